"""Claims of 2510.14807 about its tree (section 4.3, figure 5), judged on this run, with tables and a picture.

Two more are about stronger negative advantages, of 2510.14807 section 4.2 and 2601.15609 section 4.1: the tree is the
one toy in which right and wrong samples share their beginnings.

Each claim is a function that returns the paper's sentence, our numbers and a verdict. The picture shows each seed's
policy under three methods, and both coefficients swept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megasharp.reporting.style import COLOURS, GRID, INK, MUTED, dress, new_figure
from megasharp.studies.claims import clearly_above, clearly_below, clearly_rarer, settle, standard_error
from megasharp.studies.softmax import Floats
from megasharp.studies.study import Cell, Claim, Outcome, Table
from megasharp.studies.tree.experiments import (
    ACTIONS,
    ADAM_RATES,
    ALPHAS,
    BETAS,
    CASP,
    ENTROPY,
    GRPO,
    LEARNING_RATE,
    MAIN,
    MODES,
    NEGATIVE_RATES,
    NEGATIVES,
    RATES,
    TOPNS,
    VARIANTS,
    Result,
    Results,
    Setting,
    amplified,
    at_entropy,
    at_rate,
    casp,
)

ALL_MODES = len(MODES)
PAPER_ENTROPY_ACCURACY = 0.48
# Accuracies are means over seeds of shares of 1,000 draws; the paper prints two digits of one run.
TOLERANCE = 0.05
PERFECT = 0.995
# From this accuracy on it has not degraded.
INTACT = 0.99
# "Nearly all seeds".
MOST = 0.95
# "Nearly all root probability".
NEARLY_ALL = 0.95


def claims(results: Results) -> tuple[Claim, ...]:
    """Judge all claims, in the paper's order."""
    judged = (
        _grpo_modes,
        _grpo_root,
        _entropy,
        _casp,
        _entropy_cannot,
        _not_all_actions,
        _penalty,
        _amplified,
        _destabilised,
    )
    return tuple(judge(results) for judge in judged)


def _seeds(result: Result, modes: int) -> str:
    return f"{int((result.modes_R == modes).sum())} of {len(result.modes_R)} seeds"


def _shown(result: Result) -> str:
    return f"median {result.median_modes:g} modes ({_seeds(result, ALL_MODES)} all six), accuracy {result.accuracy:.3f}"


def _grpo_modes(results: Results) -> Claim:
    result = results.sgd[GRPO]
    ours = f"median {result.median_modes:g}; one mode in {_seeds(result, 1)}, accuracy {result.accuracy:.3f}"
    narrowed = Outcome.PARTLY if clearly_below(result.modes_R, ALL_MODES / 2) else Outcome.DIFFERS
    outcome = narrowed if clearly_rarer(result.modes_R == 1, MOST) else Outcome.REPRODUCED
    return Claim("fig 5b", "GRPO collapses to a single mode", "1 mode (BDC)", ours, outcome)


def _grpo_root(results: Results) -> Claim:
    root_RA = results.sgd[GRPO].root_RA
    winners = [ACTIONS[index] for index in root_RA.argmax(axis=-1)]
    collapsed_R = root_RA.max(axis=-1) > NEARLY_ALL
    counts = ", ".join(f"{action} in {winners.count(action)}" for action in ACTIONS)
    ours = f"one action above {NEARLY_ALL:g} in {collapsed_R.sum()} of {len(winners)} seeds; which one varies: {counts}"
    # A and B have the same two modes each and are exchangeable: that it was B is one run's chance.
    outcome = Outcome.DIFFERS if clearly_rarer(collapsed_R, MOST) else Outcome.REPRODUCED
    return Claim("sec 4.3", "GRPO puts nearly all root probability on one action", "on B", ours, outcome)


def _entropy(results: Results) -> Claim:
    result = results.sgd[ENTROPY]
    higher = clearly_above(result.accuracy_R, PAPER_ENTROPY_ACCURACY + TOLERANCE)
    lower = clearly_below(result.accuracy_R, PAPER_ENTROPY_ACCURACY - TOLERANCE)
    return Claim(
        "fig 5c",
        "GRPO + entropy recovers all modes and loses accuracy",
        "6 modes, accuracy .48",
        f"{_shown(result)}; at the coefficient fitted to the .48, {ENTROPY.beta:g}",
        _all_modes(result, not (higher or lower), clearly_below(result.accuracy_R, INTACT)),
    )


def _casp(results: Results) -> Claim:
    result = results.sgd[CASP]
    ours = f"{_shown(result)}; at alpha {CASP.alpha:g}, N {CASP.topn}, no gate"
    perfect, roughly = (not clearly_below(result.accuracy_R, bound) for bound in (PERFECT, 1.0 - TOLERANCE))
    outcome = _all_modes(result, perfect, roughly)
    return Claim("fig 5d", "CaSP preserves all modes at full accuracy", "6 modes, accuracy 1.00", ours, outcome)


