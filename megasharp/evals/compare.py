"""Two models on the same problems: gains and losses of the second, k by k and problem by problem.

`before` is the first one, `after` the second. Differences have paired intervals: problems are resampled, each with both
of its values. The capability boundary at k is p = 1/k, p a problem's success rate: on one side of it a solution is
expected among k samples. A problem is gained at k where the estimate c/n passes from at most 1/k to above it, and lost
where it passes back. Estimates near the boundary cross by chance; `chance` is the two-sided probability of so uneven a
split if gains and losses were equally likely (the sign test).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import comb
from pathlib import Path

import numpy as np

from megasharp.common.errors import UserError
from megasharp.evals.estimators import Interval, columns, mean_intervals, pass_at_k_mean
from megasharp.evals.result import EvalResult
from megasharp.evals.samples import ProblemResult

# More samples alone make them larger, so they are compared at the same number only.
_GROW_WITH_N = ("pass@n", "answer_entropy", "distinct_correct", "solutions_found")


@dataclass(frozen=True, slots=True)
class Difference:
    """A metric of both models on the shared problems; `interval` is of `after - before`."""

    name: str
    before: float
    after: float
    interval: Interval


@dataclass(frozen=True, slots=True)
class SamplesNeeded:
    """The smallest whole number of samples `needed` with which `after` has at least `before`'s pass@k, `reached`.

    None where all of its samples do not suffice. `needed / k` is the sample ratio.
    """

    k: int
    target: float
    needed: int | None
    reached: float


@dataclass(frozen=True, slots=True)
class Crossing:
    """Problems that cross p = 1/k upwards (`gained`) and downwards (`lost`): each its id, then c and n of both."""

    k: int
    gained: tuple[tuple[str, str], ...]
    lost: tuple[tuple[str, str], ...]

    @property
    def chance(self) -> float:
        """The sign test's two-sided p-value; 1 where nothing crossed."""
        few, total = min(len(self.gained), len(self.lost)), len(self.gained) + len(self.lost)
        tail = sum(comb(total, i) for i in range(few + 1))
        return min(1.0, float(2 * tail / 2**total)) if total else 1.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of two results. `notes` are settings that differ, and problems left out."""

    before: str
    after: str
    suite: str
    problems: int
    differences: tuple[Difference, ...]
    needed: tuple[SamplesNeeded, ...]
    crossings: tuple[Crossing, ...]
    notes: tuple[str, ...]


def compare(before: EvalResult, after: EvalResult, ks: Sequence[int], files: tuple[Path, Path]) -> Comparison:
    """Compare two results, rows included, at each k of `ks`; problems with fewer samples in one of them are left out.

    Raises:
        UserError: the results are of other problems, or have fewer samples than a k asks for.
    """
    _check_same(before, after, files)
    most = min(before.n, after.n)
    if max(ks) > most:
        raise UserError(f"--k {max(ks)}: {files[0 if before.n == most else 1]} has {most} samples per problem")
    by_id = {row.id: row for row in after.rows}
    kept = [(one, by_id[one.id]) for one in before.rows if min(one.samples, by_id[one.id].samples) >= max(ks)]
    if not kept:
        raise UserError(
            f"no problem has {max(ks)} judged samples in both {files[0]} and {files[1]}; give a smaller --k"
        )
    ones, others = [one for one, _ in kept], [other for _, other in kept]
    return Comparison(
        _called(before),
        _called(after),
        before.suite,
        len(kept),
        tuple(_differences(ones, others, ks, before.seed, same_n=before.n == after.n)),
        tuple(_needed(ones, others, k) for k in sorted(ks)),
        tuple(_crossing(kept, k) for k in sorted(ks) if k > 1),
        tuple(_notes(before, after, len(before.rows) - len(kept))),
    )


def _called(result: EvalResult) -> str:
    """The label, with the step where it does not name it: a run's own evaluations have the run's name."""
    step = f" step {result.step}"
    return result.label if result.step is None or result.label.endswith(step) else f"{result.label}{step}"


def _check_same(before: EvalResult, after: EvalResult, files: tuple[Path, Path]) -> None:
    if before.suite.partition("+")[0] != after.suite.partition("+")[0]:
        raise UserError(f"{files[0]} is of suite {before.suite}, {files[1]} of {after.suite}: nothing to compare")
    ones, others = ({row.id for row in result.rows} for result in (before, after))
    for only, file in ((ones - others, files[0]), (others - ones, files[1])):
        if only:
            more = f" and {len(only) - 1} more" if len(only) > 1 else ""
            raise UserError(f"problem {min(only)}{more} of suite {before.suite} is in {file} alone: other problems")
    digests = [result.identity.get("problems") for result in (before, after)]
    if None not in digests and digests[0] != digests[1]:
        raise UserError(f"{files[0]} and {files[1]}: the problems' texts or answers differ under the same ids")


def _differences(
    ones: Sequence[ProblemResult], others: Sequence[ProblemResult], ks: Sequence[int], seed: int, *, same_n: bool
) -> list[Difference]:
    first, second = columns(ones, ks, seed), columns(others, ks, seed)
    # The number of solutions belongs to the problems, not to the models.
    left_out = {"multiplicity"} if same_n else {"multiplicity", *_GROW_WITH_N}
    names = [name for name in first if name in second and name not in left_out]
    both = [(first[name], second[name]) for name in names]
    bounds = mean_intervals(np.stack([other - one for one, other in both], axis=1), seed=seed)
    return [
        Difference(name, float(np.nanmean(one)), float(np.nanmean(other)), bound)
        for name, (one, other), bound in zip(names, both, bounds, strict=True)
        if bound is not None
    ]


def _needed(ones: Sequence[ProblemResult], others: Sequence[ProblemResult], k: int) -> SamplesNeeded:
    target = _pass_at(ones)(k)
    reach = _pass_at(others)
    most = min(row.samples for row in others)
    # pass@k grows with k. What rounding takes away must not cost a sample.
    least = target - 1e-12
    needed = bisect_left(range(1, most + 1), least, key=reach) + 1
    return SamplesNeeded(k, target, needed if needed <= most else None, reach(min(needed, most)))


def _pass_at(rows: Sequence[ProblemResult]) -> Callable[[int], float]:
    correct, samples = [row.correct for row in rows], [row.samples for row in rows]
    return lambda k: pass_at_k_mean(correct, samples, k)


def _crossing(kept: Sequence[tuple[ProblemResult, ProblemResult]], k: int) -> Crossing:
    gained: list[tuple[str, str]] = []
    lost: list[tuple[str, str]] = []
    for one, other in kept:
        # In whole numbers: c/n > 1/k.
        above, above_after = one.correct * k > one.samples, other.correct * k > other.samples
        if above != above_after:
            counts = f"{one.correct}/{one.samples} to {other.correct}/{other.samples}"
            (gained if above_after else lost).append((one.id, counts))
    return Crossing(k, tuple(gained), tuple(lost))


def _notes(before: EvalResult, after: EvalResult, left_out: int) -> list[str]:
    names = ("suite", "n", "temperature", "top_p", "max_tokens", "seed")
    pairs = ((name, getattr(before, name), getattr(after, name)) for name in names)
    notes = [f"{name} differs: {one} and {other}" for name, one, other in pairs if one != other]
    if before.n != after.n:
        notes.append(f"{', '.join(_GROW_WITH_N)} grow with n and are left out")
    if left_out:
        notes.append(f"{left_out} problems are left out: too few judged samples in one of the two")
    return notes
