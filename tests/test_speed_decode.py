"""bench.py decode: its bytes against real tensors, its caches against the model and a softmax a head, the state that it
makes up for a slot cache against one that was decoded, and a reduced run on a CPU.
"""
import json
import math

import pytest
import torch

import bench
import decode
from data import speed_decode as speed
from flex_masks import CacheSpec
from model import Transformer, causal_attend
from tiny import tiny_scorers, tiny_transformer

F64 = torch.float64


@pytest.mark.parametrize("shape", ["qwen3-4b", "qwen3-8b"])
@pytest.mark.parametrize("batch", [1, 3])
def test_bytes_of_the_cost_card_are_those_of_the_tensors(shape, batch):
    config = speed.shape_of(shape, reduced=True)
    model = speed.random_model(config, "cpu", torch.bfloat16)
    read = dict(model.named_parameters())
    if shape == "qwen3-8b":  # its head is a matrix of its own, and of the embedding a step reads a row
        assert "lm_head.weight" in read and not config.tie_embeddings
        del read["model.embed_tokens.weight"]
    card = speed.cost_card(config, 2, [64], [100], [batch], 1e9, 4, 16)
    assert card["weight_bytes"] == sum(p.nbytes for p in read.values())
    dense = speed.DenseCache(config, 100, batch, "cpu", torch.bfloat16)
    slots = decode.KVCache(config, decode.dense_spec(100), batch, None, "cpu", torch.bfloat16)
    real = sum(x.k_cache.nbytes + x.v_cache.nbytes for x in slots.layers)
    assert dense.nbytes()["cache"] == real == batch * 100 * card["kv_bytes_per_token"]
    assert card["floor_ms"]["dense, T 100"] == [pytest.approx((card["weight_bytes"] + real) / 1e6)]
    spec = speed.spec_of("kvpop", config, 64, 4, 16)
    scorers = decode.make_scorers("kvpop", n_layer=2, n_kv_head=2, head_dim=32, window=16)
    cache = decode.KVCache(config, spec, batch, scorers, "cpu", torch.bfloat16)
    size = cache.nbytes()
    assert size["state"] == batch * card["kvpop_state_bytes"] > 0
    moved = card["weight_bytes"] + size["cache"] + 2 * size["state"]
    assert card["floor_ms"]["kvpop, budget 64"] == [pytest.approx(moved / 1e6)]
    own = sum(p.numel() * 4 for p in scorers.parameters())
    assert speed.step_bytes(config, 2, cache, scorers) == moved + own + size["bookkeeping"]


def test_full_shapes():
    """The published sizes: 4.02 and 8.19 billion parameters, 147,456 bytes of keys and values a token in bf16."""
    for name, billions in (("qwen3-4b", 4.02), ("qwen3-8b", 8.19)):
        config = speed.shape_of(name)
        with torch.device("meta"):
            assert sum(p.numel() for p in Transformer(config).parameters()) / 1e9 == pytest.approx(billions, abs=0.005)
        assert speed.token_bytes(config, 2) == 147456


def test_dense_step_is_the_models_forward():
    model = tiny_transformer(0).to(F64)
    idx = torch.randint(264, (2, 40), generator=torch.Generator().manual_seed(0))
    cache = speed.DenseCache(model.config, 40, 2, "cpu", F64)
    cache.fill_as_if(40, torch.Generator().manual_seed(1))  # what lies there must not be seen
    cache.prefill(model, idx[:, :39])
    advance = decode.make_step(model, cache, True)
    with torch.no_grad():
        whole = model.unembed(model(idx, causal_attend))
        before = cache.prefill(model, idx[:, :39])
    torch.testing.assert_close(before, whole[:, 38], rtol=0, atol=1e-10)
    logits = advance(idx[:, 39])
    torch.testing.assert_close(logits, whole[:, 39], rtol=0, atol=1e-10)
    assert cache.input_pos.tolist() == [40, 40]
    cache.input_pos.fill_(39)  # as before each timed step
    torch.testing.assert_close(advance(idx[:, 39]), logits, rtol=0, atol=1e-10)
    slots = decode.force(model, idx.tolist(), on_logits=lambda t, x: before.copy_(x))
    torch.testing.assert_close(before, logits, rtol=0, atol=1e-10)  # decode.py's own dense policy
    assert slots.peak_entries() == 40


