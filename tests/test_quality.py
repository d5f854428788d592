"""bench.py quality, tune and figures on a tiny model whose own greedy texts are the right answers, so that rates lie
between 0 and 1: every number is derived again by a plain loop over steps, and an interrupted run is compared with a
whole one.
"""
import itertools
import json
import math
import re
import zlib
from dataclasses import replace

import pytest
import torch

import bench
import train
from bench import Case, bootstrap, forced
from data import evaluation
from data.batches import collate_problems
from data.scorer_files import save_scorers
from data.tokenizer import EOT, decode
from data.traces import ALPHABET, Verdict, make_problem, worth_keeping
from decode import KVCache, dense_spec, generate, step
from flex_masks import CacheSpec
from model import ModelConfig, causal_attend, save_model
from scorer import LEARNED, POLICIES, make_scorer
from targets import policy_attend
from tiny import tiny_scorers, tiny_transformer

SHAPE = dict(n_layer=2, n_kv_head=2, head_dim=8)
SETTINGS = dict(n_sink=2, window=8, budget=40, base="../base")  # kvpop's state costs 5 of them
CONTRACT = {"policy", "task", "budget", "compression_ratio", "pass_at_1", "relative", "ci_low", "ci_high",
            "token_accuracy", "kl", "recall", "n_problems", "n_rollouts", "seed", "weights", "trained_tokens"}


def tiny_model(seed, like=None):
    """Random, but it writes letters of the traces alone. like: weights to stay near to."""
    model = tiny_transformer(seed, eos_token_ids=[EOT], alphabet=ALPHABET)
    with torch.no_grad():
        quiet = torch.ones(264, 1)
        quiet[[*ALPHABET.encode(), EOT]] = 0.0
        model.model.embed_tokens.weight.mul_(1 - quiet)
        if like is not None:
            for p, near in zip(model.parameters(), like.parameters()):
                p.copy_(near + 0.02 * p)
    return model


@pytest.fixture(scope="module")
def base():
    return tiny_model(0)


@pytest.fixture(scope="module")
def pool(base):
    """Problems whose right trace is what the dense model writes, up to its own end token."""
    made = [make_problem("walk", i, "test", size=3 + i % 2) for i in range(200)]
    result = generate(base, [list(p.prompt.encode()) for p in made], max_new_tokens=80, stop_ids=[EOT])
    found = [replace(p, trace=decode(t)) for p, t, stop in zip(made, result.tokens, result.stop)
             if stop == "end token" and len(t) > 12]
    return [replace(p, index=i) for i, p in enumerate(found)]


# ---------------------------------------------------------------------------------------------------------------------
# the other way to each number

def spec_of(policy, budget, n_sink=2, window=8):
    if policy == "tova-layer":
        n_sink, window = 0, 1
    return CacheSpec(n_sink, window, budget, {"kvpop": 5, "snapkv": 8, "rkv": 8}.get(policy, 0))


@torch.no_grad()
def walk_along(model, problems, spec, scorers, pick):
    """One step after the other from position 0, without prefill: logits (B, V) -> pick(b, n, logits (V)) -> token n of
    row b, None where the row has ended."""
    cache = KVCache(model.config, spec or dense_spec(200), len(problems), scorers)
    prompts = [list(p.prompt.encode()) for p in problems]
    cache.set_prompt_lengths([len(p) for p in prompts])
    ended, rows = [False] * len(prompts), [list(p) for p in prompts]
    for t in range(180):
        logits = step(model, torch.tensor([row[t] if t < len(row) else 0 for row in rows]), cache)
        for b, row in enumerate(rows):
            if t == len(row) - 1 and not ended[b]:
                token = pick(b, len(row) - len(prompts[b]), logits[b])
                ended[b] = token is None
                row += [] if token is None else [token]
        if all(ended):
            return [row[len(p):] for row, p in zip(rows, prompts)]
    raise AssertionError("a row never ends")


def longest_text(problems):
    return 120 - min(len(p.prompt) for p in problems)


