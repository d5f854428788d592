"""data/tokenizer.py on tokenizer.json: the ids that Hugging Face's library gives, or a refusal by name.

fixtures/tokenizers/ids.json holds 284 strings and their recorded ids (it says how they were made) for three whole
tokenizers, too large to keep here, and for five small ones beside it, which between them have every twist: bytes
without a token, digits split off first, NFC around special tokens, merges listed several times, text between matches.
KVPOP_SMOLLM2, KVPOP_QWEN3 and KVPOP_LLAMA3 name folders with the whole ones.
"""
import copy
import json
import os
import random
from pathlib import Path

import pytest
import torch

from data.tokenizer import ByteTokenizer, StreamDecoder, Tokenizer, load_tokenizer

FOLDER = Path(__file__).parent / "fixtures" / "tokenizers"
RECORDED = json.loads((FOLDER / "ids.json").read_text())
SMALL = [name for name in RECORDED["ids"] if name.startswith("small")]


def spec(name="small-qwen3"):
    return json.loads((FOLDER / f"{name}.json").read_text())


def mismatches(tokenizer, name):
    """Strings whose ids differ from the recorded ones, special tokens spelled out and matched."""
    recorded, odd = RECORDED["ids"][name], []
    for n, text in enumerate(RECORDED["strings"]):
        plain = recorded["plain"][n]
        special = recorded.get("special", {}).get(str(n), plain)
        if tokenizer.encode(text) != plain or tokenizer.encode(text, allow_special=True) != special:
            odd.append(text)
    return odd


@pytest.mark.parametrize("name", SMALL)
def test_ids_are_the_recorded_ones(name):
    assert len(RECORDED["strings"]) == 284 and mismatches(Tokenizer(spec(name)), name) == []


@pytest.mark.parametrize("name", ["smollm2", "qwen3", "llama3"])
def test_ids_of_whole_tokenizers(name):
    folder = os.environ.get(f"KVPOP_{name.upper()}")
    if not folder:
        pytest.skip(f"KVPOP_{name.upper()} does not name a folder with the tokenizer.json of {name}")
    tokenizer = load_tokenizer(folder)
    assert mismatches(tokenizer, name) == []
    assert (tokenizer.n_vocab, len(tokenizer.added)) == {"smollm2": (49152, 17), "qwen3": (151669, 26),
                                                         "llama3": (128256, 256)}[name]


@pytest.mark.parametrize("name, twist", [
    ("small-qwen3", lambda s: s.update(normalizer=None)),
    ("small-qwen3", lambda s: [t.update(normalized=True) for t in s["added_tokens"]]),  # NFC eats the '>' of one
    ("small-qwen3", lambda s: [t.update(special=True) for t in s["added_tokens"]]),
    ("small-smollm2", lambda s: s["pre_tokenizer"]["pretokenizers"].pop(0)),
    ("small-smollm2", lambda s: s["model"].update(unk_token="<|im_end|>")),
    ("small-llama3", lambda s: [t.update(normalized=False) for t in s["added_tokens"]]),
    ("small-gaps", lambda s: s["pre_tokenizer"]["pretokenizers"].pop(0)),
], ids=range(7))
def test_the_strings_would_show_a_missing_twist(name, twist):
    changed = spec(name)
    twist(changed)
    assert mismatches(Tokenizer(changed), name) != []


# ----------------------------------------------------------------------------- merging, against the definition

def merge_in_order(symbols, pairs):
    """The original's rule: while any listed pair is adjacent, join the first in the list, at its leftmost place."""
    symbols = list(symbols)
    while True:
        found = [(pairs[a, b], i) for i, (a, b) in enumerate(zip(symbols, symbols[1:])) if (a, b) in pairs]
        if not found:
            return symbols
        _, i = min(found)
        symbols[i:i + 2] = [symbols[i] + symbols[i + 1]]


def small_spec(merges, **model):
    base = spec("small-gpt2")
    letters = [text for text in base["model"]["vocab"] if len(text) == 1]
    vocab = {text: i for i, text in enumerate(dict.fromkeys([*letters, *(a + b for a, b in merges)]))}
    base["model"].update(vocab=vocab, merges=merges, **model)
    base.update(added_tokens=[], pre_tokenizer={**base["pre_tokenizer"], "use_regex": False})
    return base


