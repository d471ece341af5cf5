"""`megasharp eval --compare`: two results, or the results of two methods' runs, side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from megasharp.checkpoint.recorded import CONFIG_FILE
from megasharp.checkpoint.run_folder import stored_config
from megasharp.common.errors import UserError
from megasharp.common.exit_codes import Say
from megasharp.evals.compare import Comparison, Crossing, Difference, Side, compare
from megasharp.evals.crossed import adjusted, bold, places_by_seed
from megasharp.evals.estimators import Interval
from megasharp.evals.rejudge import Flips, find_flips, same_samples
from megasharp.evals.result_files import load_result
from megasharp.evals.stored_samples import StoredSample, samples_info
from megasharp.evals.suites import parse_ks


def compare_results(
    source: Path | None, files: Sequence[Path], others: Sequence[Path], k: str | None, problems: bool, say: Say
) -> None:
    """Say how the second side differs from the first; with `problems`, which ones it gains and loses.

    `files` are two results, one a side, or with `others` those of one side, `others` of the second.

    Raises UserError in one line for files that are no results, or of other problems.
    """
    before, after = _sides(source, files, others)
    results = [*before.results, *after.results]
    most = min(result.n for result in results)
    ks = parse_ks(k) if k is not None else tuple(sorted({k for one in results for k in one.ks if k <= most}))
    ordered = _paired(before, after)
    for line in comparison_lines(compare(before, ordered or after, ks, paired=ordered is not None), problems):
        say(line)
    if len(results) == 2:
        for line in _judgement_lines(before.files[0], after.files[0], results[0].suite, problems):
            say(line)


def _sides(source: Path | None, files: Sequence[Path], others: Sequence[Path]) -> tuple[Side, Side]:
    if source is not None:
        raise UserError(f"{source}: --compare takes result files and evaluates nothing; leave this out")
    if not files:
        raise UserError("--with names the second side; give the first side's results after --compare")
    if not others and len(files) != 2:
        raise UserError(
            f"--compare takes two results, or the runs of two methods as --compare A1.json A2.json --with B1.json "
            f"B2.json; here are {len(files)} and no --with"
        )
    sides = (files, others) if others else (files[:1], files[1:])
    every = [file.resolve() for side in sides for file in side]
    twice = [str(file) for file in dict.fromkeys(every) if every.count(file) > 1]
    # One result beside itself has no differences, which may be the question; as two runs it would be none.
    if twice and len(every) > 2:
        raise UserError(f"{twice[0]} is given twice: runs are results of trainings with other seeds")
    before, after = (Side([load_result(file) for file in side], side) for side in sides)
    return before, after


def _paired(before: Side, after: Side) -> Side | None:
    """Return the second side in the order of the first one's seeds; None where runs count as independent."""
    places = places_by_seed(*([_seed(file) for file in side.files] for side in (before, after)))
    if places is None:
        return None
    return Side([after.results[place] for place in places], [after.files[place] for place in places])


def _seed(file: Path) -> int | None:
    """Return the seed of the run whose own evaluation this is, runs/NAME/evals/step_N/SUITE.json; else None."""
    root = file.absolute().parents[2] if len(file.absolute().parents) > 2 else file.parent
    if file.absolute().parent.parent.name != "evals" or not (root / CONFIG_FILE).is_file():
        return None
    seed = stored_config(root).get("seed")
    return seed if isinstance(seed, int) else None


def comparison_lines(found: Comparison, problems: bool) -> Iterator[str]:
    """Yield the whole answer."""
    yield f"{found.suite}, {found.problems} problems: from {found.before} to {found.after}"
    yield from (f"! {note}" for note in found.notes)
    yield ""
    yield from _difference_lines(found)
    yield ""
    yield "number of samples with which the second reaches the first's pass@k (and divided by k)"
    for need in found.needed:
        reached = "not with all its samples" if need.needed is None else f"{need.needed} ({need.needed / need.k:.3g} k)"
        yield f"  pass@{need.k} {need.target:.4f}: {reached} ({need.reached:.4f})"
    several = max(found.runs) > 1
    if found.crossings:
        yield ""
        yield f"problems whose success rate crosses 1/k ({'all runs together' if several else 'chance: sign test'})"
    for crossing in found.crossings:
        chance = "" if several else f", chance {crossing.chance:.3g}"
        yield f"  1/{crossing.k}: {len(crossing.gained)} gained, {len(crossing.lost)} lost{chance}"
        if problems:
            yield from _named(crossing)