def greedily(problems):
    def pick(b, n, logits):
        token = int(logits.argmax())
        return None if token == EOT or n == longest_text(problems) else token
    return pick


def by_lot(problems, numbers):
    """Temperature 0.6, then the 20 best, then the fewest that hold 95 % of what those hold; in plain Python."""
    def pick(b, n, logits):
        if n == longest_text(problems):
            return None
        best = sorted(((x, -i) for i, x in enumerate(logits.double().tolist())), reverse=True)[:20]
        weights = [math.exp((x - best[0][0]) / 0.6) for x, _ in best]
        total, held, kept = sum(weights), 0.0, []
        for weight in weights:
            if held >= 0.95 * total:
                break
            held += weight
            kept.append(weight)
        at, so_far = numbers[b][n] * sum(kept), 0.0
        for (_, i), weight in zip(best, kept):
            so_far += weight
            if at < so_far:
                return None if -i == EOT else -i
        raise AssertionError("the lot fell beyond the weights")
    return pick


@torch.no_grad()
def plain_forced(model, base, problems, spec, scorers):
    """Token by token, a problem at a time -> hits and KLs of each problem's trace and end, explicit formula in fp64."""
    found = []
    for p in problems:
        ids = [*(p.prompt + p.trace).encode(), EOT]
        truth = base.unembed(base(torch.tensor([ids]), causal_attend))[0].double()
        cache = KVCache(model.config, spec or dense_spec(len(ids)), 1, scorers, dtype=model.model.norm.weight.dtype)
        cache.set_prompt_lengths([len(p.prompt)])
        hits, kls = [], []
        for t, token in enumerate(ids[:-1]):
            logits = step(model, torch.tensor([token]), cache)[0].double()
            if t >= len(p.prompt) - 1:
                hits.append(int(logits.argmax()) == ids[t + 1])
                a, b = (x.exp() / x.exp().sum() for x in (truth[t], logits))
                kls.append(float((a * (a / b).log()).sum()))
        found.append((hits, kls))
    return found


# ---------------------------------------------------------------------------------------------------------------------
# teacher-forced figures

# not knorm: in layer 0 all keys of one byte are equally long, so that rounding alone decides between them
@pytest.mark.parametrize("policy", ["dense", "streaming", "random-prompt", "kvpop", "dms-cap", "tova-layer", "rkv"])
def test_forced_is_the_plain_loop(base, pool, policy):
    model, teacher = tiny_model(1, base).double(), base.__class__(base.config).double()
    teacher.load_state_dict(base.state_dict())
    spec = scorers = None
    problems = pool[:3]
    if policy != "dense":
        spec = spec_of(policy, max(len(p.prompt) for p in problems) + 14)
        scorers = tiny_scorers(policy, 3, window=spec.window).double()
    result = forced(model, teacher, problems, spec, scorers)
    plain = plain_forced(model, teacher, problems, spec, scorers)
    hits, kls = (list(itertools.chain(*part)) for part in zip(*plain))
    assert result["token_accuracy"] == pytest.approx(sum(hits) / len(hits), abs=1e-12)
    assert result["kl"] == pytest.approx(sum(kls) / len(kls), rel=1e-9) and result["kl"] > 1e-3
    assert result["right"] == [all(h) for h, _ in plain]
    assert 0 < result["token_accuracy"] < 1


def test_forced_of_the_base_itself(base, pool):
    """Its own texts: all right, no KL; also under a budget that holds everything, whatever the policy."""
    for policy in (None, "streaming", "h2o", "oracle"):
        spec = policy and CacheSpec(2, 8, 300)
        result = forced(base, base, pool[:4], spec, policy and tiny_scorers(policy))
        assert result["right"] == [True] * 4 and result["token_accuracy"] == 1 and result["kl"] < 1e-6, policy
        assert result["recall"] is None or policy == "streaming"
    small = forced(base, base, pool[:4], CacheSpec(2, 8, 20), tiny_scorers("streaming"))
    assert small["token_accuracy"] < 0.95 and small["kl"] > 0.01


