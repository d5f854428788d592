"""data/text.py: documents in, the same tokens out, none on both sides of the split, and errors that name the cause."""
import json
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from data.chat import CHATML, QWEN3, encode_chat
from data.text import (TextRows, TokenFile, collate_rows, needle_prompt, read_documents, read_header, split_of,
                       write_tokens)
from data.tokenizer import ByteTokenizer, Tokenizer

TOKENIZERS = Path(__file__).parent / "fixtures" / "tokenizers"


def qwen3():
    spec = json.loads((TOKENIZERS / "small-qwen3.json").read_text())
    return Tokenizer(spec, "the small one", {"eos_token": "<|im_end|>"})


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def many(n=200):
    return [f"Document {i}: caf\u00e9 \u4f60\u597d <|endoftext|> {'word ' * (i % 7)}\n" for i in range(n)]


# ----------------------------------------------------------------------------- sources

def test_text_files_and_folders(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.md").write_text("two")
    (tmp_path / "a.txt").write_text("one\n\nstill one")
    jsonl(tmp_path / "c.jsonl", [{"text": "three"}, {"text": "four"}])
    (tmp_path / "ignored.bin").write_text("no")
    assert list(read_documents(tmp_path)) == ["one\n\nstill one", "two", "three", "four"]
    assert list(read_documents(tmp_path / "a.txt")) == ["one\n\nstill one"]


def test_parquet(tmp_path):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"body": many(150), "n": list(range(150))}), tmp_path / "x.parquet")
    assert list(read_documents(tmp_path / "x.parquet", "body")) == many(150)
    with pytest.raises(ValueError, match="no field 'text' in .*: its rows have body, n"):
        list(read_documents(tmp_path / "x.parquet"))


def test_hub_data_sets_are_streamed(monkeypatch):
    calls, rows = [], {"high_part00": [{"text": "a"}], "high_part01": [{"text": "b"}, {"text": "c"}]}

    def load_dataset(name, subset, split, streaming):
        calls.append((name, subset, split, streaming))
        if split not in rows:
            raise ValueError(f"Bad split: {split}\nand much more")
        return iter(rows[split])
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert list(read_documents("owner/set", split="high_part00+high_part01", subset="sub")) == ["a", "b", "c"]
    assert calls == [("owner/set", "sub", split, True) for split in rows]
    with pytest.raises(FileNotFoundError) as error:
        list(read_documents("owner/set", split="low"))
    assert str(error.value) == ("no file 'owner/set' here, and streaming split 'low' of it from the hub failed: "
                                "Bad split: low")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(FileNotFoundError, match="pip install datasets"):
        list(read_documents("owner/set"))


def test_chats_become_text_in_the_style_of_the_model(tmp_path):
    user, tool = dict(role="user", content="2+2?", tool_calls=None), dict(role="tool", content="4")
    answer = dict(role="assistant", content="4", reasoning_content="easy")
    path = jsonl(tmp_path / "x.jsonl", [{"messages": [user, answer]}, {"messages": [user, tool]}])
    chat, none = read_documents(path, "messages", style=QWEN3)
    assert none is None and "".join(text for text, _ in chat) == (
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n<think>\neasy\n</think>\n\n4<|im_end|>\n")
    tok = qwen3()
    header = write_tokens(tmp_path / "out", path, tok, field="messages", style=QWEN3, held_out=0)
    assert header["dropped"] == dict(empty=0, too_long=0, tools=1) and header["documents"] == dict(train=1, held_out=0)
    (ids,) = TokenFile(tmp_path / "out").documents()
    assert ids.tolist() == encode_chat(tok, chat) and tok.added["<|im_end|>"] in ids
    with pytest.raises(ValueError, match="holds chats: they need the chat template"):
        list(read_documents(path, "messages"))
    (chat, _) = read_documents(path, "messages", style=CHATML)  # a model whose template has no place for thoughts
    assert "".join(text for text, _ in chat).endswith("assistant\n<think>\neasy\n</think>\n\n4<|im_end|>\n")
    call = dict(role="assistant", content="", tool_calls=[dict(name="python")])
    path = jsonl(tmp_path / "y.jsonl", [{"messages": [user, call]}])
    assert list(read_documents(path, "messages", style=QWEN3)) == [None]


@pytest.mark.parametrize("name, content, named", [
    ("x.jsonl", '{"text": "a"}\n{"text"\n', "line 2 is not JSON"),
    ("x.jsonl", "[1]\n", "line 1 is not a JSON object"),
    ("x.jsonl", '{"b": 1, "a": 2}\n', "no field 'text' in .*: its rows have a, b"),
    ("x.jsonl", '{"text": 5}\n', "holds int, neither text nor messages"),
    ("x.txt", b"\xff\xfe", "is not UTF-8"),
    ("x.csv", "a,b", "only .txt, .md"),
], ids=range(6))
def test_bad_files_are_named(tmp_path, name, content, named):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=named):
        list(read_documents(tmp_path / name))


