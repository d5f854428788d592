"""data/facts.py and train.py --facts: what is told once is asked for later in the same row, with its answer, in words
that no evaluation of recall has; rows follow from seed and number alone; runs with and without a teacher on disk."""
import json
import math
import pickle
import random
import re
from types import SimpleNamespace

import pytest
import torch

import train
from data.batches import loader
from data.facts import FORMS, NEAR, WORDS, FactRows, draw_fact, with_facts
from data.teacher import TaughtRows
from data.text import COLOURS, THINGS, TextRows, needle_prompt, write_tokens
from data.tokenizer import ByteTokenizer, load_tokenizer
from test_text import qwen3
from test_train import refused, same, state_of, stop_at, strict_json
from test_train_text import root, run  # noqa: F401

TEXT = "It was a dark night.\nThe wind blew over the hills, and nobody came.\n"
NEEDLE = r"the numbers? of the \w+ \w+"
TOKENIZERS = pytest.mark.parametrize("tokenizer", [ByteTokenizer(), qwen3()], ids=["bytes", "qwen3"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Tokens of a text of bytes: some 200 rows of 512."""
    out = tmp_path_factory.mktemp("facts")
    (out / "text.jsonl").write_text("".join(json.dumps({"text": f"Document {i}.\n{TEXT * 8}"}) + "\n"
                                            for i in range(200)))
    write_tokens(out / "tokens", out / "text.jsonl", ByteTokenizer())
    return out / "tokens"


def fact_rows(folder, share=0.5, length=512, seed=0):
    return FactRows(TextRows(folder, length, seed=seed), share, ByteTokenizer())


def told_rows(tokenizer, n=60, length=4097):
    """(ids, facts) of n rows."""
    ids = tokenizer.encode(TEXT * 300)[:length]
    assert len(ids) == length
    return [with_facts(list(ids), tokenizer, random.Random(str(i))) for i in range(n)]


# ----------------------------------------------------------------------------- the words

def test_no_word_and_no_sentence_of_the_evaluation():
    """Neither its things nor its colours, alone or in a compound, nor the way in which it tells and asks."""
    rng, texts = random.Random(0), [" ".join(words) for words in WORDS.values()]
    for form in FORMS:
        texts += form[2] + form[3]
        texts += [text for _ in range(200) for text in draw_fact(form, rng, 2).texts]
    words = set(re.findall(r"[a-z]+", " ".join(texts).lower()))
    assert len(words) > 500
    assert not words & {*COLOURS, *THINGS, *(f"{thing}s" for thing in THINGS)}
    assert not [(w, t) for w in words for t in THINGS if t in w]
    assert not [text for text in texts if re.search(NEEDLE, text.lower()) or "number of" in text.lower()]
    ids = ByteTokenizer().encode(TEXT * 60)
    prompt = ByteTokenizer().decode(needle_prompt(ByteTokenizer(), ids, 2000, depth=0.5).ids)
    assert len(re.findall(NEEDLE, prompt.lower())) == 3  # the pattern does know them


def test_forms_are_many_and_their_subjects_too():
    pairs = {(tell, ask) for _, _, tells, asks in FORMS for tell in tells for ask in asks}
    assert len(FORMS) >= 16 and len(pairs) >= 100
    rng = random.Random(1)
    for form in FORMS:
        some = [draw_fact(form, rng, 0) for _ in range(200)]
        assert len({fact.subject for fact in some}) > 30 and len({fact.answer for fact in some}) > 30, form
    lengths = {len(draw_fact(FORMS[0], rng, 0).answer) for _ in range(200)}
    assert lengths == set(range(2, 9))


def test_every_sentence_names_its_subject_and_an_asking_one_before_the_answer():
    rng = random.Random(2)
    for subject, answer, tells, asks in FORMS:
        for text in (*tells, *asks):
            assert text.count("{s}") == text.count("{a}") == 1
        assert all(text.index("{s}") < text.index("{a}") for text in asks)
        assert any("?" in text for text in asks) and any("?" not in text for text in asks)
        fact = draw_fact((subject, answer, tells, asks), rng, 2)
        assert all(fact.subject in text and fact.answer in text for text in fact.texts) and len(fact.texts) == 3
        assert "{" not in "".join(fact.texts)


# ----------------------------------------------------------------------------- a row

@TOKENIZERS
def test_what_is_asked_was_told(tokenizer):
    """The sentence that tells a fact ends at `told`, those that ask for it begin at `asked`; the answer is in both, and
    what is left without all of them is the text, from its first token on."""
    for ids, facts in told_rows(tokenizer):
        assert len(ids) == 4097 and facts and facts[0].asked
        spans = []
        for fact in facts:
            assert len(fact.asked) == len(fact.texts) - 1
            told, *asked = (tokenizer.encode(f"\n{text}\n") for text in fact.texts)
            assert ids[fact.told - len(told):fact.told] == told
            assert fact.answer in tokenizer.decode(ids[:fact.told]) and fact.subject in tokenizer.decode(told)
            spans.append((fact.told - len(told), fact.told))
            for start, piece in zip(fact.asked, asked):
                assert ids[start:start + len(piece)] == piece and start - fact.told >= NEAR
                spans.append((start, start + len(piece)))
        spans.sort()
        assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:]))
        taken = {i for start, end in spans for i in range(start, end)}
        rest = [token for i, token in enumerate(ids) if i not in taken]
        assert rest == tokenizer.encode(TEXT * 300)[:len(rest)] and len(rest) >= 2048


@TOKENIZERS
def test_counts_distances_and_rivals(tokenizer):
    rows = told_rows(tokenizer)
    facts = [fact for _, some in rows for fact in some]
    assert 5.5 < len(facts) / len(rows) < 8.5  # one for 512 tokens
    times = [len(fact.asked) for fact in facts]
    assert all(times.count(n) > 0.08 * len(times) for n in (0, 1, 2)) and set(times) == {0, 1, 2}
    distances = [place - fact.told for fact in facts for place in fact.asked]
    shares = [sum(low <= d < 2 * low for d in distances) / len(distances) for low in (100, 200, 400, 800, 1600)]
    assert min(shares) > 0.05 and max(distances) > 3200, shares
    for ids, some in rows:
        assert len({fact.subject for fact in some}) == len({fact.answer for fact in some}) == len(some)
        if len(some) > 1:  # of each form at least two subjects: what is asked must be told from the other
            shapes = [next(i for i, form in enumerate(FORMS) for tell in form[2]
                           if tell.format(s=fact.subject, a=fact.answer) == fact.texts[0]) for fact in some]
            assert all(shapes.count(shape) > 1 for shape in shapes), shapes


@TOKENIZERS
def test_facts_stand_between_lines(tokenizer):
    """The text has a line end within 64 tokens of everywhere, but in front of the last place that is far enough."""
    where = [tokenizer.decode(ids[max(0, place - 8):place]).endswith("\n")
             for ids, facts in told_rows(tokenizer, 20) for fact in facts for place in fact.asked if place < 4000]
    assert len(where) > 50 and sum(where) > 0.95 * len(where)
    ids = tokenizer.encode("one word after another and no end " * 300)[:2049]
    assert len(with_facts(ids, tokenizer, random.Random(0))[0]) == 2049


def test_a_row_too_short_for_a_fact_is_left_as_it_is():
    for length in (1, 2, 40, 65):
        ids = ByteTokenizer().encode(TEXT * 3)[:length]
        assert with_facts(list(ids), ByteTokenizer(), random.Random(0)) == (ids, [])


# ----------------------------------------------------------------------------- rows

def test_a_row_longer_than_there_are_names_for_ends():
    """262,145 tokens have room for more facts of a form than it has answers: it is left then, and the others go on."""
    for seed in range(3):
        row, facts = with_facts([65] * 262_145, ByteTokenizer(), random.Random(seed))
        assert len(row) == 262_145 and len(facts) > 200
        assert len({f.answer for f in facts}) == len(facts)
    form = ("{place}", "{place}", ("{s} {a}",), ("{s} {a}",) * 2)
    assert draw_fact(form, random.Random(0), 1, set(WORDS["place"])) is None
    assert draw_fact(form, random.Random(0), 1, set(WORDS["place"][20:])) is not None


def test_rows_follow_from_seed_and_number_alone(folder):
    rows, again = fact_rows(folder), fact_rows(folder)
    backwards = {i: again[i] for i in reversed(range(40))}
    for i in range(40):
        idx, targets = rows[i]
        assert idx.shape == targets.shape == (512,) and idx.dtype == targets.dtype == torch.int64
        assert torch.equal(idx[1:], targets[:-1])
        assert torch.equal(idx, backwards[i][0]) and torch.equal(targets, backwards[i][1])
    every, plain = fact_rows(folder, 1.0), rows.rows
    later = next(i for i in range(plain.n, 2 * plain.n) if plain.place(i) == plain.place(0))
    assert torch.equal(plain[later][0], plain[0][0]) and not torch.equal(every[later][0], every[0][0])  # second epoch
    chosen = [[not torch.equal(some[i][0], some.rows[i][0]) for i in range(40)]
              for some in (rows, again, fact_rows(folder, seed=1))]
    assert chosen[0] == chosen[1] != chosen[2]
    assert len(rows) == len(plain) and rows.length == 512


def test_other_rows_are_the_text_bit_for_bit_and_the_share_is_right(folder):
    rows = fact_rows(folder, 0.3)
    changed = 0
    for i in range(1000):
        if not torch.equal(rows[i][0], rows.rows[i][0]):
            changed += 1
        else:
            assert torch.equal(rows[i][1], rows.rows[i][1])
    assert abs(changed - 300) < 4 * math.sqrt(1000 * 0.3 * 0.7)
    few, many = (fact_rows(folder, share) for share in (0.0, 1.0))
    assert all(torch.equal(few[i][0], few.rows[i][0]) and torch.equal(few[i][1], few.rows[i][1]) for i in range(100))
    assert not any(torch.equal(many[i][0], many.rows[i][0]) for i in range(100))


@pytest.mark.parametrize("start, workers", [("fork", 1), ("fork", 2), ("spawn", 1)])
def test_loaders_of_batches_give_the_same(folder, start, workers):
    """Any number of them, and pickled into them where processes are not forked."""
    rows = fact_rows(folder)
    settings = dict(batch_size=2, accumulate=1, steps=4)
    want = list(loader(rows, SimpleNamespace(workers=0, **settings), 0))
    made = loader(rows, SimpleNamespace(workers=workers, **settings), 0)
    made.multiprocessing_context = start
    for (a, b), (c, d) in zip(want, made, strict=True):
        assert torch.equal(a, c) and torch.equal(b, d)


def test_a_real_tokenizer_can_be_pickled(root):  # noqa: F811
    for kind in ("qwen3", "smollm2"):
        tokenizer = load_tokenizer(root / kind)
        assert pickle.loads(pickle.dumps(tokenizer)).encode(TEXT + "caf\u00e9") == tokenizer.encode(TEXT + "caf\u00e9")


def test_a_short_context_is_refused_with_one_that_will_do(folder):
    with pytest.raises(ValueError, match=r"--facts: .* give --context (\d+) or more, not 64") as error:
        fact_rows(folder, length=64)
    enough = int(re.search(r"--context (\d+)", str(error.value))[1])
    with pytest.raises(ValueError, match="or more, not"):
        fact_rows(folder, length=enough - 1)
    rows = fact_rows(folder, 1.0, length=enough)
    assert sum(torch.equal(rows[i][0], rows.rows[i][0]) for i in range(1000)) <= 5  # into which nothing fits


# ----------------------------------------------------------------------------- train.py

FACTS = ("--facts", 0.5, "--context", 320, "--steps", 2)


def test_steps_see_the_rows_with_facts_and_held_out_rows_are_plain(root, tmp_path, monkeypatch, capsys):  # noqa: F811
    seen, held, collate, evaluate = [], [], train.collate_rows, train.evaluate_text

    def spy(model, device, rows, *args, **how):
        held.append(rows)
        return evaluate(model, device, rows, *args, **how)
    monkeypatch.setattr(train, "collate_rows", lambda rows: seen.append(collate(rows)) or seen[-1])
    monkeypatch.setattr(train, "evaluate_text", spy)
    stop_at(monkeypatch, 1, KeyboardInterrupt())
    assert run(root, tmp_path / "out", *FACTS) == 130
    assert run(root, tmp_path / "out", *FACTS, "--resume") == 0
    plain, tokenizer = TextRows(tmp_path / "out/tokens", 320), load_tokenizer(root / "qwen3")
    rows = FactRows(plain, 0.5, tokenizer)
    got, want = torch.cat([idx for idx, *_ in seen]), [rows[i][0] for i in range(4)]
    assert torch.equal(got[:2], torch.stack(want[:2])) and torch.equal(got[-2:], torch.stack(want[2:]))
    changed = [not torch.equal(row, plain[i][0]) for i, row in enumerate(want)]
    assert any(changed) and not all(changed)
    kept = TextRows(tmp_path / "out/tokens", 320, "held_out")
    assert held and all(torch.equal(row[0], kept[i][0]) for some in held for i, row in enumerate(some))
    assert strict_json(tmp_path / "out/log.json")["settings"]["facts"] == 0.5
    capsys.readouterr()
    refused(capsys, run(root, tmp_path / "out", *FACTS, "--facts", 0, "--steps", 3, "--resume"), "facts = 0.5, not 0.0")


def test_logits_on_disk_teach_what_a_teacher_in_memory_does(root, tmp_path, capsys, monkeypatch):  # noqa: F811
    """And those of rows with other facts, or of none, are not taken for these."""
    more = (*FACTS, "--train-base", "--tokens", tmp_path / "tokens")
    kept = ("--teacher", tmp_path / "logits")
    assert run(root, tmp_path / "online", *more) == 0
    assert run(root, tmp_path / "offline", *more, *kept) == 0
    one, two = (strict_json(tmp_path / name / "log.json")["history"] for name in ("online", "offline"))
    assert [h["kl"] for h in one] == [h["kl"] for h in two] and one[0]["kl"] > 0
    assert same(*(state_of(tmp_path / name)["parameters"] for name in ("online", "offline")))
    rows = FactRows(TextRows(tmp_path / "tokens", 320), 0.5, load_tokenizer(root / "qwen3"))
    assert sorted(p.name for p in (tmp_path / "logits").glob("*.safetensors")) == [
        f"{i:08d}.safetensors" for i in range(4)]
    for i in range(4):
        assert torch.equal(TaughtRows(tmp_path / "logits", rows, {})[i][0], rows[i][0])
    capsys.readouterr()
    monkeypatch.setattr(train, "top_logits", None)  # no work is done
    for other in (("--facts", 0.4), ("--facts", 0), ("--seed", 1)):
        refused(capsys, run(root, tmp_path / "other", *more, *kept, *other), "another facts", "delete it")
    made = json.loads((tmp_path / "logits/teacher.json").read_text())
    assert made["facts"].keys() == {"share", "seed", "sentences"}
    made["facts"]["sentences"] = "00000000"  # as if they had been edited since
    (tmp_path / "logits/teacher.json").write_text(json.dumps(made))
    refused(capsys, run(root, tmp_path / "other", *more, *kept), "another facts")
    del made["facts"]  # as written before there were any
    (tmp_path / "logits/teacher.json").write_text(json.dumps(made))
    refused(capsys, run(root, tmp_path / "other", *more, *kept), "another facts")


@pytest.mark.parametrize("args, words", [
    (("--data", "", "--facts", 0.5), ("--facts", "--data")),
    (("--facts", 1.5), ("--facts", "share", "1.5")),
    (("--facts", -0.1), ("--facts", "share")),
    (("--facts", "nan"), ("--facts", "share")),
    (("--facts", 0.5, "--context", 64), ("--facts", "--context"))])
def test_what_facts_cannot_do(root, tmp_path, capsys, args, words):  # noqa: F811
    refused(capsys, run(root, tmp_path / "out", *args), *words)
