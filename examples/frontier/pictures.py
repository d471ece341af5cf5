"""Draw the study's pictures from the recorded runs.

    python examples/frontier/pictures.py

`frontier.png`: pass@1 against pass@256 on the test problems. `curves.png`: pass@1 against pass@64 on the development
problems while runs train, a panel a method. `tokens.png`: both by sampled tokens. Bands are one standard error over
seeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, sqrt

import numpy as np
from confirm import FOLLOWED, SEEDS
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from records import RESULTS, TEST, UNTRAINED, Point, Run, counts, grouped, read_runs, tested, untrained_point

from megasharp.evals.frontier import Values, upper_hull
from megasharp.reporting.style import COLOURS, INK, MUTED, PAPER, dress, new_figure, save_figure

GREY = COLOURS[0]
# The part of the plane that is enlarged.
NEAR_X, NEAR_Y = (0.232, 0.294), (0.835, 0.925)
# Places of labels around a point, in pixels.
AROUND = [np.array([across, up]) for across in (-17.0, 0.0, 17.0) for up in (-15.0, 0.0, 15.0) if across or up]
COLUMNS = 4
PANEL = (2.6, 2.3)


@dataclass(frozen=True, slots=True)
class Cloud:
    """Means and standard errors of two metrics over seeds, each [points]."""

    x: Values
    y: Values
    x_error: Values
    y_error: Values


def main() -> None:
    """Draw what the recorded runs allow."""
    runs = [run for run in read_runs() if run.seed in FOLLOWED.get(run.method, SEEDS)]
    save_figure(frontier(runs), RESULTS / "frontier.png")
    save_figure(curves(runs), RESULTS / "curves.png")
    save_figure(by_tokens(runs), RESULTS / "tokens.png")


def errors(values_RP: Values) -> Values:
    """Return the standard error over runs."""
    return np.asarray(values_RP.std(axis=0, ddof=1) / sqrt(len(values_RP)))


def frontier(runs: Sequence[Run]) -> Figure:
    """Draw the test problems: GRPO's line and a cross for each setting, the whole and the part where most are."""
    measured = counts(TEST)
    sides = {name: [run.name for run in each if run.name in measured] for name, each in grouped(runs).items()}
    sides = {UNTRAINED: sorted(run for run in measured if run.startswith(UNTRAINED)), **sides}
    points = {name: _point(name, names) for name, names in sides.items() if len(names) > 1}
    figure = new_figure(11.5, 4.9)
    panels = [figure.add_axes((left, 0.11, 0.33, 0.76)) for left in (0.055, 0.44)]
    line = upper_hull([(x, y) for name, (x, y, *_) in points.items() if _is_baseline(name)])
    # Each vertex of the line is a side's mean: one standard error of its pass@256.
    error = {(x, y): y_error for x, y, _, y_error in points.values()}
    low, high = ([y + sign * error[x, y] for x, y in line] for sign in (-1.0, 1.0))
    for axes in panels:
        dress(axes)
        axes.plot(*zip(*line, strict=True), color=GREY, linewidth=1.4, zorder=2)
        axes.fill_between([x for x, _ in line], low, high, color=GREY, alpha=0.15, linewidth=0, zorder=1)
        for index, (name, point) in enumerate(points.items()):
            _cross(axes, point, _colour(index, name))
        axes.set_xlabel("pass@1", fontsize=8, color=MUTED)
    whole, near = panels
    near.set(xlim=NEAR_X, ylim=NEAR_Y)
    labels: dict[Axes, list[tuple[str, Point, str]]] = {}
    for index, (name, (x, y, *_)) in enumerate(points.items()):
        inside = NEAR_X[0] < x < NEAR_X[1] and NEAR_Y[0] < y < NEAR_Y[1]
        axes, colour = near if inside else whole, _colour(index, name)
        labels.setdefault(axes, []).append((str(index), (x, y), colour))
        figure.text(0.79, 0.86 - index * 0.041, f"{index}  {name}", fontsize=7.5, color=colour, va="top")
    for axes, each in labels.items():
        _write(axes, each, [(x, y) for x, y, *_ in points.values()])
    whole.set_ylabel("pass@256", fontsize=8, color=MUTED)
    figure.text(0.015, 0.955, "256 test problems after 600,000 tokens; line: GRPO's rates", fontsize=11, color=INK)
    return figure


def _write(axes: Axes, labels: Sequence[tuple[str, Point, str]], points: Sequence[Point]) -> None:
    """Write each label at that place around its point that is farthest from other points and labels."""
    taken: list[Values] = [np.asarray(place) for place in axes.transData.transform(points)]
    for text, point, colour in labels:
        own = np.asarray(axes.transData.transform(point))
        free = [other for other in taken if not np.allclose(other, own)]
        offset = max(AROUND, key=lambda around: min(np.hypot(*(own + around - other)) for other in free))
        taken.append(own + offset)
        axes.annotate(
            text, own + offset, xycoords="figure pixels", ha="center", va="center", fontsize=7.5, color=colour
        )


