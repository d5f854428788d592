"""train.py for every policy: each one trains, resumes exactly and leaves a folder that decode.py runs; what tells the
controls from kvpop; the gate of dms-cap against its formula; the budget in stages; evaluation of every static policy.
"""
import math
import shutil
from types import SimpleNamespace

import pytest
import torch

import bench
import decode
import train
from data.resolve import resolve_policy, weights_folder
from data.scorer_files import load_scorers
from flex_masks import CacheSpec, attention, keep_everything, plan
from model import causal_attend, load_model, save_model
from scorer import LEARNED, make_scorers
from targets import GATE_TAU, Retention, gate_shortfall, gated_attention, noisy_gate, policy_attend
from test_train import CACHE, QUIET, SCORER, base, small_problems  # noqa: F401 (two are fixtures)
from test_train import random_model, refused, run, same, state_of, stop_at, strict_json
from train import ADAPTED, parse_settings, stage_spec

TRAINED = ("kvpop", "kvpop-mlp", "kvpop-nodelay", "position", "dms-cap")
CHARGE = {"kvpop": 5, "kvpop-nodelay": 6}  # entries of 40, at head_dim 8 and window 8
SPEC = CacheSpec(n_sink=2, window=4, budget=12)


def job(policy, base, out, *args):  # noqa: F811
    adapt = ["--train-base"] if policy in ADAPTED and "--train-base" not in args else []
    return ["--model", str(base), *SCORER, "--policy", policy, "--out", str(out), *adapt, *map(str, args)]


@pytest.fixture(scope="module")
def folders(base):  # noqa: F811
    """Three steps of every policy: the scorer alone, or with `-plus` every weight."""
    made = {}
    for policy in TRAINED:
        made[policy] = base.parent / policy
        assert run(*job(policy, base, made[policy]), "--steps", 3) == 0
    for policy in (*ADAPTED, "kvpop-mlp", "dms-cap"):
        name = f"{policy}-plus"
        made[name] = base.parent / name
        assert run(*job(policy, base, made[name], "--train-base"), "--steps", 3) == 0
    return made


NAMES = [*TRAINED, *(f"{policy}-plus" for policy in (*ADAPTED, "kvpop-mlp", "dms-cap"))]


def base_weights(folder):
    return {name: p for name, p in state_of(folder)["parameters"].items() if not name.startswith("scorers.")}


# ---------------------------------------------------------------------------------------------------------------------
# every policy

@pytest.mark.parametrize("name", NAMES)
def test_what_a_run_leaves(base, folders, name):  # noqa: F811
    folder, policy = folders[name], name.removesuffix("-plus")
    before, state = load_model(base).state_dict(), base_weights(folder)
    scorers, settings = load_scorers(folder)
    assert settings["policy"] == policy and settings["weights"] == ("." if "-plus" in name else "../base")
    assert {key: settings[key] for key in CACHE} == CACHE  # the budget holds the state too
    for key, value in before.items():
        assert torch.equal(state[key], value) != ("-plus" in name), key
    if "-plus" in name:
        assert same(dict(load_model(folder).state_dict()), {k: v.bfloat16().float() for k, v in state.items()})
    fresh = make_scorers(policy, n_layer=2, n_kv_head=2, head_dim=8, window=8, seed=0)
    moved = [not torch.equal(a, b) for a, b in zip(scorers.parameters(), fresh.parameters(), strict=True)]
    assert all(moved) and bool(moved) == (policy in LEARNED)
    history, keys = strict_json(folder / "log.json")["history"], {"step", "tokens", "seconds"}
    if policy == "dms-cap":
        keys |= {"kl", "marked", "target"}
    else:
        keys |= ({"retention", "recall"} if policy in LEARNED else set()) | ({"kl"} if "-plus" in name else set())
    assert [h.keys() for h in history] == [keys] * 3
    after = strict_json(folder / "log.json")["after"][policy]
    assert 0 <= after["token_accuracy"] <= 1 and (after["recall"] is None) == (policy not in LEARNED)


