"""Collecting groups through a scripted engine: order, seeds, verdicts, selection, failures and timing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

from megasharp.common.errors import UserError
from megasharp.common.records import (
    Completion,
    FinishReason,
    GenerateRequest,
    Group,
    Outcome,
    Prompt,
    SamplingParams,
    TaskAnswer,
    Verdict,
    VersionSpan,
)
from megasharp.rollout import batch_collector as module
from megasharp.rollout.batch_collector import Rollouts
from megasharp.rollout.step_request import Collected, GroupMaker, StepRequest, response_seed
from megasharp.tasks.judge import DirectJudge


@dataclass(frozen=True, slots=True)
class Expected(TaskAnswer):
    text: str


class ScriptedEngine:
    """Answers prompt [n] with the single token n, aborting for prompts that start with 9."""

    version = 5

    def generate(self, requests: Sequence[GenerateRequest], sampling: SamplingParams) -> list[list[Completion]]:
        return [[self._complete(request.tokens[0], seed) for seed in request.seeds] for request in requests]

    def _complete(self, token: int, seed: int) -> Completion:
        zero = torch.zeros(1)
        reason = FinishReason.ABORT if token == 9 else FinishReason.STOP
        return Completion(torch.tensor([token]), zero, zero, None, (VersionSpan(5, 0, 1),), reason, seed)


def verifier(text: str, answer: TaskAnswer) -> Verdict:
    assert isinstance(answer, Expected)
    if text == "t3":
        raise ZeroDivisionError("two\nlines")
    correct = text == answer.text
    return Verdict(Outcome.CORRECT if correct else Outcome.WRONG, float(correct), text)


def decode(rows: Sequence[Sequence[int]]) -> list[str]:
    return [f"t{row[0]}" for row in rows]


def prompt(token: int, *, task: str = "echo", epoch: int = 0) -> Prompt:
    return Prompt(f"p{token}", task, "", (token,), Expected("t1"), "train.jsonl", epoch, token)


class Prompts:
    """Hands out what it was given."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._prompts: Iterator[Prompt] = iter(prompts)

    def take(self, count: int) -> list[Prompt]:
        return [next(self._prompts) for _ in range(count)]


def keep_all(groups: list[Group]) -> list[Group]:
    return groups


def collect(prompts: Sequence[Prompt], step: int = 0, seed: int = 3, **order: object) -> Collected:
    maker = GroupMaker(DirectJudge({"echo": verifier}), decode, SamplingParams(max_tokens=4), 2, seed)
    asked = replace(StepRequest(step, len(prompts), keep_all), **order)  # type: ignore[arg-type]
    return Rollouts(ScriptedEngine(), maker).collect(Prompts(prompts), asked)


def test_groups_follow_the_prompts_with_verdicts() -> None:
    groups = collect([prompt(1), prompt(2)], step=7).groups
    assert [group.id for group in groups] == ["step7-0", "step7-1"]
    assert [group.prompt.id for group in groups] == ["p1", "p2"]
    assert [group.policy_version for group in groups] == [5, 5]
    assert [[r.text for r in group.responses] for group in groups] == [["t1", "t1"], ["t2", "t2"]]
    assert [r.verdict.outcome for r in groups[1].responses] == [Outcome.WRONG] * 2


def test_dropped_groups_are_replaced_round_by_round() -> None:
    def select(groups: list[Group]) -> list[Group]:
        return [replace(group, dropped_reason="odd" if group.prompt.position % 2 else None) for group in groups]

    found = collect([prompt(n) for n in range(1, 8)], step=2, wanted=2, select=select, refill_rounds=1)
    assert [group.id for group in found.groups] == ["step2-0", "step2-1", "step2-2", "step2-3"]
    assert [group.dropped_reason for group in found.groups] == ["odd", None, "odd", None]


def test_a_failing_verifier_is_an_error_verdict_on_one_line() -> None:
    (group,) = collect([prompt(3)]).groups
    assert group.responses[0].verdict == Verdict(Outcome.ERROR, 0.0, None, "ZeroDivisionError: two lines")


def test_an_aborted_response_is_infra_and_never_verified() -> None:
    (group,) = collect([prompt(9)]).groups
    assert {r.verdict.outcome for r in group.responses} == {Outcome.INFRA}


def test_seeds_depend_on_run_prompt_epoch_and_index_only() -> None:
    def seeds(run: int, what: Prompt, step: int, before: int) -> list[int]:
        groups = collect([*[prompt(2)] * before, what], step, run).groups
        return [r.completion.seed for r in groups[-1].responses]

    first = seeds(3, prompt(1), 0, 0)
    assert seeds(3, prompt(1), 12, 4) == first
    others = [seeds(4, prompt(1), 0, 0), seeds(3, prompt(2), 0, 0), seeds(3, prompt(1, epoch=1), 0, 0)]
    every = [seed for group in [first, *others] for seed in group]
    assert len(set(every)) == 8
    assert all(0 <= seed < 2**63 for seed in every)


def test_seeds_do_not_change_between_versions_of_the_code() -> None:
    assert response_seed(1, "countdown-4-000017", 0, 0) == 7773704118079628555


def test_an_unknown_task_is_refused_before_sampling() -> None:
    with pytest.raises(UserError, match="task chess, which has no verifier; known tasks: echo"):
        collect([prompt(1), prompt(2, task="chess")])


def test_seconds_split_sampling_from_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = 0.0
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: passed))

    class Slow(ScriptedEngine):
        def generate(self, requests: Sequence[GenerateRequest], sampling: SamplingParams) -> list[list[Completion]]:
            nonlocal passed
            passed += 20.0
            return super().generate(requests, sampling)

    def slow(text: str, answer: TaskAnswer) -> Verdict:
        nonlocal passed
        passed += 3.0
        return verifier(text, answer)

    maker = GroupMaker(DirectJudge({"echo": slow}), decode, SamplingParams(max_tokens=4), 2, 3)
    found = Rollouts(Slow(), maker).collect(Prompts([prompt(1)]), StepRequest(0, 1, keep_all))
    assert found.seconds == {"rollout": 20.0, "reward": 6.0}
