"""Asynchronous collection over a stand-in engine: whole groups, refills, stragglers, staleness, losses, resumes."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import pytest
from cases import each_case
from waiting import HANG_S, wait_until

from megasharp.common.errors import UserError
from megasharp.common.records import (
    Completion,
    FinishReason,
    Group,
    Outcome,
    Plausible,
    Prompt,
    SamplingParams,
    TaskAnswer,
    Verdict,
)
from megasharp.config.rollout import RolloutConfig
from megasharp.rollout import async_collector
from megasharp.rollout.async_collector import AsyncRollouts, prompts_at_once
from megasharp.rollout.step_request import Collected, GroupMaker, StepRequest
from megasharp.tasks.judge import DirectJudge
from tests.unit.rollout.standin_engine import Delay, StandInEngine, length, token

SAMPLING = SamplingParams(max_tokens=12)
QUICK = 0.0005


class Prompts:
    """Prompts 0, 1, 2, ... of which `taken` were handed out."""

    def __init__(self) -> None:
        self.taken = 0

    def take(self, count: int) -> list[Prompt]:
        numbers = range(self.taken, self.taken + count)
        self.taken += count
        return [Prompt(f"p{n}", "echo", "", (n,), TaskAnswer(), "s", 0, n) for n in numbers]


@dataclass(frozen=True, slots=True)
class Mu:
    mu: float = 0.5
    plausible: Plausible | None = None


def right(text: str, answer: TaskAnswer) -> Verdict:
    return Verdict(Outcome.CORRECT, 1.0, text)


def rollouts(engine: StandInEngine, **settings: object) -> AsyncRollouts:
    maker = GroupMaker(DirectJudge({"echo": right}), lambda rows: ["x"] * len(rows), SAMPLING, 3, seed=5)
    return AsyncRollouts(engine, maker, RolloutConfig(**settings))  # type: ignore[arg-type]


def keep_all(groups: list[Group]) -> list[Group]:
    return groups


def dropping(which: Callable[[int], bool]) -> Callable[[list[Group]], list[Group]]:
    def select(groups: list[Group]) -> list[Group]:
        return [replace(g, dropped_reason="no" if which(g.prompt.position) else None) for g in groups]

    return select


def order(step: int = 1, wanted: int = 4, **fields: object) -> StepRequest:
    return replace(StepRequest(step, wanted, keep_all), **fields)  # type: ignore[arg-type]


def numbers(found: Collected, kept: bool = True) -> list[int]:
    """The positions of a step's prompts, of kept groups or of dropped ones."""
    return [g.prompt.position for g in found.groups if (g.dropped_reason is None) is kept]


def pending(collector: AsyncRollouts) -> list[int]:
    return [prompt.position for prompt in collector.unfinished()]


def check_whole(group: Group, oldest: int) -> None:
    """Every response has all its tokens, each once, with versions that may train now."""
    assert len(group.responses) == 3
    for response in group.responses:
        completion = response.completion
        expected = length(completion.seed, SAMPLING.max_tokens)
        assert completion.finish_reason is FinishReason.STOP
        assert completion.tokens.tolist() == [token(completion.seed, i) for i in range(expected)]
        assert versions_of(completion) == [-int(value) for value in completion.policy_logp]
        assert completion.experts is not None
        assert completion.experts[:, 0, 0].tolist() == versions_of(completion)
        assert oldest <= min(versions_of(completion)) and max(versions_of(completion)) <= group.policy_version


def versions_of(completion: Completion) -> list[int]:
    spans = completion.version_spans
    assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])]
    assert spans[-1].end == completion.tokens.numel()
    return [span.version for span in spans for _ in range(span.start, span.end)]


@each_case("seed", range(4))
@each_case(
    "settings",
    [
        {},
        {"oversample": 0.6},
        {"oversample": 0.6, "max_staleness": 1},
        {"max_staleness": 1, "stragglers": "keep"},
        {"oversample": 1.0, "max_staleness": 2, "stragglers": "keep"},
    ],
)
def test_every_step_is_full_and_no_prompt_is_lost_or_trained_twice(settings: dict[str, object], seed: int) -> None:
    """Under random delays, with dropped groups and lost engines, over several pushes of weights."""
    chance = random.Random(seed)
    paces = [chance.choice([0.0001, 0.001, 0.004]) for _ in range(500)]
    lose = {n: chance.choice([1, 1, 2]) for n in range(500) if chance.random() < 0.1}
    given_up = {n for n, times in lose.items() if times == 2}
    dropped = {n for n in range(500) if chance.random() < 0.3}
    engine, source = StandInEngine(lambda n: paces[n], lose), Prompts()
    collector = rollouts(engine, **settings)
    seen: list[int] = []
    for step in range(1, 8):
        found = collector.collect(
            source, order(step, select=dropping(dropped.__contains__), refill_rounds=3, last=step == 7)
        )
        assert len(numbers(found)) == 4
        assert numbers(found) == sorted(numbers(found)) and [g.id for g in found.groups] == sorted(
            (g.id for g in found.groups), key=lambda name: int(name.partition("-")[2])
        )
        for group in found.groups:
            assert group.policy_version == engine.version
            if group.prompt.position in given_up:
                assert {r.verdict.outcome for r in group.responses} <= {Outcome.INFRA, Outcome.CORRECT}
            else:
                check_whole(group, engine.version - int(str(settings.get("max_staleness", 0))))
        seen += numbers(found) + numbers(found, kept=False)
        engine.version += 1
    assert len(seen) == len(set(seen))
    assert sorted([*seen, *pending(collector)]) == list(range(source.taken))
    assert engine.running == set()


