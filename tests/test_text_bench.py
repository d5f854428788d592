"""bench.py text, needle and health on tiny models: perplexity, accuracy and KL derived again by single decode steps and
written-out softmaxes, budgets that hold everything against dense, interrupted runs against whole ones.
"""
import json
import math
import random
import re
from collections import Counter

import pytest
import torch

import bench
from data import text_bench
from data.figures import draw_positions
from data.results import bootstrap
from data.scorer_files import save_scorers
from data.text import write_tokens
from data.text_bench import (bucket_edges, dense_nll, distinct, first_number, in_chunks, ratio_interval, recall_row,
                             text_row)
from data.tokenizer import ByteTokenizer, decode, load_tokenizer
from data.traces import ALPHABET
from decode import Generation, KVCache, dense_spec, generate, step
from flex_masks import CacheSpec
from model import causal_attend, load_model, save_model

from tiny import make_folder, tiny_scorers, tiny_transformer

CONTEXT = 48
SETTINGS = dict(n_sink=2, window=8, budget=24, base="../base")  # kvpop's state costs 5 of them at head_dim 8
SMALL = ("--n-sink", 2, "--window", 8)
KEYS = {"text": {"policy", "budget", "T", "source", "perplexity", "perplexity_ratio", "accuracy", "accuracy_delta",
                 "kl", "ci_low", "ci_high", "n_documents", "perplexity_by_position", "accuracy_by_position",
                 "kl_by_position", "nll_by_document", "n_sink", "window", "options", "model", "weights", "checkpoint",
                 "seconds", "compression_ratio"},
        "needle": {"policy", "budget", "T", "distance", "mean_distance", "keys", "n_problems", "compression_ratio",
                   "recall", "ci_low", "ci_high", "recall_delta", "delta_low", "delta_high", "found", "peak_entries",
                   "note", "source", "n_sink", "window", "options", "model", "weights", "checkpoint", "seconds"},
        "health": {"policy", "budget", "T", "n_new", "compression_ratio", "perplexity", "perplexity_ratio", "ci_low",
                   "ci_high", "distinct_4", "distinct_4_dense", "n_documents", "nll_by_document", "note", "source",
                   "n_sink", "window", "options", "model", "weights", "checkpoint", "seconds"}}


def writer(seed, like=None):
    """A byte model that finds letters of ALPHABET alone likely. like: weights to stay near to."""
    model = tiny_transformer(seed, alphabet=ALPHABET)
    with torch.no_grad():
        loud = torch.zeros(264, 1)
        loud[[*ALPHABET.encode()]] = 1.0
        model.model.embed_tokens.weight.mul_(loud)
        if like is not None:
            for p, near in zip(model.parameters(), like.parameters()):
                p.copy_(near + 0.02 * p)
    return model


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """base/, kvpop/ (a scorer for it), adapted/ (weights of its own), and texts/: what the base writes, every fourth
    byte drawn anew, so that it is right about some bytes and wrong about others; one document is short."""
    root, base, rng = tmp_path_factory.mktemp("shipped"), writer(0), random.Random(0)
    save_model(base, root / "base", torch.float32)
    save_scorers(tiny_scorers("kvpop", 1), root / "kvpop", SETTINGS)
    save_model(writer(2, base), root / "adapted", torch.float32)
    save_scorers(tiny_scorers("kvpop-mlp", 3), root / "adapted", {**SETTINGS, "budget": 20, "weights": "."})
    (root / "texts").mkdir()
    for i in range(5):
        ids = list(rng.choice(ALPHABET).encode())
        while len(ids) < CONTEXT + 10:
            ids += generate(base, [ids], max_new_tokens=3, stop_ids=[]).tokens[0] + [*rng.choice(ALPHABET).encode()]
        text = decode(ids) if i < 4 else "too short"
        assert set(text) <= set(ALPHABET) | set("too short")
        (root / "texts" / f"{i}.txt").write_text(text if i < 4 else ALPHABET[:9])
    return root


