"""Train a base model on generated traces, or retrofit a model with KVpop.

    python train.py                           the scorer alone on the shipped base; any device, minutes on two cores
    python train.py --train-base              the full retrofit: every weight, KL from the model's own dense copy
    python train.py --train-base --policy streaming      a control: the base adapts to a policy that learns nothing
    python train.py --stage pretrain          make the base model itself
    python train.py --model FOLDER_OR_HUB_ID --data TEXT   the same for a real checkpoint, on real text
    torchrun --nproc-per-node 8 train.py ... --parallel fsdp       any of them on many processes, one a GPU

What this file holds: Settings (every knob, its default and its reason), the losses, the step, the two loops. The
attends are in targets.py, the rows in data/batches.py and data/text.py, evaluations in data/evaluation.py, the output
folder in data/run.py, and what many processes need in data/parallel.py.
How it departs from nanoGPT's train.py: the attention mask comes from the scorer under training, and the loss of the
scorer is not a term of the forward: it runs in the backward of `targets.RetentionLoss`. Weights go out as safetensors
that decode.py reads; a single train_state.pt beside them, tensors and numbers only, resumes the run.
"""
import argparse
import functools
import math
import os
import sys
import time
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import scorer as scorers_module
from data import parallel
from data.batches import PackedRows, Problems, collate_problems, first_row, global_batch, loader, response_mask
from data.chat import chat_style
from data.evaluation import autocast, evaluate, evaluate_text
from data.facts import FactRows
from data.prompts import tokenizer_of
from data.resolve import resolve_start
from data.run import Run, checked, finite, print_before_after, report
from data.teacher import TaughtRows, checksum
from data.text import TextRows, collate_rows, read_header, token_folder
from data.tokenizer import EOT
from data.traces import ALPHABET, FAMILIES, MAX_LENGTH
from flex_masks import CacheSpec, attention, attention_tables
from model import GraphedStep, ModelConfig, Transformer, causal_attend, fingerprint, load_model, read_json
from targets import (LISTWISE_SHARE, POWER, Retention, counted_rows, gate_shortfall, gated_attend, training_attend)

ADAPTED = ("streaming", "random", "knorm")  # nothing to learn but the base: with --train-base the `-plus` rows


def option(default, reason, **extra):
    return field(default=default, metadata={"reason": reason, **extra})