def test_without_oversampling_a_step_is_what_the_prompts_order_says_whatever_finishes_first() -> None:
    def step(delay: Delay) -> list[tuple[str, int, str | None]]:
        collector = rollouts(StandInEngine(delay))
        found = collector.collect(Prompts(), order(select=dropping(lambda n: n in (0, 3, 4)), refill_rounds=2))
        assert pending(collector) == []
        return [(g.id, g.prompt.position, g.dropped_reason) for g in found.groups]

    reasons = ["no", None, None, "no", "no", None, None]
    expected = [(f"step1-{n}", n, reason) for n, reason in enumerate(reasons)]
    assert step(lambda n: QUICK * (1 + n)) == step(lambda n: QUICK * max(1, 8 - n)) == expected


@each_case(("rounds", "sampled"), [(0, 4), (1, 4 + 16)])
def test_refills_are_bounded(rounds: int, sampled: int) -> None:
    source = Prompts()
    found = rollouts(StandInEngine(lambda _: QUICK)).collect(
        source, order(select=dropping(lambda _: True), refill_rounds=rounds)
    )
    assert numbers(found, kept=False) == list(range(sampled))
    assert source.taken == sampled


def test_oversampled_prompts_stand_in_for_dropped_ones() -> None:
    found = rollouts(StandInEngine(lambda _: QUICK), oversample=0.5).collect(
        Prompts(), order(select=dropping(lambda n: n in (1, 2)))
    )
    assert numbers(found) == [0, 3, 4, 5]


def test_a_dropped_group_is_replaced_while_others_are_still_sampled() -> None:
    def delay(n: int) -> float:
        if n == 0:
            wait_until(lambda: len(engine.asked) == 3)
        return QUICK

    engine = StandInEngine(delay)
    rollouts(engine).collect(Prompts(), order(wanted=2, select=dropping(lambda n: n == 1), refill_rounds=1))
    # Prompt 2 was asked for before prompt 0, which is the slowest, was done: all three before the end.
    assert [request.tokens for request in engine.asked] == [(0,), (1,), (2,)]
    assert engine.beside[2] == 1, "the slow prompts were not sampled together"


def test_stragglers_are_aborted_thrown_away_and_first_in_the_next_step() -> None:
    engine, source = Held({0, 2}), Prompts()
    collector = rollouts(engine, oversample=0.5)
    first = collector.collect(source, order(1))
    assert numbers(first) == [1, 3, 4, 5]
    assert [group.id for group in first.groups] == ["step1-1", "step1-3", "step1-4", "step1-5"]
    assert (pending(collector), engine.running) == ([0, 2], set())
    assert first.metrics["rollout/aborted"] == 2
    engine.version = 1
    engine._delay = lambda _: QUICK
    asked = len(engine.asked)
    second = collector.collect(source, order(2))
    assert [(r.tokens, r.begun) for r in engine.asked[asked : asked + 2]] == [((0,), ()), ((2,), ())]
    assert len(numbers(second)) == 4
    for group in second.groups:
        check_whole(group, oldest=1)
    assert second.metrics["rollout/continued"] == second.metrics["rollout/staleness_max"] == 0


class Held(StandInEngine):
    """Some prompts get two tokens before an abort, all others none before these have one: no clock decides."""

    def __init__(self, prompts: set[int]) -> None:
        super().__init__(self._wait)
        self._changed = threading.Condition()
        self.hold(prompts)

    def hold(self, prompts: set[int]) -> None:
        """From now on these; nothing may be in flight."""
        self._steps = dict.fromkeys(prompts, 0)
        self._aborted = False

    def abort(self, futures: Sequence[Future[list[Completion]]]) -> None:
        with self._changed:
            self._ended |= set(futures)
            self._aborted = self._aborted or bool(futures)
            self._changed.notify_all()
        super().abort(futures)

    def _wait(self, prompt: int) -> float:
        with self._changed:
            if prompt not in self._steps:
                assert self._changed.wait_for(lambda: min(self._steps.values()) > 1, timeout=HANG_S)
                return 0.0
            self._steps[prompt] += 1
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._steps[prompt] == 1 or self._aborted, timeout=HANG_S)
        return 0.0


