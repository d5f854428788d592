"""bench.py train: time, memory and utilisation of a training step of the retrofit, on random weights of a shape.

What this file holds:
  matmul_flops, attention_flops, step_flops   the work that utilisation counts, by formula
  matmul_rate                  what the card does on one large product: the 100 % of utilisation
  Job                          train.py's own step of one policy on random tokens: its Settings, losses and optimiser
  Parts                        where the time of a step goes: marks on one time line, nothing measured twice
  train                        the benchmark; `register` gives it to bench.py
There is no second training loop: a Job calls what `train.retrofit` calls, under torchrun as well.

Letters: B micro-batch, T tokens, H query heads, H_kv KV heads, D head_dim, C n_embd, V vocab_size.
"""
import argparse
import functools
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest.mock import patch

import torch
import torch.distributed as dist

import flex_masks
import targets
import train as training
from data import parallel
from data.results import earlier_rows, print_table, write_results
from data.speed import Timer, add_options, card, guarded, median_ms, peak_bytes, release
from data.speed_decode import SHAPES, random_model, random_values, shape_of, spec_of
from model import Transformer
from scorer import make_scorers

POLICIES = ("dense", "kvpop-mlp", "kvpop")
PARTS = ("teacher", "student", "backward", "plan", "transposed", "scorer", "kl", "optimizer", "other")

# ------------------------------------------------------------------------------------------------ Work and utilisation

def matmul_flops(config, head=True):
    """Operations of one token's matrix products in a forward, two for each weight: q, k, v, o, the three of the MLP,
    and the head."""
    attention = 2 * config.n_embd * (config.n_head + config.n_kv_head) * config.head_dim
    mlp = 3 * config.n_embd * config.intermediate_size
    return 2 * (config.n_layer * (attention + mlp) + head * config.n_embd * config.vocab_size)


def attention_flops(config, pairs):
    """Operations of attention in a forward: for each visible pair of a query head, D multiply-adds for its score and D
    for its value. pairs: visible pairs of one layer, rows and query heads summed, the mean over layers."""
    return 4 * config.n_layer * config.head_dim * pairs


def causal_pairs(config, B, T):
    """Visible pairs of dense causal attention in a layer, all query heads."""
    return B * config.n_head * T * (T + 1) // 2


def step_flops(config, B, T, pairs, freeze_base=False):
    """Operations of a training step that cannot be saved: those of utilisation (MFU).

        trained base: 3 x student forward (its own, and gradients of inputs and of weights) + teacher forward
        frozen base:  1 x student forward without the head; there is no teacher, and no gradient reaches the base
        forward = matmul_flops x tokens + attention_flops over visible pairs: the policy's (student), causal (teacher)

    Recomputed activations, scorer, plan, transposed pass, normalisations and optimiser count nothing."""
    tokens = B * T
    if freeze_base:
        return tokens * matmul_flops(config, head=False) + attention_flops(config, pairs)
    student = tokens * matmul_flops(config) + attention_flops(config, pairs)
    return 3 * student + tokens * matmul_flops(config) + attention_flops(config, causal_pairs(config, B, T))


def matmul_rate(device, n=None):
    """Operations a second of one product of n x n matrices, bf16 on a GPU, fp32 on a CPU."""
    n = n or (8192 if device == "cuda" else 512)
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16 if device == "cuda" else torch.float32) for _ in "ab")
    return 2 * n**3 / (1e-3 * median_ms(lambda: a @ b, device))

# -------------------------------------------------------------------------------------------------- A step of train.py

def settings_of(policy, sort, T, args, device):
    """train.py's Settings for a step at T tokens, with its checks; the paper's rates."""
    given = ["--policy", "kvpop" if policy == "dense" else policy, "--data", "random tokens", "--context", T,
             "--budget", args.budget, "--n-sink", args.n_sink, "--window", args.window,
             "--batch-size", args.micro_batch, "--steps", 2000, "--warmup", 100, "--device", device,
             "--parallel", args.parallel, "--learning-rate", 1e-3,
             "--base-learning-rate", 8e-5, "--base-schedule", "constant",
             *["--train-base"] * (not args.freeze_base), *["--recompute"] * args.recompute,
             "--sort" if sort else "--no-sort", "--compile" if args.compile else "--no-compile",
             "--graph" if args.graph else "--no-graph", "--tf32" if args.tf32 else "--no-tf32"]
    return replace(training.parse_settings(list(map(str, given))), policy=policy)


