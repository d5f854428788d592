"""bench.py attention: what attention over keys in lifetime order costs, against SDPA's dense causal attention.

What this file holds:
  Timer, median_ms             what all speed benchmarks share: device or wall time, out of memory
  trace_scores, policy_scores  what ranks the keys: the shipped scorer on real traces laid end to end, random numbers
  tiles_kept, attention_row    one row: shares of tiles, times, memory
  tune_options                 FlexAttention's kernel options, tried one by one
  attention                    the benchmark; `register` gives it to bench.py
Times that say fwd or fwd_bwd start from scores: plan, tables and gathers are in them. On a CPU there is no kernel, so
sizes are cut and the row says kernel dense_reference: such a run shows that the benchmark works and compares nothing.

Letters: B batch, T tokens, H query heads, H_kv KV heads, D head_dim.
"""
import argparse
import functools
import gc
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask

import flex_masks
from data.batches import collate_problems
from data.prompts import SHIPPED
from data.resolve import weights_folder
from data.results import earlier_rows, print_table, write_results
from data.scorer_files import load_scorers
from data.traces import FAMILIES, make_problem
from flex_masks import TILE, CacheSpec, effective_priority, plan, pyplot
from model import causal_attend, load_model, read_json
from targets import transposed_lse

DECAY = 0.9995  # of policy decay, per token: its oldest keys have sunk by one standard deviation after 2,000 tokens
POLICIES = ("random", "decay", "kvpop", "streaming")
# tried by --tune; an option that the card or this torch refuses is skipped
FORWARD = (dict(fwd_BLOCK_M=64), dict(fwd_BLOCK_N=128), dict(fwd_BLOCK_N=32), dict(fwd_num_warps=4),
           dict(fwd_num_stages=2), dict(fwd_num_stages=4), dict(fwd_BLOCK_N=128, fwd_num_stages=2),
           dict(PRESCALE_QK=True), dict(USE_TMA=True))
BACKWARD = (dict(bwd_num_stages=2), dict(bwd_num_stages=4), dict(bwd_num_warps=4), dict(bwd_BLOCK_M1=32),
            dict(bwd_BLOCK_N2=32), dict(bwd_BLOCK_N1=64, bwd_BLOCK_M2=64),
            dict(bwd_BLOCK_M1=64, bwd_BLOCK_N1=64, bwd_BLOCK_M2=64, bwd_BLOCK_N2=64, bwd_num_warps=4))
# no PRESCALE_QK: its scores reach a score_mod in base 2, and the pass would be another one
TRANSPOSED = (dict(BLOCK_N=128), dict(num_warps=4), dict(num_stages=2), dict(BLOCK_M=64, num_warps=4),
              dict(BLOCK_M=64, num_warps=4, num_stages=2), dict(BLOCK_M=64, BLOCK_N=32, num_warps=4, num_stages=2),
              dict(BLOCK_M=64, BLOCK_N=128, num_warps=4, num_stages=2), dict(USE_TMA=True))

# ----------------------------------------------------------------------------------- What all speed benchmarks share

def card(device):
    return torch.cuda.get_device_name() if device == "cuda" else "CPU"


def release(device):
    """Give back what a finished or failed measurement held, so that the next one meets the same memory; on a CPU, where
    none is scarce, the collector comes by itself."""
    if device == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


class Timer:
    """`with timer:` around one run; `ms()` then gives all runs: between CUDA events, read at the end so that the device
    never waits for them, or by a clock on a CPU."""

    def __init__(self, device):
        self.cuda, self.spans = device == "cuda", []

    def now(self):
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def __enter__(self):
        self.start = self.now()

    def __exit__(self, *error):
        self.spans.append((self.start, self.now()))

    def ms(self):
        if not self.cuda:
            return [1e3 * (end - start) for start, end in self.spans]
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in self.spans]


def median_ms(fn, device, repeats=20, before=lambda: None, budget_ms=2000):
    """Median time of fn() in ms; the first call, which compiles, and a second one are not counted. At least 3 runs, at
    most `repeats`, fewer where they would take longer than budget_ms. before() goes untimed ahead of each."""
    before(), fn()
    trial, timer = Timer(device), Timer(device)
    before()
    with trial:
        fn()
    for _ in range(max(3, min(repeats, int(budget_ms / max(trial.ms()[0], 1e-3))))):
        before()
        with timer:
            fn()
    return statistics.median(timer.ms())


