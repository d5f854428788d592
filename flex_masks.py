"""Sparse attention with a fixed budget of keys, as FlexAttention masks.

What this file holds, bottom-up:
  CacheSpec             n_sink + window + n_select = n_slots entries per KV head, and how the budget pays for them
  generate_*_mask_mod   the readable form: sink, window and top-k closures, joined with or_masks under causality
  fenwick_cutoffs       the running top-k threshold with a Fenwick tree, the specification; parallel_cutoffs: for GPUs
  plan                  priorities -> evict_at, the first query that no longer sees a token: the mask's fast form
  evict_at_block_mask   which 128 x 128 tiles are empty, partial or full, in closed form: nothing of size T x T exists
  attention             (out, lse): FlexAttention on a GPU, dense_reference built from the same mods elsewhere
  draw, draw_*          pictures: each pattern, what a cache holds, and what bench.py measured
How it departs from vanilla FlexAttention code: eviction is irreversible, so any policy is one integer per token and KV
head, `visible(q, t) = (t <= q) & (q < evict_at[t])`. Run `python flex_masks.py` to draw each pattern.

Words, fixed here: `window` counts the query itself (q - t < window). `n_sink` are leading positions that are never
evicted. `budget` is what a KV head may hold, sinks, window and the scorer's own state included. True = visible.
Letters: B batch, T tokens, H query heads, H_kv KV heads, D head_dim, M candidates = T - n_sink - window.
"""
import argparse
import math
from dataclasses import dataclass

import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, and_masks, flex_attention, or_masks

NEVER = 2**31 - 1  # evict_at of a token that is never evicted; int32 so that the mask kernel loads 4 bytes a key
TILE = 128         # FlexAttention's default BLOCK_SIZE


@dataclass(frozen=True)
class CacheSpec:
    """How many entries a KV head keeps. `budget` is the total, in entries of one key and one value.

    budget = n_sink + window + n_select + state_entries (paper eq. 1 read so that the budget is the total; the released
    checkpoint does the same: 4 + 256 + 3772 + 64 = 4096). The scorer's own recurrent state is charged as state_entries.
    Raises ValueError for a combination that cannot hold a token.
    """
    n_sink: int
    window: int
    budget: int
    state_entries: int = 0

    def __post_init__(self):
        if self.window < 1:
            raise ValueError(f"window {self.window} is too small: it counts the query itself, so use at least 1")
        if self.n_sink < 0:
            raise ValueError(f"n_sink {self.n_sink} is negative: use 0 for no sinks")
        if self.n_select < 0:
            least = self.n_sink + self.window + self.state_entries
            raise ValueError(f"budget {self.budget} is below n_sink {self.n_sink} + window {self.window} + scorer "
                             f"state {self.state_entries} entries: raise --budget to {least} or more, or shrink the "
                             "window")

    @property
    def n_select(self):  # long-range entries chosen by score
        return self.budget - self.n_sink - self.window - self.state_entries

    @property
    def n_slots(self):  # N, the slots of the cache
        return self.n_sink + self.window + self.n_select


# ---------------------------------------------------------------------------------------------------------------------
# The readable form: small closures, mask_mod(b, h, q_idx, kv_idx) -> bool. `h` is the QUERY head under enable_gqa.

def causal_mask_mod(b, h, q_idx, kv_idx):
    return kv_idx <= q_idx


def generate_sink_mask_mod(n_sink):
    def sink_mask_mod(b, h, q_idx, kv_idx):
        return kv_idx < n_sink
    sink_mask_mod.__name__ = f"sink_{n_sink}"
    return sink_mask_mod


def generate_window_mask_mod(window):
    def window_mask_mod(b, h, q_idx, kv_idx):
        return q_idx - kv_idx < window
    window_mask_mod.__name__ = f"window_{window}"
    return window_mask_mod


