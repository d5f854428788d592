"""Every eviction policy as a scorer: keys and values in, one fp32 score per token and KV head out, higher = keep.

- A scorer only scores: budget, ranking, masks and the cache live elsewhere, so a new policy is one class here.
- Static policies score a token once, when it leaves the window, in two forms that must agree: `forward` over a sequence
  (training, prefill), `step` for one token (decode). Dynamic ones score the whole cache after every step: `rescore`.
- Inputs are the *cached* keys (after RoPE and q/k-norm) and values, detached: no gradient reaches the base model.
- The mLSTM departs from the usual one: the score of token u is read at query u + window (delayed), features of q and k
  are positive, no output gate, no max() normaliser, no loop over chunks (one decay matrix times the chunks' updates).
- Arithmetic is fp32 whatever autocast says, fp64 if the module is fp64. Method: KVpop, arXiv 2607.05061, App. A and E.
Letters: B batch, T tokens, H_kv KV heads, D head_dim, N slots of the cache, n chunks of L tokens.
"""
import math

import torch
import torch.nn.functional as F
from torch import nn

from data.noise import hash_uniform, mix
from data.products import FEW_ROWS, narrow_pays, narrow_product, rows_product, step_product, step_terms
from model import lay_side_by_side

POLICIES = ("dense", "streaming", "random", "random-prompt", "knorm", "keydiff", "tova-layer", "tova-head", "h2o",
            "h2o-mean", "snapkv", "rkv", "vase", "dms-cap", "kvpop-mlp", "kvpop", "kvpop-nodelay", "position", "oracle")
LEARNED = ("dms-cap", "kvpop-mlp", "kvpop", "kvpop-nodelay", "position")  # these need a checkpoint
FLOOR = -1e30  # "log of nothing": a finite stand-in for -inf, because -inf - (-inf) is NaN
_CLASSES = {}  # policy -> class, filled in by the classes themselves
TINY = 1e-30  # smallest denominator; phi(q).n itself gets as small as 4e-22, so 1e-6 or 1e-20 would change scores

# ------------------------------------------------------------------------------------ The mLSTM without its projections

def _sums_after(z):
    """(..., n) -> (..., n, n): entry [i, j] is the sum of z over j < u <= i (0 where j >= i). No difference of two
    cumulative sums, which cancels when a gate nearly closes; no matmul, so TF32 cannot touch the exponents."""
    later = torch.ones(z.shape[-1], z.shape[-1], dtype=torch.bool, device=z.device).tril(-1)  # [u, j]: u > j
    return z[..., :, None].masked_fill(~later, 0.0).cumsum(-2)


def mlstm_chunkwise(q, k, v, ig, lf, chunk=64):
    """C = f C + i k v^T, n = f n + i k, h = q C / q n (arXiv 2405.04517), without a loop and for any gates.

    q, k (B, H, T, Dk) with positive features, v (B, H, T, Dv), ig = log i and lf = log f (B, H, T); fp32 or fp64.
    Returns h (B, H, T, Dv) and the state after the last token: C (B, H, Dk, Dv) and n (B, H, Dk), both divided by
    exp(m), and m (B, H). h does not depend on the stabilisers m, so they are constants in the backward pass.
    Any T: the tail is filled with tokens that neither enter nor decay. chunk >= T is the fully parallel form."""
    T, (dk, dv) = q.shape[2], (k.shape[-1], v.shape[-1])
    L = min(chunk, T)
    n, pad = -(-T // L), -T % L
    above = lambda n: torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)  # noqa: E731
    q, k, v = (F.pad(z, (0, 0, 0, pad)).unflatten(2, (n, L)) for z in (q, k, v))  # (B, H, n, L, .)
    ig = F.pad(ig, (0, pad), value=FLOOR).unflatten(2, (n, L))  # (B, H, n, L)
    lf = F.pad(lf, (0, pad)).unflatten(2, (n, L))  # (B, H, n, L)
    # within a chunk: weight[i, j] = exp(ig_j + sum of lf over j < u <= i) for j <= i
    weight = (_sums_after(lf) + ig[..., None, :]).masked_fill(above(L), -math.inf)  # (B, H, n, L, L), a log
    since = lf.cumsum(-1)  # (B, H, n, L): decay of the incoming state, token i included
    # what each chunk adds to the state at its own end: the last row of `weight`
    last = weight[..., -1, :]  # (B, H, n, L)
    m_add = last.detach().amax(-1)  # (B, H, n)
    scaled = k * (last - m_add[..., None]).exp()[..., None]  # (B, H, n, L, Dk)
    C_add = (scaled.mT @ v).flatten(-2)  # (B, H, n, Dk * Dv)
    n_add = scaled.sum(-2)  # (B, H, n, Dk)
    # from chunk to chunk: state[c] = sum over chunks p < c; row 0 is the zero state, row n the final one
    carry = (_sums_after(since[..., -1]) + m_add[..., None, :]).masked_fill(above(n), -math.inf)  # (B, H, n, n), a log
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

def best_chunk(T, head_dim):
    """The chunk, a power of two, with the fewest products: T * L * 3 D/2 inside chunks of L, (T / L)^2 * D^2 / 2 from
    one to the next. 64 at 2k, 128 at 16k, 256 at 128k tokens of head_dim 128."""
    return 1 << max(4, round(math.log2(max(1, 2 * T * head_dim / 3)) / 3))

# ----------------------------------------------------------------------------------------- The common shape of a policy

