"""Measurements that anyone can repeat: `python bench.py NAME` prints a table and writes assets/results/NAME.json.

    python bench.py quality         pass@1, token accuracy, KL and recall of every policy at every budget
    python bench.py tune            the best setting of each training-free policy, on validation problems, for quality
    python bench.py figures         pictures of what quality or text wrote
    python bench.py first-look      pass@1 on unseen generated problems: KVpop against dense, streaming, random, knorm
                                    and the oracle, at every budget that a retrofitted checkpoint is given for
    python bench.py oracle          what future attention itself, as the score, keeps right on the base: is the task one
                                    that a budget can hold, and which target is the better teacher
    python bench.py attention       time and memory of sparse attention against dense, from scores to gradients
    python bench.py decode          time, bytes and memory of a decode step at each length, dense and with a budget
    python bench.py train           time, memory and utilisation of a training step, plain distillation and retrofit;
                                    under torchrun, on many GPUs
    python bench.py checkpoint      random weights of a model's shape, to try train.py and decode.py at full size
    python bench.py text            perplexity, accuracy and KL of a real checkpoint on real text, by position
    python bench.py needle          numbers that a real checkpoint recalls from real text, by distance
    python bench.py health          text that a real checkpoint generates under a budget, read by the dense model
    python bench.py answers         maths and multiple choice with a real checkpoint, generated under a budget

Each JSON holds name, command, commit, date, device, torch and rows; the tables of the README are made from these files.
Losing rows stay in. What a row means stands beside the function that makes it.
"""
import argparse
import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F

from data import answer_bench, parallel, random_checkpoint, speed, speed_decode, speed_train, text_bench
from data.batches import collate_problems, response_mask
from data.cases import (FREE, GEOMETRY, SAMPLING, Case, check_names, device_and_dtype, free_case, impossible,
                        retrofit_case, training)
from data.figures import draw_accuracy, draw_positions, draw_recall, draw_retention
from data.results import (RESULTS, Clock, Table, bootstrap, earlier_rows, matches, pass_rates, print_table, require,
                          write_results)
from data.tokenizer import EOT, decode
from data.traces import FAMILIES, MAX_LENGTH, check, make_problem, worth_keeping
from decode import force, generate
from flex_masks import CacheSpec
from model import ModelConfig, causal_attend, fingerprint, load_model, read_json
from scorer import check_policy, geometry, make_scorers, state_entries
from targets import RetentionWatch, policy_attend
from train import evaluate

KINDS = ("filler", "definition", "working", "stated value")  # of bytes: prompt or trace, worth keeping or not

# ---------------------------------------------------------------------------------- What a policy writes, what it keeps

def decoded(model, problems, spec, scorers, graph=True, rollouts=1, seed=0, rows=2048, **sampling):
    """Generate `rollouts` traces for each problem, at most `rows` at a time -> verdicts (a list a problem, in order),
    most slots that any head filled. Rollout r of problem i draws the same numbers under every policy."""
    jobs, verdicts, peak = [(p, r) for p in problems for r in range(rollouts)], [], 0
    for start in range(0, len(jobs), rows):
        part = jobs[start:start + rows]
        result = generate(model, [list(p.prompt.encode()) for p, _ in part], spec, scorers, stop_ids=[EOT], graph=graph,
                          max_new_tokens=MAX_LENGTH - min(len(p.prompt) for p in problems),
                          seed=[(seed * 10**6 + p.index) * 1000 + r for p, r in part], **sampling)
        verdicts += [check(p, decode(t for t in tokens if t <= EOT)) for (p, _), tokens in zip(part, result.tokens)]
        peak = max(peak, result.cache.peak_entries() if result.cache else 0)
    return [verdicts[i:i + rollouts] for i in range(0, len(verdicts), rollouts)], peak


def kinds_of_bytes(problem, T, n_sink):
    """(T, 4) fp64, one-hot: which of KINDS each byte is; zeros for sinks, which no policy may drop, and for pads."""
    keep = torch.tensor(worth_keeping(problem))
    kind = F.one_hot(torch.where(torch.arange(len(keep)) < len(problem.prompt), 0, 2) + keep, len(KINDS)).double()
    kind[:n_sink] = 0.0
    return F.pad(kind, (0, 0, 0, T - len(keep)))


