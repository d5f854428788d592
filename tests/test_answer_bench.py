"""bench.py answers on a tiny checkpoint with a real tokenizer: what is asked, what counts as right, from the rows of
its JSON back to the answers, and an interrupted run against a whole one.
"""
import json
import re
import zlib
from types import SimpleNamespace

import pytest
import torch

import bench
from data import answer_bench
from data.chat import QWEN3, encode_chat, parts
from data.results import bootstrap
from data.scorer_files import save_scorers
from data.tokenizer import load_tokenizer
from decode import Generation, generate

from tiny import make_folder, tiny_scorers

KEYS = {"policy", "task", "budget", "compression_ratio", "pass_at_1", "ci_low", "ci_high", "relative", "relative_low",
        "relative_high", "n_problems", "n_rollouts", "cut_off", "mean_new_tokens", "right", "peak_entries", "seed",
        "weights", "trained_tokens", "train_seed", "n_sink", "window", "options", "model", "checkpoint", "note",
        "seconds"}
SMALL = ("--n-sink", 2, "--window", 8, "--max-new-tokens", 20)
SUMS = [dict(question=f"What is {n} + 1?", solution=str(n + 1)) for n in range(6)]
FIELDS = ("--problem-field", "question", "--answer-field", "solution")


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    root = make_folder(tmp_path_factory.mktemp("real") / "qwen3")
    save_scorers(tiny_scorers("kvpop", 1), root.parent / "kvpop", dict(n_sink=2, window=8, budget=40, base="../qwen3"))
    return root