def peak_bytes(fn, device):
    """-> most bytes allocated while fn() ran, those of before included; None on a CPU."""
    if device != "cuda":
        fn()
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    fn()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def guarded(row, name, fn, device):
    """row[name] = fn(); None, and the name in row["oom"], where memory does not suffice."""
    try:
        row[name] = fn()
    except torch.OutOfMemoryError:
        row[name] = None
        row["oom"].append(name)
    if row[name] is None:  # outside the except: while it is handled, the exception keeps the failed run's tensors
        release(device)

# -------------------------------------------------------------------------------------------------- What is attended to

@functools.lru_cache(maxsize=2)
def trace_scores(folder, n_rows, length, device):
    """Scores that a checkpoint's scorers give real traces, (n_rows, layers * H_kv, length), and the log decay of each
    head, (layers * H_kv,). A row is whole validation traces laid end to end; each was scored by itself."""
    scorers, settings = load_scorers(folder)
    scorers, model = scorers.to(device), load_model(weights_folder(folder, settings), device).eval()
    rows, number = [], 0
    for _ in range(n_rows):
        parts, have = [], 0
        while have < length:
            problem = make_problem(FAMILIES[number % len(FAMILIES)], number // len(FAMILIES), "validation")
            idx, lengths = (x.to(device) for x in collate_problems([problem])[:2])
            found = []

            def attend(layer, q, k, v):
                found.append(scorers[layer](k, v, lengths))
                return causal_attend(layer, q, k, v)
            with torch.no_grad():
                model(idx, attend)
            parts.append(torch.cat(found, dim=1)[..., :int(lengths)])  # (1, layers * H_kv, one trace)
            have, number = have + parts[-1].shape[-1], number + 1
        rows.append(torch.cat(parts, dim=-1)[..., :length])
    log_gamma = [scorer.log_gamma() for scorer in scorers]
    return torch.cat(rows), None if log_gamma[0] is None else torch.cat(log_gamma).detach()


def policy_scores(policy, B, H_kv, T, device, folder=SHIPPED / "kvpop"):
    """-> scores (B, H_kv, T), log_gamma (H_kv,) or None. random: normal numbers; decay: the same with a decay; kvpop:
    of the shipped scorer, heads taken evenly from all its layers; streaming: all equal."""
    if policy == "kvpop":
        scores, log_gamma = trace_scores(str(folder), B, T, device)
        pick = torch.arange(H_kv, device=device) * scores.shape[1] // H_kv
        return scores[:, pick].contiguous(), None if log_gamma is None else log_gamma[pick]
    if policy == "streaming":
        return torch.zeros(B, H_kv, T, device=device), None
    scores = torch.randn(B, H_kv, T, generator=torch.Generator().manual_seed(T)).to(device)
    return scores, torch.full((H_kv,), DECAY, device=device).log() if policy == "decay" else None


def tiles_kept(evict_at, spec, compiled=False):
    """Tiles that the kernel computes, and those of them that need no mask, both as shares of all (T / TILE)^2, mean
    over rows and heads; tiles of padding count, they are computed. Dense causal attention has about 0.5."""
    T = evict_at.shape[-1]
    tables = flex_masks.kernel_tables(evict_at, spec, compiled)
    if isinstance(tables, BlockMask):
        n_partial, n_full = tables.kv_num_blocks, tables.full_kv_num_blocks
    else:
        n_partial, _, n_full, _ = tables[3:7]
    partial, full = (n.sum().item() / len(n) / (T / TILE)**2 for n in (n_partial, n_full))
    return partial + full, full


def tiles_ideal(evict_at):
    """Visible pairs as a share of T^2: mean lifetime / T. No order of keys can need fewer tiles than that."""
    T = evict_at.shape[-1]
    lives = evict_at.clamp(max=T) - torch.arange(T, device=evict_at.device)
    return lives.double().mean().item() / T

# ------------------------------------------------------------------------------------------------------------ The rows

def dense_times(q, k, v, device, backward):
    """SDPA, causal, under each backend that takes these tensors -> (best ms, its name); None, None without one."""
    best = (None, None)
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION,
                    SDPBackend.MATH):
        if backend == SDPBackend.MATH and (best[0] is not None or q.shape[2] > 8192):
            continue  # builds T x T; only where nothing else runs
        inputs = [x.detach().requires_grad_(backward) for x in (q, k, v)]

        def run():
            with sdpa_kernel(backend):
                out = F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)
            if backward:
                torch.autograd.grad(out, inputs, q)  # any gradient of the right shape
        try:
            ms = median_ms(run, device)
        except RuntimeError:  # this backend does not take these tensors, or memory does not suffice for it
            ms = None
        if ms is None:
            release(device)
        elif best[0] is None or ms < best[0]:
            best = ms, backend.name.lower().removesuffix("_attention")
    return best


