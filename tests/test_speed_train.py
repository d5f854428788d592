"""bench.py train: its count of work by hand, parts that add up to the step, and a reduced run on a CPU."""
import json
import time

import pytest
import torch

import bench
import flex_masks
import model as model_file
import targets
import train as training
from data import speed_train
from flex_masks import CacheSpec, plan
from model import ModelConfig, Transformer
from test_masks import Kernel

SMALL = ModelConfig(vocab_size=100, n_layer=2, n_embd=8, n_head=4, n_kv_head=2, head_dim=6, intermediate_size=10,
                    max_seq_len=64)


def test_matrix_products_by_hand():
    # q 8 x 24, k and v 8 x 12 each, o 24 x 8; gate, up, down 8 x 10 each: 192 + 96 + 96 + 192 + 240 weights a layer
    assert speed_train.matmul_flops(SMALL, head=False) == 2 * 2 * 816
    assert speed_train.matmul_flops(SMALL) == 2 * (2 * 816 + 8 * 100)
    # the weights that a product is taken with are all but the norms, and the embedding where it is no head
    for tied in (True, False):
        config = speed_train.shape_of("qwen3-8b", reduced=True)
        config.tie_embeddings = tied
        weights = {n: p.numel() for n, p in Transformer(config).named_parameters() if p.dim() == 2}
        unused = 0 if tied else weights["model.embed_tokens.weight"]
        assert speed_train.matmul_flops(config) == 2 * (sum(weights.values()) - unused)


def test_attention_by_hand():
    # a pair: 6 multiply-adds for its score and 6 for its value, in 2 layers
    assert speed_train.attention_flops(SMALL, 1) == 2 * (2 * 6 + 2 * 6)
    assert speed_train.causal_pairs(SMALL, 3, 5) == 3 * 4 * (1 + 2 + 3 + 4 + 5)


def test_a_step_by_hand():
    dense, pairs = 4 * (1 + 2 + 3), 4 * (1 + 2 + 2)  # three tokens; a window of two; four query heads
    forward, head = 3 * 2 * (2 * 816 + 800), 3 * 2 * 800
    assert speed_train.step_flops(SMALL, 1, 3, pairs) == 3 * (forward + 48 * pairs) + forward + 48 * dense
    assert speed_train.step_flops(SMALL, 1, 3, dense) == 4 * (forward + 48 * dense)
    assert speed_train.step_flops(SMALL, 1, 3, pairs, freeze_base=True) == forward - head + 48 * pairs
    assert speed_train.step_flops(SMALL, 2, 3, 2 * pairs) == 2 * speed_train.step_flops(SMALL, 1, 3, pairs)


def test_full_size():
    """Qwen3-4B at 16,384 tokens: 2 x 4.02 billion weights a token, 16,384^2 / 2 pairs of 32 heads in 36 layers."""
    config = speed_train.shape_of("qwen3-4b")
    assert speed_train.matmul_flops(config) == pytest.approx(2 * 4.02e9, rel=0.001)
    dense = speed_train.causal_pairs(config, 1, 16384)
    assert speed_train.attention_flops(config, dense) == pytest.approx(36 * 4 * 4096 * 16384**2 / 2, rel=1e-4)
    assert speed_train.step_flops(config, 1, 16384, dense) == pytest.approx(4 * (131.8e12 + 79.2e12), rel=0.001)


def make_job(policy="kvpop", sort=True, T=96, **options):
    args = bench.parse_args(["train"])
    args.budget, args.window = 48, 8
    for name, value in options.items():
        setattr(args, name, value)
    config = speed_train.shape_of("qwen3-4b", reduced=True)
    return speed_train.Job(policy, sort, T, *speed_train.make_base(config, "cpu", args.freeze_base), args, "cpu")


