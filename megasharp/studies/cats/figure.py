"""The picture of the cats study: collapse, estimators, optimizers, the held-out input, IAC and DLC."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megasharp.reporting.style import COLOURS, INK, MUTED, dress, new_figure
from megasharp.studies.cats.experiments import (
    ADAMW,
    CALIBRATIONS,
    FAST_ADAMW,
    GROUP_SIZE,
    GROUP_SIZES,
    MOMENTUM,
    PLAIN,
    Results,
    calibrated,
)
from megasharp.studies.cats.training import (
    CAT,
    DISTINCT_ESTIMATORS,
    PERSIAN,
    PERSIAN_INPUT,
    SHIFTS,
    SIAMESE,
    STEPS,
    Setting,
    Trajectory,
    siamese_input,
)
from megasharp.studies.softmax import Array, softmax

SHOWN_SEEDS = 12
CALIBRATION_LINES = ("none", "IAC alpha 1", "DLC mu .5", "IAC alpha 1 + DLC mu .5")


def draw(results: Results, trajectory: Trajectory) -> Figure:
    """Six panels; `trajectory` is that of PLAIN."""
    figure = new_figure(13.0, 7.4)
    panels = [figure.add_subplot(2, 3, index + 1) for index in range(6)]
    for axes in panels:
        dress(axes)
    _draw_seeds(panels[0], trajectory)
    _draw_estimators(panels[1], results)
    _draw_optimizers(panels[2], results)
    _draw_siamese(panels[3], trajectory)
    _draw_calibrations(panels[4], results, PLAIN, f"IAC and DLC, SGD lr {PLAIN.lr:g}")
    _draw_calibrations(panels[5], results, ADAMW, f"IAC and DLC, AdamW lr {ADAMW.lr:g}")
    figure.tight_layout(pad=1.4, w_pad=2.0, h_pad=2.2)
    return figure


def held_out_policy(policy_RTV: Array, shift: float) -> Array:
    """Label probabilities of the Siamese input at every step.

    All updates lie along the Persian features (AdamW's too, both of them being equal), so its logits are Persian's
    times <siamese, persian> / <persian, persian>.
    """
    share = siamese_input(shift) @ PERSIAN_INPUT / (PERSIAN_INPUT @ PERSIAN_INPUT)
    return softmax(share * np.log(policy_RTV))


def _label(axes: Axes, title: str, subject: str, x: str = "step") -> None:
    axes.set_title(title, fontsize=10, fontweight="bold", color=INK, loc="left", pad=17)
    axes.text(0, 1.03, subject, transform=axes.transAxes, fontsize=8, color=MUTED)
    axes.set_xlabel(x, fontsize=8, color=MUTED)


def _legend(axes: Axes, place: str, columns: int = 1) -> None:
    axes.legend(fontsize=7.5, loc=place, ncol=columns, frameon=True, framealpha=0.9, edgecolor="none")


def _draw_seeds(axes: Axes, trajectory: Trajectory) -> None:
    seen: set[str] = set()
    for policy_TV in trajectory.policy_RTV[:SHOWN_SEEDS]:
        winner, colour = ("Cat", COLOURS[1]) if policy_TV[-1, CAT] > policy_TV[-1, PERSIAN] else ("Persian", COLOURS[2])
        label = None if winner in seen else f"{winner} wins"
        axes.plot(policy_TV[:, CAT], color=colour, linewidth=1.2, alpha=0.75, label=label)
        seen.add(winner)
    axes.set_ylim(-0.02, 1.17)
    axes.set_yticks(np.linspace(0.0, 1.0, 6))
    _legend(axes, "upper right", columns=2)
    _label(axes, f"raw rewards, G={GROUP_SIZE}, SGD", f"p(Cat) on the Persian input, {SHOWN_SEEDS} seeds at most")


def _draw_estimators(axes: Axes, results: Results) -> None:
    for estimator, colour in zip(DISTINCT_ESTIMATORS, COLOURS[1:], strict=False):
        _draw_mean(axes, results, replace(PLAIN, estimator=estimator), estimator, colour)
    _shares(axes)
    _legend(axes, "lower right")
    _label(axes, f"estimators, G={GROUP_SIZE}, SGD", "larger correct label's share of both, mean over seeds")


def _draw_mean(axes: Axes, results: Results, setting: Setting, label: str, colour: str) -> None:
    axes.plot(results[setting].dominance_RT.mean(axis=0), color=colour, linewidth=1.8, label=label)


def _shares(axes: Axes) -> None:
    axes.set_ylim(0.49, 1.01)
    axes.set_yticks(np.linspace(0.5, 1.0, 6))
    axes.set_xlim(0, STEPS)


def _draw_optimizers(axes: Axes, results: Results) -> None:
    for optimizer, colour in zip((PLAIN, MOMENTUM, FAST_ADAMW, ADAMW), COLOURS[1:], strict=False):
        label = f"{optimizer.optimizer} lr {optimizer.lr:g}"
        _draw_steps(axes, results, replace(optimizer, estimator="raw"), colour, "-", f"raw, {label}")
    _draw_steps(axes, results, replace(PLAIN, estimator="normalised"), COLOURS[0], "--", "normalised, SGD lr 0.5")
    axes.axhline(20, color=MUTED, linewidth=0.8, linestyle=":")
    axes.text(GROUP_SIZES[-1], 21.5, "20 steps", fontsize=7.5, color=MUTED, ha="right")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(GROUP_SIZES, [str(g) for g in GROUP_SIZES])
    axes.set_yticks((5, 10, 50, 100, 500), ["5", "10", "50", "100", "none"])
    axes.minorticks_off()
    axes.set_ylim(3, 12000)
    _legend(axes, "upper left")
    _label(axes, "optimizers", f"median step of the collapse (> .95), of {STEPS}", "group size G")


def _draw_steps(axes: Axes, results: Results, row: Setting, colour: str, line: str, label: str) -> None:
    steps = [min(results[replace(row, group_size=g)].median_step, STEPS) for g in GROUP_SIZES]
    axes.plot(GROUP_SIZES, steps, line, color=colour, marker="o", markersize=4, linewidth=1.6, label=label)


def _draw_siamese(axes: Axes, trajectory: Trajectory) -> None:
    for (name, shift), colour in zip(SHIFTS.items(), COLOURS[1:], strict=False):
        mean_T = held_out_policy(trajectory.policy_RTV, shift)[:, :, SIAMESE].mean(axis=0)
        axes.plot(mean_T, color=colour, linewidth=1.8, label=f"similarity {name} (shift {shift:g})")
    axes.set_yscale("log")
    axes.set_xlim(0, STEPS)
    _legend(axes, "upper right")
    _label(axes, f"held-out Siamese input, raw, G={GROUP_SIZE}, SGD", "p(Siamese), mean over seeds")


def _draw_calibrations(axes: Axes, results: Results, base: Setting, title: str) -> None:
    for name, colour in zip(CALIBRATION_LINES, COLOURS, strict=False):
        _draw_mean(axes, results, calibrated(base, CALIBRATIONS[name]), name, colour)
    _shares(axes)
    axes.set_ylim(0.49, 1.15)
    _legend(axes, "upper left", columns=2)
    _label(axes, title, f"raw, G={GROUP_SIZE}: larger correct label's share, mean over seeds")
