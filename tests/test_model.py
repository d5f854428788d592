"""model.py: parity with recorded logits, with a reference written out head by head, and checkpoints that fail by name.

fixtures/: two tiny random checkpoints and fp32 logits that Hugging Face transformers gave for them, at some positions.
The bar (mean < 2e-5, max < 3e-4) is wide of rounding and far below any real mistake: the negative controls show it.
"""
import json
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import model as model_py
from model import ModelConfig, Transformer, causal_attend, load_model, save_model

FIXTURES = Path(__file__).parent / "fixtures"
TINY = ("tiny-llama", "tiny-qwen3-tied")
MEAN_BAR, MAX_BAR = 2e-5, 3e-4


def tiny_config(**changes):
    """Odd on purpose: H * D is not C, three query heads per KV head."""
    config = ModelConfig(vocab_size=61, n_layer=2, n_embd=40, n_head=6, n_kv_head=2, head_dim=8, intermediate_size=56,
                         max_seq_len=128, rope_base=5e4, eos_token_ids=[60], alphabet="ab\n\xe9")
    return replace(config, **changes)


def llama(**changes):
    return tiny_config(model_type="llama", qk_norm=False, tie_embeddings=False, **changes)


def random_model(config, seed=0):
    """All parameters random, norms and biases too: at their initial values they could be left out unnoticed."""
    torch.manual_seed(seed)
    model = Transformer(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.3).add_(1.0 if "norm" in name else 0.0)
    return model


@torch.no_grad()
def logits_of(model, idx, input_pos=None):
    return model.unembed(model(idx, causal_attend, input_pos))


# ----------------------------------------------------------------------------- parity

def recorded(name):
    data = np.load(FIXTURES / f"{name}.npz")
    return {key: torch.from_numpy(data[key]) for key in data.files}


def parity_error(model, name):
    """(mean, max) absolute difference from the recorded logits."""
    data, errors = recorded(name), []
    for part in ("short", "long"):
        ours = logits_of(model, data[f"ids_{part}"])[:, data[f"positions_{part}"]]
        errors.append((ours - data[f"logits_{part}"]).abs().flatten())
    errors = torch.cat(errors)
    return errors.mean().item(), errors.max().item()


@pytest.mark.parametrize("name", TINY)
def test_logits_match_recorded_ones(name):
    mean, most = parity_error(load_model(FIXTURES / name), name)
    assert mean < MEAN_BAR and most < MAX_BAR, (mean, most)