def test_parts_are_exclusive_and_the_visible_pairs_known(monkeypatch):
    """On a clock that only some functions turn: each call of them is its part's, whatever it lies in."""
    job, clock = make_job(), [0.0]
    monkeypatch.setattr(speed_train.Timer, "now", lambda self: clock[0])

    def takes(owner, name, seconds):
        real = getattr(owner, name)

        def slow(*args, **how):
            clock[0] += seconds
            return real(*args, **how)
        monkeypatch.setattr(owner, name, slow)
    for owner, name, seconds in (
            (training, "top_logits", 2), (training, "distillation_kl", 3), (training, "optimizer_step", 5),
            (targets, "attention", 7), (targets, "future_attention", 11), (targets, "judge", 13),
            (flex_masks, "plan", 17), (targets, "score", 19),
            (job.teacher, "forward", 23), (job.model, "forward", 29), (torch.Tensor, "backward", 31)):
        takes(owner, name, seconds)
    planned, real = [], flex_masks.plan
    monkeypatch.setattr(flex_masks, "plan", lambda *a, **k: planned.append(real(*a, **k)) or planned[-1])
    ms, pairs = job.step_in_parts()
    assert ms == dict(  # two layers, recomputed once: attention and scorers run four times, plans and targets twice
        teacher=23e3, student=29e3 + 2 * 7e3, backward=2 * 7e3, plan=2 * 17e3, transposed=2 * 11e3,
        scorer=4 * 19e3 + 2 * 13e3, kl=2e3 + 3e3 + 31e3, optimizer=5e3, other=0)
    t = torch.arange(96)
    brute = [((t <= q) & (q < evict_at[0, h])).sum().item() for evict_at in planned for h in (0, 1) for q in range(96)]
    assert pairs == 2 * sum(brute) / 2  # two query heads a KV head, two layers


def test_parts_of_a_real_step_add_up():
    job = make_job()
    job.step()
    start = time.perf_counter()
    ms, _ = job.step_in_parts()
    whole = 1e3 * (time.perf_counter() - start)
    assert list(ms) == list(speed_train.PARTS) and all(ms[name] > 0 for name in ms)
    assert sum(ms.values()) <= whole and ms["backward"] + ms["student"] > 0.1 * whole
    assert job.scorer_backward_ms() > 0 and job.scored[1][1].shape == (1, 2, 96, 32)  # of the step's own keys
    assert "forward" not in vars(job.model) and targets.plan is flex_masks.plan  # nothing is left behind


def test_dense_is_plain_distillation():
    """Nothing evicts and nothing scores: with the weights of the teacher there is nothing to learn."""
    job = make_job("dense")
    assert all(not n.startswith("scorers") for n, _ in job.model.named_parameters())
    values, norm = job.step()
    assert set(values) == {"kl"} and values["kl"].abs() < 1e-6 and norm < 1e-3
    assert job.step_in_parts()[1] == speed_train.causal_pairs(job.model.config, 1, 96)
    assert job.scorer_backward_ms() == 0
    values, norm = make_job("kvpop").step()
    assert values["kl"] > 1e-5 and norm > 1e-3 and values["retention"].shape == (2,)


def test_a_bf16_teacher_is_the_model_that_is_trained(monkeypatch):
    """In the precisions of a GPU: fp32 weights with products in bf16 give what their bf16 copy gives, bit for bit, as
    long as what runs between the blocks is bf16 in both."""
    monkeypatch.setattr(training, "autocast", lambda device: torch.autocast("cpu", torch.bfloat16))
    found = []
    for stream in (torch.bfloat16, None):
        job = make_job("dense")
        job.teacher.bfloat16()
        with torch.no_grad():
            for mine, its in zip(job.model.parameters(), job.teacher.parameters()):
                mine.copy_(its)
        job.model.stream_dtype = stream
        found.append(job.step()[0]["kl"].item())
    assert found[0] == 0 and found[1] > 1e-9