@pytest.fixture
def run(tmp_path, monkeypatch, qwen3):
    """`bench.py answers` in a folder of its own -> exit code, rows of its JSON ([] without one)."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)

    def call(rows, *args, model=qwen3):
        (tmp_path / "set.v2.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        code = bench.main(["answers", "--model", str(model), "--data", str(tmp_path / "set.v2.jsonl"),
                           *map(str, args)])
        path = tmp_path / "assets/results/answers.json"
        return code, json.loads(path.read_text())["rows"] if path.is_file() else []
    return call


@pytest.fixture
def scripted(monkeypatch, qwen3):
    """Generation that answers: say(policy, question text, seed) -> text, ended by the end token unless it ends in ~."""
    calls, tokenizer = [], load_tokenizer(qwen3)

    def use(say):
        def answer(model, prompts, spec=None, scorers=None, *, seed, **how):
            policy = "dense" if scorers is None else scorers[0].name
            texts = [say(policy, tokenizer.decode(ids, skip_special=False), s) for ids, s in zip(prompts, seed)]
            calls.append(SimpleNamespace(policy=policy, prompts=prompts, seed=seed, how=how, spec=spec, texts=texts))
            stop = ["max_new_tokens" if text.endswith("~") else "end token" for text in texts]
            cache = SimpleNamespace(peak_entries=lambda: 17)
            return Generation([tokenizer.encode(text) for text in texts], stop, [0] * len(prompts), cache)
        monkeypatch.setattr(answer_bench, "generate", answer)
        return calls
    return use


def number(prompt):
    return int(re.search(r"What is (\d+) \+ 1\?", prompt)[1])


def test_maths_from_question_to_row(run, scripted, qwen3):
    """dense: right but for the last; streaming: right below 2; kvpop: right in other words, its last cut off."""
    def say(policy, prompt, seed):
        n = number(prompt)
        if policy == "streaming":
            return f"\\boxed{{{n + 1 if n < 2 else n}}}"
        if policy == "kvpop":
            return f"\\boxed{{{n}}} no: </think> \\boxed{{\\frac{{{2 * n + 2}}}{{2}}}}" + "~" * (n == 5)
        return f"It is \\boxed{{{n + 1}}}." if n < 5 else "I do not know ~"
    calls = scripted(say)
    code, rows = run(SUMS, *FIELDS, *SMALL, "--rollouts", 0, "--policies", "streaming", "--budgets", 40, "--rows", 4,
                     "--retrofit", qwen3.parent / "kvpop")
    assert code == 0 and [r["policy"] for r in rows] == ["dense", "streaming", "kvpop"]
    tokenizer = load_tokenizer(qwen3)
    questions = [f"{s['question']}\n\nPlease reason step by step, and put your final answer within \\boxed{{}}."
                 for s in SUMS]
    wanted = [encode_chat(tokenizer, parts([dict(role="user", content=q)], QWEN3)) for q in questions]
    for policy in ("dense", "streaming", "kvpop"):
        mine = [call for call in calls if call.policy == policy]
        assert [len(call.prompts) for call in mine] == [4, 2]
        assert [ids for call in mine for ids in call.prompts] == wanted
        how = mine[0].how
        assert how["max_new_tokens"] == 20 and "temperature" not in how
        assert set(how["stop_ids"]) >= {tokenizer.added["<|im_end|>"], tokenizer.added["<|endoftext|>"]}
    dense, streaming, kvpop = rows
    assert all(row.keys() == KEYS and row["task"] == "set.v2" and row["n_rollouts"] == 1 for row in rows)
    assert [r["right"] for r in rows] == ["1 1 1 1 1 0", "1 1 0 0 0 0", "1 1 1 1 1 1"]
    assert [r["pass_at_1"] for r in rows] == [5 / 6, 2 / 6, 1]
    assert [r["relative"] for r in rows] == pytest.approx([1, 2 / 5, 6 / 5])
    assert (streaming["ci_low"], streaming["ci_high"]) == bootstrap([1, 1, 0, 0, 0, 0])
    assert (streaming["relative_low"], streaming["relative_high"]) == bootstrap([1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0])
    assert [r["cut_off"] for r in rows] == [1 / 6, 0, 1 / 6]
    assert [r["peak_entries"] for r in rows] == [17, 17, 22]  # the scorer's state costs 5
    said = [len(tokenizer.encode(text)) for call in calls if call.policy == "dense" for text in call.texts]
    assert dense["mean_new_tokens"] == sum(said) / 6
    length = (sum(map(len, wanted)) + sum(said)) / 6
    assert streaming["compression_ratio"] == pytest.approx(1 - 40 / length) and dense["compression_ratio"] == 0
    assert (kvpop["budget"], kvpop["n_sink"], kvpop["model"], kvpop["weights"]) == (40, 2, "kvpop", "base")


def test_choices(run, scripted):
    """The letter of the right option, wherever the order put it; a list field and single fields alike."""
    rows = [dict(q=f"Which {i}?", best=f"right {i}", bad=[f"wrong {i}", f"odd {i}"], worse=f"false {i}")
            for i in range(8)]

    def say(policy, prompt, seed):
        letters = dict(re.findall(r"^\(([A-D])\) (\w+)", prompt, re.M))
        assert sorted(letters.values()) == ["false", "odd", "right", "wrong"]
        which = "right" if policy == "dense" or int(re.search(r"Which (\d)", prompt)[1]) % 2 else "wrong"
        letter = next(k for k, v in letters.items() if v == which)
        seen.add(letter)
        return f"The answer is ({letter})." if policy == "dense" else f"\\boxed{{{letter}}}"
    seen = set()
    scripted(say)
    code, rows = run(rows, "--kind", "choice", "--problem-field", "q", "--answer-field", "best", "--wrong-fields",
                     "bad", "worse", *SMALL, "--rollouts", 0, "--policies", "random", "--budgets", 40, "--task", "gpqa")
    assert code == 0 and [r["right"] for r in rows] == ["1 1 1 1 1 1 1 1", "0 1 0 1 0 1 0 1"] and len(seen) > 2
    assert {r["task"] for r in rows} == {"gpqa"}


def test_rollouts_and_resuming(run, scripted, tmp_path, capsys):
    def say(policy, prompt, seed):
        n = number(prompt)
        return f"\\boxed{{{n + 1 if zlib.crc32(f'{policy} {n} {seed}'.encode()) % 2 else 0}}}"
    calls = scripted(say)
    args = (*FIELDS, *SMALL, "--rollouts", 3, "--problems", 4, "--budgets", 40, "--rows", 5)
    code, rows = run(SUMS, *args, "--policies", "streaming")
    assert code == 0
    assert [(r["policy"], r["n_rollouts"], r["n_problems"]) for r in rows] == [
        ("dense", 1, 4), ("dense", 3, 4), ("streaming", 1, 4), ("streaming", 3, 4)]
    seeds = {policy: [s for call in calls if call.policy == policy for s in call.seed]
             for policy in ("dense", "streaming")}
    assert seeds["dense"] == seeds["streaming"] and seeds["dense"][4:] == [i * 1000 + r for i in range(4)
                                                                           for r in range(3)]
    for row in rows:
        right = [sum(zlib.crc32(f"{row['policy']} {n} {n * 1000 + r}".encode()) % 2 for r in range(row["n_rollouts"]))
                 for n in range(4)]
        assert row["right"] == " ".join(map(str, right)) and row["pass_at_1"] == sum(right) / 4 / row["n_rollouts"]
        other = next(r for r in rows if r["policy"] == "dense" and r["n_rollouts"] == row["n_rollouts"])
        assert other["pass_at_1"] and row["relative"] == pytest.approx(row["pass_at_1"] / other["pass_at_1"])
    sampled = [call.how for call in calls if "temperature" in call.how]
    assert sampled and all((how["temperature"], how["top_p"], how["top_k"]) == (0.6, 0.95, 20) for how in sampled)
    del calls[:]
    assert run(SUMS, *args, "--policies", "streaming")[1] == rows and not calls
    path = tmp_path / "assets/results/answers.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "rows": rows[:3]}))  # stopped before the last samples
    again = run(SUMS, *args, "--policies", "streaming", "random")[1]
    strip = lambda row: {k: v for k, v in row.items() if k != "seconds"}  # noqa: E731
    assert [strip(r) for r in again[:4]] == [strip(r) for r in rows]
    assert {call.policy for call in calls} == {"streaming", "random"}
    assert run(SUMS[::-1], *args, "--policies", "streaming")[0] == 2  # other questions
    assert "questions_crc" in capsys.readouterr().err


def test_a_budget_that_holds_everything_is_dense(run, monkeypatch):
    """Nothing scripted: the same texts, greedy and sampled; other ones where the budget is small."""
    texts = {}

    def watched(model, prompts, spec=None, scorers=None, **how):
        result = generate(model, prompts, spec, scorers, **how)
        key = (scorers and scorers[0].name, spec and spec.budget, "temperature" in how)
        texts.setdefault(key, []).extend(result.tokens)
        return result
    monkeypatch.setattr(answer_bench, "generate", watched)
    code, rows = run(SUMS[:2], *FIELDS, *SMALL, "--rollouts", 2, "--policies", "streaming", "h2o", "random-prompt",
                     "--budgets", 400, 20)
    assert code == 0 and len(rows) == 2 + 2 * 3 * 2
    for sampled in (False, True):
        for policy in ("streaming", "h2o", "random-prompt"):
            assert texts[policy, 400, sampled] == texts[None, None, sampled]
        assert texts["streaming", 20, sampled] != texts[None, None, sampled]
    impossible = [r for r in rows if r["policy"] == "random-prompt" and r["budget"] == 20]
    for row in impossible:
        assert row["note"].startswith("impossible: policy random-prompt never evicts") and row["pass_at_1"] is None
    assert len(impossible) == 2 and all(r["note"] is None for r in rows if r not in impossible)


def test_without_a_template(run, scripted, tmp_path, monkeypatch, capsys):
    bare = make_folder(tmp_path / "bare", "llama3", template=False)
    calls = scripted(lambda policy, prompt, seed: "")
    args = (*FIELDS, *SMALL, "--rollouts", 0, "--policies", "streaming", "--budgets", 40)
    assert run(SUMS, *args, model=bare)[0] == 2
    err = capsys.readouterr().err
    assert "no chat template" in err and "--no-chat" in err and not calls
    assert run(SUMS, *args, "--no-chat", model=bare)[0] == 0
    tokenizer = load_tokenizer(bare)
    assert tokenizer.prefix and calls[0].prompts[0][:len(tokenizer.prefix)] == list(tokenizer.prefix)
    assert tokenizer.decode(calls[0].prompts[0]).startswith("What is 0 + 1?\n\nPlease")


def test_thinking(run, scripted, qwen3, tmp_path, capsys):
    calls = scripted(lambda policy, prompt, seed: "")
    args = (*FIELDS, *SMALL, "--rollouts", 0, "--policies", "streaming", "--budgets", 40)
    assert run(SUMS, *args, "--no-thinking")[0] == 0
    assert load_tokenizer(qwen3).decode(calls[0].prompts[0]).endswith("<think>\n\n</think>\n\n")
    assert run(SUMS, *args)[0] == 2 and "questions_crc" in capsys.readouterr().err  # other prompts
    never = make_folder(tmp_path / "never", "smollm2")
    assert run(SUMS, *args, "--thinking", model=never)[0] == 2 and "knows no thinking" in capsys.readouterr().err


def test_budgets_where_none_are_given(run, scripted, qwen3):
    """Those of the retrofits, else an eighth and a quarter of the length."""
    scripted(lambda policy, prompt, seed: "")
    args = (*FIELDS, "--n-sink", 2, "--window", 8, "--max-new-tokens", 160, "--rollouts", 0, "--policies", "streaming")
    assert [r["budget"] for r in run(SUMS, *args)[1]] == [None, 20, 40]
    assert run(SUMS, *args, "--out", "other", "--retrofit", qwen3.parent / "kvpop")[0] == 0
    rows = json.loads(open("assets/results/other.json").read())["rows"]
    assert [(r["policy"], r["budget"]) for r in rows] == [("dense", None), ("streaming", 40), ("kvpop", 40)]


@pytest.mark.parametrize("args, words", [
    (("--data", "/no/such.jsonl"), ("/no/such.jsonl",)),
    (("--problem-field", "problem"), ("no field 'problem'", "question, solution")),
    (("--kind", "choice"), ("--wrong-fields",)),
    (("--policies", "oracle"), ("oracle", "future", "--policies")),
    (("--policies", "h20"), ("unknown policy 'h20'",)),
    (("--policies", "kvpop"), ("kvpop", "--retrofit")),
    (("--max-new-tokens", 5000), ("5000 tokens", "2048")),
    (("--max-new-tokens", 2040), ("2040", "max_seq_len 2048")),
    (("--max-new-tokens", 0), ("--max-new-tokens",)),
    (("--temperature", -1), ("temperature",)),
    (("--problems", 0), ("--problems",)),
    (("--budgets", 9), ("budget 9",)),
    (("--model", "/no/such"), ("/no/such",))])
def test_refusals_are_one_sentence(run, monkeypatch, capsys, args, words):
    monkeypatch.setattr("data.cases.load_model", None)  # before any weight of a model is read
    code, rows = run(SUMS, *FIELDS, *SMALL, "--policies", "streaming", "--budgets", 40, *args)
    err = capsys.readouterr().err
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1 and all(word in err for word in words), err
    assert rows == []


def test_help(capsys):
    with pytest.raises(SystemExit):
        bench.main(["answers", "--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert all(re.search(rf"\b{key}\b", out) for key in KEYS)
    assert "LiveCodeBench" in out and "untrusted code" in out