def test_absent_things_are_named(tmp_path):
    for name in ("no.jsonl", "no/such.jsonl", "a/b/c", "nothing"):
        with pytest.raises(FileNotFoundError, match="no file or folder .* and it is no hub id"):
            list(read_documents(name))
    with pytest.raises(FileNotFoundError, match="holds no .txt"):
        list(read_documents(tmp_path))
    with pytest.raises(FileNotFoundError, match="has no tokens.json"):
        TokenFile(tmp_path)


# ----------------------------------------------------------------------------- token files

@pytest.mark.parametrize("tokenizer", [qwen3(), ByteTokenizer()], ids=["qwen3", "bytes"])
def test_documents_come_back_whole_and_on_one_side(tmp_path, tokenizer):
    rows = [{"text": text} for text in many()] + [{"text": ""}, {"text": " \n"}] + [{"text": many()[3]}]
    header = write_tokens(tmp_path / "out", jsonl(tmp_path / "x.jsonl", rows), tokenizer, held_out=0.2)
    sides = {split: [d.tolist() for d in TokenFile(tmp_path / "out", split, tokenizer, 900).documents()]
             for split in ("train", "held_out")}
    for split, found in sides.items():
        assert found == [tokenizer.encode(t) for t in [*many(), many()[3]] if split_of(t, 0.2) == split]
    assert not {tuple(d) for d in sides["train"]} & {tuple(d) for d in sides["held_out"]}
    assert 20 < len(sides["held_out"]) < 65 and header["documents"]["train"] == len(sides["train"])
    assert header["dropped"]["empty"] == 2 and header["dtype"] == "uint16"
    end = tokenizer.added["<|endoftext|>"]
    packed = TokenFile(tmp_path / "out").ids.tolist()
    assert packed == [i for d in sides["train"] for i in (*d, end)]  # no document wrote an end of its own
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "held_out.bin", "held_out.npy", "tokens.json", "train.bin", "train.npy"]


def test_wide_vocabularies_take_32_bits(tmp_path):
    tok = qwen3()
    tok.n_vocab = 151_669
    tok.encode = lambda text, allow_special=False: [151_000, 70_000, 5]
    header = write_tokens(tmp_path / "out", jsonl(tmp_path / "x.jsonl", [{"text": "a"}]), tok, held_out=0)
    assert header["dtype"] == "uint32"
    assert next(TokenFile(tmp_path / "out").documents()).tolist() == [151_000, 70_000, 5]
    with pytest.raises(ValueError, match="for 151669 tokens, the model has 49152"):
        TokenFile(tmp_path / "out", vocab_size=49_152)


