"""The labelled corpus of `tests/corpus`: its items, the rules that they keep, and our verifiers' verdicts on them.

`tests/corpus/README.md` says what an item is and how its label is found.
"""

from __future__ import annotations

import dataclasses
import json
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import combinations
from pathlib import Path
from typing import Any

import yaml

from megasharp.common.errors import UserError
from megasharp.common.records import Verdict
from megasharp.tasks.final_answer import AnswerRule, FinalJudge
from megasharp.tasks.judge import DirectJudge, Item, TaskItem
from megasharp.tasks.sandbox.bubblewrap import open_sandbox
from megasharp.tasks.table import TASKS, load_items, make_verifiers

FOLDER = Path(__file__).resolve().parents[1] / "tests" / "corpus"
WANTED = ("correct", "wrong")
# Parts of the tables: what an item tries. In the order of the tables.
GROUPS = {
    "value": "plain right and wrong answers",
    "spelling": "another spelling of the same value, or one that only looks like it",
    "equation": "equations and chains",
    "collection": "lists, sets, pairs, intervals, matrices",
    "place": "where the answer stands: boxes, tags, sentences",
    "doubt": "hedges, several answers, answers taken back",
    "thinking": "thinking, and responses that were cut off",
    "nothing": "refusals, empty and copied responses, words to the verifier",
}
MOST_ALIKE = 3
LEAST_ADVERSARIAL = 1 / 3
CORRECT_SHARE = (0.35, 0.60)
# Items drawn to be labelled twice, and the least that have to be: the share of each task holds while files grow.
SECOND_LABELS = 250
LEAST_SECOND_LABELS = 200
# A response may differ from another by two words where it has so many words, and at most so many words and signs.
_WORDS_FOR_TWO = 8
_MOST_FOR_TWO = 40
# Seconds for all tests of a program: only what never ends needs them.
PROGRAM_S = 20.0


@dataclass(frozen=True, slots=True)
class CorpusItem:
    """A response to a problem, with the verdict that it should get.

    `wanted` and `second`, the label of a second reader who saw no first one, are of WANTED, or null. `today` is the
    outcome that our verifier gave when it was last recorded. Fields stand in this order in a line of a file.
    """

    id: str
    task: str
    group: str
    category: str
    template: str
    row: dict[str, Any]
    response: str
    finish: str
    thinks: bool
    wanted: str | None
    reason: str
    adversarial: bool
    named: bool
    today: str | None = None
    second: str | None = None

    @property
    def right(self) -> bool:
        """True where the response should earn the reward."""
        return self.wanted == "correct"


# Types of an item's fields that are no text.
_KINDS: dict[str, type] = {"row": dict, "thinks": bool, "adversarial": bool, "named": bool}
_MAY_BE_NULL = ("wanted", "today", "second")


def files(folder: Path = FOLDER) -> list[Path]:
    """Return the files of a corpus: `<task>.jsonl` or `<task>-<part>.jsonl`."""
    return sorted(folder.glob("*.jsonl"))


def read_file(path: Path) -> list[CorpusItem]:
    """Read one file. Raises UserError, with the line, for what is no item, has no label, or is of another task."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not a file of the corpus: {error}") from error
    items: list[CorpusItem] = []
    # Not splitlines: responses hold other characters that break lines.
    for number, line in enumerate(text.removesuffix("\n").split("\n"), 1):
        where = f"{path}:{number}"
        try:
            item = CorpusItem(**json.loads(line))
        except (ValueError, TypeError) as error:
            raise UserError(f"{where}: not an item of the corpus: {error}") from error
        if fault := _fault(item, path.stem.partition("-")[0]):
            raise UserError(f"{where}: {item.id}: {fault}")
        items.append(item)
    return items


def _fault(item: CorpusItem, task: str) -> str:
    for field in dataclasses.fields(item):
        value, kind = getattr(item, field.name), _KINDS.get(field.name, str)
        if not isinstance(value, kind) and not (value is None and field.name in _MAY_BE_NULL):
            return f"{field.name} is {value!r:.60}, not of type {kind.__name__}"
    if item.wanted is None:
        return "wanted is null: read the response, and label it as tests/corpus/README.md says"
    checks = {
        f"task is {item.task}, in a file of {task}": item.task == task and task in TASKS,
        f"the id is not {task}- and a number": re.fullmatch(rf"{task}-\d{{4}}", item.id) is not None,
        f"group is not one of {', '.join(GROUPS)}": item.group in GROUPS,
        "category and template are not words-with-dashes": all(
            re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", text) for text in (item.category, item.template)
        ),
        "wanted and second are correct or wrong": item.wanted in WANTED and item.second in (*WANTED, None),
        "finish is stop or length": item.finish in ("stop", "length"),
        "a reason is missing": item.reason.strip() != "",
    }
    return "; ".join(text for text, holds in checks.items() if not holds)


def read_corpus(folder: Path = FOLDER) -> list[CorpusItem]:
    """Read all files, in their order. Raises UserError as `read_file` does."""
    return [item for path in files(folder) for item in read_file(path)]


def write_file(path: Path, items: Iterable[CorpusItem]) -> None:
    """Write one file, an item a line; `today` and `second` stand only where there is one."""
    path.write_text("".join(f"{line_of(item)}\n" for item in items), encoding="utf-8")


def line_of(item: CorpusItem) -> str:
    """Return an item's line."""
    fields = dataclasses.asdict(item)
    kept = {name: value for name, value in fields.items() if value is not None or name == "wanted"}
    return json.dumps(kept, ensure_ascii=False)


