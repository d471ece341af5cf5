"""Problems of any environment class: a YAML file names the class, its options, and its rows.

    use: games.py:Guess        # or package.module:Class, or a name of NAMED
    options: {most: 100}       # arguments of the class
    rows: rows.jsonl           # an object a line; or count: 500, for rows {"seed": 1}, {"seed": 2}, ...

The class is `megasharp.tasks.environment.Environment` or has its methods. A prompt is what `reset` says of a row, so
every row is begun once when the file is read.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

from pydantic import Field, JsonValue, model_validator

from megasharp.common.errors import UserError, one_line
from megasharp.common.section import Section
from megasharp.config.core import read_tree, validate
from megasharp.tasks.data_fields import check_names, read_objects
from megasharp.tasks.environment import Environment, EnvironmentAnswer, NoObservation, Observation, Row, called, checked
from megasharp.tasks.judge import TaskItem
from megasharp.tasks.user_import import beside, constructed, imported, look_beside

KEY = "use"
# Seconds for an environment to begin, when its file is read.
BEGIN_S = 60.0
_AT_ONCE = 64
# Adapters of other packages' environments, by the packages' names.
NAMED = {
    "gymnasium": "megasharp.tasks.environments.gymnasium_text:GymnasiumText",
    "openenv": "megasharp.tasks.environments.openenv:OpenEnv",
    "reasoning_gym": "megasharp.tasks.environments.reasoning_gym_tries:ReasoningGymTries",
    "verifiers": "megasharp.tasks.environments.verifiers_package:Verifiers",
}


class EnvironmentFile(Section):
    """The file."""

    use: str = Field(
        description="The environment's class: folder/file.py:Class, or package.module:Class; or gymnasium, openenv, "
        "reasoning_gym or verifiers for an environment of that package's."
    )
    options: dict[str, JsonValue] = Field(default={}, description="Arguments of the class, by their names.")
    rows: str | None = Field(
        default=None,
        description="JSONL file of the environment's rows, beside this file. null: count rows of a seed alone.",
    )
    count: int | None = Field(default=None, ge=1, description="Number of rows that hold a seed alone. Without rows.")
    seed: int = Field(default=1, ge=0, description="Seed of the first of these rows; each next row has the next one.")

    @model_validator(mode="after")
    def _one_kind_of_rows(self) -> Self:
        if (self.rows is None) == (self.count is None):
            raise ValueError("give either rows, a file, or count")
        return self


@dataclass(frozen=True, slots=True)
class AnyEnvironmentAnswer(EnvironmentAnswer):
    """A class by its path, its options and a row, both as JSON texts.

    `place` is the path with the file that was found beside the file of problems. `prompt` is a digest of the prompt.

    Example: `AnyEnvironmentAnswer("games.py:Guess", "{}", '{"number": 7}')`.
    """

    use: str
    options: str
    text: str
    place: str = field(default="", compare=False, repr=False)
    prompt: str = field(default="", compare=False, repr=False)

    @property
    def row(self) -> Row:
        """The row."""
        found: dict[str, Any] = json.loads(self.text)
        return found

    def begins_with(self, first: Observation) -> bool:
        """Return True where the observation is the prompt that was read."""
        return not self.prompt or self.prompt == _digest(first)

    def environment(self) -> Environment:
        """Make an object of the class. Raises UserError where there is none, or it has no `reset` and `step`."""
        kind = imported(NAMED.get(self.use, self.place or self.use), KEY)
        if not (isinstance(kind, type) and hasattr(kind, "reset") and hasattr(kind, "step")):
            raise UserError(f"{KEY}: {self.use} is no class with the methods reset and step")
        made: Environment = constructed(kind, self.use, json.loads(self.options), KEY)
        return made


def load_items(path: Path) -> list[TaskItem]:
    """Read a file and begin each of its rows once.

    Raises UserError, naming the file, for what is wrong with it, and where the environment raises on a row.
    """
    file = validate(EnvironmentFile, read_tree(path), str(path), path)
    look_beside(path)
    if file.rows is not None:
        its_rows = path.parent / file.rows
        if not its_rows.is_file():
            raise UserError(f"{path}: rows: there is no file {its_rows}")
        rows: list[tuple[str, Row]] = [*read_objects(its_rows, "write one object a line")]
    else:
        seeds = range(file.seed, file.seed + (file.count or 0))
        rows = [(f"seed {seed}", {"seed": seed}) for seed in seeds]
    options = json.dumps(file.options, sort_keys=True)
    place = beside(file.use, path.parent)
    answers = [AnyEnvironmentAnswer(file.use, options, json.dumps(row, sort_keys=True), place=place) for _, row in rows]
    try:
        # A notebook's thread has an event loop that runs already.
        with ThreadPoolExecutor(1) as thread:
            begun = thread.submit(asyncio.run, _begun(answers, [where for where, _ in rows])).result()
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    items = [
        _item(path, number, answer, observation)
        for number, (answer, observation) in enumerate(zip(answers, begun, strict=True))
    ]
    check_names([item.id for item in items], path)
    return items


def _item(path: Path, number: int, answer: AnyEnvironmentAnswer, first: Observation) -> TaskItem:
    name = answer.row.get("id")
    if not (isinstance(name, str) and name):
        name = f"{path.stem}-{number:05d}-{sha256(answer.text.encode()).hexdigest()[:8]}"
    answer = replace(answer, prompt=_digest(first))
    return TaskItem(name, "environment", first.text, answer, path.name, turns=first.messages)


def _digest(first: Observation) -> str:
    return sha256(repr((first.text, *first.messages)).encode("utf-8", "replace")).hexdigest()


async def _begun(answers: Sequence[AnyEnvironmentAnswer], places: Sequence[str]) -> list[Observation]:
    """Return the first observation of each row; raises the first failure, in the order of rows."""
    at_once = asyncio.Semaphore(_AT_ONCE)
    begins = [_first(answer, where, at_once) for answer, where in zip(answers, places, strict=True)]
    found = await asyncio.gather(*begins, return_exceptions=True)
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return [each for each in found if isinstance(each, Observation)]


async def _first(answer: AnyEnvironmentAnswer, where: str, at_once: asyncio.Semaphore) -> Observation:
    async with at_once:
        environment = answer.environment()
        try:
            async with asyncio.timeout(BEGIN_S):
                given: object = await called(environment.reset, answer.row)
                if hasattr(environment, "close"):
                    await called(environment.close)
        except TimeoutError as error:
            raise UserError(f"{where}: {answer.use} does not begin within {BEGIN_S:g} s") from error
        except (Exception, SystemExit) as error:  # an environment is a user's program
            cause = f"{type(error).__name__}: {one_line(error)}"
            raise UserError(f"{where}: {answer.use} cannot begin ({cause})") from error
    try:
        first = checked(given)
    except NoObservation as error:
        raise UserError(f"{where}: {answer.use}.reset {error}") from error
    if first.done or not (first.text or first.messages):
        raise UserError(
            f"{where}: {answer.use} begins with neither a text nor messages, or with an end; it has no prompt"
        )
    return first
