"""Refuses to resume a run as another experiment: changed keys, edited inputs, another model's config.json.

Changes that leave it the same experiment are named and allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from megasharp.checkpoint.manifest import Inputs, read_manifest
from megasharp.checkpoint.recorded import complete_steps
from megasharp.checkpoint.run_folder import holds_no_run, stored_config
from megasharp.common.errors import UserError
from megasharp.config.core import dump_yaml, flat, parse_yaml
from megasharp.config.hub import hub_model
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
from megasharp.trainer.resolve.models import DATA_KEY, MEMORY_KEY, MODEL_KEY
from megasharp.trainer.resolve.resolved_run import ResolvedRun
from megasharp.trainer.stored_config import as_begun

# Keys and sections that decide what is trained, on what and how: curves before and after a change are not one run's.
IDENTITY = (
    "model",
    "policy.fp8",
    "policy.fp8_recipe",
    "policy.lora",
    "policy.megatron",
    "policy.optimizer",
    "data",
    "reward.answer_after",
    "reward.function",
    "reward.functions",
    "reward.levels",
    "reward.truncated",
    "seed",
    "recipe",
    *(
        f"rollout.{key}"
        for key in ("engine", "temperature", "top_p", "top_k", "min_p", "max_staleness", "oversample", "stragglers")
    ),
    "rollout.episodes.max_turns",
    "rollout.episodes.turn_tokens",
    # Resets, stages and the best checkpoint come from a curve of evaluations.
    "eval.prompt",
    "eval.temperature",
    "eval.top_p",
    "eval.top_k",
    "eval.min_p",
    "eval.stop",
    "eval.max_response_tokens",
)
_RETENTION = ("log.rollouts.keep_last", "log.rollouts.every", "log.rollouts.tokens_keep_last")
_REMEDY = "choose another name= for it, or say --allow-change KEY"


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
    # A file that no longer validates is compared as it is.
    try:
        stored = as_begun(root)
    except UserError:
        stored = stored_config(root)
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
    notes["policy.attention"] = " (kernels round differently: curves go on, bits are not reproduced)"
    notes |= dict.fromkeys(_RETENTION, " (the tables that are there are kept or removed by it too)")
    return [
        f"changed since the last attempt: {key}: {before.get(key)!r} -> {now.get(key)!r}{notes.get(key, '')}"
        for key in changed
    ]


def inputs_of(resolved: ResolvedRun) -> Inputs:
    """Return digests of what the run reads and its checkpoints do not hold."""
    models = {MODEL_KEY: resolved.model.path, **({MEMORY_KEY: resolved.memory.model.path} if resolved.memory else {})}
    commits = {key: its[1] for key, folder in models.items() if (its := hub_model(folder)) is not None}
    if resolved.data_commit is not None:
        commits[DATA_KEY] = resolved.data_commit
    return Inputs(
        problems=resolved.prompts.digest,
        tokenizer=resolved.tokenizer.digest(),
        weights=weights_fingerprint(resolved.model),
        suites={suite.name: digest_of(suite.items) for suite in resolved.suites},
        commits=commits,
    )


def commits_of(root: Path, config: RunConfig) -> dict[str, str]:
    """Return the commits of the hub's models and set with which the run in `root` goes on.

    There are none where there is no checkpoint. What the configuration changes, which `check_resume` judges, has none.
    """
    found = [root / "checkpoints" / f"step_{step:06d}" for step in complete_steps(root / "checkpoints")]
    if not found:
        return {}
    # The newest may be damaged, and any of them has the same.
    for folder in reversed(found):
        with suppress(UserError):
            commits = read_manifest(folder).inputs.commits
            break
    else:
        return {}
    before, now = (dict(flat(tree)) for tree in (stored_config(root), parse_yaml(dump_yaml(config), str(root))))
    revisions = {key: key.removesuffix("path") + "revision" for key in commits}
    same = [key for key in commits if all(before.get(each) == now.get(each) for each in (key, revisions[key]))]
    return {key: commits[key] for key in same}


def check_inputs(before: Inputs, now: Inputs, resolved: ResolvedRun, allowed: Sequence[str]) -> list[str]:
    """Return lines that name the inputs edited since the checkpoint was written, as far as it recorded them.

    Raises UserError where `allowed` does not name the input's key.
    """
    data = resolved.config.data
    inputs = [
        ("data.mix", before.problems, now.problems, "the problems of the mixture")
        if data.mix
        else ("data.path", before.problems, now.problems, f"the problems in {data.path or data.set}"),
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