@torch.no_grad()
def causal_flex_ms(q, k, v, device):
    """FlexAttention, causal, in time order: what the same kernel takes when it may skip nothing."""
    everything = flex_masks.keep_everything(len(q), 1, q.shape[2], device)
    mask = flex_masks.evict_at_block_mask(everything)
    return median_ms(lambda: flex_masks.attention(q, k, v, everything, tables=mask), device)


class Inputs:
    """The tensors of one row and the calls that are timed. options: kernel options, of `attention` and of the
    transposed pass."""

    def __init__(self, policy, T, budget, args, device, options):
        self.spec = CacheSpec(args.n_sink, args.window, budget)
        self.device, self.compiled, self.options = device, device == "cuda", options
        dtype, generator = torch.bfloat16 if device == "cuda" else torch.float32, torch.Generator(device).manual_seed(T)
        self.q, self.k, self.v = (torch.randn(args.batch, h, T, args.head_dim, device=device, generator=generator)
                                  .to(dtype) for h in (args.n_head, args.n_kv_head, args.n_kv_head))
        self.scores, self.log_gamma = policy_scores(policy, args.batch, args.n_kv_head, T, device)
        self.leaves = [x.detach().requires_grad_() for x in (self.q, self.k, self.v)]

    def planned(self):
        return plan(effective_priority(self.scores, self.log_gamma), self.spec, self.compiled)

    def tables(self):  # scores to all that the kernel needs
        return flex_masks.kernel_tables(self.planned(), self.spec, self.compiled)

    def attend(self, q, k, v):
        return flex_masks.attention(q, k, v, self.planned(), self.spec, compiled=self.compiled,
                                    kernel_options=self.options["attention"])

    @torch.no_grad()
    def forward(self):
        return self.attend(self.q, self.k, self.v)

    def forward_backward(self):
        return torch.autograd.grad(self.attend(*self.leaves)[0], self.leaves, self.q)

    @torch.no_grad()
    def transposed(self, lse, evict_at):
        lengths = torch.full((len(self.q),), self.q.shape[2], device=self.device)
        return transposed_lse(self.q, self.k, lse, self.spec.window, lengths, evict_at, 2.0,
                              self.options["transposed"])