def _difference_lines(found: Comparison) -> Iterator[str]:
    width = max(len(each.name) for each in found.differences)
    if min(found.runs) < 2:
        yield "differences, with 95% intervals over problems (paired, problems resampled)"
        yield from (f"  {_values(each, width)} {_bounds(each.interval)}" for each in found.differences)
        yield (
            f"{'one run on a side' if max(found.runs) > 1 else 'one run a side'}: these intervals are of these models, "
            "not of the methods that trained them, and none is marked"
        )
        return
    runs = f"{found.runs[0]} pairs of runs of one seed" if found.paired else "independent runs"
    yield f"differences, with 95% intervals over runs and problems ({runs}),"
    yield "beside them 95% t intervals over runs alone, and p after Holm's correction over these rows, equal ones once;"
    yield "* p is at most 5%: the interval over runs and problems excludes zero after the correction too"
    for each, (corrected, mark) in zip(found.differences, _corrected(found.differences), strict=True):
        if each.crossed is not None:
            intervals = f"{_bounds(each.crossed.interval())}  {_bounds(each.crossed.over_runs())}"
            yield f"  {_values(each, width)} {intervals}  {corrected:.3f}{'  *' if mark else ''}"


def _corrected(rows: Sequence[Difference]) -> list[tuple[float, bool]]:
    """Return each row's p after Holm's correction, and whether it is marked.

    Metrics that are the same under two names (avg@n is pass@1, and pass@k at k = n is pass@n) are one hypothesis.
    """
    figures = [(row.before, row.after, None if row.crossed is None else float(row.crossed.p_value())) for row in rows]
    distinct = list(dict.fromkeys(figures))
    p = [one for _, _, one in distinct]
    found = dict(zip(distinct, zip(adjusted(p).tolist(), bold(p).tolist(), strict=True), strict=True))
    return [found[each] for each in figures]


def _values(each: Difference, width: int) -> str:
    change = each.after - each.before if each.crossed is None else float(each.crossed.difference)
    return f"{each.name:<{width}}  {each.before:.4f} -> {each.after:.4f}  {change:+.4f}"


def _bounds(interval: Interval) -> str:
    return f"[{interval.low:+.4f}, {interval.high:+.4f}]"


def _named(crossing: Crossing) -> Iterator[str]:
    for word, some in (("gained", crossing.gained), ("lost", crossing.lost)):
        yield from (f"    {word} {problem}: {counts}" for problem, counts in some)


def _judgement_lines(before: Path, after: Path, suite: str, problems: bool) -> Iterator[str]:
    """Yield the flips where two results are judgements of the same samples; nothing where they are not."""
    infos = [samples_info(file.parent, suite) for file in (before, after)]
    if before.resolve() != after.resolve() and same_samples(*infos):
        yield ""
        yield from flip_lines(find_flips(before.parent, after.parent, suite), problems)


def flip_lines(found: Flips, named: bool) -> Iterator[str]:
    """Yield the outcomes that changed, how often each, and with `named` every sample that flips."""
    yield f"{len(found.flips):,} of {found.samples:,} samples flip between correct and not"
    changed = [(pair, number) for pair, number in found.outcomes.items() if pair[0] is not pair[1]]
    for pair, number in sorted(changed, key=lambda each: -each[1]):
        yield f"  {pair[0]} -> {pair[1]}  {number:,}"
    for flip in found.flips if named else ():
        one, other = flip.before, flip.after
        which = "greedy" if one.greedy else f"sample {one.index}"
        yield f"    {one.problem} {which}: {one.outcome} {_said(one)} -> {other.outcome} {_said(other)}"


def _said(sample: StoredSample) -> str:
    return repr(sample.answer) if sample.answer is not None else f"({sample.detail or 'no answer'})"
