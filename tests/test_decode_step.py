"""A step of the static cache as the program that runs again and again: memory that does not grow, no look at data, one
compile for all layers, a CUDA graph, a full cache without a mask, a NaN found late, fused products.
"""
import copy
import math

import pytest
import torch

import decode
from data.together import fuse_scorers
from decode import KVCache, capture_step, prefill, step
from flex_masks import NEVER
from model import Transformer, causal_attend
from scorer import make_scorer
from test_decode import (N, N_SINK, POLICIES, V, WINDOW, close, make_cache, make_model, make_scorers, make_spec,
                         tokens)
from tiny import tiny_transformer


def test_bytes_are_the_formula_at_any_length():
    model = make_model(torch.float32)
    cache = make_cache("kvpop", model)
    size = cache.nbytes()
    assert size["cache"] == 2 * 2 * 2 * N * 8 * 4
    assert size["bookkeeping"] == 2 * 2 * (N * 8 + WINDOW * 4)
    assert size["state"] == 2 * 2 * (8 * 4 + 8 + 1) * 4
    idx = tokens(90)
    prefill(model, idx[:, :60], torch.tensor([60]), cache)
    for q in range(60, 90):
        step(model, idx[:, q], cache)
    assert cache.nbytes() == size
    assert NEVER == 2**31 - 1  # choose_victim's stand-in for "not among the lowest"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_never_looks_at_data(policy, monkeypatch):
    """On tensors without data a branch on a value raises; what passes can be captured in a CUDA graph."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
    config = make_model().config
    with FakeTensorMode():
        model = Transformer(config)
        scorers = [make_scorer(policy, n_kv_head=2, head_dim=8, window=WINDOW, layer=i) for i in range(2)]
        cache = KVCache(config, make_spec(policy), 3, scorers)
        with pytest.raises(DataDependentOutputException):  # the NaN check, which does wait on a CPU: the test can fail
            step(model, torch.zeros(3, dtype=torch.int64), cache)
        decay = lambda score, log_gamma, at: score if log_gamma is None else score - at * log_gamma
        monkeypatch.setattr(decode, "effective_priority", decay)
        assert step(model, torch.zeros(3, dtype=torch.int64), cache).shape == (3, V)


@pytest.mark.gpu
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("policy", ["kvpop", "kvpop-mlp", "knorm", "random"])
def test_a_captured_step_equals_an_eager_one(policy, together):
    model = make_model(torch.float32).cuda()
    scorers, idx = make_scorers(policy, model).cuda(), tokens(90, 3).cuda()
    fused = fuse_scorers(copy.deepcopy(scorers)) if together else scorers
    eager, captured = [KVCache(model.config, make_spec(policy), 3, s, "cuda") for s in (scorers, fused)]
    token = idx[:, 0].clone()
    graph, logits = capture_step(model, token, captured)
    captured.reset()
    for q in range(90):
        token.copy_(idx[:, q])
        graph.replay()
        close(logits, step(model, idx[:, q], eager), 1e-4)
        assert [captured.kept_positions(i) for i in range(2)] == [eager.kept_positions(i) for i in range(2)], q


def test_when_a_step_is_told_that_the_cache_is_full(monkeypatch):
    """Compiled on a GPU, with few heads, one step serves all positions; else there are two. Dense has one."""
    model = make_model(torch.float32)
    cache = KVCache(model.config, make_spec("random"), 2, make_scorers("random", model))
    cache.seen = N
    assert cache.full and cache.filling is None  # a CPU
    cache.filling = "a BlockMask"
    assert cache.full
    cache.compiled = True
    assert not cache.full
    monkeypatch.setattr(decode, "FEW_HEADS", 1)
    many = KVCache(model.config, make_spec("random"), 2, make_scorers("random", model))
    many.filling, many.compiled, many.seen = cache.filling, True, N
    assert many.full
    dense = KVCache(model.config, decode.dense_spec(N), 2)
    dense.seen = N
    assert not dense.full


def test_a_score_that_is_nan_is_found_long_after_a_compiled_step(monkeypatch):
    """Which goes on where an eager one stops, as here without its check. Nothing else is evicted for it."""
    model, at = make_model(torch.float32), 30
    scorers, idx = make_scorers("random", model), tokens(N + 90, 2)
    cache, plain = (KVCache(model.config, make_spec("random"), 2, scorers) for _ in range(2))
    real = decode.effective_priority
    for q in range(N + 90):
        step(model, idx[:, q], plain)
    plain.check()
    monkeypatch.setattr(decode, "effective_priority", lambda scores, gamma, u: real(scores, gamma, u).masked_fill(
        u == at, math.nan))
    for q in range(N + 90):
        step(model, idx[:, q], cache)
        if q < at:
            cache.check()
    with pytest.raises(ValueError, match="a score is NaN"):
        cache.check()
    held, want = (torch.tensor(c.kept_positions(0)) for c in (cache, plain))  # (B, H_kv, N)
    assert (held == at).any(-1).all() and (held[..., :N_SINK] == want[..., :N_SINK]).all()


@pytest.mark.parametrize("policy", ["kvpop", "random"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_full_cache_needs_no_mask(policy, dtype, monkeypatch):
    """Once every row has filled its slots attention gets no mask, not a step earlier; the logits keep their bits."""
    model, masks, attend = make_model(torch.float32).to(dtype), [], decode.F.scaled_dot_product_attention
    scorers, idx, lengths = make_scorers(policy, model).float(), tokens(N + 30, 2), torch.tensor([5, N - 8])
    plain, masked = (KVCache(model.config, make_spec(policy), 2, scorers, dtype=dtype) for _ in range(2))
    for cache in (plain, masked):
        prefill(model, idx[:, :N - 8], lengths, cache)
        assert cache.seen == 5  # of the shorter row

    def watch(q, k, v, attn_mask=None):
        masks.append(attn_mask is not None)
        return attend(q, k, v, attn_mask)
    monkeypatch.setattr(decode.F, "scaled_dot_product_attention", watch)
    for q in range(5, N + 20):  # of the shorter row
        ids = idx[:, q]
        logits = step(model, ids, plain)
        assert masks == [q < N - 1] * 2
        assert all(bool((layer.position >= 0).all()) == (q >= N - 1) for layer in plain.layers)
        masked.seen = 0  # never sure
        assert torch.equal(logits, step(model, ids, masked))
        masks.clear()
    assert plain.seen == plain.input_pos.min() == N + 20
    plain.reset()
    assert plain.seen == 0 and not plain.full


@pytest.mark.parametrize("policy", ["streaming", "kvpop-mlp", "kvpop"])
def test_one_compile_serves_all_layers(policy, monkeypatch):
    """Blocks through torch.compile: the same bits (with a backend that runs what was traced as it is), traced once for
    filling the cache and once for the full one, not once a layer."""
    from torch._dynamo.testing import CompileCounterWithBackend
    counter = CompileCounterWithBackend("eager")
    monkeypatch.setattr(decode, "compiled_block_step", torch.compile(decode.block_step, backend=counter, fullgraph=True,
                                                                     dynamic=False))
    decay = lambda score, log_gamma, at: score if log_gamma is None else score - at * log_gamma
    monkeypatch.setattr(decode, "effective_priority", decay)  # its NaN check is a branch, on a CPU alone
    torch._dynamo.reset()
    model = make_model(torch.float32)
    plain, compiled = (KVCache(model.config, make_spec(policy), 2, make_scorers(policy, model)) for _ in range(2))
    compiled.compiled, idx = True, tokens(N + 6, 2)
    for q in range(N + 6):
        assert torch.equal(step(model, idx[:, q], plain), step(model, idx[:, q], compiled))
        assert counter.frame_count == 1 + (q >= N - 1) and model.config.n_layer > 1
    assert [plain.kept_positions(i) for i in range(2)] == [compiled.kept_positions(i) for i in range(2)]


@pytest.mark.gpu
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("policy", ["kvpop", "kvpop-mlp", "streaming"])
def test_a_captured_compiled_step_equals_an_eager_one(policy, together):
    torch._dynamo.reset()
    model = make_model(torch.float32).cuda()
    scorers, idx = make_scorers(policy, model).cuda(), tokens(N + 20, 3).cuda()
    fused = fuse_scorers(copy.deepcopy(scorers)) if together else scorers
    eager, captured = [KVCache(model.config, make_spec(policy), 3, s, "cuda") for s in (scorers, fused)]
    captured.compiled = True
    advance = decode.make_step(model, captured, True)
    captured.reset()
    for q in range(N + 20):
        close(advance(idx[:, q]), step(model, idx[:, q], eager), 1e-3)


def test_fused_products_are_the_same_model():
    """One product for q, k, v and one for gate, up: the same numbers, the same tensors by the same names."""
    model, idx = tiny_transformer(0).double(), torch.arange(12).view(2, 6)
    names = {n: p.clone() for n, p in model.state_dict().items()}
    layers = list(model.model.layers.parameters())
    slopes = lambda: torch.autograd.grad(model(idx, causal_attend).square().sum(), layers)  # noqa: E731
    wanted = slopes()
    with torch.no_grad():
        before = model(idx, causal_attend)
        model.fuse()
        assert (model(idx, causal_attend) - before).abs().max() < 1e-12
    assert all((slope - want).abs().max() < 1e-12 for slope, want in zip(slopes(), wanted, strict=True))
    assert list(model.state_dict()) == list(names) and all(torch.equal(p, names[n]) for n, p in
                                                           model.state_dict().items())
    attn = model.model.layers[0].self_attn
    assert attn.fused.data_ptr() == attn.q_proj.weight.data_ptr() and len(attn.fused) == sum(
        len(p.weight) for p in (attn.q_proj, attn.k_proj, attn.v_proj))
    with torch.no_grad():
        attn.v_proj.weight.mul_(2)
        assert (model(idx, causal_attend) - before).abs().max() > 1e-3