@dataclass
class Settings:
    """Every knob with its default and its reason. None: the stage's preset below decides."""
    stage: str = option("retrofit", "pretrain makes a base model, retrofit adds KVpop to one",
                        choices=["retrofit", "pretrain"])
    model: str = option("assets/base", "checkpoint or retrofit to begin with: a folder, or with --data also a hub id")
    out: str = option("out/kvpop", "folder for checkpoint, training state and log")
    train_base: bool = option(False, "train every weight: KL from the dense teacher adapts the base to the mask")
    resume: bool = option(False, "continue from the training state in --out")
    device: str = option("auto", "auto, cpu or cuda", choices=["auto", "cpu", "cuda"])
    seed: int = option(0, "weights, data order and sampled boundaries all follow from it")
    policy: str = option("kvpop", "which scorer learns, or with --train-base to which mask the base adapts",
                         choices=["kvpop", "kvpop-mlp", "kvpop-nodelay", "position", "dms-cap", *ADAPTED])
    families: str = option("both", "problems of the retrofit", choices=["both", *FAMILIES, "mark"])
    data: str = option("", "real text to train on: a token folder of data/text.py; or .txt, .jsonl or .parquet, a "
                           "folder of them or a hub data set, tokenised on first use")
    field: str = option("text", "of a row of --data: text, or a list of messages")
    split: str = option("train", "of a hub data set; several are joined by +")
    subset: str = option("", "of a hub data set")
    teacher: str = option("", "with --data and --train-base: folder for the teacher's top logits, written on first "
                              "use; the teacher is then not in memory, and its forward is not run")
    tokens: str = option("", "folder for the tokens made of --data; none: tokens in --out")
    facts: float = option(0.0, "share of the training rows of --data that tell facts and ask for them much later: text "
                               "alone seldom needs again what it said once")
    held_out: float = option(0.02, "share of the documents of --data that evaluation has for itself")
    max_tokens: int = option(100_000_000, "of --data: tokenising stops there; a hub data set can be without end")
    context: int = option(0, "tokens a row of --data; 0: 2048, or what the model was trained on if that is less")
    budget: int = option(256, "entries a KV head may hold, everything included; problems have about 2,040 tokens")
    budget_start: int = option(0, "the budget falls from this to --budget over the first half of the run; 0 = constant")
    n_sink: int = option(4, "first tokens, never evicted: models park attention there")
    window: int = option(64, "recent tokens, the query included, never evicted")
    steps: int = option(None, "optimiser steps")
    batch_size: int = option(None, "rows of a micro-batch, of one process: a step takes batch_size * processes * "
                                   "accumulate rows, the same ones in the same order for an equal product")
    accumulate: int = option(1, "micro-batches of a process before its gradients meet the others' and a step is made")
    parallel: str = option("ddp", "under torchrun: ddp keeps everything on each GPU; fsdp spreads weights, their copy "
                                  "that teaches, gradients and moments over all", choices=["ddp", "fsdp"])
    learning_rate: float = option(None, "peak, of new parameters (scorer) or of the base in pretraining")
    base_learning_rate: float = option(5e-4, "peak, of the base under --train-base; the paper's 8e-5 is for billions")
    base_schedule: str = option("cosine", "of the base; the paper holds it constant, a small model ends better decayed",
                                choices=["cosine", "constant"])
    warmup: int = option(None, "steps; never more than a tenth of the run")
    final_lr_ratio: float = option(0.08, "cosine ends at this share of the peak")
    weight_decay: float = option(None, "AdamW; the paper has 1e-4")
    clip: float = option(1.0, "gradient norm")
    listwise_share: float = option(LISTWISE_SHARE, "of listwise_loss in the scorer's loss; 0: boundary loss alone")
    n_samples: int = option(128, "boundaries a sequence and head at which the scorer is taught")
    tau: float = option(1.0, "temperature of the boundary loss")
    bounded: bool = option(True, "future mass of an evicted token as if it were put back (targets.py)")
    target_power: float = option(POWER, "power mean over future queries in the target; 1 is the paper's mean mass")
    top_k: int = option(256, "teacher logits that the KL sees, renormalised")
    kl_rest: bool = option(False, "and all other tokens as one more, so that their share stays what it was")
    prompt_weight: float = option(0.1, "loss weight of prompt tokens in pretraining: they are mostly random")
    forget: float = option(0.5, "share of pretraining documents that lose sight of spent scratch after the window, or "
                                "a small model looks up old sums instead of doing new ones, and needs every byte")
    n_layer: int = option(6, "layers of the base model that --stage pretrain makes, as the next five")
    n_embd: int = option(256, "width")
    n_head: int = option(8, "query heads")
    n_kv_head: int = option(4, "KV heads: groups of two, as real models have groups")
    head_dim: int = option(32, "head size")
    intermediate_size: int = option(512, "SwiGLU width")
    log_every: int = option(10, "steps between progress lines")
    eval_every: int = option(0, "steps between evaluations; 0 = before and after only")
    eval_problems: int = option(4, "validation problems a family in an evaluation; with --data, held-out rows")
    save_every: int = option(500, "steps between checkpoints")
    recompute: bool = option(False, "activations of a block, of a scorer alone on a frozen base, again in its "
                                   "backward: less memory")
    compile: bool = option(True, "on a GPU: torch.compile the pretraining forward (not under fsdp), the thresholds "
                                 "of a retrofit and, on text, blocks and scorers")
    sort: bool = option(True, "on a GPU: attention over keys in the order of their lifetimes, which skips empty tiles; "
                              "off: in the order of time")
    tf32: bool = option(False, "on a GPU: the scorers' fp32 products of a training step in TF32, which keeps 11 bits; "
                               "those of long bf16 rows with their weights, evaluations and decoding stay exact")
    graph: bool = option(True, "on a GPU: replay each step as one CUDA graph; launching its kernels takes longer. Not "
                               "under torchrun")
    workers: int = option(None, "processes that generate data for one that trains; none or negative: 0 on CPU, up to "
                                "12 on a GPU machine")


PRESETS = {  # what differs between the jobs; a command-line option always wins
    "pretrain": dict(steps=8000, batch_size=32, learning_rate=1e-3, warmup=200, weight_decay=0.1),
    "scorer": dict(steps=60, batch_size=1, learning_rate=2e-2, warmup=6, weight_decay=1e-4),   # fits two cores
    "train_base": dict(steps=1000, batch_size=16, learning_rate=4e-3, warmup=50, weight_decay=1e-4),
}


