"""Pictures of pass@k: a few curves, many curves in panels, and the frontier between few and many tries.

`plot_pass_at_k` draws curves over k, for models before and after training. A model whose pass@1 rose while its pass@k
at large k fell has traded variety for confidence: the region in which a later curve is below the first is shaded.
`plot_panels` gives each curve of a sweep a panel with its band, beside the same one or two curves in every panel.
`plot_frontier` draws a sweep's rows as points, pass@k at a small k against a large one, and their runs as faint ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from numpy.typing import NDArray

from megasharp.common.errors import UserError
from megasharp.reporting.style import COLOURS, INK, LOSS, MUTED, PAPER, dress, new_figure, save_figure

Curve = Mapping[int, float]

# Heights of a line of label text, of the axes' foot and head and of a second line above them, as shares of the axes and
# of the figure.
LABEL_GAP = 0.055
LEFT, BOTTOM, TOP = 0.09, 0.13, 0.85
SECOND_LINE = 0.045
# Two lines of text in a corner, as a share of the axes.
CORNER = 0.2
# Width of a label's character and of the gap before it, as shares of the figure's width.
CHARACTER, LABEL_INDENT = 0.0125, 0.03
MOST_TICKS = 14


def plot_pass_at_k(
    curves: Mapping[str, Curve], path: Path, title: str, distinct: Mapping[str, float] | None = None
) -> Path:
    """Draw pass@k (values in 0..1) over k on a log2 axis, a curve per name, to the PNG `path`.

    The first curve is what the others are compared with: "before", then "after". `distinct` adds a line that names
    each curve's mean number of distinct correct answers per problem. Returns `path`.

    Raises:
        UserError: there is no curve, one has no points, or the file cannot be written.
    """
    if not curves or not all(curves.values()):
        raise UserError(f"{path}: nothing to draw; every curve needs pass@k for at least one k")
    figure = new_figure(6.4, 4.2)
    labels = {name: f"{name}  {_number(curve[max(curve)])}" for name, curve in curves.items()}
    width = 1.0 - LEFT - LABEL_INDENT - CHARACTER * max(map(len, labels.values()))
    height = TOP - BOTTOM - (SECOND_LINE if distinct else 0.0)
    axes = figure.add_axes((LEFT, BOTTOM, max(0.4, width), height))
    dress(axes)
    # The head of the axis: 1 for values that use half of it, closer for hard suites.
    highest = max(value for curve in curves.values() for value in curve.values())
    top = 1.0 if highest > 0.5 or highest == 0.0 else 1.25 * highest
    ks = sorted({k for curve in curves.values() for k in curve})
    _set_scales(axes, ks if len(ks) <= MOST_TICKS else [k for k in ks if k.bit_count() == 1], top)
    axes.set_xlim(ks[0] / 1.25, ks[-1] * 1.25)
    axes.set_xlabel("k (tries per problem)", fontsize=9, color=MUTED)
    for name, colour in _colours(curves).items():
        ks = sorted(curves[name])
        marker = "o" if len(ks) <= MOST_TICKS else ""
        values = [curves[name][k] for k in ks]
        axes.plot(ks, values, color=colour, linewidth=2.2, marker=marker, markersize=4.5, clip_on=False, zorder=3)
    _label_ends(axes, curves, labels, top)
    if len(curves) == 2 and min(map(len, curves.values())) > 1:
        before, after = curves.values()
        _label_starts(axes, before, after, top)
    _head(figure, title, distinct or {})
    _shade_losses(axes, curves, top)
    return save_figure(figure, path)


def _head(figure: Figure, title: str, distinct: Mapping[str, float]) -> None:
    figure.text(LEFT, 0.925, title, fontsize=12, fontweight="bold", color=INK)
    figure.text(LEFT, 0.872, "pass@k: share of problems solved in k tries", fontsize=9, color=MUTED)
    if distinct:
        counts = ",  ".join(f"{name} {value:.2f}" for name, value in distinct.items())
        line = f"distinct correct answers per problem:  {counts}"
        figure.text(LEFT, 0.872 - SECOND_LINE, line, fontsize=9, color=MUTED)


def _colours(curves: Mapping[str, Curve]) -> dict[str, str]:
    return {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(curves)}


def _shade_losses(axes: Axes, curves: Mapping[str, Curve], top: float) -> None:
    """Shade where a later curve is below the first, and name the largest loss in a free corner."""
    (_, first), *later = curves.items()
    losses: list[tuple[float, int, str]] = []
    for name, curve in later:
        shared = sorted(first.keys() & curve.keys())
        if len(shared) > 1:
            losses += [(first[k] - curve[k], k, name) for k in shared if curve[k] < first[k]]
            # Interpolated on the log axis, so that the shade ends where the drawn lines cross.
            log2_k = np.linspace(np.log2(shared[0]), np.log2(shared[-1]), 400)
            upper, lower = (np.interp(log2_k, np.log2(shared), [one[k] for k in shared]) for one in (first, curve))
            axes.fill_between(2**log2_k, lower, upper, where=lower < upper, color=LOSS, alpha=0.16, linewidth=0)
    if not losses:
        return
    loss, k, name = max(losses)
    text = f"shaded: lost\n{name} -{_number(loss)} at k = {k}"
    # Curves rise with k, so the lower right corner is free unless one ends low; then the upper left one is.
    if min(curve[max(curve)] for curve in curves.values()) / top > CORNER:
        axes.text(0.98, 0.04, text, transform=axes.transAxes, ha="right", fontsize=9, color=LOSS)
    else:
        axes.text(0.02, 0.96, text, transform=axes.transAxes, va="top", fontsize=9, color=LOSS)


def _set_scales(axes: Axes, ticks: Sequence[int], top: float) -> None:
    """Put k on a log2 axis with these ticks, and pass@k from 0 to `top`."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda k, _: f"{k:g}"))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.set_ylim(0.0, top)


