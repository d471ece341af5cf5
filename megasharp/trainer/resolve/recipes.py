"""The recipes of a run, one for each stage of `recipe.schedule`, and its rules of resets, lengths and spikes.

What cannot come true, such as a reset by a metric that no evaluation gives, is refused here before anything starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from megasharp.algos.base import MethodParams, Needs
from megasharp.algos.build_recipe import build_recipe
from megasharp.algos.recipe import Recipe, RecipeSchedule
from megasharp.common.control import (
    GROWING,
    LengthStage,
    ResetRule,
    Rules,
    SpikeRule,
    What,
)
from megasharp.common.errors import UserError
from megasharp.config.run_config import RunConfig
from megasharp.evals.evaluate import WITH_MEMORY


def check_prolonged(config: RunConfig, needs: Needs, where: str) -> None:
    """Refuse metrics that no evaluation gives, stages out of order, resets of nothing. Raises UserError."""
    untils = [stage.until for stage in config.data.stages if stage.until is not None]
    if any(later <= earlier for earlier, later in pairwise(untils)):
        raise UserError(f"{where}: data.stages: each `until` must be above the one before it, found {untils}")
    reset = config.recipe.reset
    asked = reset.every is not None or reset.stagnation is not None
    if asked and reset.optimizer == "keep" and not needs.ref_logp:
        raise UserError(
            f"{where}: recipe.reset has nothing to reset: no method reads a reference, and the optimizer is kept; "
            "add kl to recipe.methods, set optimizer=reinit or leave recipe.reset out"
        )
    suites = [Path(suite).stem for suite in config.eval.suites]
    if config.eval.with_memory:
        suites += [f"{suite}{WITH_MEMORY}" for suite in suites]
    metrics = [*(f"pass@{k}" for k in sorted(set(config.eval.k))), *GROWING]
    known = [f"eval/{suite}/{metric}" for suite in suites for metric in metrics]
    for key, metric in watched(config).items():
        if config.eval.every == 0:
            raise UserError(f"{where}: {key}: {metric} needs evaluations during the run; set eval.every")
        if metric not in known:
            given = ", ".join(known) or "nothing"
            raise UserError(f"{where}: {key}: no evaluation gives {metric!r}; eval gives: {given}")


def watched(config: RunConfig) -> dict[str, str]:
    """Return the metrics of evaluations that a rule depends on, by the key that names them."""
    rules = {
        "recipe.reset.stagnation": config.recipe.reset.stagnation,
        **{f"data.stages[{number}].stagnation": stage.stagnation for number, stage in enumerate(config.data.stages)},
    }
    found = {f"{key}.metric": rule.metric for key, rule in rules.items() if rule is not None}
    return found | ({"checkpoint.keep_best": config.checkpoint.keep_best} if config.checkpoint.keep_best else {})


def build_recipes(config: RunConfig, where: str) -> RecipeSchedule:
    """Build and check every recipe of a run.

    Raises UserError naming methods, the key of the schedule, or more mini-batches than there are groups.
    """
    if config.recipe.mini_batches > config.data.prompts_per_step:
        raise UserError(
            f"{where}: recipe.mini_batches={config.recipe.mini_batches} is more than "
            f"data.prompts_per_step={config.data.prompts_per_step}; a mini-batch needs a whole group"
        )
    untils = [stage.until for stage in config.recipe.schedule]
    if any(later <= earlier for earlier, later in pairwise(untils)):
        raise UserError(f"{where}: recipe.schedule: each `until` must be above the one before it, found {untils}")
    largest = config.data.largest_response
    limits = {stage.max_response_tokens for stage in config.data.stages} | {config.data.max_response_tokens}
    limited = {limit: _schedule(config, limit, where) for limit in sorted(limits - {largest})}
    schedule, prompts = _schedule(config, largest, where, limited), config.data.prompts_per_step
    memory = schedule.needs.memory
    if memory is not None and memory.network.steps > prompts:
        raise UserError(
            f"{where}: recipe.dlc.memory.steps={memory.network.steps} is more than data.prompts_per_step={prompts}; an "
            "optimizer step of the memory network needs a whole group"
        )
    return schedule


def _schedule(
    config: RunConfig, limit: int, where: str, limited: Mapping[int, RecipeSchedule] | None = None
) -> RecipeSchedule:
    """Build the recipes as they are while responses may have `limit` tokens."""
    stages = [
        (stage.until, _recipe(config, stage.methods, limit, f"{where}: recipe.schedule[{number}].methods"))
        for number, stage in enumerate(config.recipe.schedule)
    ]
    return RecipeSchedule(stages, _recipe(config, config.recipe.methods, limit, f"{where}: recipe.methods"), limited)


def _recipe(config: RunConfig, methods: Sequence[str], limit: int, key: str) -> Recipe:
    return build_recipe(
        methods,
        config.recipe.params(),
        key=key,
        reduction=config.recipe.chosen_reduction(),
        constant=float(config.data.largest_response),
        mini_batches=config.recipe.mini_batches,
        response_limit=limit,
        stale=config.recipe.correction == "auto" and config.rollout.max_staleness > 0,
    )


def correction_notes(config: RunConfig, recipes: RecipeSchedule) -> list[str]:
    """Return notes on samples of another policy or distribution, and on what corrects for them in which stage."""
    named = [*(stage.methods for stage in config.recipe.schedule), config.recipe.methods]
    stages = zip(named, recipes.all[-len(named) :], strict=True)
    return list(dict.fromkeys(note for names, recipe in stages for note in _corrections(config, names, recipe)))


def _corrections(config: RunConfig, named: Sequence[str], recipe: Recipe) -> list[str]:
    rollout = config.rollout
    shifting = {
        "dlc": recipe.needs.memory is not None,
        "top_p": rollout.top_p < 1.0,
        "top_k": rollout.top_k > 0,
        "min_p": rollout.min_p > 0.0,
    }
    shift = " and ".join(name for name, there in shifting.items() if there)
    behind = f"tokens up to {rollout.max_staleness} version(s) old"
    notes = []
    for name, method in recipe.methods.items():
        if not method.corrects:
            continue
        if name not in named:
            level = getattr(method.params, "level", None)
            notes.append(
                f"{name} by {level} is added, because dlc may train on {behind}; recipe.correction=none leaves it out"
            )
        if method.params.against == "policy":
            kept = f", and leaves the shift of {shift}" if shift else ""
            notes.append(f"{name} against policy corrects staleness and the engine's numerics{kept}")
        else:
            undone = f", and undoes the shift of {shift}; against=policy would leave it" if shift else ""
            notes.append(f"{name} against sampler corrects staleness and the engine's numerics{undone}")
    if not notes and rollout.max_staleness:
        either = f", against=policy leaving the shift of {shift}, against=sampler undoing it" if shift else ""
        notes.append(
            f"{behind} are trained on as if the present policy had sampled them; truncated_is or bypass in "
            f"recipe.methods corrects for that{either}"
        )
    return notes


def resolved_config(config: RunConfig, recipes: RecipeSchedule) -> RunConfig:
    """Return the configuration with every value of the methods in play, those of bundles and defaults included.

    A stored configuration, read again, then gives the same run, whatever defaults change. A table that differs between
    stages stays as the user wrote it.
    """
    effective: dict[str, MethodParams] = {}
    for recipe in recipes.all:
        for name, method in recipe.methods.items():
            chosen = config.recipe.params()[name]
            same = effective.get(name, method.params) == method.params
            # Validated again, so that every value counts as set and is written out.
            effective[name] = type(method.params).model_validate(method.params.model_dump()) if same else chosen
    return config.model_copy(update={"recipe": config.recipe.model_copy(update=effective)})


def make_rules(config: RunConfig, needs: Needs) -> Rules:
    """Return the rules by which a run decides in its course; `needs` are those of its recipes."""
    reset, guard = config.recipe.reset, config.guard
    return Rules(
        ResetRule(reset.every, reset.stagnation, what_is_reset(config, needs)),
        (*config.data.stages, LengthStage(max_response_tokens=config.data.max_response_tokens)),
        None if guard.spike_sigma is None else SpikeRule(guard.spike_sigma, guard.spike_window),
        config.token_budget,
    )


def what_is_reset(config: RunConfig, needs: Needs) -> tuple[What, ...]:
    """Return what a reset resets: the reference where a method reads one, the optimizer unless it is to be kept."""
    reference: tuple[What, ...] = ("reference",) if needs.ref_logp else ()
    return (*reference, "optimizer") if config.recipe.reset.optimizer == "reinit" else reference
