"""train.py on several processes, over gloo on the CPU: the same losses and weights as one process at an equal global
batch, the same after a resume by another number of them, and one clear end when they are told to stop or one is lost.

Two workers, started once, run train.main as torchrun's processes would; what needs the end of a process runs under the
real torchrun.
"""
import contextlib
import errno
import io
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import bench
import model as model_file
import train
from data import batches, parallel, speed_train, text, traces
from model import load_model, save_model
from scorer import Scorer
from targets import Retention, counted_rows, listwise_loss
from test_cli_chat import make_folder
from test_train import (JOBS, QUIET, SPEC, job, random_model, refused, small_problems, state_of,  # noqa: F401
                        stop_at, strict_json)
from test_train import run as run_alone


def spied(rank, sigterm, full, compiled):
    """Patches of train.py and bench.py in a worker -> (what they see, a MonkeyPatch)."""
    seen, patch = {"passes": [], "shards": [], "grads": [], "tokenised": 0, "graphs": 0, "kl": []}, pytest.MonkeyPatch()
    real_ready, real_step = train.make_ready, speed_train.Job.step
    real_shard, real_backward, real_rates = parallel.shard, parallel.Engine.backward, train.set_rates
    real_save, real_documents, made = torch.save, text.read_documents, []

    def make(*args, **options):
        made.append(Retention(*args, **options))
        seen["passes"] = [r.passes for r in made if isinstance(r.weight, torch.Tensor)]
        return made[-1]

    def shard(model, device):
        real_shard(model, device)
        seen["shards"].append((sum(p.to_local().numel() for p in model.parameters()),
                               sum(p.numel() for p in model.parameters())))

    def backward(engine, last, *args, **flags):
        rest = real_backward(engine, last, *args, **flags)
        grads = [p.grad for p in engine.model.parameters() if p.requires_grad]
        seen["grads"].append((last, None if grads[-1] is None else "reduced" if engine.sharded else
                              grads[-1].tolist()))
        return rest

    def set_rates(optimizer, step, settings):
        if (rank, step) == sigterm:
            os.kill(os.getpid(), signal.SIGTERM)
        real_rates(optimizer, step, settings)

    def save(state, path):
        if state["step"] == full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if sigterm:
            time.sleep(0.3)  # the others must wait for it
        real_save(state, path)

    def documents(*args):
        seen["tokenised"] += 1
        time.sleep(0.3)
        return real_documents(*args)

    def backend(graph, inputs):
        seen["graphs"] += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    def ready(settings, model, teacher=None):
        real_ready(settings, model, teacher)
        for block in (*model.model.layers, *(teacher.model.layers if teacher else ())):
            block.compiled = compiled
        if compiled and settings.parallel == "fsdp":
            train.compile_scorers(model)

    def step(job):
        values, norm = real_step(job)
        seen["kl"].append(values["kl"].item())
        return values, norm
    if compiled:  # as on a GPU
        torch._dynamo.reset()
        patch.setattr(model_file, "COMPILED_HALVES", [
            torch.compile(half, dynamic=False, fullgraph=True, backend=backend)
            for half in (model_file.Block.before, model_file.Block.after)])
        patch.setattr(train, "compiled_forward", torch.compile(Scorer.forward, dynamic=False, fullgraph=True,
                                                               backend=backend))
    for owner, name, value in ((train, "make_ready", ready), (speed_train.Job, "step", step),
                               (train, "Retention", make), (parallel, "shard", shard), (torch, "save", save),
                               (parallel.Engine, "backward", backward), (train, "set_rates", set_rates),
                               (text, "read_documents", documents)):
        patch.setattr(owner, name, value)
    return seen, patch


def work(rank, count, jobs, results):
    torch.set_num_threads(1)
    for sizes in (traces.TEST_SIZES, traces.TRAIN_SIZES):  # as small_problems does in this process
        sizes.update(dict.fromkeys(traces.PROMPTS, (3, 4)))
    train.MAX_LENGTH = 400
    while (given := jobs.get()) is not None:
        main, folder, args, port, *faults = given
        os.chdir(folder)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count), LOCAL_WORLD_SIZE=str(count),
                          MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True",
                          TORCHELASTIC_RESTART_COUNT="0")
        (seen, patch), out, err = spied(rank, *faults), io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = main(args)
            except BaseException as error:  # the test shows it
                code = f"{type(error).__name__}: {error}"
        seen["ended"] = time.time()
        patch.undo()
        if dist.is_initialized():  # after an error, where the end of the process would do it
            dist.destroy_process_group()
        results.put((rank, code, out.getvalue(), err.getvalue(), seen))


