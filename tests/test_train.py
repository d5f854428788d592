"""train.py on a tiny model and small problems: settings, data, losses and whose weights they move, evaluation, the
three jobs from the command line, and that a run which was stopped goes on as if it had not been.
"""
import contextlib
import json
import math
import pickle
import shutil
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import decode
import flex_masks
import train
from data import batches, traces
from data.scorer_files import load_scorers
from data.tokenizer import EOT
from data.traces import ALPHABET, FAMILIES, make_problem
from flex_masks import CacheSpec
from model import ModelConfig, Transformer, causal_attend, load_model, save_model
from scorer import make_scorer
from targets import POWER, Retention, policy_attend
from test_masks import Kernel
from train import PRESETS, Settings, lr_factor, make_optimizer, parse_settings

CACHE = dict(n_sink=2, window=8, budget=40)  # kvpop's state costs 5 of them at head_dim 8
SPEC = CacheSpec(**CACHE, state_entries=5)
SHAPE = "--n-layer 2 --n-embd 32 --n-head 4 --n-kv-head 2 --head-dim 8 --intermediate-size 48".split()
QUIET = "--device cpu --eval-problems 1 --log-every 1 --batch-size 2".split()
SCORER = [f"--{name.replace('_', '-')}={value}" for name, value in CACHE.items()]


@pytest.fixture(scope="module", autouse=True)
def small_problems():
    """Problems of 3 or 4 steps (100 to 350 bytes) and packed rows of 400: seconds instead of minutes."""
    with pytest.MonkeyPatch.context() as patch:
        for sizes in (traces.TEST_SIZES, traces.TRAIN_SIZES):
            for family in traces.PROMPTS:
                patch.setitem(sizes, family, (3, 4))
        patch.setattr(train, "MAX_LENGTH", 400)
        yield


def run(*args):
    return train.main([*QUIET, *map(str, args)])


def pretrain(out, *args):
    return run("--stage", "pretrain", *SHAPE, "--out", out, *args)


@pytest.fixture(scope="module")
def base(tmp_path_factory, small_problems):
    folder = tmp_path_factory.mktemp("runs") / "base"
    assert pretrain(folder, "--steps", 3) == 0
    return folder


@pytest.fixture(scope="module")
def scorer_run(base):
    assert run("--model", base, *SCORER, "--out", base.parent / "scorer", "--steps", 3) == 0
    return base.parent / "scorer"


@pytest.fixture(scope="module")
def full_run(base):
    assert run("--model", base, *SCORER, "--train-base", "--out", base.parent / "full", "--steps", 3) == 0
    return base.parent / "full"


def job(kind, base, out):
    """The arguments of one of the three jobs."""
    if kind == "pretrain":
        return ["--stage", "pretrain", *SHAPE, "--out", str(out)]
    return ["--model", str(base), *SCORER, "--out", str(out), *(["--train-base"] if kind == "train_base" else [])]


JOBS = ("pretrain", "scorer", "train_base")


def random_model(seed=0, **changes):
    """Large weights: attention is sharp, so that whatever a mask hides matters."""
    torch.manual_seed(seed)
    config = ModelConfig(**{**dict(vocab_size=264, n_layer=2, n_embd=32, n_head=4, n_kv_head=2, head_dim=8,
                                   intermediate_size=48, max_seq_len=4096, eos_token_ids=[EOT], alphabet=ALPHABET),
                            **changes})
    model = Transformer(config)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.3) if p.dim() == 2 else p.add_(0.3 * torch.randn_like(p))
    return model


def scorers_for(model, policy, noise=0.0):
    c = model.config
    scorers = torch.nn.ModuleList(make_scorer(policy, n_kv_head=c.n_kv_head, head_dim=c.head_dim, window=8, layer=i)
                                  for i in range(c.n_layer))
    with torch.no_grad():
        for p in scorers.parameters():
            p.add_(noise * torch.randn_like(p))
    return scorers


def state_of(folder):
    return torch.load(folder / "train_state.pt", weights_only=True)


