"""Benchmarks on real text, run by bench.py: what a policy costs a pretrained checkpoint without any task.

- `text`: next-token perplexity, accuracy and KL to dense, by position, teacher-forced along held-out documents;
- `needle`: numbers told in the text and asked for at its end, by distance;
- `health`: text generated under a budget, read by the dense model.

Letters: B batch, T tokens, C channels, V vocabulary.
"""
import argparse
import math
import re
import zlib
from pathlib import Path

import torch

from data.cases import add_flags, identity, impossible, open_checkpoint
from data.chat import chat_style
from data.results import Clock, Table, bootstrap, print_table, require
from data.text import TokenFile, needle_prompt, read_documents, split_of
from decode import check_request, force, fuse_scorers, generate
from model import causal_attend
from targets import policy_attend

LOGITS = 2**25  # at a time: 128 MiB in fp32
NEEDS_FUTURE = {"oracle": "ranks by future attention, which no decoder has"}


# ----------------------------------------------------------------------------- documents

def add_text_flags(add, length_help):
    add("--text", "file, folder or hub data set of documents; or a folder of data.text.write_tokens, of which the "
        "held-out split is taken", metavar="SOURCE", required=True)
    add("--field", "of the rows that holds the text", "text")
    add("--split", "of a hub data set", "train")
    add("--subset", "of a hub data set")
    add("--held-out", "share of the documents that a training kept out, chosen by the hash of their text (1: take all, "
        "for text that nothing was trained on)", 1.0, type=float)
    add("--context", length_help, 2048, type=int)


def read_ids(args, checkpoint):
    """Iterator over the held-out documents as lists of ids, the tokenizer's prefix in front."""
    tokenizer, prefix = checkpoint.tokenizer, list(checkpoint.tokenizer.prefix)
    if not 0 < args.held_out <= 1:
        raise ValueError(f"--held-out must be above 0 and at most 1, got {args.held_out}")
    if (Path(args.text) / "tokens.json").is_file():
        file = TokenFile(args.text, "held_out", tokenizer, checkpoint.config.vocab_size)
        yield from (prefix + document.tolist() for document in file.documents())
        return
    for document in read_documents(args.text, args.field, args.split, args.subset):
        if split_of(document, args.held_out) == "held_out":
            yield prefix + tokenizer.encode(document)


def read_long(args, checkpoint, length, most):
    """The first `length` ids of the first `most` documents that have as many: equally long, so that every position
    is measured on the same documents. ValueError when none is long enough."""
    found, n_short = [], 0
    for ids in read_ids(args, checkpoint):
        if len(ids) < length:
            n_short += 1
            continue
        found.append(ids[:length])
        if len(found) == most:
            break
    if not found:
        raise ValueError(f"no document of {args.text} has {length} tokens ({n_short} shorter ones): lower --context or "
                         "give longer text")
    print(f"{len(found)} documents of {length} tokens or more" + f", {n_short} shorter ones left out" * bool(n_short))
    return found


def crc(rows):
    """CRC-32 of lists of ids, 8 hex digits: rows of other text are not taken for these."""
    return f"{zlib.crc32(repr(rows).encode()):08x}"


# ----------------------------------------------------------------------------- perplexity, accuracy and KL by position

def compare(log_q, log_p, target):
    """Log-probabilities (.., V) of the policy and of dense, targets (..) -> nll (nats), hit, KL(dense || policy)."""
    nll = -log_q.gather(-1, target[..., None]).squeeze(-1)
    return nll, (log_q.argmax(-1) == target).to(nll), (log_p.exp() * (log_p - log_q)).sum(-1)


