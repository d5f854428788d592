"""Text as ids: bytes for the embedded task, and the tokenizer.json of a real checkpoint.

- `ByteTokenizer`, `encode_checked`, `decode`: id 0..255 is the byte of that value, 256 is <|endoftext|>, so
  `text.encode()` already is the ids and nothing on the training path needs tiktoken. A model trained on few bytes has
  untrained embeddings for the rest: they are refused by name;
- `load_tokenizer(folder)` -> `Tokenizer`: a tiktoken.Encoding made from tokenizer.json (byte-level BPE: Qwen3,
  SmolLM2, Llama 3, GPT-2) that gives the same ids; whatever cannot be expressed exactly is refused by name;
- `StreamDecoder`: ids to text piece by piece, never half a character.
"""
import codecs
import functools
import hashlib
import json
import re
import unicodedata
from pathlib import Path

EOT = 256
# GPT-2's split. Where digits are split off first (one a piece), a space before a digit stays with the white space, as
# the lookahead then meets the end of its piece: not the same as replacing \p{N}+ by \p{N}
GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DIGITS_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"


# ----------------------------------------------------------------------------- bytes

def byte_encoding():
    """A tiktoken.Encoding named "bytes": 256 single bytes, no merges, and <|endoftext|> = 256."""
    import tiktoken
    return tiktoken.Encoding("bytes", pat_str=r"(?s:.+)", mergeable_ranks={bytes([b]): b for b in range(256)},
                             special_tokens={"<|endoftext|>": EOT}, explicit_n_vocab=257)


def encode_checked(text: str, alphabet: str | None = None) -> list[int]:
    """UTF-8 bytes of text as ids. `alphabet` is ModelConfig.alphabet: the allowed bytes decoded as latin-1, None for
    all of them. The text of a special token is plain bytes here. ValueError names the first byte not allowed."""
    ids = list(utf8(text))
    if alphabet is not None:
        allowed = set(alphabet.encode("latin-1"))
        for offset, byte in enumerate(ids):
            if byte not in allowed:
                raise ValueError(f"byte 0x{byte:02x} ({printable(bytes([byte]))}) at offset {offset} is not one of the "
                                 f"{len(allowed)} bytes this model was trained on: {printable(bytes(sorted(allowed)))}")
    return ids


def decode(ids) -> str:
    """Ids (ints or a 1-D tensor) to text for display: EOT shows as nothing, broken UTF-8 as the replacement mark."""
    return ByteTokenizer().decode(ids)


def printable(some: bytes) -> str:
    return repr(some)[1:]


def utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"character {text[error.start]!r} at offset {error.start} has no UTF-8 bytes") from None


class ByteTokenizer:
    """The byte level behind the interface of Tokenizer."""
    n_vocab, special, fingerprint = 257, {"<|endoftext|>": EOT}, "bytes"
    added, eos_ids, prefix = special, [EOT], []

    def __init__(self, alphabet: str | None = None):
        self.alphabet = alphabet

    def encode(self, text, allow_special=False):
        """The text of <|endoftext|> is plain bytes unless allowed."""
        if not allow_special:
            return encode_checked(text, self.alphabet)
        first, *rest = (encode_checked(part, self.alphabet) for part in text.split("<|endoftext|>"))
        return first + [i for part in rest for i in (EOT, *part)]

    def token_bytes(self, i, skip_special=True) -> bytes:
        if not 0 <= i <= EOT:
            raise ValueError(f"id {i} is no byte: ids run from 0 to 255, and {EOT} ends a text")
        return bytes([i]) if i != EOT else b"" if skip_special else b"<|endoftext|>"

    def decode(self, ids, skip_special=True) -> str:
        return b"".join(self.token_bytes(int(i), skip_special) for i in ids).decode("utf-8", errors="replace")


# ----------------------------------------------------------------------------- tokenizer.json

