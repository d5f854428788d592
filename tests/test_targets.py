"""targets.py: the transposed pass against the explicit formula, the boundary loss against brute force and differences.
"""
import math

import pytest
import torch

import flex_masks
import targets
from flex_masks import CacheSpec, attention, effective_priority, keep_everything, plan
from targets import (EPS, Retention, RetentionLoss, boundary_loss, future_attention, listwise_loss, rank_targets,
                     retention_recall, sample_queries, teacher_evict_at)
from test_masks import kernel  # noqa: F401

SPEC = CacheSpec(n_sink=2, window=4, budget=12)


def inputs(T, dtype=torch.float64, B=2, H=4, H_kv=2, D=8, seed=0):
    torch.manual_seed(seed)
    return tuple(2 * torch.randn(B, h, T, D, dtype=dtype) for h in (H, H_kv, H_kv))


def explicit_target(q, k, lse, window, lengths, evict_at=None, reduce="max", power=1.0):
    """The definition, one token at a time, in fp64."""
    B, H, T, D = q.shape
    H_kv, g = k.shape[1], H // k.shape[1]
    target = torch.full((B, H_kv, T), math.log(EPS), dtype=torch.float64)
    for b in range(B):
        n = int(lengths[b])
        for h_kv in range(H_kv):
            for t in range(T - window):
                masses = []
                for h in range(h_kv * g, (h_kv + 1) * g):
                    mass = 0.0
                    for d in range(t + window, n):
                        x = (q[b, h, d] @ k[b, h_kv, t]).item() / D**0.5 - lse[b, h, d].item()
                        p = math.exp(x)
                        p = p / (1 + p) if evict_at is not None and d >= evict_at[b, h_kv, t] else p
                        mass += p**power
                    masses.append(math.log(EPS + (mass / max(1, n - t - window))**(1 / power)))
                target[b, h_kv, t] = max(masses) if reduce == "max" else sum(masses) / g
    return target


@pytest.mark.parametrize("T", [1, 4, 5, 6, 23])
@pytest.mark.parametrize("bounded, reduce, power", [(False, "max", 1), (True, "max", 1), (True, "mean", 2),
                                                    (False, "max", 2), (True, "max", 3.5)])
def test_transposed_pass_is_the_formula(T, bounded, reduce, power):
    q, k, v = inputs(T)
    evict_at = plan(torch.randn(2, 2, T), SPEC)
    lse = attention(q, k, v, evict_at)[1]
    lengths = torch.tensor([T, max(1, T - 3)])
    got = future_attention(q, k, lse, SPEC.window, lengths, evict_at if bounded else None, reduce, power)
    want = explicit_target(q, k, lse, SPEC.window, lengths, evict_at if bounded else None, reduce, power)
    assert got.isfinite().all() and (got - want).abs().max() < (3e-3 if bounded else 1e-10)  # see log_sigmoid
    assert (got[..., max(0, T - SPEC.window):] == math.log(EPS)).all()  # no future, no mass


