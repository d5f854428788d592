"""Reasoning sets, run by bench.py: maths (AIME, HMMT) and multiple choice (GPQA) with a real checkpoint.

`answers` decodes the questions of any file or hub set (answers.py) in the checkpoint's own chat template under every
policy and budget. Programs are not run: LiveCodeBench would need code that nobody has read to be executed.
"""
import argparse

import torch

from data.answers import is_right, read_questions
from data.cases import FREE, SAMPLING, add_flags, identity, impossible, open_checkpoint, training
from data.chat import chat_style, encode_chat, parts
from data.prompts import stop_ids
from data.results import Clock, Table, matches, pass_rates, print_table, require
from data.text_bench import NEEDS_FUTURE, crc, weights_of_base
from decode import check_request, generate


def question_ids(args, checkpoint, questions):
    """Ids of each question: a user's turn with the opening of the answer, or, without --chat, the bare text."""
    tokenizer = checkpoint.tokenizer
    if not args.chat:
        return [[*tokenizer.prefix, *tokenizer.encode(q.prompt)] for q in questions]
    try:
        style = chat_style(checkpoint.folder)
    except FileNotFoundError as error:
        raise ValueError(f"{error}, with --no-chat") from None
    if args.thinking and style.thinking == "never":
        raise ValueError("the chat template of this model knows no thinking: drop --thinking")
    return [encode_chat(tokenizer, parts([dict(role="user", content=q.prompt)], style, args.thinking is not False))
            for q in questions]


def answered(model, questions, prompts, spec, scorers, tokenizer, *, rollouts=1, seed=0, rows=1, **how):
    """Generate `rollouts` answers to each question, at most `rows` at a time -> right ones of each question, dict of
    peak_entries (most slots that any head filled), cut_off (share of answers that met the cap), mean_new_tokens.
    Rollout r of question i draws the same numbers under every policy."""
    jobs, right, cut, said, peak = [(i, r) for i in range(len(prompts)) for r in range(rollouts)], [], 0, 0, 0
    for start in range(0, len(jobs), rows):
        part = jobs[start:start + rows]
        result = generate(model, [prompts[i] for i, _ in part], spec, scorers,
                          seed=[(seed * 10**6 + i) * 1000 + r for i, r in part], **how)
        right += [is_right(questions[i], tokenizer.decode(ids)) for (i, _), ids in zip(part, result.tokens)]
        cut += sum(stop != "end token" for stop in result.stop)
        said += sum(map(len, result.tokens))
        peak = max(peak, result.cache.peak_entries())
    return ([sum(right[i:i + rollouts]) for i in range(0, len(right), rollouts)],
            dict(peak_entries=peak, cut_off=cut / len(jobs), mean_new_tokens=said / len(jobs)))