def strict_json(path):
    def refuse(name):
        raise AssertionError(f"{path} holds {name}, which is not JSON")
    return json.loads(path.read_text(), parse_constant=refuse)


def same(a, b):
    """Nested dicts and lists of tensors and numbers, bit for bit."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def refused(capsys, code, *words):
    """Exit code 2 and one sentence on stderr that holds the words."""
    err = capsys.readouterr().err
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1, (code, err)
    for word in words:
        assert word in err, err


# ---------------------------------------------------------------------------------------------------------------------
# settings

def test_help_lists_every_knob_with_its_default_and_reason(capsys):
    with pytest.raises(SystemExit) as stop:
        train.main(["--help"])
    assert stop.value.code == 0
    listed = capsys.readouterr().out.split("\n  --")[1:]
    entries = {entry.split()[0].rstrip(","): " ".join(entry.split()) for entry in listed}
    assert len(entries) == len(fields(Settings))
    for f in fields(Settings):
        text = entries.pop(f.name.replace("_", "-"))
        assert f.metadata["reason"] in text and len(f.metadata["reason"]) > 4
        presets = [v[f.name] for v in PRESETS.values() if f.name in v]
        assert len(presets) in (0, len(PRESETS))
        assert (f.default is None) == bool(presets) or f.name == "workers"
        for value in presets or [f.default]:
            assert str(value) in text.split("(default: ", 1)[1]


def test_presets_fill_what_the_command_leaves_open(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # what a run left in the default --out is no part of this
    for args, name in (([], "scorer"), (["--train-base"], "train_base"), (["--stage", "pretrain"], "pretrain")):
        settings = parse_settings(args)
        for key, value in PRESETS[name].items():
            assert getattr(settings, key) == value
        assert all(getattr(settings, f.name) is not None for f in fields(Settings))
    settings = parse_settings(["--train-base", "--steps", "70", "--weight-decay", "0", "--no-bounded"])
    assert (settings.steps, settings.weight_decay, settings.bounded) == (70, 0.0, False)  # 0 is a choice, not a gap
    assert settings.warmup == 7 and settings.learning_rate == PRESETS["train_base"]["learning_rate"]
    assert parse_settings(["--device", "cpu"]).workers == 0
    assert parse_settings(["--workers", "3"]).workers == 3


@pytest.mark.parametrize("args", [("--learn-rate", "1"), ("--steps", "ten"), ("--policy", "dense"), ("--stage", "dpo"),
                                  ("--budget", "2.5"), ("--device", "tpu"), ("--no-steps",), ("scorer",)])
def test_unknown_options_and_words(args, capsys):
    with pytest.raises(SystemExit) as stop:
        train.main(list(args))
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert "error: " in err and args[0].lstrip("-") in err


@pytest.mark.parametrize("name", ["steps", "batch-size", "accumulate", "log-every", "save-every", "eval-problems"])
def test_numbers_below_one(name, capsys, tmp_path):
    refused(capsys, run("--out", tmp_path / "out", f"--{name}", 0), f"--{name} must be at least 1, got 0")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["weight-decay", "eval-every", "warmup", "final-lr-ratio"])
def test_numbers_below_zero(name, capsys, tmp_path):
    refused(capsys, run("--out", tmp_path / "out", f"--{name}", -1), f"--{name} ", "got -1")
    assert not (tmp_path / "out").exists()


def test_no_gpu(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused(capsys, run("--device", "cuda", "--out", tmp_path / "out"), "--device cuda", "--device cpu")
    assert not (tmp_path / "out").exists()
    assert parse_settings([]).device == "cpu"


@pytest.mark.parametrize("args, words", [
    (("--budget", 14), ("budget 14", "--budget to 15 or more")),
    (("--window", 0), ("window 0",)),
    (("--n-sink", -1), ("n_sink -1",)),
    (("--model", "/no/such/folder"), ("/no/such/folder",))])
def test_what_a_retrofit_cannot_do(base, capsys, tmp_path, args, words):
    refused(capsys, run("--model", base, *SCORER, "--out", tmp_path / "out", *args), *words)


def test_a_model_of_few_tokens_is_refused(capsys, tmp_path):
    save_model(random_model(vocab_size=256), tmp_path / "small", torch.float32)
    refused(capsys, run("--model", tmp_path / "small", *SCORER, "--out", tmp_path / "out"), "256 tokens", "--model")


@pytest.mark.parametrize("kind", JOBS)
@pytest.mark.parametrize("below", [(), ("deeper", "still")])
def test_an_out_that_cannot_be_written_stops_before_any_work(base, capsys, tmp_path, monkeypatch, kind, below):
    (tmp_path / "file").write_text("in the way")
    out = tmp_path.joinpath("file", *below)
    monkeypatch.setattr(train, "load_model", lambda *args, **kwargs: pytest.fail("loaded a model"))
    monkeypatch.setattr(train, "Transformer", lambda *args: pytest.fail("made a model"))
    refused(capsys, run(*job(kind, base, out)), "cannot write to --out", str(out))
    assert (tmp_path / "file").read_text() == "in the way"


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

class Head:
    """Something with `unembed` whose vocabulary looks so large that a chunk is 7 rows; sees how many came at once."""

    def __init__(self, weight):
        self.weight, self.most = weight, 0
        self.config = SimpleNamespace(vocab_size=2**25 // 7)

    def unembed(self, hidden):
        self.most = max(self.most, hidden.shape[0])
        return hidden @ self.weight.to(hidden.dtype).T


def head_inputs():
    torch.manual_seed(0)
    return (torch.randn(2, 15, 6, requires_grad=True), torch.randn(20, 6, requires_grad=True),
            torch.randint(20, (2, 15)), torch.rand(2, 15).masked_fill(torch.rand(2, 15) < 0.3, 0.0))


def agree(loss, plain, inputs):
    """Values and gradients of a chunked fp32 loss and its plain fp64 form."""
    assert abs(loss.item() - plain.item()) < 1e-6 * (1 + abs(plain.item()))
    for got, want in zip(torch.autograd.grad(loss, inputs), torch.autograd.grad(plain, inputs)):
        assert want.abs().max() > 1e-3 and (got - want).abs().max() < 1e-6
    return True


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


# ---------------------------------------------------------------------------------------------------------------------
# the three jobs

def test_pretraining_leaves_a_model_and_a_log(base):
    assert {p.name for p in base.iterdir()} == {"config.json", "model.safetensors", "train_state.pt", "log.json"}
    model, state = load_model(base), state_of(base)
    assert (model.config.n_layer, model.config.n_embd, model.config.head_dim) == (2, 32, 8)
    assert (model.config.alphabet, model.config.eos_token_ids) == (ALPHABET, [EOT])
    assert same(dict(model.state_dict()), {k: v.bfloat16().float() for k, v in state["parameters"].items()})
    log = strict_json(base / "log.json")
    assert log["command"].startswith("python ") and log["settings"]["n_embd"] == 32 and log["settings"]["steps"] == 3
    assert log["settings"].keys() == {f.name for f in fields(Settings)}
    assert len(log["commit"]) == 40 or log["commit"] == "unknown"
    assert log["torch"] == torch.__version__ and log["device"].startswith("CPU") and log["python"] and log["date"]
    assert [h["step"] for h in log["history"]] == [1, 2, 3]
    assert [h["tokens"] for h in log["history"]] == [800, 1600, 2400]
    losses = [h["loss"] for h in log["history"]]
    assert abs(losses[0] - math.log(264)) < 0.3 and losses[0] > losses[1] > losses[2]
    assert log["evaluation"]["dense"]["n_problems"] == 2 and log["seconds"] > 0


def test_the_scorer_alone_leaves_the_base_alone(base, scorer_run, capsys):
    assert {p.name for p in scorer_run.iterdir()} == {"scorer.json", "scorer.safetensors", "train_state.pt", "log.json"}
    want, got = dict(load_model(base).state_dict()), state_of(scorer_run)["parameters"]
    assert same(want, {k: v for k, v in got.items() if not k.startswith("scorers.")})
    scorers, settings = load_scorers(scorer_run)
    assert {k: settings[k] for k in CACHE} == CACHE and settings["policy"] == "kvpop"
    assert (scorer_run / settings["base"] / "config.json").is_file()
    fresh = scorers_for(load_model(base), "kvpop")
    for (name, p), q in zip(scorers.named_parameters(), fresh.parameters()):
        assert torch.equal(p, got[f"scorers.{name}"]) and not torch.equal(p, q), name
    log = strict_json(scorer_run / "log.json")
    assert log["before"].keys() == {"dense", "streaming", "kvpop"} and log["after"].keys() == {"kvpop"}
    assert log["before"]["kvpop"]["loss"] != log["after"]["kvpop"]["loss"]
    assert all(h.keys() == {"step", "retention", "recall", "tokens", "seconds"} for h in log["history"])
    assert decode.main(["--model", str(scorer_run), "--device", "cpu", "--prompt", "A| M=1 M?\n",
                        "--max-new-tokens", "60"]) == 0
    err = capsys.readouterr().err  # 40 entries, of which the scorer's state costs 5
    assert "policy: kvpop, budget 40 = 2 sinks + 8 window + 25 selected + 5 scorer state" in err
    assert "entries per KV head: 35 at the peak of 69 positions seen" in err


def test_the_full_retrofit_moves_everything_and_stands_alone(base, full_run, tmp_path, capsys):
    assert {p.name for p in full_run.iterdir()} == {"config.json", "model.safetensors", "scorer.json",
                                                    "scorer.safetensors", "train_state.pt", "log.json"}
    want, state = dict(load_model(base).state_dict()), state_of(full_run)
    got = {k: v for k, v in state["parameters"].items() if not k.startswith("scorers.")}
    assert got.keys() == want.keys()
    for name in want:
        assert not torch.equal(got[name], want[name]), name
    assert same(dict(load_model(full_run).state_dict()), {k: v.bfloat16().float() for k, v in got.items()})
    log = strict_json(full_run / "log.json")
    assert all(h["kl"] > 0 and h["retention"] > 0 for h in log["history"]) and len(log["history"]) == 3
    assert load_scorers(full_run)[1]["weights"] == "."
    shutil.copytree(full_run, tmp_path / "alone")
    assert decode.main(["--model", str(tmp_path / "alone"), "--device", "cpu", "--prompt", "A| M=1 M?\n",
                        "--max-new-tokens", "5"]) == 0
    assert "policy: kvpop, budget 40" in capsys.readouterr().err


def test_the_full_retrofit_on_the_path_of_a_gpu(base, full_run, tmp_path, monkeypatch):
    """Keys in the order of their lifetimes, tables, padding: the same losses, on a stand-in for the kernel."""
    kernel = Kernel()
    monkeypatch.setattr(flex_masks, "compiled_flex_attention", kernel)
    monkeypatch.setattr(flex_masks, "has_kernel", lambda q: True)
    assert run("--model", base, *SCORER, "--train-base", "--out", tmp_path / "full", "--steps", 3) == 0
    want, got = (json.loads((folder / "log.json").read_text())["history"] for folder in (full_run, tmp_path / "full"))
    assert len(got) == len(want) == 3 and all(h[key] == pytest.approx(w[key], rel=1e-3, abs=1e-6)
                                              for h, w in zip(got, want) for key in ("kl", "retention", "recall"))
    assert any(k[2] != q[2] for q, k, v in kernel.shapes), "no call had its keys gathered"


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_rates_and_decay_by_group(base, tmp_path, schedule):
    assert run(*job("train_base", base, tmp_path), "--steps", 2, "--base-schedule", schedule, "--learning-rate", 1e-3,
               "--base-learning-rate", 1e-4, "--weight-decay", 0.03, "--final-lr-ratio", 0.2) == 0
    last = 0.2 + 0.8 * 0.5  # the second of two steps
    rates = {(round(g["lr"], 9), g["weight_decay"]) for g in state_of(tmp_path)["optimizer"]["param_groups"]}
    base_lr = 1e-4 if schedule == "constant" else round(1e-4 * last, 9)
    assert rates == {(lr, decay) for lr in (round(1e-3 * last, 9), base_lr) for decay in (0.03, 0.0)}
    model = load_model(base)
    model.scorers = scorers_for(model, "kvpop")
    optimizer = make_optimizer(model, parse_settings([*QUIET, "--train-base"]))
    owned = [p for g in optimizer.param_groups for p in g["params"]]
    assert len(owned) == len({id(p) for p in owned}) == len(list(model.parameters()))
    assert all((g["weight_decay"] > 0) == (p.dim() >= 2) for g in optimizer.param_groups for p in g["params"])
    alone = make_optimizer(model, parse_settings(QUIET))
    assert {id(p) for g in alone.param_groups for p in g["params"]} == {id(p) for p in model.scorers.parameters()}
    assert all(p.requires_grad == name.startswith("scorers.") for name, p in model.named_parameters())


@pytest.mark.parametrize("kind", ["scorer", "train_base"])
def test_the_retention_loss_gets_its_settings(base, tmp_path, monkeypatch, kind):
    made = []

    def make(*args, **options):
        made.append(Retention(*args, **options))
        return made[-1]
    monkeypatch.setattr(train, "Retention", make)
    assert run(*job(kind, base, tmp_path), "--steps", 3, "--n-samples", 6, "--tau", 0.5, "--no-bounded", "--seed", 2,
               "--log-every", 2, "--target-power", 1.5, "--listwise-share", 0.25) == 0
    made = [r for r in made if isinstance(r.noise, torch.Tensor)]  # of the steps; an evaluation makes its own
    for r in made:  # weight: 1 / layers
        assert (r.weight, r.n_samples, r.tau, r.bounded, r.power) == (0.5, 6, 0.5, False, 1.5)
        assert r.listwise_share == 0.25 and r.noise.shape == (2, 2, 2, 6)
    assert len({r.noise.sum().item() for r in made}) == 3 and all(r.spec == SPEC and r.passes == 2 for r in made)
    assert [len(r.recall) for r in made] == [0, 2, 2]  # measured where it is logged


def test_a_scorer_learns(tmp_path):
    """On problems that it was not taught on the retention loss falls and recall rises, within seconds."""
    save_model(random_model(), tmp_path / "base", torch.float32)
    assert run(*job("scorer", tmp_path / "base", tmp_path / "out"), "--steps", 30, "--learning-rate", 1e-2) == 0
    log = strict_json(tmp_path / "out" / "log.json")
    before, after = log["before"]["kvpop"], log["after"]["kvpop"]
    print(f"loss {before['loss']:.3f} -> {after['loss']:.3f}, recall {before['recall']:.3f} -> {after['recall']:.3f}")
    assert after["loss"] < 0.95 * before["loss"] and after["recall"] > before["recall"] + 0.05


def test_a_budget_beyond_the_length_has_nothing_to_teach(base, tmp_path, capsys):
    assert run(*job("scorer", base, tmp_path), "--budget", 5000, "--steps", 1) == 0
    log = strict_json(tmp_path / "log.json")  # NaN would not be JSON
    assert log["history"][0]["retention"] == 0 and "recall" not in log["history"][0]
    assert log["after"]["kvpop"]["recall"] is None and "recall" not in capsys.readouterr().out


@pytest.mark.parametrize("kind", JOBS)
def test_a_loss_that_is_no_number_stops_the_run(base, tmp_path, capsys, kind):
    out = tmp_path / "out"
    assert run(*job(kind, base, out), "--steps", 1) == 0
    good = {p.name: p.read_bytes() for p in out.iterdir()}
    capsys.readouterr()
    code = run(*job(kind, base, out), "--steps", 5, "--learning-rate", "1e30", "--base-learning-rate", "1e30")
    refused(capsys, code, "step 2", "layer 0: a score is NaN" if kind == "scorer" else "is nan at step 2")
    assert {p.name: p.read_bytes() for p in out.iterdir()} == good  # what was there before is still there


# ---------------------------------------------------------------------------------------------------------------------
# stopping and going on

@pytest.fixture(scope="module")
def straight(base):
    """Four steps without a stop, of each job."""
    folders = {kind: base.parent / f"straight-{kind}" for kind in JOBS}
    for kind, out in folders.items():
        assert run(*job(kind, base, out), "--steps", 4, "--save-every", 2) == 0
    return folders


def stop_at(monkeypatch, step, error):
    """The first try of optimiser step `step` (0-based) ends in an exception."""
    real, real_rates, at = train.optimizer_step, train.set_rates, []

    def optimizer_step(optimizer, settings):
        if at[-1] == step:
            monkeypatch.setattr(train, "optimizer_step", real)
            raise error
        return real(optimizer, settings)

    def set_rates(optimizer, number, settings):
        at.append(number)
        real_rates(optimizer, number, settings)
    monkeypatch.setattr(train, "optimizer_step", optimizer_step)
    monkeypatch.setattr(train, "set_rates", set_rates)


def same_end(a, b):
    """Weights, optimiser and exported files bit for bit; history but for the clock."""
    one, two = state_of(a), state_of(b)
    assert one["step"] == two["step"] == 4
    assert same(one["parameters"], two["parameters"]) and same(one["optimizer"], two["optimizer"])
    for name in ("model.safetensors", "scorer.safetensors", "config.json", "scorer.json"):
        assert (a / name).is_file() == (b / name).is_file()
        if (a / name).is_file():
            assert (a / name).read_bytes() == (b / name).read_bytes(), name
    clock = ("seconds", "tokens")
    numbers = [[{k: v for k, v in h.items() if k not in clock} for h in s["history"]] for s in (one, two)]
    assert numbers[0] == numbers[1] and [h["step"] for h in numbers[0]] == [1, 2, 3, 4]
    return True


@pytest.mark.parametrize("kind", JOBS)
@pytest.mark.parametrize("how", ["ctrl-c", "killed"])
def test_a_resumed_run_ends_where_a_straight_one_does(base, straight, monkeypatch, capsys, kind, how):
    out = base.parent / f"{how}-{kind}"  # beside the others, so that relative paths in scorer.json agree
    args = (*job(kind, base, out), "--steps", 4, "--save-every", 2)
    if how == "ctrl-c":
        stop_at(monkeypatch, 1, KeyboardInterrupt())
        assert run(*args) == 130
        err = capsys.readouterr().err
        assert "interrupted in step 2" in err and "after 1 steps" in err and "--resume" in err
        done = 1
    else:  # in step 4; what step 2 left is what is there
        stop_at(monkeypatch, 3, RuntimeError("killed"))
        with pytest.raises(RuntimeError, match="killed"):
            run(*args)
        done = 2
    state = state_of(out)
    assert state["step"] == done and len(state["history"]) == done
    if kind != "pretrain":  # what an interrupt leaves can be used
        assert load_scorers(out)[1]["budget"] == 40
    if kind != "scorer":
        assert load_model(out).config.n_embd == 32
    assert run(*args, "--resume") == 0
    assert f"resuming from {out / 'train_state.pt'} at step {done}" in capsys.readouterr().out
    assert same_end(out, straight[kind])



@pytest.mark.parametrize("kind", JOBS)
@pytest.mark.parametrize("where", ["loading the next rows", "printing progress"])
def test_ctrl_c_between_two_steps_repeats_none(base, straight, monkeypatch, kind, where):
    out = base.parent / f"between-{where.split()[0]}-{kind}"
    args = (*job(kind, base, out), "--steps", 4, "--save-every", 2)
    owner, name = (batches, "make_problem") if where.startswith("loading") else (train.Run, "progress")
    real = getattr(owner, name)

    def stopping(*values, **options):
        number = values[1] % 10**9 // (64 if kind == "pretrain" else 1) if owner is batches else values[1]
        if number == (4 if owner is batches else 1):
            raise KeyboardInterrupt
        return real(*values, **options)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, stopping)
        assert run(*args) == 130
    assert run(*args, "--resume") == 0
    numbers = state_of(out), state_of(straight[kind])
    assert same(numbers[0]["parameters"], numbers[1]["parameters"])


@pytest.mark.parametrize("kind", JOBS)
def test_ctrl_c_in_the_last_evaluation_keeps_the_training(base, tmp_path, monkeypatch, kind):
    real = train.evaluate

    def evaluate(*args, **kwargs):
        if (tmp_path / "trained").exists():
            raise KeyboardInterrupt
        return real(*args, **kwargs)
    real_step = train.optimizer_step
    monkeypatch.setattr(train, "evaluate", evaluate)
    monkeypatch.setattr(train, "optimizer_step", lambda *args: ((tmp_path / "trained").touch(), real_step(*args))[1])
    try:
        code = run(*job(kind, base, tmp_path / "out"), "--steps", 1)
    except KeyboardInterrupt:
        pytest.fail("the interrupt went through main")
    assert code == 130 and state_of(tmp_path / "out")["step"] == 1


def test_no_checkpoint_of_a_diverged_model(base, tmp_path, capsys):
    out = tmp_path / "out"
    refused(capsys, run(*job("pretrain", base, out), "--steps", 8, "--log-every", 4, "--save-every", 1,
                        "--learning-rate", 1e30), "is nan at step")
    assert not out.joinpath("train_state.pt").exists() or \
        all(p.isfinite().all() for p in state_of(out)["parameters"].values())


@pytest.mark.parametrize("args, words", [
    (("--seed", 1), ("seed = 0, not 1",)),
    (("--budget", 41), ("budget = 40, not 41",)),
    (("--n-sink", 1), ("n_sink = 2, not 1",)),
    (("--batch-size", 3), ("batch_size * processes * accumulate = 2, not 3",)),
    (("--learning-rate", 0.5), ("learning_rate = ", "not 0.5")),
    (("--policy", "kvpop-mlp"), ("policy = 'kvpop', not 'kvpop-mlp'",)),
    (("--no-bounded",), ("bounded = True, not False",)),
    (("--steps", 3), ("is at step 3 already", "--steps"))])
def test_resume_with_other_settings_is_refused(base, scorer_run, tmp_path, capsys, args, words):
    out = shutil.copytree(scorer_run, tmp_path / "out")
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    code = run(*job("scorer", base, out), "--steps", 5, "--resume", *args)
    refused(capsys, code, "--resume", "train_state.pt", *words)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before


def test_resume_needs_a_state_and_allows_more_steps(base, scorer_run, tmp_path, capsys):
    refused(capsys, run(*job("scorer", base, tmp_path / "none"), "--resume"), "--resume", "none/train_state.pt")
    out = shutil.copytree(scorer_run, tmp_path / "out")
    assert run(*job("scorer", base, out), "--steps", 4, "--resume", "--save-every", 1, "--log-every", 2) == 0
    assert state_of(out)["step"] == 4


@pytest.mark.parametrize("state", [{"step": 1}, [1], b"", b"no zip"])
def test_what_is_no_training_state_is_refused(base, tmp_path, capsys, state):
    (tmp_path / "out").mkdir()
    path = tmp_path / "out" / "train_state.pt"
    path.write_bytes(state) if isinstance(state, bytes) else torch.save(state, path)
    refused(capsys, run(*job("scorer", base, tmp_path / "out"), "--steps", 4, "--resume"), "not a training state")


def test_a_state_of_another_device_keeps_this_ones_kernels(base, scorer_run, tmp_path, monkeypatch):
    """A GPU's groups hold tensor rates and fused, capturable steps, a CPU's do not: neither goes over to the other."""
    out, groups = shutil.copytree(scorer_run, tmp_path / "out"), []
    state = state_of(out)
    for group in state["optimizer"]["param_groups"]:
        group.update(lr=torch.tensor(group["lr"]), fused=True, capturable=True)
    torch.save(state, out / "train_state.pt")
    real = train.set_rates
    monkeypatch.setattr(train, "set_rates", lambda o, *args: (groups.extend(o.param_groups), real(o, *args)))
    assert run(*job("scorer", base, out), "--steps", 4, "--resume") == 0
    assert groups and all(isinstance(g["lr"], float) and not g["fused"] and not g["capturable"] for g in groups)


class Code:
    """What a hostile pickle does: call something when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_a_training_state_cannot_run_code(base, tmp_path):
    (tmp_path / "out").mkdir()
    torch.save({"step": 1, "settings": {}, "code": Code(tmp_path / "ran")}, tmp_path / "out" / "train_state.pt")
    with contextlib.suppress(pickle.UnpicklingError):
        assert run(*job("scorer", base, tmp_path / "out"), "--steps", 2, "--resume") == 2
    assert not (tmp_path / "ran").exists()


