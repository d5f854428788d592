"""
Every eviction policy as a scorer: keys and values in, one fp32 score per token and KV head out, higher = keep.

- A scorer only scores: budget, ranking, masks and the cache live elsewhere, so a new policy is one class here.
- Static policies score a token once, when it leaves the window, in two forms that must agree: `forward` over a sequence
  (training, prefill), `step` for one token (decode). Dynamic ones score the whole cache after every step, `rescore`.
- Delayed: the score of token u is read at query u + window, and then u is kept or dropped for ever.
- Inputs are the *cached* keys (after RoPE and q/k-norm) and values, detached: no gradient reaches the base model.
- Departures of the mLSTM from the usual one: delayed read, positive features on q and k, no output gate, no max()
  normaliser, and no loop over chunks (one lower-triangular decay matrix times the per-chunk updates).
- Arithmetic is fp32 whatever autocast says, fp64 if the module is fp64.

Letters: B batch, T tokens, H_kv KV heads, D head_dim, n chunks of L tokens.
Method: KVpop, arXiv 2607.05061, App. A and E.
"""

import json
import math
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

POLICIES = ("dense", "streaming", "random", "random-prompt", "knorm", "keydiff", "tova-layer", "tova-head", "h2o",
            "h2o-mean", "snapkv", "rkv", "vase", "dms-cap", "kvpop-mlp", "kvpop", "kvpop-nodelay", "position", "oracle")
LEARNED = ("dms-cap", "kvpop-mlp", "kvpop", "kvpop-nodelay", "position")  # these need a checkpoint
FLOOR = -1e30  # "log of nothing": a finite stand-in for -inf, because -inf - (-inf) is NaN
TINY = 1e-30  # smallest denominator; phi(q).n itself gets as small as 4e-22, so 1e-6 or 1e-20 would change scores


# ----------------------------------------------------------------------------------------------------------------------
# the mLSTM without its projections


def _sums_after(z):
    """(..., n) -> (..., n, n): entry [i, j] is the sum of z over j < u <= i (0 where j >= i).

    A masked cumulative sum and not the difference of two global ones: those cancel when a gate nearly closes.
    It is a scan and never a matmul, so TF32 cannot touch the exponents.
    """
    size = z.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=z.device).tril(-1)  # [u, j]: u > j
    return z[..., :, None].masked_fill(~later, 0.0).cumsum(-2)