def test_a_frozen_base_trains_the_scorers_alone():
    job = make_job(freeze_base=True)
    before = {n: p.clone() for n, p in job.model.named_parameters()}
    values, _ = job.step()
    assert job.teacher is None and set(values) == {"retention"}
    moved = {n for n, p in job.model.named_parameters() if not torch.equal(p, before[n])}
    assert moved and all(n.startswith("scorers.") for n in moved)
    ms, _ = job.step_in_parts()
    assert ms["teacher"] == ms["kl"] == 0 and ms["backward"] > 0


@pytest.mark.parametrize("recompute", [True, False])
def test_compiled_blocks_change_nothing(monkeypatch, recompute):
    """Two graphs for all layers, and two for the teacher, which takes no gradients; activations kept or not."""
    seen = []

    def count(graph, inputs):
        seen.append(len(graph.graph.nodes))
        return graph.forward
    halves = [torch.compile(half, dynamic=False, fullgraph=True, backend=count)
              for half in (model_file.Block.before, model_file.Block.after)]
    monkeypatch.setattr(model_file, "COMPILED_HALVES", halves)
    ends = []
    for compiled in (False, True):
        job = make_job(recompute=recompute)
        for block in (*job.model.model.layers, *job.teacher.model.layers):
            block.compiled = compiled
        values = [{k: v.clone() for k, v in job.step()[0].items()} for _ in range(2)]
        ends.append((values, [p.detach() for p in job.model.parameters()]))
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-4, atol=1e-6)
    assert len(seen) == 4
    torch._dynamo.reset()


def test_a_recomputed_forward_plans_nothing_anew(monkeypatch):
    """On the path of a GPU: one order of the keys a layer for the two forwards of a block, and the same gradients."""
    monkeypatch.setattr(flex_masks, "compiled_flex_attention", Kernel())
    monkeypatch.setattr(flex_masks, "has_kernel", lambda q: True)
    ends = []
    for name, sort in (("lifetime_order", True), ("evict_at_block_mask", False)):
        calls, real = [], getattr(flex_masks, name)
        monkeypatch.setattr(flex_masks, name, lambda *a: calls.append(1) or real(*a))
        for recompute in (True, False):
            calls.clear()
            job = make_job(sort=sort, T=256, recompute=recompute)
            values, norm = job.step()
            assert len(calls) == 2, "two layers"
            # AdamW's first moment is a tenth of the gradient; the step itself would blow up what is zero but for
            # rounding
            moments = [job.optimizer.state[p]["exp_avg"] for p in job.model.parameters()]
            ends.append((values, norm, moments))
    for end in ends[1:]:
        torch.testing.assert_close(end, ends[0], rtol=2e-3, atol=1e-6)


def test_a_frozen_base_recomputes_its_scorers_alone(monkeypatch):
    calls, real, ends = [], targets.score, []
    monkeypatch.setattr(targets, "score", lambda *a: calls.append(1) or real(*a))
    for recompute in (False, True):
        job = make_job(freeze_base=True, recompute=recompute)
        values, norm = job.step()
        ends.append((values["retention"], norm, [p.detach() for p in job.model.scorers.parameters()]))
    assert len(calls) == 2 + 4
    torch.testing.assert_close(ends[1], ends[0])


def test_settings_are_those_of_train(monkeypatch):
    job = make_job(sort=False, micro_batch=3)
    s = job.settings
    assert (s.train_base, s.recompute, s.sort, s.batch_size, s.context) == (True, True, False, 3, 96)
    assert (s.budget, s.n_sink, s.window, s.top_k, s.policy) == (48, 4, 8, 256, "kvpop")
    assert job.spec == CacheSpec(4, 8, 48, 17) and job.inputs[0].shape == (3, 96)
    given, real = [], targets.attention
    monkeypatch.setattr(targets, "attention", lambda *a, **k: given.append(a[4]) or real(*a, **k))
    job.step()
    assert given == [None] * 4  # in time order, forward and recomputed
    make_job().step()
    assert given[4:] == [CacheSpec(4, 8, 48, 17)] * 4


ROW = {"shape", "policy", "sorted", "T", "micro_batch", "gpus", "parallel", "freeze_base", "step_ms", "tokens_per_s",
       "mfu", "peak_gib", "visible_share", "breakdown", "recompute", "tf32", "reduced", "oom"}


