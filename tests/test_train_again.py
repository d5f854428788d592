"""A retrofit of a retrofit: train.py --model with a folder that train.py wrote. It goes on with that scorer, on the
weights that the folder holds or names, or is refused in a sentence; --out names its base as a first retrofit does."""
import json
import os
import shutil

import pytest

import decode
import train
from data.resolve import resolve_start
from data.scorer_files import load_scorers
from model import fingerprint
from test_checkpoints import hub  # noqa: F401
from test_cli_chat import make_folder
from test_train import SCORER, base, refused, same, scorer_run, small_problems, state_of, stop_at  # noqa: F401
from test_train import run as run_traces, strict_json
from test_train_text import CACHE, QUIET, no_work, root, run, straight  # noqa: F401


def settings_of(folder):
    return json.loads((folder / "scorer.json").read_text())


def decodes(folder, *args):
    return decode.main(["--model", str(folder), "--device", "cpu", "--prompt", "the cache", "--max-new-tokens", "3",
                        *args]) == 0


@pytest.mark.parametrize("full", [True, False])
def test_scorer_first_and_then_more(straight, tmp_path, capsys, monkeypatch, full):  # noqa: F811
    """Before the second run all is as it was after the first; its base and its teacher are those of the first."""
    read, load = [], train.load_model
    monkeypatch.setattr(train, "load_model", lambda folder, *args: read.append(folder) or load(folder, *args))
    first, out, again = straight / "straight-scorer", tmp_path / "out", ["--train-base"] * full
    files = {p: p.read_bytes() for p in first.rglob("*") if p.is_file()}
    assert run(straight, out, "--steps", 2, *again, kind=first) == 0
    assert files == {p: p.read_bytes() for p in first.rglob("*") if p.is_file()}
    assert f"kvpop on {first}, " in (text := capsys.readouterr().out) and "parameters, begun from its own, on" in text
    assert len(read) == 1 + full and {path.resolve() for path in read} == {straight / "qwen3"}
    one, two = strict_json(first / "log.json"), strict_json(out / "log.json")
    assert two["before"] == {**{p: one["before"][p] for p in ("dense", "streaming")}, **one["after"]}
    moved = zip(load_scorers(first)[0].parameters(), load_scorers(out)[0].parameters(), strict=True)
    assert not any(a.equal(b) for a, b in moved)
    named = os.path.relpath(straight / "qwen3", out)
    assert (settings_of(out)["base"], settings_of(out)["weights"]) == (named, "." if full else named)
    assert (out / "model.safetensors").is_file() == (out / "tokenizer.json").is_file() == full
    assert decodes(out) and decodes(out, "--policy", "streaming")


def test_a_new_retrofit_says_nothing_of_a_scorer(root, tmp_path, capsys):  # noqa: F811
    assert run(root, tmp_path / "out", "--steps", 1) == 0
    assert "scorer parameters on cpu; 2 sinks" in capsys.readouterr().out


def test_a_trained_base_goes_on_with_its_own_weights(straight, tmp_path, monkeypatch):  # noqa: F811
    """Stored in bf16, so that what is measured of them is nearly what it was."""
    read, load = [], train.load_model
    monkeypatch.setattr(train, "load_model", lambda folder, *args: read.append(folder) or load(folder, *args))
    first, named = straight / "straight-base", os.path.relpath(straight / "straight-base", tmp_path / "out")
    for full in (False, True):
        assert run(straight, tmp_path / "out", "--steps", 1, *["--train-base"] * full, kind=first) == 0
        plain, after = (strict_json(first / "log.json")[when] for when in ("before", "after"))
        before = strict_json(tmp_path / "out" / "log.json")["before"]
        assert before["kvpop"]["loss"] == pytest.approx(after["kvpop"]["loss"], rel=0.01)
        assert plain["kvpop"]["loss"] != pytest.approx(after["kvpop"]["loss"], rel=0.03)
        far, near = (abs(r["dense"]["perplexity"] - before["dense"]["perplexity"]) for r in (plain, after))
        assert near < far / 3
        assert settings_of(tmp_path / "out")["base"] == named
        assert settings_of(tmp_path / "out")["weights"] == ("." if full else named)
        assert decodes(tmp_path / "out") and decodes(tmp_path / "out", "--policy", "streaming")
    assert set(read) == {first}


def test_the_teacher_on_disk_is_the_base(straight, tmp_path):  # noqa: F811
    args = ("--train-base", "--steps", 2, "--facts", 0.5, "--context", 320, "--tokens", tmp_path / "tokens")
    first = straight / "straight-scorer"
    assert run(straight, tmp_path / "out", *args, "--teacher", tmp_path / "logits", kind=first) == 0
    made = json.loads((tmp_path / "logits/teacher.json").read_text())
    assert made["model"] == fingerprint(straight / "qwen3")
    assert run(straight, tmp_path / "online", *args, kind=first) == 0
    assert same(*(state_of(tmp_path / name)["parameters"] for name in ("out", "online")))


def test_a_second_run_resumes(straight, tmp_path, monkeypatch):  # noqa: F811
    args, first = ("--train-base", "--steps", 3), straight / "straight-scorer"
    assert run(straight, tmp_path / "straight", *args, kind=first) == 0
    stop_at(monkeypatch, 1, KeyboardInterrupt())
    assert run(straight, tmp_path / "out", *args, kind=first) == 130
    assert run(straight, tmp_path / "out", *args, "--resume", kind=first) == 0
    one, two = (state_of(tmp_path / name) for name in ("straight", "out"))
    assert same(one["parameters"], two["parameters"]) and settings_of(tmp_path / "out")["weights"] == "."


