"""Claims of 2510.14807 (sections 3 and 4, appendix A) about one state: measured, judged, tabulated and drawn.

`measure` collects all results in one record. Each claim is a function that returns the paper's sentence, our numbers
and a verdict. The picture shows one update, many updates, Proposition 3, and two shapes of one entropy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megasharp.reporting.style import COLOURS, INK, MUTED, dress, new_figure
from megasharp.studies.claims import clearly_above, outcome
from megasharp.studies.softmax import Floats, entropy
from megasharp.studies.squeeze.dynamics import (
    VOCABULARY,
    LemmaTrials,
    budgets,
    distinct,
    drawn_distinct,
    lemma_trials,
    on_policy,
    peak,
    penalty_gradient,
    plateau,
    probability_change,
    repeated_penalty,
    start_logits,
    with_top,
)
from megasharp.studies.squeeze.mixture import DRIFTS, MixtureTrials, mixture_trials
from megasharp.studies.study import Cell, Claim, Outcome, Table

PENALISED_RANKS = (1, 2, 5, 20)
TOPS = (0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 0.999, 0.999999)
BUDGETS = (8, 64, 1024)
SHAPE_BUDGETS = (2, 4, 8, 16, 64, 1024)
DRAWS = 2000


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """Results of `measure`: distributions by name, and Proposition 3 by formula and by simulation.

    `penalised`: [T, V] by rank. `sampled`: [T, R, V] by advantage. `distinct`: both numbers by top probability and K.
    """

    lemma: LemmaTrials
    penalised: Mapping[int, Floats]
    sampled: Mapping[float, Floats]
    distinct: Mapping[tuple[float, int], tuple[float, float]]
    shapes: Mapping[str, Floats]
    mixtures: Sequence[MixtureTrials]


def measure(seeds: Sequence[int]) -> Measured:
    """Measure everything; `seeds` are those of the on-policy simulations, the first also that of the random trials."""
    counted = {}
    for top in TOPS:
        for samples in BUDGETS:
            p_V = with_top(top)
            counted[top, samples] = (distinct(p_V, samples), drawn_distinct(p_V, samples, DRAWS, seeds[0]))
    return Measured(
        lemma=lemma_trials(seeds[0]),
        penalised={rank: repeated_penalty(rank) for rank in PENALISED_RANKS},
        sampled={advantage: on_policy(advantage, seeds) for advantage in (1.0, -1.0)},
        distinct=counted,
        shapes={"plateau": plateau(), "peak": peak()},
        mixtures=tuple(mixture_trials(drift, seeds[0]) for drift in DRIFTS),
    )


EXACT = 1e-12
# Four standard errors of a mean of DRAWS counts. A count varies less than V independent fair coins: one token's
# appearance makes the others' less likely.
SIMULATION = 4 * (VOCABULARY / 4 / DRAWS) ** 0.5
# "Converges to 1": this close.
CLOSE_TO_ONE = 0.01


def claims(measured: Measured) -> tuple[Claim, ...]:
    """Judge all claims, in the paper's order."""
    judged = (
        _both_concentrate,
        _lemma,
        _absorbs,
        _alternatives,
        _formula,
        _limit,
        _regardless,
        _shapes,
        _by_rank,
        _unequal,
        _corrected,
    )
    return tuple(judge(measured) for judge in judged)


def _if(holds: bool, partly: bool = False) -> Outcome:
    return Outcome.REPRODUCED if holds else (Outcome.PARTLY if partly else Outcome.DIFFERS)


def _both_concentrate(measured: Measured) -> Claim:
    concentrated, first_gains, parts = [], [], []
    for advantage, name in ((1.0, "all right"), (-1.0, "all wrong")):
        p_TRV = measured.sampled[advantage]
        start, end_R, first_R = float(p_TRV[0].max()), p_TRV[-1].max(axis=-1), p_TRV[-1, :, 0]
        concentrated.append(clearly_above(end_R, start))
        first_gains.append(clearly_above(first_R, start))
        parts.append(f"{name}: rank 1 from {start:.2f} to {end_R.mean():.2f}, its first holder {first_R.mean():.2f}")
    statement = "positive and negative updates both push mass to rank 1, which is reinforced most"
    # The expected update is zero when all are equally right: being ahead at the start is no advantage.
    outcome = _if(all(concentrated) and all(first_gains), partly=all(concentrated))
    return Claim("sec 3.1, obs 1", statement, "no figure for one state", "; ".join(parts), outcome)