@pytest.fixture
def run(tmp_path, monkeypatch, shipped):
    """`bench.py NAME` in a folder of its own -> exit code, the JSON that it writes (None without one)."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)

    def call(name, *args, retrofit=(), model=shipped / "base", text=shipped / "texts"):
        code = bench.main([name, "--model", str(model), "--text", str(text), *map(str, args),
                           "--retrofit", *(str(shipped / r) for r in retrofit)])
        path = tmp_path / f"assets/results/{name}.json"

        def refuse(word):
            raise AssertionError(f"{word} is not JSON")
        return code, json.loads(path.read_text(), parse_constant=refuse) if path.is_file() else None
    return call


def text_args(*more):
    return ("--context", CONTEXT, "--buckets", 5, *SMALL, *more)


@torch.no_grad()
def plain_losses(model, base, ids, spec, scorers):
    """Token by token, without a mask -> nll, hit, KL of each next token, softmaxes written out in fp64."""
    cache, out = KVCache(model.config, spec or dense_spec(len(ids)), 1, scorers), []
    truth = base.unembed(base(torch.tensor([ids]), causal_attend))[0].double()
    for t, token in enumerate(ids[:-1]):
        q = step(model, torch.tensor([token]), cache)[0].double()
        q, p = q.exp() / q.exp().sum(), truth[t].exp() / truth[t].exp().sum()
        out.append((-math.log(q[ids[t + 1]]), float(int(q.argmax()) == ids[t + 1]), float((p * (p / q).log()).sum())))
    return list(zip(*out))


# ---------------------------------------------------------------------------------------------------------------------
# text

def test_text_is_the_plain_loop(run, shipped):
    code, results = run("text", *text_args("--policies", "streaming", "random", "h2o", "--budgets", 20),
                        retrofit=("kvpop", "adapted"))
    assert code == 0 and results["name"] == "text" and results["command"].startswith("python ")
    assert {"commit", "date", "device", "torch", "rows"} <= results.keys() and results["context"] == CONTEXT
    rows, base = results["rows"], load_model(shipped / "base").eval()
    assert [(r["policy"], r["budget"], r["model"], r["weights"]) for r in rows] == [
        ("dense", None, "base", "base"), ("streaming", 20, "base", "base"), ("random", 20, "base", "base"),
        ("h2o", 20, "base", "base"), ("kvpop", 24, "kvpop", "base"), ("kvpop-mlp", 20, "adapted", "adapted")]
    documents = [list((shipped / "texts" / f"{i}.txt").read_bytes())[:CONTEXT] for i in range(4)]
    learned = {"kvpop": tiny_scorers("kvpop", 1), "kvpop-mlp": tiny_scorers("kvpop-mlp", 3)}
    edges, dense = results["positions"], None
    assert edges[0] == 0 and edges[-1] == CONTEXT - 1 and len(edges) == 6
    for row in rows:
        assert row.keys() == KEYS["text"] and row["T"] == CONTEXT and row["n_documents"] == 4
        model = load_model(shipped / row["weights"]).eval() if row["weights"] == "adapted" else base
        spec = scorers = None
        if row["budget"]:
            spec = CacheSpec(2, 8, row["budget"], 5 if row["policy"] == "kvpop" else 0)
            scorers = learned.get(row["policy"]) or tiny_scorers(row["policy"])
        plain = [plain_losses(model, base, ids, spec, scorers) for ids in documents]
        nll, hit, kl = ([x for part in parts for x in part] for parts in zip(*plain))
        dense = dense or plain
        assert row["perplexity"] == pytest.approx(math.exp(sum(nll) / len(nll)), rel=1e-4)
        assert row["accuracy"] == pytest.approx(sum(hit) / len(hit), abs=1e-9) and 0.1 < row["accuracy"] < 0.9
        assert row["kl"] == pytest.approx(sum(kl) / len(kl), rel=1e-3, abs=1e-5)
        assert row["kl"] > 1e-3 or row["policy"] == "dense"
        assert row["perplexity_ratio"] == pytest.approx(row["perplexity"] / rows[0]["perplexity"])
        assert row["accuracy_delta"] == pytest.approx(row["accuracy"] - rows[0]["accuracy"])
        assert row["nll_by_document"] == pytest.approx([sum(p[0]) / (CONTEXT - 1) for p in plain], rel=1e-4)
        for i, (a, b) in enumerate(zip(edges, edges[1:])):
            some = [[p[k][t] for p in plain for t in range(a, b)] for k in range(3)]
            assert row["perplexity_by_position"][i] == pytest.approx(math.exp(sum(some[0]) / len(some[0])), rel=1e-4)
            assert row["accuracy_by_position"][i] == pytest.approx(sum(some[1]) / len(some[1]))
            assert row["kl_by_position"][i] == pytest.approx(sum(some[2]) / len(some[2]), rel=1e-3, abs=1e-5)
        apart = [sum(p[0]) / (CONTEXT - 1) - sum(d[0]) / (CONTEXT - 1) for p, d in zip(plain, dense)]
        assert (row["ci_low"], row["ci_high"]) == pytest.approx([math.exp(x) for x in bootstrap(apart)], rel=1e-4)
        if row["policy"] == "streaming":  # positions 0 .. 19 see everything, whatever comes later
            assert row["kl_by_position"][0] < 1e-6 < 1e-3 < row["kl_by_position"][-1]


def test_a_budget_that_holds_everything_is_dense(run):
    policies = ("streaming", "random", "knorm", "oracle", "h2o", "tova-layer", "snapkv", "keydiff")
    code, results = run("text", *text_args("--policies", *policies, "--budgets", CONTEXT + 20, 20))
    rows = results["rows"]
    assert code == 0 and len(rows) == 1 + 2 * len(policies)
    for row in rows[1:]:
        if row["budget"] > CONTEXT:
            for key in ("perplexity_ratio", "ci_low", "ci_high"):
                assert row[key] == pytest.approx(1, abs=1e-5), row["policy"]
            assert row["kl"] < 1e-6 and row["accuracy_delta"] == 0
        else:
            assert row["kl"] > 1e-3 and row["ci_low"] <= row["perplexity_ratio"] <= row["ci_high"]
            assert abs(row["perplexity_ratio"] - 1) > 1e-4


def test_intervals_are_paired():
    """Documents differ a lot, the cost of the policy is the same in each: unpaired, this would be a wide interval."""
    dense = [1.0, 3.0, 2.0, 7.0]
    ratio, low, high = ratio_interval([x + 0.1 for x in dense], dense)
    assert (low, high) == pytest.approx((math.exp(0.1), math.exp(0.1))) and ratio == pytest.approx(math.exp(0.1))
    _, low, high = ratio_interval([x + d for x, d in zip(dense, (0.0, 0.2, 0.0, 0.2))], dense)
    assert 0.99 < low < math.exp(0.1) < high < math.exp(0.201)


def test_rows_by_position():
    losses = torch.stack([torch.arange(14.0).reshape(2, 7), torch.zeros(2, 7), torch.ones(2, 7)]).double()
    row = text_row(losses, bucket_edges(7, 3))
    assert bucket_edges(7, 3) == [0, 3, 5, 7] and bucket_edges(4, 4) == [0, 1, 2, 3, 4]
    assert [math.log(x) for x in row["perplexity_by_position"]] == pytest.approx([4.5, 7.0, 9.0])  # 0 1 2 7 8 9, ...
    assert row["perplexity"] == pytest.approx(math.exp(6.5)) and row["perplexity_ratio"] == 1
    assert row["nll_by_document"] == [3, 10] and row["kl_by_position"] == [1, 1, 1]


def test_chunks_of_logits_are_the_whole(monkeypatch):
    base, model = writer(0), writer(2)
    torch.manual_seed(3)
    hidden, truth, target = torch.randn(29, 32), torch.randn(29, 32), torch.randint(264, (29,))
    whole = in_chunks(model, base, hidden, truth, target)
    seen, unembed = [], type(base).unembed
    monkeypatch.setattr(type(base), "unembed", lambda self, h: seen.append(len(h)) or unembed(self, h))
    monkeypatch.setattr(text_bench, "LOGITS", 264 * 7 + 3)
    # logits are fp32 products, whose last bits depend on the number of rows and threads; sums behind them are fp64
    torch.testing.assert_close(in_chunks(model, base, hidden, truth, target), whole, rtol=1e-5, atol=1e-5)
    assert max(seen) == 7 and sum(seen) == 2 * 29
    own = in_chunks(base, base, truth, truth, target)
    assert own[2].abs().max() < 1e-12 and whole[2].min() > 1e-6
    logits = base.unembed(truth).double()
    torch.testing.assert_close(own[0], logits.logsumexp(-1) - logits[torch.arange(29), target], rtol=1e-5, atol=1e-5)


def test_an_interrupted_run_goes_on(run, monkeypatch, shipped, tmp_path, capsys):
    args = text_args("--budgets", 20, "--policies", "streaming")
    first = run("text", *args, retrofit=("kvpop",))[1]["rows"]
    calls, real = [], text_bench.token_losses
    monkeypatch.setattr(text_bench, "token_losses",
                        lambda *a, **k: calls.append(a[5] and a[5][0].name) or real(*a, **k))
    again = run("text", *args, retrofit=("kvpop",))[1]["rows"]
    assert again == first and calls == []
    more = run("text", *args, "random", "--n-sink", 0, 2, retrofit=("kvpop",))[1]["rows"]
    assert more[:3] == first and calls == ["streaming", "random", "random"]
    assert [(r["policy"], r["n_sink"]) for r in more[3:]] == [("streaming", 0), ("random", 0), ("random", 2)]
    path = tmp_path / "assets/results/text.json"
    content = json.loads(path.read_text())
    former = [{**r, "checkpoint": "0" * 8, "kl": 99.0} if r["policy"] == "kvpop" else r for r in first]
    path.write_text(json.dumps({**content, "rows": former}))
    del calls[:]
    # a scorer trained anew since: its row alone is made again
    anew = run("text", *args, retrofit=("kvpop",))[1]["rows"]
    assert calls == ["kvpop"] and [r["kl"] for r in anew] == [r["kl"] for r in first]
    before = path.read_text()
    assert run("text", *args, "--seed", 1)[0] == 2 and "was made with seed 0, not 1" in capsys.readouterr().err
    assert run("text", *args, "--documents", 3)[0] == 2 and "text_crc" in capsys.readouterr().err  # other text
    assert path.read_text() == before


def test_held_out_documents(run, shipped, tmp_path, capsys):
    """Those that a training left out, whether the text is given or its token files: the same documents."""
    rng = random.Random(1)
    lines = ["".join(rng.choices(ALPHABET, k=CONTEXT + rng.randrange(20))) for _ in range(40)]
    source = tmp_path / "some.jsonl"
    source.write_text("".join(json.dumps(dict(body=line)) + "\n" for line in lines))
    header = write_tokens(tmp_path / "tokens", source, ByteTokenizer(ALPHABET), field="body", held_out=0.3)
    count = header["documents"]["held_out"]
    assert 3 < count < 25
    args = text_args("--budgets", 20, "--policies", "streaming", "--field", "body")
    whole = run("text", *args, text=source)[1]["rows"]
    assert whole[0]["n_documents"] == 32
    (tmp_path / "assets/results/text.json").unlink()
    ways = []
    for text, more in ((source, ("--held-out", 0.3)), (tmp_path / "tokens", ())):
        ways.append(run("text", *args, *more, text=text)[1]["rows"])
        (tmp_path / "assets/results/text.json").unlink()
    for a, b in zip(*ways):
        assert a["n_documents"] == count and a["nll_by_document"] == b["nll_by_document"]
    assert f"{count} documents" in capsys.readouterr().out


def test_figure(run, tmp_path, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    from PIL import Image
    rows = run("text", *text_args("--policies", "streaming", "oracle", "--budgets", 20, 30))[1]["rows"]
    shown = []
    monkeypatch.setattr(pyplot, "close", shown.append)
    assert bench.main(["figures", "--name", "text"]) == 0
    assert (tmp_path / "assets/text.png").read_bytes()[:4] == b"\x89PNG"
    picture = Image.open(tmp_path / "assets/text.png")
    assert picture.mode == "L" and picture.size[0] > 900
    assert [ax.get_title() for ax in shown[0].axes] == ["20 entries", "30 entries", "", ""]
    dense = rows[0]["perplexity_by_position"]
    for i, budget in enumerate((20, 30)):
        top, bottom = shown[0].axes[i], shown[0].axes[2 + i]
        mine = [row for row in rows if row["budget"] in (None, budget)]
        for ax, over in ((top, [1] * len(dense)), (bottom, dense)):
            assert {t.get_text() for t in ax.texts} == {"dense", "streaming", "oracle"}
            drawn = {tuple(line.get_ydata()) for line in ax.lines}
            assert {tuple(a / b for a, b in zip(row["perplexity_by_position"], over)) for row in mine} <= drawn
            looks = Counter((line.get_marker(), line.get_linestyle(), line.get_color()) for line in ax.lines[:3])
            assert max(looks.values()) == 1 and list(ax.lines[3].get_xdata()) == [budget, budget]
        assert "tokens" in bottom.get_xlabel()
    assert "perplexity" in shown[0].axes[0].get_ylabel() and "dense" in shown[0].axes[2].get_ylabel()


def test_figure_of_trained_policies_and_many_rows(tmp_path, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    shown = []
    monkeypatch.setattr(pyplot, "close", shown.append)

    def row(policy, budget, y, n_sink=4, **more):
        return dict(policy=policy, budget=budget, n_sink=n_sink, model="m", weights="base", n_documents=2,
                    perplexity_by_position=[y, y + 1.0], **more)
    rows = [row("dense", None, 5, n_sink=None), row("kvpop", 64, 6), row("kvpop", 64, 7) | dict(model="n"),
            row("streaming", 64, 8), row("streaming", 64, 80, n_sink=0)]
    draw_positions(tmp_path / "x.png", rows, [0, 50, 100])
    top = shown[0].axes[0]
    assert {t.get_text() for t in top.texts} == {"dense", "kvpop, 4 sinks (m)", "kvpop, 4 sinks (n)",
                                                 "streaming, 4 sinks", "streaming, 0 sinks"}
    assert [line.get_color() for line in top.lines[1:5]] == ["black", "black", "0.45", "0.45"]
    with pytest.raises(ValueError, match="no row of dense"):
        draw_positions(tmp_path / "y.png", rows[1:], [0, 50, 100])
    draw_positions(tmp_path / "z.png", rows[:1], [0, 50, 100])  # dense alone


# ---------------------------------------------------------------------------------------------------------------------
# needle

@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    """A checkpoint with a tokenizer of its own, and text for it."""
    root = make_folder(tmp_path_factory.mktemp("qwen3"))
    (root / "filler.txt").write_text("".join(f"Line {i} of a long and quiet text.\n" for i in range(500)))
    return root


NEEDLE = ("--context", 200, "--distances", 60, 150, "--problems", 4, "--budgets", 60, *SMALL)


def test_needles_found_are_counted(run, qwen3, monkeypatch):
    """Generation that answers: dense always, streaming only where the needle is near, random with a wrong number."""
    asked, numbers = {}, []

    def answer(model, prompts, spec=None, scorers=None, **how):
        tokenizer = load_tokenizer(qwen3)
        said = []
        for ids in prompts:
            prompt, policy = tokenizer.decode(ids), "dense" if scorers is None else scorers[0].name
            name = re.search(r"What is the number of the (\w+ \w+)\?", prompt)[1]
            told = re.search(rf"The number of the {name} is (\d+)\.", prompt)
            numbers.append(told[1])
            far = len(tokenizer.encode(prompt[told.end():])) > 100
            text = {"dense": f" {told[1]}.\nLine 7", "random": f" {int(told[1]) + 1}.",
                    "streaming": " not known: 3" if far else f" {told[1][:2]},{told[1][2:]} or 7"}[policy]
            said.append(tokenizer.encode(text))
            asked.setdefault(policy, []).append(ids)
        cache = type("Cache", (), dict(peak_entries=lambda self: 33))()
        return Generation(said, ["max_new_tokens"] * len(prompts), [0] * len(prompts), cache)
    monkeypatch.setattr(text_bench, "generate", answer)
    args = ("needle", *NEEDLE, "--keys", 1, 3, "--policies", "streaming", "random")
    code, results = run(*args, model=qwen3, text=qwen3 / "filler.txt")
    assert code == 0 and asked["dense"] == asked["streaming"] == asked["random"]
    assert {len(ids) for ids in asked["dense"]} == {200} and len({tuple(ids) for ids in asked["dense"]}) == 16
    assert [len(set(numbers[i:i + 4])) for i in (0, 4, 8, 12)] == [4] * 4  # each prompt has a number of its own
    rows = results["rows"]
    assert len(rows) == 3 * 4 and all(row.keys() == KEYS["needle"] for row in rows)
    for row in rows:
        near = row["distance"] == 60
        share = {"dense": 1, "random": 0, "streaming": float(near)}[row["policy"]]
        assert (row["recall"], row["recall_delta"], row["delta_low"], row["delta_high"]) == (
            share, share - 1, share - 1, share - 1)
        assert row["found"] == "01"[int(share)] * 4 and row["n_problems"] == 4 and row["peak_entries"] == 33
        assert row["distance"] - 64 <= row["mean_distance"] < row["distance"] + 80  # at a line end; a key may follow
        assert row["compression_ratio"] == (0 if row["policy"] == "dense" else 1 - 60 / 200)
    seen = len(asked["dense"])
    again = run(*args, model=qwen3, text=qwen3 / "filler.txt")[1]["rows"]
    assert again == rows and len(asked["dense"]) == seen


def watch_generate(monkeypatch):
    """-> a list that each call of generate adds (prompts, generated ids) to."""
    texts = []

    def watched(model, prompts, spec=None, scorers=None, **how):
        result = generate(model, prompts, spec, scorers, **how)
        texts.append((prompts, result.tokens))
        return result
    monkeypatch.setattr(text_bench, "generate", watched)
    return texts


def test_needles_under_a_budget_that_holds_everything(run, qwen3, monkeypatch):
    """Nothing scripted: the same ids as dense, other ones under a small budget; a chat asks in the template."""
    texts = watch_generate(monkeypatch)
    args = ("needle", "--context", 160, "--distances", 60, "--problems", 3, "--keys", 2, *SMALL, "--policies",
            "streaming", "h2o", "--budgets", 400, 20, "--chat")
    rows = run(*args, model=qwen3, text=qwen3 / "filler.txt")[1]["rows"]
    assert [(r["policy"], r["budget"]) for r in rows] == [("dense", None), ("streaming", 20), ("h2o", 20),
                                                          ("streaming", 400), ("h2o", 400)]
    dense, *small, large, largest = [said for _, said in texts]
    assert large == dense and largest == dense and small[0] != dense and small[1] != dense
    assert rows[1]["peak_entries"] == 20 and rows[3]["peak_entries"] > 160
    tokenizer = load_tokenizer(qwen3)
    prompt = tokenizer.decode(texts[0][0][0], skip_special=False)
    assert prompt.startswith("<|im_start|>user\n") and "<|im_end|>\n<|im_start|>assistant\n" in prompt


def test_recall_is_paired():
    row = recall_row([True, False, True, False], "1010")
    assert (row["recall_delta"], row["delta_low"], row["delta_high"]) == (0, 0, 0) and row["ci_low"] < row["ci_high"]
    row = recall_row([False, False, True, False], "1010")
    assert row["recall_delta"] == -0.25 and row["delta_low"] < -0.25 < row["delta_high"] == 0
    assert set(recall_row(None, "10").values()) == {None} and recall_row(None).keys() == row.keys()


@pytest.mark.parametrize("text, number", [(" 48213.", "48213"), (" 48,213 or 7", "48213"), ("none", None),
                                          ("the 2 of 48213", "2"), ("48213 48213", "48213"), ("482134", "482134")])
def test_the_first_number(text, number):
    assert first_number(text) == number


# ---------------------------------------------------------------------------------------------------------------------
# health

def test_distinct():
    assert distinct([1, 2, 3, 4, 5, 6]) == 1 and distinct([7] * 10) == 1 / 7
    assert distinct([1, 2] * 4) == 2 / 5 and distinct([1, 2] * 4, n=2) == 2 / 7


def test_health_reads_what_was_written(run, shipped, monkeypatch):
    texts = watch_generate(monkeypatch)
    args = ("--context", 60, "--prompt-tokens", 12, "--window", 8, "--n-sink", 0, 2, "--policies", "streaming",
            "--budgets", 100, 20, "--documents", 3)
    code, results = run("health", *args)
    rows, base = results["rows"], load_model(shipped / "base").eval()
    assert code == 0 and [(r["policy"], r["budget"], r["n_sink"]) for r in rows] == [
        ("dense", None, None), ("streaming", 20, 0), ("streaming", 20, 2), ("streaming", 100, 0), ("streaming", 100, 2)]
    for row, (prompts, said) in zip(rows, texts, strict=True):
        assert row.keys() == KEYS["health"] and {len(ids) for ids in said} == {48} == {row["n_new"]}
        assert [len(p) for p in prompts] == [12] * 3
        for i, (prompt, new) in enumerate(zip(prompts, said)):
            nll = plain_losses(base, base, prompt + new, None, None)[0][11:]
            assert row["nll_by_document"][i] == pytest.approx(sum(nll) / 48, rel=1e-4)
        assert row["perplexity"] == pytest.approx(math.exp(sum(row["nll_by_document"]) / 3))
        assert row["perplexity_ratio"] == pytest.approx(row["perplexity"] / rows[0]["perplexity"])
        assert row["distinct_4"] == pytest.approx(sum(map(distinct, said)) / 3)
        assert row["distinct_4_dense"] == rows[0]["distinct_4"]
    assert rows[0]["perplexity_ratio"] == rows[0]["ci_low"] == 1
    assert texts[3][1] == texts[4][1] == texts[0][1] != texts[1][1]  # the same numbers drawn, nothing evicted
    assert rows[3]["perplexity_ratio"] == rows[4]["ci_high"] == 1
    assert run("health", *args)[1]["rows"] == rows and len(texts) == 5
    with torch.no_grad():
        assert dense_nll(base, texts[0][0][0], texts[0][1][0]) == pytest.approx(rows[0]["nll_by_document"][0])


# ---------------------------------------------------------------------------------------------------------------------
# what is refused

@pytest.mark.parametrize("name, args, words", [
    ("text", ("--policies", "h20"), ("unknown policy 'h20'",)),
    ("text", ("--policies", "kvpop"), ("kvpop", "--retrofit")),
    ("text", ("--policies", "random-prompt"), ("random-prompt", "prompt", "--policies")),
    ("text", ("--context", 4000), ("4000 tokens", "1024")),
    ("text", ("--context", 500), ("no document", "500 tokens", "5 shorter")),
    ("text", ("--context", 1), ("--context", "2")),
    ("text", ("--buckets", 48), ("--buckets 48", "47")),
    ("text", ("--held-out", 0), ("--held-out",)),
    ("text", ("--budgets", 9), ("budget 9",)),
    ("text", ("--text", "/no/such"), ("/no/such",)),
    ("text", ("--field", "body"), ("no field 'body'", "text")),
    ("text", ("--model", "/no/such"), ("/no/such",)),
    ("text", ("--retrofit", "/no/such"), ("/no/such",)),
    ("needle", ("--policies", "oracle"), ("oracle", "future")),
    ("needle", ("--context", 1000), ("fewer than --context 1000",)),
    ("needle", ("--keys", 0), ("--keys",)),
    ("health", ("--policies", "oracle"), ("oracle", "future")),
    ("health", ("--prompt-tokens", 46), ("--context 48", "2 new tokens")),
    ("health", ("--temperature", -1), ("temperature",))])
def test_refusals_are_one_sentence(run, monkeypatch, capsys, shipped, name, args, words):
    monkeypatch.setattr("data.cases.load_model", None)  # before any weight of a model is read
    common = ["--model", str(shipped / "base"), "--text", str(shipped / "texts"), "--budgets", "20", "--window", "8"]
    common += ["--context", str(CONTEXT if name != "needle" else 64)]
    code = bench.main([name, *common, *(["--prompt-tokens", "8"] if name == "health" else []), *map(str, args)])
    err = capsys.readouterr().err
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1 and all(word in err for word in words), err


def test_help_explains_every_column(capsys):
    for name, keys in KEYS.items():
        with pytest.raises(SystemExit):
            bench.main([name, "--help"])
        out = capsys.readouterr().out
        assert all(re.search(rf"\b{key}\b", out) for key in keys), name
