"""The picture of study `smoothing`: selection bias, correctness against variance, where Theorem B.10 holds."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megasharp.reporting.style import COLOURS, INK, LOSS, MUTED, dress, new_figure
from megasharp.studies.smoothing.policies import DIVERGENCES, improvement_probability
from megasharp.studies.smoothing.trials import SAMPLES, Enumeration
from megasharp.studies.softmax import Bools, Floats

_GREY, _BLUE, _ORANGE, _GREEN, _PURPLE, _OCHRE = COLOURS
Curve = tuple[Floats, Floats]
_BINS = np.linspace(0, 3, 13)


def draw(
    improvement: list[Enumeration], bonus: Curve, smooth: Curve, pressure: Floats, exists: Bools, kept: dict[str, Bools]
) -> Figure:
    """Three panels, 13 x 4.4 inches."""
    figure = new_figure(13.2, 4.5)
    axes = figure.subplots(1, 3)
    for panel in axes.flat:
        dress(panel)
    _improvement(axes[0], improvement)
    _frontier(axes[1], bonus, smooth)
    _domain(axes[2], pressure, exists, kept)
    figure.tight_layout(w_pad=2.5)
    return figure


def _title(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=10, fontweight="bold", color=INK)


def _labels(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x, fontsize=9, color=MUTED)
    axes.set_ylabel(y, fontsize=9, color=MUTED)


def _improvement(axes: Axes, improvement: list[Enumeration]) -> None:
    base = np.linspace(0, 1, 200)
    axes.plot(base, improvement_probability(base, SAMPLES), color=_BLUE, label="1 - (1 - base)ⁿ (Prop B.2)")
    points = [(one.base, one.counted) for one in improvement]
    axes.plot(*zip(*points, strict=True), "o", color=_ORANGE, ms=5, label="all data sets enumerated")
    axes.legend(fontsize=8, frameon=False, loc="lower right")
    axes.set(xlim=(0, 1), ylim=(0, 1.02))
    _labels(axes, "base probability of a correct trajectory", f"P(it gains), n = {SAMPLES}")
    _title(axes, "Selection bias")


def _frontier(axes: Axes, bonus: Curve, smooth: Curve) -> None:
    axes.plot(*bonus, color=_ORANGE, linewidth=2, label="entropy bonus on all")
    axes.plot(*smooth, color=_BLUE, linewidth=2, label="differential smoothing")
    axes.plot(smooth[0][0], smooth[1][0], "o", color=INK, ms=5, label="no bonus (RL)", zorder=4)
    axes.legend(fontsize=8, frameon=False, loc="lower right")
    _labels(axes, "normalised variance of correct trajectories", "correctness")
    _title(axes, "Best policies within one KL budget")


def _domain(axes: Axes, pressure: Floats, exists: Bools, kept: dict[str, Bools]) -> None:
    centre = (_BINS[1:] + _BINS[:-1]) / 2
    axes.plot(centre, _share(pressure, exists), color=INK, linewidth=2, label="the proof's choice exists")
    for name, colour in zip(DIVERGENCES, (_BLUE, _GREEN, _PURPLE, _OCHRE), strict=True):
        axes.plot(centre, _share(pressure, kept[name]), color=colour, linestyle="--", label=f"any choice: {name}")
    axes.axvline(1, color=LOSS, linewidth=1)
    axes.text(1.04, 1.06, "bonus = reward", fontsize=8, color=LOSS)
    axes.set(xlim=(0, 3), ylim=(0, 1.14))
    axes.legend(fontsize=8, frameon=False, loc="upper right", bbox_to_anchor=(1.0, 0.93))
    _labels(axes, "gamma x mean(-log base) over incorrect trajectories", "share of cases")
    _title(axes, "Where Theorem B.10's promise can be kept")


def _share(pressure: Floats, holds: Bools) -> list[float]:
    """Share of cases per bin of pressure; NaN for an empty one, which leaves a gap."""
    bins = np.digitize(pressure, _BINS) - 1
    inside = [holds[bins == index] for index in range(len(_BINS) - 1)]
    return [float(held.mean()) if held.size else float("nan") for held in inside]