def _lemma(measured: Measured) -> Claim:
    ours = f"largest gap to autograd {measured.lemma.error:.1e} in 2,000 random distributions"
    return Claim("lemma 2", "dp_y / dz_v = -p_y p_v", "exact", ours, _if(measured.lemma.error < EXACT))


def _absorbs(measured: Measured) -> Claim:
    logit, probability = measured.lemma.logit_share, measured.lemma.probability_share
    ours = f"largest logit increase: {logit:.0%} of trials; largest probability increase: {probability:.0%}"
    return Claim("lemma 2", "penalising another token, rank 1 gains most", "always", ours, _if(logit == 1.0))


def _alternatives(measured: Measured) -> Claim:
    ours = f"every logit rises, but {measured.lemma.losing:.0%} of the alternatives lose probability"
    return Claim(
        "sec 3.1",
        "a negative update redistributes mass to the alternatives, most to the probable ones",
        "in proportion to p_y p_v (logits)",
        ours,
        _if(measured.lemma.losing == 0.0, partly=measured.lemma.losing < 1.0),
    )


def _formula(measured: Measured) -> Claim:
    gap = max(abs(formula - simulated) for formula, simulated in measured.distinct.values())
    ours = f"largest gap to {DRAWS:,} simulated sets: {gap:.3f} (allowed {SIMULATION:.2f})"
    statement = "expected distinct tokens = sum_v 1 - (1 - p_v)^K"
    return Claim("prop 3", statement, "exact", ours, _if(gap < SIMULATION))


def _limit(measured: Measured) -> Claim:
    top = TOPS[-1]
    values = {k: measured.distinct[top, k][0] for k in BUDGETS}
    ours = f"p_1 = {top}: " + ", ".join(f"{value:.4f} at K = {k}" for k, value in values.items())
    holds = all(abs(value - 1.0) < CLOSE_TO_ONE for value in values.values())
    return Claim("prop 3", "tends to 1 as p_1 tends to 1, for any fixed K", "1", ours, _if(holds))


def _regardless(measured: Measured) -> Claim:
    top, few, many = TOPS[-2], BUDGETS[0], BUDGETS[-1]
    low, high = measured.distinct[top, few][0], measured.distinct[top, many][0]
    ours = f"p_1 = {top}: {low:.3f} at K = {few}, {high:.3f} at K = {many} (at most 1 + K (1 - p_1))"
    return Claim(
        "abstract",
        "the number collapses to one regardless of the sampling budget",
        "1 for any K",
        ours,
        _if(abs(high - 1.0) < CLOSE_TO_ONE, partly=abs(low - 1.0) < CLOSE_TO_ONE),
    )


def _shapes(measured: Measured) -> Claim:
    flat_V, peak_V = measured.shapes["plateau"], measured.shapes["peak"]
    gap = abs(float(entropy(flat_V) - entropy(peak_V)))
    few, many = SHAPE_BUDGETS[1], SHAPE_BUDGETS[-2]
    counts = [f"K = {k}: {distinct(flat_V, k):.2f} and {distinct(peak_V, k):.2f} distinct" for k in (few, many)]
    ours = (
        f"entropies differ by {gap:.0e}; rank 1 has {flat_V.max():.2f} and {peak_V.max():.2f}, the top three "
        f"{_top3(flat_V):.2f} and {_top3(peak_V):.2f}; {'; '.join(counts)}"
    )
    holds = gap < EXACT and abs(flat_V.max() - peak_V.max()) > 0.1
    return Claim("fig 4c", "equal entropy, sharply different distributions", "drawn, no figures", ours, _if(holds))


def _top3(p_V: Floats) -> float:
    return float(sorted(p_V)[-1] + sorted(p_V)[-2] + sorted(p_V)[-3])


