"""What a method gains at one try against what it loses at many: a point per row of a sweep, faint ones for its runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from megasharp.common.errors import UserError
from megasharp.reporting.style import COLOURS, INK, MUTED, PAPER, dress, new_figure, save_figure

_WIDTH, _HEIGHT = 8.4, 4.6
# Names stand in a column beside the axes, numbered as the points are: beside points they would cover each other.
_AXES = (0.085, 0.12, 0.56, 0.76)
_NAMES_X, _NAMES_TOP = 0.675, 0.86
_SIDES = ((0.0, 1.0), (1.0, 0.0), (0.0, -1.0), (-1.0, 0.0), (0.7, 0.7), (-0.7, 0.7), (0.7, -0.7), (-0.7, -0.7))
_BESIDE_POINTS = 8.0

Point = tuple[float, float]


def plot_frontier(rows: Mapping[str, Sequence[Point]], ks: tuple[int, int], title: str, path: Path) -> Path:
    """Draw each row's runs, (pass@ks[0], pass@ks[1]) each, and their mean to the PNG `path`.

    Raises UserError where there is nothing to draw or the file cannot be written.
    """
    drawn = {name: runs for name, runs in rows.items() if runs}
    if not drawn:
        raise UserError(f"{path}: nothing to draw")
    figure = new_figure(_WIDTH, _HEIGHT)
    axes = figure.add_axes(_AXES)
    dress(axes)
    line = min(0.05, (_NAMES_TOP - 0.05) / len(drawn))
    means = [(sum(x for x, _ in runs) / len(runs), sum(y for _, y in runs) / len(runs)) for runs in drawn.values()]
    for index, (name, runs) in enumerate(drawn.items()):
        colour, mean = COLOURS[index % len(COLOURS)], means[index]
        for run in runs:
            # A line to the mean tells whose run a faint point is: colours come again.
            axes.plot(*zip(mean, run, strict=True), color=colour, alpha=0.35, linewidth=0.8, marker="o", markersize=3)
        axes.scatter(*mean, s=44, color=colour, edgecolors=PAPER, linewidths=0.8, zorder=3)
        figure.text(_NAMES_X, _NAMES_TOP - line * index, f"{index + 1}  {name}", fontsize=8, color=colour, va="top")
    for index, side in enumerate(_free_sides(axes.transData.transform(means))):
        _number(axes, index, means[index], side)
    axes.set_xlabel(f"pass@{ks[0]}", fontsize=8, color=MUTED)
    axes.set_ylabel(f"pass@{ks[1]}", fontsize=8, color=MUTED)
    figure.text(0.02, 0.95, title, fontsize=11, fontweight="bold", color=INK, va="center")
    return save_figure(figure, path)


def _free_sides(places_R2: NDArray[np.float64]) -> list[Point]:
    """For each place on the picture, the side of it on which no other place is near."""
    if len(places_R2) == 1:
        return [_SIDES[0]]
    sides = np.array(_SIDES)
    found = []
    for index, place in enumerate(places_R2):
        others = np.delete(places_R2, index, axis=0)
        spots = place + 1.5 * _BESIDE_POINTS * sides
        nearest = np.linalg.norm(spots[:, None] - others[None], axis=-1).min(axis=1)
        found.append(_SIDES[int(nearest.argmax())])
    return found


def _number(axes: Axes, index: int, mean: Point, side: Point) -> None:
    axes.annotate(
        str(index + 1),
        mean,
        xytext=(side[0] * _BESIDE_POINTS, side[1] * _BESIDE_POINTS),
        textcoords="offset points",
        color=COLOURS[index % len(COLOURS)],
        fontsize=7.5,
        fontweight="bold",
        ha="center",
        va="center",
        zorder=4,
    )