def test_every_file_is_renamed_into_place(base, tmp_path, monkeypatch):
    renamed, real = set(), train.os.replace

    def replace(a, b):
        renamed.add(str(b))
        real(a, b)
    monkeypatch.setattr(train.os, "replace", replace)
    assert run(*job("train_base", base, tmp_path / "out"), "--steps", 1) == 0
    files = {str(p) for p in (tmp_path / "out").iterdir()}
    assert files == renamed and len(files) == 6  # nothing else is there: no temporary file is left


def test_a_write_that_dies_half_way_spoils_nothing(base, scorer_run, tmp_path, monkeypatch):
    out = shutil.copytree(scorer_run, tmp_path / "out")
    before = {p.name: p.read_bytes() for p in out.iterdir()}

    def save(state, path):
        with open(path, "wb") as f:
            f.write(b"half")
        raise RuntimeError("killed")
    with monkeypatch.context() as patch:
        patch.setattr(train.torch, "save", save)
        with pytest.raises(RuntimeError, match="killed"):
            run(*job("scorer", base, out), "--steps", 4, "--resume")
    assert {n: (out / n).read_bytes() for n in before} == before
    assert run(*job("scorer", base, out), "--steps", 4, "--resume") == 0
    assert not list(out.glob("*.tmp")) and state_of(out)["step"] == 4