def make_base(config, device, freeze_base):
    """-> model and teacher, of the same random weights, as train.retrofit reads them from a checkpoint: on a GPU what
    is frozen in bf16, what is trained in fp32. teacher None: with a frozen base nothing is distilled."""
    frozen = torch.bfloat16 if device == "cuda" else torch.float32
    if freeze_base:
        return random_model(config, device, frozen).requires_grad_(False), None
    teacher = random_model(config, device, frozen).requires_grad_(False)
    with torch.device("meta"):
        model = Transformer(config)
    model.to_empty(device=device)
    with torch.no_grad():  # at the start of a retrofit the two are the same model
        for mine, its in zip(model.parameters(), teacher.parameters()):
            mine.copy_(its)
    return model, teacher


def meta_base(config, device, freeze_base):
    """What make_base gives, without memory for weights: one GPU may not hold them all."""
    frozen = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device("meta"):
        if freeze_base:
            return Transformer(config).to(frozen).requires_grad_(False), None
        return Transformer(config), Transformer(config).to(frozen).requires_grad_(False)


def shard_base(model, teacher, device):
    """Cut a meta_base into shards as train.py does, in place, and fill them, other numbers in each process: none ever
    holds a whole model. Teacher and student start as the same numbers, as in make_base."""
    for part in (model, teacher):
        if part is not None:
            parallel.shard(part, device)
            for name, child in part.named_children():
                if name != "scorers":  # which have their weights
                    child.to_empty(device=device)
    weights = [p for name, p in model.named_parameters() if not name.startswith("scorers.")]
    copies = weights if teacher is None else list(teacher.parameters())
    random_values(copies, torch.Generator(device).manual_seed(parallel.rank()))
    with torch.no_grad():
        for mine, its in zip(weights, copies, strict=True):
            mine.to_local().copy_(its.to_local())


def taught_scorers(policy, config, window, device):
    """Scorers whose score vectors, zero at the start of a training, are random: equal scores would evict by age alone,
    which leaves tiles emptier than any retrofit does."""
    scorers = make_scorers(policy, n_layer=config.n_layer, n_kv_head=config.n_kv_head, head_dim=config.head_dim,
                           window=window)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in scorers.named_parameters():
            if name.endswith("score"):
                p.normal_(std=p.shape[1] ** -0.5, generator=generator)
    return scorers.to(device)


class Job:
    """One policy at one length: what train.retrofit builds before its loop, on random tokens.

    model, teacher: from make_base, or with --parallel fsdp from meta_base; the scorers of the model are replaced."""

    def __init__(self, policy, sort, T, model, teacher, args, device):
        self.settings, self.device, config = settings_of(policy, sort, T, args, device), device, model.config
        self.model, self.teacher, self.scored = model, teacher, None  # scored: the last call of a scorer in parts
        self.spec = spec_of("streaming" if policy == "dense" else policy, config, args.budget, args.n_sink, args.window)
        model.scorers = torch.nn.ModuleList() if policy == "dense" else taught_scorers(
            policy, config, args.window, device)
        if self.settings.parallel == "fsdp":
            shard_base(model, teacher, device)
        training.make_ready(self.settings, model, teacher)
        self.optimizer, self.engine = training.make_optimizer(model, self.settings), parallel.Engine(model)
        self.losses = functools.partial(training.retrofit_losses(self.settings, model, teacher), self.spec)
        self.run_step = training.make_step(self.engine, self.optimizer, self.settings, self.losses)
        B, generator = args.micro_batch, torch.Generator().manual_seed(T + 10**6 * parallel.rank())
        idx = torch.randint(config.vocab_size, (B, T), generator=generator)
        noise = torch.rand(config.n_layer, B, config.n_kv_head, self.settings.n_samples, generator=generator)
        one, tokens = torch.tensor(1.0), torch.tensor(float(B * T))
        self.inputs = [x.to(device) for x in (idx, torch.full((B,), T), torch.zeros(B, dtype=torch.int64), noise, one,
                                              tokens, one, one)]

    def step(self):
        """One optimiser step of one micro-batch -> its values and the gradient norm."""
        return self.run_step(*self.inputs, want_recall=False)

    def step_in_parts(self):
        """A step, launched kernel by kernel, with marks where its parts begin -> ms by part, and the visible pairs of
        a layer (see attention_flops)."""
        parts, plans, group = Parts(self.device), [], self.model.config.group_size

        def planned(*args, **how):
            plans.append(plan(*args, **how))
            return plans[-1]
        plan = parts.timed("plan", flex_masks.plan)
        with parts.watching(self), patch.object(targets, "plan", planned):
            training.train_step(self.engine, self.optimizer, self.settings, self.losses, *self.inputs,
                                want_recall=False)
            ms = parts.ms()
        T, t = self.settings.context, torch.arange(self.settings.context, device=self.device)
        pairs = [group * (evict_at.clamp(max=T) - t).sum().item() for evict_at in plans]
        return ms, sum(pairs) / len(pairs) if pairs else causal_pairs(self.model.config, self.settings.batch_size, T)

    def scorer_backward_ms(self):
        """Backward of the scorers of all layers, by itself: inside a step it lies between other kernels."""
        if self.scored is None:
            return 0.0
        make, args = self.scored
        parameters, timer = [p for name, p in args[0].named_parameters() if name != "alpha"], Timer(self.device)
        for _ in range(3):
            with training.autocast(self.device), torch.autocast(self.device, enabled=False):  # as in the step
                scores = make(*args)
            with timer:
                torch.autograd.grad(scores.sum(), parameters)
        return self.model.config.n_layer * timer.ms()[-1]

