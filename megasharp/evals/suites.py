"""Suites: named sets of problems. A suite is a YAML file with `task` and the `path` of a data file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megasharp.config.core import Section, read_tree, validate
from megasharp.config.paths import REPOSITORY
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
    """What a suite's YAML file says."""

    task: str
    path: str


def load_suite(name: str) -> Suite:
    """The suite `name`: a path to a YAML file, or the name of one in configs/task.

    configs/task is looked up in the working directory, then in the repository this package lies in. The data
    file's path is taken relative to the YAML file, to the folder that holds its configs/, then to the working
    directory.

    Raises:
        UserError: there is no such suite (the known ones are listed), or its file or its data is wrong.
    """
    path = _suite_path(name)
    entry = validate(SuiteFile, read_tree(path), str(path))
    items = load_items(entry.task, _data_path(path, entry.path))
    return Suite(path.stem, entry.task, tuple(items))


def _suite_path(name: str) -> Path:
    folders = (Path.cwd() / SUITE_FOLDER, REPOSITORY / SUITE_FOLDER)
    for candidate in (Path(name), *(folder / f"{name}.yaml" for folder in folders)):
        if candidate.is_file():
            return candidate
    known = sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})
    raise UserError(
        f"eval.suites: no suite {name!r}; known suites: {', '.join(known) or 'none'}; "
        "or give the path of a suite's YAML file"
    )


def _data_path(suite: Path, data: str) -> Path:
    for folder in (*suite.resolve().parents[:3], Path.cwd()):
        if (folder / data).is_file():
            return folder / data
    raise UserError(f"{suite}: path: no data file {data!r} beside this file or in {Path.cwd()}")
