"""train.py on a tiny model and small problems: its settings and what it refuses of them, and the three jobs from the
command line. Of what these are made: test_train_parts.py; runs that stop and go on: test_train_runs.py.
"""
import json
import math
import shutil
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch

import decode
import flex_masks
import train
from data import traces
from data.scorer_files import load_scorers
from data.tokenizer import EOT
from data.traces import ALPHABET
from flex_masks import CacheSpec
from model import ModelConfig, Transformer, load_model, save_model
from scorer import make_scorer
from targets import Retention
from test_masks import Kernel
from train import PRESETS, Settings, make_optimizer, parse_settings

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
