"""A set's rows as problems: read, checked, counted, and put into a prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from megasharp.command import note
from megasharp.data.lines import check_names
from megasharp.data.prompts import Template, template_named
from megasharp.data.sets import SETS
from megasharp.data.sets.base import DataSet, LeftOut, Part, Problem
from megasharp.data.sets.hub import hub_rows
from megasharp.data.sets.local import local_rows
from megasharp.data.tasks import TaskItem
from megasharp.errors import UserError

_REPEATED = "a question that was there before"


@dataclass(frozen=True, slots=True)
class Loaded:
    """A set's problems, and how many rows were left out for which reason."""

    items: tuple[TaskItem, ...]
    left_out: Counter[str]


def set_named(name: str) -> DataSet:
    """The set of that name. Raises UserError, with near names, where there is none."""
    if name not in SETS:
        near = get_close_matches(name, SETS, n=3, cutoff=0.4) or sorted(SETS)
        raise UserError(f"set: no data set {name!r}; did you mean {' or '.join(near)}? see megasharp data list")
    return SETS[name]


def load_set(
    name: str, path: Path | None = None, prompt: str | None = None, say: Callable[[str], None] = note
) -> Loaded:
    """All problems of a set, from the hub, or from `path` with files in the set's own schema.

    The order is that of the rows, and ids do not depend on where the rows are from. `prompt` names another template
    than the set's. `say` is told where the hub holds another number of problems than is known.

    Raises UserError: no such set or template, rows that cannot be had, a missing or mistyped field (named, with its
    file and row), an id that appears twice, or no problem at all.
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
    if path is None and chosen.expected is not None:
        _check_count(chosen, len(items), say)
    return Loaded(tuple(items), left_out)


def _items(chosen: DataSet, path: Path | None, template: Template, left_out: Counter[str]) -> Iterator[TaskItem]:
    seen: set[str] = set()
    parts = _parts(chosen, path)
    for part in parts:
        source = path.name if path else part.source.hub
        prefix = chosen.name if len(parts) == 1 else f"{chosen.name}/{part.source.name}"
        for number, found in enumerate(_found(part, path, alone=len(parts) == 1)):
            if isinstance(found, LeftOut):
                left_out[found.reason] += 1
            elif chosen.repeats and found.question in seen:
                left_out[_REPEATED] += 1
            else:
                seen.update([found.question] if chosen.repeats else [])
                identity = f"{prefix}/{found.id or number}"
                text, turns = template.text_of(found.question), template.turns_of(found.question)
                yield TaskItem(identity, chosen.task, text, found.answer, source, turns)


def _parts(chosen: DataSet, path: Path | None) -> tuple[Part, ...]:
    """The set's parts; one, where a single file holds the rows of parts that are read the same way."""
    one_file = path is not None and path.is_file()
    alike = len({part.read for part in chosen.parts}) == 1
    return chosen.parts[:1] if one_file and alike else chosen.parts


def _found(part: Part, path: Path | None, alone: bool) -> Iterator[Problem | LeftOut]:
    if path is None and not part.source.hub:
        raise UserError(f"path: the set {part.source.name} is for files of your own; name a file or folder")
    rows = hub_rows(part.source) if path is None else local_rows(path, part.source, alone)
    for where, fields in rows:
        yield part.read(fields, where)


def _check_count(chosen: DataSet, found: int, say: Callable[[str], None]) -> None:
    expected = chosen.expected or 0
    if abs(found - expected) > chosen.tolerance * expected:
        say(f"{chosen.name}: {expected} problems are expected of {chosen.hub}, and {found} were found")