def masked(item: CorpusItem) -> str:
    """Return a response without what varies when one idea is repeated: digits, the known answer, spacing and case."""
    text = re.sub(r"\s+", "", _without_answer(item)).casefold()
    return re.sub(r"(?<![a-z\\])[a-z](?![a-z])|\d+", "#", text)


def _without_answer(item: CorpusItem) -> str:
    known = next((str(item.row[key]) for key in ("answer", "answerKey", "target") if item.row.get(key)), "")
    return re.sub(rf"(?<![A-Za-z]){re.escape(known)}(?![A-Za-z])", "#", item.response) if known else item.response


def shortened(item: CorpusItem) -> set[tuple[str, ...]]:
    """Return what is left of a response's words and signs, sorted, when one is left out, or none, or two of many words.

    Two responses that share one of these are the same but for that many words. Digits, single letters and the known
    answer are #; the marks between sentences are left out. Empty where there are fewer than two words: such responses
    try spellings of a value, which differ by a sign. Of a short sentence only one word may differ, since "A is a
    knight, B is a knave" has its names in every problem.
    """
    text = re.sub(r"(?<![a-z\\'])[a-z](?![a-z'])|\d+", "#", _without_answer(item).casefold())
    parts = sorted(re.findall(r"</?\w+>|\\?[^\W\d_]+(?:'[a-z]+)?|[^\s\w.,;:!?]|#", text))
    words = sum(len(part) > 1 and part[0].isalpha() for part in parts)
    if words < 2:
        return set()
    out = 2 if words >= _WORDS_FOR_TWO and len(parts) <= _MOST_FOR_TWO else 1
    return {kept for count in range(out + 1) for kept in combinations(parts, len(parts) - count)}


def faults(named: Iterable[tuple[str, Sequence[CorpusItem]]]) -> Iterator[str]:
    """Yield what breaks the rules of the corpus's spread, in lines; `named` are the items of each file by its name.

    A response that is nothing but an answer, as all of `knights_short` are, counts by its template alone.
    """
    every: list[CorpusItem] = []
    for name, items in named:
        every += items
        share = sum(item.right for item in items) / len(items)
        if not CORRECT_SHARE[0] <= share <= CORRECT_SHARE[1]:
            yield f"{name}: {share:.0%} of its items are wanted correct, not 35 to 60 %"
    yield from _repeated("id", Counter(item.id for item in every), 1)
    templates = Counter(f"{item.task} {item.template.rstrip('-0123456789')}" for item in every)
    yield from _repeated("template", templates, MOST_ALIKE)
    alike = Counter(f"{item.task} {text}" for item in every if (text := masked(item)).strip("#"))
    yield from _repeated("masked response", alike, MOST_ALIKE)
    yield from _repeated("reason", Counter(f"{item.task} {item.reason}" for item in every), MOST_ALIKE)
    for task, count in Counter(item.task for item in every).items():
        of_task = [item for item in every if item.task == task]
        yield from _nearly_repeated(of_task)
        share = LEAST_SECOND_LABELS * count / len(every)
        if (twice := sum(item.second is not None for item in of_task)) < int(min(share, count)):
            yield f"{task}: {twice} items have a second label; {share:.1f} are its share of {LEAST_SECOND_LABELS}"
    adversarial = sum(item.adversarial for item in every) / len(every)
    if adversarial < LEAST_ADVERSARIAL:
        yield f"{adversarial:.1%} of the items are adversarial, not a third"


