"""train.py --teacher: logits on disk teach what a teacher in memory teaches, are written once, and are refused where
they are another model's, tokenizer's or text's."""
import errno
import json
import os
import shutil

import pytest
import torch

import train
from data import teacher
from data.teacher import TaughtRows
from data.text import TextRows
from model import causal_attend, load_model
from test_parallel import two  # noqa: F401
from test_train import job, refused, state_of, strict_json  # noqa: F401
from test_train_text import root, run  # noqa: F401

STEPS = ("--train-base", "--steps", 3)


@pytest.fixture(scope="module")
def kept(root):  # noqa: F811
    """The same three steps with the teacher in memory and with its logits on disk."""
    assert run(root, root / "online", *STEPS) == 0
    assert run(root, root / "offline", *STEPS, "--teacher", root / "logits", "--tokens", root / "online/tokens") == 0
    return root


def history(folder):
    return [{k: v for k, v in line.items() if k != "seconds"} for line in strict_json(folder / "log.json")["history"]]


def test_the_same_steps_bit_for_bit(kept):
    """Numbers are kept as they come, so on one device nothing differs."""
    assert history(kept / "offline") == history(kept / "online") and history(kept / "offline")[0]["kl"] > 0
    a, b = (state_of(kept / name)["parameters"] for name in ("online", "offline"))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_what_a_file_holds(kept):
    """The logits of the model as it was, under the row's number in its text; nothing that could run code."""
    rows = TextRows(kept / "online/tokens", 96)
    files = sorted(p.name for p in (kept / "logits").iterdir())
    assert files == sorted(f"{rows.place(i):08d}.safetensors" for i in range(6)) + ["teacher.json"]
    made = json.loads((kept / "logits" / "teacher.json").read_text())
    assert made.keys() == {"model", "tokenizer", "data", "context", "top_k", "precision", "facts", "rest"}
    taught, model = TaughtRows(kept / "logits", rows, {}), load_model(kept / "qwen3")
    for i in (0, 5):
        idx, targets, logits, tokens = taught[i]
        assert torch.equal(idx, rows[i][0]) and torch.equal(targets, rows[i][1])
        assert logits.shape == tokens.shape == (96, 256) and tokens.dtype == torch.int32
        with torch.no_grad():
            full = model.unembed(model(idx[None], causal_attend))[0]
        torch.testing.assert_close(logits, full.topk(256).values, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(full.gather(-1, tokens.long()), logits, atol=1e-4, rtol=1e-4)


def test_no_teacher_is_in_memory_and_no_row_is_written_twice(kept, tmp_path, monkeypatch):
    models, written, real, write = [], [], train.load_model, TaughtRows.write_row
    monkeypatch.setattr(train, "load_model", lambda *a: models.append(real(*a)) or models[-1])
    monkeypatch.setattr(TaughtRows, "write_row", lambda self, row, *x: written.append(row) or write(self, row, *x))
    shutil.copytree(kept / "logits", tmp_path / "logits")
    next((tmp_path / "logits").glob("*.safetensors")).unlink()
    more = ("--teacher", tmp_path / "logits", "--tokens", kept / "online/tokens")
    assert run(kept, tmp_path / "out", *STEPS, *more) == 0
    assert len(models) == len(written) == 1 and history(tmp_path / "out") == history(kept / "online")
    # other batches of the same rows, and a second epoch: the file has fewer rows than these steps
    assert run(kept, tmp_path / "out", *STEPS, *more, "--batch-size", 1, "--accumulate", 2) == 0
    assert len(written) == 1
    n = TextRows(kept / "online/tokens", 96).n
    assert run(kept, tmp_path / "long", "--train-base", "--steps", n, "--batch-size", 2, *more) == 0
    assert len(written) == 1 + n - 6


def test_a_resumed_run_has_the_logits_of_the_model_as_it_was(kept, tmp_path):
    """Steps beyond those that were written at first: not those of the weights that were trained since."""
    more = ("--teacher", tmp_path / "logits", "--tokens", kept / "online/tokens", "--base-schedule", "constant",
            "--warmup", 0, "--final-lr-ratio", 1, "--train-base")
    assert run(kept, tmp_path / "out", *more, "--steps", 2) == 0
    assert len(list((tmp_path / "logits").glob("*.safetensors"))) == 4
    assert run(kept, tmp_path / "out", *more, "--steps", 3, "--resume") == 0
    rows, model = TextRows(kept / "online/tokens", 96), load_model(kept / "qwen3")
    logits = TaughtRows(tmp_path / "logits", rows, {})[5][2]
    with torch.no_grad():
        want = model.unembed(model(rows[5][0][None], causal_attend))[0].topk(256).values
    torch.testing.assert_close(logits, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name, args", [("model", ("smollm2",)), ("context", ("qwen3", "--context", 64)),
                                        ("top_k", ("qwen3", "--top-k", 32)), ("data", ("qwen3", "--max-tokens", 3000))])