@pytest.fixture(scope="module")
def two():
    """two(*arguments): train.main in two processes -> codes, stdouts, stderrs, what was seen. sigterm: the rank and the
    step, from 0, that get one; full: the disk is so when the state after so many steps is saved; compiled: blocks are;
    folder: where bench.main runs, instead of train.main."""
    context = torch.multiprocessing.get_context("spawn")
    jobs, results = [context.SimpleQueue() for _ in range(2)], context.Queue()
    workers = [context.Process(target=work, args=(i, 2, jobs[i], results), daemon=True) for i in range(2)]
    for worker in workers:
        worker.start()

    def call(*args, sigterm=None, full=None, compiled=False, folder=None):
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # torchrun's
        for queue in jobs:
            queue.put((bench.main if folder else train.main, folder or os.getcwd(),
                       [*(() if folder else QUIET), *map(str, args)], store.port, sigterm, full, compiled))
        found = sorted((results.get(timeout=120) for _ in workers), key=lambda result: result[0])
        return list(zip(*found))[1:]
    yield call
    for queue, worker in zip(jobs, workers):
        queue.put(None)
        worker.join(20)
        worker.kill()


@pytest.fixture(scope="module")
def base(tmp_path_factory, small_problems):  # noqa: F811
    """Sharp attention: there is something to choose, and gradients are large against their rounding."""
    save_model(random_model(), tmp_path_factory.mktemp("parallel") / "base", torch.float32)
    return tmp_path_factory.getbasetemp() / "parallel0" / "base"


STEPS = ("--steps", 3, "--learning-rate", 1e-3, "--base-learning-rate", 1e-3)


@pytest.fixture(scope="module")
def alone(base):
    """The run of one process with the whole global batch of four rows, of each job."""
    for kind in JOBS:
        assert run_alone(*job(kind, base, base.parent / f"alone-{kind}"), *STEPS, "--batch-size", 4) == 0
    return base.parent


def leaves(tree):
    """Tensors and numbers in a fixed order."""
    if isinstance(tree, dict):
        return [leaf for key in sorted(tree, key=str) for leaf in leaves(tree[key])]
    return [leaf for x in tree for leaf in leaves(x)] if isinstance(tree, (list, tuple)) else [tree]


def alike(a, b, clock=("seconds",)):
    """Two runs of three steps: losses within 1e-5 of each other, weights within 2e-4 of how far they moved, moments
    likewise. Measured: 1e-5 at most."""
    one, two = state_of(a), state_of(b)
    assert one["step"] == two["step"] == 3 and one["global_batch"] == two["global_batch"]
    for x, y in zip(one["history"], two["history"], strict=True):
        assert x.keys() == y.keys()
        for name in x.keys() - {*clock}:
            assert x[name] == pytest.approx(y[name], rel=1e-5, abs=1e-8), (name, x, y)
    worst = 0.0
    for name, value in two["parameters"].items():
        moved = 3e-3 * math.sqrt(value.numel())  # three steps at a rate of 1e-3
        worst = max(worst, ((one["parameters"][name] - value).norm() / moved).item())
    for x, y in zip(leaves(one["optimizer"]["state"]), leaves(two["optimizer"]["state"]), strict=True):
        worst = max(worst, ((x - y).norm() / (1e-12 + y.norm())).item()) if y.norm() > 1e-9 else worst
    print(f"worst relative difference {worst:.1e}")
    assert worst < 2e-4
    return True


# ----------------------------------------------------------------------------- which rows

def test_a_step_has_the_same_rows_and_micro_batches_on_any_number_of_processes(monkeypatch):
    def micro_batches(count, accumulate, first_step=0):
        settings = train.parse_settings([*QUIET, "--steps", "3", "--accumulate", str(accumulate)])
        found = {}
        for number in range(count):
            monkeypatch.setattr(batches, "rank", lambda: number)
            monkeypatch.setattr(batches, "world_size", lambda: count)
            rows = train.loader(list(range(99)), settings, first_step, tuple)
            for step, parts in enumerate(train.by_step(rows, settings), first_step):
                for micro, part in enumerate(parts):
                    assert part[0] == step * 2 * count * accumulate + batches.first_row(settings, micro)
                    found[step, micro * count + number] = part
        return found
    want = {(step, i): (8 * step + 2 * i, 8 * step + 2 * i + 1) for step in range(3) for i in range(4)}
    assert micro_batches(1, 4) == micro_batches(2, 2) == micro_batches(4, 1) == want
    assert micro_batches(2, 2, first_step=1) == {key: rows for key, rows in want.items() if key[0] >= 1}


