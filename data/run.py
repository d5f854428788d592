"""The folder that a training run writes: what resumes it, what decode.py reads, and what a number needs beside it.

- `Run`: train_state.pt (tensors and numbers only: it cannot run code), the exported checkpoint, log.json;
- `provenance`: commit, date, device and versions;
- `checked`, `report`, `print_before_after`: the numbers of a step, of an evaluation, and of a run.
"""
import contextlib
import math
import os
import pickle
import subprocess
import sys
import time
from dataclasses import asdict, fields
from pathlib import Path

import torch
from safetensors import SafetensorError

from data.batches import global_batch
from data.parallel import gathered, placed, rank, summed, world_size
from data.scorer_files import save_scorers
from model import copy_companions, save_model, write_json


class Run:
    """The output folder: train_state.pt to resume, the exported checkpoint, log.json. All writes are atomic, and rank
    0 alone writes. Set `source`, the folder of the weights that a retrofit begins with, and `base`, their path or hub
    id, before it is saved, and `text`, the header of its token file, where it trains on text (data/text.py)."""

    def __init__(self, settings):
        self.source = self.base = self.text = None
        self.settings, self.folder, self.started = settings, Path(settings.out), time.time()
        try:
            if rank() == 0:
                self.folder.mkdir(parents=True, exist_ok=True)
                (self.folder / ".write_test").touch()
                (self.folder / ".write_test").unlink()
        except OSError as error:
            raise ValueError(f"cannot write to --out {self.folder}: {error.strerror or error}") from None
        if settings.resume and not (self.folder / "train_state.pt").is_file():
            raise FileNotFoundError(f"--resume, but {self.folder / 'train_state.pt'} does not exist: check --out, or "
                                    "start without --resume")
        self.log = {"command": " ".join(["python", *sys.argv]), "settings": asdict(settings),
                    **provenance(settings.device), "processes": world_size(), "history": []}

    def save(self, model, optimizer, step, spec=None):
        """Export for decode.py and the exact training state, by rank 0; all processes must call it, and wait for it.
        The state does not depend on how many they are. ValueError in one sentence when it cannot be written."""
        scorers_only = self.scorers_only()
        parameters = gathered({k: v.detach() for k, v in model.state_dict().items()
                               if k.startswith("scorers.") or not scorers_only})
        state = {"step": step, "settings": asdict(self.settings), "history": self.log["history"], "text": self.text,
                 "global_batch": global_batch(self.settings), "parameters": parameters,
                 "optimizer": gathered(optimizer.state_dict())}
        if rank() == 0:
            with self.writing(f"the state after {step} steps"):
                self.write(model, state, spec)
        summed([0])  # or a process that is done would end a run that is stopped, before the files are there

    def interrupted(self, model, optimizer, step, norm, spec=None):
        """Save after `step` whole steps; the one that was under way runs again. -> exit status."""
        finite(norm, step - 1)
        self.save(model, optimizer, step, spec)
        if rank() == 0:
            print(f"\ninterrupted in step {step + 1}: {self.folder} holds the state after {step} steps; continue with "
                  "--resume", file=sys.stderr)
        return 130

    def write(self, model, state, spec):
        path = self.folder / "train_state.pt.tmp"
        torch.save(state, path)
        os.replace(path, self.folder / "train_state.pt")
        if self.settings.stage == "pretrain" or self.settings.train_base:
            save_model(model, self.folder, values=state["parameters"])
        if spec is not None:
            base = self.base  # a hub id stands for itself wherever the folder goes, a path does not
            if Path(base).is_dir():
                base = os.path.relpath(Path(base).resolve(), self.folder.resolve())
            if self.settings.train_base:
                copy_companions(self.source, self.folder)
            save_scorers(model.scorers, self.folder, {
                "n_sink": spec.n_sink, "window": spec.window, "budget": spec.budget, "base": base,
                "weights": "." if self.settings.train_base else base}, values=state["parameters"])
        write_json(self.folder / "log.json", self.log)

    def write_log(self):
        if rank() == 0:
            with self.writing("log.json"):
                write_json(self.folder / "log.json", self.log)

    @contextlib.contextmanager
    def writing(self, what):
        """A full disk, or any other that does not take what is written, is one sentence; the half-written file goes."""
        try:
            yield
        except (OSError, RuntimeError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
            if type(error) is RuntimeError:  # torch.save has no other for a file that is not taken whole
                if "inline_container" not in reason and "iostream" not in reason:
                    raise
                reason = "torch.save could not write the whole file"
            for partial in self.folder.glob("*.tmp"):
                partial.unlink()
            raise ValueError(f"cannot write {what} to {self.folder} ({reason}): the last checkpoint there is kept; "
                             "make room and continue with --resume") from None

    def scorers_only(self):
        """Whether the state leaves out the base, which is frozen and lies in --model: a real one takes gigabytes."""
        return bool(self.settings.data) and not self.settings.train_base

    def resume(self, model, optimizer):
        """-> the step to continue with; 0 without --resume."""
        path = self.folder / "train_state.pt"
        if not self.settings.resume:
            return 0
        try:
            # mapped into memory: tensors go to where they belong one by one, as 60 GB of a 4B model must
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            if missing := {"step", "settings", "history", "parameters", "optimizer"}.difference(state):
                raise RuntimeError(f"it lacks '{min(missing)}'")
        except (RuntimeError, TypeError, EOFError, pickle.UnpicklingError) as error:
            why = (str(error).splitlines() or ["empty"])[0]
            if isinstance(error, pickle.UnpicklingError):  # whose text advises to let the file run its code
                why = "it is no file of tensors and numbers alone"
            raise ValueError(f"--resume: {path} is damaged or not a training state ({why}): start without "
                             "--resume") from None
        may_differ = {"resume", "steps", "log_every", "eval_every", "eval_problems", "save_every", "workers", "device",
                      "compile", "out", "warmup", "tokens", "recompute", "parallel", "batch_size",
                      "accumulate", "sort", "teacher", "tf32"}
        for f in fields(self.settings):
            name, value = f.name, state["settings"].get(f.name, f.default)  # the default: older than the option
            if name not in may_differ and value != getattr(self.settings, name):
                raise ValueError(f"--resume: {path} was trained with {name} = {value!r}, not "
                                 f"{getattr(self.settings, name)!r}: give the same options or start without --resume")
        rows = state.get("global_batch", state["settings"].get("batch_size"))
        if rows != global_batch(self.settings):
            raise ValueError(f"--resume: {path} was trained with batch_size * processes * accumulate = {rows}, not "
                             f"{global_batch(self.settings)}: keep that product or start without --resume")
        if state["step"] >= self.settings.steps:
            raise ValueError(f"--resume: {path} is at step {state['step']} already: raise --steps above it")
        if state.get("text") != self.text:
            raise ValueError(f"--resume: {path} was trained on other tokens than --data gives now: restore them or "
                             "start without --resume")
        now = model.state_dict()
        model.load_state_dict({name: placed(value, now.get(name)) for name, value in state["parameters"].items()},
                              strict=not self.scorers_only())
        parameters = [p for group in optimizer.param_groups for p in group["params"]]  # numbered so in the state
        for i, moments in state["optimizer"]["state"].items():
            state["optimizer"]["state"][i] = {name: placed(value, parameters[i]) for name, value in moments.items()}
        # rates and kernels are this device's own: a graph would freeze the plain number that a CPU run left as rate
        for group, own in zip(state["optimizer"]["param_groups"], optimizer.param_groups):
            group.update({key: own[key] for key in ("lr", "fused", "capturable")})
        optimizer.load_state_dict(state["optimizer"])
        self.log["history"] = state["history"]
        print(f"resuming from {path} at step {state['step']}")
        return state["step"]

    def progress(self, step, first_step, tokens, **values):
        elapsed = time.time() - self.started
        done = step + 1 - first_step
        left = elapsed / done * (self.settings.steps - step - 1)
        self.log["history"].append({"step": step + 1, **values, "tokens": tokens, "seconds": round(elapsed, 2)})
        print(f"step {step + 1:5d}/{self.settings.steps}  " +
              "  ".join(f"{k} {v:.4f}" if abs(v) >= 1e-3 or v == 0 else f"{k} {v:.2e}" for k, v in values.items()) +
              f"  {tokens / elapsed:,.0f} tokens/s  {left:.0f} s left", flush=True)


def provenance(device):
    """commit, date, device and versions: what a number needs beside it."""
    commit = os.environ.get("KVPOP_COMMIT")  # for a tree that was copied without its .git
    try:
        commit = commit or subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True,
                                          cwd=Path(__file__).parent).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    return {"commit": commit, "date": time.strftime("%Y-%m-%d"), "device": name, "torch": torch.__version__,
            "python": sys.version.split()[0]}


