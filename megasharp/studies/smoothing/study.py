"""Study `smoothing`: runs the trials and compares them with the claims of arXiv 2511.19942.

The picture shows selection bias, correctness against variance, and the cases for which Theorem B.10 holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.random import default_rng

from megasharp.reporting.style import COLOURS, INK, LOSS, MUTED, dress, new_figure
from megasharp.studies.claims import COLUMNS, Check, clearly_above, pooled
from megasharp.studies.smoothing import multiplicity, theorem, variance
from megasharp.studies.smoothing.multiplicity import Counts
from megasharp.studies.smoothing.policies import DIVERGENCES, improvement_probability
from megasharp.studies.smoothing.theorem import SAMPLES, Enumeration
from megasharp.studies.smoothing.variance import Ratio
from megasharp.studies.softmax import Bools, Floats, tilt
from megasharp.studies.study import Claim, Findings, Options, Outcome, Study, Table

SEEDS = 5
TRIALS = 4000
THEOREM_TRIALS = 1000
# Of the enumerated trajectories some are correct; selection bias is averaged over this many random bases.
MIXED, BASES = theorem.ENUMERATED - 2, 100
# The base policy of the picture's second panel, and its budget in nats: ours.
SHOWN_STEEPNESS, SHOWN_CORRECT, SHOWN_BUDGET = 1.2, 8, 0.5


@dataclass(frozen=True, slots=True, eq=False)
class Results:
    """Everything that was measured."""

    checks: dict[tuple[str, str], Check]
    theorem: tuple[Check, ...]
    pressure: Floats
    exists: Bools
    kept: dict[str, Bools]
    mixed: list[Enumeration]
    all_correct: list[Enumeration]
    sharper: Floats
    ratios: tuple[Ratio, ...]
    counts: dict[int, Counts]


def run(options: Options) -> Findings:
    """Run the study: `options.seeds` blocks of trials."""
    rng = default_rng(options.seed)
    seeds = options.seeds or SEEDS
    blocks = [theorem.trial_checks(TRIALS, rng) for _ in range(seeds)]
    whole = [pooled(same) for same in zip(*blocks, strict=True)]
    compared = [theorem.compare(theorem.random_cases(THEOREM_TRIALS, rng)) for _ in range(seeds)]
    results = Results(
        checks={(check.where, check.statement): check for check in whole},
        theorem=tuple(pooled(same) for same in zip(*(one.checks for one in compared), strict=True)),
        pressure=np.concatenate([one.pressure for one in compared]),
        exists=np.concatenate([one.exists for one in compared]),
        kept={name: np.concatenate([one.dominated[name] for one in compared]) for name in DIVERGENCES},
        mixed=theorem.enumerate_improvement(rng, MIXED)[0],
        all_correct=theorem.enumerate_improvement(rng, theorem.ENUMERATED)[0],
        sharper=np.array([theorem.enumerate_improvement(rng, MIXED)[1] for _ in range(BASES)]),
        ratios=variance.compare(default_rng(options.seed)),
        counts=multiplicity.draw_all(options.seed),
    )
    base_N = tilt(np.ones(theorem.TRAJECTORIES), SHOWN_STEEPNESS * rng.normal(size=theorem.TRAJECTORIES))
    correct_N = np.arange(theorem.TRAJECTORIES) < SHOWN_CORRECT
    judged = (_collapse_claims, _theorem_claims, _extension_claims, _experiment_claims)
    bonus, smooth = (theorem.frontier(base_N, correct_N, SHOWN_BUDGET, kind) for kind in (False, True))
    return Findings(
        settings=(
            f"{seeds} blocks of {TRIALS} random problems of {theorem.TRAJECTORIES} trajectories ({THEOREM_TRIALS} for "
            f"Theorem B.10): base log-normal of spread {theorem.SPREAD[0]:g} to {theorem.SPREAD[1]:g}, "
            f"beta {theorem.BETA[0]:g} to {theorem.BETA[1]:g}, gamma below beta. The paper runs no trials: sizes and "
            "ranges are ours, and so is the reading of formulas whose symbols are lost; a condition of Theorem B.10 "
            "may be among them."
        ),
        tables=_tables(results),
        claims=tuple(claim for judge in judged for claim in judge(results)),
        figure=draw(results.mixed, bonus, smooth, results.pressure, results.exists, results.kept),
    )


def _tables(results: Results) -> tuple[Table, ...]:
    rows = tuple(check.row for check in (*results.checks.values(), *results.theorem))
    improvement = tuple(
        (kind, one.base, one.counted, one.formula)
        for kind, found in (("2 of 5 wrong", results.mixed), ("all correct", results.all_correct))
        for one in found
    )
    promise = tuple(
        (name, len(kept), int(results.exists.sum()), int((kept & ~results.exists).sum()), int((~kept).sum()))
        for name, kept in results.kept.items()
    )
    columns = ("divergence", "cases", "proof's choice", "another choice", "no choice")
    return (
        Table("trials", "random trials", COLUMNS, rows),
        Table(
            "selection_bias",
            "P(gain) over all data sets of 5",
            ("trajectories", "base", "counted", "formula"),
            improvement,
        ),
        Table("theorem_b10", "Theorem B.10's promise at the bonus policy's own divergence: kept by", columns, promise),
        variance.tabulate(results.ratios),
        multiplicity.tabulate(results.counts),
    )


def _collapse_claims(results: Results) -> tuple[Claim, ...]:
    def claim(where: str, statement: str, words: str) -> Claim:
        return results.checks[where, statement].claim(words, "always")

    # The paper names two biases; its own measure shows only one of them.
    unchanged = results.checks["sec 3.2", "those gains leave the correct normalised variance as it was"]
    selected = clearly_above(results.sharper, 0.5)
    one_bias = Outcome.PARTLY if selected else Outcome.DIFFERS
    both_biases = Claim(
        "sec 3.2",
        "selection and reinforcement bias both sharpen the correct distribution",
        "both",
        f"selection: normalised variance rises with probability {results.sharper.mean():.2f} (mean over {BASES} base "
        f"policies); reinforcement alone: it rises "
        f"in {unchanged.violations} of {unchanged.trials} trials (gains in proportion leave it unchanged)",
        Outcome.REPRODUCED if selected and unchanged.share > 0.5 else one_bias,
    )
    maximises = "the closed form maximises its objective"
    return (
        claim("Lemma B.1", maximises, "optimum of E[r] - beta KL"),
        claim("Lemma B.4", maximises, "optimum with the entropy bonus"),
        claim("Lemma B.5", maximises, "optimum with smoothing on correct trajectories"),
        _enumeration_claim(results.mixed, "some trajectories incorrect"),
        _enumeration_claim(results.all_correct, "all trajectories correct"),
        claim("Prop B.3", "of two correct trajectories the likelier gains more", "the likelier correct one gains more"),
        claim("Prop B.3", "gain / base is the same for both", "the gain is proportional to the base probability"),
        both_biases,
        claim("sec 3.2", "the incorrect normalised variance falls", "incorrect trajectories are flattened"),
    )


def _enumeration_claim(found: list[Enumeration], case: str) -> Claim:
    off = max(abs(one.counted - one.formula) for one in found)
    return Claim(
        "Prop B.2",
        f"a correct trajectory gains with probability 1 - (1 - base)^n ({case})",
        "always",
        f"largest difference {off:.2g} over all data sets of {theorem.SAMPLES}",
        Outcome.REPRODUCED if off < 1e-9 else Outcome.DIFFERS,
    )


def _theorem_claims(results: Results) -> tuple[Claim, ...]:
    choice, *promises = results.theorem
    broken = sum(check.violations for check in promises)
    proof = Claim(
        "Thm B.10",
        "the proof's parameters keep every promise",
        "always",
        f"where they exist: {broken} violations of {len(promises)} promises in {promises[0].trials} cases; they need "
        f"beta' <= 0 in {choice.share:.1%} of {choice.trials}",
        Outcome.DIFFERS if broken else Outcome.PARTLY if choice.violations else Outcome.REPRODUCED,
    )
    kept = []
    for name in DIVERGENCES:
        lost, mild = ~results.kept[name], results.pressure < 0.5
        statement = f"some smoothing is as correct, as varied and as near ({name})"
        ours = (
            f"none in {lost.mean():.1%} of {lost.size} cases; where gamma * mean(-log base) of incorrect ones < 1/2: "
            f"{lost[mild].mean():.1%} of {mild.sum()}"
        )
        outcome = Outcome.DIFFERS if lost.any() else Outcome.REPRODUCED
        kept.append(Claim("Thm B.10", statement, "always", ours, outcome))
    return (proof, *kept)


def _extension_claims(results: Results) -> tuple[Claim, ...]:
    check = results.checks
    raised = check["sec 3.5", "the penalty on incorrect trajectories raises correctness, beta and gamma_p held"]
    varied = check["sec 3.5", "and leaves the correct normalised variance"]
    costs = [check["sec 3.5", f"at equal correctness it costs no {name}"] for name in DIVERGENCES]
    free = Claim(
        "sec 3.5",
        "so it does within a budget (our reading: no more divergence at equal correctness)",
        "'without detriment'",
        "it costs more in "
        + ", ".join(f"{one.share:.0%} ({name})" for name, one in zip(DIVERGENCES, costs, strict=True)),
        Outcome.REPRODUCED if not any(one.violations for one in costs) else Outcome.DIFFERS,
    )
    shape = check["eq 19", "two-sided: some beta' and gammas give the same policy"]
    positive = check["eq 19", "two-sided: that beta' is positive"]
    literal = check["eq 19", "correct only: beta' = beta + gamma gives the same policy"]
    return (
        raised.claim("a penalty on incorrect trajectories raises correctness", "always"),
        varied.claim("and does not touch the variety of correct ones", "always"),
        free,
        check["eq 19", "bonus on all: beta' = beta + gamma"].claim("log policy for log base: bonus on all", "exact"),
        Claim(
            "eq 19",
            "log policy for log base, two-sided: a change of parameters",
            "exact",
            f"same family of policies: {shape.violations} violations in {shape.trials} trials; beta' <= 0 in "
            f"{positive.share:.1%}; beta' depends on the problem (beta + gamma is off in {literal.share:.1%})",
            Outcome.DIFFERS if shape.violations else Outcome.PARTLY if positive.violations else Outcome.REPRODUCED,
        ),
    )


def _experiment_claims(results: Results) -> tuple[Claim, ...]:
    return (*variance.judge(results.ratios), *multiplicity.judge(results.counts))


STUDY = Study("smoothing", "2511.19942", "lemmas, selection bias and Theorem B.10 of differential smoothing", run)


_GREY, _BLUE, _ORANGE, _GREEN, _PURPLE, _OCHRE = COLOURS
Curve = tuple[Floats, Floats]
_BINS = np.linspace(0, 3, 13)


def draw(
    improvement: list[Enumeration], bonus: Curve, smooth: Curve, pressure: Floats, exists: Bools, kept: dict[str, Bools]
) -> Figure:
    """Draw three panels, 13 x 4.4 inches."""
    figure = new_figure(13.2, 4.5)
    axes = figure.subplots(1, 3)
    for panel in axes.flat:
        dress(panel)
    base = np.linspace(0, 1, 200)
    points = [(one.base, one.counted) for one in improvement]
    axes[0].plot(base, improvement_probability(base, SAMPLES), color=_BLUE, label="1 - (1 - base)ⁿ (Prop B.2)")
    axes[0].plot(*zip(*points, strict=True), "o", color=_ORANGE, ms=5, label="all data sets enumerated")
    axes[0].legend(fontsize=8, frameon=False, loc="lower right")
    axes[0].set(xlim=(0, 1), ylim=(0, 1.02))
    _labels(axes[0], "base probability of a correct trajectory", f"P(it gains), n = {SAMPLES}")
    _title(axes[0], "Selection bias")
    axes[1].plot(*bonus, color=_ORANGE, linewidth=2, label="entropy bonus on all")
    axes[1].plot(*smooth, color=_BLUE, linewidth=2, label="differential smoothing")
    axes[1].plot(smooth[0][0], smooth[1][0], "o", color=INK, ms=5, label="no bonus (RL)", zorder=4)
    axes[1].legend(fontsize=8, frameon=False, loc="lower right")
    _labels(axes[1], "normalised variance of correct trajectories", "correctness")
    _title(axes[1], "Best policies within one KL budget")
    centre = (_BINS[1:] + _BINS[:-1]) / 2
    axes[2].plot(centre, _share(pressure, exists), color=INK, linewidth=2, label="the proof's choice exists")
    for name, colour in zip(DIVERGENCES, (_BLUE, _GREEN, _PURPLE, _OCHRE), strict=True):
        axes[2].plot(centre, _share(pressure, kept[name]), color=colour, linestyle="--", label=f"any choice: {name}")
    axes[2].axvline(1, color=LOSS, linewidth=1)
    axes[2].text(1.04, 1.06, "bonus = reward", fontsize=8, color=LOSS)
    axes[2].set(xlim=(0, 3), ylim=(0, 1.14))
    axes[2].legend(fontsize=8, frameon=False, loc="upper right", bbox_to_anchor=(1.0, 0.93))
    _labels(axes[2], "gamma x mean(-log base) over incorrect trajectories", "share of cases")
    _title(axes[2], "Where Theorem B.10's promise can be kept")
    figure.tight_layout(w_pad=2.5)
    return figure


def _title(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=10, fontweight="bold", color=INK)


def _labels(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x, fontsize=9, color=MUTED)
    axes.set_ylabel(y, fontsize=9, color=MUTED)


def _share(pressure: Floats, holds: Bools) -> list[float]:
    """Return the share of cases per bin of pressure; NaN for an empty bin, which leaves a gap."""
    bins = np.digitize(pressure, _BINS) - 1
    inside = [holds[bins == index] for index in range(len(_BINS) - 1)]
    return [float(held.mean()) if held.size else float("nan") for held in inside]