@pytest.mark.parametrize("T", [5, 129, 300])
@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("B, window", [(1, 4), (2, 1), (2, 2)])
def test_transposed_pass_through_its_tables(T, bounded, B, window, request):
    """What a GPU would do, tables, padding and all, on the stand-in for its kernel: only tiles with d >= t + window."""
    q, k, v = inputs(T, B=B)
    evict_at = plan(torch.randn(B, 2, T), SPEC)
    lse = attention(q, k, v, evict_at)[1]
    lengths = torch.tensor([T, T - 3])[:B]
    want = targets.transposed_lse(q, k, lse, window, lengths, evict_at if bounded else None, 2.0)
    kernel = request.getfixturevalue("kernel")
    got = targets.transposed_lse(q, k, lse, window, lengths, evict_at if bounded else None, 2.0)
    assert got.shape == want.shape and torch.allclose(got, want, rtol=0, atol=1e-11)  # an infinity equals itself
    mask, n = kernel.masks[0], flex_masks.bucket(T) // flex_masks.TILE
    taken = mask.kv_num_blocks + mask.full_kv_num_blocks
    assert len(kernel.masks) == 1 and len(taken) == (1 if B == 1 else 4) and kernel.shapes[0][2][-1] == 16
    t, d = torch.arange(128 * n).view(-1, 1), torch.arange(128 * n)
    for z, count in enumerate(taken[:, 0]):
        pairs = (d >= t + window) & (d < lengths[z // 2])
        assert count.sum() == pairs.view(n, 128, n, 128).any(3).any(1).sum()


def test_bounded_mass_of_any_score():
    """An evicted token whose score is far above the lse would take all the attention, no more and no less."""
    q = torch.tensor([0.0, 0.0, 5.0, 60.0, 2e3, -50.0]).view(1, 1, 6, 1)
    got = targets.transposed_lse(q, torch.ones(1, 1, 6, 1), torch.zeros(1, 1, 6), 2, torch.tensor([6]),
                                 torch.tensor([[[2, 3, 4, 5, 6, 6]]]))  # gone as soon as they have left the window
    want = torch.sigmoid(q.flatten().double())
    sums = torch.stack([want[t + 2:].sum() for t in range(4)])
    assert ((got[0, 0].double() - sums.log()).abs() < 3e-3).all()  # see log_sigmoid


def test_log_sigmoid_keeps_its_word():
    x = torch.linspace(-60, 60, 120001, dtype=torch.float64)
    error = (targets.log_sigmoid(x) - torch.nn.functional.logsigmoid(x)).abs()
    assert 1e-4 < error.max() < 3e-3 and (targets.log_sigmoid(x) <= 0).all()
    assert torch.equal(targets.log_sigmoid(x[x < -11]), x[x < -11])  # where nearly all pairs are it is exact
    assert targets.log_sigmoid(torch.tensor([-1e30, 1e30])).tolist() == [torch.tensor(-1e30).item(), 0.0]


def test_dense_mass_is_conserved():
    """With the dense lse, what the future gives to tokens plus what windows keep is one unit a query."""
    T, w = 40, SPEC.window
    q, k, v = inputs(T)
    lse = attention(q, k, v, keep_everything(2, 2, T))[1]
    target = targets.transposed_lse(q, k, lse, w, torch.full((2,), T))
    beyond = target.exp().sum(-1)  # (B, H)
    scores = q @ k.repeat_interleave(2, 1).mT / 8**0.5
    recent = torch.ones(T, T, dtype=torch.bool).tril() & ~torch.ones(T, T, dtype=torch.bool).tril(-w)
    window = ((scores - lse.unsqueeze(-1)).exp() * recent).sum((-1, -2))
    assert (beyond + window - T).abs().max() < 1e-9
    assert beyond.min() > 1  # the sum is not all window


def test_fp32_target_ranks_like_fp64():
    q, k, v = inputs(200)
    lse = attention(q, k, v, keep_everything(2, 2, 200))[1]
    exact = future_attention(q, k, lse, 4)
    single = future_attention(q.float(), k.float(), lse.float(), 4)
    assert (exact - single).abs().max() < 2e-5  # a log of a sum of ~200 terms, each good to a few fp32 eps
    for a, b in zip(exact.flatten(0, 1), single.flatten(0, 1)):
        assert set(a.topk(50).indices.tolist()) == set(b.topk(50).indices.tolist())


def test_power_tells_one_full_look_from_many_glances():
    """Token 0 is read once with all attention, token 1 by every query a little: equal mean mass, not equal need."""
    lse, big = torch.zeros(1, 1, 12, dtype=torch.float64), 1e3
    q = torch.zeros(1, 1, 12, 2, dtype=torch.float64)
    k = torch.full((1, 1, 12, 2), -big, dtype=torch.float64)
    q[..., 1] = 1.0                                # every later query gives token 1 a probability of 1 / 10
    k[0, 0, 1] = torch.tensor([0.0, -math.log(10) * 2**0.5])
    q[0, 0, 7, 0], k[0, 0, 0] = 1.0, torch.tensor([2 * big, -2 * big + 0.0])
    q[0, 0, 7, 1] = 1.0
    mean, square = (future_attention(q, k, lse, 2, power=p)[0, 0] for p in (1, 2))
    assert abs(mean[0] - mean[1]) < 0.12           # 1 look / 10 queries against 9 or 10 glances of 1 / 10
    assert square[0] - square[1] > 1.0             # sqrt(1 / 10) against 1 / 10


def brute_force_loss(scores, log_gamma, target, spec, q, valid):
    """The paper's words, sample by sample."""
    B, H_kv, T = scores.shape
    lg = [0.0] * H_kv if log_gamma is None else log_gamma.tolist()
    entries = []
    for b in range(B):
        for h in range(H_kv):
            if not valid[b]:
                continue
            for at in q[b, h].tolist():
                eff = lambda r, t: r[b, h, t].item() + (at - t) * lg[h]  # noqa: E731
                new = at - spec.window
                older = sorted(range(spec.n_sink, new), key=lambda t: (eff(target, t), t))
                bnd = older[-spec.n_select]  # the weakest of the teacher's top k without the newcomer
                y = 1.0 if (eff(target, new), new) > (eff(target, bnd), bnd) else -1.0
                margin = y * (eff(target, new) - eff(target, bnd))
                entries.append((h, y, 0.1 + 0.9 / (1 + math.exp(-margin)), eff(scores, new) - eff(scores, bnd)))
    keep = {h: sum(e[1] > 0 for e in entries if e[0] == h) / sum(e[0] == h for e in entries) for h in range(H_kv)}
    clip = lambda x: min(2.0, max(0.5, x))  # noqa: E731
    weight = [e[2] * clip(0.5 / max(keep[e[0]], 1e-9) if e[1] > 0 else 0.5 / max(1 - keep[e[0]], 1e-9))
              for e in entries]
    total = sum(weight)
    return sum(w / total * math.log1p(math.exp(-e[1] * e[3])) for w, e in zip(weight, entries))


@pytest.mark.parametrize("decay", [False, True])
def test_boundary_loss_is_its_definition_and_has_its_gradients(decay):
    torch.manual_seed(1)
    T, lengths = 60, torch.tensor([60, 41, 9])
    scores, target = (torch.randn(3, 2, T, dtype=torch.float64) for _ in range(2))
    log_gamma = -torch.tensor([0.02, 0.2], dtype=torch.float64) if decay else None
    q, valid = sample_queries(30, 3, 2, SPEC, lengths)
    assert valid.flatten().tolist() == [True, True, False]
    assert (q[:2] >= SPEC.n_slots).all() and (q[:2] < lengths[:2].view(2, 1, 1)).all()
    scores.requires_grad_()
    if decay:
        log_gamma.requires_grad_()
    loss = boundary_loss(scores, log_gamma, rank_targets(target, log_gamma, SPEC), SPEC, q, valid)
    ranking = rank_targets(target, log_gamma, SPEC)
    want = brute_force_loss(scores, log_gamma, target, SPEC, q, valid.flatten())
    assert abs(loss.item() - want) < 1e-10
    loss.backward()
    step = 1e-6  # finite differences in the scores; the teacher's side must not move with them
    used = scores.grad.abs().sum((0, 1)).topk(3).indices.tolist()
    for b, h, t in [(0, 0, used[0]), (1, 1, used[1]), (0, 1, used[2])]:
        moved = scores.detach().clone()
        moved[b, h, t] += step
        difference = (boundary_loss(moved, log_gamma, ranking, SPEC, q, valid).item() - loss.item()) / step
        assert abs(difference - scores.grad[b, h, t].item()) < 1e-5
    if decay:  # gamma: hold the teacher still, since its ranking uses the same gamma and carries no gradient
        frozen = log_gamma.detach()
        for h in range(2):
            moved = scores.detach() - torch.arange(T) * (step * torch.eye(2, dtype=torch.float64)[h]).view(1, 2, 1)
            difference = (boundary_loss(moved, frozen, ranking, SPEC, q, valid).item() - loss.item()) / step
            assert abs(difference - log_gamma.grad[h].item()) < 1e-4 and abs(difference) > 1e-3


@pytest.mark.parametrize("decay", [False, True])
def test_listwise_loss_is_its_definition_and_reaches_every_candidate(decay):
    """Token by token in plain Python; gradients by finite differences, gamma included."""
    torch.manual_seed(4)
    T, lengths = 60, torch.tensor([60, 41, 9])  # the last row has no candidate: 9 tokens, of which 2 + 8 are protected
    scores, target = (torch.randn(3, 2, T, dtype=torch.float64) for _ in range(2))
    target[:, :, 2:6] += 6  # worth far more than any boundary, and older than any newcomer
    log_gamma = -torch.tensor([0.02, 0.05], dtype=torch.float64) if decay else torch.zeros(2, dtype=torch.float64)
    spec = CacheSpec(2, 8, 20)
    scores.requires_grad_()
    log_gamma.requires_grad_()

    def loss_of(scores, log_gamma):
        return listwise_loss(scores, log_gamma if decay else None, target, spec, lengths)
    loss = loss_of(scores, log_gamma)
    want = 0.0
    for b in range(2):
        for h in range(2):
            lg, ts = log_gamma[h].item() if decay else 0.0, range(spec.n_sink, int(lengths[b]) - spec.window)
            mass, p = ([math.exp(x) for x in xs] for xs in zip(*(
                (target[b, h, t].item(), scores[b, h, t].item() - t * lg) for t in ts)))
            want += sum(m / sum(mass) * math.log(m / sum(mass) / (e / sum(p))) for m, e in zip(mass, p)) / 4
    assert abs(loss.item() - want) < 1e-10
    loss.backward()
    for b in range(2):
        candidate = torch.zeros(T, dtype=torch.bool)
        candidate[spec.n_sink:int(lengths[b]) - spec.window] = True
        assert (scores.grad[b, :, candidate] != 0).all() and not scores.grad[b, :, ~candidate].any()
    assert not scores.grad[2].any()
    step = 1e-6
    for b, h, t in [(0, 0, 3), (1, 1, 4), (0, 1, scores.grad[0, 1].argmax().item())]:
        moved = scores.detach().clone()
        moved[b, h, t] += step
        difference = (loss_of(moved, log_gamma).item() - loss.item()) / step
        assert abs(difference - scores.grad[b, h, t].item()) < 1e-5
    if decay:
        for h in range(2):
            moved = log_gamma.detach() + step * torch.eye(2, dtype=torch.float64)[h]
            difference = (loss_of(scores.detach(), moved).item() - loss.item()) / step
            assert abs(difference - log_gamma.grad[h].item()) < 1e-3 and abs(difference) > 1e-3


def test_listwise_loss_is_least_at_the_log_of_the_expected_attention():
    """Two kinds of token that a scorer can tell apart, worth 1 or 9 at random within a kind: gradient descent on one
    score a kind ends at the log of the mean, up to a constant, and 0 is reached where the target is the score itself.
    """
    torch.manual_seed(5)
    T, spec, lengths = 2000, CacheSpec(2, 8, 100), torch.tensor([2000])
    kind = torch.arange(T) % 2
    worth = torch.where(torch.rand(T) < torch.where(kind == 0, 0.2, 0.7), 9.0, 1.0).double()
    score = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([score], lr=2.0)
    for _ in range(200):
        loss = listwise_loss(score[kind][None, None], None, worth.log()[None, None], spec, lengths)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    inside = slice(spec.n_sink, T - spec.window)
    mean = [worth[inside][kind[inside] == i].mean().log().item() for i in range(2)]
    assert abs((score[1] - score[0]).item() - (mean[1] - mean[0])) < 1e-4
    target = 3 * torch.randn(1, 2, T, dtype=torch.float64)
    assert abs(listwise_loss(target + 7, None, target, spec, lengths).item()) < 1e-12


def test_boundary_token_is_never_the_newcomer():
    """With scores equal to the target everywhere the loss is below log 2 and pushes nothing the wrong way."""
    torch.manual_seed(2)
    target = 5 * torch.randn(2, 2, 80)
    q, valid = sample_queries(64, 2, 2, SPEC, torch.tensor([80, 80]))
    ranking = rank_targets(target, None, SPEC)
    perfect = boundary_loss(target, None, ranking, SPEC, q, valid)
    reversed_ = boundary_loss(-target, None, ranking, SPEC, q, valid)
    assert perfect < 0.3 < math.log(2) < reversed_


@pytest.mark.parametrize("T, budget", [(5, 12), (12, 12), (40, 6)])
def test_nothing_to_decide_is_zero_loss(T, budget):
    spec = CacheSpec(2, 4, budget)
    scores = torch.randn(1, 2, T, requires_grad=True)
    q, valid = sample_queries(8, 1, 2, spec, torch.tensor([T]))
    ranking = rank_targets(torch.randn(1, 2, T), None, spec)
    loss = boundary_loss(scores, None, ranking, spec, q, valid)
    loss = loss + listwise_loss(scores, None, torch.randn(1, 2, T), spec, torch.tensor([T]))
    loss.backward()
    assert loss.item() == 0 and (scores.grad == 0).all()


def test_recall_counts_kept_tokens():
    torch.manual_seed(3)
    target = torch.randn(1, 2, 100)
    q, valid = sample_queries(40, 1, 2, SPEC, torch.tensor([100]))
    teacher = teacher_evict_at(rank_targets(target, None, SPEC), SPEC)
    student = plan(effective_priority(torch.randn(1, 2, 100)), SPEC)
    kept = both = 0
    for h in range(2):
        for at in q[0, h].tolist():
            want = {t for t in range(2, at - 3) if at < teacher[0, h, t]}
            kept, both = kept + len(want), both + len({t for t in want if at < student[0, h, t]})
    assert retention_recall(student, teacher, SPEC, q, valid).item() == pytest.approx(both / kept)
    assert retention_recall(teacher, teacher, SPEC, q, valid).item() == 1
    assert kept == SPEC.n_select * q.numel()


def test_late_bias_is_late():
    q, _ = sample_queries(4000, 1, 1, SPEC, torch.tensor([1012]))
    early, late = q[0, 0, :2000].double().mean(), q[0, 0, 2000:].double().mean()
    assert abs(early - 512) < 25 and abs(late - (12 + 1000 * 2 / 3)) < 25


@pytest.mark.parametrize("frozen", [True, False])
def test_retention_loss_teaches_the_scorer_alone(frozen):
    T = 50
    q, k, v = (x.float().requires_grad_() for x in inputs(T))
    raw = torch.randn(2, 2, T, requires_grad=True)
    log_gamma = torch.full((2,), -0.01, requires_grad=True)
    evict_at = plan(effective_priority(raw.detach(), log_gamma.detach()), SPEC)
    out, lse = attention(q, k, v, evict_at)
    noise = torch.rand(4, 2, 2, 128)
    retention = Retention(SPEC, torch.tensor([T, T - 5]), weight=0.5, want_recall=True, noise=noise)
    carrier = torch.zeros((), requires_grad=True) if frozen else out
    got = RetentionLoss.apply(carrier, raw, log_gamma, q, k, lse, evict_at, retention, 3)
    assert retention.passes == 0 and not retention.loss  # the forward does not run it
    assert torch.equal(got, carrier)
    weight = torch.randn_like(got)
    got.backward(weight)
    assert retention.passes == 1 and retention.loss[3] > 0 and 0 <= retention.recall[3] <= 1
    assert raw.grad.abs().sum() > 0 and log_gamma.grad.abs().sum() > 0
    if frozen:
        assert q.grad is None and k.grad is None and v.grad is None
    else:  # exactly the gradients of attention without any retention loss
        plain = torch.autograd.grad(attention(q, k, v, evict_at)[0], (q, k, v), weight)
        assert all(torch.equal(a, x.grad) for a, x in zip(plain, (q, k, v)))
    again = torch.zeros((), requires_grad=True)
    twice = raw.detach().clone().requires_grad_()
    RetentionLoss.apply(again, twice, log_gamma.detach(), q.detach(), k.detach(), lse.detach(), evict_at,
                        Retention(SPEC, torch.tensor([T, T - 5]), weight=1.0, noise=noise), 3).backward()
    assert torch.allclose(twice.grad, 2 * raw.grad)  # same samples, and the weight scales the gradient


def test_one_pass_a_layer_under_activation_checkpointing():
    from torch.utils.checkpoint import checkpoint
    T = 40
    q, k, v = (x.float() for x in inputs(T))
    x = torch.ones(1, requires_grad=True)
    raw = torch.randn(2, 2, T, requires_grad=True)
    grads, noise = {}, torch.rand(1, 2, 2, 128)
    for use in (False, True):
        retention = Retention(SPEC, torch.tensor([T, T]), noise=noise)

        def block(x):
            evict_at = plan(raw.detach(), SPEC)
            out, lse = attention(q * x, k, v, evict_at)
            return RetentionLoss.apply(out, raw, None, q, k, lse.detach(), evict_at, retention, 0)
        raw.grad = x.grad = None
        (checkpoint(block, x, use_reentrant=False) if use else block(x)).sum().backward()
        assert retention.passes == 1
        grads[use] = (raw.grad.clone(), x.grad.clone())
    assert all(torch.equal(a, b) for a, b in zip(grads[False], grads[True]))


# ---------------------------------------------------------------------------------------------------------------------

@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("T", [127, 129, 1025])
def test_transposed_pass_on_gpu(T, bounded, dtype, record_property):
    """Against fp64 on the same (rounded) inputs; the top-k sets may differ only by near-ties, at a stated rate."""
    q, k, v = (x.to("cuda", dtype) for x in inputs(T, D=32))
    spec = CacheSpec(4, 16, 84)
    evict_at = plan(torch.randn(2, 2, T, device="cuda"), spec)
    lse = attention(q, k, v, evict_at)[1]
    lengths = torch.tensor([T, T - 9], device="cuda")
    mask = evict_at if bounded else None
    got = future_attention(q, k, lse, 16, lengths, mask).double().cpu()
    want = future_attention(q.double().cpu(), k.double().cpu(), lse.double().cpu(), 16, lengths.cpu(),
                            None if mask is None else mask.cpu())
    assert (got - want).abs().max() < 1e-3  # fp32 accumulation of products of exact bf16 or fp32 inputs
    pairs = zip(got[..., :T - 25].flatten(0, 1), want[..., :T - 25].flatten(0, 1))
    n = min(64, (T - 25) // 2)
    same = [len(set(a.topk(n).indices.tolist()) & set(b.topk(n).indices.tolist())) / n for a, b in pairs]
    print(f"T {T} {dtype} bounded {bounded}: {1 - sum(same) / len(same):.2e} of the top {n} differ from fp64")
    assert sum(same) / len(same) >= 0.995


@pytest.mark.gpu
@pytest.mark.parametrize("T", [129, 1025])
def test_scorer_and_decay_gradients_on_gpu(T):
    """One retention step on the GPU against the same on the CPU in fp64: gradients of every scorer parameter."""
    from scorer import make_scorer
    q, k, v = inputs(T, D=32)
    spec = CacheSpec(4, 16, 64)
    grads = {}
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.float32)):
        scorer = make_scorer("kvpop", n_kv_head=2, head_dim=32, window=16, layer=0).to(device, dtype)
        torch.manual_seed(5)
        for p in scorer.parameters():
            p.data += 0.3 * torch.randn(p.shape, dtype=torch.float64).to(p)
        x = [t.to(device, dtype) for t in (q, k, v)]
        scores, log_gamma = scorer(x[1], x[2]), scorer.log_gamma()
        evict_at = plan(effective_priority(torch.arange(T).sin().expand(2, 2, T).contiguous()), spec).to(device)
        lse = attention(*x, evict_at)[1]
        target = future_attention(x[0], x[1], lse, 16, None, evict_at)
        at = torch.arange(spec.n_slots, T, 3, device=device).expand(2, 2, -1)
        valid, ranking = torch.ones(2, 1, 1, dtype=torch.bool, device=device), rank_targets(target, log_gamma, spec)
        (boundary_loss(scores, log_gamma, ranking, spec, at, valid) +
         listwise_loss(scores, log_gamma, target, spec, torch.full((2,), T, device=device))).backward()
        grads[device] = {n: p.grad.double().cpu() for n, p in scorer.named_parameters()}
    for name, want in grads["cpu"].items():
        assert (grads["cuda"][name] - want).norm() <= 2e-3 * want.norm() + 1e-9, name
