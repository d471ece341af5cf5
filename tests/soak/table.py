"""The soak's table for the manual, and the comparison of disturbed with undisturbed runs."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.soak.round import Round, file_of

_SUITE = "countdown_test"


def table(rounds: Sequence[Round]) -> list[str]:
    """Return Markdown: rounds, faults by kind, memory and files."""
    lines = [
        "| round | steps | minutes | faults | attempts | started by hand | goodput | findings |",
        "|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for one in rounds:
        told = "; ".join(one.findings) or "none"
        name = f"{one.kind} {one.number}{', undisturbed' * one.calm}"
        share = "" if one.goodput is None else f"{one.goodput:.0%}"
        figures = [one.steps, f"{one.minutes:.1f}", len(one.faults), one.attempts, len(one.by_hand), share, told]
        lines.append(f"| {name} | " + " | ".join(map(str, figures)) + " |")
    disturbed = [one for one in rounds if not one.calm]
    minutes, faults = sum(one.minutes for one in disturbed), sum(len(one.faults) for one in disturbed)
    lines += ["", f"{len(disturbed)} rounds with faults, {minutes:.0f} minutes, {faults} faults.", ""]
    counts = {kind: _counted(disturbed, kind) for kind in ("fleet", "slurm")}
    lines += ["| fault | fleet | slurm |", "|---|---:|---:|"]
    for name in sorted(set().union(*counts.values())):
        lines.append(f"| {name} | {counts['fleet'][name]} | {counts['slurm'][name]} |")
    lines += ["", "| undisturbed | steps | driver, MB for 100 steps | files: MB by `plan` / there |"]
    lines += ["|---|---:|---:|---|"]
    for one in rounds:
        if one.calm:
            growth = "" if one.growth is None else f"{one.growth:.2f}"
            files = ", ".join(f"{kind} {told:.1f} / {there:.1f}" for kind, (told, there) in one.files.items())
            lines.append(f"| {one.kind} {one.number} | {one.steps} | {growth} | {files} |")
    return lines


def _counted(rounds: Sequence[Round], kind: str) -> Counter[str]:
    return Counter(fault["kind"] for one in rounds if one.kind == kind for fault in one.faults)


def compare_pass_at_k(folder: Path, rounds: Sequence[Round]) -> list[str]:
    """Compare the last evaluations of disturbed fleet rounds with those of undisturbed ones, by `eval --compare`."""
    found: dict[bool, list[str]] = {True: [], False: []}
    steps = {one.steps for one in rounds if one.kind == "fleet" and not one.calm}
    for one in rounds:
        evals = file_of(folder, one.kind, one.number).with_suffix("") / "evals" / f"step_{one.steps:06d}"
        if one.kind == "fleet" and one.steps in steps and evals.exists():
            found[one.calm].append(str(evals / f"{_SUITE}.json"))
    if len(found[True]) < 2 or len(found[False]) < 2:
        return ["pass@k: too few rounds to compare"]
    command = [sys.executable, "-m", "megasharp.cli", "eval", "--compare", *found[True], "--with", *found[False]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return ["```", *(done.stdout + done.stderr).strip().splitlines(), "```"]
