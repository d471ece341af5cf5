"""What a study is and what it finds: tables, claims of the paper beside our figures, and a picture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from matplotlib.figure import Figure

Cell = str | int | float


class Outcome(StrEnum):
    """How a claim of the paper fared here."""

    REPRODUCED = "reproduced"
    PARTLY = "partly"
    DIFFERS = "differs"


@dataclass(frozen=True, slots=True)
class Table:
    """One table; `name` is a short file name (its CSV is `<name>.csv`), floats are shown with 3 digits."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim of the paper and what came out here.

    Example: `Claim("fig 5", "GRPO keeps one mode", "1 mode", "median 1.0 modes of 20 seeds", Outcome.REPRODUCED)`.
    `ours` and `outcome` are computed from the run, never written by hand.
    """

    where: str
    statement: str
    paper: str
    ours: str
    outcome: Outcome


@dataclass(frozen=True, slots=True, eq=False)
class Findings:
    """Everything a study reports. `settings` says what the paper left open and what was chosen (lr, steps, ...)."""

    settings: str
    tables: tuple[Table, ...]
    claims: tuple[Claim, ...]
    figure: Figure


@dataclass(frozen=True, slots=True)
class Options:
    """`seeds`: how many runs (None: the study's own number); `seed`: the first one; `model`: a Hugging Face folder."""

    seeds: int | None = None
    seed: int = 0
    model: Path | None = None


@dataclass(frozen=True, slots=True)
class Study:
    """A named study. `paper` is its arXiv number, `title` one line for the list; `takes_model`: it measures a model."""

    name: str
    paper: str
    title: str
    run: Callable[[Options], Findings]
    takes_model: bool = False