@torch.no_grad()
def test_oracle_beside_a_plain_one(base, pool):
    """Layer by layer with whole attention matrices: scores from the dense one, eviction one by one, then its mask."""
    problem, spec = max(pool[:20], key=lambda p: len(p.trace)), CacheSpec(2, 8, 20)
    result = forced(base, base, [problem], spec, tiny_scorers("oracle", power=2.0))
    ids = [*(problem.prompt + problem.trace).encode(), EOT]
    T = len(ids)

    def attend(layer, q, k, v):
        k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))  # (1, H, T, D)
        scores = (q @ k.mT / 8**0.5).masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
        p = scores.softmax(-1)[0]  # (H, T, T)
        alive = torch.ones(4, T, T, dtype=torch.bool)  # (H, query, key)
        for head in range(2):
            mass = [max(float((p[h, t + 8:, t]**2).sum() / max(1, T - t - 8))**0.5 for h in (2 * head, 2 * head + 1))
                    for t in range(T)]
            held = []
            for query in range(T):
                if query - 8 >= 2:
                    held.append(query - 8)
                    if len(held) > spec.n_select:
                        held.remove(min(held, key=lambda t: (mass[t], t)))
                gone = [t for t in range(2, query - 7) if t not in held]
                alive[2 * head:2 * head + 2, query, gone] = False
        return scores.masked_fill(~alive, -math.inf).softmax(-1) @ v
    logits = base.unembed(base(torch.tensor([ids]), attend))[0]
    at = range(len(problem.prompt) - 1, T - 1)
    hits = [int(logits[t].argmax()) == ids[t + 1] for t in at]
    assert result["token_accuracy"] == pytest.approx(sum(hits) / len(hits))
    assert result["right"] == [all(hits)] and 0 < sum(hits) < len(hits)


def test_recall_is_that_of_training(base, pool, monkeypatch):
    """train.evaluate takes the same average; both ways of holding less than the teacher would."""
    monkeypatch.setattr(evaluation, "problem_batches", lambda *_: (
        (*collate_problems([p]), [p]) for p in sorted(pool[:4], key=lambda p: len(p.prompt) + len(p.trace))))
    for policy in ("kvpop", "position"):
        scorers, spec = tiny_scorers(policy, 3), spec_of(policy, 30)
        want = train.evaluate(base, "cpu", 4, spec, scorers, families=("walk",))
        got = forced(base, base, pool[:4], spec, scorers)
        assert got["recall"] == pytest.approx(want["recall"]) and 0 < got["recall"] < 1
        assert got["token_accuracy"] == pytest.approx(want["token_accuracy"])
        assert len(got["recall_by_layer"]) == 2 and sum(got["recall_by_layer"]) / 2 == pytest.approx(got["recall"])


def test_retention_counts_queries(base, pool):
    scorers, spec, problems = tiny_scorers("kvpop", 3), spec_of("kvpop", 30), pool[:3]
    seen, room = {}, {}
    for p in problems:
        idx, lengths, starts = collate_problems([p])

        def count(layer, q, k, lse, scores, evict_at):
            for t, keep in enumerate(worth_keeping(p)):
                kind = (("definition" if keep else "filler") if t < len(p.prompt) else
                        ("stated value" if keep else "working"))
                for head in range(2):
                    for query in range(t + 8, int(lengths)):
                        if t >= 2:
                            room[kind, layer] = room.get((kind, layer), 0) + 1
                            seen[kind, layer] = seen.get((kind, layer), 0) + (query < int(evict_at[0, head, t]))
        with torch.no_grad():
            base(idx, policy_attend(scorers, spec, lengths, count))
    got = forced(base, base, problems, spec, scorers)["retention"]
    assert got.pop("stated value") is None  # walks have none
    assert set(got) == {kind for kind, _ in room}
    for kind, layers in got.items():
        assert layers == pytest.approx([seen[kind, layer] / room[kind, layer] for layer in range(2)])
    assert 0 < got["definition"][0] < 1


