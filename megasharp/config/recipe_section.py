"""The recipe of a run: its methods with their options, the schedule of methods, and resets.

The tables of options come from the table of methods, so a new method brings its own keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, create_model, model_serializer

from megasharp.algos import METHODS
from megasharp.algos.base import MethodParams, Reduction
from megasharp.common.control import StagnationRule
from megasharp.common.section import Section

ReductionName = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "token_sum_over_constant"]


class ScheduleStage(Section):
    """Other methods than `recipe.methods`, until this step."""

    until: int = Field(
        ge=1,
        description="Last training step of the stage, counted from 1. It must grow from stage to stage.",
    )
    methods: list[str] = Field(description="Methods that train in this stage instead of recipe.methods.")


class ResetConfig(Section):
    """Resets of reference and optimizer during prolonged training: every so many steps, or on stagnation, or both."""

    every: int | None = Field(
        default=None,
        ge=1,
        description="Number of steps from one reset, of either kind, to the next one by steps. A reset makes the "
        "present weights the reference policy, and clears the optimizer where optimizer says so. null: no reset by "
        "steps.",
    )
    stagnation: StagnationRule | None = Field(
        default=None,
        description="Resets when an evaluation metric stops improving. null: no reset by evaluations.",
    )
    optimizer: Literal["reinit", "keep"] = Field(
        default="reinit",
        description="Optimizer at a reset: reinit clears Adam's moments, keep leaves them. The learning rate schedule "
        "goes on either way.",
    )


class RecipeBase(Section):
    """The methods that train; the parameters of each are in a table of its name."""

    methods: list[str] = Field(
        default=["grpo"],
        description="Methods of the run, such as [dapo, iac]; megasharp methods lists them. One must be the estimator "
        "of advantages; clip is added where no other surrogate is named.",
    )
    mini_batches: int = Field(
        default=1,
        ge=1,
        description="Number of optimizer steps per training step, each on an equal share of the groups. Above 1 each "
        "sample is still used once, and the importance ratio moves away from 1.",
    )
    reduction: ReductionName | None = Field(
        default=None,
        description="Averaging of token losses over the optimizer step. token_mean: all tokens alike; "
        "seq_mean_token_mean: all responses alike; seq_mean_token_sum: sum per response; token_sum_over_constant: sum "
        "divided by the largest response limit. null: what the methods prescribe.",
    )
    schedule: list[ScheduleStage] = Field(
        default=[],
        description="Stages in which other methods train before recipe.methods does, for example 50 steps of grpo "
        "before casp. Empty: recipe.methods throughout.",
    )
    correction: Literal["auto", "none"] = Field(
        default="auto",
        description="Correction for stale tokens beside dlc. auto: a recipe with dlc that names no correction gets "
        "truncated_is against policy where rollout.max_staleness is above 0, which corrects staleness and leaves DLC's "
        "shift. none: only the methods named, as in runs begun before this key.",
    )
    reset: ResetConfig = Field(
        default=ResetConfig(),
        description="Resets of the reference policy and of the optimizer during long runs, as in ProRL.",
    )

    def params(self) -> Mapping[str, MethodParams]:
        """Return the parameter table of every method, by name."""
        return {name: getattr(self, name) for name in METHODS}

    @model_serializer(mode="wrap")
    def _tables_as_set(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Write only what was set in a method's table: a default written out would override a bundle's value."""
        tree: dict[str, Any] = handler(self)
        for name, params in self.params().items():
            written = params.model_dump(mode="json", exclude_unset=True)
            tree.pop(name, None)
            if written:
                tree[name] = written
        return tree

    def chosen_reduction(self) -> Reduction | None:
        """Return the reduction set by hand, or None to let the methods prescribe it."""
        return Reduction(self.reduction) if self.reduction else None


def _recipe_schema() -> type[RecipeBase]:
    named: dict[str, Any] = {}
    for name, method in METHODS.items():
        opening = f"Options of {name}" if method.Params.model_fields else f"{name} has no options"
        named[name] = (method.Params, Field(default=method.Params(), description=f"{opening}: {method.options}"))
    return create_model("RecipeConfig", __base__=RecipeBase, **named)


# mypy cannot see the fields that the table of methods adds.
if TYPE_CHECKING:
    RecipeConfig = RecipeBase
else:
    RecipeConfig = _recipe_schema()
