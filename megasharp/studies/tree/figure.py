"""The picture of the tree study: each seed's policy under three methods, and both coefficients swept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megasharp.reporting.style import COLOURS, GRID, INK, MUTED, dress, new_figure
from megasharp.studies.tree.experiments import ALPHAS, BETAS, MAIN, TOPNS, Result, Results, at_entropy, casp
from megasharp.studies.tree.training import MODES, Setting

_PAPER = {"GRPO": "paper: 1", "GRPO + entropy": "paper: 6, .48", "CaSP": "paper: 6, 1.00"}
# Two shades for the two modes behind A, two for those behind B.
_MODE_COLOURS = (COLOURS[1], "#7fb2dd", COLOURS[2], "#e9b184", COLOURS[3], COLOURS[4])


def draw(results: Results) -> Figure:
    """Above: what each seed's policy gives to each mode. Below: modes and accuracy against beta and alpha."""
    figure = new_figure(13.0, 7.8)
    panels = [figure.add_subplot(2, 3, index + 1) for index in range(6)]
    for axes, (name, setting) in zip(panels, MAIN.items(), strict=False):
        _draw_policies(axes, name, results.sgd[setting])
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncol=7, fontsize=9, frameon=False, bbox_to_anchor=(0.5, 1.0))
    _draw_entropy(panels[3], results.sgd)
    _draw_casp(panels[4], results.sgd, "modes")
    _draw_casp(panels[5], results.sgd, "accuracy")
    figure.tight_layout(pad=1.4, w_pad=2.2, h_pad=2.6, rect=(0.0, 0.0, 1.0, 0.95))
    return figure


def _title(axes: Axes, title: str, subject: str) -> None:
    axes.set_title(title, fontsize=10, fontweight="bold", color=INK, loc="left", pad=17)
    axes.text(0, 1.03, subject, transform=axes.transAxes, fontsize=8, color=MUTED)


def _draw_policies(axes: Axes, name: str, result: Result) -> None:
    dress(axes)
    axes.grid(visible=False)
    # Seeds with the same mode ahead stand side by side.
    order = np.lexsort((-result.mode_probability_RM.max(axis=1), result.mode_probability_RM.argmax(axis=1)))
    share_RM = result.mode_probability_RM[order]
    seeds, bottom_R = np.arange(len(share_RM)), np.zeros(len(share_RM))
    for mode, share_R, colour in zip(MODES, share_RM.T, _MODE_COLOURS, strict=True):
        axes.bar(seeds, share_R, width=0.85, bottom=bottom_R, color=colour, label=mode)
        bottom_R = bottom_R + share_R
    axes.bar(seeds, 1.0 - bottom_R, width=0.85, bottom=bottom_R, color=GRID, label="not rewarded")
    axes.set_ylim(0.0, 1.0)
    axes.set_xticks([])
    axes.set_xlabel(f"{len(seeds)} seeds", fontsize=8, color=MUTED)
    ours = f"modes found {result.median_modes:g} (median), accuracy {result.accuracy:.3f}"
    _title(axes, name, f"{ours}  ({_PAPER[name]})")


def _draw_entropy(axes: Axes, sgd: Mapping[Setting, Result]) -> None:
    dress(axes)
    found = [sgd[at_entropy(beta)] for beta in BETAS]
    modes = [float(result.modes_R.mean()) / len(MODES) for result in found]
    accuracy = [result.accuracy for result in found]
    axes.plot(BETAS, modes, color=COLOURS[1], marker="o", markersize=4, linewidth=1.6, label="modes found / 6")
    axes.plot(BETAS, accuracy, color=COLOURS[2], marker="s", markersize=4, linewidth=1.6, label="accuracy")
    axes.axhline(0.48, color=MUTED, linewidth=0.8, linestyle=":")
    axes.text(0.42, 0.495, "paper's accuracy .48", fontsize=7.5, color=MUTED)
    axes.set_ylim(0.0, 1.08)
    axes.set_xlabel("entropy coefficient", fontsize=8, color=MUTED)
    axes.legend(fontsize=8, loc="lower left", frameon=False)
    _title(axes, "GRPO + entropy, by coefficient", "mean over seeds")


def _draw_casp(axes: Axes, sgd: Mapping[Setting, Result], what: str) -> None:
    dress(axes)
    for topn, colour in zip(TOPNS, COLOURS[1:], strict=False):
        axes.plot(ALPHAS, _values(sgd, topn, what), color=colour, marker="o", markersize=4, label=f"N = {topn}")
    axes.set_ylim(*((0.0, 6.5) if what == "modes" else (0.0, 1.08)))
    axes.set_xlabel("alpha", fontsize=8, color=MUTED)
    axes.legend(fontsize=8, loc="upper left" if what == "modes" else "lower left", frameon=False)
    _title(axes, f"CaSP, {what} by alpha and N", "mean over seeds; lambda 1.1, no gate")


def _values(sgd: Mapping[Setting, Result], topn: int, what: str) -> Sequence[float]:
    found = [sgd[casp(topn, alpha)] for alpha in ALPHAS]
    return [float(r.modes_R.mean()) if what == "modes" else r.accuracy for r in found]