class Scorer(nn.Module):
    """Base class: dtype, detaching, padding and the window's edge. A stateless policy fills in `score`, one with state
    `score_all` and `score_ahead`, and `score_finish` and `settle` if it waits, a dynamic one `rescore`.

    Attributes: name (policy), n_kv_head, head_dim, layer, state_entries (what the state costs with one query head a KV
    head; the function of that name knows any), dynamic (ranks the whole cache at every step), delayed (the score of t
    reads tokens up to t + window), shift (`step` is handed token u + shift as the leaving one), window (the one it was
    made for; None = any), ranges (option -> default, least, most; None = the window), narrow (see `taken`), waits
    (`finish` needs token q), by_layer (scores depend on the layer's number)."""

    name, delayed, dynamic, narrow, shift, ranges, waits, by_layer = "", False, False, False, 0, {}, False, False

    def __init_subclass__(cls, **attributes):  # class Random(Scorer, name="random")
        for name, value in attributes.items():
            setattr(cls, name, value)
        _CLASSES[cls.name] = cls

    def __init__(self, n_kv_head, head_dim, window, layer=0, seed=0, **options):
        super().__init__()
        if unknown := options.keys() - self.ranges.keys():
            raise ValueError(f"policy {self.name} has no option '{min(unknown)}': see its class in scorer.py")
        for name, (default, least, most) in self.ranges.items():
            value, most = options.get(name, default), (window or math.inf) if most is None else most
            if not isinstance(value, (int, type(default))) or not least <= value <= most:
                raise ValueError(f"policy {self.name}: {name} must be {type(default).__name__}, {least} to {most}, "
                                 f"got {value}")
            setattr(self, name, value)
        self.n_kv_head, self.head_dim, self.layer, self.seed = n_kv_head, head_dim, layer, seed
        self.window = None  # learned scorers overwrite it: they only know what they were trained on
        self.state_entries = state_entries(self.name, head_dim, 1, window, **options)

    def work_dtype(self, like):
        """fp64 if the parameters (without any: the input) are fp64, else fp32."""
        dtype = next((p.dtype for p in self.parameters()), like.dtype)
        return torch.float64 if dtype == torch.float64 else torch.float32

    def taken(self, k, v):
        """k, v, of a sequence or (B, H_kv, D) of a step: constants in `work_dtype`, or, if `narrow`, bf16 as they came,
        where tensor cores then give the fp32 product sooner."""
        narrow = self.narrow and self.work_dtype(k) == torch.float32 and narrow_pays(k, v)
        if k.dim() == 3:
            narrow = getattr(self, "terms", None) is not None and len(k) > FEW_ROWS and k.dtype == torch.bfloat16
        return [z.detach() if narrow else z.detach().to(self.work_dtype(z)) for z in (k, v)]

    def forward(self, k, v, lengths=None, return_state=False):
        """Scores of a whole sequence: k, v (B, H_kv, T, D), any float dtype -> (B, H_kv, T) fp32 [, state].

        scores[..., t] is the score of token t as it is read at query t + window; entries still in the window
        (t >= T - window) carry none and are 0.0, but policies with window None score those too.
        lengths (B,) int64: rows are right-padded; T becomes the row's own length, pads score 0.0 and reach nothing,
        whatever they hold. state: tensors after each row's last real token, as `step` takes them ({} if stateless).
        ValueError: shapes that do not fit; a dynamic policy. Compiled, call it with autocast off outside too: Inductor
        runs a backward pass under the autocast of the call (measured on CPU: gradients wrong by 1e-2)."""
        B, T = k.shape[0], k.shape[2]
        if k.shape != v.shape or k.shape[1] != self.n_kv_head or k.shape[3] != self.head_dim:
            raise ValueError(f"scorer {self.name} wants keys and values (B, {self.n_kv_head}, T, {self.head_dim}), "
                             f"got {tuple(k.shape)} and {tuple(v.shape)}")
        pos = torch.arange(T, device=k.device)
        real = None if lengths is None else pos < lengths[:, None]  # (B, T)
        with torch.autocast(k.device.type, enabled=False):
            k, v = self.taken(k, v)
            if real is not None:  # zeroed, not only weighted by 0: 0 * inf is NaN, in the backward pass too
                k, v = (z.masked_fill(~real[:, None, :, None], 0.0) for z in (k, v))
            scores, state = self.score_all(k, v, real)  # (B, H_kv, T), dict
        left = pos + (self.window or 0) < (T if lengths is None else lengths[:, None])  # (T,) or (B, T)
        scores = scores.masked_fill(~left.expand(B, T)[:, None], 0.0)
        return (scores, state) if return_state else scores

    def init_state(self, batch, device, dtype=torch.float32, group_size=1, cache_dtype=None):
        return {}  # tensors by name: the state before the first token

    def step(self, state, k, v, k_leave, v_leave, leave_pos):
        """One decode step at query q: k, v (B, H_kv, D) are token q, taken into the state first; leave_pos (B,) int64
        is u = q - window, the token that leaves the window, and k_leave, v_leave (B, H_kv, D) are token u + shift.
        -> score of token u, (B, H_kv) fp32, and state. Rows with leave_pos < 0: finite, but means nothing."""
        score, news = self.finish(state, due := self.ahead(state, k_leave, v_leave, leave_pos), k, v)
        return score, self.settle(state, due | news)

    # A step in three parts, the first and the last for all layers at once if need be (data/together.py): what does not
    # need token q -> dict of (B, H_kv, ..); score of u, and what token q brings -> (B, H_kv), dict; the new state

    def ahead(self, state, k_leave, v_leave, leave_pos):
        with torch.autocast(k_leave.device.type, enabled=False):
            leave = [z.masked_fill((leave_pos < 0)[:, None, None], 0.0) for z in self.taken(k_leave, v_leave)]
            return self.score_ahead(state, *leave, leave_pos)

    def finish(self, state, due, k, v):
        if not self.waits:
            return due["score"], {}
        with torch.autocast(k.device.type, enabled=False):
            return self.score_finish(state, due, *self.taken(k, v))

    def settle(self, state, due):
        return state

    def score(self, k, v, pos):
        """A score from a token alone: k, v (B, H_kv, T, D), pos (B or 1, T) int64 -> (B or 1, H_kv, T)."""
        raise NotImplementedError

    def score_all(self, k, v, real):
        return self.score(k, v, torch.arange(k.shape[2], device=k.device)[None]).expand(k.shape[:3]), {}

    def score_ahead(self, state, k_leave, v_leave, leave_pos):
        return {"score": self.score(k_leave[:, :, None], v_leave[:, :, None], leave_pos[:, None]).squeeze(-1)}

    def log_gamma(self):
        """Decay per token of age, (H_kv,) fp32 < 0, or None for policies without it."""
        return None

