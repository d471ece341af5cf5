"""Stored samples judged again, with no model, and two judgings of the same samples side by side.

It is for a verifier that was mended, known answers that were corrected, and rewards that did not exist when the samples
were drawn.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, zip_longest
from operator import attrgetter
from pathlib import Path

from megasharp.common.errors import UserError
from megasharp.common.records import FinishReason, Outcome, Verdict
from megasharp.evals.stored_samples import SamplesInfo, StoredSample, read_samples
from megasharp.tasks.judge import Item, Judge, TaskItem

# Responses from which on a judge gets them: enough for all of its workers, few enough that their texts stay small.
_AT_ONCE = 1024
# Of an identity, what says how samples were judged, by which answers too; all else says what they are.
JUDGING = ("reward", "timeout_s", "answers", "problems", "judged")


def judge_again(
    samples: Iterable[StoredSample], problems: Mapping[str, TaskItem], task: str, judge: Judge
) -> Iterator[list[StoredSample]]:
    """Yield samples, whole problems at a time and in their order, with verdicts of `judge` by the problems' ids.

    As in an evaluation, greedy ones are judged by themselves: a reward may compare a problem's responses. A response
    that an engine aborted keeps its verdict. Raises UserError for a sample without its text, or of a problem that is
    not there.
    """
    some: list[StoredSample] = []
    for _, of_problem in groupby(samples, key=attrgetter("number")):
        some += of_problem
        if len(some) >= _AT_ONCE:
            yield _judged_together(some, problems, task, judge)
            some = []
    if some:
        yield _judged_together(some, problems, task, judge)


def _judged_together(
    some: Sequence[StoredSample], problems: Mapping[str, TaskItem], task: str, judge: Judge
) -> list[StoredSample]:
    judged: dict[tuple[int, bool, int], StoredSample] = {}
    for greedy in (True, False):
        kind = [each for each in some if each.greedy is greedy and each.finish is not FinishReason.ABORT]
        start = time.perf_counter()
        verdicts = judge.verdicts([_item(sample, problems, task) for sample in kind])
        seconds = (time.perf_counter() - start) / max(1, len(kind))
        judged |= {each.key: _judged(each, verdict, seconds) for each, verdict in zip(kind, verdicts, strict=True)}
    return [judged.get(sample.key, sample) for sample in some]


def _judged(sample: StoredSample, verdict: Verdict, seconds: float) -> StoredSample:
    return replace(
        sample,
        outcome=verdict.outcome,
        reward=verdict.reward,
        answer=verdict.canonical_answer,
        detail=verdict.detail,
        judged_s=seconds,
    )


def _item(sample: StoredSample, problems: Mapping[str, TaskItem], task: str) -> Item:
    problem, text = problem_of(sample.problem, problems), text_of(sample)
    return Item.of(
        problem,
        task,
        text,
        tokens=sample.token_ids or (),
        truncated=sample.finish is FinishReason.LENGTH,
        in_thinking=sample.in_thinking,
    )


def problem_of(name: str, problems: Mapping[str, TaskItem]) -> TaskItem:
    """Return a problem by its id. Raises UserError where it is not among those of the suite as it is now."""
    if name not in problems:
        raise UserError(f"problem {name} has samples, but the suite does not have it now; give its own --suite")
    return problems[name]


def text_of(sample: StoredSample) -> str:
    """Return a sample's text. Raises UserError where it was not kept."""
    if sample.text is None:
        raise UserError(
            f"problem {sample.problem}, sample {sample.index}: its text was not kept; evaluate with --keep texts, and "
            "with a --keep-mb that all have room in"
        )
    return sample.text


@dataclass(frozen=True, slots=True)
class Flip:
    """A sample that exactly one of two judgings calls correct."""

    before: StoredSample
    after: StoredSample


@dataclass(frozen=True, slots=True)
class Flips:
    """Two judgings of the same samples: how often each pair of outcomes occurs, and the flips."""

    samples: int
    outcomes: Mapping[tuple[Outcome, Outcome], int]
    flips: Sequence[Flip]


def same_samples(one: SamplesInfo | None, other: SamplesInfo | None) -> bool:
    """Return whether two folders hold the same samples of a suite, however each was judged."""
    if one is None or other is None or one.suite != other.suite:
        return False
    return _drawn(one) == _drawn(other)


def _drawn(info: SamplesInfo) -> dict[str, object]:
    # The identity of a run's evaluations leaves out the step, which names their folder.
    model = {name: info.setting.get(name) for name in ("label", "step")}
    return model | {name: value for name, value in info.identity.items() if name not in JUDGING}


def find_flips(before: Path, after: Path, suite: str) -> Flips:
    """Compare the judgings in two evaluations' folders. Raises UserError where they are not of the same samples."""
    outcomes: Counter[tuple[Outcome, Outcome]] = Counter()
    found: list[Flip] = []
    first, second = read_samples(before, suite, texts=False), read_samples(after, suite, texts=False)
    for one, other in zip_longest(first, second):
        if one is None or other is None or (one.key, one.seed, one.tokens) != (other.key, other.seed, other.tokens):
            at = one or other
            raise UserError(f"{before} and {after}: not the same samples of {suite}, from problem {at.problem} on")
        outcomes[one.outcome, other.outcome] += 1
        if (one.outcome is Outcome.CORRECT) != (other.outcome is Outcome.CORRECT):
            found.append(Flip(one, other))
    return Flips(outcomes.total(), outcomes, found)