# ------------------------------------------------------------------------------------------------ Where the time goes

class Parts:
    """Time by part of one step. A mark says what begins; time up to the next mark is that part's, so that a part that
    runs inside another is taken out of it, and all of them add up to the step."""

    def __init__(self, device):
        self.timer, self.marks, self.stack = Timer(device), [], ["other"]

    def mark(self):
        self.marks.append((self.stack[-1], self.timer.now()))

    @contextmanager
    def part(self, name):
        self.stack.append(name)
        self.mark()
        yield
        self.stack.pop()
        self.mark()

    def timed(self, name, fn):
        """fn, its calls a part."""
        def wrapped(*args, **how):
            with self.part(name):
                return fn(*args, **how)
        return wrapped

    def backward(self, fn):
        """A loss's backward: first that of the KL, until the gradient of the student's hidden state is there."""
        return self.timed("kl" if self.distilled else "backward", fn)

    def hidden_known(self, grad):
        self.stack[-1] = "backward"
        self.mark()

    @contextmanager
    def watching(self, job):
        """While it lasts, marks in the functions that a step of the job calls; they are called by these names."""
        model, teacher = job.model, job.teacher
        self.distilled = teacher is not None
        forward = self.timed("student", model.forward)

        def student(*args, **how):
            hidden = forward(*args, **how)
            if hidden.requires_grad:
                hidden.register_hook(self.hidden_known)
            return hidden
        def scored(make):
            timed = self.timed("scorer", make)

            def wrapped(*args):
                job.scored = make, args
                return timed(*args)
            return wrapped
        with ExitStack() as stack:
            def watch(owner, name, new):
                stack.enter_context(patch.object(owner, name, new))
            watch(model, "forward", student)
            if teacher is not None:
                watch(teacher, "forward", self.timed("teacher", teacher.forward))
            for name, owner, part in (
                    ("top_logits", training, "kl"), ("distillation_kl", training, "kl"),
                    ("optimizer_step", training, "optimizer"), ("judge", targets, "scorer"),
                    ("future_attention", targets, "transposed"), ("lifetime_order", flex_masks, "plan"),
                    ("compiled_lifetime_order", flex_masks, "plan"), ("evict_at_block_mask", flex_masks, "plan")):
                watch(owner, name, self.timed(part, getattr(owner, name)))
            for name in ("score", "compiled_score"):
                watch(targets, name, scored(getattr(targets, name)))
            watch(torch.Tensor, "backward", self.backward(torch.Tensor.backward))
            yield

    def ms(self):
        """part -> ms, PARTS in order; all of the step is in them."""
        self.stack = ["other"]
        self.mark()
        if self.timer.cuda:
            torch.cuda.synchronize()
        total = dict.fromkeys(PARTS, 0.0)
        for (name, start), (_, end) in zip(self.marks, self.marks[1:]):
            total[name] += start.elapsed_time(end) if self.timer.cuda else 1e3 * (end - start)
        return total

# ------------------------------------------------------------------------------------------------------- The benchmark

def together(device):
    """Wait until every process is here, its GPU idle; nothing alone."""
    if dist.is_initialized():
        if device == "cuda":
            torch.cuda.synchronize()
        parallel.summed([0])