# ---------------------------------------------------------------------------------------------------------------------
# intervals and rates

def test_interval_of_averaged_rollouts():
    """Four problems of four rollouts: the distribution of the mean has 4**4 outcomes, all of which are listed."""
    share = [0.0, 0.25, 0.75, 1.0]
    means = sorted(sum(pick) / 4 for pick in itertools.product(share, repeat=4))
    low, high = bootstrap(share)
    below = lambda x: sum(m < x for m in means) / 256, lambda x: sum(m <= x for m in means) / 256  # noqa: E731
    for x, q in ((low, 0.025), (high, 0.975)):
        assert below[0](x) - 0.01 <= q <= below[1](x) + 0.01
    reference = [0.5, 1.0, 1.0, 0.5]
    ratios = sorted(sum(share[i] for i in pick) / sum(reference[i] for i in pick)
                    for pick in itertools.product(range(4), repeat=4))
    for x, q in zip(bootstrap(share, reference), (0.025, 0.975)):
        assert sum(r < x - 1e-9 for r in ratios) / 256 - 0.01 <= q <= sum(r <= x + 1e-9 for r in ratios) / 256 + 0.01


def test_pass_rates():
    row = bench.pass_rates([4, 0, 2], 4, "4 4 0")
    assert row["pass_at_1"] == 0.5 and row["relative"] == pytest.approx(0.75) and row["right"] == "4 0 2"
    assert (row["ci_low"], row["ci_high"]) == bootstrap([1, 0, 0.5])
    assert (row["relative_low"], row["relative_high"]) == bootstrap([1, 0, 0.5], [1, 1, 0])
    assert bench.pass_rates([4, 0, 2], 4)["relative"] == 1
    none = bench.pass_rates([1, 0], 1, "0 0")
    assert none["pass_at_1"] == 0.5 and none["relative"] is None and none["relative_low"] is None
    assert set(bench.pass_rates(None, 1).values()) == {None}


# ---------------------------------------------------------------------------------------------------------------------
# the command

@pytest.fixture(scope="module")
def shipped(base, tmp_path_factory):
    """base/; frozen/ (kvpop for the base); kvpop/ and stream/ (adapted weights), each with a log."""
    root = tmp_path_factory.mktemp("shipped")
    save_model(base, root / "base", torch.float32)
    save_scorers(tiny_scorers("kvpop", 1), root / "frozen", {**SETTINGS, "budget": 50})
    save_model(tiny_model(2, base), root / "kvpop", torch.float32)
    save_scorers(tiny_scorers("kvpop", 3), root / "kvpop", SETTINGS)
    save_model(tiny_model(4, base), root / "stream", torch.float32)
    save_scorers(tiny_scorers("streaming"), root / "stream", {**SETTINGS, "weights": "."})
    for name, tokens in (("frozen", [5, 30]), ("kvpop", [10, 20, 7, 9]), ("stream", [40])):  # kvpop's was resumed
        (root / name / "log.json").write_text(json.dumps(
            {"history": [{"tokens": n} for n in tokens], "settings": {"seed": 17}}))
    return root


@pytest.fixture
def run(tmp_path, monkeypatch, shipped, pool):
    """`bench.py NAME` on the pool, in a folder of its own -> exit code, rows of its JSON."""
    monkeypatch.setattr(bench, "make_problem", lambda family, i, split: pool[i + 50 * (split == "validation")])
    monkeypatch.setattr(bench, "MAX_LENGTH", 120)
    monkeypatch.setattr(bench, "check", lambda p, text: Verdict(text == p.trace or zlib.crc32(text.encode()) % 3 == 0,
                                                                text == p.trace, None, ""))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)

    def call(name, *args, retrofit=(), out=None):
        extra = ["--retrofit", *(str(shipped / folder) for folder in retrofit)] if name == "quality" else []
        code = bench.main([name, "--base", str(shipped / "base"), *extra, *map(str, args)])
        path = tmp_path / f"assets/results/{out or name}.json"

        def refuse(what):
            raise AssertionError(f"{what} is not JSON")
        return code, json.loads(path.read_text(), parse_constant=refuse)["rows"] if path.is_file() else None
    return call


