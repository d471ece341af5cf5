"""What 2601.15609 says about its softmax cats, each sentence judged on this run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from megasharp.labs.cats.experiments import (
    ADAMW,
    BASES,
    CALIBRATIONS,
    FAST_ADAMW,
    GROUP_SIZE,
    GROUP_SIZES,
    LONG_STEPS,
    MOMENTUM,
    OPTIMIZERS,
    PLAIN,
    Result,
    Results,
    calibrated,
    long_setting,
)
from megasharp.labs.cats.tables import steps_cell
from megasharp.labs.cats.training import STEPS, Setting
from megasharp.labs.cats.world import DISTINCT_ESTIMATORS, ESTIMATORS, SHIFTS, Estimator
from megasharp.labs.softmax import Array
from megasharp.labs.study import Claim, Outcome

# Most seeds: the word "collapses" is granted to a setting from here on.
MOST = 0.9
# How many standard errors of the seeds' paired differences make a difference.
ERRORS = 2.0
# "Equilibrium": dominance over the second half moves by less than this and ends below EVEN.
DRIFT, EVEN = 0.03, 0.7
# "Prevented": the weaker correct label keeps a tenth of their mass.
SURVIVING = 0.9


def judge(results: Results) -> tuple[Claim, ...]:
    """All claims, in the paper's order."""
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


def outcome(holds: int, of: int) -> Outcome:
    """All cases: reproduced; none: differs; else partly."""
    if holds == of:
        return Outcome.REPRODUCED
    return Outcome.DIFFERS if holds == 0 else Outcome.PARTLY


def _sizes(results: Results, row: Setting) -> list[Result]:
    return [results[replace(row, group_size=g)] for g in GROUP_SIZES]


def _steps(found: Iterable[Result]) -> str:
    return "/".join(str(steps_cell(result.median_step)) for result in found)


def _of(results: Results, estimator: Estimator) -> Result:
    return results[replace(PLAIN, estimator=estimator)]


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
    share = np.mean([result.cat_wins for result in _sizes(results, PLAIN)])
    verdict = Outcome.REPRODUCED if 0.3 <= share <= 0.7 else Outcome.DIFFERS
    statement = "which of Cat and Persian wins is random, driven by early sampling noise"
    return Claim("3.4", statement, "either, randomly", f"Cat wins in {share:.0%} of the runs with raw rewards", verdict)


def weigh(favour: int, against: int, of: int) -> Outcome:
    """Of cases that noise leaves open, most clearly one way and none clearly the other settle it; else partly."""
    if favour > of / 2 and not against:
        return Outcome.REPRODUCED
    return Outcome.DIFFERS if against > of / 2 and not favour else Outcome.PARTLY


def _group_size_delays(results: Results) -> Claim:
    favour = against = 0
    shown = []
    for estimator in DISTINCT_ESTIMATORS:
        sizes = _sizes(results, replace(PLAIN, estimator=estimator))
        favour += slower(sizes[-1], sizes[0])
        against += slower(sizes[0], sizes[-1])
        shown.append(f"{estimator} {_steps(sizes)}")
    ours = f"median step at G={'/'.join(map(str, GROUP_SIZES))}: " + "; ".join(shown)
    verdict = weigh(favour, against, len(DISTINCT_ESTIMATORS))
    return Claim("3.4, fig 1", "a larger G delays the collapse", "can delay, not prevent", ours, verdict)


def slower(one: Result, other: Result) -> bool:
    """Whether `one` was clearly less collapsed than `other` over the whole run, seed by seed."""
    return _clearly_below(one.dominance_RT.mean(axis=1), other.dominance_RT.mean(axis=1))


def less_dominant(one: Result, other: Result) -> bool:
    """Whether `one` ends clearly less collapsed than `other`, seed by seed."""
    return _clearly_below(one.dominance_RT[:, -1], other.dominance_RT[:, -1])


def _clearly_below(one_R: Array, other_R: Array) -> bool:
    if len(one_R) < 2:
        return False
    difference_R = other_R - one_R
    return bool(difference_R.mean() > ERRORS * difference_R.std(ddof=1) / np.sqrt(len(difference_R)))


def _estimators_of_figure_1(results: Results) -> list[tuple[Result, Result, Result]]:
    """Raw, mean-shifted and normalised for every learning rate of SGD and every G."""
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
    verdict = weigh(favour, against, len(cases))
    return Claim("3.4, fig 1", "raw rewards are the most aggressive", "most aggressive", ours, verdict)