def mlstm_chunkwise(q, k, v, ig, lf, chunk=64):
    """C = f C + i k v^T, n = f n + i k, h = q C / q n (arXiv 2405.04517), without a loop and for any gates.

    q, k (B, H, T, Dk) with positive features, v (B, H, T, Dv), ig = log i and lf = log f (B, H, T); fp32 or fp64.
    Any T: the tail is filled with tokens that neither enter nor decay.
    Returns h (B, H, T, Dv) and the state after the last token: C (B, H, Dk, Dv) and n (B, H, Dk), both divided by
    exp(m), and m (B, H). h does not depend on the stabilisers m, so they are constants in the backward pass.
    chunk >= T is the fully parallel form. Peak memory: the n updates of Dk x Dv per head, twice.
    """
    T, (dk, dv) = q.shape[2], (k.shape[-1], v.shape[-1])
    L = min(chunk, T)
    n = -(-T // L)
    pad = n * L - T
    q, k, v = (F.pad(z, (0, 0, 0, pad)).unflatten(2, (n, L)) for z in (q, k, v))  # (B, H, n, L, .)
    ig = F.pad(ig, (0, pad), value=FLOOR).unflatten(2, (n, L))  # (B, H, n, L)
    lf = F.pad(lf, (0, pad)).unflatten(2, (n, L))  # (B, H, n, L)

    # within a chunk: weight[i, j] = exp(ig_j + sum of lf over j < u <= i) for j <= i
    upper = torch.ones(L, L, dtype=torch.bool, device=q.device).triu(1)
    weight = (_sums_after(lf) + ig[..., None, :]).masked_fill(upper, -math.inf)  # (B, H, n, L, L), a log
    since = lf.cumsum(-1)  # (B, H, n, L): decay of the incoming state, token i included

    # what each chunk adds to the state at its own end: the last row of `weight`
    last = weight[..., -1, :]  # (B, H, n, L)
    m_add = last.detach().amax(-1)  # (B, H, n)
    scaled = k * (last - m_add[..., None]).exp()[..., None]  # (B, H, n, L, Dk)
    C_add = (scaled.mT @ v).flatten(-2)  # (B, H, n, Dk * Dv)
    n_add = scaled.sum(-2)  # (B, H, n, Dk)

    # from chunk to chunk: state[c] = sum over chunks p < c; row 0 is the zero state, row n the final one
    upper = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
    carry = (_sums_after(since[..., -1]) + m_add[..., None, :]).masked_fill(upper, -math.inf)  # (B, H, n, n), a log
    carry = F.pad(carry, (0, 0, 1, 0), value=-math.inf)  # (B, H, n + 1, n)
    m = carry.detach().amax(-1).clamp(min=FLOOR)  # (B, H, n + 1); without the floor row 0 would be -inf - -inf = NaN
    carry = (carry - m[..., None]).exp()
    C = (carry @ C_add).unflatten(-1, (dk, dv))  # (B, H, n + 1, Dk, Dv)
    norm = carry @ n_add  # (B, H, n + 1, Dk)

    # read: inside the chunk through `weight`, before it through the state the chunk started from
    since = since + m[..., :-1, None]
    m_read = torch.maximum(since.detach(), weight.detach().amax(-1))  # (B, H, n, L)
    near = (q @ k.mT) * (weight - m_read[..., None]).exp()  # (B, H, n, L, L)
    far = q * (since - m_read).exp()[..., None]  # (B, H, n, L, Dk)
    num = near @ v + far @ C[:, :, :-1]  # (B, H, n, L, Dv)
    den = near.sum(-1) + (far * norm[:, :, :-1, None]).sum(-1)  # (B, H, n, L)
    h = num / den.clamp(min=TINY)[..., None]  # clamp first: a 0/0 poisons gradients even in rows that are sliced off
    return h.flatten(2, 3)[:, :, :T], C[:, :, -1], norm[:, :, -1], m[:, :, -1]


# ----------------------------------------------------------------------------------------------------------------------
# the common shape of a policy


class Scorer(nn.Module):
    """Base class: dtype, detaching, padding and the window's edge. A stateless policy fills in `score`, one with a state
    `score_all` and `score_one`, a dynamic one `rescore`.

    Attributes: name (policy), n_kv_head, head_dim, layer, state_entries (int: budget entries that the state costs with
    one query head a KV head; the function of that name knows any), dynamic (True: re-ranks the whole cache every step),
    delayed (True: the score of t also reads tokens up to t + window), shift (the one-step form is handed token
    u + shift as the leaving one), window (the one it was made for; None = any), defaults (options of the policy).
    """

    name, delayed, dynamic, shift, defaults = "", False, False, 0, {}

    def __init__(self, n_kv_head, head_dim, window, layer=0, seed=0, **options):
        super().__init__()
        if unknown := options.keys() - self.defaults.keys():
            raise ValueError(f"policy {self.name} has no option '{min(unknown)}': see class {type(self).__name__} "
                             f"in scorer.py")
        for name, value in {**self.defaults, **options}.items():
            setattr(self, name, value)
        self.n_kv_head, self.head_dim, self.layer, self.seed = n_kv_head, head_dim, layer, seed
        self.window = None  # learned scorers overwrite it: they only know what they were trained on
        self.state_entries = state_entries(self.name, head_dim, 1, window, **options)
        self.options = {"seed": seed}

    def work_dtype(self, like):
        """fp64 if the parameters (without any: the input) are fp64, else fp32."""
        dtype = next((p.dtype for p in self.parameters()), like.dtype)
        return torch.float64 if dtype == torch.float64 else torch.float32

    def forward(self, k, v, lengths=None, return_state=False):
        """Scores of a whole sequence: k, v (B, H_kv, T, D), any float dtype -> (B, H_kv, T) fp32 [, state].

        scores[..., t] is the score of token t as it is read at query t + window. Entries that have not left the window
        (t >= T - window) carry none and are 0.0; policies with window None score those too.
        lengths (B,) int64: rows are right-padded; T becomes the row's own length, pads score 0.0 and reach nothing,
        whatever they hold. state: tensors after each row's last real token, as `step` takes them ({} if stateless).
        ValueError: shapes that do not fit; a dynamic policy.
        Compiled, call it with autocast off outside too: Inductor runs a backward pass under the autocast of the call
        (measured on CPU: 1e-2 relative error in the gradients).
        """
        B, T = k.shape[0], k.shape[2]
        if k.shape != v.shape or k.shape[1] != self.n_kv_head or k.shape[3] != self.head_dim:
            raise ValueError(f"scorer {self.name} wants keys and values (B, {self.n_kv_head}, T, {self.head_dim}), "
                             f"got {tuple(k.shape)} and {tuple(v.shape)}")
        pos = torch.arange(T, device=k.device)
        real = None if lengths is None else pos < lengths[:, None]  # (B, T)
        with torch.autocast(k.device.type, enabled=False):
            k, v = (z.detach().to(self.work_dtype(z)) for z in (k, v))
            if real is not None:  # zeroed, not only weighted by 0: 0 * inf is NaN, in the backward pass too
                k, v = (z.masked_fill(~real[:, None, :, None], 0.0) for z in (k, v))
            scores, state = self.score_all(k, v, real)  # (B, H_kv, T), dict
        left = pos + (self.window or 0) < (T if lengths is None else lengths[:, None])  # (T,) or (B, T)
        scores = scores.masked_fill(~left.expand(B, T)[:, None], 0.0)
        return (scores, state) if return_state else scores

    def init_state(self, batch, device, dtype=torch.float32, group_size=1, cache_dtype=None):
        """The state before the first token: dict of tensors ({} if stateless)."""
        return {}

    def step(self, state, k, v, k_leave, v_leave, leave_pos):
        """One decode step at query q: k, v (B, H_kv, D) are token q, taken into the state first; k_leave, v_leave
        (B, H_kv, D) and leave_pos (B,) int64 are the token that leaves the window, u = q - window (with `shift`, the
        keys and values are those of u + shift).

        Returns the score of token u, (B, H_kv) fp32, and the new state. Rows with leave_pos < 0 have no such token yet:
        their score means nothing but is finite.
        """
        with torch.autocast(k.device.type, enabled=False):
            k, v, k_leave, v_leave = (z.detach().to(self.work_dtype(z)) for z in (k, v, k_leave, v_leave))
            none = (leave_pos < 0)[:, None, None]
            k_leave, v_leave = k_leave.masked_fill(none, 0.0), v_leave.masked_fill(none, 0.0)
            return self.score_one(state, k, v, k_leave, v_leave, leave_pos)

    def score(self, k, v, pos):
        """A score from a token alone: k, v (B, H_kv, T, D), pos (B or 1, T) int64 -> (B or 1, H_kv, T)."""
        raise NotImplementedError(f"policy {self.name} does not score a token by itself")

    def score_all(self, k, v, real):
        return self.score(k, v, torch.arange(k.shape[2], device=k.device)[None]).expand(k.shape[:3]), {}

    def score_one(self, state, k, v, k_leave, v_leave, leave_pos):
        return self.score(k_leave[:, :, None], v_leave[:, :, None], leave_pos[:, None]).squeeze(-1), state

    def log_gamma(self):
        """Decay per token of age, (H_kv,) fp32 < 0, or None for policies without it."""
        return None


# ----------------------------------------------------------------------------------------------------------------------
# static policies without parameters


class Streaming(Scorer):
    """Equal scores: "the newer wins a tie" then keeps sinks and the most recent tokens (StreamingLLM, arXiv 2309.17453,
    but at absolute positions)."""

    name = "streaming"

    def score(self, k, v, pos):
        return k.new_zeros(k.shape[:3])


def _mix(x):
    """A 32-bit integer hash on int64 (tensor or int). Both multipliers are below 2^31, so no product leaves int64."""
    x = x & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x045D9F3B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def hash_uniform(seed, layer, n_head, pos):
    """Counter-based noise: pos (..., n_head or 1, T) int64 -> (..., n_head, T) fp32 in [0, 1), a pure function of its
    arguments: the same bits on every device and in both forms of a scorer, which no stateful generator can promise."""
    h = torch.arange(n_head, device=pos.device)[:, None]  # (n_head, 1)
    h = _mix(_mix(_mix(seed + 0x9E3779B9) ^ _mix(layer + 0x3C6EF372)) ^ _mix(h + 0x1B873593))
    h = _mix(h ^ _mix(pos.long() + 0x2545F491))  # (..., n_head, T)
    return (h >> 8).float() * 2.0**-24  # 24 bits: exact in fp32, never rounds up to 1.0


class Random(Scorer):
    """One number per (seed, layer, KV head, position), never redrawn: reservoir sampling of the past."""

    name = "random"

    def score(self, k, v, pos):
        return hash_uniform(self.seed, self.layer, self.n_kv_head, pos[:, None])


class RandomPrompt(Random):
    """The prompt is never evicted (and counts against the budget); generated tokens compete by `random`
    (arXiv 2609.03430). State: "prompt" (B,) int64, each row's prompt length. The parallel form takes it from
    `prompt_lengths` (B,) if set, as for teacher-forced rows; else the whole sequence is prompt, as in a prefill."""

    name, prompt_lengths = "random-prompt", None

    def init_state(self, batch, device, dtype=torch.float32, group_size=1, cache_dtype=None):
        return {"prompt": torch.zeros(batch, dtype=torch.int64, device=device)}

    def score_all(self, k, v, real):
        pos = torch.arange(k.shape[2], device=k.device)
        lengths = pos.new_full(k.shape[:1], len(pos)) if real is None else real.sum(-1)
        prompt = lengths if self.prompt_lengths is None else self.prompt_lengths
        return super().score_all(k, v, real)[0].masked_fill((pos < prompt[:, None])[:, None], 2.0), {"prompt": prompt}

    def score_one(self, state, k, v, k_leave, v_leave, leave_pos):
        scores, state = super().score_one(state, k, v, k_leave, v_leave, leave_pos)
        return scores.masked_fill((leave_pos < state["prompt"])[:, None], 2.0), state  # above every random number


class KNorm(Scorer):
    """-||k||_2: small keys stay (arXiv 2406.11430). RoPE keeps norms; on Qwen3 only the k-norm gain varies them."""

    name = "knorm"

    def score(self, k, v, pos):
        return -torch.linalg.vector_norm(k, dim=-1)


class Oracle(Scorer):
    """Scores handed in from outside through `scorer.scores = (B, H_kv, T)`, usually the future-attention targets:
    the upper bound of what any scorer can do. Knows the future, so it has no one-step form. `power` says which target
    the caller is to hand in (targets.future_attention); None = its default."""

    name, scores, defaults = "oracle", None, {"power": None}

    def score_all(self, k, v, real):
        if self.scores is None or self.scores.shape != k.shape[:3]:
            got = None if self.scores is None else tuple(self.scores.shape)
            raise ValueError(f"oracle of layer {self.layer}: set scorer.scores to a {tuple(k.shape[:3])} tensor first, "
                             f"it is {got}")
        return self.scores.detach().to(k), {}

    def score_one(self, state, k, v, k_leave, v_leave, leave_pos):
        raise ValueError("policy oracle needs the future, so it cannot decode; use it in the parallel form only")


# ----------------------------------------------------------------------------------------------------------------------
# dynamic policies: every slot is scored again after the attention of each step, before the next token evicts one


class Dynamic(Scorer):
    """Base class. No parallel form: what step q keeps follows from what step q - 1 kept."""

    dynamic = True

    def score_all(self, k, v, real):
        raise ValueError(f"policy {self.name} ranks the whole cache anew at every step, so it has no parallel form: "
                         "use generate or force of decode.py")

    def rescore(self, state, q, k_cache, v_cache, probs, position, input_pos, scores, candidate):
        """After the attention of query q at input_pos (B,), with its own token in the cache: q (B, H, D) rotated,
        k_cache, v_cache (B, H_kv, N, D), probs (B, H, N) fp32 attention (0 on empty slots), position (B, H_kv, N) int32
        (negative = empty), scores (B, H_kv, N) what this function said a step ago (0 on empty slots and on the slot
        just written), candidate (B, H_kv, N) bool: what the next step may evict, no sink and out of its window.

        Returns scores (B, H_kv, N) in the dtype of probs for ALL slots and the new state. Empty slots hold garbage:
        their scores mean nothing. No branch on data, no wait for the device: a step is captured in a CUDA graph.
        """
        raise NotImplementedError

    def per_group(self, x):
        """(B, H, ...) -> (B, H_kv, group_size, ...)"""
        return x.unflatten(1, (self.n_kv_head, -1))


class KeyDiff(Dynamic):
    """-cos(k, A), A the mean direction of all live keys: keys unlike the others stay (arXiv 2504.15364). A is summed
    anew from the cache in each step: no state, no drift."""

    name = "keydiff"

    def rescore(self, state, q, k_cache, v_cache, probs, position, input_pos, scores, candidate):
        unit = F.normalize(k_cache.to(probs.dtype), dim=-1).masked_fill(position[..., None] < 0, 0.0)
        return -(unit * F.normalize(unit.sum(2, keepdim=True), dim=-1)).sum(-1), state


class TovaHead(Dynamic):
    """The attention that the newest query gives a token, mean over the query heads of a KV head. Memoryless. A
    variant of TOVA with sinks and a window; a probability that underflows ties with others, and the older goes."""

    name = "tova-head"

    def rescore(self, state, q, k_cache, v_cache, probs, position, input_pos, scores, candidate):
        return self.per_group(probs).mean(2), state


class TovaLayer(Dynamic):
    """TOVA as published (arXiv 2401.06104): mean over all heads of the layer, one decision for all its KV heads, which
    therefore hold the same token in each slot. Nothing is protected, see `geometry`."""

    name = "tova-layer"

    def rescore(self, state, q, k_cache, v_cache, probs, position, input_pos, scores, candidate):
        return probs.mean(1, keepdim=True).expand_as(scores), state


class H2O(Dynamic):
    """Attention received so far, summed over the queries since arrival (arXiv 2306.14048) and the heads of the group.
    The sum is the priority itself, so nothing more is kept. Old tokens had more queries: see `h2o-mean`."""

    name = "h2o"

    def rescore(self, state, q, k_cache, v_cache, probs, position, input_pos, scores, candidate):
        return scores + self.per_group(probs).sum(2), state


class H2OMean(Dynamic):
    """The same divided by the number of those queries, as a running mean."""

    name = "h2o-mean"

    def rescore(self, state, q, k_cache, v_cache, probs, position, input_pos, scores, candidate):
        age = input_pos[:, None, None] - position + 1  # queries that saw it, this one included
        return scores + (self.per_group(probs).sum(2) - scores) / age, state


class SnapKV(Dynamic):
    """SnapKV (arXiv 2404.14469) for decoding, after every step: the attention that the last n_queries queries give each
    token now (causal, over all live keys), mean over them and the group, average over `kernel` neighbours.
    Neighbours in order of position among the candidates: far apart where others were evicted; fewer at the ends.

    State: "queries" (B, H, n_queries, D), rotated, in the dtype of the cache; half an entry each, so n_queries is 8,
    as in the R-KV port, and not 64 as in kvpress: with groups of 2 those would cost 64 entries of a budget of 128.
    """

    name, defaults = "snapkv", {"n_queries": 8, "kernel": 5}

    def __init__(self, n_kv_head, head_dim, window, layer=0, seed=0, **options):
        super().__init__(n_kv_head, head_dim, window, layer, seed, **options)
        if self.kernel % 2 == 0 or not 1 <= self.n_queries <= (window or self.n_queries):
            raise ValueError(f"policy {self.name} wants an odd kernel and 1 to window ({window}) n_queries, "
                             f"got {self.kernel} and {self.n_queries}")

    def init_state(self, batch, device, dtype=torch.float32, group_size=1, cache_dtype=None):
        shape = batch, self.n_kv_head * group_size, self.n_queries, self.head_dim
        return {"queries": torch.zeros(shape, dtype=cache_dtype or dtype, device=device)}

    def observe(self, state, q, k, input_pos):
        """Take in q -> state, logits (B, H_kv, group_size, n_queries, N), position of each query (B, n_queries),
        negative where there is none yet."""
        entry, newest = torch.arange(self.n_queries, device=q.device), input_pos[:, None]
        here = (newest % self.n_queries == entry)[:, None, :, None]
        queries = torch.where(here, q[:, :, None], state["queries"])  # (B, H, n_queries, D)
        logits = self.per_group(queries).flatten(2, 3).to(k.dtype) @ k.mT * self.head_dim**-0.5
        return {"queries": queries}, logits.unflatten(2, (-1, self.n_queries)), newest - (newest - entry) % self.n_queries

    @staticmethod
    def importance(logits, sees, at):
        """Mean over queries and heads of the softmax over keys that a query sees -> (B, H_kv, N)."""
        probs = logits.masked_fill(~sees, FLOOR).softmax(-1)
        weight = (at >= 0).to(probs.dtype) / (at >= 0).sum(-1, keepdim=True)  # (B, n_queries)
        return (probs * weight[:, None, None, :, None]).sum(-2).mean(2)

    def neighbours(self, x, position, candidate):
        """(B, H_kv, N) -> as many views (B, H_kv, N, kernel) on x and on candidate around each slot, by position, and
        how to put a result back; what is no candidate is 0 and comes last."""
        order = position.masked_fill(~candidate, 2**31 - 1).argsort(-1)
        x, there = x.masked_fill(~candidate, 0.0).gather(-1, order), candidate.to(x.dtype).gather(-1, order)
        x, there = (F.pad(z, (self.kernel // 2,) * 2).unfold(-1, self.kernel, 1) for z in (x, there))
        return x, there, lambda pooled: torch.empty_like(pooled).scatter_(-1, order, pooled)

    def rescore(self, state, q, k_cache, v_cache, probs, position, input_pos, scores, candidate):
        state, logits, at = self.observe(state, q, k_cache.to(probs.dtype), input_pos)
        slot = position[:, :, None, None]  # (B, H_kv, 1, 1, N)
        mass = self.importance(logits, (slot >= 0) & (slot <= at[:, None, None, :, None]), at)
        mass, there, put_back = self.neighbours(mass, position, candidate)
        return put_back(mass.sum(-1) / there.sum(-1).clamp(min=1.0)), state


class RKV(SnapKV):
    """R-KV (arXiv 2505.24133) after every step: mix * importance - (1 - mix) * redundancy.

    Importance: logits, max over the group, softmax over the candidates, mean over the queries, max over neighbours.
    Redundancy: cosines of live keys without the diagonal; each row forgives its newest look-alike (cos > threshold; a
    row without one forgives nothing); mean over rows, softmax over live columns. The constants are the authors' code's.
    """

    name, defaults = "rkv", {"n_queries": 8, "kernel": 7, "mix": 0.07, "threshold": 0.5}

    def rescore(self, state, q, k_cache, v_cache, probs, position, input_pos, scores, candidate):
        live = position >= 0
        k = k_cache.to(probs.dtype).masked_fill(~live[..., None], 0.0)
        state, logits, at = self.observe(state, q, k, input_pos)
        mass = self.importance(logits.amax(2, keepdim=True), candidate[:, :, None, None], at)
        mass, _, put_back = self.neighbours(mass, position, candidate)
        unit = F.normalize(k, dim=-1)
        cos = (unit @ unit.mT).masked_fill(torch.eye(k.shape[2], dtype=torch.bool, device=k.device), 0.0)
        column = position[:, :, None]  # (B, H_kv, 1, N)
        alike = cos > self.threshold
        newest = torch.where(alike, column, -1).amax(-1, keepdim=True)  # (B, H_kv, N, 1)
        cos = cos.masked_fill(alike & (column == newest), 0.0)
        redundancy = (cos.sum(-2) / live.sum(-1, keepdim=True)).masked_fill(~live, FLOOR).softmax(-1)
        return self.mix * put_back(mass.amax(-1)) - (1 - self.mix) * redundancy, state


class VaSE(Dynamic):
    """Random, but candidates whose value norm is in the top `percent` go last (arXiv 2606.03928, our reading). 10 is
    the middle of 5, 10, 20: at 128 to 512 entries it keeps 6 to 40 of them safe."""

    name, defaults = "vase", {"percent": 10}

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        if type(self.percent) is not int or not 0 <= self.percent <= 100:
            raise ValueError(f"policy vase wants an integer percent from 0 to 100, got {self.percent}")

    def rescore(self, state, q, k_cache, v_cache, probs, position, input_pos, scores, candidate):
        norm = torch.linalg.vector_norm(v_cache.to(probs.dtype), dim=-1).masked_fill(~candidate, -1.0)
        n_safe = candidate.sum(-1, keepdim=True) * self.percent // 100  # rounded down
        bar = norm.sort(-1, descending=True).values.gather(-1, (n_safe - 1).clamp(min=0))
        safe = (norm >= bar) & (n_safe > 0)
        return hash_uniform(self.seed, self.layer, self.n_kv_head, position).to(probs.dtype) + safe, state


# ----------------------------------------------------------------------------------------------------------------------
# learned policies


class LearnedScorer(Scorer):
    """What the learned scorers share: weights per KV head, a learned decay gamma_h.

    log gamma_h = log gamma_min + sigmoid(alpha_h) (log gamma_max - log gamma_min), alpha_h = 0 at the start.
    No score bias: rankings and the boundary loss see differences only, so it would never get a gradient.
    """

    def __init__(self, n_kv_head, head_dim, window, layer=0, seed=0, decay=True, gamma_min=0.999, gamma_max=0.999999,
                 **unknown):
        super().__init__(n_kv_head, head_dim, window, layer, seed, **unknown)
        self.window = window
        self.gamma_range = (math.log(gamma_min), math.log(gamma_max))
        self.alpha = nn.Parameter(torch.zeros(n_kv_head, device="cpu")) if decay else None

    def normal(self, rows, columns, salt):
        """(H_kv, rows, columns) fp32, unit normal. A generator of its own: the start depends on (seed, layer, salt)
        only, and the global stream stays where it was."""
        rng = torch.Generator().manual_seed(_mix(_mix(self.seed + 1) ^ _mix(self.layer + 0x3C6EF372) ^ salt))
        return torch.randn(self.n_kv_head, rows, columns, generator=rng, device="cpu")

    def weight(self, name, like):
        return getattr(self, name).to(like.dtype)

    def per_head(self, x, name):
        """x (B, H_kv, T, I) times the weight (H_kv, I, O) -> (B, H_kv, T, O)."""
        return torch.einsum("bhti,hio->bhto", x, self.weight(name, x))

    def log_gamma(self):
        if self.alpha is None:
            return None
        low, high = self.gamma_range
        return low + torch.sigmoid(self.alpha.to(self.work_dtype(self.alpha))) * (high - low)


def mlstm_param_count(head_dim, skip_width):
    """Parameters per KV head of `MLSTM`, alpha aside: projections, two gates with bias, read vector, skip path."""
    return 3 * 2 * head_dim * (head_dim // 2) + 2 * (2 * head_dim + 1) + head_dim // 2 + (2 * head_dim + 1) * skip_width


class MLP(LearnedScorer):
    """kvpop-mlp: c^T SiLU(W x + b) per KV head with x = [k; v], stateless; c = 0, so equal scores at the start.

    The hidden width follows from the parameter count of `MLSTM` with its skip path at the same head_dim, so that
    comparing the two compares memory and not size (320 at D = 128; 191 would match an mLSTM without skip).
    """

    name = "kvpop-mlp"

    def __init__(self, n_kv_head, head_dim, window, layer=0, seed=0, hidden=None, **options):
        super().__init__(n_kv_head, head_dim, window, layer, seed, **options)
        x_dim = self.x_dim()
        hidden = hidden or round(mlstm_param_count(head_dim, head_dim) / (x_dim + 2))
        self.w_hidden = nn.Parameter(self.normal(x_dim, hidden, salt=1) / x_dim**0.5)
        self.b_hidden = nn.Parameter(torch.zeros(n_kv_head, hidden, device="cpu"))
        self.w_score = nn.Parameter(torch.zeros(n_kv_head, hidden, 1, device="cpu"))

    def x_dim(self):
        return 2 * self.head_dim

    def x(self, k, v, pos):
        return torch.cat([k, v], dim=-1)  # (B, H_kv, T, 2D)

    def score(self, k, v, pos):
        x = self.x(k, v, pos)
        z = self.per_head(x, "w_hidden") + self.weight("b_hidden", x)[:, None]  # (B, H_kv, T, hidden)
        return self.per_head(F.silu(z), "w_score").squeeze(-1)  # (B, H_kv, T)


class Position(MLP):
    """position, a control: x is a function of t alone, log t and the sines and cosines of 16 wavelengths (6 to 35,000).
    What it reaches is what the task gives away by position."""

    name = "position"

    def x_dim(self):
        return 33

    def x(self, k, v, pos):
        t = pos.clamp(min=0).to(k.dtype)[:, None, :, None]  # (B or 1, 1, T, 1)
        angle = t * 1e4 ** (torch.arange(16, device=k.device, dtype=k.dtype) / -16)
        return torch.cat([t.log1p() / 8, angle.sin(), angle.cos()], -1).expand(-1, self.n_kv_head, -1, -1)


class DMSCap(MLP):
    """dms-cap: the gate of DMS (arXiv 2506.05345) under a fixed budget. The logit read from [k; v] of token t + 1
    decides about token t; priority = -logit, so marked tokens (logit > 0) go first. The offset starts every gate open:
    sigmoid(-5) = 0.7 % marked. Of the size of kvpop, where the original has one linear map."""

    name, shift, delayed = "dms-cap", 1, True

    def __init__(self, *args, offset=5.0, **options):
        super().__init__(*args, **{"decay": False, **options})
        self.offset = offset

    def logits(self, k, v):
        """Eviction logits of whole rows: (B, H_kv, T, D) twice -> (B, H_kv, T) fp32; the last token has none: 0."""
        with torch.autocast(k.device.type, enabled=False):
            k, v = (z.detach().to(self.work_dtype(z))[:, :, 1:] for z in (k, v))
            return F.pad(-self.score(k, v, None), (0, 1))

    def score(self, k, v, pos):
        return self.offset - super().score(k, v, pos)

    def score_all(self, k, v, real):
        return -self.logits(k, v), {}


class MLSTM(LearnedScorer):
    """kvpop: an mLSTM per KV head that takes in every token and reads each one when it leaves the window (App. A, E).

        score_u = a^T SiLU(h_u) + c^T SiLU(W_s x_u),   h_u = phi(q_u)^T C_q / phi(q_u)^T n_q,   q = u + window
        phi(z) = [softmax(z); softmax(-z)] (Hedgehog), i = exp(a_i), f = sigmoid(a_f), a = 15 tanh(linear(x) / 15)

    Features are positive, so h is a convex mix of past values. State per row and head: C (D, D/2), n (D), m (1), fp32.
    Start: W_q = W_k = random orthonormal columns on the key half of x, W_v likewise on the value half. Orthonormal
    keeps the RMS of a key in its features at every head_dim (softmax logits of order 1 for normed keys: neither flat
    nor one-hot), and W_q = W_k makes a token read the values of keys like its own. a = c = 0: equal scores, so with
    decay it begins as StreamingLLM. Gate weights 0, input bias 0, forget bias 5..8 over heads: memory of 150..3000
    tokens (about 1500 at the long end after the soft cap); the usual 3..6 would have forgotten a token before its
    delayed read.
    skip_width: default D, 0 = none. delay: None = window, 0 = read at the token's own time (parallel form only; policy
    kvpop-nodelay decodes too).
    """

    name = "kvpop"

    def __init__(self, n_kv_head, head_dim, window, layer=0, seed=0, skip_width=None, chunk=64, soft_cap=15.0,
                 delay=None, **options):
        super().__init__(n_kv_head, head_dim, window, layer, seed, **options)
        if head_dim % 2:
            raise ValueError(f"policy {self.name} splits head_dim in two halves, so it must be even, got {head_dim}")
        if delay not in (None, 0, window):
            raise ValueError(f"policy {self.name}: delay must be the window ({window}) or 0, got {delay}")
        D, half = head_dim, head_dim // 2
        self.chunk, self.soft_cap, self.delay = chunk, soft_cap, window if delay is None else delay
        self.delayed = self.delay > 0
        skip_width = D if skip_width is None else skip_width
        key_basis, value_basis = (torch.linalg.qr(self.normal(D, half, salt=i)).Q for i in (1, 2))  # (H_kv, D, D/2)
        self.w_q, self.w_k = (nn.Parameter(F.pad(key_basis, (0, 0, 0, D))) for _ in "qk")  # (H_kv, 2D, D/2), equal
        self.w_v = nn.Parameter(F.pad(value_basis, (0, 0, D, 0)))  # (H_kv, 2D, D/2)
        self.w_gate = nn.Parameter(torch.zeros(n_kv_head, 2 * D, 2, device="cpu"))  # input gate, forget gate
        forget = torch.linspace(5.0, 8.0, n_kv_head, device="cpu")
        self.b_gate = nn.Parameter(torch.stack([torch.zeros_like(forget), forget], dim=-1))  # (H_kv, 2)
        self.w_score = nn.Parameter(torch.zeros(n_kv_head, half, 1, device="cpu"))  # a
        self.w_skip = nn.Parameter(self.normal(2 * D, skip_width, salt=3) / (2 * D) ** 0.5)  # W_s
        self.w_skip_score = nn.Parameter(torch.zeros(n_kv_head, skip_width, 1, device="cpu"))  # c

    @staticmethod
    def phi(z):
        return torch.cat([z.softmax(-1), (-z).softmax(-1)], dim=-1)  # (..., D/2) -> (..., D), positive

    def write(self, x):
        """x (B, H_kv, T, 2D) -> features k (.., T, D), values (.., T, D/2), input gate and log forget gate (.., T)."""
        gate = self.per_head(x, "w_gate") + self.weight("b_gate", x)[:, None]  # (B, H_kv, T, 2)
        if self.soft_cap:
            gate = self.soft_cap * torch.tanh(gate / self.soft_cap)
        ig, lf = gate[..., 0], F.logsigmoid(gate[..., 1])
        return self.phi(self.per_head(x, "w_k")), self.per_head(x, "w_v"), ig, lf

    def read(self, h, x):
        """What was read, h (B, H_kv, T, D/2), and the token itself, x (B, H_kv, T, 2D) -> score (B, H_kv, T)."""
        skip = self.per_head(F.silu(self.per_head(x, "w_skip")), "w_skip_score")
        return (self.per_head(F.silu(h), "w_score") + skip).squeeze(-1)

    def score_all(self, k, v, real):
        x, T = torch.cat([k, v], dim=-1), k.shape[2]
        k_feat, value, ig, lf = self.write(x)
        if real is not None:  # a pad neither enters the state nor lets it decay
            ig, lf = ig.masked_fill(~real[:, None], FLOOR), lf.masked_fill(~real[:, None], 0.0)
        delay = min(self.delay, T)
        q_feat = F.pad(self.phi(self.per_head(x, "w_q")), (0, 0, delay, 0))[:, :, :T]  # q reads for token q - delay
        h, C, n, m = mlstm_chunkwise(q_feat, k_feat, value, ig, lf, self.chunk)  # (B, H_kv, T, D/2), state
        scores = self.read(h[:, :, delay:], x[:, :, : T - delay])  # (B, H_kv, T - delay)
        return F.pad(scores, (0, delay)), {"C": C, "n": n, "m": m}

    def init_state(self, batch, device, dtype=torch.float32, group_size=1, cache_dtype=None):
        C = torch.zeros(batch, self.n_kv_head, self.head_dim, self.head_dim // 2, device=device, dtype=dtype)
        n = C.new_zeros(C.shape[:3])
        return {"C": C, "n": n, "m": C.new_full(C.shape[:2], FLOOR)}

    def score_one(self, state, k, v, k_leave, v_leave, leave_pos):
        if not self.delayed:  # the score would be token q's, and nothing here keeps it until q leaves the window
            raise ValueError("policy kvpop with delay=0 has no one-step form; use policy kvpop-nodelay")
        return self.advance(state, k, v, k_leave, v_leave)

    def advance(self, state, k, v, k_read, v_read):
        """Token q into the state, then the score of the token to be read -> (B, H_kv), state."""
        k_feat, value, ig, lf = (z.squeeze(2) for z in self.write(torch.cat([k, v], dim=-1)[:, :, None]))
        m = torch.maximum(lf + state["m"], ig)  # (B, H_kv)
        f, i = (lf + state["m"] - m).exp()[..., None], (ig - m).exp()[..., None]  # (B, H_kv, 1)
        C = f[..., None] * state["C"] + (i * k_feat)[..., None] * value[..., None, :]  # (B, H_kv, D, D/2)
        n = f * state["n"] + i * k_feat  # (B, H_kv, D)
        x = torch.cat([k_read, v_read], dim=-1)[:, :, None]  # (B, H_kv, 1, 2D)
        q_feat = self.phi(self.per_head(x, "w_q"))  # (B, H_kv, 1, D)
        h = (q_feat @ C) / (q_feat @ n[..., None]).clamp(min=TINY)  # (B, H_kv, 1, D/2)
        return self.read(h, x).squeeze(-1), {"C": C, "n": n, "m": m}


class MLSTMNoDelay(MLSTM):
    """kvpop-nodelay: the same scorer, but each token is read at its own time. It is decided when it leaves the window,
    so decoding keeps the last `window` scores: state "ring" (B, H_kv, window) fp32, entry t % window."""

    name = "kvpop-nodelay"

    def __init__(self, *args, **options):
        super().__init__(*args, **{"delay": 0, **options})
        if self.delay:
            raise ValueError(f"policy {self.name} reads without delay; for delay={self.delay} use policy kvpop")

    def init_state(self, batch, device, dtype=torch.float32, group_size=1, cache_dtype=None):
        ring = torch.zeros(batch, self.n_kv_head, self.window, device=device, dtype=dtype)
        return super().init_state(batch, device, dtype) | {"ring": ring}

    def score_all(self, k, v, real):
        scores, state = super().score_all(k, v, real)
        T, entry = k.shape[2], torch.arange(self.window, device=k.device)
        last = (entry.new_full(k.shape[:1], T) if real is None else real.sum(-1))[:, None] - 1  # (B, 1)
        newest = (last - (last - entry) % self.window)[:, None].expand(-1, self.n_kv_head, -1)  # (B, H_kv, window)
        return scores, state | {"ring": scores.gather(-1, newest.clamp(min=0)).masked_fill(newest < 0, 0.0)}

    def score_one(self, state, k, v, k_leave, v_leave, leave_pos):
        now, new = self.advance(state, k, v, k, v)
        here = (leave_pos[:, None] % self.window == torch.arange(self.window, device=k.device))[:, None]
        leaving = (state["ring"] * here).sum(-1)  # (B, H_kv): q and u = q - window share their entry
        return leaving, new | {"ring": torch.where(here, now[..., None], state["ring"])}


# ----------------------------------------------------------------------------------------------------------------------
# making, saving, loading

_CLASSES = {c.name: c for c in (Streaming, Random, RandomPrompt, KNorm, KeyDiff, TovaLayer, TovaHead, H2O, H2OMean, SnapKV,
                                RKV, VaSE, Oracle, DMSCap, MLP, MLSTM, MLSTMNoDelay, Position)}


def check_policy(policy):
    """ValueError: unknown policy."""
    if policy not in POLICIES:
        raise ValueError(f"unknown policy '{policy}'; choose one of: {', '.join(POLICIES)}")


def state_entries(policy, head_dim, group_size=None, window=None, **options):
    """Budget entries (one bf16 key and value each, 4 D bytes) that the policy's own state costs: kvpop's C, D x D/2 in
    fp32, is D/2 entries and its normaliser n one more; kvpop-nodelay adds `window` fp32 scores; snapkv and rkv keep
    n_queries bf16 queries for each of group_size query heads. The others keep nothing but priority and position
    (random-prompt: one prompt length a row). ValueError: unknown policy, or group_size or window not said."""
    check_policy(policy)
    if policy in ("snapkv", "rkv"):
        if group_size is None:
            raise ValueError(f"policy {policy} keeps queries: give state_entries the group_size (query heads a KV head)")
        n_queries = options.get("n_queries", _CLASSES[policy].defaults["n_queries"])
        return -(-n_queries * group_size // 2)
    if policy == "kvpop-nodelay":
        if window is None:
            raise ValueError(f"policy {policy} keeps a score for each token of the window: give state_entries the window")
        return head_dim // 2 + 1 + -(-window // head_dim)
    return head_dim // 2 + 1 if policy == "kvpop" else 0


def geometry(policy, n_sink, window):
    """-> n_sink, window as the policy defines them: tova-layer protects nothing but the query's own token."""
    return (0, 1) if policy == "tova-layer" else (n_sink, window)


def make_scorer(policy, *, n_kv_head, head_dim, window, layer, seed=0, **options):
    """A scorer for one layer, on CPU in fp32. Options are the keyword arguments of the policy's class.

    ValueError: unknown policy or option, `dense` (it evicts nothing), window < 1."""
    check_policy(policy)
    if policy == "dense":
        raise ValueError("policy dense keeps every token, so it has no scorer; run it without one")
    if window is not None and window < 1:
        raise ValueError(f"window counts the query itself, so it must be at least 1, got {window}")
    scorer = _CLASSES[policy](n_kv_head, head_dim, window, layer, seed, **options)
    scorer.options = {"seed": seed, **options}
    return scorer


def make_scorers(policy, *, n_layer, **shape):
    """One scorer per layer as an nn.ModuleList; shape and options as for `make_scorer`."""
    return nn.ModuleList(make_scorer(policy, layer=i, **shape) for i in range(n_layer))


def check_window(scorers, window):
    """ValueError when a learned scorer was trained with another window than the cache is to have."""
    for s in scorers:
        if s.window is not None and s.window != window:
            raise ValueError(f"the {s.name} scorer of layer {s.layer} was trained with window {s.window}, "
                             f"not {window}: use window {s.window} or train another")


def save_scorers(scorers, folder, spec_dict):
    """Write scorer.safetensors (fp32, whatever the dtype in use) and scorer.json; both appear whole or not at all.

    spec_dict: n_sink, window, budget (and more if you like), stored beside the policy, its sizes and options.
    ValueError: a setting missing, layers that differ, a window that is not the scorers' own."""
    from safetensors.torch import save_file

    first = scorers[0]
    for key in ("n_sink", "window", "budget"):
        if key not in spec_dict:
            raise ValueError(f"save_scorers: the settings lack '{key}'")
    if any((s.name, s.options) != (first.name, first.options) for s in scorers):
        raise ValueError("save_scorers: all layers must have the same policy and options")
    check_window(scorers, spec_dict["window"])
    settings = {"policy": first.name, "n_layer": len(scorers), "n_kv_head": first.n_kv_head, "head_dim": first.head_dim,
                **spec_dict, "options": first.options}
    tensors = {f"{i}.{name}": p.detach().float().cpu().contiguous().clone()
               for i, s in enumerate(scorers) for name, p in s.named_parameters()}
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "scorer.safetensors.tmp", metadata={"format": "pt"})
    os.replace(folder / "scorer.safetensors.tmp", folder / "scorer.safetensors")
    (folder / "scorer.json.tmp").write_text(json.dumps(settings, indent=2) + "\n")
    os.replace(folder / "scorer.json.tmp", folder / "scorer.json")


def load_scorers(folder):
    """-> (ModuleList with one scorer per layer, on CPU in fp32; settings dict of scorer.json).

    FileNotFoundError: a file is missing. ValueError: a pickle in its place, an unreadable file, and every tensor that
    is missing, unknown or of another shape or dtype, by name, before any is read."""
    from safetensors import SafetensorError, safe_open

    folder = Path(folder)
    path = folder / "scorer.safetensors"
    if not path.is_file():
        pickles = sorted(p.name for p in folder.glob("*") if p.suffix in (".bin", ".pt", ".pth", ".pkl", ".ckpt"))
        if pickles:
            raise ValueError(f"{folder / pickles[0]} is a pickle, and those can run code: convert it to safetensors")
        raise FileNotFoundError(f"no scorer in {folder}: scorer.safetensors is missing")
    if not (folder / "scorer.json").is_file():
        raise FileNotFoundError(f"no scorer in {folder}: scorer.json is missing")
    try:
        settings = json.loads((folder / "scorer.json").read_text())
        args = {key: settings[key] for key in ("policy", "n_kv_head", "head_dim", "window")} | settings["options"]
        scorers = make_scorers(**args, n_layer=settings["n_layer"])
    except (json.JSONDecodeError, KeyError, TypeError) as err:
        raise ValueError(f"{folder / 'scorer.json'} is not a scorer description: {err!r}") from None
    want = {name: list(p.shape) for name, p in scorers.named_parameters()}
    try:
        with safe_open(path, framework="pt") as f:
            have = {name: (f.get_slice(name).get_shape(), f.get_slice(name).get_dtype()) for name in f.keys()}
            wrong = [f"{name} is missing" for name in want if name not in have]
            wrong += [f"{name} is not ours" for name in have if name not in want]
            wrong += [f"{name} is {dtype} {shape}, not F32 {want[name]}" for name, (shape, dtype) in have.items()
                      if name in want and (shape, dtype) != (want[name], "F32")]
            if wrong:
                raise ValueError(f"{path} does not fit scorer.json: " + "; ".join(wrong))
            tensors = {name: f.get_tensor(name) for name in have}
    except SafetensorError as err:
        raise ValueError(f"{path} is not a whole safetensors file ({err}); copy or convert it again") from None
    scorers.load_state_dict(tensors)
    return scorers, settings
