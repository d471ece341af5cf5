"""Problems of a set, or of a task's file, asked by a template."""

from __future__ import annotations

from pathlib import Path

from megasharp.tasks.judge import TaskItem
from megasharp.tasks.prompts import asked
from megasharp.tasks.sets.load import load_set, set_named
from megasharp.tasks.table import TASKS, load_items


def published_prompt(set_name: str | None, task: str | None) -> str:
    """Return the template of a set or a task as its publication has it; empty where the prompt is the task's own.

    Raises UserError for an unknown set.
    """
    if set_name is not None:
        return set_named(set_name).prompt
    return TASKS[task].prompt if task in TASKS else ""


def load_problems(set_name: str | None, task: str | None, path: Path | None, prompt: str) -> list[TaskItem]:
    """All problems of a set, or of a task's file, in their order; an empty `prompt` leaves the task's own.

    Raises UserError as `load_set`, `load_items` and `asked` do.
    """
    if set_name is not None:
        return list(load_set(set_name, path, prompt or None).items)
    assert task is not None and path is not None
    items = load_items(task, path)
    return asked(items, prompt) if prompt else items