# ----------------------------------------------------------------------------- numbers, checked and printed

def finite(value, step, name="gradient norm"):
    value = float(value)
    if not math.isfinite(value):
        raise ValueError(f"the {name} is {value} at step {step + 1}: --out keeps the last checkpoint; lower the rate")
    return value


def checked(values, norm, step):
    """Values of a step by name, one for each layer or for all -> their means, floats. ValueError for one that is not
    finite, and for such a gradient norm."""
    called = {"kl": "KL loss", "retention": "retention loss"}
    for name, value in values.items():
        for layer, x in enumerate(value.flatten().tolist()):
            finite(x, step, called.get(name, name) + f" of layer {layer}" * value.dim())
    finite(norm, step)
    return {name: value.mean().item() for name, value in values.items()}


def report(when, **results):
    """Print and return one line a policy, without the per-problem lists."""
    for policy, r in results.items():
        extra = "" if r["recall"] is None else f"  retention loss {r['loss']:.3f}  recall {r['recall']:.3f}"
        if "perplexity" in r:
            print(f"{when}: {policy:10s} perplexity {r['perplexity']:.3f}  tokens right {r['token_accuracy']:.4f} (n = "
                  f"{r['n_tokens']} in {r['n_rows']} rows){extra}", flush=True)
            continue
        families = ", ".join(f"{f} {v:.3f}" for f, v in r["by_family"].items())
        print(f"{when}: {policy:10s} trace tokens right {r['token_accuracy']:.4f}  whole traces {r['traces_right']:.3f}"
              f" ({families}; n = {r['n_problems']}){extra}", flush=True)
    return {policy: {k: v for k, v in r.items() if k != "right"} for policy, r in results.items()}


def print_before_after(before, after, policy):
    rows = [("retention loss", "loss", 3), ("recall of the teacher's top-k", "recall", 3),
            ("perplexity", "perplexity", 3), ("tokens right", "token_accuracy", 4),
            ("trace tokens right", "token_accuracy", 4), ("whole traces right", "traces_right", 3)]
    text = "perplexity" in before[policy]
    rows = [row for row in rows if row[0] != ("trace tokens right" if text else "tokens right")]
    print(f"\n{policy:32s}{'before':>10s}{'after':>10s}")
    for name, key, digits in rows:
        if before[policy].get(key) is not None:  # no recall where nothing is evicted or selected
            print(f"{name:32s}{before[policy][key]:10.{digits}f} {after[policy][key]:9.{digits}f}")
    others = [f"{p}: {r['token_accuracy']:.4f} of tokens, " + (
        f"perplexity {r['perplexity']:.3f}" if text else f"{r['traces_right']:.3f} of traces")
        for p, r in before.items() if p in ("dense", "streaming")]
    print(f"({'; '.join(others)})\n")
