"""The soak's table for the manual, and the comparison of disturbed with undisturbed runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from megasharp.common.errors import UserError
from megasharp.evals.compare import Side, compare
from megasharp.evals.result_files import load_result
from tests.soak.faults import FAULTS
from tests.soak.round import KINDS, NOT_THERE, Round, file_of

_SUITE = "countdown_test"
_KS = (1, 8)


def table(rounds: Sequence[Round]) -> list[str]:
    """Return Markdown: rounds, faults by kind, memory and files."""
    return [*_rounds(rounds), "", *_faults([one for one in rounds if not one.calm]), "", *_undisturbed(rounds)]


def _rounds(rounds: Sequence[Round]) -> list[str]:
    lines = [
        "| round | steps | minutes | faults | attempts | started by hand | goodput | findings |",
        "|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for one in rounds:
        told = "; ".join(one.findings).replace("|", "/") or "none"
        name = f"{one.kind} {one.number}{', undisturbed' * one.calm}"
        share = "" if one.goodput is None else f"{one.goodput:.0%}"
        figures = [one.steps, f"{one.minutes:.1f}", len(one.faults), one.attempts, len(one.by_hand), share, told]
        lines.append(f"| {name} | " + " | ".join(map(str, figures)) + " |")
    disturbed = [one for one in rounds if not one.calm]
    minutes, faults = sum(one.minutes for one in disturbed), sum(len(one.faults) for one in disturbed)
    return [*lines, "", f"{len(disturbed)} rounds with faults, {minutes:.0f} minutes, {faults} faults."]


def _faults(rounds: Sequence[Round]) -> list[str]:
    counts = {
        kind: Counter(fault["kind"] for one in rounds if one.kind == kind for fault in one.faults) for kind in KINDS
    }
    lines = ["| fault | " + " | ".join(KINDS) + " |", "|---|" + "---:|" * len(KINDS)]
    for name in FAULTS:
        cells = (" " if name in NOT_THERE[kind] else str(counts[kind][name]) for kind in KINDS)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _undisturbed(rounds: Sequence[Round]) -> list[str]:
    lines = ["| undisturbed | steps | driver, MB for 100 steps | files: MB by `plan` / there |", "|---|---:|---:|---|"]
    for one in rounds:
        if one.calm:
            growth = "" if one.growth is None else f"{one.growth:.2f}"
            files = ", ".join(f"{kind} {told:.1f} / {there:.1f}" for kind, (told, there) in one.files.items())
            lines.append(f"| {one.kind} {one.number} | {one.steps} | {growth} | {files} |")
    return lines


def compare_pass_at_k(folder: Path, rounds: Sequence[Round], steps: int) -> tuple[list[str], list[str]]:
    """Compare last evaluations of disturbed fleet rounds with undisturbed ones; return lines, and findings.

    Intervals of 95 % are over runs and problems. A finding is an evaluation that is missing, and a difference whose
    interval leaves zero out.
    """
    found: dict[bool, list[Path]] = {True: [], False: []}
    for one in rounds:
        if one.kind == "fleet" and one.steps == steps:
            path = file_of(folder, one.kind, one.number).with_suffix("") / f"evals/step_{steps:06d}/{_SUITE}.json"
            found[one.calm].append(path)
    findings = [f"{path} is missing" for paths in found.values() for path in paths if not path.exists()]
    calm, disturbed = ([path for path in found[side] if path.exists()] for side in (True, False))
    if min(len(calm), len(disturbed)) < 2:
        return [], [*findings, "pass@k: two undisturbed and two disturbed fleet rounds are needed"]
    sides = [Side([load_result(path) for path in paths], paths) for paths in (calm, disturbed)]
    try:
        told = compare(sides[0], sides[1], _KS)
    except UserError as error:
        return [], [*findings, f"pass@k: {error}"]
    lines = [f"| {len(calm)} undisturbed, {len(disturbed)} disturbed | undisturbed | disturbed | difference |"]
    lines.append("|---|---:|---:|---|")
    for each in told.differences:
        if each.name in {f"pass@{k}" for k in _KS} and each.crossed is not None:
            interval = each.crossed.interval()
            lines.append(
                f"| {each.name} | {each.before:.3f} | {each.after:.3f} | "
                f"{each.after - each.before:+.3f} [{interval.low:+.3f}, {interval.high:+.3f}] |"
            )
            if not interval.low <= 0.0 <= interval.high:
                findings.append(f"{each.name} differs from undisturbed runs'")
    return lines, findings
