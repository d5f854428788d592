"""Sparse attention with a fixed budget of keys, as FlexAttention masks.

What this file holds, bottom-up:
  CacheSpec             n_sink + window + n_select = n_slots entries per KV head, and how the budget pays for them
  generate_*_mask_mod   the readable form: sink, window and top-k closures, joined with or_masks under causality
  fenwick_cutoffs       the running top-k threshold with a Fenwick tree, the specification; parallel_cutoffs: for GPUs
  plan                  priorities -> evict_at, the first query that no longer sees a token: the mask's fast form
  evict_at_block_mask   which 128 x 128 tiles are empty, partial or full, in closed form: nothing of size T x T exists
  lifetime_order        keys sorted so that most tiles are empty, for a sparse mask that costs less than a dense one
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
NAN_SCORE = "a score is NaN: it cannot be ranked; look for a diverged scorer or a NaN key"


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
        raise ValueError(NAN_SCORE)
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

    rank: (..., M) int64 unique in 0..M-1. Digit by digit of the rank, from the top: every prefix i is a range [lo, hi)
    of the sequence stably partitioned by the digits above, in which the k-th largest is sought. Counts of the digits in
    the range tell its digit and how many are larger; its digit's part of the range is where the walk goes on.
    compiled: through torch.compile (once a padded shape, tens of seconds), for training on a GPU, where they come back
    in every step and launching the small kernels one by one would cost more than the attention they save.
    """
    if rank.shape[-1] == 0 or n_select == 0:
        return torch.full_like(rank, rank.shape[-1])
    flat, M = rank.flatten(0, -2), rank.shape[-1]
    n_select = torch.full((), n_select, dtype=torch.int64, device=rank.device)  # data: a graph serves all k
    if not compiled:
        return wavelet_walk(flat, n_select).view_as(rank)
    pads = torch.arange(M, bucket(M), device=rank.device).expand(len(flat), -1)  # a prefix does not know what follows
    return compiled_wavelet_walk(torch.cat((flat, pads), dim=-1), n_select)[:, :M].view_as(rank)