FEW = ("--problems", 3, "--rollout-problems", 2, "--rollouts", 2, "--forced-problems", 2)


def timeless(rows):
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def load(folder):
    return bench.load_model(folder, "cpu", torch.float32).eval()


def test_every_number_again(run, pool, shipped, base):
    """All rows: which there are, then each rate by walking along, each teacher-forced figure by the plain loop."""
    code, rows = run("quality", *FEW, "--policies", "streaming", "random-prompt", "h2o", "oracle", "--budgets", 110,
                     "--seed", 5, retrofit=("frozen", "kvpop", "stream"))
    wanted = [("dense", "base", None, "base", 0)]
    wanted += [(policy, "base", 110, "base", 0) for policy in ("streaming", "random-prompt", "h2o", "oracle")]
    wanted += [("kvpop", "frozen", 50, "base", 30), ("kvpop", "kvpop", 40, "adapted", 29),
               ("oracle", "kvpop", 40, "adapted", 29), ("streaming-plus", "stream", 40, "adapted", 40)]
    keys = ("policy", "model", "budget", "weights", "trained_tokens")
    assert code == 0 and [tuple(r[key] for key in keys) for r in rows] == [
        w for w in wanted for _ in range(1 if w[0] == "oracle" else 2)]
    length = sum(len(p.prompt) + len(p.trace) + 1 for p in pool[:3]) / 3
    dense, rates = {}, []
    for row in rows:
        assert CONTRACT <= row.keys() and row["task"] == "arith" and row["seed"] == 5
        folder, budget, policy = shipped / row["model"], row["budget"], row["policy"].removesuffix("-plus")
        model = load(folder) if row["weights"] == "adapted" else base
        spec = scorers = None
        if budget:
            spec = spec_of(policy, budget)
            assert (row["n_sink"], row["window"]) == (2, 8)
            scorers = (tiny_scorers(policy, {"frozen": 1, "kvpop": 3}[row["model"]]) if policy == "kvpop" else
                       tiny_scorers(policy, seed=5))
        assert row["compression_ratio"] == pytest.approx(1 - budget / length if budget else 0)
        assert row["train_seed"] == (None if row["trained_tokens"] == 0 else 17)
        n = row["n_rollouts"]
        problems = pool[:3 if n == 1 else 2]
        assert row["n_problems"] == len(problems)
        some = pool[:2 if policy == "h2o" else 3]
        assert row["forced_problems"] == len(some) and row["decoded"] is (policy != "oracle")
        if policy == "oracle":
            got = forced(model, base, some, spec, scorers)
            assert (row["token_accuracy"], row["kl"]) == (got["token_accuracy"], got["kl"])
            right = [int(ok) for ok in got["right"]]
        else:
            if n == 1:
                plain = plain_forced(model, base, some, spec, scorers)
                hits, kls = (list(itertools.chain(*part)) for part in zip(*plain))
            assert row["token_accuracy"] == pytest.approx(sum(hits) / len(hits))
            assert row["kl"] == pytest.approx(sum(kls) / len(kls), rel=1e-3, abs=1e-5)
            assert row["traces_right"] == pytest.approx(sum(all(h) for h, _ in plain) / len(some))
            jobs = [(p, r) for p in problems for r in range(n)]
            numbers = [torch.rand(longest_text(problems), dtype=torch.float64, generator=torch.Generator().manual_seed(
                (5 * 10**6 + p.index) * 1000 + r)).tolist() for p, r in jobs]
            texts = walk_along(model, [p for p, _ in jobs], spec, scorers,
                               greedily(problems) if n == 1 else by_lot(problems, numbers))
            ok = [bench.check(p, decode(text)).answer_right for (p, _), text in zip(jobs, texts)]
            right = [sum(ok[i:i + n]) for i in range(0, len(ok), n)]
        assert row["right"] == " ".join(map(str, right)), row
        share = [k / n for k in right]
        reference = dense.setdefault(n, share)
        assert row["pass_at_1"] == pytest.approx(sum(share) / len(share))
        assert row["relative"] == pytest.approx(sum(share) / sum(reference))
        assert (row["ci_low"], row["ci_high"]) == bootstrap(share)
        assert (row["relative_low"], row["relative_high"]) == bootstrap(share, reference)
        assert (row["recall"] is None) is (policy in ("dense", "h2o", "oracle"))
        if budget and policy != "oracle":
            assert row["peak_entries"] <= budget
        rates.append((policy, n, row["pass_at_1"]))
    assert rates[0] == ("dense", 1, 1.0) and len({rate for _, _, rate in rates}) > 3
    assert any(row["peak_entries"] == row["budget"] for row in rows if row["policy"] == "kvpop")


