"""Problems in a user's own rows: which column is the prompt, which the answer, and the words around them.

A prompt is a text, or a list of messages (`role`, `content`), which keep all their turns. Every column travels with its
problem, for the user's reward. Where a task judges the responses, its record is made of the answer's value.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import chain
from math import isfinite
from typing import Any

from megasharp.common.errors import UserError
from megasharp.common.exit_codes import note
from megasharp.common.records import TaskAnswer
from megasharp.tasks.data_fields import Fields, is_unicode, number_field, plain_columns, short
from megasharp.tasks.judge import TaskItem
from megasharp.tasks.own_reward import OWN_TASK
from megasharp.tasks.prompts import Template

# Columns that people call the prompt and the answer, looked for where no key is given.
PROMPTS = ("prompt", "messages", "question", "problem", "instruction", "input", "query")
ANSWERS = ("answer", "ground_truth", "reward_model.ground_truth", "solution", "label", "target", "output", "response")
_HERE = "{question}"
_PLACE = re.compile(r"\{([A-Za-z_][\w.]*)\}")
_ROLES = ("system", "user", "assistant", "tool", "developer")

Message = tuple[str, str]


@dataclass(frozen=True, slots=True)
class OwnAnswer(TaskAnswer):
    """The answer as its row has it: a text stays a text, a number a number; None where the rows have none.

    `columns` is a digest of the whole row: a reward may read any column, so that an edited one is another problem.

    Example: `OwnAnswer("72")`.
    """

    value: Any
    columns: bytes = b""

    @property
    def given(self) -> object:
        """The answer as its row has it."""
        return self.value


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of the prompt and of the answer, and the words that are put around a prompt that is a text.

    A key may lead into a column: `reward_model.ground_truth`. None looks for a usual name. `system` is put before
    prompts that have no system message of their own. `template` has places for columns, `{question}` among them, which
    is the prompt's text whatever its column is called. `whole` makes a task's whole problem of such a text, its row and
    the row's place.
    """

    prompt_key: str | None = None
    answer_key: str | None = None
    system: str | None = None
    template: str | None = None
    whole: Callable[[str, Fields, str], str] | None = None


def as_template(system: str | None, template: str | None) -> Template | None:
    """Return the words around own prompts as a template for any problems; None where they have other columns in them.

    They are None too where there are no words.
    """
    if (system is None and template is None) or _PLACE.findall(template or _HERE) != ["question"]:
        return None
    return Template(template or _HERE, "a run's own words", True, system or "")


@dataclass(frozen=True, slots=True)
class OwnRows:
    """Problems of own rows, and the columns that were found to be the prompt and the answer (None: no such column)."""

    items: tuple[TaskItem, ...]
    prompt_key: str
    answer_key: str | None


def read_own_rows(
    rows: Iterable[tuple[str, Fields]], columns: Columns, source: str, say: Callable[[str], None] = note
) -> OwnRows:
    """Read rows, each with its place, as problems named after `source`.

    `say` gets a line with the columns that were found by their names, and one where rows have a system message beside
    that of `columns`. Raises UserError, in one line that names the place, where there is no row, a column is missing or
    ambiguous, a prompt is neither a text nor a list of messages, or an answer is null or an object.
    """
    iterator = iter(rows)
    first = next(iterator, None)
    if first is None:
        raise UserError(f"{source}: no row in it; give it one at least")
    where, fields = first
    prompt_key = columns.prompt_key or _usual(fields, PROMPTS, "data.prompt_key", where)
    if prompt_key is None:
        raise UserError(f"{where}: no column is a prompt; name one of these as data.prompt_key: {_names(fields)}")
    answer_key = columns.answer_key or _usual(fields, ANSWERS, "data.answer_key", where)
    if (prompt_key, answer_key) != (columns.prompt_key, columns.answer_key):
        answers = f"answers are its {answer_key}" if answer_key else "there is no answer"
        say(f"{source}: prompts are its column {prompt_key}, {answers} (data.prompt_key, data.answer_key)")
    items = tuple(_items(chain([first], iterator), prompt_key, answer_key, columns, source))
    own = sum(item.turns[0] != ("system", columns.system) for item in items)
    if columns.system is not None and own:
        say(f"{source}: {own} of {len(items)} prompts keep their own system message; data.system is put before others")
    return OwnRows(items, prompt_key, answer_key)


def _items(
    rows: Iterable[tuple[str, Fields]], prompt_key: str, answer_key: str | None, columns: Columns, source: str
) -> Iterator[TaskItem]:
    name = source.rpartition("/")[2]
    before = ""
    for number, (where, found) in enumerate(rows, start=1):
        fields = plain_columns(found)
        for key, option in ((prompt_key, "data.prompt_key"), (answer_key, "data.answer_key")):
            if key is not None and key in found and key not in fields:
                raise UserError(f"{where}: '{key}' ({option}) holds {type(found[key]).__name__}; write it as text")
        prompt = _column(fields, prompt_key, "data.prompt_key", where)
        turns, question = _turns(prompt, prompt_key, columns, fields, where)
        answer = None if answer_key is None else _answer(fields, answer_key, where)
        kind = "a text" if question else "a list of messages"
        if before not in ("", kind):
            raise UserError(f"{where}: '{prompt_key}' is {kind}, and {before} in the rows before; write one kind")
        before = kind
        yield TaskItem(
            id=f"{name}-{number}",
            task=OWN_TASK,
            text="\n\n".join(text for _, text in turns),
            answer=OwnAnswer(answer, hashlib.sha256(repr(fields).encode(errors="surrogatepass")).digest()),
            source=source,
            turns=turns,
            question=question,
            row=fields,
        )


