"""The transformer and its checkpoints: one decoder for the shapes of Qwen3 and Llama.

Read bottom-up: Transformer -> Block -> Attention, MLP -> RMSNorm, RoPE; then GraphedStep, save_model, load_model and
resolve_checkpoint (a hub id as a local folder).
Departures from the plain thing (nanoGPT's model.py):
- attention is handed in with every call, `attend(layer, q, k, v)`: dense, masked or cached, the model does not know;
- grouped-query attention with an explicit head_dim (H * D need not be C), RMSNorm, SwiGLU, no dropout;
- half-split RoPE at absolute positions (`input_pos`), so a key keeps its place after others were evicted; plain, or
  stretched to longer contexts as Llama 3 and YaRN do;
- Qwen3 normalises q and k per head, before RoPE; Llama does not. Heads are tied or not;
- parameters carry Hugging Face names: a checkpoint is config.json + model.safetensors, readable by other tools.

Shapes: B batch, T tokens, C n_embd, H n_head, H_kv n_kv_head, D head_dim, V vocab_size. Layout (B, H, T, D).
"""
import json
import math
import os
import re
import shutil
import zlib
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# ours -> Hugging Face's; the keys that need more than a new name are handled in from_dict and to_dict
HF_KEYS = dict(vocab_size="vocab_size", n_layer="num_hidden_layers", n_embd="hidden_size", n_head="num_attention_heads",
               n_kv_head="num_key_value_heads", head_dim="head_dim", intermediate_size="intermediate_size",
               max_seq_len="max_position_embeddings", norm_eps="rms_norm_eps", tie_embeddings="tie_word_embeddings",
               attention_bias="attention_bias", mlp_bias="mlp_bias", model_type="model_type", alphabet="alphabet")
ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}
# RoPE scaling: what must be given, and what may be with its default
ROPE_KEYS = {"llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), {}),
             "yarn": (("factor",), dict(original_max_position_embeddings=None, attention_factor=None, beta_fast=32.0,
                                        beta_slow=1.0))}
COMPANIONS = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


# ----------------------------------------------------------------------------- configuration