def test_random_merge_lists_are_exact_or_refused():
    """Lists that no training would give, on two letters: a token that its own bytes do not reach must be refused,
    and all others must merge as the definition says."""
    rng, seen = random.Random(0), {"exact": 0, "refused": 0}
    for _ in range(600):
        symbols, merges = ["a", "b"], []
        while len(merges) < rng.randint(1, 6):
            pair = [rng.choice(symbols), rng.choice(symbols)]
            if "".join(pair) not in symbols:
                merges.append(pair)
                symbols.append("".join(pair))
        pairs = {tuple(pair): i for i, pair in enumerate(merges)}
        proper = all(merge_in_order(a + b, pairs) == [a + b] for a, b in merges)
        if not proper:
            seen["refused"] += 1
            with pytest.raises(ValueError, match="the merges do not make"):
                Tokenizer(small_spec(merges))
            continue
        seen["exact"] += 1
        made = small_spec(merges)
        tokenizer = Tokenizer(made)
        for _ in range(20):
            text = "".join(rng.choices("ab", k=rng.randint(1, 14)))
            assert tokenizer.encode(text) == [made["model"]["vocab"][s] for s in merge_in_order(text, pairs)]
    assert min(seen.values()) > 50, seen


def test_a_token_that_no_merge_makes_is_decoded_and_never_encoded():
    made = small_spec([["a", "b"]])
    made["model"]["vocab"]["abb"] = top = len(made["model"]["vocab"])
    tokenizer = Tokenizer(made)
    assert tokenizer.encode("abb") == [made["model"]["vocab"][t] for t in ("ab", "b")]
    assert tokenizer.decode([top]) == "abb"
    made["model"]["ignore_merges"] = True
    with pytest.raises(ValueError, match="ignore_merges with 'abb', which no merge makes"):
        Tokenizer(made)


# ----------------------------------------------------------------------------- specials, decoding, streams

def test_control_tokens_only_where_allowed():
    tokenizer = Tokenizer(spec(), config={"eos_token": {"content": "<|im_end|>"}})
    end, think = tokenizer.special["<|im_end|>"], tokenizer.added["<think>"]
    assert "<think>" not in tokenizer.special and tokenizer.eos_ids == [end]
    text = "a<|im_end|>b<think>"
    assert tokenizer.encode(text, allow_special=True)[1:4:2] == [end, think]
    spelled = tokenizer.encode(text)
    assert end not in spelled and spelled[-1] == think
    assert tokenizer.decode(spelled) == tokenizer.decode(tokenizer.encode(text, True), skip_special=False) == text
    assert tokenizer.decode(tokenizer.encode(text, True)) == "ab<think>"
    assert tokenizer.decode(torch.tensor([end])) == "" and tokenizer.decode([tokenizer.n_vocab + 5]) == ""
    with pytest.raises(ValueError, match="id -1 is no token"):
        tokenizer.decode([-1])
    with pytest.raises(ValueError, match="offset 1 has no UTF-8 bytes"):
        tokenizer.encode("a\ud800")
    assert Tokenizer(spec("small-llama3")).prefix == [656] and tokenizer.prefix == []


def test_bytes_without_a_token_become_unknown_and_stay_inside_the_embedding():
    tokenizer = Tokenizer(spec("small-smollm2"))
    assert tokenizer.encode("a\x04\x04b")[1:3] == [0, 0]
    text = "".join(map(chr, range(0x600)))
    assert max(tokenizer.encode(text)) < tokenizer.n_vocab == 852


@pytest.mark.parametrize("tokenizer", [Tokenizer(spec()), Tokenizer(spec("small-smollm2")), ByteTokenizer()],
                         ids=["qwen3", "smollm2", "bytes"])
def test_streamed_pieces_are_whole_and_join_to_the_text(tokenizer):
    held = False
    for text in RECORDED["strings"]:
        ids, stream = tokenizer.encode(text, allow_special=True), StreamDecoder(tokenizer)
        pieces = [stream.push(i) for i in ids]
        held |= "" in pieces[:-1]
        assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in text
        assert "".join(pieces) + stream.finish() == tokenizer.decode(ids)
    assert held
    half = StreamDecoder(ByteTokenizer())
    assert half.push(0xF0, 0x9F) == "" and half.finish() == "\ufffd"
    assert half.push(97, 0xC3) == "a" and half.push(97) == "\ufffda"  # not a continuation: broken, and said so


def test_runs_that_tiktoken_cannot_take_are_one_sentence():
    tokenizer = Tokenizer(spec())
    assert len(tokenizer.encode("a" * 50_000)) > 0
    with pytest.raises(ValueError, match="up to 1000000 white-space characters in a row"):
        tokenizer.encode("x" + " " * 1_000_000)


