"""
The contract of scorer.py: the parallel form, the one-step form and the definition are one function; pads and later
tokens reach nothing; gates may be anything; files that do not fit are refused by name. CPU only, ten seconds.
"""
import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import scorer as S
from data.scorer_files import check_window, load_scorers, save_scorers
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
    """bf16 tokens of more than FEW_ROWS rows take the product from the terms: the scores of the plain fp32 step, whose own
    rounding is 1e-6 of sums of 2 D numbers of order 1, and not those of weights rounded to bf16 (1e-2)."""
    s = make(policy).float()
    size = torch.linspace(0.5, 1.5, S.FEW_ROWS + 1)[:, None, None, None]
    k, v = ((z[:1].float() * size).bfloat16() for z in tokens(40))
    with torch.no_grad():
        plain, _ = run_steps(s, k, v)
        s.fuse(narrow=True)
        assert s.terms.shape == (H, 2 * D, 3 * (s.fused.shape[-1] + -s.fused.shape[-1] % 8))
        torch.testing.assert_close(run_steps(s, k, v)[0], plain, atol=1e-5, rtol=1e-5)
        s.terms[..., :2 * s.terms.shape[-1] // 3] = 0  # the smaller two of the three
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


# ----------------------------------------------------------------------------------------------------------------------
# the policies themselves


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


def test_streaming_has_no_preference():
    k, v = tokens(50)
    assert (make("streaming")(k, v) == 0).all()


def test_knorm_keeps_small_keys():
    k, v = (z.clone() for z in tokens(50))
    k[:, :, 7] *= 100.0
    k[:, :, 9] *= 0.01
    scores = make("knorm")(k, v)
    assert (scores.argmin(-1) == 7).all() and (scores.argmax(-1) == 9).all()
    torch.testing.assert_close(scores, -k.square().sum(-1).sqrt())


def test_random_is_a_function_of_seed_layer_head_and_position():
    T = 20_000
    k, v = torch.zeros(2, 1, H, T, D).unbind(0)
    draw = lambda **kw: make("random", **kw)(k, v)[0]
    u = draw()
    assert u.dtype == torch.float32 and u.min() >= 0 and u.max() < 1
    assert torch.equal(u, draw()) and torch.equal(u[:, :50], make("random")(k[:, :, :50], v[:, :, :50])[0])
    others = [draw(seed=1), draw(layer=2), draw(seed=1, layer=0)]
    for a in [*others, u.roll(1, 0), u.roll(1, 1)]:  # another seed, layer, head, or the neighbouring position
        assert abs(torch.corrcoef(torch.stack([u.flatten(), a.flatten()]))[0, 1]) < 0.02
    counts = torch.stack([torch.histc(u[h], 20, 0, 1) for h in range(H)])
    chi2 = ((counts - T / 20) ** 2 / (T / 20)).sum(-1)
    assert (chi2 < 50).all(), chi2  # 19 degrees of freedom: 50 is p = 1e-4
    s = make("random")
    one = [s.step({}, *[k[:, :, 0]] * 4, torch.tensor([t]))[0] for t in (0, 1, 777, 19_999)]
    assert torch.equal(torch.cat(one).T, u[:, [0, 1, 777, 19_999]])  # bit for bit


def test_random_in_rows_at_different_positions():
    """The leaving position is per row in a batch with unequal prompts."""
    s, k = make("random"), torch.zeros(2, H, D)
    both, _ = s.step({}, k, k, k, k, torch.tensor([3, 40]))
    want = s(*torch.zeros(2, 1, H, 50, D).unbind(0))[0]
    assert torch.equal(both, torch.stack([want[:, 3], want[:, 40]]))


def test_oracle_hands_through_and_cannot_decode():
    s, (k, v) = make("oracle"), tokens(30)
    with pytest.raises(ValueError, match="set scorer.scores"):
        s(k, v)
    s.scores = torch.randn(B, H, 30)
    assert torch.equal(s(k, v), s.scores.double())
    with pytest.raises(ValueError, match=r"\(2, 3, 20\)"):
        s(k[:, :, :20], v[:, :, :20])
    with pytest.raises(ValueError, match="needs the future"):
        run_steps(s, k, v)


@pytest.mark.parametrize("policy", ["kvpop", "kvpop-mlp"])
def test_start_is_neutral_but_not_dead(policy):
    """Equal scores at the start, so it begins as StreamingLLM; one gradient step and they differ."""
    s, (k, v) = make(policy, noise=0.0), tokens(60)
    scores = s(k, v)
    assert (scores == 0).all()
    scores[..., : 60 - W: 2].sum().backward()
    with torch.no_grad():
        for p in s.parameters():
            if p.grad is not None:
                p -= 0.1 * p.grad
    assert s(k, v)[..., :-W].std(-1).min() > 1e-4
    low, high = torch.log(torch.tensor([0.999, 0.999999], dtype=torch.float64))
    torch.testing.assert_close(s.log_gamma(), ((low + high) / 2).expand(H), atol=1e-9, rtol=0)  # alpha = 0: half way


def test_start_of_the_mlstm():
    s = make_scorer("kvpop", n_kv_head=4, head_dim=D, window=W, layer=0)
    eye = torch.eye(D // 2).expand(4, -1, -1)
    for weight, own, other in ((s.w_q, slice(0, D), slice(D, None)), (s.w_v, slice(D, None), slice(0, D))):
        torch.testing.assert_close(weight[:, own].mT @ weight[:, own], eye, atol=1e-5, rtol=0)
        assert (weight[:, other] == 0).all()
    assert torch.equal(s.w_q, s.w_k) and s.w_q.data_ptr() != s.w_k.data_ptr()
    assert (s.w_q[0] - s.w_q[1]).abs().max() > 0.1 and (s.w_q[:, :D] - s.w_v[:, D:]).abs().max() > 0.1
    assert (s.w_gate == 0).all() and (s.b_gate[:, 0] == 0).all()
    odds = s.b_gate[:, 1].exp() / W  # of remembering a token against forgetting it, f / (1 - f), in windows
    torch.testing.assert_close(odds, torch.tensor([-1.0, 0.0, 1.0, 2.0]).exp(), atol=0, rtol=1e-5)


def test_start_depends_on_seed_and_layer_only():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    build = lambda seed, layer: make_scorer("kvpop", n_kv_head=H, head_dim=D, window=W, layer=layer, seed=seed)
    a, b, c, d = build(0, 0), build(0, 0), build(0, 1), build(1, 0)
    assert torch.equal(torch.get_rng_state(), before)
    for name in ("w_q", "w_v", "w_skip"):
        w = getattr(a, name)
        assert torch.equal(w, getattr(b, name))
        assert not torch.equal(w, getattr(c, name)) and not torch.equal(w, getattr(d, name))


def test_log_gamma_stays_in_its_range():
    s = make("kvpop")
    with torch.no_grad():
        s.alpha.copy_(torch.tensor([-100.0, 0.3, 100.0]))
    low, mid, high = s.log_gamma().exp().tolist()
    assert low == pytest.approx(0.999, abs=1e-12) and high == pytest.approx(0.999999, abs=1e-12) and low < mid < high
    s.log_gamma().sum().backward()
    assert s.alpha.grad[1] < -1e-5 or s.alpha.grad[1] > 1e-5
    assert s.float().log_gamma().dtype == torch.float32 and (s.log_gamma() < 0).all()
    assert make("kvpop", decay=False).log_gamma() is None and make("knorm").log_gamma() is None


@pytest.mark.parametrize("head_dim", [8, 32, 64, 128])
def test_both_learned_scorers_have_the_same_size(head_dim):
    size = {}
    for policy in ("kvpop", "kvpop-mlp"):
        s = make_scorer(policy, n_kv_head=2, head_dim=head_dim, window=W, layer=0)
        size[policy] = sum(p.numel() for p in s.parameters()) / 2  # per head
    assert size["kvpop"] == S.mlstm_param_count(head_dim, head_dim) + 1  # + alpha
    assert abs(size["kvpop-mlp"] / size["kvpop"] - 1) < 0.02


def test_skip_width_zero_is_the_scorer_without_skip():
    s, (k, v) = make("kvpop", skip_width=0), tokens(60)
    full = make("kvpop")
    with torch.no_grad():
        for name, p in full.named_parameters():
            p.copy_(dict(s.named_parameters())[name] if "skip" not in name else torch.zeros_like(p))
    torch.testing.assert_close(s(k, v), full(k, v), atol=1e-12, rtol=0)
    assert s(k, v).std() > 0.05


# ----------------------------------------------------------------------------------------------------------------------
# names, files, refusals


def test_state_is_charged_as_stored():
    """State entries = bytes of C, which has its normaliser as its last row, over the bytes of a bf16 key and value."""
    assert S.state_entries("kvpop", 128) == 65
    for policy in S.POLICIES:  # the others with a state: test_policies.py
        if policy not in ("kvpop-nodelay", "snapkv", "rkv"):
            assert S.state_entries(policy, D) == (D // 2 + 1 if policy == "kvpop" else 0)
    s = make("kvpop")
    state = s.init_state(1, "cpu")
    assert s.state_entries == S.state_entries("kvpop", D)
    assert state["C"][0, 0].numel() * 4 == s.state_entries * 4 * D
    assert all(make(p).init_state(1, "cpu") == {} for p in STEPPABLE if p != "kvpop")


@pytest.mark.parametrize("policy, options, message", [
    ("dense", {}, "dense keeps every token"),
    ("h2oo", {}, "unknown policy 'h2oo'.*streaming.*kvpop"),
    ("kvpop", {"with_skip": 3}, "kvpop has no option 'with_skip'"),
    ("knorm", {"hidden": 3}, "knorm has no option 'hidden'"),
    ("kvpop", {"window": 0}, "at least 1, got 0"),
    ("kvpop", {"delay": 3}, "delay must be the window"),
    ("kvpop", {"head_dim": 7}, "even, got 7"),
])
def test_make_scorer_refuses(policy, options, message):
    with pytest.raises(ValueError, match=message):
        make_scorer(policy, **{"n_kv_head": 2, "head_dim": 8, "window": W, "layer": 0, **options})


def test_window_mismatch_is_refused_for_learned_scorers():
    check_window([make("kvpop"), make("kvpop-mlp")], W)
    check_window([make(p) for p in ("streaming", "random", "knorm", "oracle")], 3)
    for policy in ("kvpop", "kvpop-mlp"):
        with pytest.raises(ValueError, match=f"{policy} scorer of layer 1 .*window {W}, not 3"):
            check_window([make("knorm"), make(policy)], 3)


SPEC = {"n_sink": 4, "window": W, "budget": 64}


def saved(folder, policy="kvpop", **options):
    layers = torch.nn.ModuleList(make(policy, layer=i, seed=3, dtype=torch.float32, **options) for i in range(2))
    save_scorers(layers, folder, SPEC)
    return layers


@pytest.mark.parametrize("policy, options", [("kvpop", {"skip_width": 5, "chunk": 32}), ("kvpop-mlp", {"hidden": 11}),
                                             ("kvpop", {"decay": False}), ("random", {})])
def test_save_and_load(tmp_path, policy, options):
    layers = saved(tmp_path / "new", policy, **options)
    loaded, settings = load_scorers(tmp_path / "new")
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["scorer.json", "scorer.safetensors"]
    assert settings == {"policy": policy, "n_layer": 2, "n_kv_head": H, "head_dim": D, **SPEC,
                        "options": {"seed": 3, **options}}
    k, v = tokens(50, dtype=torch.float32)
    for a, b in zip(layers, loaded):
        assert torch.equal(a(k, v), b(k, v)) and a.layer == b.layer
        assert {n: p.dtype for n, p in b.named_parameters()} == {n: torch.float32 for n, _ in a.named_parameters()}
        assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(loaded[0](k, v), loaded[1](k, v))


@pytest.mark.parametrize("policy", ["kvpop", "kvpop-mlp"])
def test_half_the_bytes_in_fp16_and_fp32_in_use(tmp_path, policy):
    layers = saved(tmp_path / "fp32", policy)
    save_scorers(layers, tmp_path / "fp16", SPEC, dtype=torch.float16)
    assert {t.dtype for t in load_file(tmp_path / "fp16" / "scorer.safetensors").values()} == {torch.float16}
    loaded, settings = load_scorers(tmp_path / "fp16")
    assert settings == load_scorers(tmp_path / "fp32")[1]
    for p, q in zip(layers.parameters(), loaded.parameters(), strict=True):
        assert q.dtype == torch.float32 and torch.equal(p.half().float(), q)
    assert any(not torch.equal(p, q) for p, q in zip(layers.parameters(), loaded.parameters()))
    k, v = tokens(50, dtype=torch.float32)
    assert torch.allclose(layers[0](k, v), loaded[0](k, v), atol=1e-2)
    save_scorers(loaded, tmp_path / "again", SPEC)  # fp32 again, unless asked
    assert {t.dtype for t in load_file(tmp_path / "again" / "scorer.safetensors").values()} == {torch.float32}
    with torch.no_grad():
        loaded[1].alpha.fill_(1e5)  # above what fp16 has
    with pytest.raises(ValueError, match="1.alpha is not finite in float16"):
        save_scorers(loaded, tmp_path / "large", SPEC, dtype=torch.float16)
    assert not (tmp_path / "large").exists()


def test_save_refuses_what_it_could_not_load(tmp_path):
    for dtype in (torch.bfloat16, torch.float64, torch.float8_e4m3fn):
        with pytest.raises(ValueError, match=f"{dtype} is not supported: store float32 or float16"):
            save_scorers([make("kvpop")], tmp_path, SPEC, dtype=dtype)
    with pytest.raises(ValueError, match="lack 'budget'"):
        save_scorers([make("kvpop")], tmp_path, {"n_sink": 4, "window": W})
    with pytest.raises(ValueError, match="window 16, not 8"):
        save_scorers([make("kvpop")], tmp_path, {**SPEC, "window": 8})
    with pytest.raises(ValueError, match="same policy and options"):
        save_scorers([make("kvpop"), make("kvpop", chunk=32)], tmp_path, SPEC)
    assert list(tmp_path.iterdir()) == []


def test_load_names_what_is_wrong(tmp_path):
    saved(tmp_path)
    path = tmp_path / "scorer.safetensors"
    good = load_file(path)

    def refused(tensors, *messages):
        save_file(tensors, path)
        with pytest.raises(ValueError) as err:
            load_scorers(tmp_path)
        assert all(m in str(err.value) for m in messages), err.value

    refused({n: t for n, t in good.items() if n != "1.w_v"}, "1.w_v is missing")
    refused({**good, "0.w_extra": torch.zeros(2)}, "0.w_extra is not ours")
    refused({**good, "0.alpha": torch.zeros(H + 1)}, "0.alpha", f"[{H + 1}]", f"[{H}]")
    refused({**good, "1.w_gate": good["1.w_gate"].bfloat16()}, "1.w_gate is BF16", "not F32 or F16")
    refused({**good, "1.w_gate": good["1.w_gate"].double()}, "1.w_gate is F64")
    refused({**good, "1.w_gate": good["1.w_gate"].int()}, "1.w_gate is I32")
    refused({**good, "1.w_gate": good["1.w_gate"].half()[:-1]}, "1.w_gate is F16")
    refused({"0.alpha": torch.zeros(1), "x": torch.zeros(1)}, "0.w_q is missing", "1.w_q is missing", "x is not ours",
            "0.alpha is F32 [1]")
    save_file(good, path)
    load_scorers(tmp_path)  # the good file still loads: the refusals above were not about the folder

    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        load_scorers(tmp_path)
    torch.save(good, path)  # a pickle under the right name
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        load_scorers(tmp_path)
    path.rename(tmp_path / "scorer.pt")
    with pytest.raises(ValueError, match="scorer.pt is a pickle"):
        load_scorers(tmp_path)
    (tmp_path / "scorer.pt").unlink()
    with pytest.raises(FileNotFoundError, match="scorer.safetensors is missing"):
        load_scorers(tmp_path)


@pytest.mark.parametrize("edit, message", [
    (lambda s: s.pop("head_dim"), "head_dim"),
    (lambda s: s.update(policy="kvpopp"), "unknown policy 'kvpopp'"),
    (lambda s: s.update(options={"skips": 1}), "no option 'skips'"),
    (lambda s: s.update(options=None), "not a scorer description"),
    (lambda s: s.update(n_layer=3), "2.w_q is missing"),
    (lambda s: s.update(n_layer=1), "1.w_q is not ours"),
    (lambda s: s.update(n_kv_head=H + 1), "0.w_q is F32"),
])
def test_a_description_that_does_not_fit(tmp_path, edit, message):
    saved(tmp_path)
    settings = json.loads((tmp_path / "scorer.json").read_text())
    edit(settings)
    (tmp_path / "scorer.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError) as err:
        load_scorers(tmp_path)
    assert message in str(err.value)


def test_a_missing_or_broken_description(tmp_path):
    saved(tmp_path)
    (tmp_path / "scorer.json").write_text("{")
    with pytest.raises(ValueError, match="not a scorer description"):
        load_scorers(tmp_path)
    (tmp_path / "scorer.json").unlink()
    with pytest.raises(FileNotFoundError, match="scorer.json is missing"):
        load_scorers(tmp_path)
