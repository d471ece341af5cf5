"""Two models, or two methods of several runs each, on the same problems: gains and losses by k and by problem.

`before` is the first side, `after` the second. With one result a side, differences have paired intervals over problems:
problems are resampled, each with both of its values. They are of these two models. With several results a side, runs of
a method that was trained with other seeds, intervals are over runs and problems (`crossed.py`).

The capability boundary at k is p = 1/k, p a problem's success rate: on one side of it a solution is expected among k
samples. A problem is gained at k where the estimate c/n, of all runs together, passes from at most 1/k to above it, and
lost where it passes back. Estimates near the boundary cross by chance; `chance` is the two-sided probability of so
uneven a split if gains and losses were equally likely (the sign test). It knows nothing of other runs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import comb
from pathlib import Path

import numpy as np

from megasharp.common.errors import UserError
from megasharp.evals.crossed import Crossed, crossed
from megasharp.evals.estimators import Interval, columns_of, mean_intervals, mean_over_runs, pass_at_k_mean
from megasharp.evals.result import EvalResult
from megasharp.evals.samples import ProblemResult

# More samples alone make them larger, so they are compared at the same number only.
_GROW_WITH_N = ("pass@n", "answer_entropy", "distinct_correct", "solutions_found")


@dataclass(frozen=True, slots=True)
class Difference:
    """A metric of both sides on the shared problems, means over runs; `interval` is of `after - before`, over problems.

    `crossed` is over runs and problems; None where a side has one run.
    """

    name: str
    before: float
    after: float
    interval: Interval
    crossed: Crossed | None = None


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
    """Problems that cross p = 1/k upwards (`gained`) and downwards (`lost`): each its id, then both c and n."""

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
    """The comparison of two sides. `notes` are settings that differ, and problems left out.

    `runs` are the numbers of results on both sides; `paired` tells that those of one place are of one seed.
    """

    before: str
    after: str
    runs: tuple[int, int]
    paired: bool
    suite: str
    problems: int
    differences: tuple[Difference, ...]
    needed: tuple[SamplesNeeded, ...]
    crossings: tuple[Crossing, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Side:
    """One model's result, or those of several runs of one method, and the files that they are from."""

    results: Sequence[EvalResult]
    files: Sequence[Path]

    def kept(self, least: int) -> dict[str, list[ProblemResult]]:
        """Return the rows by problem, one a run, of those with at least `least` judged samples."""
        found: dict[str, list[ProblemResult]] = {}
        for result in self.results:
            for row in result.rows:
                if row.samples >= least:
                    found.setdefault(row.id, []).append(row)
        return found

    @property
    def label(self) -> str:
        """The model's name, or those of the runs."""
        names: list[str] = []
        for result in self.results:
            # The label of a run's own evaluations is the run's name, without the step.
            step = "" if result.step is None else f" step {result.step}"
            names.append(f"{result.label.removesuffix(step)}{step}")
        return names[0] if len(names) == 1 else f"{len(names)} runs ({', '.join(names)})"


def compare(before: Side, after: Side, ks: Sequence[int], *, paired: bool = False) -> Comparison:
    """Compare two sides, rows included, at each k of `ks`; problems with fewer samples on one of them are left out.

    With `paired` results of one place on both sides are of one seed.

    Raises:
        UserError: the results are of other problems, or have fewer samples than a k asks for.
    """
    first = before.results[0]
    every = [*zip(before.results, before.files, strict=True), *zip(after.results, after.files, strict=True)]
    for result, file in every[1:]:
        _check_same(first, result, (before.files[0], file))
    fewest, file = min(every, key=lambda each: each[0].n)
    if max(ks) > fewest.n:
        raise UserError(f"--k {max(ks)}: {file} has {fewest.n} samples per problem")
    ones, others = before.kept(max(ks)), after.kept(max(ks))
    kept = [row.id for row in first.rows if row.id in ones and row.id in others]
    for result, file in every:
        if not kept or not any(row.samples >= max(ks) for row in result.rows):
            sides = f"both {before.files[0]} and {after.files[0]}" if len(every) == 2 else str(file)
            raise UserError(f"no problem has {max(ks)} judged samples in {sides}; give a smaller --k")
    rows, rows_after = ([row for problem in kept for row in side[problem]] for side in (ones, others))
    counts = [(problem, *_pooled(ones[problem]), *_pooled(others[problem])) for problem in kept]
    return Comparison(
        before.label,
        after.label,
        (len(before.results), len(after.results)),
        paired,
        first.suite,
        len(kept),
        tuple(_differences(before, after, kept, ks, paired=paired)),
        tuple(_needed(rows, rows_after, k) for k in sorted(ks)),
        tuple(_crossing(counts, k) for k in sorted(ks) if k > 1),
        (*_notes([result for result, _ in every], len(first.rows) - len(kept)), *_copies(before), *_copies(after)),
    )