@torch.no_grad()
def forced(model, base, problems, spec, scorers, graph=True):
    """Teacher-forced along the right traces, in the dtype of the weights. Static policies: one masked pass; dynamic
    ones: step by step, since what they keep follows from what they kept.
    -> dict: token_accuracy (of trace bytes and the end), kl (KL(dense base || model under the policy) in nats, whole
    vocabulary, mean over the same), right (a bool a problem: the whole trace, as greedy decoding would write it),
    recall, recall_by_layer, retention (targets.RetentionWatch; None where they have no meaning)."""
    device, dynamic = base.model.embed_tokens.weight.device, scorers is not None and scorers[0].dynamic
    watch = None if scorers is None or dynamic else RetentionWatch(scorers, spec)
    order = sorted(range(len(problems)), key=lambda i: len(problems[i].prompt) + len(problems[i].trace))  # less padding
    size = len(order) if dynamic else 1 if device.type == "cpu" else 64
    right, wrong, kl, total = [None] * len(problems), 0, 0.0, 0

    def compare(logits, truth, target):  # logits (.., V), hidden states of the base (.., C), ids (..) -> hit, KL (..)
        wide = torch.promote_types(logits.dtype, torch.float32)
        log_p, log_q = (x.to(wide).log_softmax(-1) for x in (base.unembed(truth), logits))
        return logits.argmax(-1) == target, (log_p.exp() * (log_p - log_q)).sum(-1)
    for part in (order[i:i + size] for i in range(0, len(order), size)):
        batch = [problems[i] for i in part]
        idx, lengths, starts = (x.to(device) for x in collate_problems(batch, device.type == "cuda" and MAX_LENGTH))
        truth, T = base(idx, causal_attend), idx.shape[1]
        if dynamic:
            steps, rows = [], [row[:n] for row, n in zip(idx.tolist(), lengths.tolist())]
            force(model, rows, spec, scorers, graph=graph, on_logits=lambda t, logits: steps.append(
                compare(logits, truth[:, t], idx[:, min(t + 1, T - 1)])))
            hit, apart = (torch.stack(x[:-1], dim=1) for x in zip(*steps))  # (B, longest - 1)
        else:
            attend = causal_attend
            if watch:
                watch.lengths = lengths
                watch.kinds = torch.stack([kinds_of_bytes(p, T, spec.n_sink) for p in batch]).to(device)
                attend = policy_attend(scorers, spec, lengths, watch, starts + 1)
            hit, apart = compare(model.unembed(model(idx, attend)[:, :-1]), truth[:, :-1], idx[:, 1:])
        mask = response_mask(T, lengths, starts)[:, :hit.shape[1]]
        for i, ok in zip(part, (hit | ~mask).all(1).tolist()):
            right[i] = ok
        wrong, total = wrong + (~hit & mask).sum().item(), total + mask.sum().item()
        kl += apart.masked_fill(~mask, 0.0).double().sum().item()
    layers = watch.recall() if watch else None
    return dict(token_accuracy=1 - wrong / total, kl=kl / total, right=right,
                recall=sum(layers) / len(layers) if layers else None, recall_by_layer=layers,
                retention=dict(zip(KINDS, watch.retention())) if watch else None)

# ----------------------------------------------------------------------------------------------- Quality and its tuning

def best_setting(case, grid, task):
    """The case with what `tune` found best for its policy, task and budget: most traces right, then most tokens. At a
    budget that was not tuned, that of the nearest one, the window as the same share of the budget."""
    mine = [r for r in grid if (r["policy"], r["task"]) == (case.policy, task) and r["traces_right"] is not None]
    if not mine:
        return case
    at = min((r["budget"] for r in mine), key=lambda budget: abs(budget - case.budget))
    best = max((r for r in mine if r["budget"] == at), key=lambda r: (r["traces_right"], r["token_accuracy"]))
    return replace(case, n_sink=best["n_sink"], window=max(1, round(best["window"] * case.budget / at)),
                   options=best["options"], tuned_at=at)


