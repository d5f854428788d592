"""bench.py attention: shares of tiles against brute force, scores of the shipped scorer, and a reduced run on a CPU."""
import json
import time
from pathlib import Path

import pytest
import torch

import bench
import flex_masks
import train
from data import speed
from flex_masks import CacheSpec, effective_priority, plan


def visible_pairs(evict_at):
    """(Z, T, T) bool, [q, t], from the definition alone."""
    Z, T = evict_at.flatten(0, 1).shape
    t, dies = torch.arange(T), evict_at.flatten(0, 1)
    return (t <= t[:, None]) & (t[:, None] < dies[:, None])


def tiles_by_force(shown):
    """Tiles of (Z, q, rows) bool in which some pair / every pair is visible."""
    Z, n_q, n_rows = shown.shape
    tiles = shown.view(Z, n_q // 128, 128, n_rows // 128, 128)
    return tiles.any(4).any(2).sum().item(), tiles.all(4).all(2).sum().item()


@pytest.mark.parametrize("T, budget, window", [(512, 400, 64), (1024, 900, 32)])
def test_tiles_in_time_order(T, budget, window):
    spec = CacheSpec(4, window, budget)
    evict_at = plan(torch.randn(2, 3, T, generator=torch.Generator().manual_seed(0)), spec)
    some, all_of_it = tiles_by_force(visible_pairs(evict_at))
    kept, full = speed.tiles_kept(evict_at, spec)
    assert kept == pytest.approx(some / 6 / (T / 128)**2) and full == pytest.approx(all_of_it / 6 / (T / 128)**2)


@pytest.mark.parametrize("policy", ["random", "decay", "streaming"])
def test_tiles_in_lifetime_order(policy):
    """The rows of each chunk of queries laid out by the order itself, pairs by the definition: no tile with a visible
    pair may be left out, hardly any without one may be in."""
    T, spec = 1024, CacheSpec(4, 64, 256)
    scores, log_gamma = speed.policy_scores(policy, 1, 2, T, "cpu")
    evict_at = plan(effective_priority(scores, log_gamma), spec)
    order, birth = flex_masks.key_order(evict_at, spec)[:2]
    pairs, some, chunk = visible_pairs(evict_at), 0, 256
    for c in range(T // chunk):
        live = (birth.view(order.shape)[:, c] < flex_masks.NEVER)[:, None]  # (Z, 1, rows)
        mine = pairs[:, c * chunk:(c + 1) * chunk]
        shown = mine.gather(2, order[:, c, None].expand(-1, chunk, -1)) & live
        assert torch.equal(shown.sum(-1), mine.sum(-1))  # each visible pair has one row
        some += tiles_by_force(shown)[0]
    kept, full = speed.tiles_kept(evict_at, spec)
    exact = some / 2 / (T / 128)**2
    assert exact <= kept <= 1.1 * exact and 0 <= full < kept
    assert speed.tiles_ideal(evict_at) == pytest.approx(pairs.sum().item() / 2 / T**2)
    assert speed.tiles_ideal(evict_at) < kept < 0.5 * (1 + 128 / T)  # the bound of any order; dense causal


def test_scores_of_the_shipped_scorer():
    """Each trace is scored by itself: the second of a row as if it stood alone."""
    scores, log_gamma = speed.policy_scores("kvpop", 2, 8, 3000, "cpu")
    assert scores.shape == (2, 8, 3000) and log_gamma.shape == (8,) and (log_gamma < 0).all()
    short, _ = speed.policy_scores("kvpop", 2, 8, 100, "cpu")
    assert torch.equal(short[0], scores[0, :, :100])
    assert not torch.equal(scores[0], scores[1]) and scores.std(-1).min() > 0
    problem = speed.make_problem(speed.FAMILIES[0], 0, "validation")
    first = len(problem.prompt) + len(problem.trace) + 1
    assert first < 3000  # the row goes on with another trace
    window = speed.load_scorers(str(speed.SHIPPED / "kvpop"))[1]["window"]
    assert (scores[0, :, first - window:first] == 0).all()  # the last tokens of a trace never leave its window
    assert (scores[0, :, first:first + 1] != 0).all()  # and the next trace starts anew


ROW = {"policy", "T", "budget", "batch", "n_head", "n_kv_head", "head_dim", "tiles_kept", "tiles_full", "tiles_ideal",
       "plan_ms", "fwd_ms", "fwd_bwd_ms", "dense_backend", "dense_fwd_ms", "dense_fwd_bwd_ms", "ratio_fwd",
       "ratio_fwd_bwd", "transposed_ms", "transposed_free_ms", "causal_flex_fwd_ms", "plan_peak_mib", "kernel",
       "reduced", "oom", "kernel_options"}


def test_reduced_run_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "assets").mkdir()
    assert bench.main(["attention", "--lengths", "0", "640"]) == 2  # before any work
    assert bench.main(["attention", "--lengths", "640", "--policies", "random"]) == 0
    assert bench.main(["attention", "--lengths", "640", "--policies", "random", "streaming"]) == 0
    rows = json.loads((tmp_path / "assets/results/attention.json").read_text())["rows"]
    assert [row["policy"] for row in rows] == ["random", "streaming"] and (tmp_path / "assets/attention.png").is_file()
    said = capsys.readouterr().out
    assert said.count("random, T 640") == 1 and "reduced" in said  # the second run kept the first one's row
    for row in rows:
        assert set(row) == ROW and row["reduced"] and row["kernel"] == "dense_reference" and row["oom"] == []
        assert row["causal_flex_fwd_ms"] is None and row["plan_peak_mib"] is None  # there is no GPU
        assert row["ratio_fwd"] == pytest.approx(row["fwd_ms"] / row["dense_fwd_ms"])
        assert row["ratio_fwd_bwd"] == pytest.approx(row["fwd_bwd_ms"] / row["dense_fwd_bwd_ms"])
        assert row["fwd_ms"] > row["plan_ms"] > 0 and row["transposed_ms"] > 0  # plan is part of forward
        assert row["tiles_ideal"] < row["tiles_kept"] < 1
    assert bench.main(["attention", "--n-sink", "2"]) == 2  # other settings do not overwrite
    assert bench.main(["attention", "--kernel-options", "fwd_BLOCK_N=wide"]) == 2


def test_out_of_memory_leaves_a_row(monkeypatch):
    """A figure for which memory does not suffice is None and named; the others are there."""
    args = bench.parse_args(["attention"])
    args.n_head, args.n_kv_head, args.head_dim, args.window = 4, 2, 16, 32

    def fail(self):
        raise torch.OutOfMemoryError
    monkeypatch.setattr(speed.Inputs, "forward_backward", fail)
    row = speed.attention_row("random", 512, 128, args, "cpu", dict(attention={}, transposed={}), {})
    assert row["oom"] == ["fwd_bwd_ms"] and row["fwd_bwd_ms"] is None and row["ratio_fwd_bwd"] is None
    assert row["fwd_ms"] > 0 and row["dense_fwd_bwd_ms"] > 0


def test_tuning_keeps_what_is_faster_and_survives_refusals(monkeypatch, capsys):
    args = bench.parse_args(["attention"])
    args.n_head, args.n_kv_head, args.head_dim, args.window = 4, 2, 16, 32
    seen = {}

    def time_of(fn, device):
        x = fn.__self__ if hasattr(fn, "__self__") else None
        options = x.options["attention"] if x else {"none": 0}
        if options.get("fwd_num_warps") or options.get("bwd_num_stages") == 4:
            raise RuntimeError("out of resource: shared memory")
        seen[str(options)] = True
        return 1.0 - 0.5 * (options.get("fwd_BLOCK_N") == 32) - 0.1 * (options.get("bwd_BLOCK_M1") == 32)
    monkeypatch.setattr(speed, "median_ms", time_of)
    best, trials = speed.tune_options(512, 128, args, "cpu", dict(attention={}, transposed={}))
    assert best == dict(attention=dict(fwd_BLOCK_N=32, bwd_BLOCK_M1=32), transposed={})
    refused = [t for t in trials if t["ms"] is None]
    assert len(refused) == 2 and all("shared memory" in t["note"] for t in refused)
    assert len(trials) == 3 + len(speed.FORWARD) + len(speed.BACKWARD) + len(speed.TRANSPOSED)


def test_median_leaves_out_the_first_calls():
    calls = []

    def fn():
        calls.append(len(calls))
        if len(calls) == 1:
            time.sleep(0.05)
    ms = speed.median_ms(fn, "cpu", repeats=5)
    assert 0 < ms < 10 and len(calls) == 7  # two that do not count, five that do


def test_loss_curves_of_both_orders(monkeypatch):
    """Both orders with the same settings, and how far their losses part; a training that fails is no curve."""
    asked, codes = [], [0, 0, 2]

    def main(argv):
        settings = train.parse_settings(argv)
        asked.append((settings.sort, settings.steps, settings.train_base, settings.log_every, settings.seed))
        history = [dict(step=i, kl=0.5 + 0.1 * settings.sort * i, retention=2.0 / i, recall=0.1) for i in (1, 2)]
        (Path(settings.out) / "log.json").write_text(json.dumps(dict(history=history)))
        return codes.pop(0)
    monkeypatch.setattr(train, "main", main)
    found = speed.loss_curves(2, "cpu")
    assert [sort for sort, *_ in asked] == [True, False] and asked[0][1:] == asked[1][1:] == (2, True, 1, 0)
    assert found["by_lifetime"]["kl"] == [0.6, 0.7] and found["by_time"] == dict(kl=[0.5, 0.5], retention=[2.0, 1.0])
    assert found["largest_difference"] == dict(kl=pytest.approx(0.2 / 0.7), retention=0.0)
    with pytest.raises(RuntimeError, match="--sort"):
        speed.loss_curves(2, "cpu")
