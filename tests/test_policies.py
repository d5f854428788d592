"""The policies against lists: each dynamic one is simulated token by token in plain Python, on a full matrix of logits
of which it may look at the live columns only, and must keep the same positions at every step, ties included."""
import math

import pytest
import torch

from data.scorer_files import check_window, load_scorers, save_scorers
from decode import KVCache, LayerCache, check_prompts, force, generate, make_step, prefill, step
from flex_masks import CacheSpec, attention, effective_priority, plan
from model import ModelConfig, Transformer, causal_attend
from scorer import LEARNED, POLICIES, geometry, make_scorer, mlstm_param_count, state_entries
from scorer import make_scorers as make_all

H, H_KV, V = 4, 2, 120
N_SINK, WINDOW, N_SELECT = 2, 5, 9
DYNAMIC = ("keydiff", "tova-layer", "tova-head", "h2o", "h2o-mean", "snapkv", "rkv", "vase")
STATIC = ("random-prompt", "kvpop-nodelay", "position", "dms-cap")  # the new ones; the others: test_scorer.py
OPTIONS = {"snapkv": {"n_queries": 4, "reach": 1}, "rkv": {"n_queries": 3, "reach": 1}, "vase": {"percent": 30}}


def make_spec(policy, n_select=N_SELECT, D=8, **options):
    n_sink, window = geometry(policy, N_SINK, WINDOW)
    charge = state_entries(policy, D, H // H_KV, window, **options)
    return CacheSpec(n_sink, window, N_SINK + WINDOW + n_select + charge, charge)


def shape(D=8, n_layer=2):
    return ModelConfig(vocab_size=V, n_layer=n_layer, n_embd=32, n_head=H, n_kv_head=H_KV, head_dim=D,
                       intermediate_size=48, max_seq_len=4096, eos_token_ids=[V - 1])


def close(a, b, tolerance=1e-9):
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


# ---------------------------------------------------------------------------------------------------------------------
# the simulation: one row, one policy, Python lists

def softmax(logits, keys):
    """{key: probability} over `keys` alone."""
    top = max(logits[p] for p in keys)
    weight = {p: math.exp(logits[p] - top) for p in keys}
    total = sum(weight.values())
    return {p: w / total for p, w in weight.items()}


def dot(a, b):
    return sum(x * y for x, y in zip(a, b))


def cosine(a, b):
    length = math.sqrt(dot(a, a) * dot(b, b))
    return dot(a, b) / length if length else 0.0


def neighbours(values, r):
    """The values within r places of each."""
    return [values[max(0, i - r):i + r + 1] for i in range(len(values))]


class Simulation:
    """q (H, T, D), k, v (H_kv, T, D) of one row -> kept[t][h], sorted positions after step t, and out (H, T, D).
    `ties` counts decisions in which the lowest score was shared."""

    def __init__(self, policy, q, k, v, spec, options, uniform):
        self.policy, self.spec, self.o, self.uniform, self.ties = policy, spec, options, uniform, 0
        T, D = q.shape[1:]
        group = [list(range(h * H // H_KV, (h + 1) * H // H_KV)) for h in range(H_KV)]
        logits = (q @ k.repeat_interleave(H // H_KV, 0).mT / D**0.5).tolist()  # the full matrix: [head][query][key]
        self.logits, self.group = logits, group
        self.k, self.v = k.tolist(), v.tolist()
        live, self.sums, score = [[] for _ in group], [{} for _ in group], [{} for _ in group]
        self.kept, outs = [], []
        for t in range(T):
            for h in range(H_KV):
                if len(live[h]) == spec.n_slots:
                    may_go = self.may_go(live[h], t)
                    victim = min(may_go, key=lambda p: (score[h][p], p))
                    self.ties += sum(score[h][p] == score[h][victim] for p in may_go) > 1
                    live[h].remove(victim)
                live[h].append(t)
            probs = {j: softmax(logits[j][t], live[h]) for h in range(H_KV) for j in group[h]}
            outs.append([[sum(probs[j][p] * self.v[h][p][d] for p in live[h]) for d in range(D)]
                         for h in range(H_KV) for j in group[h]])
            for h in range(H_KV):
                score[h] = getattr(self, policy.replace("-", "_"))(h, t, live[h], probs)
            self.kept.append([sorted(heads) for heads in live])
        self.out = torch.tensor(outs, dtype=torch.float64).transpose(0, 1)

    def may_go(self, live, query):
        return sorted(p for p in live if self.spec.n_sink <= p <= query - self.spec.window)

    def tova_head(self, h, t, live, probs):
        return {p: sum(probs[j][p] for j in self.group[h]) / len(self.group[h]) for p in live}

    def tova_layer(self, h, t, live, probs):
        return {p: sum(row[p] for row in probs.values()) / H for p in live}

    def h2o(self, h, t, live, probs):
        self.sums[h] = {p: self.sums[h].get(p, 0.0) + sum(probs[j][p] for j in self.group[h]) for p in live}
        return self.sums[h]

    def h2o_mean(self, h, t, live, probs):
        return {p: x / (t - p + 1) for p, x in self.h2o(h, t, live, probs).items()}

    def keydiff(self, h, t, live, probs):
        unit = {p: [x / (math.sqrt(dot(self.k[h][p], self.k[h][p])) or 1.0) for x in self.k[h][p]] for p in live}
        mean = [sum(column) / len(live) for column in zip(*unit.values())]
        return {p: -cosine(self.k[h][p], mean) for p in live}

    def vase(self, h, t, live, probs):
        norm = {p: math.sqrt(dot(self.v[h][p], self.v[h][p])) for p in self.may_go(live, t + 1)}
        n_safe = len(norm) * self.o["percent"] // 100
        bar = sorted(norm.values(), reverse=True)[n_safe - 1] if n_safe else math.inf
        return {p: self.uniform[h][p] + (norm.get(p, -1.0) >= bar) for p in live}

    def snapkv(self, h, t, live, probs):
        queries = range(max(0, t - self.o["n_queries"] + 1), t + 1)
        mass = {p: 0.0 for p in live}
        for j in self.group[h]:
            for i in queries:
                for p, x in softmax(self.logits[j][i], [p for p in live if p <= i]).items():
                    mass[p] += x / len(queries) / len(self.group[h])
        order = self.may_go(live, t + 1)
        pooled = neighbours([mass[p] for p in order], self.o["reach"])
        return {**mass, **{p: sum(x) / len(x) for p, x in zip(order, pooled)}}

    def rkv(self, h, t, live, probs):
        order = self.may_go(live, t + 1)
        if not order:
            return {p: 0.0 for p in live}
        queries = range(max(0, t - self.o["n_queries"] + 1), t + 1)
        mass = {p: 0.0 for p in order}
        for i in queries:
            top = {p: max(self.logits[j][i][p] for j in self.group[h]) for p in order}
            for p, x in softmax(top, order).items():
                mass[p] += x / len(queries)
        importance = dict(zip(order, map(max, neighbours([mass[p] for p in order], self.o["reach"]))))
        column = {p: 0.0 for p in live}
        for i in live:
            row = {p: cosine(self.k[h][i], self.k[h][p]) for p in live if p != i}
            alike = [p for p, x in row.items() if x > 0.5]
            if alike:
                row[max(alike)] = 0.0
            for p, x in row.items():
                column[p] += x / len(live)
        redundancy, mix = softmax(column, live), self.o.get("mix", 0.07)
        return {p: mix * importance.get(p, 0.0) - (1 - mix) * redundancy[p] for p in live}


def data(kind, T, batch=2, dtype=torch.float64, seed=0):
    """q (B, H, T, D), k, v. "ties": keys are 60 times a unit vector or zero, and queries are two of those: a head's
    attention is shared evenly by the keys of one kind, exactly, and others get exactly nothing; values are integers."""
    g = torch.Generator().manual_seed(seed)
    if kind == "random":
        q, k, v = (torch.randn(batch, heads, T, 8, generator=g, dtype=torch.float64) for heads in (H, H_KV, H_KV))
        return (2 * q).to(dtype), k.to(dtype), v.to(dtype)
    basis = torch.cat([torch.eye(4), torch.zeros(1, 4)]).double() * 60
    q, k = (basis[torch.randint(n, (batch, heads, T), generator=g)] for heads, n in ((H, 2), (H_KV, 5)))
    return q.to(dtype), k.to(dtype), torch.randint(-1, 2, (batch, H_KV, T, 4), generator=g).to(dtype)


def make_layer(policy, spec, D=8, batch=2, dtype=torch.float64, **options):
    scorer = make_scorer(policy, n_kv_head=H_KV, head_dim=D, window=spec.window, layer=1, seed=3, **options)
    return LayerCache(shape(D), spec, batch, scorer.to(dtype), "cpu", dtype)


def kept(layer):
    return [[sorted(p for p in head if p >= 0) for head in row] for row in layer.position.tolist()]


def run(layer, q, k, v, start=0, stop=None):
    """-> kept after each step, outputs (B, H, T, D)"""
    held, outs = [], []
    for t in range(start, stop or q.shape[2]):
        at = torch.full(q.shape[:1], t)
        outs.append(layer.step(*(z[:, :, t:t + 1] for z in (q, k, v)), at))
        held.append(kept(layer))
    return held, torch.cat(outs, dim=2)


CASES = [(policy, OPTIONS.get(policy, {})) for policy in DYNAMIC]
CASES += [("rkv", {"n_queries": 4, "reach": 1, "mix": 1.0}), ("rkv", {"n_queries": 2, "reach": 0, "mix": 0.5}),
          ("snapkv", {"n_queries": 4, "reach": 2}), ("vase", {"percent": 10})]


@pytest.mark.parametrize("kind", ["random", "ties"])
@pytest.mark.parametrize("policy, options", CASES)
def test_a_dynamic_policy_is_its_definition(policy, options, kind):
    T, (q, k, v) = 70, data(kind, 70)
    D = q.shape[-1]
    spec = make_spec(policy, D=D, **options)
    layer = make_layer(policy, spec, D, **options)
    held, out = run(layer, q, k, v)
    uniform = make_scorer("random", n_kv_head=H_KV, head_dim=D, window=1, layer=1, seed=3)(k, v).double()
    ties, histories = 0, set()
    for b in range(2):
        want = Simulation(policy, q[b], k[b], v[b], spec, options, uniform[b].tolist())
        assert [row[b] for row in held] == want.kept
        close(out[b], want.out)
        ties += want.ties
        histories |= {str([heads[h] for heads in want.kept]) for h in range(H_KV)}
    assert len(histories) == (2 if policy == "tova-layer" else 4)  # heads differ, or a mix-up would not show
    if kind == "ties" and policy not in ("vase", "rkv") or (kind, options.get("mix")) == ("ties", 1.0):
        assert ties > 10
    assert max(len(head) for head in held[-1][0]) == spec.n_slots < T / 4


@pytest.mark.parametrize("policy", ["tova-head", "h2o", "keydiff", "snapkv", "rkv", "vase"])
@pytest.mark.parametrize("n_sink, window, n_select", [(0, 1, 5), (2, 1, 6), (0, 4, 5), (3, 4, 0), (1, 1, 1)])
def test_odd_specs(policy, n_sink, window, n_select):
    options = {**OPTIONS.get(policy, {}), **({"n_queries": 1} if policy in ("snapkv", "rkv") else {})}
    q, k, v = data("random", 40, seed=1)
    spec = CacheSpec(n_sink, window, n_sink + window + n_select)
    held, _ = run(make_layer(policy, spec, **options), q, k, v)
    uniform = make_scorer("random", n_kv_head=H_KV, head_dim=8, window=1, layer=1, seed=3)(k, v).double()
    for b in range(2):
        assert [row[b] for row in held] == Simulation(policy, q[b], k[b], v[b], spec, options, uniform[b].tolist()).kept


# ---------------------------------------------------------------------------------------------------------------------
# what a dynamic policy owes

@pytest.mark.parametrize("policy", DYNAMIC)
def test_query_heads_count_within_their_group_only(policy):
    """Swapping the two query heads of a group changes nothing; swapping heads of different groups does, except for
    what does not look at attention and for tova-layer, which looks at all heads alike."""
    q, k, v = data("random", 60)
    spec, options = make_spec(policy, **OPTIONS.get(policy, {})), OPTIONS.get(policy, {})
    base, within, across = (run(make_layer(policy, spec, **options), q[:, order], k, v)[0]
                            for order in ([0, 1, 2, 3], [1, 0, 3, 2], [2, 1, 0, 3]))
    assert within == base
    assert (across == base) == (policy in ("keydiff", "vase"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("policy", DYNAMIC)
def test_huge_values_in_unfilled_slots_change_nothing(policy, dtype):
    q, k, v = data("random", 40, dtype=dtype)
    options = OPTIONS.get(policy, {})
    clean, dirty = (make_layer(policy, make_spec(policy, **options), dtype=dtype, **options) for _ in range(2))
    for layer in (clean, dirty):
        run(layer, q, k, v, stop=4)
    dirty.k_cache[:, :, 4:], dirty.v_cache[:, :, 4:] = 1e30, -1e30
    (a, out_a), (b, out_b) = run(clean, q, k, v, 4), run(dirty, q, k, v, 4)
    assert a == b and torch.equal(out_a, out_b)


@pytest.mark.parametrize("policy", DYNAMIC + STATIC + ("kvpop",))
def test_reset_clears_everything(policy):
    q, k, v = data("random", 60)
    options = OPTIONS.get(policy, {})
    used, fresh = (make_layer(policy, make_spec(policy, **options), **options) for _ in range(2))
    run(used, *(3 * z.roll(7, 2) for z in (q, k, v)), stop=33)
    for tensor in used.state.values():
        tensor.add_(1)  # an untrained scorer says 0, and nothing has set a prompt length
    assert all(not torch.equal(used.state[name], fresh.state[name]) for name in fresh.state)
    used.reset()
    assert all(torch.equal(used.state[name], fresh.state[name]) for name in fresh.state)
    for name in ("k_cache", "v_cache", "priority", "position"):
        assert torch.equal(getattr(used, name), getattr(fresh, name)), name
    (a, out_a), (b, out_b) = run(used, q, k, v), run(fresh, q, k, v)
    assert a == b and torch.equal(out_a, out_b)
    assert all(torch.equal(used.state[name], fresh.state[name]) for name in fresh.state)


@pytest.mark.parametrize("policy", DYNAMIC)
def test_slot_order_is_irrelevant(policy):
    q, k, v = data("random", 60)
    options = OPTIONS.get(policy, {})
    plain, shuffled = (make_layer(policy, make_spec(policy, **options), **options) for _ in range(2))
    for layer in (plain, shuffled):
        run(layer, q, k, v, stop=25)
    order = torch.randperm(plain.spec.n_slots, generator=torch.Generator().manual_seed(1))
    for name in ("k_cache", "v_cache", "priority", "position"):
        getattr(shuffled, name).copy_(getattr(shuffled, name)[:, :, order].clone())
    (a, out_a), (b, out_b) = run(plain, q, k, v, 25), run(shuffled, q, k, v, 25)
    assert a == b and not torch.equal(plain.position, shuffled.position)
    close(out_a, out_b)


@pytest.mark.parametrize("policy", DYNAMIC)
def test_a_dynamic_policy_has_no_parallel_form(policy):
    scorer, (_, k, v) = make_scorer(policy, n_kv_head=H_KV, head_dim=8, window=8, layer=0), data("random", 10)
    with pytest.raises(ValueError, match=f"policy {policy} .* no parallel form"):
        scorer(k, v)


def test_snapkv_keeps_a_run_of_neighbours_and_rkv_drops_copies():
    """Their point, on data made for it. Every query reads token 9 alone: SnapKV keeps its neighbours too.
    Tokens 10 .. 19 are copies of one key, the others are all different: R-KV drops copies first."""
    q, k, v = data("random", 60, 1)
    q = k[:, [0, 0, 1, 1], 9:10].expand_as(q) * 4
    options = {"n_queries": 4, "reach": 1}
    held, _ = run(make_layer("snapkv", make_spec("snapkv", n_select=5, **options), batch=1, **options), q, k, v)
    assert all({8, 9, 10} <= set(head) for head in held[-1][0])
    q, k, v = data("random", 30, 1)
    k[:, :, 10:20] = k[:, :, 10:11]
    held, _ = run(make_layer("rkv", make_spec("rkv", n_select=15, n_queries=4), batch=1, n_queries=4), q, k, v)
    for head in held[-1][0]:
        assert len(set(range(10, 20)) - set(head)) >= 7


def test_vase_keeps_large_values_and_is_random_otherwise():
    q, k, v = data("random", 200, 1)
    v[:, :, [20, 50, 90]] *= 100
    held, _ = run(make_layer("vase", make_spec("vase", n_select=40), batch=1), q, k, v)
    plain, _ = run(make_layer("random", make_spec("random", n_select=40), batch=1), q, k, v)
    for h in range(H_KV):
        a, b = set(held[-1][0][h]), set(plain[-1][0][h])
        assert {20, 50, 90} <= a and len(a & b) > 30


# ---------------------------------------------------------------------------------------------------------------------
# whole models

def make_model(dtype=torch.float64):
    torch.manual_seed(0)
    model = Transformer(shape())
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.uniform_(0.3, 2.0) if "norm" in name else p.normal_(std=0.25)
    return model.to(dtype).eval()


def make_scorers(policy, dtype=torch.float64, **options):
    window = geometry(policy, N_SINK, WINDOW)[1]
    scorers = make_all(policy, n_layer=2, n_kv_head=H_KV, head_dim=8, window=window, seed=3,
                       **{**OPTIONS.get(policy, {}), **options})
    torch.manual_seed(3)
    with torch.no_grad():
        for name, p in scorers.named_parameters():
            p.add_(torch.randn_like(p) * (0.5 if "gate" in name else 1.0))
    return scorers.double() if dtype == torch.float64 else scorers


def policy_spec(policy, n_select=N_SELECT):
    return make_spec(policy, n_select, **OPTIONS.get(policy, {}))


def tokens(T, seed=0):
    return torch.randperm(V - 1, generator=torch.Generator().manual_seed(seed))[:T].tolist()


@torch.no_grad()
def masked(model, scorers, spec, row, prompt=None):
    """One pass under the mask of training -> logits (T, V), and by layer evict_at (H_kv, T)."""
    plans = []

    def attend(layer, q, k, v):
        if prompt is not None:
            scorers[layer].prompt_lengths = torch.tensor([prompt])
        priority = effective_priority(scorers[layer](k, v), scorers[layer].log_gamma())
        plans.append(plan(priority, spec))
        return attention(q, k, v, plans[-1])[0]

    return model.unembed(model(torch.tensor([row]), attend))[0], [p[0] for p in plans]


def forced(model, rows, policy, spec=None, **options):
    """-> logits of each row (T, V), the cache, and what it held after each step by layer"""
    logits, held = [], []
    cache = KVCache(model.config, spec or policy_spec(policy), len(rows), make_scorers(policy),
                    dtype=model.model.embed_tokens.weight.dtype)

    def on_logits(t, x):
        logits.append(x.clone())
        held.append([cache.kept_positions(i) for i in range(2)])
    force(model, rows, on_logits=on_logits, cache=cache, **options)
    return [torch.stack(logits, 1)[b, :len(row)] for b, row in enumerate(rows)], cache, held


def assert_same_state(one, two):
    for a, b in zip(one.layers, two.layers):
        assert a.state.keys() == b.state.keys()
        for name in a.state:
            close(a.state[name].double(), b.state[name].double())


@pytest.mark.parametrize("policy", (*STATIC, "kvpop", "streaming", "knorm"))
def test_forced_rows_equal_the_masked_pass(policy):
    model, prompts = make_model(), [4, 9, 1]
    rows = [tokens(n, seed=n) for n in (50, 17, 31)]
    extra = {"prompt_lengths": prompts} if policy == "random-prompt" else {}
    logits, cache, held = forced(model, rows, policy, **extra)
    for b, row in enumerate(rows):
        want, plans = masked(model, make_scorers(policy), policy_spec(policy), row, prompts[b] if extra else None)
        close(logits[b], want)
        for q in range(len(row)):
            for i, evict_at in enumerate(plans):
                assert held[q][i][b] == [[t for t in range(q + 1) if head[t] > q] for head in evict_at.tolist()]
    assert cache.peak_entries() == N_SINK + WINDOW + N_SELECT


@pytest.mark.parametrize("policy", STATIC)
def test_prefill_and_steps_equal_stepping_alone(policy):
    model, row = make_model(), tokens(60)
    spec = policy_spec(policy, 20)
    for n in (1, 3, WINDOW, WINDOW + 1, 17):
        extra = {"prompt_lengths": [n]} if policy == "random-prompt" else {}
        logits, stepped, held = forced(model, [row], policy, spec, **extra)
        cache = KVCache(model.config, spec, 1, make_scorers(policy), dtype=torch.float64)
        close(prefill(model, torch.tensor([row[:n] + [7] * 3]), torch.tensor([n]), cache)[0], logits[0][n - 1])
        assert_same_state(cache, forced(model, [row[:n]], policy, spec, **extra)[1])
        for t in range(n, 60):
            assert [cache.kept_positions(i) for i in range(2)] == held[t - 1]
            close(step(model, torch.tensor(row[t:t + 1]), cache)[0], logits[0][t])
        assert_same_state(cache, stepped)


@pytest.mark.parametrize("policy", DYNAMIC)
def test_a_budget_that_holds_everything_is_dense(policy):
    model, row = make_model(), tokens(40)
    with torch.no_grad():
        dense = model.unembed(model(torch.tensor([row]), causal_attend))[0]
    close(forced(model, [row], policy, policy_spec(policy, 40))[0][0], dense)
    assert (forced(model, [row], policy)[0][0] - dense).abs().max() > 1e-3


@pytest.mark.parametrize("policy", DYNAMIC + STATIC)
def test_generate_is_exact_and_rows_are_independent(policy):
    """A batch of unequal prompts = each alone = the same text forced; the peak is the budget, state included."""
    model, spec = make_model(), policy_spec(policy, 14)
    prompts = [tokens(n, seed=n) for n in (1, 6, 9, 12)] + ([] if policy == "random-prompt" else [tokens(40, seed=5)])
    options = dict(max_new_tokens=30, stop_ids=[])
    told, scorers = [], make_scorers(policy)
    together = generate(model, prompts, spec, scorers, on_token=lambda row, t: told.append((row, t)), **options)
    assert [[t for r, t in told if r == row] for row in range(len(prompts))] == together.tokens
    assert together.seen == [len(p) + 29 for p in prompts] and set(together.stop) == {"max_new_tokens"}
    assert together.cache.peak_entries() + spec.state_entries == spec.budget
    for prompt, out in zip(prompts, together.tokens):
        alone = generate(model, [prompt], spec, scorers, **options)
        assert alone.tokens == [out] and alone.steps == 29
        extra = {"prompt_lengths": [len(prompt)]} if policy == "random-prompt" else {}
        logits, _, _ = forced(model, [prompt + out], policy, spec, **extra)
        assert logits[0][len(prompt) - 1:-1].argmax(-1).tolist() == out
    assert generate(model, prompts, spec, scorers, cache=together.cache, **options).tokens == together.tokens


@pytest.mark.parametrize("policy", ["h2o", "snapkv"])
def test_sampling_and_stops_under_a_dynamic_policy(policy):
    model, spec, scorers = make_model(), policy_spec(policy), make_scorers(policy)
    prompts = [tokens(n, seed=n) for n in (2, 11, 30)]
    options = dict(stop_ids=[], temperature=1.3, top_k=20, max_new_tokens=25)
    first = generate(model, prompts, spec, scorers, seed=5, **options).tokens
    assert generate(model, prompts[::-1], spec, scorers, seed=[7, 6, 5], **options).tokens == first[::-1]
    for row in range(3):
        assert generate(model, [prompts[row]], spec, scorers, seed=5 + row, **options).tokens == [first[row]]
    wide = policy_spec(policy, 60)  # holds everything, so each row draws what the dense policy draws
    assert generate(model, prompts, wide, scorers, seed=5, **options).tokens == \
        generate(model, prompts, seed=5, **options).tokens
    stop = next(t for t in first[0] if t in prompts[2])  # in a prompt an end token ends nothing
    result = generate(model, prompts, spec, scorers, seed=5, **{**options, "stop_ids": [stop]})
    for row, out in enumerate(first):
        cut = out.index(stop) if stop in out else 25
        assert result.tokens[row] == out[:cut] and result.stop[row] == ("end token" if cut < 25 else "max_new_tokens")
    limited = generate(model, prompts, spec, scorers, seed=5, max_seq_len=32, **{**options, "max_new_tokens": None})
    assert limited.tokens == [out[:32 - len(p)] for p, out in zip(prompts, first)] or len(first[0]) < 30
    assert [len(p) + len(t) for p, t in zip(prompts, limited.tokens)] == [32] * 3


@pytest.mark.parametrize("policy", [p for p in POLICIES if p not in ("dense", "oracle")])
def test_a_step_never_looks_at_data(policy, monkeypatch):
    """On tensors without data a branch on a value raises; what passes can be captured in a CUDA graph."""
    import decode
    from torch._subclasses.fake_tensor import FakeTensorMode
    monkeypatch.setattr(decode, "effective_priority",  # its NaN check waits on a CPU, and only there
                        lambda score, decay=None, at=None: score if decay is None else score - at * decay)
    with FakeTensorMode():
        cache = KVCache(shape(), policy_spec(policy), 3, make_scorers(policy, torch.float32))
        assert step(Transformer(shape()), torch.zeros(3, dtype=torch.int64), cache).shape == (3, V)


@pytest.mark.gpu
@pytest.mark.parametrize("policy", DYNAMIC + STATIC)
def test_a_captured_step_equals_an_eager_one(policy):
    model, scorers = make_model(torch.float32).cuda(), make_scorers(policy, torch.float32).cuda()
    rows, logits = torch.tensor([tokens(90, seed=b) for b in range(3)]).cuda(), []
    eager, captured = (KVCache(model.config, policy_spec(policy), 3, scorers, "cuda") for _ in range(2))
    advance = make_step(model, captured, True)
    captured.reset()
    for q in range(90):
        close(advance(rows[:, q]), step(model, rows[:, q], eager), 1e-4)
        assert [captured.kept_positions(i) for i in range(2)] == [eager.kept_positions(i) for i in range(2)], q
    force(model, rows.tolist(), cache=captured, on_logits=lambda t, x: logits.append(x.clone()))
    eager.reset()
    for q in range(90):
        close(logits[q], step(model, rows[:, q], eager), 1e-4)


# ---------------------------------------------------------------------------------------------------------------------
# single policies

def test_random_prompt_keeps_the_prompt_and_refuses_what_cannot_fit():
    model, prompt = make_model(), tokens(N_SELECT)
    spec, scorers = policy_spec("random-prompt"), make_scorers("random-prompt")
    result = generate(model, [prompt, prompt[:3]], spec, scorers, max_new_tokens=60, stop_ids=[])
    for row, n in enumerate((N_SELECT, 3)):
        for heads in (result.cache.kept_positions(i)[row] for i in range(2)):
            assert all(set(range(n)) <= set(head) and len(head) == spec.n_slots for head in heads)
            assert heads[0] != heads[1]
    for i in range(2):  # left over by somebody
        scorers[i].prompt_lengths = torch.tensor([50, 50])
    again = generate(model, [prompt, prompt[:3]], spec, scorers, max_new_tokens=60, stop_ids=[], cache=result.cache)
    assert again.tokens == result.tokens
    with pytest.raises(ValueError, match="2 sinks . a prompt of 10 . 5 window are more than 16 slots"):
        generate(model, [tokens(10), prompt], spec, scorers, max_new_tokens=60, stop_ids=[])
    with pytest.raises(ValueError, match="never evicts the prompt"):
        force(model, [tokens(30)], spec, scorers, on_logits=lambda *_: pytest.fail("it ran"), prompt_lengths=[10])
    check_prompts("random", spec, 1000)


def test_random_prompt_without_a_prompt_is_random():
    _, k, v = data("random", 60)
    scorers = [make_scorer(policy, n_kv_head=H_KV, head_dim=8, window=5, layer=1, seed=3)
               for policy in ("random-prompt", "random")]
    scorers[0].prompt_lengths = torch.tensor([0, 7])
    scores, plain = scorers[0](k, v), scorers[1](k, v)
    assert torch.equal(scores[0], plain[0]) and torch.equal(scores[1, :, 7:], plain[1, :, 7:])
    assert (scores[1, :, :7] > plain.max()).all()
    with pytest.raises(ValueError, match="before each parallel pass"):
        scorers[0](k, v)


def test_tova_layer_decides_for_all_heads_and_protects_nothing():
    q, k, v = data("random", 60)
    held, _ = run(make_layer("tova-layer", make_spec("tova-layer")), q, k, v)
    assert all(row[0] == row[1] for rows in held for row in rows)
    assert not all(0 in row[0] and t in row[0] for t, rows in enumerate(held) for row in rows)
    assert geometry("tova-layer", 4, 64) == (0, 1)
    assert all(geometry(p, 4, 64) == (4, 64) for p in POLICIES if p != "tova-layer")


@pytest.mark.parametrize("policy", ["kvpop-nodelay", "position", "dms-cap"])
def test_parallel_and_one_step_form_agree(policy):
    """Scores of rows with unequal lengths, junk in the pads, against the one-step form fed token by token."""
    for window in (1, 5, 16):
        s = make_scorer(policy, n_kv_head=H_KV, head_dim=8, window=window, layer=1, seed=3).double()
        torch.manual_seed(1)
        for p in s.parameters():
            p.data.add_(torch.randn_like(p) * 0.5)
        lengths, (_, k, v) = torch.tensor([40, 23]), data("random", 40)
        k[1, :, 23:], v[1, :, 23:] = 1e30, math.nan
        scores, state = s(k, v, lengths, return_state=True)
        for b, n in enumerate(lengths.tolist()):
            end, kb, vb = s.init_state(1, "cpu", torch.float64), k[b:b + 1, :, :n], v[b:b + 1, :, :n]
            for q in range(n):
                at = max(0, min(q - window + s.shift, q))
                leave = kb[:, :, at], vb[:, :, at], torch.tensor([q - window])
                score, end = s.step(end, kb[:, :, q], vb[:, :, q], *leave)
                if q >= window:
                    close(scores[b, :, q - window], score[0], 1e-10)
            for name in end:
                close(state[name][b], end[name][0], 1e-10)
            assert (scores[b, :, n - window:] == 0).all() and scores[b, :, :n - window].std(-1).min() > 0.05


def test_position_sees_the_position_alone_and_dms_reads_the_next_token():
    _, k, v = data("random", 40)
    s = make_scorers("position")[0]
    assert torch.equal(s(k, v), s(k.flip(2) * 5, v * 0)) and s(k, v)[0, 0, :-WINDOW].std() > 0.05
    assert not torch.equal(s(k, v)[:, 0], s(k, v)[:, 1])
    s, start = make_scorers("dms-cap")[0], make_scorer("dms-cap", n_kv_head=H_KV, head_dim=8, window=5, layer=0)
    k2 = k.clone()
    k2[:, :, 20] += 1.0
    changed = (s.logits(k2, v) != s.logits(k, v)).any(0).any(0)
    assert changed.nonzero().flatten().tolist() == [19]
    close(s(k, v)[..., :-WINDOW], -s.logits(k, v)[..., :-WINDOW])
    assert (s.logits(k, v)[..., -1] == 0).all() and (start.logits(k, v)[..., :-1] == -5).all()
    assert s.log_gamma() is None and make_scorers("position")[0].log_gamma() is not None


def test_nodelay_is_kvpop_with_delay_zero():
    _, k, v = data("random", 60)
    s, kvpop = make_scorers("kvpop-nodelay")[1], make_scorers("kvpop", delay=0)[1]
    assert torch.equal(s(k, v), kvpop(k, v))
    assert [(n, p.shape) for n, p in s.named_parameters()] == [(n, p.shape) for n, p in kvpop.named_parameters()]


@pytest.mark.parametrize("head_dim", [8, 32, 128])
def test_the_learned_controls_have_the_size_of_kvpop(head_dim):
    for policy in ("dms-cap", "position"):
        s = make_scorer(policy, n_kv_head=2, head_dim=head_dim, window=64, layer=0)
        assert abs(sum(p.numel() for p in s.parameters()) / 2 / mlstm_param_count(head_dim, head_dim) - 1) < 0.05


def test_state_is_charged_as_stored():
    """Bytes of the state per row and KV head with a bf16 cache, against entries of 4 D bytes."""
    table = {"snapkv": 8, "rkv": 8, "kvpop": 17, "kvpop-nodelay": 19}
    config = ModelConfig(**{**vars(shape(32)), "n_layer": 1})
    for policy in POLICIES:
        entries = state_entries(policy, 32, group_size=2, window=64)
        assert entries == table.get(policy, 0), policy
        if policy in ("dense", "oracle"):
            continue
        n_sink, window = geometry(policy, 4, 64)
        scorers = make_all(policy, n_layer=1, n_kv_head=H_KV, head_dim=32, window=window)
        cache = KVCache(config, CacheSpec(n_sink, window, 256, entries), 3, scorers, dtype=torch.bfloat16)
        held = cache.nbytes()["state"] / (3 * H_KV)
        left_out = 4 * policy.startswith("kvpop") + 8 / H_KV  # the stabiliser m; a prompt length a row
        assert entries * 4 * 32 - 128 < held <= entries * 4 * 32 + left_out, policy
    assert state_entries("snapkv", 32, group_size=3, n_queries=5) == 8 and state_entries("rkv", 8, 1, n_queries=16) == 8
    assert state_entries("kvpop-nodelay", 128, window=256) == 67 and state_entries("kvpop-nodelay", 8, window=5) == 6
    with pytest.raises(ValueError, match="group_size"):
        state_entries("snapkv", 32)
    with pytest.raises(ValueError, match="window"):
        state_entries("kvpop-nodelay", 32)


@pytest.mark.parametrize("policy, options, message", [
    ("h2o", {"n_queries": 3}, "h2o has no option 'n_queries'"), ("snapkv", {"mix": 0.1}, "snapkv has no option 'mix'"),
    ("snapkv", {"n_queries": 5, "reach": -1}, "reach must be int, 0 to"),
    ("rkv", {"n_queries": 6}, "n_queries must be int, 1 to 5, got 6"),
    ("rkv", {"n_queries": 0}, "n_queries"), ("vase", {"percent": 101}, "percent"),
    ("vase", {"percent": 2.5}, "percent must be int"),
    ("rkv", {"n_queries": 5, "mix": 1.5}, "mix must be float, 0 to 1"),
    ("dms-cap", {"taus": 3}, "dms-cap has no option 'taus'"), ("kvpop-nodelay", {"delay": 5}, "delay must be"),
    ("position", {"skip_width": 3}, "position has no option 'skip_width'")])
def test_options_are_checked(policy, options, message):
    with pytest.raises(ValueError, match=message):
        make_scorer(policy, n_kv_head=2, head_dim=8, window=5, layer=0, **options)


@pytest.mark.parametrize("policy, options", [("kvpop-nodelay", {"skip_width": 5}), ("position", {"hidden": 7}),
                                             ("dms-cap", {"offset": 4.0}), ("rkv", {"mix": 0.2}),
                                             ("vase", {"percent": 5})])
def test_save_and_load(policy, options, tmp_path):
    scorers = make_scorers(policy, torch.float32, **options)
    save_scorers(scorers, tmp_path, {"n_sink": 2, "window": 5, "budget": 40})
    loaded, settings = load_scorers(tmp_path)
    assert settings["policy"] == policy and all(settings["options"][name] == value for name, value in options.items())
    assert all(torch.equal(a, b) for a, b in zip(scorers.parameters(), loaded.parameters(), strict=True))
    assert all(getattr(s, name, value) == value for s in loaded for name, value in options.items())
    if policy in LEARNED:
        with pytest.raises(ValueError, match="trained with window 5"):
            check_window(loaded, 6)
