"""Claims of 2601.15609 about its softmax cats, judged on this run, and their picture.

Each claim is a function that returns the paper's sentence, our numbers and a verdict. The picture shows the collapse,
estimators, optimizers, the held-out input, and IAC with DLC.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megasharp.reporting.style import COLOURS, INK, MUTED, dress, new_figure
from megasharp.studies.cats.experiments import (
    ADAMW,
    BASES,
    CALIBRATIONS,
    CAT,
    DISTINCT_ESTIMATORS,
    EARLY,
    ESTIMATORS,
    FAST_ADAMW,
    GROUP_SIZE,
    GROUP_SIZES,
    LONG_STEPS,
    MOMENTUM,
    OPTIMIZERS,
    PERSIAN,
    PERSIAN_INPUT,
    PLAIN,
    SHIFTS,
    SIAMESE,
    STEPS,
    Estimator,
    Result,
    Results,
    Setting,
    Trajectory,
    calibrated,
    long_setting,
    siamese_input,
    steps_cell,
)
from megasharp.studies.claims import clearly_above, clearly_below, clearly_rarer, outcome, settle, weigh
from megasharp.studies.softmax import Floats, softmax
from megasharp.studies.study import Claim, Outcome

# A setting counts as collapsing from this share of seeds on.
MOST = 0.9
# "Either label": each wins in clearly more than this share of the runs.
SOME = 0.1
# How often the leader of an early step would win if later noise alone decided.
CHANCE = 0.5
# "Slightly": the median step at most this many times as late.
SLIGHTLY = 2.0
# "Equilibrium": dominance over the second half does not clearly rise by more than DRIFT and ends clearly below EVEN.
DRIFT, EVEN = 0.03, 0.7
# "Prevented": the weaker correct label keeps a tenth of their mass.
SURVIVING = 0.9


def judge(results: Results) -> tuple[Claim, ...]:
    """Judge all claims, in the paper's order."""
    judges = (
        _collapses,
        _either_label,
        _group_size_delays,
        _raw_is_fastest,
        _normalised_is_slowest,
        _squeezed,
        _similarity,
        _group_size_squeezes,
        _advanced,
        _momentum,
        _adamw,
        _iac,
        _equilibrium,
        _adamw_prevented,
    )
    return tuple(claim(results) for claim in judges)


def _sizes(results: Results, row: Setting) -> list[Result]:
    return [results[replace(row, group_size=g)] for g in GROUP_SIZES]


def _steps(found: Iterable[Result]) -> str:
    return "/".join(str(steps_cell(result.median_step)) for result in found)


def _collapses(results: Results) -> Claim:
    main = [r for e in ESTIMATORS for r in _sizes(results, replace(PLAIN, estimator=e))]
    collapsed = sum(result.collapsed >= MOST for result in main)
    long = {e: results[long_setting(replace(PLAIN, estimator=e))].collapsed for e in DISTINCT_ESTIMATORS}
    ours = (
        f"{collapsed} of {len(main)} settings (SGD) have {MOST:.0%} of seeds past .95 within {STEPS} steps; after "
        f"{LONG_STEPS}, G={GROUP_SIZE}: " + ", ".join(f"{e} {share:.0%}" for e, share in long.items())
    )
    statement = "across all settings the model eventually collapses onto a single label"
    return Claim("3.4, fig 1", statement, "all settings", ours, outcome(collapsed, len(main)))


def _either_label(results: Results) -> Claim:
    share_R, early_R = (
        np.mean([getattr(result, what) for result in _sizes(results, PLAIN)], axis=0)
        for what in ("cat_wins_R", "early_leader_wins_R")
    )
    as_said = (clearly_above(share_R, SOME), clearly_below(share_R, 1.0 - SOME), clearly_above(early_R, CHANCE))
    statement = "which of Cat and Persian wins is random, driven by early sampling noise"
    ours = (
        f"Cat wins in {share_R.mean():.0%} of the runs with raw rewards, and the label that leads after {EARLY} steps "
        f"in {early_R.mean():.0%}"
    )
    return Claim("3.4", statement, "either, randomly", ours, Outcome.REPRODUCED if all(as_said) else Outcome.DIFFERS)


