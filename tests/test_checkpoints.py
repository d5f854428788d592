"""model.py on real checkpoints' ways: stretched RoPE, hub ids, memory while loading.

fixtures/rope-scaling.npz: logits and frequencies that Hugging Face transformers 5.24.0 gave (fp32, eager) for the two
tiny checkpoints with these scalings put into their config.json.
"""
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from model import (ModelConfig, Transformer, causal_attend, copy_companions, fingerprint, load_model,
                   resolve_checkpoint, rope_cos_sin, rope_frequencies, save_model)

FIXTURES = Path(__file__).parent / "fixtures"
ROOT = Path(__file__).parent.parent
SCALINGS = {"llama3": ("tiny-llama", dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                          original_max_position_embeddings=64)),
            "yarn": ("tiny-qwen3-tied", dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=128))}


def with_config(folder, name, **changes):
    """A copy of a tiny checkpoint whose config.json says something else."""
    shutil.copytree(FIXTURES / name, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


# ----------------------------------------------------------------------------- RoPE scaling

def scaled_logits(folder, kind):
    data = np.load(FIXTURES / "rope-scaling.npz")
    model = load_model(folder)
    with torch.no_grad():
        logits = model.unembed(model(torch.from_numpy(data[f"{kind}_ids"]), causal_attend))
    error = (logits[:, data[f"{kind}_positions"]] - torch.from_numpy(data[f"{kind}_logits"])).abs()
    return model, error


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("spelling", ["older", "newer"])
def test_stretched_rope_matches_recorded_logits(kind, spelling, tmp_path):
    name, scaling = SCALINGS[kind]
    base = json.loads((FIXTURES / name / "config.json").read_text())["rope_theta"]
    changes = dict(rope_scaling=scaling) if spelling == "older" else dict(
        rope_scaling=None, rope_theta=None, rope_parameters={**scaling, "rope_theta": base})
    changes["max_position_embeddings"] = 512
    model, error = scaled_logits(with_config(tmp_path / "m", name, **changes), kind)
    assert error.mean() < 2e-5 and error.max() < 3e-4, (error.mean(), error.max())
    save_model(model, tmp_path / "again", dtype=torch.float32)  # and the scaling is kept
    assert load_model(tmp_path / "again").config.rope_scaling == model.config.rope_scaling
    model.config.rope_scaling = None
    assert ModelConfig.from_dict(model.config.to_dict()).rope_scaling is None
    plain, error = scaled_logits(with_config(tmp_path / "plain", name), kind)
    assert plain.config.rope_scaling is None and error.mean() > 1e-3  # the bar would see it left out


def test_llama3_frequencies_by_definition():
    """Llama 3.1's own numbers, channel by channel, as its reference code branches."""
    base, dim, factor, low, high, context = 500_000.0, 128, 8.0, 1.0, 4.0, 8192
    expected = []
    for i in range(dim // 2):
        frequency = base ** (-2 * i / dim)
        wavelength = 2 * math.pi / frequency
        if wavelength < context / high:
            expected.append(frequency)
        elif wavelength > context / low:
            expected.append(frequency / factor)
        else:
            smooth = (context / wavelength - low) / (high - low)
            expected.append((1 - smooth) * frequency / factor + smooth * frequency)
    scaling = dict(rope_type="llama3", factor=factor, low_freq_factor=low, high_freq_factor=high,
                   original_max_position_embeddings=context)
    torch.testing.assert_close(rope_frequencies(dim, base, scaling, "cpu"), torch.tensor(expected, dtype=torch.float64),
                               rtol=1e-12, atol=0)
    assert len({round(f * base ** (2 * i / dim), 6) for i, f in enumerate(expected)}) > 5  # all three branches


def yarn_by_search(dim, base, factor, context, fast, slow):
    """The paper's ramp, with its two ends found by searching the channel that turns `fast` and `slow` times."""
    def channel(turns):
        lower, upper = -float(dim), 2.0 * dim
        for _ in range(200):
            middle = (lower + upper) / 2
            lower, upper = (middle, upper) if context * base ** (-2 * middle / dim) > turns * 2 * math.pi else (
                lower, middle)
        return lower
    first, last, out = max(math.floor(channel(fast)), 0), min(math.ceil(channel(slow)), dim - 1), []
    for i in range(dim // 2):
        slowed = min(1.0, max(0.0, (i - first) / (last - first)))
        frequency = base ** (-2 * i / dim)
        out.append(frequency / factor * slowed + frequency * (1 - slowed))
    return out


def hf_config(**changes):
    return ModelConfig.from_dict(dict(model_type="qwen3", vocab_size=5, num_hidden_layers=1, hidden_size=8, head_dim=8,
                                      num_attention_heads=1, intermediate_size=8, **changes))


@pytest.mark.parametrize("dim, base, factor, context, betas", [
    (128, 1e6, 4.0, 32768, {}), (64, 1e4, 2.5, 2048, {}), (32, 1e4, 8.0, 256, dict(beta_fast=8.0, beta_slow=2.0))])
def test_yarn_frequencies_by_definition(dim, base, factor, context, betas):
    scaling = hf_config(max_position_embeddings=7, rope_scaling=dict(
        rope_type="yarn", factor=factor, original_max_position_embeddings=context, **betas)).rope_scaling
    expected = yarn_by_search(dim, base, factor, context, betas.get("beta_fast", 32), betas.get("beta_slow", 1))
    ours = rope_frequencies(dim, base, scaling, "cpu")
    torch.testing.assert_close(ours, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)
    assert ours[0] == 1.0 and ours[-1].item() == pytest.approx(base ** (2 / dim - 1) / factor)
    sharpen = 0.1 * math.log(factor) + 1
    cos, sin = rope_cos_sin(torch.tensor([0, 5]), dim, base, torch.float64, scaling)
    assert cos[0, 0].tolist() == pytest.approx([sharpen] * (dim // 2))
    torch.testing.assert_close(cos[0, 1].square() + sin[0, 1].square(), torch.full((dim // 2,), sharpen ** 2).double())
    given = dict(scaling, attention_factor=1.25)
    assert rope_cos_sin(torch.tensor([0]), dim, base, torch.float32, given)[0].unique().tolist() == [1.25]


def test_yarn_context_is_the_stretched_one():
    """Qwen3's card: factor 4 over 32,768 in a config that goes on saying 40,960."""
    qwen = dict(max_position_embeddings=40_960, rope_scaling=dict(type="yarn", factor=4.0,
                                                                  original_max_position_embeddings=32_768))
    config = hf_config(**qwen)
    assert config.max_seq_len == 131_072 and ModelConfig.from_dict(config.to_dict()) == config
    bare = hf_config(max_position_embeddings=1000, rope_scaling=dict(rope_type="yarn", factor=2.0))
    assert (bare.max_seq_len, bare.rope_scaling["original_max_position_embeddings"]) == (2000, 1000)
    assert hf_config(max_position_embeddings=64, rope_scaling=SCALINGS["llama3"][1]).max_seq_len == 64


# ----------------------------------------------------------------------------- hub ids, with a cache made by hand

@pytest.fixture
def hub(tmp_path, monkeypatch):
    """An empty hub cache and a network that is not there; yields (cache, list of hosts that were asked for)."""
    constants = pytest.importorskip("huggingface_hub.constants")
    cache, asked = tmp_path / "hub", []

    def no_network(host, *args, **kwargs):
        asked.append(host)
        raise socket.gaierror(-2, "Name or service not known")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    return cache, asked


def put(cache, name="tiny-llama", id="owner/some-Model.1"):
    folder = cache / f"models--{id.replace('/', '--')}"
    shutil.copytree(FIXTURES / name, folder / "snapshots" / ("c0ffee" + "0" * 34))
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("c0ffee" + "0" * 34)
    return folder / "snapshots" / ("c0ffee" + "0" * 34)


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen3-tied"])
def test_cached_hub_id_needs_no_network(hub, name):
    cache, asked = hub
    snapshot = put(cache, name)
    assert resolve_checkpoint("owner/some-Model.1") == snapshot and asked == []
    assert load_model(resolve_checkpoint("owner/some-Model.1")).config.n_layer == 2


def test_what_is_not_cached_and_cannot_be_fetched_is_one_sentence(hub):
    cache, asked = hub
    shard = put(cache, "tiny-qwen3-tied") / "model-00002-of-00003.safetensors"
    shard.unlink()
    for name in ("owner/some-Model.1", "owner/never-seen"):
        with pytest.raises(FileNotFoundError) as error:
            resolve_checkpoint(name)
        text = str(error.value)
        assert f"no folder '{name}' here" in text and str(cache) in text and "failed: " in text and "\n" not in text
    assert asked  # it did try


def test_local_folders_and_names_that_are_neither(hub, tmp_path):
    assert resolve_checkpoint(str(FIXTURES / "tiny-llama")) == FIXTURES / "tiny-llama"
    for name in ("nothing", "./a/b", "/a/b", "a/b/c", "../a", "a/"):
        with pytest.raises(FileNotFoundError, match="no checkpoint folder .* and it is no hub id"):
            resolve_checkpoint(name)
    assert hub[1] == []


def test_without_huggingface_hub_the_way_on_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert resolve_checkpoint(str(FIXTURES)) == FIXTURES  # a local folder never needs it
    with pytest.raises(FileNotFoundError, match="pip install datasets"):
        resolve_checkpoint("owner/model")


def test_companions_are_copied(tmp_path):
    source, target = tmp_path / "a", tmp_path / "b"
    source.mkdir(), target.mkdir()
    (source / "tokenizer.json").write_text("{}"), (source / "chat_template.jinja").write_text("x")
    (source / "other.txt").write_text("no")
    copy_companions(source, target)
    copy_companions(source, source)
    assert sorted(os.listdir(target)) == ["chat_template.jinja", "tokenizer.json"]


# ----------------------------------------------------------------------------- memory while loading

LOAD = """
import sys, threading, time, torch
from model import load_model
def resident():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmRSS"))
torch.zeros(1), load_model(sys.argv[2])  # the libraries themselves
start, peak, done = resident(), [0], []
def watch():
    while not done:
        peak[0] = max(peak[0], resident())
        time.sleep(0.0005)
thread = threading.Thread(target=watch)
thread.start()
model = load_model(sys.argv[1], dtype=torch.bfloat16)
done.append(1)
thread.join()
print(peak[0] - start, sum(p.nbytes for p in model.parameters()))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_loading_needs_little_more_than_the_weights(tmp_path):
    from safetensors.torch import save_file
    config = ModelConfig(vocab_size=4000, n_layer=5, n_embd=1024, n_head=8, n_kv_head=8, head_dim=128, max_seq_len=64,
                         intermediate_size=2048, dtype="bfloat16")
    with torch.device("meta"):
        names = {name: p.shape for name, p in Transformer(config).named_parameters()}
    shards, weight_map = [[] for _ in range(5)], {}
    for i, name in enumerate(names):
        shards[i * 5 // len(names)].append(name)
    for i, shard in enumerate(shards):
        tensors = {name: torch.ones(names[name], dtype=torch.bfloat16) for name in shard}
        save_file(tensors, tmp_path / f"{i}.safetensors")
        weight_map |= {name: f"{i}.safetensors" for name in shard}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(dict(weight_map=weight_map)))
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    largest = max((tmp_path / f"{i}.safetensors").stat().st_size for i in range(5))
    result = subprocess.run([sys.executable, "-c", LOAD, str(tmp_path), str(FIXTURES / "tiny-llama")], cwd=ROOT,
                            capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert result.returncode == 0, result.stderr
    peak, weights = map(int, result.stdout.split())
    assert weights > 1e8 and 0.9 * weights < peak <= 1.2 * weights + largest, (peak, weights, largest)


def test_the_fingerprint_covers_every_shard(tmp_path):
    for path in (FIXTURES / "tiny-qwen3-tied").glob("*.safetensors"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    whole, shards = fingerprint(tmp_path), sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) == 3 and whole == fingerprint(FIXTURES / "tiny-qwen3-tied") != fingerprint(tmp_path / "none")
    crc = 0
    for shard in shards:
        crc = zlib.crc32(shard.read_bytes(), crc)
    assert whole == f"{crc:08x}"
    shards[1].write_bytes(shards[1].read_bytes()[:-1] + b"?")
    assert fingerprint(tmp_path) != whole
