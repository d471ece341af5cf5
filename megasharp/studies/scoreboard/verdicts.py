"""Verdicts of the scoreboard, held against the claims of the studies, the frontier study, and other measured figures.

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
DISTANCES = Path("examples/frontier/results/distances.csv")
LEVEL = 0.05
# Values of a measured row that the page's head names.
USUAL = (("suite", "countdown_test"), ("temperature", "1.0"))
# Formats of a row's values, by column.
VALUE_FORMATS = {"temperature": "decoded at {}", "solutions": "solutions: {}"}
# What the frontier study allows, by its verdict and the sign that a claim gives the distance.
FRONTIER_WORDS = {
    ("confirmed", "above"): "holds",
    ("confirmed", "below"): "does not hold here",
    ("contradicted", "above"): "does not hold here",
    ("contradicted", "below"): "holds",
}


@dataclass(frozen=True, slots=True)
class FrontierTest:
    """A method's distance from GRPO's line at equal pass@1: its verdict, and its figures in one line."""

    verdict: str
    figures: str


# By method and metric.
Frontier = Mapping[tuple[str, str], FrontierTest]
Lines = Sequence[Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Measured:
    """Figures of the examples: the frontier study's tests, and the lines of CSV files by their paths."""

    frontier: Frontier
    files: Mapping[str, Lines]


def read_measured(root: Path, papers: Iterable[Paper]) -> Measured:
    """Read the files that claims name, in the repository `root`; one that is not there has no lines."""
    paths = {check.file for paper in papers for claim in paper.claims for check in claim.measured}
    return Measured(read_frontier(_lines(root / DISTANCES)), {path: _lines(root / path) for path in sorted(paths)})


def _lines(path: Path) -> Lines:
    if not path.is_file():
        return ()
    with path.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def read_frontier(lines: Lines) -> Frontier:
    """Return the tests in the lines of distances.csv, by method and metric."""
    found: dict[tuple[str, str], FrontierTest] = {}
    for line in lines:
        distance, low, high = (float(line[key]) for key in ("distance", "low", "high"))
        figures = (
            f"{line['setting']}: {line['metric']} {_interval(distance, low, high)} from GRPO's line at "
            f"pass@1 {float(line['pass@1']):.3f}, {line['seeds']} seeds"
        )
        if line["holm"]:
            figures += f", Holm's p {float(line['holm']):.2g}"
        found[line["method"], line["metric"]] = FrontierTest(line["verdict"], figures)
    return found


def check_named(papers: Sequence[Paper], studies: Mapping[str, Sequence[Claim]]) -> None:
    """Raise UserError where a study's statement that is not reproduced, or not wholly, stands in no claim."""
    named = {
        (claim.study.name, statement)
        for paper in papers
        for claim in paper.claims
        if claim.study is not None
        for statement in claim.study.statements
    }
    missing = [
        f"toy {name} says {one.outcome}: {one.statement}"
        for name, claims in studies.items()
        for one in claims
        if one.outcome is not Outcome.REPRODUCED and (name, one.statement) not in named
    ]
    if missing:
        raise UserError(f"{'; '.join(missing)}; name it in the claim that it speaks against")


def study_names(papers: Iterable[Paper]) -> list[str]:
    """Return the studies that the claims name, each once."""
    return list(dict.fromkeys(claim.study.name for paper in papers for claim in paper.claims if claim.study))


