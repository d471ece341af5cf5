"""Training problems that share a run of words with an evaluated problem: `megasharp data decontaminate`.

As in GPT-3 (2005.14165, appendix C): texts are in lower case, without punctuation, split into words; two overlap where
they share `n` words in a row, 13 by default. A problem of fewer words than that overlaps with a text that is the same
as a whole. Questions are compared, not prompts, whose words are the same in all of them. A problem that was reworded,
translated, or given other numbers is not found; one that shares a stock phrase is ("where m and n are relatively prime
positive integers"), with few shared runs.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from megasharp.common.errors import UserError
from megasharp.common.exit_codes import Say
from megasharp.common.files import completed
from megasharp.config.core import find
from megasharp.evals.suites import load_suite
from megasharp.tasks.judge import TaskItem
from megasharp.tasks.sets.data_set import DataSet, LeftOut
from megasharp.tasks.sets.load import Row, parts_of, set_named, walk

WORDS = 13
_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class Overlap:
    """A problem that a text overlaps with: its suite and id, how many runs they share, and the first of them.

    Example: `Overlap("math500", "math500/test/algebra/1.json", 4, "the sum of the first twelve ...")`.
    """

    suite: str
    problem: str
    runs: int
    words: str


def words_of(text: str) -> list[str]:
    r"""Return the words to compare. Example: `words_of(r"What is $\frac{1}{2}$?")` is `what is frac 1 2`, split."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).lower())


def runs_of(words: Sequence[str], n: int) -> Iterator[str]:
    """Yield every `n` words in a row; the whole, marked as such, where there are fewer."""
    if len(words) < n:
        yield f"={' '.join(words)}"
    for start in range(len(words) - n + 1):
        yield " ".join(words[start : start + n])


class OverlapIndex:
    """The runs of words of all problems that are evaluated; texts are looked up one at a time."""

    def __init__(self, n: int = WORDS) -> None:
        """Without any problem. Two problems overlap where they share `n` words in a row."""
        self._n = n
        self._problems: list[tuple[str, str]] = []
        self._holders: dict[str, list[int]] = defaultdict(list)

    def add(self, suite: str, items: Sequence[TaskItem]) -> None:
        """Index a suite's problems."""
        for item in items:
            number = len(self._problems)
            self._problems.append((suite, item.id))
            for run in set(runs_of(words_of(item.question or item.text), self._n)):
                self._holders[run].append(number)

    def overlaps(self, text: str) -> list[Overlap]:
        """Return the problems that a text overlaps with, in the order in which they were added."""
        counts: Counter[int] = Counter()
        first: dict[int, str] = {}
        for run in dict.fromkeys(runs_of(words_of(text), self._n)):
            for number in self._holders.get(run, ()):
                counts[number] += 1
                first.setdefault(number, run.removeprefix("="))
        return [Overlap(*self._problems[number], counts[number], first[number]) for number in sorted(counts)]


def decontaminate(name: str, path: Path | None, suites: Sequence[str], n: int, out: Path | None, say: Say) -> bool:
    """Say which problems of a set overlap with which of the suites'; with `out`, write the rows of all others there.

    `out` is a JSONL file of rows as they were, or for a set of several tables a folder of such files, and so a `path`
    of the same set. It appears when it is complete. Returns True where a problem overlaps. Raises UserError for an
    unknown name, and an `out` that exists or does not suit the set.
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
    """Counts of overlapping problems, on both sides."""

    def __init__(self) -> None:
        self.read = self.hit = 0
        self._theirs: dict[str, set[str]] = {}
        self._ours: Counter[str] = Counter()

    def add(self, found: Sequence[Overlap]) -> None:
        """Count one problem that was read and the overlaps that were found for it, none included."""
        self.read += 1
        self.hit += bool(found)
        self._ours.update({overlap.suite for overlap in found})
        for overlap in found:
            self._theirs.setdefault(overlap.suite, set()).add(overlap.problem)

    def lines(self, name: str, sizes: Counter[str], out: Path | None) -> Iterator[str]:
        """Yield a line for each suite of `sizes` (problems by suite), then one for all of the data set `name`."""
        for suite, size in sizes.items():
            yield (
                f"{suite}: {len(self._theirs.get(suite, ()))} of {size} problems overlap with {self._ours[suite]} of "
                f"{self.read} problems of {name}"
            )
        yield f"{self.hit} of {self.read} problems of {name} overlap" + (
            f"; the other {self.read - self.hit} are in {out}" if out else ""
        )


def _writer(chosen: DataSet, path: Path | None, out: Path | None, stack: ExitStack) -> Callable[[Row], None]:
    """Return a function that writes a row to its table's file; the files appear when `stack` closes."""
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
