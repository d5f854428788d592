"""flex_masks.py: one mask in four forms (online eviction by brute force, closures, evict_at, tiles), and its attention.
"""
import heapq
import math

import pytest
import torch

import flex_masks
from flex_masks import (NEVER, TILE, CacheSpec, attention, bucket, dense_reference, effective_priority,
                        evict_at_block_mask, fenwick_cutoffs, generate_evict_at_mask_mod, generate_kvpop_mask_mod,
                        keep_everything, lifetime_attention, lifetime_order, padded_dies, parallel_cutoffs, plan,
                        running_topk)


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


# sinks, window, k
SPECS = [(4, 5, 7), (0, 1, 1), (0, 1, 0), (3, 1, 0), (2, 4, 0), (1, 3, 200), (4, 130, 3), (0, 2, 64)]


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


def test_compiled_thresholds_of_many_lengths_are_few_shapes(monkeypatch):
    shapes = set()

    def walk(rank, n_select):
        shapes.add(rank.shape)
        return flex_masks.wavelet_walk(rank, n_select)
    monkeypatch.setattr(flex_masks, "compiled_wavelet_walk", walk)
    for M in range(200, 1301, 100):
        rank = torch.stack([torch.randperm(M) for _ in range(4)]).view(2, 2, M)
        assert torch.equal(parallel_cutoffs(rank, 50, compiled=True), parallel_cutoffs(rank, 50))
    assert len(shapes) <= 6


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


# ---------------------------------------------------------------------------------------------------------------------
# Tiles and the order of keys. There is no kernel on a CPU, so a stand-in reads the tables exactly as the kernel does.

def listed(number, indices, n_columns):
    """(Z, 1, rows), (Z, 1, rows, width) -> (Z, rows, n_columns) bool. A tile listed twice would count twice: no."""
    lists = torch.arange(indices.shape[-1]) < number.unsqueeze(-1)
    count = torch.zeros(*number.shape, n_columns + 1, dtype=torch.int32)
    count.scatter_add_(-1, torch.where(lists, indices, n_columns).long(), lists.int())
    assert number.dtype == indices.dtype == torch.int32 and number.is_contiguous() and indices.is_contiguous()
    assert count.max() <= 1
    return count[:, 0, :, :-1].bool()


