"""Verdicts of the scoreboard, held against the claims of the studies and the tests of the frontier study.

A verdict that a run contradicts is a mistake of the claims' file: the run tells which, and nothing is written.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megasharp.common.errors import UserError
from megasharp.studies.scoreboard.claims import Paper, PaperClaim
from megasharp.studies.study import Claim, Outcome

# A study's outcome, and the verdicts that it allows: a condition may be narrower than what the study varied.
ALLOWED = {
    Outcome.REPRODUCED: ("holds", "holds where"),
    Outcome.PARTLY: ("holds where", "does not hold here"),
    Outcome.DIFFERS: ("holds where", "does not hold here"),
}


@dataclass(frozen=True, slots=True)
class FrontierTest:
    """A method's distance from GRPO's line at equal pass@1: its verdict, and its figures in one line."""

    verdict: str
    figures: str


# By method and metric; None where there is no study to read.
Frontier = Mapping[tuple[str, str], FrontierTest] | None


def read_frontier(path: Path) -> Frontier:
    """Read distances.csv of the frontier study, by method and metric; None where there is no such file."""
    if not path.is_file():
        return None
    found: dict[tuple[str, str], FrontierTest] = {}
    with path.open(encoding="utf-8", newline="") as lines:
        for line in csv.DictReader(lines):
            distance, low, high = (float(line[key]) for key in ("distance", "low", "high"))
            figures = (
                f"{line['setting']}: {line['metric']} {distance:+.3f} [{low:+.3f}, {high:+.3f}] from GRPO's line at "
                f"pass@1 {float(line['pass@1']):.3f}, {line['seeds']} seeds"
            )
            if line["holm"]:
                figures += f", Holm's p {float(line['holm']):.2g}"
            found[line["method"], line["metric"]] = FrontierTest(line["verdict"], figures)
    return found


def study_names(papers: Iterable[Paper]) -> list[str]:
    """Return the studies that the claims name, each once."""
    return list(dict.fromkeys(claim.study.name for paper in papers for claim in paper.claims if claim.study))


def computed(claim: PaperClaim, studies: Mapping[str, Sequence[Claim]], frontier: Frontier) -> list[str]:
    """Return what computes a claim, as lines of evidence.

    Raises:
        UserError: the study has no such claim, or a run contradicts the verdict.
    """
    found = []
    if claim.study is not None:
        stated = {one.statement: one for one in studies[claim.study.name]}
        for statement in claim.study.statements:
            if statement not in stated:
                raise UserError(f"{claim.id}: toy {claim.study.name} has no claim {statement!r}")
        ours = [stated[statement] for statement in claim.study.statements]
        outcomes = {one.outcome for one in ours}
        outcome = outcomes.pop() if len(outcomes) == 1 else Outcome.PARTLY
        if claim.word not in ALLOWED[outcome]:
            _refuse(claim, f"toy {claim.study.name} says {outcome}: {'; '.join(one.ours for one in ours)}")
        found += [f"{one.statement}: {one.ours}" if len(ours) > 1 else one.ours for one in ours]
    if claim.frontier is not None and frontier is not None:
        test = frontier.get((claim.frontier.method, claim.frontier.metric))
        allowed = "being measured" if test is None else _frontier_word(test.verdict, claim.frontier.sign)
        if claim.word != allowed:
            _refuse(claim, f"the frontier study says {allowed}" + ("" if test is None else f": {test.figures}"))
        if test is not None:
            found.append(test.figures)
    return found


def _frontier_word(verdict: str, sign: str) -> str:
    """The verdict on a claim that a method lies above (or below) the line."""
    if verdict not in ("confirmed", "contradicted"):
        return "not shown here"
    return "holds" if (verdict == "confirmed") == (sign == "above") else "does not hold here"


def _refuse(claim: PaperClaim, reason: str) -> None:
    raise UserError(f"{claim.id}: its verdict is {claim.verdict!r}, but {reason}; correct the claims' file")