@pytest.mark.parametrize("name", TINY)
def test_greedy_continuation_matches(name):
    model, data = load_model(FIXTURES / name), recorded(name)
    ids, greedy = data["ids_short"], data["greedy"]
    while ids.size(1) < greedy.size(1):
        ids = torch.cat((ids, logits_of(model, ids)[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(ids, greedy)


def interleaved_rope(x, cos, sin):
    x1, x2 = x[..., 0::2], x[..., 1::2]
    return torch.stack((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).flatten(-2)


def norm_after_rope(self, x, cos, sin):
    q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
               for proj in (self.q_proj, self.k_proj, self.v_proj))
    q, k = model_py.apply_rotary_emb(q, cos, sin), model_py.apply_rotary_emb(k, cos, sin)
    return self.q_norm(q), self.k_norm(k), v


@pytest.mark.parametrize("mistake", ["eps", "interleaved RoPE", "RoPE base", "norm after RoPE", "KV heads swapped"])
def test_parity_bar_catches(mistake, monkeypatch):
    name = "tiny-qwen3-tied"
    model = load_model(FIXTURES / name)
    if mistake == "eps":
        for norm in (m for m in model.modules() if isinstance(m, model_py.RMSNorm)):
            norm.eps *= 10
    elif mistake == "interleaved RoPE":
        monkeypatch.setattr(model_py, "apply_rotary_emb", interleaved_rope)
    elif mistake == "RoPE base":
        model.config.rope_base /= 2
    elif mistake == "norm after RoPE":
        monkeypatch.setattr(model_py.Attention, "qkv", norm_after_rope)
    else:  # query heads in stripes over the KV heads instead of in groups
        monkeypatch.setitem(globals(), "causal_attend", lambda layer, q, k, v: model_py.causal_attend(
            layer, q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)))
    mean, _ = parity_error(model, name)
    assert mean > 3 * MEAN_BAR, mean


def reference_logits(tensors, config, ids):
    """Numpy, fp64, one head and one position at a time: the definition, from the tensors of a file."""
    w = {name: tensor.double().numpy() for name, tensor in tensors.items()}
    base, eps, d = config.rope_base, config.norm_eps, config.head_dim

    def norm(x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    def rotate(x, position):
        out = np.empty_like(x)
        for i in range(d // 2):
            angle = position * base ** (-2 * i / d)
            out[i] = x[i] * math.cos(angle) - x[i + d // 2] * math.sin(angle)
            out[i + d // 2] = x[i + d // 2] * math.cos(angle) + x[i] * math.sin(angle)
        return out

    def heads(x, name, n):
        x = linear(x, f"{name}_proj").reshape(len(ids), n, d)
        return norm(x, w[f"{name}_norm.weight"]) if f"{name}_norm.weight" in w else x

    x = w["model.embed_tokens.weight"][ids]
    for layer in range(config.n_layer):
        p = f"model.layers.{layer}"
        h = norm(x, w[f"{p}.input_layernorm.weight"])
        q, k, v = (heads(h, f"{p}.self_attn.{z}", n) for z, n in
                   (("q", config.n_head), ("k", config.n_kv_head), ("v", config.n_kv_head)))
        y = np.zeros((len(ids), config.n_head, d))
        for head in range(config.n_head):
            kv = head // (config.n_head // config.n_kv_head)
            for t in range(len(ids)):
                score = np.array([rotate(q[t, head], t) @ rotate(k[s, kv], s) / math.sqrt(d) for s in range(t + 1)])
                p_att = np.exp(score - score.max())
                y[t, head] = (p_att / p_att.sum()) @ v[:t + 1, kv]
        x = x + linear(y.reshape(len(ids), -1), f"{p}.self_attn.o_proj")
        h = norm(x, w[f"{p}.post_attention_layernorm.weight"])
        gate = linear(h, f"{p}.mlp.gate_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(h, f"{p}.mlp.up_proj"), f"{p}.mlp.down_proj")
    head = w["model.embed_tokens.weight"] if config.tie_embeddings else w["lm_head.weight"]
    return norm(x, w["model.norm.weight"]) @ head.T


@pytest.mark.parametrize("config", [tiny_config(), tiny_config(attention_bias=True, tie_embeddings=False), llama(),
                                    llama(attention_bias=True, mlp_bias=True)],
                         ids=["qwen3", "qwen3-bias", "llama", "llama-bias"])
def test_logits_match_the_reference_in_fp64(config):
    model = random_model(config).double()
    ids = torch.randint(config.vocab_size, (1, 9))
    expected = torch.from_numpy(reference_logits(model.state_dict(), config, ids[0].numpy()))
    torch.testing.assert_close(logits_of(model, ids)[0], expected, rtol=1e-10, atol=1e-10)
    single = logits_of(model.float(), ids)[0].double()
    assert (single - expected).abs().max() < 1e-4 * expected.abs().max()


def test_bias_tensors_are_those_of_hugging_face():
    def biases(config):
        return sorted({n.split(".", 3)[-1] for n, _ in Transformer(config).named_parameters() if n.endswith("bias")})
    attention = [f"self_attn.{z}_proj.bias" for z in "koqv"]
    assert biases(tiny_config()) == [] and biases(tiny_config(attention_bias=True)) == attention
    assert biases(llama(mlp_bias=True)) == [f"mlp.{z}_proj.bias" for z in ("down", "gate", "up")]


# ----------------------------------------------------------------------------- positions and dtypes

def test_only_distances_matter():
    model, ids = random_model(tiny_config()).double(), torch.randint(61, (2, 12))
    here = logits_of(model, ids)
    torch.testing.assert_close(logits_of(model, ids, torch.arange(12) + 100_000), here, rtol=0, atol=1e-9)
    rows = torch.stack((torch.arange(12), torch.arange(12) + 77))  # each row its own start
    torch.testing.assert_close(logits_of(model, ids, rows), here, rtol=0, atol=1e-9)
    gap = torch.arange(12) + (torch.arange(12) >= 6)  # one distance changed: not the same any more
    assert (logits_of(model, ids, gap) - here).abs().max() > 1e-3


def test_rows_keep_their_own_positions():
    model, ids = random_model(tiny_config()).double(), torch.randint(61, (2, 12))
    spread = torch.arange(12) * 3
    rows = torch.stack((torch.arange(12), spread))
    both = logits_of(model, ids, rows)
    torch.testing.assert_close(both[:1], logits_of(model, ids[:1]), rtol=0, atol=1e-12)
    torch.testing.assert_close(both[1:], logits_of(model, ids[1:], spread), rtol=0, atol=1e-12)


def test_angles_are_exact_to_fp32_at_131072():
    positions, dim, base = [0, 1, 4095, 131_071], 64, 1e6
    cos, sin = model_py.rope_cos_sin(torch.tensor(positions), dim, base, torch.float32)
    angles = [[p * base ** (-2 * i / dim) for i in range(dim // 2)] for p in positions]
    assert cos.shape == sin.shape == (1, 4, dim // 2) and cos.dtype == torch.float32
    torch.testing.assert_close(cos[0], torch.tensor([[math.cos(a) for a in row] for row in angles]), rtol=0, atol=1e-7)
    torch.testing.assert_close(sin[0], torch.tensor([[math.sin(a) for a in row] for row in angles]), rtol=0, atol=1e-7)


def test_bf16_rotates_in_fp32():
    torch.manual_seed(0)
    x = torch.randn(1, 2, 5, 8, dtype=torch.bfloat16)
    cos, sin = model_py.rope_cos_sin(torch.arange(5) + 900, 8, 1e4, torch.float32)
    rotated = model_py.apply_rotary_emb(x, cos, sin)
    assert rotated.dtype == torch.bfloat16
    assert torch.equal(rotated, model_py.apply_rotary_emb(x.float(), cos, sin).bfloat16())


@pytest.mark.parametrize("config", [tiny_config(), llama()], ids=["qwen3", "llama"])
@pytest.mark.parametrize("setting", ["float32", "float64", "bfloat16", "autocast"])
def test_attend_gets_one_dtype_and_the_stated_shapes(config, setting):
    check_attend(config, setting, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("config", [tiny_config(), llama()], ids=["qwen3", "llama"])
@pytest.mark.parametrize("setting", ["float32", "bfloat16", "autocast"])
def test_attend_gets_one_dtype_on_cuda(config, setting):
    check_attend(config, setting, "cuda")


def check_attend(config, setting, device):
    seen = []

    def attend(layer, q, k, v):
        seen.append((layer, q.dtype, k.dtype, v.dtype, tuple(q.shape), tuple(k.shape), tuple(v.shape)))
        return causal_attend(layer, q, k, v)

    model, ids = random_model(config), torch.randint(61, (2, 12))
    exact = logits_of(model, ids)
    dtype = torch.bfloat16 if setting == "autocast" else getattr(torch, setting)
    model.to(device, torch.float32 if setting == "autocast" else dtype)
    with torch.autocast(device, torch.bfloat16, enabled=setting == "autocast"), torch.no_grad():
        logits = model.unembed(model(ids.to(device), attend))
    assert seen == [(layer, dtype, dtype, dtype, (2, 6, 12, 8), (2, 2, 12, 8), (2, 2, 12, 8)) for layer in range(2)]
    assert logits.dtype == dtype
    error = (logits.cpu().double() - exact.double()).norm() / exact.double().norm()
    assert error < (0.05 if dtype == torch.bfloat16 else 1e-3), error


def test_one_compiled_block_serves_every_layer():
    from torch._dynamo.testing import CompileCounter
    torch._dynamo.reset()
    model, ids, counter = random_model(llama(n_layer=5)), torch.randint(61, (2, 12)), CompileCounter()
    expected = logits_of(model, ids)
    for block in model.model.layers:
        block.compile(backend=counter, fullgraph=True)
    torch.testing.assert_close(logits_of(model, ids), expected, rtol=1e-4, atol=1e-4)
    assert 1 <= counter.frame_count <= 2, counter.frame_count  # once, and once more for "layer is any int"
    assert not any("_orig_mod" in name for name in model.state_dict())


@pytest.mark.gpu
def test_a_step_replays_in_a_cuda_graph():
    model = random_model(tiny_config()).cuda()
    token, position = torch.zeros(1, 1, dtype=torch.int64).cuda(), torch.zeros(1, dtype=torch.int64).cuda()
    seen = {}

    def attend(layer, q, k, v):
        seen[layer] = k
        return causal_attend(layer, q, k, v)

    def step():
        with torch.no_grad():
            return model.unembed(model(token, attend, position)), seen[1]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        replayed = step()
    for t in (3, 131_071):
        token.fill_(t % 61), position.fill_(t)
        graph.replay()
        for ours, eager in zip(replayed, step()):
            torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize("dtype, bar", [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_a_compiled_product_of_one_token_is_a_sum(dtype, bar):
    """The same numbers, sums of 512 terms of order 1, with no product left in the graph; of two tokens, with a bias, or
    not compiled, it is F.linear itself."""
    weight, ops = torch.randn(64, 512, dtype=dtype), []

    def note(graph, inputs):
        ops.append({str(node.target) for node in graph.graph.nodes if node.op in ("call_function", "call_method")})
        return graph
    compiled = torch.compile(model_py.linear, backend=note, dynamic=False, fullgraph=True)
    for shape, bias, summed in (((1, 1, 512), None, True), ((512,), None, True), ((2, 1, 512), None, False),
                                ((1, 2, 512), None, False), ((1, 1, 512), torch.randn(64, dtype=dtype), False)):
        x = torch.randn(shape, dtype=dtype)
        want = F.linear(x, weight, bias)
        got = compiled(x, weight, bias)
        assert got.dtype == dtype and torch.equal(model_py.linear(x, weight, bias), want)
        torch.testing.assert_close(got, want, atol=bar * 512**0.5, rtol=bar)
        assert ("sum" in ops[-1]) == summed and any("linear" in name for name in ops[-1]) != summed


def test_checkpointed_blocks_give_the_same_gradients():
    model, ids = random_model(tiny_config()), torch.randint(61, (2, 12))
    calls, gradients = [], []
    for model.checkpoint_blocks in (False, True):
        model.zero_grad()
        model.unembed(model(ids, lambda *a: calls.append(a[0]) or causal_attend(*a))).square().mean().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert calls == [0, 1] + [0, 1, 1, 0]  # forward twice, then recomputed from the last layer down
    for plain, again in zip(*gradients):
        torch.testing.assert_close(plain, again)


def test_init_is_gpt_like():
    torch.manual_seed(0)
    model = Transformer(tiny_config(n_embd=128, n_layer=8, attention_bias=True))
    for name, p in model.named_parameters():
        if p.dim() == 2:
            std = 0.02 / 4 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
            assert abs(p.std().item() / std - 1) < 0.1, name
        else:
            assert (p == (0 if name.endswith("bias") else 1)).all(), name


# ----------------------------------------------------------------------------- config

HF_LLAMA = json.loads((FIXTURES / "tiny-llama" / "config.json").read_text())
HF_QWEN3 = json.loads((FIXTURES / "tiny-qwen3-tied" / "config.json").read_text())


@pytest.mark.parametrize("config", [tiny_config(), llama(attention_bias=True, mlp_bias=True, dtype="bfloat16"),
                                    tiny_config(alphabet=None, eos_token_ids=[])], ids=["qwen3", "llama", "bare"])
def test_config_round_trip(config):
    hf = json.loads(json.dumps(config.to_dict()))
    assert ModelConfig.from_dict(hf) == config
    assert hf["hidden_size"] == 40 and hf["num_key_value_heads"] == 2 and config.group_size == 3


def test_config_spellings():
    def read(base, drop=(), **changes):
        return ModelConfig.from_dict({k: v for k, v in {**base, **changes}.items() if k not in drop})
    old = read(HF_QWEN3)
    assert (old.rope_base, old.dtype, old.eos_token_ids, old.head_dim) == (1e6, "bfloat16", [258], 32)
    new = read(HF_QWEN3, drop=("rope_theta", "rope_scaling", "torch_dtype"), dtype="bfloat16",
               rope_parameters={"rope_theta": 1000000.0, "rope_type": "default"})
    assert new == old == read(HF_QWEN3, rope_scaling={"type": "default"}, torch_dtype="torch.bfloat16")
    assert read(HF_QWEN3, eos_token_id=[258, 256]).eos_token_ids == [258, 256]
    assert read(HF_QWEN3, eos_token_id=None).eos_token_ids == []
    assert read(HF_LLAMA, head_dim=None) == read(HF_LLAMA, drop=("head_dim",)) == read(HF_LLAMA)  # 64 / 4 = 16
    bare = read(HF_LLAMA, drop=("num_key_value_heads", "rope_theta", "rms_norm_eps", "tie_word_embeddings"))
    assert (bare.n_kv_head, bare.rope_base, bare.norm_eps, bare.tie_embeddings) == (4, 10000.0, 1e-6, False)
    unused = read(HF_QWEN3, use_sliding_window=False, sliding_window=4096, layer_types=["full_attention"] * 2)
    slides = dict(use_sliding_window=True, sliding_window=4096)  # from layer 28 on, which these two layers never reach
    assert unused == old == read(HF_QWEN3, **slides) == read(HF_QWEN3, drop=("max_window_layers",), **slides)


@pytest.mark.parametrize("changes, named", [
    ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "rope_scaling of type 'longrope'"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0}}, "'yarn' with mscale is not supported"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": "4"}}, "'yarn' needs positive numbers"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
     "two RoPE scalings"),
    ({"rope_interleaved": True}, "rope_interleaved"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling of type 'linear'"),
    ({"rope_scaling": {"factor": 2.0}}, "rope_scaling of type None"),
    ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e6}},
     "'llama3' lacks factor, low_freq_factor, high_freq_factor, original_max_position_embeddings"),
    ({"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
    ({"rope_parameters": {"rope_theta": 5e5}}, "two values of rope_theta"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ({"model_type": "mixtral"}, "model_type 'mixtral'"),
    ({"model_type": None}, "model_type None"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, "sliding_attention"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
    ({"mlp_bias": True}, "mlp_bias"),
    ({"torch_dtype": "int8"}, "dtype 'int8'"),
    ({"hidden_size": None, "intermediate_size": None}, "lacks hidden_size, intermediate_size"),
    ({"head_dim": None, "hidden_size": 66}, "no head_dim"),
    ({"head_dim": 15}, "head_dim must be even"),
    ({"num_key_value_heads": 3}, "not a multiple of n_kv_head"),
    ({"num_hidden_layers": 0}, "num_hidden_layers"),
])
def test_config_refuses_by_name(changes, named):
    with pytest.raises(ValueError, match=named):
        ModelConfig.from_dict({**HF_QWEN3, **changes})


# ----------------------------------------------------------------------------- checkpoints

@pytest.mark.parametrize("config", [tiny_config(), tiny_config(tie_embeddings=False), llama(attention_bias=True)],
                         ids=["tied", "untied", "llama"])
def test_save_and_load_are_bitwise(config, tmp_path):
    model = random_model(config)
    model.scorers = nn.ModuleList(nn.Linear(3, 1) for _ in range(2))  # lives in the tree, stays out of the file
    save_model(model, tmp_path / "new" / "full", dtype=torch.float32)
    save_model(model, tmp_path / "half")
    full, half = load_model(tmp_path / "new" / "full"), load_model(tmp_path / "half", dtype=torch.bfloat16)
    base = {name: p for name, p in model.state_dict().items() if not name.startswith("scorers.")}
    assert list(full.state_dict()) == list(half.state_dict()) == list(base)
    for name, tensor in base.items():
        assert torch.equal(full.state_dict()[name], tensor), name
        assert torch.equal(half.state_dict()[name], tensor.bfloat16()), name
    assert full.config == replace(config, dtype="float32") and half.config == replace(config, dtype="bfloat16")
    assert sorted(os.listdir(tmp_path / "half")) == ["config.json", "model.safetensors"]
    with safe_open(tmp_path / "half" / "model.safetensors", "pt") as file:
        assert sorted(file.keys()) == sorted(base) and file.metadata() == {"format": "pt"}
    assert all(p.requires_grad and not p.is_meta for p in full.parameters())


def test_one_file_and_shards_load_the_same(tmp_path):
    shards = load_model(FIXTURES / "tiny-qwen3-tied")
    save_model(shards, tmp_path)
    for name, tensor in load_model(tmp_path).state_dict().items():
        assert torch.equal(tensor, shards.state_dict()[name]), name


def test_a_save_that_fails_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    old = random_model(tiny_config(), seed=1)
    save_model(old, tmp_path, dtype=torch.float32)
    written = []

    def half_a_file(tensors, path, **kwargs):
        written.append(Path(path))
        Path(path).write_bytes(b"half")
        raise OSError("disk full")

    def no_replace(source, target):
        written.extend(tmp_path.glob("*.tmp"))
        raise OSError("disk full")

    for name, failing in (("safetensors.torch.save_file", half_a_file), ("os.replace", no_replace)):
        with monkeypatch.context() as patch, pytest.raises(OSError, match="disk full"):
            patch.setattr(name, failing)
            save_model(random_model(tiny_config(), seed=2), tmp_path, dtype=torch.float32)
        assert written and all(path.suffix == ".tmp" for path in written)  # the failure came with files on disk
        assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]
        for name, tensor in load_model(tmp_path).state_dict().items():
            assert torch.equal(tensor, old.state_dict()[name]), name


def test_save_refuses_renamed_weights(tmp_path):
    model = random_model(tiny_config())
    model.model.layers[0] = torch.compile(model.model.layers[0], backend="eager")
    with pytest.raises(ValueError, match=r"missing model\.layers\.0\..*extra model\.layers\.0\._orig_mod"):
        save_model(model, tmp_path)
    assert os.listdir(tmp_path) == []


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """A checkpoint to damage, and the promise that nothing is allocated before the refusal."""
    def no_work(*args, **kwargs):
        raise AssertionError("allocated before the check")
    monkeypatch.setattr(Transformer, "to_empty", no_work)

    def prepare(name="tiny-qwen3-tied", change=None, file="model.safetensors"):
        folder = tmp_path / name
        shutil.copytree(FIXTURES / name, folder)
        if change:
            tensors = load_file(folder / file)
            change(tensors)
            save_file(tensors, folder / file)
        return folder
    return prepare


SHARD = "model-00002-of-00003.safetensors"
NORM = "model.layers.0.input_layernorm.weight"


def test_missing_extra_and_misshaped_are_named_together(broken):
    def change(tensors):
        del tensors["model.norm.weight"]
        tensors["model.layers.7.mlp.up_proj.weight"] = torch.zeros(2)
        tensors["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(64, 16)
    with pytest.raises(ValueError) as error:
        load_model(broken("tiny-llama", change))
    for part in ("missing model.norm.weight", "extra model.layers.7.mlp.up_proj.weight",
                 "mis-shaped model.layers.0.self_attn.k_proj.weight [64, 16] instead of [32, 64]"):
        assert part in str(error.value)


def test_untied_config_over_a_tied_file_names_the_head(broken):
    folder = broken()
    (folder / "config.json").write_text(json.dumps({**HF_QWEN3, "tie_word_embeddings": False}))
    with pytest.raises(ValueError, match="missing lm_head.weight"):
        load_model(folder)


@pytest.mark.parametrize("keep", [0.0, 1e-4, 1e-3, 0.5, 0.999])
def test_truncated_file(broken, keep):
    folder = broken()
    size = (folder / SHARD).stat().st_size
    os.truncate(folder / SHARD, int(size * keep))
    named = f"{SHARD} is truncated" + (r": the data of model\.layers\..* end after" if keep > 0.1 else " or no ")
    with pytest.raises(ValueError, match=named):
        load_model(folder)


def test_damaged_header(broken):
    folder = broken()
    data = bytearray((folder / SHARD).read_bytes())
    data[data.index(b'"dtype"')] = ord("?")
    (folder / SHARD).write_bytes(data)
    with pytest.raises(ValueError, match=f"{SHARD} is no valid safetensors file"):
        load_model(folder)


def test_data_that_do_not_fill_their_shape(broken):
    folder = broken()
    data = (folder / SHARD).read_bytes()
    (folder / SHARD).write_bytes(data.replace(b'"shape":[64]', b'"shape":[65]', 1))
    with pytest.raises(ValueError, match=f"{SHARD} is no valid safetensors file"):
        load_model(folder)


def test_missing_shard_names_its_tensors(broken):
    folder = broken()
    (folder / SHARD).unlink()
    with pytest.raises(FileNotFoundError, match=f"lacks {SHARD}.*{NORM}"):
        load_model(folder)


def test_tensor_missing_from_its_shard(broken):
    with pytest.raises(ValueError, match=f"missing {NORM}$"):
        load_model(broken(change=lambda tensors: tensors.pop(NORM), file=SHARD))


def test_tensor_stored_in_two_shards(broken):
    with pytest.raises(ValueError, match="model.embed_tokens.weight is stored twice"):
        load_model(broken(change=lambda t: t.update({"model.embed_tokens.weight": torch.zeros(320, 64)}), file=SHARD))


def test_integer_weights_are_refused(broken):
    with pytest.raises(ValueError, match=f"{NORM} in {SHARD} is stored as I8"):
        load_model(broken(change=lambda t: t.update({NORM: torch.zeros(64, dtype=torch.int8)}), file=SHARD))


@pytest.mark.parametrize("pickle", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_pickle_is_refused_with_the_way_on(broken, pickle):
    folder = broken("tiny-llama")
    (folder / "model.safetensors").rename(folder / pickle)
    with pytest.raises(ValueError, match=f"{pickle}.*weights_only=True.*save_file"):
        load_model(folder)


def test_absent_things_are_named(broken, tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint folder 'some/model'"):
        load_model("some/model")
    folder = broken("tiny-llama")
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="neither model.safetensors nor"):
        load_model(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json is not JSON"):
        load_model(folder)
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match="has no config.json"):
        load_model(folder)


def with_head(change):
    def add(tensors):
        tensors["lm_head.weight"] = change(load_file(FIXTURES / "tiny-qwen3-tied" / "model-00001-of-00003.safetensors")[
            "model.embed_tokens.weight"].clone())
    return add


def test_tied_head_stored_all_the_same(tmp_path):
    shutil.copytree(FIXTURES / "tiny-qwen3-tied", tmp_path / "m")
    tensors = load_file(tmp_path / "m" / SHARD)
    with_head(lambda head: head)(tensors)
    save_file(tensors, tmp_path / "m" / SHARD)
    model = load_model(tmp_path / "m")
    assert not hasattr(model, "lm_head") and parity_error(model, "tiny-qwen3-tied")[0] < MEAN_BAR


@pytest.mark.parametrize("change, named", [(lambda head: head.float(), "lm_head.weight differs"),
                                           (lambda head: head[:-1].clone(), "mis-shaped lm_head.weight"),
                                           (lambda head: head.index_fill_(0, torch.tensor([319]), 0.5),
                                            "lm_head.weight differs")], ids=["dtype", "shape", "last row"])
def test_tied_head_that_is_another_is_refused(broken, change, named):
    with pytest.raises(ValueError, match=named):
        load_model(broken(change=with_head(change), file=SHARD))


def test_rotary_tables_of_old_llama_files_are_ignored(tmp_path):
    shutil.copytree(FIXTURES / "tiny-llama", tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    assert parity_error(load_model(tmp_path / "m"), "tiny-llama")[0] < MEAN_BAR
