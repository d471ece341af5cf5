"""The picture of the squeeze study: one update, many, Proposition 3, and two shapes of one entropy."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megasharp.reporting.style import COLOURS, INK, MUTED, dress, new_figure
from megasharp.studies.softmax import Array
from megasharp.studies.squeeze.claims import BUDGETS, SHAPE_BUDGETS, TOPS, Measured
from megasharp.studies.squeeze.dynamics import (
    budgets,
    distinct,
    penalty_gradient,
    probability_change,
    start_logits,
    with_top,
)

SHOWN_RANKS = 12
ONE_UPDATE_RANK = 3


def draw(measured: Measured) -> Figure:
    """Six panels."""
    figure = new_figure(13.0, 7.4)
    panels = [figure.add_subplot(2, 3, index + 1) for index in range(6)]
    for axes in panels:
        dress(axes)
    _draw_one_update(panels[0])
    _draw_penalised(panels[1], measured.penalised)
    _draw_sampled(panels[2], measured.sampled)
    _draw_distinct(panels[3], measured)
    _draw_shapes(panels[4], measured.shapes)
    _draw_budgets(panels[5], measured.shapes)
    figure.tight_layout(pad=1.4, w_pad=2.2, h_pad=2.4)
    return figure


def _label(axes: Axes, title: str, subject: str, x: str, place: str) -> None:
    axes.set_title(title, fontsize=10, fontweight="bold", color=INK, loc="left", pad=17)
    axes.text(0, 1.03, subject, transform=axes.transAxes, fontsize=8, color=MUTED)
    axes.set_xlabel(x, fontsize=8, color=MUTED)
    axes.legend(fontsize=8, loc=place, frameon=True, framealpha=0.9, edgecolor="none")


def _draw_one_update(axes: Axes) -> None:
    logit_SV = torch.from_numpy(start_logits())[None]
    change_SV = penalty_gradient(logit_SV, torch.tensor([ONE_UPDATE_RANK - 1]))
    ranks = np.arange(1, SHOWN_RANKS + 1)
    moved_V, shifted_V = change_SV[0, :SHOWN_RANKS], probability_change(logit_SV, change_SV)[0, :SHOWN_RANKS]
    axes.bar(ranks - 0.2, moved_V.numpy(), width=0.4, color=COLOURS[1], label="logit")
    axes.bar(ranks + 0.2, shifted_V.numpy(), width=0.4, color=COLOURS[2], label="probability")
    axes.axhline(0.0, color=MUTED, linewidth=0.8)
    axes.set_xticks(ranks)
    _label(
        axes, f"one negative update on rank {ONE_UPDATE_RANK}", "first-order change (Lemma 2)", "rank", "lower right"
    )


def _draw_penalised(axes: Axes, penalised: Mapping[int, Array]) -> None:
    for (rank, p_TV), colour in zip(penalised.items(), COLOURS[1:], strict=False):
        axes.plot(p_TV.max(axis=-1), color=colour, linewidth=1.8, label=f"rank {rank}")
    axes.set_ylim(0.0, 1.05)
    _label(axes, "the same rank penalised at every step", "probability of rank 1", "step", "center right")


def _draw_sampled(axes: Axes, sampled: Mapping[float, Array]) -> None:
    for (advantage, p_TRV), colour in zip(sampled.items(), COLOURS[1:], strict=False):
        name = "all right" if advantage > 0 else "all wrong"
        axes.plot(p_TRV.max(axis=-1).mean(axis=-1), color=colour, linewidth=1.8, label=f"{name}: rank 1")
        first_T = p_TRV[..., 0].mean(axis=-1)
        axes.plot(first_T, "--", color=colour, linewidth=1.4, label=f"{name}: first holder of rank 1")
    axes.set_ylim(0.0, 1.4)
    axes.set_yticks(np.linspace(0.0, 1.0, 6))
    _label(axes, "on-policy updates with one advantage", "probability, mean over runs", "step", "upper left")


def _draw_distinct(axes: Axes, measured: Measured) -> None:
    shown = [top for top in TOPS if top < 1 - 1e-4]
    fine = 1.0 - np.geomspace(1.0 - shown[0], 1.0 - shown[-1], 80)
    for samples, colour in zip(BUDGETS, COLOURS[1:], strict=False):
        axes.plot(1.0 - fine, [distinct(with_top(top), samples) for top in fine], color=colour, label=f"K = {samples}")
        simulated = [measured.distinct[top, samples][1] for top in shown]
        axes.plot([1.0 - top for top in shown], simulated, "o", color=colour, markersize=4)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.invert_xaxis()
    axes.set_yticks((1, 2, 5, 10, 20, 50), ["1", "2", "5", "10", "20", "50"])
    axes.minorticks_off()
    _label(axes, "Proposition 3", "expected distinct tokens; dots simulated", "1 - p of rank 1", "lower left")


def _draw_shapes(axes: Axes, shapes: Mapping[str, Array]) -> None:
    ranks = np.arange(1, SHOWN_RANKS + 1)
    for offset, (name, p_V), colour in zip((-0.2, 0.2), shapes.items(), COLOURS[1:], strict=False):
        axes.bar(ranks + offset, p_V[:SHOWN_RANKS], width=0.4, color=colour, label=f"{name}, rank 1 = {p_V.max():.2f}")
    axes.set_xticks(ranks)
    axes.set_ylim(0.0, 1.0)
    size = len(next(iter(shapes.values())))
    _label(axes, "one entropy, ln 3", f"probability; first {SHOWN_RANKS} of {size} candidates", "rank", "upper right")


def _draw_budgets(axes: Axes, shapes: Mapping[str, Array]) -> None:
    for (name, p_V), colour in zip(shapes.items(), COLOURS[1:], strict=False):
        axes.plot(SHAPE_BUDGETS, budgets(p_V, SHAPE_BUDGETS), color=colour, marker="o", markersize=4, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(SHAPE_BUDGETS, [str(samples) for samples in SHAPE_BUDGETS])
    axes.set_yticks((1, 2, 5, 10, 20, 50), ["1", "2", "5", "10", "20", "50"])
    axes.minorticks_off()
    _label(axes, "their expected distinct tokens", "Proposition 3", "samples K", "upper left")
