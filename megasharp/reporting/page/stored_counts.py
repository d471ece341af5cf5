"""Stored samples counted by problem and judgement, from their short columns alone; no text is read for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from megasharp.common.errors import UserError
from megasharp.common.records import Outcome
from megasharp.evals.rejudge import same_samples
from megasharp.evals.stored_samples import (
    SamplesInfo,
    count_samples,
    journals,
    parts,
    read_columns,
    samples_info,
    suites_with_samples,
)
from megasharp.reporting.page.records import Judgement

# `StoredSample.key`.
Key = tuple[int, bool, int]
_COLUMNS = ("problem", "number", "greedy", "index", "seed", "tokens", "outcome")
# States of a verdict; a failure of the machine counts as no verdict.
_NONE, _WRONG, _CORRECT = -1, 0, 1
_STATES = {Outcome.CORRECT: _CORRECT, Outcome.INFRA: _NONE}
_AGAIN = "rejudged"
_Numbers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True, eq=False)
class _Table:
    """A judgement of all samples in a folder, in their order. `numbers` are the problems' places, ascending.

    `keys` sort as `StoredSample.key` does; `drawn` are seed and tokens, [2, samples], by which samples are known again.
    """

    info: SamplesInfo | None
    numbers: dict[str, int]
    number: _Numbers
    sampled: _Numbers
    keys: _Numbers
    drawn: _Numbers
    state: _Numbers


@lru_cache(maxsize=64)
def _table(folder: Path, suite: str, stamps: tuple[tuple[str, int, int], ...]) -> _Table:
    """Read the short columns of a suite as its files (`stamps`) are by now; a served page reads each once."""
    table = read_columns(folder, suite, _COLUMNS)
    number, index, seed, tokens = (
        table[name].to_numpy().astype(np.int64) for name in ("number", "index", "seed", "tokens")
    )
    sampled = 1 - table["greedy"].to_numpy().astype(np.int64)
    outcomes = table["outcome"].combine_chunks().dictionary_encode()
    names = map(Outcome, outcomes.dictionary.to_pylist())
    by_name = np.array([_STATES.get(name, _WRONG) for name in names], np.int64)
    state = by_name[outcomes.indices.to_numpy()] if len(number) else number
    unique, first = np.unique(number, return_index=True)
    numbers = dict(zip(table["problem"].take(first).to_pylist(), unique.tolist(), strict=True))
    keys = (number << 33) | (sampled << 32) | index
    return _Table(samples_info(folder, suite), numbers, number, sampled, keys, np.stack((seed, tokens)), state)


def _stamps(folder: Path, suite: str) -> Iterator[tuple[str, int, int]]:
    for path in (*parts(folder, suite), *journals(folder, suite)):
        # A journal becomes a part meanwhile.
        with suppress(FileNotFoundError):
            stat = path.stat()
            yield str(path), stat.st_mtime_ns, stat.st_size


@dataclass(frozen=True, slots=True)
class Source:
    """A folder of results, the model that they are of, and the suites that count; `run` is -1 for a model of no run."""

    run: int
    step: int
    name: str
    folder: Path
    suites: Sequence[str]

    def judgements(self, suite: str) -> Iterator[tuple[str, Path]]:
        """Yield a name and a folder for each judgement of a suite's samples, the first one first."""
        root = self.folder
        if root.name.startswith(_AGAIN) and suite in suites_with_samples(root.parent):
            root = root.parent
        again = sorted(root.glob(f"{_AGAIN}*"), key=lambda path: (len(path.name), path.name))
        yield root.name if root.name.startswith(_AGAIN) else "first judgement", root
        yield from ((path.name, path) for path in again if suite in suites_with_samples(path))


