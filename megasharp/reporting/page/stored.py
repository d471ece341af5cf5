"""The stored samples of evaluations on the page: some of them with their texts, and counts of all.

A set is the samples of one model on a suite; of a run's evaluations MOST_STEPS are read, the first and the last among
them, as everywhere on the page, and the samples of the others are counted. Samples that were judged again are one set
with several judgements. Of a suite's problems the page has first those with samples that two judgements call otherwise,
then those that models solve unequally often, then those of middle success rate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from megasharp.common.errors import UserError
from megasharp.evals.evaluate import WITH_MEMORY
from megasharp.evals.harness_log import target_of
from megasharp.evals.result import EvalResult
from megasharp.evals.stored_samples import StoredSample, read_chosen, suites_with_samples
from megasharp.evals.suites import load_suite, suite_source
from megasharp.reporting.history import RunHistory
from megasharp.reporting.page.evaluations import MOST_STEPS, beside_label, step_folders
from megasharp.reporting.page.records import (
    SampleSet,
    StoredProblem,
    StoredRow,
    StoredSuite,
    StoredVerdict,
    rounded,
    spread_out,
)
from megasharp.reporting.page.stored_counts import Counted, Key, Source, count_left_out, gather

# On the page: problems of a suite, samples of a problem in one set and in all sets, letters of all.
SHOWN_PROBLEMS, SHOWN_SAMPLES, OF_PROBLEM = 32, 8, 48
MOST_LETTERS = 2_000_000
# Letters of a response that is longer than both together; its answer is at its end.
BEGINNING, END = 1_000, 3_000
_SHORT, _QUESTION = 200, 2_000


def read_stored(
    runs: Sequence[RunHistory], names: Sequence[str], beside: Mapping[Path, EvalResult]
) -> tuple[list[StoredSuite], list[str]]:
    """Read samples of the runs' evaluations and of those in `beside`; return a line for each that cannot be read."""
    chosen, others = _of_runs(runs, names)
    sources = [*chosen, *_of_files(beside)]
    suites = dict.fromkeys(suite for source in sources for suite in source.suites)
    paths = {Path(name).stem: name for run in runs for name in _suites_of(run)}
    made: list[StoredSuite] = []
    unread: list[str] = []
    left = MOST_LETTERS
    for place, suite in enumerate(sorted(suites)):
        sets, problems = gather(suite, [source for source in sources if suite in source.suites])
        unread += problems
        counted, uncounted = count_left_out(suite, [source for source in others if suite in source.suites])
        unread += uncounted
        if sets:
            base = suite.removesuffix(WITH_MEMORY)
            try:
                questions = _questions(paths.get(base, base))
                one, used = _suite(suite, sets, counted, questions, left // (len(suites) - place))
            except UserError as error:
                unread.append(str(error))
                continue
            made.append(one)
            left -= used
    return made, unread


def _of_runs(runs: Sequence[RunHistory], names: Sequence[str]) -> tuple[list[Source], list[Source]]:
    """Return the evaluations of the runs that the page shows, and the others."""
    shown: list[Source] = []
    others: list[Source] = []
    for place, (run, name) in enumerate(zip(runs, names, strict=True)):
        found = [
            Source(place, step, f"{name} {step}", at, suites)
            for step, at in step_folders(run)
            if (suites := suites_with_samples(at))
        ]
        chosen = spread_out(found, MOST_STEPS)
        shown += chosen
        others += [one for one in found if one not in chosen]
    return shown, others


def _of_files(beside: Mapping[Path, EvalResult]) -> Iterator[Source]:
    for path, result in beside.items():
        if result.suite in suites_with_samples(path.parent):
            yield Source(-1, result.step or 0, beside_label(result), path.parent, [result.suite])


def _suites_of(run: RunHistory) -> list[str]:
    asked = run.config.get("eval")
    suites = asked.get("suites") if isinstance(asked, dict) else None
    return [name for name in suites if isinstance(name, str)] if isinstance(suites, list) else []


@lru_cache
def _questions(name: str) -> Mapping[str, tuple[str, str]]:
    """Return question and known answer by problem, of a suite whose data is on this machine; of others none."""
    with suppress(UserError):
        _, data = suite_source(name)
        if data is not None and data.exists():
            return {
                item.id: (
                    (item.question or item.text or "\n\n".join(text for _, text in item.turns))[:_QUESTION],
                    target_of(item.answer)[:_SHORT],
                )
                for item in load_suite(name).items
            }
    return {}


def _suite(
    suite: str,
    sets: Sequence[Counted],
    others: Mapping[Path, int],
    questions: Mapping[str, tuple[str, str]],
    room: int,
) -> tuple[StoredSuite, int]:
    """Return a suite's part of the page, and how many letters it takes: at most `room`.

    `others` counts the samples of evaluations that the page leaves out.
    """
    ids = list(dict.fromkeys(problem for one in sets for problem in one.ids))
    ranks = {problem: (*_interest(sets, problem), place) for place, problem in enumerate(ids)}
    most = max(2, min(SHOWN_SAMPLES, OF_PROBLEM // len(sets)))
    chosen = sorted(ids, key=ranks.__getitem__)[:SHOWN_PROBLEMS]
    found = [_rows(one, place, chosen, most, suite) for place, one in enumerate(sets)]
    problems: list[StoredProblem] = []
    rows: list[StoredRow] = []
    used = 0
    for place, problem in enumerate(chosen):
        question, known = questions.get(problem, ("", ""))
        own = [row for of_set in found for row in of_set if row.problem == place]
        letters = len(question) + sum(map(_letters, own))
        if used + letters > room:
            break
        used += letters
        problems.append(StoredProblem(problem[:_SHORT], question, known, [one.of_problem(problem) for one in sets]))
        rows += own
    told = [SampleSet(one.run, one.step, one.name, one.judgements()) for one in sets]
    return StoredSuite(suite, _note(suite, sets, others, len(ids), problems, rows), told, problems, rows), used


def _interest(sets: Sequence[Counted], problem: str) -> tuple[float, float, float]:
    """Return a rank, the smallest the most interesting: flips, then unequal success, then a success near one half."""
    rates = [rate for one in sets if (rate := one.rate(problem)) is not None]
    flips = sum(one.flips(problem) for one in sets)
    if not rates:
        return -flips, 0.0, 1.0
    return -flips, min(rates) - max(rates), abs(sum(rates) / len(rates) - 0.5)


def _note(
    suite: str,
    sets: Sequence[Counted],
    others: Mapping[Path, int],
    count: int,
    problems: Sequence[StoredProblem],
    rows: Sequence[StoredRow],
) -> str:
    left_out = sum(others.values())
    there = sum(one.size for one in sets) + left_out
    without = (
        f"Evaluations that are left out: {len(others):,}, with {left_out:,} of the samples, as the page shows at most "
        f"{MOST_STEPS} of a run, the first, the last and some between. "
        if others
        else ""
    )
    return (
        f"{suite}: {there:,} samples of {count:,} problems are stored. {without}On this page are {len(rows):,} samples "
        f"of {len(problems):,} problems: first those with samples that two judgements call otherwise, then those that "
        "models solve unequally often, then those of middle success rate; "
        f"up to {SHOWN_PROBLEMS} problems of a suite, {SHOWN_SAMPLES} samples of a model on each ({OF_PROBLEM} of all "
        f"models), the first {BEGINNING:,} and the last {END:,} letters of a response, and {MOST_LETTERS:,} letters in "
        "all. The rest is in the evaluations' folders samples/."
    )


def _letters(row: StoredRow) -> int:
    # Names of fields take as much room as some letters.
    said = sum(len(verdict.answer) + len(verdict.detail) + 60 for verdict in row.verdicts)
    return len(row.text) + len(row.tail) + said + 150


def _rows(one: Counted, place: int, problems: Sequence[str], most: int, suite: str) -> list[StoredRow]:
    """Read at most `most` samples of each problem, with the verdicts of all judgements."""
    places = {key: number for number, problem in enumerate(problems) for key in one.chosen(problem, most)}
    read: list[dict[Key, StoredSample]] = [
        {sample.key: sample for sample in read_chosen(folder, suite, frozenset(places))} for folder in one.folders
    ]
    return [
        _row(place, number, [samples.get(key) for samples in read])
        for key, number in sorted(places.items(), key=lambda pair: (pair[1], pair[0]))
        if any(key in samples for samples in read)
    ]


def _row(place: int, problem: int, judged: Sequence[StoredSample | None]) -> StoredRow:
    first = next(sample for sample in judged if sample is not None)
    text = next((sample.text for sample in judged if sample is not None and sample.text is not None), None)
    whole = text is None or len(text) <= BEGINNING + END
    verdicts: list[StoredVerdict] = []
    for sample in judged:
        if sample is None:
            verdicts.append(StoredVerdict("not judged", 0.0, "", ""))
        else:
            answer, detail = (sample.answer or "")[:_SHORT], sample.detail[:_SHORT]
            verdicts.append(StoredVerdict(str(sample.outcome), rounded(sample.reward), answer, detail))
    return StoredRow(
        set=place,
        problem=problem,
        index=first.index,
        greedy=first.greedy,
        seed=str(first.seed),
        finish=str(first.finish),
        tokens=first.tokens,
        text=(text or "")[: None if whole else BEGINNING],
        tail="" if whole or text is None else text[-END:],
        letters=-1 if text is None else len(text),
        verdicts=verdicts,
        turns=[] if text is None else [[turn.text_end, turn.text_until, turn.reward] for turn in first.turns],
    )
