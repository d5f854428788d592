"""The scorers of a retrofit as files: scorer.safetensors with the weights, scorer.json with what they are.

What this file holds: save_scorers, load_scorers; sizes, check_scorers and check_window, whether they fit.
Nothing is unpickled, and nothing that does not fit is loaded.
Weights are used in fp32; in the file they may be fp16, half the size.
"""
import json
import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from scorer import make_scorers

STORED = {torch.float32: "F32", torch.float16: "F16"}  # what a file may hold, and what safetensors calls it


def save_scorers(scorers, folder, spec_dict, values=None, dtype=torch.float32):
    """Write scorer.safetensors (in `dtype`, whatever the one in use) and scorer.json; both appear whole or not at all.
    spec_dict: n_sink, window, budget (and more if you like), stored beside the policy, its sizes and options.
    values: state dict of the model they belong to, written in place of their own weights, which may be sharded.
    ValueError: a setting missing, layers that differ, a window that is not the scorers' own, another dtype than fp32 or
    fp16, a weight that is not finite in it."""
    first, folder = scorers[0], Path(folder)
    if missing := {"n_sink", "window", "budget"} - spec_dict.keys():
        raise ValueError(f"save_scorers: the settings lack '{min(missing)}'")
    if any((s.name, s.options) != (first.name, first.options) for s in scorers):
        raise ValueError("save_scorers: all layers must have the same policy and options")
    if dtype not in STORED:
        raise ValueError(f"save_scorers: {dtype} is not supported: store float32 or float16")
    check_window(scorers, spec_dict["window"])
    settings = {"policy": first.name, "n_layer": len(scorers), "n_kv_head": first.n_kv_head, "head_dim": first.head_dim,
                **spec_dict, "options": first.options}
    tensors = {f"{i}.{name}": values[f"scorers.{i}.{name}"] if values else p
               for i, s in enumerate(scorers) for name, p in s.named_parameters()}
    tensors = {name: p.detach().to("cpu", dtype, copy=True).contiguous() for name, p in tensors.items()}
    if odd := [name for name, p in tensors.items() if not p.isfinite().all()]:
        raise ValueError(f"save_scorers: {odd[0]} is not finite in {str(dtype)[6:]}")
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "scorer.safetensors.tmp", metadata={"format": "pt"})
    os.replace(folder / "scorer.safetensors.tmp", folder / "scorer.safetensors")
    (folder / "scorer.json.tmp").write_text(json.dumps(settings, indent=2) + "\n")
    os.replace(folder / "scorer.json.tmp", folder / "scorer.json")


def load_scorers(folder):
    """-> (ModuleList with one scorer per layer, on CPU in fp32; settings dict of scorer.json).
    FileNotFoundError: a file is missing. ValueError: a pickle in its place, an unreadable file, and every tensor that
    is missing, unknown or of another shape or dtype than fp32 and fp16, by name, before any is read."""
    folder, path = Path(folder), Path(folder) / "scorer.safetensors"
    pickles = sorted(p for p in folder.glob("*") if p.suffix in (".bin", ".pt", ".pth", ".pkl", ".ckpt"))
    if pickles and not path.is_file():
        raise ValueError(f"{pickles[0]} is a pickle, and those can run code: convert it to safetensors")
    for name in ("scorer.safetensors", "scorer.json"):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"no scorer in {folder}: {name} is missing")
    try:
        settings = json.loads((folder / "scorer.json").read_text())
        args = {key: settings[key] for key in ("policy", "n_kv_head", "head_dim", "window")} | settings["options"]
        scorers = make_scorers(**args, n_layer=settings["n_layer"])
    except (json.JSONDecodeError, KeyError, TypeError) as err:
        raise ValueError(f"{folder / 'scorer.json'} is not a scorer description: {err!r}") from None
    want = {name: list(p.shape) for name, p in scorers.named_parameters()}
    try:
        with safe_open(path, framework="pt") as f:
            have = {name: (f.get_slice(name).get_shape(), f.get_slice(name).get_dtype()) for name in f.keys()}
            wrong = [f"{name} is missing" for name in want if name not in have]
            wrong += [f"{name} is {dtype} {shape}, not F32 or F16 {want[name]}" if name in want else
                      f"{name} is not ours" for name, (shape, dtype) in have.items()
                      if shape != want.get(name) or dtype not in STORED.values()]
            if wrong:
                raise ValueError(f"{path} does not fit scorer.json: " + "; ".join(wrong))
            tensors = {name: f.get_tensor(name).float() for name in have}
    except SafetensorError as err:
        raise ValueError(f"{path} is not a whole safetensors file ({err}); copy or convert it again") from None
    scorers.load_state_dict(tensors)
    return scorers, settings


def check_window(scorers, window):
    """ValueError when a learned scorer was trained with another window."""
    for s in scorers:
        if s.window is not None and s.window != window:
            raise ValueError(f"the {s.name} scorer of layer {s.layer} was trained with window {s.window}, "
                             f"not {window}: use window {s.window} or train another")


def sizes(scorers, config):
    """(layers, KV heads, head_dim) of the scorers, and of the model: the same where they fit."""
    return ((len(scorers), scorers[0].n_kv_head, scorers[0].head_dim),
            (config.n_layer, config.n_kv_head, config.head_dim))


def check_scorers(scorers, config, spec):
    """ValueError when the scorers do not fit the model or were trained with another window."""
    found, wanted = sizes(scorers, config)
    if found != wanted:
        raise ValueError(f"the scorers fit a model with (layers, KV heads, head_dim) = {found}, this one has {wanted}: "
                         "take both from one folder")
    check_window(scorers, spec.window)