def _number(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


def _label_ends(axes: Axes, curves: Mapping[str, Curve], labels: Mapping[str, str], top: float) -> None:
    """Name each curve at its right end."""
    colours = _colours(curves)
    names = sorted(curves, key=lambda name: curves[name][max(curves[name])])
    heights = spread([curves[name][max(curves[name])] for name in names], LABEL_GAP * top, top)
    for name, height in zip(names, heights, strict=True):
        axes.annotate(
            labels[name],
            (max(curves[name]), height),
            xytext=(9, 0),
            textcoords="offset points",
            va="center",
            fontsize=9.5,
            fontweight="bold",
            color=colours[name],
            annotation_clip=False,
        )


def spread(heights: Sequence[float], gap: float, top: float) -> list[float]:
    """Move ascending `heights` apart to at least `gap`, none above `top` (given that they fit below it)."""
    placed: list[float] = []
    for height in heights:
        placed.append(max(height, placed[-1] + gap) if placed else height)
    ceiling = top
    for index in reversed(range(len(placed))):
        placed[index] = min(placed[index], ceiling)
        ceiling = placed[index] - gap
    return placed


def _label_starts(axes: Axes, first: Curve, second: Curve, top: float) -> None:
    """Write the values at the smallest k: the higher one above its point, the lower one below."""
    for curve, other, colour in ((first, second, COLOURS[0]), (second, first, COLOURS[1])):
        k = min(curve)
        # The tick labels are below the lowest points.
        above = curve[k] > other[min(other)] or curve[k] < LABEL_GAP * top
        axes.annotate(
            _number(curve[k]),
            (k, curve[k]),
            xytext=(0, 7 if above else -7),
            textcoords="offset points",
            ha="center",
            va="bottom" if above else "top",
            fontsize=9,
            color=colour,
            annotation_clip=False,
        )


_COLUMNS = 4
_WIDTH, _HEIGHT = 2.5, 2.1
_HEAD = 0.55
# Ticks of a panel: more would touch.
_TICKS = 5


@dataclass(frozen=True, slots=True)
class Banded:
    """A curve over k with its lower and upper bounds, all in 0..1."""

    values: Mapping[int, float]
    low: Mapping[int, float]
    high: Mapping[int, float]


def plot_panels(curves: Mapping[str, Banded], beside: Sequence[str], title: str, path: Path) -> Path:
    """Draw a panel for each curve that is not `beside`, with those in the background, to the PNG `path`.

    Raises UserError where there is nothing to draw or the file cannot be written.
    """
    own = [name for name in curves if name not in beside] or list(curves)
    if not own:
        raise UserError(f"{path}: nothing to draw")
    columns = min(_COLUMNS, len(own))
    lines = ceil(len(own) / columns)
    figure = new_figure(max(columns, 2) * _WIDTH, lines * _HEIGHT + _HEAD)
    grid = figure.add_gridspec(lines, columns)
    top = max(max(curve.high.values()) for curve in curves.values())
    for index, name in enumerate(own):
        axes = figure.add_subplot(grid[index // columns, index % columns])
        _panel(axes, name, curves, [other for other in beside if other in curves and other != name], top)
        if index + columns >= len(own):
            axes.set_xlabel("k (tries per problem)", fontsize=7.5, color=MUTED)
    height = lines * _HEIGHT + _HEAD
    figure.subplots_adjust(left=0.06, right=0.98, bottom=0.42 / height, top=1 - (_HEAD + 0.15) / height, hspace=0.42)
    figure.text(0.02, 1 - 0.22 / height, title, fontsize=11, fontweight="bold", color=INK, va="center")
    legend = "   ".join(f"{_MARKS[i]} {name}" for i, name in enumerate(beside) if name in curves)
    figure.text(
        0.02,
        1 - 0.45 / height,
        f"pass@k with 95% intervals over problems;  {legend}",
        fontsize=8,
        color=MUTED,
        va="center",
    )
    return save_figure(figure, path)


_MARKS = ("dotted:", "dashed:")
_STYLES = (":", "--")


def _panel(axes: Axes, name: str, curves: Mapping[str, Banded], beside: Sequence[str], top: float) -> None:
    dress(axes)
    for other, style, colour in zip(beside, _STYLES, (COLOURS[0], COLOURS[1]), strict=False):
        ks = sorted(curves[other].values)
        axes.plot(ks, [curves[other].values[k] for k in ks], color=colour, linewidth=1.3, linestyle=style)
    curve = curves[name]
    ks = sorted(curve.values)
    axes.fill_between(ks, [curve.low[k] for k in ks], [curve.high[k] for k in ks], color=COLOURS[2], alpha=0.18, lw=0)
    axes.plot(ks, [curve.values[k] for k in ks], color=COLOURS[2], linewidth=1.8)
    axes.set_title(name, fontsize=8.5, color=INK, loc="left", fontweight="bold")
    _set_scales(axes, ks[:: max(1, ceil(len(ks) / _TICKS))], min(1.0, 1.05 * top))


_FRONTIER_WIDTH, _FRONTIER_HEIGHT = 8.4, 4.6
# Names are in a column beside the axes, with the numbers of the points: beside points they would overlap.
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
    figure = new_figure(_FRONTIER_WIDTH, _FRONTIER_HEIGHT)
    axes = figure.add_axes(_AXES)
    dress(axes)
    line = min(0.05, (_NAMES_TOP - 0.05) / len(drawn))
    means = [(sum(x for x, _ in runs) / len(runs), sum(y for _, y in runs) / len(runs)) for runs in drawn.values()]
    for index, (name, runs) in enumerate(drawn.items()):
        colour, mean = COLOURS[index % len(COLOURS)], means[index]
        for run in runs:
            # A line to the mean shows the row of a faint point: colours repeat.
            axes.plot(*zip(mean, run, strict=True), color=colour, alpha=0.35, linewidth=0.8, marker="o", markersize=3)
        axes.scatter(*mean, s=44, color=colour, edgecolors=PAPER, linewidths=0.8, zorder=3)
        figure.text(_NAMES_X, _NAMES_TOP - line * index, f"{index + 1}  {name}", fontsize=8, color=colour, va="top")
    for index, side in enumerate(_free_sides(axes.transData.transform(means))):
        axes.annotate(
            str(index + 1),
            means[index],
            xytext=(side[0] * _BESIDE_POINTS, side[1] * _BESIDE_POINTS),
            textcoords="offset points",
            color=COLOURS[index % len(COLOURS)],
            fontsize=7.5,
            fontweight="bold",
            ha="center",
            va="center",
            zorder=4,
        )
    axes.set_xlabel(f"pass@{ks[0]}", fontsize=8, color=MUTED)
    axes.set_ylabel(f"pass@{ks[1]}", fontsize=8, color=MUTED)
    figure.text(0.02, 0.95, title, fontsize=11, fontweight="bold", color=INK, va="center")
    return save_figure(figure, path)


def _free_sides(places_R2: NDArray[np.float64]) -> list[Point]:
    """Return for each place on the picture the side on which other places are farthest."""
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
