"""Refuses to resume a run as another experiment: changed keys, edited inputs, another model's config.json.

Changes that leave it the same experiment are named and allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from megasharp.algos.dlc import MemoryParams
from megasharp.checkpoint.manifest import Inputs
from megasharp.checkpoint.recorded import complete_steps
from megasharp.checkpoint.run_folder import holds_no_run, stored_config
from megasharp.common.errors import UserError
from megasharp.common.exit_codes import Say
from megasharp.config.core import Tree, dump_yaml, flat, parse_yaml, validate
from megasharp.config.log import LogConfig
from megasharp.config.policy import OptimizerConfig
from megasharp.config.rollout import RolloutConfig
from megasharp.config.run_config import RunConfig
from megasharp.convert.architecture import (
    ARGUMENTS_FILE,
    Architecture,
    check_arguments,
    model_arguments,
    read_arguments,
)
from megasharp.convert.hf_folder import read_config
from megasharp.convert.model_folder import CONFIG_FILE
from megasharp.convert.record import weights_fingerprint
from megasharp.tasks.judge import digest_of
from megasharp.trainer.resolve.prompts import prompts_meant
from megasharp.trainer.resolve.resolved_run import ResolvedRun

# Keys and sections that decide what is trained, on what and how: curves before and after a change are not one run's.
IDENTITY = (
    "model",
    "policy.fp8",
    "policy.fp8_recipe",
    "policy.lora",
    "policy.megatron",
    "policy.optimizer",
    "data",
    "reward.function",
    "seed",
    "recipe",
    *(
        f"rollout.{key}"
        for key in ("engine", "temperature", "top_p", "top_k", "max_staleness", "oversample", "stragglers")
    ),
    # Resets, stages and the best checkpoint come from a curve of evaluations.
    "eval.prompt",
    "eval.temperature",
    "eval.top_p",
    "eval.max_response_tokens",
)
_RETENTION = ("log.rollouts.keep_last", "log.rollouts.every", "log.rollouts.tokens_keep_last")
_REMEDY = "choose another name= for it, or say --allow-change KEY"


def with_stored_tables(root: Path, config: RunConfig) -> RunConfig:
    """Return a configuration that keeps the run's stored `log.rollouts`, where the user has not set it.

    A release whose default keeps fewer tables must not remove those of a run that was begun before.
    """
    if holds_no_run(root) or "rollouts" in config.log.model_fields_set:
        return config
    with suppress(UserError):
        stored = validate(LogConfig, stored_config(root).get("log") or {}, str(root / "config.yaml"))
        return config.model_copy(update={"log": config.log.model_copy(update={"rollouts": stored.rollouts})})
    return config


def with_stored_bias(root: Path, config: RunConfig) -> RunConfig:
    """Return a configuration that allows the length bias of a run that was begun before there was a key for it.

    Its steps go on as they were; `check_resume` names the key as changed. A file that sets the key is followed.
    """
    if holds_no_run(root) or "allow_length_bias" in config.rollout.model_fields_set:
        return config
    with suppress(UserError):
        stored = stored_config(root).get("rollout") or {}
        begun = validate(RolloutConfig, stored, str(root / "config.yaml"))
        allowed = begun.allow_length_bias or "allow_length_bias" not in begun.model_fields_set
        if allowed and begun.oversample and not begun.max_staleness:
            return config.model_copy(update={"rollout": config.rollout.model_copy(update={"allow_length_bias": True})})
    return config


def with_stored_prompts(root: Path, config: RunConfig) -> RunConfig:
    """Return a configuration that asks training and suites as the stored run does, where the user's file does not say.

    So its evaluations compare, also where a release with other prompts began it.
    """
    if holds_no_run(root):
        return config
    with suppress(UserError):
        stored = prompts_meant(stored_config(root))
        changed = {}
        for section, keys in (("data", ("prompt", "bos")), ("eval", ("prompt",))):
            table: Any = stored.get(section) or {}
            now = getattr(config, section)
            kept = {key: table[key] for key in keys if key in table and getattr(now, key) is None}
            changed[section] = now.model_copy(update=kept)
        return config.model_copy(update=changed)
    return config


def with_stored_memory(root: Path, resolved: ResolvedRun, say: Say) -> ResolvedRun:
    """Return the run with the memory network's schedule that it was begun with, where a release without keys began it.

    What the user has set in their place stays, and is a change. `say` gets one line where something is taken over.
    """
    if resolved.memory is None or holds_no_run(root):
        return resolved
    params, stored = resolved.memory.params, stored_config(root)
    # The stored file has the values that an earlier resume took over; the user's file still has not.
    table: Any = ((stored.get("recipe") or {}).get("dlc") or {}).get("memory") or {}
    kept = _schedule_before(stored) or {key: table[key] for key in ("lr", "warmup_steps", "decay") if key in table}
    taken = {
        key: value
        for key, value in kept.items()
        if value != getattr(params, key) == type(params).model_fields[key].default
    }
    if not taken:
        return resolved
    say(f"the memory network goes on learning as it began, by {', '.join(f'{k} {v!r}' for k, v in taken.items())}")
    # Validated again, so that every value counts as set and is written out.
    params, section = type(params).model_validate({**params.model_dump(), **taken}), resolved.config.recipe
    dlc = section.params()["dlc"].model_copy(update={"memory": params})
    config = resolved.config.model_copy(update={"recipe": section.model_copy(update={"dlc": dlc})})
    return replace(resolved, config=config, memory=replace(resolved.memory, params=params))


def _schedule_before(stored: Tree) -> Tree:
    """Return the keys by which the memory network of a run from before 22e0df7 (2026-11-24) learns; else nothing.

    Its learning rate was the policy's where none was set, and it followed the policy's warm-up and decay.
    """
    recipe: Any = stored.get("recipe", {})
    stages = [recipe.get("methods", []), *(stage["methods"] for stage in recipe.get("schedule", []))]
    memory = (recipe.get("dlc") or {}).get("memory") or {}
    if not any("dlc" in methods for methods in stages) or "warmup_steps" in memory:
        return {}
    policy: Any = stored.get("policy", {})
    own = OptimizerConfig.model_validate({**policy.get("optimizer", {})})
    return {"lr": memory.get("lr"), "warmup_steps": own.warmup_steps, "decay": own.decay}


def _as_trained(stored: Tree) -> Tree:
    """Return a stored configuration with the keys that it lacks and that are not the defaults of today."""
    kept = _schedule_before(stored)
    if not kept:
        return stored
    recipe: Any = stored["recipe"]
    dlc = recipe.get("dlc") or {}
    # A method's table is written as it was set, so defaults of keys that are younger than the file are set too.
    memory = {**MemoryParams().model_dump(), **(dlc.get("memory") or {}), **kept}
    return {**stored, "recipe": {**recipe, "dlc": {**dlc, "memory": memory}}}


def with_stored_correction(root: Path, config: RunConfig) -> RunConfig:
    """Return a configuration that corrects as a run did that was begun before `recipe.correction` and `against`.

    A file that sets them is followed, and refused by `check_resume` where it differs.
    """
    if holds_no_run(root):
        return config
    recipe, update, meant = config.recipe, dict[str, object](), dict[str, Any]()
    with suppress(UserError):
        meant = _before_correction(stored_config(root))
    for key, value in meant.items():
        if key == "correction":
            update |= {} if key in recipe.model_fields_set or value == recipe.correction else {key: value}
        elif "against" not in recipe.params()[key].model_fields_set:
            update[key] = recipe.params()[key].model_copy(update=value)
    return config.model_copy(update={"recipe": recipe.model_copy(update=update)}) if update else config


def _before_correction(stored: Tree) -> dict[str, Any]:
    """Return what a stored configuration without the key `recipe.correction` means by it, as part of its recipe.

    No correction but those named, and those against the sampler.
    """
    recipe = stored.get("recipe")
    if not isinstance(recipe, dict):
        return {}
    if "correction" in recipe:
        # Values that an earlier resume filled in; the user's file still has none.
        tables = {name: (recipe.get(name) or {}).get("against") for name in ("truncated_is", "bypass")}
        kept: dict[str, Any] = {name: {"against": value} for name, value in tables.items() if value is not None}
        return kept | {"correction": recipe["correction"]}
    named = {*recipe.get("methods", []), *(name for stage in recipe.get("schedule", []) for name in stage["methods"])}
    against: dict[str, Any] = {name: {"against": "sampler"} for name in ("truncated_is", "bypass") if name in named}
    behind = (stored.get("rollout") or {}).get("max_staleness")
    return against | ({"correction": "none"} if "dlc" in named and behind else {})


def check_resume(root: Path, config: RunConfig, allowed: Sequence[str] = (), remedy: str = _REMEDY) -> list[str]:
    """Return lines that name changes since the last attempt; none for a run that does not exist yet.

    `allowed` are keys or sections of `IDENTITY` that may change all the same. Raises UserError for a folder that is no
    run, for an allowed key that no configuration has, for changed keys of `IDENTITY`, naming each and the remedy, and
    for a run that has more steps behind it than `steps`.
    """
    now = dict(flat(parse_yaml(dump_yaml(config), str(root))))
    for name in allowed:
        if not any(_within(key, name) for key in (*now, *IDENTITY)):
            raise UserError(f"--allow-change {name}: no configuration has this key")
    if holds_no_run(root):
        return []
    path = root / "config.yaml"
    stored = prompts_meant(_as_trained(stored_config(root)))
    # Keys that are younger than the stored file get their defaults; a file that no longer validates is compared as is.
    with suppress(UserError):
        recipe = stored.get("recipe") or {}
        for key, value in _before_correction(stored).items():
            recipe = recipe | {key: recipe.get(key, {}) | value if isinstance(value, dict) else value}
        stored = stored | {"recipe": recipe}
        stored = parse_yaml(dump_yaml(validate(RunConfig, stored, str(path))), str(path))
    before = dict(flat(stored))
    changed = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    refused = [
        f"{key} was {before.get(key)!r} and is now {now.get(key)!r}"
        for key in changed
        if any(_within(key, name) for name in IDENTITY) and not any(_within(key, name) for name in allowed)
    ]
    if refused:
        raise UserError(f"{root}: {'; '.join(refused)}, which is another run; {remedy}")
    done = max(complete_steps(root / "checkpoints"), default=0)
    if done > config.steps:
        raise UserError(f"{root}: step {done} is done already; steps={config.steps} is less")
    decay = config.policy.optimizer.decay
    notes = {} if decay == "constant" else {"steps": f" (the {decay} decay of the learning rate ends there)"}
    notes["rollout.allow_length_bias"] = " (with oversample and max_staleness 0, steps train on what is sampled first)"
    notes |= dict.fromkeys(_RETENTION, " (the tables that are there are kept or removed by it too)")
    return [
        f"changed since the last attempt: {key}: {before.get(key)!r} -> {now.get(key)!r}{notes.get(key, '')}"
        for key in changed
    ]


def inputs_of(resolved: ResolvedRun) -> Inputs:
    """Return digests of what the run reads and its checkpoints do not hold."""
    return Inputs(
        problems=resolved.prompts.digest,
        tokenizer=resolved.tokenizer.digest(),
        weights=weights_fingerprint(resolved.model),
        suites={suite.name: digest_of(suite.items) for suite in resolved.suites},
    )


def check_inputs(before: Inputs, now: Inputs, resolved: ResolvedRun, allowed: Sequence[str]) -> list[str]:
    """Return lines that name the inputs edited since the checkpoint was written, as far as it recorded them.

    Raises UserError where `allowed` does not name the input's key.
    """
    data = resolved.config.data
    inputs = [
        ("data.path", before.problems, now.problems, f"the problems in {data.path or data.set}"),
        ("model.path", before.tokenizer, now.tokenizer, f"the tokenizer and its end tokens in {resolved.model.path}"),
        ("model.path", before.weights, now.weights, f"the weights in {resolved.model.path}"),
        *(
            ("eval.suites", before.suites[name], now.suites[name], f"the problems of suite {name}")
            for name in before.suites.keys() & now.suites.keys()
        ),
    ]
    edited = [(key, what) for key, old, new, what in inputs if old and old != new]
    for key, what in edited:
        if not any(_within(key, name) for name in allowed):
            raise UserError(
                f"{what} are not those that the run began with, which is another run; restore them, choose another "
                f"name= for it, or say --allow-change {key}"
            )
    return [f"changed since the last attempt: {what}" for _, what in edited]


def check_recorded(folder: Path, weights: Path, model: Path, arch: Architecture) -> list[str]:
    """Compare a model's arguments with those recorded in `folder` of a checkpoint, for its `weights`.

    `model` is the folder of config.json. Older versions recorded none; then the config.json that was saved beside the
    weights is compared, and the lines returned say so, or that there is none.

    Raises UserError where they differ, naming every key.
    """
    recorded, saved = read_arguments(folder), folder / "hf" / CONFIG_FILE
    if recorded is not None:
        check_arguments(model / CONFIG_FILE, arch, weights, recorded)
        return []
    missing = f"{weights} has no record of the model's arguments ({ARGUMENTS_FILE})"
    if not saved.is_file():
        return [f"{missing}: {model / CONFIG_FILE} could not be checked against it"]
    check_arguments(model / CONFIG_FILE, arch, weights, model_arguments(read_config(saved.parent)[2]))
    return [f"{missing}: {model / CONFIG_FILE} was compared with {saved}, which was saved with it"]


def _within(key: str, name: str) -> bool:
    """Return whether a dotted key is `name` or is in that section."""
    return f"{key}.".startswith(f"{name}.")
