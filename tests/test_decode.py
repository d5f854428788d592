"""The static cache against the training mask: three ways to reach a state must keep the same positions, give the same
logits. Everything in fp64 on tiny random models, so that "the same" means the same. What generate makes of it:
test_decode_generate.py; a step that is compiled or captured: test_decode_step.py.
"""
import itertools
import math

import pytest
import torch

import decode
from decode import KVCache, choose_victim, dense_spec, prefill, step
from flex_masks import CacheSpec, attention, effective_priority, keep_everything, plan
from model import ModelConfig, Transformer, causal_attend
from scorer import make_scorer, state_entries
from tiny import tiny_transformer

WINDOW, N_SINK, N_SELECT = 5, 2, 9
N = N_SINK + WINDOW + N_SELECT
TRAINING_FREE = ("streaming", "random", "knorm")
POLICIES = ("kvpop", "kvpop-mlp") + TRAINING_FREE
AWKWARD = (1, 2, WINDOW - 1, WINDOW, WINDOW + 1, N - 1, N, N + 1, 3 * N)
V = 200


def make_model(dtype=torch.float64, n_layer=2, seed=0, qk_norm=True):
    torch.manual_seed(seed)
    config = ModelConfig(vocab_size=V, n_layer=n_layer, n_embd=32, n_head=4, n_kv_head=2, head_dim=8,
                         intermediate_size=48, max_seq_len=4096, qk_norm=qk_norm,
                         model_type="qwen3" if qk_norm else "llama", eos_token_ids=[V - 1])
    model = Transformer(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.uniform_(0.3, 2.0)  # otherwise every key of a q/k-normed model has the same length
            else:
                p.normal_(std=0.25)  # far from the near-uniform attention of the usual init
    return model.to(dtype).eval()


def make_scorers(policy, model, seed=3, window=WINDOW):
    config = model.config
    scorers = torch.nn.ModuleList(make_scorer(policy, n_kv_head=config.n_kv_head, head_dim=config.head_dim,
                                              window=window, layer=i, seed=seed) for i in range(config.n_layer))
    torch.manual_seed(seed)
    for name, p in scorers.named_parameters():
        with torch.no_grad():
            p.add_(torch.randn_like(p) * (0.5 if "gate" in name else 1.0))  # trained scorers have no equal scores
    return scorers.to(model.model.embed_tokens.weight.dtype)


def make_spec(policy, n_select=N_SELECT, n_sink=N_SINK, window=WINDOW):
    entries = state_entries(policy, 8)
    return CacheSpec(n_sink, window, n_sink + window + n_select + entries, entries)


def make_cache(policy, model, batch=1, scorers=None, spec=None):
    scorers = make_scorers(policy, model) if scorers is None else scorers
    return KVCache(model.config, spec or make_spec(policy), batch, scorers, dtype=model.model.embed_tokens.weight.dtype)


def tokens(T, B=1, seed=0):
    """No token twice in a row: KNorm gives a token the same score at all positions in layer 0, up to RoPE's rounding,
    and then rounding would decide and not the code under test. Exact ties have tests of their own."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(V - 1, generator=generator)[:T] for _ in range(B)])


@torch.no_grad()
def masked(model, scorers, spec, idx):
    """The reference: one pass over idx (B, T) under the training mask -> logits, and by layer evict_at and priority."""
    plans, priorities = [], []

    def attend(layer, q, k, v):
        priority = effective_priority(scorers[layer](k, v), scorers[layer].log_gamma())
        priorities.append(priority)
        plans.append(plan(priority, spec))
        return attention(q, k, v, plans[-1])[0]

    return model.unembed(model(idx, attend)), plans, priorities


def visible_at(evict_at, q):
    """Positions that query q sees under the mask: nested lists as kept_positions gives them."""
    t = torch.arange(q + 1)
    return [[t[head[:q + 1] > q].tolist() for head in row] for row in evict_at]


def assert_state(cache, plans, q, rows=None):
    for layer, evict_at in enumerate(plans):
        kept = cache.kept_positions(layer)
        kept = kept if rows is None else [kept[b] for b in rows]
        assert kept == visible_at(evict_at, q), f"layer {layer}, query {q}"


def assert_priorities(cache, priorities, q):
    """The stored priorities are the mask's, and +inf exactly on sinks and window (the cache must be full)."""
    for slots, priority in zip(cache.layers, priorities):
        position = slots.position.long()
        safe = (position < N_SINK) | (position > q - WINDOW)
        close(slots.priority, priority.double().gather(-1, position).masked_fill(safe, math.inf), 1e-12)


def close(a, b, tolerance=1e-9):
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


# ---------------------------------------------------------------------------------------------------------------------
# mask = prefill + steps = token by token

@pytest.mark.parametrize("policy", POLICIES)
def test_masked_pass_equals_prefill_and_steps_equals_token_by_token(policy):
    model, T = make_model(), 3 * N + 14
    scorers, spec, idx = make_scorers(policy, model), make_spec(policy), tokens(T)
    logits, plans, priorities = masked(model, scorers, spec, idx)
    evicted = sum((p < T).sum().item() for p in plans)
    assert evicted > 2 * 2 * (T - N) - 20  # the test exercises eviction
    if policy != "streaming":  # and heads disagree, so a mix-up of heads or layers would show
        assert len({str(visible_at(p, T - 1)[0][h]) for p in plans for h in range(2)}) == 4
    cache = make_cache(policy, model, scorers=scorers)
    for q in range(T):  # from nothing
        close(step(model, idx[:, q], cache), logits[:, q])
        assert_state(cache, plans, q)
        if q < N:  # slots are filled in order
            assert all((slots.position[..., :q + 1] == torch.arange(q + 1)).all() for slots in cache.layers)
    assert_priorities(cache, priorities, T - 1)
    for length in AWKWARD:
        close(prefill(model, idx[:, :length], torch.tensor([length]), cache), logits[:, length - 1])
        assert_state(cache, plans, length - 1)
        for q in range(length, T if length <= N else length + WINDOW + 3):
            close(step(model, idx[:, q], cache), logits[:, q])
            assert_state(cache, plans, q)
        assert_priorities(cache, priorities, q)


@pytest.mark.parametrize("n_sink, window, n_select", [(0, 5, 6), (2, 1, 6), (0, 1, 1), (0, 1, 0), (3, 4, 0), (4, 1, 1)])
@pytest.mark.parametrize("policy", ["kvpop", "random"])
def test_odd_specs(policy, n_sink, window, n_select):
    model, T = make_model(), 34
    spec, scorers = make_spec(policy, n_select, n_sink, window), make_scorers(policy, model, window=window)
    idx = tokens(T)
    logits, plans, _ = masked(model, scorers, spec, idx)
    for length in (1, window, n_sink + window, spec.n_slots, spec.n_slots + 7):
        cache = make_cache(policy, model, scorers=scorers, spec=spec)
        close(prefill(model, idx[:, :length], torch.tensor([length]), cache), logits[:, length - 1])
        assert_state(cache, plans, length - 1)
        for q in range(length, T):
            close(step(model, idx[:, q], cache), logits[:, q])
            assert_state(cache, plans, q)


@pytest.mark.parametrize("policy", ["kvpop", "knorm"])
def test_a_batch_of_unequal_prompts_equals_each_alone(policy):
    model, more = make_model(), 12
    scorers = make_scorers(policy, model)
    idx = tokens(max(AWKWARD) + more, len(AWKWARD), seed=1)
    lengths = torch.tensor(AWKWARD)
    cache = make_cache(policy, model, len(AWKWARD), scorers)
    for pad in ("next tokens", "zeros", "out of range"):
        padded = idx[:, :max(AWKWARD)].clone()
        pads = torch.arange(padded.shape[1]) >= lengths[:, None]
        if pad != "next tokens":
            padded[pads] = 0 if pad == "zeros" else -1
        steps = [prefill(model, padded, lengths, cache)]
        held = [[cache.kept_positions(layer) for layer in range(2)]]
        for i in range(more):
            steps.append(step(model, idx[torch.arange(len(AWKWARD)), lengths + i], cache))
            held.append([cache.kept_positions(layer) for layer in range(2)])
        for row, length in enumerate(AWKWARD):
            logits, plans, _ = masked(model, scorers, make_spec(policy), idx[row:row + 1, :length + more])
            for i, (got, kept) in enumerate(zip(steps, held)):
                close(got[row], logits[0, length - 1 + i])
                for layer in range(2):
                    assert [kept[layer][row]] == visible_at(plans[layer], length - 1 + i)


@pytest.mark.parametrize("chunk", [1, 7, 4096])
def test_chunks_of_a_prefill_change_nothing(chunk, monkeypatch):
    model, spec = tiny_transformer(0).double(), CacheSpec(2, 4, 12)
    scorers = decode.make_scorers("knorm", n_layer=model.config.n_layer, n_kv_head=model.config.n_kv_head,
                                  head_dim=model.config.head_dim, window=4)
    idx, lengths = torch.randint(0, model.config.vocab_size, (2, 30)), torch.tensor([30, 17])
    kept = []
    for size in (chunk, 8192):
        monkeypatch.setattr(decode, "CHUNK", size)
        cache = KVCache(model.config, spec, 2, scorers, dtype=torch.float64)
        kept.append((prefill(model, idx, lengths, cache), [cache.kept_positions(i) for i in range(len(cache.layers))]))
    assert (kept[0][0] - kept[1][0]).abs().max() < 1e-12 and kept[0][1] == kept[1][1]


# ---------------------------------------------------------------------------------------------------------------------
# what the cache promises

@pytest.mark.parametrize("policy", ["kvpop", "random"])
def test_never_more_than_n_slots_and_sinks_and_window_stay(policy):
    model = make_model()
    cache = make_cache(policy, model, 2)
    idx = tokens(70, 2)
    lengths = torch.tensor([3, N + 4])
    prefill(model, idx[:, :N + 4], lengths, cache)
    addresses = [t.data_ptr() for layer in cache.layers for t in (layer.k_cache, layer.position, *layer.state.values())]
    for i in range(40):
        step(model, idx[torch.arange(2), lengths + i], cache)
        for layer, slots in enumerate(cache.layers):
            assert slots.k_cache.shape[2] == N
            for row, heads in enumerate(cache.kept_positions(layer)):
                q = int(lengths[row]) + i
                for head in heads:
                    assert len(head) == len(set(head)) == min(q + 1, N)
                    assert set(range(min(N_SINK, q + 1))) <= set(head)
                    assert set(range(max(0, q - WINDOW + 1), q + 1)) <= set(head)
    assert cache.peak_entries() == N and cache.input_pos.tolist() == [43, N + 44]
    assert addresses == [t.data_ptr() for layer in cache.layers
                         for t in (layer.k_cache, layer.position, *layer.state.values())]  # a graph may capture a step


@pytest.mark.parametrize("policy", POLICIES)
def test_a_budget_of_the_whole_length_is_dense(policy):
    model, T = make_model(), 40
    idx = tokens(T)
    with torch.no_grad():
        dense = model.unembed(model(idx, causal_attend))
    spec = make_spec(policy, n_select=T)
    caches = [make_cache(policy, model, spec=spec), KVCache(model.config, dense_spec(T), 1, dtype=torch.float64)]
    for cache, length in itertools.product(caches, (1, WINDOW, 17)):
        close(prefill(model, idx[:, :length], torch.tensor([length]), cache), dense[:, length - 1])
        for q in range(length, T):
            close(step(model, idx[:, q], cache), dense[:, q])
        assert cache.kept_positions(1) == [[list(range(T))] * 2]


def test_huge_values_in_unfilled_slots_change_nothing():
    model, idx = make_model(), tokens(12)
    clean, dirty = make_cache("kvpop", model), make_cache("kvpop", model)
    for cache in (clean, dirty):
        prefill(model, idx[:, :4], torch.tensor([4]), cache)
    for slots in dirty.layers:
        slots.k_cache[:, :, 4:], slots.v_cache[:, :, 4:] = 1e30, -1e30
    for q in range(4, 12):
        assert torch.equal(step(model, idx[:, q], clean), step(model, idx[:, q], dirty))


@pytest.mark.parametrize("policy", ["kvpop", "knorm"])
def test_slot_order_is_irrelevant(policy):
    model, idx = make_model(), tokens(60)
    plain, shuffled = make_cache(policy, model), make_cache(policy, model)
    for cache in (plain, shuffled):
        prefill(model, idx[:, :30], torch.tensor([30]), cache)
    order = torch.randperm(N, generator=torch.Generator().manual_seed(1))
    back = order.argsort().int()
    for slots in shuffled.layers:
        for name in ("k_cache", "v_cache", "priority", "position"):
            setattr(slots, name, getattr(slots, name)[:, :, order])
        slots.ring = back[slots.ring.long()]
    for q in range(30, 60):
        close(step(model, idx[:, q], shuffled), step(model, idx[:, q], plain))
        assert shuffled.kept_positions(1) == plain.kept_positions(1)
    assert not torch.equal(shuffled.layers[0].position, plain.layers[0].position)


@pytest.mark.parametrize("policy", ["kvpop", "random"])
def test_later_tokens_change_nothing_that_is_kept_before(policy):
    model, t = make_model(), 40
    scorers, spec = make_scorers(policy, model), make_spec(policy)
    one, two = tokens(60), tokens(60)
    two[:, t + 1:] = tokens(60, seed=9)[:, t + 1:]
    (_, first, _), (_, second, _) = masked(model, scorers, spec, one), masked(model, scorers, spec, two)
    for a, b in zip(first, second):
        assert [visible_at(a, q) for q in range(t + 1)] == [visible_at(b, q) for q in range(t + 1)]
    cache, kept = make_cache(policy, model, scorers=scorers), []
    for idx in (one, two):  # the same of the cache, token by token
        cache.reset()
        kept.append([])
        for q in range(60):
            step(model, idx[:, q], cache)
            kept[-1].append([cache.kept_positions(layer) for layer in range(2)])
    assert kept[0][:t + 1] == kept[1][:t + 1]
    if policy == "kvpop":
        assert kept[0] != kept[1]


def test_equal_scores_are_streaming():
    """An untrained kvpop scores every token the same; with decay it is StreamingLLM, and so is every tie."""
    model, T = make_model(), 50
    idx, spec = tokens(T), make_spec("streaming")
    untrained = [torch.nn.ModuleList(make_scorer(policy, n_kv_head=2, head_dim=8, window=WINDOW, layer=i)
                                     for i in range(2)).double() for policy in ("kvpop", "kvpop-mlp", "streaming")]
    for scorers in untrained:
        cache = make_cache("streaming", model, scorers=scorers, spec=spec)
        logits, plans, _ = masked(model, scorers, spec, idx)
        prefill(model, idx[:, :20], torch.tensor([20]), cache)
        for q in range(20, T):
            close(step(model, idx[:, q], cache), logits[:, q])
            assert_state(cache, plans, q)
            newest = list(range(N_SINK)) + list(range(q + 1 - N + N_SINK, q + 1))
            assert cache.kept_positions(0) == [[newest, newest]]


class FewScores(torch.nn.Module):
    """Scores 0, 1 or 2 by position, so that most comparisons are ties."""
    name, window, n_kv_head, head_dim, log_gamma = "few", None, 2, 8, staticmethod(lambda: None)
    dynamic, waits, shift = False, False, 0

    def forward(self, k, v, lengths=None, return_state=False):
        score = (torch.arange(k.shape[2]) * 7 % 5 % 3).double().expand(k.shape[:3])
        return (score, {}) if return_state else score

    def init_state(self, batch, device, dtype):
        return {}

    def ahead(self, state, k_leave, v_leave, leave_pos):
        return {"score": (leave_pos[:, None] * 7 % 5 % 3).double().expand(k_leave.shape[:2])}

    def finish(self, state, due, k, v):
        return due["score"], {}

    def settle(self, state, due):
        return state


def test_ties_agree_with_the_mask():
    model, T = make_model(), 70
    scorers, spec, idx = torch.nn.ModuleList([FewScores(), FewScores()]), make_spec("streaming"), tokens(T)
    cache = make_cache("", model, scorers=scorers, spec=spec)
    logits, plans, _ = masked(model, scorers, spec, idx)
    prefill(model, idx[:, :3], torch.tensor([3]), cache)
    for q in range(3, T):
        close(step(model, idx[:, q], cache), logits[:, q])
        assert_state(cache, plans, q)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_victim_is_exact(dtype):
    inf = math.inf
    eps = torch.finfo(dtype).eps
    rows = [([1.0 + eps, 1.0, 1.0, inf], [3, 9, 7, 1], 2),       # equals: the older goes; one ulp decides
            ([1.0, 1.0 + eps, 2.0, inf], [9, 3, 1, 0], 0),
            ([-1e30, -1e30, inf, inf], [2**31 - 3, 2**31 - 2, 0, 1], 0),
            ([0.0, -0.0, 1.0, 1.0], [8, 5, 1, 2], 1),            # the two zeros are equal, as they are for the mask
            ([0.0, -0.0, 1.0, 1.0], [5, 8, 1, 2], 0),
            ([inf, -inf, -1e30, -inf], [5, -3, 1, -1], 1)]       # empty slots first, in slot order
    for priority, position, slot in rows:
        got, _ = choose_victim(torch.tensor([[priority]], dtype=dtype), torch.tensor([[position]], dtype=torch.int32))
        assert got.item() == slot, (priority, position)


def test_rope_stays_at_absolute_positions_after_three_budgets():
    """Every slot holds the key of its stored position, rotated there, long after slots and positions went apart."""
    model, T = make_model(n_layer=1), 3 * N + 20
    idx = tokens(T)
    exact = {}

    def attend(layer, q, k, v):
        exact["k"], exact["v"] = k, v
        return attention(q, k, v, keep_everything(1, 2, k.shape[2]))[0]

    with torch.no_grad():
        model(idx, attend)  # one layer: its keys depend on the tokens alone, not on what was evicted
    cache = make_cache("kvpop", model)
    prefill(model, idx[:, :7], torch.tensor([7]), cache)
    for q in range(7, T):
        step(model, idx[:, q], cache)
    slots = cache.layers[0]
    position = slots.position.long()
    assert (position != torch.arange(N)).sum() > N  # slot order is no longer time order
    where = position[..., None].expand(*position.shape, 8)
    close(slots.k_cache, exact["k"].gather(2, where))
    close(slots.v_cache, exact["v"].gather(2, where))


@pytest.mark.parametrize("policy", ["kvpop", "knorm"])
def test_fp32_agrees_up_to_near_ties(policy):
    """In fp32 the parallel and the one-step scorer round differently. Where the two first part, the tokens they
    disagree on must be near-ties; everything before is equal."""
    model, T, parted = make_model(torch.float32), 120, 0
    scorers, spec = make_scorers(policy, model), make_spec(policy)
    for seed in range(4):
        idx = tokens(T, seed=seed)
        logits, plans, priorities = masked(model, scorers, spec, idx)
        cache = make_cache(policy, model, scorers=scorers)
        prefill(model, idx[:, :9], torch.tensor([9]), cache)
        for q in range(9, T):
            got = step(model, idx[:, q], cache)
            differ = [(layer, h, set(kept) ^ set(want)) for layer in range(2) for h, (kept, want) in
                      enumerate(zip(cache.kept_positions(layer)[0], visible_at(plans[layer], q)[0])) if kept != want]
            for layer, h, tokens_ in differ:
                values = priorities[layer][0, h, sorted(tokens_)]
                gap = (values.max() - values.min()).item()
                assert gap <= 1e-5 * (1 + values.abs().max().item()), \
                    f"query {q}, layer {layer}, head {h}: tokens {sorted(tokens_)} are no near-tie, gap {gap}"
            if differ:  # from here on the two are different computations
                parted += 1
                break
            close(got, logits[:, q], 2e-4)
    assert parted <= 1, "near-ties of 1e-5 should be rare among a few hundred decisions"


def test_scorers_that_do_not_fit_are_refused():
    model, three_layers = make_model(), make_model(n_layer=3)
    with pytest.raises(ValueError, match=r"\(2, 2, 8\), this one has \(3, 2, 8\)"):
        KVCache(three_layers.config, make_spec("kvpop"), 1, make_scorers("kvpop", model))
    with pytest.raises(ValueError, match="trained with window 5"):
        KVCache(model.config, make_spec("kvpop", window=6), 1, make_scorers("kvpop", model))
    with pytest.raises(ValueError, match="cannot select"):
        KVCache(model.config, make_spec("streaming"), 1, None)