@dataclass
class ModelConfig:
    """Shape of a model, in our words. ValueError when the numbers cannot make one."""
    vocab_size: int
    n_layer: int
    n_embd: int
    n_head: int
    n_kv_head: int
    head_dim: int
    intermediate_size: int
    max_seq_len: int  # what it was trained on; nothing here has a table of that length
    rope_base: float = 10000.0
    rope_scaling: dict | None = None  # rope_type llama3 or yarn with all of its ROPE_KEYS; None = plain
    norm_eps: float = 1e-6
    qk_norm: bool = True  # RMSNorm on each head of q and k, before RoPE: what makes a qwen3 of a llama
    tie_embeddings: bool = True
    attention_bias: bool = False  # on q, k, v and o, as in Hugging Face's llama and qwen3
    mlp_bias: bool = False
    model_type: str = "qwen3"
    eos_token_ids: list[int] = field(default_factory=list)
    alphabet: str | None = None  # the bytes it was trained on, decoded as latin-1; None = any token
    dtype: str = "float32"  # of the file on disk; load_model takes the working dtype

    def __post_init__(self):
        for name in ("vocab_size", "n_layer", "n_embd", "n_head", "n_kv_head", "head_dim", "intermediate_size",
                     "max_seq_len"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise ValueError(f"{name} ({HF_KEYS[name]} in config.json) must be a positive integer, "
                                 f"got {getattr(self, name)!r}")
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_head {self.n_head} is not a multiple of n_kv_head {self.n_kv_head}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for RoPE, got {self.head_dim}")
        if self.model_type not in ARCHITECTURES:
            raise ValueError(f"model_type {self.model_type!r} is not supported: use one of {sorted(ARCHITECTURES)}")
        if self.qk_norm != (self.model_type == "qwen3"):
            raise ValueError(f"qk_norm={self.qk_norm} does not go with model_type {self.model_type!r}: "
                             "qwen3 has it, llama has not")
        if self.mlp_bias and self.model_type == "qwen3":
            raise ValueError("mlp_bias is not part of qwen3: use model_type 'llama' or switch it off")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is not supported: use one of {list(DTYPES)}")

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.n_head // self.n_kv_head

    @classmethod
    def from_dict(cls, hf: dict) -> "ModelConfig":
        """From the keys of a Hugging Face config.json, older or newer spelling. Absent keys take HF's defaults,
        except that a missing head_dim is hidden_size / num_attention_heads.
        ValueError names whatever the model here would silently compute differently."""
        refuse_unsupported(hf)
        values = {ours: hf[theirs] for ours, theirs in HF_KEYS.items() if hf.get(theirs) is not None}
        absent = [HF_KEYS[name] for name in ("vocab_size", "n_layer", "n_embd", "n_head", "intermediate_size",
                                             "max_seq_len") if name not in values]
        if absent:
            raise ValueError(f"config.json lacks {', '.join(absent)}")
        values.setdefault("n_kv_head", values["n_head"])
        if "head_dim" not in values:
            if values["n_embd"] % values["n_head"]:
                raise ValueError(f"config.json has no head_dim, and hidden_size {values['n_embd']} is not a multiple "
                                 f"of num_attention_heads {values['n_head']}")
            values["head_dim"] = values["n_embd"] // values["n_head"]
        values.setdefault("tie_embeddings", False)
        bases = {float(base) for base in (hf.get("rope_theta"), (hf.get("rope_parameters") or {}).get("rope_theta"))
                 if base is not None}
        if len(bases) > 1:
            raise ValueError(f"config.json gives two values of rope_theta, {sorted(bases)}: keep one")
        scaling = read_rope_scaling(hf, values["max_seq_len"])
        if scaling and scaling["rope_type"] == "yarn":  # switched on by hand, with max_position_embeddings as it was
            stretched = int(scaling["factor"] * scaling["original_max_position_embeddings"])
            values["max_seq_len"] = max(values["max_seq_len"], stretched)
        eos = hf.get("eos_token_id")
        dtype = hf.get("dtype") or hf.get("torch_dtype") or "float32"
        return cls(**values, rope_base=bases.pop() if bases else 10000.0, rope_scaling=scaling,
                   qk_norm=hf["model_type"] == "qwen3",
                   eos_token_ids=[] if eos is None else list(eos) if isinstance(eos, list) else [eos],
                   dtype=str(dtype).removeprefix("torch."))

    def to_dict(self) -> dict:
        """Hugging Face keys in the older spelling, which all versions of transformers read, and `alphabet`.
        bos and pad ids are not kept."""
        ours = asdict(self)
        hf = {theirs: ours[name] for name, theirs in HF_KEYS.items()}
        hf.update(architectures=[ARCHITECTURES[self.model_type]], hidden_act="silu", rope_theta=self.rope_base,
                  rope_scaling=self.rope_scaling, torch_dtype=self.dtype, eos_token_id=self.eos_token_ids or None)
        return hf


def refuse_unsupported(hf: dict):
    """ValueError, by name, for what a config.json asks and this file does not do."""
    if hf.get("model_type") not in ARCHITECTURES:
        raise ValueError(f"model_type {hf.get('model_type')!r} is not supported: use one of {sorted(ARCHITECTURES)}")
    if hf.get("rope_interleaved"):
        raise ValueError("rope_interleaved is not supported: only half-split RoPE is")
    if hf.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act {hf['hidden_act']!r} is not supported: only 'silu' is")
    if hf.get("quantization_config"):
        raise ValueError("quantization_config is not supported: take the unquantised checkpoint")
    layers = hf.get("layer_types")  # newer configs say it per layer, older ones by the first layer that slides
    if layers is None and hf.get("use_sliding_window") and hf.get("sliding_window"):
        layers = ["sliding_attention"] * (hf.get("num_hidden_layers", 0) - hf.get("max_window_layers", 28))
    odd = sorted(set(layers or []) - {"full_attention"})
    if odd:
        raise ValueError(f"layers of type {', '.join(odd)} (use_sliding_window, layer_types) are not supported: "
                         "every layer must be full_attention")


def read_rope_scaling(hf: dict, max_seq_len: int) -> dict | None:
    """RoPE scaling of a config.json, in rope_scaling (older) or rope_parameters (newer), with every key filled in.
    None for plain RoPE. ValueError names the type or the key that is not supported or not there."""
    found = []
    for key in ("rope_scaling", "rope_parameters"):
        rope = {k: v for k, v in (hf.get(key) or {}).items() if v is not None}
        kind = rope.get("rope_type", rope.get("type", "default" if key == "rope_parameters" or not rope else None))
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise ValueError(f"partial_rotary_factor {rope['partial_rotary_factor']} in {key} is not supported")
        if kind == "default":
            continue
        if kind not in ROPE_KEYS:
            raise ValueError(f"{key} of type {kind!r} is not supported: only plain RoPE (null or 'default'), 'llama3' "
                             "and 'yarn' are")
        needed, optional = ROPE_KEYS[kind]
        odd = sorted(set(rope) - {"rope_type", "type", "rope_theta", "partial_rotary_factor", *needed, *optional})
        lacking = [name for name in needed if name not in rope]
        if odd or lacking:
            raise ValueError(f"{key} of type {kind!r} " + (f"with {', '.join(odd)} is not supported" if odd else
                                                           f"lacks {', '.join(lacking)}"))
        given = {**optional, **{name: rope[name] for name in (*needed, *optional) if name in rope}}
        if given["original_max_position_embeddings"] is None:
            given["original_max_position_embeddings"] = max_seq_len
        bad = [name for name, value in given.items() if value is not None and not (
            isinstance(value, (int, float)) and value > 0)]
        if bad or kind == "llama3" and given["low_freq_factor"] >= given["high_freq_factor"]:
            raise ValueError(f"{key} of type {kind!r} needs positive numbers, low_freq_factor below high_freq_factor; "
                             f"got {given}")
        found.append(dict(rope_type=kind, **given))
    if len(found) == 2 and found[0] != found[1]:
        raise ValueError("config.json gives two RoPE scalings, rope_scaling and rope_parameters: keep one")
    scaling = found[0] if found else None
    if scaling and scaling["rope_type"] == "yarn" and scaling["attention_factor"] is None:
        scaling["attention_factor"] = 0.1 * math.log(scaling["factor"]) + 1.0 if scaling["factor"] > 1 else 1.0
    return scaling


# ----------------------------------------------------------------------------- model

def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32 for bf16, fp16 and fp32; fp64 stays fp64, so that exact tests can run in it."""
    return torch.promote_types(dtype, torch.float32)


def rope_frequencies(head_dim: int, base: float, scaling: dict | None, device):
    """Angle per position of each channel pair, (D/2,) fp64. Scaled: channels that turn often within the context the
    model was first trained on stay, those that hardly turn are slowed down by `factor`, between them a blend:
    over the wavelength in llama3, over the channel number in yarn (arXiv 2309.00071)."""
    exponent = torch.arange(0, head_dim, 2, device=device, dtype=torch.float64) / head_dim
    plain = base ** -exponent
    if scaling is None:
        return plain
    context = scaling["original_max_position_embeddings"]
    if scaling["rope_type"] == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        keep = (context * plain / (2 * math.pi) - low) / (high - low)  # turns within the context, between low and high
    else:
        def channel(turns):  # the (real) channel pair that turns so often
            return head_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(base))
        first = max(math.floor(channel(scaling["beta_fast"])), 0)
        last = min(math.ceil(channel(scaling["beta_slow"])), head_dim - 1)
        pair = torch.arange(head_dim // 2, device=device, dtype=torch.float64)
        keep = 1 - (pair - first) / max(last - first, 1e-3)
    keep = keep.clamp(0, 1)
    return plain * (keep + (1 - keep) / scaling["factor"])


def rope_cos_sin(input_pos, head_dim: int, base: float, dtype: torch.dtype, scaling: dict | None = None):
    """cos, sin of shape (1, T, D/2), or (B, 1, T, D/2) when the rows have their own positions: both broadcast over
    (B, H, T, D/2). Angles are taken in fp64: at position 131,072 an fp32 angle is already off by 0.004 radians.
    YaRN also sharpens attention: its factor, on q and on k, goes into both tables."""
    frequency = rope_frequencies(head_dim, base, scaling, input_pos.device)
    angle = (input_pos.to(torch.float64)[..., None] * frequency).unsqueeze(-3)  # (1, T, D/2) or (B, 1, T, D/2)
    sharpen = (scaling or {}).get("attention_factor", 1.0)
    return (angle.cos() * sharpen).to(dtype), (angle.sin() * sharpen).to(dtype)


def apply_rotary_emb(x, cos, sin):
    """Rotate x (B, H, T, D), pairing channel i with i + D/2. A bf16 x times an fp32 cos is fp32: rounded once, at
    the end, back to the dtype of x."""
    x1, x2 = x.chunk(2, dim=-1)  # 2 x (B, H, T, D/2)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype)  # (B, H, T, D)


def causal_attend(layer, q, k, v):
    """Dense causal attention: q (B, H, T, D), k and v (B, H_kv, T, D) -> (B, H, T, D)."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.size(1) != k.size(1))


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, in fp32 and rounded once, in the dtype it came in."""

    def __init__(self, dim, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        acc = accumulation_dtype(x.dtype)
        return F.rms_norm(x.to(acc), self.weight.shape, self.weight.to(acc), self.eps).to(x.dtype)


def lay_side_by_side(parameters, dim=0):
    """Put parameters that multiply the same input into one buffer along dim, of which they become parts: one product
    then does for all of them, and no memory is added. -> the buffer."""
    fused = torch.cat([p.data for p in parameters], dim)
    for p, part in zip(parameters, fused.split([p.shape[dim] for p in parameters], dim)):
        p.data = part
    return fused


def linear(x, weight, bias=None):
    """F.linear. Compiled, of one token: a reduction, which on a GPU reads the weight nearer to the speed of the memory,
    and into which the compiler takes what comes before and after."""
    if bias is None and x.shape[:-1].numel() == 1 and torch.compiler.is_compiling():
        wide = torch.promote_types(x.dtype, torch.float32)
        return (x.flatten().to(wide) * weight.to(wide)).sum(-1).to(x.dtype).view(*x.shape[:-1], -1)
    return F.linear(x, weight, bias)


def side_by_side(x, linears, fused):
    """[part(x) for part in linears], in one product where their weights lie in `fused`, which has no gradient."""
    if fused is None or torch.is_grad_enabled():
        return [part(x) for part in linears]
    return linear(x, fused).split([part.out_features for part in linears], dim=-1)


class Attention(nn.Module):
    """Projections, q/k-norm and RoPE; the attention itself is `attend`'s."""

    def __init__(self, config):
        super().__init__()
        self.head_dim, bias = config.head_dim, config.attention_bias
        q_dim, kv_dim = config.n_head * config.head_dim, config.n_kv_head * config.head_dim
        self.q_proj = nn.Linear(config.n_embd, q_dim, bias=bias)
        self.k_proj = nn.Linear(config.n_embd, kv_dim, bias=bias)
        self.v_proj = nn.Linear(config.n_embd, kv_dim, bias=bias)
        self.o_proj = nn.Linear(q_dim, config.n_embd, bias=bias)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else nn.Identity()
        self.register_buffer("fused", None, persistent=False)  # see Transformer.fuse

    def qkv(self, x, cos, sin):
        """x (B, T, C) -> q (B, H, T, D), k and v (B, H_kv, T, D), all of one dtype, as a cache would hold them."""
        projected = side_by_side(x, (self.q_proj, self.k_proj, self.v_proj), self.fused)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in projected)
        q, k = self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2)  # (B, H, T, D), (B, H_kv, T, D)
        return apply_rotary_emb(q, cos, sin), apply_rotary_emb(k, cos, sin), v.transpose(1, 2)

    def out(self, y):
        """What was attended to, (B, H, T, D) -> (B, T, C)."""
        return linear(y.transpose(1, 2).flatten(2), self.o_proj.weight, self.o_proj.bias)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.n_embd, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.n_embd, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.n_embd, bias=config.mlp_bias)
        self.register_buffer("fused", None, persistent=False)  # see Transformer.fuse

    def forward(self, x):
        gate, up = side_by_side(x, (self.gate_proj, self.up_proj), self.fused)
        return linear(F.silu(gate) * up, self.down_proj.weight, self.down_proj.bias)


