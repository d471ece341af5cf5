"""What a method gains at one try against what it loses at many: a point per row of a sweep, faint ones for its runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from megasharp.errors import UserError
from megasharp.report.style import COLOURS, INK, MUTED, PAPER, dress, new_figure, save_figure

_WIDTH, _HEIGHT = 8.4, 4.6
# Names stand in a column beside the axes, numbered as the points are: beside points they would cover each other.
_AXES = (0.085, 0.12, 0.56, 0.76)
_NAMES_X, _NAMES_TOP = 0.675, 0.86

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
    for index, (name, runs) in enumerate(drawn.items()):
        colour = COLOURS[index % len(COLOURS)]
        first, last = [run[0] for run in runs], [run[1] for run in runs]
        x, y = sum(first) / len(runs), sum(last) / len(runs)
        axes.scatter(first, last, s=14, color=colour, alpha=0.35, linewidths=0)
        axes.scatter([x], [y], s=130, color=colour, edgecolors=PAPER, linewidths=0.8, zorder=3)
        axes.annotate(str(index + 1), (x, y), color=PAPER, fontsize=6.5, ha="center", va="center", zorder=4)
        figure.text(_NAMES_X, _NAMES_TOP - line * index, f"{index + 1}  {name}", fontsize=8, color=colour, va="top")
    axes.set_xlabel(f"pass@{ks[0]}", fontsize=8, color=MUTED)
    axes.set_ylabel(f"pass@{ks[1]}", fontsize=8, color=MUTED)
    figure.text(0.02, 0.95, title, fontsize=11, fontweight="bold", color=INK, va="center")
    return save_figure(figure, path)
