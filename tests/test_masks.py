"""flex_masks.py: one mask in four forms (online eviction by brute force, closures, evict_at, tiles), and its attention."""
import heapq
import math

import pytest
import torch

from flex_masks import (NEVER, TILE, CacheSpec, attention, dense_reference, effective_priority, evict_at_block_mask,
                        fenwick_cutoffs, generate_evict_at_mask_mod, generate_kvpop_mask_mod, keep_everything,
                        parallel_cutoffs, plan, running_topk)


def online_eviction(priority, spec):
    """Brute force: a list of live positions per row and head, one victim a step. -> visible (B, H_kv, T, T) bool."""
    B, H, T = priority.shape
    visible = torch.zeros(B, H, T, T, dtype=torch.bool)
    for b in range(B):
        for h in range(H):
            live = []
            for q in range(T):
                if len(live) == spec.n_slots:
                    candidates = [t for t in live if spec.n_sink <= t <= q - spec.window]
                    live.remove(min(candidates, key=lambda t: (priority[b, h, t].item(), t)))  # ties: the older goes
                live.append(q)
                assert len(live) <= spec.n_slots
                visible[b, h, q, live] = True
    return visible


def grid(mod, B, H, T):
    b, h = torch.arange(B).view(B, 1, 1, 1), torch.arange(H).view(1, H, 1, 1)
    return mod(b, h, torch.arange(T).view(1, 1, T, 1), torch.arange(T).view(1, 1, 1, T)).expand(B, H, T, T)


def heap_cutoffs(rank, n_select):
    """A third formula: a heap of the n_select largest so far."""
    heap, cutoffs = [], []
    for r in rank.tolist():
        heapq.heappush(heap, r)
        if len(heap) > n_select:
            heapq.heappop(heap)
        cutoffs.append(-1 if len(heap) < n_select else heap[0])
    return torch.tensor(cutoffs)


SPECS = [(4, 5, 7), (0, 1, 1), (0, 1, 0), (3, 1, 0), (2, 4, 0), (1, 3, 200), (4, 130, 3), (0, 2, 64)]  # sinks, window, k


@pytest.mark.parametrize("n_sink, window, n_select", SPECS)
@pytest.mark.parametrize("T", [1, 2, 9, 64, 127, 129])
@pytest.mark.parametrize("kind", ["normal", "ties", "equal", "decay", "huge"])
def test_mask_is_online_eviction(n_sink, window, n_select, T, kind):
    torch.manual_seed(T + n_select)
    spec = CacheSpec(n_sink, window, n_sink + window + n_select)
    scores = {"normal": torch.randn(2, 2, T), "ties": torch.randint(0, 3, (2, 2, T)).float(),
              "equal": torch.zeros(2, 2, T), "decay": torch.randn(2, 2, T),
              "huge": torch.randn(2, 2, T).sign() * math.inf}[kind]
    log_gamma = -torch.tensor([0.001, 0.3]) if kind == "decay" else None
    priority = effective_priority(scores, log_gamma)
    expected = online_eviction(priority, spec).repeat_interleave(2, dim=1)  # group_size 2
    rank, cutoff = running_topk(priority, spec)
    assert torch.equal(grid(generate_evict_at_mask_mod(plan(priority, spec), 2), 2, 4, T), expected)
    assert torch.equal(grid(generate_kvpop_mask_mod(rank, cutoff, spec, 2), 2, 4, T), expected)


@pytest.mark.parametrize("M", [1, 2, 3, 17, 64, 100])
@pytest.mark.parametrize("n_select", [0, 1, 2, 8, 99, 1000])
def test_parallel_cutoffs_equal_fenwick_equal_heap(M, n_select):
    torch.manual_seed(M)
    rank = torch.stack([torch.randperm(M) for _ in range(6)]).view(2, 3, M)
    parallel = parallel_cutoffs(rank, n_select)
    for row, got in zip(rank.flatten(0, 1), parallel.flatten(0, 1)):
        assert got.tolist() == fenwick_cutoffs(row, n_select).tolist()
        if n_select:
            assert got.tolist() == heap_cutoffs(row, n_select).tolist()
    assert (parallel.diff(dim=-1) >= 0).all()  # a threshold never falls: what is evicted stays out


def test_full_rows_hold_exactly_the_budget():
    spec = CacheSpec(3, 8, 32)
    evict_at = plan(torch.randn(2, 2, 200), spec)
    held = grid(generate_evict_at_mask_mod(evict_at), 2, 2, 200).sum(-1)
    assert torch.equal(held, torch.arange(1, 201).clamp(max=32).expand(2, 2, 200))


