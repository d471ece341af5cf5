"""Many pass@k curves, a panel each: its own curve with a band, beside the same one or two curves in every panel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from megasharp.errors import UserError
from megasharp.report.style import COLOURS, INK, MUTED, dress, new_figure, save_figure

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
    figure.text(0.02, 1 - 0.45 / height, f"pass@k with 95% intervals;  {legend}", fontsize=8, color=MUTED, va="center")
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
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(ks[:: max(1, ceil(len(ks) / _TICKS))]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda k, _: f"{k:g}"))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.set_ylim(0.0, min(1.0, 1.05 * top))