class Block(nn.Module):
    """Knows nothing of its own depth, so one compiled block serves all layers; `layer` only passes through."""
    compiled = False  # the two halves through torch.compile, once for all blocks of a shape; attend stays outside

    def __init__(self, config):
        super().__init__()
        self.input_layernorm = RMSNorm(config.n_embd, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.n_embd, config.norm_eps)
        self.mlp = MLP(config)

    def before(self, x, cos, sin):
        return self.self_attn.qkv(self.input_layernorm(x), cos, sin)

    def after(self, x, y):
        x = x + self.self_attn.out(y)
        return x + self.mlp(self.post_attention_layernorm(x))  # (B, T, C)

    def forward(self, x, cos, sin, attend, layer):
        before, after = COMPILED_HALVES if self.compiled else (Block.before, Block.after)
        return after(self, x, attend(layer, *before(self, x, cos, sin)))


COMPILED_HALVES = [torch.compile(half, dynamic=False, fullgraph=True) for half in (Block.before, Block.after)]


class Transformer(nn.Module):
    """The decoder. A caller may set `scorers`, an nn.ModuleList with one module per layer: it then trains, shards and
    moves with the model, while the base weights keep their names and save_model writes the base alone."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.checkpoint_blocks = False  # recompute each block in the backward: time for memory
        self.stream_dtype = None  # of x between blocks; None: the embedding's. bf16 beside fp32 weights under autocast
        self.model = nn.ModuleDict(dict(
            embed_tokens=nn.Embedding(config.vocab_size, config.n_embd),
            layers=nn.ModuleList(Block(config) for _ in range(config.n_layer)),
            norm=RMSNorm(config.n_embd, config.norm_eps)))
        if not config.tie_embeddings:
            self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        for name, parameter in self.named_parameters():  # GPT-2's init; norms stay at one
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))  # each layer adds two to the stream
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.n_layer) if residual else 0.02)

    def fuse(self):
        """For decoding: q, k and v become one product, gate and up another. Weights stay the same tensors by the same
        names, in new places, so call it after moving the model and before anything is captured in a CUDA graph."""
        for block in self.model.layers:
            attn, mlp = block.self_attn, block.mlp
            for part, linears in ((attn, (attn.q_proj, attn.k_proj, attn.v_proj)), (mlp, (mlp.gate_proj, mlp.up_proj))):
                if all(linear.bias is None for linear in linears):  # with biases it stays as it is
                    part.fused = lay_side_by_side([linear.weight for linear in linears])
        return self

    def rope(self, input_pos):
        """cos, sin for absolute positions (T,) or (B, T): what a caller needs to run a Block by itself."""
        dtype = accumulation_dtype(self.model.embed_tokens.weight.dtype)
        return rope_cos_sin(input_pos, self.config.head_dim, self.config.rope_base, dtype, self.config.rope_scaling)

    def forward(self, idx, attend, input_pos=None, run=None):
        """idx (B, T) int64 -> hidden (B, T, C), after the final norm.
        attend(layer: int, q (B, H, T, D), k (B, H_kv, T, D), v) -> (B, H, T, D), with q and k normed and rotated;
        input_pos (T,) or (B, T) int64: absolute positions, 0 .. T-1 when None. run(block, x, cos, sin, attend, layer):
        calls a block, compiled perhaps; None: as it is."""
        if input_pos is None:
            input_pos = torch.arange(idx.size(1), device=idx.device)  # (T,)
        cos, sin = self.rope(input_pos)
        x = self.model.embed_tokens(idx)  # (B, T, C)
        x = x if self.stream_dtype is None else x.to(self.stream_dtype)
        for layer, block in enumerate(self.model.layers):
            if self.checkpoint_blocks and torch.is_grad_enabled():
                x = checkpoint(block, x, cos, sin, attend, layer, use_reentrant=False,
                               preserve_rng_state=False)  # nothing random in it, and a CUDA graph could not
            elif run is not None:
                x = run(block, x, cos, sin, attend, layer)
            else:
                x = block(x, cos, sin, attend, layer)
        return self.model.norm(x)

    def unembed(self, hidden):
        """hidden (..., C) -> logits (..., V)."""
        head = self.model.embed_tokens if self.config.tie_embeddings else self.lm_head
        return F.linear(hidden, head.weight)


# ----------------------------------------------------------------------------- a step as a CUDA graph

class GraphedStep:
    """step(*tensors, **flags) -> dict of tensors, on a GPU as a CUDA graph after `warmup` ordinary calls.

    A training step is about a thousand small kernels, and launching them one by one takes longer than running them. The
    first calls are real steps; the next one is captured, and from then on inputs are copied into the captured
    tensors and the graph is replayed. One graph for each set of flags. What it returns is overwritten by the next call.
    A step that waits for the device, or whose shapes depend on data, raises at its capture.
    """

    def __init__(self, step, enabled, warmup=3):
        self.step, self.enabled, self.warmup = step, enabled, warmup
        self.calls, self.graphs = {}, {}
        self.stream = torch.cuda.Stream() if enabled else None

    def __call__(self, *inputs, **flags):
        if not self.enabled:
            return self.step(*inputs, **flags)
        key = (*flags.items(), *(x.shape for x in inputs))
        self.calls[key] = self.calls.get(key, 0) + 1
        if self.calls[key] <= self.warmup:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                out = self.step(*inputs, **flags)
            torch.cuda.current_stream().wait_stream(self.stream)
            return out
        if key not in self.graphs:
            static, graph = [x.clone() for x in inputs], torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.stream):
                out = self.step(*static, **flags)
            self.graphs[key] = graph, static, out
        graph, static, out = self.graphs[key]
        for mine, given in zip(static, inputs):
            mine.copy_(given)
        graph.replay()
        return out


# ----------------------------------------------------------------------------- checkpoints

def save_model(model: Transformer, folder, dtype: torch.dtype = torch.bfloat16, values: dict | None = None):
    """Write config.json and model.safetensors, base weights only, under temporary names and then renamed: a reader
    sees the old file or the new one. Compile blocks in place (block.compile()), or their names change and we refuse.
    values: a state dict to write in place of the model's own, which may be sharded."""
    from safetensors.torch import save_file
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in
               (values or model.state_dict()).items() if not name.startswith("scorers.")}
    compare_names(expected_shapes(model.config), {n: list(t.shape) for n, t in tensors.items()}, "the model to save")
    config = replace(model.config, dtype=str(dtype).removeprefix("torch."))
    weights, settings = (folder / f"{name}.{os.getpid()}.tmp" for name in ("model.safetensors", "config.json"))
    try:
        save_file(tensors, weights, metadata={"format": "pt"})
        settings.write_text(json.dumps(config.to_dict(), indent=2, sort_keys=True) + "\n")
        os.replace(weights, folder / "model.safetensors")
        os.replace(settings, folder / "config.json")
    finally:
        weights.unlink(missing_ok=True)
        settings.unlink(missing_ok=True)