@pytest.mark.parametrize("how", ["flex", "heads"])
@pytest.mark.parametrize("batch", [1, 2])
def test_ragged_attention_is_each_heads_own(how, batch):
    config = tiny_transformer(0, n_kv_head=2, n_head=6).config
    lengths = torch.tensor([[130, 7], [20, 300]])
    cache = speed.RaggedCache(config, lengths, batch, "cpu", F64, how)
    cache.fill_as_if(300, torch.Generator().manual_seed(0))
    generator, begin = torch.Generator().manual_seed(1), 0
    for layer in range(2):
        q, k, v = (torch.randn(batch, h, 1, 8, dtype=F64, generator=generator) for h in (6, 2, 2))
        out = cache.attend(layer, q, k, v)
        assert (cache.layers[layer].mask is not None) == (how == "flex")
        for head in range(2):
            n = lengths[layer, head]
            keys, values = (flat[:, begin:begin + n].clone() for flat in (cache.flat_k, cache.flat_v))
            assert torch.equal(keys[:, -1], k[:, head, 0]) and torch.equal(values[:, -1], v[:, head, 0])
            mine = q[:, 3 * head:3 * head + 3, 0]  # (B, G, D)
            probs = (mine @ keys.mT / math.sqrt(8)).softmax(-1)
            torch.testing.assert_close(out[:, 3 * head:3 * head + 3, 0], probs @ values, rtol=0, atol=1e-12)
            begin += n
    assert cache.nbytes()["cache"] == batch * 457 * 8 * 8 * 2


@pytest.mark.parametrize("T, budget, dense", [(16384, 2048, 29), (131072, 2048, 3), (65536, 4096, 16), (2100, 2048, 29),
                                              (8192, 512, 9)])
def test_skew_of_ragged_lengths(T, budget, dense):
    lengths = speed.ragged_lengths(36, 8, T, budget, 260)
    assert lengths.shape == (36, 8) and lengths.sum() == 288 * budget
    assert lengths.min() >= 260 and lengths.max() <= T
    n_dense = (lengths == T).sum().item()
    assert n_dense == dense if T > 4 * budget else n_dense >= dense  # near the budget most heads must be dense
    if T > 4 * budget:
        assert lengths.float().median() < budget  # most lie below the mean
    assert torch.equal(lengths, speed.ragged_lengths(36, 8, T, budget, 260))


def test_ragged_lengths_within_the_budget():
    assert (speed.ragged_lengths(2, 2, 100, 128, 36) == 100).all()


def check_slots(cache, T):
    """What holds in any slot cache after T - 1 tokens."""
    spec, seen = cache.spec, T - 1
    assert cache.input_pos.tolist() == [seen] * len(cache.input_pos)
    for layer in cache.layers:
        for position, priority, ring in zip(*(x.flatten(0, 1) for x in (layer.position, layer.priority, layer.ring))):
            held = [p for p in position.tolist() if p >= 0]
            assert len(held) == len(set(held)) == min(seen, spec.n_slots) and max(held) == seen - 1
            safe = (position >= 0) & ((position < spec.n_sink) | (position >= seen - spec.window))
            assert torch.equal(priority == math.inf, safe)
            assert torch.equal(priority == -math.inf, position < 0)
            for t in range(max(0, seen - spec.window), seen):
                assert position[ring[t % spec.window]] == t
            assert set(range(min(seen, spec.n_sink))) <= set(held)


@pytest.mark.parametrize("policy", ["streaming", "random", "kvpop"])
@pytest.mark.parametrize("T", [2, 5, 14, 31, 32, 33, 34, 200])
def test_made_up_state_is_one_that_decoding_leaves(policy, T):
    """The same conditions hold for a cache that decoded T - 1 tokens and for one that was filled, and for both after
    three more steps."""
    model, window = tiny_transformer(1), 8
    scorers, spec = tiny_scorers(policy, window=window), CacheSpec(2, window, 32 + 5 * (policy == "kvpop"),
                                                                   5 * (policy == "kvpop"))
    idx = torch.randint(264, (2, T + 2), generator=torch.Generator().manual_seed(T))
    real = decode.force(model, idx[:, :T - 1].tolist(), spec, scorers, on_logits=lambda t, x: None)
    made = decode.KVCache(model.config, spec, 2, scorers)
    speed.fill(made, T, "cpu")
    for cache in (real, made):
        check_slots(cache, T)
        for i in range(3):
            logits = decode.step(model, idx[:, T - 1 + i], cache)
            assert logits.isfinite().all()
            check_slots(cache, T + 1 + i)
    speed.fill(made, T, "cpu")
    check_slots(made, T)  # used again for the next length
    assert made.layers[0].k_cache[:, :, :min(T - 1, 32)].std() > 0.5