def _all_modes(result: Result, exact: bool, roughly: bool) -> Outcome:
    if result.median_modes < ALL_MODES or not roughly:
        return Outcome.DIFFERS
    return Outcome.REPRODUCED if exact else Outcome.PARTLY


def _score(result: Result) -> Floats:
    """Return per seed the share of the modes that were found, times accuracy."""
    return np.asarray(result.modes_R / ALL_MODES * result.accuracy_R)


def _entropy_cannot(results: Results) -> Claim:
    tried = ((beta, results.sgd[at_entropy(beta)]) for beta in BETAS)
    beta, best = max(tried, key=lambda pair: float(_score(pair[1]).mean()))
    behind_R = _score(results.sgd[CASP]) - _score(best)
    near = Outcome.DIFFERS if clearly_below(behind_R) else Outcome.PARTLY
    return Claim(
        "sec 4.3",
        "an entropy bonus cannot match CaSP: it spreads mass onto dead ends",
        "6 modes only with loss of accuracy",
        f"best coefficient, {beta:g}: {_shown(best)} (CaSP: {_shown(results.sgd[CASP])}); in share of modes times "
        f"accuracy CaSP leads by {behind_R.mean():.3f} +- {standard_error(behind_R):.3f}",
        Outcome.REPRODUCED if clearly_above(behind_R, TOLERANCE) else near,
    )


def _not_all_actions(results: Results) -> Claim:
    smaller = [(n, alpha) for n in TOPNS if n < len(ACTIONS) for alpha in ALPHAS]
    tried = (((n, alpha), results.sgd[casp(n, alpha)]) for n, alpha in smaller)
    (topn, alpha), best = max(tried, key=lambda pair: (pair[1].accuracy >= INTACT, pair[1].modes_R.mean()))
    reached = best.median_modes == ALL_MODES and not clearly_below(best.accuracy_R, INTACT)
    return Claim(
        "sec 4.3",
        "CaSP keeps them by smoothing over plausible candidates, not over the full action set",
        "top N (N not given)",
        f"best of N < {len(ACTIONS)}, N {topn} and alpha {alpha:g}: {_shown(best)}; the run above has N {CASP.topn}",
        Outcome.REPRODUCED if reached else Outcome.DIFFERS,
    )


def _penalty(results: Results) -> Claim:
    without = results.sgd[VARIANTS["smoothing only (lambda 1)"]]
    alone = results.sgd[VARIANTS["penalty only (alpha 0)"]]
    needed = clearly_below(without.modes_R - results.sgd[CASP].modes_R)
    return Claim(
        "sec 4.3",
        "the penalty on the rank-1 action keeps the squeeze from pushing mass back",
        "part of the explanation of fig 5d",
        f"without it: {_shown(without)}; with it alone: {_shown(alone)}",
        Outcome.REPRODUCED if needed else Outcome.DIFFERS,
    )


def _amplified(results: Results) -> Claim:
    strongest = NEGATIVES[-1]
    lost = [
        results.sgd[at_rate(GRPO, lr)].modes_R - results.sgd[amplified(factor, lr)].modes_R
        for lr in NEGATIVE_RATES
        for factor in NEGATIVES
    ]
    shown = [
        f"lr {lr:g}: {results.sgd[at_rate(GRPO, lr)].modes_R.mean():.2f} to "
        f"{results.sgd[amplified(strongest, lr)].modes_R.mean():.2f}"
        for lr in NEGATIVE_RATES
    ]
    ours = f"mean modes with negative advantages times {strongest:g}: {'; '.join(shown)}"
    return Claim("sec 4.2", "amplifying all negative updates sharpens", "sharpens", ours, settle(lost))


def _destabilised(results: Results) -> Claim:
    falls, shown = [], []
    for lr in NEGATIVE_RATES:
        plain = results.sgd[at_rate(GRPO, lr)]
        each = [results.sgd[amplified(factor, lr)] for factor in NEGATIVES]
        falls += [plain.accuracy_R - result.accuracy_R for result in each]
        shown.append(f"lr {lr:g}: {plain.accuracy:.3f}, {', '.join(f'{result.accuracy:.3f}' for result in each)}")
    factors = ", ".join(f"{factor:g}" for factor in (1.0, *NEGATIVES))
    return Claim(
        "2601.15609 sec 4.1",
        "amplified negative advantages destroy what wrong samples have right (read as: accuracy falls)",
        "destabilises training",
        f"accuracy with negative advantages times {factors}: {'; '.join(shown)}",
        settle(falls),
    )