def load_model(folder, device="cpu", dtype: torch.dtype = torch.float32) -> Transformer:
    """Read a checkpoint folder: config.json with model.safetensors, or shards named by model.safetensors.index.json.
    Names, shapes and file lengths are compared with the config before a weight is allocated or read; FileNotFoundError
    or ValueError names what is wrong. Peak memory: the weights and one tensor."""
    from safetensors import safe_open
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"no checkpoint folder {str(folder)!r}: give a local folder with config.json and "
                                "model.safetensors")
    config = ModelConfig.from_dict(read_json(folder / "config.json"))
    found, where = {}, {}
    for file in weight_files(folder):
        for name, entry in read_header(folder / file).items():
            if name in where:
                raise ValueError(f"{name} is stored twice, in {where[name]} and in {file}")
            if not name.endswith(".rotary_emb.inv_freq"):  # old Llama files keep this table; we compute it
                found[name], where[name] = entry["shape"], file
            if entry["dtype"] not in ("F64", "F32", "F16", "BF16"):
                raise ValueError(f"{name} in {file} is stored as {entry['dtype']}: only floating point weights load")
    expected = expected_shapes(config)

    def read(name):
        with safe_open(folder / where[name], framework="pt") as handle:
            return handle.get_tensor(name)

    tied_head = config.tie_embeddings and "lm_head.weight" in found
    if tied_head:  # some tools store the tied head as well; harmless as long as it is the embedding
        expected["lm_head.weight"] = expected["model.embed_tokens.weight"]
    compare_names(expected, found, str(folder))
    if tied_head:
        head, embedding = read("lm_head.weight"), read("model.embed_tokens.weight")
        if head.dtype != embedding.dtype or not torch.equal(head, embedding):
            raise ValueError(f"{folder}: config.json ties the head to the embedding, but lm_head.weight differs from "
                             "model.embed_tokens.weight: set tie_word_embeddings to false or drop lm_head.weight")
        del head, embedding
    with torch.device("meta"):
        model = Transformer(config).to(dtype)
    model.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(read(name))
    return model