def wavelet_walk(rank, n_select, bits=3):
    """rank (Z, M). Levels follow each other and each is a scan, so few levels of 2^bits branches beat many of two."""
    M, base = rank.shape[-1], 1 << bits
    sequence = rank
    count = torch.arange(1, M + 1, device=rank.device).expand_as(rank)  # candidates in prefix i
    lo, hi = torch.zeros_like(rank), count
    k = torch.minimum(count, n_select)  # short prefixes: any valid k, overwritten at the end
    cutoff = torch.zeros_like(rank)
    digits = torch.arange(base + 1, device=rank.device).view(-1, 1)
    for level in reversed(range(max(1, -(-(M - 1).bit_length() // bits)))):
        digit = (sequence >> (level * bits)) & (base - 1)
        # among the first j, how many digits are at least d: (Z, base + 1, M + 1)
        above = torch.nn.functional.pad((digit.unsqueeze(1) >= digits).cumsum(-1, dtype=torch.int32), (1, 0))
        start = M - above[..., -1].long()  # (Z, base + 1), where the part of digit d begins
        in_lo, in_hi = (above.gather(-1, x.unsqueeze(1).expand(-1, base + 1, -1)) for x in (lo, hi))
        larger = in_hi - in_lo
        branch = (larger >= k.unsqueeze(1)).sum(1) - 1  # (Z, M), the digit of the k-th largest

        def pick(table, i):
            return table.gather(1, i.unsqueeze(1)).squeeze(1)
        k = k - pick(larger, branch + 1)
        cutoff = cutoff + (branch << (level * bits))
        lo = start.gather(1, branch) + pick(in_lo, branch) - pick(in_lo, branch + 1)
        hi = start.gather(1, branch) + pick(in_hi, branch) - pick(in_hi, branch + 1)
        if level:
            before = above[..., :-1]
            goes_to = start.gather(1, digit) + pick(before, digit) - pick(before, digit + 1)
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
# Which tiles are empty, partial, full. From here on heads that share a mask are one batch row: with H_mask masks a row
# (H_kv, or 1 when all heads are alike), q is (Z, H / H_mask, T, D) and a mask (Z, T), Z = B * H_mask. So a table is
# stored once a KV head, not once a query head.

def bucket(T):
    """The length that T is padded to, so that many lengths make few compiles: a power of two from TILE to 1024, above
    that a multiple of an eighth of the power of two below it. Pads are nearly free: a pad sees itself alone."""
    if T <= 1024:
        return max(TILE, 1 << (T - 1).bit_length())
    step = 1 << ((T - 1).bit_length() - 4)
    return -(-T // step) * step


def pad_to(x, length, value, dim):
    """Pad dimension `dim` with `value` up to `length`."""
    short = length - x.shape[dim]
    return x if short == 0 else torch.nn.functional.pad(x, [0, 0] * (x.dim() - 1 - dim % x.dim()) + [0, short],
                                                        value=value)


def padded_dies(evict_at):
    """evict_at (B, H_mask, T) -> (Z, bucket(T)) int32, at most T on real tokens. A pad key is born behind all real
    queries and dies after its own: no real query sees it, and no pad query has an empty row or many keys."""
    T = evict_at.shape[-1]
    dies = pad_to(evict_at.flatten(0, 1).clamp(max=T), bucket(T), T, -1)
    t = torch.arange(dies.shape[-1], dtype=torch.int32, device=dies.device)
    return torch.maximum(dies, t + 1)  # window >= 1: a token always sees itself


def tile_table(tiles, base=0):
    """(..., rows, columns) bool -> for each row how many columns are listed, and which; int32. base: of the columns.
    The listed ones come first by sorting: Inductor (torch 2.11) fails on the scatter that a running index would take.
    """
    tiles, n = tiles.contiguous(), tiles.shape[-1]  # the kernel takes tables to be contiguous
    column = torch.arange(n, dtype=torch.int32, device=tiles.device)
    return tiles.sum(-1, dtype=torch.int32), torch.where(tiles, column, column + n).sort(dim=-1).values % n + base


def block_mask_from_tiles(visible, full, mask_mod, q_len, kv_len, backward=True):
    """A BlockMask from two tile maps (Z, q tiles, kv tiles) bool: some pair may be visible / all pairs are. Both
    directions of the tables come straight from the maps; BlockMask.from_kv_blocks would take ten times as long."""
    visible, full = visible.unsqueeze(1), full.unsqueeze(1)  # (Z, 1, ...): all heads of a batch row
    partial = visible & ~full
    back = [*tile_table(partial.mT), *tile_table(full.mT)] if backward else [None] * 4
    return BlockMask((q_len, kv_len), *tile_table(partial), *tile_table(full), *back, BLOCK_SIZE=(TILE, TILE),
                     mask_mod=mask_mod)


def evict_at_block_mask(evict_at):
    """BlockMask of the fast mask in time order, exact, from each key tile's least and greatest evict_at.

    evict_at (B, H_mask, T) -> a mask over bucket(T) tokens. A key tile before the query tile is visible iff its last
    survivor outlives the tile's first query, and full iff its first victim outlives the last one. The diagonal is
    always partial (a pad tile apart, window >= 1).
    """
    dies = padded_dies(evict_at)
    Z, T = dies.shape
    n = T // TILE
    first_dies, last_dies = dies.view(Z, 1, n, TILE).aminmax(dim=-1)  # (Z, 1, n)
    tile = torch.arange(n, device=dies.device)
    i, j = tile.view(n, 1), tile.view(1, n)  # query tile, key tile
    visible = (j == i) | ((j < i) & (last_dies > i * TILE))
    full = (j < i) & (first_dies > i * TILE + TILE - 1)

    def mask_mod(b, h, q_idx, kv_idx):
        return (kv_idx <= q_idx) & (q_idx < dies[b, kv_idx])
    return block_mask_from_tiles(visible, full, mask_mod, T, T)


# ---------------------------------------------------------------------------------------------------------------------
# Keys in the order of their lifetimes. Kept tokens lie scattered in time, so that in time order no tile is empty and a
# sparse mask costs as much as a dense one. Attention does not care about the order of keys.

def lifetime_order(dies, n_slots, window, chunk, kv_tile=TILE):
    """Rows of keys for each chunk of queries, sorted so that tiles hold keys that are visible together.

    Queries are cut into chunks of `chunk` (a multiple of TILE). A chunk's rows are the keys that any of its queries
    sees: at most n_slots - 1 carried over from before, sorted by their end, then the chunk's own: those that die at the
    window's edge in time order, then those that live on, by their end. A key has a row in each chunk that it lives in,
    about 1 + n_slots / chunk rows in all, and in return hardly any tile is half used. Rows that are left over are born
    NEVER. Lifetimes are clipped to the chunk, so that each visible pair of the mask has exactly one row.

    dies (Z, T) int32 as from padded_dies, no query seeing more than n_slots keys (else the device asserts); static
    shapes, no wait for the device, nothing larger than a few times Z x T or Z x (T / TILE) x (rows / TILE).
    -> order (Z, n_chunk, rows) int64, birth and dies (Z, n_chunk * rows) int32, then the eight tables of a BlockMask.
    """
    Z, T = dies.shape
    device, n_chunk = dies.device, -(-T // chunk)
    rows = -(-(n_slots - 1 + chunk) // TILE) * TILE
    t = torch.arange(T, dtype=torch.int32, device=device)
    born_in = t // chunk
    crossed = (dies - 1) // chunk - born_in  # how many later chunks see the token
    ends = crossed.cumsum(-1)
    # all pairs (token, later chunk) by a search: repeat_interleave would have a length that depends on data
    pair = torch.arange((n_slots - 1) * (n_chunk - 1), device=device)
    token = torch.searchsorted(ends, pair.expand(Z, -1).contiguous(), right=True)  # (Z, pairs)
    exists = token < T
    token = token.clamp(max=T - 1)
    goes_to = born_in[token] + 1 + pair - (ends - crossed).gather(-1, token)
    # one integer a row: which mask and chunk, then the section of the chunk, then the place in the section
    token = torch.cat((t.long().expand(Z, T), token), dim=-1)  # (Z, T + pairs): own rows, carried rows
    goes_to = torch.cat((born_in.long().expand(Z, T), goes_to), dim=-1)
    start = goes_to * chunk
    end = torch.minimum(dies.gather(-1, token), start + chunk) - start  # 1 .. chunk
    age = dies.gather(-1, token) - token
    place = torch.where(token < start, end, torch.where(age <= window, chunk + 1 + token - start, 2 * chunk + end))
    span = 3 * chunk + 1
    segment = torch.arange(Z, device=device).view(Z, 1) * n_chunk + goes_to
    key = segment * span + place
    key[:, T:].masked_fill_(~exists, NEVER)
    if Z * n_chunk * span < NEVER:
        key = key.int()  # half the passes of a radix sort
    key, source = key.flatten().sort(stable=True)
    first = torch.searchsorted(key, torch.arange(Z * n_chunk + 1, dtype=key.dtype, device=device) * span)
    count = first.diff()
    torch._assert_async((count.amax() <= rows) & (ends[:, -1].amax() <= pair.shape[0]))  # more keys seen than n_slots
    row = torch.arange(rows, device=device)
    lives = (row < count.unsqueeze(-1)).view(Z, n_chunk, rows)
    place = (first[:-1, None] + row).clamp(max=key.shape[0] - 1)  # (Z * n_chunk, rows)
    order = token.flatten()[source[place]].view(Z, n_chunk, rows)
    start = chunk * torch.arange(n_chunk, device=device).view(1, n_chunk, 1)
    birth = torch.maximum(order, start).masked_fill(~lives, NEVER).int()
    dies = dies.gather(-1, order.flatten(1)).view_as(order)
    dies = torch.minimum(dies, start + chunk).masked_fill(~lives, 0).int()
    # a tile's keys live together but for some near its borders: closed form, 2 % above the exact tiles at most
    first_born, last_born = (x.unsqueeze(-2) for x in birth.view(Z, n_chunk, -1, kv_tile).aminmax(dim=-1))
    first_dies, last_dies = (x.unsqueeze(-2) for x in dies.view(Z, n_chunk, -1, kv_tile).aminmax(dim=-1))
    query = start.unsqueeze(-1) + TILE * torch.arange(chunk // TILE, device=device).view(1, 1, -1, 1)  # first of a tile
    visible = (first_born < query + TILE) & (last_dies > query)  # (Z, n_chunk, query tiles, row tiles)
    full = (last_born <= query) & (first_dies >= query + TILE)
    tables, number = [], torch.arange(n_chunk, dtype=torch.int32, device=device).view(1, n_chunk, 1, 1)
    for tiles in (visible & ~full, full, (visible & ~full).mT, full.mT):
        n_listed, listed = tile_table(tiles, number * tiles.shape[-1])
        n_rows = T // TILE if len(tables) < 4 else n_chunk * rows // kv_tile  # the last chunk may be a short one
        tables += [x.flatten(1, 2)[:, None, :n_rows].contiguous() for x in (n_listed, listed)]  # (Z, 1, n_rows, ...)
    return order, birth.flatten(1), dies.flatten(1), *tables


compiled_lifetime_order = torch.compile(lifetime_order, dynamic=False, fullgraph=True)


class GatherRows(torch.autograd.Function):
    """x (Z, h, T, D), order (Z, n_chunk, rows) -> (Z, h, n_chunk * rows, D). A token may have a row in several chunks:
    the backward adds them in fp32 chunk by chunk, one live row a token each time, so that runs agree bit for bit."""

    @staticmethod
    def forward(ctx, x, order):
        Z, h, T, D = x.shape
        head = T * torch.arange(Z * h, device=x.device).view(Z, h, 1, 1)
        index = head + order.unsqueeze(1)  # (Z, h, n_chunk, rows), rows of x.view(-1, D): the fast kind of gather
        ctx.save_for_backward(index)
        ctx.like = x.shape, x.dtype
        return x.reshape(-1, D).index_select(0, index.flatten()).view(Z, h, -1, D)

    @staticmethod
    def backward(ctx, grad):
        (index,), (shape, dtype) = ctx.saved_tensors, ctx.like
        total = grad.new_zeros(shape, dtype=torch.promote_types(dtype, torch.float32)).view(-1, shape[-1])
        for rows, part in zip(index.unbind(2), grad.chunk(index.shape[2], dim=2)):
            total.index_add_(0, rows.flatten(), part.to(total.dtype).flatten(0, 2))  # rows that nobody sees add zeros
        return total.view(shape).to(dtype), None


def key_order(evict_at, spec, chunk=None, kv_tile=TILE, compiled=False):
    """lifetime_order of evict_at (B, H_mask, T). chunk: queries that share a gathered set of keys, a multiple of TILE
    (default: about n_slots, for two rows a key). compiled: through torch.compile, once a shape."""
    dies = padded_dies(evict_at)
    chunk = min(dies.shape[1], -(-spec.n_slots // TILE) * TILE if chunk is None else chunk)
    if chunk % TILE:
        raise ValueError(f"chunk {chunk} is no multiple of {TILE}: a tile of queries would lie in two chunks")
    return (compiled_lifetime_order if compiled else lifetime_order)(dies, spec.n_slots, spec.window, chunk, kv_tile)


def lifetime_attention(q, k, v, evict_at, spec, chunk=None, kv_tile=TILE, compiled=False, kernel_options=None,
                       tables=None):
    """`attention` with keys in key_order, for a GPU; tables: that order, where it is known. kv_tile 64 lists fewer
    keys, forward only: the backward kernel of H100-class GPUs wants 128.

    No kernel option ROWS_GUARANTEED_SAFE: it would want every query to see a key in the first listed tile.
    """
    (B, H, T, D), (H_mask, H_kv) = q.shape, (evict_at.shape[1], k.shape[1])
    Z, padded = B * H_mask, bucket(T)
    order, birth, dies, *tables = tables or key_order(evict_at, spec, chunk, kv_tile, compiled)

    def mask_mod(b, h, q_idx, kv_idx):
        return (birth[b, kv_idx] <= q_idx) & (q_idx < dies[b, kv_idx])
    block_mask = BlockMask((padded, birth.shape[1]), *tables, BLOCK_SIZE=(TILE, kv_tile), mask_mod=mask_mod)
    if padded > T:
        order = order.clamp(max=T - 1)  # only pad queries see a pad key, whatever it is
    k, v = (GatherRows.apply(x.reshape(Z, H_kv // H_mask, T, -1), order) for x in (k, v))
    out, lse = fused_attention(q.reshape(Z, H // H_mask, T, D), k, v, block_mask, "attention", kernel_options,
                               enable_gqa=True)
    return out.reshape(B, H, T, -1), lse.reshape(B, H, T)


# ---------------------------------------------------------------------------------------------------------------------
# The attention call

def has_kernel(q):
    """FlexAttention has no backward on CPUs, and no lse from compiled inference: there dense_reference does the job."""
    return q.is_cuda


def fused_only(q, k, v, **options):
    """flex_attention, but never its unfused form, which builds T x T scores: what it does, silently, where
    torch.compile is switched off or has stopped compiling."""
    if not torch.compiler.is_compiling():
        raise RuntimeError("FlexAttention would run unfused and build all T x T scores: torch.compile is switched off, "
                           "perhaps by TORCH_COMPILE_DISABLE, or gave up; allow it, or use the CPU")
    return flex_attention(q, k, v, **options)


# FlexAttention's documented kernel options, as measured on an H200 (bench.py attention --tune). The transposed pass
# waits for the lse of each tile of queries: small tiles and few stages, so that many of them wait at once
HOPPER = dict(attention=dict(fwd_BLOCK_N=128),
              transposed=dict(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=2))


def best_options(call, q):
    """Kernel options of a call, "attention" or "transposed"; {}, FlexAttention's own, where none were measured: other
    cards and heads, and fp32, whose tiles would not fit into shared memory."""
    measured = (q.is_cuda and torch.cuda.get_device_capability(q.device)[0] == 9 and q.shape[-1] == 128
                and q.dtype in (torch.bfloat16, torch.float16))
    return HOPPER[call] if measured else {}


# fullgraph makes torch.compile's recompile limit an error; the limit leaves room for many lengths (see bucket)
torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
compiled_flex_attention = torch.compile(fused_only, dynamic=False, fullgraph=True)


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


def fused_attention(q, k, v, block_mask, call=None, kernel_options=None, **options):
    """The compiled kernel on tensors padded to the lengths of block_mask, which must hide pad keys; head_dim below 16
    too. -> out (Z, h, T_q, D_v), lse (Z, h, T_q) fp32. kernel_options: None = best_options of the call, {} =
    FlexAttention's own; options: the rest of flex_attention's. RuntimeError: too many shapes in one process."""
    if kernel_options is None and call and block_mask.BLOCK_SIZE[1] == TILE:  # narrower tiles are no 128 keys wide
        kernel_options = best_options(call, q)
    T, D, D_v = q.shape[2], q.shape[3], v.shape[3]
    q_len, kv_len = block_mask.seq_lengths
    q, k, v = pad_to(q, q_len, 0.0, 2), pad_to(k, kv_len, 0.0, 2), pad_to(v, kv_len, 0.0, 2)
    # 16 is the smallest head that the kernel takes; zeros change neither scores nor the rest of the output
    q, k, v = (pad_to(x, max(16, x.shape[3]), 0.0, 3) for x in (q, k, v))
    try:
        out, aux = compiled_flex_attention(q, k, v, block_mask=block_mask, scale=D**-0.5,
                                           return_aux=AuxRequest(lse=True), kernel_options=kernel_options, **options)
    except torch._dynamo.exc.FailOnRecompileLimitHit as error:
        raise RuntimeError(f"attention of shape {tuple(q.shape)} is one compile too many: over "
                           f"{torch._dynamo.config.recompile_limit} shapes or masks in one process; pad batches to "
                           "fewer lengths, or raise torch._dynamo.config.recompile_limit") from error
    return out[:, :, :T, :D_v], aux.lse[:, :, :T]


def kernel_tables(evict_at, spec=None, compiled=False):
    """What the kernel needs to know of evict_at: a key_order, or a BlockMask in time order."""
    if spec is not None and 2 * spec.n_slots <= evict_at.shape[-1]:  # below that few tiles are empty in any order
        return key_order(evict_at, spec, compiled=compiled)
    return evict_at_block_mask(evict_at)


def attention_tables(evict_at, spec=None, compiled=False):
    """kernel_tables for those who call `attention` twice; None where there is no kernel."""
    return kernel_tables(evict_at, spec, compiled) if has_kernel(evict_at) else None


def attention(q, k, v, evict_at, spec=None, tables=None, compiled=False, kernel_options=None):
    """Attention in which key t is visible to queries t <= q < evict_at[t].

    q (B, H, T, D), k, v (B, H_kv, T, D) of one dtype, evict_at (B, H_kv, T) int32, or (B, 1, T) for all heads
    -> out (B, H, T, D), lse (B, H, T) fp32, natural log. Any T >= 1.
    spec: what evict_at was planned for; a GPU then gathers keys into lifetime_order and skips the empty tiles. None:
    time order, right for any mask and best for masks that are dense, or local in time.
    tables: attention_tables(evict_at, spec), when several calls share them. compiled, kernel_options: see key_order and
    fused_attention.
    """
    (B, H, T, _), H_mask = q.shape, evict_at.shape[1]
    if not has_kernel(q):
        return dense_reference(q, k, v, generate_evict_at_mask_mod(evict_at, H // H_mask), causal=True)
    tables = kernel_tables(evict_at, spec, compiled) if tables is None else tables
    if not isinstance(tables, BlockMask):
        return lifetime_attention(q, k, v, evict_at, spec, kernel_options=kernel_options, tables=tables)
    q, k, v = (x.reshape(B * H_mask, -1, T, x.shape[3]) for x in (q, k, v))
    out, lse = fused_attention(q, k, v, tables, "attention", kernel_options, enable_gqa=True)
    return out.reshape(B, H, T, -1), lse.reshape(B, H, T)


# ---------------------------------------------------------------------------------------------------------------------
# Pictures

def pyplot():
    import matplotlib
    matplotlib.use("Agg")  # files only, also without a display
    from matplotlib import pyplot
    return pyplot


def draw(path, T=24, spec=CacheSpec(n_sink=2, window=4, budget=10), seed=0):
    """Each closure on T tokens, their union, the fast form, and the lifetimes as bars. Black is visible."""
    plt = pyplot()
    priority = effective_priority(torch.randn(1, 1, T, generator=torch.Generator().manual_seed(seed)))
    rank, cutoff = running_topk(priority, spec)
    ends = evict_at_from_cutoffs(rank, cutoff, spec, T)[0, 0].clamp(max=T).numpy()
    panels = [("causal", causal_mask_mod),
              (f"sinks (n_sink = {spec.n_sink})", and_masks(causal_mask_mod, generate_sink_mask_mod(spec.n_sink))),
              (f"window (= {spec.window}, query included)",
               and_masks(causal_mask_mod, generate_window_mask_mod(spec.window))),
              (f"top-k of the older ones (n_select = {spec.n_select})",
               and_masks(causal_mask_mod, generate_topk_mask_mod(rank, cutoff, spec))),
              ("union of the three: what the cache holds", generate_kvpop_mask_mod(rank, cutoff, spec))]
    zero, q_idx, kv_idx = torch.zeros((), dtype=torch.long), torch.arange(T).view(T, 1), torch.arange(T).view(1, T)
    fig, axes = plt.subplots(2, 3, figsize=(12, 8), constrained_layout=True)
    for ax, (title, mod) in zip(axes.flat, panels):
        ax.imshow(mod(zero, zero, q_idx, kv_idx).expand(T, T).numpy(), cmap="Greys", vmin=0, vmax=1.3)
        ax.set(title=title, xlabel="key position t", ylabel="query position q")
    ax = axes.flat[-1]
    ax.hlines(range(T), range(T), ends, color="black", linewidth=3)
    ax.plot(ends[ends < T], [t for t in range(T) if ends[t] < T], "x", color="black", markersize=6)
    ax.set(title="lifetimes: t <= q < evict_at[t]", xlabel="query position q", ylabel="key position t",
           xlim=(-0.5, T - 0.5), ylim=(T - 0.5, -0.5))
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
