"""The configuration of a resumed run: the one it was stored with, under what the user's file and command line set.

A key that the user does not set keeps the run's stored value, whatever today's default is: a new release, or a machine
with other devices, goes on as the run began. Older releases stored no values for keys that are younger than they are;
the functions below say what such a file means.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from megasharp.algos.dlc import MemoryParams
from megasharp.checkpoint.run_folder import holds_no_run, stored_config
from megasharp.common.errors import UserError
from megasharp.common.exit_codes import Say
from megasharp.config.core import Tree, dump_yaml, flat, merge, parse_yaml, validate
from megasharp.config.policy import OptimizerConfig
from megasharp.config.run_config import RunConfig
from megasharp.trainer.resolve.prompt_format import prompts_meant

# Keys whose null (`auto` for the dtype) is no value but the wish for a derived one, which a begun run has.
DERIVED = frozenset(
    {
        "data.prompt",
        "data.bos",
        "data.max_prompt_tokens",
        "data.max_response_tokens",
        "eval.prompt",
        "model.dtype",
        "policy.dp",
        "policy.micro_batch_tokens",
    }
)
# What the problems are is said by several keys together, of which a run file always has one.
_SOURCE = ("task", "set", "path", "mix")


def resumed_config(root: Path, tree: Tree, where: str, say: Say) -> RunConfig:
    """Return the configuration of the run in `root`, of which the user's file and overrides (`tree`) change a part.

    A run that does not exist yet has the user's. `say` gets one line that names stored values that differ from what the
    user's file alone would mean. Raises UserError for a tree that is no configuration.
    """
    own = validate(RunConfig, tree, where)
    if holds_no_run(root):
        return own
    # What does not validate as a whole is compared key by key by `check_resume`, which names the keys.
    with suppress(UserError):
        stored = as_begun(root)
        stored["data"] = {key: value for key, value in stored["data"].items() if key not in _SOURCE}
        config = validate(RunConfig, merge(stored, _without_wishes(tree)), where)
        before, now = (dict(flat(parse_yaml(dump_yaml(each), where))) for each in (own, config))
        # A stored file has every table that its recipe reads, a user's only those that are set.
        tables = {name: table.model_dump(mode="json") for name, table in own.recipe.params().items()}
        before = dict(flat({"recipe": tables})) | before
        kept = [f"{key} {now[key]!r}" for key in sorted(now) if now[key] != before.get(key)]
        if kept:
            say(f"the run goes on with what it began with where {where} says nothing: {', '.join(kept)}")
        return config
    return own


def _without_wishes(tree: Tree, prefix: str = "") -> Tree:
    """Return a tree without the values that stand for derived ones."""
    return {
        key: _without_wishes(value, f"{prefix}{key}.") if isinstance(value, dict) else value
        for key, value in tree.items()
        if value not in (None, "auto") or f"{prefix}{key}" not in DERIVED
    }


def as_begun(root: Path) -> Tree:
    """Return the stored configuration of a run with a value for every key, as the release that began it meant it.

    Raises UserError for a folder that is no run, or of a later release, and where the file no longer validates.
    """
    where = str(root / "config.yaml")
    stored = _with_length_bias(_with_correction(_with_schedule(as_judged(prompts_meant(stored_config(root))))))
    # A run from before 2026-11-26 that has no value had this one.
    stored = merge({"policy": {"dp": 1}}, stored)
    whole: Tree = parse_yaml(dump_yaml(validate(RunConfig, stored, where)), where)
    return whole


def as_judged(stored: Tree) -> Tree:
    """Fill in how a run reads responses that was begun before `reward.answer_after`: whole, thinking and all."""
    reward: Any = stored.get("reward") or {}
    if "answer_after" in reward:
        return stored
    return {**stored, "reward": {**reward, "answer_after": "", "truncated": "as_whole"}}


def _with_schedule(stored: Tree) -> Tree:
    """Fill in by which keys the memory network of a run from before 22e0df7 (2026-11-24) learns.

    Its learning rate was the policy's where none was set, and it followed the policy's warm-up and decay.
    """
    recipe: Any = stored.get("recipe") or {}
    dlc = recipe.get("dlc") or {}
    memory = dlc.get("memory") or {}
    if "dlc" not in _named(recipe) or "warmup_steps" in memory:
        return stored
    own = OptimizerConfig.model_validate((stored.get("policy") or {}).get("optimizer", {}))
    kept = {"lr": memory.get("lr"), "warmup_steps": own.warmup_steps, "decay": own.decay}
    # A method's table is written as it was set, so defaults of keys that are younger than the file are set too.
    memory = {**MemoryParams().model_dump(), **memory, **kept}
    return {**stored, "recipe": {**recipe, "dlc": {**dlc, "memory": memory}}}


def _with_correction(stored: Tree) -> Tree:
    """Fill in how a run corrects that was begun before `recipe.correction`: as its methods say, against the sampler."""
    recipe: Any = stored.get("recipe") or {}
    if "correction" in recipe:
        return stored
    named = _named(recipe)
    against = {
        name: {"against": "sampler", **(recipe.get(name) or {})} for name in ("truncated_is", "bypass") if name in named
    }
    behind = (stored.get("rollout") or {}).get("max_staleness")
    none = {"correction": "none"} if "dlc" in named and behind else {}
    return {**stored, "recipe": {**recipe, **against, **none}}


def _with_length_bias(stored: Tree) -> Tree:
    """Allow the length bias of a run that was begun before there was a key for it."""
    rollout: Any = stored.get("rollout") or {}
    if "allow_length_bias" in rollout or not rollout.get("oversample") or rollout.get("max_staleness"):
        return stored
    return {**stored, "rollout": {**rollout, "allow_length_bias": True}}


def _named(recipe: Any) -> set[str]:
    """Return the methods of a stored recipe, of all its stages."""
    stages = [recipe.get("methods") or [], *(stage["methods"] for stage in recipe.get("schedule") or [])]
    return {name for methods in stages for name in methods}