def resolve_checkpoint(name: str, revision: str | None = None) -> Path:
    """Local folder of a checkpoint: `name` itself, or the files of a Hugging Face hub id "owner/model", from the local
    cache without a connection if they are all there, else fetched into it. FileNotFoundError in one sentence when
    there is no such folder and it cannot be fetched."""
    if Path(name).is_dir():
        return Path(name)
    if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(name)):
        raise FileNotFoundError(f"no checkpoint folder {str(name)!r}, and it is no hub id (owner/model)")
    try:
        from huggingface_hub import constants, snapshot_download
    except ImportError:
        raise FileNotFoundError(f"no checkpoint folder {name!r}; to fetch it as a hub id, pip install datasets, which "
                                "brings huggingface_hub") from None
    wanted = dict(repo_id=name, revision=revision, allow_patterns=["*.json", "*.safetensors", "*.jinja"],
                  ignore_patterns=["*/*"])

    def fetch(**how):
        folder = Path(snapshot_download(**wanted, **how))
        weight_files(folder), read_json(folder / "config.json")  # without a network it may give back a part
        return folder
    try:
        return fetch(local_files_only=True)
    except FileNotFoundError:
        pass  # not there, or only in part
    try:
        return fetch()
    except Exception as error:  # many kinds: no network, no such id, gated, disk full
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise FileNotFoundError(f"no folder {name!r} here, it is not whole in the cache {constants.HF_HUB_CACHE}, and "
                                f"fetching it from the hub failed: {first}") from None