def _answer(fields: Fields, key: str, where: str) -> object:
    answer = _column(fields, key, "data.answer_key", where)
    if answer is None:
        raise UserError(f"{where}: '{key}' is null; give each row an answer, or take it out")
    if isinstance(answer, float) and not isfinite(answer):
        raise UserError(f"{where}: '{key}' is {answer}, which no response can give; take the row out")
    if isinstance(answer, Mapping):
        entry = next(iter(answer), "entry")
        raise UserError(f"{where}: '{key}' is an object; name an entry of it, such as data.answer_key={key}.{entry}")
    return answer


def answer_text(item: TaskItem, key: str) -> str:
    """Return a row's answer as a text that a task reads. Raises UserError where it is no number and no text."""
    return number_field({key: item.answer.given}, key, f"row {item.id}")


def _turns(prompt: object, key: str, columns: Columns, fields: Fields, where: str) -> tuple[tuple[Message, ...], str]:
    """Return a prompt's messages, and its question where it is a text."""
    if isinstance(prompt, str):
        question = _text(prompt, f"{where}: '{key}'")
        if columns.whole is not None:
            question = columns.whole(question, fields, where)
        words = question if columns.template is None else _filled(columns.template, question, fields, where)
        turns: tuple[Message, ...] = (("user", words),)
    elif isinstance(prompt, Sequence) and prompt and all(isinstance(each, Mapping) for each in prompt):
        if columns.template is not None:
            raise UserError(
                f"{where}: '{key}' is a list of messages, which data.template has no place in; leave "
                "it out (of a suite: eval.prompt=suite)"
            )
        turns, question = tuple(_message(each, key, where) for each in prompt), ""
        if turns[-1][0] == "assistant":
            raise UserError(
                f"{where}: '{key}' ends with a message of the assistant, which is for the model to write; take it out "
                "of the column"
            )
    else:
        raise UserError(
            f"{where}: '{key}' must be a text, or a list of messages such as "
            f'[{{"role": "user", "content": "..."}}], got {short(prompt)}'
        )
    if columns.system is not None and turns[0][0] != "system":
        turns = (("system", columns.system), *turns)
    return turns, question


def _message(message: Mapping[str, object], key: str, where: str) -> Message:
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        raise UserError(
            f"{where}: a message of '{key}' has the role {short(role)}; it must be one of {', '.join(_ROLES)}"
        )
    return str(role), _text(content, f"{where}: the content of a message of '{key}'")


def _text(value: object, what: str) -> str:
    if not isinstance(value, str) or not value or not is_unicode(value):
        raise UserError(f"{what} must be a text of Unicode that is not empty, got {short(value)}")
    return value


def _filled(template: str, question: str, fields: Fields, where: str) -> str:
    """Fill the places of a template: `{question}`, the prompt, and `{column}`. Other braces stay.

    Raises UserError where a name in braces is nearly that of a column, or none is a column's.
    """
    known = ["question", *map(str, fields)]
    names = _PLACE.findall(template)
    for name in names:
        first = name.partition(".")[0]
        near = [] if first in known else get_close_matches(first, known, n=1, cutoff=0.75)
        if near:
            raise UserError(f"{where}: no column '{first}' (data.template); is it '{near[0]}'?")
    if not any(name.partition(".")[0] in known for name in names):
        raise UserError(
            f"{where}: data.template has no column in it, so that all prompts are the same; put {{question}} where the "
            f"prompt goes; columns: {_names(fields)}"
        )

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name == "question":
            return question
        if name.partition(".")[0] not in fields:
            return match[0]
        return str(_column(fields, name, "data.template", where))

    return _PLACE.sub(value, template)


def _column(fields: Fields, key: str, option: str, where: str) -> object:
    """Return a column's value; `a.b` leads into an object. Raises UserError, with near names, where there is none."""
    if key in fields:
        return fields[key]
    value: object = fields
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            usual = [name for name in ANSWERS if option == "data.answer_key" and _has(fields, name)]
            near = usual or get_close_matches(key, map(str, fields), n=1, cutoff=0.6)
            hint = f"is it '{near[0]}'? " if near else ""
            raise UserError(f"{where}: no column '{key}' ({option}); {hint}its columns: {_names(fields)}")
        value = value[part]
    return value


def _usual(fields: Fields, names: Sequence[str], option: str, where: str) -> str | None:
    """Return the one of the usual names that a row has a value under, None for none. Raises UserError for several."""
    found = [name for name in names if _has(fields, name)]
    if len(found) > 1:
        raise UserError(f"{where}: {' and '.join(found)} may be meant; name one of them as {option}")
    return found[0] if found else None


def _has(fields: Fields, key: str) -> bool:
    value: object = fields
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return False
        value = value[part]
    return value is not None


def _names(fields: Fields) -> str:
    return ", ".join(map(str, fields)) or "none"
