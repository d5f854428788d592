"""bench.py checkpoint: shards that load, train and decode as those of a real checkpoint."""
import json
import math
from dataclasses import replace

import pytest
import torch

import bench
import decode
import train
from data import random_checkpoint
from data.random_checkpoint import write_checkpoint
from data.speed_decode import shape_of
from model import load_model, read_header, weight_files
from test_train_text import WORDS, root  # noqa: F401

CONFIG = replace(shape_of("qwen3-8b", reduced=True), dtype="bfloat16", vocab_size=1024)


@pytest.mark.parametrize("shard_bytes, count", [(2**30, 1), (140_000, 4), (1, None)])
def test_shards_hold_every_weight_once(tmp_path, shard_bytes, count):
    total = write_checkpoint(tmp_path / "m", CONFIG, shard_bytes, seed=3)
    files, model = weight_files(tmp_path / "m"), load_model(tmp_path / "m", dtype=torch.bfloat16)
    names = [name for file in files for name in read_header(tmp_path / "m" / file)]
    weights = dict(model.named_parameters())
    assert sorted(names) == sorted(weights) and total == sum(p.nbytes for p in weights.values())
    assert len(files) == (count or len(weights)) and not list((tmp_path / "m").glob("*.tmp"))
    sizes = [(tmp_path / "m" / file).stat().st_size for file in files]
    assert count is None or max(sizes) < shard_bytes + 4096  # and a header
    index = json.loads((tmp_path / "m/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == total and set(index["weight_map"]) == set(weights)
    assert model.config == CONFIG
    for name, p in weights.items():
        if p.dim() == 2:
            assert p.float().std().item() == pytest.approx(p.shape[1]**-0.5, rel=0.1), name
        else:
            assert (p == 1).all(), name
    write_checkpoint(tmp_path / "again", CONFIG, 2**30, seed=3)
    again = dict(load_model(tmp_path / "again", dtype=torch.bfloat16).named_parameters())
    assert all(torch.equal(again[name], p) for name, p in weights.items())  # the seed, whatever the shards


def test_a_shard_at_a_time_is_in_memory(tmp_path, monkeypatch):
    held, real = [], random_checkpoint.save_file
    monkeypatch.setattr(random_checkpoint, "save_file", lambda tensors, *a, **k: held.append(
        sum(t.nbytes for t in tensors.values())) or real(tensors, *a, **k))
    total = write_checkpoint(tmp_path / "m", CONFIG, 140_000)
    assert max(held) <= 140_000 and sum(held) == total > 2.5 * max(held)


def test_a_folder_with_a_model_is_left_alone(tmp_path, capsys):
    write_checkpoint(tmp_path / "m", CONFIG)
    before = {p.name: p.read_bytes() for p in (tmp_path / "m").iterdir()}
    assert bench.main(["checkpoint", "--shape", "traces", "--out", str(tmp_path / "m")]) == 2
    assert "holds a model already" in capsys.readouterr().err
    assert before == {p.name: p.read_bytes() for p in (tmp_path / "m").iterdir()}
    assert bench.main(["checkpoint", "--out", str(tmp_path / "n"), "--tokenizer", str(tmp_path)]) == 2
    assert not (tmp_path / "n").exists()


@pytest.mark.parametrize("args, word", [(("--layers", "-1"), "--layers"), (("--shard-gb", "0"), "--shard-gb"),
                                        (("--out", __file__), "is a file")])
def test_what_cannot_be_made_is_refused(tmp_path, capsys, args, word):
    assert bench.main(["checkpoint", "--shape", "traces", "--out", str(tmp_path / "n"), *args]) == 2
    assert word in capsys.readouterr().err and not (tmp_path / "n").exists()


def test_the_command_makes_what_training_takes(root, tmp_path, capsys, monkeypatch):  # noqa: F811
    """The whole way: shards, tokens of a smaller tokenizer, a trained base, a frozen one, text."""
    monkeypatch.setattr(random_checkpoint, "shape_of", lambda name: replace(CONFIG))
    out = tmp_path / "random"
    assert bench.main(["checkpoint", "--shape", "qwen3-8b", "--layers", "3", "--out", str(out), "--shard-gb", "0.00014",
                       "--tokenizer", str(root / "qwen3")]) == 0
    model = load_model(out)
    assert model.config.n_layer == 3 and len(weight_files(out)) > 3
    common = ["--model", str(out), "--data", str(root / "text.jsonl"), "--device", "cpu", "--context", "96",
              "--batch-size", "1", "--n-sink", "2", "--window", "8", "--budget", "60", "--steps", "2", "--held-out",
              "0.2", "--eval-problems", "1", "--log-every", "1", "--recompute"]
    for name, args in (("frozen", []), ("full", ["--train-base"])):
        assert train.main([*common, "--out", str(tmp_path / name), *args]) == 0
        history = json.loads((tmp_path / name / "log.json").read_text())["history"]
        assert len(history) == 2 and all(math.isfinite(x) for line in history for x in line.values())
        assert decode.main(["--model", str(tmp_path / name), "--device", "cpu", "--prompt", " ".join(WORDS),
                            "--max-new-tokens", "4"]) == 0
    assert not list((tmp_path / "frozen").glob("model*.safetensors"))  # a frozen base is named, not copied
    assert load_model(tmp_path / "full").config.n_layer == 3
