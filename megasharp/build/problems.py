"""The problems that a run trains on: a task's file, or a data set."""

from __future__ import annotations

from megasharp.config.paths import find
from megasharp.config.run import DataConfig
from megasharp.data.sets.load import load_set, set_named
from megasharp.data.tasks import TaskItem, load_items
from megasharp.errors import UserError


def training_task(data: DataConfig) -> str:
    """The task whose verifier judges training's responses. Raises UserError for a set that there is not."""
    if data.set is not None:
        return set_named(data.set).task
    assert data.task is not None
    return data.task


def training_problems(data: DataConfig, where: str) -> list[TaskItem]:
    """All problems, in their own order. `where` names the configuration file. Raises UserError in one line."""
    path = find(data.path) if data.path is not None else None
    if data.set is not None:
        return list(load_set(data.set, path, data.prompt).items)
    if path is None:
        raise UserError(f"{where}: data.path: name a data file of task {data.task!r}")
    assert data.task is not None
    return load_items(data.task, path)