def quality_cases(args, task, grid):
    retrofits = [retrofit_case(folder, args.base) for folder in args.retrofit]
    check_names(retrofits)
    cases = [Case("dense", args.base, args.base)]
    for budget in sorted(set(args.budgets or [case.budget for case in retrofits] or [256, 512])):
        cases += [best_setting(free_case(policy, args.base, budget, retrofits), grid, task)
                  for policy in args.policies if policy != "dense"]
    for case in retrofits:
        cases.append(case)
        if case.policy == "kvpop" and case.adapted and "oracle" in args.policies:
            cases.append(replace(case, policy="oracle", trained=False, options={}))
    return cases


def quality(args):
    """pass@1 of every policy under every budget on unseen problems, one row a way of decoding: greedy on the first
    --problems test problems of each family (n_rollouts 1), and --rollouts samples (temperature 0.6, top-p 0.95, top-k
    20) on the first --rollout-problems. Retrofits run at their own budget; dense and the training-free policies on the
    base, as assets/results/tune.json says where it is there; the oracle also on the weights of each adapted kvpop.

    Row: policy (POLICY-plus: training-free, on weights adapted under it), task (family), budget (entries a KV head,
    scorer state included; None = dense), compression_ratio (1 - budget / mean length), pass_at_1 (share of right
    answers) with ci_low and ci_high (its 95 % bootstrap interval over problems; rollouts are averaged per problem
    first), relative (pass_at_1 / the dense base's, same problems, same n_rollouts) with relative_low and relative_high
    (paired bootstrap); teacher-forced on forced_problems: token_accuracy, kl (nats a trace byte, from the dense base),
    traces_right (share of whole traces), recall (of what future attention would keep; static policies) with
    recall_by_layer, retention (share of later queries that still see a token, by kind of byte and layer); n_problems,
    n_rollouts, seed (of sampling and policy random), weights (base or adapted), trained_tokens (0: nothing is trained),
    train_seed, model (folder), checkpoint (CRC of its weights), n_sink, window, options, tuned_at (the budget of the
    grid that gave them), peak_entries (most entries held, state included), right (right rollouts of each problem),
    seconds. decoded false: the oracle needs the future, so whole traces, teacher-forced, stand in for greedy answers,
    which under-counts if anything. note: why a policy is impossible at a budget; pass_at_1 is then None.

    Rows that the file has already are kept, so an interrupted run goes on; other settings need another --out.
    """
    device, dtype = device_and_dtype(args)
    require(args, problems=1, rollout_problems=1, rollouts=0, forced_problems=1, rows=1)
    config, mine = ModelConfig.from_dict(read_json(Path(args.base) / "config.json")), fingerprint(args.base)
    grid = earlier_rows("tune", base_checkpoint=mine)
    jobs = [(task, case, case.spec(config)) for task in args.families for case in quality_cases(args, task, grid)]
    settings = dict(base_checkpoint=mine, problems=args.problems, rollout_problems=args.rollout_problems,
                    forced_problems=args.forced_problems, seed=args.seed, dtype=str(dtype)[6:])
    most = max(args.problems, args.rollout_problems if args.rollouts > 1 else 0)
    table, clock = Table(args.out, device, dict(base=args.base), **settings), Clock(len(jobs))
    base = load_model(args.base, device, dtype).eval()
    if plain := sorted({case.policy for _, case, _ in jobs if case.policy in FREE and case.tuned_at is None}):
        print(f"default settings, python bench.py tune has found none: {', '.join(plain)}")
    for task, case, spec in jobs:
        clock.start()
        problems = [make_problem(task, i, "test") for i in range(most)]
        lengths = [len(p.prompt) + len(p.trace) + 1 for p in problems[:args.problems]]
        who = dict(policy=case.policy, task=task, budget=case.budget, model=Path(case.folder).resolve().name)
        how = dict(weights="adapted" if case.adapted else "base", checkpoint=fingerprint(case.folder, case.weights),
                   n_sink=spec and spec.n_sink, window=spec and spec.window, options=case.options)
        done = table.having(who, how)
        ways = [(1, problems[:args.problems])]
        if args.rollouts > 1 and case.policy != "oracle":
            ways.append((args.rollouts, problems[:args.rollout_problems]))
        ways = [way for way in ways if not any(r["n_rollouts"] == way[0] for r in done)]
        if not ways:
            continue
        model, spec, scorers = case.load(base, args.seed)
        row = dict(done[0]) if done else {}
        if not row:
            tokens, train_seed = training(case.folder) if case.trained or case.adapted else (0, None)
            few = scorers is not None and scorers[0].dynamic  # these take a step for each token
            some = problems[:args.forced_problems if few else args.problems]
            note = impossible(case, spec, max(len(p.prompt) for p in problems))
            result = dict.fromkeys(("token_accuracy", "kl", "recall")) if note else forced(
                model, base, some, spec, scorers, args.graph)
            bits = result.pop("right", None)
            row = dict(**who, compression_ratio=1 - case.budget * len(lengths) / sum(lengths) if spec else 0.0, **how,
                       **result, traces_right=sum(bits) / len(bits) if bits else None, forced_problems=len(some),
                       seed=args.seed, trained_tokens=tokens, train_seed=train_seed, tuned_at=case.tuned_at,
                       decoded=case.policy != "oracle", note=note)
        for n_rollouts, some in ways:
            right = peak = None
            if not row["decoded"]:
                right = [int(bit) for bit in bits]
            elif not row["note"]:
                verdicts, peak = decoded(model, some, spec, scorers, args.graph, n_rollouts, args.seed, args.rows,
                                         **(SAMPLING if n_rollouts > 1 else {}))
                right = [sum(v.answer_right for v in rollouts) for rollouts in verdicts]
                peak += spec.state_entries if spec else 0
            row |= dict(n_problems=len(some), n_rollouts=n_rollouts, peak_entries=peak)
            dense = [r["right"] for r in table.rows if matches(r, policy="dense", task=task, n_rollouts=n_rollouts)]
            table.add({**row, **pass_rates(right, n_rollouts, *dense), "seconds": clock.seconds()})
        rates = ", ".join(f"{r['pass_at_1']:.4f}" for r in table.rows[-len(ways):] if r["pass_at_1"] is not None)
        clock.say(f"{task}, {case.policy} on {who['model']}, {case.budget or 'all'} entries: {rates or row['note']}")
        torch.cuda.empty_cache()  # the pools of the captured steps
    print_table(table.rows, ["policy", "task", "model", "weights", "budget", "compression_ratio", "pass_at_1", "ci_low",
                       "ci_high", "relative", "token_accuracy", "kl", "recall", "n_problems", "n_rollouts",
                       "trained_tokens"])
    print(f"wrote {table.write()}")