def parse_settings(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], epilog="See the README for recipes. SmolLM2 "
                                     "at 8,192 tokens: --n-sink 4 --window 256 --budget 1024 (to 4096).",
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    for f in fields(Settings):
        name, reason = "--" + f.name.replace("_", "-"), f.metadata["reason"]
        presets = ", ".join(f"{v[f.name]} ({k})" for k, v in PRESETS.items() if f.name in v)
        text = f"{reason} (default: {presets or f.default})".replace("%", "%%")
        if f.type is bool:
            parser.add_argument(name, action=argparse.BooleanOptionalAction, default=f.default, help=text)
        else:
            parser.add_argument(name, type=f.type, default=f.default, choices=f.metadata.get("choices"), help=text)
    settings = Settings(**vars(parser.parse_args(argv)))
    preset = "pretrain" if settings.stage == "pretrain" else "train_base" if settings.train_base else "scorer"
    for name, value in PRESETS[preset].items():
        if getattr(settings, name) is None:
            setattr(settings, name, value)
    settings.warmup = min(settings.warmup, settings.steps // 10)
    if settings.device == "auto":
        settings.device = "cuda" if torch.cuda.is_available() else "cpu"
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda, but this machine shows no GPU to torch: use --device cpu")
    if settings.parallel == "fsdp" and not torch.distributed.is_initialized():
        raise ValueError("--parallel fsdp spreads a model over the processes of torchrun: start with torchrun, or "
                         "leave it out")
    if settings.device == "cuda":
        parallel.use_gpu()
    for name in ("steps", "batch_size", "accumulate", "log_every", "save_every", "eval_problems", "n_samples", "top_k",
                 "max_tokens"):
        if getattr(settings, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(settings, name)}")
    for name in ("weight_decay", "eval_every", "warmup"):
        if not 0 <= getattr(settings, name) < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} must not be below 0, got {getattr(settings, name)}")
    for name in ("forget", "listwise_share", "facts", "held_out", "final_lr_ratio"):
        if not 0 <= getattr(settings, name) <= 1:
            raise ValueError(f"--{name.replace('_', '-')} is a share, 0 to 1, got {getattr(settings, name)}")
    for name in ("tau", "target_power", "learning_rate", "base_learning_rate", "clip"):
        if not 0 < getattr(settings, name) < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} must be above 0, got {getattr(settings, name)}")
    if settings.policy in ADAPTED and settings.stage == "retrofit" and not settings.train_base:
        raise ValueError(f"policy {settings.policy} has nothing to learn: add --train-base to adapt the base to it")
    if settings.budget_start and (settings.budget_start < settings.budget or settings.policy == "dms-cap"):
        raise ValueError("--budget-start must not be below --budget, and dms-cap has a ramp of its own: leave it out")
    if settings.data and (settings.stage == "pretrain" or settings.families != "both"):
        raise ValueError("--data is for a retrofit on text alone: leave --stage pretrain and --families out")
    if settings.teacher and not (settings.data and settings.train_base):
        raise ValueError("--teacher keeps what a full retrofit on text distils from: add --data and --train-base")
    if settings.facts and not settings.data:
        raise ValueError("--facts puts facts into the rows of a text: add --data")
    if settings.stage == "pretrain" and (Path(settings.out) / "scorer.json").is_file():
        raise ValueError(f"--out {settings.out} holds a retrofit, whose scorer does not fit a new base: choose another")
    if settings.stage == "retrofit" and Path(settings.out).resolve() == Path(settings.model).resolve():
        raise ValueError(f"--out {settings.out} is --model itself: a retrofit would overwrite its base, choose another")
    if settings.workers is None or settings.workers < 0:
        settings.workers = 0 if settings.device == "cpu" else min(
            12, ((os.cpu_count() or 2) - 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    return settings


# ---------------------------------------------------------------------------------------------------------------------

def packed_attend(evict_at):
    """Attention of packed rows, tokens seen until their evict_at (B, T); one BlockMask serves all layers and heads."""
    evict_at = evict_at[:, None]  # (B, 1, T): all heads alike
    tables = attention_tables(evict_at)
    return lambda layer, q, k, v: attention(q, k, v, evict_at, tables=tables)[0]


# ---------------------------------------------------------------------------------------------------------------------
# Losses. Logits exist for one chunk of tokens at a time; the backward computes them again.

def rows_at_a_time(vocab_size, device):
    """Tokens of a chunk. Their logits take 128 MiB in fp32 on a CPU, 512 MiB in bf16 on a GPU: each chunk adds a whole
    matrix to the gradient of the head, which with few tokens a chunk takes longer than the products."""
    return max(1, 2**(28 if device.type == "cuda" else 25) // vocab_size)


def chunked(fn, *tensors, vocab_size):
    """Sum of fn over chunks of rows, recomputed in the backward."""
    total, chunk = 0.0, rows_at_a_time(vocab_size, tensors[0].device)
    for parts in zip(*(t.split(chunk) for t in tensors)):
        total = total + checkpoint(fn, *parts, use_reentrant=False, preserve_rng_state=False)  # nothing random in it
    return total


def cross_entropy(model, hidden, targets, weight, total=None):
    """Weighted mean next-token loss; hidden (B, T, C), targets and weight (B, T). total: what to divide the sum by,
    where this is one micro-batch of several; None: its own weights."""
    def part(h, y, w):
        return (F.cross_entropy(model.unembed(h).float(), y, reduction="none") * w).sum()
    return chunked(part, hidden.flatten(0, 1), targets.flatten(), weight.flatten(),
                   vocab_size=model.config.vocab_size) / (weight.sum() if total is None else total)


def with_rest(top, logits):
    """top (n, k), of logits (n, V) -> (n, k + 1) fp32: and the logit of all other tokens taken together."""
    of_all, of_top = (z.float().logsumexp(-1, keepdim=True) for z in (logits, top))
    return torch.cat([top.float(), of_all + (-torch.expm1((of_top - of_all).clamp(max=-1e-6))).log()], dim=-1)


@torch.no_grad()
def top_logits(teacher, hidden, top_k, rest=False):
    """The teacher's side of the KL: hidden (B, T, C) -> its top_k logits and their tokens, (B, T, top_k) each, in the
    dtype of the product and int32. rest: one logit more, see with_rest."""
    found = []
    for h in hidden.flatten(0, 1).split(rows_at_a_time(teacher.config.vocab_size, hidden.device)):
        logits, tokens = (all_logits := teacher.unembed(h)).topk(top_k, dim=-1)
        found.append((with_rest(logits, all_logits) if rest else logits, tokens.int()))
    return [torch.cat(x).unflatten(0, hidden.shape[:2]) for x in zip(*found)]


def distillation_kl(model, hidden, logits, tokens, mask, total=None):
    """Forward KL(teacher || student) over the teacher's top_logits, renormalised there, or with the rest as one token
    more; mean over mask (B, T), or the sum divided by total."""
    def part(h, known, top, counts):
        all_logits = model.unembed(h)
        mine = all_logits.gather(-1, top.long())
        mine = with_rest(mine, all_logits) if known.shape[-1] > top.shape[-1] else mine
        log_p, log_q = known.float().log_softmax(-1), mine.float().log_softmax(-1)
        return ((log_p.exp() * (log_p - log_q)).sum(-1) * counts).sum()
    # weighted and not gathered: a step whose shapes depend on data cannot be a CUDA graph
    return chunked(part, hidden.flatten(0, 1), logits.flatten(0, 1), tokens.flatten(0, 1), mask.flatten().float(),
                   vocab_size=model.config.vocab_size) / (mask.sum() if total is None else total)


# ---------------------------------------------------------------------------------------------------------------------
# Learning rate, optimiser

def lr_factor(step, settings):
    """Share of the peak rate: linear warm-up, then cosine to final_lr_ratio."""
    if step < settings.warmup:
        return (step + 1) / settings.warmup
    x = (step - settings.warmup) / max(1, settings.steps - settings.warmup)
    return settings.final_lr_ratio + (1 - settings.final_lr_ratio) * 0.5 * (1 + math.cos(math.pi * x))


def make_optimizer(model, settings):
    """A peak rate for new parameters, and one for the base under --train-base."""
    new = [p for n, p in model.named_parameters() if n.startswith("scorers.") or settings.stage == "pretrain"]
    base = [p for n, p in model.named_parameters() if not n.startswith("scorers.") and settings.stage != "pretrain"]
    jobs = [(new, settings.learning_rate, True)]
    if settings.train_base:
        jobs.append((base, settings.base_learning_rate, settings.base_schedule == "cosine"))
    groups = []
    for parameters, peak, scheduled in jobs:
        # norm gains are not decayed: the gains of q- and k-norm bound the logits, and attention that cannot be
        # sharp spreads over every old token, which no eviction policy survives
        for decay, part in ((settings.weight_decay, [p for p in parameters if p.dim() >= 2]),
                            (0.0, [p for p in parameters if p.dim() < 2])):
            # a rate that a captured step is to read must be a tensor
            lr = torch.tensor(peak, device=settings.device) if settings.device == "cuda" else peak
            groups.append({"params": part, "lr": lr, "peak": peak, "scheduled": scheduled, "weight_decay": decay})
    for p in base:
        p.requires_grad_(settings.train_base)
    cuda = settings.device == "cuda"
    return parallel.AdamW([g for g in groups if g["params"]], betas=(0.9, 0.95), fused=cuda, capturable=cuda)


def set_rates(optimizer, step, settings):
    for group in optimizer.param_groups:
        lr = group["peak"] * (lr_factor(step, settings) if group["scheduled"] else 1.0)
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def stage_spec(spec, settings, step, stages=4):
    """The CacheSpec in force at `step`. With --budget-start the budget falls to --budget by equal ratios, in `stages`
    equal parts of the first half of the run: a CUDA graph holds one budget, and is captured anew for each."""
    stage = 2 * stages * step // settings.steps
    if not settings.budget_start or stage >= stages:
        return spec
    ratio = spec.budget / settings.budget_start
    return replace(spec, budget=round(settings.budget_start * ratio ** (stage / stages)))


def optimizer_step(optimizer, settings):
    """Clip, step, forget the gradients (a graph must allocate its own) -> the gradient norm, of all shards."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = torch.nn.utils.clip_grad_norm_(parameters, settings.clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def train_step(engine, optimizer, settings, losses, *inputs, **flags):
    """One optimiser step over the micro-batches of this process, whose tensors follow one another in inputs.
    losses(*tensors of one, **flags) -> its share of the loss, and a function that gives values by name once the
    backward has run. -> the sums of these values, and the gradient norm."""
    values, n, products = {}, len(inputs) // settings.accumulate, torch.backends.cuda.matmul
    before, products.allow_tf32 = products.allow_tf32, settings.tf32
    try:
        for i in range(0, len(inputs), n):
            measured = engine.backward(i + n == len(inputs), losses, *inputs[i:i + n], **flags)
            for name, value in measured().items():
                values[name] = values.get(name, 0.0) + value.detach()
        return values, optimizer_step(optimizer, settings)
    finally:
        products.allow_tf32 = before


def make_step(engine, optimizer, settings, losses):
    """train_step of these losses; as a CUDA graph on a GPU, but not with others: their collectives are not captured."""
    graphed = settings.graph and settings.device == "cuda" and not torch.distributed.is_initialized()
    return GraphedStep(functools.partial(train_step, engine, optimizer, settings, losses), graphed)


def by_step(batches, settings):
    """Micro-batches -> tuples of those that make a step."""
    return zip(*[iter(batches)] * settings.accumulate)  # one iterator, asked so many times for each tuple


# ---------------------------------------------------------------------------------------------------------------------

def pretrain(settings):
    run = Run(settings)
    torch.manual_seed(settings.seed)
    config = ModelConfig(vocab_size=264, n_layer=settings.n_layer, n_embd=settings.n_embd, n_head=settings.n_head,
                         n_kv_head=settings.n_kv_head, head_dim=settings.head_dim, max_seq_len=4096,
                         intermediate_size=settings.intermediate_size, eos_token_ids=[EOT], alphabet=ALPHABET)
    model = Transformer(config).to(settings.device)
    sharded = settings.parallel == "fsdp"
    if sharded:
        parallel.shard(model, settings.device)
    optimizer = make_optimizer(model, settings)
    first_step = run.resume(model, optimizer)
    # one graph for the whole forward: its layers are the same few kernels
    compiled = settings.compile and settings.device == "cuda" and not sharded
    forward = torch.compile(model, dynamic=False) if compiled else model
    rows = PackedRows(MAX_LENGTH, settings.seed, settings.prompt_weight, settings.forget, settings.window)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters on {settings.device}")

    def losses(idx, targets, weight, evict_at, total):
        """See train_step; total: mean weight of a process's rows in this step."""
        with autocast(settings.device):
            hidden = forward(idx, packed_attend(evict_at))
            loss = cross_entropy(model, hidden, targets, weight, total)
        return loss, lambda: {"loss": loss}

    run_step = make_step(parallel.Engine(model), optimizer, settings, losses)
    tokens, done, norm = 0, first_step, 0.0
    parallel.catch_stop_signals()
    try:
        for step, batches in enumerate(by_step(loader(rows, settings, first_step), settings), first_step):
            weight, seen = parallel.agree([sum(b[2].sum().item() for b in batches), sum(b[0].numel() for b in batches)])
            total = torch.tensor(weight / parallel.world_size())
            set_rates(optimizer, step, settings)
            values, norm = run_step(*(x.to(settings.device) for batch in batches for x in (*batch, total)))
            done = step + 1
            tokens += int(seen)
            if (step + 1) % settings.log_every == 0 or step + 1 == settings.steps:
                run.progress(step, first_step, tokens, **checked(parallel.averaged(values), norm, step),
                             lr=settings.learning_rate * lr_factor(step, settings))
            if settings.eval_every and (step + 1) % settings.eval_every == 0:
                report(f"step {step + 1}", dense=evaluate(model, settings.device, settings.eval_problems))
            if (step + 1) % settings.save_every == 0:
                finite(norm, step)
                run.save(model, optimizer, step + 1)
    except KeyboardInterrupt:
        return run.interrupted(model, optimizer, done, norm)
    run.save(model, optimizer, settings.steps)
    run.log["evaluation"] = report("after", dense=evaluate(model, settings.device, settings.eval_problems))
    run.log["seconds"] = time.time() - run.started
    run.write_log()
    print(f"wrote {run.folder}")


def retrofit_losses(settings, model, teacher):
    """losses(stage, *inputs, want_recall) of train_step for a retrofit; teacher: None where there is no KL, or where
    its top_logits come with the rows.
    settings.policy may also be "dense": nothing is evicted and no scorer learns (what bench.py compares with)."""
    gated, taught_by_kl = settings.policy == "dms-cap", settings.train_base or settings.policy == "dms-cap"
    n_layer, top_k = model.config.n_layer, min(settings.top_k, model.config.vocab_size)
    compiled, long = settings.compile and settings.device == "cuda", bool(settings.data)

    def losses(stage, idx, lengths, starts, noise, ramp, total, share, recall_share, *known, want_recall):
        """Under the CacheSpec `stage`. idx (B, T), lengths and starts (B,) of a micro-batch; noise (n_layer, B, H_kv,
        S) uniform; scalars: ramp of dms-cap, total: mean number of taught tokens of a process in this step, shares:
        rows that count here, of the mean number of a process; known: what top_logits gave, if that is on disk."""
        retention = Retention(stage, lengths, weight=share / n_layer, n_samples=settings.n_samples,
                              tau=settings.tau, bounded=settings.bounded, power=settings.target_power,
                              listwise_share=settings.listwise_share, want_recall=want_recall, noise=noise,
                              compiled=compiled, compiled_scorer=compiled and long and settings.parallel == "ddp",
                              sort=settings.sort, recompute=settings.recompute)
        values, anchors, gates = {}, [], []
        if not taught_by_kl:
            with autocast(settings.device), torch.no_grad():
                model(idx, training_attend(model, stage, retention, anchors))
            loss = sum(anchors)
        else:
            with autocast(settings.device):
                if teacher is not None:
                    with torch.no_grad():
                        known = top_logits(teacher, teacher(idx, causal_attend), top_k, settings.kl_rest)
                hidden = model(idx, causal_attend if settings.policy == "dense" else
                               gated_attend(model, stage, noise, gates) if gated else
                               training_attend(model, stage, retention))
                # of text every position of a row counts, of a problem those that write its trace
                taught = torch.ones_like(idx, dtype=torch.bool) if settings.data else response_mask(
                    idx.shape[1], lengths, starts)
                loss = values["kl"] = distillation_kl(model, hidden, *known, taught, total)
            if gated:  # a hinge on the share marked in a micro-batch: the mean of them
                found = [x / settings.accumulate for x in gate_shortfall(gates, stage, lengths, ramp)]
                loss, values["marked"], values["target"] = loss + found[0], *found[1:]

        def measured():
            if retention.loss:
                values["retention"] = torch.stack([retention.loss[i] for i in sorted(retention.loss)]) * share
            if retention.recall:  # NaN where nothing was evicted; then the share is 0
                values["recall"] = torch.stack(list(retention.recall.values())).mean().nan_to_num() * recall_share
            return values
        return loss, measured
    return losses


# of a sharded scorer: the hooks that gather its weights lie around its forward, where no compile can follow them
compiled_forward = torch.compile(scorers_module.Scorer.forward, dynamic=False, fullgraph=True)


def make_ready(settings, model, teacher=None):
    """How a model is run in a retrofit: activations kept or not, blocks and sharded scorers compiled or not."""
    model.checkpoint_blocks = settings.recompute and settings.train_base
    if settings.data and settings.device == "cuda":
        if settings.compile and settings.parallel == "fsdp":
            compile_scorers(model)
        for part in (model, teacher):
            if part is not None:
                part.stream_dtype = torch.bfloat16  # as of a base that is read in bf16, and as under FSDP
                for block in part.model.layers:
                    block.compiled = settings.compile


def compile_scorers(model):
    for scorer in model.scorers:
        if scorer.window:  # one that learns
            scorer.forward = functools.partial(compiled_forward, scorer)


def retrofit(settings):
    run = Run(settings)
    torch.manual_seed(settings.seed)
    run.source, run.base, scorers = resolve_start(settings)
    config = ModelConfig.from_dict(read_json(run.source / "config.json"))
    spec = CacheSpec(settings.n_sink, settings.window, settings.budget,
                     scorers_module.state_entries(settings.policy, config.head_dim, config.group_size, settings.window))
    if settings.data:
        rows, held_out, run.text = parallel.first(lambda: text_rows(settings, run.source, config))
        run.log.update(settings=asdict(settings), text=run.text)
        collate = collate_rows
    elif config.vocab_size <= EOT or (run.source / "tokenizer.json").is_file():
        raise ValueError(f"{settings.model} has {config.vocab_size} tokens, but the traces use byte ids up to {EOT}: "
                         "point --model at a base made by --stage pretrain, or give text with --data")
    else:
        families = FAMILIES if settings.families == "both" else (settings.families,)
        rows = Problems("train", settings.seed, families)
        pad_to = MAX_LENGTH if settings.device == "cuda" else None  # one shape, one compilation
        collate = functools.partial(collate_problems, pad_to=pad_to)
    # What is frozen, a base or a teacher, is read in bf16 on a GPU, as decode.py reads it and real ones are stored:
    # half the memory. A base that is trained stays in fp32, as its steps are smaller than bf16 can tell; its products
    # are taken in bf16, so that at the start it agrees with its teacher. The byte models stay in fp32: their numbers
    # were made so.
    frozen = torch.bfloat16 if settings.data and settings.device == "cuda" else torch.float32
    sharded = settings.parallel == "fsdp"  # block by block onto the GPU, from a whole one in the memory of the CPU
    read = lambda dtype: load_model(run.source, "cpu" if sharded else settings.device, dtype)  # noqa: E731
    model = read(torch.float32 if settings.train_base else frozen).requires_grad_(settings.train_base)
    make = lambda policy: scorers_module.make_scorers(  # noqa: E731
        policy, n_layer=config.n_layer, n_kv_head=config.n_kv_head, head_dim=config.head_dim, window=spec.window,
        seed=settings.seed).to(settings.device)
    gated = settings.policy == "dms-cap"  # taught by the KL, so it needs a teacher even where the base is frozen
    distilled = settings.train_base and not settings.teacher
    teacher = read(frozen).requires_grad_(False) if distilled else model if gated else None
    model.scorers = scorers.to(settings.device) if scorers else make(settings.policy)
    if sharded:
        parallel.shard(model, settings.device)
        if teacher not in (model, None):
            parallel.shard(teacher, settings.device)
    make_ready(settings, model, teacher)
    optimizer = make_optimizer(model, settings)  # ahead of any forward, which under FSDP leaves some weights whole
    if settings.teacher:
        rows = taught_rows(settings, run, model, rows)  # before a resume: now the model is still the teacher
    first_step = run.resume(model, optimizer)
    print(f"{settings.policy} on {settings.model}, {'all weights' if settings.train_base else 'scorer alone'}: "
          f"{sum(p.numel() for p in model.scorers.parameters()):,} scorer parameters"
          f"{', begun from its own,' * bool(scorers)} on {settings.device}; {spec.n_sink} sinks + {spec.window} window "
          f"+ {spec.n_select} selected + {spec.state_entries} state = {spec.budget} entries a head")

    def measure(spec=spec, scorers=model.scorers):
        how = dict(bounded=settings.bounded, tau=settings.tau, power=settings.target_power,
                   listwise_share=settings.listwise_share)
        if settings.data:
            return evaluate_text(model, settings.device, held_out, spec, scorers, **how)
        return evaluate(model, settings.device, settings.eval_problems, spec, scorers, families=families, **how)

    def measure_base():  # without a policy, and with the one that a policy must beat
        return {"dense": measure(None, None), "streaming": measure(replace(spec, state_entries=0), make("streaming"))}
    if first_step == 0:
        run.log["before"] = report("before", **{**measure_base(), settings.policy: measure()})
    run.started = time.time()
    losses = retrofit_losses(settings, model, teacher)

    @functools.lru_cache(maxsize=1)
    def noise_of(step, width):  # of all rows of a step, so that a row's does not depend on the process that has it
        return torch.rand(config.n_layer, global_batch(settings), config.n_kv_head, width,
                          generator=torch.Generator().manual_seed(settings.seed * 10**6 + step))

    engine, tokens, done, stage, norm = parallel.Engine(model), 0, first_step, None, 0.0
    parallel.catch_stop_signals()
    try:
        for step, batches in enumerate(by_step(loader(rows, settings, first_step, collate), settings), first_step):
            logging = (step + 1) % settings.log_every == 0 or step + 1 == settings.steps
            if stage != (now := stage_spec(spec, settings, step)):
                if settings.device == "cuda":
                    torch.cuda.synchronize()  # the last stage's graph may still run, and its memory is given back here
                stage, run_step = now, make_step(engine, optimizer, settings, functools.partial(losses, now))
            counts = [(idx.numel() if settings.data else int((lengths - 1 - starts).sum()), int(lengths.sum()),
                       *counted_rows(lengths, idx.shape[1], stage)) for idx, lengths, starts, *_ in batches]
            taught, seen, n_rows, n_recall = parallel.agree(map(sum, zip(*counts)))
            mean = [max(n, 1) / parallel.world_size() for n in (taught, n_rows, n_recall)]  # of a process
            ramp = torch.tensor(min(1.0, (step + 1) / (0.6 * settings.steps)))  # of the share that dms-cap must mark
            inputs = []
            for micro, (batch, count) in enumerate(zip(batches, counts)):
                row = first_row(settings, micro)
                noise = noise_of(step, batch[0].shape[1] if gated else settings.n_samples)
                inputs += [*batch[:3], noise[:, row:row + settings.batch_size], ramp, torch.tensor(mean[0]),
                           torch.tensor(count[2] / mean[1]), torch.tensor(count[3] / mean[2]), *batch[3:]]
            set_rates(optimizer, step, settings)
            try:
                values, norm = run_step(*(x.to(settings.device) for x in inputs), want_recall=logging)
            except ValueError as error:  # a score that is NaN
                raise ValueError(f"step {step + 1}: {error}; --out keeps the last checkpoint") from None
            done = step + 1
            tokens += int(seen)
            if logging:
                known = {k: v for k, v in values.items() if n_recall or k != "recall"}  # 0 rows: nothing was evicted
                run.progress(step, first_step, tokens, **checked(parallel.averaged(known), norm, step))
            if settings.eval_every and (step + 1) % settings.eval_every == 0:
                report(f"step {step + 1}", **{settings.policy: measure()})
            if (step + 1) % settings.save_every == 0:
                finite(norm, step)
                run.save(model, optimizer, step + 1, spec)
    except KeyboardInterrupt:
        return run.interrupted(model, optimizer, done, norm, spec)
    run.log["seconds"] = time.time() - run.started
    run.save(model, optimizer, settings.steps, spec)
    moved = measure_base() if settings.data and settings.train_base else {}
    run.log["after"] = report("after", **{**moved, settings.policy: measure()})
    run.write_log()
    if "before" in run.log:
        print_before_after(run.log["before"], run.log["after"], settings.policy)
    print(f"wrote {run.folder}; try: python decode.py --model {run.folder}" + " --prompt TEXT" * bool(settings.data))


def text_rows(settings, folder, config):
    """Rows of --data for the model in `folder`, checked, and tokenised on first use -> training rows, held-out rows (a
    list of (idx, targets)), header of the token file. Sets settings.context where it is 0."""
    settings.context = settings.context or min(2048, config.max_seq_len)
    if not 1 < settings.context <= config.max_seq_len:
        raise ValueError(f"--context {settings.context} is outside 2 .. {config.max_seq_len}, what the model was "
                         "trained on")
    tokenizer = tokenizer_of(folder, config)
    tokens = token_folder(settings.data, settings.tokens or Path(settings.out) / "tokens", tokenizer,
                          lambda: chat_style(folder), field=settings.field, split=settings.split,
                          subset=settings.subset or None, held_out=settings.held_out, max_tokens=settings.max_tokens,
                          cut=True)
    train, held_out = (TextRows(tokens, settings.context, side, seed, tokenizer, config.vocab_size)
                       for side, seed in (("train", settings.seed), ("held_out", 0)))
    train = FactRows(train, settings.facts, tokenizer) if settings.facts else train
    return train, [held_out[i] for i in range(min(held_out.n, settings.eval_problems))], read_header(tokens)


def taught_rows(settings, run, model, rows):
    """Rows with what the model, not yet trained, says about them; written to --teacher where they are not there."""
    top_k = min(settings.top_k, model.config.vocab_size)
    taught = TaughtRows(settings.teacher, rows, dict(
        model=fingerprint(run.source), tokenizer=run.text["made"]["tokenizer"], data=checksum(rows.file.path),
        context=settings.context, top_k=top_k, precision="bfloat16" if settings.device == "cuda" else "float32",
        facts=rows.way() if settings.facts else None, rest=settings.kl_rest or None))

    def logits_of(idx):
        with torch.no_grad(), autocast(settings.device):
            return top_logits(model, model(idx, causal_attend), top_k, settings.kl_rest)
    taught.write(settings.steps * global_batch(settings), logits_of, settings.batch_size, settings.device)
    return taught


def main(argv=None):
    with parallel.processes():
        try:
            settings = parse_settings(argv)
            return (pretrain if settings.stage == "pretrain" else retrofit)(settings) or 0
        except (ValueError, FileNotFoundError) as error:
            parallel.report_error(f"error: {error}")
            return 2
        except RuntimeError as error:
            lost = ("another process of this run" if parallel.lost_process(error) else
                    "a process that prepares batches" if str(error).startswith("DataLoader worker") else None)
            if lost is None:
                raise
            parallel.report_error(f"error: {lost} is gone: what --out held is kept; continue with --resume if it has a "
                                  "state")
            return 2
        except KeyboardInterrupt:  # outside the loop, which saves
            parallel.report_error("\ninterrupted between training steps: what --out held before it is kept")
            return 130


if __name__ == "__main__":
    sys.exit(main())
