"""Counts of right and wrong verdicts on the labelled corpus, and the tables of `docs/explanation/verifier-errors.md`.

A verdict is positive where it earns the reward: TP and TN are those that agree with the label, FN a right response that
earns nothing, FP a wrong one that earns.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from verifier_corpus import FOLDER, GROUPS, CorpusItem

from megasharp.common.errors import UserError

PAGE = FOLDER.parents[1] / "docs" / "explanation" / "verifier-errors.md"
BEGIN, END = "<!-- tools/verifier_report.py -->", "<!-- end -->"
# What public graders said, an item a line: a sign for each grader of its task, in the order of the versions.
GRADERS_FILE = "graders.json"
SIGNS = {"correct": "+", "wrong": "-", "raised": "!", "hung": "?"}


@dataclass(slots=True)
class Tally:
    """Counts of verdicts; `failed` are those of a grader that raised or hung, each an FN or a TN too."""

    tp: int = 0
    fn: int = 0
    fp: int = 0
    tn: int = 0
    failed: int = 0

    def add(self, right: bool, earns: bool, failed: bool = False) -> None:
        """Count one verdict on a response that is `right` or not."""
        name = ("tp" if earns else "fn") if right else ("fp" if earns else "tn")
        setattr(self, name, getattr(self, name) + 1)
        self.failed += failed

    @property
    def items(self) -> int:
        """All verdicts."""
        return self.tp + self.fn + self.fp + self.tn

    def cells(self) -> list[str]:
        """Return the counts, precision and recall as a row's cells."""
        precision, recall = _share(self.tp, self.tp + self.fp), _share(self.tp, self.tp + self.fn)
        return [*(str(count) for count in (self.items, self.tp, self.fn, self.fp, self.tn)), precision, recall]


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.3f}" if whole else ""


def tallies(items: Iterable[CorpusItem], key: Callable[[CorpusItem], str]) -> dict[str, Tally]:
    """Count the recorded verdicts of our verifiers, by a key."""
    found: dict[str, Tally] = defaultdict(Tally)
    for item in items:
        found[key(item)].add(item.right, item.today == "correct")
    return found


def agreement(pairs: Sequence[tuple[bool, bool]]) -> tuple[float, float]:
    """Return the share of pairs of labels that agree, and Cohen's kappa (1960); 1 where no chance is left to agree by.

    Example: `agreement([(True, True), (False, False), (True, False), (False, False)])` is `(0.75, 0.5)`.
    """
    count = len(pairs)
    same = sum(first == second for first, second in pairs) / count
    first, second = (sum(pair[place] for pair in pairs) / count for place in (0, 1))
    chance = first * second + (1 - first) * (1 - second)
    return same, 1.0 if chance == 1 else (same - chance) / (1 - chance)


@dataclass(frozen=True, slots=True)
class Recorded:
    """Verdicts of public graders: by task the version of each grader, in order, and by item a text with a sign each."""

    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    verdicts: dict[str, str] = field(default_factory=dict)


def read_graders(folder: Path = FOLDER) -> Recorded:
    """Read the verdicts that were recorded last, or none without a file. Raises UserError for an unreadable one."""
    path = folder / GRADERS_FILE
    if not path.is_file():
        return Recorded()
    try:
        recorded = Recorded(**json.loads(path.read_text(encoding="utf-8")))
        count = {task: len(versions) for task, versions in recorded.versions.items()}
        wrong = [
            id
            for id, signs in recorded.verdicts.items()
            if len(signs) != count[id.rpartition("-")[0]] or not set(signs) <= set(SIGNS.values())
        ]
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise UserError(f"{path}: not the verdicts of public graders: {error!r}") from error
    if wrong:
        raise UserError(f"{path}: {wrong[0]}: not a sign for each grader")
    return recorded


def write_graders(recorded: Recorded, folder: Path = FOLDER) -> None:
    """Write verdicts, a line for each item."""
    text = json.dumps({"versions": recorded.versions, "verdicts": recorded.verdicts}, indent=1)
    (folder / GRADERS_FILE).write_text(f"{text}\n")