class Tokenizer:
    """What tokenizer.json says. Attributes:

    encoding     the tiktoken.Encoding; its ids are those of the file, except for bytes that the vocabulary lacks, which
                 get ids from n_vocab up there and become `unknown` in encode
    n_vocab      highest id + 1; a model may have more rows (Qwen3: 151,936 for 151,669 tokens)
    added        {text: id} of the added tokens, special or not; `special` those that are control tokens
    prefix       ids that the original puts in front of a text (Llama 3: bos); encode does not
    eos_ids      of eos_token in tokenizer_config.json, [] without; what ends a chat is chat.py's to say
    fingerprint  sha256 of the file, for token files to name

    Not done, because lengths are the caller's: truncation and padding.
    """

    def __init__(self, spec: dict, fingerprint: str = "", config: dict | None = None, name: str = "tokenizer.json"):
        import tiktoken
        self.fingerprint, self.normalize = fingerprint, normalizer_of(spec, name)
        pattern, added = split_pattern(spec.get("pre_tokenizer"), name), added_tokens(spec, name)
        self.added = {token["content"]: token["id"] for token in added}
        self.special = {token["content"]: token["id"] for token in added if token.get("special")}
        vocab = {text: i for text, i in spec["model"]["vocab"].items() if text not in self.added}
        self._bytes = {i: to_bytes(text) for text, i in vocab.items()}
        self._bytes |= {i: text.encode() for text, i in self.added.items()}
        self.n_vocab = 1 + max(self._bytes)
        ranks = merge_ranks(spec["model"], vocab, name)
        missing = [bytes([b]) for b in range(256) if bytes([b]) not in ranks]  # tiktoken needs all 256
        unknown = spec["model"].get("unk_token")
        self.unknown = vocab.get(unknown, self.added.get(unknown))
        if missing and (self.unknown is None or spec["model"].get("fuse_unk")):
            raise ValueError(f"{name} has no token for byte 0x{missing[0].hex()} and " + (
                "fuse_unk is set: several unknown bytes in one token" if unknown else "no unk_token")
                + " cannot be expressed")
        ranks |= {byte: self.n_vocab + n for n, byte in enumerate(missing)}
        self.has_missing = bool(missing)
        self.encoding = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=self.added)
        # matched on the text as it is, then on normalised text; the longest where several begin, as in the original
        self._split = {}
        for everything in (True, False):
            some = [token for token in added if everything or not token.get("special")]
            self._split[everything] = [one_of(token["content"] for token in some if not token.get("normalized")),
                                       one_of(self.normalize(token["content"])
                                              for token in some if token.get("normalized"))]
        self._normal = {self.normalize(token["content"]): token["id"] for token in added if token.get("normalized")}
        self.prefix = prefix_ids(spec.get("post_processor"), name)
        eos = (config or {}).get("eos_token")
        eos = eos.get("content") if isinstance(eos, dict) else eos
        self.eos_ids = [self.added[eos]] if eos in self.added else []

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """Ids of text, as the original gives them without its prefix. allow_special: "<|im_end|>" in text is the
        control token; otherwise it is spelled out like any text, so that no document and no user can write one.
        Added tokens that are no control tokens (Qwen3's <think>) are matched either way, as in the original."""
        utf8(text)  # tiktoken would put replacement marks for lone surrogates
        raw, normal = self._split[allow_special]
        ids = []
        for piece, token in cut(text, raw):
            if token is not None:
                ids.append(self.added[token])
                continue
            for part, token in cut(self.normalize(piece), normal):
                ids += self.encode_ordinary(part) if token is None else [self._normal[token]]
        return [i if i < self.n_vocab else self.unknown for i in ids] if self.has_missing else ids

    def encode_ordinary(self, text):
        try:
            return self.encoding.encode_ordinary(text)
        except BaseException as error:  # tiktoken's regular expressions give up by a panic, which is no Exception
            if type(error).__name__ != "PanicException":
                raise
            longest = max(map(len, re.findall(r"\s+", text)), default=0)
            raise ValueError(f"the text, {len(text)} characters with up to {longest} white-space characters in a row, "
                             "is too much for tiktoken: shorten such runs") from None

    def token_bytes(self, i: int, skip_special: bool = True) -> bytes:
        """The bytes of one id: control tokens show as nothing when skipped; rows of the model past the vocabulary,
        which a model can sample, too."""
        some = self._bytes.get(i)
        if some is None:
            if i < 0:
                raise ValueError(f"id {i} is no token")
            return b""
        return b"" if skip_special and self.special.get(some.decode("utf-8", "replace")) == i else some

    def decode(self, ids, skip_special: bool = True) -> str:
        """Text of ids (ints or a 1-D tensor); broken UTF-8 shows as the replacement mark."""
        return b"".join(self.token_bytes(int(i), skip_special) for i in ids).decode("utf-8", errors="replace")


def load_tokenizer(folder, alphabet: str | None = None):
    """Tokenizer of a checkpoint folder with a tokenizer.json; the ByteTokenizer of `alphabet` for a folder without
    one whose config.json says at most 257 tokens. FileNotFoundError or ValueError names what is missing or odd."""
    folder = Path(folder)
    path, settings, model = (folder / n for n in ("tokenizer.json", "tokenizer_config.json", "config.json"))
    if not path.is_file():
        config = json.loads(model.read_text()) if model.is_file() else {}
        if not config or config.get("vocab_size", 0) > 257:
            raise FileNotFoundError(f"{folder} has no tokenizer.json: put it beside config.json (from the same "
                                    "checkpoint); vocab.json with merges.txt or a .model file will not do")
        return ByteTokenizer(config.get("alphabet") if alphabet is None else alphabet)
    raw = path.read_bytes()
    try:
        spec = json.loads(raw)
        config = json.loads(settings.read_text()) if settings.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{folder}: tokenizer.json or tokenizer_config.json is not JSON: {error}") from None
    if not isinstance(spec, dict) or not isinstance(spec.get("model"), dict):
        raise ValueError(f"{path} must hold a JSON object with a model")
    return Tokenizer(spec, hashlib.sha256(raw).hexdigest(), config, str(path))


