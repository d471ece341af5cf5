"""The recipes of a run: one per stage of `recipe.schedule`, and the one for the rest of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from megasharp.algos.base import MethodParams
from megasharp.algos.build import build_recipe
from megasharp.algos.recipe import Recipe
from megasharp.algos.schedule import RecipeSchedule
from megasharp.config.run import RunConfig
from megasharp.errors import UserError


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
    return _schedule(config, largest, where, limited)


def _schedule(
    config: RunConfig, limit: int, where: str, limited: Mapping[int, RecipeSchedule] | None = None
) -> RecipeSchedule:
    """The recipes as they are while responses may have `limit` tokens."""
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
    )


def resolved(config: RunConfig, recipes: RecipeSchedule) -> RunConfig:
    """The configuration with the tables of the methods in play as they take effect, bundles' values included.

    So a stored configuration, read again, gives the same run, whatever defaults change. A table that differs between
    stages stays as the user wrote it.
    """
    effective: dict[str, MethodParams] = {}
    for recipe in recipes.all:
        for name, method in recipe.methods.items():
            chosen = config.recipe.params()[name]
            same = effective.get(name, method.params) == method.params
            effective[name] = _all_set(method.params) if same else chosen
    return config.model_copy(update={"recipe": config.recipe.model_copy(update=effective)})


def _all_set(params: MethodParams) -> MethodParams:
    return type(params).model_validate(params.model_dump())