def tables(items: Sequence[CorpusItem], recorded: Recorded) -> str:
    """Return all tables as Markdown, of the recorded verdicts alone."""
    parts = [_verifiers(items), _groups(items)]
    parts += [_beside(task, items, recorded) for task in recorded.versions]
    if any(item.second for item in items):
        parts.append(_labelled_twice([item for item in items if item.second]))
    return "\n\n".join(parts)


def _table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"### {title}", "", f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


_COUNTS = ["items", "TP", "FN", "FP", "TN", "precision", "recall"]


def _verifiers(items: Sequence[CorpusItem]) -> str:
    found = tallies(items, lambda item: item.task)
    rows = [[f"`{task}`", *tally.cells()] for task, tally in sorted(found.items())]
    rows.append(["all", *tallies(items, lambda _: "all")["all"].cells()])
    return _table("Our verifiers", ["verifier", *_COUNTS], rows)


def _groups(items: Sequence[CorpusItem]) -> str:
    found = tallies(items, lambda item: f"{item.task} {item.group}")
    totals = tallies(items, lambda item: item.group)
    tasks = sorted({item.task for item in items})
    rows = [[f"`{task}`", *(_errors(found.get(f"{task} {group}")) for group in GROUPS)] for task in tasks]
    rows.append(["all", *(_errors(totals.get(group)) for group in GROUPS)])
    return _table("FN + FP / items, by what an item tries", ["verifier", *GROUPS], rows)


def _errors(tally: Tally | None) -> str:
    if tally is None:
        return ""
    return f"{tally.fn} + {tally.fp} / {tally.items}" if tally.fn or tally.fp else f"0 / {tally.items}"


def _beside(task: str, items: Sequence[CorpusItem], recorded: Recorded) -> str:
    """Return a task's public graders beside our verifier: their counts, then their errors by group."""
    of_task = [item for item in items if item.task == task]
    judged = [item for item in of_task if item.id in recorded.verdicts]
    columns = {
        "**`megasharp`**": [(item, SIGNS["correct" if item.today == "correct" else "wrong"]) for item in of_task]
    }
    for place, (name, version) in enumerate(recorded.versions[task].items()):
        columns[f"`{name}` {version}"] = [(item, recorded.verdicts[item.id][place]) for item in judged]
    counts = [[name, *_of_signs(said).cells(), str(_of_signs(said).failed)] for name, said in columns.items()]
    groups = [group for group in GROUPS if any(item.group == group for item in of_task)]
    errors = [
        [name, *(_errors(_of_signs([(item, sign) for item, sign in said if item.group == group])) for group in groups)]
        for name, said in columns.items()
    ]
    first = _table(f"`{task}` beside public graders", ["grader", *_COUNTS, "raised or hung"], counts)
    if len(groups) < len(GROUPS):
        return first
    return f"{first}\n\n{_table(f'`{task}` beside public graders, FN + FP / items', ['grader', *groups], errors)}"


def _of_signs(said: Iterable[tuple[CorpusItem, str]]) -> Tally:
    tally = Tally()
    for item, sign in said:
        tally.add(item.right, sign == SIGNS["correct"], sign in (SIGNS["raised"], SIGNS["hung"]))
    return tally


def _labelled_twice(items: Sequence[CorpusItem]) -> str:
    by_task: Mapping[str, list[tuple[bool, bool]]] = defaultdict(list)
    for item in items:
        by_task[item.task].append((item.right, item.second == "correct"))
    rows = [[f"`{task}`", *_agreed(pairs)] for task, pairs in sorted(by_task.items())]
    rows.append(["all", *_agreed([pair for pairs in by_task.values() for pair in pairs])])
    return _table("Items labelled twice", ["verifier", "items", "labels agree", "Cohen's kappa"], rows)


def _agreed(pairs: Sequence[tuple[bool, bool]]) -> list[str]:
    same, kappa = agreement(pairs)
    return [str(len(pairs)), f"{same:.1%}", f"{kappa:.2f}"]


def on_page(page: str, text: str, begin: str = BEGIN) -> str:
    """Return a Markdown page with the tables between its two marks; UserError where they are missing."""
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(END)}", re.DOTALL)
    if not pattern.search(page):
        raise UserError(f"the page has no lines {begin} and {END}")
    return pattern.sub(lambda _: f"{begin}\n\n{text}\n\n{END}", page)