def test_means_of_micro_batches_make_the_mean_of_all():
    """counted_rows weighs the listwise loss of unequal parts, one of them with nothing to teach."""
    torch.manual_seed(0)
    lengths = torch.tensor([90, 60, 10, 75])
    scores, target = torch.randn(2, 4, 2, 90)
    loss = lambda part: listwise_loss(scores[part], None, target[part], SPEC, lengths[part])  # noqa: E731
    parts = [torch.tensor(rows) for rows in ([0], [1, 2], [3])]
    counts = [counted_rows(lengths[part], 90, SPEC)[0] for part in parts]
    assert counts == [1, 1, 1] and counted_rows(lengths, 90, SPEC) == (3, 3)
    assert counted_rows(torch.tensor([35, 20]), 35, SPEC) == (0, 0)
    assert sum(n / 3 * loss(part) for n, part in zip(counts, parts)) == pytest.approx(loss(torch.arange(4)).item())


# ----------------------------------------------------------------------------- the same numbers

@pytest.mark.parametrize("kind", JOBS)
def test_accumulation_equals_the_larger_batch(alone, base, tmp_path, kind):
    assert run_alone(*job(kind, base, tmp_path), *STEPS, "--accumulate", 2) == 0
    assert alike(tmp_path, alone / f"alone-{kind}")


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", JOBS)
def test_two_processes_equal_one(alone, base, two, kind, engine):
    out = base.parent / f"{engine}-{kind}"
    codes, said, errors, seen = two(*job(kind, base, out), *STEPS, "--parallel", engine)
    assert codes == (0, 0), errors
    assert "step     3/3" in said[0] and said[1] == ""  # rank 0 alone prints
    assert alike(out, alone / f"alone-{kind}")
    files = {p.name for p in out.iterdir()}
    assert files == {p.name for p in (alone / f"alone-{kind}").iterdir()}
    assert strict_json(out / "log.json")["processes"] == 2
    if kind != "scorer":  # what is exported is what was trained
        want = {k: v.bfloat16().float() for k, v in state_of(out)["parameters"].items() if k[:8] != "scorers."}
        assert all(torch.equal(v, want[k]) for k, v in load_model(out).state_dict().items())
    if engine == "fsdp":  # the student, and the teacher if it is another: about half of each with each process
        assert [len(s["shards"]) for s in seen] == [2 if kind == "train_base" else 1] * 2
        for (mine, whole), (other, _) in zip(seen[0]["shards"], seen[1]["shards"]):
            assert mine + other == whole and 0.4 < mine / whole < 0.6
    if kind == "train_base":
        evaluated = [strict_json(folder / "log.json")["after"]["kvpop"] for folder in (out, alone / f"alone-{kind}")]
        assert evaluated[0]["loss"] == pytest.approx(evaluated[1]["loss"], rel=1e-4)


def test_dms_cap_on_two_processes(base, two, tmp_path):
    """The gate is no forward of its scorer, and the teacher is the student's own frozen base."""
    args = (*job("scorer", base, tmp_path / "out"), *STEPS, "--policy", "dms-cap")
    assert run_alone(*args, "--accumulate", 2, "--out", tmp_path / "one") == 0
    assert two(*args, "--parallel", "fsdp")[0] == (0, 0)
    assert alike(tmp_path / "out", tmp_path / "one")


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_gradients_meet_once_a_step(base, two, tmp_path, engine):
    codes, _, errors, seen = two(*job("scorer", base, tmp_path), *STEPS, "--accumulate", 2, "--parallel", engine)
    assert codes == (0, 0), errors
    for (last, mine), (_, other) in zip(seen[0]["grads"], seen[1]["grads"], strict=True):
        if engine == "ddp":
            assert (mine == other) == last and any(leaves(mine))
        else:  # shards have no gradient until all have been summed
            assert mine == other == ("reduced" if last else None)
    assert [last for last, _ in seen[0]["grads"]] == [False, True] * 3


