"""Real text as rows of tokens for a retrofit, and questions about it for an evaluation.

- `read_rows`, `read_documents`: .txt, .jsonl, .parquet, folders of them, or a hub data set, streamed;
- `write_tokens`: documents -> one file of ids per split beside a header that names tokenizer and vocabulary; a document
  belongs to train or held_out by the hash of its text, so the two never share one;
- `token_folder`: such a file, or the text itself, tokenised on first use;
- `TextRows`: rows of full context out of such a file. Documents follow each other with an end token between and no
  reset of attention or positions, as in the paper (arXiv 2607.05061);
- `needle_prompt`: numbers hidden in real text, one asked for at the end.

Letters: B batch, T tokens.
"""
import contextlib
import functools
import hashlib
import json
import os
import random
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from data.chat import encode_chat, keep_thoughts, parts

TEXT_FILES = (".txt", ".md", ".rst", ".py")  # one document each
ROW_FILES = (".jsonl", ".json", ".parquet")  # a document per row
SPLITS = ("train", "held_out")


# ----------------------------------------------------------------------------- documents

def read_rows(source, split="train", subset=None):
    """Rows (dicts) of a file, of all files of a folder in order of name, or of a hub data set "owner/name", which is
    streamed; split may name several, "high_part00+high_part01". FileNotFoundError or ValueError in one sentence."""
    path = Path(source)
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix in TEXT_FILES + ROW_FILES and p.is_file())
        if not files:
            raise FileNotFoundError(f"{path} holds no {', '.join(TEXT_FILES + ROW_FILES)} file")
        for file in files:
            yield from read_rows(file)
    elif path.is_file():
        yield from read_file(path)
    elif re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(source)) and path.suffix not in TEXT_FILES + ROW_FILES:
        yield from read_hub(str(source), split, subset)
    else:
        raise FileNotFoundError(f"no file or folder {str(source)!r}, and it is no hub id (owner/name)")


def read_file(path: Path):
    if path.suffix in TEXT_FILES:
        try:
            yield {"text": path.read_text(encoding="utf-8")}
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8: {error}") from None
    elif path.suffix == ".parquet":
        try:
            import pyarrow.parquet as parquet
        except ImportError:
            raise ValueError(f"{path}: reading parquet needs pyarrow; pip install datasets brings it") from None
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=64):
            yield from batch.to_pylist()
    elif path.suffix in ROW_FILES:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise ValueError(f"{path}, line {number} is not JSON: {error}") from None
                if not isinstance(row, dict):
                    raise ValueError(f"{path}, line {number} is not a JSON object")
                yield row
    else:
        raise ValueError(f"{path}: only {', '.join(TEXT_FILES + ROW_FILES)} files are read")


def read_hub(name, split, subset):
    try:
        from datasets import load_dataset
    except ImportError:
        raise FileNotFoundError(f"no file {name!r}; to stream it as a hub data set, pip install datasets") from None
    for part in split.split("+"):
        try:
            rows = load_dataset(name, subset, split=part, streaming=True)
        except Exception as error:  # many kinds: no network, no such id, split or subset, gated
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise FileNotFoundError(f"no file {name!r} here, and streaming split {part!r} of it from the hub failed: "
                                    f"{first}") from None
        yield from rows


def read_documents(source, field="text", split="train", subset=None, style=None):
    """Documents of the rows: text, or, where the field holds a list of messages, the parts of a chat in `style`
    (chat.py). Rows with what no style writes (tools, their calls) come as None, for the caller to count.
    ValueError names the fields that exist when `field` does not."""
    for row in read_rows(source, split, subset):
        if field not in row:
            raise ValueError(f"no field {field!r} in {source}: its rows have {', '.join(sorted(row))}")
        value = row[field]
        if isinstance(value, str):
            yield value
        elif isinstance(value, list) and value and all(isinstance(m, dict) and "role" in m for m in value):
            if style is None:
                raise ValueError(f"field {field!r} of {source} holds chats: they need the chat template of a model")
            known = ("role", "content", "reasoning_content")
            spoken = [{name: m[name] for name in known if m.get(name) is not None} for m in value]
            ok = all(m["role"] in ("system", "user", "assistant") and isinstance(m.get("content"), str) for m in spoken)
            ok = ok and not any(m.get("tool_calls") for m in value)
            yield parts(keep_thoughts(spoken, style), style, prompt=False) if ok else None
        else:
            raise ValueError(f"field {field!r} of {source} holds {type(value).__name__}, neither text nor messages")


# ----------------------------------------------------------------------------- token files

