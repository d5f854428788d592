"""What the scorer is taught: the attention each token receives after it has left the window.

What this file holds:
  future_attention   the target: one attention call with queries and keys swapped, fed with the lse of the sparse pass
  boundary_loss      a logistic loss where the cache decides: the newcomer against the token it would displace
  listwise_loss      every token at once: the scorer's softmax against the shares of future attention
  retention_recall   share of the teacher's top-k that the student keeps, the figure to watch
  RetentionWatch     sums recall, and what kinds of tokens are held, over an evaluation
  RetentionLoss      custom autograd function: identity forward, all of the above in the backward
  policy_attend, training_attend   a block's attention under a policy, in an evaluation and with the losses attached
  noisy_gate, gated_attention, gated_attend, gate_shortfall   what dms-cap is taught instead: DMS with its
                     Gumbel-sigmoid gate
How it departs from plain distillation: the attention matrix never exists. exp(score - lse) is the probability itself,
so the log-sum-exp of a call that swaps q and k IS the log of a token's future mass. The loss reaches the scorer only.

Source: KVpop, arXiv 2607.05061, sections 3.2-3.3, table 3. Letters as in flex_masks.py: B, T, H, H_kv, D, M candidates.
"""
import contextlib
import functools
import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import flex_masks
from flex_masks import (TILE, CacheSpec, attention, attention_tables, dense_reference, effective_priority,
                        keep_everything, plan, running_topk)

# Power of the mean over future queries; 1 is the paper's. An oracle with 1 drops records that are read only once.
POWER = 2.0
# Share of listwise_loss in the scorer's loss, the rest is the paper's boundary loss (see listwise_loss for why)
LISTWISE_SHARE = 1.0
EPS = 1e-8  # added to the mean mass, so that a token nobody looks at has a finite target


def log_sigmoid(x):
    """log(sigmoid(x)) to 0.003, a third of a bf16 rounding, in multiplications alone: an exp and a log for each pair of
    tokens took more time than the rest of the transposed pass (11.4 against 5.3 ms at 16k on an H200)."""
    y = (1 - x.abs() * (1 / 10.55)).clamp(min=0.0)
    y = y * y
    y = y * y
    return x.clamp(max=0.0) - 0.696 * (y * y)  # log(1 + exp(-|x|)) is nearly an eighth power


