"""What a row of a benchmark measures: a policy, on weights, at a budget, and how to load it.

- `Case`: the choice; `Case.load` gives model, CacheSpec and scorers;
- `retrofit_case`, `free_case`: a trained checkpoint, a training-free policy on the base;
- `add_flags`, `open_checkpoint`: the same choice from the command line, for a real checkpoint with its tokenizer.
"""
import argparse
import functools
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from data.prompts import tokenizer_of
from data.scorer_files import load_scorers
from data.resolve import weights_folder
from decode import check_prompts
from flex_masks import CacheSpec
from model import ModelConfig, fingerprint, load_model, read_json, resolve_checkpoint
from scorer import LEARNED, POLICIES, check_policy, geometry, make_scorers, state_entries
from train import Settings

GEOMETRY = {"n_sink": Settings.n_sink, "window": Settings.window}  # where no retrofit says otherwise
FREE = tuple(p for p in POLICIES if p not in ("dense", "oracle", *LEARNED))  # they need no training
SAMPLING = dict(temperature=0.6, top_p=0.95, top_k=20)  # of rollouts, the paper's


@dataclass(frozen=True)
class Case:
    """What a row measures. policy is its name in the table: POLICY-plus is a training-free policy on weights that were
    adapted under it. folder: the checkpoint, or the base. weights: where the model lies. options: the scorer's."""
    policy: str
    folder: str
    weights: str
    budget: int | None = None  # None: dense
    n_sink: int = GEOMETRY["n_sink"]
    window: int = GEOMETRY["window"]
    options: dict = field(default_factory=dict)
    adapted: bool = False
    trained: bool = False  # the scorers lie in `folder`
    tuned_at: int | None = None  # the budget that `tune` found the setting at

    @property
    def scorer(self):
        return self.policy.removesuffix("-plus")

    def spec(self, config):
        """CacheSpec, None for dense; ValueError where the budget is too small."""
        if self.budget is None:
            return None
        n_sink, window = geometry(self.scorer, self.n_sink, self.window)
        return CacheSpec(n_sink, window, self.budget,
                         state_entries(self.scorer, config.head_dim, config.group_size, window, **self.options))

    def load(self, base, seed=0):
        """-> model (`base` itself unless adapted), CacheSpec, scorers; both None for dense."""
        config, weight = base.config, base.model.embed_tokens.weight
        spec, scorers = self.spec(config), None
        if self.trained:
            scorers = load_scorers(self.folder)[0].to(weight.device)
        elif spec is not None:
            scorers = make_scorers(self.scorer, n_layer=config.n_layer, n_kv_head=config.n_kv_head, seed=seed,
                                   head_dim=config.head_dim, window=spec.window, **self.options).to(weight.device)
        model = load_model(self.weights, weight.device, weight.dtype).eval() if self.adapted else base
        return model, spec, scorers


def retrofit_case(folder, base):
    settings = load_scorers(folder)[1]
    lies, policy = weights_folder(folder, settings), settings["policy"]
    adapted = lies.resolve() != Path(base).resolve()  # else the scorer was trained on the frozen base
    return Case(policy + "-plus" * (adapted and policy not in LEARNED), str(folder), str(lies), settings["budget"],
                settings["n_sink"], settings["window"], settings["options"], adapted, trained=True)


def free_case(policy, base, budget, retrofits=()):
    """A training-free policy on the base, with the sinks and window of the first retrofit if there is one."""
    check_policy(policy)
    if policy in LEARNED:
        raise ValueError(f"policy {policy} needs a trained checkpoint: give its folder with --retrofit")
    case = Case(policy, base, base, budget)
    return replace(case, n_sink=retrofits[0].n_sink, window=retrofits[0].window) if retrofits else case


def device_and_dtype(args):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return device, getattr(torch, getattr(args, "dtype", None) or ("bfloat16" if device == "cuda" else "float32"))


def training(folder):
    """-> tokens that a checkpoint was trained on, its seed; None without a log. A resumed run counts from 0 again."""
    log = read_json(Path(folder) / "log.json") if (Path(folder) / "log.json").is_file() else {}
    counts = [entry["tokens"] for entry in log.get("history", [])]
    tokens = sum(b - a if b > a else b for a, b in zip([0, *counts], counts)) if log else None
    return tokens, log.get("settings", {}).get("seed")


