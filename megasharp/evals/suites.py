"""Suites: named sets of problems. A suite is a YAML file that names a data set, or a task and a data file."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from pydantic import Field, model_validator

from megasharp.config.core import Section, read_tree, validate
from megasharp.config.paths import REPOSITORY
from megasharp.data.sample import sampled
from megasharp.data.sets.load import load_set
from megasharp.data.tasks import TaskItem, load_items
from megasharp.errors import UserError

SUITE_FOLDER = Path("configs") / "task"


@dataclass(frozen=True, slots=True)
class Suite:
    """Problems of one task under one name.

    Example: `Suite("countdown_dev", "countdown", (item0, item1, ...))`.
    """

    name: str
    task: str
    items: tuple[TaskItem, ...]


class SuiteFile(Section):
    """What a suite's YAML file says: a `task` and the `path` of its file, or a `set`, whose rows may be at `path` too.

    `prompt` is another template than the set's. `limit` problems are drawn by `seed`; null is all of them.
    """

    task: str | None = None
    set: str | None = None
    path: str | None = None
    prompt: str | None = None
    limit: int | None = Field(default=None, ge=1)
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _one_kind(self) -> SuiteFile:
        if (self.task is None) == (self.set is None):
            raise ValueError("give either set, or task and path")
        if self.set is None and self.path is None:
            raise ValueError("task: name its data file as path")
        if self.set is None and self.prompt is not None:
            raise ValueError("prompt: a template is for a set; a task has its own prompt")
        return self


def load_suite(name: str, *, prompt: str | None = None, limit: int | None = None, seed: int | None = None) -> Suite:
    """The suite `name`: a path to a YAML file, or the name of one in configs/task.

    configs/task is looked up in the working directory, then in the repository this package lies in. The path of data
    is taken relative to the YAML file, to the folder that holds its configs/, then to the working directory. `prompt`,
    `limit` and `seed` count before the file's.

    Raises:
        UserError: there is no such suite (the known ones are listed), or its file or its data is wrong.
    """
    path = _suite_path(name)
    given = {key: value for key, value in (("prompt", prompt), ("limit", limit), ("seed", seed)) if value is not None}
    entry = validate(SuiteFile, {**read_tree(path), **given}, str(path))
    task, items = _problems(entry, path)
    try:
        return Suite(path.stem, task, tuple(sampled(items, entry.limit, entry.seed)))
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def _problems(entry: SuiteFile, suite: Path) -> tuple[str, list[TaskItem]]:
    data = _data_path(suite, entry.path) if entry.path is not None else None
    if entry.set is not None:
        items = list(load_set(entry.set, data, entry.prompt).items)
        return items[0].task, items
    assert entry.task is not None and data is not None
    return entry.task, load_items(entry.task, data)


def _suite_path(name: str) -> Path:
    folders = (Path.cwd() / SUITE_FOLDER, REPOSITORY / SUITE_FOLDER)
    for candidate in (Path(name), *(folder / f"{name}.yaml" for folder in folders)):
        if candidate.is_file():
            return candidate
    known = sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})
    near = " or ".join(get_close_matches(name, known, n=3, cutoff=0.5))
    raise UserError(
        f"eval.suites: no suite {name!r}; known suites: {', '.join(known) or 'none'}; "
        + (f"did you mean {near}? Else " if near else "or ")
        + "give the path of a suite's YAML file"
    )


def _data_path(suite: Path, data: str) -> Path:
    for folder in (*suite.resolve().parents[:3], Path.cwd()):
        if (folder / data).exists():
            return folder / data
    raise UserError(f"{suite}: path: no data {data!r} beside this file or in {Path.cwd()}")