# ----------------------------------------------------------------------------- folders and refusals

def test_load_by_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match="has no tokenizer.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 257, "alphabet": "ab"}')
    assert load_tokenizer(tmp_path).encode("ab") == [97, 98]
    with pytest.raises(ValueError, match="byte 0x63"):
        load_tokenizer(tmp_path).encode("c")
    (tmp_path / "config.json").write_text('{"vocab_size": 151936}')
    with pytest.raises(FileNotFoundError, match="vocab.json with merges.txt"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text((FOLDER / "small-qwen3.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    first = load_tokenizer(tmp_path)
    assert first.eos_ids == [first.added["<|im_end|>"]] and mismatches(first, "small-qwen3") == []
    (tmp_path / "tokenizer.json").write_text((FOLDER / "small-gaps.json").read_text())
    second = load_tokenizer(tmp_path)  # the same path, another file: nothing may be remembered
    assert mismatches(second, "small-gaps") == [] and first.fingerprint != second.fingerprint
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        load_tokenizer(tmp_path)


def set_split(pattern, **more):
    def change(s):
        s["pre_tokenizer"]["pretokenizers"][0].update(pattern={"Regex": pattern}, **more)
    return change


@pytest.mark.parametrize("change, named", [
    (lambda s: s.update(normalizer={"type": "NFKC"}), "normalizer NFKC"),
    (lambda s: s.update(normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}),
     "normalizer NFC.Lowercase"),
    (lambda s: s["model"].update(type="WordPiece"), "model type 'WordPiece'"),
    (lambda s: s["model"].update(type="Unigram"), "model type 'Unigram'"),
    (lambda s: s["model"].update(byte_fallback=True), "byte_fallback True"),
    (lambda s: s["model"].update(dropout=0.1), "dropout 0.1"),
    (lambda s: s["model"].update(end_of_word_suffix="</w>"), "end_of_word_suffix"),
    (lambda s: s["model"]["merges"].reverse(), "merges are not in the order of their ids"),
    (lambda s: s["model"]["merges"].append(["Q", "Q"]), "needs 'QQ', which is not in the vocabulary"),
    (lambda s: s["model"]["merges"].insert(1, s["model"]["merges"][0]), "several merges make one token"),
    (lambda s: s["model"]["vocab"].pop("\u0100"), "no token for byte 0x00 and no unk_token"),
    (lambda s: (s["model"]["vocab"].pop("\u0100"), s["model"].update(unk_token="!", fuse_unk=True)), "fuse_unk"),
    (lambda s: s.update(pre_tokenizer=None), "pre_tokenizer null"),
    (lambda s: s.update(pre_tokenizer={"type": "Whitespace"}), "pre_tokenizer Whitespace"),
    (lambda s: s["pre_tokenizer"]["pretokenizers"].insert(0, {"type": "Punctuation"}),
     r"pre_tokenizer Punctuation\+Split\+ByteLevel"),
    (lambda s: s["pre_tokenizer"]["pretokenizers"][-1].update(add_prefix_space=True), "add_prefix_space"),
    (set_split("a", behavior="Removed"), "behavior 'Removed'"),
    (set_split("a", invert=True), "invert True"),
    (set_split(r"\w+"), r"'\\\\w' in the Split pattern"),
    (set_split("^a"), r"'\^' in the Split pattern"),
    (set_split("[a-z&&[^b]]"), "in the Split pattern"),
    (lambda s: s["added_tokens"][0].update(lstrip=True), "'<.endoftext.>' with lstrip"),
    (lambda s: s.update(post_processor={"type": "BertProcessing"}), "post_processor 'BertProcessing'"),
    (lambda s: s.update(decoder={"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "ByteLevel"}]}),
     r"decoder ByteLevel\+Fuse"),
], ids=range(24))
def test_refused_by_name(change, named):
    changed = copy.deepcopy(spec())
    change(changed)
    with pytest.raises(ValueError, match=named):
        Tokenizer(changed)


def test_a_cut_that_llama_3_does_not_list_is_refused():
    changed = spec("small-llama3")
    several = [pair for pair in changed["model"]["merges"] if "".join(pair) == "\u0120" * 8]
    assert len(several) > 1
    changed["model"]["merges"].remove(several[0])
    with pytest.raises(ValueError, match="in a way that is not listed"):
        Tokenizer(changed)