def test_what_is_there_is_reused_only_if_made_alike(tmp_path):
    path, tok = jsonl(tmp_path / "x.jsonl", [{"text": t} for t in many()]), qwen3()
    first = write_tokens(tmp_path / "out", path, tok)
    path.unlink()  # so a second reading would fail
    assert write_tokens(tmp_path / "out", path, tok) == first == read_header(tmp_path / "out")
    with pytest.raises(ValueError, match="made in another way .held_out 0.02, not 0.5"):
        write_tokens(tmp_path / "out", path, tok, held_out=0.5)
    other = ByteTokenizer()
    with pytest.raises(ValueError, match="tokenizer 'the small one', not 'bytes'"):
        write_tokens(tmp_path / "out", path, other)
    with pytest.raises(ValueError, match="tokenised by another tokenizer"):
        TokenFile(tmp_path / "out", tokenizer=other)
    with open(tmp_path / "out" / "train.bin", "ab") as file:
        file.write(b"x")
    with pytest.raises(ValueError, match="tokens.json says"):
        TokenFile(tmp_path / "out")


def test_limits_and_empty_splits(tmp_path):
    path, tok = jsonl(tmp_path / "x.jsonl", [{"text": t} for t in many()]), ByteTokenizer()
    header = write_tokens(tmp_path / "short", path, tok, max_document=60, held_out=0.3)
    lengths = [len(t.encode()) for t in many()]
    assert header["dropped"]["too_long"] == sum(n > 60 for n in lengths) > 0
    header = write_tokens(tmp_path / "few", path, tok, max_tokens=1000, held_out=0.3)
    assert 1000 <= sum(header["tokens"].values()) < 1000 + max(lengths) + 1
    one = jsonl(tmp_path / "one.jsonl", [{"text": "only"}])
    missing = "held_out" if split_of("only", 0.5) == "train" else "train"
    with pytest.raises(ValueError, match=f"no document of .* is left for {missing}: 1 documents"):
        write_tokens(tmp_path / "none", one, tok, held_out=0.5)
    assert list((tmp_path / "none").iterdir()) == []
    with pytest.raises(ValueError, match="held_out must be"):
        write_tokens(tmp_path / "none", one, tok, held_out=1.5)


@pytest.mark.parametrize("texts", [["one long document " * 40],
                                   [f"a document of several, the {i} th " * 9 for i in range(4)]])
@pytest.mark.parametrize("held_out", [0.01, 0.3])
def test_the_end_of_a_text_is_held_out_where_no_document_is(tmp_path, texts, held_out):
    path, tok = jsonl(tmp_path / "x.jsonl", [{"text": t} for t in texts]), ByteTokenizer()
    if len({split_of(t, held_out) for t in texts}) == 2:
        pytest.skip("whole documents are held out")
    header = write_tokens(tmp_path / "out", path, tok, held_out=held_out, cut=True)
    train, held = (TokenFile(tmp_path / "out", split, tok) for split in ("train", "held_out"))
    whole = [i for t in texts for i in (*t.encode(), 256)]
    at = len(whole) - max(2, round(held_out * len(whole)))
    assert train.ids.tolist() == whole[:at] + [256] * (whole[at - 1] != 256) and held.ids.tolist() == whole[at:]
    assert header["tokens"] == dict(train=len(train.ids), held_out=len(held.ids))
    pieces = [[bytes(d.tolist()).decode() for d in side.documents()] for side in (train, held)]
    assert "".join(pieces[0] + pieces[1]) == "".join(texts) and all(256 not in d for d in train.documents())
    assert header["documents"] == dict(zip(("train", "held_out"), map(len, pieces)))


# ----------------------------------------------------------------------------- rows

