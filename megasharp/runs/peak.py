"""The best evaluation of a run beside its last one, and which suite's figure chose it.

Papers report peaks (2601.15609, section 5.1: the best of a checkpoint every 50 steps). The suite that chose the peak
flatters it, because the best of many noisy figures is partly luck; on other suites it is as fair as the last one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from megasharp.config.core import Tree
from megasharp.metrics.writers import Row
from megasharp.prolonged.best import BestFigure, with_evaluation

KEEP_BEST = "checkpoint.keep_best"
_FIRST = "the first suite, because checkpoint.keep_best names none"


@dataclass(frozen=True, slots=True)
class Peak:
    """`metric` was best after step `step`, and `last_value` after the last evaluated step, `last_step`.

    `chosen_by` says who named the metric, `kept` whether the peak's checkpoint is there, `last_kept` the last one's.
    """

    metric: str
    chosen_by: str
    step: int
    value: float
    last_step: int
    last_value: float
    kept: bool
    last_kept: bool

    @property
    def line(self) -> str:
        """One line for a person."""
        kept = "its checkpoint is there" if self.kept else "no checkpoint of it"
        last = "its checkpoint is there" if self.last_kept else "no checkpoint of it"
        return (
            f"peak  {self.metric} {self.value:.3f} after step {self.step} ({kept}); last {self.last_value:.3f} after "
            f"step {self.last_step} ({last}); chosen by {self.chosen_by}"
        )

    def tree(self, figures: Mapping[int, Mapping[str, float]]) -> dict[str, object]:
        """For summary.json: with all figures of both evaluations."""
        return {**asdict(self), "figures": figures.get(self.step, {}), "last_figures": figures.get(self.last_step, {})}


def find_peak(config: Tree, rows: Sequence[Row], checkpoints: Collection[int]) -> Peak | None:
    """The peak by `checkpoint.keep_best`, or else by pass@k of the first suite at the smallest k.

    None where nothing was evaluated after a step. `checkpoints` are the steps that have a whole one.
    """
    metric, chosen_by = _metric(config)
    values = {step: value for step, figures in evaluations(rows).items() if (value := figures.get(metric)) is not None}
    best: dict[str, BestFigure] = {}
    for step, value in values.items():
        best = with_evaluation(best, step, {metric: value})
    if metric not in best:
        return None
    last, peak = max(values), best[metric]
    return Peak(
        metric, chosen_by, peak.step, peak.value, last, values[last], peak.step in checkpoints, last in checkpoints
    )


def evaluations(rows: Iterable[Row]) -> dict[int, dict[str, float]]:
    """All figures of evaluations by step, in order; of a step that was evaluated twice the later ones."""
    found: dict[int, dict[str, float]] = {}
    for row in rows:
        figures = {name: value for name, value in row.items() if name.startswith("eval/") and value is not None}
        if figures:
            found.setdefault(int(row["step"] or 0), {}).update(figures)
    return dict(sorted(found.items()))


def _metric(config: Tree) -> tuple[str, str]:
    named = _section(config, "checkpoint").get("keep_best")
    if isinstance(named, str):
        return named, KEEP_BEST
    evaluation = _section(config, "eval")
    suites, ks = evaluation.get("suites") or [""], evaluation.get("k") or [1]
    suite = str(suites[0]).rpartition("/")[2].removesuffix(".yaml")
    return f"eval/{suite}/pass@{min(ks)}", _FIRST


def _section(config: Tree, name: str) -> Tree:
    section = config.get(name)
    return section if isinstance(section, dict) else {}