@pytest.mark.parametrize("name", NAMES)
def test_its_folder_decodes_alone(folders, tmp_path, capsys, name):
    policy, plus = name.removesuffix("-plus"), "-plus" in name
    folder = shutil.copytree(folders[name], tmp_path / "copy") if plus else folders[name]  # its base is not there
    assert decode.main(["--model", str(folder), "--device", "cpu", "--prompt", "A| M=1 M?\n", "--max-new-tokens",
                        "60"]) == 0
    charge = CHARGE.get(policy, 0)
    assert f"policy: {policy}, budget 40 = 2 sinks + 8 window + {30 - charge} selected" in capsys.readouterr().err


@pytest.mark.parametrize("policy", ADAPTED)
def test_decoding_an_adapted_folder_takes_its_own_weights(base, folders, policy, capsys):  # noqa: F811
    """With and without --policy named; another policy runs on the base that the folder names."""
    folder = folders[f"{policy}-plus"]
    for named in (None, policy):
        where, got, has_scorers, settings = resolve_policy(SimpleNamespace(model=str(folder), policy=named))
        assert (where, got, has_scorers) == (folder, policy, True)
        assert weights_folder(where, settings).resolve() == folder.resolve()
    other = next(p for p in ADAPTED if p != policy)
    where, got, has_scorers, _ = resolve_policy(SimpleNamespace(model=str(folder), policy=other))
    assert where.resolve() == base.resolve() and (got, has_scorers) == (other, False)
    assert "using the base model" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["kvpop-nodelay", "position", "dms-cap", "dms-cap-plus", "random-plus"])
def test_a_stopped_run_ends_where_a_straight_one_does(base, folders, monkeypatch, name):  # noqa: F811
    out = base.parent / f"stopped-{name}"
    args = job(name.removesuffix("-plus"), base, out, *(["--train-base"] if "-plus" in name else []))
    stop_at(monkeypatch, 1, KeyboardInterrupt())
    assert run(*args, "--steps", 3) == 130
    assert run(*args, "--steps", 3, "--resume") == 0
    one, two = state_of(out), state_of(folders[name])
    assert one["step"] == 3 and all(same(one[key], two[key]) for key in ("parameters", "optimizer"))
    for file in ("scorer.json", "scorer.safetensors", *(["model.safetensors"] if "-plus" in name else [])):
        assert (out / file).read_bytes() == (folders[name] / file).read_bytes(), file


def test_first_look_takes_every_kind_of_folder(base, folders, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "MAX_LENGTH", 150)  # bounds what is generated
    assert bench.main(["first-look", "--base", str(base), "--problems", "2", "--policies", "streaming", "--retrofit",
                       *(str(folders[name]) for name in ("streaming-plus", "kvpop-nodelay", "dms-cap-plus"))]) == 0
    rows = [r for r in strict_json(tmp_path / "assets/results/first-look.json")["rows"] if r["family"] == "both"]
    assert [(r["policy"], r["weights"]) for r in rows] == [
        ("dense", "base"), ("streaming", "base"), ("streaming-plus", "adapted"), ("kvpop-nodelay", "base"),
        ("dms-cap", "adapted")]


# ---------------------------------------------------------------------------------------------------------------------
# what a comparison rests on

@pytest.mark.parametrize("policy", ADAPTED)
def test_nothing_to_learn_without_the_base(base, capsys, tmp_path, policy):  # noqa: F811
    args = [a for a in job(policy, base, tmp_path / "out") if a != "--train-base"]
    refused(capsys, run(*args), f"policy {policy} has nothing to learn", "--train-base")
    assert not (tmp_path / "out").exists()