def answers(args):
    """pass@1 on questions with checkable answers, greedy (n_rollouts 1) and --rollouts samples a question, under every
    policy and budget. --kind maths: the last \\boxed{} of the answer against the expected one (numbers, expressions,
    sets, intervals, as data/answers.py reads them); --kind choice: the letter of the right option, the options in an
    order drawn from the question. An answer that is cut off by --max-new-tokens counts by what it says so far.
    LiveCodeBench is not planned: judging it means to run code that a model wrote, which nobody has read.

    Row: policy (POLICY-plus: training-free, on weights adapted under it), task (--task), budget (entries per KV head,
    scorer state included; None = dense), compression_ratio (1 - budget / mean length of the question with dense's
    greedy answer), pass_at_1 with ci_low and ci_high (95 % bootstrap over questions; rollouts are averaged per question
    first), relative (pass_at_1 / dense's, same questions, same n_rollouts) with relative_low and relative_high (paired
    bootstrap), n_problems, n_rollouts, cut_off (share of answers that met the cap), mean_new_tokens, right (right
    rollouts of each question), peak_entries (most entries held, state included), seed, weights (base or adapted),
    trained_tokens (0: nothing is trained), train_seed, n_sink, window, options, model (folder), checkpoint (CRC of its
    weights), note (why a policy is impossible; pass_at_1 is then None), seconds.

    Rows that the file has already are kept, so an interrupted run goes on; other settings need another --out.
    """
    require(args, problems=1, rollouts=0, max_new_tokens=1, rows=1)
    if args.kind == "choice" and not args.wrong_fields:
        raise ValueError("--kind choice needs --wrong-fields, the fields of the wrong options")
    questions = read_questions(args.data, args.kind, problem=args.problem_field, answer=args.answer_field,
                               wrong=args.wrong_fields, split=args.split, subset=args.subset)[:args.problems]
    checkpoint = open_checkpoint(args, args.max_new_tokens, NEEDS_FUTURE)
    prompts = question_ids(args, checkpoint, questions)
    sampled = dict(temperature=args.temperature, top_p=args.top_p, top_k=args.top_k)
    check_request(prompts, args.max_new_tokens, checkpoint.config.max_seq_len, **sampled)
    table = Table(args.out, checkpoint.device, dict(model=args.model), benchmark="answers", data=args.data,
                  questions_crc=crc([prompts, [q.answer for q in questions]]),
                  base_checkpoint=weights_of_base(checkpoint), max_new_tokens=args.max_new_tokens, **sampled,
                  seed=args.seed, dtype=str(checkpoint.dtype)[6:])
    ends = stop_ids(checkpoint.folder, checkpoint.tokenizer, checkpoint.config)
    how_long, clock, base = max(map(len, prompts)), Clock(len(checkpoint.jobs)), None
    task = args.task or str(args.data).rstrip("/").rsplit("/", 1)[-1].rsplit(".", 1)[0]
    for case, spec in checkpoint.jobs:
        clock.start()
        who, how = identity(case, spec)
        done = table.having(who, how)
        ways = [n for n in dict.fromkeys((1, max(1, args.rollouts))) if all(r["n_rollouts"] != n for r in done)]
        if not ways:
            continue
        base = base or checkpoint.load()
        model, spec, scorers = case.load(base, args.seed)
        tokens, train_seed = training(case.folder) if case.trained or case.adapted else (0, None)
        note = spec and impossible(case, spec, how_long)
        for n_rollouts in ways:
            right, seen, before = None, dict.fromkeys(("peak_entries", "cut_off", "mean_new_tokens")), clock.seconds()
            if not note:
                right, seen = answered(model, questions, prompts, spec, scorers, checkpoint.tokenizer, rows=args.rows,
                                       rollouts=n_rollouts, seed=args.seed, graph=args.graph, stop_ids=ends,
                                       max_new_tokens=args.max_new_tokens, **(sampled if n_rollouts > 1 else {}))
                seen["peak_entries"] += spec.state_entries if spec else 0
            dense = [r for r in table.rows if matches(r, policy="dense", n_rollouts=n_rollouts)]
            length = sum(map(len, prompts)) / len(prompts) + next(
                (r["mean_new_tokens"] for r in table.rows if matches(r, policy="dense", n_rollouts=1)),
                seen["mean_new_tokens"])
            table.add({**who, "task": task, "compression_ratio": 1 - case.budget / length if spec else 0.0, **how,
                       **pass_rates(right, n_rollouts, *(r["right"] for r in dense)), "n_problems": len(prompts),
                       "n_rollouts": n_rollouts, **seen, "seed": args.seed, "trained_tokens": tokens,
                       "train_seed": train_seed, "note": note, "seconds": round(clock.seconds() - before, 1)})
        mine = table.rows[-len(ways):]
        rates = [f"{r['pass_at_1']:.4f} ({r['n_rollouts']} a question)" for r in mine if not note]
        clock.say(f"{case.policy} at {case.budget or 'any length'}: " + (note or "pass@1 " + ", ".join(rates)))
        del model
        torch.cuda.empty_cache()
    print_table(table.rows, ["policy", "task", "model", "budget", "n_sink", "compression_ratio", "pass_at_1", "ci_low",
                             "ci_high", "relative", "n_problems", "n_rollouts", "cut_off", "mean_new_tokens",
                             "seconds"])
    print(f"wrote {table.write()}")


def answers_flags(add):
    add_flags(add, list(FREE))
    add("--data", "questions: a file (.jsonl, .parquet) or a hub data set; no programs (LiveCodeBench), since judging "
        "those runs untrusted code", metavar="FILE_OR_HUB_ID", required=True)
    add("--kind", "of the questions", "maths", choices=["maths", "choice"])
    add("--task", "name in the rows (default: that of the data)")
    add("--problem-field", "of the rows that holds the question", "problem")
    add("--answer-field", "of the rows that holds the right answer", "answer")
    add("--wrong-fields", "of the rows that hold the wrong options, or one with a list", [], nargs="*")
    add("--split", "of a hub data set", "train")
    add("--subset", "of a hub data set")
    add("--problems", "the first so many questions (default: all)", type=int)
    add("--rollouts", "samples a question beside the greedy answer; 0 or 1: greedy alone", 16, type=int)
    add("--max-new-tokens", "cap of an answer", 4096, type=int)
    add("--temperature", "of the samples", SAMPLING["temperature"], type=float)
    add("--top-p", "of the samples", SAMPLING["top_p"], type=float)
    add("--top-k", "of the samples", SAMPLING["top_k"], type=int)
    add("--chat", "ask in the chat template of the checkpoint", True, action=argparse.BooleanOptionalAction)
    add("--thinking", "whether a Qwen3 thinks first (default: it does)", action=argparse.BooleanOptionalAction)
    add("--rows", "decoded at a time", 64, type=int)
    add("--out", "name of the JSON in assets/results", "answers")


COMMANDS = ((answers, "maths and multiple choice, generated under a budget", answers_flags),)