def test_latency_integrates_step_times():
    assert speed.latency([(10, 2.0), (30, 2.0)]) == [pytest.approx(0.02), pytest.approx(0.06)]
    assert speed.latency([(10, 1.0), (20, 3.0)])[1] == pytest.approx(0.01 + 10 * 2e-3)


ROW = {"policy", "shape", "batch", "budget", "T", "ms_per_token", "tokens_per_s", "bytes_per_step",
       "copy_bandwidth_share", "peak_gib", "cache_gib", "prefill_ms", "prefill_peak_gib", "kernels_per_layer",
       "kernels_ms", "kernel", "others_ms", "graph", "compiled", "reduced", "oom"}


def test_reduced_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "assets").mkdir()
    steps, whole = [], decode.step
    monkeypatch.setattr(decode, "step", lambda model, ids, cache: steps.append(cache) or whole(model, ids, cache))
    timed = speed.median_ms
    monkeypatch.setattr(speed, "median_ms", lambda *args, **how: timed(*args, **{**how, "repeats": 3}))
    command = ["decode", "--shape", "traces", "--lengths", "96", "300", "--policies"]
    assert bench.main([*command, "dense", "kvpop"]) == 0
    assert bench.main([*command, *speed.POLICIES]) == 0
    content = json.loads((tmp_path / "assets/results/decode-traces.json").read_text())
    rows, cost = content["rows"], content["cost_card"]
    assert (tmp_path / "assets/decode-traces.png").is_file()
    assert sorted((r["policy"], r["batch"], r["T"]) for r in rows) == sorted(
        (p, b, T) for p in speed.POLICIES for b in (1, 2) for T in (96, 128, 300))
    said = capsys.readouterr().out
    assert said.count("kvpop, batch 1") == 1 and f"{cost['kv_bytes_per_token']} bytes" in said
    assert {type(cache) for cache in steps} == {decode.KVCache, speed.DenseCache, speed.RaggedCache}  # one step for all
    for r in rows:
        assert set(r) == ROW and r["oom"] == [] and r["reduced"] and not r["graph"] and r["shape"] == "traces"
        assert r["ms_per_token"] > 0 and r["tokens_per_s"] == pytest.approx(1e3 * r["batch"] / r["ms_per_token"])
        share = r["bytes_per_step"] / (r["ms_per_token"] / 1e3) / cost["copy_bandwidth"]
        assert r["copy_bandwidth_share"] == pytest.approx(share)
        assert r["peak_gib"] is None and r["kernels_per_layer"] is None is r["kernels_ms"]  # there is no GPU
        assert (r["budget"] is None) == r["policy"].startswith("dense")
        asked = r["batch"] == 1 and r["policy"] not in ("dense-slots", "dms-ragged")
        assert (r["prefill_ms"] is not None) == asked
        if r["policy"] == "dense":
            entries = r["T"]
        elif r["policy"] == "dms-ragged":
            entries = min(r["T"], 128)
            assert r["kernel"] in ("flex", "heads") and len(r["others_ms"]) == 1
            assert all(ms > r["ms_per_token"] for ms in r["others_ms"].values())  # both ran
        else:
            continue
        tokens = r["batch"] * entries * cost["kv_bytes_per_token"]
        assert r["bytes_per_step"] == cost["weight_bytes"] + tokens and r["cache_gib"] == tokens / 2**30
    constant = {(r["policy"], r["batch"]): set() for r in rows if r["policy"] in speed.CONSTANT}
    for r in rows:
        if r["policy"] in speed.CONSTANT:
            constant[r["policy"], r["batch"]].add((r["bytes_per_step"], r["cache_gib"]))
    assert all(len(sizes) == 1 for sizes in constant.values())
    assert bench.main([*command, "dense", "--n-sink", "1"]) == 2  # other settings do not overwrite
    assert bench.main(["decode", "--lengths", "1"]) == 2
    assert "real_run" not in content  # nobody asked
    assert bench.main(["decode", "--shape", "traces", "--lengths", "128", "--prefill", "0", "--policies", "kvpop",
                       "--check", "64", "--out", "checked"]) == 0
    real = json.loads((tmp_path / "assets/results/checked.json").read_text())["real_run"]
    assert (real["policy"], real["T"], real["batch"]) == ("kvpop", 64, 1)
    assert real["seconds"] > 0 and real["ratio"] == pytest.approx(real["seconds"] / real["integrated_seconds"])