def _group_size_delays(results: Results) -> Claim:
    later, shown = [], []
    for estimator in DISTINCT_ESTIMATORS:
        sizes = _sizes(results, replace(PLAIN, estimator=estimator))
        later.append(sizes[0].mean_dominance_R - sizes[-1].mean_dominance_R)
        shown.append(f"{estimator} {_steps(sizes)}")
    ours = f"median step at G={'/'.join(map(str, GROUP_SIZES))}: " + "; ".join(shown)
    return Claim("3.4, fig 1", "a larger G delays the collapse", "can delay, not prevent", ours, settle(later))


def slower(one: Result, other: Result) -> bool:
    """Return True where `one` was clearly less collapsed than `other` over the whole run, seed by seed."""
    return clearly_above(other.mean_dominance_R - one.mean_dominance_R)


def less_dominant(one: Result, other: Result) -> bool:
    """Return True where `one` ends clearly less collapsed than `other`, seed by seed."""
    return clearly_above(other.dominance_RT[:, -1] - one.dominance_RT[:, -1])


def _estimators_of_figure_1(results: Results) -> list[tuple[Result, Result, Result]]:
    """List raw, mean-shifted and normalised for every learning rate of SGD and every G."""
    names: tuple[Estimator, Estimator, Estimator] = ("raw", "mean-shifted", "normalised")
    found = []
    for row in (row for row in OPTIMIZERS if row.optimizer == "SGD"):
        for size in GROUP_SIZES:
            raw, shifted, normalised = (results[replace(row, estimator=e, group_size=size)] for e in names)
            found.append((raw, shifted, normalised))
    return found


def _raw_is_fastest(results: Results) -> Claim:
    cases = _estimators_of_figure_1(results)
    favour = sum(slower(shifted, raw) and slower(normalised, raw) for raw, shifted, normalised in cases)
    against = sum(slower(raw, shifted) or slower(raw, normalised) for raw, shifted, normalised in cases)
    ours = f"clearly so in {favour} of {len(cases)} pairs of lr (.1, .5, 2) and G, clearly not in {against}"
    ahead = [raw.mean_dominance_R - other.mean_dominance_R for raw, *others in cases for other in others]
    verdict = settle(ahead)
    return Claim("3.4, fig 1", "raw rewards are the most aggressive", "most aggressive", ours, verdict)


def _normalised_is_slowest(results: Results) -> Claim:
    cases = _estimators_of_figure_1(results)
    favour = sum(slower(normalised, raw) and slower(normalised, shifted) for raw, shifted, normalised in cases)
    against = sum(slower(shifted, normalised) for _, shifted, normalised in cases)
    shown: tuple[Estimator, ...] = ("raw", "normalised", "mean-shifted")
    at = "; ".join(f"{e} {results[replace(PLAIN, estimator=e)].dominance:.2f}" for e in shown)
    ours = (
        f"clearly so in {favour} of {len(cases)} pairs of lr and G, mean-shifted clearly slower in {against}; "
        f"dominance at lr .5, G={GROUP_SIZE}: {at} (a step is divided by a std of about .5 or less)"
    )
    # The slowest is slower than the mean-shifted, which is what the raw rewards' claim leaves open.
    behind = [shifted.mean_dominance_R - normalised.mean_dominance_R for _, shifted, normalised in cases]
    verdict = settle(behind)
    return Claim("3.4, fig 1", "normalised advantages are the slowest", "slowest", ours, verdict)