def separator_id(tokenizer) -> int:
    """The id after each document: <|endoftext|>, with which text models are trained, else eos."""
    found = [tokenizer.added[t] for t in ("<|endoftext|>",) if t in tokenizer.added] or tokenizer.eos_ids
    if not found:
        raise ValueError("the tokenizer has neither <|endoftext|> nor an eos_token to put between documents")
    return found[0]


def split_of(text: str, held_out: float) -> str:
    """Where a document belongs, by its text alone: equal documents are never on both sides."""
    number = int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big")
    return "held_out" if number < held_out * 2**64 else "train"


def write_tokens(out, source, tokenizer, *, field="text", split="train", subset=None, style=None, held_out=0.02,
                 max_document=None, max_tokens=None, cut=False) -> dict:
    """Tokenise `source` into folder `out`, or take what is there if it was made in the same way -> the header.

    {train, held_out}.bin  ids, uint16 where the vocabulary fits, else uint32
    {train, held_out}.npy  int64, where each document ends (its separator included)
    tokens.json            tokenizer and vocabulary, counts, and how it was made
    held_out: share of the documents. max_document: longer ones are dropped, in tokens. max_tokens: stop there.
    cut: where all documents fall to one split, as a single one must, the end of the text is held out instead.
    ValueError when `out` was made in another way or a split has no document."""
    out, way = Path(out), dict(
        source=str(source), field=field, split=split, subset=subset, style=None if style is None else style.name,
        held_out=held_out, max_document=max_document, max_tokens=max_tokens, cut=cut, tokenizer=tokenizer.fingerprint)
    if (out / "tokens.json").is_file():
        header = read_header(out)
        other = [f"{name} {header['made'].get(name)!r}, not {way[name]!r}" for name in way
                 if header["made"].get(name) != way[name]]
        if other:
            raise ValueError(f"{out} holds tokens made in another way ({'; '.join(other)}): give another folder or "
                             "delete it")
        return header
    if not 0 <= held_out < 1:
        raise ValueError(f"held_out must be at least 0 and below 1, got {held_out}")
    out.mkdir(parents=True, exist_ok=True)
    end, dtype = separator_id(tokenizer), np.uint16 if tokenizer.n_vocab <= 2**16 else np.uint32
    ends, counts, dropped = {s: [] for s in SPLITS}, dict.fromkeys(SPLITS, 0), dict(empty=0, too_long=0, tools=0)
    temporary = {s: out / f"{s}.bin.{os.getpid()}.tmp" for s in SPLITS}
    try:
        with contextlib.ExitStack() as stack:
            files = {s: stack.enter_context(open(temporary[s], "wb")) for s in SPLITS}
            for document in read_documents(source, field, split, subset, style):
                if document is None:
                    dropped["tools"] += 1
                    continue
                chat = not isinstance(document, str)
                text = "".join(part for part, _ in document) if chat else document
                ids = encode_chat(tokenizer, document) if chat else tokenizer.encode(document)
                if not text.strip() or max_document is not None and len(ids) > max_document:
                    dropped["too_long" if text.strip() else "empty"] += 1
                    continue
                side = split_of(text, held_out)
                np.array([*ids, end], dtype).tofile(files[side])
                counts[side] += len(ids) + 1
                ends[side].append(counts[side])
                if max_tokens is not None and sum(counts.values()) >= max_tokens:
                    break
        if cut and held_out and sum(map(bool, ends.values())) == 1:
            ends = cut_end(temporary, max(SPLITS, key=lambda s: len(ends[s])), ends, dtype, end, held_out)
            counts = {s: ends[s][-1] for s in SPLITS}
        for s in SPLITS:
            if not ends[s] and (s == "train" or held_out):
                raise ValueError(f"no document of {source} is left for {s}: {sum(map(len, ends.values()))} documents, "
                                 f"held_out {held_out}, dropped {dropped}")
        for s in SPLITS:
            np.save(out / f"{s}.npy", np.array(ends[s], np.int64))
            os.replace(temporary[s], out / f"{s}.bin")
    finally:
        for path in temporary.values():
            path.unlink(missing_ok=True)
    header = dict(n_vocab=tokenizer.n_vocab, dtype=np.dtype(dtype).name, end=end, made=way, dropped=dropped,
                  tokens=counts, documents={s: len(ends[s]) for s in SPLITS})
    partial = out / f"tokens.json.{os.getpid()}.tmp"
    partial.write_text(json.dumps(header, indent=2) + "\n")
    os.replace(partial, out / "tokens.json")  # last: a header means that all is there
    return header