def computed(claim: PaperClaim, studies: Mapping[str, Sequence[Claim]], measured: Measured | None) -> list[str]:
    """Return what computes a claim, as lines of evidence; without `measured` its studies alone do.

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
    if claim.frontier is not None and measured is not None:
        test = measured.frontier.get((claim.frontier.method, claim.frontier.metric))
        if test is None:
            raise UserError(f"{claim.id}: the frontier study has no test of {claim.frontier.method}")
        allowed = FRONTIER_WORDS.get((test.verdict, claim.frontier.sign), "not shown here")
        if claim.word != allowed:
            _refuse(claim, f"the frontier study says {allowed}: {test.figures}")
        found.append(test.figures)
    if claim.measured and measured is not None:
        found += _held_to_figures(claim, measured.files)
    return found


def _held_to_figures(claim: PaperClaim, files: Mapping[str, Lines]) -> list[str]:
    """Hold a verdict against its measured differences; return them, a line each."""
    outcomes, figures = set[str](), list[str]()
    allowed: tuple[str, ...]
    for check in claim.measured:
        rows = [line for line in files[check.file] if check.row.items() <= line.items()]
        if len(rows) != 1:
            raise UserError(f"{claim.id}: {check.file} has {len(rows)} rows with {check.row}, not one")
        as_claimed = (float(rows[0]["difference"]) > 0.0) == (check.sign == "above")
        outcomes.add("open" if not _is_shown(rows[0]) else "as claimed" if as_claimed else "contrary")
        figures.append(f"{_label(rows[0], check.row)}: {_figures(rows[0])}")
    figures += _left_out(claim, files)
    if outcomes == {"open"}:
        allowed = ("not shown here",)
    elif outcomes == {"as claimed"}:
        allowed = ("holds", "holds where")
    else:
        allowed = ("holds where", "does not hold here") if "as claimed" in outcomes else ("does not hold here",)
    if claim.word not in allowed:
        _refuse(claim, f"its measured differences allow {' or '.join(allowed)}: {'; '.join(figures)}")
    return figures


def _left_out(claim: PaperClaim, files: Mapping[str, Lines]) -> list[str]:
    """Return what was recorded without zero at other k of the same pairs, so that no claim chooses its k."""
    named: dict[tuple[str, tuple[tuple[str, str], ...]], set[str]] = {}
    for check in claim.measured:
        pair = tuple(item for item in check.row.items() if item[0] != "metric")
        named.setdefault((check.file, pair), set()).add(check.row.get("metric", ""))
    found = []
    for (file, pair), metrics in named.items():
        others = [
            line
            for line in files[file]
            if any(map(_is_pass_at_k, metrics))
            and dict(pair).items() <= line.items()
            and _is_pass_at_k(line["metric"])
            and line["metric"] not in metrics
            and _is_shown(line)
        ]
        if others:
            figures = "; ".join(f"{line['metric']} {_figures(line)}" for line in others)
            found.append(f"also {_label(others[0], dict(pair))}: {figures}")
    return found


def _label(line: Mapping[str, str], row: Mapping[str, str]) -> str:
    """Name a measured difference by what the page's head does not say of its `row`."""
    sides = [line[side].removeprefix("claim_") for side in ("case", "against") if side in line]
    rest = [
        VALUE_FORMATS.get(key, "{}").format(value)
        for key, value in row.items()
        if key not in ("case", "against") and (key, value) not in USUAL
    ]
    return ", ".join([" less ".join(sides), *rest])


def _figures(line: Mapping[str, str]) -> str:
    difference, low, high = (float(line[key]) for key in ("difference", "low", "high"))
    corrected = f", p {float(line['holm']):.2g}" if line.get("holm") else ""
    return _interval(difference, low, high) + corrected


def _interval(difference: float, low: float, high: float) -> str:
    return f"{difference:+.3f} [{low:+.3f}, {high:+.3f}]"


def _is_shown(line: Mapping[str, str]) -> bool:
    """True where a measured difference is not zero: by Holm's p-value where it has one, else by its interval."""
    if line.get("holm"):
        return float(line["holm"]) <= LEVEL
    return float(line["low"]) > 0.0 or float(line["high"]) < 0.0


def _is_pass_at_k(metric: str) -> bool:
    """True for pass@k of more than one sample, over all problems."""
    return metric.startswith("pass@") and metric[5:].isdigit() and metric != "pass@1"


def _refuse(claim: PaperClaim, reason: str) -> None:
    raise UserError(f"{claim.id}: its verdict is {claim.verdict!r}, but {reason}; correct the claims' file")