def visible_by_tables(block_mask, forward=True):
    """Which pairs the kernel takes in: mask_mod on partial tiles, all of a full one, nothing elsewhere. (Z, Q, K) bool.
    forward: from the tables that the forward and dq walk; else from those of dk and dv."""
    (q_len, kv_len), (q_tile, kv_tile) = block_mask.seq_lengths, block_mask.BLOCK_SIZE
    m = block_mask
    assert q_len % q_tile == 0 and kv_len % kv_tile == 0
    if forward:
        partial = listed(m.kv_num_blocks, m.kv_indices, kv_len // kv_tile)
        full = listed(m.full_kv_num_blocks, m.full_kv_indices, kv_len // kv_tile)
    else:
        partial = listed(m.q_num_blocks, m.q_indices, q_len // q_tile).mT
        full = listed(m.full_q_num_blocks, m.full_q_indices, q_len // q_tile).mT
    assert not (partial & full).any()
    assert partial.shape[1:] == (q_len // q_tile, kv_len // kv_tile)
    Z = partial.shape[0]
    pairs = m.mask_mod(torch.arange(Z).view(-1, 1, 1), torch.zeros((), dtype=torch.long),
                       torch.arange(q_len).view(-1, 1), torch.arange(kv_len)).expand(Z, -1, -1)
    wide = lambda x: x.repeat_interleave(q_tile, 1).repeat_interleave(kv_tile, 2)  # noqa: E731
    return pairs & wide(partial) | wide(full)


class Kernel:
    """flex_masks.compiled_flex_attention on a CPU, with gradients, through the tables. Keeps the shapes it has seen."""

    def __init__(self):
        self.shapes, self.masks = [], []

    def __call__(self, q, k, v, *, block_mask, scale, return_aux, enable_gqa=False, score_mod=None,
                 kernel_options=None):
        assert return_aux.lse and (q.shape[1] == k.shape[1] or enable_gqa)
        assert block_mask.seq_lengths == (q.shape[2], k.shape[2]) and min(q.shape[3], v.shape[3]) >= 16
        visible = visible_by_tables(block_mask)
        if block_mask.q_indices is not None:
            assert torch.equal(visible, visible_by_tables(block_mask, forward=False))
        self.shapes.append((q.shape, k.shape, v.shape))
        self.masks.append(block_mask)
        if len(visible) == 1:
            visible = visible.expand(len(q), -1, -1)
        out, lse = dense_reference(q, k, v, lambda b, h, q_idx, kv_idx: visible[b, q_idx, kv_idx], score_mod, scale)
        return out, flex_masks.AuxRequest(lse=lse)


@pytest.fixture
def kernel(monkeypatch):
    """Everything takes the path of a GPU, and ends in the stand-in."""
    kernel = Kernel()
    monkeypatch.setattr(flex_masks, "compiled_flex_attention", kernel)
    monkeypatch.setattr(flex_masks, "has_kernel", lambda q: True)
    return kernel


def in_time_order(q, k, v, evict_at):
    """The yardstick: dense_reference of the fast mask."""
    return dense_reference(q, k, v, generate_evict_at_mask_mod(evict_at, q.shape[1] // evict_at.shape[1]), causal=True)


def plans(kind, B, H_kv, T, spec):
    """evict_at of the policies, unequal between heads and rows where they can be."""
    torch.manual_seed(T)
    scores = torch.randn(B, H_kv, T) * torch.arange(1, H_kv + 1).view(-1, 1)
    if kind == "decay":
        return plan(effective_priority(scores, -torch.linspace(0.001, 0.3, H_kv)), spec)
    if kind == "documents":  # (B, 1, T): ends of packed documents, one for all heads
        ends = torch.arange(T).div(37, rounding_mode="floor").add(1).mul(37).int()
        return torch.stack([ends, (torch.arange(T) + 1).clamp(min=T // 2).int()])[:B, None]
    return {"random": lambda: plan(scores, spec), "streaming": lambda: plan(torch.zeros(B, H_kv, T), spec),
            "rising": lambda: plan(torch.arange(T).float().expand(B, H_kv, T), spec),  # the newest always wins
            "falling": lambda: plan(-torch.arange(T).float().expand(B, H_kv, T), spec),
            "dense": lambda: keep_everything(B, H_kv, T)}[kind]()


KINDS = ["random", "decay", "streaming", "rising", "falling"]


def out_lse_grads(fn, q, k, v):
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = fn(*inputs)
    torch.manual_seed(0)
    loss = (out * torch.randn(out.shape, dtype=out.dtype)).sum() + (lse * torch.randn(lse.shape, dtype=lse.dtype)).sum()
    return [out, lse, *torch.autograd.grad(loss, inputs)]


@pytest.mark.parametrize("T", [1, 127, 129, 1000])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_select, chunk", [(0, None), (40, None), (300, 256)])
def test_sorted_attention_equals_time_order(kernel, T, kind, n_select, chunk):
    """Outputs, lse and gradients of q, k, v, fp64, batch 2, groups of 2, through the tables of both directions."""
    spec = CacheSpec(3, 20, 23 + n_select)
    evict_at = plans(kind, 2, 2, T, spec)
    q, k, v = (torch.randn(2, h, T, 8, dtype=torch.float64) for h in (4, 2, 2))
    want = out_lse_grads(lambda *x: in_time_order(*x, evict_at), q, k, v)
    got = out_lse_grads(lambda *x: lifetime_attention(*x, evict_at, spec, chunk), q, k, v)
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, want):
        assert a.shape == b.shape and (a - b).abs().max() < 1e-11, name
    assert all(shape[0][2] == bucket(T) for shape in kernel.shapes) and len(kernel.shapes) == 1


@pytest.mark.parametrize("T", [1, 127, 129, 700])
@pytest.mark.parametrize("kind", ["random", "dense", "documents"])
def test_time_order_equals_reference(kernel, T, kind):
    evict_at = plans(kind, 2, 2, T, CacheSpec(3, 20, 60))
    q, k, v = (torch.randn(2, h, T, 8, dtype=torch.float64) for h in (4, 2, 2))
    want = out_lse_grads(lambda *x: in_time_order(*x, evict_at), q, k, v)
    block_mask = evict_at_block_mask(evict_at)  # shared by the layers
    for fn in (lambda *x: attention(*x, evict_at), lambda *x: attention(*x, evict_at, tables=block_mask)):
        for a, b in zip(out_lse_grads(fn, q, k, v), want):
            assert (a - b).abs().max() < 1e-11


@pytest.mark.parametrize("T", [TILE, 4 * TILE])
@pytest.mark.parametrize("n_select", [0, 20, 200])
def test_block_mask_is_exact(T, n_select):
    """A tile is listed iff some pair in it is visible, and as full only if all are."""
    spec = CacheSpec(4, 30, 34 + n_select)
    evict_at = plan(torch.randn(2, 2, T), spec)
    evict_at[0, 0] = plan(torch.arange(T).float().view(1, 1, T), spec)[0, 0]  # streaming: whole tiles die
    block_mask = evict_at_block_mask(evict_at)
    n = T // TILE
    tiles = grid(generate_evict_at_mask_mod(evict_at), 2, 2, T).reshape(4, n, TILE, n, TILE).transpose(2, 3)
    full = listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, n)
    partial = listed(block_mask.kv_num_blocks, block_mask.kv_indices, n)
    assert torch.equal(full | partial, tiles.any(-1).any(-1)) and torch.equal(full, tiles.all(-1).all(-1))
    if n_select == 0 and n > 1:
        assert not (full | partial).all(), "a streaming mask must leave tiles empty"


@pytest.mark.parametrize("kv_tile", [64, 128])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("T, n_select, chunk", [(1024, 200, 256), (1000, 60, 128), (1152, 490, 512)])
def test_lifetime_order_is_the_mask(kv_tile, kind, T, n_select, chunk):
    """Every visible pair has one row, in a tile that both directions list, and the tiles are few."""
    spec = CacheSpec(4, 30, 34 + n_select)
    evict_at = plans(kind, 1, 3, T, spec)
    dies = padded_dies(evict_at)
    order, birth, ends, *tables = lifetime_order(dies, spec.n_slots, spec.window, chunk, kv_tile)
    P, R = bucket(T), birth.shape[1]

    def mask_mod(b, h, q_idx, kv_idx):
        return (birth[b, kv_idx] <= q_idx) & (q_idx < ends[b, kv_idx])
    mask = flex_masks.BlockMask((P, R), *tables, BLOCK_SIZE=(TILE, kv_tile), mask_mod=mask_mod)
    by_row = visible_by_tables(mask)
    assert torch.equal(by_row, visible_by_tables(mask, forward=False))
    pairs = mask_mod(torch.arange(3).view(-1, 1, 1), 0, torch.arange(P).view(-1, 1), torch.arange(R))
    assert torch.equal(by_row, pairs)  # an unlisted tile holds no visible pair, a full one no hidden pair
    by_key = torch.zeros(3, P, P, dtype=torch.int32)
    by_key.scatter_add_(2, order.flatten(1)[:, None].expand(-1, P, -1), by_row.int())
    assert torch.equal(by_key[:, :T, :T], grid(generate_evict_at_mask_mod(evict_at), 1, 3, T)[0].int())
    assert torch.equal(by_key[:, T:], torch.eye(P, dtype=torch.int32)[T:].expand(3, -1, -1))  # a pad sees itself
    tiles = by_row.view(3, P // TILE, TILE, R // kv_tile, kv_tile).transpose(2, 3)
    taken = sum(n.sum().item() for n in (mask.kv_num_blocks, mask.full_kv_num_blocks))
    exact = tiles.any(-1).any(-1).sum().item()
    assert exact <= taken <= 1.05 * exact and mask.full_kv_num_blocks.sum() == tiles.all(-1).all(-1).sum()


@pytest.mark.parametrize("dies_at", [255, 256, 257, 383, 384, 385, 511, 512])
def test_tiles_at_their_very_edges(dies_at):
    """128 keys that die together, one query before, at and after the border of a tile or a chunk."""
    dies = torch.arange(1, 513, dtype=torch.int32).view(1, 512)
    dies[:, :128] = dies_at
    _, birth, ends, *tables = lifetime_order(dies, 129, 1, 256)
    mask = flex_masks.BlockMask((512, birth.shape[1]), *tables, BLOCK_SIZE=(TILE, TILE),
                                mask_mod=lambda b, h, i, j: (birth[b, j] <= i) & (i < ends[b, j]))
    by_row, i = visible_by_tables(mask), torch.arange(512).view(-1, 1)
    assert torch.equal(by_row[0], (birth <= i) & (i < ends)) and torch.equal(by_row, visible_by_tables(mask, False))
    assert by_row.sum() == (dies - torch.arange(512)).sum()
    tiles = by_row.view(4, TILE, -1, TILE).transpose(1, 2)
    assert mask.full_kv_num_blocks.sum() == tiles.all(-1).all(-1).sum()


def test_sorting_empties_tiles():
    """Random scores: in time order next to no tile below the diagonal is empty; sorted, nearly all that may be are."""
    T, spec = 16384, CacheSpec(4, 256, 2048)
    evict_at = plan(torch.randn(1, 1, T), spec)
    ideal = (evict_at.clamp(max=T) - torch.arange(T)).double().mean().item() / T
    count = lambda *tables: sum(n.sum().item() for n in tables) / (T // TILE)**2  # noqa: E731
    in_time = evict_at_block_mask(evict_at)
    tables = lifetime_order(padded_dies(evict_at), spec.n_slots, spec.window, 2048)[3:]
    assert count(in_time.kv_num_blocks, in_time.full_kv_num_blocks) > 0.49
    assert ideal < count(tables[0], tables[2]) < 1.25 * ideal and count(tables[2]) > 0.7 * ideal


def test_a_query_that_sees_more_than_n_slots_is_refused():
    with pytest.raises(RuntimeError):
        lifetime_order(padded_dies(keep_everything(1, 1, 1024)), 100, 20, 128)


def test_order_plan_and_tables_are_one_graph():
    """Static shapes and no wait for the device: one full graph, compiled once, whatever the scores."""
    from torch._dynamo.testing import CompileCounterWithBackend
    spec, backend = CacheSpec(4, 30, 100), CompileCounterWithBackend("aot_eager")

    def everything(priority):
        evict_at = plan(priority, spec)
        return evict_at, *lifetime_order(padded_dies(evict_at), spec.n_slots, spec.window, 128)
    torch._dynamo.reset()
    compiled = torch.compile(everything, backend=backend, fullgraph=True, dynamic=False)
    earlier = None
    for seed in range(3):
        priority = torch.randn(2, 2, 700, generator=torch.Generator().manual_seed(seed))
        got = compiled(priority)
        assert all(torch.equal(a, b) for a, b in zip(got, everything(priority)))
        assert earlier is None or not torch.equal(got[0], earlier)  # new scores, new mask
        earlier = got[0]
    assert backend.frame_count == 1


def test_nothing_is_quadratic(kernel, monkeypatch):
    """The largest tensor in plan, order, tables, gathers and their backward grows with T, not with T squared."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Allocations(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(x, torch.Tensor):
                    self.largest = max(self.largest, x.untyped_storage().nbytes())
            return out

    def stand_in(q, k, v, **options):  # the shapes of the kernel's result, no attention
        return q + k.sum() + v.sum(), flex_masks.AuxRequest(lse=q[..., 0].float())
    monkeypatch.setattr(flex_masks, "compiled_flex_attention", stand_in)
    spec, seen = CacheSpec(4, 64, 512), {}
    for T in (4096, 8192):
        q, k, v = (torch.randn(1, h, T, 16).requires_grad_() for h in (2, 1, 1))
        with Allocations() as seen[T]:
            evict_at = plan(torch.randn(1, 1, T), spec)
            lifetime_attention(q, k, v, evict_at, spec)[0].sum().backward()
    assert seen[4096].largest <= 2 * 4096 * 16 * 4 * 1.1  # the gathered keys: two rows a key
    assert seen[8192].largest <= 2.2 * seen[4096].largest


def test_few_shapes_for_many_lengths(kernel):
    """12 lengths from 200 to 1,300 compile the kernel for six lengths, and evaluation adds none to training's."""
    spec, lengths = CacheSpec(2, 8, 40), range(200, 1301, 100)
    for T in lengths:
        q, k, v = (torch.randn(1, 1, T, 16) for _ in range(3))
        attention_on_gpu = lifetime_attention(q, k, v, plan(torch.randn(1, 1, T), spec), spec)
        assert attention_on_gpu[0].shape == (1, 1, T, 16) and attention_on_gpu[1].shape == (1, 1, T)
    assert len(kernel.shapes) == 12 and len(set(kernel.shapes)) <= 6
    assert [bucket(T) for T in (1, 128, 129, 1000, 1024, 1025, 2048, 2049, 16384, 16385)] == \
        [128, 128, 256, 1024, 1024, 1152, 2048, 2304, 16384, 18432]


def test_unfused_attention_is_impossible(monkeypatch):
    """Not compiled, and at the recompile limit: one sentence, never T x T scores."""
    x = torch.randn(1, 1, 128, 16)
    with pytest.raises(RuntimeError, match="run unfused"):
        flex_masks.fused_only(x, x, x)
    monkeypatch.setattr(flex_masks, "fused_only", lambda q, k, v, **options: (q, flex_masks.AuxRequest(lse=q[..., 0])))
    torch._dynamo.reset()
    monkeypatch.setattr(flex_masks, "compiled_flex_attention",
                        torch.compile(flex_masks.fused_only, backend="eager", dynamic=False, fullgraph=True))
    spec = CacheSpec(2, 8, 40)

    def call(T):
        q, k, v = (torch.randn(1, 1, T, 16) for _ in range(3))
        return lifetime_attention(q, k, v, plan(torch.randn(1, 1, T), spec), spec)
    with torch._dynamo.config.patch(recompile_limit=2):
        for T in (200, 230, 300, 500):  # two lengths after padding
            call(T)
        with pytest.raises(RuntimeError, match="one compile too many.*pad batches"):
            call(600)
    torch._dynamo.reset()


def test_attention_chooses_the_order(kernel):
    """With a spec keys are sorted, once a query sees half of them at most; without one, or with a shared mask, not."""
    spec = CacheSpec(2, 8, 100)
    for T, given, rows in ((1000, spec, 8 * 256), (1000, None, 1024), (199, spec, 256), (200, spec, 2 * 256)):
        q, k, v = (torch.randn(2, h, T, 16, dtype=torch.float64) for h in (4, 2, 2))
        evict_at = plan(torch.randn(2, 2, T), spec)
        out, lse = attention(q, k, v, evict_at, given)
        want = in_time_order(q, k, v, evict_at)
        assert (out - want[0]).abs().max() < 1e-12 and (lse - want[1]).abs().max() < 1e-12
        assert kernel.shapes[-1][1] == (4, 1, rows, 16)  # a KV head is a batch row


def test_keys_get_the_gradient_of_all_their_rows(kernel):
    """A token that lives through many chunks has a row in each: the backward adds them, twice the same bits."""
    spec, T = CacheSpec(1, 4, 24), 640
    q, k, v = (torch.randn(1, 1, T, 16) for _ in range(3))
    evict_at = plan(torch.randn(1, 1, T), spec)
    first = out_lse_grads(lambda *x: lifetime_attention(*x, evict_at, spec), q, k, v)
    again = out_lse_grads(lambda *x: lifetime_attention(*x, evict_at, spec), q, k, v)
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    order = lifetime_order(padded_dies(evict_at), spec.n_slots, spec.window, 128)[0]
    assert (order == 0).any(-1).sum() == 5  # the sink, in each of the chunks with real queries
    assert (first[3] - out_lse_grads(lambda *x: in_time_order(*x, evict_at), q, k, v)[3]).abs().max() < 1e-4


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
@pytest.mark.parametrize("T", [1, 127, 129, 1000, 4096])
@pytest.mark.parametrize("D", [32, 128])
@pytest.mark.parametrize("order", ["time", "lifetime"])
def test_flex_attention_equals_dense_reference(T, D, dtype, order):
    """Yardstick: the error that the same dense formula makes in the working precision, measured here against fp64.
    A fused kernel rounds in another order, so it may err a few times as much, never by orders of magnitude."""
    torch.manual_seed(T)
    q, k, v = (torch.randn(2, h, T, D, device="cuda").to(dtype) for h in (4, 2, 2))
    spec = CacheSpec(4, 16, 64 if T < 4096 else 600)
    evict_at = plan(torch.randn(2, 2, T, device="cuda") * torch.tensor([[1.0], [3.0]], device="cuda"), spec)
    evict_at[0, 0] = plan(torch.zeros(1, 1, T, device="cuda"), spec)[0, 0]  # heads unlike each other
    mod = generate_evict_at_mask_mod(evict_at, 2)
    fast = {"time": lambda *x: attention(*x, evict_at), "lifetime": lambda *x: lifetime_attention(*x, evict_at, spec)}
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
    for name, got, low, want in zip(names, run(fast[order], q, k, v), yardstick, exact):
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
@pytest.mark.parametrize("compiled", [False, True])
def test_new_scores_of_the_same_shape_use_the_new_mask(compiled):
    q, k, v = (torch.randn(1, h, 256, 32, device="cuda") for h in (4, 2, 2))
    spec = CacheSpec(2, 8, 40)
    for seed in range(3):
        torch.manual_seed(seed)
        evict_at = plan(torch.randn(1, 2, 256, device="cuda"), spec, compiled)
        want = dense_reference(q, k, v, generate_evict_at_mask_mod(evict_at, 2), causal=True)[0]
        assert (attention(q, k, v, evict_at)[0] - want).abs().max() < 1e-4
        assert (attention(q, k, v, evict_at, spec, compiled=compiled)[0] - want).abs().max() < 1e-4
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")  # no step waits for the device
    try:
        attention(q, k, v, plan(torch.randn(1, 2, 256, device="cuda"), spec, compiled), spec, compiled=compiled)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_memory_is_linear_and_gradients_repeat_bit_for_bit():
    """Plan, order and tables for 8 KV heads of 32k tokens: far below the 0.5 GB that they may take."""
    T, spec = 32768, CacheSpec(4, 256, 2048)
    priority = torch.randn(1, 8, T, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    lifetime_order(padded_dies(plan(priority, spec)), spec.n_slots, spec.window, 2048)
    extra = (torch.cuda.max_memory_allocated() - before) / 2**20
    print(f"{extra:.0f} MiB")
    assert extra < 400
    evict_at = plan(priority[..., :4096], CacheSpec(4, 256, 1024))
    q, k, v = (torch.randn(1, h, 4096, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for h in (16, 8, 8))
    grads = [torch.autograd.grad(lifetime_attention(q, k, v, evict_at, CacheSpec(4, 256, 1024))[0].sum(), (q, k, v))
             for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*grads))


@pytest.mark.gpu
def test_twelve_lengths_in_one_process():
    """With and without gradients: two compiles for each of six padded lengths, and never an unfused call."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    spec, peak = CacheSpec(2, 8, 40), {}
    for T in range(200, 1301, 100):
        q, k, v = (torch.randn(1, 2, T, 32, device="cuda").requires_grad_() for _ in range(3))
        evict_at = plan(torch.randn(1, 2, T, device="cuda"), spec)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        attention(q, k, v, evict_at, spec)[0].sum().backward()
        peak[T] = torch.cuda.max_memory_allocated() - before
        with torch.no_grad():
            attention(q, k, v, evict_at, spec)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 12
    assert peak[1200] <= 6 * peak[200] + 2**22  # 5 buckets of 256 against 1; T x T would be 25