def _squeezed(results: Results) -> Claim:
    found = [
        r.siamese[s] for e in DISTINCT_ESTIMATORS for r in _sizes(results, replace(PLAIN, estimator=e)) for s in SHIFTS
    ]
    squeezed = sum(p < 0.05 for p in found)
    ours = (
        f"from .25 to between {min(found):.1g} and {max(found):.1g} in {len(found)} settings (below .05 in {squeezed})"
    )
    statement = "Siamese on the held-out Siamese input is strongly squeezed"
    return Claim("3.4, fig 2", statement, "strongly squeezed", ours, outcome(squeezed, len(found)))


def _similarity(results: Results) -> Claim:
    main = [r for e in DISTINCT_ESTIMATORS for r in _sizes(results, replace(PLAIN, estimator=e))]
    # By falling similarity: High, Mid, Low.
    ordered = sum(all(a <= b for a, b in pairwise(result.siamese.values())) for result in main)
    at = ", ".join(f"{name} {p:.3f}" for name, p in results[PLAIN].siamese.items())
    ours = f"ordered in {ordered} of {len(main)} settings; raw, G={GROUP_SIZE}: {at}"
    return Claim(
        "3.4, fig 2", "higher similarity squeezes more", "worsens with similarity", ours, outcome(ordered, len(main))
    )


def _group_size_squeezes(results: Results) -> Claim:
    favour, against, shown = 0, 0, []
    for estimator in DISTINCT_ESTIMATORS:
        small, *_, large = _sizes(results, replace(PLAIN, estimator=estimator))
        fall_R = small.siamese_R["Mid"] - large.siamese_R["Mid"]
        favour += clearly_above(fall_R)
        against += clearly_below(fall_R)
        shown.append(f"{estimator} {small.siamese['Mid']:.4f} to {large.siamese['Mid']:.4f}")
    ours = (
        f"Mid similarity, G={GROUP_SIZES[0]} to {GROUP_SIZES[-1]}: {', '.join(shown)}; clearly so in {favour}, clearly "
        f"not in {against}"
    )
    verdict = weigh(favour, against, len(DISTINCT_ESTIMATORS))
    return Claim("3.4, fig 2", "a larger G squeezes more", "exacerbates", ours, verdict)


def _advanced(results: Results) -> Claim:
    advanced: tuple[Estimator, ...] = ("RLOO", "RF++-baseline")
    raw, later, slightly, comes, shown = _sizes(results, PLAIN), 0, 0, 0, []
    for estimator in advanced:
        sizes = _sizes(results, replace(PLAIN, estimator=estimator))
        long = results[long_setting(replace(PLAIN, estimator=estimator))]
        later += sum(slower(one, other) for one, other in zip(sizes, raw, strict=True))
        slightly += sum(o.median_step <= SLIGHTLY * r.median_step for o, r in zip(sizes, raw, strict=True))
        comes += not clearly_rarer(np.isfinite(long.collapse_step_R), MOST)
        shown.append(f"{estimator} {_steps(sizes)}, {long.collapsed:.0%} of seeds after {LONG_STEPS}")
    of = len(advanced) * (2 * len(GROUP_SIZES) + 1)
    ours = (
        f"raw {_steps(raw)}; {'; '.join(shown)} (with one query per step RF++-baseline is the normalised estimator); "
        f"clearly later in {later} of {len(advanced) * len(GROUP_SIZES)}, by a factor of at most {SLIGHTLY:g} in "
        f"{slightly}"
    )
    statement = "RLOO and RF++-baseline delay the collapse slightly, in the end it comes"
    verdict = outcome(later + slightly + comes, of)
    return Claim("app I, fig 4", statement, "single mode eventually", ours, verdict)


def _momentum(results: Results) -> Claim:
    within = {e: _sizes(results, replace(MOMENTUM, estimator=e)) for e in DISTINCT_ESTIMATORS}
    fast = sum(r.median_step <= 20 for sizes in within.values() for r in sizes)
    ours = f"median step at G={'/'.join(map(str, GROUP_SIZES))}: " + "; ".join(
        f"{e} {_steps(s)}" for e, s in within.items()
    )
    of = len(DISTINCT_ESTIMATORS) * len(GROUP_SIZES)
    statement = "with momentum the collapse comes within 20 steps whatever G"
    return Claim("app I, fig 5", statement, "within 20 steps, any G", ours, outcome(fast, of))


