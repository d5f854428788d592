"""Batches of generated problems for training: packed rows for a base model, whole problems for a retrofit.

Everything follows from (seed, row number), so a resumed run sees what an uninterrupted one would have seen, and worker
processes share nothing. Source of the problems: data/traces.py. Letters: B batch, T tokens.
"""
import math
import os
import zlib

import torch

from data.parallel import rank, world_size
from data.tokenizer import EOT
from data.traces import FAMILIES, MAX_LENGTH, TEST_SIZES, make_problem, worth_keeping

# arith is the harder of the two; a little of the diagnostic family, so that one base serves all three
PRETRAIN_MIX = ("arith", "arith", "walk") * 3 + ("mark",)


class PackedRows(torch.utils.data.Dataset):
    """Row i of pretraining: problems of all families one after the other, cut at `length` tokens.

    -> idx, targets (length,) int64, weight (length,) fp32, evict_at (length,) int32: the position after a token's
    document, so packing needs no mask of its own. In a share `forget` of the documents, spent scratch (what is not
    `worth_keeping`) goes unseen after `window` tokens. Without that a small model does its sums by looking up
    equal ones that it wrote before, and then every byte of scratch matters and no small cache can hold what it reads.
    """

    def __init__(self, length, seed, prompt_weight, forget=0.0, window=64):
        self.length, self.seed, self.prompt_weight = length, seed, prompt_weight
        self.forget, self.window = forget, window

    def __len__(self):
        return 2**31

    def __getitem__(self, row):
        ids, weight, evict_at, j = [], [], [], 0
        while len(ids) <= self.length:
            number = (self.seed * 10**9 + row) * 64 + j  # a row holds fewer than 64 problems
            problem = make_problem(PRETRAIN_MIX[(row + j) % len(PRETRAIN_MIX)], number, "train")
            tokens = [*(problem.prompt + problem.trace).encode(), EOT]
            ids += tokens
            # the weight of predicting the NEXT token: the last token of a document predicts nothing
            weight += [self.prompt_weight] * (len(problem.prompt) - 1) + [1.0] * (len(problem.trace) + 1) + [0.0]
            start, end = len(ids) - len(tokens), len(ids)
            keep = [True] * len(tokens)
            if zlib.crc32(str(number).encode()) < self.forget * 2**32:
                keep = worth_keeping(problem) + [True]
            evict_at += [end if k else min(end, start + i + self.window) for i, k in enumerate(keep)]
            j += 1
        n = self.length
        return (torch.tensor(ids[:n]), torch.tensor(ids[1:n + 1]), torch.tensor(weight[:n]),
                torch.tensor(evict_at[:n], dtype=torch.int32))


class Problems(torch.utils.data.Dataset):
    """Row i of the retrofit: one whole problem of full size; even rows arith, odd rows walk."""

    def __init__(self, split, seed, families=FAMILIES):
        self.split, self.seed, self.families = split, seed, families

    def __len__(self):
        return 2**31

    def __getitem__(self, row):
        family = self.families[row % len(self.families)]
        low, high = TEST_SIZES[family]  # the train split has small ones too; a cache must learn to hold long problems
        size = low + zlib.crc32(str(row).encode()) % (high - low + 1)
        return make_problem(family, self.seed * 10**9 + row, self.split, size)


def collate_problems(problems, pad_to=None):
    """-> idx (B, T) int64 right-padded with EOT, lengths (B,), starts (B,): the first predicted position is the
    last token of the prompt. T is the longest row, or the next multiple of pad_to, so that a GPU meets few shapes."""
    rows = [[*(p.prompt + p.trace).encode(), EOT] for p in problems]
    lengths = torch.tensor([len(r) for r in rows])
    T = int(lengths.max())
    if pad_to:
        T = math.ceil(T / pad_to) * pad_to
    idx = torch.full((len(rows), T), EOT)
    for i, r in enumerate(rows):
        idx[i, :len(r)] = torch.tensor(r)
    return idx, lengths, torch.tensor([len(p.prompt) - 1 for p in problems])


def loader(dataset, settings, first_step, collate=None):
    """Micro-batches of this process, settings.accumulate a step, from first_step on. Step s has the rows from
    s * global_batch on, and its micro-batches go round the processes: which rows make a step, and which of them a
    micro-batch, depends on processes * accumulate alone."""
    size = global_batch(settings)
    rows = [step * size + first_row(settings, micro) + i for step in range(first_step, settings.steps)
            for micro in range(settings.accumulate) for i in range(settings.batch_size)]
    return torch.utils.data.DataLoader(dataset, batch_size=settings.batch_size, sampler=rows, collate_fn=collate,
                                       num_workers=settings.workers, worker_init_fn=lead_a_group,
                                       prefetch_factor=8 if settings.workers else None)


def lead_a_group(worker):
    """For a loader of batches: out of the group of the process that it serves. torchrun ends whole groups, and Ctrl-C
    too; that process means to finish its step and save, and ends its loaders itself."""
    os.setsid()


def global_batch(settings):
    """Rows a step, over all processes and micro-batches."""
    return settings.batch_size * world_size() * settings.accumulate


def first_row(settings, micro):
    """Number within the global batch of the first row of this process's micro-batch `micro`."""
    return (micro * world_size() + rank()) * settings.batch_size


def response_mask(T, lengths, starts):
    """(B, T) bool: positions whose next token belongs to the trace or is its end."""
    t = torch.arange(T, device=lengths.device)
    return (t >= starts[:, None]) & (t < lengths[:, None] - 1)


def problem_batches(n, device, batch_size, split, families):
    """Batches of whole problems, n a family, sorted by length to save padding: idx, lengths, starts, problems."""
    problems = [make_problem(family, i, split) for family in families for i in range(n)]
    problems.sort(key=lambda p: len(p.prompt) + len(p.trace))
    for i in range(0, len(problems), batch_size):
        part = problems[i:i + batch_size]
        idx, lengths, starts = collate_problems(part, MAX_LENGTH if device == "cuda" else None)
        yield idx.to(device), lengths.to(device), starts.to(device), part
