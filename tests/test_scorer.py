"""
The contract of scorer.py: the parallel form, the one-step form and the definition are one function; pads and later
tokens reach nothing; gates may be anything. CPU only, ten seconds. What tells the policies apart:
test_scorer_policies.py; their files, and refusals by name: test_scorer_files.py.
"""
import copy

import pytest
import torch

import scorer as S
from scorer import make_scorer

B, H, D, W = 2, 3, 8, 16  # rows, KV heads, head_dim, window
LENGTHS = (1, W, W + 1, 127, 129, 300)
STEPPABLE = ("streaming", "random", "knorm", "kvpop-mlp", "kvpop")


def make(policy, window=W, seed=0, layer=1, noise=0.5, dtype=torch.float64, **options):
    """A scorer away from its start: every parameter moved, so that no path is hidden behind a zero."""
    s = make_scorer(policy, n_kv_head=H, head_dim=D, window=window, layer=layer, seed=seed, **options)
    g = torch.Generator().manual_seed(seed + 99)
    with torch.no_grad():
        for p in s.parameters():
            p += noise * torch.randn(p.shape, generator=g)
    return s.to(dtype)


def tokens(T, batch=B, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(2, batch, H, T, D, generator=g, dtype=torch.float64).to(dtype).unbind(0)


def run_steps(s, k, v, start=0, state=None, window=W):
    """Feed tokens start..T-1 one by one -> scores of tokens max(start - window, 0) .. T - window - 1, state."""
    batch, T, out = k.shape[0], k.shape[2], []
    state = s.init_state(batch, k.device, k.dtype) if state is None else state
    for q in range(start, T):
        u = q - window
        leave = (k[:, :, max(u, 0)], v[:, :, max(u, 0)], torch.full((batch,), u))
        score, state = s.step(state, k[:, :, q], v[:, :, q], *leave)
        assert score.isfinite().all()
        if u >= 0:
            out.append(score)
    return torch.stack(out, dim=-1) if out else k.new_zeros(batch, H, 0), state


def kvpop_by_definition(s, k, v, window=W):
    """Every score from the closed form alone: a weighted mean over all tokens up to q = u + window, no state."""
    x = torch.cat([k, v], dim=-1)
    batch, _, T, _ = x.shape
    scores = x.new_zeros(batch, H, T)
    for h in range(H):
        w = {n: p[h].detach() for n, p in s.named_parameters()}
        phi = lambda z: torch.cat([z.softmax(-1), (-z).softmax(-1)], dim=-1)
        gate = 15 * torch.tanh((x[:, h] @ w["w_gate"] + w["b_gate"]) / 15)  # (B, T, 2)
        ig, lf = gate[..., 0], torch.nn.functional.logsigmoid(gate[..., 1])
        q_feat, k_feat, val = phi(x[:, h] @ w["w_q"]), phi(x[:, h] @ w["w_k"]), x[:, h] @ w["w_v"]
        silu = torch.nn.functional.silu
        for u in range(T - window):
            q = u + window
            decay = torch.stack([lf[:, j + 1: q + 1].sum(-1) for j in range(q + 1)], dim=-1)  # (B, q + 1)
            weight = (ig[:, : q + 1] + decay).exp() * (k_feat[:, : q + 1] @ q_feat[:, u, :, None])[..., 0]
            read = (weight[..., None] * val[:, : q + 1]).sum(1) / weight.sum(1, keepdim=True)  # (B, D / 2)
            skip = silu(x[:, h, u] @ w["w_skip"]) @ w["w_skip_score"]
            scores[:, h, u] = (silu(read) @ w["w_score"] + skip)[:, 0]
    return scores


def mlstm_recurrent(q, k, v, ig, lf):
    """The specification: C = f C + i k v^T, n = f n + i k, h = q C / q n, written as the loop it is. Arguments as for
    mlstm_chunkwise -> h (B, H, T, Dv) and the last C (B, H, Dk, Dv), n (B, H, Dk). No stabiliser: call it in fp64."""
    C = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])  # (B, H, Dk, Dv)
    n = q.new_zeros(*q.shape[:2], q.shape[-1])  # (B, H, Dk)
    h = []
    for t in range(q.shape[2]):
        i, f = ig[:, :, t, None].exp(), lf[:, :, t, None].exp()  # (B, H, 1)
        C = f[..., None] * C + (i * k[:, :, t])[..., None] * v[:, :, t, None, :]
        n = f * n + i * k[:, :, t]
        den = (q[:, :, t] * n).sum(-1, keepdim=True)
        h.append((q[:, :, t, None, :] @ C).squeeze(-2) / den.clamp(min=S.TINY))
    return torch.stack(h, dim=2), C, n