def impossible(case, spec, longest):
    """Why a policy that never evicts a prompt cannot run with one of `longest` tokens, or None."""
    try:
        check_prompts(case.scorer, spec, longest)
    except ValueError as error:
        return f"impossible: {error}"


# ----------------------------------------------------------------------------- real checkpoints

@dataclass
class Checkpoint:
    """What a benchmark of a real checkpoint works on. jobs: (Case, CacheSpec or None), the dense base first."""
    folder: str
    config: ModelConfig
    tokenizer: object
    device: str
    dtype: torch.dtype
    jobs: list

    def load(self):
        return load_model(self.folder, self.device, self.dtype).eval()


def add_flags(add, policies):
    """The options that every benchmark of a real checkpoint has; `add` as in bench.parse_args."""
    add("--model", "checkpoint: folder or hub id", metavar="FOLDER", required=True)
    add("--retrofit", "retrofits of it, each run at its own budget", [], nargs="*", metavar="FOLDER")
    add("--policies", "training-free policies, run on the checkpoint at each budget", policies, nargs="*")
    add("--budgets", "entries per KV head of the training-free policies (default: those of the retrofits, else an "
        "eighth and a quarter of the length)", nargs="*", type=int)
    add("--n-sink", "of the training-free policies; several: each is run (default: the first retrofit's, else "
        f"{GEOMETRY['n_sink']})", nargs="+", type=int)
    add("--window", f"of the training-free policies (default: the first retrofit's, else {GEOMETRY['window']})",
        type=int)
    add("--seed", "of the sampling and of policy random", 0, type=int)
    add("--dtype", "of weights and cache (default: float32 on CPU, bfloat16 on CUDA)", choices=["float32", "bfloat16"])
    add("--graph", "on a GPU, replay decode steps as a CUDA graph", True, action=argparse.BooleanOptionalAction)


def open_checkpoint(args, length, without=()):
    """The checkpoint, tokenizer and jobs of a command line; reads no weights.
    length: tokens that a row has, for the budgets where none are given. without: {policy: why it cannot run}."""
    folder = str(resolve_checkpoint(args.model))
    config = ModelConfig.from_dict(read_json(Path(folder) / "config.json"))
    if length > config.max_seq_len:
        raise ValueError(f"{length} tokens are more than the {config.max_seq_len} that the model was trained on: ask "
                         "for fewer")
    for policy in args.policies:
        if policy in without:
            raise ValueError(f"policy {policy} {without[policy]}: leave it out of --policies")
    retrofits = [retrofit_case(name, folder) for name in args.retrofit]
    check_names(retrofits)
    cases = []
    for budget in sorted(set(args.budgets or [case.budget for case in retrofits] or [length // 8, length // 4])):
        for n_sink in args.n_sink or [None]:
            given = {k: v for k, v in (("n_sink", n_sink), ("window", args.window)) if v is not None}
            cases += [replace(free_case(policy, folder, budget, retrofits), **given)
                      for policy in args.policies if policy != "dense"]
    jobs = {}
    for case in [Case("dense", folder, folder), *cases, *retrofits]:
        spec = case.spec(config)
        jobs.setdefault((case.policy, case.folder, spec), (case, spec))  # tova-layer has its own sinks: one job
    return Checkpoint(folder, config, tokenizer_of(Path(folder), config), *device_and_dtype(args), list(jobs.values()))


@functools.cache
def weights_crc(*folders):
    """fingerprint, read once a run: the weights of a real checkpoint are gigabytes."""
    return fingerprint(*folders)


def identity(case, spec):
    """-> who: the keys of a row that say which one it is; how: those that differ in a row of a former one."""
    who = dict(policy=case.policy, budget=case.budget, n_sink=spec and spec.n_sink, window=spec and spec.window,
               model=Path(case.folder).resolve().name)
    return who, dict(weights="adapted" if case.adapted else "base", options=case.options,
                     checkpoint=weights_crc(case.folder, case.weights))


def check_names(cases):
    """ValueError where two checkpoints have one name: rows go by it."""
    names = [Path(case.folder).resolve().name for case in cases]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"two checkpoints of --retrofit are called {twice[0]}: rows go by that name, rename one")
