"""data/together.py: what all layers decide at once is what each of them decides by itself.

The plain cache, layer by layer, is the specification; tests/test_decode*.py hold it against the masks of training.
"""
import copy

import pytest
import torch

import decode
from data.together import fuse_scorers
from decode import KVCache, generate, prefill, step
from test_decode_step import N, make_model, make_scorers, make_spec, tokens

TOGETHER = ["streaming", "knorm", "kvpop-mlp", "kvpop", "kvpop-nodelay", "dms-cap", "position"]


def pair(policy, batch, dtype=torch.float64, **spec):
    """A model, and a cache with scorers of its own beside one whose scorers are laid together."""
    model = make_model(dtype)
    spec = make_spec("kvpop" if policy == "kvpop-nodelay" else policy, **spec)
    scorers = make_scorers(policy, model).to(dtype)
    both = scorers, fuse_scorers(copy.deepcopy(scorers))
    caches = [KVCache(model.config, spec, batch, s, dtype=dtype) for s in both]
    assert caches[0].whole is None and caches[1].whole is not None
    return model, caches


def assert_equal(plain, together):
    """Entries exactly, numbers to what another order of a sum does in fp64."""
    for a, b in zip(plain.layers, together.layers, strict=True):
        for name in ("position", "ring"):
            assert torch.equal(getattr(a, name), getattr(b, name)), name
        for x, y in [(a.priority, b.priority), (a.k_cache, b.k_cache), (a.v_cache, b.v_cache),
                     *((a.state[name], b.state[name]) for name in a.state)]:
            torch.testing.assert_close(x, y, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("policy", TOGETHER)
def test_layers_together_are_layers_one_by_one(policy):
    """Token by token past every fill level, then after a reset from prompts of unequal lengths, shorter and longer than
    the cache: logits, entries and states after every step."""
    model, (plain, together) = pair(policy, 3)
    idx, lengths = tokens(N + 40, 3), torch.tensor([7, N + 9, 1])
    for prompts in (None, tokens(N + 9, 3)):
        for cache in (plain, together):
            cache.reset()
        if prompts is not None:
            a, b = (prefill(model, prompts, lengths, cache) for cache in (plain, together))
            torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-11)
            assert_equal(plain, together)
        for q in range(N + 40):
            a, b = (step(model, idx[:, q], cache) for cache in (plain, together))
            torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-11)
            assert_equal(plain, together)


@pytest.mark.parametrize("policy", ["streaming", "kvpop"])
def test_what_is_due_is_found_anew_after_a_prefill(policy):
    """What the next step was told belongs to the cache as it was: without `prepare` the step after a prefill goes
    wrong, so the test above can fail."""
    model, (plain, together) = pair(policy, 1)
    prompt = tokens(N + 9)
    prefill(model, prompt, torch.tensor([N + 9]), plain)
    together.prepare = lambda: None
    prefill(model, prompt, torch.tensor([N + 9]), together)
    for cache in (plain, together):
        step(model, prompt[:, 0], cache)
    assert any(plain.kept_positions(i) != together.kept_positions(i) for i in range(len(plain.layers)))


def test_no_memory_is_added_and_none_is_left_behind():
    """A layer's weights and slots are parts of the whole's; the names and numbers of the weights stay."""
    model = make_model(torch.float32)
    scorers = make_scorers("kvpop", model)
    before = {name: p.clone() for name, p in scorers.state_dict().items()}
    fused = fuse_scorers(scorers)
    assert all(torch.equal(p, before[name]) for name, p in scorers.state_dict().items())
    assert list(fused.state_dict()) == list(before)
    for i, s in enumerate(scorers):
        for name, p in s.named_parameters():
            whole = getattr(fused.one, name)
            assert p.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
            assert torch.equal(whole.unflatten(0, (len(scorers), -1))[i], p)
    cache = KVCache(model.config, make_spec("kvpop"), 2, fused)
    plain = KVCache(model.config, make_spec("kvpop"), 2, make_scorers("kvpop", model))
    assert cache.nbytes() == plain.nbytes()
    for layer in cache.layers:
        for name in ("k_cache", "v_cache", "priority", "position", "ring"):
            whole = getattr(cache.whole, name)
            assert getattr(layer, name).untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    with torch.no_grad():
        scorers[1].w_score.add_(1.0)
    assert torch.equal(fused.one.w_score[-scorers[1].n_kv_head:], scorers[1].w_score)


