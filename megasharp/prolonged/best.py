"""The best evaluation so far, figure by figure, with the step whose weights it measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Figures of an evaluation of which more is better, beside pass@k for every k; `eval/<suite>/` stands before them.
GROWING = ("avg@n", "pass@n", "greedy", "distinct_correct")


@dataclass(frozen=True, slots=True)
class BestFigure:
    """The highest value of a figure, and after which step it was first reached."""

    value: float
    step: int


def is_growing(name: str) -> bool:
    """Whether more of this figure is better, by its name in the metrics."""
    figure = name.rpartition("/")[2]
    return name.startswith("eval/") and (figure in GROWING or figure.startswith("pass@"))


def with_evaluation(best: Mapping[str, BestFigure], step: int, figures: Mapping[str, float]) -> dict[str, BestFigure]:
    """`best` with the evaluation after `step`. The model that training starts from (step 0) is not counted."""
    found = dict(best)
    for name, value in figures.items():
        if step > 0 and is_growing(name) and (name not in found or value > found[name].value):
            found[name] = BestFigure(value, step)
    return found
