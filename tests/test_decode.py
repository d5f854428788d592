"""The static cache against the training mask: three ways to reach a state must keep the same positions, give the same
logits. Everything in fp64 on tiny random models, so that "the same" means the same."""
import itertools
import math

import pytest
import torch

import decode
from data.sampling import most_likely, sample, sampling_probs
from decode import KVCache, capture_step, choose_victim, dense_spec, generate, prefill, step
from flex_masks import NEVER, CacheSpec, attention, effective_priority, keep_everything, plan
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
    dynamic, shift = False, 0

    def forward(self, k, v, lengths=None, return_state=False):
        score = (torch.arange(k.shape[2]) * 7 % 5 % 3).double().expand(k.shape[:3])
        return (score, {}) if return_state else score

    def init_state(self, batch, device, dtype):
        return {}

    def step(self, state, k, v, k_leave, v_leave, leave_pos):
        return (leave_pos[:, None] * 7 % 5 % 3).double().expand(k.shape[:2]), state


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


# ---------------------------------------------------------------------------------------------------------------------
# generate

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


def test_scorers_that_do_not_fit_are_refused():
    model, three_layers = make_model(), make_model(n_layer=3)
    with pytest.raises(ValueError, match=r"\(2, 2, 8\), this one has \(3, 2, 8\)"):
        KVCache(three_layers.config, make_spec("kvpop"), 1, make_scorers("kvpop", model))
    with pytest.raises(ValueError, match="trained with window 5"):
        KVCache(model.config, make_spec("kvpop", window=6), 1, make_scorers("kvpop", model))
    with pytest.raises(ValueError, match="cannot select"):
        KVCache(model.config, make_spec("streaming"), 1, None)


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