def generate_topk_mask_mod(rank, cutoff, spec, group_size=1):
    """Candidates that have left the window and whose rank reaches the running threshold (paper algorithm 2).

    rank, cutoff: (B, H_kv, M) int64 from `running_topk`; entry i is candidate t = i + n_sink, eligible at t + window.
    """
    n_sink, window, last = spec.n_sink, spec.window, rank.shape[-1] - 1

    def topk_mask_mod(b, h, q_idx, kv_idx):
        # mods are evaluated on a grid rounded up to whole tiles, and where they are masked out: clamp every index
        eligible = (kv_idx >= n_sink) & (q_idx - kv_idx >= window)
        candidate = (kv_idx - n_sink).clamp(0, last)
        newest = (q_idx - n_sink - window).clamp(0, last)
        return eligible & (rank[b, h // group_size, candidate] >= cutoff[b, h // group_size, newest])
    topk_mask_mod.__name__ = f"top_{spec.n_select}"
    return topk_mask_mod


def generate_kvpop_mask_mod(rank, cutoff, spec, group_size=1):
    """Sinks, window and top-k together under causality: the mask that the cache of decode.py realises."""
    parts = [generate_sink_mask_mod(spec.n_sink), generate_window_mask_mod(spec.window)]
    if rank.shape[-1] > 0:  # a sequence no longer than sinks + window has no candidate yet
        parts.append(generate_topk_mask_mod(rank, cutoff, spec, group_size))
    return and_masks(causal_mask_mod, or_masks(*parts))


def generate_evict_at_mask_mod(evict_at, group_size=1):
    """The fast form of any irreversible policy: one load and two comparisons. evict_at: (B, H_kv, T) int32."""
    def evict_at_mask_mod(b, h, q_idx, kv_idx):
        return (kv_idx <= q_idx) & (q_idx < evict_at[b, h // group_size, kv_idx])
    return evict_at_mask_mod


# ---------------------------------------------------------------------------------------------------------------------
# From scores to evict_at

def effective_priority(scores, log_gamma=None, positions=None):
    """Scores with decay as one static fp32 priority: r_t(q) = r_t + (q - t) log_gamma orders like r_t - t log_gamma.

    scores (B, H_kv, T) or, for one token a row, (B, H_kv); log_gamma (H_kv,) <= 0 or None; positions broadcastable to
    scores (default 0..T-1). The mask and the decode both call this, so that they rank the same numbers.
    NaN is an error (the mask would keep it, an argmin would evict it); infinities are clamped to +-1e30, above
    which only the sinks' and the window's +inf remain.
    """
    # a float64 score keeps its precision (the equality tests run in fp64); all else is ranked in fp32
    scores = scores if scores.dtype == torch.float64 else scores.float()
    if scores.is_cuda:
        torch._assert_async(~scores.isnan().any())  # no device-to-host wait in the training loop
    elif scores.isnan().any():
        raise ValueError("a score is NaN: it cannot be ranked; look for a diverged scorer or a NaN key")
    if log_gamma is not None:
        if positions is None:
            positions = torch.arange(scores.shape[-1], device=scores.device)
        log_gamma = log_gamma.to(scores.dtype)
        log_gamma = log_gamma.view(1, -1, 1) if scores.dim() == 3 else log_gamma.view(1, -1)
        scores = scores - positions * log_gamma
    return scores.clamp(-1e30, 1e30)


def rank_candidates(priority, spec):
    """Unique ranks 0..M-1 of the candidates t in [n_sink, T - window), by (priority, position): newer wins ties.

    priority (B, H_kv, T) -> rank (B, H_kv, M) int64, M = max(0, T - window - n_sink).
    """
    T = priority.shape[-1]
    candidates = priority[..., spec.n_sink:max(spec.n_sink, T - spec.window)]  # (B, H_kv, M)
    order = candidates.argsort(dim=-1, stable=True)  # ascending; stable = the older of two equals comes first
    places = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, places)  # the inverse permutation


def fenwick_cutoffs(rank, n_select):
    """Running threshold with a Fenwick tree: cutoff[i] = the n_select-th largest of rank[:i + 1]. The specification.

    rank: (M,) unique ints 0..M-1. Returns (M,) int64: -1 while fewer than n_select candidates are in (keep all),
    M when n_select is 0 (keep none). O(M log M); plain Python, one row. Paper algorithm 2.
    """
    rank = rank.tolist()
    M = len(rank)
    if n_select == 0:
        return torch.full((M,), M, dtype=torch.int64)
    tree = [0] * (M + 1)  # tree[j] counts the inserted ranks in the j & -j places that end at j (1-based)
    top = 1 << M.bit_length()
    cutoffs = []
    for i, r in enumerate(rank):
        j = r + 1
        while j <= M:  # insert r
            tree[j] += 1
            j += j & -j
        if i + 1 < n_select:
            cutoffs.append(-1)
            continue
        need, place, step = i + 1 - n_select + 1, 0, top  # the k-th largest of i + 1 is the (i + 2 - k)-th smallest
        while step:  # binary lifting: the largest prefix that holds fewer than `need` ranks
            if place + step <= M and tree[place + step] < need:
                place += step
                need -= tree[place]
            step >>= 1
        cutoffs.append(place)  # 1-based place + 1, so as a rank: place
    return torch.tensor(cutoffs, dtype=torch.int64)


def parallel_cutoffs(rank, n_select, compiled=False):
    """The same thresholds for all prefixes at once, without a loop over T: a walk down a wavelet matrix.

    rank: (..., M) int64 unique in 0..M-1. At each bit of the rank, from the top, every prefix i is a range [lo, hi) of
    the sequence stably partitioned by the bits above. If the range holds at least k ones the k-th largest has this bit
    set: go to the ones; otherwise subtract them and go to the zeros. log2(M) levels of cumsum, gathers, a partition.
    compiled: through torch.compile (once a shape, tens of seconds), for training on a GPU, where a shape comes back in
    every step and launching the small kernels one by one would cost more than the attention they save.
    """
    if rank.shape[-1] == 0 or n_select == 0:
        return torch.full_like(rank, rank.shape[-1])
    walk = compiled_wavelet_walk if compiled else wavelet_walk
    return walk(rank, torch.full((), n_select, dtype=torch.int64, device=rank.device))  # data: a graph serves all k


def wavelet_walk(rank, n_select):
    M = rank.shape[-1]
    sequence = rank
    count = torch.arange(1, M + 1, device=rank.device).expand_as(rank)  # candidates in prefix i
    lo, hi = torch.zeros_like(rank), count
    k = torch.minimum(count, n_select)  # short prefixes: any valid k, overwritten at the end
    cutoff = torch.zeros_like(rank)
    for bit in reversed(range((M - 1).bit_length())):
        one = (sequence >> bit) & 1
        zeros = torch.nn.functional.pad((1 - one).cumsum(-1), (1, 0))  # (..., M + 1) zeros among the first j
        n_zero = zeros[..., -1:]
        z_lo, z_hi = zeros.gather(-1, lo), zeros.gather(-1, hi)
        n_one = (hi - lo) - (z_hi - z_lo)
        up = k <= n_one
        cutoff = cutoff + (up.long() << bit)
        k = torch.where(up, k, k - n_one)
        lo = torch.where(up, n_zero + lo - z_lo, z_lo)
        hi = torch.where(up, n_zero + hi - z_hi, z_hi)
        place = torch.arange(M, device=rank.device)
        goes_to = torch.where(one.bool(), n_zero + place - zeros[..., :-1], zeros[..., :-1])
        sequence = torch.empty_like(sequence).scatter_(-1, goes_to, sequence)
    return cutoff.masked_fill(count < n_select, -1)


compiled_wavelet_walk = torch.compile(wavelet_walk, dynamic=False, fullgraph=True)


def running_topk(priority, spec, compiled=False):
    """Ranks and running thresholds of the candidates: (rank, cutoff), each (B, H_kv, M) int64."""
    rank = rank_candidates(priority, spec)
    return rank, parallel_cutoffs(rank, spec.n_select, compiled)


def evict_at_from_cutoffs(rank, cutoff, spec, T):
    """First query that no longer sees each token: (B, H_kv, T) int32, NEVER for sinks, survivors and the last window.

    The threshold never falls, so a token once below it stays out: one searchsorted. Not before its own eligibility:
    a newcomer that does not make it is last seen at q = t + window - 1.
    """
    B, H_kv, M = rank.shape
    evict_at = torch.full((B, H_kv, T), NEVER, dtype=torch.int32, device=rank.device)
    if M == 0:
        return evict_at
    first = torch.searchsorted(cutoff.contiguous(), rank, right=True)  # first i with cutoff[i] > rank
    first = torch.maximum(first, torch.arange(M, device=rank.device))
    at = torch.where(first < M, first + spec.n_sink + spec.window, NEVER)
    evict_at[..., spec.n_sink:spec.n_sink + M] = at.int()
    return evict_at


def plan(priority, spec, compiled=False):
    """priority (B, H_kv, T), finite -> evict_at (B, H_kv, T) int32; see `effective_priority` for making it.
    compiled: see parallel_cutoffs."""
    rank, cutoff = running_topk(priority, spec, compiled)
    return evict_at_from_cutoffs(rank, cutoff, spec, priority.shape[-1])


def keep_everything(B, n_kv_head, T, device=None):
    """evict_at of the dense policy."""
    return torch.full((B, n_kv_head, T), NEVER, dtype=torch.int32, device=device)


# ---------------------------------------------------------------------------------------------------------------------
# Which tiles are empty, partial, full

def tile_table(tiles, n_head):
    """(B, H_kv, rows, columns) bool -> for each row how many columns are listed, and which, by query head; int32."""
    if tiles.shape[1] > 1:  # a BlockMask knows query heads; one KV head for all is broadcast
        tiles = tiles.repeat_interleave(n_head // tiles.shape[1], dim=1)
    tiles = tiles.int()
    return tiles.sum(-1, dtype=torch.int32), tiles.argsort(dim=-1, descending=True, stable=True).int()


def block_mask_from_tiles(visible, full, n_head, mask_mod, q_len, kv_len):
    """A BlockMask from two tile maps (B, H_kv, q tiles, kv tiles) bool: some pair may be visible / all pairs are.
    Both directions of the tables come straight from the maps; BlockMask.from_kv_blocks would take ten times as long."""
    partial = visible & ~full
    return BlockMask((q_len, kv_len), *tile_table(partial, n_head), *tile_table(full, n_head),
                     *tile_table(partial.mT, n_head), *tile_table(full.mT, n_head), BLOCK_SIZE=(TILE, TILE),
                     mask_mod=mask_mod)


def evict_at_block_mask(evict_at, n_head):
    """BlockMask of the fast mask in time order, exact, from each key tile's least and greatest evict_at.

    A key tile before the query tile is visible iff its last survivor outlives the tile's first query, and full iff its
    first victim outlives the last one. The diagonal is always partial (window >= 1). T must be a multiple of TILE.
    """
    B, H_kv, T = evict_at.shape
    n = T // TILE
    first_dies, last_dies = evict_at.view(B, H_kv, 1, n, TILE).aminmax(dim=-1)  # (B, H_kv, 1, n)
    tile = torch.arange(n, device=evict_at.device)
    i, j = tile.view(n, 1), tile.view(1, n)  # query tile, key tile
    visible = (j == i) | ((j < i) & (last_dies > i * TILE))
    full = (j < i) & (first_dies > i * TILE + TILE - 1)
    return block_mask_from_tiles(visible, full, n_head, generate_evict_at_mask_mod(evict_at, n_head // H_kv), T, T)


# ---------------------------------------------------------------------------------------------------------------------
# The attention call

# FlexAttention falls back to an unfused form that builds T x T scores when it is not compiled, and torch.compile stops
# compiling silently at its recompile limit. fullgraph makes that an error; the limit leaves room for many lengths.
torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
compiled_flex_attention = torch.compile(flex_attention, dynamic=False, fullgraph=True)


def dense_reference(q, k, v, mask_mod=None, score_mod=None, scale=None, chunk=128, causal=False):
    """Plain softmax attention from the same mods that FlexAttention takes: the specification, and the CPU path.

    q (B, H, T_q, D), k, v (B, H_kv, T_k, D) -> out (B, H, T_q, D) in v's dtype, lse (B, H, T_q) fp32 (fp64 for fp64
    inputs), natural log. Arithmetic in fp32 at least. Rows that see nothing give out 0 and lse -inf, with zero
    gradients. `chunk` queries at a time; causal=True says that mask_mod shows no key after its query, so that
    keys beyond a chunk are skipped (the numbers stay the same).
    """
    B, H, T_q, D = q.shape
    H_kv, T_k = k.shape[1], k.shape[2]
    scale = D**-0.5 if scale is None else scale
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    k, v_wide = k.to(dtype), v.to(dtype)
    b = torch.arange(B, device=q.device).view(B, 1, 1, 1)
    h = torch.arange(H, device=q.device).view(1, H, 1, 1)
    outs, lses = [], []
    keep_graph = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    with torch.autocast(q.device.type, enabled=False):
        for start in range(0, T_q, chunk):
            stop = min(start + chunk, T_q)
            seen = min(stop, T_k) if causal else T_k
            q_idx = torch.arange(start, stop, device=q.device).view(1, 1, -1, 1)
            kv_idx = torch.arange(seen, device=q.device).view(1, 1, 1, -1)
            rows = (q[:, :, start:stop].to(dtype) * scale).reshape(B, H_kv, -1, D)  # a group's heads share one product
            scores = (rows @ k[:, :, :seen].transpose(-1, -2)).view(B, H, stop - start, seen)
            if score_mod is not None:
                scores = score_mod(scores, b, h, q_idx, kv_idx)
                keep_graph = keep_graph or scores.requires_grad  # it may bring tensors of its own to be taught
            if mask_mod is not None:
                hidden = ~mask_mod(b, h, q_idx, kv_idx)
                scores = scores.masked_fill(hidden, -math.inf) if keep_graph else scores.masked_fill_(hidden, -math.inf)
            top = scores.detach().amax(-1, keepdim=True).clamp(min=-1e30)  # an empty row must not give inf - inf
            p = (scores - top).exp() if keep_graph else scores.sub_(top).exp_()  # in place: CPU time is memory traffic
            total = p.sum(-1, keepdim=True)
            empty = total == 0
            safe = total.masked_fill(empty, 1.0)
            out = (p.reshape(B, H_kv, -1, seen) @ v_wide[:, :, :seen]).view(B, H, stop - start, -1) / safe
            outs.append(out.to(v.dtype))
            lses.append((safe.log() + top).masked_fill(empty, -math.inf).squeeze(-1))
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def pad_to_tile(x, value, dim):
    """Pad dimension `dim` up to a multiple of TILE, so that FlexAttention meets few shapes and no ragged tile."""
    short = -x.shape[dim] % TILE
    if short == 0:
        return x
    pad = [0, 0] * (x.dim() - 1 - dim % x.dim()) + [0, short]
    return torch.nn.functional.pad(x, pad, value=value)


def fused_attention(q, k, v, block_mask, **options):
    """The compiled kernel on padded tensors: any lengths, head_dim below 16 too. block_mask is of the padded lengths
    and must hide the pad keys. -> out (B, H, T_q, D_v), lse (B, H, T_q) fp32. options: flex_attention's."""
    T, D, D_v = q.shape[2], q.shape[3], v.shape[3]
    q, k, v = (pad_to_tile(x, 0.0, 2) for x in (q, k, v))
    # 16 is the smallest head that the kernel takes; zeros change neither scores nor the rest of the output
    q, k, v = (torch.nn.functional.pad(x, (0, max(0, 16 - x.shape[3]))) for x in (q, k, v))
    out, aux = compiled_flex_attention(q, k, v, block_mask=block_mask, scale=D**-0.5, return_aux=AuxRequest(lse=True),
                                       **options)
    return out[:, :, :T, :D_v], aux.lse[:, :, :T]


def attention(q, k, v, evict_at, block_mask=None):
    """Attention in which key t is visible to queries t <= q < evict_at[t].

    q (B, H, T, D), k, v (B, H_kv, T, D) of one dtype, evict_at (B, H_kv, T) int32, or (B, 1, T) for all heads
    -> out (B, H, T, D), lse (B, H, T) fp32, natural log. Any T >= 1.
    block_mask: `evict_at_block_mask(evict_at, H)` when T is a multiple of TILE and several layers share it.
    """
    H = q.shape[1]
    if not q.is_cuda:  # FlexAttention has no backward on CPUs, and no lse from compiled inference
        mask_mod = generate_evict_at_mask_mod(evict_at, H // evict_at.shape[1])
        return dense_reference(q, k, v, mask_mod, causal=True)
    if block_mask is None:
        # A pad key has birth >= T, so real queries never see it; it never dies, so that no pad query has an empty row.
        block_mask = evict_at_block_mask(pad_to_tile(evict_at, NEVER, -1).contiguous(), H)
    return fused_attention(q, k, v, block_mask, enable_gqa=True)


# ---------------------------------------------------------------------------------------------------------------------
# Pictures

def draw(path, T=24, spec=CacheSpec(n_sink=2, window=4, budget=10), seed=0):
    """Each closure on T tokens, their union, the fast form, and the lifetimes as bars. Black is visible."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    scores = torch.randn(1, 1, T, generator=torch.Generator().manual_seed(seed))
    priority = effective_priority(scores)
    rank, cutoff = running_topk(priority, spec)
    evict_at = evict_at_from_cutoffs(rank, cutoff, spec, T)
    topk = and_masks(causal_mask_mod, generate_topk_mask_mod(rank, cutoff, spec))
    panels = [("causal", causal_mask_mod),
              (f"sinks (n_sink = {spec.n_sink})", and_masks(causal_mask_mod, generate_sink_mask_mod(spec.n_sink))),
              (f"window (= {spec.window}, query included)",
               and_masks(causal_mask_mod, generate_window_mask_mod(spec.window))),
              (f"top-k of the older ones (n_select = {spec.n_select})", topk),
              ("union of the three: what the cache holds", generate_kvpop_mask_mod(rank, cutoff, spec))]
    zero, q_idx, kv_idx = torch.zeros((), dtype=torch.long), torch.arange(T).view(T, 1), torch.arange(T).view(1, T)
    fig, axes = plt.subplots(2, 3, figsize=(12, 8), constrained_layout=True)
    for ax, (title, mod) in zip(axes.flat, panels):
        ax.imshow(mod(zero, zero, q_idx, kv_idx).expand(T, T).numpy(), cmap="Greys", vmin=0, vmax=1.3)
        ax.set(title=title, xlabel="key position t", ylabel="query position q")
    ax = axes.flat[-1]
    ends = evict_at[0, 0].clamp(max=T).numpy()
    ax.hlines(range(T), range(T), ends, color="black", linewidth=3)
    ax.plot(ends[ends < T], [t for t in range(T) if ends[t] < T], "x", color="black", markersize=6)
    ax.set(title="lifetimes: t <= q < evict_at[t]", xlabel="query position q",
           ylabel="key position t", xlim=(-0.5, T - 0.5), ylim=(T - 0.5, -0.5))
    fig.suptitle("A lifetime is a black column above, read downwards from the diagonal; x = evict_at", fontsize=11)
    fig.savefig(path, dpi=110)
    plt.close(fig)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draw sink, window and top-k masks, their union, the lifetimes.")
    parser.add_argument("--out", default="assets/masks.png", help="picture to write (default: %(default)s)")
    path = parser.parse_args().out
    try:
        draw(path)
    except (OSError, ValueError) as error:
        parser.exit(2, f"error: cannot write {path}: {error}\n")
    print(f"wrote {path}")
