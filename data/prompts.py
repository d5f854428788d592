"""What decode.py is asked and what it answers, as text: prompts, the turns of a chat, tokens as they come, verdicts.

- `parse_args` -> `tokenizer_of` -> `open_prompts`: from the command line to the ids of one prompt after another;
- `sampling`, `stop_ids`, `resolve_device`: how to sample, when to stop and where to run, from the flags and the files
  of a checkpoint;
- `check_request`, `check_prompts`: what cannot be generated, said before any work;
- `Writer`: tokens to stdout as they come; `summary`: what they cost; `verdict`: a generated problem, judged; `labels`:
  tokens for a picture, `draw`: the picture.

stdout carries the model's text alone; everything else goes to stderr, by `say`.
"""
import argparse
import json
import math
import os
import sys
from pathlib import Path

import torch

from data.chat import Conversation, chat_style, encode_chat, end_ids, sampling_defaults
from data.figures import draw_kept
from data.tokenizer import EOT, ByteTokenizer, StreamDecoder, decode, load_tokenizer
from data.traces import FAMILIES, check, make_problem
from model import fingerprint
from scorer import LEARNED, POLICIES

CHAT_CAP = 4096  # new tokens in a turn, unless the flag says otherwise
SHIPPED = Path(__file__).resolve().parent.parent / "assets"


def say(text, end="\n"):
    print(text, file=sys.stderr, end=end, flush=True)


def emit(data):
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()  # as it comes


def parse_args(argv):
    parser = argparse.ArgumentParser(
        description="Generate with a KV cache of fixed size. Text goes to stdout as it comes, the rest to stderr.")
    add = parser.add_argument
    add("--model", default=str(SHIPPED / "kvpop"), metavar="FOLDER", help="folder or hub id (default: %(default)s)")
    free = ", ".join(policy for policy in POLICIES if policy not in (*LEARNED, "oracle"))
    add("--policy", help=f"on the base model: {free}; or the checkpoint's own (default)")
    add("--budget", type=int, help="entries per KV head, all included (default: the checkpoint's)")
    add("--n-sink", type=int, help="first positions, never evicted (default: the checkpoint's)")
    add("--window", type=int, help="newest positions, the query included (default: the checkpoint's)")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", metavar="TEXT", help="prompt, taken as it is; with --chat the first turn "
                        "(default: a generated test problem for the byte model)")
    source.add_argument("--prompt-file", metavar="PATH", help="read the prompt from a file, - for stdin")
    add("--chat", action="store_true", help="talk in the checkpoint's own template; every line of stdin is a turn")
    add("--system", metavar="TEXT", help="system prompt of the chat (default: the template's)")
    add("--thinking", action=argparse.BooleanOptionalAction, help="whether a Qwen3 thinks first (default: it does)")
    add("--problem", type=int, metavar="N", help="number of the generated test problem (default: 0)")
    add("--family", help="family of the generated problem, arith, walk or mark (default: arith)")
    own = "in a chat the checkpoint's"
    add("--temperature", type=float, help=f"0 is greedy (default: 0; {own})")
    add("--top-p", type=float, help=f"share of probability to sample from (default: 1; {own})")
    add("--top-k", type=int, help=f"number of tokens to sample from, 0 = all (default: 0; {own})")
    add("--max-new-tokens", type=int, help="stop after so many (default: at an end token or --max-seq-len; in a chat "
        f"also after {CHAT_CAP} a turn)")
    add("--seed", type=int, default=0, help="of the sampling and of policy random (default: %(default)s)")
    add("--max-seq-len", type=int, help="prompt and text together (default and limit: the model's)")
    add("--device", help="cpu, cuda or cuda:N (default: cuda if there is one)")
    add("--dtype", choices=("float32", "bfloat16"), help="default: float32 on CPU, bfloat16 on CUDA")
    add("--compile", action=argparse.BooleanOptionalAction,
        help="on a GPU, blocks through torch.compile: 20 s, then faster steps (default: from a billion parameters)")
    add("--picture", metavar="FILE.png", help="draw which tokens each layer still holds at the end")
    return parser.parse_args(argv)


def tokenizer_of(folder, config):
    """Tokenizer of a checkpoint folder; without a tokenizer.json, bytes for a model small enough to speak them, whose
    rows may be padded. ValueError when the tokenizer knows more ids than the model."""
    if config.vocab_size <= 512 and not (folder / "tokenizer.json").is_file():
        return ByteTokenizer(config.alphabet)
    tokenizer = load_tokenizer(folder)
    if tokenizer.n_vocab > config.vocab_size:
        raise ValueError(f"{folder}/tokenizer.json has {tokenizer.n_vocab} tokens, the model {config.vocab_size}: take "
                         "both from one checkpoint")
    return tokenizer