def test_what_is_timed_decides_together(monkeypatch):
    """As decode.py does; and a cache filled by hand is due what it would find."""
    args, caches, make_step = bench.parse_args(["decode", "--shape", "traces"]), [], speed.make_step
    args.window, args.prefill, args.compile = 16, 0, False
    monkeypatch.setattr(speed, "make_step", lambda model, cache, graph: (caches.append(cache),
                                                                         make_step(model, cache, graph))[1])
    model = speed.random_model(speed.shape_of("traces", True), "cpu", torch.float32)
    for policy in ("kvpop", "kvpop-mlp", "streaming"):
        with torch.no_grad():
            speed.measure(policy, model, 1, 100, [50], args, 1e9, "cpu", torch.float32)
        whole = caches[-1].whole
        assert whole is not None
        speed.fill(caches[-1], 150, "cpu")
        due = {name: z.clone() for name, z in whole.due.items()}
        caches[-1].prepare()
        assert all(torch.equal(z, due[name]) for name, z in whole.due.items())
        assert int(whole.due["slot" if policy == "kvpop" else "victim"].max()) > 0  # not the zeros of an empty one


def test_out_of_memory_leaves_a_row(monkeypatch):
    args = bench.parse_args(["decode", "--shape", "traces", "--batches", "1"])
    args.window, args.prefill = 16, 0
    model, whole = speed.random_model(speed.shape_of("traces", True), "cpu", torch.float32), speed.make_cache

    def make_cache(policy, config, budget, T, *rest):
        if T > 100:
            raise torch.OutOfMemoryError
        return whole(policy, config, budget, T, *rest)
    monkeypatch.setattr(speed, "make_cache", make_cache)
    with torch.no_grad():
        rows = speed.measure("dense", model, 1, None, [64, 128], args, 1e9, "cpu", torch.float32)
    assert [r["oom"] for r in rows] == [[], ["step"]]
    assert rows[0]["ms_per_token"] > 0 and rows[1]["ms_per_token"] is None and rows[1]["tokens_per_s"] is None


@pytest.mark.parametrize("policy, compiles", [("dense", 1), ("kvpop", 2), ("dms-ragged", 1)])
def test_compiled_blocks_serve_all_layers(policy, compiles, monkeypatch):
    """--compile with a backend that runs what was traced: measured without a variant failing, one trace a shape of the
    cache and not one a layer."""
    from torch._dynamo.testing import CompileCounterWithBackend
    counter = CompileCounterWithBackend("eager")
    monkeypatch.setattr(decode, "one_block_step", torch.compile(decode.block_step, backend=counter, fullgraph=True,
                                                                dynamic=False))
    monkeypatch.setattr(decode, "effective_priority", lambda score, log_gamma, at: score - at * log_gamma)
    args = bench.parse_args(["decode", "--shape", "traces", "--compile"])
    args.window, args.prefill = 16, 0
    model = speed.random_model(speed.shape_of("traces", True), "cpu", torch.float32)
    lengths = [50, 200] if policy == "kvpop" else [200]  # kvpop: before and after its slots are filled
    with torch.no_grad():
        rows = speed.measure(policy, model, 1, None if policy == "dense" else 100, lengths, args, 1e9, "cpu",
                             torch.float32)
    assert all(r["ms_per_token"] > 0 and r["compiled"] and r["others_ms"] == {} for r in rows)
    assert counter.frame_count == compiles and model.config.n_layer == 2
