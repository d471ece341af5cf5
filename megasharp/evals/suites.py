"""Suites: named sets of problems, and the values of k that they are evaluated for.

A suite is a YAML file that names a data set, or a task and a data file. Values of k are text as people write them:
`1,4,16` or `1,2,4,...,1024`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

from pydantic import Field

from megasharp.common.errors import UserError
from megasharp.config.core import SHIPPED, read_tree, validate
from megasharp.config.data import DataSource
from megasharp.tasks.judge import TaskItem
from megasharp.tasks.own_reward import is_own
from megasharp.tasks.own_rows import as_template
from megasharp.tasks.problems import is_worded, load_problems, published_prompt, task_of
from megasharp.tasks.prompts import by_chat, template_named, worded
from megasharp.tasks.sets.row_sources import is_set_id
from megasharp.tasks.stream import sampled

_ELLIPSES = ("...", "…")


def parse_ks(text: str) -> tuple[int, ...]:
    """Parse the values of k that `text` names, sorted, each once.

    `...` stands between at least two values and a last one, and goes on from those before it by a constant factor or a
    constant difference, whichever fits; where both do, a third value before it decides.

    Raises:
        UserError: no numbers, a value below 1, or dots that lead nowhere or to two places.

    Example: `parse_ks("1,2,4,...,32,100")` is `(1, 2, 4, 8, 16, 32, 100)`.
    """
    parts = [part.strip() for part in text.split(",")]
    values: list[int] = []
    for number, part in enumerate(parts):
        if part in _ELLIPSES:
            end = parts[number + 1] if number + 1 < len(parts) else ""
            values += _continued(values, _number(end, text), text)
        else:
            values.append(_number(part, text))
    return tuple(sorted(set(values)))


def default_ks(n: int) -> tuple[int, ...]:
    """Return the powers of 4 below `n`, and `n`."""
    return (*(4**power for power in range(16) if 4**power < n), n)


def _number(part: str, text: str) -> int:
    if not part.isascii() or not part.isdigit() or int(part) < 1:
        raise UserError(f"--k {text}: expected whole numbers from 1 on, such as 1,4,16 or 1,2,4,...,1024")
    return int(part)


def _continued(before: Sequence[int], end: int, text: str) -> list[int]:
    """The values that the dots after `before` stand for, without `end`."""
    if len(before) < 2 or not before[-2] < before[-1] < end:
        raise UserError(f"--k {text}: the dots need two growing values before them and a larger one after")
    a, b = before[-2:]
    factor, difference = b // a, b - a
    steps: list[tuple[Callable[[int], int], bool]] = [
        (lambda k: k * factor, b % a == 0 and _is_kept(before, lambda k: k * factor)),
        (lambda k: k + difference, _is_kept(before, lambda k: k + difference)),
    ]
    found = [run for step, fits in steps if fits and (run := _run(b, end, step)) is not None]
    if not found:
        raise UserError(f"--k {text}: neither a constant factor nor a constant difference leads from {a},{b} to {end}")
    if len(found) > 1 and found[0] != found[1]:
        raise UserError(f"--k {text}: the dots may double or count; give a third value before them, as in 1,2,4,...,16")
    return found[0]


def _is_kept(before: Sequence[int], step: Callable[[int], int]) -> bool:
    """True where the last three values, if there are three, keep to the step."""
    return len(before) < 3 or before[-2] == step(before[-3])


def _run(start: int, end: int, step: Callable[[int], int]) -> list[int] | None:
    """The values strictly between both; None where the step passes over `end`."""
    found: list[int] = []
    value = step(start)
    while value < end:
        found.append(value)
        value = step(value)
    return found if value == end else None


SUITE_FOLDER = Path("configs") / "task"


@dataclass(frozen=True, slots=True)
class Suite:
    """Problems of one task under one name, and the template that they are asked by; empty where that is the task's own.

    Example: `Suite("countdown_dev", "countdown", (item0, item1, ...))`.
    """

    name: str
    task: str
    items: tuple[TaskItem, ...]
    prompt: str = ""


# As a prompt's name: each suite's own template, as its set or task was published with.
OWN = "suite"


@dataclass(frozen=True, slots=True)
class Asking:
    """The template by which suites are asked whose file names none.

    `name` is a template's name or `suite`; where it is None, suites of a task that is trained on are asked as in
    training, by `training`: its tasks and their templates. An empty one stands for the task's `words` around a user's
    own rows: a system message and a template. What is `first` counts before the template of a group.
    """

    name: str | None = None
    training: Mapping[str, str] = field(default_factory=dict)
    words: Mapping[str, tuple[str | None, str | None]] = field(default_factory=dict)
    first: bool = False

    def asks_as_training(self, task: str) -> bool:
        """Return whether suites of `task` are asked as training is."""
        return self.name is None and task in self.training

    def in_words(self, source: SuiteFile) -> SuiteFile:
        """Return a suite of own rows with the words of training around them, where it has none of its own."""
        task = task_of(source)
        asks = self.asks_as_training(task) and task in self.words
        if not asks or not source.is_own or source.prompt or source.system or source.template:
            return source
        return source.model_copy(update=dict(zip(("system", "template"), self.words[task], strict=True)))

    def template(self, task: str, own: str) -> str:
        """Return the template for a suite of `task` whose `own` is the published one; empty: the task's notation."""
        if self.name == OWN or not (own or is_own(task)):
            return own
        if self.name is not None:
            return self.name if is_own(task) or template_named(self.name).fits(task) else by_chat(own)
        return (self.asks_as_training(task) and self.training[task]) or by_chat(own)