def test_logits_of_something_else_are_refused(kept, tmp_path, capsys, monkeypatch, name, args):
    monkeypatch.setattr(train, "top_logits", None)  # no work is done
    code = run(kept, tmp_path / "out", *STEPS, "--teacher", kept / "logits", *args[1:], kind=args[0])
    refused(capsys, code, "--teacher", f"another {name}", "delete it")


def test_logits_of_another_tokenizer_are_refused(kept, tmp_path, capsys):
    shutil.copytree(kept / "logits", tmp_path / "logits")
    made = json.loads((tmp_path / "logits/teacher.json").read_text())
    (tmp_path / "logits/teacher.json").write_text(json.dumps({**made, "tokenizer": "0" * 64}))
    code = run(kept, tmp_path / "out", *STEPS, "--teacher", tmp_path / "logits")
    refused(capsys, code, "another tokenizer")


def test_rows_that_nobody_owns_are_refused(kept, tmp_path, capsys):
    shutil.copytree(kept / "logits", tmp_path / "logits")
    (tmp_path / "logits/teacher.json").unlink()
    refused(capsys, run(kept, tmp_path / "out", *STEPS, "--teacher", tmp_path / "logits"), "no teacher.json")


@pytest.mark.parametrize("args", [("--data", "", "--train-base"), ()])
def test_only_where_something_is_distilled(kept, tmp_path, capsys, args):
    refused(capsys, run(kept, tmp_path / "out", *args, "--teacher", tmp_path / "logits"), "--train-base")
    assert not (tmp_path / "logits").exists()


def test_a_full_disk_keeps_the_rows_that_are_there(kept, tmp_path, monkeypatch, capsys):
    real, calls = teacher.save_file, []

    def save(tensors, path):
        calls.append(path)
        if len(calls) == 4:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(tensors, path)
    monkeypatch.setattr(teacher, "save_file", save)
    more = (*STEPS, "--teacher", tmp_path / "logits", "--tokens", kept / "online/tokens")
    refused(capsys, run(kept, tmp_path / "out", *more), "No space left", "are kept", "same command")
    assert len(list((tmp_path / "logits").glob("*.safetensors"))) == 3 and not list(tmp_path.rglob("*.tmp"))
    assert run(kept, tmp_path / "out", *more) == 0 and len(calls) == 4 + 3
    assert history(tmp_path / "out") == history(kept / "online")


@pytest.mark.parametrize("folder", ["file", "folder"])
def test_what_is_no_folder_for_logits_is_refused(kept, tmp_path, capsys, folder):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder/teacher.json").mkdir(parents=True)
    code = run(kept, tmp_path / "out", *STEPS, "--teacher", tmp_path / folder, "--tokens", kept / "online/tokens")
    refused(capsys, code, "cannot write to --teacher", folder)


def test_a_damaged_row_is_named(kept, tmp_path, capsys):
    shutil.copytree(kept / "logits", tmp_path / "logits")
    path = tmp_path / "logits" / f"{TextRows(kept / 'online/tokens', 96).place(0):08d}.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    code = run(kept, tmp_path / "out", *STEPS, "--teacher", tmp_path / "logits", "--tokens", kept / "online/tokens")
    refused(capsys, code, path.name, "damaged", "writes it again")


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_two_processes_write_and_learn_the_same(kept, two, tmp_path, engine):  # noqa: F811
    """An odd number of missing rows: sharded weights need as many forwards in each process."""
    shutil.copytree(kept / "logits", tmp_path / "logits")
    for path in sorted((tmp_path / "logits").glob("*.safetensors"))[:3]:
        path.unlink()
    base = strict_json(kept / "online/log.json")["settings"]
    args = ["--model", base["model"], "--data", base["data"], "--tokens", kept / "online/tokens", "--device", "cpu",
            "--batch-size", 1, "--context", 96, "--window", base["window"], "--budget", base["budget"], "--n-sink",
            base["n_sink"], "--eval-problems", base["eval_problems"], "--held-out", base["held_out"], "--log-every", 1,
            "--learning-rate", base["learning_rate"], *STEPS, "--out", tmp_path / "out"]
    codes, _, errors, _ = two(*args, "--teacher", tmp_path / "logits", "--parallel", engine)
    assert codes == (0, 0), errors
    assert len(list((tmp_path / "logits").glob("*.safetensors"))) == 6
    for got, want in zip(history(tmp_path / "out"), history(kept / "online"), strict=True):
        assert got["kl"] == pytest.approx(want["kl"], rel=1e-4) and got["tokens"] == want["tokens"]