def _adamw(results: Results) -> Claim:
    momentum, same, low = (_sizes(results, row) for row in (MOMENTUM, FAST_ADAMW, ADAMW))
    worse = sum(a.median_step < m.median_step for sizes in (same, low) for a, m in zip(sizes, momentum, strict=True))
    ours = f"raw: momentum {_steps(momentum)}; AdamW at the same lr (.5) {_steps(same)}, at lr .1 {_steps(low)}"
    statement = "AdamW is worse still than momentum"
    return Claim("app I, fig 5", statement, "a worse trend", ours, outcome(worse, 2 * len(GROUP_SIZES)))


def _iac(results: Results) -> Claim:
    calibration, better, shown = CALIBRATIONS["IAC alpha 1"], 0, []
    literal = replace(calibration, iac_form="literal")
    bases = ("SGD, raw", "SGD, normalised")
    for base in bases:
        before, after, written = (results[calibrated(BASES[base], c)] for c in (PLAIN, calibration, literal))
        better += slower(after, before)
        shown.append(f"{base}: {before.dominance:.2f} to {after.dominance:.2f} (literal form {written.dominance:.2f})")
    ours = f"dominance, alpha 1: {'; '.join(shown)}"
    statement = "IAC alone retards the collapse clearly"
    return Claim("app J, fig 6", statement, "significantly retards", ours, outcome(better, len(bases)))


def _equilibrium(results: Results) -> Claim:
    bases, shown, stable = ("SGD, raw", "SGD, normalised"), [], 0
    for base in bases:
        both = results[calibrated(BASES[base], CALIBRATIONS["IAC alpha 1 + DLC mu .5"])]
        half, end = both.dominance_halfway, both.dominance
        stable += clearly_below(both.dominance_RT[:, -1], EVEN) and not clearly_above(both.late_rise_R, DRIFT)
        shown.append(f"{base}: {half:.2f} at step {STEPS // 2}, {end:.2f} at {STEPS}")
    corrected = results[calibrated(PLAIN, CALIBRATIONS["DLC mu .5, pi/sampler up to 2"])].dominance
    ours = f"dominance with mu .5: {'; '.join(shown)}; importance weights undo DLC (SGD, raw: {corrected:.2f})"
    statement = "IAC with DLC reaches a stable equilibrium that keeps diversity"
    return Claim("app J, fig 6", statement, "stable equilibrium", ours, outcome(stable, len(bases)))


def _adamw_prevented(results: Results) -> Claim:
    bases, shown, prevented = ("AdamW .1, raw", "AdamW .5, raw"), [], 0
    for base in bases:
        before, iac, both = (
            results[calibrated(BASES[base], CALIBRATIONS[name])]
            for name in ("none", "IAC alpha 1", "IAC alpha 1 + DLC mu .5")
        )
        prevented += less_dominant(both, before) and clearly_below(both.dominance_RT[:, -1], SURVIVING)
        shown.append(f"{base}: {before.dominance:.2f}, with IAC {iac.dominance:.2f}, with both {both.dominance:.2f}")
    ours = f"dominance: {'; '.join(shown)}"
    statement = "under AdamW too the methods prevent the elimination of the other mode"
    return Claim("app J, fig 6", statement, "can prevent", ours, outcome(prevented, len(bases)))


SHOWN_SEEDS = 12
CALIBRATION_LINES = ("none", "IAC alpha 1", "DLC mu .5", "IAC alpha 1 + DLC mu .5")


