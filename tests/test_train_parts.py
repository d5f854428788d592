"""What train.py is made of, each part alone against a plain form of it: the rows that it reads, its losses and whose
weights they move, the learning rate over a run, evaluation. Tiny models, small problems.
"""
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import train
from data import traces
from data.tokenizer import EOT
from data.traces import FAMILIES, make_problem
from flex_masks import CacheSpec
from model import causal_attend
from targets import POWER, Retention, policy_attend
from test_train import QUIET, SPEC, Head, agree, head_inputs, random_model, same, scorers_for
from test_train import small_problems  # noqa: F401 (a fixture)
from train import lr_factor, make_optimizer, parse_settings


# ---------------------------------------------------------------------------------------------------------------------
# data

def test_packed_rows_know_their_documents():
    """Told again from the text: where each document starts, what is prompt, and where prediction must stop."""
    seen = set()
    for row in range(6):
        idx, targets, weight, doc_end = train.PackedRows(800, 3, 0.25)[row]
        assert [x.dtype for x in (idx, targets, weight, doc_end)] == [torch.int64] * 2 + [torch.float32, torch.int32]
        assert [tuple(x.shape) for x in (idx, targets, weight, doc_end)] == [(800,)] * 4
        assert torch.equal(idx[1:], targets[:-1])
        start, ids = 0, [*idx.tolist(), targets[-1].item()]
        while start < 800:
            text = ids[start:]
            answer_from = text.index(ord("\n")) if ord("\n") in text else len(text)
            end = text.index(EOT) if EOT in text else None
            here = slice(start, 800 if end is None else start + end + 1)
            assert bytes(text[:3]) in (b"A| ", b"W| ") and len(doc_end[here].unique()) == 1
            want = [0.0 if i == end else 1.0 if i >= answer_from else 0.25 for i in range(here.stop - start)]
            assert weight[here].tolist() == want[:800 - start]
            if end is None:
                assert doc_end[start] > 800  # cut at the end of the row
                break
            assert doc_end[start] == start + end + 1
            seen.add(bytes(text[:end]))
            start += end + 1
        assert doc_end[0] < 800
    assert len({t.split(b"\n")[0] for t in seen}) == len(seen) > 6  # no problem comes twice
    assert {t[:1] for t in seen} == {b"A", b"W"}
    assert not torch.equal(train.PackedRows(800, 3, 0.25)[0][0], train.PackedRows(800, 4, 0.25)[0][0])


def test_forgetful_documents_lose_their_scratch_after_the_window():
    """At --forget 1: of a document's bytes those worth keeping live to its end, the others `window` tokens; at 0.5 both
    kinds of document occur, and nothing else of a row differs."""
    kinds = set()
    for row in range(8):
        plain = train.PackedRows(800, 3, 0.25)[row]
        for share in (0.5, 1.0):
            packed = train.PackedRows(800, 3, 0.25, share, 20)[row]
            assert all(torch.equal(a, b) for a, b in zip(plain[:3], packed[:3]))
            text, start = packed[0].tolist(), 0
            while start < 800 and EOT in text[start:]:
                end = text.index(EOT, start)
                document = bytes(text[start:end]).decode()
                family = {"A": "arith", "W": "walk", "M": "mark"}[document[0]]
                prompt, trace = document.split("\n")
                keep = traces.worth_keeping(traces.Problem(family, "train", 0, 0, prompt + "\n", trace, ""))
                full = [end + 1] * (end + 1 - start)
                short = [e if k else min(e, start + i + 20) for i, (e, k) in enumerate(zip(full, [*keep, True]))]
                got = packed[3][start:end + 1].tolist()
                assert got == short or (share < 1 and got == full)
                kinds.add((share, got == full))
                start = end + 1
    assert kinds == {(0.5, True), (0.5, False), (1.0, False)}


@torch.no_grad()
def test_packed_attention_is_attention_in_each_document_alone():
    model = random_model()
    idx, _, _, doc_end = (x[None] for x in train.PackedRows(400, 0, 0.1)[1])
    packed = model(idx, train.packed_attend(doc_end))
    starts = [0, *(e for e in doc_end[0].unique().tolist() if e < 400)]
    assert len(starts) >= 2
    for a, b in zip(starts, starts[1:] + [400]):
        alone = model(idx[:, a:b], causal_attend)  # from position 0: RoPE is relative
        assert (packed[:, a:b] - alone).abs().max() < 1e-4 * alone.abs().max()
    together = model(idx, causal_attend)  # the bar sees a leak between documents
    assert (together - packed)[:, starts[1]:].abs().max() > 0.05 * packed.abs().max()


