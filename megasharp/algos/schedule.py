"""Which recipe trains at which step: `recipe.schedule` gives the first steps other methods than the rest of the run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce as fold

from megasharp.algos.base import Needs
from megasharp.algos.recipe import Recipe


class RecipeSchedule:
    """Recipes one after another; each of `stages` holds until its step, `final` from there on.

    Example: CaSP after 50 steps of GRPO is `RecipeSchedule([(50, grpo)], casp)`. `needs` is the union over all stages.
    """

    def __init__(self, stages: Sequence[tuple[int, Recipe]], final: Recipe) -> None:
        assert [until for until, _ in stages] == sorted({until for until, _ in stages})
        self._stages = tuple(stages)
        self.final = final
        self.needs: Needs = fold(lambda a, b: a | b, (recipe.needs for _, recipe in stages), final.needs)

    @property
    def all(self) -> tuple[Recipe, ...]:
        """Every stage's recipe, the final one last."""
        return (*(recipe for _, recipe in self._stages), self.final)

    def at(self, step: int) -> Recipe:
        """The recipe of training step `step` (from 1), coefficients that change with the step settled."""
        recipe = next((recipe for until, recipe in self._stages if step <= until), self.final)
        return recipe.at(step)