def log_probs(model, hidden):
    logits = model.unembed(hidden)
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def in_chunks(model, base, hidden, truth, target):
    """Hidden states of the policy and of dense (n, C), target (n,) -> (3, n) fp64 on the CPU, as `compare`. The logits
    of a chunk are LOGITS numbers, whatever the vocabulary. hidden is truth (the same object): dense itself."""
    size, parts = max(1, LOGITS // base.config.vocab_size), []
    for h, t, y in zip(hidden.split(size), truth.split(size), target.split(size)):
        log_p = log_probs(base, t)
        parts.append(compare(log_p if hidden is truth else log_probs(model, h), log_p, y))
    return torch.stack([torch.cat(values).double().cpu() for values in zip(*parts)])


@torch.no_grad()
def dense_hidden(base, ids):
    """Hidden states (T, C) of the dense base on one document, kept on the CPU: every policy is compared with them."""
    device = base.model.embed_tokens.weight.device
    return base(torch.tensor([ids], device=device), causal_attend)[0].cpu()


@torch.no_grad()
def token_losses(model, base, documents, truth, spec, scorers, graph=True, rows=16):
    """documents: equally long lists of T ids; truth: their dense_hidden -> (3, n_documents, T - 1) fp64: nll in nats,
    hit and KL(dense base || model under the policy) in nats of the token after position t.
    Static policies: one masked pass a document. Dynamic ones: step by step, `rows` documents at a time."""
    device, T = base.model.embed_tokens.weight.device, len(documents[0])
    if scorers is None or not scorers[0].dynamic:
        lengths, out = torch.tensor([T], device=device), []
        for ids, dense in zip(documents, truth):
            idx, dense = torch.tensor([ids], device=device), dense.to(device)
            dense = hidden = dense[:-1]
            if scorers is not None:
                hidden = model(idx, policy_attend(scorers, spec, lengths))[0, :-1]
            out.append(in_chunks(model, base, hidden, dense, idx[0, 1:]))
        return torch.stack(out, dim=1)
    out = []
    for start in range(0, len(documents), rows):
        idx = torch.tensor(documents[start:start + rows], device=device)  # (B, T)
        steps = []

        def on_logits(t, logits):
            if t < T - 1:
                dense = torch.stack([hidden[t] for hidden in truth[start:start + rows]]).to(device)  # (B, C)
                log_q = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
                steps.append(torch.stack(compare(log_q, log_probs(base, dense), idx[:, t + 1])).double().cpu())
        force(model, idx.tolist(), spec, scorers, graph=graph, on_logits=on_logits)
        out.append(torch.stack(steps, dim=-1))  # (3, B, T - 1)
    return torch.cat(out, dim=1)


def bucket_edges(n, n_buckets):
    """First position of each of n_buckets equal ranges of positions 0 .. n - 1, and n."""
    return [-(-i * n // n_buckets) for i in range(n_buckets + 1)]


def ratio_interval(nll, reference):
    """Perplexity ratio exp(mean(nll - reference)) and its 95 % interval. nll, reference: mean nats a token of each
    document, equally long; a resample draws documents, each with its reference."""
    apart = [a - b for a, b in zip(nll, reference)]
    return math.exp(sum(apart) / len(apart)), *map(math.exp, bootstrap(apart))


def text(args):
    """Teacher-forced along the first --context tokens of each held-out document, under every policy and budget:
    one masked pass for static policies, step by step for dynamic ones (slow on a CPU). Documents that are shorter are
    left out, so that every position is measured on the same ones. The reference is the dense base.

    Row: policy, budget (entries per KV head, scorer state included; None = dense), T (tokens of a document), source,
    compression_ratio (1 - budget / T), perplexity (exp of the mean nats a token), perplexity_ratio (to dense's) with
    ci_low and ci_high (95 % bootstrap over documents, each paired with its dense value), accuracy (share of tokens
    that are the most likely one), accuracy_delta (less dense's), kl (KL(dense || policy), nats a token),
    n_documents, perplexity_by_position with accuracy_by_position and kl_by_position (one value a range of positions,
    whose bounds the file has in "positions"; position t is that of the query, which predicts token t + 1),
    nll_by_document (nats a token), n_sink, window, options, model (folder), weights (base or adapted), checkpoint (CRC
    of its weights), seconds.

    Rows that the file has already are kept, so an interrupted run goes on; other settings need another --out.
    `python bench.py figures --name NAME` draws perplexity against position.
    """
    require(args, context=2, documents=1, buckets=1, rows=1)
    without = {"random-prompt": "never evicts a prompt, and text has none"}
    checkpoint = open_checkpoint(args, args.context, without)
    if args.buckets >= args.context:
        raise ValueError(f"--buckets {args.buckets} are more than the {args.context - 1} predictions: ask for fewer")
    documents = read_long(args, checkpoint, args.context, args.documents)
    table = Table(args.out, checkpoint.device, dict(model=args.model), benchmark="text", text=args.text,
                  text_crc=crc(documents), base_checkpoint=weights_of_base(checkpoint), context=args.context,
                  positions=bucket_edges(args.context - 1, args.buckets), seed=args.seed,
                  dtype=str(checkpoint.dtype)[6:])
    clock, base, truth = Clock(len(checkpoint.jobs)), None, None
    for case, spec in checkpoint.jobs:
        clock.start()
        who, how = identity(case, spec)
        if table.having(who, how):
            continue
        if base is None:
            base = checkpoint.load()
            truth = [dense_hidden(base, ids) for ids in documents]
        model, spec, scorers = case.load(base, args.seed)
        losses = token_losses(model, base, documents, truth, spec, scorers, args.graph, args.rows)
        row = text_row(losses, table.settings["positions"],
                       next((r for r in table.rows if r["policy"] == "dense"), None))
        table.add({**who, "T": args.context, "source": args.text,
                   "compression_ratio": 1 - case.budget / args.context if spec else 0.0, **how, **row,
                   "seconds": clock.seconds()})
        clock.say(f"{case.policy} at {case.budget or 'any length'}, n_sink {who['n_sink']}: perplexity "
                  f"{row['perplexity']:.3f}, {row['perplexity_ratio']:.4f} of dense's, KL {row['kl']:.4f}")
        del model
        torch.cuda.empty_cache()
    print_table(table.rows, ["policy", "model", "budget", "n_sink", "window", "perplexity", "perplexity_ratio",
                             "ci_low", "ci_high", "accuracy", "accuracy_delta", "kl", "n_documents", "seconds"])
    print(f"wrote {table.write()}")


def text_row(losses, edges, dense=None):
    """The measured keys of a row of `text`. losses as of token_losses; edges of the ranges of positions; dense: the
    row of the dense base, None if this is it."""
    nll, accuracy, kl = losses.mean((1, 2)).tolist()
    by_position = torch.stack([losses[:, :, a:b].mean((1, 2)) for a, b in zip(edges, edges[1:])], dim=1)  # (3, ranges)
    by_document = losses[0].mean(1).tolist()
    ratio, low, high = ratio_interval(by_document, (dense or dict(nll_by_document=by_document))["nll_by_document"])
    return dict(perplexity=math.exp(nll), perplexity_ratio=ratio, ci_low=low, ci_high=high, accuracy=accuracy,
                accuracy_delta=accuracy - dense["accuracy"] if dense else 0.0, kl=kl, n_documents=len(by_document),
                perplexity_by_position=by_position[0].exp().tolist(), accuracy_by_position=by_position[1].tolist(),
                kl_by_position=by_position[2].tolist(), nll_by_document=by_document)


def weights_of_base(checkpoint):
    case, spec = checkpoint.jobs[0]
    return identity(case, spec)[1]["checkpoint"]


# ----------------------------------------------------------------------------- recall by distance

def first_number(text):
    """The first run of digits, thousands separated or not; None without one."""
    found = re.search(r"\d[\d,]*", text)
    return found and found[0].replace(",", "")


def needle_prompts(args, checkpoint, stream, distance, keys, style):
    """--problems prompts of --context tokens; prompt i is the same under every policy, and begins at a place of its own
    in the stream of text."""
    prefix, length = list(checkpoint.tokenizer.prefix), args.context
    step = max(1, (len(stream) - length) // args.problems)
    out = []
    for i in range(args.problems):
        start = min(i * step, len(stream) - length)
        out.append(needle_prompt(checkpoint.tokenizer, stream[start:start + length], length - len(prefix),
                                 distance=distance, keys=keys, seed=args.seed * 10**6 + i, style=style))
        out[-1].ids = prefix + out[-1].ids
    return out


def greedy(model, prompts, spec, scorers, rows, graph=True, **how):
    """Greedy ids after each prompt, `rows` at a time, and the most entries that any head held."""
    tokens, peak = [], 0
    for start in range(0, len(prompts), rows):
        result = generate(model, prompts[start:start + rows], spec, scorers, graph=graph, **how)
        tokens, peak = tokens + result.tokens, max(peak, result.cache.peak_entries())
    return tokens, peak


def needle(args):
    """A number told at a distance from the end of --context tokens of real text, "The number of the red kettle is
    48213.", and asked for at the end; --keys such sentences stand in it, the others at random places. Found: the first
    number that greedy decoding goes on to say, under each policy and budget, is the one told.

    Row: policy, budget, T (tokens of a prompt), distance (asked for; tokens from the end of the sentence to the end of
    the prompt), mean_distance (what it came to, since sentences stand at line ends), keys, n_problems,
    compression_ratio (1 - budget / T), recall (share found) with ci_low and ci_high (95 % bootstrap over prompts),
    recall_delta (recall less that of the dense base on the same prompts) with delta_low and delta_high (paired
    bootstrap), found (one digit a prompt), peak_entries (most entries held, state included), note (why a policy is
    impossible; recall is then None), source, n_sink, window, options, model, weights, checkpoint, seconds.

    Rows that the file has already are kept, so an interrupted run goes on; other settings need another --out.
    """
    require(args, context=64, problems=1, distances=1, keys=1, rows=1)
    checkpoint = open_checkpoint(args, args.context + args.max_new_tokens, NEEDS_FUTURE)
    style = chat_style(checkpoint.folder) if args.chat else None
    stream, wanted = [], args.context * args.problems
    for ids in read_ids(args, checkpoint):
        stream += ids
        if len(stream) >= wanted:
            break
    if len(stream) < args.context:
        raise ValueError(f"{args.text} has {len(stream)} tokens, fewer than --context {args.context}: give more text")
    distances = args.distances or [args.context // 8, args.context // 4, args.context // 2, args.context * 7 // 8]
    prompts = {(keys, distance): needle_prompts(args, checkpoint, stream, distance, keys, style)
               for keys in args.keys for distance in distances}
    table = Table(args.out, checkpoint.device, dict(model=args.model), benchmark="needle", text=args.text,
                  text_crc=crc(stream[:wanted]), base_checkpoint=weights_of_base(checkpoint), context=args.context,
                  problems=args.problems, chat=args.chat, max_new_tokens=args.max_new_tokens, seed=args.seed,
                  dtype=str(checkpoint.dtype)[6:])
    clock, base = Clock(len(checkpoint.jobs)), None
    for case, spec in checkpoint.jobs:
        clock.start()
        who, how = identity(case, spec)
        there = {(r["keys"], r["distance"]) for r in table.having(who, how)}
        if there >= prompts.keys():
            continue
        base = base or checkpoint.load()
        model, spec, scorers = case.load(base, args.seed)
        note, recalls = spec and impossible(case, spec, args.context), []
        for (keys, distance), some in prompts.items():
            if (keys, distance) in there:
                continue
            bits, peak, before = None, None, clock.seconds()
            if not note:
                said, peak = greedy(model, [p.ids for p in some], spec, scorers, args.rows, args.graph,
                                    max_new_tokens=args.max_new_tokens)
                bits = [first_number(checkpoint.tokenizer.decode(ids)) == p.answer for ids, p in zip(said, some)]
                recalls.append(sum(bits) / len(bits))
                peak += spec.state_entries if spec else 0
            dense = next((r["found"] for r in table.rows if (r["policy"], r["keys"], r["distance"])
                          == ("dense", keys, distance)), None)
            table.add({**who, "T": args.context, "source": args.text, "distance": distance, "keys": keys,
                       "mean_distance": sum(p.distance for p in some) / len(some), "n_problems": len(some),
                       "compression_ratio": 1 - case.budget / args.context if spec else 0.0, **how,
                       **recall_row(bits, dense), "peak_entries": peak, "note": note,
                       "seconds": round(clock.seconds() - before, 1)})
        clock.say(f"{case.policy} at {case.budget or 'any length'}: "
                  + (note or "found " + ", ".join(f"{share:.3f}" for share in recalls)))
        del model
        torch.cuda.empty_cache()
    print_table(table.rows, ["policy", "model", "budget", "n_sink", "keys", "distance", "recall", "ci_low", "ci_high",
                             "recall_delta", "delta_low", "delta_high", "n_problems", "seconds"])
    print(f"wrote {table.write()}")


def recall_row(found, dense=None):
    """found: a bool a prompt, None where the policy was impossible; dense: the same of the dense base as its row has
    it, None if this is it."""
    if found is None:
        return dict.fromkeys(("recall", "ci_low", "ci_high", "recall_delta", "delta_low", "delta_high", "found"))
    bits = "".join("01"[bool(x)] for x in found)
    apart = [int(a) - int(b) for a, b in zip(bits, dense or bits)]
    low, high = bootstrap(found)
    delta_low, delta_high = bootstrap(apart)
    return dict(recall=sum(found) / len(found), ci_low=low, ci_high=high, recall_delta=sum(apart) / len(apart),
                delta_low=delta_low, delta_high=delta_high, found=bits)


# ----------------------------------------------------------------------------- the health of generated text

def distinct(ids, n=4):
    """Share of the n-grams of a text that are different ones: 1 repeats nothing, near 0 is a loop."""
    grams = list(zip(*(ids[i:] for i in range(n))))
    return len(set(grams)) / len(grams)


@torch.no_grad()
def dense_nll(base, prompt, new):
    """Mean nats a token of `new` (ids) after `prompt` (ids) under the dense base."""
    hidden = dense_hidden(base, prompt + new).to(base.model.embed_tokens.weight.device)[len(prompt) - 1:-1]
    target = torch.tensor(new, device=hidden.device)
    return in_chunks(base, base, hidden, hidden, target)[0].mean().item()


def health(args):
    """Text generated from the first --prompt-tokens of each held-out document, --context tokens in all with the prompt,
    under every policy and budget; the end token is text like any other. A policy that loses the thread writes what the
    dense model finds unlikely, or repeats itself: `--n-sink 0 4` shows what the sinks are worth.

    Row: policy, budget, T (tokens with the prompt), n_new (generated ones), compression_ratio (1 - budget / T),
    perplexity (of the generated text under the dense base, the prompt given), perplexity_ratio (to that of the text
    which dense itself wrote) with ci_low and ci_high (95 % bootstrap over documents, in pairs), distinct_4 (share of
    different 4-grams of a text, mean over documents), distinct_4_dense, n_documents, nll_by_document (nats a token),
    note (why a policy is impossible; the figures are then None), source, n_sink, window, options, model, weights,
    checkpoint, seconds. Low perplexity with low distinct_4 is a loop and no good sign.

    Rows that the file has already are kept, so an interrupted run goes on; other settings need another --out.
    """
    require(args, context=2, prompt_tokens=1, documents=1, rows=1)
    n_new = args.context - args.prompt_tokens
    if n_new < 4:
        raise ValueError(f"--context {args.context} leaves {n_new} new tokens after --prompt-tokens "
                         f"{args.prompt_tokens}: at least 4 are needed")
    checkpoint = open_checkpoint(args, args.context, NEEDS_FUTURE)
    prompts = read_long(args, checkpoint, args.prompt_tokens, args.documents)
    sampling = dict(temperature=args.temperature, top_p=args.top_p, top_k=args.top_k)
    on_gpu = torch.device(checkpoint.device).type == "cuda"
    check_request(prompts, n_new, checkpoint.config.max_seq_len, **sampling)
    table = Table(args.out, checkpoint.device, dict(model=args.model), benchmark="health", text=args.text,
                  text_crc=crc(prompts), base_checkpoint=weights_of_base(checkpoint), context=args.context,
                  prompt_tokens=args.prompt_tokens, **sampling, compiled=on_gpu and args.compile, seed=args.seed,
                  dtype=str(checkpoint.dtype)[6:])
    clock, base = Clock(len(checkpoint.jobs)), None
    for case, spec in checkpoint.jobs:
        clock.start()
        who, how = identity(case, spec)
        if table.having(who, how):
            continue
        base = base or checkpoint.load()
        model, spec, scorers = case.load(base, args.seed)
        note = spec and impossible(case, spec, args.prompt_tokens)
        if on_gpu:  # thousands of steps a text
            torch._dynamo.reset()  # or the shapes of all policies reach its limit of recompiles
            model.fuse()
            scorers = fuse_scorers(scorers, args.rows, checkpoint.dtype)
        row = dict.fromkeys(("perplexity", "perplexity_ratio", "ci_low", "ci_high", "distinct_4", "distinct_4_dense",
                             "n_documents", "nll_by_document"))
        if not note:
            said = []
            for start in range(0, len(prompts), args.rows):
                some = prompts[start:start + args.rows]
                said += generate(model, some, spec, scorers, graph=args.graph, compiled=on_gpu and args.compile,
                                 ahead=True, max_new_tokens=n_new, stop_ids=[],
                                 seed=[args.seed * 10**6 + start + i for i in range(len(some))], **sampling).tokens
            nll = [dense_nll(base, prompt, new) for prompt, new in zip(prompts, said)]
            varied = sum(map(distinct, said)) / len(said)
            dense = next((r for r in table.rows if r["policy"] == "dense"),
                         dict(nll_by_document=nll, distinct_4=varied))
            ratio, low, high = ratio_interval(nll, dense["nll_by_document"])
            row = dict(perplexity=math.exp(sum(nll) / len(nll)), perplexity_ratio=ratio, ci_low=low, ci_high=high,
                       distinct_4=varied, distinct_4_dense=dense["distinct_4"], n_documents=len(said),
                       nll_by_document=nll)
        table.add({**who, "T": args.context, "n_new": n_new, "source": args.text,
                   "compression_ratio": 1 - case.budget / args.context if spec else 0.0, **how, **row, "note": note,
                   "seconds": clock.seconds()})
        clock.say(f"{case.policy} at {case.budget or 'any length'}, n_sink {who['n_sink']}: " + (
            note or f"perplexity {row['perplexity']:.3f} under dense, distinct 4-grams {row['distinct_4']:.3f}"))
        del model
        torch.cuda.empty_cache()
    print_table(table.rows, ["policy", "model", "budget", "n_sink", "window", "perplexity", "perplexity_ratio",
                             "ci_low", "ci_high", "distinct_4", "distinct_4_dense", "n_documents", "seconds"])
    print(f"wrote {table.write()}")


# ----------------------------------------------------------------------------- command line

def text_flags(add):
    add_flags(add, ["streaming", "random", "knorm", "oracle"])
    add_text_flags(add, "tokens of each document")
    add("--documents", "at most", 32, type=int)
    add("--buckets", "ranges of positions that perplexity is given for", 16, type=int)
    add("--rows", "documents at a time, of dynamic policies", 16, type=int)
    add("--out", "name of the JSON in assets/results", "text")


def needle_flags(add):
    add_flags(add, ["streaming", "random", "knorm"])
    add_text_flags(add, "tokens of a prompt")
    add("--distances", "tokens from the sentence to the end (default: 1/8, 1/4, 1/2 and 7/8 of the context)", nargs="+",
        type=int)
    add("--keys", "such sentences in a prompt; several: each is run", [1, 4], nargs="+", type=int)
    add("--problems", "prompts a distance", 32, type=int)
    add("--max-new-tokens", "to find the number in", 12, type=int)
    add("--chat", "ask in the chat template of the checkpoint", False, action=argparse.BooleanOptionalAction)
    add("--rows", "prompts at a time", 4, type=int)
    add("--out", "name of the JSON in assets/results", "needle")


def health_flags(add):
    add_flags(add, ["streaming", "random", "knorm"])
    add_text_flags(add, "tokens of prompt and text together")
    add("--prompt-tokens", "of each document, to go on from", 64, type=int)
    add("--documents", "at most", 32, type=int)
    add("--temperature", "0 is greedy", 1.0, type=float)
    add("--top-p", "share of probability to sample from", 1.0, type=float)
    add("--top-k", "number of tokens to sample from, 0 = all", 0, type=int)
    add("--rows", "texts at a time", 16, type=int)
    add("--compile", "on a GPU, run blocks through torch.compile", True, action=argparse.BooleanOptionalAction)
    add("--out", "name of the JSON in assets/results", "health")


COMMANDS = ((text, "perplexity, accuracy and KL on real text, by position", text_flags),
            (needle, "numbers recalled from real text, by distance", needle_flags),
            (health, "text generated under a budget, read by the dense model", health_flags))
