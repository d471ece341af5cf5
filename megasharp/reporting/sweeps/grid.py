"""A sweep's file and its runs: cases x values of axes x seeds over one run file.

Each run has a run file of its own that includes that one, so any of them can be read, started or resumed by hand.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import Field, JsonValue, field_validator

from megasharp.common.errors import UserError
from megasharp.common.section import Section
from megasharp.config.core import PRESETS, Tree, apply_overrides, find, merge, read_tree, validate
from megasharp.config.slurm import JobOptions

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
Axes = dict[str, Annotated[list[JsonValue], Field(min_length=1)]]
# Keys that each run of a sweep has of its own.
_OWN = ("name", "seed", "include")


class CaseConfig(Section):
    """One thing that is compared: pieces of configuration, keys over them, and axes that only this case has."""

    include: list[str] = Field(
        default=[],
        description="Configuration files laid over the run file in this case, later ones first in priority.",
    )
    set: dict[str, JsonValue] = Field(
        default={},
        description="Keys of the run file with the values of this case, laid over the sweep's set.",
    )
    axes: Axes = Field(default={}, description="Dotted keys with lists of values that only this case is run with.")


class ResultsConfig(Section):
    """The content of the table: pass@k of `suite`, or the average of several, and the rows that it is compared with.

    `before` names a case whose evaluation before its first step is a row of its own, `against` the case from which the
    others' differences are taken, `line` those that draw the line to which others are compared at equal pass@1.
    """

    suite: str | list[str] | None = Field(
        default=None,
        description="Suite that the table shows, or a list of suites: the average of their means. All must be in "
        "eval.suites. null: the only suite that the runs were evaluated on.",
    )
    k: list[int] = Field(
        default=[1, 4, 16, 64],
        min_length=1,
        description="Values of k whose pass@k the table shows; all must be in eval.k.",
    )
    before: str | None = Field(
        default=None,
        description="Case whose evaluation before its first step becomes the row base. null: no such row.",
    )
    against: str | None = Field(
        default=None,
        description="Case that differences are taken from, its first row where it has several. null: no differences.",
    )
    line: list[str] = Field(
        default=[],
        description="Cases of one method at several learning rates. With the row base they draw a line of pass@1 and "
        "pass@k, and a further table has the distance of each other row from it. Empty: no such table.",
    )

    @field_validator("suite")
    @classmethod
    def _each_once(cls, suite: str | list[str] | None) -> str | list[str] | None:
        if isinstance(suite, list) and (twice := sorted({name for name in suite if suite.count(name) > 1})):
            raise ValueError(f"{', '.join(twice)} would count twice in the average")
        return suite

    @property
    def suites(self) -> tuple[str, ...]:
        """The suites whose means are averaged; empty for the only one of the runs."""
        return (self.suite,) if isinstance(self.suite, str) else tuple(self.suite or ())


class SlurmConfig(JobOptions):
    """Options of `megasharp submit` for the runs; at most `at_once` of the array's jobs run together."""

    profile: str | None = Field(
        default=None,
        description="Cluster profile with the options that this table does not set: a file beside the sweep's or found "
        "from here, or a name in ~/.config/megasharp/profiles. null: none.",
    )
    at_once: int | None = Field(
        default=None,
        ge=1,
        description="Number of jobs of the array that may run at the same time. null: as many as Slurm starts.",
    )
    nodes: int | None = Field(
        default=None,
        ge=1,
        description="Number of nodes per run. null: cluster.nodes of the run file, which it must equal.",
    )


class SweepConfig(Section):
    """A sweep: the run file `run`, keys that `set` gives to all of its runs, and what differs between them."""

    name: str = Field(
        pattern=f"^{_NAME.pattern}$",
        description="Name of the sweep and of its folder below --runs, which holds the folders of its runs.",
    )
    run: str = Field(
        description="Run file that all runs of the sweep are based on, beside the sweep's file or found as an include "
        "is.",
    )
    set: dict[str, JsonValue] = Field(
        default={},
        description="Keys of the run file with the values that all runs get, as dotted names or nested tables. name, "
        "seed and include are not allowed.",
    )
    seeds: list[int] = Field(
        default=[1],
        min_length=1,
        description="Seeds; every case and choice of axis values is run once with each. Two allow an "
        "interval over runs and problems; with fewer than five, few differences of a table of ten rows are bold.",
    )
    cases: dict[str, CaseConfig] = Field(
        default={},
        description="Things to compare, by name; each has includes, keys and axes of its own. Empty: one case, the "
        "run file itself.",
    )
    axes: Axes = Field(
        default={},
        description="Dotted keys with lists of values; every combination of values is run in every case. A case's own "
        "axis of the same key counts first.",
    )
    results: ResultsConfig = Field(
        default=ResultsConfig(),
        description="Content of the table that megasharp sweep --results writes.",
    )
    slurm: SlurmConfig = Field(
        default=SlurmConfig(),
        description="Slurm settings of megasharp sweep --slurm, which submits the runs as one array.",
    )


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of a sweep: its name, the row of the table that it belongs to, its seed and its run file's content."""

    name: str
    row: str
    case: str
    seed: int
    tree: Tree = field(compare=False)