def _repeated(what: str, counts: Counter[str], most: int) -> Iterator[str]:
    yield from (
        f"{what} {text[:80]!r} stands {count} times, not {most}" for text, count in counts.items() if count > most
    )


def _nearly_repeated(of_task: Iterable[CorpusItem]) -> Iterator[str]:
    sharing: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for item in of_task:
        for kept in shortened(item):
            sharing[kept].append(item.id)
    sets = {frozenset(ids) for ids in sharing.values() if len(ids) > MOST_ALIKE}
    for ids in sorted(sorted(each) for each in sets if not any(each < other for other in sets)):
        yield f"{len(ids)} responses, not {MOST_ALIKE}, are the same but for a word or two: {', '.join(ids)}"


def for_second_labels(items: Sequence[CorpusItem], count: int = SECOND_LABELS) -> list[CorpusItem]:
    """Return the items to label twice: of each task its share, the first ones by the SHA-256 of their ids."""
    by_task: dict[str, list[CorpusItem]] = {}
    for item in items:
        by_task.setdefault(item.task, []).append(item)
    shares = {task: count * len(of_task) / len(items) for task, of_task in by_task.items()}
    quotas = {task: int(share) for task, share in shares.items()}
    most_left = sorted(shares, key=lambda task: quotas[task] - shares[task])
    for task in most_left[: count - sum(quotas.values())]:
        quotas[task] += 1
    drawn = {
        task: sorted(of_task, key=lambda item: sha256(item.id.encode()).digest()) for task, of_task in by_task.items()
    }
    return [item for task, quota in quotas.items() for item in drawn[task][:quota]]


def problems_of(items: Sequence[CorpusItem]) -> list[TaskItem]:
    """Return each item's problem, as its task's own reader makes it of a file with the item's row."""
    by_task: dict[str, list[CorpusItem]] = {}
    for item in items:
        by_task.setdefault(item.task, []).append(item)
    found: dict[str, TaskItem] = {}
    with tempfile.TemporaryDirectory() as folder:
        for task, of_task in by_task.items():
            read = _generated if task == "reasoning_gym" else _read
            found |= dict(zip((item.id for item in of_task), read(task, of_task, Path(folder)), strict=True))
    return [found[item.id] for item in items]


def _read(task: str, items: Sequence[CorpusItem], folder: Path) -> list[TaskItem]:
    # Several items are responses to one problem, which a file may hold once.
    lines = [json.dumps(item.row) for item in items]
    distinct = list(dict.fromkeys(lines))
    path = folder / f"{task}.jsonl"
    path.write_text("".join(f"{line}\n" for line in distinct), encoding="utf-8")
    problems = dict(zip(distinct, load_items(task, path), strict=True))
    return [problems[line] for line in lines]


def _generated(task: str, items: Sequence[CorpusItem], folder: Path) -> list[TaskItem]:
    """Read the file of data sets that the items' rows name, in which a row is one problem by its `index`."""
    sets = [{key: value for key, value in item.row.items() if key != "index"} for item in items]
    path = folder / f"{task}.yaml"
    path.write_text(yaml.safe_dump({"datasets": [json.loads(text) for text in dict.fromkeys(map(json.dumps, sets))]}))
    problems = {problem.id: problem for problem in load_items(task, path)}
    return [problems[f"{item.row['name']}-{item.row['seed']}-{item.row['index']:05d}"] for item in items]


def to_judge(items: Sequence[CorpusItem]) -> list[Item]:
    """Return what a run would hand to its judge."""
    problems = problems_of(items)
    return [
        Item.of(problem, item.task, item.response, truncated=item.finish == "length", in_thinking=item.thinks)
        for item, problem in zip(items, problems, strict=True)
    ]


def judged(items: Sequence[CorpusItem]) -> list[Verdict]:
    """Return our verifiers' verdicts, in order; programs run without a sandbox, as they are the corpus's own."""
    tasks = {item.task for item in items}
    verifiers = make_verifiers(tasks, sandbox=open_sandbox("none"), seconds=PROGRAM_S, preload=True)
    return FinalJudge(DirectJudge(verifiers), AnswerRule()).verdicts(to_judge(items))