def train_row(policy, sort, T, model, teacher, args, device, rate):
    """One row, see `train`. With many processes it ends at the first part that does not fit: the others wait for a part
    of a step that this one will not do."""
    gpus, alone = parallel.world_size(), not dist.is_initialized()
    row = dict(shape=args.shape, policy=policy, sorted=sort, T=T, micro_batch=args.micro_batch, gpus=gpus,
               parallel=None if alone else args.parallel, freeze_base=args.freeze_base)
    row |= dict.fromkeys(("step_ms", "tokens_per_s", "mfu", "peak_gib", "visible_share", "breakdown"))
    row |= dict(recompute=args.recompute, tf32=args.tf32, reduced=device != "cuda", oom=[])
    made = {}

    def measure(name, fn):
        guarded(row, name, fn, device)
        if row[name] is None:
            model.zero_grad(set_to_none=True)  # of a step that was cut off
            release(device)
    measure("job", lambda: made.update(job=Job(policy, sort, T, model, teacher, args, device)) or True)
    if row.pop("job"):
        job = made["job"]
        # the same number of steps in each process, whatever it measured
        measure("step_ms", lambda: parallel.largest(median_ms(
            job.step, device, repeats=args.repeats, before=lambda: together(device),
            budget_ms=20000 if alone else 1e9)))
    if row["step_ms"]:
        row["tokens_per_s"] = 1e3 * gpus * args.micro_batch * T / row["step_ms"]
        peak = peak_bytes(job.step, device)
        row["peak_gib"] = peak and parallel.largest(peak) / 2**30
        measure("breakdown", lambda: made.update(zip(("ms", "pairs"), job.step_in_parts())) or made["ms"])
    if row["breakdown"]:
        if alone:
            back = job.scorer_backward_ms()
            made["ms"]["scorer"] += back
            made["ms"]["backward"] -= back
        else:
            row["breakdown"] = None  # a part would hold what it waits for the others
            made["pairs"] = parallel.summed([made["pairs"]])[0] / gpus
        row["visible_share"] = made["pairs"] / causal_pairs(model.config, args.micro_batch, T)
        flops = step_flops(model.config, args.micro_batch, T, made["pairs"], args.freeze_base)
        row["mfu"] = flops / (1e-3 * row["step_ms"]) / rate
    if alone:  # else the model is not used again
        model.scorers = torch.nn.ModuleList()
    return row