@pytest.mark.parametrize("optimizer, plain", [(parallel.AdamW, True), (torch.optim.AdamW, False)])
def test_the_fused_step_of_a_shard_sees_plain_tensors(optimizer, plain, monkeypatch):
    """Else every process makes whole moments on its CPU first, see parallel.AdamW. A mesh of one process is enough to
    make parameters sharded ones; the numbers are those of an ordinary parameter and the moments stay sharded."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh, start = torch.distributed.device_mesh.init_device_mesh("cpu", (1,)), torch.randn(6, 4)
        whole = torch.nn.Parameter(start.clone())
        shard = torch.nn.Parameter(distribute_tensor(start.clone(), mesh, [Shard(0)]))
        how, seen, fused = dict(lr=torch.tensor(1e-2), weight_decay=0.1, fused=True), [], torch._fused_adamw_

        def spy(*lists, **options):
            seen.append([type(t) for tensors in lists for t in tensors])
            return fused(*lists, **options)
        one, other = torch.optim.AdamW([whole], **how), optimizer([shard], **how)
        monkeypatch.setattr(torch, "_fused_adamw_", spy)
        for _ in range(3):
            grad = torch.randn(6, 4)
            whole.grad, shard.grad = grad, distribute_tensor(grad, mesh, [Shard(0)])
            one.step(), other.step()
        assert all(DTensor not in types for types in seen[::2])
        assert all((DTensor not in types) == plain for types in seen[1::2]) and len(seen) == 6
        assert torch.equal(shard.full_tensor(), whole) and not torch.equal(whole, start)
        for name, moment in one.state[whole].items():
            mine = other.state[shard][name]
            assert isinstance(mine, DTensor) == (name != "step")
            assert torch.equal(mine.full_tensor() if name != "step" else mine, moment)
    finally:
        dist.destroy_process_group()


def test_text_is_tokenised_once_and_teaches_the_same(two, tmp_path):
    make_folder(tmp_path / "qwen3", "qwen3")
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": f"row {i} of the cache, " * 30}) + "\n"
                                                 for i in range(60)))
    args = (*"--context 96 --held-out 0.2 --n-sink 2 --window 8 --budget 40 --train-base".split(), *STEPS,
            "--model", tmp_path / "qwen3", "--data", tmp_path / "text.jsonl")
    assert run_alone(*args, "--out", tmp_path / "one", "--batch-size", 4) == 0
    codes, _, errors, seen = two(*args, "--out", tmp_path / "two")
    assert codes == (0, 0) and [s["tokenised"] for s in seen] == [1, 0], errors
    assert alike(tmp_path / "two", tmp_path / "one")


def test_recomputed_blocks_change_no_gradient_and_teach_once(base, two, tmp_path):
    """One step: the first moments are the gradients. One transposed pass a layer and micro-batch."""
    ends = []
    for name, how in (("kept", ()), ("recomputed", ("--recompute",))):
        codes, _, errors, seen = two(*job("train_base", base, tmp_path / name), "--steps", 1, "--parallel", "fsdp",
                                     "--accumulate", 2, *how)
        assert codes == (0, 0), errors
        assert seen[0]["passes"][:1] == [2], seen[0]["passes"]
        ends.append([x for x in leaves(state_of(tmp_path / name)["optimizer"]["state"]) if x.dim()])
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-9) for a, b in zip(*ends, strict=True)) and len(ends[0]) > 20


@pytest.mark.parametrize("engine, how", [("fsdp", ()), ("fsdp", ("--recompute",)), ("ddp", ())])
def test_compiled_blocks_change_nothing(alone, base, two, tmp_path, engine, how):
    """A block's weights are whole when its compiled halves get them, and in the backward again."""
    codes, _, errors, seen = two(*job("train_base", base, tmp_path), *STEPS, "--parallel", engine, *how, compiled=True)
    assert codes == (0, 0), errors
    assert alike(tmp_path, alone / "alone-train_base")
    assert 0 < seen[0]["graphs"] == seen[1]["graphs"]


# ----------------------------------------------------------------------------- bench.py train

BENCH = ("train", "--lengths", 100, "--repeats", 1)


