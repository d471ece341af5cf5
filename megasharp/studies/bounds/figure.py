"""The picture of study `bounds`: group size, the bound of Z, violations of Theorem 3.4, gradient alignment."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from megasharp.reporting.style import COLOURS, INK, LOSS, MUTED, dress, new_figure
from megasharp.studies.bounds.gradients import READINGS, GradientKernel
from megasharp.studies.bounds.sharpening import Sharing
from megasharp.studies.claims import Check

_BLUE, _ORANGE = COLOURS[1], COLOURS[2]
_POINTS = 1500


def draw(
    sharing: tuple[Sharing, ...],
    partition: tuple[NDArray[np.float64], NDArray[np.float64]],
    checks: list[Check],
    kernel: GradientKernel | None,
) -> Figure:
    """Four panels, 10 x 8 inches."""
    figure = new_figure(10.5, 8.2)
    axes = figure.subplots(2, 2)
    for panel in axes.flat:
        dress(panel)
    _group_size(axes[0, 0], sharing)
    _partition(axes[0, 1], *partition)
    _violations(axes[1, 0], [c for c in checks if c.where.startswith("Thm 3.4 case") and "entry" not in c.statement])
    _gradients(axes[1, 1], kernel)
    figure.tight_layout(h_pad=3.0, w_pad=2.5)
    return figure


def _title(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=10, fontweight="bold", color=INK)


def _group_size(axes: Axes, sharing: tuple[Sharing, ...]) -> None:
    groups = [s.group for s in sharing]
    axes.plot(groups, [s.batch for s in sharing], color=_BLUE, marker="o", ms=4, label="batch-optimal (Thm 3.2)")
    axes.plot(groups, [s.ratio for s in sharing], color=_ORANGE, marker="s", ms=4, label="importance ratio (GRPO's)")
    axes.axhline(0, color=MUTED, linestyle="--", linewidth=1.2, label="infinite-sample optimum (Thm 3.1)")
    axes.set_xscale("log")
    axes.set_ylim(-0.03, 1)
    axes.set_xlabel("group size G", fontsize=9, color=MUTED)
    axes.set_ylabel("share of queries", fontsize=9, color=MUTED)
    axes.legend(fontsize=8, frameon=False, loc="upper right")
    _title(axes, "Over-sharpened queries")


def _partition(axes: Axes, bound: NDArray[np.float64], partition: NDArray[np.float64]) -> None:
    bound, partition = bound[:_POINTS], partition[:_POINTS]
    shown = (bound > 0) & (partition < 30)
    suppressed = shown & (bound <= 1) & (partition > 1)
    axes.scatter(bound[shown], partition[shown], s=5, color=_BLUE, alpha=0.4, linewidths=0, label="a batch")
    axes.scatter(
        bound[suppressed], partition[suppressed], s=5, color=LOSS, alpha=0.6, linewidths=0, label="Z > 1 though gap < 0"
    )
    ends = np.array([0.1, 20])
    axes.plot(ends, ends, color=INK, linewidth=1, label="Z = bound")
    axes.set(xscale="log", yscale="log", xlim=(0.1, 20), ylim=(0.1, 30))
    axes.axhline(1, color=MUTED, linewidth=0.8, linestyle=":")
    axes.axvline(1, color=MUTED, linewidth=0.8, linestyle=":")
    axes.set_xlabel("lower bound 1 + (s / β) gap", fontsize=9, color=MUTED)
    axes.set_ylabel("Z", fontsize=9, color=MUTED)
    axes.legend(fontsize=8, frameon=False, loc="lower right", markerscale=2.5)
    _title(axes, "Theorem 3.3: Z against its bound")


def _violations(axes: Axes, checks: list[Check]) -> None:
    labels = [f"{check.where.removeprefix('Thm 3.4 ')}: {_short(check.statement)}" for check in checks]
    shares = [100 * check.share for check in checks]
    rows = np.arange(len(checks))[::-1]
    axes.barh(rows, shares, color=[LOSS if share > 0 else _BLUE for share in shares], height=0.6)
    for row, share in zip(rows, shares, strict=True):
        axes.text(share + 0.3, row, f"{share:.2g}%" if share else "0", va="center", fontsize=8, color=INK)
    axes.set_yticks(rows, labels, fontsize=7.5)
    axes.set_xlim(0, max(5.0, 1.2 * max(shares)))
    axes.set_xlabel("% of trials that violate the bound", fontsize=9, color=MUTED)
    _title(axes, "Theorem 3.4's bounds")


def _short(statement: str) -> str:
    """A statement on at most two lines."""
    head, _, tail = statement.partition(", ")
    return f"{head},\n{tail}" if tail else head


def _gradients(axes: Axes, kernel: GradientKernel | None) -> None:
    _title(axes, "Gradient alignment between questions")
    if kernel is None:
        axes.text(0.5, 0.5, "no model was measured", transform=axes.transAxes, ha="center", color=MUTED)
        return
    apart_RR = kernel.question_R[:, None] != kernel.question_R[None, :]
    bins = np.linspace(-1, 1, 81).tolist()
    for reading, colour in zip(READINGS, (_BLUE, _ORANGE), strict=True):
        gram_RR = kernel.gram_RR[reading]
        length_R = np.sqrt(np.diagonal(gram_RR))
        cosine = (gram_RR / length_R / length_R[:, None])[apart_RR]
        label = f"{reading}: mean {cosine.mean():+.3f}, {(cosine > 0).mean():.0%} positive"
        axes.hist(cosine, bins=bins, density=True, color=colour, alpha=0.55, label=label)
    axes.axvline(0, ymax=0.8, color=INK, linewidth=0.8)
    axes.set_xlim(-1, 1)
    axes.set_ylim(0, 1.25 * axes.get_ylim()[1])
    axes.set_xlabel("cosine", fontsize=9, color=MUTED)
    axes.set_ylabel("density", fontsize=9, color=MUTED)
    axes.legend(fontsize=8, frameon=False, loc="upper right")