def train(args):
    """One training step of the retrofit, as train.py runs it, on random weights and tokens of a model's shape: teacher
    forward, student forward under the policy, KL over the teacher's top 256 logits, backward with recomputed
    activations, AdamW on fp32 weights; products in bf16 on a GPU. dense is plain distillation: the same step in which
    nothing is evicted and no scorer learns. With --freeze-base the scorers alone are trained, without teacher and KL,
    and there is no dense row. Under torchrun the step of all processes, one a GPU, by DDP or FSDP2: rows from other
    numbers of GPUs stay in the file. Weights are made shard by shard, and teacher and student start equal.

    Row: shape, policy, sorted (keys in the order of their lifetimes, or of time), T, micro_batch (rows of a GPU), gpus,
    parallel (ddp or fsdp; None: without torchrun), freeze_base, step_ms (median of steps between CUDA events, the first
    two not counted; processes begin each together, and the slowest one's median counts), tokens_per_s (of all GPUs),
    mfu (of a GPU: step_flops of data/speed_train.py / step_ms, over the rate of one 8192^3 product in bf16 in the same
    process), peak_gib (of a GPU, the fullest: weights, moments, gradients and all else), visible_share (visible pairs /
    causal pairs), breakdown (ms of another step, with marks in it: teacher; student, its forward; backward, recomputed
    forward included; plan, cutoffs and tables; transposed, the pass that makes the scorer's targets; scorer, its
    forwards, loss and backward, this one measured by itself and taken out of backward; kl, both sides of it and its
    backward; optimizer, clipping included; other; None under torchrun), recompute, tf32, reduced, oom (what did not
    fit). On a CPU the shape is cut to two narrow layers and T to 256: such a run compares nothing. Rows that the file
    has already are kept, so an interrupted run goes on.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        args.lengths, args.budget, args.window = sorted({min(T, 256) for T in args.lengths}), 64, min(args.window, 16)
        print("no GPU: a reduced run, to show that it works; its times compare nothing")
    if min(args.lengths) < 2 or args.micro_batch < 1 or args.repeats < 1:
        raise ValueError("--lengths must be 2 or more, --micro-batch and --repeats 1 or more")
    settings_of(args.policies[0], True, min(args.lengths), args, device)  # refuses options, and takes the GPU
    config = shape_of(args.shape, device == "cpu")
    for policy in args.policies:  # refuses a budget before any work
        spec_of("streaming" if policy == "dense" else policy, config, args.budget, args.n_sink, args.window)
    jobs = [(policy, sort, T) for T in args.lengths for policy in args.policies
            for sort in ([None] if policy == "dense" else [True] if policy == "kvpop-mlp" or not args.by_time else
                         [True, False])
            if not (args.freeze_base and policy == "dense")]
    rate = matmul_rate(device)
    settings = dict(card=card(device), budget=args.budget, n_sink=args.n_sink, window=args.window,
                    graph=args.graph and not dist.is_initialized(), compiled=args.compile)
    rows, extra = earlier_rows(args.out, strict=True, **settings), dict(settings, matmul_rate=rate)
    print(f"{args.shape}: one product runs at {rate / 1e12:.2f} TFLOP/s")
    write = lambda: write_results(args.out, rows, device, **extra)  # noqa: E731
    model = teacher = None
    for policy, sort, T in jobs:
        me = dict(shape=args.shape, policy=policy, sorted=sort, T=T, micro_batch=args.micro_batch,
                  gpus=parallel.world_size(), parallel=args.parallel if dist.is_initialized() else None,
                  freeze_base=args.freeze_base, recompute=args.recompute, tf32=args.tf32)
        older = {**dict.fromkeys(me, False), "parallel": None}  # than the option
        if any(all(row.get(key, older[key]) == value for key, value in me.items()) for row in rows):
            continue
        if dist.is_initialized():
            model = teacher = None  # those of the last row: their hooks and shards are for its scorers
            release(device)
        if model is None:
            make = meta_base if args.parallel == "fsdp" else make_base
            model, teacher = make(config, device, args.freeze_base)
        row = train_row(policy, sort, T, model, teacher, args, device, rate)
        release(device)
        rows.append(row)
        if row["oom"] and dist.is_initialized():
            if parallel.claim("oom"):  # the others may wait for this process, and end with it
                write()
            raise ValueError(f"{policy}, T {T}: out of memory on {row['gpus']} GPUs by {args.parallel}; its row says "
                             "so, and the same command goes on with the next one")
        if parallel.rank() == 0:
            write()
        said = "out of memory" if row["step_ms"] is None else (
            ", ".join([f"{row['step_ms']:.1f} ms, {100 * (row['mfu'] or 0):.1f} % of the product's rate",
                       *(f"{name} {ms:.1f}" for name, ms in (row["breakdown"] or {}).items() if ms)]))
        print(f"{policy}{'' if sort is None else ', by lifetime' if sort else ', by time'}, T {T}: {said}", flush=True)
    print_table(rows, ["shape", "policy", "sorted", "T", "micro_batch", "gpus", "parallel", "freeze_base",
                       "step_ms", "tokens_per_s", "mfu", "peak_gib", "visible_share", "reduced", "oom"])
    if parallel.rank() == 0:
        print(f"wrote {write()}")


def register(names):
    numbers, number = dict(nargs="+", type=int), dict(type=int)
    switch = dict(action=argparse.BooleanOptionalAction)
    add_options(names, train, "a training step of the retrofit, in time, memory and utilisation", {
        "--shape": ("qwen3-4b", "of the model", dict(choices=list(SHAPES))),
        "--lengths": ([16384, 32768], "tokens a row", numbers),
        "--policies": (list(POLICIES), "to measure", dict(nargs="+", choices=POLICIES)),
        "--micro-batch": (1, "rows", number), "--budget": (2048, "entries per KV head", number),
        "--n-sink": (4, "first positions, never evicted", number), "--window": (256, "newest positions", number),
        "--freeze-base": (False, "train the scorers alone", switch),
        "--recompute": (True, "activations of a block again in its backward", switch),
        "--compile": (True, "as in train.py", switch), "--graph": (False, "as in train.py", switch),
        "--parallel": ("ddp", "under torchrun, as in train.py", dict(choices=["ddp", "fsdp"])),
        "--by-time": (True, "kvpop also with keys in the order of time", switch),
        "--tf32": (False, "as in train.py", switch),
        "--repeats": (5, "steps to time", number),
        "--out": ("train", "name of the JSON in assets/results", {})})