def test_bench_measures_the_step_of_all(two, tmp_path, monkeypatch):
    """Rows by DDP, FSDP2 and of one process stand in one file, each once."""
    monkeypatch.chdir(tmp_path)
    rows_of = lambda: strict_json(tmp_path / "assets/results/train.json")["rows"]  # noqa: E731
    assert bench.main([*map(str, BENCH), "--policies", "kvpop-mlp"]) == 0
    alone = rows_of()
    for engine in ("ddp", "fsdp", "fsdp"):
        codes, said, errors, seen = two(*BENCH, "--parallel", engine, "--policies", "dense", "kvpop-mlp",
                                        folder=tmp_path)
        assert codes == (0, 0) and said[1] == "" and "wrote assets/results/train.json" in said[0], errors
        if seen[0]["kl"]:  # the third run finds its rows; the first step is of teacher and student as they were made
            assert len(seen[0]["kl"]) == len(seen[1]["kl"]) == 12 and abs(seen[0]["kl"][0]) < 1e-6
            assert seen[0]["kl"][6:] != seen[1]["kl"][6:]  # tokens of their own
        if engine == "fsdp":
            assert all(0.4 < mine / whole < 0.6 for s in seen for mine, whole in s["shards"])
            assert len(seen[0]["shards"]) == (4 if seen[0]["kl"] else 0)
    rows = rows_of()
    assert rows[0] == alone[0] and [(r["policy"], r["gpus"], r["parallel"]) for r in rows] == [
        ("kvpop-mlp", 1, None), ("dense", 2, "ddp"), ("kvpop-mlp", 2, "ddp"), ("dense", 2, "fsdp"),
        ("kvpop-mlp", 2, "fsdp")]
    for row in rows:
        assert set(row) == set(rows[0]) and row["oom"] == [] and row["mfu"] > 0
        assert row["tokens_per_s"] == pytest.approx(row["gpus"] * 1e5 / row["step_ms"])
        assert (row["breakdown"] is None) == (row["gpus"] == 2)
        assert row["visible_share"] == (1 if row["policy"] == "dense" else pytest.approx(rows[0]["visible_share"], 0.1))
    assert strict_json(tmp_path / "assets/results/train.json")["command"].startswith("torchrun --nproc-per-node 2 ")


def test_what_does_not_fit_many_gpus_is_a_row(base, tmp_path):
    """One process finds no memory, the other waits for it: the row is written, and all end with one line."""
    (tmp_path / "script.py").write_text(OOM.format(root=str(Path(train.__file__).parent)))
    done = torchrun(tmp_path / "script.py", *BENCH, "--policies", "dense", cwd=tmp_path)
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode != 0 and len(lines) == 1 and "out of memory on 2 GPUs by ddp" in lines[0], done.stderr
    row, = strict_json(tmp_path / "assets/results/train.json")["rows"]
    assert row["oom"] == ["step_ms"] and row["step_ms"] is None


def test_bench_refuses(two, tmp_path, capsys):
    refused(capsys, bench.main([*map(str, BENCH), "--parallel", "fsdp"]), "--parallel fsdp", "torchrun")
    codes, _, errors, _ = two("attention", folder=tmp_path)
    assert codes == (2, 2) and sum("bench.py train alone" in e for e in errors) == 1


# ----------------------------------------------------------------------------- stopping and going on

@pytest.mark.parametrize("kind, engine", [("scorer", "ddp"), ("train_base", "fsdp"), ("pretrain", "fsdp")])
def test_resume_by_two_processes_and_by_one_again(alone, base, two, monkeypatch, tmp_path, kind, engine):
    """1, 2 and 1 process for a part of the steps each; the middle one stops because rank 1 gets a SIGTERM."""
    args = (*job(kind, base, tmp_path), *STEPS)
    with monkeypatch.context() as patch:
        stop_at(patch, 1, KeyboardInterrupt())
        assert run_alone(*args, "--batch-size", 4) == 130 and state_of(tmp_path)["step"] == 1
    codes, _, errors, seen = two(*args, "--parallel", engine, "--resume", sigterm=(1, 1))
    assert codes == (130, 130) and "interrupted in step 3" in errors[0] and "after 2 steps" in errors[0], errors
    assert errors[1] == "" and state_of(tmp_path)["step"] == 2
    assert seen[1]["ended"] > (tmp_path / "log.json").stat().st_mtime - 0.01  # not while rank 0 still writes
    assert run_alone(*args, "--accumulate", 2, "--resume") == 0
    assert alike(tmp_path, alone / f"alone-{kind}", ("seconds", "tokens"))  # tokens count from the resume on