def copy_companions(source, target):
    """Copy the files that make a checkpoint usable beside its weights (tokenizer, chat template, sampling)."""
    for name in COMPANIONS:
        if (Path(source) / name).is_file() and Path(source).resolve() != Path(target).resolve():
            partial = Path(target) / f"{name}.{os.getpid()}.tmp"
            shutil.copyfile(Path(source) / name, partial)
            os.replace(partial, Path(target) / name)


def weight_files(folder: Path) -> list[str]:
    """The safetensors files of a checkpoint, or one sentence that says how to get some."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return ["model.safetensors"]
    if index.is_file():
        weight_map = read_json(index).get("weight_map", {})
        files = sorted(set(weight_map.values()))
        gone = [file for file in files if not (folder / file).is_file()]
        if gone:
            names = [name for name, file in weight_map.items() if file in gone]
            raise FileNotFoundError(f"{folder} lacks {listed(gone)}, which {index.name} gives for {listed(names)}")
        return files
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
    if pickles:
        raise ValueError(f"{folder} holds a pickle ({listed(pickles)}), which can run any code when opened: convert "
                         "it with torch.load(file, weights_only=True) and safetensors.torch.save_file")
    raise FileNotFoundError(f"{folder} has neither model.safetensors nor model.safetensors.index.json")


def read_header(path: Path) -> dict:
    """Header of a safetensors file: {name: {dtype, shape, data_offsets}}; ValueError when cut short or damaged."""
    from safetensors import SafetensorError, safe_open
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        raw = file.read(min(length, size))
    if not raw or len(raw) < length:
        raise ValueError(f"{path} is truncated or no safetensors file: its header does not fit in {size} bytes")
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        cut = [name for name, entry in header.items() if 8 + length + entry["data_offsets"][1] > size]
        if not cut:
            safe_open(path, framework="pt").__exit__(None, None, None)  # the library's own checks; reads no weights
    except (ValueError, AttributeError, TypeError, LookupError, SafetensorError) as error:
        raise ValueError(f"{path} is no valid safetensors file: {error}") from None
    if cut:
        raise ValueError(f"{path} is truncated: the data of {listed(cut)} end after its {size} bytes; fetch it again")
    return header


def fingerprint(*folders):
    """CRC-32, 8 hex digits, of all weights in these folders, shards included: a row of a checkpoint trained anew is not
    taken for it."""
    crc = 0
    for path in sorted({path for f in folders for path in Path(f).glob("*.safetensors")}):
        with open(path, "rb") as file:
            while piece := file.read(2**26):
                crc = zlib.crc32(piece, crc)
    return f"{crc:08x}"


def read_json(path: Path) -> dict:
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent} has no {path.name}")
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return content


def write_json(path: Path, content):
    """Whole or not at all."""
    partial = path.with_name(f"{path.name}.tmp")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(partial, path)


def expected_shapes(config: ModelConfig) -> dict:
    with torch.device("meta"):
        return {name: list(parameter.shape) for name, parameter in Transformer(config).named_parameters()}


def compare_names(expected: dict, found: dict, where: str):
    """ValueError with every missing, extra and mis-shaped tensor in one sentence."""
    shaped = [f"{name} {found[name]} instead of {expected[name]}" for name in expected
              if name in found and found[name] != expected[name]]
    problems = [f"{label} {listed(names)}" for label, names in
                (("missing", [n for n in expected if n not in found]),
                 ("extra", [n for n in found if n not in expected]), ("mis-shaped", shaped)) if names]
    if problems:
        raise ValueError(f"{where} does not fit its config: {'; '.join(problems)}")


def listed(names: list, most: int = 6) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