# ----------------------------------------------------------------------------------- static policies without parameters

class Streaming(Scorer, name="streaming"):
    """Equal scores, so the newest stay (StreamingLLM, arXiv 2309.17453, but at absolute positions)."""
    def score(self, k, v, pos):
        return k.new_zeros(k.shape[:3])


class Random(Scorer, name="random", by_layer=True):
    """One number per (seed, layer, KV head, position), never redrawn: reservoir sampling of the past."""
    def score(self, k, v, pos):
        return hash_uniform(self.seed, self.layer, self.n_kv_head, pos[:, None])


class RandomPrompt(Random, name="random-prompt", prompt_lengths=None):
    """The prompt is never evicted (and counts); generated tokens compete by `random` (arXiv 2609.03430). State:
    "prompt" (B,) int64, each row's prompt length. For the parallel form the caller sets `prompt_lengths` (B,), which
    holds for one call only, so that no other rows meet it."""
    def init_state(self, batch, device, dtype=torch.float32, group_size=1, cache_dtype=None):
        return {"prompt": torch.zeros(batch, dtype=torch.int64, device=device)}

    def score_all(self, k, v, real):
        pos = torch.arange(k.shape[2], device=k.device)
        prompt, self.prompt_lengths = self.prompt_lengths, None
        if prompt is None:
            raise ValueError(f"policy {self.name}: set prompt_lengths of its scorers, (B,), before each parallel pass")
        return super().score_all(k, v, real)[0].masked_fill((pos < prompt[:, None])[:, None], 2.0), {"prompt": prompt}

    def score_ahead(self, state, k_leave, v_leave, leave_pos):
        score = super().score_ahead(state, k_leave, v_leave, leave_pos)["score"]
        return {"score": score.masked_fill((leave_pos < state["prompt"])[:, None], 2.0)}  # above every random number


class KNorm(Scorer, name="knorm"):
    """-||k||_2: small keys stay (arXiv 2406.11430). RoPE keeps norms; on Qwen3 only the k-norm gain varies them."""
    def score(self, k, v, pos):
        return -torch.linalg.vector_norm(k, dim=-1)


class Oracle(Scorer, name="oracle", scores=None, by_layer=True):
    """Scores handed in through `scorer.scores = (B, H_kv, T)`, usually future attention: the upper bound of what any
    scorer can do. `power` says which target that is to be (targets.future_attention); None = its default."""
    def __init__(self, *args, power=None, **options):
        super().__init__(*args, **options)
        self.power = power

    def score_all(self, k, v, real):
        if (got := getattr(self.scores, "shape", None)) != k.shape[:3]:
            raise ValueError(f"oracle of layer {self.layer}: set scorer.scores to a {tuple(k.shape[:3])} tensor first, "
                             f"it is {got and tuple(got)}")
        return self.scores.detach().to(k), {}

    def score_ahead(self, state, k_leave, v_leave, leave_pos):
        raise ValueError("policy oracle needs the future, so it cannot decode; use it in the parallel form only")

# ------ dynamic policies: every slot is scored again after the attention of each step, before the next token evicts one

class Dynamic(Scorer, dynamic=True):
    """Base class. No parallel form: what step q keeps follows from what step q - 1 kept."""
    def score_all(self, k, v, real):
        raise ValueError(f"policy {self.name} ranks the whole cache anew at every step, so it has no parallel form: "
                         "use generate or force of decode.py")

    def rescore(self, state, q, k_cache, v_cache, probs, position, input_pos, scores, candidate):
        """After the attention of query q at input_pos (B,), its own token in the cache: q (B, H, D) rotated, k_cache,
        v_cache (B, H_kv, N, D), probs (B, H, N) fp32 attention (0 on empty slots), position (B, H_kv, N) int32 (< 0:
        empty), scores (B, H_kv, N) what this said a step ago (0 on empty slots and the one just written), candidate
        (B, H_kv, N) bool: what the next step may evict, neither sinks nor its window.
        -> scores (B, H_kv, N) in the dtype of probs for ALL slots (on empty ones, which hold garbage, they mean
        nothing) and state. No branch on data, no wait for the device: a step is captured in a CUDA graph."""
        raise NotImplementedError

    def per_group(self, x):
        return x.unflatten(1, (self.n_kv_head, -1))  # (B, H, ...) -> (B, H_kv, group_size, ...)


