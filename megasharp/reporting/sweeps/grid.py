"""A sweep's file, and the runs that it stands for.

A sweep is cases x values of axes x seeds over one run file. Each of its runs is a run file of its own that includes
that one, so any of them can be looked at, begun or resumed by hand.
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
from megasharp.config.core import Tree, apply_overrides, find, merge, read_tree, validate

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
Axes = dict[str, Annotated[list[JsonValue], Field(min_length=1)]]
# What each run of a sweep has of its own.
_OWN = ("name", "seed", "include")


class CaseConfig(Section):
    """One thing that is compared: pieces of configuration, keys over them, and axes that only this case has."""

    include: list[str] = []
    set: dict[str, JsonValue] = {}
    axes: Axes = {}


class ResultsConfig(Section):
    """What the table shows: pass@k of `suite` (where the runs have one only, that one), and what it is compared with.

    `before` names a case whose evaluation before its first step is a row of its own, `against` the case from which the
    others' differences are taken.
    """

    suite: str | None = None
    k: list[int] = Field(default=[1, 4, 16, 64], min_length=1)
    before: str | None = None
    against: str | None = None


class SlurmConfig(Section):
    """How runs are submitted, as `megasharp submit` names it; at most `at_once` of the array's jobs run together."""

    time: str = "24:00:00"
    at_once: int | None = Field(default=None, ge=1)
    nodes: int | None = Field(default=None, ge=1)
    cpus_per_node: int | None = Field(default=None, ge=1)
    partition: str | None = None
    account: str | None = None
    sbatch: list[str] = []
    lead: int | None = Field(default=None, ge=1)
    restarts: int = Field(default=20, ge=0)
    retries: int = Field(default=3, ge=0)
    python: str | None = None
    container: str | None = None
    mount: list[str] = []
    doctor: bool | None = None

    @field_validator("time", mode="before")
    @classmethod
    def _is_text(cls, value: object) -> object:
        if isinstance(value, int):
            raise ValueError('YAML reads this as a number; write it in quotes, as "4:00:00" or "240" minutes')
        return value


class SweepConfig(Section):
    """A sweep: the run file `run`, keys that `set` gives to all of its runs, and what differs between them."""

    name: str = Field(pattern=f"^{_NAME.pattern}$")
    run: str
    set: dict[str, JsonValue] = {}
    seeds: list[int] = Field(default=[1], min_length=1)
    cases: dict[str, CaseConfig] = {}
    axes: Axes = {}
    results: ResultsConfig = ResultsConfig()
    slurm: SlurmConfig = SlurmConfig()


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
    config = validate(SweepConfig, apply_overrides(read_tree(path), overrides), str(path))
    for key, name in (("before", config.results.before), ("against", config.results.against)):
        if name is not None and name not in (config.cases or {""}):
            raise UserError(f"{path}: results.{key}: no case {name!r}; cases: {', '.join(config.cases) or 'none'}")
    return config


def cells(config: SweepConfig, path: Path) -> list[Cell]:
    """All runs of the sweep in `path`, a seed's together, so that one that is stopped early has compared something.

    Raises UserError where two runs would have one name, or a name is none.
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
    """Every choice of one value of each axis."""
    for chosen in itertools.product(*axes.values()):
        yield dict(zip(axes, chosen, strict=True))


def _cell(
    config: SweepConfig, path: Path, name: str, case: CaseConfig, values: Mapping[str, JsonValue], seed: int
) -> Cell:
    row = "-".join([*([name] if name else []), *(_told(key, value) for key, value in values.items())]) or config.name
    run = f"{row}_s{seed}"
    tree: Tree = {"include": [str(_found(path, item)) for item in (config.run, *case.include)]}
    for keys in (config.set, case.set, values):
        tree = merge(tree, nested(keys))
    return Cell(run, row, name, seed, merge(tree, {"name": run, "seed": seed}))


def _told(key: str, value: JsonValue) -> str:
    """An axis's value in a name: `recipe.casp.alpha` of 0.05 is alpha0.05."""
    shown = f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)
    if isinstance(value, list):
        shown = "+".join(map(str, value))
    return f"{key.rpartition('.')[2]}{shown}"


def _found(sweep: Path, item: str) -> Path:
    """A file that a sweep names, as a run file's include is found."""
    beside = sweep.resolve().parent / item
    found = beside if beside.exists() else find(item)
    if not found.is_file():
        raise UserError(f"{sweep}: no file {item!r} beside it, in {Path.cwd()} or in the repository")
    return found.resolve()


def nested(keys: Mapping[str, JsonValue]) -> Tree:
    """Dotted keys as tables: `{"recipe.casp.alpha": 0.1}` is `{"recipe": {"casp": {"alpha": 0.1}}}`."""
    tree: Tree = {}
    for key, value in keys.items():
        inner: Tree | JsonValue = nested(value) if isinstance(value, dict) else value
        for part in reversed(key.split(".")):
            inner = {part: inner}
        assert isinstance(inner, dict)
        tree = merge(tree, inner)
    return tree