def wild_gates(T, seed=0, dtype=torch.float64):
    """Features, values and gates whose pre-activations jump between -50 and 50."""
    g = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)
    jump = lambda: torch.where(rand(B, H, T) > 0, 50.0, -50.0).double() * (rand(B, H, T).abs() / 2).clamp(max=1)
    q, k = S.MLSTM.phi(rand(B, H, T, 4)), S.MLSTM.phi(rand(B, H, T, 4))
    ig, fg = jump(), jump()
    ig[..., ::5], fg[..., ::7] = 50.0, -50.0  # the ends themselves
    return [z.to(dtype) for z in (q, k, rand(B, H, T, 4), ig, fg)]


# ----------------------------------------------------------------------------------------------------------------------
# the mLSTM: one function, however it is computed

@pytest.mark.parametrize("T", [1, 63, 64, 130])
@pytest.mark.parametrize("chunk", [1, 7, 64, 999])
def test_chunkwise_is_the_recurrence(T, chunk):
    q, k, v, ig, fg = wild_gates(T)
    lf = torch.nn.functional.logsigmoid(fg)
    h, C, n = mlstm_recurrent(q, k, v, ig, lf)
    h2, C2, n2, m2 = S.mlstm_chunkwise(q, k, v, ig, lf, chunk)
    torch.testing.assert_close(h2, h, atol=1e-10, rtol=0)
    # compared relative to the state's own size, which is e^50 here and e^-50 there
    size = n.amax(-1, keepdim=True)
    torch.testing.assert_close(n2 * m2.exp()[..., None] / size, n / size, atol=1e-10, rtol=0)
    size = size[..., None]
    torch.testing.assert_close(C2 * m2.exp()[..., None, None] / size, C / size, atol=1e-10, rtol=0)


def test_the_scale_of_the_input_gates_cancels():
    """Only their differences matter: gates near e^-200 read the same, and the state's scale sits in m alone."""
    q, k, v, ig, fg = wild_gates(100)
    lf = torch.nn.functional.logsigmoid(fg)
    h, C, n, m = S.mlstm_chunkwise(q, k, v, ig, lf, 64)
    h2, C2, n2, m2 = S.mlstm_chunkwise(q, k, v, ig - 200.0, lf, 64)
    for a, b in ((h, h2), (C, C2), (n, n2), (m - 200.0, m2)):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=0)


def test_gates_at_50_have_the_right_gradients_in_fp32():
    """Finite is not enough: fp32 gradients of the chunkwise form against the fp64 loop, empty leading reads too."""
    T, shift = 150, 20
    def grads(form, dtype):
        leaves = [z.requires_grad_() for z in wild_gates(T, dtype=dtype)]
        q, k, v, ig, fg = leaves
        q = torch.nn.functional.pad(q, (0, 0, shift, 0))[:, :, :T]  # leading reads: 0 / 0 if careless
        h = form(q, k, v, ig, torch.nn.functional.logsigmoid(fg))[0]
        assert h.isfinite().all()
        h[:, :, shift:].square().sum().backward()
        return [z.grad.double() for z in leaves]

    for fast, exact in zip(grads(S.mlstm_chunkwise, torch.float32), grads(mlstm_recurrent, torch.float64)):
        assert fast.isfinite().all() and exact.abs().max() > 0
        torch.testing.assert_close(fast, exact, atol=2e-5 * exact.abs().max().item(), rtol=0)