def test_where_masks_coincide_all_policies_train_the_same_base(base, tmp_path):  # noqa: F811
    """Nothing is selected, so every policy has the mask of sinks and window: the same rows in the same order, the same
    KL, steps and rates must then give the same base, bit for bit; with other rows they would not."""
    ends = {}
    for policy in ("kvpop-mlp", "position", *ADAPTED):
        assert run(*job(policy, base, tmp_path / policy, "--train-base"), "--budget", 10, "--steps", 2) == 0
        ends[policy] = base_weights(tmp_path / policy)
        history = strict_json(tmp_path / policy / "log.json")["history"]
        ends[policy]["kl"] = [(h["kl"], h["tokens"]) for h in history]
    assert all(same(ends[policy], ends["kvpop-mlp"]) for policy in ends)
    assert run(*job("streaming", base, tmp_path / "other"), "--budget", 10, "--steps", 2, "--seed", 1) == 0
    assert not any(torch.equal(p, ends["streaming"][name]) for name, p in base_weights(tmp_path / "other").items())


def test_first_steps_tell_the_masks_apart(folders):
    """kvpop-mlp starts with equal scores, which is streaming; random and knorm have masks of their own."""
    first = {name: strict_json(folders[name] / "log.json")["history"][0]["kl"]
             for name in ("kvpop-mlp-plus", "streaming-plus", "random-plus", "knorm-plus")}
    assert first["kvpop-mlp-plus"] == first["streaming-plus"] > 0
    assert len(set(first.values())) == 3


def test_the_position_control_sees_time_alone(folders):
    scorer = load_scorers(folders["position"])[0][0]
    k, v = torch.randn(2, 2, 2, 40, 8)
    scores = scorer(k, v)
    assert torch.equal(scores, scorer(-3 * v, k)) and scores.std(-1).min() > 0
    assert (load_scorers(folders["kvpop-mlp"])[0][0](k, v) - load_scorers(folders["kvpop-mlp"])[0][0](v, k)).any()


def test_without_the_delay_it_is_another_scorer(folders):
    """From one start and one run of rows kvpop and kvpop-nodelay learn apart; only kvpop looks at what comes later."""
    torch.manual_seed(0)
    k, v = torch.randn(2, 1, 2, 40, 8)
    later = k.clone()
    later[:, :, 20:] += 1
    pair = {}
    for policy in ("kvpop", "kvpop-nodelay"):
        pair[policy] = scorers, _ = load_scorers(folders[policy])
        with torch.no_grad():
            scorers[0].w_score.add_(1.0)  # three steps teach it little; make the state count
        changed = (scorers[0](k, v) != scorers[0](later, v))[0, 0].nonzero().flatten().tolist()
        assert changed[0] == (20 - 8 if policy == "kvpop" else 20)
    one, two = (dict(pair[p][0].named_parameters()) for p in pair)
    assert one.keys() == two.keys() and not any(torch.equal(one[name], two[name]) for name in one)


# ---------------------------------------------------------------------------------------------------------------------
# dms-cap

def test_a_noisy_gate_is_a_coin_of_its_probability():
    torch.manual_seed(0)
    logits = torch.tensor([-5.0, -1.0, 0.0, 2.0])[:, None].expand(4, 200_000)
    z = noisy_gate(logits, torch.rand(4, 200_000))
    assert ((z > 0).float().mean(-1) - logits[:, 0].sigmoid()).abs().max() < 0.004  # 4 standard errors
    u = torch.tensor([0.0, 0.25, 1.0], dtype=torch.float64)
    z = noisy_gate(u * 0 + 0.5, u)
    assert z.isfinite().all() and z[1].item() == pytest.approx((0.5 - math.log(3)) / GATE_TAU)
    assert ((z.sigmoid() - 0.5).abs() > 0.45).all()  # at this temperature gates are nearly hard