def test_retrofit_rows_and_their_batches():
    rows = train.Problems("train", 5)
    some = [rows[i] for i in range(8)]
    assert [p.family for p in some] == list(FAMILIES) * 4 and {p.split for p in some} == {"train"}
    assert {p.size for p in some} <= {3, 4} and len({p.prompt for p in some}) == 8
    assert rows[3] == some[3] and train.Problems("train", 6)[3] != some[3]
    idx, lengths, starts = train.collate_problems(some)
    assert idx.shape == (8, lengths.max()) and train.collate_problems(some, 128)[0].shape[1] % 128 == 0
    mask = train.response_mask(idx.shape[1], lengths, starts)
    for p, row, n, start, predicts in zip(some, idx.tolist(), lengths.tolist(), starts.tolist(), mask):
        ids = [*(p.prompt + p.trace).encode(), EOT]
        assert row == ids + [EOT] * (len(row) - n) and n == len(ids) and row[start] == ord("\n")
        # the positions whose successors are the trace and its end
        assert [row[i + 1] for i in predicts.nonzero().flatten().tolist()] == [*p.trace.encode(), EOT]


def test_workers_and_a_later_start_see_the_same_rows():
    rows, settings = train.PackedRows(400, 0, 0.1), parse_settings(["--steps", "4", *QUIET])
    all_steps = list(train.loader(rows, settings, 0))
    assert len(all_steps) == 4 and all_steps[0][0].shape == (2, 400)
    assert same(list(train.loader(rows, settings, 2)), all_steps[2:])
    settings.workers = 2
    assert same(list(train.loader(rows, settings, 1)), all_steps[1:])


# ---------------------------------------------------------------------------------------------------------------------
# losses

def test_cross_entropy_is_its_plain_form():
    hidden, weight, targets, share = head_inputs()
    head = Head(weight)
    loss = train.cross_entropy(head, hidden, targets, share)
    log_p = (hidden.double() @ weight.double().T).log_softmax(-1)
    plain = -(log_p.gather(-1, targets[..., None]).squeeze(-1) * share).sum() / share.sum()
    assert agree(loss, plain, (hidden, weight)) and head.most == 7


@pytest.mark.parametrize("top_k", [1, 5, 20])
def test_distillation_is_its_plain_form(top_k):
    """Forward KL on the teacher's top_k, both renormalised there; with top_k = vocabulary the whole forward KL."""
    hidden, weight, _, _ = head_inputs()
    mask = torch.arange(15) < torch.tensor([[14], [9]])
    student, teacher = Head(weight), Head(torch.randn(20, 6))
    teacher_hidden = torch.randn(2, 15, 6)
    loss = train.distillation_kl(student, hidden, *train.top_logits(teacher, teacher_hidden, top_k), mask)
    total = 0.0
    for b, t in mask.nonzero().tolist():
        logits = (teacher_hidden[b, t] @ teacher.weight.T).double()
        top = logits.argsort(descending=True)[:top_k]
        p, q = logits.softmax(0), (hidden[b, t].double() @ weight.double().T).softmax(0)
        p, q = p[top] / p[top].sum(), q[top] / q[top].sum()
        total = total + (p * (p / q).log()).sum()
    plain = total / 23
    if top_k == 1:
        assert loss.item() == 0  # one candidate has all the mass on both sides
    else:
        assert agree(loss, plain, (hidden, weight)) and student.most == 7
    if top_k == 20:
        log_q = (hidden @ weight.T).log_softmax(-1)[mask]
        full = F.kl_div(log_q, (teacher_hidden @ teacher.weight.T).softmax(-1)[mask], reduction="batchmean")
        assert abs(loss.item() - full.item()) < 1e-5


def test_a_model_has_no_distance_to_itself():
    model, other = random_model(), random_model(1)
    idx, lengths, starts = train.collate_problems([train.Problems("train", 0)[i] for i in range(2)])
    mask = train.response_mask(idx.shape[1], lengths, starts)
    hidden = model(idx, causal_attend)
    own, others = (train.top_logits(m, m(idx, causal_attend), 256) for m in (model, other))
    assert train.distillation_kl(model, hidden, *own, mask).item() == 0
    assert train.distillation_kl(model, hidden, *others, mask).item() > 0.1