def _by_rank(measured: Measured) -> Claim:
    change = {rank: float(p_TV[-1].max() - p_TV[0].max()) for rank, p_TV in measured.penalised.items()}
    ours = "probability of rank 1: " + ", ".join(f"rank {r} penalised {d:+.2f}" for r, d in change.items())
    holds = change[1] < 0 and all(change[rank] > 0 for rank in PENALISED_RANKS[1:])
    statement = "penalising rank 1 flattens the distribution, penalising lower ranks squeezes it"
    return Claim("sec 4.2, fig 4b", statement, "drawn, no figures", ours, _if(holds))


def _unequal(measured: Measured) -> Claim:
    drifted = [trials for trials in measured.mixtures if trials.drift > 0]
    holds = sum(trials.unequal == 1.0 for trials in measured.mixtures)
    shown = [f"{t.drift:g}: {t.spread:.3f} times ({t.gap:.0%} of the smoothing is off)" for t in drifted]
    on_policy = max(trials.unequal for trials in measured.mixtures if trials.drift == 0)
    ours = (
        f"on policy unequal in {on_policy:.0%}; largest coefficient over smallest, by the deviation of the logits "
        f"since the sampling, {'; '.join(shown)}"
    )
    statement = "without the stop-gradient correction candidates have different importance coefficients"
    return Claim("app A, eq 15", statement, "different", ours, outcome(holds, len(measured.mixtures)))


def _corrected(measured: Measured) -> Claim:
    error = max(trials.error for trials in measured.mixtures)
    ours = f"largest relative gap {error:.1e}, by autograd"
    statement = "the correction gives every candidate the sampled token's coefficient"
    return Claim("app A, eq 4", statement, "exact", ours, _if(error < EXACT))


# Number of samples in "a group" of the tables of trajectories.
GROUP = 16


def tables(measured: Measured) -> tuple[Table, ...]:
    """Make all tables."""
    return tuple(table(measured) for table in (_penalised, _sampled, _distinct, _shapes_table, _mixtures))


def _penalised(measured: Measured) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for rank, p_TV in measured.penalised.items():
        start_V, end_V = p_TV[0], p_TV[-1]
        rows.append((rank, float(start_V.max()), float(end_V.max()), float(entropy(end_V)), distinct(end_V, GROUP)))
    columns = ("penalised rank", "rank 1: start", "rank 1: end", "entropy: end", f"distinct of {GROUP}: end")
    return Table("penalised", "one rank penalised again and again", columns, tuple(rows))


def _sampled(measured: Measured) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for advantage, p_TRV in measured.sampled.items():
        last_RV = p_TRV[-1]
        top, first = float(last_RV.max(axis=-1).mean()), float(last_RV[:, 0].mean())
        count = sum(distinct(p_V, GROUP) for p_V in last_RV) / len(last_RV)
        rows.append((advantage, float(p_TRV[0].max()), top, first, float(entropy(last_RV).mean()), count))
    columns = (
        "advantage",
        "rank 1: start",
        "rank 1: end",
        "its first holder: end",
        "entropy: end",
        f"distinct of {GROUP}: end",
    )
    return Table(
        "sampled", "on-policy updates, all tokens equally right or wrong, mean over runs", columns, tuple(rows)
    )


def _distinct(measured: Measured) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for top in TOPS:
        pairs = [measured.distinct[top, samples] for samples in BUDGETS]
        rows.append((str(top), *(value for pair in pairs for value in pair)))
    heads = [f"K={samples}{kind}" for samples in BUDGETS for kind in ("", " simulated")]
    return Table("distinct", "expected distinct tokens by p_1, an even tail", ("p_1", *heads), tuple(rows))


def _shapes_table(measured: Measured) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for name, p_V in measured.shapes.items():
        rows.append((name, float(entropy(p_V)), float(p_V.max()), *budgets(p_V, SHAPE_BUDGETS)))
    columns = ("shape", "entropy", "rank 1", *(f"K={samples}" for samples in SHAPE_BUDGETS))
    return Table("shapes", "two distributions of one entropy: expected distinct tokens of K", columns, tuple(rows))


def _mixtures(measured: Measured) -> Table:
    rows = tuple((t.drift, t.unequal, t.spread, t.gap, t.error) for t in measured.mixtures)
    columns = (
        "deviation of the logits",
        "trials with unequal coefficients",
        "largest over smallest",
        "gradient off, of the smoothing",
        "corrected: error",
    )
    return Table("mixtures", "equation 15's mixture beside equation 4's", columns, rows)


