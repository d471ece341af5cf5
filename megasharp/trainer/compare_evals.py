"""`megasharp eval --compare`: two results side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from megasharp.common.errors import UserError
from megasharp.evals.compare import Comparison, Crossing, compare
from megasharp.evals.files import load_result
from megasharp.evals.suites import parse_ks


def compare_results(
    source: Path | None, before: Path, after: Path, k: str | None, problems: bool, say: Callable[[str], None]
) -> None:
    """Say how the second result differs from the first; with `problems`, which ones it gains and loses.

    Raises UserError in one line for files that are no results, or of other problems.
    """
    if source is not None:
        raise UserError(f"{source}: --compare takes two result files and evaluates nothing; leave this out")
    one, other = load_result(before), load_result(after)
    most = min(one.n, other.n)
    ks = parse_ks(k) if k is not None else tuple(sorted(k for k in {*one.ks, *other.ks} if k <= most))
    for line in comparison_lines(compare(one, other, ks, (before, after)), problems):
        say(line)


def comparison_lines(found: Comparison, problems: bool) -> Iterator[str]:
    """The whole answer."""
    yield f"{found.suite}, {found.problems} problems: from {found.before} to {found.after}"
    yield from (f"! {note}" for note in found.notes)
    yield ""
    yield "differences, with 95% intervals (paired, problems resampled); * the interval is on one side of zero"
    width = max(len(each.name) for each in found.differences)
    for each in found.differences:
        low, high = each.interval.low, each.interval.high
        clear = "" if low <= 0.0 <= high else "  *"
        change = f"{each.after - each.before:+.4f} [{low:+.4f}, {high:+.4f}]{clear}"
        yield f"  {each.name:<{width}}  {each.before:.4f} -> {each.after:.4f}  {change}"
    yield ""
    yield "samples the second needs for the first's pass@k (whole numbers; ratio needed/k)"
    for need in found.needed:
        reached = (
            "not with all its samples" if need.needed is None else f"{need.needed}, ratio {need.needed / need.k:.3g}"
        )
        yield f"  pass@{need.k} {need.target:.4f}: {reached} ({need.reached:.4f})"
    if found.crossings:
        yield ""
        yield "problems whose success rate crosses 1/k (chance: sign test)"
    for crossing in found.crossings:
        gained, lost = len(crossing.gained), len(crossing.lost)
        yield f"  1/{crossing.k}: {gained} gained, {lost} lost, chance {crossing.chance:.3g}"
        if problems:
            yield from _named(crossing)


def _named(crossing: Crossing) -> Iterator[str]:
    for word, some in (("gained", crossing.gained), ("lost", crossing.lost)):
        yield from (f"    {word} {problem}: {counts}" for problem, counts in some)
