"""The table of tasks: how a data file of each becomes problems with a prompt and an answer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megasharp.data import countdown, math
from megasharp.data.boxed import boxed_prompt
from megasharp.errors import UserError
from megasharp.types import TaskAnswer


@dataclass(frozen=True, slots=True)
class TaskItem:
    """One problem before tokenization.

    Example: `TaskItem("countdown-train-00017", "countdown", "3 5 7 8=24:", CountdownAnswer((3, 5, 7, 8), 24),
    "train.jsonl")`.
    """

    id: str
    task: str
    text: str
    answer: TaskAnswer
    source: str


def load_countdown(path: Path) -> list[TaskItem]:
    """Countdown problems from a JSONL file. Raises UserError as `countdown.read_records` does."""
    return [
        TaskItem(
            id=record.id,
            task="countdown",
            text=countdown.prompt_text(record.numbers, record.target),
            answer=record.answer,
            source=path.name,
        )
        for record in countdown.read_records(path)
    ]


def load_math(path: Path) -> list[TaskItem]:
    """Problems of mathematics from a JSONL file. Raises UserError as `math.read_records` does."""
    return [
        TaskItem(record.id, "math", boxed_prompt(record.problem), record.answer, path.name)
        for record in math.read_records(path)
    ]


TASKS: dict[str, Callable[[Path], list[TaskItem]]] = {
    "countdown": load_countdown,
    "math": load_math,
}


def digest_of(items: Sequence[TaskItem]) -> str:
    """SHA-256 of problems in their order: ids, texts and answers."""
    digest = hashlib.sha256()
    for item in items:
        digest.update(repr((item.id, item.text, item.answer)).encode())
    return digest.hexdigest()


def load_items(task: str, path: Path) -> list[TaskItem]:
    """All problems of a task's data file. Raises UserError for a task not in the table, or a bad file."""
    if task not in TASKS:
        raise UserError(f"data.task: unknown task {task!r}; known tasks: {', '.join(sorted(TASKS))}")
    return TASKS[task](path)