@pytest.mark.parametrize("T", LENGTHS)
def test_kvpop_is_its_definition_in_every_form(T):
    s = make("kvpop")
    k, v = tokens(T)
    want = kvpop_by_definition(s, k, v)
    stepped, end = run_steps(s, k, v)
    torch.testing.assert_close(stepped, want[..., : max(T - W, 0)], atol=1e-10, rtol=0)
    for s.chunk in (1, 48, 64, 4096):
        scores, state = s(k, v, return_state=True)
        torch.testing.assert_close(scores, want, atol=1e-10, rtol=0)  # the last `window` entries are 0 in both
        for name in ("C", "m"):
            torch.testing.assert_close(state[name], end[name], atol=1e-10, rtol=0)
    if T > W + 1:
        assert want[..., : T - W].std() > 0.1  # the test would be empty on constant scores


@pytest.mark.parametrize("policy", ["kvpop", "kvpop-nodelay"])
def test_fused_weights_are_the_same_weights(policy):
    """Fused or not a step is the same numbers, and what is then changed in a parameter is changed in the product.
    Gradients still reach every parameter. Only the order of a sum may differ, for weights that lie the other way round:
    fp64, at most 300 terms of order 1 are right to 300 * 1e-16."""
    close = dict(atol=3e-14, rtol=3e-14)
    s, (k, v) = make(policy), tokens(40)
    slopes = lambda: torch.autograd.grad(s(k, v).square().sum(), weights)  # noqa: E731
    weights = [p for name, p in s.named_parameters() if name != "alpha"]
    before = slopes()
    with torch.no_grad():
        plain, _ = run_steps(s, k, v)
        s.fuse()
        torch.testing.assert_close(run_steps(s, k, v)[0], plain, **close)
    assert "fused" not in s.state_dict() and s.fused.data_ptr() == s.w_skip.data_ptr()
    for slope, want in zip(slopes(), before, strict=True):
        torch.testing.assert_close(slope, want, **close)
    with torch.no_grad():
        for p in s.parameters():
            p.add_(0.1 * torch.ones_like(p).cumsum(-1))
        changed, whole = run_steps(s, k, v)[0], s(k, v)[..., : 40 - W]
    torch.testing.assert_close(changed, whole, atol=1e-10, rtol=0)
    assert (changed - plain).abs().max() > 0.01


