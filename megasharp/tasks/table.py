"""The table of tasks: for each, the reader of its data files, its verifier, and what its judge needs.

A new task is a file beside this one and a row here.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from megasharp.common.errors import UserError
from megasharp.common.records import TaskAnswer
from megasharp.tasks import (
    choice,
    code,
    countdown,
    countdown_tags,
    environment,
    form,
    instructions,
    knights,
    knights_short,
    math,
    maze,
    reasoning_gym,
    short_answer,
    synlogic,
)
from megasharp.tasks.data_fields import Fields, plain_columns, read_objects
from megasharp.tasks.environments import problem_file
from megasharp.tasks.judge import TaskItem, Verifier, Verifiers
from megasharp.tasks.own_reward import OwnReward
from megasharp.tasks.own_rows import answer_text
from megasharp.tasks.sandbox.programs import Sandbox
from megasharp.tasks.tools import tool_file

# The part of a response that a verifier is given: its final answer, as `final_answer.py` says; all of it, thinking
# included; or what stands after thinking, which is the answer from its first sign to its last.
Reading = Literal["final", "whole", "all of it"]


@dataclass(frozen=True, slots=True)
class Task:
    """A task: the reader of its files, its verifier, and what judging needs.

    - `load` reads a data file; raises UserError for a bad one.
    - `verify` judges a response. Where that means to run programs, `sandbox` makes the verifier, of a sandbox and the
      seconds for all tests of a response.
    - `worker`: the verifier may never end, so it runs only in processes that can be killed.
    - `library` imports what the verifier needs and takes seconds to import; the parent of the workers calls it before
      it forks them. `extra`: that library is an optional extra of the package, and only a run of this task has the
      verifier.
    - `prompt` is the template by which `load` asks; empty where a prompt is a notation of the task's own.
    - `answer` makes its record of the answer in a user's own row, whose column is the key; None where it takes more
      than that. `whole` makes the problem's text of the prompt, its row and the row's place, where it takes more than
      the prompt.
    - `response` is a response's limit in tokens where a run sets none.
    - `reading`: the part of a response that the verifier is given.

    Example: `Task(math.load_items, math.verify, worker=True, library=math.load_library)`.
    """

    load: Callable[[Path], list[TaskItem]]
    verify: Verifier | None = None
    sandbox: Callable[[Sandbox, float], Verifier] | None = None
    worker: bool = False
    library: Callable[[], object] | None = None
    extra: bool = False
    prompt: str = ""
    answer: Callable[[TaskItem, str], TaskAnswer] | None = None
    whole: Callable[[str, Fields, str], str] | None = None
    response: int = 2048
    reading: Reading = "final"


TASKS: dict[str, Task] = {
    "choice": Task(
        choice.load_items,
        choice.verify,
        prompt="boxed_chatml",
        answer=choice.own_answer,
        whole=choice.own_problem,
        response=1024,
    ),
    "code": Task(code.load_items, sandbox=code.CodeVerifier, prompt="plain", response=8192),
    "countdown": Task(countdown.load_items, countdown.verify, response=32, reading="all of it"),
    "countdown_3": Task(
        countdown_tags.load_items_of_three, countdown_tags.verify, prompt="countdown_qwen", response=1024
    ),
    "countdown_3to4": Task(countdown_tags.load_items, countdown_tags.verify, prompt="countdown_qwen", response=1024),
    "environment": Task(problem_file.load_items, environment.verify, reading="whole"),
    "form": Task(form.load_items, form.verify, prompt="plain", reading="whole"),
    "instructions": Task(
        instructions.load_items,
        instructions.verify,
        library=instructions.load_library,
        extra=True,
        prompt="plain",
        reading="all of it",
    ),
    "knights": Task(knights.load_items, knights.verify, prompt="chatml"),
    "knights_short": Task(knights_short.load_items, knights_short.verify, response=32, reading="all of it"),
    "math": Task(
        math.load_items,
        math.verify,
        worker=True,
        library=math.load_library,
        prompt="boxed_chatml",
        answer=lambda item, key: math.answer_of(answer_text(item, key)),
        response=4096,
    ),
    "maze": Task(maze.load_items, environment.verify, response=64, reading="whole"),
    "reasoning_gym": Task(
        reasoning_gym.load_items,
        reasoning_gym.verify,
        worker=True,
        library=reasoning_gym.load_library,
        extra=True,
        prompt="tags_chatml",
    ),
    "short_answer": Task(
        short_answer.load_items,
        short_answer.verify,
        prompt="boxed_chatml",
        answer=lambda item, key: short_answer.answer_to(item.question, answer_text(item, key)),
    ),
    # Its `operation` is judged by the algebra of `math`.
    "synlogic": Task(
        synlogic.load_items, synlogic.verify, worker=True, library=math.load_library, prompt="plain", response=8192
    ),
    # Any task's answers, `math` among them.
    "tools": Task(tool_file.load_items, tool_file.verify, worker=True, library=math.load_library, response=4096),
}


# Tests of programs, which their answers hold too, are megabytes; the files of the others are no rows, and may name more
# files.
_WITHOUT_COLUMNS = ("code", "environment", "reasoning_gym", "tools")


def load_items(task: str, path: Path) -> list[TaskItem]:
    """Load all problems of a task's data file, with the columns of their rows.

    A small file is read once: a run's checks, its plan and its training ask for the same one. Raises UserError for a
    task not in the table, or a bad file.
    """
    stamp = None if task in _WITHOUT_COLUMNS else _stamp(path)
    return _load(task, path) if stamp is None else [*_remembered(task, path, stamp)]


# Above it what is remembered would be felt in a process's memory.
_REMEMBERED_BYTES = 4_000_000
# Within it a file may be written again with the same time.
_SETTLED_NS = 2_000_000_000


def _stamp(path: Path) -> tuple[int, ...] | None:
    """Return what tells the file's content from another; None where it is large, or may still be changed unnoticed."""
    try:
        found = path.stat()
    except OSError:
        return None
    settled = time.time_ns() - found.st_mtime_ns > _SETTLED_NS
    if not settled or found.st_size > _REMEMBERED_BYTES or not path.is_file():
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