def open_prompts(args, folder, tokenizer):
    """-> iterator over the ids to feed, the generated problem they come from or None, the Conversation or None. In a
    chat the iterator goes on with the next turn, which needs `Conversation.heard` of the answer to the last one."""
    own = args.prompt is not None or args.prompt_file is not None
    if not args.chat and (args.system is not None or args.thinking is not None):
        raise ValueError("--system and --thinking belong to a chat: add --chat")
    if (own or args.chat) and (args.problem is not None or args.family is not None):
        raise ValueError("--problem and --family choose a generated prompt: leave them out when you give your own")
    if args.chat:
        style = chat_style(folder)
        if args.thinking and style.thinking == "never":
            raise ValueError("the chat template of this model knows no thinking: drop --thinking")
        talk = Conversation(style, args.system, args.thinking is not False)
        return (encode_chat(tokenizer, talk.say(text)) for text in read_turns(args)), None, talk
    if own:
        return iter([tokenizer.prefix + tokenizer.encode(read_prompt(args))]), None, None
    if not isinstance(tokenizer, ByteTokenizer):
        raise ValueError("no prompt: give --prompt, --prompt-file or --chat (generated problems are for bytes)")
    if (args.problem or 0) < 0:
        raise ValueError(f"--problem is a number from 0, got {args.problem}")
    problem = make_problem(args.family or FAMILIES[0], args.problem or 0, "test")
    return iter([tokenizer.encode(problem.prompt)]), problem, None


def read_prompt(args) -> str:
    if args.prompt is not None:
        return args.prompt
    try:
        return (sys.stdin.buffer.read() if args.prompt_file == "-" else Path(args.prompt_file).read_bytes()).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read --prompt-file {args.prompt_file!r} as UTF-8 text: {error}") from None


def read_turns(args):
    """The turns of a user, each when it is needed: the prompt if there is one, then the lines of stdin."""
    if args.prompt is not None or args.prompt_file is not None:
        yield read_prompt(args)
    while args.prompt_file != "-":
        if sys.stdin.isatty():
            say("> ", end="")
        line = sys.stdin.buffer.readline()
        if not line:
            say("", end="\n" * sys.stdin.isatty())
            return
        try:
            text = line.decode().rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise ValueError(f"a line of stdin is not UTF-8 text: {error}") from None
        if text.strip():
            yield text


def sampling(args, folder) -> dict:
    """temperature, top_p, top_k: the flags; in a chat what generation_config.json says for the others; else greedy."""
    given = {name: getattr(args, name) for name in ("temperature", "top_p", "top_k")}
    given = {name: value for name, value in given.items() if value is not None}
    found = sampling_defaults(folder) if args.chat and len(given) < 3 else {}
    if used := {name: value for name, value in found.items() if name not in given}:
        say("from generation_config.json: " + ", ".join(f"{name} {value}" for name, value in used.items()))
    return dict(temperature=0.0, top_p=1.0, top_k=0) | used | given


def stop_ids(folder, tokenizer, config) -> list[int]:
    if isinstance(tokenizer, ByteTokenizer):
        return config.eos_token_ids or [EOT]
    return end_ids(folder, tokenizer)


class Writer:
    """on_token for `generate`: text to stdout as it comes, real tokens never half a character, bytes as they are."""

    def __init__(self, tokenizer):
        self.stream = None if isinstance(tokenizer, ByteTokenizer) else StreamDecoder(tokenizer)

    def __call__(self, row, token):
        emit(self.stream.push(token).encode() if self.stream else bytes([token] if token < EOT else []))

    def finish(self):
        emit((self.stream.finish().encode() if self.stream else b"") + b"\n")


def verdict(problem, ids, record="") -> str:
    found = check(problem, decode(t for t in ids if t <= EOT))
    return f"answer: {'right' if found.answer_right else 'wrong'}, trace: {found.message}{record}"


def known_record(policy, budget, *folders) -> str:
    """"; this checkpoint: P of M right", or "" where assets/results/first-look.json has no greedy row for the weights
    in these folders, which their CRC tells, whatever the folders are called."""
    path = SHIPPED / "results" / "first-look.json"
    rows = json.loads(path.read_text()).get("rows", []) if path.is_file() else []
    wanted = (fingerprint(*folders), policy, budget, "both")
    found = [r for r in rows if wanted == tuple(r.get(key) for key in ("checkpoint", "policy", "budget", "family"))]
    return f"; this checkpoint: {found[0]['right']} of {found[0]['problems']} right" if found else ""


def labels(tokenizer, ids):
    """-> a short text for each of ids, for `draw_kept`, and in how many columns: bytes narrow, real tokens in wider
    columns, narrower again for texts so long that the picture would not end."""
    columns = 128 if isinstance(tokenizer, ByteTokenizer) or len(ids) > 4096 else 32
    width = 224 // columns - 1  # characters that fit

    def short(token):
        if isinstance(tokenizer, ByteTokenizer):
            return {10: "\u21b5", 32: "\u2423"}.get(token, chr(token) if 32 < token < 127 else f"{token:x}")
        text = tokenizer.token_bytes(token, skip_special=False).decode("utf-8", errors="replace")
        text = text.replace("\n", "\u21b5").replace(" ", "\u2423")
        text = "".join(c if c.isprintable() and c < "\u0500" or c in "\u21b5\u2423" else "\u25a1" for c in text)
        return (text if len(text) <= width else text[:width - 1] + "\u2026" * (width > 1)).replace("$", r"\$")
    return [short(token) for token in ids], columns