@pytest.mark.parametrize("policy", ["kvpop", "kvpop-nodelay"])
def test_many_rows_from_bf16_terms(policy):
    """bf16 tokens of more than FEW_ROWS rows take the product from the terms: the scores of the plain fp32 step, whose
    own rounding is 1e-6 of sums of 2 D numbers of order 1, and not those of weights rounded to bf16 (1e-2)."""
    s = make(policy).float()
    size = torch.linspace(0.5, 1.5, S.FEW_ROWS + 1)[:, None, None, None]
    k, v = ((z[:1].float() * size).bfloat16() for z in tokens(40))
    with torch.no_grad():
        plain, _ = run_steps(s, k, v)
        s.fuse(narrow=True)
        widths = [sum(getattr(s, name).shape[-1] for name in names) for names in (s.leaving, s.entering)]
        parts = s.terms.split([3 * (n + -n % 8) for n in widths], dim=-1)  # those are all its columns
        torch.testing.assert_close(run_steps(s, k, v)[0], plain, atol=1e-5, rtol=1e-5)
        for part in parts:
            part[..., :2 * part.shape[-1] // 3] = 0  # the smaller two of the three
        assert (run_steps(s, k, v)[0] - plain).abs().max() > 1e-4
        few = run_steps(s, k[:S.FEW_ROWS], v[:S.FEW_ROWS])[0]  # these read the fp32 weights
        torch.testing.assert_close(few, plain[:S.FEW_ROWS], atol=1e-5, rtol=1e-5)


def test_kvpop_in_fp32():
    """fp32 against fp64, scores of order 1: 1e-5 for either form."""
    s, (k, v) = make("kvpop"), tokens(300)
    exact, s = s(k, v), s.float()
    parallel, stepped = s(k.float(), v.float()), run_steps(s, k.float(), v.float())[0]
    assert parallel.dtype == stepped.dtype == torch.float32
    torch.testing.assert_close(parallel.double(), exact, atol=1e-5, rtol=0)
    torch.testing.assert_close(stepped.double(), exact[..., :-W], atol=1e-5, rtol=0)


def test_wild_gates_on_a_long_bf16_sequence():
    """T = 4096, no soft cap, gate inputs around +-50, bf16 keys: finite, fp32 state, still the fp64 numbers."""
    s = make("kvpop", soft_cap=None, dtype=torch.float32)
    with torch.no_grad():
        s.w_gate.mul_(30.0)
    k, v = tokens(4096, batch=1, dtype=torch.bfloat16)
    gate = torch.cat([k, v], dim=-1).float() @ s.w_gate.detach()[None]
    assert (gate > 50).any() and (gate < -50).any()
    scores, state = s(k, v, return_state=True)
    scores.square().mean().backward()
    assert scores.isfinite().all() and all(z.isfinite().all() and z.dtype == torch.float32 for z in state.values())
    assert all(p.grad.isfinite().all() for n, p in s.named_parameters() if n != "alpha")
    exact = copy.deepcopy(s).double()(k.double(), v.double())
    torch.testing.assert_close(scores.double(), exact, atol=1e-4, rtol=0)


def test_one_graph_whatever_the_length():
    """No Python loop over tokens or chunks: the traced graph has the same nodes at 4 and at 32 chunks."""
    sizes = []
    def backend(graph, inputs):
        sizes.append(len(graph.graph.nodes))
        return graph

    s = make("kvpop", dtype=torch.float32)
    for T in (256, 2048):
        torch._dynamo.reset()
        k, v = tokens(T, batch=1, dtype=torch.float32)
        compiled = torch.compile(s.forward, backend=backend, fullgraph=True, dynamic=False)
        torch.testing.assert_close(compiled(k, v), s(k, v))
    assert len(sizes) == 2 and sizes[0] == sizes[1]


# ----------------------------------------------------------------------------------------------------------------------
# what every policy owes

@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("policy", STEPPABLE)
def test_step_equals_parallel(policy, T):
    s, (k, v) = make(policy), tokens(T)
    scores, state = s(k, v, return_state=True)
    stepped, end = run_steps(s, k, v)
    torch.testing.assert_close(stepped, scores[..., : max(T - W, 0)], atol=1e-10, rtol=0, check_dtype=False)
    assert scores.shape == (B, H, T) and state.keys() == end.keys()
    if s.window is not None:
        assert (scores[..., max(T - W, 0):] == 0).all()


@pytest.mark.parametrize("policy", STEPPABLE)
def test_pads_reach_nothing(policy):
    """Unequal rows with NaN, inf and huge values in the pads = each row alone, gradients too."""
    s, lengths = make(policy), (5, W + 1, 150, 97)
    k, v = (z.clone() for z in tokens(150, batch=4))
    for b, n in enumerate(lengths):
        for junk, z in ((float("nan"), k), (1e30, v), (float("inf"), v[:, :, :, :1])):
            z[b, :, n:] = junk
    scores, state = s(k, v, lengths=torch.tensor(lengths), return_state=True)
    for b, n in enumerate(lengths):
        row, row_state = s(k[b: b + 1, :, :n], v[b: b + 1, :, :n], return_state=True)
        torch.testing.assert_close(scores[b: b + 1, :, :n], row, atol=1e-12, rtol=0)
        assert (scores[b, :, n:] == 0).all()
        for name in row_state:
            torch.testing.assert_close(state[name][b: b + 1], row_state[name], atol=1e-12, rtol=0)
    if list(s.parameters()):
        scores.sum().backward()
        assert all(p.grad.isfinite().all() for n, p in s.named_parameters() if n != "alpha")


@pytest.mark.parametrize("policy", STEPPABLE)
@pytest.mark.parametrize("n", [1, W, W + 1, 100])
def test_steps_continue_a_prefill(policy, n):
    """Prefill of a padded prompt of n tokens, then step by step = one long pass."""
    s, (k, v) = make(policy), tokens(140)
    padded = [torch.cat([z[:, :, :n], torch.full_like(z[:, :, :9], 1e9)], dim=2) for z in (k, v)]
    _, state = s(*padded, lengths=torch.full((B,), n), return_state=True)
    stepped, end = run_steps(s, k, v, start=n, state=state)
    scores, want = s(k, v, return_state=True)
    torch.testing.assert_close(stepped, scores[..., max(n - W, 0): 140 - W], atol=1e-10, rtol=0)
    for name in want:
        torch.testing.assert_close(end[name], want[name], atol=1e-10, rtol=0)


@pytest.mark.parametrize("policy", STEPPABLE)
def test_causality(policy):
    """Token p changes no score that was read before p, and for kvpop it does change the one that is read at p."""
    s, (k, v) = make(policy), tokens(200)
    base = s(k, v)
    for p in (0, W, 63, 64, 65, 150):
        k2, v2 = k.clone(), v.clone()
        k2[:, :, p] += 3.0
        v2[:, :, p] -= 3.0
        change = (s(k2, v2) - base).abs()
        before = p - W if s.delayed else p
        assert (change[..., : max(before, 0)] < 1e-13).all()
        if policy in ("kvpop", "kvpop-mlp", "knorm"):
            assert (change[..., max(before, 0)] > 1e-9).all()
        if not s.delayed:
            assert (change[..., p + 1:] == 0).all()


def test_delay_zero_reads_at_the_tokens_own_time():
    s, late, (k, v) = make("kvpop", delay=0), make("kvpop"), tokens(100)
    k2 = k.clone()
    k2[:, :, 50] += 3.0
    change = (s(k2, v) - s(k, v)).abs()
    assert not s.delayed and (change[..., :50] < 1e-13).all() and (change[..., 50] > 1e-9).all()
    assert (s(k, v)[..., :-W] - late(k, v)[..., :-W]).abs().max() > 1e-3
    with pytest.raises(ValueError, match="one-step"):
        run_steps(s, k, v)


@pytest.mark.parametrize("policy", ["kvpop", "kvpop-mlp"])
def test_inputs_are_detached_and_every_parameter_learns(policy):
    s = make(policy)
    k, v = (z.clone().requires_grad_() for z in tokens(60))
    (s(k, v).square().sum() + s.log_gamma().sum()).backward()
    assert k.grad is None and v.grad is None
    for name, p in s.named_parameters():
        assert p.grad.isfinite().all() and p.grad.reshape(H, -1).abs().amax(1).min() > 0, name  # in every head


@pytest.mark.parametrize("policy", STEPPABLE)
def test_autocast_and_bf16_weights_do_not_lower_the_arithmetic(policy):
    s, (k, v) = make(policy, dtype=torch.float32), tokens(80, dtype=torch.bfloat16)
    plain = s(k, v)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside, stepped = s(k, v), run_steps(s, k.float(), v.float())[0]
    assert plain.dtype == inside.dtype == stepped.dtype == torch.float32
    assert torch.equal(inside, plain)
    torch.testing.assert_close(stepped, plain[..., :-W], atol=1e-5, rtol=0)
    half = copy.deepcopy(s).bfloat16()
    assert torch.equal(half(k, v), copy.deepcopy(half).float()(k, v))


def test_shapes_that_do_not_fit_are_refused():
    k, v = tokens(20)
    with pytest.raises(ValueError, match=rf"\(B, {H}, T, {D}\)"):
        make("knorm")(k[:, :2], v[:, :2])
    with pytest.raises(ValueError, match="keys and values"):
        make("kvpop")(k, v[:, :, :10])


@pytest.mark.parametrize("policy", STEPPABLE)
def test_rows_without_a_leaving_token_stay_finite(policy):
    """leave_pos < 0: whatever the unused slot holds, the score is finite and the other rows are not touched."""
    s, (k, v) = make(policy), tokens(W + 1)
    junk = k[:, :, 0].clone()
    junk[0] = float("nan")
    now, pos = (k[:, :, W], v[:, :, W]), torch.tensor([-3, 0])
    score, state = s.step(s.init_state(B, "cpu", torch.float64), *now, junk, junk, pos)
    clean, _ = s.step(s.init_state(B, "cpu", torch.float64), *now, k[:, :, 0], k[:, :, 0], pos)
    assert all(z.isfinite().all() for z in (score, *state.values())) and torch.equal(score[1], clean[1])