class StreamDecoder:
    """Text of ids as they come: `push` gives what is complete, `finish` the rest. A character of several tokens is
    held back until it is whole, so the pieces joined are exactly `decode` of all ids."""

    def __init__(self, tokenizer, skip_special: bool = True):
        self.tokenizer, self.skip_special = tokenizer, skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, *ids) -> str:
        return self._utf8.decode(b"".join(self.tokenizer.token_bytes(int(i), self.skip_special) for i in ids))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


# ----------------------------------------------------------------------------- the parts of tokenizer.json

def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte -> the byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + n): b for n, b in enumerate(others)}


ALPHABET = byte_alphabet()


def to_bytes(text: str) -> bytes:
    """Bytes of a vocabulary entry; one that is not in the byte alphabet stands for itself, as in the original."""
    try:
        return bytes(ALPHABET[c] for c in text)
    except KeyError:
        return text.encode()


def kinds(part, key) -> list[dict]:
    """A part of the file as a list: null, one thing, or a Sequence of things."""
    if not part:
        return []
    return part[key] if part.get("type") == "Sequence" else [part]


def normalizer_of(spec, name):
    found = [part.get("type") for part in kinds(spec.get("normalizer"), "normalizers")]
    if not set(found) <= {"NFC"}:
        raise ValueError(f"{name}: normalizer {'+'.join(map(str, found))} is not supported: only NFC or none is")
    return functools.partial(unicodedata.normalize, "NFC") if found else str  # no lambda: loaders of batches pickle it


def added_tokens(spec, name) -> list[dict]:
    decoders = {part.get("type") for part in kinds(spec.get("decoder"), "decoders")}
    if not decoders <= {"ByteLevel"}:
        raise ValueError(f"{name}: decoder {'+'.join(map(str, sorted(decoders)))} is not supported: only ByteLevel is")
    added = spec.get("added_tokens") or []
    for token in added:
        for option in ("single_word", "lstrip", "rstrip"):
            if token.get(option):
                raise ValueError(f"{name}: added token {token['content']!r} with {option} is not supported")
    return added


def split_pattern(part, name) -> str:
    """One regular expression with the effect of the pre-tokenizer."""
    steps = kinds(part, "pretokenizers")
    names = [step.get("type") for step in steps]
    level = steps[-1] if steps else {}
    if level.get("type") != "ByteLevel" or level.get("add_prefix_space"):
        raise ValueError(f"{name}: pre_tokenizer {'+'.join(map(str, names)) or 'null'} is not supported: it must end "
                         "in ByteLevel without add_prefix_space")
    whole = level.get("use_regex", True)  # the file's default
    if names == ["ByteLevel"]:
        return GPT2_SPLIT if whole else r"(?s:.+)"
    if names == ["Digits", "ByteLevel"] and whole and steps[0].get("individual_digits"):
        return DIGITS_GPT2_SPLIT
    if names == ["Split", "ByteLevel"] and not whole:
        split = steps[0]
        if split.get("behavior") != "Isolated" or split.get("invert"):
            raise ValueError(f"{name}: Split with behavior {split.get('behavior')!r}, invert {split.get('invert')} is "
                             "not supported: only Isolated without invert is")
        pattern = split["pattern"].get("Regex") or re.escape(split["pattern"]["String"])
        check_pattern(pattern, name)
        # text between two matches is a piece too; tiktoken would drop it without a word
        return rf"{pattern}|(?:(?!{pattern})(?s:.))+"
    raise ValueError(f"{name}: pre_tokenizer {'+'.join(map(str, names))} with use_regex {whole} is not supported: one "
                     "of ByteLevel, Digits(individual)+ByteLevel, Split+ByteLevel without use_regex is")


def check_pattern(pattern, name):
    """ValueError for what the two regular expression engines read differently."""
    bare = re.sub(r"\\[pP]\{\^?\w+\}|\\[sSdDrnt]|\\[^\w\s]", "", pattern)  # what both read alike
    bare = bare.replace("[^", "[")
    odd = re.search(r"\\.?|[$^]|&&|\[:|\[[^\]]*\[", bare)
    if odd:
        raise ValueError(f"{name}: {odd[0]!r} in the Split pattern {pattern!r} is not supported")