@dataclass(slots=True, eq=False)
class Counted:
    """A set of samples and its judgements; `states` has a row for each judgement, for the samples of the first one."""

    run: int
    step: int
    name: str
    table: _Table
    names: list[str] = field(default_factory=list)
    folders: list[Path] = field(default_factory=list)
    states: list[_Numbers] = field(default_factory=list)

    def add(self, name: str, folder: Path, table: _Table) -> bool:
        """Add a judgement if it is of these samples, or of some of them; return whether it is."""
        at = np.searchsorted(self.table.keys, table.keys)
        if not same_samples(self.table.info, table.info) or (at >= self.size).any():
            return False
        if (self.table.keys[at] != table.keys).any() or (self.table.drawn[:, at] != table.drawn).any():
            return False
        state = np.full(self.size, _NONE, np.int64)
        state[at] = table.state
        self.names.append(name if name not in self.names else str(folder))
        self.folders.append(folder)
        self.states.append(state)
        return True

    @property
    def ids(self) -> Sequence[str]:
        """The problems, in the suite's order."""
        return list(self.table.numbers)

    @property
    def size(self) -> int:
        """The number of samples."""
        return len(self.table.keys)

    def of_problem(self, problem: str) -> list[list[int]]:
        """Return [samples, correct] of a problem by each judgement, greedy ones only where there are no others."""
        rows = self._rows(problem)
        drawn = rows[self.table.sampled[rows] == 1]
        chosen = drawn if len(drawn) else rows
        return [[*_counts(state[chosen])] for state in self.states]

    def rate(self, problem: str) -> float | None:
        """Return the share of correct samples by the last judgement; None for a problem without samples."""
        samples, correct = self.of_problem(problem)[-1]
        return correct / samples if samples else None

    def flips(self, problem: str) -> int:
        """Return how many samples some judgement calls otherwise than the first."""
        return int(self._flipped(self._rows(problem)).sum())

    def chosen(self, problem: str, most: int) -> list[Key]:
        """Choose samples: the greedy one, those that flip, then correct and other ones in turn."""
        rows = self._rows(problem)
        flipped, state, sampled = self._flipped(rows), self.states[-1][rows], self.table.sampled[rows]
        right = state == _CORRECT
        turn = np.where(right, np.cumsum(right), np.cumsum(~right))
        order = np.lexsort((~right, turn, ~flipped, sampled))
        return [
            (key >> 33, bool(key >> 32 & 1), key & 0xFFFFFFFF) for key in self.table.keys[rows[order[:most]]].tolist()
        ]

    def judgements(self) -> list[Judgement]:
        """Count all samples by judgement."""
        first, drawn = self.states[0], self.table.sampled == 1
        made = []
        for name, state in zip(self.names, self.states, strict=True):
            both = (first != _NONE) & (state != _NONE)
            gained, lost = (int((both & (one > other)).sum()) for one, other in ((state, first), (first, state)))
            made.append(Judgement(name, *_counts(state[drawn]), *_counts(state[~drawn]), gained, lost))
        return made

    def _rows(self, problem: str) -> _Numbers:
        number = self.table.numbers.get(problem)
        if number is None:
            return np.zeros(0, np.int64)
        return np.arange(*np.searchsorted(self.table.number, (number, number + 1)))

    def _flipped(self, rows: _Numbers) -> np.ndarray[Any, np.dtype[np.bool_]]:
        first = self.states[0][rows]
        others = [state[rows] for state in self.states[1:]]
        differ = [(state != first) & (state != _NONE) & (first != _NONE) for state in others]
        return np.any(differ, axis=0) if differ else np.zeros(len(rows), dtype=bool)


def _counts(state: _Numbers) -> tuple[int, int]:
    """Return how many samples are judged, and how many of them correct."""
    return int((state != _NONE).sum()), int((state == _CORRECT).sum())


def gather(suite: str, sources: Sequence[Source]) -> tuple[list[Counted], list[str]]:
    """Count the judgements of a suite, by set of samples; return a line for each folder that cannot be read."""
    sets: list[Counted] = []
    unread: list[str] = []
    seen: set[Path] = set()
    for source in sources:
        for name, folder in source.judgements(suite):
            if folder.resolve() in seen:
                continue
            seen.add(folder.resolve())
            try:
                table = _table(folder, suite, tuple(_stamps(folder, suite)))
            except UserError as error:
                unread.append(str(error))
                continue
            label = name if folder != source.folder else folder.name
            if table.numbers and not any(one.add(label, folder, table) for one in sets):
                taken = [one.name for one in sets]
                called = source.name if source.name not in taken else f"{source.name} ({folder})"
                new = Counted(source.run, source.step, called, table)
                new.add(name, folder, table)
                sets.append(new)
    return sets, unread


def count_left_out(suite: str, sources: Sequence[Source]) -> tuple[dict[Path, int], list[str]]:
    """Count a suite's samples in each folder, without its judgements; return a line for each that cannot be read."""
    counted: dict[Path, int] = {}
    unread: list[str] = []
    for source in sources:
        try:
            counted[source.folder] = count_samples(source.folder, suite)
        except UserError as error:
            unread.append(str(error))
    return counted, unread