def test_rows_are_the_file_in_another_order(tmp_path):
    path, tok = jsonl(tmp_path / "x.jsonl", [{"text": t} for t in many()]), ByteTokenizer()
    write_tokens(tmp_path / "out", path, tok)
    rows, again = TextRows(tmp_path / "out", 64, seed=3), TextRows(tmp_path / "out", 64, seed=3)
    packed = torch.from_numpy(rows.file.ids.astype(np.int64))
    expected = {tuple(packed[i * 64:(i + 1) * 64].tolist()) for i in range(rows.n)}
    orders = []
    for epoch in range(2):
        order = [tuple(rows[epoch * rows.n + i][0].tolist()) for i in range(rows.n)]
        assert len(order) == rows.n and set(order) == expected
        orders.append(order)
    assert orders[0] != orders[1] and TextRows(tmp_path / "out", 64, seed=4)[0][0].tolist() != rows[0][0].tolist()
    for i in (0, 5, rows.n + 2):
        idx, targets = rows[i]
        assert torch.equal(idx[1:], targets[:-1]) and torch.equal(idx, again[i][0]) and idx.dtype == torch.int64
    idx, lengths, starts = collate_rows([rows[0], rows[1]])
    assert idx.shape == (2, 64) and lengths.tolist() == [64, 64] and starts.tolist() == [0, 0]
    exact = len(packed) - 1
    assert TextRows(tmp_path / "out", exact).n == 1
    with pytest.raises(ValueError, match=f"has {len(packed)} tokens, one row of {exact + 1} needs {exact + 2}"):
        TextRows(tmp_path / "out", exact + 1)


# ----------------------------------------------------------------------------- recall

FILLER = "It was a dark night.\nThe wind blew over the hills.\n" * 300


@pytest.mark.parametrize("tokenizer, style", [(qwen3(), None), (qwen3(), CHATML), (ByteTokenizer(), None)],
                         ids=["qwen3", "chat", "bytes"])
@pytest.mark.parametrize("keys", [1, 6])
def test_needles_stand_where_asked(tokenizer, style, keys):
    filler, seen = tokenizer.encode(FILLER), set()
    for seed in range(5):
        for where in (dict(depth=0.0), dict(depth=0.5), dict(depth=1.0), dict(distance=700)):
            prompt = needle_prompt(tokenizer, filler, 2000, keys=keys, seed=seed, style=style, **where)
            text = tokenizer.decode(prompt.ids)
            assert len(prompt.ids) == 2000 and text.count("The number of the") == keys + 1
            name = text.rsplit("the number of the ", 1)[1].split("?")[0]
            assert f"The number of the {name} is {prompt.answer}.\n" in text and text.count(prompt.answer) == 1
            assert text.endswith(f"The number of the {name} is") and len(prompt.answer) == 5
            needle_end = text.index(f"{prompt.answer}.\n") + 7
            behind = tokenizer.decode(prompt.ids[2000 - prompt.distance:])
            assert text[needle_end:] == behind
            if "distance" in where:
                assert 700 - 64 <= prompt.distance <= 700 + 40
            seen.add((name, prompt.answer))
        assert needle_prompt(tokenizer, filler, 2000, keys=keys, seed=seed, style=style, **where) == prompt
    assert len(seen) == 5  # a seed draws one name and number
    if style is not None:
        whole = tokenizer.decode(prompt.ids, skip_special=False)
        assert whole.startswith("<|im_start|>user\nIt was") and whole.count("<|im_end|>") == 1
        assert f"?<|im_end|>\n<|im_start|>assistant\nThe number of the {name} is" in whole


def test_impossible_needles_are_named():
    tok = ByteTokenizer()
    filler = tok.encode(FILLER)
    for arguments, named in ((dict(length=100, depth=0.5), "leaves -"), (dict(length=90_000, depth=0.5), "filler"),
                             (dict(length=2000), "depth or a distance"), (dict(length=2000, depth=1.5), "depth must"),
                             (dict(length=2000, distance=3), "distance 3 is not inside"),
                             (dict(length=2000, distance=5000), "distance 5000 is not inside"),
                             (dict(length=2000, depth=0.5, keys=0), "keys must be")):
        with pytest.raises(ValueError, match=named):
            needle_prompt(tok, filler, **arguments)