def resolve_device(args):
    """-> torch device and dtype; bf16 on CUDA and fp32 on CPU unless asked otherwise."""
    name = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = name.partition(":")
    if name != "cpu" and (kind != "cuda" or (index or "0") not in map(str, range(torch.cuda.device_count()))):
        n = torch.cuda.device_count()
        raise ValueError(f"--device {name!r} is not here: use " + ("cpu" if n == 0 else f"cpu, or cuda:N with N < {n}"))
    return torch.device(name), getattr(torch, args.dtype or ("bfloat16" if kind == "cuda" else "float32"))


def summary(result, policy, config, spent):
    """The closing lines: entries against positions, bytes measured against the formula, speed, why it stopped."""
    cache, spec, seen = result.cache, result.cache.spec, result.seen[0]
    held = min(cache.peak_entries(), max(result.seen))  # a step ahead holds one more
    size, width = cache.nbytes(), cache.layers[0].k_cache.element_size()
    charged = held + spec.state_entries
    formula = config.n_layer * 2 * config.n_kv_head * spec.n_slots * config.head_dim * width
    return [
        f"policy: {policy}" + (f", budget {spec.budget} = {spec.n_sink} sinks + {spec.window} window + {spec.n_select} "
                               f"selected + {spec.state_entries} scorer state") * (policy != "dense"),
        f"entries per KV head: {held} at the peak of {seen} positions seen"
        + (f", {charged} with the scorer state" if spec.state_entries else "")
        + f"; compression {max(0.0, 1 - charged / max(1, seen)):.1%}",
        f"cache: {size['cache']} bytes measured; {config.n_layer} layers * 2 * {config.n_kv_head} KV heads * "
        f"{spec.n_slots} slots * {config.head_dim} * {width} bytes = {formula}",
        f"priority, position, window ring: {size['bookkeeping']} bytes, not charged (every policy has them)",
        f"scorer state: {size['state']} bytes, charged as {spec.state_entries} entries per KV head",
        f"prefill: {spent['fed']} tokens, {spent['fed'] / (spent['prefill'] or math.inf):.1f} tokens/s; "
        f"decode: {spent['steps']} steps, {spent['steps'] / (spent['decode'] or math.inf):.1f} tokens/s",
        f"stopped by: {result.stop[0]}"]


def check_request(prompts, max_new_tokens, max_seq_len, temperature, top_p, top_k, past=0):
    """ValueError for what cannot be generated, before any work."""
    if not prompts or not all(prompts):
        raise ValueError("the prompt is empty: give at least one token")
    if not (0 <= temperature < math.inf and 0 < top_p <= 1 and top_k >= 0):
        raise ValueError(f"sampling wants temperature >= 0, 0 < top_p <= 1 and top_k >= 0 (0 = off), "
                         f"got {temperature}, {top_p} and {top_k}")
    if max_new_tokens is not None and max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}: ask for at least 1")
    longest, new = past + max(map(len, prompts)), max_new_tokens or 1
    if longest + new > max_seq_len:
        raise ValueError(f"a prompt of {longest} tokens and {new} new ones need {longest + new} positions, more than "
                         f"max_seq_len {max_seq_len}: shorten the prompt or lower --max-new-tokens")


def check_prompts(policy, spec, longest):
    """ValueError when a policy never evicts the prompt, and sinks, prompt and window do not fit in the slots."""
    if policy == "random-prompt" and spec.n_sink + longest + spec.window > spec.n_slots:
        raise ValueError(f"policy {policy} never evicts the prompt, and {spec.n_sink} sinks + a prompt of {longest} + "
                         f"{spec.window} window are more than {spec.n_slots} slots: raise --budget or choose another")


def check_picture(path):
    if path is None:
        return
    parent = os.path.join(os.path.dirname(path) or ".", "")  # the slash: a file will not do
    if not path.endswith(".png") or os.path.isdir(path) or not os.access(parent, os.W_OK):
        raise ValueError(f"--picture {path!r} cannot be written: give a .png file in a folder that exists")


def draw(path, result, tokens, n_prompt, tokenizer, policy):
    """Which tokens each layer of a Generation's only row still holds, as a picture; tokens: what its cache has seen."""
    layers, slots = len(result.cache.layers), result.cache.spec.n_slots
    kept = [result.cache.kept_positions(layer)[0] for layer in range(layers)]
    title = f"Tokens held by policy {policy} after {len(tokens)} positions, {slots} slots per KV head"
    marks, columns = labels(tokenizer, tokens)
    draw_kept(path, kept, marks, n_prompt, title, columns)
    say(f"wrote {path}")