def transposed_lse(q, k, lse, window, lengths, evict_at=None, power=1.0, kernel_options=None):
    """log sum_d p(d -> t)^power over d in [t + window, length): (B, H, T - window) fp32, -inf for an empty sum.

    p(d -> t) = exp(q_d . k_t / sqrt(D) - lse_d) comes from an attention call with K as queries and Q as keys; only its
    lse is used, the value is a narrow stand-in. lse (B, H, T) of the attention pass that q and k come from.
    evict_at (B, H_kv, T) given: the bounded form. For a token already evicted at d, exp(score - lse) is p / (1 - p),
    which rewards having been evicted without bound; sigmoid(score - lse) is the mass that the token would get if it
    were put back. (Cutting off at 1 is cheaper and teaches worse: it credits such a token with up to twice that.)
    A KV head is a batch row, so that K is one tensor seen by its group's heads, never copied. kernel_options: see
    flex_masks.fused_attention.
    """
    (B, H, T, D), H_kv = q.shape, k.shape[1]
    Z, G, rows = B * H_kv, H // H_kv, T - window  # later tokens have no future query: their sum is empty
    padded = flex_masks.bucket(T) if flex_masks.has_kernel(q) else T
    q, k = (flex_masks.pad_to(x.reshape(Z, -1, T, D), padded, 0.0, 2) for x in (q, k))
    lse = lse.to(torch.promote_types(lse.dtype, torch.float32)).reshape(Z, G, T)
    lse, lengths = flex_masks.pad_to(lse, padded, 0.0, 2), lengths.int()
    if evict_at is not None:
        evict_at = flex_masks.pad_to(evict_at.reshape(Z, T), padded, T, 1)

    def score_mod(score, b, h, t, d):
        x = score - lse[b, h, d]
        x = x if evict_at is None else torch.where(d < evict_at[b, t], x, log_sigmoid(x))
        return x * power

    def mask_mod(b, h, t, d):
        return (d >= t + window) & (d < lengths[b // H_kv])

    if not flex_masks.has_kernel(q):
        k = k[:, :, :rows].expand(-1, G, -1, -1)  # (Z, G, T - window, D)
        return dense_reference(k, q, q[..., :1], mask_mod, score_mod)[1].view(B, H, rows)
    tile = TILE * torch.arange(padded // TILE, device=q.device)
    tile_t, tile_d, end = tile.view(1, -1, 1), tile.view(1, 1, -1), lengths.view(B, 1, 1)
    visible = (torch.minimum(tile_d + TILE, end) > tile_t + window) & (tile_d < end)  # (B, t tiles, d tiles)
    full = (tile_d >= tile_t + TILE - 1 + window) & (tile_d + TILE <= end)
    if B > 1:
        visible, full = visible.repeat_interleave(H_kv, dim=0), full.repeat_interleave(H_kv, dim=0)
    block_mask = flex_masks.block_mask_from_tiles(visible, full, mask_mod, padded, padded, backward=False)
    narrow = q.new_zeros(padded, 16).expand(Z, G, -1, -1)
    lse = flex_masks.fused_attention(k.expand(-1, G, -1, -1), q, narrow, block_mask, "transposed", kernel_options,
                                     score_mod=score_mod)[1]
    return lse.reshape(B, H, padded)[:, :, :rows]


@torch.no_grad()
def future_attention(q, k, lse, window, lengths=None, evict_at=None, reduce="max", power=POWER, eps=EPS):
    """Score targets r*_t = reduce over the group of log(eps + m_t), m_t the future attention of token t (eqs. 5-7).

        m_t = ((1 / N_t) sum_{d = t + window}^{length - 1} p(d -> t)^power)^(1 / power)
        N_t = max(1, length - t - window)

    power 1 is the paper's mean mass. There a token that one later query reads with all its attention counts as much as
    one that every query grazes with 1 / N_t; the power mean tells them apart at the same cost (see POWER).

    q (B, H, T, D), k (B, H_kv, T, D), lse (B, H, T) -> (B, H_kv, T) fp32; the last `window` tokens of a row, and its
    pads, have no future: log eps. reduce: "max" or "mean" over the query heads of a KV head. evict_at: the bounded
    form (see transposed_lse). lengths (B,) int64, default T.
    """
    B, H, T, _ = q.shape
    H_kv = k.shape[1]
    if lengths is None:
        lengths = torch.full((B,), T, dtype=torch.int64, device=q.device)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    target = torch.full((B, H_kv, T), math.log(eps), dtype=dtype, device=q.device)
    if T <= window:
        return target
    mass = transposed_lse(q, k, lse, window, lengths, evict_at, power)  # (B, H, T - window)
    n_future = (lengths.view(B, 1, 1) - torch.arange(T - window, device=q.device) - window).clamp(min=1)
    log_mean = (mass - n_future.to(dtype).log()) / power
    target_h = torch.logaddexp(log_mean, torch.full_like(log_mean, math.log(eps)))  # finite for an empty sum
    target_h = target_h.view(B, H_kv, H // H_kv, T - window)
    target[..., :T - window] = target_h.amax(2) if reduce == "max" else target_h.mean(2)
    return target


def sample_queries(n_samples, B, H_kv, spec, lengths, u=None):
    """Queries q in [n_slots, length) at which the cache must choose: half uniform, half late-biased (density rising
    linearly). u: uniform noise (B, H_kv, n_samples), drawn here when None.
    -> q (B, H_kv, n_samples) int64, valid (B, 1, 1) bool: rows no longer than the cache have none."""
    u = torch.rand(B, H_kv, n_samples, device=lengths.device) if u is None else u
    late = torch.arange(n_samples, device=lengths.device) >= n_samples // 2
    u = torch.where(late, u.sqrt(), u)
    span = (lengths - spec.n_slots).view(B, 1, 1)
    q = spec.n_slots + (u * span.clamp(min=0)).long().minimum(span.clamp(min=1) - 1)
    return q, span > 0


@torch.no_grad()
def rank_targets(target, log_gamma, spec, compiled=False):
    """The teacher's ranking under its effective targets: (priority (B, H_kv, T), rank, cutoff (B, H_kv, M))."""
    teacher = effective_priority(target, log_gamma)
    return teacher, *running_topk(teacher, spec, compiled)


def nothing_to_decide(scores, spec):
    return spec.n_select == 0 or scores.shape[-1] <= spec.n_slots


def counted_rows(lengths, T, spec):
    """What the means of a batch are over, to weigh it among others: (rows that the listwise loss is a mean of, rows
    with queries at which recall is measured), of rows padded to T tokens; lengths (B,) on the CPU. The boundary loss
    balances the batch that it sees, so a mean of its means is not the loss of all rows at once."""
    if spec.n_select == 0 or T <= spec.n_slots:
        return 0, 0
    return int((lengths - spec.window > spec.n_sink).sum()), int((lengths > spec.n_slots).sum())


def nothing(scores, log_gamma):
    """A loss of 0 that scores and log_gamma still get a gradient from, of 0."""
    return scores.sum() * 0 + (0.0 if log_gamma is None else log_gamma.sum() * 0)


def lead(scores, log_gamma, t, other):
    """Effective score of token t over `other` (B, H_kv, S): r_t - r_other + (other - t) log_gamma, at any query."""
    difference = scores.gather(-1, t) - scores.gather(-1, other)
    return difference if log_gamma is None else difference + (other - t) * log_gamma.view(1, -1, 1)


def boundary_loss(scores, log_gamma, ranking, spec, q, valid, tau=1.0, margin_floor=0.1, margin_tau=1.0,
                  balance_range=(0.5, 2.0)):
    """Boundary loss at sampled queries (paper eqs. 8-11), with EFFECTIVE scores on both sides of the difference.

    At query q the newcomer t_new = q - window meets t_bnd, the weakest of the teacher's top n_select among the older
    candidates: the token that it would displace. y = +1 iff the newcomer wins under the teacher's effective targets.
        loss = mean of omega * softplus(-y (r_new(q) - r_bnd(q)) / tau)
    Decay does not cancel: the difference keeps (t_bnd - t_new) log_gamma, which is gamma's only gradient.
    omega = margin weight * keep/drop balance per head, normalised to mean 1. y, omega and the teacher's ranking carry
    no gradient; the teacher uses the same gamma.

    scores (B, H_kv, T); log_gamma (H_kv,) or None; ranking from rank_targets; q (B, H_kv, S) and valid as from
    sample_queries. Returns a scalar, 0 when no query is valid or nothing is selected by score.
    """
    if nothing_to_decide(scores, spec):
        return nothing(scores, log_gamma)
    with torch.no_grad():
        teacher, rank, cutoff = ranking
        order = rank.argsort(dim=-1)  # order[r] = the candidate of rank r
        new = (q - spec.window - spec.n_sink).clamp(min=1)  # candidate number of the newcomer
        bnd_rank = cutoff.gather(-1, new - 1).clamp(min=0)  # among those before it; cutoff[new] could be itself
        y = torch.where(rank.gather(-1, new) > bnd_rank, 1.0, -1.0).to(scores.dtype)
        t_new, t_bnd = new + spec.n_sink, order.gather(-1, bnd_rank) + spec.n_sink
        margin = y * (teacher.gather(-1, t_new) - teacher.gather(-1, t_bnd))  # >= 0
        omega = margin_floor + (1 - margin_floor) * torch.sigmoid(margin / margin_tau)
        valid = valid.expand_as(y).to(scores.dtype)
        count = valid.sum((0, 2)).clamp(min=1)
        keep = ((y > 0) * valid).sum((0, 2)) / count  # rho_h
        low, high = balance_range
        balance = torch.where(y > 0, (0.5 / keep).clamp(low, high).view(1, -1, 1),
                              (0.5 / (1 - keep)).clamp(low, high).view(1, -1, 1))
        omega = omega * balance * valid
        omega = omega / omega.sum().clamp(min=1e-12)  # sums to 1 over the valid samples
    return (omega * F.softplus(-y * lead(scores, log_gamma, t_new, t_bnd) / tau)).sum()


def listwise_loss(scores, log_gamma, target, spec, lengths):
    """How far the scorer's softmax over a row's tokens is from where future attention goes: KL in nats (ListNet's
    top-one loss, Cao et al. 2007, with attention as the relevance).

        share_t = m_t / sum m,   p_t = softmax of the effective score over the candidates n_sink <= t < length - window
        loss = mean over rows and heads of sum_t share_t (log share_t - log p_t)

    It is least where a score is the log of the attention that the token can expect given what the scorer sees, and
    ranking by that loses the least attention in the mean, whatever the budget. Every token takes part in every step.
    The boundary loss sees only the newcomer and the boundary token of queries after the cache is full: a definition at
    the start of a prompt, older than that and worth far more, never appears in it, so nothing teaches to keep it.

    scores and target (B, H_kv, T), the target log m_t from future_attention; lengths (B,). Returns a scalar, 0 when
    nothing is selected by score. Gradients reach scores and log_gamma.
    """
    if nothing_to_decide(scores, spec):
        return nothing(scores, log_gamma)
    t, end = torch.arange(scores.shape[-1], device=scores.device), lengths.view(-1, 1, 1) - spec.window
    candidate = (t >= spec.n_sink) & (t < end)  # (B, 1, T)
    log_share, log_p = (x.masked_fill(~candidate, -1e30).log_softmax(-1)
                        for x in (target, effective_priority(scores, log_gamma)))
    apart = (log_share.exp() * (log_share - log_p)).masked_fill(~candidate, 0.0).sum(-1)  # (B, H_kv)
    real = (end > spec.n_sink).squeeze(-1).to(apart.dtype).expand_as(apart)
    return (apart * real).sum() / real.sum().clamp(min=1)


def retention_loss(scores, log_gamma, target, ranking, spec, lengths, at, valid, tau=1.0,
                   listwise_share=LISTWISE_SHARE):
    """listwise_share of listwise_loss, the rest boundary_loss; ranking from rank_targets(target), at and valid from
    sample_queries."""
    loss = 0.0
    if listwise_share < 1:
        loss = loss + (1 - listwise_share) * boundary_loss(scores, log_gamma, ranking, spec, at, valid, tau)
    if listwise_share > 0:
        loss = loss + listwise_share * listwise_loss(scores, log_gamma, target, spec, lengths)
    return loss


@torch.no_grad()
def retention_recall(evict_at, teacher_evict_at, spec, q, valid):
    """Share of the teacher's top n_select that the student also keeps, at queries q (B, H_kv, S): a scalar tensor.

    NaN when no query is valid. Both evict_at (B, H_kv, T).
    """
    t = torch.arange(evict_at.shape[-1], device=evict_at.device)
    q = q.unsqueeze(-1)
    eligible = (t >= spec.n_sink) & (t <= q - spec.window) & valid.unsqueeze(-1)  # (B, H_kv, S, T)
    teacher = eligible & (q < teacher_evict_at.unsqueeze(2))
    both = teacher & (q < evict_at.unsqueeze(2))
    return both.sum() / teacher.sum()


def teacher_evict_at(ranking, spec):
    """The eviction plan that future attention itself would make: the oracle, and the teacher of recall."""
    teacher, rank, cutoff = ranking
    return flex_masks.evict_at_from_cutoffs(rank, cutoff, spec, teacher.shape[-1])


class RetentionWatch:
    """Sums what a static policy holds over the batches of an evaluation; an `on_layer` of policy_attend.
    Set `lengths` (B,) int64 and `kinds` (B, T, K) fp64, one-hot, before each pass: the kind of each token; zeros: of
    none. Recall is NaN, so None here, where nothing is evicted; an oracle's own is not asked for."""

    def __init__(self, scorers, spec):
        self.scorers, self.spec, self.lengths, self.kinds = scorers, spec, None, None
        self.recalls, self.held, self.room = ([[] for _ in scorers] for _ in range(3))  # layer -> a tensor a batch

    def __call__(self, layer, q, k, lse, scores, evict_at):
        spec, end, (B, H_kv, T) = self.spec, self.lengths[:, None, None], scores.shape
        left = torch.arange(T, device=q.device) + spec.window  # the first query at which a token is out of the window
        for sums, until in ((self.held, evict_at.minimum(end)), (self.room, end)):
            queries = (until - left).clamp(min=0).expand(B, H_kv, T).double()
            sums[layer].append(torch.einsum("bht,btk->k", queries, self.kinds))
        if spec.n_select and self.scorers[layer].name != "oracle":
            target = future_attention(q, k, lse, spec.window, self.lengths, evict_at)
            u = torch.rand(B, H_kv, 64, generator=torch.Generator().manual_seed(layer)).to(q.device)
            at, valid = sample_queries(64, B, H_kv, spec, self.lengths, u)
            teacher = teacher_evict_at(rank_targets(target, self.scorers[layer].log_gamma(), spec), spec)
            self.recalls[layer].append(retention_recall(evict_at, teacher, spec, at[..., :32], valid))  # uniform ones

    def recall(self):
        """By layer, a list, or None."""
        layers = [torch.stack(r).nanmean().item() if r else math.nan for r in self.recalls]
        return None if any(map(math.isnan, layers)) else layers

    def retention(self):
        """For each kind, by layer: the share of queries, from when a token left the window to the end of its row, that
        still see it, over all its tokens and heads. None for a kind that no row has."""
        held, room = (torch.stack([sum(x) for x in sums], dim=1) for sums in (self.held, self.room))  # (K, n_layer)
        return [(h / r).tolist() if (r > 0).all() else None for h, r in zip(held, room)]


@dataclass
class Retention:
    """Settings of the retention loss for one micro-step, and where its results are written.

    `loss` and `recall` hold one entry a layer after the backward; that is when the transposed pass runs.
    """
    spec: CacheSpec
    lengths: torch.Tensor            # (B,) int64, real tokens a row
    weight: float = 1.0              # gradient scale of one layer: 1 / n_layer / accumulation steps
    n_samples: int = 128             # boundaries a row and head
    bounded: bool = True             # mass of an evicted token as if it were put back
    reduce: str = "max"
    power: float = POWER             # of the mean over future queries; 1 is the paper's
    tau: float = 1.0
    listwise_share: float = LISTWISE_SHARE  # of listwise_loss, the rest is boundary_loss; 0 is the paper's loss
    noise: torch.Tensor = None       # (n_layer, B, H_kv, n_samples) uniform: the queries; None: drawn
    want_recall: bool = False
    compiled: bool = False           # thresholds through torch.compile (flex_masks.parallel_cutoffs)
    compiled_scorer: bool = False    # the scorer through torch.compile: long rows, whose small kernels take their time
    recompute: bool = False          # with a frozen base: activations of a scorer again in its backward
    sort: bool = True                # keys in the order of their lifetimes, on a GPU; False: in time order
    loss: dict = field(default_factory=dict)
    recall: dict = field(default_factory=dict)
    plans: dict = field(default_factory=dict)  # layer -> evict_at, tables: a recomputed block takes its forward's
    passes: int = 0                  # transposed passes so far: one a layer and micro-step


def judge(retention, layer, scores, log_gamma, q, k, lse, evict_at):
    """The retention loss of one layer, a scalar, and its recall, None unless wanted: the transposed pass, the teacher's
    ranking, the sampled queries. Gradients reach scores and log_gamma alone."""
    r, (B, H_kv, _) = retention, scores.shape
    target = future_attention(q, k, lse, r.spec.window, r.lengths, evict_at if r.bounded else None, r.reduce, r.power)
    at = valid = ranking = recall = None
    if r.want_recall or r.listwise_share < 1:
        # data, not a generator: a CUDA graph would replay its numbers
        u = torch.rand(B, H_kv, r.n_samples, device=q.device) if r.noise is None else r.noise[layer]
        at, valid = sample_queries(r.n_samples, B, H_kv, r.spec, r.lengths, u)
        ranking = rank_targets(target, log_gamma, r.spec, r.compiled)
    if r.want_recall:
        uniform = at[..., :r.n_samples // 2]  # the half that is not late-biased
        recall = retention_recall(evict_at, teacher_evict_at(ranking, r.spec), r.spec, uniform, valid)
    return retention_loss(scores, log_gamma, target, ranking, r.spec, r.lengths, at, valid, r.tau,
                          r.listwise_share), recall


class RetentionLoss(torch.autograd.Function):
    """Identity on `carrier`; its backward teaches the scorer. No gradient to q, k, lse or v, ever.

    The transposed pass needs a finished lse, and under activation checkpointing a forward runs twice, so the work is
    done in the backward, which runs once. In eval nothing runs at all. carrier: the attention output when the base is
    trained (the loss then rides on the backward of the model), or a zero that the caller adds up when it is frozen.
    """

    @staticmethod
    def forward(ctx, carrier, scores, log_gamma, q, k, lse, evict_at, retention, layer):
        ctx.save_for_backward(scores, log_gamma, q, k, lse, evict_at)
        ctx.retention, ctx.layer = retention, layer
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx, grad):
        scores, log_gamma, q, k, lse, evict_at = ctx.saved_tensors
        r, layer = ctx.retention, ctx.layer
        r.passes += 1
        with torch.enable_grad():
            leaves = [scores.detach().requires_grad_()]
            if log_gamma is not None:
                leaves.append(log_gamma.detach().requires_grad_())
            decay = leaves[1] if log_gamma is not None else None
            loss, recall = judge(r, layer, leaves[0], decay, q, k, lse, evict_at)
            grads = [g * r.weight for g in torch.autograd.grad(loss, leaves)] + [None]
        r.loss[layer] = loss.detach()
        if r.want_recall:
            r.recall[layer] = recall
        return grad, grads[0], grads[1], None, None, None, None, None, None


# ---------------------------------------------------------------------------------------------------------------------
# The attends: what a block's attention does under a policy, handed to the model with every forward

def policy_attend(scorers, spec, lengths, on_layer=None, prompt_lengths=None):
    """The masked parallel form of a policy: score, plan, attend. `on_layer(layer, q, k, lse, scores, evict_at)` sees
    each layer's result. prompt_lengths (B,): for a policy that never evicts prompts. Used by evaluation; training adds
    the retention loss in `training_attend`."""
    def attend(layer, q, k, v):
        scorer = scorers[layer]
        if getattr(scorer, "name", "") == "oracle":
            _, dense_lse = attention(q, k, v, keep_everything(*k.shape[:3], k.device))
            scorer.scores = future_attention(q, k, dense_lse, spec.window, lengths, power=scorer.power or POWER)
        elif getattr(scorer, "name", "") == "random-prompt":
            scorer.prompt_lengths = prompt_lengths
        scores = scorer(k, v, lengths)
        evict_at = plan(effective_priority(scores, scorer.log_gamma()), spec)
        out, lse = attention(q, k, v, evict_at, spec)
        if on_layer is not None:
            on_layer(layer, q, k, lse, scores, evict_at)
        return out
    return attend


def score(scorer, k, v, lengths):
    return scorer(k.detach(), v.detach(), lengths)


compiled_score = torch.compile(score, dynamic=False, fullgraph=True)  # once for all layers


def training_attend(model, spec, retention, anchors=None):
    """Sparse attention under the scorer being trained, with the retention loss attached.

    anchors given: the base is frozen and runs under no_grad; each layer leaves a zero there whose backward
    teaches its scorer. Otherwise the loss rides on the attention output. A policy that learns nothing gets none.
    """
    ordered = spec if retention.sort else None

    def attend(layer, q, k, v):
        scorer = model.scorers[layer]
        make = compiled_score if retention.compiled_scorer and scorer.window else score
        if anchors is not None and retention.recompute:
            make = functools.partial(checkpoint, make, use_reentrant=False, preserve_rng_state=False)
        # autocast off outside as well: a compiled backward runs under that of its call
        with (torch.enable_grad() if anchors is not None else contextlib.nullcontext(),
              torch.autocast(k.device.type, enabled=False)):
            scores, log_gamma = make(scorer, k, v, retention.lengths), scorer.log_gamma()
        try:
            if layer not in retention.plans:
                with torch.no_grad():
                    evict_at = plan(effective_priority(scores, log_gamma), spec, retention.compiled)
                    retention.plans[layer] = evict_at, attention_tables(evict_at, ordered, retention.compiled)
        except ValueError as error:  # a score that is NaN: say whose
            raise ValueError(f"layer {layer}: {error}") from None
        evict_at, tables = retention.plans[layer]
        out, lse = attention(q, k, v, evict_at, ordered, tables)
        if scorer.window is None:
            return out
        inputs = (scores, log_gamma, q.detach(), k.detach(), lse.detach(), evict_at, retention, layer)
        if anchors is None:
            return RetentionLoss.apply(out, *inputs)
        with torch.enable_grad():
            anchors.append(RetentionLoss.apply(q.new_zeros((), requires_grad=True), *inputs))
        return out
    return attend


# ---------------------------------------------------------------------------------------------------------------------
# dms-cap: DMS (arXiv 2506.05345) has no targets. A gate per token dims its key in the attention, and two losses meet in
# the gates: distillation keeps open those that matter, the shortfall asks for a share of closed ones.

GATE_TAU = 0.1  # gates are soft in training and hard in use: low, so that few stand half open


def noisy_gate(logits, noise, tau=GATE_TAU):
    """Gumbel-sigmoid: z = (logit + g1 - g2) / tau, the gate being sigmoid(z), 1 = evict. The difference of two Gumbel
    numbers is logistic, logit(u). logits (B, H_kv, T), noise likewise, uniform: data, not a generator, because a CUDA
    graph would replay its numbers. -> (B, H_kv, T)."""
    return (logits + torch.logit(noise.to(logits.dtype), eps=1e-6)) / tau


def gated_attention(q, k, v, z, spec):
    """Causal attention in which a key beyond the window, no sink, keeps the share 1 - sigmoid(z_t) of its weight: its
    scores get log(1 - sigmoid(z_t)) = logsigmoid(-z_t). q (B, H, T, D), k, v (B, H_kv, T, D), z (B, H_kv, T), to which
    gradients flow as well -> (B, H, T, D)."""
    (B, H, T, D), H_kv = q.shape, k.shape[1]
    n_sink, window = spec.n_sink, spec.window
    q, k, v = (x.reshape(B * H_kv, -1, T, D) for x in (q, k, v))  # a KV head is a batch row
    log_keep = F.logsigmoid(-z).flatten(0, 1)  # (B * H_kv, T)

    def gate_score_mod(score, b, h, q_idx, kv_idx):
        beyond = (q_idx - kv_idx >= window) & (kv_idx >= n_sink)
        # a single look-up: FlexAttention knows the gradient of one
        return score + torch.where(beyond, log_keep[b, kv_idx], 0.0)

    if not flex_masks.has_kernel(q):
        out = dense_reference(q, k, v, flex_masks.causal_mask_mod, gate_score_mod, causal=True)[0]
    else:
        log_keep = flex_masks.pad_to(log_keep, flex_masks.bucket(T), 0.0, 1).contiguous()
        block_mask = flex_masks.evict_at_block_mask(keep_everything(B, H_kv, T, q.device))
        out = flex_masks.fused_attention(q, k, v, block_mask, score_mod=gate_score_mod, enable_gqa=True)[0]
    return out.reshape(B, H, T, D)


def gated_attend(model, spec, noise, gates):
    """dms-cap in training: every key stays, dimmed by its noisy gate. noise (n_layer, B, H_kv, T) uniform;
    each layer appends its z (B, H_kv, T) to gates. The KL teaches the gates through the attention."""
    def attend(layer, q, k, v):
        gates.append(noisy_gate(model.scorers[layer].logits(k, v), noise[layer]))
        return gated_attention(q, k, v, gates[-1], spec)
    return attend


def gate_shortfall(gates, spec, lengths, ramp):
    """max(0, target - marked). marked: share of hard gates (z > 0; straight-through, the gradient is the sigmoid's)
    among the tokens that leave the window, over all layers, rows and heads at once, so that heads may share unevenly;
    sinks count as unmarked. target: ramp (0 to 1, a scalar tensor) times 1 - (n_slots - window) / (mean length -
    window), the share at which rows end with n_slots live tokens on average.
    gates: (B, H_kv, T) a layer; lengths (B,) -> loss, marked, target: scalars."""
    z = torch.stack(gates)  # (n_layer, B, H_kv, T)
    t = torch.arange(z.shape[-1], device=z.device)
    left = t < (lengths - spec.window).view(-1, 1, 1)  # (B, 1, T)
    soft = z.sigmoid()
    hard = soft + ((z > 0).to(z.dtype) - soft).detach()
    marked = hard.masked_fill(~left | (t < spec.n_sink), 0.0).sum() / left.expand_as(z).sum().clamp(min=1)
    beyond = (lengths.to(z.dtype).mean() - spec.window).clamp(min=1)
    target = ramp * (1 - (spec.n_slots - spec.window) / beyond).clamp(min=0)
    return (target - marked).clamp(min=0), marked.detach(), target
