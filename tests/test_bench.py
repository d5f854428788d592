"""bench.py: the interval against cases that can be worked out by hand, and first-look on a tiny model, from the rows of
its JSON back to the answers that they count.
"""
import json
import os
import random
import re
import sys
from math import comb

import pytest
import torch

import bench
from bench import bootstrap, print_table
from data import traces
from data.scorer_files import save_scorers
from data.tokenizer import EOT
from data.traces import ALPHABET, FAMILIES, make_problem
from decode import Generation, generate
from flex_masks import CacheSpec
from model import save_model

from tiny import tiny_scorers, tiny_transformer
from train import evaluate

KEYS = {"policy", "model", "weights", "budget", "compression_ratio", "family", "problems", "right", "pass_at_1",
        "ci_low", "ci_high", "relative", "relative_low", "relative_high", "traces_right", "decoded", "token_accuracy",
        "recall", "right_bits", "checkpoint"}


# ---------------------------------------------------------------------------------------------------------------------
# the interval

@pytest.mark.parametrize("n, k", [(40, 0), (40, 1), (40, 20), (40, 40), (7, 5), (1, 1)])
def test_interval_is_the_binomial_one(n, k):
    """A resample of n answers of which k are right is a binomial draw: its quantiles are known exactly."""
    values = [i < k for i in range(n)]
    low, high = bootstrap(values)
    assert low <= k / n <= high and (low, high) == bootstrap(values)
    cdf, total = [], 0.0
    for j in range(n + 1):
        total += comb(n, j) * (k / n)**j * (1 - k / n)**(n - j)
        cdf.append(total)
    exact = [next(j for j in range(n + 1) if cdf[j] >= q - 1e-12) / n for q in (0.025, 0.975)]
    assert abs(low - exact[0]) <= 1 / n and abs(high - exact[1]) <= 1 / n
    shuffled = random.Random(0).sample(values, n)
    assert bootstrap(shuffled)[0] == pytest.approx(low, abs=1 / n)  # the order of the problems is no matter


def test_interval_shrinks_with_the_root_of_n():
    wide, narrow = (high - low for low, high in (bootstrap([i % 2 for i in range(n)]) for n in (50, 800)))
    assert 3 < wide / narrow < 5.5
    assert abs(wide - 2 * 1.96 * 0.5 / 50**0.5) < 0.05


def test_ratios_keep_problems_in_pairs():
    some = [i % 3 > 0 for i in range(60)]
    assert bootstrap(some, some) == (1, 1)  # whatever is drawn: unpaired, this would be an interval
    half = [ok and i % 2 for i, ok in enumerate(some)]
    low, high = bootstrap(half, some)
    assert low < 0.5 < high and high - low < 0.35
    assert bootstrap(half, [True] * 60) == pytest.approx(bootstrap(half))
    assert bootstrap(some, half)[1] > 2  # a ratio may exceed one


@pytest.mark.parametrize("values", [[False] * 5, [True] * 5, [True, False, False, False, False]])
def test_a_reference_without_a_right_answer(values):
    """Also in some resamples only: no division by zero, and nothing that JSON cannot say."""
    for reference in ([False] * 5, [False, False, False, False, True]):
        low, high = bootstrap(values, reference)
        assert 0 <= low <= high <= 25 and float(low) == low and float(high) == high


# ---------------------------------------------------------------------------------------------------------------------
# the table and the file

def test_table(capsys):
    print_table([dict(policy="dense", right=3, rate=0.123456), dict(policy="kvpop", right=None, other=1)],
                ["policy", "right", "rate"])
    assert capsys.readouterr().out == ("policy  right    rate\n"
                                       " dense      3  0.1235\n"
                                       " kvpop      -       -\n")


def test_results_are_written_whole(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["bench.py", "some", "--thing"])
    path = bench.write_results("some", [dict(a=1)], "cpu", mean_length=2.5)
    assert path.resolve() == tmp_path / "assets" / "results" / "some.json"
    content = json.loads(path.read_text())
    assert content.keys() == {"name", "command", "commit", "date", "device", "torch", "python", "mean_length", "rows"}
    assert content["command"] == "python bench.py some --thing" and content["rows"] == [dict(a=1)]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", content["date"]) and content["device"].startswith("CPU")
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda a, b: (_ for _ in ()).throw(RuntimeError("killed")))
        with pytest.raises(RuntimeError, match="killed"):
            bench.write_results("some", [], "cpu")
    assert json.loads(path.read_text()) == content
    bench.write_results("some", [], "cpu")
    assert [p.name for p in path.parent.iterdir()] == ["some.json"]


# ---------------------------------------------------------------------------------------------------------------------
# first-look

