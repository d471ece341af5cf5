"""Judge the labelled corpus by all verifiers, print their errors, and record verdicts and tables.

    make verifier-report
    make verifier-report RECORD=1
    python tools/verifier_report.py --graders /tmp/graders/bin/python --record

Prints the tables and each verdict that is not the recorded one; the exit code is 1 where there are such, and where the
page has other tables, as when a label was changed. `--record`
writes them into `tests/corpus` and the tables into the page. With `--graders` the public graders of another Python
(tools/public_graders.py) judge too.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from public_graders import GRADERS, grade
from verifier_corpus import FOLDER, PROGRAM_S, CorpusItem, files, read_corpus, read_file, to_judge, write_file
from verifier_tables import PAGE, SIGNS, Recorded, on_page, read_graders, tables, write_graders

from megasharp.common.errors import UserError
from megasharp.common.records import Verdict
from megasharp.tasks.final_answer import AnswerRule, FinalJudge
from megasharp.tasks.sandbox.bubblewrap import open_sandbox
from megasharp.tasks.sandbox.pool import VerifierPool
from megasharp.tasks.table import make_verifiers

RECORD = "make verifier-report RECORD=1"
# Seconds for a response; a program's tests have less.
_ITEM_S = PROGRAM_S + 10.0
_WORKERS = 2


def judged_in_workers(items: Sequence[CorpusItem]) -> list[Verdict]:
    """Return our verifiers' verdicts, in order; one that takes too long is TIMEOUT."""
    tasks = {item.task for item in items}
    make = partial(make_verifiers, tasks, sandbox=open_sandbox("none"), seconds=PROGRAM_S, preload=True)
    pool = VerifierPool(make, tasks, _WORKERS, _ITEM_S)
    try:
        return FinalJudge(pool, AnswerRule()).verdicts(to_judge(items))
    finally:
        pool.close()


def changes(items: Sequence[CorpusItem], verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Yield a line for each verdict that is not the recorded one."""
    for item, verdict in zip(items, verdicts, strict=True):
        if verdict.outcome != item.today:
            earned = "right now" if item.right == (verdict.outcome == "correct") else "not as wanted"
            yield (
                f"{item.id} ({item.category}): {item.today or 'no verdict'} -> {verdict.outcome}, {earned}: "
                f"{item.reason} {verdict.detail}".rstrip()
            )


def record(today: dict[str, str]) -> None:
    """Write outcomes, by id, into the items of the corpus."""
    for path in files():
        write_file(path, [replace(item, today=today[item.id]) for item in read_file(path)])


def graded(python: str, items: Sequence[CorpusItem]) -> Recorded:
    """Return what the public graders of a Python say; a line is printed for each that it does not have.

    Raises UserError for a Python that has none of them, or is none.
    """
    if shutil.which(python) is None:
        raise UserError(f"--graders {python}: no such program")
    versions: dict[str, dict[str, str]] = {}
    signs: dict[str, str] = {}
    for name, grader in GRADERS.items():
        of_task = [item for item in items if item.task == grader.task]
        known = [item.row["answer"] if grader.task == "math" else item.row for item in of_task]
        said = grade(python, name, [(item.id, item.response, row) for item, row in zip(of_task, known, strict=True)])
        if isinstance(said, str):
            print(said, file=sys.stderr)
            continue
        versions.setdefault(grader.task, {})[name] = said[0]
        signs |= {id: signs.get(id, "") + SIGNS[verdict] for id, verdict in said[1].items()}
        print(f"{name} {said[0]}: {len(of_task)} items", file=sys.stderr)
    if not versions:
        raise UserError(f"--graders {python}: it has none of the graders; see tools/public_graders.py")
    return Recorded(versions, dict(sorted(signs.items())))


def main() -> int:
    """The exit code."""
    try:
        return report()
    except (UserError, OSError) as error:
        sys.exit(str(error))


def report() -> int:
    """Judge, print, record where asked to; returns the exit code. Raises UserError for what is unreadable."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--record", action="store_true", help="write verdicts and tables")
    parser.add_argument("--graders", metavar="PYTHON", help="a Python that has public graders")
    arguments = parser.parse_args()
    items = read_corpus()
    verdicts = judged_in_workers(items)
    changed = [*changes(items, verdicts)]
    now = [replace(item, today=str(verdict.outcome)) for item, verdict in zip(items, verdicts, strict=True)]
    recorded = graded(arguments.graders, items) if arguments.graders else read_graders()
    text = tables(now, recorded)
    print(text)
    print("", *changed, f"{len(changed)} verdicts are not the recorded ones", sep="\n")
    if not arguments.record:
        stale = on_page(PAGE.read_text(), text) != PAGE.read_text()
        print(f"the tables of {PAGE.name} are others" if stale else f"the tables of {PAGE.name} are these")
        return int(bool(changed) or stale)
    record({item.id: item.today or "" for item in now})
    write_graders(recorded)
    PAGE.write_text(on_page(PAGE.read_text(), text))
    print(f"recorded in {FOLDER} and {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