def test_reduced_run_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert bench.main(["train", "--lengths", "1"]) == 2 and bench.main(["train", "--repeats", "0"]) == 2
    short = ["train", "--lengths", "200", "--repeats", "1"]
    assert bench.main([*short, "--policies", "dense"]) == 0
    assert bench.main(short) == 0
    assert bench.main([*short, "--freeze-base", "--policies", "dense", "kvpop"]) == 0
    rows = json.loads((tmp_path / "assets/results/train.json").read_text())["rows"]
    assert [(r["policy"], r["sorted"], r["freeze_base"]) for r in rows] == [
        ("dense", None, False), ("kvpop-mlp", True, False), ("kvpop", True, False), ("kvpop", False, False),
        ("kvpop", True, True), ("kvpop", False, True)]
    assert capsys.readouterr().out.count("dense, T 200") == 1  # the second run kept the first one's row
    for row in rows:
        assert set(row) == ROW and row["reduced"] and row["T"] == 200 and row["oom"] == [] and row["peak_gib"] is None
        assert row["step_ms"] > 0 and row["mfu"] > 0 and row["tokens_per_s"] == pytest.approx(2e5 / row["step_ms"])
        assert set(row["breakdown"]) == set(speed_train.PARTS)
        assert (row["visible_share"] < 1) == (row["policy"] != "dense")
    assert bench.main([*short, "--n-sink", "2"]) == 2  # other settings do not overwrite


def test_out_of_memory_leaves_a_row(tmp_path, monkeypatch):
    """What does not fit is None and named; the next row is measured."""
    monkeypatch.chdir(tmp_path)
    real = speed_train.Job.step

    def fail(self):
        if self.settings.policy == "dense":
            real(self)
            self.model.model.norm.weight.grad = torch.ones_like(self.model.model.norm.weight)
            raise torch.OutOfMemoryError
        assert self.model.model.norm.weight.grad is None, "gradients of the step that was cut off"
        return real(self)
    monkeypatch.setattr(speed_train.Job, "step", fail)
    assert bench.main(["train", "--lengths", "100", "--policies", "dense", "kvpop-mlp", "--repeats", "1"]) == 0
    dense, mlp = json.loads((tmp_path / "assets/results/train.json").read_text())["rows"]
    assert dense["oom"] == ["step_ms"] and dense["step_ms"] is dense["mfu"] is dense["breakdown"] is None
    assert mlp["oom"] == [] and mlp["step_ms"] > 0


@pytest.mark.parametrize("tf32", [False, True])
def test_tf32_ends_with_the_step(monkeypatch, tf32):
    """Forward and backward of a step have it, what follows has not, not even after an error."""
    flags, judged, real, products = [], [], targets.judge, torch.backends.cuda.matmul

    def judge(*args):
        flags.append(products.allow_tf32)
        judged.append(1)
        if len(judged) == 3:
            raise ValueError("stop")
        return real(*args)
    monkeypatch.setattr(targets, "judge", judge)
    score = targets.score
    monkeypatch.setattr(targets, "score", lambda *a: flags.append(products.allow_tf32) or score(*a))
    job = make_job(tf32=tf32)
    with pytest.raises(ValueError, match="stop"):
        for _ in range(2):
            assert products.allow_tf32 is False
            job.step()
    assert set(flags) == {tf32} and len(flags) == 10 and products.allow_tf32 is False


def test_scores_are_not_those_of_age_alone():
    scorers = speed_train.taught_scorers("kvpop", speed_train.shape_of("qwen3-4b", True), 16, "cpu")
    k, v = torch.randn(2, 1, 2, 200, 32).unbind(0)
    scores = scorers[0](k, v)[..., :184]
    assert scores.std(-1).min() > 0.1
    spec = CacheSpec(4, 16, 64)
    assert not torch.equal(plan(scores, spec), plan(torch.zeros_like(scores), spec))