def cut_end(files, full, ends, dtype, end, held_out):
    """The last share held_out of the tokens in files[full] becomes the held-out split, the rest is for training; a
    document that is cut ends with `end` on either side -> ends of both."""
    ids, whole = np.fromfile(files[full], dtype), np.array(ends[full])
    at = len(ids) - max(2, round(held_out * len(ids)))  # 2: a token and its end
    between = at in whole
    (ids[:at] if between else np.append(ids[:at], ids.dtype.type(end))).tofile(files["train"])
    ids[at:].tofile(files["held_out"])
    return {"train": [*whole[whole <= at].tolist()] + ([] if between else [at + 1]),
            "held_out": (whole[whole > at] - at).tolist()}


def read_header(folder: Path) -> dict:
    path = Path(folder) / "tokens.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no tokens.json: make it with data.text.write_tokens")
    return json.loads(path.read_text())


class TokenFile:
    """Ids of one split, mapped into memory. ValueError when the file is not whole, or was made with another tokenizer
    or for more tokens than the model has rows."""

    def __init__(self, folder, split="train", tokenizer=None, vocab_size=None):
        folder, header = Path(folder), read_header(folder)
        if tokenizer is not None and header["made"]["tokenizer"] != tokenizer.fingerprint:
            raise ValueError(f"{folder} was tokenised by another tokenizer ({header['made']['tokenizer'][:12]}, this "
                             f"one is {tokenizer.fingerprint[:12]}): tokenise the text again")
        if vocab_size is not None and header["n_vocab"] > vocab_size:
            raise ValueError(f"{folder} was tokenised for {header['n_vocab']} tokens, the model has {vocab_size}: "
                             "tokenise the text with the model's own tokenizer")
        count, dtype = header["tokens"][split], np.dtype(header["dtype"])
        path = folder / f"{split}.bin"
        size = path.stat().st_size if path.is_file() else 0
        if size != count * dtype.itemsize:
            raise ValueError(f"{path} has {size} bytes, tokens.json says {count * dtype.itemsize}: make it again")
        self.name, self.path, self.end = f"{split} of {folder}", path, header["end"]
        self.ids = np.memmap(path, dtype, "r") if count else np.empty(0, dtype)
        self.ends = np.load(folder / f"{split}.npy")

    def documents(self):
        """Each document by itself, (n,) int64, its end token left out."""
        for start, end in zip([0, *self.ends[:-1]], self.ends):
            yield torch.from_numpy(self.ids[start:end - 1].astype(np.int64))


@functools.lru_cache(maxsize=4)
def shuffled(n, seed, epoch):
    return np.random.default_rng((seed, epoch)).permutation(n)


class TextRows(torch.utils.data.Dataset):
    """Row i: idx and targets, (T,) int64 each, of packed documents. All rows of the file in an order drawn from seed,
    then all again in another: row i depends on (seed, i) alone, as in batches.py. ValueError for less than one row."""

    def __init__(self, folder, length, split="train", seed=0, tokenizer=None, vocab_size=None):
        self.file, self.length, self.seed = TokenFile(folder, split, tokenizer, vocab_size), length, seed
        self.n = (len(self.file.ids) - 1) // length  # the last target of a row is one token further
        if self.n < 1:
            raise ValueError(f"{self.file.name} has {len(self.file.ids)} tokens, one row of {length} needs "
                             f"{length + 1}: take shorter rows or more text")

    def __len__(self):
        return 2**31

    def place(self, row):
        """Which of the n rows of the file, in its order, row `row` is."""
        epoch, i = divmod(row, self.n)
        return int(shuffled(self.n, self.seed, epoch)[i])

    def __getitem__(self, row):
        start = self.place(row) * self.length
        ids = torch.from_numpy(self.file.ids[start:start + self.length + 1].astype(np.int64))
        return ids[:-1], ids[1:]


def token_folder(data, cache, tokenizer, style, **how) -> Path:
    """What --data stands for, as a folder of ids: such a folder or a file of it as it is, else the text, tokenised into
    `cache` as write_tokens does with `how`, or found there. style: a function, asked when the field holds chats.
    ValueError or FileNotFoundError in one sentence."""
    path = Path(data)
    for folder in (path, path.parent if path.suffix in (".json", ".bin", ".npy") else path):
        if (folder / "tokens.json").is_file():
            return folder
    cache = Path(cache)
    if (cache / "tokens.json").is_file():  # found there: the source, perhaps on a hub, is not asked again
        chats, made = read_header(cache)["made"]["style"] is not None, (cache / "tokens.json").stat().st_mtime
        if any(p.stat().st_mtime > made for p in ([path] if path.is_file() else path.rglob("*"))):
            raise ValueError(f"{data} has changed since {cache} was made of it: delete that folder or give another")
    else:
        first = next(iter(read_rows(data, how["split"], how["subset"])), {})
        chats = isinstance(first.get(how["field"]), list)
    write_tokens(cache, data, tokenizer, style=style() if chats else None, **how)
    return cache


