"""Claims of a paper as its file has them: statement, place, test, verdict and evidence."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from megasharp.common.errors import UserError
from megasharp.common.section import Section
from megasharp.config.core import read_tree, validate

# The files, in the order of the page.
PAPERS = ("iac", "ds", "casp", "two_stage")
VERDICTS = (
    "holds",
    "holds where",
    "not shown here",
    "does not hold here",
    "needs GPUs",
    "not testable",
)
_VERDICT = re.compile(r"holds|holds where .+|(not shown here|does not hold here|not testable)( \(.+\))?|needs GPUs")


class StudyCheck(Section):
    """Claims of a study of `megasharp toy` that test this one: the study, and their statements there."""

    name: str
    statements: list[str] = Field(min_length=1)


class FrontierCheck(Section):
    """A primary test of the frontier study: the method, and the sign that the claim gives its distance."""

    method: str
    metric: str = "pass@256"
    sign: Literal["above", "below"] = "above"


class MeasuredCheck(Section):
    """A measured difference of an example's CSV file, and the sign that the claim gives it.

    `row` has the values of the columns that tell the row. Its interval decides, or Holm's p-value where it has one.
    """

    file: str
    row: dict[str, str] = Field(min_length=1)
    sign: Literal["above", "below"] = "above"


class PaperClaim(Section):
    """One claim of a paper.

    `verdict` is written by hand where nothing computes it, and held against `study`, `frontier` and `measured` where
    they do.
    """

    id: str = Field(pattern=r"^[a-z]+-[A-Za-z0-9._-]+$")
    place: str
    claim: str
    kind: Literal["theorem", "toy", "small model", "full size"]
    test: str
    verdict: str
    evidence: str = ""
    study: StudyCheck | None = None
    frontier: FrontierCheck | None = None
    measured: list[MeasuredCheck] = []

    @field_validator("verdict")
    @classmethod
    def _of_the_known_words(cls, verdict: str) -> str:
        if not _VERDICT.fullmatch(verdict):
            raise ValueError(f"{verdict!r} is none of {', '.join(VERDICTS)}")
        return verdict

    @property
    def word(self) -> str:
        """The verdict without its condition, one of VERDICTS."""
        return max((word for word in VERDICTS if self.verdict.startswith(word)), key=len)


class Paper(Section):
    """A paper's number, title, and claims in the order of their places."""

    paper: str
    title: str
    claims: list[PaperClaim]


def read_paper(name: str) -> Paper:
    """Read a paper's file, one of PAPERS. Raises UserError for a row that is not valid, or an id that comes twice."""
    path = Path(str(files("megasharp.studies.scoreboard"))) / f"{name}.yaml"
    paper = validate(Paper, read_tree(path), str(path))
    ids = [claim.id for claim in paper.claims]
    if twice := sorted({each for each in ids if ids.count(each) > 1}):
        raise UserError(f"{path}: {', '.join(twice)} come twice")
    return paper