def attention_row(policy, T, budget, args, device, options, dense):
    """One row, see `attention`. None where a figure does not exist; where memory ran out, `oom` names it too. dense:
    T -> the figures of dense attention, which depend on no policy and budget; what it lacks is measured and added."""
    row = dict(policy=policy, T=T, budget=budget, batch=args.batch, n_head=args.n_head, n_kv_head=args.n_kv_head,
               head_dim=args.head_dim)
    row |= dict.fromkeys(("tiles_kept", "tiles_full", "tiles_ideal", "plan_ms", "fwd_ms", "fwd_bwd_ms", "dense_backend",
                          "dense_fwd_ms", "dense_fwd_bwd_ms", "ratio_fwd", "ratio_fwd_bwd", "transposed_ms",
                          "transposed_free_ms", "causal_flex_fwd_ms", "plan_peak_mib"))
    row |= dict(kernel="flex_attention" if device == "cuda" else "dense_reference", reduced=device != "cuda", oom=[])
    made = {}

    def measure(name, fn):
        guarded(row, name, fn, device)
    measure("inputs", lambda: made.update(inputs=Inputs(policy, T, budget, args, device, options)) or True)
    if not row.pop("inputs"):
        return row
    x = made["inputs"]
    measure("plan_ms", lambda: median_ms(x.tables, device))
    if row["plan_ms"] is not None:
        if device == "cuda":
            before = torch.cuda.memory_allocated()
            measure("plan_peak_mib", lambda: (peak_bytes(x.tables, device) - before) / 2**20)
        evict_at = x.planned()
        row["tiles_kept"], row["tiles_full"] = tiles_kept(evict_at, x.spec, x.compiled)
        row["tiles_ideal"] = tiles_ideal(evict_at)
        measure("fwd_ms", lambda: median_ms(x.forward, device))
        measure("fwd_bwd_ms", lambda: median_ms(x.forward_backward, device))
    if T not in dense:
        fwd, backend = dense_times(x.q, x.k, x.v, device, backward=False)
        both, another = dense_times(x.q, x.k, x.v, device, backward=True)
        dense[T] = dict(dense_fwd_ms=fwd, dense_fwd_bwd_ms=both, oom=[], causal_flex_fwd_ms=None,
                        dense_backend=backend if backend == another else f"{backend}, {another}")
        if device == "cuda":
            guarded(dense[T], "causal_flex_fwd_ms", lambda: causal_flex_ms(x.q, x.k, x.v, device), device)
    row |= {**dense[T], "oom": row["oom"] + dense[T]["oom"]}
    for name in ("fwd", "fwd_bwd"):
        if row[f"{name}_ms"] and row[f"dense_{name}_ms"]:
            row[f"ratio_{name}"] = row[f"{name}_ms"] / row[f"dense_{name}_ms"]
    if row["fwd_ms"] and T > args.window:
        lse = x.forward()[1]
        measure("transposed_ms", lambda: median_ms(lambda: x.transposed(lse, evict_at), device))
        measure("transposed_free_ms", lambda: median_ms(lambda: x.transposed(lse, None), device))
    return row


def tune_options(T, budget, args, device, options):
    """Try FORWARD, BACKWARD and TRANSPOSED one by one on random scores -> the best options, and a list of trials:
    what, options, ms (None: refused). A candidate is kept where it beats no option at all by more than 1 %."""
    x = Inputs("random", T, budget, args, device, {key: dict(value) for key, value in options.items()})
    lse, evict_at, trials = x.forward()[1], x.planned(), []
    for what, kind, candidates, fn in (("fwd", "attention", FORWARD, x.forward),
                                       ("fwd_bwd", "attention", BACKWARD, x.forward_backward),
                                       ("transposed", "transposed", TRANSPOSED, lambda: x.transposed(lse, evict_at))):
        given, best = x.options[kind], None
        for option in ({}, *candidates):
            x.options[kind] = {**given, **option}
            try:
                ms = median_ms(fn, device)
            except Exception as error:  # of Triton, Inductor or CUDA: too much shared memory, an option unknown here
                ms, text = None, (str(error).strip() or type(error).__name__).splitlines()[-1][:160]
            trials.append(dict(what=what, options=x.options[kind], ms=ms, note=None if ms else text))
            print(f"  {what} with {x.options[kind] or 'no option'}: " + (f"{ms:.3f} ms" if ms else text), flush=True)
            if ms and (best is None or ms < 0.99 * best[0]):
                best = ms, x.options[kind]
        x.options[kind] = best[1] if best else given
    return x.options, trials


def loss_curves(steps, device):
    """`steps` steps of train.py on traces with keys in the order of their lifetimes, and again in that of time: the
    same masks, sums in another order -> its losses by step, and how far they part, relative to the larger one."""
    import train  # it is no part of the other measurements
    found = dict(steps=steps)
    for name, flag in (("by_lifetime", "--sort"), ("by_time", "--no-sort")):
        with tempfile.TemporaryDirectory() as out:
            argv = ["--train-base", "--budget", "256", "--steps", str(steps), "--log-every", "1", "--eval-problems",
                    "1", "--batch-size", "16" if device == "cuda" else "1", "--out", out, flag]
            if train.main(argv):
                raise RuntimeError(f"train.py {' '.join(argv)} failed: see above")
            history = read_json(Path(out) / "log.json")["history"]
        found[name] = {key: [step[key] for step in history] for key in ("kl", "retention")}
    found["largest_difference"] = {key: max(abs(a - b) / max(a, b) for a, b in zip(
        found["by_lifetime"][key], found["by_time"][key])) for key in ("kl", "retention")}
    return found


