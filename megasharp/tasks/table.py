"""The table of tasks: how a data file of each becomes problems with a prompt and an answer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

from megasharp.common.errors import UserError
from megasharp.common.records import TaskAnswer
from megasharp.tasks import (
    choice,
    code,
    countdown,
    countdown_tags,
    form,
    knights,
    knights_short,
    math,
    reasoning_gym,
    short_answer,
)
from megasharp.tasks.knights_short import KnightsShortAnswer
from megasharp.tasks.prompts import boxed_prompt
from megasharp.tasks.synlogic import problems


@dataclass(frozen=True, slots=True)
class TaskItem:
    """One problem before tokenization.

    `turns` are messages, each a role and a text, that the model's own chat template makes the prompt of
    (`tasks/stream.py`); where there are none, the prompt is `text` as it stands. `question` is what is asked, without
    what a prompt adds; empty where a prompt adds nothing.

    Example: `TaskItem("countdown-train-00017", "countdown", "3 5 7 8=24:", CountdownAnswer((3, 5, 7, 8), 24),
    "train.jsonl")`.
    """

    id: str
    task: str
    text: str
    answer: TaskAnswer
    source: str
    turns: tuple[tuple[str, str], ...] = ()
    question: str = ""


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


def load_code(path: Path) -> list[TaskItem]:
    """Programming problems from a JSONL file. Raises UserError as `code.read_records` does."""
    return [
        TaskItem(record.id, task="code", text=record.prompt, answer=record.answer, source=path.name)
        for record in code.read_records(path)
    ]


def load_math(path: Path) -> list[TaskItem]:
    """Problems of mathematics from a JSONL file. Raises UserError as `math.read_records` does."""
    return [
        TaskItem(record.id, "math", boxed_prompt(record.problem), record.answer, path.name, question=record.problem)
        for record in math.read_records(path)
    ]


def load_countdown_3to4(path: Path, count: int | None = None) -> list[TaskItem]:
    """Problems of Countdown-Tasks-3to4, those of `count` numbers where it is given."""
    return [
        TaskItem(record.id, "countdown_3to4", countdown_tags.prompt_text(record.answer), record.answer, path.name)
        for record in countdown_tags.read_records(path, count)
    ]


def load_countdown_3(path: Path) -> list[TaskItem]:
    """The problems of three numbers of Countdown-Tasks-3to4."""
    return [replace(item, task="countdown_3") for item in load_countdown_3to4(path, 3)]


def load_choice(path: Path) -> list[TaskItem]:
    """Multiple choice from a JSONL file. Raises UserError as `choice.read_records` does."""
    return [
        TaskItem(record.id, "choice", boxed_prompt(record.text), record.answer, path.name, question=record.text)
        for record in choice.read_records(path)
    ]


def load_short_answer(path: Path) -> list[TaskItem]:
    """Short answers from a JSONL file. Raises UserError as `short_answer.read_records` does."""
    return [
        TaskItem(
            record.id, "short_answer", boxed_prompt(record.question), record.answer, path.name, question=record.question
        )
        for record in short_answer.read_records(path)
    ]


def load_form(path: Path) -> list[TaskItem]:
    """Prompts whose responses are judged by their form alone. Raises UserError as `form.read_records` does."""
    return [TaskItem(record.id, "form", record.prompt, record.answer, path.name) for record in form.read_records(path)]


def load_knights(path: Path) -> list[TaskItem]:
    """Knights and Knaves from a JSONL file. Raises UserError as `knights.read_records` does."""
    return [
        TaskItem(record.id, "knights", knights.prompt_text(record.puzzle), record.puzzle.answer, path.name)
        for record in knights.read_records(path)
    ]


def load_knights_short(path: Path) -> list[TaskItem]:
    """The same files, asked and answered in a few characters."""
    return [
        TaskItem(
            record.id,
            "knights_short",
            knights_short.prompt_text(record.puzzle),
            KnightsShortAnswer(record.puzzle.solution),
            path.name,
        )
        for record in knights.read_records(path)
    ]


def load_synlogic(path: Path) -> list[TaskItem]:
    """Problems of SynLogic from a JSONL file. Raises UserError as `synlogic.read_records` does."""
    return [
        TaskItem(record.id, "synlogic", record.prompt, record.answer, path.name)
        for record in problems.read_records(path)
    ]


def load_reasoning_gym(path: Path) -> list[TaskItem]:
    """Problems that reasoning-gym generates. Raises UserError as `reasoning_gym.read_records` does."""
    return [
        TaskItem(
            record.id,
            "reasoning_gym",
            reasoning_gym.prompt_text(record.question),
            record.answer,
            path.name,
            question=record.question,
        )
        for record in reasoning_gym.read_records(path)
    ]


TASKS: dict[str, Callable[[Path], list[TaskItem]]] = {
    "choice": load_choice,
    "code": load_code,
    "countdown": load_countdown,
    "countdown_3": load_countdown_3,
    "countdown_3to4": load_countdown_3to4,
    "form": load_form,
    "knights": load_knights,
    "knights_short": load_knights_short,
    "math": load_math,
    "reasoning_gym": load_reasoning_gym,
    "short_answer": load_short_answer,
    "synlogic": load_synlogic,
}


def digest_of(items: Sequence[TaskItem]) -> str:
    """SHA-256 of problems in their order: ids, texts and answers."""
    digest = hashlib.sha256()
    for item in items:
        digest.update(repr((item.id, item.text, item.answer, *item.turns)).encode())
    return digest.hexdigest()


def load_items(task: str, path: Path) -> list[TaskItem]:
    """All problems of a task's data file. Raises UserError for a task not in the table, or a bad file."""
    if task not in TASKS:
        near = " or ".join(get_close_matches(task, TASKS, n=3, cutoff=0.5))
        hint = f"is it {near}? Known tasks" if near else "known tasks"
        raise UserError(f"data.task: unknown task {task!r}; {hint}: {', '.join(sorted(TASKS))}")
    return TASKS[task](path)