def test_a_hub_id_is_handed_on(root, tmp_path, hub, monkeypatch):  # noqa: F811
    """That of the base which a retrofit names, and that of a retrofit which holds its own weights."""
    cache, _ = hub
    for name, folder in (("owner/plain", root / "smollm2"), ("owner/trained", None)):
        if folder is None:
            folder = tmp_path / "trained"
            assert train.main([*QUIET, *CACHE, "--model", "owner/plain", "--data", str(root / "text.jsonl"), "--out",
                               str(folder), "--steps", "1", "--train-base"]) == 0
        snapshot = cache / f"models--{name.replace('/', '--')}" / "snapshots" / ("c0ffee" + "0" * 34)
        shutil.copytree(folder, snapshot)
        (snapshot.parent.parent / "refs").mkdir()
        (snapshot.parent.parent / "refs" / "main").write_text(snapshot.name)
    assert run(root, tmp_path / "scorer", "--steps", 1, "--model", "owner/plain") == 0
    for model, want in ((tmp_path / "scorer", "owner/plain"), ("owner/trained", "owner/trained")):
        for full in (False, True):
            out = tmp_path / f"out{full}"
            assert run(root, out, "--steps", 1, "--model", model, *["--train-base"] * full) == 0
            settings = settings_of(out)
            assert (settings["base"], settings["weights"]) == (want, "." if full else want)


def test_traces_too(base, scorer_run, tmp_path, capsys):  # noqa: F811
    assert run_traces("--model", scorer_run, *SCORER, "--train-base", "--out", tmp_path / "full", "--steps", 2) == 0
    assert "begun from its own" in capsys.readouterr().out
    one, two = strict_json(scorer_run / "log.json"), strict_json(tmp_path / "full/log.json")
    assert two["before"]["kvpop"] == one["after"]["kvpop"]
    assert settings_of(tmp_path / "full")["base"] == os.path.relpath(base, tmp_path / "full")


# ----------------------------------------------------------------------------- refusals, before any work

@pytest.mark.parametrize("args, words", [
    (("--policy", "kvpop-mlp"), ("policy kvpop with window 8, not for kvpop-mlp with 8", "--policy")),
    (("--policy", "streaming", "--train-base"), ("not for streaming with 8",)),
    (("--window", 6), ("window 8, not for kvpop with 6", "--window"))])
def test_a_scorer_of_another_kind(straight, tmp_path, capsys, no_work, args, words):  # noqa: F811
    for kind in ("straight-scorer", "straight-base"):
        refused(capsys, run(straight, tmp_path / "out", "--steps", 1, *args, kind=kind), *words)


def test_a_scorer_of_other_shapes_or_without_its_weights(straight, tmp_path, capsys, no_work):  # noqa: F811
    folder = shutil.copytree(straight / "straight-scorer", tmp_path / "first")
    for changes, shape in ((dict(n_layer=1), "(1, 2, 8)"), (dict(n_kv_head=1), "(2, 1, 8)"),
                           (dict(head_dim=16), "(2, 2, 16)")):
        make_folder(tmp_path / shape, **changes)
        (folder / "scorer.json").write_text(json.dumps({**settings_of(folder), "weights": f"../{shape}"}))
        refused(capsys, run(straight, tmp_path / "out", kind=folder), "= (2, 2, 8), but", f"have {shape}")
    (folder / "scorer.json").write_text(json.dumps({**settings_of(folder), "weights": "../gone"}))
    refused(capsys, run(straight, tmp_path / "out", kind=folder), "not there", str(tmp_path / "gone"))
    for name in ("scorer.safetensors", "train_state.pt"):
        (folder / name).unlink()
    refused(capsys, run(straight, tmp_path / "out", kind=folder), "scorer.safetensors is missing")


@pytest.mark.parametrize("resume", [[], ["--resume"]])
def test_out_is_neither_the_retrofit_nor_its_base(straight, tmp_path, capsys, no_work, resume):  # noqa: F811
    """With --resume neither: the run to go on with began from another --model."""
    for name in ("qwen3", "straight-scorer", "straight-base"):
        shutil.copytree(straight / name, tmp_path / name)
    files = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    for model, out in (("straight-scorer",) * 2, ("straight-base",) * 2, ("straight-scorer", "qwen3")):
        code = run(tmp_path, tmp_path / out, "--train-base", "--data", straight / "text.jsonl", *resume, kind=model)
        refused(capsys, code, "train_state.pt" if resume and out == "qwen3" else "choose another")
    assert files == {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}


def test_what_a_start_is(straight, tmp_path):  # noqa: F811
    """Folder of the weights, their name, scorers: of a plain checkpoint, of a retrofit, of one with its own weights."""
    for kind, where, has in (("qwen3", "qwen3", False), ("straight-scorer", "qwen3", True),
                             ("straight-base", "straight-base", True)):
        settings = train.parse_settings([*QUIET, *CACHE, "--data", "x", "--model", str(straight / kind), "--out",
                                         str(tmp_path / "out")])
        source, name, scorers = resolve_start(settings)
        assert source.resolve() == straight / where and os.path.realpath(name) == str(straight / where)
        assert (scorers is not None) == has