def load_sweep(path: Path, overrides: Sequence[str] = ()) -> SweepConfig:
    """Read a sweep's file, with `key=value` overrides of its own keys. Raises UserError in one line."""
    config = validate(SweepConfig, apply_overrides(read_tree(path), overrides), str(path), path, overrides)
    named = [("before", config.results.before), ("against", config.results.against)]
    for key, name in (*named, *(("line", name) for name in config.results.line)):
        if name is not None and name not in (config.cases or {""}):
            raise UserError(f"{path}: results.{key}: no case {name!r}; cases: {', '.join(config.cases) or 'none'}")
    return config


def cells(config: SweepConfig, path: Path) -> list[Cell]:
    """List the runs of the sweep in `path`, seed by seed, so that a sweep that is stopped early can be compared.

    Raises UserError where two runs would have one name, or a name is invalid.
    """
    found = [
        _cell(config, path, name, case, values, seed)
        for seed in config.seeds
        for name, case in (config.cases or {"": CaseConfig()}).items()
        for values in _values({**config.axes, **case.axes})
    ]
    for keys in (config.set, config.axes, *(part for each in config.cases.values() for part in (each.set, each.axes))):
        for key in keys:
            if key.partition(".")[0] in _OWN:
                raise UserError(f"{path}: {key}: each run has its own; write seeds, cases, or a case's include")
    if len(set(config.seeds)) < len(config.seeds):
        raise UserError(f"{path}: seeds: {list(config.seeds)} names a seed twice")
    names = [cell.name for cell in found]
    for name in names:
        if not _NAME.fullmatch(name) or names.count(name) > 1:
            what = "would be the name of two runs" if names.count(name) > 1 else "cannot be a run's name"
            raise UserError(f"{path}: {name!r} {what}; write these values as cases with names of their own")
    return found


def _values(axes: Axes) -> Iterator[Mapping[str, JsonValue]]:
    """Yield every choice of one value of each axis."""
    for chosen in itertools.product(*axes.values()):
        yield dict(zip(axes, chosen, strict=True))


def _cell(
    config: SweepConfig, path: Path, name: str, case: CaseConfig, values: Mapping[str, JsonValue], seed: int
) -> Cell:
    row = (
        "-".join([*([name] if name else []), *(_axis_text(key, value) for key, value in values.items())]) or config.name
    )
    run = f"{row}_s{seed}"
    files = []
    for item in (config.run, *case.include):
        found = find(item, path.resolve().parent)
        if not found.is_file():
            raise UserError(f"{path}: no file {item!r} beside it, in {Path.cwd()} or among the presets in {PRESETS}")
        files.append(str(found.resolve()))
    tree: Tree = {"include": [*files]}
    for keys in (config.set, case.set, values):
        tree = merge(tree, nested(keys))
    return Cell(run, row, name, seed, merge(tree, {"name": run, "seed": seed}))


def _axis_text(key: str, value: JsonValue) -> str:
    """Format an axis's value for a name: `recipe.casp.alpha` of 0.05 is alpha0.05."""
    shown = f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)
    if isinstance(value, list):
        shown = "+".join(map(str, value))
    return f"{key.rpartition('.')[2]}{shown}"


def nested(keys: Mapping[str, JsonValue]) -> Tree:
    """Turn dotted keys into tables: `{"recipe.casp.alpha": 0.1}` is `{"recipe": {"casp": {"alpha": 0.1}}}`."""
    tree: Tree = {}
    for key, value in keys.items():
        inner: Tree | JsonValue = nested(value) if isinstance(value, dict) else value
        for part in reversed(key.split(".")):
            inner = {part: inner}
        assert isinstance(inner, dict)
        tree = merge(tree, inner)
    return tree
