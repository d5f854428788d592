"""
The policies of scorer.py themselves: what each one prefers, what random depends on, where the learned ones start, their
size and decay. The contract that all of them keep: test_scorer.py.
"""
import pytest
import torch

import scorer as S
from scorer import make_scorer
from test_scorer import B, D, H, W, make, run_steps, tokens


def test_streaming_has_no_preference():
    k, v = tokens(50)
    assert (make("streaming")(k, v) == 0).all()


def test_knorm_keeps_small_keys():
    k, v = (z.clone() for z in tokens(50))
    k[:, :, 7] *= 100.0
    k[:, :, 9] *= 0.01
    scores = make("knorm")(k, v)
    assert (scores.argmin(-1) == 7).all() and (scores.argmax(-1) == 9).all()
    torch.testing.assert_close(scores, -k.square().sum(-1).sqrt())


def test_random_is_a_function_of_seed_layer_head_and_position():
    T = 20_000
    k, v = torch.zeros(2, 1, H, T, D).unbind(0)
    draw = lambda **kw: make("random", **kw)(k, v)[0]
    u = draw()
    assert u.dtype == torch.float32 and u.min() >= 0 and u.max() < 1
    assert torch.equal(u, draw()) and torch.equal(u[:, :50], make("random")(k[:, :, :50], v[:, :, :50])[0])
    others = [draw(seed=1), draw(layer=2), draw(seed=1, layer=0)]
    for a in [*others, u.roll(1, 0), u.roll(1, 1)]:  # another seed, layer, head, or the neighbouring position
        assert abs(torch.corrcoef(torch.stack([u.flatten(), a.flatten()]))[0, 1]) < 0.02
    counts = torch.stack([torch.histc(u[h], 20, 0, 1) for h in range(H)])
    chi2 = ((counts - T / 20) ** 2 / (T / 20)).sum(-1)
    assert (chi2 < 50).all(), chi2  # 19 degrees of freedom: 50 is p = 1e-4
    s = make("random")
    one = [s.step({}, *[k[:, :, 0]] * 4, torch.tensor([t]))[0] for t in (0, 1, 777, 19_999)]
    assert torch.equal(torch.cat(one).T, u[:, [0, 1, 777, 19_999]])  # bit for bit


def test_random_in_rows_at_different_positions():
    """The leaving position is per row in a batch with unequal prompts."""
    s, k = make("random"), torch.zeros(2, H, D)
    both, _ = s.step({}, k, k, k, k, torch.tensor([3, 40]))
    want = s(*torch.zeros(2, 1, H, 50, D).unbind(0))[0]
    assert torch.equal(both, torch.stack([want[:, 3], want[:, 40]]))


def test_oracle_hands_through_and_cannot_decode():
    s, (k, v) = make("oracle"), tokens(30)
    with pytest.raises(ValueError, match="set scorer.scores"):
        s(k, v)
    s.scores = torch.randn(B, H, 30)
    assert torch.equal(s(k, v), s.scores.double())
    with pytest.raises(ValueError, match=r"\(2, 3, 20\)"):
        s(k[:, :, :20], v[:, :, :20])
    with pytest.raises(ValueError, match="needs the future"):
        run_steps(s, k, v)


@pytest.mark.parametrize("policy", ["kvpop", "kvpop-mlp"])
def test_start_is_neutral_but_not_dead(policy):
    """Equal scores at the start, so it begins as StreamingLLM; one gradient step and they differ."""
    s, (k, v) = make(policy, noise=0.0), tokens(60)
    scores = s(k, v)
    assert (scores == 0).all()
    scores[..., : 60 - W: 2].sum().backward()
    with torch.no_grad():
        for p in s.parameters():
            if p.grad is not None:
                p -= 0.1 * p.grad
    assert s(k, v)[..., :-W].std(-1).min() > 1e-4
    low, high = torch.log(torch.tensor([0.999, 0.999999], dtype=torch.float64))
    torch.testing.assert_close(s.log_gamma(), ((low + high) / 2).expand(H), atol=1e-9, rtol=0)  # alpha = 0: half way


def test_start_of_the_mlstm():
    s = make_scorer("kvpop", n_kv_head=4, head_dim=D, window=W, layer=0)
    eye = torch.eye(D // 2).expand(4, -1, -1)
    for weight, own, other in ((s.w_q, slice(0, D), slice(D, None)), (s.w_v, slice(D, None), slice(0, D))):
        torch.testing.assert_close(weight[:, own].mT @ weight[:, own], eye, atol=1e-5, rtol=0)
        assert (weight[:, other] == 0).all()
    assert torch.equal(s.w_q, s.w_k) and s.w_q.data_ptr() != s.w_k.data_ptr()
    assert (s.w_q[0] - s.w_q[1]).abs().max() > 0.1 and (s.w_q[:, :D] - s.w_v[:, D:]).abs().max() > 0.1
    assert (s.w_gate == 0).all() and (s.b_gate[:, 0] == 0).all()
    odds = s.b_gate[:, 1].exp() / W  # of remembering a token against forgetting it, f / (1 - f), in windows
    torch.testing.assert_close(odds, torch.tensor([-1.0, 0.0, 1.0, 2.0]).exp(), atol=0, rtol=1e-5)


def test_start_depends_on_seed_and_layer_only():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    build = lambda seed, layer: make_scorer("kvpop", n_kv_head=H, head_dim=D, window=W, layer=layer, seed=seed)
    a, b, c, d = build(0, 0), build(0, 0), build(0, 1), build(1, 0)
    assert torch.equal(torch.get_rng_state(), before)
    for name in ("w_q", "w_v", "w_skip"):
        w = getattr(a, name)
        assert torch.equal(w, getattr(b, name))
        assert not torch.equal(w, getattr(c, name)) and not torch.equal(w, getattr(d, name))


def test_log_gamma_stays_in_its_range():
    s = make("kvpop")
    with torch.no_grad():
        s.alpha.copy_(torch.tensor([-100.0, 0.3, 100.0]))
    low, mid, high = s.log_gamma().exp().tolist()
    assert low == pytest.approx(0.999, abs=1e-12) and high == pytest.approx(0.999999, abs=1e-12) and low < mid < high
    s.log_gamma().sum().backward()
    assert s.alpha.grad[1] < -1e-5 or s.alpha.grad[1] > 1e-5
    assert s.float().log_gamma().dtype == torch.float32 and (s.log_gamma() < 0).all()
    assert make("kvpop", decay=False).log_gamma() is None and make("knorm").log_gamma() is None


@pytest.mark.parametrize("head_dim", [8, 32, 64, 128])
def test_both_learned_scorers_have_the_same_size(head_dim):
    size = {}
    for policy in ("kvpop", "kvpop-mlp"):
        s = make_scorer(policy, n_kv_head=2, head_dim=head_dim, window=W, layer=0)
        size[policy] = sum(p.numel() for p in s.parameters()) / 2  # per head
    assert size["kvpop"] == S.mlstm_param_count(head_dim, head_dim) + 1  # + alpha
    assert abs(size["kvpop-mlp"] / size["kvpop"] - 1) < 0.02


def test_skip_width_zero_is_the_scorer_without_skip():
    s, (k, v) = make("kvpop", skip_width=0), tokens(60)
    full = make("kvpop")
    with torch.no_grad():
        for name, p in full.named_parameters():
            p.copy_(dict(s.named_parameters())[name] if "skip" not in name else torch.zeros_like(p))
    torch.testing.assert_close(s(k, v), full(k, v), atol=1e-12, rtol=0)
    assert s(k, v).std() > 0.05