class KeyDiff(Dynamic, name="keydiff"):
    """-cos(k, A), A the mean direction of all live keys, summed anew in each step (no state, no drift): keys unlike the
    others stay (arXiv 2504.15364)."""
    def rescore(self, state, q, k_cache, v_cache, probs, position, input_pos, scores, candidate):
        unit = F.normalize(k_cache.to(probs.dtype), dim=-1).masked_fill(position[..., None] < 0, 0.0)
        return -(unit * F.normalize(unit.sum(2, keepdim=True), dim=-1)).sum(-1), state


class TovaHead(Dynamic, name="tova-head"):
    """TOVA (arXiv 2401.06104), the attention of the newest query: tova-layer, as published, takes the mean over all
    heads, one decision for all KV heads of the layer, and protects nothing (`geometry`); tova-head is a variant with
    sinks and a window, the mean over a KV head's own query heads. Probabilities that underflow tie: the older goes."""
    def rescore(self, state, q, k_cache, v_cache, probs, position, input_pos, scores, candidate):
        mass = self.per_group(probs).mean(2)
        return mass.mean(1, keepdim=True).expand_as(mass) if self.name == "tova-layer" else mass, state


class H2O(Dynamic, name="h2o"):
    """Attention summed over all queries since arrival (arXiv 2306.14048) and over the group. The sum is the priority
    itself, so nothing more is kept. It favours old tokens, which had more queries; h2o-mean is the mean over those."""
    def rescore(self, state, q, k_cache, v_cache, probs, position, input_pos, scores, candidate):
        mass = self.per_group(probs).sum(2)
        age = input_pos[:, None, None] - position + 1  # queries that saw it, this one included
        return scores + (mass if self.name == "h2o" else (mass - scores) / age), state


class H2OMean(H2O, name="h2o-mean"): ...
class TovaLayer(TovaHead, name="tova-layer"): ...


class SnapKV(Dynamic, name="snapkv", ranges={"n_queries": (8, 1, None), "reach": (2, 0, 64)}):
    """SnapKV (arXiv 2404.14469) for decoding, after every step: the attention that the last n_queries queries give each
    token now (causal, over all live keys), mean over them and the group, then over `reach` neighbours on both sides:
    in order of position among the candidates, so far apart where others were evicted, and fewer at the ends.
    State: "queries" (B, H, n_queries, D), rotated, in the dtype of the cache. Each costs half an entry, so the default
    is 8, as in the R-KV port, and not kvpress's 64: with groups of 2 those would take 64 entries of a budget of 128."""
    def init_state(self, batch, device, dtype=torch.float32, group_size=1, cache_dtype=None):
        shape = batch, self.n_kv_head * group_size, self.n_queries, self.head_dim
        return {"queries": torch.zeros(shape, dtype=cache_dtype or dtype, device=device)}

    def observe(self, state, q, k, input_pos):
        """-> state with q, logits (B, H_kv, group_size, n_queries, N), query positions (B, n_queries), < 0 = none."""
        back = (input_pos[:, None] - torch.arange(self.n_queries, device=q.device)) % self.n_queries  # steps since
        queries = torch.where((back == 0)[:, None, :, None], q[:, :, None], state["queries"])  # (B, H, n_queries, D)
        logits = self.per_group(queries).flatten(2, 3).to(k.dtype) @ k.mT * self.head_dim**-0.5
        return {"queries": queries}, logits.unflatten(2, (-1, self.n_queries)), input_pos[:, None] - back

    @staticmethod
    def importance(logits, sees, at):  # mean over queries and heads of the softmax over what each sees: (B, H_kv, N)
        probs = logits.masked_fill(~sees, FLOOR).softmax(-1)
        weight = (at >= 0).to(probs.dtype) / (at >= 0).sum(-1, keepdim=True)  # (B, n_queries)
        return (probs * weight[:, None, None, :, None]).sum(-2).mean(2)

    def neighbours(self, x, position, candidate):
        """(B, H_kv, N) -> views (B, H_kv, N, 2 reach + 1) on x and candidate in order of position, zero beyond the
        candidates, and a function that puts a result in slot order again."""
        order = position.masked_fill(~candidate, 2**31 - 1).argsort(-1)
        x, there = x.masked_fill(~candidate, 0.0).gather(-1, order), candidate.to(x.dtype).gather(-1, order)
        x, there = (F.pad(z, (self.reach, self.reach)).unfold(-1, 2 * self.reach + 1, 1) for z in (x, there))
        return x, there, lambda pooled: torch.empty_like(pooled).scatter_(-1, order, pooled)

    def rescore(self, state, q, k_cache, v_cache, probs, position, input_pos, scores, candidate):
        state, logits, at = self.observe(state, q, k_cache.to(probs.dtype), input_pos)
        slot = position[:, :, None, None]  # (B, H_kv, 1, 1, N)
        mass = self.importance(logits, (slot >= 0) & (slot <= at[:, None, None, :, None]), at)
        mass, there, put_back = self.neighbours(mass, position, candidate)
        return put_back(mass.sum(-1) / there.sum(-1).clamp(min=1.0)), state