def _normalised_is_slowest(results: Results) -> Claim:
    cases = _estimators_of_figure_1(results)
    favour = sum(slower(normalised, raw) and slower(normalised, shifted) for raw, shifted, normalised in cases)
    against = sum(slower(shifted, normalised) for _, shifted, normalised in cases)
    at = "; ".join(f"{e} {_of(results, e).dominance:.2f}" for e in ("raw", "normalised", "mean-shifted"))
    ours = (
        f"clearly so in {favour} of {len(cases)} pairs of lr and G, mean-shifted clearly slower in {against}; "
        f"dominance at lr .5, G={GROUP_SIZE}: {at} (a step is divided by a std of about .5 or less)"
    )
    verdict = weigh(favour, against, len(cases))
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


def _not_falling(values: Sequence[float]) -> bool:
    return all(a <= b for a, b in pairwise(values))


def _similarity(results: Results) -> Claim:
    main = [r for e in DISTINCT_ESTIMATORS for r in _sizes(results, replace(PLAIN, estimator=e))]
    ordered = sum(_not_falling(list(result.siamese.values())) for result in main)
    at = ", ".join(f"{name} {p:.3f}" for name, p in results[PLAIN].siamese.items())
    ours = f"ordered in {ordered} of {len(main)} settings; raw, G={GROUP_SIZE}: {at}"
    return Claim(
        "3.4, fig 2", "higher similarity squeezes more", "worsens with similarity", ours, outcome(ordered, len(main))
    )


def _group_size_squeezes(results: Results) -> Claim:
    pairs = {
        e: (
            _sizes(results, replace(PLAIN, estimator=e))[0].siamese["Mid"],
            _sizes(results, replace(PLAIN, estimator=e))[-1].siamese["Mid"],
        )
        for e in DISTINCT_ESTIMATORS
    }
    worse = sum(large < small for small, large in pairs.values())
    at = ", ".join(f"{e} {small:.4f} to {large:.4f}" for e, (small, large) in pairs.items())
    ours = f"Mid similarity, G={GROUP_SIZES[0]} to {GROUP_SIZES[-1]}: {at}"
    return Claim("3.4, fig 2", "a larger G squeezes more", "exacerbates", ours, outcome(worse, len(pairs)))


def _advanced(results: Results) -> Claim:
    advanced: tuple[Estimator, ...] = ("RLOO", "RF++-baseline")
    sizes = {e: _sizes(results, replace(PLAIN, estimator=e)) for e in advanced}
    raw = _sizes(results, PLAIN)
    later = sum(r.median_step > f.median_step for e in advanced for r, f in zip(sizes[e], raw, strict=True))
    long = {e: results[long_setting(replace(PLAIN, estimator=e))].collapsed for e in advanced}
    shown = "; ".join(f"{e} {_steps(sizes[e])}, {long[e]:.0%} of seeds after {LONG_STEPS}" for e in advanced)
    holds = later + sum(share >= MOST for share in long.values())
    of = len(advanced) * (len(GROUP_SIZES) + 1)
    ours = f"raw {_steps(raw)}; {shown} (with one query per step RF++-baseline is the normalised estimator)"
    statement = "RLOO and RF++-baseline delay the collapse slightly, in the end it comes"
    return Claim("app I, fig 4", statement, "single mode eventually", ours, outcome(holds, of))


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
        better += less_dominant(after, before)
        shown.append(f"{base}: {before.dominance:.2f} to {after.dominance:.2f} (literal form {written.dominance:.2f})")
    ours = f"dominance, alpha 1: {'; '.join(shown)}"
    statement = "IAC alone retards the collapse clearly"
    return Claim("app J, fig 6", statement, "significantly retards", ours, outcome(better, len(bases)))


def _equilibrium(results: Results) -> Claim:
    bases, shown, stable = ("SGD, raw", "SGD, normalised"), [], 0
    for base in bases:
        both = results[calibrated(BASES[base], CALIBRATIONS["IAC alpha 1 + DLC mu .5"])]
        half, end = both.dominance_halfway, both.dominance
        stable += abs(end - half) < DRIFT and end < EVEN
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
        prevented += less_dominant(both, before) and both.dominance < SURVIVING
        shown.append(f"{base}: {before.dominance:.2f}, with IAC {iac.dominance:.2f}, with both {both.dominance:.2f}")
    ours = f"dominance: {'; '.join(shown)}"
    statement = "under AdamW too the methods prevent the elimination of the other mode"
    return Claim("app J, fig 6", statement, "can prevent", ours, outcome(prevented, len(bases)))
