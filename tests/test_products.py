"""
The contract of data/products.py: bf16 tokens times fp32 weights through bf16 terms is as exact as the fp32 product, in
values and in weight gradients, and the learned scorers that use it score and learn the same. On a CPU the terms are
multiplied in fp32, and `narrow_pays`, which says no there, is forced.
"""
import copy
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import scorer as scorers_module
from data import products
from data.products import NarrowProduct, bf16_terms, narrow_pays, narrow_product
from scorer import make_scorer
from targets import compiled_score, score

U = 2.0**-24  # unit roundoff of fp32
H, D, W = 2, 16, 16
NARROW = [("kvpop", {}), ("kvpop", {"skip_width": 0}), ("kvpop-nodelay", {}), ("kvpop-mlp", {}), ("dms-cap", {})]


def wide_range(*shape, spread, seed):
    """Normal numbers times powers of two from 2^-spread to 2^spread, fp32."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g) * torch.randint(-spread, spread + 1, shape, generator=g).float().exp2()


def product_errors(product, B, T, device="cpu"):
    """Errors against fp64, each relative to the sum of absolute values behind its entry: of the product and of the
    weight gradient, the greatest and the root mean square -> (2, 2)."""
    x = wide_range(B, 2, T, 32, spread=8, seed=1).bfloat16().to(device)
    w, dy = (wide_range(*shape, spread=12, seed=i).to(device) for i, shape in ((2, (2, 32, 23)), (3, (B, 2, T, 23))))
    y = product(x, w.requires_grad_())
    assert y.dtype == torch.float32 and y.shape == dy.shape
    dw, = torch.autograd.grad(y, w, dy)
    x, w, dy = x.double(), w.detach().double(), dy.double()
    errors = []
    for got, want, scale in ((y, x @ w, x.abs() @ w.abs()), (dw, (x.mT @ dy).sum(0), (x.mT.abs() @ dy.abs()).sum(0))):
        error = (got.double() - want) / scale
        errors.append([error.abs().max().item(), error.square().mean().sqrt().item()])
    return torch.tensor(errors)


def plain(x, w):
    return x.float() @ w


def narrow(x, w):
    return narrow_product(x, w)


def fewer_terms(n):
    """bf16_terms without the 3 - n smallest: a split that is not exact."""
    def terms(z):
        low, middle, high = bf16_terms(z).chunk(3, -1)
        return torch.cat([0 * low, middle if n == 2 else 0 * middle, high], -1)
    return terms


@pytest.fixture
def forced(monkeypatch):
    """The narrow product on a CPU too, for whatever is bf16 -> shapes of the x that it was given."""
    seen, product = [], scorers_module.narrow_product
    monkeypatch.setattr(scorers_module, "narrow_pays", lambda *z: all(t.dtype == torch.bfloat16 for t in z))
    monkeypatch.setattr(scorers_module, "narrow_product", lambda x, w: seen.append(x.shape) or product(x, w))
    return seen


def make(policy, seed=0, noise=0.3, head_dim=D, **options):
    s = make_scorer(policy, n_kv_head=H, head_dim=head_dim, window=W, layer=1, seed=seed, **options)
    g = torch.Generator().manual_seed(seed + 99)
    with torch.no_grad():
        for p in s.parameters():
            p += noise * torch.randn(p.shape, generator=g)
    return s


def tokens(B, T, head_dim=D, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(2, B, H, T, head_dim, generator=g).bfloat16().unbind(0)


def scores_and_slopes(s, k, v, lengths=None, run=score):
    """-> scores and the gradients of all parameters by name, fp64 on the CPU."""
    scores, g = run(s, k, v, lengths), torch.Generator().manual_seed(7)
    weight = torch.randn(scores.shape, generator=g).to(scores)
    names = [n for n, _ in s.named_parameters() if n != "alpha"]
    slopes = torch.autograd.grad((scores * weight).sum(), [s.get_parameter(n) for n in names])
    return {n: z.detach().double().cpu() for n, z in zip(["scores", *names], [scores, *slopes], strict=True)}


# ----------------------------------------------------------------------------------------------------------------------
# the product


@pytest.mark.parametrize("compiled", [False, True])
def test_three_terms_are_the_number(compiled):
    """Compiled too: Inductor takes a cast to bf16 and back for nothing (2.11, 2.13)."""
    edges = torch.tensor([0.0, 2**-110, -3.4e38, 1 + 2**-23]).expand(4, 4)
    z = torch.cat([wide_range(4, 500, spread=90, seed=0), edges], dim=-1)
    terms = (torch.compile(bf16_terms, dynamic=False, fullgraph=True) if compiled else bf16_terms)(z)
    assert terms.dtype == torch.bfloat16 and torch.equal(terms.double().unflatten(-1, (3, -1)).sum(-2), z.double())
    assert not bf16_terms(torch.tensor([float("nan"), float("inf")])).float().view(3, 2).sum(0).isfinite().any()


@pytest.mark.parametrize("B, T", [(1, 5), (1, 777), (3, 4099)])  # 4,099 tokens: three parts, padded
def test_narrow_is_as_exact_as_fp32(B, T, monkeypatch):
    """A sum of n products is off by at most n U times the sum of their absolute values, whatever the order (Higham,
    Accuracy and Stability, 3.1). With terms there are 3 n, of the same sum: all three have the sign of their number."""
    exact, usual = product_errors(narrow, B, T), product_errors(plain, B, T)
    assert (exact[:, 0] <= 3 * torch.tensor([32, B * T]) * U).all()
    assert (exact <= 2 * usual).all()  # what it is measured against: the fp32 product of the same numbers
    with torch.autocast("cpu", torch.bfloat16):  # lowers neither pass
        assert torch.equal(product_errors(narrow, B, T), exact)
    for n in (1, 2):
        monkeypatch.setattr(products, "bf16_terms", fewer_terms(n))
        assert (product_errors(narrow, B, T)[:, 1] > 8 * usual[:, 1]).all()


def test_shapes_of_the_cuda_form_without_cuda():
    """That branch on fake tensors: torch.bmm knows out_dtype, and shapes fit, with pads of every kind."""
    with FakeTensorMode():
        x, w = torch.empty(3, 2, 5001, 32, dtype=torch.bfloat16, device="cuda"), torch.empty(2, 32, 23, device="cuda")
        assert narrow_pays(x, x) and not narrow_pays(x, x.float()) and not narrow_pays(x.mT)
        context = SimpleNamespace(save_for_backward=lambda x: None, saved_tensors=(x,))
        y = NarrowProduct.forward(context, x, w)
        dx, dw = NarrowProduct.backward(context, y)
        assert y.shape == (3, 2, 5001, 23) and dx is None and dw.shape == w.shape
        assert y.is_cuda and dw.is_cuda and y.dtype == dw.dtype == torch.float32
    assert not narrow_pays(torch.empty(3, 2, 5001, 32, dtype=torch.bfloat16))


# ----------------------------------------------------------------------------------------------------------------------
# the scorers that use it


@pytest.mark.parametrize("B, lengths", [(1, None), (3, None), (3, (131, 40, 7))])
@pytest.mark.parametrize("policy, options", NARROW)
def test_scores_and_gradients_are_those_of_fp32(policy, options, B, lengths, monkeypatch, forced):
    """Against fp64 no worse than the fp32 path, but for a factor of 2 (roundings of equal size, not the same) and 8 U
    (a gradient of few entries can be lucky), and the state alike. Pads hold anything."""
    s, (k, v), T = make(policy, **options), tokens(B, 131), 131
    if lengths is not None:
        for b, n in enumerate(lengths):
            k[b, :, n:], v[b, :, n:] = float("nan"), float("inf")
        lengths = torch.tensor(lengths)
    got, state = scores_and_slopes(s, k, v, lengths), s(k, v, lengths, return_state=True)[1]
    T = T - (policy == "dms-cap")
    assert set(forced) == {(B, H, T, 2 * D)} and len(forced) == 2
    exact = scores_and_slopes(copy.deepcopy(s).double(), k.double(), v.double(), lengths)
    assert len(forced) == 2  # fp64 as ever
    monkeypatch.setattr(scorers_module, "narrow_pays", lambda *z: False)
    usual, usual_state = scores_and_slopes(s, k, v, lengths), s(k, v, lengths, return_state=True)[1]
    for name, want in exact.items():
        size = want.norm() * U
        error, usual_error = ((z[name] - want).norm() for z in (got, usual))
        assert error <= 2 * usual_error + 8 * size, (name, error / size, usual_error / size)
    for name, want in usual_state.items():
        assert state[name].dtype == torch.float32
        torch.testing.assert_close(state[name], want, atol=1e-5 * want.abs().max().item(), rtol=0)


def test_only_bf16_in_fp32_scorers_is_narrow(forced):
    k, v = tokens(1, 50)
    for s, *inputs in ((make("position"), k, v), (make("kvpop").double(), k, v), (make("kvpop"), k, v.float()),
                       (make("kvpop"), k.float(), v.float()), (make("knorm"), k, v)):
        assert s(*inputs).dtype in (torch.float32, torch.float64)
    assert not forced
    half = make("kvpop").bfloat16()  # weights of bf16: their values in fp32
    wide = copy.deepcopy(half).float()
    torch.testing.assert_close(half(k, v), wide(k.float(), v.float()), atol=1e-5, rtol=0)
    assert len(forced) == 1


def test_logits_of_dms_cap_are_narrow(forced):
    s, (k, v) = make("dms-cap"), tokens(2, 50)
    torch.testing.assert_close(s.logits(k, v), s.logits(k.float(), v.float()), atol=1e-5, rtol=0)
    assert len(forced) == 1


@pytest.mark.parametrize("policy", ["kvpop", "kvpop-mlp"])
def test_one_graph(policy, forced):
    """Forward and backward, as `targets.compiled_score` asks."""
    s, (k, v) = make(policy), tokens(2, 131)
    compiled = torch.compile(score, dynamic=False, fullgraph=True, backend="aot_eager")
    want, got = scores_and_slopes(s, k, v), scores_and_slopes(s, k, v, run=compiled)
    assert len(forced) == 2  # once while it is traced
    for name in want:
        torch.testing.assert_close(got[name], want[name], atol=1e-5 * want[name].abs().max().item(), rtol=0)


# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("B, T", [(1, 16384), (3, 4099)])
def test_product_on_gpu(B, T):
    """Tensor cores cut off instead of rounding, once in 16 numbers: at the lengths used here the error of an fp32 sum
    (see data/products.py); a factor of 4 for the two to differ. Without the third term it is far more."""
    exact, usual = (product_errors(f, B, T, "cuda") for f in (narrow, plain))
    print(f"greatest and rms error, of y and dw: narrow {exact.tolist()}, fp32 {usual.tolist()}")
    assert (exact[:, 0] <= 3 * torch.tensor([32, B * T]) * U).all()
    assert (exact <= 4 * usual + U / 4).all()


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["kvpop", "kvpop-mlp"])
@pytest.mark.parametrize("B, lengths", [(1, None), (3, (4099, 3000, 40))])
def test_compiled_narrow_scores_on_gpu(policy, B, lengths, monkeypatch):
    """Scores and gradients, compiled and not, against fp64, beside the fp32 path in the same form: no worse, but for a
    factor of 4 and 32 U (a gradient of few entries can be lucky). test_product_on_gpu is the sharper one."""
    assert not torch.backends.cuda.matmul.allow_tf32
    s, (k, v) = make(policy, head_dim=64).cuda(), (z.cuda() for z in tokens(B, 4099, head_dim=64))
    lengths = None if lengths is None else torch.tensor(lengths, device="cuda")
    exact = scores_and_slopes(copy.deepcopy(s).double(), k.double(), v.double(), lengths)
    for how, run in (("compiled", compiled_score), ("eager", score)):
        errors = []
        for is_narrow in (narrow_pays, lambda *z: False):
            monkeypatch.setattr(scorers_module, "narrow_pays", is_narrow)
            torch._dynamo.reset()
            assert scorers_module.narrow_pays(k, v) == (is_narrow is narrow_pays)
            got = scores_and_slopes(s, k, v, lengths, run)
            errors.append({n: ((got[n] - want).norm() / want.norm() / U).item() for n, want in exact.items()})
        for name, error in errors[0].items():
            print(f"{policy} {how} {name}: {error:.1f} U, fp32 {errors[1][name]:.1f} U")
            assert error <= 4 * errors[1][name] + 32, (how, name)
