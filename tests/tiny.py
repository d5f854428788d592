"""Tiny random models and scorers that several test files share."""
import json
from pathlib import Path

import torch

from model import ModelConfig, Transformer, save_model
from scorer import make_scorers

FIXTURES = Path(__file__).parent / "fixtures"
TEMPLATES = json.loads((FIXTURES / "chats.json").read_text())["templates"]


def tiny_transformer(seed, **changes):
    """Two layers of width 32. Weights of 0.3 and not of the usual init: attention is sharp, so what a mask hides
    matters."""
    torch.manual_seed(seed)
    model = Transformer(ModelConfig(**{**dict(vocab_size=264, n_layer=2, n_embd=32, n_head=4, n_kv_head=2, head_dim=8,
                                              intermediate_size=48, max_seq_len=1024), **changes}))
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.normal_(std=0.3)
    return model


def tiny_scorers(policy, noise=None, window=8, **options):
    """Scorers for tiny_transformer; noise: seed of what is added to their weights, None to leave them as they start."""
    scorers = make_scorers(policy, n_layer=2, n_kv_head=2, head_dim=8, window=window, **options)
    if noise is not None:
        torch.manual_seed(noise)
        with torch.no_grad():
            for p in scorers.parameters():
                p.add_(0.3 * torch.randn_like(p))
    return scorers


def make_folder(folder, kind="qwen3", template=True, generation=None, **changes):
    """A tiny random checkpoint with the cut-down tokenizer of a family, its template and its sampling."""
    save_model(tiny_transformer(5, **{**dict(vocab_size=896, max_seq_len=2048, qk_norm=kind == "qwen3",
                                             model_type="qwen3" if kind == "qwen3" else "llama"), **changes}),
               folder, torch.float32)
    (folder / "tokenizer.json").write_text((FIXTURES / "tokenizers" / f"small-{kind}.json").read_text())
    settings = dict(eos_token="<|im_end|>", **(dict(chat_template=TEMPLATES[kind]) if template else {}))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder
