"""Which weights, which policy, which cache: what decode.py's flags and a checkpoint's scorer.json say together.

What this file holds: weights_folder (of a retrofit), resolve_policy, resolve_spec, and for train.py resolve_start. All
that can be refused is refused here, before weights are read.
"""
import os
from dataclasses import replace
from pathlib import Path

from data.prompts import say
from data.scorer_files import load_scorers, sizes
from flex_masks import CacheSpec
from model import ModelConfig, read_json, resolve_checkpoint
from scorer import LEARNED, check_policy, geometry, state_entries

DEFAULTS = dict(n_sink=4, window=256, budget=2048)  # the paper's, for a folder without a scorer.json


def named_folder(folder, name):
    """A folder that the scorer.json of `folder` names: relative to it, or by hub id. FileNotFoundError says where a
    checkpoint must be that is not there."""
    if not isinstance(name, str):
        raise ValueError(f"{Path(folder) / 'scorer.json'} names a checkpoint {name!r}: give a folder or a hub id")
    local = Path(folder) / name
    if name.startswith(".") and not local.is_dir():
        bare = "" if (Path(folder) / "config.json").is_file() else ", which has no config.json,"
        raise FileNotFoundError(f"the scorer in {folder}{bare} belongs to a checkpoint that is not there: put its "
                                f"folder at {os.path.normpath(local)}, or name another under \"base\" and \"weights\" "
                                f"in {Path(folder) / 'scorer.json'}")
    return local if local.is_dir() else resolve_checkpoint(name)


def weights_folder(folder, settings):
    """Where the model weights of a retrofit lie: with its scorers, or, trained on a frozen base, with the base."""
    default = "." if (Path(folder) / "config.json").is_file() else settings.get("base", ".")
    return named_folder(folder, settings.get("weights", default))


def resolve_policy(args):
    """-> folder of the weights, policy, whether its scorers lie there, settings: --model and --policy taken together.
    A policy that was trained lives with its weights. One that needs no training runs on the base model, which a
    retrofitted folder names under "base" in its scorer.json, relative to itself."""
    try:
        folder = resolve_checkpoint(args.model)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"--model: {error}") from None
    retrofit = (folder / "scorer.json").is_file()
    settings = read_json(folder / "scorer.json") if retrofit else DEFAULTS
    own = settings.get("policy") if retrofit else "dense"
    policy = args.policy or own
    check_policy(policy)
    if policy == "oracle":
        raise ValueError("policy oracle ranks by future attention, which no decoder has: choose another --policy")
    if policy in LEARNED and retrofit and policy != own:
        raise ValueError(f"{folder} was trained for policy {own}: give a {policy} checkpoint with --model")
    if policy in LEARNED or not retrofit or policy == own:
        return folder, policy, policy in LEARNED or retrofit, settings  # load_scorers says it if a folder has none
    if not settings.get("base"):
        raise ValueError(f"{folder}/scorer.json names no base model for policy {policy}: give its folder with --model")
    base = named_folder(folder, settings["base"])
    say(f"policy {policy} needs no training: using the base model in {os.path.normpath(base)}")
    return base, policy, False, settings


def resolve_spec(args, settings, policy, config, limit):
    """CacheSpec from the flags, else from the settings; None for dense. Warns where the sinks go."""
    flags = {name: getattr(args, name) for name in ("n_sink", "window", "budget")}
    if policy == "dense":
        if any(value is not None for value in flags.values()):
            raise ValueError("policy dense keeps every token: drop --budget, --n-sink and --window")
        return None
    values = {name: settings.get(name) if value is None else value for name, value in flags.items()}
    if odd := [name for name, value in values.items() if type(value) is not int]:
        raise ValueError(f"scorer.json gives no integer {odd[0]}: give it with --{odd[0].replace('_', '-')}")
    own = dict(zip(("n_sink", "window"), geometry(policy, values["n_sink"], values["window"])))
    if any(flags[name] not in (None, own[name]) for name in own):
        raise ValueError(f"policy {policy} is defined with n_sink {own['n_sink']} and window {own['window']}: drop "
                         "--n-sink and --window")
    options = settings.get("options") if policy == settings.get("policy") else None
    charge = state_entries(policy, config.head_dim, config.group_size, own["window"], **(options or {}))
    spec = CacheSpec(**{**values, **own}, state_entries=charge)
    if spec.n_sink == 0 and own["n_sink"] == values["n_sink"]:
        say("warning: n_sink 0 evicts the attention sinks; most models break down beyond the budget")
    most = max(limit, spec.n_sink + spec.window) + spec.state_entries  # no token would reach more slots
    return replace(spec, budget=min(spec.budget, most))


def resolve_start(settings):
    """-> folder of the weights that a retrofit begins with, how its scorer.json is to name them (a hub id or a path),
    scorers (None: new ones). A --model that is a retrofit itself gives its scorers, and its own weights or those of
    the base that it names. ValueError where they are not for this policy, window and model, or --out holds these
    weights."""
    folder = source = resolve_checkpoint(settings.model)
    name, scorers = settings.model, None
    if (folder / "scorer.json").is_file():
        scorers, stored = load_scorers(folder)
        found, wanted = (stored["policy"], stored["window"]), (settings.policy, settings.window)
        if found != wanted:
            raise ValueError("--model {} holds a scorer for policy {} with window {}, not for {} with {}: give the "
                             "same --policy and --window, or its base with --model".format(settings.model, *found,
                                                                                           *wanted))
        source = weights_folder(folder, stored)
        if source != folder:
            named = stored.get("weights", stored.get("base"))
            name = str(source) if (folder / named).is_dir() else named
        found, wanted = sizes(scorers, ModelConfig.from_dict(read_json(source / "config.json")))
        if found != wanted:
            raise ValueError(f"--model {settings.model} holds a scorer for (layers, KV heads, head_dim) = {found}, but "
                             f"the weights in {source} have {wanted}: take both from one retrofit")
    if source.resolve() == Path(settings.out).resolve():
        raise ValueError(f"--out {settings.out} holds the weights that --model {settings.model} begins with: a "
                         "retrofit would overwrite its base, choose another")
    return source, name, scorers
