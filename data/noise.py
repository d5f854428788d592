"""Noise without a generator: random numbers that are a function of where they stand, for policies that draw."""
import torch


def mix(x):
    """A 32-bit integer hash on int64 (tensor or int). Both multipliers are below 2^31, so no product leaves int64."""
    x = x & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x045D9F3B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def hash_uniform(seed, layer, n_head, pos):
    """Counter-based noise: pos (..., n_head or 1, T) int -> (..., n_head, T) fp32 in [0, 1), a pure function of its
    arguments: the same bits on every device and in both forms of a scorer, which no stateful generator can promise."""
    h = torch.arange(n_head, device=pos.device)[:, None]  # (n_head, 1)
    h = mix(mix(mix(seed + 0x9E3779B9) ^ mix(layer + 0x3C6EF372)) ^ mix(h + 0x1B873593))
    h = mix(h ^ mix(pos.long() + 0x2545F491))  # (..., n_head, T)
    return (h >> 8).float() * 2.0**-24  # 24 bits: exact in fp32, never rounds up to 1.0