SETTINGS = dict(n_sink=2, window=8, budget=40)  # kvpop's state costs 5 of them at head_dim 8


def tiny_model(seed):
    return tiny_transformer(seed, eos_token_ids=[EOT], alphabet=ALPHABET)


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """base/, kvpop/ (a scorer for the base) and adapted/ (a scorer with weights of its own, another budget)."""
    root = tmp_path_factory.mktemp("shipped")
    save_model(tiny_model(0), root / "base", torch.float32)
    save_scorers(tiny_scorers("kvpop", 1), root / "kvpop", {**SETTINGS, "base": "../base"})
    save_model(tiny_model(2), root / "adapted", torch.float32)
    save_scorers(tiny_scorers("kvpop-mlp", 3), root / "adapted", {**SETTINGS, "budget": 60, "base": "../base"})
    return root


@pytest.fixture
def first_look(tmp_path, monkeypatch, shipped):
    """The command on problems of 3 or 4 steps, in a folder of its own -> the JSON that it writes."""
    for family in FAMILIES:
        monkeypatch.setitem(traces.TEST_SIZES, family, (3, 4))
    monkeypatch.setattr(bench, "MAX_LENGTH", 150)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)

    def call(*args, retrofit=("kvpop",)):
        assert bench.main(["first-look", "--base", str(shipped / "base"), "--problems", "4", *map(str, args),
                           "--retrofit", *(str(shipped / name) for name in retrofit)]) == 0

        def refuse(name):
            raise AssertionError(f"{name} is not JSON")
        return json.loads((tmp_path / "assets/results/first-look.json").read_text(), parse_constant=refuse)
    return call


def some_problems():
    return [make_problem(family, i, "test") for family in FAMILIES for i in range(2)]


def scripted(monkeypatch, wrong):
    """Generation that answers: `wrong(model, spec, scorers, problem)` says how: None rightly, else (step, answer)."""
    calls = []

    def answer(model, prompts, spec=None, scorers=None, **options):
        calls.append((model, spec, scorers, options))
        texts = []
        for prompt in prompts:
            problem = next(p for p in some_problems() if list(p.prompt.encode()) == prompt)
            texts.append({None: problem.trace, "step": "x" + problem.trace, "answer": problem.trace + "0",
                          "nothing": ""}[wrong(model, spec, scorers, problem)])
        return Generation([list(t.encode()) for t in texts], ["end token"] * len(prompts), [0] * len(prompts), None)
    monkeypatch.setattr(bench, "generate", answer)
    return calls


def test_first_look_of_a_real_model(first_look, capsys, shipped):
    results = first_look()
    lengths = [len(p.prompt) + len(p.trace) + 1 for p in some_problems()]
    assert results["name"] == "first-look" and results["device"].startswith("CPU") and results["problems"] == 4
    assert results["mean_length"] == sum(lengths) / 4 and results["base"] == str(shipped / "base")
    rows, policies = results["rows"], ("dense", "streaming", "random", "knorm", "oracle", "kvpop")
    assert sorted((r["policy"], r["family"]) for r in rows) == \
        sorted((p, f) for p in policies for f in ("both", *FAMILIES))
    for row in rows:
        assert row.keys() == KEYS
        dense = row["policy"] == "dense"
        assert row["budget"] == (None if dense else 40) and row["decoded"] is (row["policy"] != "oracle")
        assert row["compression_ratio"] == pytest.approx(0 if dense else 1 - 40 / results["mean_length"])
        assert row["model"] == ("kvpop" if row["policy"] == "kvpop" else "base") and row["weights"] == "base"
        assert row["problems"] == (4 if row["family"] == "both" else 2)
        assert (row["recall"] is not None) is (row["policy"] == "kvpop" and row["family"] == "both")
    out = capsys.readouterr().out
    assert out.splitlines()[-1].endswith("first-look.json") and "policy" in out
    assert sum(line.split()[0] in policies for line in out.splitlines()[-19:-1]) == 18