def _is_baseline(name: str) -> bool:
    return name == UNTRAINED or name.startswith("grpo ")


def _colour(index: int, name: str) -> str:
    return GREY if _is_baseline(name) else COLOURS[1 + index % (len(COLOURS) - 1)]


def _cross(axes: Axes, point: tuple[float, float, float, float], colour: str) -> None:
    x, y, x_error, y_error = point
    axes.errorbar(x, y, xerr=x_error, yerr=y_error, color=colour, linewidth=1.0, zorder=3)
    axes.scatter(x, y, s=26 if colour == GREY else 38, color=colour, edgecolors=PAPER, linewidths=0.7, zorder=4)


def _point(name: str, runs: Sequence[str]) -> tuple[float, float, float, float]:
    side = tested(name, runs, "pass@256")
    x_R, y_R = side.x_RP.mean(axis=1, keepdims=True), side.y_RP.mean(axis=1, keepdims=True)
    return *side.point, float(errors(x_R)[0]), float(errors(y_R)[0])


def trajectory(runs: Sequence[Run], x: str, y: str) -> Cloud:
    """Average the evaluations of runs, one by one from the first: runs of one setting are evaluated at the same steps.

    The last evaluation is at each run's own last step.
    """
    count = min(len(run.curve) for run in runs)
    x_RT, y_RT = (np.array([[line[key] for line in run.curve[:count]] for run in runs]) for key in (x, y))
    return Cloud(x_RT.mean(axis=0), y_RT.mean(axis=0), errors(x_RT), errors(y_RT))


def curves(runs: Sequence[Run]) -> Figure:
    """Draw each setting's way through the plane of pass@1 and pass@64, GRPO's ways behind it."""
    groups = {name: each for name, each in grouped(runs).items() if len(each) > 1}
    behind = [trajectory(each, "pass@1", "pass@64") for name, each in groups.items() if name.startswith("grpo ")]
    start = untrained_point(runs)
    figure, panels = _panels(groups, "pass@1 against pass@64 on 128 development problems; grey: GRPO's three rates")
    for axes, (name, each) in zip(panels, groups.items(), strict=True):
        for cloud in behind:
            axes.plot([start[0], *cloud.x], [start[1], *cloud.y], color=GREY, linewidth=1.0, alpha=0.7)
        cloud = trajectory(each, "pass@1", "pass@64")
        axes.plot(
            [start[0], *cloud.x], [start[1], *cloud.y], color=COLOURS[2], linewidth=1.6, marker="o", markersize=2.5
        )
        axes.fill_between(cloud.x, cloud.y - cloud.y_error, cloud.y + cloud.y_error, color=COLOURS[2], alpha=0.18, lw=0)
        axes.set_title(name, fontsize=7, color=INK, loc="left", fontweight="bold")
    return figure


def by_tokens(runs: Sequence[Run]) -> Figure:
    """Draw pass@1 and pass@64 by sampled tokens, GRPO at the middle rate behind each."""
    groups = {name: each for name, each in grouped(runs).items() if len(each) > 1}
    figure, panels = _panels(
        groups, "pass@1 (below) and pass@64 (above) by thousands of sampled tokens; grey: GRPO at 5e-5"
    )
    for axes, (name, each) in zip(panels, groups.items(), strict=True):
        for metric in ("pass@1", "pass@64"):
            if "grpo 5e-5" in groups:
                cloud = trajectory(groups["grpo 5e-5"], "tokens", metric)
                axes.plot(cloud.x / 1000, cloud.y, color=GREY, linewidth=1.0)
            cloud = trajectory(each, "tokens", metric)
            axes.plot(cloud.x / 1000, cloud.y, color=COLOURS[2], linewidth=1.6)
            low, high = cloud.y - cloud.y_error, cloud.y + cloud.y_error
            axes.fill_between(cloud.x / 1000, low, high, color=COLOURS[2], alpha=0.18, lw=0)
        axes.set_ylim(0.0, 1.0)
        axes.set_title(name, fontsize=7, color=INK, loc="left", fontweight="bold")
    return figure


def _panels(groups: Mapping[str, object], title: str) -> tuple[Figure, list[Axes]]:
    lines = ceil(len(groups) / COLUMNS)
    height = lines * PANEL[1] + 0.5
    figure = new_figure(COLUMNS * PANEL[0], height)
    grid = figure.add_gridspec(lines, COLUMNS)
    panels: list[Axes] = []
    for index in range(len(groups)):
        # Panels share their limits, so that they can be compared.
        shared = {"sharex": panels[0], "sharey": panels[0]} if panels else {}
        panels.append(figure.add_subplot(grid[index // COLUMNS, index % COLUMNS], **shared))
    for axes in panels:
        dress(axes)
    figure.subplots_adjust(left=0.05, right=0.99, bottom=0.3 / height, top=1 - 0.75 / height, hspace=0.35, wspace=0.25)
    figure.text(0.01, 1 - 0.25 / height, title, fontsize=11, color=INK, va="center")
    return figure, panels


if __name__ == "__main__":
    main()