_COLUMNS = ("median modes", "mean modes", "seeds with 1", "seeds with 6", "mean accuracy", "least accuracy")
_PAPER = {"GRPO": "1 mode", "GRPO + entropy": "6 modes, .48", "CaSP": "6 modes, 1.00"}


def tables(results: Results) -> tuple[Table, ...]:
    """Make all tables: the paper's three methods, then the variations."""
    sgd = results.sgd
    methods = (((name, _PAPER[name]), sgd[setting]) for name, setting in MAIN.items())
    betas = (((beta,), sgd[at_entropy(beta)]) for beta in BETAS)
    strengths = (((n, alpha), sgd[casp(n, alpha)]) for n in TOPNS for alpha in ALPHAS)
    variants = (((name,), sgd[setting]) for name, setting in VARIANTS.items())
    negatives = (((lr, f), sgd[amplified(f, lr)]) for lr in NEGATIVE_RATES for f in NEGATIVES)
    modes: list[tuple[Cell, ...]] = []
    for name, setting in MAIN.items():
        mean_M = sgd[setting].mode_probability_RM.mean(axis=0)
        modes.append((name, *(float(p) for p in mean_M), float(1.0 - mean_M.sum())))
    heads = ("method", *MODES, "not rewarded")
    return (
        _table("methods", "2510.14807 figure 5", ("method", "paper"), methods),
        _table("entropy", "entropy bonus, by coefficient", ("beta",), betas),
        _table("casp", "CaSP, by N and alpha (lambda 1.1, no gate)", ("N", "alpha"), strengths),
        _table("variants", "CaSP, other variants", ("variant",), variants),
        _table("rates", "other learning rates and Adam", ("method", "optimizer", "lr"), _rates(results)),
        _table("negatives", "GRPO with negative advantages times a factor", ("lr", "factor"), negatives),
        Table("modes", "exact probability of each mode, mean over seeds", heads, tuple(modes)),
    )


def _table(name: str, title: str, keys: tuple[str, ...], rows: Iterable[tuple[tuple[Cell, ...], Result]]) -> Table:
    lines: list[tuple[Cell, ...]] = []
    for key, result in rows:
        modes = (result.median_modes, float(result.modes_R.mean()), int((result.modes_R == 1).sum()))
        accuracy = (result.accuracy, float(result.accuracy_R.min()))
        lines.append((*key, *modes, result.seeds_with_all, *accuracy))
    return Table(name, title, (*keys, *_COLUMNS), tuple(lines))


def _rates(results: Results) -> Iterable[tuple[tuple[Cell, ...], Result]]:
    for name, setting in MAIN.items():
        for lr in sorted((*RATES, LEARNING_RATE)):
            yield (name, "SGD", lr), results.sgd[at_rate(setting, lr)]
        for lr in ADAM_RATES:
            yield (name, "Adam", lr), results.adam[at_rate(setting, lr)]


_PAPER_TITLES = {"GRPO": "paper: 1", "GRPO + entropy": "paper: 6, .48", "CaSP": "paper: 6, 1.00"}
# Two shades for the two modes behind A, two for those behind B.
_MODE_COLOURS = (COLOURS[1], "#7fb2dd", COLOURS[2], "#e9b184", COLOURS[3], COLOURS[4])


def draw(results: Results) -> Figure:
    """Draw each seed's probability of each mode above, and modes and accuracy over beta and alpha below."""
    figure = new_figure(13.0, 7.8)
    panels = [figure.add_subplot(2, 3, index + 1) for index in range(6)]
    for axes, (name, setting) in zip(panels, MAIN.items(), strict=False):
        _draw_policies(axes, name, results.sgd[setting])
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncol=7, fontsize=9, frameon=False, bbox_to_anchor=(0.5, 1.0))
    axes = panels[3]
    dress(axes)
    found = [results.sgd[at_entropy(beta)] for beta in BETAS]
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
    _title(axes, name, f"{ours}  ({_PAPER_TITLES[name]})")


def _draw_casp(axes: Axes, sgd: Mapping[Setting, Result], what: str) -> None:
    dress(axes)
    for topn, colour in zip(TOPNS, COLOURS[1:], strict=False):
        found = [sgd[casp(topn, alpha)] for alpha in ALPHAS]
        values = [float(result.modes_R.mean()) if what == "modes" else result.accuracy for result in found]
        axes.plot(ALPHAS, values, color=colour, marker="o", markersize=4, label=f"N = {topn}")
    axes.set_ylim(*((0.0, 6.5) if what == "modes" else (0.0, 1.08)))
    axes.set_xlabel("alpha", fontsize=8, color=MUTED)
    axes.legend(fontsize=8, loc="upper left" if what == "modes" else "lower left", frameon=False)
    _title(axes, f"CaSP, {what} by alpha and N", "mean over seeds; lambda 1.1, no gate")
