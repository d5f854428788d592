"""Generation with a KV cache that never grows: N = n_sink + window + n_select slots per KV head, whatever the length.

What this file holds, bottom-up:
  LayerCache, KVCache   the static tensors of one layer and of all; `step` evicts one entry and writes one
  prefill, step         whole prompts under the mask of training, keeping each layer's survivors; then a token a row
  generate              the batched loop with its stop reasons; `resume` adds a turn (data/sampling.py draws tokens)
  force                 given rows through the same decode step: how a dynamic policy is measured
  run, main             the command line (data/prompts.py has its flags)
How it departs from a vanilla KV cache: a slot is not a position. A new token takes the slot of the token evicted for
it, so nothing moves; keys are stored rotated at their absolute position, which is kept beside each slot. No branch
looks at data and no tensor changes its address, so a step can be captured in one CUDA graph. The dense policy is the
same code with a window as long as the sequence, which no token ever leaves.

Letters: B batch, T tokens, H query heads, H_kv KV heads, D head_dim, N slots; q the position of the newest token.
"""
import math
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask

from data.prompts import (CHAT_CAP, Writer, check_picture, check_prompts, check_request, draw, known_record,
                          open_prompts, parse_args, resolve_device, sampling, say, stop_ids, summary, tokenizer_of,
                          verdict)
from data.resolve import resolve_policy, resolve_spec, weights_folder
from data.sampling import Fetched, sample
from data.scorer_files import check_scorers, load_scorers
from data.together import at_slot, fuse_scorers, parts_of
from data.traces import FAMILIES
import flex_masks
from flex_masks import NEVER, TILE, CacheSpec, attention, effective_priority, plan
from model import GraphedStep, ModelConfig, Transformer, load_model, read_json
from scorer import make_scorers

CHUNK = 8192  # tokens that a prefill takes through an MLP at a time: a prompt's own activations then stay small

# ------------------------------------------------------------------------------------------------------------ The cache

def choose_victim(priority, position):
    """Slot to give up, (B, H_kv) int64: the lowest priority, among equals the oldest position; and that priority. Exact
    at any precision. A bare argmin would break ties by slot, the mask of training breaks them by position. Empty slots
    carry -inf and position slot - N, so that the same rule fills slots 0, 1, 2, ... before anything is evicted."""
    lowest = priority.amin(-1, keepdim=True)  # (B, H_kv, 1)
    return position.masked_fill(priority > lowest, NEVER).argmin(-1), lowest.squeeze(-1)


FEW_HEADS = 64  # KV heads of all rows: not enough to fill the card


def attend_all(q, k, v):
    """q (B, H_kv, group_size, D) to k, v (B, H_kv, N, D) -> like q. Flash splits few heads over the whole card (18 us a
    layer at batch 1, 4096 entries; cuDNN 50), and is called by name: a first compiled step was seen to ignore
    sdpa_kernel. Many heads: SDPA's choice, cuDNN, 124 us against 210 at batch 64, 2048 entries (H200)."""
    fits = q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    if fits and k.shape[:2].numel() <= FEW_HEADS and torch.cuda.get_device_capability(q.device)[0] >= 8:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)[0]
    return F.scaled_dot_product_attention(q, k, v)


