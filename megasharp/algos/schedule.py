"""Which recipe trains at which step: `recipe.schedule` gives the first steps other methods than the rest of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce as fold

from megasharp.algos.base import Needs
from megasharp.algos.recipe import Recipe


class RecipeSchedule:
    """Recipes one after another; each of `stages` holds until its step, `final` from there on.

    Example: CaSP after 50 steps of GRPO is `RecipeSchedule([(50, grpo)], casp)`. `needs` is the union over all stages.
    `limited` has the same recipes under other response limits than the run's largest, by limit in tokens.
    """

    def __init__(
        self,
        stages: Sequence[tuple[int, Recipe]],
        final: Recipe,
        limited: Mapping[int, RecipeSchedule] | None = None,
    ) -> None:
        assert [until for until, _ in stages] == sorted({until for until, _ in stages})
        self._stages = tuple(stages)
        self.final = final
        self._limited = dict(limited or {})
        self.needs: Needs = fold(lambda a, b: a | b, (recipe.needs for _, recipe in stages), final.needs)

    @property
    def all(self) -> tuple[Recipe, ...]:
        """Every stage's recipe under every limit, the final one under the largest limit last."""
        limited = (recipe for schedule in self._limited.values() for recipe in schedule.all)
        return (*limited, *(recipe for _, recipe in self._stages), self.final)

    def at(self, step: int, response_limit: int | None = None) -> Recipe:
        """The recipe of training step `step` (from 1), coefficients that change with the step settled.

        `response_limit` is how many tokens its responses may have; None is the run's largest limit.
        """
        if response_limit in self._limited:
            return self._limited[response_limit].at(step)
        recipe = next((recipe for until, recipe in self._stages if step <= until), self.final)
        return recipe.at(step)