def test_an_interrupted_run_goes_on(run, monkeypatch, tmp_path, capsys):
    args = *FEW, "--policies", "streaming", "h2o", "oracle", "--budgets", 80
    _, whole = run("quality", *args, "--out", "whole", out="whole")
    for stop in (0, 3, 5):
        calls, real = [], bench.decoded

        def watched(*given, **options):
            calls.append(1)
            if len(calls) > stop:
                raise KeyboardInterrupt
            return real(*given, **options)
        with monkeypatch.context() as patch:
            patch.setattr(bench, "decoded", watched)
            code, rows = run("quality", *args, "--out", f"cut{stop}", out=f"cut{stop}")
        assert code == 130 and "goes on" in capsys.readouterr().err
        assert timeless(rows or []) == timeless(whole[:stop])
    forced_again = []
    monkeypatch.setattr(bench, "forced", lambda *a, **k: forced_again.append(a[4]) or forced(*a, **k))
    code, rows = run("quality", *args, "--out", "cut3", out="cut3")  # stopped between streaming's two rows
    assert code == 0 and timeless(rows) == timeless(whole)
    assert [scorers[0].name for scorers in forced_again] == ["h2o", "oracle"]
    del forced_again[:]
    assert run("quality", *args, "--out", "cut3", out="cut3") == (0, rows) and not forced_again
    _, more = run("quality", *args, "--families", "walk", "--rollouts", 0, "--out", "cut3", out="cut3")
    assert timeless(more[:len(rows)]) == timeless(rows) and {r["task"] for r in more[len(rows):]} == {"walk"}


def test_what_a_file_is_not_continued_from(run, shipped, capsys, monkeypatch):
    """Other settings are refused and the file stays; of a checkpoint trained anew only its own rows are made again."""
    args = ("--problems", 3, "--rollouts", 0, "--policies", "streaming")
    _, rows = run("quality", *args, retrofit=("kvpop",))
    assert [r["policy"] for r in rows] == ["dense", "streaming", "kvpop"]
    capsys.readouterr()
    code, same = run("quality", "--problems", 2, *args[2:], retrofit=("kvpop",))
    err = capsys.readouterr().err
    assert code == 2 and same == rows and err.count("\n") == 1 and "problems 3, not 2" in err and "--out" in err
    path = shipped / "kvpop" / "scorer.safetensors"
    old = path.read_bytes()
    try:
        save_scorers(tiny_scorers("kvpop", 9), shipped / "kvpop", SETTINGS)
        code, new = run("quality", *args, retrofit=("kvpop",))
    finally:
        path.write_bytes(old)
    assert code == 0 and new[:2] == rows[:2] and len(new) == 3
    assert new[2]["checkpoint"] != rows[2]["checkpoint"] and new[2]["kl"] != rows[2]["kl"]