class SuiteFile(DataSource):
    """A suite's YAML file: a source of problems, of which `limit` are drawn by `seed`; null is all of them.

    `prompt` is the template of this suite in every evaluation, and its path is relative to the YAML file, to the folder
    that holds its configs/, or to the working directory.
    """

    limit: int | None = Field(default=None, ge=1, description="Number of problems to draw from all of them. null: all.")
    seed: int = Field(
        default=0,
        ge=0,
        description="Seed of the draw; the same seed with a larger limit keeps the problems of the smaller one. Used "
        "with limit.",
    )


def load_suite(
    name: str,
    *,
    prompt: str | None = None,
    limit: int | None = None,
    seed: int | None = None,
    asking: Asking = Asking(),
) -> Suite:
    """Load the suite `name`: a path to a YAML file, or the name of one in configs/task.

    configs/task is looked up in the working directory, then in what megasharp ships. The path of data is taken
    relative to the YAML file, to the folder that holds its configs/, then to the working directory. `prompt`, `limit`
    and `seed` count before the file's; `asking` is for a suite without a prompt of its own.

    Raises:
        UserError: there is no such suite (the known ones are listed), or its file or its data is wrong.
    """
    path = _suite_path(name)
    given = {key: value for key, value in (("prompt", prompt), ("limit", limit), ("seed", seed)) if value is not None}
    entry = validate(SuiteFile, {**read_tree(path), **given}, str(path), path)
    if entry.set is None and entry.path is None:
        raise UserError(f"{path}: task: name its data file as path")
    data = _data_path(path, entry)
    task, entry = task_of(entry), asking.in_words(entry)
    words = entry.system is not None or entry.template is not None
    chosen = entry.prompt or ("" if words else asking.template(task, published_prompt(entry.set, entry.task)))
    items = load_problems(entry, data, chosen)
    around = asking.words.get(task, (None, None))
    training = as_template(*around) if asking.asks_as_training(task) and not words and not entry.prompt else None
    if not is_worded(entry, items):
        chosen = ""
    elif training is not None and all(item.question for item in items):
        chosen, items = "", worded(items, training)
    try:
        return Suite(path.stem, task, tuple(sampled(items, entry.limit, entry.seed)), chosen)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def suite_source(name: str) -> tuple[SuiteFile, Path | None]:
    """Return what a suite's file says, and where its data is; None for a set's own place. Raises as `load_suite`."""
    path = _suite_path(name)
    entry = validate(SuiteFile, read_tree(path), str(path), path)
    return entry, _data_path(path, entry)


def _suite_path(name: str) -> Path:
    folders = (Path.cwd() / SUITE_FOLDER, SHIPPED / SUITE_FOLDER)
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


def _data_path(suite: Path, entry: SuiteFile) -> Path | None:
    data = entry.path
    if data is None:
        return None
    for folder in (*suite.resolve().parents[:3], Path.cwd()):
        if (folder / data).exists():
            return folder / data
    if is_set_id(data):
        return Path(data)
    raise UserError(f"{suite}: path: no data {data!r} beside this file or in {Path.cwd()}")
