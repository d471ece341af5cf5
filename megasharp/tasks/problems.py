"""Problems of a source: a set's, a task's file's, or a user's own rows, asked by a template."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from megasharp.common.errors import UserError
from megasharp.config.data import DataSource
from megasharp.tasks.judge import TaskItem
from megasharp.tasks.own_reward import OWN_TASK
from megasharp.tasks.own_rows import Columns, OwnRows, read_own_rows
from megasharp.tasks.prompts import asked, by_chat
from megasharp.tasks.sets.load import load_set, set_named
from megasharp.tasks.sets.row_sources import own_rows
from megasharp.tasks.table import TASKS, load_items, row_of

# Tokens of a response to a user's own rows where a run sets no limit.
_OWN_RESPONSE = 2048


def published_prompt(set_name: str | None, task: str | None) -> str:
    """Return the template of a set or a task as its publication has it; empty where the prompt is the task's own.

    Raises UserError for an unknown set.
    """
    if set_name is not None:
        return set_named(set_name).prompt
    return TASKS[task].prompt if task in TASKS else ""


def task_of(source: DataSource) -> str:
    """Return the task whose verifier judges a source's responses, `own` for a user's function.

    Raises UserError for an unknown set.
    """
    return set_named(source.set).task if source.set is not None else source.task or OWN_TASK


def prompt_of(source: DataSource) -> str:
    """Return the template by which a source is asked where nothing else is said; empty for its own words.

    Own rows with a system message or a template of their own have words of their own, and so have those without a task.
    """
    if source.prompt is not None:
        return source.prompt
    if source.system is not None or source.template is not None:
        return ""
    return by_chat(published_prompt(source.set, source.task))


def response_of(task: str) -> int:
    """Return the limit of tokens of a response of a task's where a run sets none."""
    return TASKS[task].response if task in TASKS else _OWN_RESPONSE


def load_problems(source: DataSource, path: Path | None, prompt: str) -> list[TaskItem]:
    """All problems of a source in their order, at `path`; an empty `prompt` leaves their own words.

    Raises UserError as `load_set`, `load_items`, `read_own_rows` and `asked` do.
    """
    if source.set is not None:
        return list(load_set(source.set, path, prompt or None).items)
    assert path is not None
    if not source.is_own:
        assert source.task is not None
        try:
            items = load_items(source.task, path)
        except UserError as error:
            if row_of(source.task).answer is None or not path.exists():
                raise
            raise UserError(f"{error}; for other columns set data.prompt_key and data.answer_key") from error
        return asked(items, prompt) if prompt else items
    items = _own_items(source, path)
    # Messages are asked as they stand, unless the user says otherwise, which is refused.
    return asked(items, prompt) if prompt and (source.prompt or is_worded(source, items)) else items


def is_worded(source: DataSource, items: Iterable[TaskItem]) -> bool:
    """Return whether a template is put around a source's problems: not where own rows are messages already."""
    return not source.is_own or all(item.question for item in items)


def _own_items(source: DataSource, path: Path) -> list[TaskItem]:
    name = source.path if path.as_posix() == source.path and not path.exists() else path.name
    whole = None if source.task is None else row_of(source.task).whole
    columns = Columns(source.prompt_key, source.answer_key, source.system, source.template, whole)
    found = read_own_rows(own_rows(path, source.split, source.name, source.revision), columns, str(name))
    if source.task is None:
        return _alike(found)
    answer_of = row_of(source.task).answer
    if answer_of is None:
        can = ", ".join(name for name, row in TASKS.items() if row.answer)
        raise UserError(
            f"{path}: task {source.task} cannot judge rows of your own by one answer; tasks that can: {can}; write the "
            "task's own fields, or judge by reward.function"
        )
    if found.answer_key is None:
        raise UserError(f"{path}: task {source.task} judges by an answer; name its column as data.answer_key")
    return [replace(item, task=source.task, answer=answer_of(item, found.answer_key)) for item in found.items]


def _alike(found: OwnRows) -> list[TaskItem]:
    """Return problems whose answers are all of one kind. Raises UserError where a text stands among numbers, say."""
    kinds: dict[str, str] = {}
    for item in found.items:
        value = item.answer.given
        kind = "a number" if isinstance(value, int | float) else "a text" if isinstance(value, str) else "a list"
        kinds.setdefault(kind, item.id)
    if len(kinds) > 1:
        (kind, row), (other, its_row), *_ = kinds.items()
        raise UserError(
            f"'{found.answer_key}' is {kind} in row {row} and {other} in row {its_row}; write one kind, so that a "
            "reward can compare"
        )
    return list(found.items)
