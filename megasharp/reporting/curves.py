"""Curves over steps: one run's reward, entropy and pass@k in panels, or several runs in the same panels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from megasharp.common.control import ControlState
from megasharp.common.errors import UserError
from megasharp.reporting.history import evaluated_suites
from megasharp.reporting.style import COLOURS, INK, LOSS, MUTED, dress, new_figure, save_figure

Row = Mapping[str, float | None]
Points = list[tuple[float, float]]

# Fewer points than this are shown unsmoothed.
SMOOTH_FROM = 20


@dataclass(frozen=True, slots=True)
class Panel:
    """One small picture. `smooth` lays a running mean over noisy per-step points."""

    title: str
    subject: str
    points: Points
    smooth: bool


@dataclass(frozen=True, slots=True)
class Events:
    """Steps after which something was reset, and those after which responses got another limit in tokens."""

    resets: tuple[float, ...]
    limits: tuple[tuple[float, float], ...]

    @property
    def explanation(self) -> str:
        """The legend of the lines in the panels; empty without any."""
        limits = ", ".join(f"{limit:.0f} after step {step:.0f}" for step, limit in self.limits)
        parts = ["dashed: reset"] * bool(self.resets) + [f"dotted: response limit {limits}"] * bool(limits)
        return "    ".join(parts)


NO_EVENTS = Events((), ())


def events_of(control: ControlState) -> Events:
    """Return the resets and changed limits that a run has decided on."""
    changes = tuple((float(change.step), float(change.max_response_tokens)) for change in control.lengths.changes)
    return Events(tuple(float(reset.step) for reset in control.resets.done), changes)


def plot_training(rows: Sequence[Row], path: Path, events: Events = NO_EVENTS) -> Path:
    """Draw the curves of `rows` (of metrics.jsonl) in small panels to the PNG `path`; return `path`.

    Panels: mean reward, entropy in nats, and per suite pass@1 and pass@k at its largest k. A metric that no
    row has gets no panel; null values are left out. Resets of the reference or the optimizer are dashed lines, steps
    from which responses may have another length dotted ones; both are explained below the panels where there are any.

    Raises:
        UserError: the rows have none of these metrics, or the file cannot be written.
    """
    panels = [panel for panel in _panels(rows) if panel.points]
    if not panels:
        raise UserError(f"{path}: nothing to draw; the metrics have neither reward nor entropy nor pass@k")
    columns = min(4, len(panels))
    lines = -(-len(panels) // columns)
    last_step = max(step for panel in panels for step, _ in panel.points)
    explained = 0.25 if events.explanation else 0.0
    height = 2.5 * lines + 0.2 + explained
    figure = new_figure(2.7 * columns + 0.3, height)
    for index, panel in enumerate(panels):
        axes = figure.add_subplot(lines, columns, index + 1)
        _draw(axes, panel, last_step)
        for step in events.resets:
            axes.axvline(step, color=LOSS, linewidth=0.9, linestyle="--", zorder=1)
        for step, _ in events.limits:
            axes.axvline(step, color=INK, linewidth=0.9, linestyle=":", zorder=1)
    figure.text(0.02, 0.1 / height, events.explanation, fontsize=8, color=MUTED)
    figure.tight_layout(pad=1.2, w_pad=1.6, rect=(0.0, explained / height, 1.0, 1.0))
    return save_figure(figure, path)


def _panels(rows: Sequence[Row]) -> Iterable[Panel]:
    yield Panel("reward", "mean of the step", _points(rows, "reward/mean"), smooth=True)
    yield Panel("entropy", "nats per token", _points(rows, "entropy/policy"), smooth=True)
    for suite, ks in evaluated_suites(rows).items():
        for k in sorted({min(ks), max(ks)}):
            yield Panel(f"pass@{k}", suite, _points(rows, f"eval/{suite}/pass@{k}"), smooth=False)


def _points(rows: Sequence[Row], name: str) -> Points:
    return [
        (step, value) for row in rows if (step := row.get("step")) is not None and (value := row.get(name)) is not None
    ]


def _draw(axes: Axes, panel: Panel, last_step: float) -> None:
    dress(axes)
    steps, values = np.array(panel.points).T
    if panel.smooth and len(values) >= SMOOTH_FROM:
        axes.plot(steps, values, color=COLOURS[1], linewidth=0.8, alpha=0.3)
        steps, values = running_mean(steps, values)
        axes.plot(steps, values, color=COLOURS[1], linewidth=2.0)
    else:
        axes.plot(steps, values, color=COLOURS[1], linewidth=2.0, marker="o", markersize=3.5, clip_on=False)
    axes.set_title(panel.title, fontsize=10, fontweight="bold", color=INK, loc="left", pad=17)
    axes.set_title(f"{values[0]:.2f} → {values[-1]:.2f}", fontsize=9, color=COLOURS[1], loc="right", pad=17)
    axes.text(0, 1.04, panel.subject, transform=axes.transAxes, fontsize=8, color=MUTED)
    axes.set_xlabel("step", fontsize=8, color=MUTED)
    axes.set_xlim(0, max(1.0, last_step))
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(4))


def window(points: int) -> int:
    """Return how many of a curve's points a running mean averages."""
    return max(3, points // 10)


def running_mean(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Average over windows of a tenth of the run; each mean is at its window's middle."""
    width = window(len(values))
    kernel = np.full(width, 1.0 / width)
    return np.convolve(steps, kernel, mode="valid"), np.convolve(values, kernel, mode="valid")


Series = Sequence[tuple[int, float]]


def plot_runs(figures: Mapping[str, Mapping[str, Series]], path: Path) -> Path:
    """Draw each metric of `figures` (by name, then by run: points of step and value) as one panel to the PNG `path`.

    Every run has one colour in all panels, named once below them. Long curves of steps, which are noisy, are shown as
    running means, which the axis says; evaluations are shown as they are.

    Raises:
        UserError: no metric has a point, or the file cannot be written.
    """
    panels = {name: runs for name, runs in figures.items() if any(runs.values())}
    if not panels:
        raise UserError(f"{path}: nothing to draw; these runs have no metrics yet")
    names = dict.fromkeys(run for runs in figures.values() for run in runs)
    colours = dict(zip(names, cycle(COLOURS[1:]), strict=False))
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    foot = 0.3
    height = 2.6 * lines + foot
    figure = new_figure(3.4 * columns, height)
    for index, (name, runs) in enumerate(panels.items()):
        axes = figure.add_subplot(lines, columns, index + 1)
        dress(axes)
        windows: set[int] = set()
        for run, colour in colours.items():
            steps, values = np.array(runs.get(run) or np.empty((0, 2))).reshape(-1, 2).T
            plain = name.startswith("eval/") or len(values) < SMOOTH_FROM
            if not plain:
                windows.add(window(len(values)))
                steps, values = running_mean(steps, values)
            axes.plot(steps, values, color=colour, linewidth=1.8, marker="o" if plain else None, markersize=3)
        axes.set_title(name, fontsize=9, fontweight="bold", color=INK, loc="left")
        over = " to ".join(f"{width}" for width in sorted({min(windows), max(windows)})) if windows else ""
        axes.set_xlabel(f"step (means over {over} steps)" if over else "step", fontsize=8, color=MUTED)
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(4))
    lines_drawn = figure.axes[0].get_lines()
    figure.legend(lines_drawn, list(colours), loc="lower left", ncols=len(colours), frameon=False, fontsize=8)
    figure.tight_layout(pad=1.0, w_pad=1.4, rect=(0.0, foot / height, 1.0, 1.0))
    return save_figure(figure, path)
