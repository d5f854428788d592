"""generate: each row follows the masked model and stops by itself, seeds, the top-p and top-k filters against brute
force, requests that are refused before any work, and what Ctrl-C leaves.
"""
import math

import pytest
import torch

import decode
from data.sampling import most_likely, sample, sampling_probs
from decode import generate
from model import causal_attend
from test_decode import N, WINDOW, make_cache, make_model, make_scorers, make_spec, masked, tokens


def generation(model, prompts, policy="kvpop", batch_cache=None, **options):
    return generate(model, prompts, make_spec(policy), make_scorers(policy, model), cache=batch_cache, **options)


def test_generate_follows_the_masked_model_and_each_row_is_independent():
    model = make_model()
    prompts = [tokens(n, seed=n)[0].tolist() for n in (1, WINDOW, N + 3)]
    together = generation(model, prompts, max_new_tokens=30, stop_ids=[])
    for prompt, out in zip(prompts, together.tokens):
        assert generation(model, [prompt], max_new_tokens=30, stop_ids=[]).tokens == [out]
        logits, _, _ = masked(model, make_scorers("kvpop", model), make_spec("kvpop"), torch.tensor([prompt + out]))
        assert logits[0, len(prompt) - 1:-1].argmax(-1).tolist() == out
    assert together.stop == ["max_new_tokens"] * 3 and together.steps == 29
    assert together.seen == [len(p) + 29 for p in prompts]


def test_rows_stop_by_themselves():
    model = make_model()
    prompts = [tokens(n, seed=n)[0].tolist() for n in (3, 8, 20)]
    free = generation(model, prompts, max_new_tokens=40, stop_ids=[])
    stop = next(t for t in free.tokens[1][6:] if sum(t in out for out in free.tokens) == 1)  # only row 1 says it
    got, told = generation(model, prompts, max_new_tokens=40, stop_ids=[stop]), []
    for row, out in enumerate(free.tokens):
        cut = out.index(stop) if stop in out else None
        assert got.tokens[row] == out[:cut]
        assert got.stop[row] == ("max_new_tokens" if cut is None else "end token")
        assert got.seen[row] == len(prompts[row]) + (39 if cut is None else cut)
    assert "max_new_tokens" in got.stop and "end token" in got.stop
    generation(model, prompts, max_new_tokens=40, stop_ids=[stop], on_token=lambda row, t: told.append((row, t)))
    assert [[t for r, t in told if r == row] for row in range(3)] == got.tokens
    limited = generation(model, prompts, max_seq_len=25, stop_ids=[])
    assert limited.stop == ["max_seq_len"] * 3 and [len(t) for t in limited.tokens] == [22, 17, 5]
    assert limited.tokens[2] == free.tokens[2][:5]


def test_dense_by_default_and_generations_do_not_leak():
    model = make_model()
    long, short = [tokens(n, seed=n)[0].tolist() for n in (40, 4)]
    fresh = generation(model, [short], max_new_tokens=20, stop_ids=[])
    cache = make_cache("kvpop", model)
    for prompt in (long, short, long, short):
        again = generation(model, [prompt], batch_cache=cache, max_new_tokens=20, stop_ids=[])
    assert again.tokens == fresh.tokens
    for a, b in zip(cache.layers, fresh.cache.layers):
        for name in ("k_cache", "v_cache", "priority", "position", "ring"):
            assert torch.equal(getattr(a, name), getattr(b, name)), name
        assert all(torch.equal(a.state[name], b.state[name]) for name in b.state)
    dense = generate(model, [short], max_new_tokens=20, stop_ids=[])
    idx = list(short)
    for _ in range(20):
        with torch.no_grad():
            idx.append(int(model.unembed(model(torch.tensor([idx]), causal_attend))[0, -1].argmax()))
    assert dense.tokens == [idx[4:]]


def test_seeds():
    model = make_model()
    prompts = [tokens(6, seed=n)[0].tolist() for n in range(3)]
    options = dict(max_new_tokens=25, stop_ids=[], temperature=1.3, top_p=0.95, top_k=20)
    first = generation(model, prompts, seed=5, **options).tokens
    assert generation(model, prompts, seed=5, **options).tokens == first
    assert generation(model, prompts, seed=6, **options).tokens != first
    for row in range(3):  # row b draws with seed + b, whoever else is there
        assert generation(model, [prompts[row]], seed=5 + row, **options).tokens == [first[row]]
    assert generation(model, prompts[::-1], seed=[7, 6, 5], **options).tokens == first[::-1]
    greedy = generation(model, prompts, max_new_tokens=25, stop_ids=[]).tokens
    assert greedy != first and generation(model, prompts, seed=9, max_new_tokens=25, stop_ids=[]).tokens == greedy
    assert generation(model, prompts, **{**options, "top_k": 1}).tokens == greedy
    assert generation(model, prompts, **{**options, "top_p": 1e-9}).tokens == greedy