SHOWN_RANKS = 12
ONE_UPDATE_RANK = 3


def draw(measured: Measured) -> Figure:
    """Draw six panels."""
    figure = new_figure(13.0, 7.4)
    panels = [figure.add_subplot(2, 3, index + 1) for index in range(6)]
    for axes in panels:
        dress(axes)
    logit_SV = torch.from_numpy(start_logits())[None]
    change_SV = penalty_gradient(logit_SV, torch.tensor([ONE_UPDATE_RANK - 1]))
    ranks = np.arange(1, SHOWN_RANKS + 1)
    moved_V, shifted_V = change_SV[0, :SHOWN_RANKS], probability_change(logit_SV, change_SV)[0, :SHOWN_RANKS]
    panels[0].bar(ranks - 0.2, moved_V.numpy(), width=0.4, color=COLOURS[1], label="logit")
    panels[0].bar(ranks + 0.2, shifted_V.numpy(), width=0.4, color=COLOURS[2], label="probability")
    panels[0].axhline(0.0, color=MUTED, linewidth=0.8)
    panels[0].set_xticks(ranks)
    title = f"one negative update on rank {ONE_UPDATE_RANK}"
    _label(panels[0], title, "first-order change (Lemma 2)", "rank", "lower right")
    of_measured = (_draw_penalised, _draw_sampled, _draw_distinct, _draw_shapes, _draw_budgets)
    for axes, draw_panel in zip(panels[1:], of_measured, strict=True):
        draw_panel(axes, measured)
    figure.tight_layout(pad=1.4, w_pad=2.2, h_pad=2.4)
    return figure


def _label(axes: Axes, title: str, subject: str, x: str, place: str) -> None:
    axes.set_title(title, fontsize=10, fontweight="bold", color=INK, loc="left", pad=17)
    axes.text(0, 1.03, subject, transform=axes.transAxes, fontsize=8, color=MUTED)
    axes.set_xlabel(x, fontsize=8, color=MUTED)
    axes.legend(fontsize=8, loc=place, frameon=True, framealpha=0.9, edgecolor="none")


def _draw_penalised(axes: Axes, measured: Measured) -> None:
    for (rank, p_TV), colour in zip(measured.penalised.items(), COLOURS[1:], strict=False):
        axes.plot(p_TV.max(axis=-1), color=colour, linewidth=1.8, label=f"rank {rank}")
    axes.set_ylim(0.0, 1.05)
    _label(axes, "the same rank penalised at every step", "probability of rank 1", "step", "center right")


def _draw_sampled(axes: Axes, measured: Measured) -> None:
    for (advantage, p_TRV), colour in zip(measured.sampled.items(), COLOURS[1:], strict=False):
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


def _draw_shapes(axes: Axes, measured: Measured) -> None:
    shapes = measured.shapes
    ranks = np.arange(1, SHOWN_RANKS + 1)
    for offset, (name, p_V), colour in zip((-0.2, 0.2), shapes.items(), COLOURS[1:], strict=False):
        axes.bar(ranks + offset, p_V[:SHOWN_RANKS], width=0.4, color=colour, label=f"{name}, rank 1 = {p_V.max():.2f}")
    axes.set_xticks(ranks)
    axes.set_ylim(0.0, 1.0)
    size = len(next(iter(shapes.values())))
    _label(axes, "one entropy, ln 3", f"probability; first {SHOWN_RANKS} of {size} candidates", "rank", "upper right")


def _draw_budgets(axes: Axes, measured: Measured) -> None:
    for (name, p_V), colour in zip(measured.shapes.items(), COLOURS[1:], strict=False):
        axes.plot(SHAPE_BUDGETS, budgets(p_V, SHAPE_BUDGETS), color=colour, marker="o", markersize=4, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(SHAPE_BUDGETS, [str(samples) for samples in SHAPE_BUDGETS])
    axes.set_yticks((1, 2, 5, 10, 20, 50), ["1", "2", "5", "10", "20", "50"])
    axes.minorticks_off()
    _label(axes, "their expected distinct tokens", "Proposition 3", "samples K", "upper left")
