"""bench.py decode: time, bytes and memory of a decode step and of a prefill, on random weights of a model's shape.

What this file holds:
  SHAPES, random_model         the shapes of Qwen3-4B, Qwen3-8B and of the shipped base, without anybody's weights
  weight_bytes, cost_card      what a step must move, before anything is timed
  DenseCache                   the opponent: a plain static cache, one write and one SDPA call without a mask a layer
  RaggedCache                  DMS as it would be served: heads of unequal lengths in one flat buffer a layer
  fill_as_if                   a slot cache in the state that it has after T tokens, without decoding T tokens
  decode                       the benchmark; `register` gives it to bench.py
There is no second decoder: every cache is a decode.KVCache with layers of its own, and decode.make_step steps it, as
one CUDA graph on a GPU. For the slot policies that is the very step that `generate` replays.

Letters: B batch, T tokens, H query heads, H_kv KV heads, G = H / H_kv, D head_dim, N slots. T is the number of
positions that the timed step sees: it is the step of position T - 1.
"""
import argparse
import collections
import functools
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.nn.attention.flex_attention import BlockMask

import flex_masks
from data.prompts import SHIPPED
from data.results import RESULTS, earlier_rows, print_table, write_results
from data.speed import Timer, add_options, card, guarded, median_ms, peak_bytes, release
from decode import KVCache, attend_all, block_in_chunks, dense_spec, fuse_scorers, make_step, prefill, step
from flex_masks import TILE, CacheSpec, pyplot
from model import ModelConfig, Transformer, causal_attend, expected_shapes, read_json
from scorer import make_scorers, state_entries

QWEN3 = dict(vocab_size=151936, n_layer=36, n_head=32, n_kv_head=8, head_dim=128, max_seq_len=131072, rope_base=1e6)
SHAPES = {"qwen3-4b": dict(QWEN3, n_embd=2560, intermediate_size=9728, tie_embeddings=True),
          "qwen3-8b": dict(QWEN3, n_embd=4096, intermediate_size=12288, tie_embeddings=False),
          "traces": None}  # of the shipped base
POLICIES = ("dense", "dense-slots", "streaming", "kvpop-mlp", "kvpop", "dms-ragged")
CONSTANT = ("streaming", "kvpop-mlp", "kvpop")  # a cache of N slots, whatever the length
DENSE_SHARE = 0.1  # of the heads of dms-ragged, at most

# ------------------------------------------------------------------------------------------ Shapes, weights, and bytes

def shape_of(name, reduced=False):
    """ModelConfig. reduced: two layers, narrow and with few tokens, for a CPU."""
    config = (ModelConfig.from_dict(read_json(SHIPPED / "base" / "config.json")) if SHAPES[name] is None else
              ModelConfig(**SHAPES[name]))
    if reduced:
        config.vocab_size, config.n_layer, config.n_embd, config.intermediate_size = 512, 2, 64, 128
        config.n_head, config.n_kv_head, config.head_dim = 4, 2, 32
    return config


def random_model(config, device, dtype, seed=0):
    """A Transformer with normal weights, made on the device; time and bytes do not depend on what they are."""
    with torch.device("meta"):
        model = Transformer(config).to(dtype)
    model.to_empty(device=device)
    random_values(model.parameters(), torch.Generator(device).manual_seed(seed))
    return model.eval()


@torch.no_grad()
def random_values(parameters, generator):
    """Normal weights in place, norms one. Of a sharded one each process fills what it has."""
    for parameter in parameters:
        mine = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        mine.normal_(std=0.02, generator=generator) if mine.dim() == 2 else mine.fill_(1.0)


def weight_bytes(config, itemsize):
    """Bytes of weights that a step reads: all of them, but of an embedding that is no head only B rows: 0 here."""
    return sum(math.prod(shape) * itemsize for name, shape in expected_shapes(config).items()
               if config.tie_embeddings or name != "model.embed_tokens.weight")


def token_bytes(config, itemsize):
    """Bytes of keys and values of one token, all layers."""
    return config.n_layer * 2 * config.n_kv_head * config.head_dim * itemsize


