"""`megasharp data decontaminate`: training problems that are evaluated on too."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from megasharp.config.paths import find
from megasharp.data.overlap import Overlap, OverlapIndex
from megasharp.data.sets.base import DataSet, LeftOut
from megasharp.data.sets.load import Row, parts_of, set_named, walk
from megasharp.errors import UserError
from megasharp.evals.suites import load_suite
from megasharp.files import completed

Say = Callable[[str], None]


def decontaminate(name: str, path: Path | None, suites: Sequence[str], n: int, out: Path | None, say: Say) -> bool:
    """Say which problems of a set overlap with which of the suites'; with `out`, write the rows of all others there.

    `out` is a JSONL file of rows as they were, or for a set of several tables a folder of such files, and so a `path`
    of the same set. It appears when it is complete. Returns whether there was an overlap.
    """
    if not suites:
        raise UserError("--against: name at least one suite, such as math500,aime24")
    chosen = set_named(name)
    local = find(str(path)) if path else None
    index = OverlapIndex(n)
    sizes = Counter[str]()
    for suite in suites:
        loaded = load_suite(suite)
        index.add(loaded.name, loaded.items)
        sizes[loaded.name] = len(loaded.items)
    tally = _Tally()
    with ExitStack() as stack:
        keep = _writer(chosen, local, out, stack)
        for row in walk(chosen, local):
            if isinstance(row.found, LeftOut):
                continue
            found = index.overlaps(row.found.question)
            for overlap in found:
                say(f"{row.name}: {overlap.problem}, {overlap.runs} shared, as: {overlap.words}")
            tally.add(found)
            if not found:
                keep(row)
    for line in tally.lines(name, sizes, out):
        say(line)
    return tally.hit > 0


class _Tally:
    """How many problems overlap, on both sides."""

    def __init__(self) -> None:
        self.read = self.hit = 0
        self._theirs: dict[str, set[str]] = {}
        self._ours: Counter[str] = Counter()

    def add(self, found: Sequence[Overlap]) -> None:
        self.read += 1
        self.hit += bool(found)
        self._ours.update({overlap.suite for overlap in found})
        for overlap in found:
            self._theirs.setdefault(overlap.suite, set()).add(overlap.problem)

    def lines(self, name: str, sizes: Counter[str], out: Path | None) -> Iterator[str]:
        for suite, size in sizes.items():
            yield (
                f"{suite}: {len(self._theirs.get(suite, ()))} of {size} problems overlap with {self._ours[suite]} of "
                f"{self.read} problems of {name}"
            )
        yield f"{self.hit} of {self.read} problems of {name} overlap" + (
            f"; the other {self.read - self.hit} are in {out}" if out else ""
        )


def _writer(chosen: DataSet, path: Path | None, out: Path | None, stack: ExitStack) -> Callable[[Row], None]:
    """What writes a row to its table's file; the files are there once all rows are."""
    if out is None:
        return lambda row: None
    parts = parts_of(chosen, path)
    if len(parts) > 1 and out.suffix:
        raise UserError(f"--out {out}: {chosen.name} has {len(parts)} tables; name a folder")
    if len(parts) == 1 and out.suffix != ".jsonl":
        raise UserError(f"--out {out}: name a file that ends in .jsonl")
    places = {part.source.name: out if len(parts) == 1 else out / f"{part.source.name}.jsonl" for part in parts}
    for place in places.values():
        if place.exists():
            raise UserError(f"--out {place}: there is such a file already; name another or remove it")
    partial = {name: stack.enter_context(completed(place)) for name, place in places.items()}
    files = {name: stack.enter_context(place.open("wb")) for name, place in partial.items()}

    def write(row: Row) -> None:
        files[row.part.source.name].write(json.dumps(row.fields, default=str).encode() + b"\n")

    return write
