"""Limits of a mixture's sources: tokens and numbers of responses of their own, in a step, over stages and a stop."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from waiting import wait_until

from megasharp.checkpoint.rollout_store import read_unfinished, write_unfinished
from megasharp.common.records import Completion, FinishReason, GenerateRequest, Prompt, SamplingParams
from megasharp.config.rollout import RolloutConfig
from megasharp.rollout.async_collector import AsyncRollouts
from megasharp.rollout.batch_collector import Rollouts
from megasharp.rollout.in_flight import Unfinished
from megasharp.rollout.inprocess import InProcessEngine
from megasharp.rollout.step_request import Collected, GroupMaker, SourceLimits
from megasharp.tasks.judge import DirectJudge
from tests.unit.rollout.conftest import MakeModel, engine_of
from tests.unit.rollout.standin_engine import StandInEngine
from tests.unit.rollout.test_async_collector import QUICK, SAMPLING, Prompts, numbers, order, right


class Mixed(Prompts):
    """Every other prompt is of a source with limits of its own."""

    def take(self, count: int) -> list[Prompt]:
        return [replace(each, source="ab"[each.position % 2]) for each in super().take(count)]


def maker(sizes: tuple[int, ...] = (3, 6)) -> GroupMaker:
    limits = {"b": SourceLimits(max_tokens=4, responses=2)}
    judge = DirectJudge({"echo": right})
    return GroupMaker(judge, lambda rows: ["x"] * len(rows), SAMPLING, 3, 5, limits, sizes)


def collector(engine: StandInEngine, **settings: object) -> AsyncRollouts:
    return AsyncRollouts(engine, maker(), RolloutConfig(**settings))  # type: ignore[arg-type]


def check(found: list[tuple[int, list[int]]], responses: int) -> None:
    """By position: those of source b have two responses of at most 4 tokens, in every stage."""
    for position, lengths in found:
        assert len(lengths) == (2 if position % 2 else responses)
        assert max(lengths) <= (4 if position % 2 else 12)


def lengths_in(collected: Collected) -> list[tuple[int, list[int]]]:
    return [(group.prompt.position, [response.length for response in group.responses]) for group in collected.groups]


def test_groups_of_a_step_have_the_sizes_and_lengths_of_their_sources() -> None:
    found = collector(StandInEngine(lambda _: QUICK)).collect(Mixed(), order(1, last=True))
    assert numbers(found) == [0, 1, 2, 3]
    check(lengths_in(found), responses=3)
    assert all(group.begun_limit is None for group in found.groups)
    assert found.tally.metrics()["responses/asked"] == 2 * 3 + 2 * 2


def test_a_later_stage_asks_for_more_responses_of_what_has_not_begun(tmp_path: Path) -> None:
    """Over a stop too: what has begun keeps its number, and nothing is sampled again."""
    settings = {"max_staleness": 1, "stragglers": "keep"}
    engine, source = StandInEngine(lambda _: QUICK), Mixed()
    first = collector(engine, **settings)
    first.collect(source, order(1, responses=3))
    wait_until(lambda: engine.running == set())
    write_unfinished(tmp_path, first.unfinished())
    begun = [unfinished.position for unfinished in first.unfinished()]
    assert begun == [4, 5, 6, 7]
    other, source = StandInEngine(lambda _: QUICK), Mixed()
    other.version, source.taken = 1, 4
    second = collector(other, **settings)
    stored = read_unfinished(tmp_path)
    assert second.take_up(source, stored) == 0
    check(lengths_in(second.collect(source, order(2, responses=6))), responses=3)
    other.version = 2
    check(lengths_in(second.collect(source, order(3, responses=6, last=True))), responses=6)


def test_what_was_only_taken_gets_the_number_of_the_present_stage() -> None:
    engine, source = StandInEngine(lambda _: QUICK), Mixed()
    second = collector(engine, max_staleness=1)
    untouched = [Unfinished.untouched(each, len(maker().request(each).seeds)) for each in Mixed().take(4)]
    assert second.take_up(source, untouched) == 0
    check(lengths_in(second.collect(source, order(1, responses=6, last=True))), responses=6)


def test_a_number_that_no_stage_has_is_sampled_anew() -> None:
    (prompt,) = Mixed().take(1)
    assert len(maker().again(prompt, 6).seeds) == 6 and len(maker(sizes=(3,)).again(prompt, 6).seeds) == 3


def test_an_engine_samples_each_request_up_to_its_own_limit(make_model: MakeModel) -> None:
    engine: InProcessEngine = engine_of(*make_model(), max_batch=4)
    free = [GenerateRequest((3, 7), (1, 2, 3)), GenerateRequest((5,), (4, 5)), GenerateRequest((6, 1), (6,))]
    asked = [free[0], replace(free[1], max_tokens=3), replace(free[2], max_tokens=99)]
    sampling = SamplingParams(max_tokens=8)

    def tokens(samples: list[list[Completion]]) -> list[list[list[int]]]:
        return [[completion.tokens.tolist() for completion in group] for group in samples]

    whole, found = engine.generate(free, sampling), engine.generate(asked, sampling)
    assert tokens(found)[0] == tokens(whole)[0] and tokens(found)[2] == tokens(whole)[2]
    assert tokens(found)[1] == [row[:3] for row in tokens(whole)[1]]
    assert {completion.finish_reason for completion in found[1]} == {FinishReason.LENGTH}


@pytest.mark.parametrize("responses", [None, 6])
def test_a_collector_of_rounds_asks_for_the_same(make_model: MakeModel, responses: int | None) -> None:
    rounds = Rollouts(engine_of(*make_model()), maker())
    check(lengths_in(rounds.collect(Mixed(), order(1, responses=responses))), responses=responses or 3)