class RKV(SnapKV, name="rkv", ranges={"n_queries": (8, 1, None), "reach": (3, 0, 64), "mix": (0.07, 0, 1),
                                       "threshold": (0.5, -1, 1)}):
    """R-KV (arXiv 2505.24133) after every step: mix * importance - (1 - mix) * redundancy; the authors' constants.
    Importance: logits, max over the group, softmax over the candidates, mean over the queries, max over neighbours.
    Redundancy: cosines of live keys without the diagonal; each row forgives its newest look-alike (cos > threshold; a
    row without one forgives nothing); mean over rows, softmax over live columns."""
    def rescore(self, state, q, k_cache, v_cache, probs, position, input_pos, scores, candidate):
        live = position >= 0
        k = k_cache.to(probs.dtype).masked_fill(~live[..., None], 0.0)
        state, logits, at = self.observe(state, q, k, input_pos)
        mass = self.importance(logits.amax(2, keepdim=True), candidate[:, :, None, None], at)
        mass, _, put_back = self.neighbours(mass, position, candidate)
        unit, column = F.normalize(k, dim=-1), position[:, :, None]  # (B, H_kv, N, D), (B, H_kv, 1, N)
        cos = (unit @ unit.mT).masked_fill(column.mT == column, 0.0)  # (B, H_kv, N, N), without the diagonal
        alike = cos > self.threshold
        cos = cos.masked_fill(alike & (column == torch.where(alike, column, -1).amax(-1, keepdim=True)), 0.0)
        redundancy = (cos.sum(-2) / live.sum(-1, keepdim=True)).masked_fill(~live, FLOOR).softmax(-1)
        return self.mix * put_back(mass.amax(-1)) - (1 - self.mix) * redundancy, state


class VaSE(Dynamic, name="vase", ranges={"percent": (10, 0, 100)}):
    """Random, but candidates whose value norm is in the top `percent` go last (arXiv 2606.03928, our reading). 10 is
    the middle of 5, 10, 20: at budgets of 128 to 512 it keeps 6 to 44 of them safe."""
    def rescore(self, state, q, k_cache, v_cache, probs, position, input_pos, scores, candidate):
        norm = torch.linalg.vector_norm(v_cache.to(probs.dtype), dim=-1).masked_fill(~candidate, -1.0)
        n_safe = candidate.sum(-1, keepdim=True) * self.percent // 100  # rounded down
        bar = norm.sort(-1, descending=True).values.gather(-1, (n_safe - 1).clamp(min=0))
        random = hash_uniform(self.seed, self.layer, self.n_kv_head, position).to(probs.dtype)
        return random + ((norm >= bar) & (n_safe > 0)), state

# ----------------------------------------------------------------------------------------------------- learned policies

class LearnedScorer(Scorer):
    """Weights per KV head and a learned decay, alpha_h = 0 at the start:
    log gamma_h = log gamma_min + sigmoid(alpha_h) (log gamma_max - log gamma_min).
    No score bias: rankings and the boundary loss see differences only, so it would never get a gradient."""
    def __init__(self, n_kv_head, head_dim, window, layer=0, seed=0, decay=True, gamma_min=0.999, gamma_max=0.999999,
                 **unknown):
        super().__init__(n_kv_head, head_dim, window, layer, seed, **unknown)
        self.window, self.gamma_range = window, (math.log(gamma_min), math.log(gamma_max))
        self.alpha = nn.Parameter(torch.zeros(n_kv_head, device="cpu")) if decay else None

    def normal(self, rows, columns, salt):
        """(H_kv, rows, columns) fp32, unit normal, from (seed, layer, salt) alone: the global stream stays put."""
        rng = torch.Generator().manual_seed(mix(mix(self.seed + 1) ^ mix(self.layer + 0x3C6EF372) ^ salt))
        return torch.randn(self.n_kv_head, rows, columns, generator=rng, device="cpu")

    def weight(self, name, like):
        return getattr(self, name).to(like.dtype)

    def per_head(self, x, name):
        """x (B, H_kv, T, I) times the weight (H_kv, I, O) -> (B, H_kv, T, O)."""
        if x.shape[2] == 1:  # a decode step
            return rows_product(x.squeeze(2), self.weight(name, x))[:, :, None]
        # not einsum, whose weight gradient is H_kv products of length B * T; bf16: see `taken`
        return narrow_product(x, getattr(self, name)) if x.dtype == torch.bfloat16 else x @ self.weight(name, x)

    def log_gamma(self):
        if self.alpha is None:
            return None
        low, high = self.gamma_range
        return low + torch.sigmoid(self.alpha.to(self.work_dtype(self.alpha))) * (high - low)