def settings_grid(policy, budget):
    """-> list of (n_sink, window, options): at least six settings for every policy that leaves a choice. Windows are
    shares of the budget. Streaming keeps the newest anyway, so its window is no choice, its sinks are."""
    shares, n_sink, window = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4), *GEOMETRY.values()
    if policy == "streaming":
        return [(n, min(window, budget - n), {}) for n in (0, 1, 2, 4, 8, 16)]
    if policy == "tova-layer":
        return [(*geometry(policy, n_sink, window), {})]
    options = dict(snapkv=dict(n_queries=(4, 16), reach=(0, 3)), rkv=dict(n_queries=(4, 8), mix=(0.07, 0.5)),
                   vase=dict(percent=(5, 10, 20))).get(policy, {})
    if options:
        shares = (1 / 8, 1 / 4, 1 / 2)
    return [(n_sink, max(1, round(budget * share)), dict(zip(options, values)))
            for share in shares for values in product(*options.values())]


def tune(args):
    """Every setting of every training-free policy, teacher-forced on the first --problems VALIDATION problems of each
    family at --budgets; `quality` takes the best. A trace that is right so is one that greedy decoding writes.

    Row: policy, task (family), budget, n_sink, window, options (of the policy's class in scorer.py), problems,
    traces_right (share of whole traces, the first criterion), token_accuracy (the second), kl (nats a trace byte, from
    the dense base), note (why it is impossible), seconds. tova-layer, as published, leaves no choice: one row.
    Rows that the file has already are kept, so an interrupted run goes on.
    """
    device, dtype = device_and_dtype(args)
    require(args, problems=1)
    if odd := [policy for policy in args.policies if check_policy(policy) or policy not in FREE]:
        raise ValueError(f"policy {odd[0]} has nothing to tune: choose of {', '.join(FREE)}")
    config = ModelConfig.from_dict(read_json(Path(args.base) / "config.json"))
    jobs = [(task, replace(free_case(policy, args.base, budget), n_sink=n_sink, window=window, options=options))
            for task in args.families for budget in args.budgets for policy in args.policies
            for n_sink, window, options in settings_grid(policy, budget)]
    specs = [case.spec(config) for _, case in jobs]  # refuses a budget before any work
    settings = dict(base_checkpoint=fingerprint(args.base), problems=args.problems, seed=args.seed)
    table, clock = Table("tune", device, dict(base=args.base), **settings), Clock(len(jobs))
    base = load_model(args.base, device, dtype).eval()
    for (task, case), spec in zip(jobs, specs):
        clock.start()
        row = dict(policy=case.policy, task=task, budget=case.budget, n_sink=case.n_sink, window=case.window,
                   options=case.options)
        if any(matches(r, **row) for r in table.rows):
            continue
        problems = [make_problem(task, i, "validation") for i in range(args.problems)]
        result = dict.fromkeys(("traces_right", "token_accuracy", "kl"))
        if not (note := impossible(case, spec, max(len(p.prompt) for p in problems))):
            result |= forced(base, base, problems, *case.load(base, args.seed)[1:], args.graph)
            result["traces_right"] = sum(result["right"]) / args.problems
        table.add({**row, "problems": args.problems, "note": note, "seconds": clock.seconds(),
                   **{key: result[key] for key in ("traces_right", "token_accuracy", "kl")}})
        outcome = note or f"traces {result['traces_right']:.3f}, bytes {result['token_accuracy']:.4f}"
        clock.say(f"{task}, {case.policy} at {case.budget}: n_sink {case.n_sink}, window {case.window} "
                  f"{case.options or ''}: {outcome}")
        torch.cuda.empty_cache()
    print_table(table.rows, ["policy", "task", "budget", "n_sink", "window", "options", "traces_right",
                             "token_accuracy", "kl"])
    for task, policy, budget in dict.fromkeys((task, case.policy, case.budget) for task, case in jobs):
        best = best_setting(free_case(policy, args.base, budget), table.rows, task)
        print(f"best for {policy} at {budget} on {task}: n_sink {best.n_sink}, window {best.window}, {best.options}")
    print(f"wrote {table.write()}")