def _pooled(rows: Sequence[ProblemResult]) -> tuple[int, int]:
    return sum(row.correct for row in rows), sum(row.samples for row in rows)


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
    before: Side, after: Side, problems: Sequence[str], ks: Sequence[int], *, paired: bool
) -> list[Difference]:
    sides = [[columns_of(one.rows, ks, one.seed, problems) for one in side.results] for side in (before, after)]
    every = [*sides[0], *sides[1]]
    same_n = len({one.n for one in (*before.results, *after.results)}) == 1
    # The number of solutions belongs to the problems, not to the models.
    left_out = {"multiplicity"} if same_n else {"multiplicity", *_GROW_WITH_N}
    names = [name for name in sides[0][0] if name not in left_out and all(name in one for one in every)]
    both = {name: tuple(np.stack([one[name] for one in side]) for side in sides) for name in names}
    means = {name: (mean_over_runs(one_RP), mean_over_runs(other_RP)) for name, (one_RP, other_RP) in both.items()}
    seed = before.results[0].seed
    bounds = mean_intervals(np.stack([other_P - one_P for one_P, other_P in means.values()], axis=1), seed=seed)
    return [
        Difference(
            name,
            float(np.nanmean(means[name][0])),
            float(np.nanmean(means[name][1])),
            bound,
            crossed(*both[name], paired=paired),
        )
        for name, bound in zip(names, bounds, strict=True)
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


def _crossing(kept: Sequence[tuple[str, int, int, int, int]], k: int) -> Crossing:
    gained: list[tuple[str, str]] = []
    lost: list[tuple[str, str]] = []
    for problem, correct, samples, correct_after, samples_after in kept:
        # In whole numbers: c/n > 1/k.
        above, above_after = correct * k > samples, correct_after * k > samples_after
        if above != above_after:
            counts = f"{correct}/{samples} to {correct_after}/{samples_after}"
            (gained if above_after else lost).append((problem, counts))
    return Crossing(k, tuple(gained), tuple(lost))


def _copies(side: Side) -> Iterator[str]:
    """Name the results of one side that are of the same weights: they show no other training."""
    first: dict[str, Path] = {}
    for result, file in zip(side.results, side.files, strict=True):
        weights = result.identity.get("weights")
        if weights in first:
            yield f"{first[weights]} and {file} are of the same weights: samples of one model, not two runs"
        elif weights is not None:
            first[weights] = file


def _notes(results: Sequence[EvalResult], left_out: int) -> list[str]:
    names = ["suite", "n", "temperature", "top_p", "max_tokens", "max_turns", "turn_tokens"]
    # Several runs of a method have samples of several seeds.
    names += ["seed"] if len(results) == 2 else []
    values = ((name, list(dict.fromkeys(getattr(result, name) for result in results))) for name in names)
    notes = [f"{name} differs: {' and '.join(map(str, some))}" for name, some in values if len(some) > 1]
    if len({result.n for result in results}) > 1:
        notes.append(f"{', '.join(_GROW_WITH_N)} grow with n and are left out")
    if left_out:
        notes.append(f"{left_out} problems are left out: too few judged samples in one of the two")
    return notes