# ---------------------------------------------------------------------------------------------------------------------
# a step as a CUDA graph

def test_without_a_graph_a_step_is_itself():
    step = train.GraphedStep(lambda x, flag: (x + flag, flag), enabled=False)
    assert step(torch.ones(2), flag=1)[0].tolist() == [2, 2]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", JOBS)
def test_a_graphed_run_is_the_ordinary_run(base, tmp_path, kind):
    """Ten steps with and without graphs, the same data and noise: the same losses and weights up to the order of
    sums. The graph is captured in the fourth step, the one with recall in the fourth that logs."""
    ends = {}
    for name in ("graph", "no-graph"):
        out = tmp_path / name
        args = [a for a in job(kind, base, out)]
        assert train.main([*args, "--device", "cuda", "--batch-size", "2", "--eval-problems", "1", "--steps", "10",
                           "--log-every", "2", "--workers", "0", "--no-compile", f"--{name}"]) == 0
        ends[name] = state_of(out)
    for a, b in zip(ends["graph"]["history"], ends["no-graph"]["history"], strict=True):
        for key in {"loss", "kl", "retention", "recall"} & a.keys():
            assert a[key] == pytest.approx(b[key], rel=0.02, abs=1e-3), (key, a, b)
    assert len({h.get("loss", h.get("retention")) for h in ends["graph"]["history"]}) == 5  # not one step over again
    before = load_model(base).state_dict() if kind != "pretrain" else None
    for name, want in ends["no-graph"]["parameters"].items():
        got = ends["graph"]["parameters"][name]
        moved = (want - (before[name].cuda() if before and name in before else want * 0)).norm()
        assert (got - want).norm() <= 0.1 * moved + 1e-6, name
