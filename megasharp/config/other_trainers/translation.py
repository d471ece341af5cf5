"""A run file made of another trainer's configuration: values that carry over, and a reason for each that does not.

The tables beside this file say what a key is called here. What is not one key for one is in `from_trl` and `from_verl`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, reduce
from pathlib import Path
from typing import Any

from megasharp.common.errors import UserError
from megasharp.config.core import Tree, dump_tree, merge, nested, validate
from megasharp.config.other_trainers.configurations import Written
from megasharp.config.run_config import RunConfig
from megasharp.config.schema_keys import described_keys
from megasharp.config.synonyms import Row, read_table, rows

# Required keys that a configuration may lack, with placeholders for the check of the other keys; never printed.
_TO_FILL_IN = {"steps": 1, "model.path": "MODEL", "data.path": "ROWS.jsonl"}
# Values by which a key without a counterpart asks for nothing.
_NOTHING: tuple[Any, ...] = (None, False, "", 0, [], {})
# Steps between checkpoints of which only the one after the last step is written.
NEVER = 1_000_000


class Translation:
    """One configuration on its way: `ours` grows by dotted keys, `left` by theirs that have no place, with reasons."""

    def __init__(self, name: str, written: Written) -> None:
        table = read_table(name)
        self.trainer = f"{table['trainer']} {table['version']}"
        self._rows = rows(name)
        self._defaults: Mapping[str, Any] = table["defaults"]
        self._given = written.given
        self._taken: set[str] = set()
        self._carried: set[str] = set()
        self._latest = ""
        self.ours: dict[str, Any] = {}
        self.left = {key: ("", reason) for key, reason in written.unread.items()}
        self.needless: dict[str, str] = {}
        self.to_fill_in: dict[str, str] = {}
        self.notes = list(written.notes)

    def take(self, key: str) -> Any:
        """Return the value of a key of theirs, its default where it is not set; it is dealt with by that."""
        self._taken.add(key)
        self._latest = key
        return self._given.get(key, self._defaults.get(key))

    def first(self, *keys: str) -> Any:
        """Return the first value that is set, of several names of one key; all are dealt with."""
        values = [self.take(key) for key in keys]
        return next((value for value in values if value is not None), None)

    def given(self, key: str) -> bool:
        """Return whether the configuration sets a key."""
        return key in self._given

    def named(self, key: str) -> Any:
        """Return our name of a value that both have names for; None, and a reason, where it has no counterpart."""
        value, row = self.take(key), self._row(key)
        assert row is not None
        return None if value is None else self._value(key, value, row)

    def below(self, key: str) -> dict[str, Any]:
        """Return what the configuration sets below a key of theirs, by the names there."""
        found = {each: self.take(each) for each in [*self._given] if each.startswith(f"{key}.")}
        self._carried |= found.keys()
        return {each.removeprefix(f"{key}."): value for each, value in found.items() if value is not None}

    def leave(self, key: str, reason: str) -> None:
        """Say why a key that the configuration sets does not carry over."""
        self._taken.add(key)
        if key in self._given:
            text = " ".join(str(self._given[key]).split())
            self.left[key] = (text if len(text) <= 60 else f"{text[:57]}...", reason)

    def without_use(self, reason: str, *keys: str) -> None:
        """Say why keys that are set change nothing."""
        for key in keys:
            if key in self._given and key not in self._taken:
                self.needless[key] = reason
            self._taken.add(key)

    def whole(self, key: str, value: float, by: float, what: str) -> int:
        """Return `value / by` as a whole number of at least 1; says so where it is rounded."""
        exact = value / by
        found = max(1, round(exact))
        if found != exact:
            self.notes.append(f"{what}: {exact:g} is made {found}, of {key}")
        return found

    def rest(self) -> None:
        """Deal with all keys that nothing has taken, by their rows of the table."""
        for key in [key for key in dict.fromkeys((*self._given, *self._defaults)) if key not in self._taken]:
            row, given = self._row(key), key in self._given
            value = self.take(key)
            if row is None:
                self.leave(key, f"no key of {self.trainer} that is known here")
            elif row.needless:
                self.needless |= {key: row.text} if given else {}
            elif not row.ours:
                if value != row.same and not (row.same is None and value in _NOTHING):
                    self.leave(key, row.text)
                elif given:
                    self.needless[key] = "its value asks for nothing"
            elif value is not None and row.ours[0] not in self.ours:
                found = self._value(key, value, row)
                self.ours |= {row.ours[0]: found} if found is not None else {}
            elif given:
                self.needless[key] = "null" if value is None else f"{row.ours[0]} is set by another key"

    def made(self, where: str, parts: Sequence[Callable[[Translation], None]]) -> str:
        """Return the run file that these parts and the table make. Raises UserError for a value that is none."""
        if not any(self._row(key) for key in (*self._given, *self.left)):
            raise UserError(f"{where}: no key of {self.trainer} in it")
        try:
            for part in parts:
                part(self)
            self.rest()
        except (ValueError, TypeError) as error:
            value = self._given.get(self._latest)
            raise UserError(f"{where}: {self._latest}: {value!r} is not of the kind that it takes") from error
        return self.text(where)

    def text(self, where: str) -> str:
        """Return the run file, valid by its schema, with what does not carry over in comments below it."""
        for key in self._given:
            row = self._row(key)
            there = row is not None and any(
                f"{path}.".startswith(f"{ours}.") for ours in row.ours for path in self.ours
            )
            if not there and key not in self.left and key not in self._carried:
                asked = row is not None and any(path.startswith(ours) for ours in row.ours for path in self.to_fill_in)
                self.needless.setdefault(key, "see what is to fill in" if asked else "off, by itself or by other keys")
        self.ours.setdefault("name", run_name(Path(where).stem))
        lacking = _TO_FILL_IN.keys() - self.ours.keys() - ({"data.path"} if "data.mix" in self.ours else set())

        def made_of(ours: str) -> str:
            theirs = [key for key in self._given if (row := self._row(key)) is not None and ours in row.ours]
            return f"made of {', '.join(theirs)}" if theirs else ""

        tree = _tree(self.ours | {key: _TO_FILL_IN[key] for key in lacking})
        validate(RunConfig, tree, where, made_of=made_of)
        for key in sorted(lacking):
            self.to_fill_in.setdefault(key, f"{where} does not say it")
        lines = [f"# {where}, of {self.trainer}, as a run of megasharp.", dump_tree(_tree(self.ours)).rstrip()]
        for title, found in (
            ("To fill in or to check", self.to_fill_in),
            ("Not carried over", {key: f"{value}: {why}".lstrip(": ") for key, (value, why) in self.left.items()}),
            ("Without a counterpart, and without need of one", self.needless),
            ("Notes", {str(number): note for number, note in enumerate(self.notes, 1)}),
        ):
            lines += ["", f"# {title}:", *(f"#   {key}: {text}" for key, text in found.items())] if found else []
        return "\n".join(lines)

    def _row(self, key: str) -> Row | None:
        """Return the row about a key: its own, one of all keys like it, or that of the table that it is in."""
        exact = (row for row in self._rows if row.theirs == key)
        like = (row for row in self._rows if row.covers(key))
        above = (row for row in self._rows if not row.ours and key.startswith(f"{row.theirs}."))
        return next(exact, None) or next(like, None) or next(above, None)

    def _value(self, key: str, value: Any, row: Row) -> Any:
        if not row.values and not row.refused:
            return value
        if isinstance(value, list):
            each = [self._value(key, part, row) for part in value]
            return list(dict.fromkeys(part for part in each if part is not None))
        name = str(value).lower() if isinstance(value, bool) else str(value)
        if name not in row.values:
            self.leave(key, row.refused.get(name, f"known here are {', '.join(row.values)}"))
            return None
        return row.values[name]


def _tree(values: Mapping[str, Any]) -> Tree:
    """Return a tree of dotted keys, its tables in the order of the schema."""
    order = _order()
    in_order = sorted(values.items(), key=lambda item: order[item[0]])
    return reduce(merge, (nested(path, value) for path, value in in_order), {})


@cache
def _order() -> Mapping[str, int]:
    return {key: number for number, (key, _) in enumerate(described_keys(RunConfig))}


def run_name(text: str) -> str:
    """Return what a run may be called after a name or folder of theirs. Example: "out/My run" gives "My_run"."""
    return re.sub(r"[^A-Za-z0-9._+-]+", "_", str(text).rstrip("/").rpartition("/")[2]).lstrip("._+-") or "mine"


def listed(value: Any) -> list[Any]:
    """Return a list as it is, nothing as an empty one, and anything else as the only entry of one."""
    return value if isinstance(value, list) else [] if value is None else [value]


def ks(samples: int) -> list[int]:
    """Return the k of pass@k that so many samples a problem give."""
    return [k for k in (1, 4, 16, 64, 256, 1024) if k <= samples]


# Maps of ours that are several of theirs, whose own names for the whole begin with linear_.
_PARTS = {"qkv": ("q_proj", "k_proj", "v_proj"), "fc1": ("gate_proj", "up_proj")}


def adapted_maps(t: Translation, key: str) -> None:
    """Translate the names of the linear maps that get adapters; says which get some that theirs does not name."""
    asked = listed(t.take(key))
    if not asked or "all-linear" in asked:
        return
    found = listed(t.named(key))
    if not found:
        t.to_fill_in["policy.lora.targets"] = f"{key} names no map that gets adapters here; without it all four do"
        return
    t.ours["policy.lora.targets"] = found
    for ours, parts in _PARTS.items():
        more = [part for part in parts if part not in asked]
        if ours in found and more and f"linear_{ours}" not in asked:
            too = " and ".join(more)
            t.notes.append(f"policy.lora.targets: {ours} is {', '.join(parts)}, so adapters are on {too} too")


def trackers(t: Translation, key: str, project: str, without: Sequence[str]) -> None:
    """Translate a list of trackers and their project.

    Those of `without` need no counterpart; "all" among them stands for all of ours.
    """
    asked, where = listed(t.take(key)), t.take(project)
    every = "all" in without and "all" in asked
    t.ours |= {f"log.{name}": where for name in ("wandb", "mlflow") if every or name in asked}
    other = [name for name in asked if name not in ("wandb", "mlflow", "tensorboard", *without)]
    if other:
        t.leave(key, f"of {', '.join(map(str, other))}: trackers are wandb, mlflow and tensorboard")