# ----------------------------------------------------------------------------------------- Pictures, first-look, oracle

def figures(args):
    """Pictures of what `python bench.py quality` wrote: NAME.png (pass@1 and wrong bytes against entries kept, with
    lines for dense and the oracle), NAME-recall.png (recall by layer), NAME-retention.png (what is held, by layer and
    kind of byte: filler and definitions of the prompt; stated values and working of the trace). For --name quality the
    last two are recall.png and retention.png. Of what `python bench.py text` wrote: NAME.png, perplexity against
    position."""
    results = read_json(RESULTS / f"{args.name}.json")
    if "positions" in results:
        draw_positions(Path(args.folder) / f"{args.name}.png", results["rows"], results["positions"])
        return print(f"wrote {Path(args.folder) / args.name}.png")
    rows = [row for row in results["rows"] if row["n_rollouts"] == 1]
    folder, prefix = Path(args.folder), "" if args.name == "quality" else f"{args.name}-"
    shown = [row for row in rows if row["trained_tokens"] or row["policy"] in ("streaming", "oracle")]
    for name, draw, some in (
            (args.name, draw_accuracy, [row for row in rows if row["pass_at_1"] is not None]),
            (f"{prefix}recall", draw_recall, [row for row in shown if row.get("recall_by_layer")]),
            (f"{prefix}retention", draw_retention, [row for row in shown if row.get("retention")])):
        if some:
            draw(folder / f"{name}.png", some)
            print(f"wrote {folder / name}.png")