def test_a_reset_cache_is_a_new_one():
    """What was due in the old text is not in the new one, also without a prefill in between."""
    model, (plain, together) = pair("kvpop", 2)
    for q in range(N + 9):
        step(model, tokens(N + 9, 2)[:, q], together)
    together.reset()
    idx = tokens(N + 40, 2).flip(1)
    for q in range(N + 40):
        a, b = (step(model, idx[:, q], cache) for cache in (plain, together))
        torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-11)
        assert_equal(plain, together)


def test_buffers_are_shared_too():
    """The products of a layer read what the whole reads, fused weights and bf16 terms; many rows of bf16 then keep what
    they keep layer by layer."""
    model, spec = make_model(torch.bfloat16), make_spec("kvpop")
    apart, scorers = make_scorers("kvpop", model), make_scorers("kvpop", model)
    for s in apart:
        s.fuse(narrow=True)
    fused = fuse_scorers(scorers, 10, torch.bfloat16)
    few = fuse_scorers(make_scorers("kvpop", model), 8, torch.bfloat16)
    assert few.one.terms is None and few[0].terms is None
    for s in fused:
        for name in ("fused", "terms"):
            mine, whole = (getattr(x, name).untyped_storage().data_ptr() for x in (s, fused.one))
            assert mine == whole
    plain, together = (KVCache(model.config, spec, 10, s, dtype=torch.bfloat16) for s in (apart, fused))
    idx = tokens(N + 20, 10)
    for q in range(N + 20):
        assert torch.equal(step(model, idx[:, q], plain), step(model, idx[:, q], together))
    assert [plain.kept_positions(i) for i in range(2)] == [together.kept_positions(i) for i in range(2)]


@pytest.mark.parametrize("change", [copy.deepcopy, lambda fused: fused.double()], ids=["copied", "cast"])
def test_weights_that_came_apart_are_refused(change):
    model = make_model(torch.float32)
    fused = change(fuse_scorers(make_scorers("kvpop", model)))
    with pytest.raises(ValueError, match="call it again"):
        KVCache(model.config, make_spec("kvpop"), 1, fused)
    again = fuse_scorers(fused)
    assert KVCache(model.config, make_spec("kvpop"), 1, again).whole is not None


def test_policies_that_stay_apart():
    """Random numbers by layer, whole caches ranked anew, and a decision that waits for a token not there yet."""
    model = make_model(torch.float32)
    for policy in ("random", "random-prompt", "keydiff", "h2o"):
        scorers = make_scorers(policy, model)
        assert fuse_scorers(scorers) is scorers
    assert fuse_scorers(None) is None
    scorers = decode.make_scorers("dms-cap", n_layer=2, n_kv_head=2, head_dim=8, window=1)
    assert fuse_scorers(scorers) is scorers


def test_generated_texts_are_the_same():
    model = make_model(torch.float64)
    scorers, spec = make_scorers("kvpop", model).double(), make_spec("kvpop")
    prompts = [tokens(n)[0].tolist() for n in (3, N + 5, 1)]

    def run(s):
        return generate(model, prompts, spec, s, max_new_tokens=30, temperature=0.8, seed=3, stop_ids=[])
    plain, together = run(scorers), run(fuse_scorers(copy.deepcopy(scorers)))
    assert plain.tokens == together.tokens and plain.seen == together.seen
    assert [plain.cache.kept_positions(i) for i in range(2)] == [together.cache.kept_positions(i) for i in range(2)]


@pytest.mark.parametrize("policy", ["streaming", "kvpop"])
def test_one_compile_for_all_layers_and_one_between_steps(policy, monkeypatch):
    from torch._dynamo.testing import CompileCounterWithBackend
    counters = [CompileCounterWithBackend("eager") for _ in range(2)]
    for name, function, counter in (("compiled_block_step", decode.block_step, counters[0]),
                                    ("compiled_between_steps", decode.between_steps, counters[1])):
        monkeypatch.setattr(decode, name, torch.compile(function, backend=counter, fullgraph=True, dynamic=False))
    decay = lambda score, log_gamma, at: score if log_gamma is None else score - at * log_gamma  # noqa: E731
    monkeypatch.setattr(decode, "effective_priority", decay)  # its NaN check is a branch, on a CPU alone
    torch._dynamo.reset()
    model, (plain, together) = pair(policy, 2, torch.float32)
    together.compiled, idx = True, tokens(N + 6, 2)
    for q in range(N + 6):
        a, b = (step(model, idx[:, q], cache) for cache in (plain, together))
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
        assert [c.frame_count for c in counters] == [1 + (q >= N - 1), 1] and model.config.n_layer > 1
    assert [plain.kept_positions(i) for i in range(2)] == [together.kept_positions(i) for i in range(2)]