def collate_rows(rows):
    """-> idx (B, T), lengths (B,), starts (B,): as collate_problems of batches.py, with nothing padded and every
    position predicted; then what rows have beside idx and targets (teacher.py)."""
    idx, _, *more = (torch.stack(column) for column in zip(*rows))
    return idx, torch.full((len(rows),), idx.shape[1]), torch.zeros(len(rows), dtype=torch.int64), *more


# ----------------------------------------------------------------------------- recall in real text

COLOURS = "amber black blue brown copper crimson golden green grey ivory orange purple red silver violet white".split()
THINGS = ("anchor basket bridge candle castle falcon garden harbour hammer kettle ladder lantern mirror needle orchard "
          "window").split()


@dataclass
class Recall:
    """A prompt that asks for a number it has told. distance: tokens from the end of that sentence to the end of the
    prompt, each; keys: how many such sentences there are."""
    ids: list[int]
    answer: str
    distance: int
    keys: int


def at_line_end(tokenizer, ids, place, last):
    """Where to put a sentence into ids: the next line end within 64 tokens of place and up to last, or place itself."""
    near = range(max(place, 1), min(place + 64, last) + 1)
    return next((p for p in near if tokenizer.token_bytes(ids[p - 1]).endswith(b"\n")), place)


def needle_prompt(tokenizer, filler, length, *, depth=None, distance=None, keys=1, seed=0, style=None) -> Recall:
    """`length` tokens: filler (ids of real text, at least as many) with `keys` sentences "The number of the red kettle
    is 48213." in it, one of which is asked for at the end. It stands at `depth` (0 first .. 1 last) or `distance`
    tokens before the end, moved to the next line end within 64 tokens; the others stand at random places.
    style: as a chat. The answer is 5 digits; compare it with the first digits of what the model goes on to say."""
    if (depth is None) == (distance is None):
        raise ValueError("give a depth or a distance, not both")
    rng, names = random.Random(f"needle {seed}"), [f"{colour} {thing}" for colour in COLOURS for thing in THINGS]
    if not 1 <= keys <= len(names):
        raise ValueError(f"keys must be between 1 and {len(names)}, got {keys}")
    names = rng.sample(names, keys)
    numbers = rng.sample(range(10_000, 100_000), keys)
    told = [tokenizer.encode(f"\nThe number of the {name} is {number}.\n") for name, number in zip(names, numbers)]
    question = f"\n\nWhat is the number of the {names[0]}?"
    opening = f" The number of the {names[0]} is"
    if style is None:
        head, tail = [], tokenizer.encode(question + opening)
    else:  # the text between two marks that no text has, to find where the filler goes
        chat = parts([dict(role="user", content="\x00" + question)], style, thinking=style.thinking == "always")
        at = next(i for i, (text, _) in enumerate(chat) if "\x00" in text)
        before, after = chat[at][0].split("\x00")
        head = encode_chat(tokenizer, [*chat[:at], (before, False)])
        tail = encode_chat(tokenizer, [(after, False), *chat[at + 1:], (opening[1:], False)])
    room = length - len(head) - len(tail) - sum(map(len, told))
    if room < 0 or len(filler) < room:
        raise ValueError(f"a prompt of {length} tokens with {keys} keys leaves {room} for filler, of which there are "
                         f"{len(filler)}: change the length or give more text")
    body = [int(i) for i in filler[:room]]

    others = [at_line_end(tokenizer, body, rng.randint(0, room), room) for _ in range(keys - 1)]

    def distance_from(place):
        return room - place + len(tail) + sum(len(text) for text, p in zip(told[1:], others) if p >= place)
    if depth is None:  # the latest place that is far enough from the end
        fits = [place for place in range(room + 1) if distance_from(place) >= distance]
        if not fits or distance < len(tail):
            raise ValueError(f"distance {distance} is not inside a prompt of {length} tokens: it must be between "
                             f"{len(tail)} and {distance_from(0)}")
        place = fits[-1]
    elif 0 <= depth <= 1:
        place = round(depth * room)
    else:
        raise ValueError(f"depth must be between 0 and 1, got {depth}")
    places = [at_line_end(tokenizer, body, place, room), *others]
    ids, last, end_of = list(head), 0, {}
    for i in sorted(range(keys), key=lambda i: places[i]):
        ids += body[last:places[i]] + told[i]
        last, end_of[i] = places[i], len(ids)
    ids += body[last:] + tail
    return Recall(ids, str(numbers[0]), len(ids) - end_of[0], keys)