class LayerCache:
    """The slots of one layer, all tensors static:

    k_cache, v_cache  (B, H_kv, N, D)   keys after RoPE at absolute positions
    priority          (B, H_kv, N)      fp32; +inf on sinks and on tokens in the window, -inf on empty slots; of a
                                        dynamic policy the bare scores, and sinks and window are protected in the step
    position          (B, H_kv, N)      int32, absolute; negative on empty slots
    ring              (B, H_kv, window) int32; entry t % window is the slot of token t of the window
    state             the scorer's own, dict of fp32 tensors
    due               what the next step can be told before its token, dict; None: it finds out (data/together.py)
    With an fp64 model (tests) priority and state are fp64. scorer None: the window is all there is. n_layer: heads of
    all layers side by side, H_kv of each, but k_cache, v_cache (n_layer, B, H_kv, N, D), for `parts_of` to cut."""

    def __init__(self, config, spec, batch, scorer, device, dtype, n_layer=None):
        self.spec, self.scorer, self.dynamic, self.due = spec, scorer, scorer is not None and scorer.dynamic, None
        self.wide = torch.promote_types(dtype, torch.float32)
        heads, slots = (batch, config.n_kv_head * (n_layer or 1)), (batch, config.n_kv_head, spec.n_slots)
        layers = (n_layer,) if n_layer else ()
        self.k_cache = torch.empty(*layers, *slots, config.head_dim, device=device, dtype=dtype)
        self.v_cache = torch.empty_like(self.k_cache)
        self.priority = torch.empty(*heads, spec.n_slots, device=device, dtype=self.wide)
        self.position = torch.empty(*heads, spec.n_slots, device=device, dtype=torch.int32)
        self.ring = torch.empty(*heads, spec.window, device=device, dtype=torch.int32)
        shape = dict(group_size=config.group_size, cache_dtype=dtype) if self.dynamic else {}
        self.empty_state = lambda scorer: {} if scorer is None else scorer.init_state(batch, device, self.wide, **shape)
        self.b = torch.arange(batch, device=device)[:, None]  # (B, 1), with h and a (B, H_kv) slot: one entry a head
        self.h = torch.arange(heads[1], device=device)[None]  # (1, H_kv)
        self.state = self.empty_state(scorer)
        self.reset()

    def reset(self):
        """Empty, in place."""
        for tensor in (self.k_cache, self.v_cache, self.ring):
            tensor.zero_()
        self.priority.fill_(-math.inf)
        self.position.copy_(torch.arange(-self.spec.n_slots, 0, device=self.position.device))
        self.set_state(self.empty_state(self.scorer))

    def set_state(self, state):
        for name, tensor in self.state.items():
            tensor.copy_(state[name])

    def fill(self, k, v, priority, evict_at, lengths, state):
        """Take over what a masked pass over right-padded prompts leaves; the cache must be empty.
        k, v (B, H_kv, T, D), priority and evict_at (B, H_kv, T), lengths (B,). A row's survivors are the tokens that
        its last query sees, itself included; they go to slots 0, 1, 2, ... in time order, pads nowhere."""
        N, window, T = self.spec.n_slots, self.spec.window, k.shape[2]
        n, last = min(N, T), (lengths - 1)[:, None, None]  # last query of each row
        alive = (torch.arange(T, device=k.device) <= last) & (evict_at > last)  # (B, H_kv, T)
        token = (~alive).int().argsort(dim=-1, stable=True)[..., :n]  # (B, H_kv, n): survivors first, in time order
        slot = torch.arange(n, device=k.device)
        count = (last + 1).clamp(max=N)  # (B, 1, 1): every head of a row holds as many
        filled = slot < count  # (B, 1, n)
        for cache, full in ((self.k_cache, k), (self.v_cache, v)):
            kept = full.gather(2, token[..., None].expand(*token.shape, full.shape[-1]))  # (B, H_kv, n, D)
            cache[:, :, :n] = kept.masked_fill(~filled[..., None], 0.0)
        safe = (token < self.spec.n_sink) | (token > last - window)  # sinks, and the window seen from the last query
        kept = priority.gather(-1, token).to(self.wide).masked_fill(safe, math.inf)
        self.priority[..., :n] = kept.masked_fill(~filled, -math.inf)
        self.position[..., :n] = torch.where(filled, token, slot - N).int()
        entry = torch.arange(window, device=k.device)
        newest = last - (last - entry) % window  # (B, 1, window): the newest token of each entry
        self.ring.copy_((count - 1 - (last - newest)).clamp(min=0))  # the window is the tail of the filled slots
        self.set_state(state)

    def ahead(self, input_pos, k=None, v=None):
        """What the step at input_pos (B,) does, as far as it does not depend on its token (k, v (B, H_kv, D), for a
        policy that decides by it): the victim among the others, and token u = q - window, which leaves the window."""
        b, h, window, scorer, priority = self.b, self.h, self.spec.window, self.scorer, self.priority
        if self.dynamic:
            priority = priority.masked_fill((self.position >= 0) & ~self.candidates(input_pos), math.inf)
        rival, lowest = choose_victim(priority, self.position)
        if scorer is None or self.dynamic:
            return dict(victim=rival)
        entry, u = (input_pos % window)[:, None], input_pos - window  # (B, 1), (B,)
        slot = self.ring[b, h, entry].long()  # (B, H_kv)
        # a policy may decide by a token after u, in the cache unless it is q itself
        read = self.ring[b, h, (entry + scorer.shift) % window].long() if scorer.shift else slot
        leave = (at_slot(z, b, h, read) for z in (self.k_cache, self.v_cache)) if scorer.shift < window else (k, v)
        return dict(rival=rival, lowest=lowest, slot=slot, old=priority[b, h, slot],
                    **scorer.ahead(self.state, *leave, u))

    def decide(self, due, k, v, input_pos):
        """Score u and let it compete -> victim, (B, H_kv) slots; new, the priority of u; what the scorer will want."""
        score, news = self.scorer.finish(self.state, due, k, v)
        u = (input_pos - self.spec.window)[:, None]  # (B, 1)
        new = effective_priority(score, self.scorer.log_gamma(), u).to(self.wide)
        new = new.masked_fill(new.isnan(), math.inf)  # which a compiled step cannot refuse: `check` finds it
        # sinks stay at +inf; rows where nothing has left yet (u < 0) rewrite what is there
        new = torch.where(u >= self.spec.n_sink, new, due["old"])
        # so far u was safe, so the rival is the least of the others, who are older and go first if equal
        victim = torch.where(new < due["lowest"], due["slot"], due["rival"])
        return dict(victim=victim, new=new, **news)

    def look_ahead(self, input_pos):
        """Note what the step at input_pos can be told."""
        due = self.ahead(input_pos)
        self.note(due if self.scorer.waits else due | self.decide(due, None, None, input_pos))

    def note(self, found):  # in place
        for name, tensor in found.items():
            self.due[name].copy_(tensor)

    def record(self, due, input_pos):
        """The token at input_pos has come, and all but its key and value is still to be written."""
        b, h, victim = self.b, self.h, due["victim"]
        safe = self.priority.new_full((), 0.0 if self.dynamic else math.inf)
        if "new" in due:  # one write for u and for q, which may take the place of u
            new, slot = due["new"], due["slot"]
            both = torch.stack([new.masked_fill(slot == victim, math.inf), safe.expand_as(new)], -1)  # (B, H_kv, 2)
            self.priority.index_put_((b[..., None], h[..., None], torch.stack([slot, victim], -1)), both)
            self.set_state(self.scorer.settle(self.state, due))
        else:
            self.priority.index_put_((b, h, victim), safe)
        self.position.index_put_((b, h, victim), input_pos[:, None].int())
        self.ring.index_put_((b, h, (input_pos % self.spec.window)[:, None]), victim.int())

    def step(self, q, k, v, input_pos, full=False, filling=None):
        """One token per row at absolute positions input_pos (B,): evict, write, attend.
        q (B, H, 1, D), k, v (B, H_kv, 1, D) -> (B, H, 1, D). Rows may be at different positions and fill levels.
        full: the caller knows that with this token every slot of every row is filled. filling: else, for a compiled
        step on a GPU, a BlockMask of those that are; with a mask SDPA has only slow kernels there, 140 us a layer."""
        b, h, scorer = self.b, self.h, self.scorer
        k, v = k.squeeze(2), v.squeeze(2)  # (B, H_kv, D)
        due = self.due or self.ahead(input_pos, k, v)
        waits = scorer is not None and not self.dynamic and (self.due is None or scorer.waits)
        found = self.decide(due, k, v, input_pos) if waits else {}
        victim = (found or due)["victim"]  # decided before the write: never more than N entries
        # index_put_ and not scatter_: with an expanded index the compiler would copy the whole cache every step
        self.k_cache.index_put_((b, h, victim), k)
        self.v_cache.index_put_((b, h, victim), v)
        self.note(found) if self.due else self.record(due | found, input_pos)
        grouped = q.reshape(*k.shape[:2], -1, k.shape[-1])  # (B, H_kv, group_size, D): a group's heads as its queries
        live = self.position >= 0  # (B, H_kv, N): all true from q = N - 1 on
        if not self.dynamic:
            if self.due:  # token q is written down later
                live = live | (victim[..., None] == torch.arange(live.shape[-1], device=live.device))
            if full:
                out = attend_all(grouped, self.k_cache, self.v_cache)
            elif filling is not None:
                out = flex_masks.compiled_flex_attention(grouped, self.k_cache, self.v_cache, block_mask=filling)
            else:
                out = F.scaled_dot_product_attention(grouped, self.k_cache, self.v_cache, attn_mask=live[:, :, None])
            return out.reshape(q.shape)
        with torch.autocast(q.device.type, enabled=False):  # the same attention, but with its probabilities
            logits = grouped.to(self.wide) @ self.k_cache.to(self.wide).mT * k.shape[-1] ** -0.5
            probs = logits.masked_fill(~live[:, :, None], -math.inf).softmax(-1)  # (B, H_kv, group_size, N)
            out = (probs @ self.v_cache.to(self.wide)).to(q.dtype)
            scores, state = scorer.rescore(self.state, q.squeeze(2), self.k_cache, self.v_cache, probs.flatten(1, 2),
                                           self.position, input_pos, self.priority.masked_fill(~live, 0.0),
                                           self.candidates(input_pos + 1))
        self.set_state(state)
        self.priority.copy_(effective_priority(scores).masked_fill(~live, -math.inf))
        return out.reshape(q.shape)

    def candidates(self, q):
        """(B, H_kv, N) bool: the tokens that query q (B,) may evict, neither sinks nor in its window."""
        return (self.position >= self.spec.n_sink) & (self.position <= (q - self.spec.window)[:, None, None])