def draw_attention(path, rows):
    """Time against T, both logarithmic: dense, ours, and ours if only visible pairs cost anything."""
    plt = pyplot()
    fig, axes = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    policy = "random" if any(r["policy"] == "random" for r in rows) else rows[0]["policy"]
    mine = sorted((r for r in rows if r["policy"] == policy), key=lambda r: r["T"])
    for ax, name, title in zip(axes, ("fwd", "fwd_bwd"), ("forward", "forward and backward")):
        dense = {r["T"]: r[f"dense_{name}_ms"] for r in mine if r[f"dense_{name}_ms"]}
        ax.plot(list(dense), list(dense.values()), "k-o", linewidth=2, label="dense, the fastest of SDPA")
        for i, budget in enumerate(sorted({r["budget"] for r in mine})):
            line = [r for r in mine if r["budget"] == budget and r[f"{name}_ms"]]
            style = dict(marker="s^vD"[i % 4], color=f"C{i % 10}")
            ax.plot([r["T"] for r in line], [r[f"{name}_ms"] for r in line], "-", **style, label=f"budget {budget}")
            line = [r for r in line if r["T"] in dense]
            ax.plot([r["T"] for r in line], [2 * r["tiles_ideal"] * dense[r["T"]] for r in line], ":", **style,
                    markerfacecolor="white", label=f"budget {budget}, ideal: dense x visible / causal pairs")
        lengths = sorted({r["T"] for r in mine})
        ax.set(xscale="log", yscale="log", xlabel="T, tokens", ylabel="ms", title=title)
        ax.set_xticks(lengths, [f"{T // 1024}k" if T % 1024 == 0 else str(T) for T in lengths])
        ax.minorticks_off()
        ax.grid(color="0.9")
        ax.legend(fontsize=8)
    r = mine[0]
    fig.suptitle(f"Attention, scores {policy}, batch {r['batch']}, {r['n_head']} query and {r['n_kv_head']} KV heads "
                 f"of {r['head_dim']}" + (": reduced, on a CPU, compares nothing" if r["reduced"] else ""), fontsize=10)
    fig.savefig(path, dpi=110)
    plt.close(fig)


