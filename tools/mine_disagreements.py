"""Find responses that two judges see differently, in the stored samples of an evaluation, as items to label.

    python tools/mine_disagreements.py runs/mine/evals/step_200 --suite math500 --second now --out mined.jsonl
    python tools/mine_disagreements.py evals/mine --suite math500 --first now --second "verl prime_math" \\
        --graders /tmp/graders/bin/python --out mined.jsonl

A judge is `stored`, the verdict that was stored; `now`, our verifier as it is; a user's `module:function`; or a public
grader of tools/public_graders.py. The items have the schema of tests/corpus and no label: its reader refuses them until
somebody has read each one. They do not say what the judges said, so that it does not sway the reader.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from public_graders import GRADERS, grade
from verifier_corpus import CorpusItem, line_of, masked, read_corpus

from megasharp.common.errors import UserError
from megasharp.common.files import write_text
from megasharp.common.records import FinishReason, Outcome
from megasharp.config.data import RewardConfig
from megasharp.evals.rejudge import judge_again
from megasharp.evals.stored_samples import StoredSample, read_samples
from megasharp.evals.suites import Suite, load_suite
from megasharp.tasks.own_reward import OWN_TASK
from megasharp.tasks.user_import import look_beside
from megasharp.trainer.reward_judge import RewardJudge

STORED, NOW = "stored", "now"
# Items of one problem: more of them say little more.
_OF_A_PROBLEM = 2


def earning(name: str, samples: Sequence[StoredSample], suite: Suite, python: str | None) -> list[bool]:
    """Return for each sample if the judge of that name calls it correct. Raises UserError for an unknown judge."""
    if name == STORED:
        return [sample.outcome is Outcome.CORRECT for sample in samples]
    if name in GRADERS:
        return _graded(name, samples, suite, python)
    if name != NOW and ":" not in name:
        known = ", ".join((STORED, NOW, *GRADERS))
        raise UserError(f"no judge {name!r}; known: {known}, or a function as module:function")
    reward, task = (RewardConfig(), suite.task) if name == NOW else (RewardConfig(function=name), OWN_TASK)
    problems = {item.id: item for item in suite.items}
    with closing(RewardJudge(reward, {task}, None, _say)) as judging:
        again = judge_again(samples, problems, task, judging.judge)
        return [sample.outcome is Outcome.CORRECT for some in again for sample in some]


def _graded(name: str, samples: Sequence[StoredSample], suite: Suite, python: str | None) -> list[bool]:
    grader = GRADERS[name]
    if python is None or grader.task != suite.task:
        raise UserError(f"{name} judges {grader.task}, in the Python that --graders names")
    rows = {item.id: item.row or {} for item in suite.items}
    known = {name: row["answer"] if grader.task == "math" else row for name, row in rows.items()}
    asked = [(str(place), sample.text or "", known[sample.problem]) for place, sample in enumerate(samples)]
    said = grade(python, name, asked)
    if isinstance(said, str):
        raise UserError(f"{python}: {said}")
    return [said[1][str(place)] == "correct" for place in range(len(samples))]


def disagreements(
    samples: Sequence[StoredSample], first: Sequence[bool], second: Sequence[bool], suite: Suite, next_number: int
) -> Iterator[CorpusItem]:
    """Yield an item for each sample that exactly one of two judges calls correct, of those that are alike one.

    Raises UserError where the problems have no rows of their own, as generated ones and programs' have not.
    """
    rows = {item.id: item.row for item in suite.items}
    seen: set[str] = set()
    of_problem: Counter[str] = Counter()
    for sample, one, other in zip(samples, first, second, strict=True):
        if one == other or of_problem[sample.problem] == _OF_A_PROBLEM:
            continue
        row = rows.get(sample.problem)
        if row is None:
            raise UserError(f"problem {sample.problem} has no row that an item could hold")
        item = unlabelled(f"{suite.task}-{next_number + len(seen):04d}", suite.task, dict(row), sample)
        if (alike := masked(item)) not in seen:
            seen.add(alike)
            of_problem[sample.problem] += 1
            yield item


def unlabelled(id: str, task: str, row: dict[str, Any], sample: StoredSample) -> CorpusItem:
    """Return a sample as an item that waits for its reader, who writes all that is empty or `unlabelled`."""
    return CorpusItem(
        id=id,
        task=task,
        group="value",
        category="unlabelled",
        template="unlabelled",
        row=row,
        response=sample.text or "",
        finish="length" if sample.finish is FinishReason.LENGTH else "stop",
        thinks=sample.in_thinking,
        wanted=None,
        reason="",
        adversarial=False,
        named=False,
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr)


def mine(folder: Path, suite: Suite, names: tuple[str, str], python: str | None) -> tuple[list[CorpusItem], str]:
    """Return the items, and a line that counts what both judges said. Raises UserError where no text was kept."""
    samples = [sample for sample in read_samples(folder, suite.name) if sample.finish is not FinishReason.ABORT]
    if not samples or any(sample.text is None for sample in samples):
        raise UserError(f"{folder}: no samples of {suite.name} with their texts; evaluate with --keep texts")
    first, second = (earning(name, samples, suite, python) for name in names)
    numbers = [int(item.id.rpartition("-")[2]) for item in read_corpus() if item.task == suite.task]
    items = [*disagreements(samples, first, second, suite, max(numbers, default=0) + 1)]
    counts = Counter(zip(first, second, strict=True))
    return items, (
        f"{len(samples)} samples: both correct {counts[True, True]}, only {names[0]} {counts[True, False]}, "
        f"only {names[1]} {counts[False, True]}, neither {counts[False, False]}; {len(items)} items"
    )


def main() -> None:
    """Write the items and print the counts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="an evaluation's results, which have a folder samples")
    parser.add_argument("--suite", required=True, help="a suite's name, or the path of its YAML file")
    parser.add_argument("--first", default=STORED, help="a judge (default: stored)")
    parser.add_argument("--second", default=NOW, help="another judge (default: now)")
    parser.add_argument("--graders", metavar="PYTHON", help="a Python that has public graders")
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    arguments = parser.parse_args()
    names = (arguments.first, arguments.second)
    look_beside(arguments.folder)
    try:
        items, counted = mine(arguments.folder, load_suite(arguments.suite), names, arguments.graders)
    except UserError as error:
        sys.exit(str(error))
    write_text(arguments.out, "".join(f"{line_of(item)}\n" for item in items))
    print(f"{counted} in {arguments.out}")


if __name__ == "__main__":
    main()
