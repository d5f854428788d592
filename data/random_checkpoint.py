"""bench.py checkpoint: a sharded checkpoint of a model's shape with random weights, to try train.py and decode.py at
full size without anybody's weights.

- `write_checkpoint`: config.json, shards and their index as large checkpoints have them, one shard in memory at a time;
- `checkpoint`: the command; `register` gives it to bench.py.
"""
import math
import os
from pathlib import Path

import torch
from safetensors.torch import save_file

from data.speed import add_options
from data.speed_decode import SHAPES, shape_of
from model import COMPANIONS, DTYPES, copy_companions, expected_shapes, write_json

SHARD = 2**32  # bytes of a shard, at most, but for a tensor that is larger


def write_checkpoint(folder, config, shard_bytes=SHARD, seed=0):
    """Random weights in config.dtype: norms 1, matrices normal with std 1 / sqrt(columns), so that numbers keep their
    size from layer to layer. The index, without which nobody reads the shards, is written last. -> bytes of weights.
    ValueError for a folder that holds a model already."""
    folder, dtype = Path(folder), DTYPES[config.dtype]
    if any(folder.glob("*.safetensors*")):
        raise ValueError(f"--out {folder} holds a model already: choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    shapes, itemsize, shards, room = expected_shapes(config), dtype.itemsize, [[]], shard_bytes
    for name, shape in shapes.items():
        size = math.prod(shape) * itemsize
        if size > room and shards[-1]:
            shards, room = [*shards, []], shard_bytes
        shards[-1].append(name)
        room -= size
    generator, where = torch.Generator().manual_seed(seed), {}
    for i, names in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: torch.empty(shapes[name], dtype=dtype) for name in names}
        for tensor in tensors.values():
            tensor.normal_(std=tensor.shape[1]**-0.5, generator=generator) if tensor.dim() == 2 else tensor.fill_(1.0)
        save_file(tensors, folder / f"{file}.tmp", metadata={"format": "pt"})
        os.replace(folder / f"{file}.tmp", folder / file)
        where |= dict.fromkeys(names, file)
    total = sum(math.prod(shape) for shape in shapes.values()) * itemsize
    write_json(folder / "config.json", config.to_dict())
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": where})
    return total


def checkpoint(args):
    """Write a checkpoint of a model's shape with random weights in bf16, in shards. It says nothing, but loads, trains
    and decodes as a real one. --tokenizer: a folder whose tokenizer is copied, which --data and chats need; it may have
    fewer tokens than the model."""
    config = shape_of(args.shape)
    if args.layers < 0 or not 0 < args.shard_gb < math.inf:
        raise ValueError(f"--layers must not be below 0, and --shard-gb above 0, got {args.layers} and {args.shard_gb}")
    if Path(args.out).is_file():
        raise ValueError(f"--out {args.out} is a file: choose a folder")
    config.dtype, config.n_layer = "bfloat16", args.layers or config.n_layer
    if args.tokenizer and not (Path(args.tokenizer) / "tokenizer.json").is_file():
        raise ValueError(f"--tokenizer {args.tokenizer} has no tokenizer.json")
    total = write_checkpoint(args.out, config, int(args.shard_gb * 1e9), args.seed)
    if args.tokenizer:
        copy_companions(args.tokenizer, args.out)
    print(f"wrote {args.out}: {total / 1e9:.3g} GB of weights"
          + ("" if args.tokenizer else f"; no tokenizer, which would be {COMPANIONS[0]} and {COMPANIONS[1]}"))


def register(names):
    add_options(names, checkpoint, "random weights of a model's shape, as a sharded checkpoint", {
        "--shape": ("qwen3-4b", "of the model", dict(choices=list(SHAPES))),
        "--layers": (0, "how many; 0: as many as the shape has", dict(type=int)),
        "--out": ("out/random", "folder to write", {}),
        "--tokenizer": (None, "folder to copy the tokenizer from", {}),
        "--shard-gb": (SHARD / 1e9, "bytes of a shard, in 10^9", dict(type=float)),
        "--seed": (0, "of the weights", dict(type=int))})