def test_the_right_model_spec_and_scorers_are_decoded(first_look, monkeypatch, shipped):
    """What `generate` is handed, and that the teacher-forced figures come from the same pair."""
    calls = scripted(monkeypatch, lambda *_: None)
    rows = first_look(retrofit=("kvpop", "adapted"))["rows"]
    wanted = [("dense", "base", None)]
    wanted += [(policy, "base", b) for b in (40, 60) for policy in ("streaming", "random", "knorm", "oracle")]
    wanted += [("kvpop", "kvpop", 40), ("kvpop-mlp", "adapted", 60)]
    both = [r for r in rows if r["family"] == "both"]
    assert [(r["policy"], r["model"], r["budget"]) for r in both] == wanted
    assert [r["weights"] for r in both] == ["base"] * 10 + ["adapted"]
    decoded = [w for w in wanted if w[0] != "oracle"]
    assert len(calls) == len(decoded)
    models = {"base": tiny_model(0), "adapted": tiny_model(2)}
    learned = {"kvpop": tiny_scorers("kvpop", 1), "kvpop-mlp": tiny_scorers("kvpop-mlp", 3)}
    shortest = min(len(p.prompt) for p in some_problems())
    for (policy, folder, budget), (model, spec, scorers, options) in zip(decoded, calls):
        assert options["stop_ids"] == [EOT] and options["max_new_tokens"] == 150 - shortest
        weights = models["adapted" if folder == "adapted" else "base"].state_dict()
        assert all(torch.equal(model.state_dict()[name], w) for name, w in weights.items())
        if policy == "dense":
            assert spec is None and scorers is None
            continue
        assert spec == CacheSpec(2, 8, budget, 5 if policy == "kvpop" else 0)
        assert [s.name for s in scorers] == [policy] * 2 and [s.layer for s in scorers] == [0, 1]
        for p, q in zip(scorers.parameters(), learned[policy].parameters() if policy in learned else []):
            assert torch.equal(p, q)
    for row, model in ((both[-2], models["base"]), (both[-1], models["adapted"])):
        spec = CacheSpec(2, 8, row["budget"], 5 if row["policy"] == "kvpop" else 0)
        want = evaluate(model, "cpu", 2, spec, learned[row["policy"]], split="test")
        assert (row["token_accuracy"], row["recall"]) == (want["token_accuracy"], want["recall"])


def test_rows_count_answers_and_traces(first_look, monkeypatch):
    """dense: all but one right; streaming: walks right; random: answers right though steps are not; kvpop: nothing."""
    def wrong(model, spec, scorers, problem):
        policy = "dense" if scorers is None else scorers[0].name
        return {"dense": "answer" if (problem.family, problem.index) == ("walk", 1) else None,
                "streaming": "answer" if problem.family == "arith" else None, "random": "step",
                "kvpop": "nothing"}[policy]
    calls = scripted(monkeypatch, wrong)
    rows = {(r["policy"], r["family"]): r for r in first_look("--policies", "streaming", "random")["rows"]}
    assert len(calls) == 4 and len(rows) == 12
    counts = {key: (r["right"], r["traces_right"], r["pass_at_1"], r["relative"]) for key, r in rows.items()}
    assert counts == {
        ("dense", "both"): (3, 3, 0.75, 1), ("dense", "arith"): (2, 2, 1, 1), ("dense", "walk"): (1, 1, 0.5, 1),
        ("streaming", "both"): (2, 2, 0.5, 2 / 3), ("streaming", "arith"): (0, 0, 0, 0),
        ("streaming", "walk"): (2, 2, 1, 2),
        ("random", "both"): (4, 0, 1, 4 / 3), ("random", "arith"): (2, 0, 1, 1), ("random", "walk"): (2, 0, 1, 2),
        ("kvpop", "both"): (0, 0, 0, 0), ("kvpop", "arith"): (0, 0, 0, 0), ("kvpop", "walk"): (0, 0, 0, 0)}
    bits = {p: rows[p, "both"]["right_bits"] for p in ("dense", "streaming", "random", "kvpop")}
    assert bits == {"dense": "1110", "streaming": "0011", "random": "1111", "kvpop": "0000"}
    for row in rows.values():
        assert row["ci_low"] <= row["pass_at_1"] <= row["ci_high"]
        assert row["relative_low"] <= row["relative"] <= row["relative_high"]
    assert rows["dense", "arith"]["ci_low"] == rows["dense", "arith"]["relative_low"] == 1
    assert (rows["streaming", "both"]["ci_low"], rows["streaming", "both"]["ci_high"]) == bootstrap([0, 0, 1, 1])
    paired = bootstrap([0, 0, 1, 1], [1, 1, 1, 0])
    assert (rows["streaming", "both"]["relative_low"], rows["streaming", "both"]["relative_high"]) == paired


def test_the_oracle_is_forced_along_the_trace(first_look, monkeypatch):
    """It cannot be decoded, so whole traces count, from the same evaluation under the same budget."""
    scripted(monkeypatch, lambda *_: None)
    seen = []

    def forced(model, device, n, spec=None, scorers=None, split="validation", **options):
        seen.append((spec, scorers and scorers[0].name, n, split))
        result = evaluate(model, device, n, spec, scorers, split, **options)
        return {**result, "right": {"arith": [True, False], "walk": [True, True]}}
    monkeypatch.setattr(bench, "evaluate", forced)
    rows = [r for r in first_look("--policies", "oracle")["rows"] if r["policy"] == "oracle"]
    counts = [(r["family"], r["right"], r["traces_right"]) for r in rows]
    assert counts == [("both", 3, 3), ("arith", 1, 1), ("walk", 2, 2)]
    assert rows[0]["right_bits"] == "1011"
    assert seen == [(None, None, 2, "test"), (CacheSpec(2, 8, 40), "oracle", 2, "test"),
                    (CacheSpec(2, 8, 40, 5), "kvpop", 2, "test")]


