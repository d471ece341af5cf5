"""Curves of several runs in the same panels, over the same steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from megasharp.errors import UserError
from megasharp.report.curves import SMOOTH_FROM, running_mean
from megasharp.report.style import COLOURS, INK, MUTED, dress, new_figure, save_figure

Series = Sequence[tuple[int, float]]


def plot_runs(figures: Mapping[str, Mapping[str, Series]], path: Path) -> Path:
    """Draw each of `figures` (by name, then by run: points of step and value) as one panel to the PNG `path`.

    Every run has one colour in all panels, named once below them. Long curves of steps, which are noisy, are shown as
    running means; evaluations are shown as they are.

    Raises:
        UserError: no figure has a point, or the file cannot be written.
    """
    panels = {name: runs for name, runs in figures.items() if any(runs.values())}
    if not panels:
        raise UserError(f"{path}: nothing to draw; these runs have no figures yet")
    names = dict.fromkeys(run for runs in figures.values() for run in runs)
    colours = dict(zip(names, cycle(COLOURS[1:]), strict=False))
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    foot = 0.3
    height = 2.6 * lines + foot
    figure = new_figure(3.4 * columns, height)
    for index, (name, runs) in enumerate(panels.items()):
        _draw(figure.add_subplot(lines, columns, index + 1), name, runs, colours)
    lines_drawn = figure.axes[0].get_lines()
    figure.legend(lines_drawn, list(colours), loc="lower left", ncols=len(colours), frameon=False, fontsize=8)
    figure.tight_layout(pad=1.0, w_pad=1.4, rect=(0.0, foot / height, 1.0, 1.0))
    return save_figure(figure, path)


def _draw(axes: Axes, name: str, runs: Mapping[str, Series], colours: Mapping[str, str]) -> None:
    dress(axes)
    for run, colour in colours.items():
        steps, values = np.array(runs.get(run) or np.empty((0, 2))).reshape(-1, 2).T
        plain = name.startswith("eval/") or len(values) < SMOOTH_FROM
        if not plain:
            steps, values = running_mean(steps, values)
        axes.plot(steps, values, color=colour, linewidth=1.8, marker="o" if plain else None, markersize=3)
    axes.set_title(name, fontsize=9, fontweight="bold", color=INK, loc="left")
    axes.set_xlabel("step", fontsize=8, color=MUTED)
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(4))
