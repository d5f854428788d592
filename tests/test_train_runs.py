"""Runs of train.py that stop: at a loss that is no number, by Ctrl-C, killed, in the middle of a write. What they leave
is whole, and with --resume they end where a straight run does; what --resume refuses. And runs whose steps are CUDA
graphs, against ordinary ones.
"""
import contextlib
import pickle
import shutil

import pytest
import torch

import train
from data import batches
from data.scorer_files import load_scorers
from model import load_model
from test_train import (JOBS, base, job, refused, run, same, scorer_run, small_problems, state_of,  # noqa: F401
                        stop_at)


@pytest.fixture(scope="module")
def straight(base):  # noqa: F811
    """Four steps without a stop, of each job."""
    folders = {kind: base.parent / f"straight-{kind}" for kind in JOBS}
    for kind, out in folders.items():
        assert run(*job(kind, base, out), "--steps", 4, "--save-every", 2) == 0
    return folders


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
def test_a_resumed_run_ends_where_a_straight_one_does(base, straight, monkeypatch, capsys, kind, how):  # noqa: F811
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
def test_ctrl_c_between_two_steps_repeats_none(base, straight, monkeypatch, kind, where):  # noqa: F811
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
def test_ctrl_c_in_the_last_evaluation_keeps_the_training(base, tmp_path, monkeypatch, kind):  # noqa: F811
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


@pytest.mark.parametrize("kind", JOBS)
def test_a_loss_that_is_no_number_stops_the_run(base, tmp_path, capsys, kind):  # noqa: F811
    out = tmp_path / "out"
    assert run(*job(kind, base, out), "--steps", 1) == 0
    good = {p.name: p.read_bytes() for p in out.iterdir()}
    capsys.readouterr()
    code = run(*job(kind, base, out), "--steps", 5, "--learning-rate", "1e30", "--base-learning-rate", "1e30")
    refused(capsys, code, "step 2", "layer 0: a score is NaN" if kind == "scorer" else "is nan at step 2")
    assert {p.name: p.read_bytes() for p in out.iterdir()} == good  # what was there before is still there


def test_no_checkpoint_of_a_diverged_model(base, tmp_path, capsys):  # noqa: F811
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
def test_resume_with_other_settings_is_refused(base, scorer_run, tmp_path, capsys, args, words):  # noqa: F811
    out = shutil.copytree(scorer_run, tmp_path / "out")
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    code = run(*job("scorer", base, out), "--steps", 5, "--resume", *args)
    refused(capsys, code, "--resume", "train_state.pt", *words)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before


def test_resume_needs_a_state_and_allows_more_steps(base, scorer_run, tmp_path, capsys):  # noqa: F811
    refused(capsys, run(*job("scorer", base, tmp_path / "none"), "--resume"), "--resume", "none/train_state.pt")
    out = shutil.copytree(scorer_run, tmp_path / "out")
    assert run(*job("scorer", base, out), "--steps", 4, "--resume", "--save-every", 1, "--log-every", 2) == 0
    assert state_of(out)["step"] == 4


@pytest.mark.parametrize("state", [{"step": 1}, [1], b"", b"no zip"])
def test_what_is_no_training_state_is_refused(base, tmp_path, capsys, state):  # noqa: F811
    (tmp_path / "out").mkdir()
    path = tmp_path / "out" / "train_state.pt"
    path.write_bytes(state) if isinstance(state, bytes) else torch.save(state, path)
    refused(capsys, run(*job("scorer", base, tmp_path / "out"), "--steps", 4, "--resume"), "not a training state")


def test_a_state_of_another_device_keeps_this_ones_kernels(base, scorer_run, tmp_path, monkeypatch):  # noqa: F811
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


def test_a_training_state_cannot_run_code(base, tmp_path):  # noqa: F811
    (tmp_path / "out").mkdir()
    torch.save({"step": 1, "settings": {}, "code": Code(tmp_path / "ran")}, tmp_path / "out" / "train_state.pt")
    with contextlib.suppress(pickle.UnpicklingError):
        assert run(*job("scorer", base, tmp_path / "out"), "--steps", 2, "--resume") == 2
    assert not (tmp_path / "ran").exists()


def test_every_file_is_renamed_into_place(base, tmp_path, monkeypatch):  # noqa: F811
    renamed, real = set(), train.os.replace

    def replace(a, b):
        renamed.add(str(b))
        real(a, b)
    monkeypatch.setattr(train.os, "replace", replace)
    assert run(*job("train_base", base, tmp_path / "out"), "--steps", 1) == 0
    files = {str(p) for p in (tmp_path / "out").iterdir()}
    assert files == renamed and len(files) == 6  # nothing else is there: no temporary file is left


def test_a_write_that_dies_half_way_spoils_nothing(base, scorer_run, tmp_path, monkeypatch):  # noqa: F811
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
def test_a_graphed_run_is_the_ordinary_run(base, tmp_path, kind):  # noqa: F811
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