def test_equal_scores_are_streaming():
    spec = CacheSpec(4, 8, 32)
    q, t = torch.arange(100).view(-1, 1), torch.arange(100)
    streaming = (t <= q) & ((t < 4) | (q - t < 28))  # sinks and one long window
    assert torch.equal(grid(generate_evict_at_mask_mod(plan(torch.zeros(1, 1, 100), spec)), 1, 1, 100)[0, 0], streaming)


def test_decisions_are_causal():
    """Changing a score changes no mask row before the token leaves the window."""
    spec, t = CacheSpec(2, 5, 16), 40
    priority = torch.randn(1, 1, 90)
    changed = priority.clone()
    changed[..., t] += 100.0
    before, after = (grid(generate_evict_at_mask_mod(plan(p, spec)), 1, 1, 90)[0, 0] for p in (priority, changed))
    assert torch.equal(before[:t + 5], after[:t + 5]) and not torch.equal(before, after)


def test_nan_is_refused_and_infinity_is_ranked():
    with pytest.raises(ValueError, match="NaN"):
        effective_priority(torch.tensor([[[1.0, math.nan]]]))
    assert effective_priority(torch.tensor([[[math.inf, -math.inf]]])).isfinite().all()
    assert effective_priority(torch.zeros(1, 2, 3, dtype=torch.bfloat16)).dtype == torch.float32


def test_decode_and_mask_share_the_priority():
    scores, log_gamma = torch.randn(2, 3, 50), -torch.rand(3)
    whole = effective_priority(scores, log_gamma)
    for t in (0, 7, 49):
        one = effective_priority(scores[..., t], log_gamma, torch.full((2, 1), t))
        assert torch.equal(one, whole[..., t])  # bit for bit: a rounding here would change who is evicted


@pytest.mark.parametrize("kwargs, words", [(dict(n_sink=4, window=0, budget=64), "window 0"),
                                           (dict(n_sink=-1, window=8, budget=64), "n_sink -1"),
                                           (dict(n_sink=4, window=64, budget=67), "raise --budget to 68"),
                                           (dict(n_sink=4, window=64, budget=80, state_entries=17), "to 85")])
def test_impossible_specs_are_refused(kwargs, words):
    with pytest.raises(ValueError, match=words):
        CacheSpec(**kwargs)


@pytest.mark.parametrize("T", [TILE, 4 * TILE])
@pytest.mark.parametrize("n_select", [0, 20, 200])
def test_block_mask_is_exact(T, n_select):
    """A tile is listed iff some pair in it is visible, and as full only if all are."""
    spec = CacheSpec(4, 30, 34 + n_select)
    evict_at = plan(torch.randn(2, 2, T), spec)
    evict_at[0, 0] = plan(torch.arange(T).float().view(1, 1, T), spec)[0, 0]  # streaming: whole tiles die
    block_mask = evict_at_block_mask(evict_at, 4)
    n = T // TILE
    tiles = grid(generate_evict_at_mask_mod(evict_at, 2), 2, 4, T).reshape(2, 4, n, TILE, n, TILE).transpose(3, 4)
    assert torch.equal(block_mask.to_dense().bool(), tiles.any(-1).any(-1))
    full = torch.zeros(2, 4, n, n + 1, dtype=torch.bool)
    number = block_mask.full_kv_num_blocks.unsqueeze(-1)
    listed = torch.where(torch.arange(n) < number, block_mask.full_kv_indices.long(), n)
    full.scatter_(-1, listed, True)
    assert torch.equal(full[..., :n], tiles.all(-1).all(-1))
    if n_select == 0 and n > 1:
        assert not block_mask.to_dense().bool().all(), "a streaming mask must leave tiles empty"


@pytest.mark.parametrize("T", [1, 5, 127, 129, 300])
def test_dense_reference_equals_softmax(T):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, T, 8, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2))
    evict_at = plan(torch.randn(2, 2, T), CacheSpec(2, 3, 11))
    out, lse = attention(q, k, v, evict_at)
    visible = grid(generate_evict_at_mask_mod(evict_at, 2), 2, 4, T)
    scores = (q @ k.repeat_interleave(2, 1).mT / 8**0.5).masked_fill(~visible, -math.inf)
    expected = scores.softmax(-1) @ v.repeat_interleave(2, 1)
    assert (out - expected).abs().max() < 1e-12 and (lse - scores.logsumexp(-1)).abs().max() < 1e-12
    weight = torch.randn_like(out)
    for a, b in zip(torch.autograd.grad((out * weight).sum(), (q, k, v), retain_graph=True),
                    torch.autograd.grad((expected * weight).sum(), (q, k, v))):
        assert (a - b).abs().max() < 1e-11


