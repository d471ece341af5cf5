"""Names that other trainers have for our keys, from the tables in `other_trainers`; and the hint for an unknown key.

Facts carry over from public configurations, and nothing else: a name of theirs, the name here, or why there is none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

TABLES = Path(__file__).parent / "other_trainers"
# In the order in which a hint and the manual name them; `general` has words that are no trainer's.
NAMES = ("trl", "verl", "nemo_rl", "slime", "general")
# A hint with more answers than this would be none.
_MOST = 3


@dataclass(frozen=True)
class Row:
    """A key of another trainer: its name, ours (empty: no counterpart), and what differs or why there is none.

    `values` has ours for theirs where both name things, `refused` why a value has none, and `same` is the value at
    which a key without a counterpart asks for nothing. A `needless` key never does: the run is the same.

    Example: `Row("TRL", "beta", ("recipe.kl.coefficient",), "with kl in recipe.methods")`.
    """

    trainer: str
    theirs: str
    ours: tuple[str, ...]
    text: str
    values: Mapping[str, str] = field(default_factory=dict, hash=False)
    refused: Mapping[str, str] = field(default_factory=dict, hash=False)
    same: Any = None
    needless: bool = False

    @property
    def last(self) -> str:
        """Name of the key in its own table."""
        return self.theirs.rpartition(".")[2]

    def covers(self, key: str) -> bool:
        """Return whether this row is about `key`: its own, or one below or above it where it has a `*` there."""
        start, star, end = self.theirs.partition("*")
        return key == self.theirs or (bool(star) and key.startswith(start) and key.endswith(end))


@cache
def rows(name: str) -> tuple[Row, ...]:
    """Return the rows of the table `name`, one of NAMES: first those with a counterpart."""
    table = read_table(name)
    trainer = table["trainer"]
    called = []
    for theirs, said in table["called"].items():
        if isinstance(said, dict):
            values, text = said["values"], said.get("text", "")
            told = "; ".join(filter(None, (_in_words(values), text)))
            ours = tuple(said["here"].split(", "))
            called.append(Row(trainer, spelled(theirs), ours, told, values, said.get("refused", {})))
        else:
            here, _, text = said.partition(" | ")
            called.append(Row(trainer, spelled(theirs), tuple(here.split(", ")), text))
    rest = []
    for kind in ("without", "needless"):
        for why, keys in table.get(kind, {}).items():
            for key, equals, value in (key.partition("=") for key in keys):
                same = yaml.safe_load(value) if equals else None
                rest.append(Row(trainer, spelled(key), (), why, same=same, needless=kind == "needless"))
    return (*called, *rest)


@cache
def read_table(name: str) -> Mapping[str, Any]:
    """Return the table `name` as its file has it."""
    table: Mapping[str, Any] = yaml.safe_load((TABLES / f"{name}.yaml").read_text(encoding="utf-8"))
    return table


def _in_words(values: Mapping[str, str]) -> str:
    """Return values in a sentence. Example: "grpo, rloo; gae, ppo are mine"."""
    theirs: dict[str, list[str]] = {}
    for their, our in values.items():
        theirs.setdefault("" if their == our else our, []).append(their)
    said = []
    for our, names in theirs.items():
        verb = f" {'is' if len(names) == 1 else 'are'} {our}" if our else ""
        said.append(f"{', '.join(names)}{verb}")
    return "; ".join(said)


def spelled(key: str) -> str:
    """Return a key as the tables have it: command lines write dashes, and verl's a plus before a new key."""
    return key.lstrip("+-").replace("-", "_")


def other_name(key: str, value: Any, known: Collection[str]) -> str:
    """Return what to say of an unknown key of a run file: where it belongs, or what another trainer calls so.

    `known` are all keys of the file's schema. The answer goes on after "unknown key"; it is empty where nothing is
    known, and for files of other kinds.
    """
    if "recipe.methods" not in known:
        return ""
    key = spelled(key)
    last = key.rpartition(".")[2]
    everything = [row for name in NAMES for row in rows(name)]
    inside = [f"{key}.{spelled(path)}" for path in _paths(value)] if isinstance(value, dict) else [key]
    # A key with its tables is looked up whole; of a bare one the cases below ask first whether it is ours elsewhere.
    for path in inside if "." in inside[0] else ():
        same = _told(row for row in everything if row.covers(path) or row.theirs.endswith(f".{path}"))
        if same:
            return same
    # Without those of entries of a table that has the key itself, such as data.stages.max_response_tokens.
    places = [
        place
        for place in known
        if place.endswith(f".{last}") and f"{place.rpartition('.')[0].rpartition('.')[0]}.{last}" not in known
    ]
    flat = [row for row in everything if row.theirs == last]
    meant = [place for row in flat for place in row.ours if place in places] or places
    # A name that is ours too: the place of it that is meant, unless another trainer means another key by it.
    if 0 < len(meant) <= _MOST and not any(row.ours and not {*row.ours} & {*places} for row in flat):
        return f"; its full name is {' or '.join(meant)}"
    return _told(flat) or _told(row for row in everything if row.last == last)


def _paths(table: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from _paths(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _told(found: Iterable[Row]) -> str:
    """Return the answer that these rows give together; empty if they are none, or say too many different things."""
    found = list(found)
    called = [row for row in found if row.ours] or found
    answers = list(dict.fromkeys(row.ours or (row.text,) for row in called))
    if not 0 < len(answers) <= _MOST:
        return ""
    of = list(dict.fromkeys(f"{row.trainer}: {row.theirs}" for row in called if row.trainer))[:2]
    who = f" ({', '.join(of)})" if of else ""
    if not called[0].ours:
        return f", without a counterpart here{who}: {called[0].text}"
    ours = dict.fromkeys(" and ".join(answer) for answer in answers)
    text = f": {called[0].text}" if called[0].text and len(answers) == 1 else ""
    return f"; {called[0].last} is called {' or '.join(ours)} here{who}{text}"