def first_look(args):
    """pass@1, greedy, on the first `--problems` test problems, half of each family.

    Row: policy, model (folder name), weights (base or adapted), budget (entries a KV head, scorer state included; None
    = dense), compression_ratio (1 - budget / mean length), family (arith, walk, both), problems, right (final answer
    right), pass_at_1 with ci_low, ci_high (bootstrap over problems), relative (pass_at_1 / dense's) with relative_low,
    relative_high (paired bootstrap), traces_right (every byte right), token_accuracy (teacher-forced), decoded: true
    when the policy really generated token by token under its budget. The oracle needs the future, so it is
    teacher-forced on the right trace and its `right` counts whole traces, which under-counts answers if anything.
    right_bits: one digit a problem; checkpoint: CRC of the weights. Rows that the file has already of the same weights
    are kept: delete it to start over.
    """
    device, dtype = device_and_dtype(args)
    per_family = args.problems // len(FAMILIES)
    if per_family < 1:
        raise ValueError(f"--problems {args.problems} is less than one of each family: use {len(FAMILIES)} or more")
    problems = [make_problem(family, i, "test") for family in FAMILIES for i in range(per_family)]
    mean_length = sum(len(p.prompt) + len(p.trace) + 1 for p in problems) / len(problems)
    base = load_model(args.base, device, dtype).eval()
    retrofits = [retrofit_case(folder, args.base) for folder in args.retrofit]
    cases = [Case("dense", args.base, args.base)]
    cases += [free_case(policy, args.base, budget, retrofits)
              for budget in sorted(args.budgets or {case.budget for case in retrofits}) for policy in args.policies]
    cases += retrofits
    for case in cases:
        case.spec(base.config)  # refuses a budget before any work
    same = dict(base=args.base, base_checkpoint=fingerprint(args.base), problems=len(problems))
    rows, dense_ok = earlier_rows("first-look", **same), None
    for case in cases:
        start, policy, budget, model_name = time.time(), case.policy, case.budget, Path(case.folder).resolve().name
        checkpoint = fingerprint(case.folder, case.weights)
        mine = [row for row in rows if (row["policy"], row["model"], row["budget"]) == (policy, model_name, budget)]
        done = [row for row in mine if row["checkpoint"] == checkpoint]
        rows = [row for row in rows if row in done or row not in mine]  # those of a checkpoint trained anew go
        if done:  # an interrupted run goes on where it stopped
            if policy == "dense":
                dense_ok = [bit == "1" for bit in done[0]["right_bits"]]
            continue
        model, spec, scorers = case.load(base)
        result = evaluate(model.float(), device, per_family, spec, scorers, split="test")
        model.to(dtype)
        if policy == "oracle":
            right = traces = [ok for family in FAMILIES for ok in result["right"][family]]
        else:
            verdicts = [v for (v,) in decoded(model, problems, spec, scorers, args.graph)[0]]
            right, traces = [v.answer_right for v in verdicts], [v.trace_right for v in verdicts]
        dense_ok = right if policy == "dense" else dense_ok
        for family in ("both", *FAMILIES):
            mine = [i for i, p in enumerate(problems) if family in ("both", p.family)]
            ok, reference = [right[i] for i in mine], [dense_ok[i] for i in mine]
            low, high = bootstrap(ok)
            relative_low, relative_high = bootstrap(ok, reference)
            both = family == "both"
            rows.append(dict(
                policy=policy, model=model_name, weights="adapted" if case.adapted else "base", budget=budget,
                checkpoint=checkpoint, compression_ratio=0.0 if budget is None else 1 - budget / mean_length,
                family=family, problems=len(ok),
                right=sum(ok), pass_at_1=sum(ok) / len(ok), ci_low=low, ci_high=high,
                relative=sum(ok) / max(1, sum(reference)), relative_low=relative_low, relative_high=relative_high,
                traces_right=sum(traces[i] for i in mine), decoded=policy != "oracle",
                token_accuracy=result["token_accuracy"] if both else None, recall=result["recall"] if both else None,
                right_bits="".join("01"[bool(x)] for x in ok) if both else None))
        write_results("first-look", rows, device, **same, mean_length=mean_length)
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
    specs = {budget: CacheSpec(**GEOMETRY, budget=budget, state_entries=state_entries("kvpop", config.head_dim))
             for budget in args.budgets}
    jobs = [("dense", None, None)] + [("oracle", power, budget) for budget in args.budgets for power in args.powers]
    for policy, power, budget in jobs:
        spec = scorers = None
        if policy == "oracle":
            spec = specs[budget]
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
    names = parser.add_subparsers(dest="name_of_run", required=True, metavar="NAME")

    def command(run, text):
        sub = names.add_parser(run.__name__.replace("_", "-"), help=text, description=run.__doc__,
                               formatter_class=argparse.RawDescriptionHelpFormatter)
        sub.set_defaults(run=run)
        return lambda flag, text, default=None, **extra: sub.add_argument(
            flag, default=default, help=text + ("" if default is None else " (default: %(default)s)"), **extra)

    def common(add, policies, families=None):
        add("--base", "base checkpoint", "assets/base")
        if policies:
            add("--policies", "training-free policies, run on the base at each budget", policies, nargs="*")
        if families:
            add("--families", "tasks, each measured by itself", families, nargs="+", choices=[*FAMILIES, "mark"])
            add("--seed", "of the sampling and of policy random", 0, type=int)
            add("--dtype", "of weights and cache (default: float32 on CPU, bfloat16 on CUDA)",
                choices=["float32", "bfloat16"])
        add("--graph", "on a GPU, replay decode steps as a CUDA graph", True, action=argparse.BooleanOptionalAction)

    add = command(quality, "accuracy of every policy at every budget")
    common(add, [*FREE, "oracle"], ["arith"])
    add("--retrofit", "retrofitted checkpoints", sorted(str(p.parent) for p in Path("assets").glob("*/scorer.json")),
        nargs="*", metavar="FOLDER")
    add("--budgets", "of the training-free policies (default: those of the retrofits)", nargs="*", type=int)
    add("--problems", "test problems a family for greedy decoding", 512, type=int)
    add("--rollout-problems", "of them (or more), for sampling", 128, type=int)
    add("--rollouts", "samples a problem; 0 or 1: greedy alone", 16, type=int)
    add("--forced-problems", "of them, for the teacher-forced figures of dynamic policies", 128, type=int)
    add("--rows", "decoded at a time", 2048, type=int)
    add("--out", "name of the JSON in assets/results", "quality")
    add = command(tune, "the best setting of each training-free policy")
    common(add, list(FREE), ["arith"])
    add("--budgets", "to tune at; for others quality takes the nearest, its window in proportion", [256], nargs="+",
        type=int)
    add("--problems", "validation problems a family", 64, type=int)
    add = command(figures, "pictures of what quality or text wrote")
    add("--name", "of the JSON in assets/results", "quality")
    add("--folder", "for the pictures", "assets")
    add = command(first_look, "pass@1 of a few policies on both families")
    common(add, ["streaming", "random", "knorm", "oracle"])
    add("--retrofit", "retrofitted checkpoints, one a budget", ["assets/kvpop"], nargs="*", metavar="FOLDER")
    add("--budgets", "of the training-free policies (default: those of the retrofits)", nargs="*", type=int)
    add("--problems", "test problems, half of each family", 512, type=int)
    add = command(oracle, "future attention itself as the score")
    add("--base", "base checkpoint", "assets/base")
    add("--problems", "validation problems, half of each family", 16, type=int)
    add("--budgets", "to try", [256, 512], nargs="*", type=int)
    add("--powers", "of the mean over future queries in the target", [1.0, 2.0], nargs="*", type=float)
    for part in (speed, speed_decode, speed_train, random_checkpoint):
        part.register(names)
    for run, text, flags in (*text_bench.COMMANDS, *answer_bench.COMMANDS):
        flags(command(run, text))
    return parser.parse_args(argv)


def main(argv=None):
    args = parse_args(argv)
    with parallel.processes():
        try:
            if torch.distributed.is_initialized() and args.run is not speed_train.train:
                raise ValueError("torchrun starts bench.py train alone: start the others with python")
            args.run(args)
        except (ValueError, OSError) as error:
            parallel.report_error(f"error: {error}")
            return 2
        except RuntimeError as error:
            if not parallel.lost_process(error):
                raise
            parallel.report_error(f"error: another process of this run is gone: {RESULTS} holds what was finished")
            return 2
        except KeyboardInterrupt:
            parallel.report_error(f"\ninterrupted: {RESULTS} holds what was finished, and the same command goes on "
                                  "from there")
            return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
