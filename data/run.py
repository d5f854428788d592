"""The folder that a training run writes: what resumes it, what decode.py reads, and what a number needs beside it.

- `Run`: train_state.pt (tensors and numbers only: it cannot run code), the exported checkpoint, log.json;
- `provenance`: commit, date, device and versions.
"""
import os
import pickle
import subprocess
import sys
import time
from dataclasses import asdict, fields
from pathlib import Path

import torch

from model import copy_companions, save_model, write_json
from scorer import save_scorers


class Run:
    """The output folder: train_state.pt to resume, the exported checkpoint, log.json. All writes are atomic.
    Set `source`, the folder that --model stands for, before a retrofit is saved, and `text`, the header of its token
    file, where it trains on text (data/text.py)."""

    def __init__(self, settings):
        self.source = self.text = None
        self.settings, self.folder, self.started = settings, Path(settings.out), time.time()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / ".write_test").touch()
            (self.folder / ".write_test").unlink()
        except OSError as error:
            raise ValueError(f"cannot write to --out {self.folder}: {error.strerror or error}") from None
        if settings.resume and not (self.folder / "train_state.pt").is_file():
            raise FileNotFoundError(f"--resume, but {self.folder / 'train_state.pt'} does not exist: check --out, or "
                                    "start without --resume")
        self.log = {"command": " ".join(["python", *sys.argv]), "settings": asdict(settings),
                    **provenance(settings.device), "history": []}

    def save(self, model, optimizer, step, spec=None):
        """Export for decode.py and the exact training state."""
        scorers_only = self.scorers_only()
        state = {"step": step, "settings": asdict(self.settings), "history": self.log["history"], "text": self.text,
                 "parameters": {k: v.detach() for k, v in model.state_dict().items()
                                if k.startswith("scorers.") or not scorers_only},
                 "optimizer": optimizer.state_dict()}
        path = self.folder / "train_state.pt.tmp"
        torch.save(state, path)
        os.replace(path, self.folder / "train_state.pt")
        if self.settings.stage == "pretrain" or self.settings.train_base:
            save_model(model, self.folder)
        if spec is not None:
            base = self.settings.model  # a hub id stands for itself wherever the folder goes, a path does not
            if Path(base).is_dir():
                base = os.path.relpath(Path(base).resolve(), self.folder.resolve())
            if self.settings.train_base:
                copy_companions(self.source, self.folder)
            save_scorers(model.scorers, self.folder, {
                "n_sink": spec.n_sink, "window": spec.window, "budget": spec.budget, "base": base,
                "weights": "." if self.settings.train_base else base})
        write_json(self.folder / "log.json", self.log)

    def scorers_only(self):
        """Whether the state leaves out the base, which is frozen and lies in --model: a real one takes gigabytes."""
        return bool(self.settings.data) and not self.settings.train_base

    def resume(self, model, optimizer):
        """-> the step to continue with; 0 without --resume."""
        path = self.folder / "train_state.pt"
        if not self.settings.resume:
            return 0
        try:
            state = torch.load(path, map_location=self.settings.device, weights_only=True)
            if missing := {"step", "settings", "history", "parameters", "optimizer"}.difference(state):
                raise RuntimeError(f"it lacks '{min(missing)}'")
        except (RuntimeError, TypeError, EOFError, pickle.UnpicklingError) as error:
            raise ValueError(f"--resume: {path} is damaged or not a training state "
                             f"({(str(error).splitlines() or ['empty'])[0]}): start without --resume") from None
        may_differ = {"resume", "steps", "log_every", "eval_every", "eval_problems", "save_every", "workers", "device",
                      "compile", "out", "warmup", "tokens", "recompute"}
        for f in fields(self.settings):
            name, value = f.name, state["settings"].get(f.name, f.default)  # the default: older than the option
            if name not in may_differ and value != getattr(self.settings, name):
                raise ValueError(f"--resume: {path} was trained with {name} = {value!r}, not "
                                 f"{getattr(self.settings, name)!r}: give the same options or start without --resume")
        if state["step"] >= self.settings.steps:
            raise ValueError(f"--resume: {path} is at step {state['step']} already: raise --steps above it")
        if state.get("text") != self.text:
            raise ValueError(f"--resume: {path} was trained on other tokens than --data gives now: restore them or "
                             "start without --resume")
        model.load_state_dict(state["parameters"], strict=not self.scorers_only())
        # rates and kernels are this device's own: a CUDA graph would freeze the plain number that a CPU run left as rate
        mine = [{key: group[key] for key in ("lr", "fused", "capturable")} for group in optimizer.param_groups]
        optimizer.load_state_dict(state["optimizer"])
        for group, own in zip(optimizer.param_groups, mine):
            group.update(own)
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
