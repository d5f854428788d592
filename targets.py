"""What the scorer is taught: the attention each token receives after it has left the window.

What this file holds:
  future_attention   the target: one attention call with queries and keys swapped, fed with the lse of the sparse pass
  boundary_loss      a logistic loss where the cache decides: the newcomer against the token it would displace
  retention_recall   share of the teacher's top-k that the student keeps, the figure to watch
  RetentionLoss      custom autograd function: identity forward, all of the above in the backward
How it departs from plain distillation: the attention matrix never exists. exp(score - lse) is the probability itself,
so the log-sum-exp of a call that swaps q and k IS the log of a token's future mass. The loss reaches the scorer only.

Source: KVpop, arXiv 2607.05061, sections 3.2-3.3, table 3. Letters as in flex_masks.py: B, T, H, H_kv, D, M candidates.
"""
import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

import flex_masks
from flex_masks import TILE, CacheSpec, dense_reference, effective_priority, running_topk

# Power of the mean over future queries; 1 is the paper's. An oracle with 1 drops records that are read only once.
POWER = 2.0
EPS = 1e-8  # added to the mean mass, so that a token nobody looks at has a finite target


def transposed_lse(q, k, lse, window, lengths, evict_at=None, power=1.0, kernel_options=None):
    """log sum_d p(d -> t)^power over d in [t + window, length): (B, H, T - window) fp32, -inf for an empty sum.

    p(d -> t) = exp(q_d . k_t / sqrt(D) - lse_d) comes from an attention call with K as queries and Q as keys; only its
    lse is used, the value is a narrow stand-in. lse (B, H, T) of the attention pass that q and k come from.
    evict_at (B, H_kv, T) given: the bounded form. For a token already evicted at d, exp(score - lse) is p / (1 - p),
    which rewards having been evicted without bound; x - log(1 + exp(x)) turns it into the mass that the token would get
    if it were put back. A KV head is a batch row, so that K is one tensor seen by its group's heads, never copied.
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
        if evict_at is not None:
            y = x.clamp(max=30)  # at 30 the mass is 1 to the last bit
            x = torch.where(d < evict_at[b, t], x, y - (1 + y.exp()).log())
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
    lse = flex_masks.fused_attention(k.expand(-1, G, -1, -1), q, narrow, block_mask, score_mod=score_mod,
                                     kernel_options=kernel_options)[1]
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


def boundary_loss(scores, log_gamma, target, spec, q, valid, tau=1.0, margin_floor=0.1, margin_tau=1.0,
                  balance_range=(0.5, 2.0), compiled=False):
    """Boundary loss at sampled queries (paper eqs. 8-11), with EFFECTIVE scores on both sides of the difference.

    At query q the newcomer t_new = q - window meets t_bnd, the weakest of the teacher's top n_select among the older
    candidates: the token that it would displace. y = +1 iff the newcomer wins under the teacher's effective targets.
        loss = mean of omega * softplus(-y (r_new(q) - r_bnd(q)) / tau)
    Decay does not cancel: the difference keeps (t_bnd - t_new) log_gamma, which is gamma's only gradient.
    omega = margin weight * keep/drop balance per head, normalised to mean 1. y, omega and the teacher's ranking carry
    no gradient; the teacher uses the same gamma.

    scores, target (B, H_kv, T); log_gamma (H_kv,) or None; q (B, H_kv, S) and valid as from sample_queries.
    Returns a scalar, 0 when no query is valid or nothing is selected by score.
    """
    B, H_kv, T = scores.shape
    if spec.n_select == 0 or T <= spec.n_slots:
        return (scores * 0).sum() if log_gamma is None else (scores * 0).sum() + (log_gamma * 0).sum()
    with torch.no_grad():
        teacher = effective_priority(target, log_gamma)
        rank, cutoff = running_topk(teacher, spec, compiled)  # (B, H_kv, M)
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
    difference = scores.gather(-1, t_new) - scores.gather(-1, t_bnd)
    if log_gamma is not None:
        difference = difference + (t_bnd - t_new) * log_gamma.view(1, -1, 1)
    return (omega * F.softplus(-y * difference / tau)).sum()


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


def teacher_evict_at(target, log_gamma, spec):
    """The eviction plan that future attention itself would make: the oracle, and the teacher of recall."""
    return flex_masks.plan(effective_priority(target, log_gamma), spec)


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
    noise: torch.Tensor = None       # (n_layer, B, H_kv, n_samples) uniform, for the sampled queries; None: drawn anew
    want_recall: bool = False
    compiled: bool = False           # thresholds through torch.compile (flex_masks.parallel_cutoffs)
    loss: dict = field(default_factory=dict)
    recall: dict = field(default_factory=dict)
    passes: int = 0                  # transposed passes so far: one a layer and micro-step


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
        B, H_kv, _ = scores.shape
        target = future_attention(q, k, lse, r.spec.window, r.lengths, evict_at if r.bounded else None, r.reduce,
                                  r.power)
        r.passes += 1
        u = None if r.noise is None else r.noise[layer]  # data, not a generator: a CUDA graph would replay its numbers
        at, valid = sample_queries(r.n_samples, B, H_kv, r.spec, r.lengths, u)
        with torch.enable_grad():
            leaves = [scores.detach().requires_grad_()]
            if log_gamma is not None:
                leaves.append(log_gamma.detach().requires_grad_())
            loss = boundary_loss(leaves[0], leaves[1] if log_gamma is not None else None, target, r.spec, at, valid,
                                 r.tau, compiled=r.compiled)
            grads = [g * r.weight for g in torch.autograd.grad(loss, leaves)] + [None]
        r.loss[layer] = loss.detach()
        if r.want_recall:
            teacher = teacher_evict_at(target, log_gamma, r.spec)
            uniform = at[..., :r.n_samples // 2]  # the half that is not late-biased
            r.recall[layer] = retention_recall(evict_at, teacher, r.spec, uniform, valid)
        return grad, grads[0], grads[1], None, None, None, None, None, None