def test_another_global_batch_is_refused(alone, base, tmp_path, capsys):
    out = shutil.copytree(alone / "alone-scorer", tmp_path / "out")
    args = (*job("scorer", base, out), *STEPS, "--steps", 4, "--resume")
    refused(capsys, run_alone(*args, "--accumulate", 3), "batch_size * processes * accumulate = 4, not 6")
    assert run_alone(*args, "--accumulate", 2) == 0


@pytest.mark.parametrize("kind", ["pretrain", "scorer"])
def test_sigterm_saves_as_ctrl_c_does(base, tmp_path, monkeypatch, capsys, kind):
    before, real = signal.getsignal(signal.SIGTERM), train.set_rates

    def set_rates(optimizer, step, settings):
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        real(optimizer, step, settings)
    monkeypatch.setattr(train, "set_rates", set_rates)
    assert run_alone(*job(kind, base, tmp_path), *STEPS) == 130
    assert "interrupted in step 3" in capsys.readouterr().err and state_of(tmp_path)["step"] == 2
    assert signal.getsignal(signal.SIGTERM) is before


def test_fsdp_needs_torchrun(base, tmp_path, capsys):
    refused(capsys, run_alone(*job("scorer", base, tmp_path), "--parallel", "fsdp"), "--parallel fsdp", "torchrun")


# ----------------------------------------------------------------------------- what goes wrong

def test_a_layer_whose_loss_is_no_number_is_named(base, tmp_path, monkeypatch, capsys):
    import targets
    real, calls = targets.judge, []

    def judge(retention, layer, *args):
        loss, recall = real(retention, layer, *args)
        calls.append(layer)
        return loss * (math.nan if layer == 1 and calls.count(1) == 3 else 1), recall
    monkeypatch.setattr(targets, "judge", judge)
    code = run_alone(*job("scorer", base, tmp_path), *STEPS, "--save-every", 1)
    refused(capsys, code, "the retention loss of layer 1 is nan at step 3", "--out keeps the last checkpoint")
    assert state_of(tmp_path)["step"] == 2
    assert all(x.isfinite().all() for x in state_of(tmp_path)["parameters"].values())


def test_an_interrupt_saves_no_diverged_model(base, tmp_path, monkeypatch, capsys):
    args = (*job("pretrain", base, tmp_path), *STEPS, "--log-every", 9, "--save-every", 1)
    real = train.optimizer_step

    def diverging(optimizer, settings):
        norm = real(optimizer, settings)
        return norm * (math.nan if state_of(tmp_path)["step"] == 1 else 1) if list(tmp_path.glob("*.pt")) else norm
    monkeypatch.setattr(train, "optimizer_step", diverging)
    monkeypatch.setattr(train.Run, "progress", lambda *args, **values: None)
    refused(capsys, run_alone(*args), "gradient norm is nan at step 2")
    assert state_of(tmp_path)["step"] == 1
    stopping = train.set_rates
    monkeypatch.setattr(train, "set_rates", lambda optimizer, step, settings: stopping(optimizer, step, settings)
                        if step < 2 else (_ for _ in ()).throw(KeyboardInterrupt))
    refused(capsys, run_alone(*args, "--save-every", 9, "--resume"), "gradient norm is nan at step 2")
    assert state_of(tmp_path)["step"] == 1


@pytest.mark.parametrize("where", ["torch.save", "a limit on file sizes", "safetensors"])
def test_a_full_disk_keeps_the_checkpoint(alone, base, tmp_path, monkeypatch, capsys, where):
    import resource
    out = shutil.copytree(alone / "alone-train_base", tmp_path / "out")
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    args = (*job("train_base", base, out), *STEPS, "--steps", 4, "--resume", "--batch-size", 4)

    def full(*args, **how):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with monkeypatch.context() as patch:
        if where == "torch.save":
            patch.setattr(torch, "save", full)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        smallest = 30_000 if where == "safetensors" else len(before["train_state.pt"]) // 2
        if where == "safetensors":
            patch.setattr(torch, "save", lambda state, path: Path(path).write_bytes(before["train_state.pt"][:20_000]))
        try:
            if where != "torch.save":
                resource.setrlimit(resource.RLIMIT_FSIZE, (smallest, limits[1]))
            code = run_alone(*args)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    refused(capsys, code, "cannot write the state after 4 steps", str(out), "last checkpoint there is kept")
    names = before.keys() - ({"train_state.pt"} if where == "safetensors" else set())
    assert {name: (out / name).read_bytes() for name in names} == {name: before[name] for name in names}
    assert {p.name for p in out.iterdir()} == before.keys()
    if where != "safetensors":
        assert run_alone(*args) == 0 and state_of(out)["step"] == 4


