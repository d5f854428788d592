"""bench.py attention: what lifetime-sorted sparse attention costs against dense attention. To be merged into bench.py."""
import gc
import math
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import flex_masks
from bench import print_table, write_results
from flex_masks import TILE, CacheSpec, attention, effective_priority, lifetime_order, padded_dies, plan
from targets import transposed_lse

ATTENTION_FIGURE = "assets/attention.png"
DECAY = math.log(0.9995)  # per token: a token sinks by one standard deviation of the scores in 2,000 tokens


def median_ms(fn, device, repeats=20):
    """Median time of fn() in ms after a warm-up, each run between two CUDA events (a clock on a CPU)."""
    def once():
        if device != "cuda":
            start = time.perf_counter()
            fn()
            return 1e3 * (time.perf_counter() - start)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        fn()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)
    once()  # compiles
    first = once()
    repeats = max(3, min(repeats, int(2000 / max(first, 1e-3))))
    return statistics.median(once() for _ in range(repeats))


def tiles_kept(evict_at, spec, compiled):
    """Share of all (T / TILE)^2 tiles that the kernel computes, the mean over heads, and how many of them are full."""
    T = evict_at.shape[-1]
    chunk = min(flex_masks.bucket(T), -(-spec.n_slots // TILE) * TILE)
    make = flex_masks.compiled_lifetime_order if compiled else lifetime_order
    tables = make(padded_dies(evict_at), spec.n_slots, spec.window, chunk)[3:]
    partial, full = (tables[i].sum().item() / len(tables[i]) / (T / TILE)**2 for i in (0, 2))
    return partial + full, full


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
        except torch.OutOfMemoryError:
            gc.collect()
            continue
        except RuntimeError:  # this backend does not take these tensors
            continue
        if best[0] is None or ms < best[0]:
            best = ms, backend.name.lower().removesuffix("_attention")
    return best


def attention_row(T, budget, policy, args, device):
    """One row; None where a figure does not exist or memory ran out (`oom` names it)."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    B, H, H_kv, D, compiled = args.batch, args.n_head, args.n_kv_head, args.head_dim, device == "cuda"
    spec = CacheSpec(args.n_sink, args.window, budget)
    torch.manual_seed(T)
    row = dict(T=T, budget=budget, batch=B, n_head=H, n_kv_head=H_kv, head_dim=D, policy=policy)
    row.update(dict.fromkeys(("tiles_kept", "tiles_full", "tiles_ideal", "plan_ms", "fwd_ms", "fwd_bwd_ms",
                              "dense_backend", "dense_fwd_ms", "dense_fwd_bwd_ms", "ratio_fwd", "ratio_fwd_bwd",
                              "transposed_ms", "transposed_bounded_ms", "causal_flex_fwd_ms", "plan_peak_mib")))
    row.update(kernel="flex_attention" if device == "cuda" else "dense_reference", oom=[])
    q, k, v = (torch.randn(B, h, T, D, device=device, dtype=dtype) for h in (H, H_kv, H_kv))
    scores = torch.randn(B, H_kv, T, device=device) if policy != "streaming" else k.new_zeros(B, H_kv, T)
    log_gamma = torch.full((H_kv,), DECAY, device=device) if policy == "decay" else None
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    options = {name: value for name, value in (o.split("=") for o in args.kernel_options)}
    options = {name: value == "True" if value in ("True", "False") else int(value) for name, value in options.items()}

    def planned():
        return plan(effective_priority(scores, log_gamma), spec, compiled)

    def ordered():
        chunk = min(flex_masks.bucket(T), -(-spec.n_slots // TILE) * TILE)
        make = flex_masks.compiled_lifetime_order if compiled else lifetime_order
        return make(padded_dies(planned()), spec.n_slots, spec.window, chunk)

    def forward(tensors):
        return attention(*tensors, planned(), spec, compiled=compiled, kernel_options=options or None)

    def forward_backward():
        torch.autograd.grad(forward(inputs)[0], inputs, q)

    def forward_only():
        with torch.no_grad():
            return forward((q, k, v))

    def causal_flex():
        with torch.no_grad():
            return attention(q, k, v, causal_plan, block_mask=causal_mask)

    def guarded(name, fn):
        try:
            row[name] = median_ms(fn, device)
        except torch.OutOfMemoryError:
            row["oom"].append(name)
            gc.collect()
            torch.cuda.empty_cache()

    guarded("plan_ms", ordered)
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        made = ordered()
        row["plan_peak_mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
        del made
    evict_at = planned()
    row["tiles_kept"], row["tiles_full"] = tiles_kept(evict_at, spec, compiled)
    row["tiles_ideal"] = (evict_at.clamp(max=T) - torch.arange(T, device=device)).double().mean().item() / T
    guarded("fwd_ms", forward_only)
    guarded("fwd_bwd_ms", forward_backward)
    row["dense_fwd_ms"], row["dense_backend"] = dense_times(q, k, v, device, backward=False)
    row["dense_fwd_bwd_ms"], backend = dense_times(q, k, v, device, backward=True)
    if backend != row["dense_backend"]:
        row["dense_backend"] = f"{row['dense_backend']}, {backend}"
    for name in ("fwd", "fwd_bwd"):
        if row[f"{name}_ms"] and row[f"dense_{name}_ms"]:
            row[f"ratio_{name}"] = row[f"{name}_ms"] / row[f"dense_{name}_ms"]
    if T > spec.window and "fwd_ms" not in row["oom"]:
        lse, lengths = forward_only()[1], torch.full((B,), T, device=device)
        for name, given in (("transposed_ms", None), ("transposed_bounded_ms", evict_at)):
            with torch.no_grad():
                guarded(name, lambda: transposed_lse(q, k, lse, spec.window, lengths, given, 2.0, options or None))
    if device == "cuda":
        causal_plan = flex_masks.keep_everything(B, 1, T, device)
        causal_mask = flex_masks.evict_at_block_mask(causal_plan)
        guarded("causal_flex_fwd_ms", causal_flex)
    return row


def trained_rows(args, device):
    """Tiles of the shipped scorer on real traces: a row per layer, shares only (its heads are too small to time)."""
    from data.traces import FAMILIES
    from decode import weights_folder
    from model import load_model
    from scorer import load_scorers, state_entries
    from train import policy_attend, problem_batches
    rows = []
    for folder in args.retrofit:
        scorers, settings = load_scorers(folder)
        model = load_model(weights_folder(folder, settings), device).eval()
        spec = CacheSpec(settings["n_sink"], settings["window"], settings["budget"],
                         state_entries(settings["policy"], model.config.head_dim))

        def watch(layer, q, k, lse, scores, evict_at):
            T, lives = evict_at.shape[-1], evict_at.clamp(max=evict_at.shape[-1])
            kept, full = tiles_kept(evict_at, spec, False)
            ideal = (lives - torch.arange(T, device=device)).double().mean().item() / T
            rows.append(dict(T=T, budget=spec.budget, batch=len(evict_at), n_head=q.shape[1],
                             n_kv_head=k.shape[1], head_dim=k.shape[3], policy=f"{settings['policy']}, layer {layer}",
                             tiles_kept=kept, tiles_full=full, tiles_ideal=ideal))
        for idx, lengths, _, _ in problem_batches(1, device, 2, "validation", FAMILIES):
            with torch.no_grad():
                model(idx, policy_attend(scorers.to(device), spec, lengths, watch))
            break
    return rows


def training_curves(args, device):
    """The same `--train-steps` steps of a full retrofit with keys in lifetime order and in time order."""
    import json

    import train
    curves, sorted_attention = {}, flex_masks.lifetime_attention
    for order in ("lifetime", "time"):
        with tempfile.TemporaryDirectory() as folder:
            if order == "time":
                flex_masks.lifetime_attention = lambda q, k, v, evict_at, spec, compiled, kernel_options: (
                    attention(q, k, v, evict_at, kernel_options=kernel_options))
            try:
                code = train.main(["--train-base", "--model", args.base, "--steps", str(args.train_steps), "--out",
                                   f"{folder}/run", "--log-every", "1", "--eval-problems", "1", "--device", device])
            finally:
                flex_masks.lifetime_attention = sorted_attention
            if code:
                raise ValueError(f"the training run in {order} order ended with code {code}")
            curves[order] = json.loads(Path(folder, "run", "log.json").read_text())["history"]
    names = [name for name, value in curves["time"][0].items() if name in ("kl", "retention", "recall")]
    worst = {name: max(abs(a[name] - b[name]) / max(abs(b[name]), 1e-6) for a, b in zip(*curves.values()))
             for name in names}
    return {"steps": args.train_steps, "largest_relative_difference": worst, **curves}


def attention_figure(rows, path):
    """Time against T, log-log: dense, ours, and what ours would cost if the kernel did only visible pairs."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    fig, axes = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    timed = [r for r in rows if r["policy"] == "random"]
    for ax, name, title in zip(axes, ("fwd", "fwd_bwd"), ("forward", "forward + backward")):
        dense = {r["T"]: r[f"dense_{name}_ms"] for r in timed if r[f"dense_{name}_ms"]}
        ax.plot(list(dense), list(dense.values()), "k-o", label="dense, SDPA")
        for i, budget in enumerate(sorted({r["budget"] for r in timed})):
            mine = [r for r in timed if r["budget"] == budget and r[f"{name}_ms"]]
            ax.plot([r["T"] for r in mine], [r[f"{name}_ms"] for r in mine], f"C{i}-o", label=f"budget {budget}")
            mine = [r for r in mine if r[f"dense_{name}_ms"]]
            ax.plot([r["T"] for r in mine], [2 * r["tiles_ideal"] * r[f"dense_{name}_ms"] for r in mine], f"C{i}:",
                    label=f"budget {budget}, ideal: dense time x visible pairs / causal pairs")
        ax.set(xscale="log", yscale="log", xlabel="T, tokens", ylabel="ms", title=title)
        ax.set_xticks(sorted(dense) or [1], [f"{T // 1024}k" if T >= 1024 else T for T in sorted(dense) or [1]])
        ax.minorticks_off()
        ax.grid(alpha=0.3)
        ax.legend(fontsize=8)
    fig.savefig(path, dpi=110)
    plt.close(fig)


def attention_bench(args):
    """Sparse attention over keys in lifetime order against dense attention, random q, k, v.

    Row: T, budget, batch, n_head, n_kv_head, head_dim, policy (random; decay: log gamma = ln 0.9995; streaming; kvpop:
    the shipped scorer on real traces, tiles only), tiles_kept (share of the (T / 128)^2 tiles that the kernel computes;
    dense causal is 0.5), tiles_full (those that need no mask), tiles_ideal (mean lifetime / T), plan_ms (scores to
    tables), fwd_ms and fwd_bwd_ms (plan, tables and gathers included), dense_backend (SDPA's fastest here),
    dense_fwd_ms, dense_fwd_bwd_ms, ratio_fwd, ratio_fwd_bwd (ours / dense), transposed_ms and transposed_bounded_ms
    (the target's pass), causal_flex_fwd_ms, plan_peak_mib (memory that scores to tables take), kernel, oom. Medians of
    up to 20 runs between CUDA events. On a CPU sizes are reduced and kernel says dense_reference: times there compare
    nothing.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        args.lengths, args.budgets = [min(T, 2048) for T in args.lengths[:1]], [512]
        args.n_head, args.n_kv_head, args.head_dim, args.window = 4, 2, 32, 64
        print("no GPU: a reduced run on the dense reference, to show that it works; its times mean nothing")
    rows = []
    for policy in args.policies:
        for T in args.lengths:
            for budget in args.budgets:
                if policy == "random" or T <= 32768:
                    rows.append(attention_row(T, budget, policy, args, device))
                    print(rows[-1], flush=True)
                    gc.collect()
                    if device == "cuda":
                        torch.cuda.empty_cache()
                    write_results("attention", rows, device)
    rows += trained_rows(args, device)
    extra = {"training": training_curves(args, device)} if args.train_steps else {}
    print_table(rows, ["T", "budget", "policy", "tiles_kept", "tiles_full", "tiles_ideal", "plan_ms", "fwd_ms",
                       "dense_fwd_ms", "ratio_fwd", "fwd_bwd_ms", "dense_fwd_bwd_ms", "ratio_fwd_bwd", "transposed_ms",
                       "transposed_bounded_ms", "causal_flex_fwd_ms", "plan_peak_mib", "dense_backend"])
    if extra:
        print(f"training, {args.train_steps} steps: {extra['training']['largest_relative_difference']}")
    attention_figure(rows, ATTENTION_FIGURE)
    print(f"wrote {write_results('attention', rows, device, **extra)} and {ATTENTION_FIGURE}")


def add_attention_options(names, formatter):
    """The sub-command of bench.py's parser: names = parser.add_subparsers(...)."""
    sub = names.add_parser("attention", help="sparse attention against dense, in time and memory",
                           description=attention_bench.__doc__, formatter_class=formatter)
    sub.add_argument("--lengths", nargs="*", type=int, default=[16384, 32768, 65536, 131072],
                     help="tokens (default: 16k to 128k)")
    sub.add_argument("--budgets", nargs="*", type=int, default=[2048, 4096], help="(default: 2048 4096)")
    sub.add_argument("--policies", nargs="*", default=["random", "decay", "streaming"],
                     choices=["random", "decay", "streaming"], help="all but random up to 32k (default: all)")
    sub.add_argument("--retrofit", nargs="*", default=["assets/kvpop"], metavar="FOLDER",
                     help="scorers whose tiles are counted on real traces (default: %(default)s)")
    sub.add_argument("--base", default="assets/base", help="base of the training comparison (default: %(default)s)")
    sub.add_argument("--train-steps", type=int, default=50, help="of each training run; 0: none (default: %(default)s)")
    for name, value in (("batch", 1), ("n-head", 32), ("n-kv-head", 8), ("head-dim", 128), ("n-sink", 4),
                        ("window", 256)):
        sub.add_argument(f"--{name}", type=int, default=value, help="(default: %(default)s)")
    sub.add_argument("--kernel-options", nargs="*", default=[], metavar="NAME=VALUE",
                     help="FlexAttention's, e.g. fwd_BLOCK_N=64 USE_TMA=True")
    sub.set_defaults(run=attention_bench)


if __name__ == "__main__":  # until it is merged
    import argparse
    parser = argparse.ArgumentParser()
    add_attention_options(parser.add_subparsers(required=True), argparse.HelpFormatter)
    args = parser.parse_args()
    args.run(args)