def gate_inputs(device="cpu", dtype=torch.float64, T=150, D=8):
    g = torch.Generator().manual_seed(0)
    q, k, v = (2 * torch.randn(2, h, T, D, generator=g, dtype=torch.float64) for h in (4, 2, 2))
    z = 3 * torch.randn(2, 2, T, generator=g, dtype=torch.float64)
    weight = torch.randn(2, 4, T, D, generator=g, dtype=torch.float64)
    return [x.to(device, dtype).requires_grad_() for x in (q, k, v, z)], weight.to(device, dtype)


def explicit_gated_attention(q, k, v, z, spec):
    """The definition, with T x T matrices."""
    T = q.shape[2]
    k, v, z = (x.repeat_interleave(2, 1) for x in (k, v, z))
    d, t = torch.arange(T)[:, None], torch.arange(T)
    keep = torch.where((d - t >= spec.window) & (t >= spec.n_sink), 1 - z.sigmoid()[:, :, None], 1.0)
    p = (q @ k.mT / q.shape[-1]**0.5).exp() * keep * (t <= d)
    return p @ v / p.sum(-1, keepdim=True)


def test_gated_attention_is_its_formula():
    (q, k, v, z), weight = gate_inputs(T=30)
    out, want = gated_attention(q, k, v, z, SPEC), explicit_gated_attention(q, k, v, z, SPEC)
    assert (out - want).abs().max() < 1e-12
    got, expected = (torch.autograd.grad((x * weight).sum(), (q, k, v, z)) for x in (out, want))
    for a, b in zip(got, expected):
        assert b.abs().max() > 0.1 and (a - b).abs().max() < 1e-11
    never = got[3].abs().amax((0, 1)) == 0  # sinks, and what no query sees from beyond the window
    assert never.nonzero().flatten().tolist() == [0, 1, *range(26, 30)]
    # the gate alone, as in the first layer of a frozen base, and by finite differences
    value = lambda z: (gated_attention(q.detach(), k.detach(), v.detach(), z, SPEC) * weight).sum()  # noqa: E731
    alone = torch.autograd.grad(value(z), z)[0]
    assert (alone - got[3]).abs().max() < 1e-12
    for at in [(0, 0, 5), (1, 1, 20), (0, 1, 2)]:
        step = torch.zeros_like(z)
        step[at] = 1e-5
        difference = (value(z.detach() + step) - value(z.detach() - step)).item() / 2e-5
        assert abs(difference - alone[at].item()) < 1e-6


def test_gates_open_and_shut():
    (q, k, v, z), _ = gate_inputs(T=60)
    dense = attention(q, k, v, keep_everything(2, 2, 60))[0]
    assert (gated_attention(q, k, v, z * 0 - 1000, SPEC) - dense).abs().max() < 1e-12
    window = attention(q, k, v, plan(torch.zeros(2, 2, 60), CacheSpec(2, 4, 6)))[0]  # sinks and window, no more
    assert (gated_attention(q, k, v, z * 0 + 1000, SPEC) - window).abs().max() < 1e-12
    some = torch.rand(2, 2, 60) < 0.5  # hard gates are an eviction at the window's edge
    evict_at = torch.where(some & (torch.arange(60) >= 2), torch.arange(60) + 4, 2**31 - 1).int()
    hard = gated_attention(q, k, v, torch.where(some, 1000.0, -1000.0).double(), SPEC)
    assert (hard - attention(q, k, v, evict_at)[0]).abs().max() < 1e-12