@functools.lru_cache(maxsize=4)
def _remembered(task: str, path: Path, stamp: tuple[int, ...]) -> list[TaskItem]:
    return _load(task, path)


def _load(task: str, path: Path) -> list[TaskItem]:
    items = row_of(task).load(path)
    rows = [] if task in _WITHOUT_COLUMNS else read_objects(path, "")
    # One that leaves rows out has no columns.
    if len(rows) != len(items):
        return items
    return [replace(item, row=plain_columns(fields)) for item, (_, fields) in zip(items, rows, strict=True)]


def row_of(task: str) -> Task:
    """Return the row of a task. Raises UserError, with near names, for one that is not in the table."""
    if task not in TASKS:
        near = " or ".join(get_close_matches(task, TASKS, n=3, cutoff=0.5))
        hint = f"is it {near}? Known tasks" if near else "known tasks"
        raise UserError(f"data.task: unknown task {task!r}; {hint}: {', '.join(sorted(TASKS))}")
    return TASKS[task]


def rows_of(tasks: Collection[str]) -> dict[str, Task]:
    """Return the rows of `tasks`, sorted by name; a name that is not in the table has none."""
    return {name: TASKS[name] for name in sorted(tasks) if name in TASKS}


def make_verifiers(
    tasks: Collection[str] = (),
    own: Mapping[str, OwnReward] | None = None,
    sandbox: Sandbox | None = None,
    seconds: float = 0.0,
    preload: bool = False,
) -> Verifiers:
    """Make the verifiers, by task, a user's `own` among them; called in the process that workers are forked from too.

    Those that need neither a sandbox nor an extra are always there. With a `sandbox` programs are judged, which have
    `seconds` for all of their tests; of the extras, those of `tasks` are judged, and their libraries imported now.
    With `preload` the libraries of all `tasks` are, before workers are forked. Raises UserError where an extra is not
    installed.
    """
    asked = rows_of(tasks)
    for row in asked.values():
        if row.library is not None and (preload or row.extra):
            row.library()
    found: dict[str, Verifier] = {}
    for name, row in TASKS.items():
        if row.sandbox is not None and sandbox is not None:
            found[name] = row.sandbox(sandbox, seconds)
        elif row.verify is not None and (not row.extra or name in asked):
            found[name] = row.verify
    return {**found, **(own or {})}