def gradients(train_base, weight, pad=EOT):
    """One micro-step as in `retrofit` -> gradients of the scorers and of the base, by name."""
    model, teacher = random_model(), random_model().requires_grad_(False)
    torch.manual_seed(3)
    model.scorers = scorers_for(model, "kvpop", noise=0.1)
    make_optimizer(model, parse_settings(["--device", "cpu", *(["--train-base"] if train_base else [])]))
    idx, lengths, starts = train.collate_problems([train.Problems("train", 0)[i] for i in range(2)])
    assert lengths[0] != lengths[1]
    idx[torch.arange(idx.shape[1]) >= lengths[:, None]] = pad
    noise = torch.rand(2, 2, 2, 128, generator=torch.Generator().manual_seed(1))
    retention, anchors = Retention(SPEC, lengths, weight=weight, noise=noise), None if train_base else []
    if train_base:
        hidden = model(idx, train.training_attend(model, SPEC, retention))
        train.distillation_kl(model, hidden, *train.top_logits(teacher, teacher(idx, causal_attend), 256),
                              train.response_mask(idx.shape[1], lengths, starts)).backward()
    else:
        with torch.no_grad():
            model(idx, train.training_attend(model, SPEC, retention, anchors))
        sum(anchors).backward()
    assert retention.passes == 2 and set(retention.loss) == {0, 1}
    grads = {name: p.grad for name, p in model.named_parameters()}
    return ({n: g for n, g in grads.items() if n.startswith("scorers.")},
            {n: g for n, g in grads.items() if not n.startswith("scorers.")})


def test_each_loss_moves_its_own_weights():
    """Retention loss: scorers alone. KL: base alone. Freezing the base changes nothing for the scorers."""
    scorer_both, base_both = gradients(True, 0.5)
    scorer_kl, base_kl = gradients(True, 0.0)
    scorer_alone, base_alone = gradients(False, 0.5)
    assert all(g.abs().max() > 0 for g in base_kl.values()) and len(base_kl) > 10
    assert same(base_both, base_kl)
    assert all(g is not None and not g.any() for g in scorer_kl.values())
    assert all(g is None for g in base_alone.values())
    assert scorer_alone.keys() == scorer_both.keys()
    for name, g in scorer_alone.items():
        assert g.abs().max() > 0, name
        assert torch.allclose(g, scorer_both[name], rtol=1e-4, atol=1e-7), name
    assert same((scorer_both, base_both), gradients(True, 0.5, pad=ord("7")))  # pads teach nothing


def test_learning_rate_over_a_run():
    settings = SimpleNamespace(steps=110, warmup=10, final_lr_ratio=0.1)
    factor = [lr_factor(step, settings) for step in range(111)]
    assert factor[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert factor[10] == 1 and factor[60] == pytest.approx(0.55) and factor[110] == pytest.approx(0.1)
    assert all(a > b for a, b in zip(factor[10:], factor[11:]))
    assert factor[35] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)
    assert lr_factor(0, SimpleNamespace(steps=1, warmup=0, final_lr_ratio=0.1)) == 1


# ---------------------------------------------------------------------------------------------------------------------
# evaluation

class Knows:
    """Says each next token, except after the positions that `wrong(family, prompt length, T)` lists."""

    def __init__(self, wrong):
        self.wrong = wrong

    def __call__(self, idx, attend):
        guess = idx.roll(-1, 1).clone()
        family = "arith" if idx[0, 0] == ord("A") else "walk"
        for at in self.wrong(family, idx[0].tolist().index(ord("\n")) + 1, idx.shape[1]):
            guess[0, at] = (guess[0, at] + 1) % 264
        return F.one_hot(guess, 264).float()

    def unembed(self, hidden):
        return hidden


def test_evaluation_counts_the_trace_and_its_end_alone():
    problems = [make_problem(f, i, "validation") for f in FAMILIES for i in range(2)]
    n_tokens = sum(len(p.trace) + 1 for p in problems)
    measure = lambda wrong: train.evaluate(Knows(wrong), "cpu", 2)  # noqa: E731
    result = measure(lambda family, n, T: [0, n - 2, T - 1])  # in the prompt, and after the end
    assert result["token_accuracy"] == result["traces_right"] == 1
    assert (result["loss"], result["recall"], result["n_problems"]) == (None, None, 4)
    for first_or_last in (lambda n, T: n - 1, lambda n, T: T - 2):  # the first byte of the trace; its end token
        result = measure(lambda family, n, T: [first_or_last(n, T)] * (family == "walk"))
        assert result["token_accuracy"] == pytest.approx(1 - 2 / n_tokens)
        assert result["by_family"] == {"arith": 1.0, "walk": 0.0} and result["traces_right"] == 0.5
    longest = max(problems[:2], key=lambda p: len(p.prompt) + len(p.trace))  # `right` is in order of the index
    T = len(longest.prompt) + len(longest.trace) + 1
    result = measure(lambda family, n, t: [n + 3] * (family == "arith" and t == T))
    assert result["right"] == {"arith": [longest.index != 0, longest.index != 1], "walk": [True, True]}