def test_shortfall_is_its_definition():
    torch.manual_seed(0)
    gates = [torch.randn(2, 2, 40, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    lengths, ramp = torch.tensor([40, 31]), torch.tensor(0.9)
    loss, marked, target = gate_shortfall(gates, SPEC, lengths, ramp)
    hits = [[(z[b, h, t] > 0).item() and t >= 2 for t in range(n - 4)]
            for z in gates for b, n in enumerate([40, 31]) for h in range(2)]
    assert marked.item() == pytest.approx(sum(map(sum, hits)) / sum(map(len, hits)))
    assert target.item() == pytest.approx(0.9 * (1 - (12 - 4) / (35.5 - 4)))
    assert loss.item() == pytest.approx(target.item() - marked.item()) and loss > 0
    loss.backward()
    for z in gates:
        for b, n in enumerate([40, 31]):
            s = z.detach()[b].sigmoid()
            want = -s * (1 - s) / (3 * 2 * (36 + 27))
            want[:, :2] = want[:, n - 4:] = 0
            assert (z.grad[b] - want).abs().max() < 1e-9
    # at the target share rows end with n_slots live tokens on average: what the formula is for
    live = [4 + (n - 4) * (1 - target.item() / 0.9) for n in (40, 31)]
    assert sum(live) / 2 == pytest.approx(SPEC.n_slots)


def test_shortfall_asks_for_no_more_than_its_share():
    """One-sided and global: one layer shut and one open is enough where half is asked for; more costs nothing."""
    gates = [torch.full((1, 2, 40), sign, requires_grad=True) for sign in (9.0, -9.0)]
    lengths = torch.tensor([40])
    enough = gate_shortfall(gates, SPEC, lengths, torch.tensor(0.5))
    assert enough[0] == 0 and enough[1] > 0.4 and enough[2] < 0.4
    enough[0].backward()
    assert all((z.grad == 0).all() for z in gates)
    assert gate_shortfall(gates, SPEC, lengths, torch.tensor(1.0))[0] > 0.2
    for short in ([3], [12]):  # rows that the cache holds whole: nothing to mark
        loss, _, target = gate_shortfall(gates, SPEC, torch.tensor(short), torch.tensor(1.0))
        assert loss == 0 and target == 0


@pytest.mark.parametrize("adapt", [(), ("--train-base",)])
def test_dms_trains_towards_its_target(base, tmp_path, adapt):  # noqa: F811
    """The target rises linearly to 60 % of the run and the gates follow: this base hardly attends, the KL lets them."""
    assert run(*job("dms-cap", base, tmp_path, *adapt), "--steps", 20, "--learning-rate", 0.3) == 0
    history = strict_json(tmp_path / "log.json")["history"]
    share = [h["target"] / min(1.0, (i + 1) / 12) for i, h in enumerate(history)]  # 1 - 32 / (mean length - 8)
    assert 0.6 < min(share) <= max(share) < 0.95
    marked = [h["marked"] for h in history]
    print([round(m, 2) for m in marked])
    assert marked[0] < 0.05 and min(marked[-3:]) > 0.9 * max(share)
    # what is marked goes first when hard gates meet the budget: the evaluation's priorities are those of the logits
    assert strict_json(tmp_path / "log.json")["after"]["dms-cap"]["recall"] is not None


def test_the_kl_teaches_the_gates():
    """Without the shortfall the scorers get gradients, through the attention of every layer."""
    model = random_model()
    model.scorers = make_scorers("dms-cap", n_layer=2, n_kv_head=2, head_dim=8, window=8, offset=0.0)
    with torch.no_grad():
        for p in model.scorers.parameters():
            p.add_(0.1 * torch.randn_like(p))
    idx, lengths, starts = train.collate_problems([train.Problems("train", 0)[i] for i in range(2)])
    mask, noise = train.response_mask(idx.shape[1], lengths, starts), torch.rand(2, 2, 2, idx.shape[1])
    spec, gates = CacheSpec(**CACHE), []
    with torch.no_grad():
        teacher = model(idx, causal_attend)
    hidden = model(idx, train.gated_attend(model, spec, noise, gates))
    kl = train.distillation_kl(model, hidden, *train.top_logits(model, teacher, 256), mask)
    assert kl > 0 and [z.shape for z in gates] == [(2, 2, idx.shape[1])] * 2
    kl.backward()
    assert all(p.grad.abs().max() > 0 for p in model.scorers.parameters())
    # pads reach nothing: neither the loss nor a gradient
    want = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    idx[torch.arange(idx.shape[1]) >= lengths[:, None]] = 65
    hidden = model(idx, train.gated_attend(model, spec, noise, []))
    train.distillation_kl(model, hidden, *train.top_logits(model, teacher, 256), mask).backward()
    for name, p in model.named_parameters():
        assert (p.grad - want[name]).abs().max() <= 1e-5 * want[name].abs().max(), name


# ---------------------------------------------------------------------------------------------------------------------
# a budget that falls

def test_stages_of_the_budget():
    settings = parse_settings(["--budget-start", "640", "--budget", "40", "--steps", "80", *QUIET])
    spec = CacheSpec(2, 8, 40, state_entries=5)
    specs = [stage_spec(spec, settings, step) for step in range(80)]
    assert [s.budget for s in specs] == [640] * 10 + [320] * 10 + [160] * 10 + [80] * 10 + [40] * 40
    assert all((s.n_sink, s.window, s.state_entries) == (2, 8, 5) for s in specs) and specs[-1] == spec
    settings = parse_settings(["--steps", "5", *QUIET])
    assert all(stage_spec(spec, settings, step) == spec for step in range(5))


def test_a_run_over_several_budgets(base, tmp_path, monkeypatch):  # noqa: F811
    made = []

    def make(spec, *args, **options):
        if isinstance(options["noise"], torch.Tensor):  # of a step; an evaluation makes its own
            made.append(spec.budget)
        return Retention(spec, *args, **options)
    monkeypatch.setattr(train, "Retention", make)
    args = job("kvpop", base, tmp_path / "straight", "--budget-start", 160, "--steps", 8)
    assert run(*args) == 0 and made == [160, 113, 80, 57, 40, 40, 40, 40]
    history = strict_json(tmp_path / "straight" / "log.json")["history"]
    assert load_scorers(tmp_path / "straight")[1]["budget"] == 40 and len(history) == 8
    args = job("kvpop", base, tmp_path / "stopped", "--budget-start", 160, "--steps", 8)
    stop_at(monkeypatch, 2, KeyboardInterrupt())
    assert run(*args) == 130 and run(*args, "--resume") == 0
    assert made[8:] == [160, 113, 80, 80, 57, 40, 40, 40, 40]
    assert same(state_of(tmp_path / "stopped")["parameters"], state_of(tmp_path / "straight")["parameters"])
    assert run(*job("kvpop", base, tmp_path / "constant", "--steps", 8)) == 0
    assert not same(state_of(tmp_path / "constant")["parameters"], state_of(tmp_path / "straight")["parameters"])


@pytest.mark.parametrize("policy, start", [("kvpop", 39), ("kvpop", -1), ("dms-cap", 80)])
def test_budgets_that_cannot_fall(base, capsys, tmp_path, policy, start):  # noqa: F811
    refused(capsys, run(*job(policy, base, tmp_path / "out"), "--budget-start", start), "--budget-start")


# ---------------------------------------------------------------------------------------------------------------------
# evaluation

def test_every_static_policy_can_be_evaluated():
    model = random_model()
    for policy in (*TRAINED, *ADAPTED, "random-prompt", "oracle"):
        scorers = make_scorers(policy, n_layer=2, n_kv_head=2, head_dim=8, window=8)
        result = train.evaluate(model, "cpu", 1, CacheSpec(2, 8, 160), scorers)
        assert result["n_problems"] == 2 and (result["recall"] is None) == (policy not in LEARNED), policy
    with pytest.raises(ValueError, match="h2o ranks the whole cache"):
        scorers = make_scorers("h2o", n_layer=2, n_kv_head=2, head_dim=8, window=8)
        train.evaluate(model, "cpu", 1, CacheSpec(2, 8, 160), scorers)


def test_random_prompt_learns_how_long_prompts_are():
    model, spec = random_model(), CacheSpec(2, 8, 60)
    scorers = make_scorers("random-prompt", n_layer=2, n_kv_head=2, head_dim=8, window=8)
    idx = torch.randint(65, 90, (2, 150))
    lengths, starts, plans = torch.tensor([150, 120]), torch.tensor([19, 40]), []
    attend = policy_attend(scorers, spec, lengths, lambda *args: plans.append(args[-1]), starts + 1)
    with torch.no_grad():
        model(idx, attend)
        model(idx, attend)  # set anew in each pass
    assert len(plans) == 4 and not any(torch.equal(plans[0][b], plans[1][b]) for b in range(2))
    for evict_at in plans:
        assert (evict_at[0, :, :20] > 150).all() and (evict_at[1, :, :41] > 150).all()
        assert (evict_at[0, :, 20:140] <= 150).any(-1).all() and (evict_at[1, :, 41:110] <= 150).any(-1).all()
    with pytest.raises(ValueError, match="random-prompt: set prompt_lengths"):
        model(idx, policy_attend(scorers, spec, lengths))


# ---------------------------------------------------------------------------------------------------------------------
# on a GPU

@pytest.mark.gpu
@pytest.mark.parametrize("T, D", [(150, 8), (300, 32), (512, 64)])
def test_fused_gates_are_the_formula(T, D):
    """FlexAttention with a captured tensor that learns, against the dense form in fp64; ragged lengths too."""
    spec = CacheSpec(2, 20, 40)
    (exact, weight), (single, _) = gate_inputs(T=T, D=D), gate_inputs("cuda", torch.float32, T, D)
    want = gated_attention(*exact, spec)
    got = gated_attention(*single, spec)
    assert (got.double().cpu() - want).abs().max() < 5e-3 * want.abs().max()  # TF32 products
    expected = torch.autograd.grad((want * weight).sum(), exact)
    grads = torch.autograd.grad((got * weight.cuda().float()).sum(), single)
    for name, a, b in zip("qkvz", grads, expected):
        assert (a.double().cpu() - b).norm() < 1e-2 * b.norm(), name
    frozen = [x.detach() for x in single[:3]]  # a frozen base: the gate alone, bf16 as under autocast
    got = gated_attention(*(x.bfloat16() for x in frozen), single[3], spec)
    alone = torch.autograd.grad((got.float() * weight.cuda().float()).sum(), single[3])[0]
    assert (alone.double().cpu() - expected[3]).norm() < 5e-2 * expected[3].norm()


@pytest.mark.gpu
@pytest.mark.parametrize("policy, args", [
    ("dms-cap", ()), ("dms-cap", ("--train-base",)), ("random", ()),
    ("kvpop-nodelay", ("--train-base", "--budget-start", 80, "--steps", 40, "--log-every", 40))])  # 5 steps a stage
def test_a_graphed_run_is_the_ordinary_run(base, tmp_path, policy, args):  # noqa: F811
    """As in test_train_runs.py; every stage of a falling budget is captured in its fourth step."""
    ends = {}
    for name in ("graph", "no-graph"):
        out = tmp_path / name
        assert train.main([*QUIET, "--steps", "12", "--log-every", "2", *job(policy, base, out, *args), "--no-compile",
                           "--device", "cuda", "--workers", "0", f"--{name}"]) == 0
        ends[name] = state_of(out)
    for a, b in zip(ends["graph"]["history"], ends["no-graph"]["history"], strict=True):
        for key in {"kl", "retention", "recall", "marked", "target"} & a.keys():
            assert a[key] == pytest.approx(b[key], rel=0.03, abs=3e-3), (key, a, b)
    before = load_model(base).state_dict()
    for name, want in ends["no-graph"]["parameters"].items():
        moved = (want - (before[name].cuda() if name in before else want * 0)).norm()
        assert (ends["graph"]["parameters"][name] - want).norm() <= 0.1 * moved + 1e-6, name