def test_bytes_are_the_formula_at_any_length():
    model = make_model(torch.float32)
    cache = make_cache("kvpop", model)
    size = cache.nbytes()
    assert size["cache"] == 2 * 2 * 2 * N * 8 * 4
    assert size["bookkeeping"] == 2 * 2 * (N * 8 + WINDOW * 4)
    assert size["state"] == 2 * 2 * (8 * 4 + 8 + 1) * 4
    idx = tokens(90)
    prefill(model, idx[:, :60], torch.tensor([60]), cache)
    for q in range(60, 90):
        step(model, idx[:, q], cache)
    assert cache.nbytes() == size
    assert NEVER == 2**31 - 1  # choose_victim's stand-in for "not among the lowest"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_never_looks_at_data(policy, monkeypatch):
    """On tensors without data a branch on a value raises; what passes can be captured in a CUDA graph."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
    config = make_model().config
    with FakeTensorMode():
        model = Transformer(config)
        scorers = [make_scorer(policy, n_kv_head=2, head_dim=8, window=WINDOW, layer=i) for i in range(2)]
        cache = KVCache(config, make_spec(policy), 3, scorers)
        with pytest.raises(DataDependentOutputException):  # the NaN check, which does wait on a CPU: the test can fail
            step(model, torch.zeros(3, dtype=torch.int64), cache)
        decay = lambda score, log_gamma, at: score if log_gamma is None else score - at * log_gamma
        monkeypatch.setattr(decode, "effective_priority", decay)
        assert step(model, torch.zeros(3, dtype=torch.int64), cache).shape == (3, V)


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["kvpop", "kvpop-mlp", "knorm", "random"])
def test_a_captured_step_equals_an_eager_one(policy):
    model = make_model(torch.float32).cuda()
    scorers, idx = make_scorers(policy, model).cuda(), tokens(90, 3).cuda()
    eager, captured = [KVCache(model.config, make_spec(policy), 3, scorers, "cuda") for _ in range(2)]
    token = idx[:, 0].clone()
    graph, logits = capture_step(model, token, captured)
    captured.reset()
    for q in range(90):
        token.copy_(idx[:, q])
        graph.replay()
        close(logits, step(model, idx[:, q], eager), 1e-4)
        assert [captured.kept_positions(i) for i in range(2)] == [eager.kept_positions(i) for i in range(2)], q


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


def test_when_a_step_is_told_that_the_cache_is_full(monkeypatch):
    """Compiled on a GPU, with few heads, one step serves all positions; else there are two. Dense has one."""
    model = make_model(torch.float32)
    cache = KVCache(model.config, make_spec("random"), 2, make_scorers("random", model))
    cache.seen = N
    assert cache.full and cache.filling is None  # a CPU
    cache.filling = "a BlockMask"
    assert cache.full
    cache.compiled = True
    assert not cache.full
    monkeypatch.setattr(decode, "FEW_HEADS", 1)
    many = KVCache(model.config, make_spec("random"), 2, make_scorers("random", model))
    many.filling, many.compiled, many.seen = cache.filling, True, N
    assert many.full
    dense = KVCache(model.config, decode.dense_spec(N), 2)
    dense.seen = N
    assert not dense.full


def test_a_score_that_is_nan_is_found_long_after_a_compiled_step(monkeypatch):
    """Which goes on where an eager one stops, as here without its check. Nothing else is evicted for it."""
    model, at = make_model(torch.float32), 30
    scorers, idx = make_scorers("random", model), tokens(N + 90, 2)
    cache, plain = (KVCache(model.config, make_spec("random"), 2, scorers) for _ in range(2))
    real = decode.effective_priority
    for q in range(N + 90):
        step(model, idx[:, q], plain)
    plain.check()
    monkeypatch.setattr(decode, "effective_priority", lambda scores, gamma, u: real(scores, gamma, u).masked_fill(
        u == at, math.nan))
    for q in range(N + 90):
        step(model, idx[:, q], cache)
        if q < at:
            cache.check()
    with pytest.raises(ValueError, match="a score is NaN"):
        cache.check()
    held, want = (torch.tensor(c.kept_positions(0)) for c in (cache, plain))  # (B, H_kv, N)
    assert (held == at).any(-1).all() and (held[..., :N_SINK] == want[..., :N_SINK]).all()


@pytest.mark.parametrize("policy", ["kvpop", "random"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_full_cache_needs_no_mask(policy, dtype, monkeypatch):
    """Once every row has filled its slots attention gets no mask, not a step earlier; the logits keep their bits."""
    model, masks, attend = make_model(torch.float32).to(dtype), [], decode.F.scaled_dot_product_attention
    scorers, idx, lengths = make_scorers(policy, model).float(), tokens(N + 30, 2), torch.tensor([5, N - 8])
    plain, masked = (KVCache(model.config, make_spec(policy), 2, scorers, dtype=dtype) for _ in range(2))
    for cache in (plain, masked):
        prefill(model, idx[:, :N - 8], lengths, cache)
        assert cache.seen == 5  # of the shorter row

    def watch(q, k, v, attn_mask=None):
        masks.append(attn_mask is not None)
        return attend(q, k, v, attn_mask)
    monkeypatch.setattr(decode.F, "scaled_dot_product_attention", watch)
    for q in range(5, N + 20):  # of the shorter row
        ids = idx[:, q]
        logits = step(model, ids, plain)
        assert masks == [q < N - 1] * 2
        assert all(bool((layer.position >= 0).all()) == (q >= N - 1) for layer in plain.layers)
        masked.seen = 0  # never sure
        assert torch.equal(logits, step(model, ids, masked))
        masks.clear()
    assert plain.seen == plain.input_pos.min() == N + 20
    plain.reset()
    assert plain.seen == 0 and not plain.full


@pytest.mark.parametrize("policy", ["streaming", "kvpop-mlp", "kvpop"])
def test_one_compile_serves_all_layers(policy, monkeypatch):
    """Blocks through torch.compile: the same bits (with a backend that runs what was traced as it is), traced once for
    filling the cache and once for the full one, not once a layer."""
    from torch._dynamo.testing import CompileCounterWithBackend
    counter = CompileCounterWithBackend("eager")
    monkeypatch.setattr(decode, "compiled_block_step", torch.compile(decode.block_step, backend=counter, fullgraph=True,
                                                                     dynamic=False))
    decay = lambda score, log_gamma, at: score if log_gamma is None else score - at * log_gamma
    monkeypatch.setattr(decode, "effective_priority", decay)  # its NaN check is a branch, on a CPU alone
    torch._dynamo.reset()
    model = make_model(torch.float32)
    plain, compiled = (KVCache(model.config, make_spec(policy), 2, make_scorers(policy, model)) for _ in range(2))
    compiled.compiled, idx = True, tokens(N + 6, 2)
    for q in range(N + 6):
        assert torch.equal(step(model, idx[:, q], plain), step(model, idx[:, q], compiled))
        assert counter.frame_count == 1 + (q >= N - 1) and model.config.n_layer > 1
    assert [plain.kept_positions(i) for i in range(2)] == [compiled.kept_positions(i) for i in range(2)]


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["kvpop", "kvpop-mlp", "streaming"])
def test_a_captured_compiled_step_equals_an_eager_one(policy):
    model = make_model(torch.float32).cuda()
    scorers, idx = make_scorers(policy, model).cuda(), tokens(N + 20, 3).cuda()
    eager, captured = [KVCache(model.config, make_spec(policy), 3, scorers, "cuda") for _ in range(2)]
    captured.compiled = True
    advance = decode.make_step(model, captured, True)
    captured.reset()
    for q in range(N + 20):
        close(advance(idx[:, q]), step(model, idx[:, q], eager), 1e-3)


def test_fused_products_are_the_same_model():
    """One product for q, k, v and one for gate, up: the same numbers, the same tensors by the same names."""
    model, idx = tiny_transformer(0).double(), torch.arange(12).view(2, 6)
    names = {n: p.clone() for n, p in model.state_dict().items()}
    layers = list(model.model.layers.parameters())
    slopes = lambda: torch.autograd.grad(model(idx, causal_attend).square().sum(), layers)  # noqa: E731
    wanted = slopes()
    with torch.no_grad():
        before = model(idx, causal_attend)
        model.fuse()
        assert (model(idx, causal_attend) - before).abs().max() < 1e-12
    assert all((slope - want).abs().max() < 1e-12 for slope, want in zip(slopes(), wanted, strict=True))
    assert list(model.state_dict()) == list(names) and all(torch.equal(p, names[n]) for n, p in
                                                           model.state_dict().items())
    attn = model.model.layers[0].self_attn
    assert attn.fused.data_ptr() == attn.q_proj.weight.data_ptr() and len(attn.fused) == sum(
        len(p.weight) for p in (attn.q_proj, attn.k_proj, attn.v_proj))
    with torch.no_grad():
        attn.v_proj.weight.mul_(2)
        assert (model(idx, causal_attend) - before).abs().max() > 1e-3


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


@pytest.mark.parametrize("k", [1, 3, 6])
def test_most_likely_takes_lower_ids_among_equals(k):
    logits = torch.tensor([[2.0, 5.0, 5.0, 1.0, 5.0, 9.0, 2.0], [0.0] * 7]).bfloat16()
    assert most_likely(logits, k).tolist() == [sorted([5, 1, 2, 4, 0, 6, 3][:k]), list(range(k))]