def merge_ranks(model, vocab, name) -> dict[bytes, int]:
    """{bytes: id} for tiktoken, which merges the adjacent pair whose joined bytes have the lowest id, and takes a piece
    that is a token at once. The original merges the pairs that it lists, in the order of the list. The two agree on
    every text if ids follow that order and each token, cut into bytes, merges back into itself: the merges inside a
    span that is still whole are those of the span alone, so a pair that joins to a token is the listed one."""
    if model.get("type", "BPE") != "BPE":
        raise ValueError(f"{name}: model type {model.get('type')!r} is not supported: only byte-level BPE is")
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(key):
            raise ValueError(f"{name}: {key} {model[key]!r} is not supported")
    ranks = {bytes([ALPHABET[text]]): i for text, i in vocab.items() if len(text) == 1 and text in ALPHABET}
    pairs, made, last = {}, {}, -1  # (left, right) -> merged id; id -> (left, right)
    several = False
    for merge in model["merges"]:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        gone = [text for text in (left, right, left + right) if text not in vocab]
        if gone:
            raise ValueError(f"{name}: the merge {left!r} {right!r} needs {gone[0]!r}, which is not in the vocabulary")
        i = vocab[left + right]
        if i < last:
            raise ValueError(f"{name}: merges are not in the order of their ids: {left + right!r} has id {i} and "
                             f"comes after id {last}")
        several |= i == last
        last = i
        pairs[vocab[left], vocab[right]] = i
        made.setdefault(i, (vocab[left], vocab[right]))
        ranks[to_bytes(left + right)] = i
    text_of = {i: text for text, i in vocab.items()}
    if several:  # written from a tiktoken file: all ways to cut a token are listed, and whole pieces are taken
        if not model.get("ignore_merges"):
            raise ValueError(f"{name}: several merges make one token without ignore_merges: not supported")
        lacking = next((i for i in made if any((vocab[text_of[i][:n]], vocab[text_of[i][n:]]) not in pairs
                                               for n in range(1, len(text_of[i]))
                                               if text_of[i][:n] in vocab and text_of[i][n:] in vocab)), None)
    else:
        single = {i for i in ranks.values() if i not in made}
        order = {i: n for n, i in enumerate([*single, *made])}
        lacking = next((i for i in made if not merges_back(i, made, pairs, order)), None)
    if lacking is not None:
        raise ValueError(f"{name}: the merges do not make {text_of[lacking]!r} (id {lacking}) out of its bytes, or do "
                         "in a way that is not listed: cannot be expressed")
    whole = [text for text, i in vocab.items() if i not in made and to_bytes(text) not in ranks]
    if whole and model.get("ignore_merges"):
        raise ValueError(f"{name}: ignore_merges with {whole[0]!r}, which no merge makes, cannot be expressed")
    return ranks


def merges_back(token, made, pairs, order) -> bool:
    """Whether the bytes of token, merged in order, end as token. Its halves do (they come earlier), so only a merge
    across their border can spoil it: walk down the last merge of either side, the later one first, and see whether
    the two ends at the border would have been merged before that."""
    left, right = made[token]
    limit = order[token]
    while True:
        across = pairs.get((left, right))
        if across is not None and order[across] < limit:
            return False
        # the side made last is taken apart; a merge at the border of equal age is decided left to right
        if order[left] > order[right]:
            if left in made:
                limit, left = order[left], made[left][1]
            elif right in made:
                limit, right = order[right] + 1, made[right][0]
            else:
                return True
        elif right in made:
            limit, right = order[right] + 1, made[right][0]
        elif left in made:
            limit, left = order[left], made[left][1]
        else:
            return True


def prefix_ids(part, name) -> list[int]:
    """The ids before "$A" in the post-processor's template for one text; nothing may stand after it."""
    ids = []
    for step in kinds(part, "processors"):
        if step.get("type") == "TemplateProcessing":
            seen = False
            for item in step["single"]:
                if "Sequence" in item:
                    seen = True
                elif seen:
                    raise ValueError(f"{name}: the post_processor adds tokens after the text: not supported")
                else:
                    ids += step["special_tokens"][item["SpecialToken"]["id"]]["ids"]
        elif step.get("type") != "ByteLevel":
            raise ValueError(f"{name}: post_processor {step.get('type')!r} is not supported: only ByteLevel and "
                             "TemplateProcessing are")
    return ids


def one_of(texts):
    """A regular expression for the longest of the texts at the leftmost place, None for no text."""
    texts = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, texts))) if texts else None


def cut(text, pattern):
    """(piece, None) for text between matches, (match, match) for matches, in order; nothing is empty."""
    start = 0
    for match in pattern.finditer(text) if pattern else ():
        if match.start() > start:
            yield text[start:match.start()], None
        yield match[0], match[0]
        start = match.end()
    if start < len(text):
        yield text[start:], None