def test_a_full_disk_ends_all_processes_in_one_line(base, two, tmp_path):
    codes, _, errors, _ = two(*job("scorer", base, tmp_path), *STEPS, "--save-every", 1, "--parallel", "fsdp", full=2)
    assert codes == (2, 2) and errors[1] == "" and errors[0].count("\n") == 1, errors
    assert "cannot write the state after 2 steps" in errors[0] and "No space left on device" in errors[0]
    assert state_of(tmp_path)["step"] == 1


SCRIPT = """
import os, signal, sys, time
sys.path.insert(0, {root!r})
import torch
import train
from data import traces
for sizes in (traces.TEST_SIZES, traces.TRAIN_SIZES):
    sizes.update(dict.fromkeys(traces.PROMPTS, (3, 4)))
real = train.set_rates

def set_rates(optimizer, step, settings):
    if step == 2 and os.environ["RANK"] == "1":
        {deed}
    real(optimizer, step, settings)
train.set_rates = set_rates
sys.exit(train.main())
"""


def test_torchrun_told_to_end_lets_them_save(base, tmp_path):
    """SIGTERM to torchrun, as before a machine is taken away: it ends the group of each process, loaders of batches
    too if they were in it, and a process without them could not finish its step."""
    out = tmp_path / "out"
    (tmp_path / "script.py").write_text(SCRIPT.format(root=str(Path(train.__file__).parent),
                                                      deed="os.kill(os.getppid(), signal.SIGTERM); time.sleep(1)"))
    done = torchrun(tmp_path / "script.py", *QUIET, *job("scorer", base, out), *STEPS, "--steps", 9, "--workers", 2)
    told = [line for line in done.stderr.splitlines() if line.startswith("interrupted in step")]
    assert done.returncode != 0 and len(told) == 1 and "DataLoader" not in done.stderr, done.stderr
    assert state_of(out)["step"] == 3 and "[rank" not in done.stderr  # the step under way was finished


def test_a_loss_is_known_behind_the_exception_that_it_interrupts(monkeypatch):
    try:
        try:
            raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer")
        except RuntimeError:
            raise RuntimeError("DataLoader worker (pid 8594) is killed by signal: Terminated. ")
    except RuntimeError as error:
        both = error
    assert not parallel.lost_process(both)  # a process alone has none to lose
    monkeypatch.setattr(parallel.dist, "is_initialized", lambda: True)
    assert parallel.lost_process(both) and not parallel.lost_process(RuntimeError("a shape that does not fit"))


OOM = """
import os, sys
sys.path.insert(0, {root!r})
import torch
import bench
from data import speed_train
real = speed_train.Job.step

def step(job):
    if os.environ["RANK"] == "1":
        raise torch.OutOfMemoryError
    return real(job)
speed_train.Job.step = step
sys.exit(bench.main())
"""


def torchrun(*args, cwd=None):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    return subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port",
                           str(port), *map(str, args)], capture_output=True, text=True, timeout=120, cwd=cwd,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})


def test_torchrun_ends_with_one_line_when_a_process_is_killed(base, tmp_path):
    """With loaders of batches, which torchrun would end before the process that they serve has heard of the loss."""
    out = tmp_path / "out"
    (tmp_path / "script.py").write_text(SCRIPT.format(root=str(Path(train.__file__).parent),
                                                      deed="os.kill(os.getpid(), signal.SIGKILL)"))
    done = torchrun(tmp_path / "script.py", *QUIET, *job("scorer", base, out), *STEPS, "--save-every", 1,
                    "--workers", 2)
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode != 0 and len(lines) == 1 and "another process of this run is gone" in lines[0], done.stderr
    assert "[rank0]" not in done.stderr, done.stderr  # how torchrun marks the lines of a traceback
    assert state_of(out)["step"] == 2 and not list(out.glob("*.tmp"))
    assert run_alone(*job("scorer", base, out), *STEPS, "--accumulate", 2, "--resume") == 0
