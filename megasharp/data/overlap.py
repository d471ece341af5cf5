"""Which training problems share a run of words with a problem that is evaluated.

As GPT-3 has it (2005.14165, appendix C): texts in lower case, without punctuation, split into words; two overlap where
they share `n` words in a row, 13 by default. A problem of fewer words than that overlaps with what is the same as a
whole. Questions are compared, not prompts, whose words are the same in all of them. What is reworded, translated, or
has other numbers in it is not found; what shares a stock phrase is ("where m and n are relatively prime positive
integers"), and shares few runs.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megasharp.data.tasks import TaskItem

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
    r"""The words that are compared. Example: `words_of(r"What is $\frac{1}{2}$?")` is `what is frac 1 2`, split."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).lower())


def runs_of(words: Sequence[str], n: int) -> Iterator[str]:
    """Every `n` words in a row; the whole, marked as such, where there are fewer."""
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
        """The problems that a text overlaps with, in the order in which they were added."""
        counts: Counter[int] = Counter()
        first: dict[int, str] = {}
        for run in dict.fromkeys(runs_of(words_of(text), self._n)):
            for number in self._holders.get(run, ()):
                counts[number] += 1
                first.setdefault(number, run.removeprefix("="))
        return [Overlap(*self._problems[number], counts[number], first[number]) for number in sorted(counts)]