@torch.no_grad()
def test_evaluation_of_a_real_model_is_a_loop_over_positions():
    model = random_model(7, tie_embeddings=False)
    model.lm_head.weight[[i for i in range(264) if chr(i) not in "0123456789"]] = 0  # it says digits, some right
    for family in FAMILIES:
        problem = make_problem(family, 0, "test")
        ids, n = [*(problem.prompt + problem.trace).encode(), EOT], len(problem.prompt)
        right = sum(model.unembed(model(torch.tensor([ids[:t]]), causal_attend)[0, -1]).argmax().item() == ids[t]
                    for t in range(n, len(ids)))
        result = train.evaluate(model, "cpu", 1, split="test", families=(family,))
        assert result["token_accuracy"] == right / (len(ids) - n) and result["right"] == {family: [False]}
        assert right > 0


@torch.no_grad()
@pytest.mark.parametrize("policy", ["streaming", "random", "knorm", "kvpop-mlp", "kvpop", "oracle"])
def test_a_budget_that_holds_everything_is_dense(policy):
    model = random_model()
    scorers = scorers_for(model, policy, noise=0.3)
    idx, lengths, _ = train.collate_problems([make_problem("walk", i) for i in range(2)])
    dense = model(idx, causal_attend)
    spec = lambda budget: CacheSpec(2, 8, budget, scorers[0].state_entries)  # noqa: E731
    held = model(idx, policy_attend(scorers, spec(1000), lengths))
    assert (held - dense).abs().max() < 1e-4 * dense.abs().max()
    evicted = model(idx, policy_attend(scorers, spec(40), lengths))
    changed = (evicted - dense).abs().amax((0, 2)) > 1e-4 * dense.abs().max()
    n_slots = spec(40).n_slots
    assert not changed[:n_slots].any() and changed[n_slots + 40:].any()
    a = train.evaluate(model, "cpu", 1, spec(1000), scorers)
    b = train.evaluate(model, "cpu", 1)
    assert (a["right"], a["token_accuracy"]) == (b["right"], b["token_accuracy"])
    learned = policy.startswith("kvpop")
    assert a["loss"] == (0.0 if learned else None) and a["recall"] is None  # nothing was ever chosen
    c = train.evaluate(model, "cpu", 1, spec(40), scorers)
    assert (c["loss"] is None) is not learned
    if learned:
        assert c["loss"] > 0.1 and 0 < c["recall"] < 1


@torch.no_grad()
def test_the_oracle_ranks_by_the_attention_that_dense_queries_will_pay():
    model = random_model()
    scorers, found = scorers_for(model, "oracle"), []
    idx, lengths, _ = train.collate_problems([make_problem("walk", 0)])
    T = idx.shape[1]
    model(idx, policy_attend(scorers, CacheSpec(2, 8, 35), lengths, lambda *result: found.append(result)))
    assert [layer for layer, *_ in found] == [0, 1]
    query, t = torch.arange(T)[:, None], torch.arange(T)
    for _, q, k, _, scores, evict_at in found:
        p = (q @ k.repeat_interleave(2, 1).mT / 8**0.5).masked_fill(t > query, -math.inf).softmax(-1)  # (1, H, T, T)
        mass = (p**POWER * (query >= t + 8)).sum(2) / (T - t - 8).clamp(min=1)
        want = (mass**(1 / POWER) + 1e-8).log().view(1, 2, 2, T).amax(2)
        assert (scores - want)[..., :T - 8].abs().max() < 1e-3 and want.std() > 1
        visible = (t <= query) & (query < evict_at[..., None, :])  # sinks stay, and no query sees more than 35
        assert visible[..., 2:, :2].all()
        assert (visible.sum(-1) == torch.arange(1, T + 1).clamp(max=35)).all()