def attention(args):
    """Attention over keys in lifetime order against dense attention, on random q, k, v.

    Row: policy (what ranks the keys. random; decay: random with 0.9995 a token; kvpop: the shipped scorer on validation
    traces laid end to end, heads from all its layers; streaming: the newest), T, budget, batch, n_head, n_kv_head,
    head_dim, tiles_kept (share of the (T / 128)^2 tiles that the kernel computes; dense causal: 0.5), tiles_full (those
    of them without a mask), tiles_ideal (mean lifetime / T), plan_ms (scores to tables), fwd_ms and fwd_bwd_ms (plan,
    tables and gathers included), dense_backend, dense_fwd_ms, dense_fwd_bwd_ms (SDPA, causal, its fastest backend in
    this process), ratio_fwd, ratio_fwd_bwd (ours / dense), transposed_ms (the pass that makes the scorer's targets, in
    its bounded form), transposed_free_ms (in its unbounded form), causal_flex_fwd_ms (FlexAttention, causal, time
    order), plan_peak_mib (what scores to tables take at most), kernel, reduced, oom (the figures for which memory did
    not suffice). With --train-steps the file has loss_curves too. Medians of up to 20 runs between CUDA events after
    two that do not count. Rows that the file has already are kept, so an interrupted run goes on.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        args.lengths, args.budgets = sorted({min(T, 1024) for T in args.lengths}), [256]
        args.batch, args.n_head, args.n_kv_head, args.head_dim, args.window = 1, 4, 2, 32, min(args.window, 64)
        print("no GPU: a reduced run on the dense reference, to show that it works; its times compare nothing")
    if min(args.lengths) < 1:
        raise ValueError(f"--lengths must be 1 or more, got {min(args.lengths)}")
    for budget in args.budgets:
        CacheSpec(args.n_sink, args.window, budget)  # refuses before any work
    shape = {name: getattr(args, name) for name in ("batch", "n_head", "n_kv_head", "head_dim", "n_sink", "window")}
    given = [option.partition("=") for option in args.kernel_options]
    if bad := ["".join(o) for o in given if not (o[2] in ("True", "False") or o[2].isdigit())]:
        raise ValueError(f"--kernel-options {bad[0]}: write NAME=NUMBER, NAME=True or NAME=False")
    given = {name: value == "True" if value in ("True", "False") else int(value) for name, _, value in given}
    heads = torch.empty(0, args.head_dim, device=device, dtype=torch.bfloat16)  # as Inputs has them on a GPU
    options = {name: {} if args.tune else flex_masks.best_options(name, heads) for name in ("attention", "transposed")}
    options["attention"] = given or options["attention"]
    settings, trials = dict(card=card(device), shape=shape), []
    Path(args.folder).mkdir(parents=True, exist_ok=True)
    rows = earlier_rows(args.out, strict=True, **settings)
    if args.tune:
        options, trials = tune_options(args.lengths[0], args.budgets[0], args, device, options)
        print(f"kernel options kept: {options}")
    extra, dense = dict(settings, kernel_options=options, tuning=trials), {}
    for policy in args.policies:
        for T in args.lengths:
            for budget in args.budgets:
                if any((r["policy"], r["T"], r["budget"]) == (policy, T, budget) for r in rows):
                    continue
                row = attention_row(policy, T, budget, args, device, options, dense)
                rows.append(dict(row, kernel_options=options))
                release(device)
                write_results(args.out, rows, device, **extra)
                print(f"{policy}, T {T}, budget {budget}: forward {rows[-1]['fwd_ms'] or -1:.2f} ms, dense "
                      f"{rows[-1]['dense_fwd_ms'] or -1:.2f} ms", flush=True)
    if args.train_steps:
        extra["loss_curves"] = loss_curves(args.train_steps, device)
        print(f"{args.train_steps} training steps by lifetime and by time: losses differ by at most "
              + ", ".join(f"{100 * x:.2g} % ({name})" for name, x in
                          extra["loss_curves"]["largest_difference"].items()))
    print_table(rows, ["policy", "T", "budget", "tiles_kept", "tiles_full", "tiles_ideal", "plan_ms", "fwd_ms",
                               "dense_fwd_ms", "ratio_fwd", "fwd_bwd_ms", "dense_fwd_bwd_ms", "ratio_fwd_bwd",
                               "transposed_ms", "transposed_free_ms", "causal_flex_fwd_ms",
                               "plan_peak_mib", "dense_backend", "reduced",
                               "oom"])
    picture = Path(args.folder) / f"{args.out}.png"
    draw_attention(picture, rows)
    print(f"wrote {write_results(args.out, rows, device, **extra)} and {picture}")


def add_options(names, run, text, options):
    """A subcommand of bench.py. names: parser.add_subparsers(...); options: flag -> (default, help, more)."""
    sub = names.add_parser(run.__name__, help=text, description=run.__doc__,
                           formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag, (default, about, more) in options.items():
        shown = "" if default is None else " (default: %(default)s)"
        sub.add_argument(flag, default=default, help=about + shown, **more)
    sub.set_defaults(run=run)


def register(names):
    numbers, number = dict(nargs="+", type=int), dict(type=int)
    add_options(names, attention, "sparse attention against dense, in time and memory", {
        "--lengths": ([16384, 32768, 65536, 131072], "tokens", numbers),
        "--budgets": ([2048, 4096], "entries per KV head", numbers),
        "--policies": (list(POLICIES), "what ranks the keys", dict(nargs="+", choices=POLICIES)),
        "--batch": (1, "rows", number), "--n-head": (32, "query heads", number),
        "--n-kv-head": (8, "KV heads", number), "--head-dim": (128, "of all heads", number),
        "--n-sink": (4, "first positions, never evicted", number), "--window": (256, "newest positions", number),
        "--tune": (False, "first try kernel options at the first length and budget, and use the best",
                   dict(action="store_true")),
        "--kernel-options": ([], "FlexAttention's, e.g. fwd_BLOCK_N=64 USE_TMA=True; none: best_options", dict(
            nargs="*", metavar="NAME=VALUE")),
        "--train-steps": (0, "also steps of train.py in both orders of the keys; 0: none", number),
        "--out": ("attention", "name of the JSON in assets/results", {}),
        "--folder": ("assets", "for the picture", {})})
