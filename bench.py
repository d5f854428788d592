"""Measurements that anyone can repeat: `python bench.py NAME` prints a table and writes assets/results/NAME.json.

    python bench.py first-look      pass@1 on unseen generated problems: KVpop against dense, streaming, random, knorm
                                    and the oracle, at every budget that a retrofitted checkpoint is given for
    python bench.py oracle          what future attention itself, as the score, keeps right on the base: is the task one
                                    that a budget can hold, and which target is the better teacher

Each JSON holds name, command, commit, date, device, torch and rows; the tables of the README are made from these files.
Losing rows stay in. What a row means stands beside the function that makes it.
"""
import argparse
import json
import os
import random
import sys
import time
from pathlib import Path

import torch

from data.tokenizer import EOT, decode
from data.traces import FAMILIES, MAX_LENGTH, check, make_problem
from decode import generate, weights_folder
from flex_masks import CacheSpec
from model import load_model
from scorer import load_scorers, make_scorers, state_entries
from train import Settings, evaluate, provenance

RESULTS = Path("assets/results")
GEOMETRY = {"n_sink": Settings.n_sink, "window": Settings.window}  # where no retrofit says otherwise


def write_results(name, rows, device, **extra):
    """assets/results/NAME.json, whole or not at all."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    content = {"name": name, "command": " ".join(["python", *sys.argv]), **provenance(device), **extra, "rows": rows}
    path.with_suffix(".tmp").write_text(json.dumps(content, indent=1) + "\n")
    os.replace(path.with_suffix(".tmp"), path)
    return path


def earlier_rows(name, **settings):
    """Rows of an earlier run of the same benchmark with the same settings; [] where there is none."""
    path = RESULTS / f"{name}.json"
    earlier = json.loads(path.read_text()) if path.is_file() else {}
    return earlier["rows"] if earlier and all(earlier.get(k) == v for k, v in settings.items()) else []


def print_table(rows, columns):
    """Columns of equal width, numbers to four digits."""
    def cell(value):
        return "-" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)
    table = [list(columns)] + [[cell(row.get(c)) for c in columns] for row in rows]
    widths = [max(len(line[i]) for line in table) for i in range(len(columns))]
    for line in table:
        print("  ".join(text.rjust(width) for text, width in zip(line, widths)))


def bootstrap(values, reference=None, n=2000, seed=0):
    """95 % interval over problems of mean(values), or of mean(values) / mean(reference) with problems kept in pairs."""
    rng, m, stats = random.Random(seed), len(values), []
    for _ in range(n):
        pick = rng.choices(range(m), k=m)
        top = sum(values[i] for i in pick)
        bottom = m if reference is None else sum(reference[i] for i in pick)
        stats.append(top / bottom if bottom else 0.0)
    stats.sort()
    return stats[int(0.025 * n)], stats[int(0.975 * n)]


# ---------------------------------------------------------------------------------------------------------------------

def first_look(args):
    """pass@1, greedy, on the first `--problems` test problems, half of each family.

    Row: policy, model (folder name), weights (base or adapted), budget (entries a KV head, scorer state included; None
    = dense), compression_ratio (1 - budget / mean length), family (arith, walk, both), problems, right (final answer
    right), pass_at_1 with ci_low, ci_high (bootstrap over problems), relative (pass_at_1 / dense's) with relative_low,
    relative_high (paired bootstrap), traces_right (every byte right), token_accuracy (teacher-forced), decoded: true
    when the policy really generated token by token under its budget. The oracle needs the future, so it is
    teacher-forced on the right trace and its `right` counts whole traces, which under-counts answers if anything.
    right_bits: one digit a problem. Rows that the file has already are kept: delete it to start over.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    per_family = args.problems // len(FAMILIES)
    if per_family < 1:
        raise ValueError(f"--problems {args.problems} is less than one of each family: use {len(FAMILIES)} or more")
    problems = [make_problem(family, i, "test") for family in FAMILIES for i in range(per_family)]
    mean_length = sum(len(p.prompt) + len(p.trace) + 1 for p in problems) / len(problems)
    base = load_model(args.base, device, torch.bfloat16 if device == "cuda" else torch.float32).eval()
    config, jobs, retrofits = base.config, [("dense", args.base, None)], {}
    for folder in args.retrofit:
        retrofits[folder] = load_scorers(folder)[1]
    for budget in sorted(args.budgets or {settings["budget"] for settings in retrofits.values()}):
        jobs += [(policy, args.base, budget) for policy in args.policies]
    jobs += [(settings["policy"], folder, settings["budget"]) for folder, settings in retrofits.items()]
    plain = next(iter(retrofits.values()), GEOMETRY)  # the training-free policies share one geometry
    rows, dense_right = earlier_rows("first-look", base=args.base, problems=len(problems)), None
    for policy, folder, budget in jobs:
        start, model_name = time.time(), Path(folder).resolve().name
        done = [row for row in rows if (row["policy"], row["model"], row["budget"]) == (policy, model_name, budget)]
        if done:  # an interrupted run goes on where it stopped
            if policy == "dense":
                dense_right = [bit == "1" for bit in done[0]["right_bits"]]
            continue
        model, weights, spec, scorers = base, "base", None, None
        if budget is not None:
            settings = retrofits.get(folder, plain)
            charge = state_entries(policy, config.head_dim, config.group_size, settings["window"])
            spec = CacheSpec(settings["n_sink"], settings["window"], budget, charge)
            if folder == args.base:
                scorers = make_scorers(policy, n_layer=config.n_layer, n_kv_head=config.n_kv_head,
                                       head_dim=config.head_dim, window=spec.window)
            else:
                scorers = load_scorers(folder)[0]
                lies = weights_folder(folder, settings)
                if lies.resolve() != Path(args.base).resolve():  # else the scorer was trained on the frozen base
                    model, weights = load_model(lies, device, base.model.embed_tokens.weight.dtype).eval(), "adapted"
            scorers = scorers.to(device)
        forced = evaluate(model.float(), device, per_family, spec, scorers, split="test")
        model.to(torch.bfloat16 if device == "cuda" else torch.float32)
        if policy == "oracle":
            right = traces = [ok for family in FAMILIES for ok in forced["right"][family]]
        else:
            result = generate(model, [list(p.prompt.encode()) for p in problems], spec, scorers, stop_ids=[EOT],
                              max_new_tokens=MAX_LENGTH - min(len(p.prompt) for p in problems), graph=args.graph)
            verdicts = [check(p, decode(t for t in tokens if t <= EOT)) for p, tokens in zip(problems, result.tokens)]
            right, traces = [v.answer_right for v in verdicts], [v.trace_right for v in verdicts]
        dense_right = right if policy == "dense" else dense_right
        for family in ("both", *FAMILIES):
            mine = [i for i, p in enumerate(problems) if family in ("both", p.family)]
            ok, reference = [right[i] for i in mine], [dense_right[i] for i in mine]
            low, high = bootstrap(ok)
            relative_low, relative_high = bootstrap(ok, reference)
            both = family == "both"
            rows.append(dict(
                policy=policy, model=model_name, weights=weights, budget=budget,
                compression_ratio=0.0 if budget is None else 1 - budget / mean_length, family=family, problems=len(ok),
                right=sum(ok), pass_at_1=sum(ok) / len(ok), ci_low=low, ci_high=high,
                relative=sum(ok) / max(1, sum(reference)), relative_low=relative_low, relative_high=relative_high,
                traces_right=sum(traces[i] for i in mine), decoded=policy != "oracle",
                token_accuracy=forced["token_accuracy"] if both else None, recall=forced["recall"] if both else None,
                right_bits="".join("01"[bool(x)] for x in ok) if both else None))
        write_results("first-look", rows, device, base=args.base, problems=len(problems), mean_length=mean_length)
        print(f"{policy} at {budget or 'any length'}: {sum(right)} of {len(right)} right, {sum(traces)} whole traces, "
              f"{time.time() - start:.0f} s", flush=True)
    print_table(rows, ["policy", "model", "weights", "budget", "compression_ratio", "family", "right", "problems",
                       "pass_at_1", "ci_low", "ci_high", "relative", "relative_low", "relative_high", "traces_right",
                       "token_accuracy"])
    print(f"wrote {RESULTS / 'first-look.json'}")


def oracle(args):
    """Teacher-forced on the first `--problems` validation problems, half of each family, on the base: the attention
    that each token really receives later decides what is kept. An upper bound for any scorer that learns this target.

    Row: policy (dense or oracle), power (of the mean over future queries in the target; 1 is the paper's mean mass),
    budget (n_sink + window + n_select + the state that a KVpop scorer would cost), family, problems, traces_right,
    token_accuracy, wrong_per_trace (trace bytes that come out wrong), extra_per_trace (wrong_per_trace less dense's).
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    base = load_model(args.base, device).eval()
    config, per_family, rows = base.config, args.problems // len(FAMILIES), []
    if per_family < 1 or not all(power > 0 for power in args.powers):
        raise ValueError(f"oracle wants --problems of at least {len(FAMILIES)} and --powers above 0")
    jobs = [("dense", None, None)] + [("oracle", power, budget) for budget in args.budgets for power in args.powers]
    for policy, power, budget in jobs:
        spec = scorers = None
        if policy == "oracle":
            spec = CacheSpec(**GEOMETRY, budget=budget, state_entries=state_entries("kvpop", config.head_dim))
            scorers = make_scorers("oracle", n_layer=config.n_layer, n_kv_head=config.n_kv_head,
                                   head_dim=config.head_dim, window=spec.window, power=power)
        for family in FAMILIES:
            result = evaluate(base, device, per_family, spec, scorers, families=(family,))
            wrong = result["wrong"] / per_family
            dense = wrong if policy == "dense" else next(r["wrong_per_trace"] for r in rows if r["family"] == family)
            rows.append(dict(policy=policy, power=power, budget=budget, family=family, problems=per_family,
                             traces_right=result["traces_right"], token_accuracy=result["token_accuracy"],
                             wrong_per_trace=wrong, extra_per_trace=wrong - dense))
    print_table(rows, list(rows[0]))
    print(f"wrote {write_results('oracle', rows, device, base=args.base)}")


def parse_args(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    sub = names.add_parser("first-look", help="pass@1 of every policy on generated problems",
                           description=first_look.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sub.add_argument("--base", default="assets/base", help="base checkpoint (default: %(default)s)")
    sub.add_argument("--retrofit", nargs="*", default=["assets/kvpop"], metavar="FOLDER",
                     help="retrofitted checkpoints, one a budget (default: %(default)s)")
    sub.add_argument("--policies", nargs="*", default=["streaming", "random", "knorm", "oracle"],
                     help="training-free policies, run on the base at each budget (default: %(default)s)")
    sub.add_argument("--budgets", nargs="*", type=int,
                     help="budgets of the training-free policies (default: those of the retrofits)")
    sub.add_argument("--problems", type=int, default=512,
                     help="test problems, half of each family (default: %(default)s)")
    sub.add_argument("--graph", action=argparse.BooleanOptionalAction, default=True,
                     help="on a GPU, replay decode steps as a CUDA graph (default: %(default)s)")
    sub.set_defaults(run=first_look)
    sub = names.add_parser("oracle", help="future attention itself as the score", description=oracle.__doc__,
                           formatter_class=argparse.RawDescriptionHelpFormatter)
    sub.add_argument("--base", default="assets/base", help="base checkpoint (default: %(default)s)")
    sub.add_argument("--problems", type=int, default=16,
                     help="validation problems, half of each family (default: %(default)s)")
    sub.add_argument("--budgets", nargs="*", type=int, default=[256, 512], help="(default: 256 512)")
    sub.add_argument("--powers", nargs="*", type=float, default=[1.0, 2.0], help="(default: 1 2)")
    sub.set_defaults(run=oracle)
    return parser.parse_args(argv)


def main(argv=None):
    args = parse_args(argv)
    try:
        args.run(args)
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