def test_an_interrupted_run_goes_on(first_look, monkeypatch):
    calls = scripted(monkeypatch, lambda model, spec, scorers, problem: "answer" if problem.index else None)
    whole = first_look("--policies", "streaming", "random", "oracle")["rows"]
    assert len(calls) == 4
    del calls[:]
    again = first_look("--policies", "streaming", "random", "oracle")["rows"]
    assert again == whole and not calls  # all rows were there
    path = bench.RESULTS / "first-look.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "rows": whole[:6]}))  # dense and streaming
    rows = first_look("--policies", "streaming", "random", "oracle")["rows"]
    assert rows == whole and [scorers[0].name for _, _, scorers, _ in calls] == ["random", "kvpop"]
    del calls[:]
    other = [{**row, "checkpoint": "0" * 8} if row["policy"] == "kvpop" else row for row in whole]
    # a scorer trained anew since: its rows alone are made again
    path.write_text(json.dumps({**content, "rows": other}))
    assert first_look("--policies", "streaming", "random", "oracle")["rows"] == whole
    assert [scorers[0].name for _, _, scorers, _ in calls] == ["kvpop"]
    del calls[:]
    path.write_text(json.dumps({**content, "base_checkpoint": "0" * 8}))
    first_look("--policies", "streaming", "random", "oracle")
    assert len(calls) == 4  # another base: nothing is kept
    del calls[:]
    first_look("--problems", "2", "--policies", "random")
    assert len(calls) == 3  # other problems: nothing is kept


@pytest.mark.parametrize("name", ["first-look", "oracle"])
def test_a_budget_too_small_is_refused_before_any_work(name, shipped, monkeypatch, capsys):
    monkeypatch.setattr(bench, "evaluate", lambda *args, **options: pytest.fail("evaluated"))
    options = ["--retrofit"] if name == "first-look" else []
    assert bench.main([name, "--base", str(shipped / "base"), "--problems", "4", "--budgets", "10", *options]) == 2
    assert "budget 10" in capsys.readouterr().err


def test_decoding_under_a_budget_that_holds_everything_is_dense(first_look, monkeypatch):
    """Nothing scripted: what the command really decodes, token by token."""
    texts = []

    def watched(*args, **options):
        result = generate(*args, **options)
        texts.append(result.tokens)
        return result
    monkeypatch.setattr(bench, "generate", watched)
    rows = first_look("--policies", "streaming", "--budgets", "1000", "20")["rows"]
    dense, small, large, _ = texts
    assert all(len(t) > 20 for t in dense) and large == dense and small != dense
    both = {r["budget"]: r for r in rows if r["family"] == "both" and r["policy"] in ("dense", "streaming")}
    assert all(both[1000][key] == both[None][key] for key in ("right_bits", "traces_right", "token_accuracy"))
    assert both[1000]["compression_ratio"] < 0 < both[20]["compression_ratio"]


# ---------------------------------------------------------------------------------------------------------------------
# what is refused

@pytest.mark.parametrize("args, words", [
    (("--base", "/no/such/base"), ("/no/such/base",)),
    (("--retrofit", "/no/such/retrofit"), ("/no/such/retrofit", "scorer.safetensors")),
    (("--policies", "h20"), ("unknown policy 'h20'", "streaming")),
    (("--problems", "1"), ("--problems 1", "2")),
    (("--budgets", "9"), ("budget 9",))])
def test_refusals_are_one_sentence(first_look, monkeypatch, capsys, shipped, args, words):
    scripted(monkeypatch, lambda *_: None)
    code = bench.main(["first-look", "--base", str(shipped / "base"), "--retrofit", str(shipped / "kvpop"),
                       "--problems", "2", *args])
    err = capsys.readouterr().err
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1
    assert all(word in err for word in words), err


def test_command_line(capsys):
    for args in ([], ["second-look"], ["first-look", "--problem", "x"]):
        with pytest.raises(SystemExit) as stop:
            bench.main(args)
        assert stop.value.code == 2
    with pytest.raises(SystemExit):
        bench.main(["first-look", "--help"])
    out = capsys.readouterr().out
    assert all(key in out for key in KEYS - {"recall"})  # each column is explained