class KVCache:
    """All layers; `input_pos` (B,) int64, the position of each row's next token; `seen`, an int: no row's is smaller;
    `compiled`: `step` runs blocks through torch.compile, which leaves a GPU fewer kernels; "tuned": harder still.
    spec: CacheSpec. scorers: one per layer, or None for the dense policy with `dense_spec`. Memory for any length:
    n_layer * 2 * B * H_kv * N * D * itemsize, 8 bytes a slot, 4 a window entry, and the scorers' state."""
    filling = whole = None  # see LayerCache.step; the heads of all layers as those of one (data/together.py)

    def __init__(self, config: ModelConfig, spec: CacheSpec, batch, scorers=None, device="cpu", dtype=torch.float32):
        if scorers is None and (spec.n_sink or spec.n_select):
            raise ValueError("a cache without scorers cannot select: give one scorer per layer, or dense_spec(limit)")
        if scorers is not None:
            check_scorers(scorers, config, spec)
        self.spec, self.seen, self.compiled = spec, 0, False
        self.input_pos = torch.zeros(batch, dtype=torch.int64, device=device)
        L, one = config.n_layer, getattr(scorers, "one", None)
        make = lambda scorer, n=None: LayerCache(config, spec, batch, scorer, device, dtype, n)  # noqa: E731
        self.whole = make(one, L) if one else None
        self.layers = (parts_of(self.whole, scorers, self.input_pos) if one else
                       [make(scorer) for scorer in scorers or [None] * L])
        self.prepare()
        if self.input_pos.is_cuda and not self.layers[0].dynamic:
            # slots fill in order, so until the cache is full a row's live ones are a prefix of its slots
            self.filled = filled = torch.zeros(batch, dtype=torch.int32, device=device)
            n_tiles = torch.zeros(batch, 1, 1, dtype=torch.int32, device=device)
            tiles = torch.arange(-(-spec.n_slots // TILE), dtype=torch.int32, device=device).repeat(batch, 1, 1, 1)
            self.filling = BlockMask((config.group_size, spec.n_slots), n_tiles, tiles, *[None] * 6, (TILE, TILE),
                                     lambda b, h, q, slot: slot < filled[b])

    def reset(self, smaller=None):
        """Empty; or what a smaller dense cache holds, at the places where it would lie here."""
        self.input_pos.copy_(smaller.input_pos if smaller else torch.zeros_like(self.input_pos))
        self.seen = smaller.seen if smaller else 0
        for i, layer in enumerate(self.layers):
            layer.reset()
            for name in ("k_cache", "v_cache", "priority", "position", "ring") if smaller else ():
                old, new = getattr(smaller.layers[i], name), getattr(layer, name)[:, :, :smaller.spec.n_slots]
                # an empty slot is numbered from the end: fewer slots, other numbers
                new.copy_(torch.where(old < 0, new, old) if name == "position" else old)

        self.prepare()

    @torch.no_grad()
    def prepare(self):
        """Find what of the next step is `due` before its token: after anything but a step has changed the cache."""
        for layer in self.layers if self.whole is not None else ():
            layer.look_ahead(self.input_pos)

    def set_prompt_lengths(self, lengths):
        """For a policy that never evicts prompts: their lengths, (B,) ints, after a reset and before a step (a prefill
        knows them). ValueError if the cache cannot hold them."""
        for layer in self.layers:
            if "prompt" in layer.state:
                lengths = torch.as_tensor(lengths)
                check_prompts(layer.scorer.name, self.spec, int(lengths.max()))
                layer.state["prompt"].copy_(lengths)

    def run(self, block, x, cos, sin, attend, layer):  # the model's, in place of calling the block
        compiled = (tuned_block_step if self.compiled == "tuned" else one_block_step if len(x) == 1 else
                    compiled_block_step)
        return compiled(block, self.layers[layer], x, cos, sin, self.input_pos, self.full,
                        None if self.full else self.filling)

    def attend(self, layer, q, k, v):  # the model's while decoding
        return self.layers[layer].step(q, k, v, self.input_pos, self.full)

    @property
    def full(self):
        """Whether the host knows that the next step leaves every slot filled, and says so. Dense and dynamic policies:
        never. Nor compiled with few heads: `filling` is as fast as flash (16 us a layer, 18): one step does for all."""
        layer, filled = self.layers[0], self.seen >= self.spec.n_slots - 1
        flex = self.compiled and self.filling is not None and layer.k_cache.shape[:2].numel() <= FEW_HEADS
        return filled and not flex and layer.scorer is not None and not layer.dynamic

    def check(self):
        """ValueError if a score was NaN, where a compiled step goes on: its token is then one protected too many."""
        protected = self.spec.n_sink + self.spec.window
        if any(bool((layer.priority.isnan().any(-1) | (layer.priority.isposinf().sum(-1) > protected)).any())
               for layer in self.layers):
            raise ValueError(flex_masks.NAN_SCORE)

    def kept_positions(self, layer):
        """Positions held, ascending: list over rows of list over KV heads of lists."""
        return [[sorted(p for p in head if p >= 0) for head in row] for row in self.layers[layer].position.tolist()]

    def peak_entries(self):
        """Most slots filled in any layer, row and head; slots are never freed, so it is the peak."""
        return max(int((layer.position >= 0).sum(-1).max()) for layer in self.layers)

    def nbytes(self):
        """Bytes held, measured: keys and values, priority with position and ring, the scorers' state."""
        return dict(cache=sum(x.k_cache.nbytes + x.v_cache.nbytes for x in self.layers),
                    bookkeeping=sum(x.priority.nbytes + x.position.nbytes + x.ring.nbytes for x in self.layers),
                    state=sum(t.nbytes for x in self.layers for t in x.state.values()))


def dense_spec(limit):
    """The dense policy: a window of `limit` entries, which no token leaves before position `limit`."""
    return CacheSpec(n_sink=0, window=limit, budget=limit)

# ---------------------------------------------------------------------------------------------- The two ways to fill it

@torch.no_grad()
def prefill(model: Transformer, idx, lengths, cache: KVCache):
    """Whole prompts: idx (B, T) int64 right-padded with anything, lengths (B,) int64 -> logits (B, V) of each row's
    last token. Afterwards the cache has seen queries 0 .. length - 1, and the next step is q = length.
    Layer by layer: parallel scores -> priority -> evict_at -> masked attention; the survivors go to the slots, other
    keys and values are dropped. What stays is what stepping through the prompt would have kept.
    ValueError: a dynamic policy, which has no parallel form."""
    cache.reset()
    pad = torch.arange(idx.shape[1], device=idx.device) >= lengths[:, None]  # (B, T)
    idx = idx.masked_fill(pad, 0)  # whatever stands there, the embedding knows token 0

    def attend(layer, q, k, v):
        slots = cache.layers[layer]
        if slots.scorer is None:
            priority, state = k.new_zeros(k.shape[:3]), {}
        else:
            if "prompt" in slots.state:
                slots.scorer.prompt_lengths = lengths
            scores, state = slots.scorer(k, v, lengths=lengths, return_state=True)  # (B, H_kv, T)
            priority = effective_priority(scores, slots.scorer.log_gamma())
        evict_at = plan(priority, cache.spec)  # a pad ranks only for queries that its row does not have
        slots.fill(k, v, priority, evict_at, lengths, state)
        return attention(q, k, v, evict_at, cache.spec)[0]

    hidden = model(idx, attend, run=block_in_chunks)  # (B, T, C)
    cache.input_pos.copy_(lengths)
    cache.seen = int(lengths.min())
    cache.prepare()
    return model.unembed(hidden[torch.arange(len(lengths), device=idx.device), lengths - 1])


def block_in_chunks(block, x, cos, sin, attend, layer):
    """A block whose MLP sees CHUNK tokens at a time: at 131,072 tokens of an 8B model it would hold 10 GB at once."""
    x = x + block.self_attn.out(attend(layer, *block.before(x, cos, sin)))
    for part in x.split(CHUNK, dim=1):
        part += block.mlp(block.post_attention_layernorm(part))
    return x


def block_step(block, slots, x, cos, sin, input_pos, full, filling):
    """A block of `step`. It is given weights and slots, not a layer's number: one compile serves all layers."""
    return block(x, cos, sin, lambda layer, q, k, v: slots.step(q, k, v, input_pos, full, filling), None)


def between_steps(whole, input_pos):
    """The end of the step at input_pos and the begin of the next, for all layers at once."""
    whole.record(whole.due, input_pos)
    whole.look_ahead(input_pos + 1)


# no reduction in two kernels, they are short; on Hopper a kernel is launched while the one before it still runs (PDL)
WHOLE = {"split_reductions": False, "triton.enable_pdl": True}
# of one row products are reductions (model.linear): their tiles are tried out, or they would be slower than products;
# so are those of what is done for all layers at once, where the memory of many rows is a tenth of the bytes of a step
ONE = {**WHOLE, "max_autotune_pointwise": True}
compiled_block_step = torch.compile(block_step, dynamic=False, fullgraph=True, options=WHOLE)
one_block_step = torch.compile(block_step, dynamic=False, fullgraph=True, options=ONE)
compiled_between_steps = torch.compile(between_steps, dynamic=False, fullgraph=True, options=ONE)
tuned_block_step = torch.compile(block_step, dynamic=False, fullgraph=True,
                                 options={**WHOLE, "coordinate_descent_tuning": True})  # a minute of compilation


@torch.no_grad()
def step(model: Transformer, idx, cache: KVCache):
    """One token per row: idx (B,) int64 -> logits (B, V). In place on the cache, without a wait for the device."""
    if cache.compiled and cache.filling is not None and not cache.full:
        cache.filled.copy_((cache.input_pos + 1).clamp(max=cache.spec.n_slots))
        cache.filling.kv_num_blocks.copy_((cache.filled.view(-1, 1, 1) + TILE - 1) // TILE)
    hidden = model(idx[:, None], cache.attend, cache.input_pos[:, None], cache.run if cache.compiled else None)
    if cache.whole is not None:
        (compiled_between_steps if cache.compiled else between_steps)(cache.whole, cache.input_pos)
    cache.input_pos.add_(1)
    cache.seen += 1
    return model.unembed(hidden[:, 0])


def capture_step(model, ids, cache):
    """`step` as a CUDA graph, since launching its kernels one by one takes longer than running them: replay() reads
    ids (B,), this very tensor. -> graph, logits (B, V), overwritten by each replay. Reset the cache afterwards."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # kernels and workspaces must exist before the capture
        for _ in range(2):
            step(model, ids, cache)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = step(model, ids, cache)
    return graph, logits


def make_step(model, cache, graph):
    """-> function: ids (B,) -> logits (B, V), `step` or, on a GPU with `graph`, replays. Reset the cache first."""
    if not (graph and cache.input_pos.is_cuda):
        return lambda ids: step(model, ids, cache)
    static_ids, captured = torch.zeros_like(cache.input_pos), {}
    for cache.seen in (-NEVER, NEVER):  # the step until the cache is full and the one after, where they differ
        if cache.full not in captured:
            captured[cache.full] = capture_step(model, static_ids, cache)

    def advance(ids):
        static_ids.copy_(ids)
        graph, logits = captured[cache.full]
        graph.replay()
        cache.seen += 1
        return logits
    return advance


@torch.no_grad()
def force(model: Transformer, rows, spec=None, scorers=None, *, on_logits, graph=True, prompt_lengths=None,
          cache=None) -> KVCache:
    """Teacher-forced: whole rows (lists of token ids, any lengths) through the decode step of any policy, from position
    0. Calls on_logits(t, logits (B, V)) after step t; rows with t >= their length mean nothing. With a graph the next
    step overwrites logits, so copy what is to stay. For a static policy it is the masked pass, up to rounding.
    prompt_lengths: one int a row, for policies that treat prompts apart. spec, scorers, cache as for `generate`."""
    weight = model.model.embed_tokens.weight
    if not rows or not all(rows):
        raise ValueError("a row to force is empty: give at least one token")
    T = max(map(len, rows))
    cache = cache or KVCache(model.config, spec or dense_spec(T), len(rows), scorers, weight.device, weight.dtype)
    idx = torch.tensor([row + [0] * (T - len(row)) for row in rows], device=weight.device)
    advance = make_step(model, cache, graph)
    cache.reset()
    if prompt_lengths is not None:
        cache.set_prompt_lengths(prompt_lengths)
    for t in range(T):
        on_logits(t, advance(idx[:, t]))
    return cache

# ------------------------------------------------------------------------------------------------------------- The loop

@dataclass
class Generation:
    """What `generate` returns; lists have one entry per row."""
    tokens: list  # generated ids, without the end token
    stop: list  # "end token", "max_new_tokens", "max_seq_len" or "interrupted"; None while a row is running
    seen: list  # positions that went through the cache: the last generated token may not have
    cache: KVCache
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    steps: int = 0  # decode steps, of the whole batch
    advance: object = None  # the step of this cache, perhaps captured: to go on with


class Interrupted(KeyboardInterrupt):
    """Ctrl-C inside `generate`; args[0] is the Generation so far."""


@torch.no_grad()
def generate(model: Transformer, prompts, spec=None, scorers=None, *, max_new_tokens=None, max_seq_len=None,
             temperature=0.0, top_p=1.0, top_k=0, seed=0, stop_ids=None, on_token=None, cache=None, resume=None,
             graph=True, compiled=False, ahead=False) -> Generation:
    """Generate for a batch of prompts (lists of token ids, any lengths) until every row has stopped.
    spec and scorers as for KVCache; both None is the dense policy, with room for the longest row. max_new_tokens None:
    until an end token or max_seq_len (default: the model's). stop_ids default to the model's end tokens.
    seed: one int, row b then draws with seed + b, or one per row. A row's random numbers depend on its seed alone, so
    it draws the same text in any batch and on any device, up to what rounding does to the logits.
    A dynamic policy has no prefill: all rows step through their prompts; steps and decode_seconds then count from
    where the longest one ends. on_token(row, id) is called for each new token. cache: one to reuse, it is reset. graph:
    on a GPU, replay each step as a CUDA graph, and the sampling as another. compiled: blocks through torch.compile, of
    a cache made here. ahead: the host reads a token while a GPU runs the next step, so that it never waits; at the end
    the cache has seen a token too many and cannot be resumed. Rows that have stopped go through the steps unread: their
    slots mean nothing after that. resume: the Generation of one row, to go on from. Its cache stays (a dense one
    grows), and the prompt, behind the last token said if that was never fed, is stepped in token by token: the same
    state as from one prompt with everything. An end token is not fed. ValueError before any work."""
    config, weight = model.config, model.model.embed_tokens.weight
    ahead = ahead and weight.is_cuda
    max_seq_len = config.max_seq_len if max_seq_len is None else max_seq_len
    stop_ids = config.eos_token_ids if stop_ids is None else stop_ids
    past = 0  # positions that the cache has seen
    if resume is not None:
        spoilt = "interrupted" in resume.stop or resume.cache.input_pos.tolist() != resume.seen
        if spoilt or (len(prompts), len(resume.seen)) != (1, 1):
            raise ValueError("only a single row can be resumed, once, and not after an interruption: start anew")
        prompts, past = [resume.tokens[0][-1:] * (resume.stop[0] != "end token") + prompts[0]], resume.seen[0]
    check_request(prompts, max_new_tokens, max_seq_len, temperature, top_p, top_k, past)
    B, longest = len(prompts), max(map(len, prompts))
    room = max_new_tokens or max_seq_len - past - min(map(len, prompts))
    cache = cache if resume is None else resume.cache
    most = past + longest + room
    grow = resume is not None and spec is None and cache.layers[0].scorer is None and cache.spec.window < most
    if cache is None or grow:
        spec = dense_spec(most) if spec is None else spec
        cache = KVCache(config, spec, B, scorers, weight.device, weight.dtype)
        cache.compiled = compiled
    # all randomness is drawn before the loop and on the CPU, so that it is the same in any batch and on any device
    seeds = [seed + b for b in range(B)] if isinstance(seed, int) else seed
    noise = torch.stack([torch.rand(room if temperature else 1, dtype=torch.float64,
                                    generator=torch.Generator().manual_seed(s % 2**63)) for s in seeds])  # (B, steps)
    noise, result = noise.to(weight.device), Generation([[] for _ in prompts], [None] * B, [past] * B, cache)
    idx = torch.tensor([p + [0] * (longest - len(p)) for p in prompts], device=weight.device)
    lengths = torch.tensor([len(p) for p in prompts], device=weight.device)
    if resume is None:
        cache.set_prompt_lengths(lengths)
    result.advance = advance = make_step(model, cache, graph) if resume is None or grow else resume.advance
    if resume is None or grow:
        cache.reset(resume and resume.cache)
    stepped, n_done = resume is not None or cache.layers[0].dynamic, 0
    first, lead = [past + 1 if stepped else len(p) for p in prompts], longest - 1 if stepped else 0

    def choose(logits, at):  # at (B,): tokens that each row has had; a stepped one may still be in its prompt
        drawn, told = (at - lengths).clamp(0, noise.shape[1] - 1)[:, None], at.clamp(max=longest - 1)[:, None]
        ids = sample(logits, noise.gather(1, drawn).squeeze(1), temperature, top_p, top_k)
        return dict(ids=torch.where(at < lengths, idx.gather(1, told).squeeze(1), ids))
    choose = GraphedStep(choose, graph and weight.is_cuda)
    start = time.perf_counter()
    try:
        logits = advance(idx[:, 0]) if stepped else prefill(model, idx, lengths, cache)  # (B, V)
        while True:  # logits are those of each row's last token so far; input_pos has counted it
            ids = choose(logits, cache.input_pos - past)["ids"]
            told = Fetched(ids)
            if ahead:
                logits = advance(ids)
            for b, token in enumerate(told.tolist()):  # the one wait for the device in a step
                if result.stop[b] is not None:
                    continue
                result.seen[b] = first[b] + n_done
                if result.seen[b] < past + len(prompts[b]):
                    continue
                if token in stop_ids:
                    result.stop[b] = "end token"
                    continue
                result.tokens[b].append(token)
                n = len(result.tokens[b])
                result.stop[b] = ("max_new_tokens" if n == max_new_tokens else
                                  "max_seq_len" if past + len(prompts[b]) + n == max_seq_len else None)
                if on_token is not None:
                    on_token(b, token)
            if n_done == lead:
                result.prefill_seconds, start = time.perf_counter() - start, time.perf_counter()
            if all(result.stop):
                break
            logits = logits if ahead else advance(ids)
            n_done += 1
            result.steps = max(0, n_done - lead)
    except KeyboardInterrupt:
        result.stop = [reason or "interrupted" for reason in result.stop]
        raise Interrupted(result) from None
    finally:
        result.decode_seconds = time.perf_counter() - start
    if cache.compiled:
        cache.check()
    return result

# ----------------------------------------------------------------------------------------------------- The command line

def run(args):
    """The command, after parsing -> exit code. All that can be refused is, before weights are read."""
    folder, policy, has_scorers, settings = resolve_policy(args)
    weights = weights_folder(folder, settings) if has_scorers else folder
    config = ModelConfig.from_dict(read_json(weights / "config.json"))
    limit = config.max_seq_len if args.max_seq_len is None else args.max_seq_len
    if not 0 < limit <= config.max_seq_len:
        raise ValueError(f"--max-seq-len {limit} is outside 1 .. {config.max_seq_len}, what the model was trained on")
    spec = resolve_spec(args, settings, policy, config, limit)
    tokenizer = tokenizer_of(weights, config)
    prompts, problem, talk = open_prompts(args, weights, tokenizer)
    device, dtype = resolve_device(args)
    how, ends = sampling(args, weights), stop_ids(weights, tokenizer, config)
    if (prompt := next(prompts, None)) is None:
        raise ValueError("a chat without a turn: give --prompt, or lines on stdin")
    check_request([prompt], args.max_new_tokens, limit, **how)
    check_prompts(policy, spec, len(prompt))
    check_picture(args.picture)
    scorers = load_scorers(folder)[0] if has_scorers else None
    if not has_scorers and policy != "dense":
        scorers = make_scorers(policy, n_layer=config.n_layer, n_kv_head=config.n_kv_head, head_dim=config.head_dim,
                               window=spec.window, seed=args.seed)
    if scorers is not None:
        check_scorers(scorers, config, spec)
        scorers.to(device)
    model, on_gpu = load_model(weights, device, dtype).eval(), torch.device(device).type == "cuda"
    compiled = on_gpu and (sum(p.numel() for p in model.parameters()) >= 1e9 if args.compile is None else args.compile)
    if on_gpu:
        model.fuse()
    scorers = fuse_scorers(scorers)
    result, ids, tokens, spent, code = None, prompt, [], Counter(), 0
    while ids is not None and not code:
        write, room, cap = Writer(tokenizer), limit - len(tokens) - len(ids), args.max_new_tokens
        if talk is not None:  # the cap is each turn's, the room the whole chat's
            cap = None if (cap or CHAT_CAP) >= room else cap or CHAT_CAP
            if room < 1:
                say(f"the chat is full: {len(tokens)} tokens and a turn of {len(ids)} reach --max-seq-len {limit}")
                break
        try:
            result = generate(model, [ids], spec, scorers, max_new_tokens=cap, max_seq_len=limit, resume=result, **how,
                              seed=args.seed + spent["turns"], on_token=write, stop_ids=ends, compiled=compiled,
                              ahead=talk is None and not args.picture)
        except Interrupted as stopped:
            code, result = 130, stopped.args[0]
        write.finish()
        tokens += ids + result.tokens[0]
        spent.update(turns=1, fed=len(ids), steps=result.steps, prefill=result.prefill_seconds,
                     decode=result.decode_seconds)
        if talk is None:
            break
        say(f"turn {spent['turns']}: {len(ids)} tokens fed, {len(result.tokens[0])} new, stopped by: {result.stop[0]}")
        talk.heard(tokenizer.decode(result.tokens[0]), ended=False)  # generate does not feed the end token
        ids = None if code else next(prompts, None)
    say("\n".join(summary(result, policy, config, spent)))
    if problem is not None:
        usual = problem.family in FAMILIES and not how["temperature"] and (args.n_sink, args.window) == (None, None)
        record = known_record(policy, spec and spec.budget, folder, weights) if usual else ""
        say(verdict(problem, result.tokens[0], record))
    if args.picture and result.seen[0]:
        draw(args.picture, result, tokens[:result.seen[0]], len(prompt), tokenizer, policy)
    return code


def main(argv=None):
    try:
        return run(parse_args(argv))
    except BrokenPipeError:  # the reader of stdout went away, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError) as error:
        say(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