def test_a_prompt_that_does_not_fit(run):
    code, rows = run("quality", *FEW, "--policies", "random-prompt", "streaming", "--budgets", 80)
    assert code == 0 and [r["policy"] for r in rows] == ["dense"] * 2 + ["random-prompt"] * 2 + ["streaming"] * 2
    for row in rows[2:4]:
        assert CONTRACT <= row.keys() and row["note"].startswith("impossible: policy random-prompt never evicts")
        assert {row[key] for key in ("pass_at_1", "relative", "ci_low", "token_accuracy", "kl", "right")} == {None}
    assert rows[4]["note"] is None and rows[4]["pass_at_1"] is not None
    assert len(run("quality", *FEW, "--policies", "random-prompt", "streaming", "--budgets", 80)[1]) == 6


# ---------------------------------------------------------------------------------------------------------------------
# tuning

@pytest.mark.parametrize("budget", [128, 256, 512])
def test_grids(budget):
    for policy in bench.FREE:
        grid = bench.settings_grid(policy, budget)
        assert len({json.dumps(setting) for setting in grid}) == len(grid)
        assert len(grid) >= 6 or policy == "tova-layer" and grid == [(0, 1, {})]
        for n_sink, window, options in grid:
            case = replace(bench.free_case(policy, "b", budget), n_sink=n_sink, window=window, options=options)
            spec = case.spec(ModelConfig(264, 2, 256, 8, 4, 32, 48, 512))
            assert spec.n_select > 0 or policy == "streaming"
            assert spec.state_entries == options.get("n_queries", 0)  # two heads a group, half an entry each
            assert make_scorer(policy, n_kv_head=4, head_dim=32, window=spec.window, layer=0, **options)
    assert set(bench.FREE) | set(LEARNED) | {"dense", "oracle"} == set(POLICIES)


def test_tuned_settings_are_used(run, pool, base, monkeypatch, capsys):
    """The whole grid on validation problems, the best by traces and then by bytes, at its budget and scaled."""
    code, grid = run("tune", "--problems", 3, "--policies", "streaming", "vase", "--budgets", 40)
    assert code == 0 and len(grid) == 6 + 9
    for row in grid[:2] + grid[-1:]:
        spec = CacheSpec(row["n_sink"], row["window"], 40)
        scorers = tiny_scorers(row["policy"], window=spec.window, **row["options"])
        plain = plain_forced(base, base, pool[50:53], spec, scorers)
        hits = list(itertools.chain(*(h for h, _ in plain)))
        assert row["token_accuracy"] == pytest.approx(sum(hits) / len(hits))
        assert row["traces_right"] == pytest.approx(sum(all(h) for h, _ in plain) / 3)
    order = sorted(grid, key=lambda r: (-r["traces_right"], -r["token_accuracy"]))
    best = {policy: next(r for r in order if r["policy"] == policy) for policy in ("streaming", "vase")}
    assert f"window {best['vase']['window']}, {best['vase']['options']}" in capsys.readouterr().out
    small = ("--problems", 1, "--rollouts", 0, "--forced-problems", 1)
    code, rows = run("quality", *small, "--policies", "streaming", "vase", "--budgets", 40, 80)
    assert code == 0
    for row in rows[1:]:
        was = best[row["policy"]]
        assert (row["n_sink"], row["options"], row["tuned_at"]) == (was["n_sink"], was["options"], 40)
        assert row["window"] == was["window"] * row["budget"] // 40
    monkeypatch.setattr(bench, "forced", None)
    assert run("tune", "--problems", 3, "--policies", "streaming", "vase", "--budgets", 40) == (0, grid)  # all there
    case = Case("vase", "b", "b", 40)
    rows = [dict(policy="vase", task="arith", budget=b, n_sink=4, window=8, options={"percent": p}, traces_right=t,
                 token_accuracy=a) for b, p, t, a in ((64, 5, 0.5, 0.1), (64, 10, 0.5, 0.2), (64, 20, 0.2, 0.9),
                                                      (256, 1, 1.0, 1.0), (40, 2, None, None))]
    found = replace(case, n_sink=4, window=5, options={"percent": 10}, tuned_at=64)
    assert bench.best_setting(case, rows, "arith") == found
    assert bench.best_setting(case, rows, "walk") == case


# ---------------------------------------------------------------------------------------------------------------------
# figures and refusals