def test_partial_responses_are_continued_by_the_next_weights() -> None:
    engine, source = Held({0, 2}), Prompts()
    collector = rollouts(engine, oversample=0.5, max_staleness=1)
    assert numbers(collector.collect(source, order(1))) == [1, 3, 4, 5]
    assert engine.running == set()
    engine.version = 1
    engine.hold({6})
    second = collector.collect(source, order(2, wanted=2))
    assert numbers(second) == [0, 2]
    spans = [versions_of(r.completion) for g in second.groups for r in g.responses]
    assert any(set(versions) == {0, 1} for versions in spans), "nothing was continued"
    for group in second.groups:
        check_whole(group, oldest=0)
    assert second.metrics["rollout/continued"] == 2
    assert second.metrics["rollout/staleness_max"] == 1
    assert 0 < second.metrics["rollout/staleness_mean"] < 1
    total = sum(len(versions) for versions in spans)
    assert second.metrics["rollout/staleness_mean"] == sum(v.count(0) for v in spans) / total


def test_kept_stragglers_and_the_next_steps_prompts_run_while_the_policy_learns() -> None:
    collected = threading.Event()

    def delay(n: int) -> float:
        assert n != 0 or collected.wait(HANG_S)
        return QUICK

    engine, source = StandInEngine(delay), Prompts()
    collector = rollouts(engine, oversample=0.5, max_staleness=1, stragglers="keep")
    first = collector.collect(source, order(1))
    collected.set()
    ahead = pending(collector)
    assert 0 not in numbers(first)
    # No more than the one step can train that they may wait for.
    assert len(pending(collector)) == 4 and pending(collector)[0] == 0
    assert len(engine.asked) == source.taken == 4 + 4
    assert first.metrics["rollout/aborted"] == 0
    wait_until(lambda: engine.running == set())
    engine.version = 1
    asked = len(engine.asked)
    second = collector.collect(source, order(2, last=True))
    assert len(engine.asked[asked:]) == 2, "all but the two more that oversampling adds was sampled ahead"
    assert set(numbers(second)) == set(ahead)
    assert second.metrics["rollout/staleness_mean"] == 1.0
    assert second.metrics["rollout/continued"] == 4
    assert engine.running == set()


def test_what_is_to_be_done_meanwhile_is_done_while_engines_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_collector, "_LOOK_S", 0.01)
    running: list[int] = []

    def until_looked(_: int) -> float:
        wait_until(lambda: running.count(4) > 1)
        return QUICK

    engine = StandInEngine(until_looked)
    maker = GroupMaker(DirectJudge({"echo": right}), lambda rows: ["x"] * len(rows), SAMPLING, 3, seed=5)
    collector = AsyncRollouts(engine, maker, RolloutConfig(), lambda: running.append(len(engine.running)))
    assert numbers(collector.collect(Prompts(), order())) == [0, 1, 2, 3]
    assert running.count(4) > 1


def test_a_prompt_over_which_engines_were_lost_is_asked_for_once_more() -> None:
    engine = StandInEngine(lambda _: QUICK, lose={1: 1, 2: 5})
    found = rollouts(engine).collect(Prompts(), order())
    assert numbers(found) == [0, 1, 2, 3]
    outcomes = [{r.verdict.outcome for r in group.responses} for group in found.groups]
    assert outcomes == [{Outcome.CORRECT}, {Outcome.CORRECT}, {Outcome.INFRA}, {Outcome.CORRECT}]
    assert [c.completion.finish_reason for c in found.groups[2].responses] == [FinishReason.ABORT] * 3
    assert [r.tokens for r in engine.asked].count((2,)) == 2
    assert found.metrics["rollout/retried"] == 2


def test_requests_that_the_engine_itself_sent_again_count_by_step() -> None:
    class Retrying(StandInEngine):
        def submit(self, *args):  # type: ignore[no-untyped-def]
            self.retried += 1
            return super().submit(*args)

    engine, source = Retrying(lambda _: QUICK), Prompts()
    engine.retried = 100
    collector = rollouts(engine)
    assert [collector.collect(source, order(step)).metrics["rollout/retried"] for step in (1, 2)] == [4, 4]


def test_a_refused_prompt_is_an_outcome_but_engines_that_refuse_all_are_a_mistake() -> None:
    found = rollouts(StandInEngine(lambda _: QUICK, refuse=[2])).collect(Prompts(), order())
    assert {r.verdict.outcome for r in found.groups[2].responses} == {Outcome.INFRA}
    assert found.metrics["rollout/unsampled"] == 1
    with pytest.raises(UserError, match="sampled none of 4 prompts; the first: prompt 0 is not for me"):
        rollouts(StandInEngine(lambda _: QUICK, refuse=range(9))).collect(Prompts(), order())


def test_an_on_policy_step_never_takes_other_tokens() -> None:
    engine = StandInEngine(lambda _: 0.01)
    collector = rollouts(engine)
    real = engine.submit

    def late(*args):  # type: ignore[no-untyped-def]
        engine.version = -1
        return real(*args)

    engine.submit = late  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="an on-policy step got tokens of an earlier version"):
        collector.collect(Prompts(), order(wanted=1))


@each_case(("wanted", "share", "runs"), [(10, 0.1, 11), (10, 0.11, 12), (3, 0.0, 3), (30, 0.1, 33)])
def test_how_many_prompts_run(wanted: int, share: float, runs: int) -> None:
    assert prompts_at_once(wanted, share) == runs
