"""The scorers of all layers as one: what a decode step can do for all layers at once, in a few large kernels.

For one token a layer has little to do: scoring took seven kernels, each as long as a launch and not as its work. But
most of it does not need the newest token: who leaves the window is known a step before, the feature it is read with,
its own part of the score, what the memory gives it, and whom the cache would give up. LayerCache.ahead finds that for
the heads of all layers when the last step has ended, LayerCache.record writes what need not be there for the attention,
and between them a layer only has to project one key and value, to compare, and to write these two (decode.py).
"""
import copy

import torch
from torch import nn

from data.products import FEW_ROWS


class Together(nn.ModuleList):
    """Scorers, one a layer; `one`: a scorer whose heads are theirs, layer after layer, and whose weights are theirs."""


def fuse_scorers(scorers, rows=1, dtype=None):
    """As model.fuse, for scorers: a step lays no weights together, and where a policy's scores depend on no layer's
    number its layers decide together. rows, dtype: of the cache. -> the scorers to use. Call it last of all, and again
    after a copy, another device or another dtype; bf16 terms do not follow changes either (scorer.MLSTM.fuse)."""
    if scorers is None or not len(scorers):
        return scorers
    first, narrow = scorers[0], dtype == torch.bfloat16 and rows > FEW_ROWS
    if first.dynamic or first.by_layer or first.shift >= (first.window or 1):
        return scorers
    fused, one = Together(scorers), copy.deepcopy(first)
    fused.__dict__["one"] = one  # no module of it: its weights would count twice
    one.n_kv_head *= len(scorers)
    for name, p in one.named_parameters():
        p.data = torch.cat([getattr(s, name).data for s in scorers])
    if hasattr(one, "fuse"):
        one.fuse(narrow)
    for i, s in enumerate(scorers):  # no memory is added: theirs are parts
        for name, p in s.named_parameters():
            p.data = getattr(one, name).data.unflatten(0, (len(scorers), -1))[i]
        for name, buffer in one._buffers.items():
            setattr(s, name, buffer if buffer is None else buffer.unflatten(0, (len(scorers), -1))[i])
    return fused


def parts_of(whole, scorers, input_pos):
    """-> the slots of each layer, parts of `whole`'s, with room for what is `due`: found, by its shapes, from a step at
    input_pos (B,). ValueError when the layers' weights are no longer those of the whole."""
    for name, p in whole.scorer.named_parameters():
        if any(getattr(s, name).untyped_storage().data_ptr() != p.untyped_storage().data_ptr() for s in scorers):
            raise ValueError(f"{name} of the scorers was copied, moved or cast after fuse_scorers: call it again")
    first = part(whole, 0, scorers)
    token = first.k_cache[:, :, 0].zero_()  # (B, H_kv, D)
    with torch.no_grad():
        due = first.ahead(input_pos)
        due |= first.decide(due, token, token, input_pos)
    whole.due = {name: z.new_zeros(len(z), whole.h.numel(), *z.shape[2:]) for name, z in due.items()}
    return [part(whole, i, scorers) for i in range(len(scorers))]


def part(whole, i, scorers):
    """The slots of layer i."""
    cut = lambda z: z.unflatten(1, (len(scorers), -1))[:, i]  # noqa: E731  (B, L * H_kv, ..) -> (B, H_kv, ..)
    layer = copy.copy(whole)
    layer.scorer, layer.h = scorers[i], whole.h[:, :whole.h.numel() // len(scorers)]
    layer.k_cache, layer.v_cache = whole.k_cache[i], whole.v_cache[i]
    for name in ("priority", "position", "ring"):
        setattr(layer, name, cut(getattr(whole, name)))
    for name in ("state", "due"):
        held = getattr(whole, name)
        setattr(layer, name, held and {key: cut(z) for key, z in held.items()})
    return layer


def at_slot(cache, b, h, slot):
    """One entry of each head: cache (B, H_kv, N, D) of a layer or (L, B, H_kv, N, D) of all, one after the other, where
    attention wants them; b (B, 1), h (1, heads), slot (B, heads) -> (B, heads, D)."""
    if cache.dim() == 4:
        return cache[b, h, slot]
    L, H = cache.shape[0], cache.shape[2]
    layer = torch.arange(L, device=slot.device)[:, None]
    return cache[layer, b[..., None], h[:, :H], slot.unflatten(1, (L, H))].flatten(1, 2)