def test_figures(run, tmp_path, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    run("quality", "--problems", 2, "--rollouts", 0, "--policies", "streaming", "random-prompt", "oracle", "--budgets",
        30, 110, retrofit=("kvpop", "stream"))
    shown = []
    monkeypatch.setattr(pyplot, "close", shown.append)
    assert bench.main(["figures"]) == 0
    assert sorted(p.name for p in (tmp_path / "assets").glob("*.png")) == ["quality.png", "recall.png", "retention.png"]
    assert all(p.read_bytes()[:4] == b"\x89PNG" for p in (tmp_path / "assets").glob("*.png"))
    texts = [{t.get_text() for ax in fig.axes for t in (*ax.texts, ax.title, ax.xaxis.label, ax.yaxis.label)}
             for fig in shown]
    assert {"dense (all entries)", "streaming", "random-prompt", "oracle", "oracle (adapted)", "kvpop",
            "streaming-plus"} <= texts[0]
    assert any("entries" in t for t in texts[0]) and any("pass@1" in t for t in texts[0])
    assert "kvpop (adapted), 40 entries, arith" in texts[1] and "layer" in texts[1]
    rows = json.loads((tmp_path / "assets/results/quality.json").read_text())["rows"]
    filler = next(r["retention"]["filler"] for r in rows if r["policy"] == "kvpop")
    assert {f"{share:.2f}" for share in filler} <= texts[2]
    lines = [line for line in shown[0].axes[0].lines if len(line.get_xdata()) == 2 and line.get_marker() != "None"]
    points = {tuple(zip(line.get_xdata(), line.get_ydata())) for line in lines}
    want = tuple((r["budget"], r["pass_at_1"]) for r in rows if r["policy"] == "streaming" and r["n_rollouts"] == 1)
    assert len(want) == 2 and want in points
    drawn = [line for line in shown[0].axes[0].lines if line.get_marker() != "None"]
    looks = [(line.get_marker(), line.get_linestyle()) for line in drawn]
    assert len(set(looks)) == len(looks)


@pytest.mark.parametrize("name, args, words", [
    ("quality", ("--policies", "h20"), ("unknown policy 'h20'",)),
    ("quality", ("--policies", "kvpop-mlp"), ("kvpop-mlp", "--retrofit")),
    ("quality", ("--problems", 0), ("--problems",)),
    ("quality", ("--rollouts", -1), ("--rollouts",)),
    ("quality", ("--budgets", 9), ("budget 9",)),
    ("quality", ("--base", "/no/such"), ("/no/such",)),
    ("quality", ("--retrofit", "/no/such"), ("/no/such",)),
    ("tune", ("--policies", "kvpop"), ("kvpop", "nothing to tune")),
    ("tune", ("--problems", 0), ("--problems",)),
    ("tune", ("--budgets", 3, "--policies", "h2o"), ("budget 3",)),
    ("figures", ("--name", "none"), ("none.json",))])
def test_refusals_are_one_sentence(run, monkeypatch, capsys, name, args, words):
    monkeypatch.setattr(bench, "load_model", None)  # before any weight of a model is read
    code = bench.main([name, *map(str, args)]) if name == "figures" else run(name, *args)[0]
    err = capsys.readouterr().err
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1 and all(word in err for word in words), err


def test_two_checkpoints_of_one_name(run, shipped, tmp_path, capsys):
    save_scorers(tiny_scorers("kvpop", 1), tmp_path / "kvpop", {**SETTINGS, "base": str(shipped / "base")})
    assert run("quality", "--policies", "streaming", "--retrofit", shipped / "kvpop", tmp_path / "kvpop")[0] == 2
    assert "called kvpop" in capsys.readouterr().err


def test_help_explains_every_column(capsys):
    for name, keys in (("quality", CONTRACT), ("tune", {"traces_right", "token_accuracy", "n_sink", "options"})):
        with pytest.raises(SystemExit):
            bench.main([name, "--help"])
        out = capsys.readouterr().out
        assert all(re.search(rf"\b{key}\b", out) for key in keys)