def mlstm_param_count(head_dim, skip_width):
    """Parameters per KV head of `MLSTM`, alpha aside: projections, two gates with bias, read vector, skip path."""
    return 3 * 2 * head_dim * (head_dim // 2) + 2 * (2 * head_dim + 1) + head_dim // 2 + (2 * head_dim + 1) * skip_width


class MLP(LearnedScorer, name="kvpop-mlp", x_dim=None, narrow=True):
    """c^T SiLU(W x + b) per KV head with x = [k; v], stateless; c = 0, so equal scores at the start. As many parameters
    as `MLSTM` with its skip path (hidden 320 at D = 128): the two differ in memory and not in size."""
    def __init__(self, n_kv_head, head_dim, window, layer=0, seed=0, hidden=None, **options):
        super().__init__(n_kv_head, head_dim, window, layer, seed, **options)
        x_dim = 2 * head_dim if self.x_dim is None else self.x_dim
        hidden = hidden or round(mlstm_param_count(head_dim, head_dim) / (x_dim + 2))
        self.w_hidden = nn.Parameter(self.normal(x_dim, hidden, salt=1) / x_dim**0.5)
        self.b_hidden = nn.Parameter(torch.zeros(n_kv_head, hidden, device="cpu"))
        self.w_score = nn.Parameter(torch.zeros(n_kv_head, hidden, 1, device="cpu"))

    def x(self, k, v, pos):
        return torch.cat([k, v], dim=-1)  # (B, H_kv, T, 2D)

    def score(self, k, v, pos):
        z = self.per_head(self.x(k, v, pos), "w_hidden")  # (B, H_kv, T, hidden)
        return self.per_head(F.silu(z + self.weight("b_hidden", z)[:, None]), "w_score").squeeze(-1)  # (B, H_kv, T)


class Position(MLP, name="position", x_dim=33, narrow=False):
    """A control: x is log t and sines and cosines of t at 16 wavelengths (6 to 35,000). What it reaches is what the
    task gives away by position."""
    def x(self, k, v, pos):
        t = pos.clamp(min=0).to(k.dtype)[:, None, :, None]  # (B or 1, 1, T, 1)
        angle = t * 1e4 ** (torch.arange(16, device=k.device, dtype=k.dtype) / -16)
        return torch.cat([t.log1p() / 8, angle.sin(), angle.cos()], -1).expand(-1, self.n_kv_head, -1, -1)


class DMSCap(MLP, name="dms-cap", shift=1, delayed=True):
    """The gate of DMS (arXiv 2506.05345) under a fixed budget: the logit read from [k; v] of token t + 1 decides about
    t; score = -logit, so marked tokens (logit > 0) go first. The offset opens gates at the start: sigmoid(-5) = 0.7 %
    marked. Of the size of kvpop, where the original has one linear map."""
    def __init__(self, *args, offset=5.0, **options):
        super().__init__(*args, **{"decay": False, **options})
        self.offset = offset

    def logits(self, k, v):
        """Eviction logits of whole rows: (B, H_kv, T, D) twice -> (B, H_kv, T) fp32; the last token has none: 0."""
        with torch.autocast(k.device.type, enabled=False):
            return -self.score_all(*self.taken(k, v), None)[0]

    def score(self, k, v, pos):
        return self.offset - super().score(k, v, pos)

    def score_all(self, k, v, real):
        return F.pad(self.score(k[:, :, 1:], v[:, :, 1:], None), (0, 1)), {}


class MLSTM(LearnedScorer, name="kvpop", narrow=True, waits=True):
    """An mLSTM per KV head that takes in every token and reads each one when it leaves the window (App. A, E).

        score_u = a^T SiLU(h_u) + c^T SiLU(W_s x_u),   h_u = phi(q_u)^T C_q / phi(q_u)^T n_q,   q = u + window
        phi(z) = [softmax(z); softmax(-z)] (Hedgehog), i = exp(a_i), f = sigmoid(a_f), a = 15 tanh(linear(x) / 15)

    Features are positive, so h is a convex mix of past values. State per row and head, fp32: m (1), and C
    (D/2 + 1, 2, D/2), transposed, n its last row, the memory of a value that is always 1: one read and one write. In a
    step h is read as f phi(q_u)^T C_(q-1) + i phi(q_u)^T k_q v_q: all but three numbers is known before token q.
    Start: W_q = W_k = random orthonormal columns on the key half of x, W_v on the value half: that keeps the RMS of a
    key at every head_dim (softmax neither flat nor one-hot), and a token reads the values of keys like its own. a = c =
    0: equal scores, so with decay it begins as StreamingLLM. Gate weights 0, input bias 0, forget bias over heads log
    window - 1 to log window + 2: a memory of a third of a window to about five. What the delayed read is for happened
    within one; a memory of many (biases 5 to 8 at a window of 64) drowns it and hardly shortens in a whole training.
    skip_width: default D, 0 = none. delay: None = window, 0 = read at the token's own time (see kvpop-nodelay)."""
    # what multiplies the token that leaves the window, to read it, and the one that enters the state
    leaving, entering = ("w_skip", "w_q"), ("w_k", "w_v", "w_gate")
    projections = leaving + entering

    def __init__(self, n_kv_head, head_dim, window, layer=0, seed=0, skip_width=None, chunk=None, soft_cap=15.0,
                 delay=None, **options):
        super().__init__(n_kv_head, head_dim, window, layer, seed, **options)
        if head_dim % 2:
            raise ValueError(f"policy {self.name} splits head_dim in two halves, so it must be even, got {head_dim}")
        if delay not in (None, 0, window) or delay and self.name == "kvpop-nodelay":
            raise ValueError(f"policy {self.name}: delay must be the window ({window}) or 0, got {delay}")
        D, half, skip_width = head_dim, head_dim // 2, head_dim if skip_width is None else skip_width
        self.chunk, self.soft_cap, self.delayed = chunk, soft_cap, delay != 0 and self.name == "kvpop"
        self.delay = window if self.delayed else 0
        key_basis, value_basis = (torch.linalg.qr(self.normal(D, half, salt=i)).Q for i in (1, 2))  # (H_kv, D, D/2)
        self.w_q, self.w_k = (nn.Parameter(F.pad(key_basis, (0, 0, 0, D))) for _ in "qk")  # (H_kv, 2D, D/2), equal
        self.w_v = nn.Parameter(F.pad(value_basis, (0, 0, D, 0)))  # (H_kv, 2D, D/2)
        self.w_gate = nn.Parameter(torch.zeros(n_kv_head, 2 * D, 2, device="cpu"))  # input gate, forget gate
        forget = torch.linspace(math.log(window) - 1, math.log(window) + 2, n_kv_head, device="cpu")
        self.b_gate = nn.Parameter(torch.stack([torch.zeros_like(forget), forget], dim=-1))  # (H_kv, 2)
        self.w_score = nn.Parameter(torch.zeros(n_kv_head, half, 1, device="cpu"))  # a
        self.w_skip = nn.Parameter(self.normal(2 * D, skip_width, salt=3) / (2 * D) ** 0.5)  # W_s
        self.w_skip_score = nn.Parameter(torch.zeros(n_kv_head, skip_width, 1, device="cpu"))  # c
        self.register_buffer("fused", None, persistent=False)  # see fuse
        self.register_buffer("terms", None, persistent=False)

    def fuse(self, narrow=False):
        """Lay all that multiplies x in one buffer, of which the parameters become parts, transposed: a decode step then
        has two products in place of five, reductions that read w in order. narrow: as bf16 terms too, for many rows on
        tensor cores, which do not follow changes. Call it where it will decode, again for a copy or another dtype."""
        parts = [getattr(self, name) for name in self.projections]
        for p in parts:
            p.data = p.data.mT  # (H_kv, O, 2D)
        self.fused = lay_side_by_side(parts, dim=1).mT  # (H_kv, 2D, O)
        for p in parts:
            p.data = p.data.mT
        self.terms = step_terms(self.fused, sum(p.shape[-1] for p in parts[:len(self.leaving)])) if narrow else None

    halves = staticmethod(lambda z: (z.softmax(-1), (-z).softmax(-1)))  # of phi, (..., D/2) each, positive
    phi = staticmethod(lambda z: torch.cat(MLSTM.halves(z), -1))  # (..., D/2) -> (..., D)

    def gates(self, gate):
        """(..., 2) -> input gate and log forget gate, (...) each."""
        gate = self.soft_cap * torch.tanh(gate / self.soft_cap) if self.soft_cap else gate
        return gate[..., 0], F.logsigmoid(gate[..., 1])

    def weights_of(self, names):
        """All that multiplies a token to give projections, `leaving`, `entering` or both: (H_kv, 2D, O); the widths."""
        parts = [getattr(self, name) for name in names]
        widths = [p.shape[-1] for p in parts]
        if self.fused is None or torch.is_grad_enabled():  # gradients go to the parameters, not to their buffer
            return torch.cat(parts, dim=-1), widths
        fused = self.fused.mT  # (H_kv, O, 2D)
        return (fused[:, -sum(widths):] if names == self.entering else fused[:, :sum(widths)]).mT, widths

    def project(self, x):
        """x (B, H_kv, T, 2D) times all weights at once, x is read once: skip (.., skip_width), query, key, value
        (.., D/2), gates (.., 2). bf16: see `taken`."""
        w, widths = self.weights_of(self.projections)
        return (narrow_product(x, w) if x.dtype == torch.bfloat16 else x @ w.to(x.dtype)).split(widths, dim=-1)

    def project_one(self, k, v, names):  # the same of a step and of some: k, v (B, H_kv, D) -> (B, H_kv, .) each
        w, widths = self.weights_of(names)
        return step_product(torch.cat([k, v], dim=-1), w, self.terms, names == self.leaving).split(widths, dim=-1)

    def score_all(self, k, v, real):
        T = k.shape[2]
        skip, query, key, value, gate = self.project(torch.cat([k, v], dim=-1))  # (B, H_kv, T, ..)
        k_feat, (ig, lf) = self.phi(key), self.gates(gate + self.weight("b_gate", gate)[:, None])
        if real is not None:  # a pad neither enters the state nor lets it decay
            ig, lf = ig.masked_fill(~real[:, None], FLOOR), lf.masked_fill(~real[:, None], 0.0)
        delay = min(self.delay, T)
        q_feat = F.pad(self.phi(query), (0, 0, delay, 0))[:, :, :T]  # q reads for token q - delay
        h, C, n, m = mlstm_chunkwise(q_feat, k_feat, value, ig, lf, self.chunk or best_chunk(T, self.head_dim))
        both = F.silu(torch.cat([h[:, :, delay:], skip[:, :, :T - delay]], dim=-1))  # (B, H_kv, T - delay, ..)
        heads = torch.cat([self.w_score, self.w_skip_score], dim=1).to(h.dtype)  # (H_kv, D/2 + skip_width, 1)
        # compiled, part of the kernel that makes them; else weight gradients are those of any way to cut a batch
        scores = (both * heads.mT).sum(-1) if torch.compiler.is_compiling() else (both @ heads).squeeze(-1)
        return F.pad(scores, (0, delay)), {"C": torch.cat([C.mT, n[:, :, None]], dim=2).unflatten(-1, (2, -1)), "m": m}

    def init_state(self, batch, device, dtype=torch.float32, group_size=1, cache_dtype=None):
        C = torch.zeros(batch, self.n_kv_head, self.head_dim // 2 + 1, self.head_dim, device=device, dtype=dtype)
        return {"C": C.unflatten(-1, (2, -1)), "m": C.new_full(C.shape[:2], FLOOR)}

    def score_ahead(self, state, k_leave, v_leave, leave_pos):
        """The token's own part of its score; the feature it is read with; what the state before token q gives it."""
        if not self.delayed and self.name == "kvpop":  # nothing here keeps the score until q leaves the window
            raise ValueError("policy kvpop with delay=0 has no one-step form; use policy kvpop-nodelay")
        skip, query = self.project_one(k_leave, v_leave, self.leaving)  # (B, H_kv, ..)
        own = (F.silu(skip) * self.weight("w_skip_score", skip).squeeze(-1)).sum(-1)  # (B, H_kv)
        up, down = self.halves(query)  # (B, H_kv, D/2)
        # (B, H_kv, D/2 + 1), in two sums: rows of D/2 are for the compiler one pass, which also writes what C becomes
        read = (state["C"] * torch.stack([up, down], 2)[:, :, None]).sum(-1).sum(-1)
        return {"own": own, "q_up": up, "q_down": down, "read": read[..., :-1], "norm": read[..., -1]}

    def score_finish(self, state, due, k, v):
        key, value, gate = self.project_one(k, v, self.entering)  # (B, H_kv, ..)
        ig, lf = self.gates(gate + self.weight("b_gate", gate))  # (B, H_kv)
        m = torch.maximum(lf + state["m"], ig)  # (B, H_kv)
        f, i = (lf + state["m"] - m).exp(), (ig - m).exp()
        up, down = self.halves(key)  # (B, H_kv, D/2), and not phi: all sums are then as long, and one kernel
        i_dot = i * (up * due["q_up"] + down * due["q_down"]).sum(-1)
        norm = (f * due["norm"] + i_dot).clamp(min=TINY)
        h = (f[..., None] * due["read"] + i_dot[..., None] * value) / norm[..., None]
        score = (F.silu(h) * self.weight("w_score", h).squeeze(-1)).sum(-1) + due["own"]
        return score, {"m": m, "f": f, "i": i, "k_up": up, "k_down": down, "value": value}

    def settle(self, state, due):
        k_in = due["i"][..., None, None] * torch.stack([due["k_up"], due["k_down"]], 2)  # (B, H_kv, 2, D/2)
        value = F.pad(due["value"], (0, 1), value=1.0)[..., None, None]  # (B, H_kv, D/2 + 1, 1, 1)
        C = due["f"][..., None, None, None] * state["C"] + value * k_in[:, :, None]
        return {**state, "C": C, "m": due["m"]}


class MLSTMNoDelay(MLSTM, name="kvpop-nodelay"):
    """Each token is read at its own time, but decided when it leaves the window, so decoding keeps the last `window`
    scores: state "ring" (B, H_kv, window) fp32, entry t % window."""
    def init_state(self, batch, device, dtype=torch.float32, group_size=1, cache_dtype=None):
        ring = torch.zeros(batch, self.n_kv_head, self.window, device=device, dtype=dtype)
        return super().init_state(batch, device, dtype) | {"ring": ring}

    def score_all(self, k, v, real):
        scores, state = super().score_all(k, v, real)
        T, entry = k.shape[2], torch.arange(self.window, device=k.device)
        last = (entry.new_full(k.shape[:1], T) if real is None else real.sum(-1))[:, None] - 1  # (B, 1)
        newest = (last - (last - entry) % self.window)[:, None].expand(-1, self.n_kv_head, -1)  # (B, H_kv, window)
        return scores, state | {"ring": scores.gather(-1, newest.clamp(min=0)).masked_fill(newest < 0, 0.0)}

    def score_ahead(self, state, k_leave, v_leave, leave_pos):
        here = (leave_pos[:, None] % self.window == torch.arange(self.window, device=leave_pos.device))[:, None]
        return {"score": (state["ring"] * here).sum(-1), "here": here}  # q and u = q - window share their entry

    def score_finish(self, state, due, k, v):
        now, news = super().score_finish(state, super().score_ahead(state, k, v, None), k, v)
        return due["score"], {**news, "now": now[..., None]}

    def settle(self, state, due):
        return {**super().settle(state, due), "ring": torch.where(due["here"], due["now"], state["ring"])}

# ------------------------------------------------------------------ making them (data/scorer_files.py reads and writes)

def check_policy(policy):
    if policy not in POLICIES:
        raise ValueError(f"unknown policy '{policy}'; choose one of: {', '.join(POLICIES)}")


def state_entries(policy, head_dim, group_size=None, window=None, **options):
    """Budget entries (one bf16 key and value each, 4 D bytes) that a policy's own state costs: kvpop's C in fp32,
    D/2 + 1; kvpop-nodelay `window` scores more; snapkv and rkv n_queries bf16 queries for each of group_size heads. The
    others keep priority and position alone. ValueError: unknown policy; group_size or window lacks where it counts."""
    check_policy(policy)
    if {"snapkv": group_size, "rkv": group_size, "kvpop-nodelay": window}.get(policy, 0) is None:
        raise ValueError(f"policy {policy}: give group_size and window, its state grows with them")
    if policy in ("snapkv", "rkv"):
        return -(-options.get("n_queries", SnapKV.ranges["n_queries"][0]) * group_size // 2)
    recurrent = head_dim // 2 + 1
    return {"kvpop": recurrent, "kvpop-nodelay": recurrent - (-(window or 0) // head_dim)}.get(policy, 0)


def geometry(policy, n_sink, window):
    """-> n_sink, window as the policy defines them: tova-layer protects nothing but the query's own token."""
    return (0, 1) if policy == "tova-layer" else (n_sink, window)


def make_scorer(policy, *, n_kv_head, head_dim, window, layer, seed=0, **options):
    """A scorer for one layer, on CPU in fp32. Options: `ranges` or keyword arguments of the policy's class.
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