def brute_force_filter(logits, temperature, top_p, top_k):
    """One row, in plain Python: {token: probability}."""
    weights = {i: math.exp(x / temperature) for i, x in enumerate(logits)}
    order = sorted(weights, key=lambda i: (-weights[i], i))
    if top_k:
        order = order[:top_k]
    total = sum(weights[i] for i in order)
    kept, mass = [], 0.0
    for i in order:
        if kept and top_p < 1 and mass >= top_p * total:
            break
        kept.append(i)
        mass += weights[i]
    return {i: weights[i] / mass for i in kept}


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("top_p", [0.1, 0.7, 0.95, 1.0])
@pytest.mark.parametrize("top_k", [0, 1, 5, 100])
def test_top_p_and_top_k_against_brute_force(temperature, top_p, top_k):
    logits = torch.randn(6, 30, generator=torch.Generator().manual_seed(top_k), dtype=torch.float64) * 2
    logits[1, :10] = 1.5  # ties
    probs, ids = sampling_probs(logits, temperature, top_p, top_k)
    noise = (torch.arange(2000, dtype=torch.float64) + 0.5) / 2000  # even, so that shares are exact to 1 / 2000
    ends = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    for row in range(6):
        wanted = brute_force_filter(logits[row].tolist(), temperature, top_p, top_k)
        got = {i: p for i, p in zip(ids[row].tolist(), probs[row].tolist()) if p > 0}
        assert got.keys() == wanted.keys()
        assert all(abs(got[i] - wanted[i]) < 1e-12 for i in got)
        assert set(sample(logits[row].expand(2, -1), ends, temperature, top_p, top_k).tolist()) <= wanted.keys()
        share = sample(logits[row].expand(2000, -1), noise, temperature, top_p, top_k).bincount(minlength=30) / 2000
        assert all(abs(share[i].item() - wanted.get(i, 0.0)) <= 1.01 / 2000 for i in range(30))


def test_a_tiny_temperature_is_greedy_and_not_nan():
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    noise = torch.full((4,), 0.999, dtype=torch.float64)
    assert torch.equal(sample(logits, noise, 1e-320), logits.argmax(-1))


@pytest.mark.parametrize("k", [1, 3, 6])
def test_most_likely_takes_lower_ids_among_equals(k):
    logits = torch.tensor([[2.0, 5.0, 5.0, 1.0, 5.0, 9.0, 2.0], [0.0] * 7]).bfloat16()
    assert most_likely(logits, k).tolist() == [sorted([5, 1, 2, 4, 0, 6, 3][:k]), list(range(k))]


@pytest.mark.parametrize("options, words", [
    (dict(prompts=[[1], []]), "empty"), (dict(prompts=[]), "empty"),
    (dict(max_new_tokens=0), "at least 1"), (dict(temperature=-1.0), "temperature"), (dict(top_p=0.0), "top_p"),
    (dict(temperature=math.nan), "temperature"), (dict(top_k=-1), "top_k"),
    (dict(max_new_tokens=60, max_seq_len=64), "a prompt of 5 tokens and 60 new ones need 65 positions, more than "
                                              "max_seq_len 64")])
def test_bad_requests_are_refused_before_work(options, words, monkeypatch):
    model = make_model()
    monkeypatch.setattr(decode, "prefill", lambda *a: pytest.fail("the model ran"))
    with pytest.raises(ValueError, match=words):
        generation(model, **{"prompts": [[1, 2, 3, 4, 5]], **options})


def test_ctrl_c_carries_the_result_so_far():
    model, told = make_model(), []

    def press(row, token):
        told.append(token)
        if len(told) == 7:
            raise KeyboardInterrupt

    with pytest.raises(decode.Interrupted) as stopped:
        generation(model, [[1, 2, 3]], max_new_tokens=30, stop_ids=[], on_token=press)
    result = stopped.value.args[0]
    assert result.tokens == [told] and result.stop == ["interrupted"] and result.seen == [3 + 6]


@pytest.mark.gpu
def test_generation_in_bf16_on_a_gpu():
    model = make_model(torch.float32).to("cuda", torch.bfloat16)
    scorers = make_scorers("kvpop", make_model(torch.float32)).cuda()
    prompts = [tokens(n, seed=n)[0].tolist() for n in (1, 60, 150)]
    options = dict(max_new_tokens=40, stop_ids=[], temperature=1.0)
    out, again = [generate(model, prompts, make_spec("kvpop"), scorers, **options) for _ in range(2)]
    assert [len(t) for t in out.tokens] == [40] * 3 and out.tokens == again.tokens
    assert out.cache.peak_entries() == N and out.cache.layers[0].k_cache.dtype == torch.bfloat16
    assert all(t.isfinite().all() and t.dtype == torch.float32 for t in out.cache.layers[0].state.values())