def draw(results: Results, trajectory: Trajectory) -> Figure:
    """Draw six panels; `trajectory` is that of PLAIN."""
    figure = new_figure(13.0, 7.4)
    panels = [figure.add_subplot(2, 3, index + 1) for index in range(6)]
    for axes in panels:
        dress(axes)
    seen: set[str] = set()
    for policy_TV in trajectory.policy_RTV[:SHOWN_SEEDS]:
        winner, colour = ("Cat", COLOURS[1]) if policy_TV[-1, CAT] > policy_TV[-1, PERSIAN] else ("Persian", COLOURS[2])
        label = None if winner in seen else f"{winner} wins"
        panels[0].plot(policy_TV[:, CAT], color=colour, linewidth=1.2, alpha=0.75, label=label)
        seen.add(winner)
    panels[0].set_ylim(-0.02, 1.17)
    panels[0].set_yticks(np.linspace(0.0, 1.0, 6))
    _legend(panels[0], "upper right", columns=2)
    _label(panels[0], f"raw rewards, G={GROUP_SIZE}, SGD", f"p(Cat) on the Persian input, {SHOWN_SEEDS} seeds at most")
    for estimator, colour in zip(DISTINCT_ESTIMATORS, COLOURS[1:], strict=False):
        _draw_mean(panels[1], results, replace(PLAIN, estimator=estimator), estimator, colour)
    _shares(panels[1])
    _legend(panels[1], "lower right")
    _label(panels[1], f"estimators, G={GROUP_SIZE}, SGD", "larger correct label's share of both, mean over seeds")
    _draw_optimizers(panels[2], results)
    for (name, shift), colour in zip(SHIFTS.items(), COLOURS[1:], strict=False):
        mean_T = held_out_policy(trajectory.policy_RTV, shift)[:, :, SIAMESE].mean(axis=0)
        panels[3].plot(mean_T, color=colour, linewidth=1.8, label=f"similarity {name} (shift {shift:g})")
    panels[3].set_yscale("log")
    panels[3].set_xlim(0, STEPS)
    _legend(panels[3], "upper right")
    _label(panels[3], f"held-out Siamese input, raw, G={GROUP_SIZE}, SGD", "p(Siamese), mean over seeds")
    _draw_calibrations(panels[4], results, PLAIN, f"IAC and DLC, SGD lr {PLAIN.lr:g}")
    _draw_calibrations(panels[5], results, ADAMW, f"IAC and DLC, AdamW lr {ADAMW.lr:g}")
    figure.tight_layout(pad=1.4, w_pad=2.0, h_pad=2.2)
    return figure


def held_out_policy(policy_RTV: Floats, shift: float) -> Floats:
    """Return the label probabilities of the Siamese input at every step.

    All updates are along the Persian features (also AdamW's, because both features are equal), so its logits are
    Persian's times <siamese, persian> / <persian, persian>.
    """
    share = siamese_input(shift) @ PERSIAN_INPUT / (PERSIAN_INPUT @ PERSIAN_INPUT)
    return softmax(share * np.log(policy_RTV))


def _label(axes: Axes, title: str, subject: str, x: str = "step") -> None:
    axes.set_title(title, fontsize=10, fontweight="bold", color=INK, loc="left", pad=17)
    axes.text(0, 1.03, subject, transform=axes.transAxes, fontsize=8, color=MUTED)
    axes.set_xlabel(x, fontsize=8, color=MUTED)


def _legend(axes: Axes, place: str, columns: int = 1) -> None:
    axes.legend(fontsize=7.5, loc=place, ncol=columns, frameon=True, framealpha=0.9, edgecolor="none")


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


def _draw_calibrations(axes: Axes, results: Results, base: Setting, title: str) -> None:
    for name, colour in zip(CALIBRATION_LINES, COLOURS, strict=False):
        _draw_mean(axes, results, calibrated(base, CALIBRATIONS[name]), name, colour)
    _shares(axes)
    axes.set_ylim(0.49, 1.15)
    _legend(axes, "upper left", columns=2)
    _label(axes, title, f"raw, G={GROUP_SIZE}: larger correct label's share, mean over seeds")