def test_budget_of_everything_is_dense_attention():
    q, k, v = (torch.randn(1, h, 60, 8, dtype=torch.float64) for h in (4, 2, 2))
    dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    for evict_at in (plan(torch.randn(1, 2, 60), CacheSpec(2, 4, 60)), keep_everything(1, 2, 60)):
        assert (evict_at == NEVER).all()
        assert (attention(q, k, v, evict_at)[0] - dense).abs().max() < 1e-12


def test_a_row_that_sees_nothing_is_zero_with_finite_gradients():
    q, k, v = (torch.randn(1, 1, 4, 8, requires_grad=True) for _ in range(3))
    out, lse = dense_reference(q, k, v, lambda b, h, q_idx, kv_idx: q_idx > kv_idx)  # row 0 sees no key
    assert (out[:, :, 0] == 0).all() and lse[0, 0, 0] == -math.inf and lse[0, 0, 1:].isfinite().all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), (q, k, v)))


def test_pictures(tmp_path):
    from flex_masks import draw
    draw(tmp_path / "masks.png")
    assert (tmp_path / "masks.png").read_bytes()[:4] == b"\x89PNG"


# ---------------------------------------------------------------------------------------------------------------------
# On a GPU: FlexAttention against the dense reference in fp64

@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("T", [1, 127, 129, 1025])
@pytest.mark.parametrize("D", [32, 128])
def test_flex_attention_equals_dense_reference(T, D, dtype):
    """Yardstick: the error that the same dense formula makes in the working precision, measured here against fp64.
    A fused kernel rounds in another order, so it may err a few times as much, never by orders of magnitude."""
    torch.manual_seed(T)
    q, k, v = (torch.randn(2, h, T, D, device="cuda").to(dtype) for h in (4, 2, 2))
    evict_at = plan(torch.randn(2, 2, T, device="cuda"), CacheSpec(4, 16, 64))
    mod = generate_evict_at_mask_mod(evict_at, 2)
    weight = torch.randn(2, 4, T, D, device="cuda")

    def run(fn, *inputs):
        inputs = [x.detach().requires_grad_() for x in inputs]
        out, lse = fn(*inputs)
        grads = torch.autograd.grad(out, inputs, weight.to(out.dtype))
        return [x.double() for x in (out, lse, *grads)]

    def low_precision(q, k, v):  # plain attention with every intermediate in the working dtype
        scores = (q @ k.repeat_interleave(2, 1).mT * D**-0.5)
        scores = scores.masked_fill(~grid_on(mod, 2, 4, T, q.device), -math.inf)
        return scores.softmax(-1) @ v.repeat_interleave(2, 1), scores.float().logsumexp(-1)

    exact = run(lambda *x: dense_reference(*x, mod, causal=True), q.double(), k.double(), v.double())
    yardstick = run(low_precision, q, k, v)
    eps = torch.finfo(dtype).eps
    names = ("out", "lse", "dq", "dk", "dv")
    for name, got, low, want in zip(names, run(lambda *x: attention(*x, evict_at), q, k, v), yardstick, exact):
        scale = want.norm().item()
        if T == 1 and name in ("dq", "dk"):  # exactly 0: (dout . v - dout . out) times k or q, two equal terms
            other = (k if name == "dq" else q).double().norm().item() * D**-0.5
            scale = (weight.double() * v.double().repeat_interleave(2, 1)).sum(-1).norm().item() * other
        error, allowed = (got - want).norm().item() / scale, (low - want).norm().item() / scale
        assert error <= 3 * allowed + 4 * eps, (name, error, allowed)


def grid_on(mod, B, H, T, device):
    b, h = torch.arange(B, device=device).view(B, 1, 1, 1), torch.arange(H, device=device).view(1, H, 1, 1)
    return mod(b, h, torch.arange(T, device=device).view(1, 1, T, 1), torch.arange(T, device=device).view(1, 1, 1, T))


@pytest.mark.gpu
def test_new_scores_of_the_same_shape_use_the_new_mask():
    q, k, v = (torch.randn(1, h, 256, 32, device="cuda") for h in (4, 2, 2))
    for seed in range(3):
        torch.manual_seed(seed)
        evict_at = plan(torch.randn(1, 2, 256, device="cuda"), CacheSpec(2, 8, 40))
        want = dense_reference(q, k, v, generate_evict_at_mask_mod(evict_at, 2), causal=True)[0]
        assert (attention(q, k, v, evict_at)[0] - want).abs().max() < 1e-4
