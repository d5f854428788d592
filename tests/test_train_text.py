"""train.py --data: real text, a tokenizer, tiny random Qwen3 and Llama checkpoints. What it learns from, what it
measures (told again by hand), that a stop changes nothing, what it refuses before any work, and that decode.py runs the
result.
"""
import io
import json
import math
import os
import random
import shutil
import sys

import pytest
import torch

import decode
import flex_masks
import train
from data.scorer_files import load_scorers
from data.text import TextRows, write_tokens
from data.tokenizer import load_tokenizer
from flex_masks import CacheSpec
from model import causal_attend, load_model, resolve_checkpoint, save_model

from test_checkpoints import hub  # noqa: F401
from test_cli_chat import make_folder
from test_masks import Kernel
from test_train import refused, same, scorers_for, state_of, stop_at, strict_json

CACHE = "--n-sink 2 --window 8 --budget 40".split()  # kvpop's state costs 5 of them at head_dim 8
QUIET = "--device cpu --context 96 --eval-problems 2 --log-every 1 --batch-size 2 --held-out 0.2".split()
WORDS = "the cache of a small model holds what later words will ask for and drops what none of them needs".split()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Two checkpoints and a text: qwen3/, smollm2/ (a Llama), text.jsonl."""
    root, rng = tmp_path_factory.mktemp("text"), random.Random(0)
    for kind in ("qwen3", "smollm2"):
        model = load_model(make_folder(root / kind, kind, generation=dict(temperature=0.5)))
        with torch.no_grad():  # sharp attention: there is something to choose, and to learn
            for name, p in model.named_parameters():
                p.mul_(4 if "q_norm" in name else 1)
        save_model(model, root / kind, torch.float32)
    rows = [{"text": " ".join(rng.choices(WORDS, k=rng.randint(20, 60)))} for _ in range(90)]
    (root / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def run(root, out, *args, kind="qwen3", data="text.jsonl"):
    return train.main([*QUIET, *CACHE, "--model", str(root / kind), "--data", str(root / data), "--out", str(out),
                       *map(str, args)])


def base_of(parameters):
    return {k: v for k, v in parameters.items() if not k.startswith("scorers.")}


@pytest.fixture(scope="module")
def straight(root):
    """Four steps without a stop, with the base frozen and with it trained."""
    for name, args in (("scorer", ()), ("base", ("--train-base",))):
        assert run(root, root / f"straight-{name}", *args, "--steps", 4) == 0
    return root


# ----------------------------------------------------------------------------- what comes out

@pytest.mark.parametrize("kind", ["qwen3", "smollm2"])
def test_a_scorer_learns_from_text_while_the_base_stays(root, tmp_path, monkeypatch, capsys, kind):
    models, real = [], train.load_model
    monkeypatch.setattr(train, "load_model", lambda *args, **how: models.append(real(*args, **how)) or models[-1])
    files = {p.name: p.read_bytes() for p in (root / kind).iterdir()}
    assert run(root, tmp_path / "out", "--steps", 12, "--learning-rate", 2e-2, kind=kind) == 0
    out, (model,) = tmp_path / "out", models
    assert same(dict(load_model(root / kind).state_dict()), base_of(model.state_dict()))  # bit for bit
    assert files == {p.name: p.read_bytes() for p in (root / kind).iterdir()}
    scorers, settings = load_scorers(out)
    for (name, p), fresh in zip(scorers.named_parameters(), scorers_for(model, "kvpop").parameters()):
        assert torch.equal(p, state_of(out)["parameters"][f"scorers.{name}"]) and not torch.equal(p, fresh), name
    assert all(name.startswith("scorers.") for name in state_of(out)["parameters"])  # a frozen base is not kept again
    assert (settings["base"], settings["weights"]) == (os.path.relpath(root / kind, out),) * 2
    log, text = strict_json(out / "log.json"), capsys.readouterr().out
    before, after = log["before"], log["after"]
    assert before.keys() == {"dense", "streaming", "kvpop"} and after.keys() == {"kvpop"}
    assert all(r["n_rows"] == 2 and r["n_tokens"] == 192 and r["perplexity"] > 1 for r in before.values())
    assert after["kvpop"]["loss"] < before["kvpop"]["loss"] and 0 < after["kvpop"]["recall"] < 1
    assert log["settings"]["context"] == 96 and log["text"] == json.loads((out / "tokens" / "tokens.json").read_text())
    assert [h["tokens"] for h in log["history"]] == [192 * (i + 1) for i in range(12)]
    table = {line[:32].strip(): line[32:].split() for line in text.split("before     after\n")[1].splitlines()}
    assert table["perplexity"] == [f"{r['kvpop']['perplexity']:.3f}" for r in (before, after)]
    assert table["tokens right"] == [f"{r['kvpop']['token_accuracy']:.4f}" for r in (before, after)]
    assert "trace tokens right" not in table and f"perplexity {before['dense']['perplexity']:.3f}; streaming" in text
    assert decode.main(["--model", str(out), "--device", "cpu", "--prompt", "the cache " * 30, "--max-new-tokens",
                        "9"]) == 0
    err = capsys.readouterr().err
    assert "policy: kvpop, budget 40 = 2 sinks + 8 window + 25 selected + 5 scorer state" in err
    assert "entries per KV head: 35 at the peak of" in err
    assert decode.main(["--model", str(out), "--device", "cpu", "--policy", "streaming", "--prompt", "the cache",
                        "--max-new-tokens", "3"]) == 0


def test_a_trained_base_stands_alone_with_its_tokenizer(straight, tmp_path, capsys, monkeypatch):
    out, base = straight / "straight-base", straight / "qwen3"
    names = {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    for name in names:
        assert (out / name).read_bytes() == (base / name).read_bytes()
    assert not list(out.glob("*.tmp"))
    parameters, before = base_of(state_of(out)["parameters"]), dict(load_model(base).state_dict())
    assert parameters.keys() == before.keys()
    assert not any(torch.equal(parameters[name], before[name]) for name in before)
    log = strict_json(out / "log.json")
    assert all(h["kl"] > 0 and h["retention"] > 0 for h in log["history"]) and len(log["history"]) == 4
    assert log["after"].keys() == {"dense", "streaming", "kvpop"}  # the base is another one now
    assert log["after"]["dense"]["perplexity"] != log["before"]["dense"]["perplexity"]
    shutil.copytree(out, tmp_path / "alone")
    assert decode.main(["--model", str(tmp_path / "alone"), "--device", "cpu", "--prompt", "the cache of",
                        "--max-new-tokens", "3"]) == 0
    assert "policy: kvpop, budget 40" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    assert decode.main(["--model", str(tmp_path / "alone"), "--device", "cpu", "--chat", "--prompt", "the",
                        "--max-new-tokens", "3"]) == 0  # template and sampling came along
    assert "temperature 0.5" in capsys.readouterr().err


def test_a_hub_id_stays_a_hub_id(root, tmp_path, hub, capsys, monkeypatch):  # noqa: F811
    name, (cache, _) = "owner/some-Model.1", hub
    snapshot = cache / "models--owner--some-Model.1" / "snapshots" / ("c0ffee" + "0" * 34)
    shutil.copytree(root / "smollm2", snapshot)
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text(snapshot.name)
    assert resolve_checkpoint(name) == snapshot
    for args, weights in (((), name), (("--train-base",), ".")):
        out = tmp_path / f"out{len(args)}"
        assert train.main([*QUIET, *CACHE, "--model", name, "--data", str(root / "text.jsonl"), "--out", str(out),
                           "--steps", "1", *args]) == 0
        settings = json.loads((out / "scorer.json").read_text())
        assert (settings["base"], settings["weights"]) == (name, weights)
        moved = shutil.move(out, tmp_path / "elsewhere" / out.name)
        for policy in ((), ("--policy", "streaming")):  # its own, and one that runs on the base
            capsys.readouterr()
            assert decode.main(["--model", str(moved), "--device", "cpu", "--prompt", "the cache", *policy,
                                "--max-new-tokens", "3"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("policy", ["kvpop", "kvpop-mlp", "kvpop-nodelay", "position", "dms-cap", "streaming"])
@pytest.mark.parametrize("full", [False, True])
def test_every_policy_that_learns(root, tmp_path, capsys, policy, full):
    if policy == "streaming" and not full:
        pytest.skip("nothing to learn but the base")
    start = [] if policy == "dms-cap" else ["--budget-start", 80]
    assert run(root, tmp_path / "out", "--policy", policy, "--steps", 2, *start, *["--train-base"] * full) == 0
    log, state = strict_json(tmp_path / "out" / "log.json"), state_of(tmp_path / "out")
    wanted = {"kl"} if full or policy == "dms-cap" else set()
    wanted |= {"retention"} if policy not in ("dms-cap", "streaming") else set()
    assert all(wanted <= h.keys() and all(math.isfinite(h[key]) for key in wanted) for h in log["history"])
    assert ("model.embed_tokens.weight" in state["parameters"]) == full
    assert decode.main(["--model", str(tmp_path / "out"), "--device", "cpu", "--prompt", "the cache",
                        "--max-new-tokens", "3"]) == 0
    assert f"policy: {policy}, budget 40" in capsys.readouterr().err


# ----------------------------------------------------------------------------- what goes in

def test_steps_see_the_rows_of_the_file_and_every_position_counts(root, tmp_path, monkeypatch):
    seen, masks, collate, kl = [], [], train.collate_rows, train.distillation_kl

    def spy_kl(*args):
        masks.append(args[4])
        return kl(*args)
    monkeypatch.setattr(train, "collate_rows", lambda rows: seen.append(collate(rows)) or seen[-1])
    monkeypatch.setattr(train, "distillation_kl", spy_kl)
    assert run(root, tmp_path / "out", "--steps", 3, "--train-base", "--seed", 4) == 0
    rows = TextRows(tmp_path / "out" / "tokens", 96, "train", 4)
    for step, (idx, lengths, _) in enumerate(seen):
        assert torch.equal(idx, torch.stack([rows[2 * step + i][0] for i in range(2)])) and lengths.tolist() == [96, 96]
    assert len(seen) == len(masks) == 3 and all(mask.shape == (2, 96) and mask.all() for mask in masks)


def test_a_token_folder_is_the_text_it_was_made_of(root, straight, tmp_path):
    write_tokens(tmp_path / "tokens", root / "text.jsonl", load_tokenizer(root / "qwen3"), held_out=0.2)
    want = strict_json(straight / "straight-scorer" / "log.json")
    for data in (tmp_path / "tokens", tmp_path / "tokens" / "train.bin"):
        assert run(root, tmp_path / data.name, "--steps", 4, data=data) == 0
        got = strict_json(tmp_path / data.name / "log.json")
        assert (got["before"], got["after"]) == (want["before"], want["after"])
        assert not (tmp_path / data.name / "tokens.json").exists() or data.name == "tokens"


def test_chats_are_rows_in_the_template_of_the_model(root, tmp_path):
    chats = [{"messages": [dict(role="user", content=f"{i} and {w}?"), dict(role="assistant", content=" ".join(WORDS))]}
             for i, w in enumerate(WORDS * 4)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(c) + "\n" for c in chats))
    assert run(root, tmp_path / "out", "--steps", 1, "--field", "messages", "--tokens", tmp_path / "mine",
               data=tmp_path / "chats.jsonl") == 0
    ids = TextRows(tmp_path / "mine", 96)[0][0].tolist()
    assert load_tokenizer(root / "qwen3").added["<|im_start|>"] in ids and not (tmp_path / "out" / "tokens").exists()


def test_recomputed_activations_change_nothing(straight, tmp_path):
    assert run(straight, tmp_path / "out", "--train-base", "--steps", 4, "--recompute") == 0
    a, b = (state_of(folder)["parameters"] for folder in (tmp_path / "out", straight / "straight-base"))
    assert a.keys() == b.keys() and all(torch.allclose(a[name], b[name], atol=1e-6) for name in a)


# ----------------------------------------------------------------------------- evaluation

@torch.no_grad()
@pytest.mark.parametrize("policy", ["dense", "streaming", "kvpop"])
def test_evaluation_is_a_sum_over_positions(root, tmp_path, policy):
    """Against logits of the whole row in fp64, under masks written by hand; kvpop with room for everything is dense."""
    write_tokens(tmp_path / "tokens", root / "text.jsonl", load_tokenizer(root / "smollm2"), held_out=0.2)
    model, rows = load_model(root / "smollm2"), TextRows(tmp_path / "tokens", 96, "held_out")
    rows = [(idx, targets.clone()) for idx, targets in (rows[i] for i in range(3))]
    for idx, targets in rows:  # some that this random model gets right
        targets[::4] = model.unembed(model(idx[None], causal_attend))[0, ::4].argmax(-1)
    spec = {"streaming": CacheSpec(2, 8, 20), "kvpop": CacheSpec(2, 8, 200, 5), "dense": None}[policy]
    scorers = None if policy == "dense" else scorers_for(model, policy, 0.1)
    result = train.evaluate_text(model, "cpu", rows, spec, scorers)
    exact, t = model.double(), torch.arange(96)
    visible = t <= t[:, None]
    if policy == "streaming":  # 2 sinks and the last 18
        visible &= (t < 2) | (t > t[:, None] - 18)

    def attend(layer, q, k, v):
        scores = q @ k.repeat_interleave(2, 1).mT / 8**0.5
        return scores.masked_fill(~visible, -math.inf).softmax(-1) @ v.repeat_interleave(2, 1)
    nll = right = 0
    for idx, targets in rows:
        log_p = exact.unembed(exact(idx[None], attend))[0].log_softmax(-1)
        for position, target in enumerate(targets.tolist()):
            nll -= log_p[position, target].item()
            right += int(log_p[position].argmax().item() == target)
    assert 10 < right < 288
    assert result["perplexity"] == pytest.approx(math.exp(nll / 288), rel=1e-4)
    assert result["token_accuracy"] == right / 288 and (result["n_rows"], result["n_tokens"]) == (3, 288)
    assert (result["loss"], result["recall"]) == ((0.0, None) if policy == "kvpop" else (None, None))
    if policy == "streaming":  # the bar sees the mask
        dense = train.evaluate_text(load_model(root / "smollm2"), "cpu", rows)
        assert abs(result["perplexity"] / dense["perplexity"] - 1) > 1e-2


# ----------------------------------------------------------------------------- stopping and going on

@pytest.mark.parametrize("kind", ["scorer", "base"])
@pytest.mark.parametrize("how", ["ctrl-c", "killed"])
def test_a_resumed_run_is_the_straight_one(straight, monkeypatch, capsys, kind, how):
    out, want, seen, collate = straight / f"{how}-{kind}", straight / f"straight-{kind}", [], train.collate_rows
    args = ["--steps", 4, "--save-every", 2, *["--train-base"] * (kind == "base")]
    monkeypatch.setattr(train, "collate_rows", lambda rows: seen.append(collate(rows)) or seen[-1])
    if how == "ctrl-c":
        stop_at(monkeypatch, 1, KeyboardInterrupt())
        assert run(straight, out, *args) == 130 and "interrupted in step 2" in capsys.readouterr().err
        assert load_scorers(out)[1]["budget"] == 40
    else:
        stop_at(monkeypatch, 3, RuntimeError("killed"))
        with pytest.raises(RuntimeError, match="killed"):
            run(straight, out, *args)
    done = state_of(out)["step"]
    assert done == (1 if how == "ctrl-c" else 2)
    first, seen[:] = seen[:done], []
    assert run(straight, out, *args, "--resume") == 0
    rows = TextRows(want / "tokens", 96, "train", 0)
    want_rows = [[rows[2 * step + i][0].tolist() for i in range(2)] for step in range(4)]
    assert [idx.tolist() for idx, _, _ in first + seen] == want_rows
    one, two = state_of(out), state_of(want)
    assert one["step"] == two["step"] == 4 and same(one["optimizer"], two["optimizer"])
    assert same(one["parameters"], two["parameters"])
    for name in ("scorer.safetensors", "scorer.json", *["model.safetensors"] * (kind == "base")):
        assert (out / name).read_bytes() == (want / name).read_bytes(), name
    assert strict_json(out / "log.json")["after"] == strict_json(want / "log.json")["after"]


def test_resume_on_other_text_or_rows_is_refused(straight, tmp_path, capsys):
    out = shutil.copytree(straight / "straight-scorer", tmp_path / "out")
    refused(capsys, run(straight, out, "--steps", 5, "--resume", "--context", 64), "context = 96, not 64")
    refused(capsys, run(straight, out, "--steps", 5, "--resume", data="qwen3"), "made in another way", "text.jsonl")
    shutil.copytree(out / "tokens", tmp_path / "tokens")
    refused(capsys, run(straight, out, "--steps", 5, "--resume", data=tmp_path / "tokens"), "data = ", "text.jsonl")
    changed = json.loads((out / "tokens" / "tokens.json").read_text())
    (out / "tokens" / "tokens.json").write_text(json.dumps({**changed, "dropped": dict(empty=1, too_long=0, tools=0)}))
    refused(capsys, run(straight, out, "--steps", 5, "--resume"), "--resume", "other tokens")


# ----------------------------------------------------------------------------- refusals, before any work

@pytest.fixture
def no_work(monkeypatch):
    monkeypatch.setattr(train, "load_model", lambda *args, **how: pytest.fail("read the weights"))


def test_tokens_of_another_tokenizer(root, tmp_path, capsys, no_work):
    write_tokens(tmp_path / "tokens", root / "text.jsonl", load_tokenizer(root / "smollm2"), held_out=0.2)
    refused(capsys, run(root, tmp_path / "out", data=tmp_path / "tokens"), "another tokenizer", "tokenise")
    folder = make_folder(tmp_path / "small", "smollm2", vocab_size=860)
    header = json.loads((tmp_path / "tokens" / "tokens.json").read_text())
    (tmp_path / "tokens" / "tokens.json").write_text(json.dumps({**header, "n_vocab": 861}))
    refused(capsys, run(root, tmp_path / "out", kind=folder, data=tmp_path / "tokens"), "861 tokens, the model has 860")
    # the cache of another model, in --tokens
    assert not (tmp_path / "out" / "tokens").exists()
    refused(capsys, run(root, tmp_path / "out", "--tokens", tmp_path / "tokens"), "made in another way", "tokenizer")


@pytest.mark.parametrize("args, words", [
    (("--context", 2049), ("--context 2049", "2048")),
    (("--context", 1), ("--context 1 ",)),
    (("--stage", "pretrain"), ("--data", "pretrain")),
    (("--families", "walk"), ("--data", "--families")),
    (("--held-out", 1.5), ("--held-out", "1.5")),
    (("--max-tokens", 0), ("--max-tokens",)),
    (("--field", "body"), ("'body'", "text")),
    (("--data", "no/such.jsonl"), ("no/such.jsonl",)),
    (("--model", "/no/such/folder"), ("/no/such/folder",)),
    (("--budget", 14), ("budget 14",)),
    (("--resume",), ("--resume", "train_state.pt")),
    (("--context", 2000), ("tokens, one row of 2000 needs 2001",))])
def test_what_text_cannot_do(root, tmp_path, capsys, no_work, args, words):
    refused(capsys, run(root, tmp_path / "out", *args), *words)


def test_context_defaults_to_what_fits(root):
    for longest, want in ((2048, 2048), (70, 70), (9999, 2048)):
        settings = train.parse_settings(["--data", str(root / "none.txt"), "--device", "cpu"])
        config = load_model(root / "qwen3").config
        config.max_seq_len = longest
        with pytest.raises(FileNotFoundError):
            train.text_rows(settings, root / "qwen3", config)
        assert settings.context == want


def test_a_text_that_changed_is_not_taken_for_its_tokens(root, tmp_path, capsys):
    text = shutil.copy(root / "text.jsonl", tmp_path / "text.jsonl")
    assert run(root, tmp_path / "out", "--steps", 1, data=text) == 0
    assert run(root, tmp_path / "out", "--steps", 1, data=text) == 0
    capsys.readouterr()
    os.utime(text, (2**32, 2**32))
    refused(capsys, run(root, tmp_path / "out", "--steps", 1, data=text), "text.jsonl has changed since", "tokens")


def test_a_real_checkpoint_without_text(root, tmp_path, capsys, no_work):
    refused(capsys, train.main(["--device", "cpu", "--model", str(root / "qwen3"), "--out", str(tmp_path / "out")]),
            "896 tokens", "--data")


# ------------------------------------------------------------------------- what a GPU does, as far as a CPU can tell

def histories(*folders):
    return [strict_json(folder / "log.json")["history"] for folder in folders]


@pytest.mark.parametrize("kind", ["scorer", "base"])
def test_the_path_of_a_gpu(straight, tmp_path, monkeypatch, kind):
    """Keys in the order of their lifetimes, tables, padding: the same losses, on a stand-in for the kernel."""
    kernel = Kernel()
    monkeypatch.setattr(flex_masks, "compiled_flex_attention", kernel)
    monkeypatch.setattr(flex_masks, "has_kernel", lambda q: True)
    assert run(straight, tmp_path / "out", "--steps", 4, *["--train-base"] * (kind == "base")) == 0
    want, got = histories(straight / f"straight-{kind}", tmp_path / "out")
    for key in ("retention", "recall", *["kl"] * (kind == "base")):
        assert [h[key] for h in got] == pytest.approx([h[key] for h in want], rel=1e-3)
    assert kernel.shapes


@pytest.mark.parametrize("policy", ["kvpop", "dms-cap"])
def test_a_frozen_base_in_bf16_teaches_the_same(root, tmp_path, monkeypatch, policy):
    assert run(root, tmp_path / "fp32", "--steps", 3, "--policy", policy) == 0
    real = train.load_model
    monkeypatch.setattr(train, "load_model", lambda folder, device, dtype: real(folder, device, torch.bfloat16))
    assert run(root, tmp_path / "bf16", "--steps", 3, "--policy", policy) == 0
    for a, b in zip(*histories(tmp_path / "fp32", tmp_path / "bf16"), strict=True):
        for key in {"retention", "marked"} & a.keys():
            assert a[key] == pytest.approx(b[key], rel=0.05, abs=1e-3) and a != b
    assert all(p.dtype == torch.float32 for p in load_scorers(tmp_path / "bf16")[0].parameters())
    assert all(p.dtype == torch.float32 for p in state_of(tmp_path / "bf16")["parameters"].values())