def state_bytes(policy, config):
    """Bytes of a scorer's state a row, all layers: kvpop's C (D, D/2), n (D) and m (1) in fp32."""
    D = config.head_dim
    return config.n_layer * config.n_kv_head * (D * D // 2 + D + 1) * 4 if policy == "kvpop" else 0


def spec_of(policy, config, budget, n_sink, window):
    return CacheSpec(n_sink, window, budget, state_entries(policy, config.head_dim, config.group_size, window))


def copy_bandwidth(device, n_bytes=None):
    """Bytes a second of a large copy, read and written ones together."""
    source = torch.zeros(n_bytes or (2**31 if device == "cuda" else 2**26), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / (1e-3 * median_ms(lambda: target.copy_(source), device))


def cost_card(config, itemsize, budgets, lengths, batches, bandwidth, n_sink, window):
    """What a step must move and what that takes at the bandwidth of a copy, before anything is timed. Bytes of weights
    a step, of keys and values a token, of kvpop's state a row; floor_ms: by policy (at each T; at each budget), a list
    over batches. Scorer weights, priority and position are left out: they are what the method may be blamed for."""
    weights, token, state = weight_bytes(config, itemsize), token_bytes(config, itemsize), state_bytes("kvpop", config)

    def floor(a_row):
        return [1e3 * (weights + B * a_row) / bandwidth for B in batches]
    floors = {f"dense, T {T}": floor(T * token) for T in lengths}
    for budget in budgets:
        floors[f"streaming, budget {budget}"] = floor(budget * token)
        slots = spec_of("kvpop", config, budget, n_sink, window).n_slots
        floors[f"kvpop, budget {budget}"] = floor(slots * token + 2 * state)  # the state is read and written
    return dict(weight_bytes=weights, kv_bytes_per_token=token, kvpop_state_bytes=state, copy_bandwidth=bandwidth,
                batches=batches, floor_ms=floors)

# ---------------------------------------------------------------------------------------------------------- The caches

class DenseLayer:
    """k_cache, v_cache (B, H_kv, T, D), slot = position."""

    def __init__(self, config, T, batch, device, dtype):
        shape = (batch, config.n_kv_head, T, config.head_dim)
        self.k_cache, self.v_cache = (torch.empty(shape, device=device, dtype=dtype) for _ in "kv")
        self.b = torch.arange(batch, device=device)[:, None]  # (B, 1)
        self.h = torch.arange(config.n_kv_head, device=device)[None]  # (1, H_kv)

    def step(self, q, k, v, input_pos, full=True, filling=None):
        """q (B, H, 1, D), k, v (B, H_kv, 1, D) -> (B, H, 1, D)."""
        for cache, new in ((self.k_cache, k), (self.v_cache, v)):
            cache.index_put_((self.b, self.h, input_pos[:, None]), new.squeeze(2))
        grouped = q.reshape(*k.shape[:2], -1, k.shape[-1])  # (B, H_kv, G, D): a group's heads as its queries
        return attend_all(grouped, self.k_cache, self.v_cache).reshape(q.shape)


class DenseCache(KVCache):
    """A plain static cache of T slots, no priorities. What is attended to is all T slots, so the step of position T - 1
    is exact and needs no mask, which leaves SDPA its fastest kernel; earlier steps are not meant."""
    full = True  # decode.make_step: there is one step only

    def __init__(self, config, T, batch, device, dtype):
        self.seen, self.compiled = 0, False
        self.input_pos = torch.zeros(batch, dtype=torch.int64, device=device)
        self.layers = [DenseLayer(config, T, batch, device, dtype) for _ in range(config.n_layer)]

    def attend_prompt(self, layer, q, k, v):
        for cache, new in ((self.layers[layer].k_cache, k), (self.layers[layer].v_cache, v)):
            cache[:, :, :k.shape[2]] = new
        return causal_attend(layer, q, k, v)

    @torch.no_grad()
    def prefill(self, model, idx):
        """Whole prompts of equal length: idx (B, T') -> logits (B, V) of the last token."""
        self.input_pos.fill_(idx.shape[1])
        return model.unembed(model(idx, self.attend_prompt, run=block_in_chunks)[:, -1])

    def fill_as_if(self, T, generator):
        for layer in self.layers:
            layer.k_cache.normal_(generator=generator)
            layer.v_cache.normal_(generator=generator)

    def nbytes(self):
        return dict(cache=sum(x.k_cache.nbytes + x.v_cache.nbytes for x in self.layers), bookkeeping=0, state=0)


def ragged_lengths(n_layer, n_kv_head, T, budget, near, seed=0):
    """Live entries of each head, (n_layer, H_kv) int64, with mean `budget` to the entry: what a global target of DMS
    ends in, winners that keep all T tokens and the rest near the window.

    Dense: DENSE_SHARE of the heads, or as many as the mean allows where that is fewer, drawn without replacement. The
    others: `near` (sinks and window) plus their share of what is left, shared in proportion to exponential numbers."""
    n = n_layer * n_kv_head
    if T <= budget:
        return torch.full((n_layer, n_kv_head), T)
    generator = torch.Generator().manual_seed(seed)
    spare = n * (budget - near)  # entries beyond `near`, all heads together
    n_dense = max(0, min(round(DENSE_SHARE * n), spare // (T - near)))
    extra = torch.zeros(n, dtype=torch.float64)
    order = torch.randperm(n, generator=generator)
    extra[order[:n_dense]], rest = T - near, order[n_dense:]
    weight = torch.empty(len(rest), dtype=torch.float64).exponential_(generator=generator).clamp(min=1e-3)
    left, low, high = spare - n_dense * (T - near), 0.0, 1e3 * (T - near)
    for _ in range(100):  # the scale at which min(T - near, scale * weight) adds up to what is left
        scale = (low + high) / 2
        fits = (scale * weight).clamp(max=T - near).sum() <= left
        low, high = (scale, high) if fits else (low, scale)
    exact = (low * weight).clamp(max=T - near)
    share = exact.floor()
    cut = (exact - share).argsort(descending=True, stable=True)  # what rounding took goes back, largest cuts first
    share[cut[:int(left - share.sum())]] += 1
    extra[rest] = share
    return (near + extra.long()).view(n_layer, n_kv_head)


class RaggedLayer:
    """The part of the flat buffers that belongs to one layer.

    k, v    (B, view, D)  views that begin with the layer's first entry and may reach into the next layers' parts
    spans   a slice of k and v for each KV head
    newest  (1, H_kv) int64, its last entry
    mask    the BlockMask that lists the layer's own tiles; None: an SDPA call for each head"""

    def __init__(self, k, v, lengths, n_head, flex):
        H_kv, total, device = len(lengths), int(lengths.sum()), k.device
        ends = lengths.cumsum(0)
        self.k, self.v, self.group, self.mask = k, v, n_head // H_kv, None
        self.spans = [slice(end - n, end) for end, n in zip(ends.tolist(), lengths.tolist())]
        self.newest, self.b = (ends - 1)[None].to(device), torch.arange(len(k), device=device)[:, None]
        if flex:
            owner = torch.full((k.shape[1],), -1, dtype=torch.int32)  # KV head of each entry; -1: of another layer
            owner[:total] = torch.arange(H_kv, dtype=torch.int32).repeat_interleave(lengths)
            self.mask = self.block_mask(owner.to(device), n_head, total)

    def block_mask(self, owner, n_head, total):
        group, n_tiles, device = self.group, -(-len(owner) // TILE), owner.device
        listed = torch.arange(n_tiles, dtype=torch.int32, device=device).view(1, 1, 1, -1)
        count = torch.full((1, 1, 1), -(-total // TILE), dtype=torch.int32, device=device)

        def mask_mod(b, h, q_idx, kv_idx):
            return owner[kv_idx] == q_idx // group
        return BlockMask((n_head, len(owner)), count, listed, None, None, None, None, None, None,
                         BLOCK_SIZE=(TILE, TILE), mask_mod=mask_mod)

    def step(self, q, k, v, input_pos, full=True, filling=None):
        """q (B, H, 1, D), k, v (B, H_kv, 1, D) -> (B, H, 1, D)."""
        for flat, new in ((self.k, k), (self.v, v)):
            flat.index_put_((self.b, self.newest), new.squeeze(2))
        if self.mask is not None:
            heads = q.transpose(1, 2)  # (B, 1, H, D): the query heads as the queries of one head
            if flex_masks.has_kernel(q):
                attend = functools.partial(flex_masks.compiled_flex_attention, block_mask=self.mask)
            else:
                attend = lambda *qkv: flex_masks.dense_reference(*qkv, self.mask.mask_mod)[0]  # noqa: E731
            return attend(heads, self.k[:, None], self.v[:, None]).transpose(1, 2)
        parts = q.reshape(len(q), -1, self.group, q.shape[-1]).split(1, dim=1)  # (B, 1, G, D) a KV head
        outs = [F.scaled_dot_product_attention(part, self.k[:, None, span], self.v[:, None, span])
                for part, span in zip(parts, self.spans)]
        return torch.cat(outs, dim=1).reshape(q.shape)


class RaggedCache(KVCache):
    """Heads of unequal lengths (n_layer, H_kv), the same in each row. The newest token goes to a head's last entry, as
    where the oldest of its window is overwritten. The gate of DMS, a linear map, is left out: in its favour.

    flat_k, flat_v  (B, total, D)  head by head, layer by layer, without gaps
    how: "flex" (one FlexAttention call a layer: all H query heads against the layer's part, each seeing its own KV
    head's entries) or "heads" (an SDPA call for each KV head, on a view of exactly its entries)."""
    full = True

    def __init__(self, config, lengths, batch, device, dtype, how):
        self.seen, self.compiled = 0, False
        self.input_pos = torch.zeros(batch, dtype=torch.int64, device=device)
        totals = lengths.sum(1)
        begins, self.total = (totals.cumsum(0) - totals).tolist(), int(totals.sum())
        # flex: powers of two, so few compiles; the tiles beyond a layer's own are not listed
        views = [max(TILE, 1 << (n - 1).bit_length()) if how == "flex" else n for n in totals.tolist()]
        room = max(begin + n for begin, n in zip(begins, views))
        self.flat_k, self.flat_v = (torch.zeros(batch, room, config.head_dim, device=device, dtype=dtype) for _ in "kv")
        self.layers = [RaggedLayer(self.flat_k[:, begin:begin + n], self.flat_v[:, begin:begin + n], mine,
                                   config.n_head, how == "flex") for begin, n, mine in zip(begins, views, lengths)]

    def fill_as_if(self, T, generator):
        for flat in (self.flat_k, self.flat_v):
            flat.normal_(generator=generator)

    def nbytes(self):
        """Of keys and values that are live; the tail that rounds the last view up is none of the method's."""
        row = self.total * self.flat_k.shape[-1] * self.flat_k.element_size()
        return dict(cache=2 * len(self.flat_k) * row, bookkeeping=0, state=0)


def at_position(cache, q):
    """The next step of all rows is that of position q. What is due in it stays that of another position: it costs the
    same, and to find it anew before every timed step would leave the device waiting for launches."""
    cache.input_pos.fill_(q)
    cache.seen = q


def fill_as_if(cache, T, generator):
    """Bring a slot cache into a state that it can have after T - 1 tokens, in place; keys, values and priorities are
    random. The newest `window` tokens and the sinks lie where they would if nothing had moved, between them evenly
    spaced older ones; below N tokens all of them. No state of a scorer is made up: what it holds costs the same."""
    spec, seen = cache.spec, T - 1
    held = min(seen, spec.n_slots)
    recent = min(held, spec.window)
    first = min(held - recent, spec.n_sink)
    device = cache.input_pos.device
    middle = held - recent - first
    old = first + (torch.arange(middle, device=device) * (seen - recent - first)) // max(1, middle)
    position = torch.cat((torch.arange(first, device=device), old, torch.arange(seen - recent, seen, device=device)))
    for layer in cache.layers:
        layer.reset()
        for tensor in (layer.k_cache, layer.v_cache):
            tensor.normal_(generator=generator)
        layer.position[..., :held] = position.int()
        layer.priority[..., :held].normal_(generator=generator)
        layer.priority[..., :first] = math.inf
        layer.priority[..., held - recent:held] = math.inf
        newest = torch.arange(seen - recent, seen, device=device)
        layer.ring[..., newest % spec.window] = torch.arange(held - recent, held, device=device).int()
    at_position(cache, seen)
    cache.prepare()

# ----------------------------------------------------------------------------------------------------------- Measuring

def make_cache(policy, config, budget, T, batch, args, device, dtype, how=None, scorers=None):
    """-> a cache for the step of position T - 1, empty. For the constant policies any T will do."""
    if policy == "dense":
        return DenseCache(config, T, batch, device, dtype)
    if policy == "dense-slots":
        return KVCache(config, dense_spec(T), batch, None, device, dtype)
    if policy == "dms-ragged":
        lengths = ragged_lengths(config.n_layer, config.n_kv_head, T, budget, args.n_sink + args.window)
        return RaggedCache(config, lengths, batch, device, dtype, how)
    return KVCache(config, spec_of(policy, config, budget, args.n_sink, args.window), batch, scorers, device, dtype)


def fill(cache, T, device):
    generator = torch.Generator(device).manual_seed(T)
    return cache.fill_as_if(T, generator) if hasattr(cache, "fill_as_if") else fill_as_if(cache, T, generator)


def step_bytes(config, itemsize, cache, scorers=None):
    """Bytes that a step must read or write: weights, all keys and values, priority and position, twice the state."""
    size = cache.nbytes()
    own = sum(p.nbytes for p in scorers.parameters()) if scorers is not None else 0
    return weight_bytes(config, itemsize) + own + size["cache"] + size["bookkeeping"] + 2 * size["state"]


def kernels_of(model, ids, cache):
    """One step, launched one by one -> kernels and copies on the GPU divided by the layers, and the slowest dozen of
    them and "all", name -> ms of the step; None, None on a CPU."""
    if not ids.is_cuda:
        return None, None
    step(model, ids, cache)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step(model, ids, cache)
        torch.cuda.synchronize()
    ms = collections.Counter()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    for e in events:
        ms[e.name[:80]] += 1e-3 * e.device_time_total
    listed = {**dict(ms.most_common(12)), "all": sum(ms.values())}
    return len(events) / model.config.n_layer or None, listed


# dms-ragged's attention. --compile leaves the first: with "heads" each layer, of other lengths, needs a compile
VARIANTS = ("flex", "heads")


def new_row(policy, args, batch, budget, T, device):
    row = dict(policy=policy, shape=args.shape, batch=batch, budget=budget, T=T)
    row |= dict.fromkeys(("ms_per_token", "tokens_per_s", "bytes_per_step", "copy_bandwidth_share", "peak_gib",
                          "cache_gib", "prefill_ms", "prefill_peak_gib", "kernels_per_layer", "kernels_ms", "kernel",
                          "others_ms"))
    return row | dict(graph=device == "cuda" and args.graph, compiled=args.compile, reduced=device != "cuda", oom=[])


def step_row(row, model, cache, advance, bandwidth, scorers, device):
    """Time the step of position T - 1 on a filled cache, into the row."""
    config, itemsize = model.config, model.model.embed_tokens.weight.element_size()
    ids = torch.ones_like(cache.input_pos)
    fill(cache, row["T"], device)
    ms = median_ms(lambda: advance(ids), device, repeats=50, before=lambda: at_position(cache, row["T"] - 1))
    moved = step_bytes(config, itemsize, cache, scorers)
    row.update(ms_per_token=ms, tokens_per_s=1e3 * row["batch"] / ms, bytes_per_step=moved,
               copy_bandwidth_share=moved / (1e-3 * ms) / bandwidth, cache_gib=sum(cache.nbytes().values()) / 2**30)


def prefill_row(row, model, cache, device):
    """A prompt of T - 1 tokens a row into the cache, into the row: time, and peak memory with weights and cache."""
    T, vocab_size = row["T"] - 1, model.config.vocab_size
    idx = torch.randint(vocab_size, (row["batch"], T), generator=torch.Generator().manual_seed(T)).to(device)
    lengths = torch.full((row["batch"],), T, device=device)

    def run():
        return cache.prefill(model, idx) if isinstance(cache, DenseCache) else prefill(model, idx, lengths, cache)

    def timed():  # once to compile and for the peak, once for the time: at 131,072 tokens each takes many seconds
        peak, timer = peak_bytes(run, device), Timer(device)
        with timer:
            run()
        row["prefill_peak_gib"] = peak and peak / 2**30
        return timer.ms()[0]
    guarded(row, "prefill_ms", timed, device)


def real_run(policy, rows, cache, advance, T, device):
    """T tokens decoded one after the other from an empty cache, against the time that the rows add up to."""
    cache.reset()
    ids, timer = torch.ones_like(cache.input_pos), Timer(device)
    with timer:
        for _ in range(T):
            ids = advance(ids).argmax(-1)
    seconds = 1e-3 * timer.ms()[0]
    points = [(r["T"], r["ms_per_token"]) for r in rows if r["T"] < T and r["ms_per_token"]]
    after = next((r["ms_per_token"] for r in rows if r["T"] >= T and r["ms_per_token"]), points[-1:] and points[-1][1])
    integrated = latency([*points, (T, after)])[-1]
    return dict(policy=policy, batch=rows[0]["batch"], budget=rows[0]["budget"], T=T, seconds=seconds,
                integrated_seconds=integrated, ratio=seconds / integrated)


def measure(policy, model, batch, budget, lengths, args, bandwidth, device, dtype, checked=None):
    """-> rows of one policy, batch and budget, one a length. Constant policies keep cache and graph for all lengths.
    checked: a dict to be filled in by real_run, for kvpop's smallest batch."""
    config, scorers, kept, rows = model.config, None, None, []
    if policy in CONSTANT:
        scorers = make_scorers(policy, n_layer=config.n_layer, n_kv_head=config.n_kv_head, head_dim=config.head_dim,
                               window=args.window).to(device)
        scorers = fuse_scorers(scorers, batch, dtype)
    for T in lengths:
        row, times = new_row(policy, args, batch, budget, T, device), {}
        if args.compile and kept is None:
            torch._dynamo.reset()  # or the many shapes of a run reach its limit of recompiles
        variants = VARIANTS[:1 if args.compile else None] if policy == "dms-ragged" else (policy,)
        for name in variants:
            trial = dict(row, oom=[])

            def run():
                nonlocal kept
                if device == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                cache, advance = kept or (make_cache(policy, config, budget, T, batch, args, device, dtype, name,
                                                     scorers), None)
                if advance is None:
                    fill(cache, T, device)
                    at_position(cache, max(0, T - 3))  # capturing takes two steps
                    cache.compiled = args.compile
                    advance = make_step(model, cache, args.graph)
                step_row(trial, model, cache, advance, bandwidth, scorers, device)
                if device == "cuda":
                    trial["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
                fill(cache, T, device)
                at_position(cache, T - 2)  # two steps
                ids = torch.ones_like(cache.input_pos)
                trial["kernels_per_layer"], trial["kernels_ms"] = kernels_of(model, ids, cache)
                kept = (cache, advance) if policy in CONSTANT else None
                if batch == min(args.batches) and 1 < T <= args.prefill // batch + 1 and policy in (*CONSTANT, "dense"):
                    prefill_row(trial, model, cache, device)
                return True
            try:
                guarded(trial, "step", run, device)
            except Exception as error:  # of SDPA, Inductor or Triton: a variant that this card does not run
                if len(variants) == 1:
                    raise
                times[name] = f"{(str(error).strip() or type(error).__name__).splitlines()[0][:100]}"
                release(device)
                continue
            trial.pop("step")
            times[name] = trial["ms_per_token"]
            better = trial["ms_per_token"] and trial["ms_per_token"] < (row["ms_per_token"] or math.inf)
            prefills = {key: row[key] or trial[key] for key in ("prefill_ms", "prefill_peak_gib")}
            row = {**(trial if better else row), **prefills, "kernel": name if better else row["kernel"],
                   "oom": sorted({*row["oom"], *trial["oom"]})}
            if policy not in CONSTANT:
                release(device)
        row["others_ms"] = {name: ms for name, ms in times.items() if name != row["kernel"]}
        rows.append(row)
    if policy == "kvpop" and args.check and batch == min(args.batches) and kept and checked is not None:
        checked.update(real_run(policy, rows, *kept, args.check, device))
    return rows

# ------------------------------------------------------------------------------------------------- Figure and benchmark

def latency(points):
    """points: (T, ms a token) ascending -> seconds to generate each T tokens: trapezoids between the measured
    positions, before the first one its own time."""
    total, seconds, (before, rate) = 0.0, [], (0, points[0][1])
    for T, ms in points:
        total += (T - before) * (rate + ms) / 2e3
        seconds.append(total)
        before, rate = T, ms
    return seconds


def draw_decode(path, rows):
    """Time to the last token and memory at the peak against the generated length, two axes a batch of several lengths.
    A line ends where memory did not suffice."""
    plt = pyplot()
    lengths = {batch: {r["T"] for r in rows if r["batch"] == batch and r["ms_per_token"]}
               for batch in sorted({r["batch"] for r in rows})}
    batches = [batch for batch in lengths if len(lengths[batch]) > 1] or list(lengths)[:1]
    fig, axes = plt.subplots(2, len(batches), figsize=(5.2 * len(batches), 8.5), squeeze=False, layout="constrained")
    lines = list(dict.fromkeys((r["policy"], r["budget"]) for r in rows))
    for column, batch in enumerate(batches):
        for i, (policy, budget) in enumerate(lines):
            mine = sorted((r for r in rows if (r["policy"], r["budget"], r["batch"]) == (policy, budget, batch)
                           and r["ms_per_token"]), key=lambda r: r["T"])
            if not mine:
                continue
            T = [r["T"] for r in mine]
            memory = [r["peak_gib"] if r["peak_gib"] is not None else r["cache_gib"] for r in mine]
            style = dict(marker="os^vDPX*"[i % 8], linestyle=("-", "--", "-.", ":")[i % 4], markersize=5,
                         label=policy + (f", budget {budget}" if budget else ""))
            axes[0, column].plot(T, latency([(r["T"], r["ms_per_token"]) for r in mine]), **style)
            axes[1, column].plot(T, memory, **style)
        axes[0, column].set_yscale("log")
        axes[1, column].set_ylim(bottom=0)
        for ax, what in zip(axes[:, column], ("seconds to the last token", "GiB at the peak, weights included")):
            ax.set(xscale="log", xlabel="generated tokens", ylabel=what, title=f"batch {batch}")
            ticks = sorted(T for T in lengths[batch] if T & (T - 1) == 0) or sorted(lengths[batch])
            ax.set_xticks(ticks, [f"{t // 1024}k" if t % 1024 == 0 else str(t) for t in ticks])
            ax.xaxis.minorticks_off()
            ax.grid(color="0.9")
    if rows[0]["reduced"]:
        for ax in axes[1]:
            ax.set_ylabel("GiB of the cache")
    axes[0, 0].legend(fontsize=8)
    fig.suptitle(f"Decode, random weights of shape {rows[0]['shape']}"
                 + (": reduced, on a CPU, compares nothing" if rows[0]["reduced"] else ""), fontsize=10)
    fig.savefig(path, dpi=110)
    plt.close(fig)


def decode(args):
    """A decode step on random weights of a model's shape, at --lengths positions, under each policy: dense (a plain
    static cache of T slots, attention to all of them by decode.attend_all), dense-slots (decode.py's own
    dense policy), streaming, kvpop-mlp and kvpop (decode.py, N slots), dms-ragged (heads of unequal length, mean =
    budget: 10 % of them keep all T tokens, or as many as that mean allows, the rest lie near the window; the faster of
    FlexAttention on one flat buffer a layer and SDPA on each head's view). First a cost card.

    No T tokens are decoded: the cache is filled with random keys and values as if they had been, and the step of
    position T - 1 is replayed. On a GPU it is one CUDA graph for all policies.

    Row: policy, shape, batch, budget (entries a KV head, scorer state included; None = dense), T, ms_per_token (median
    of up to 50 steps between CUDA events), tokens_per_s (of the whole batch), bytes_per_step (weights, keys and values,
    priority and position, scorer weights, twice the scorer's state), copy_bandwidth_share (bytes_per_step / time over
    the bandwidth of a large copy), peak_gib (weights, cache, all else), cache_gib (the cache's tensors alone),
    prefill_ms and prefill_peak_gib (a prompt of T - 1 tokens; smallest batch, up to --prefill tokens),
    kernels_per_layer (all kernels of a step / layers), kernels_ms (the slowest dozen of them, by name, and "all",
    launched one by one), kernel (the variant that was fastest), others_ms (of the other variants, or why not), graph,
    compiled, reduced, oom. With --check the file has real_run too: seconds for that many tokens, decoded one after the
    other, and the ratio to what the steps add up to. On a CPU the shape is cut to two narrow layers, lengths and
    batches too: such a run compares nothing. Rows that the file has already are kept: an interrupted run goes on.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, args.dtype or ("bfloat16" if device == "cuda" else "float32"))
    if min(args.lengths) < 2 or min(args.batches) < 1:
        raise ValueError("--lengths must be 2 or more, --batches 1 or more")
    Path(args.folder).mkdir(parents=True, exist_ok=True)
    if device == "cpu":
        args.lengths, args.batches = sorted({min(T, 512) for T in args.lengths} | {128}), [1, 2]
        args.budgets, args.window, args.prefill = [128], min(args.window, 32), min(args.prefill, 512)
        print("no GPU: a reduced run, to show that it works; its times compare nothing")
    # on a CPU a branch checks the scores for NaN, which no compile takes
    args.compile = device == "cuda" and ("tuned" if args.tuned else args.compile)
    config = shape_of(args.shape, device == "cpu")
    for budget in args.budgets:
        for policy in args.policies:
            spec_of("kvpop" if policy == "kvpop" else "streaming", config, budget, args.n_sink, args.window)
    itemsize = torch.empty((), dtype=dtype).element_size()
    name = args.out or f"decode-{args.shape}"
    settings = dict(card=card(device), shape=args.shape, dtype=str(dtype)[6:], n_sink=args.n_sink, window=args.window,
                    compiled=args.compile)
    rows = earlier_rows(name, strict=True, **settings)
    bandwidth = copy_bandwidth(device)
    for row in rows:  # of an earlier run: the card of this one stands beside them
        if row["ms_per_token"]:
            row["copy_bandwidth_share"] = row["bytes_per_step"] / (1e-3 * row["ms_per_token"]) / bandwidth
    release(device)
    cost = cost_card(config, itemsize, args.budgets, args.lengths, args.batches, bandwidth, args.n_sink, args.window)
    print(f"{args.shape}: {cost['weight_bytes'] / 1e9:.3f} GB of weights a step, {cost['kv_bytes_per_token']} bytes of "
          f"keys and values a token, {cost['kvpop_state_bytes'] / 1e6:.2f} MB of kvpop's state a row; copies move "
          f"{bandwidth / 1e12:.3f} TB/s")
    print(f"floor, ms a step at batch {', '.join(map(str, args.batches))}:")
    for what, floors in cost["floor_ms"].items():
        print(f"  {what}: " + ", ".join(f"{ms:.3f}" for ms in floors))
    model, lengths, checked = random_model(config, device, dtype).fuse(), sorted(set(args.lengths)), {}
    extra, path = dict(settings, cost_card=cost), RESULTS / f"{name}.json"
    if rows and "real_run" in (before := read_json(path)):
        extra["real_run"] = before["real_run"]
    for batch in args.batches:
        for policy in args.policies:
            for budget in [None] if policy.startswith("dense") else args.budgets:
                done = {r["T"] for r in rows if (r["policy"], r["batch"], r["budget"]) == (policy, batch, budget)}
                todo = [T for T in lengths if T not in done]
                if not todo:
                    continue
                with torch.no_grad():
                    rows += measure(policy, model, batch, budget, todo, args, bandwidth, device, dtype, checked)
                release(device)
                if checked and extra.get("real_run") is not checked:
                    extra["real_run"] = checked
                    print(f"{checked['T']} tokens one after the other: {checked['seconds']:.1f} s, "
                          f"{checked['ratio']:.3f} of what the steps add up to")
                write_results(name, rows, device, **extra)
                print(f"{policy}, batch {batch}, budget {budget}: ms a step " + ", ".join(
                    f"{r['ms_per_token']:.3f}" if r["ms_per_token"] else "out of memory" for r in rows[-len(todo):]),
                    flush=True)
    print_table(rows, ["policy", "shape", "batch", "budget", "T", "ms_per_token", "tokens_per_s",
                               "bytes_per_step", "copy_bandwidth_share", "peak_gib", "cache_gib", "prefill_ms",
                               "prefill_peak_gib", "kernels_per_layer", "kernel", "reduced", "oom"])
    picture = Path(args.folder) / f"{name}.png"
    draw_decode(picture, rows)
    print(f"wrote {write_results(name, rows, device, **extra)} and {picture}")


def register(names):
    numbers, number = dict(nargs="+", type=int), dict(type=int)
    add_options(names, decode, "a decode step and a prefill, in time, bytes and memory", {
        "--shape": ("qwen3-4b", "of the model", dict(choices=list(SHAPES))),
        "--lengths": ([2**i for i in range(10, 18)], "positions at which a step is timed", numbers),
        "--batches": ([1, 16, 64], "rows", numbers), "--budgets": ([2048], "entries per KV head", numbers),
        "--policies": (list(POLICIES), "to measure", dict(nargs="+", choices=POLICIES)),
        "--n-sink": (4, "first positions, never evicted", number), "--window": (256, "newest positions", number),
        "--prefill": (32768, "longest prompt to time, in tokens of the whole batch; 0: none", number),
        "--check": (0, "kvpop also decodes this many tokens for real, at the smallest batch; 0: none", number),
        "--dtype": (None, "of weights and cache (default: float32 on CPU, bfloat16 on CUDA)",
                    dict(choices=["float32", "bfloat16"])),
        "--graph": (True, "on a GPU, replay steps as a CUDA graph", dict(action=argparse.BooleanOptionalAction)),
        "--compile": (True, "on a GPU, run blocks through torch.compile, once a policy, batch and shape of cache",
                      dict(action=argparse.BooleanOptionalAction)),
        "--tuned": (False, "and try out each kernel of theirs: a minute more", dict(action="store_true")),
        "--out": (None, "name of the JSON in assets/results (default: decode-SHAPE)", {}),
        "--folder": ("assets", "for the picture", {})})
