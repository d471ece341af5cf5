"""A set's rows as problems: read, checked, counted, and put into a prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from megasharp.common.errors import UserError
from megasharp.common.exit_codes import note
from megasharp.tasks.data_fields import Fields, check_names, plain_columns
from megasharp.tasks.judge import TaskItem
from megasharp.tasks.prompts import Template, template_named
from megasharp.tasks.sets import SETS
from megasharp.tasks.sets.data_set import DataSet, LeftOut, Part, Problem
from megasharp.tasks.sets.row_sources import hub_rows, local_rows

_REPEATED = LeftOut("a question that was there before")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A set's problems, and how many rows were left out for which reason."""

    items: tuple[TaskItem, ...]
    left_out: Counter[str]


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a set: the table it is of, its problem's id (empty where it is left out), and what was found in it."""

    part: Part
    name: str
    fields: Fields
    found: Problem | LeftOut


def set_named(name: str) -> DataSet:
    """The set of that name. Raises UserError, with near names, where there is none."""
    if name not in SETS:
        near = " or ".join(get_close_matches(name, SETS, n=3, cutoff=0.5))
        raise UserError(f"set: no data set {name!r}; {f'did you mean {near}? ' if near else ''}see megasharp data list")
    return SETS[name]


def load_set(
    name: str, path: Path | None = None, prompt: str | None = None, say: Callable[[str], None] = note
) -> Loaded:
    """All problems of a set, from the hub, or from `path` with files in the set's own schema.

    The order is that of the rows, and ids do not depend on where the rows are from. `prompt` names another template
    than the set's. `say` gets a line where the number of problems is another than that on the hub, and where rows
    without ids are repeated: each is a problem with an id of its own.

    Raises UserError: no such set or template, rows that cannot be had, a missing or mistyped field (named, with its
    file and row), an id that appears twice, a part without a row, or no problem at all.
    """
    chosen = set_named(name)
    template = template_named(prompt or chosen.prompt)
    left_out: Counter[str] = Counter()
    items = list(_items(chosen, path, template, left_out))
    where = str(path or chosen.hub)
    if not items:
        reasons = ", ".join(f"{count} rows: {reason}" for reason, count in left_out.items()) or "there are no rows"
        raise UserError(f"{where}: no problem of {name} ({reasons})")
    check_names([item.id for item in items], path or Path(chosen.hub))
    expected = chosen.expected
    if expected is not None and abs(len(items) - expected) > chosen.tolerance * expected:
        say(f"{name}: {expected} problems are expected of {chosen.hub}, and {len(items)} were found in {where}")
    # Repeated questions stay: DeepScaleR, for one, has some, and the papers trained on them.
    repeated = len(items) - len({(item.text, item.turns) for item in items})
    if repeated:
        say(f"{name}: {repeated} of {len(items)} problems in {where} repeat the question of one before")
    return Loaded(tuple(items), left_out)


def walk(chosen: DataSet, path: Path | None) -> Iterator[Row]:
    """Every row of a set, read one by one and not kept. Raises UserError as `load_set` does, for each row."""
    parts = parts_of(chosen, path)
    seen: set[str] = set()
    for part in parts:
        prefix = chosen.name if len(parts) == 1 else f"{chosen.name}/{part.source.name}"
        for number, (fields, found) in enumerate(_found(part, path, alone=len(parts) == 1)):
            # DAPO-Math-17k holds each question about a hundred times.
            if chosen.repeats and isinstance(found, Problem):
                if found.question in seen:
                    yield Row(part, "", fields, _REPEATED)
                    continue
                seen.add(found.question)
            name = "" if isinstance(found, LeftOut) else f"{prefix}/{found.id or number}"
            yield Row(part, name, fields, found)


def _items(chosen: DataSet, path: Path | None, template: Template, left_out: Counter[str]) -> Iterator[TaskItem]:
    for row in walk(chosen, path):
        if isinstance(row.found, LeftOut):
            left_out[row.found.reason] += 1
            continue
        question = row.found.question
        source = path.name if path else row.part.source.hub
        text, turns = template.text_of(question), _turns(row.found, template)
        # Tests of programs, which their answers hold too, are megabytes.
        columns = None if chosen.task == "code" else plain_columns(row.fields)
        answer = row.found.answer.on_a_line(template.line)
        yield TaskItem(row.name, chosen.task, text, answer, source, turns, question, columns)


def _turns(problem: Problem, template: Template) -> tuple[tuple[str, str], ...]:
    """Return a problem's messages, of which its own system message counts. A template that is a text has none."""
    before, turns = problem.before, template.turns_of(problem.question)
    if not before or not turns:
        return turns
    return (*before, turns[-1]) if before[0][0] == "system" else (*turns[:-1], *before, turns[-1])


def parts_of(chosen: DataSet, path: Path | None) -> tuple[Part, ...]:
    """The set's parts; one, where a single file holds the rows of parts that are read the same way."""
    one_file = path is not None and path.is_file()
    alike = len({part.read for part in chosen.parts}) == 1
    return chosen.parts[:1] if one_file and alike else chosen.parts


def _found(part: Part, path: Path | None, alone: bool) -> Iterator[tuple[Fields, Problem | LeftOut]]:
    if path is None and not part.source.hub:
        raise UserError(f"path: the set {part.source.name} is for files of your own; name a file or folder")
    rows = hub_rows(part.source) if path is None else local_rows(path, part.source, alone)
    for where, fields in rows:
        yield fields, part.read(fields, where)
