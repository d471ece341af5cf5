"""Admission: pure rules, and over stand-ins of engines that run a few responses at once."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch
from cases import each_case
from waiting import HANG_S, wait_until

from megasharp.common.records import Completion, FinishReason, GenerateRequest, SamplingParams
from megasharp.config.rollout import RolloutConfig
from megasharp.rollout.sglang.client.admission import Lengths, Load, choose, limits_of
from megasharp.rollout.sglang.client.api import Limits, Room
from megasharp.rollout.sglang.client.members import Member
from megasharp.rollout.sglang.client.router import Router, _Sample, _short_of_its_limit
from tests.unit.rollout.sglang.conftest import Make
from tests.unit.rollout.sglang.test_fleet import SAMPLING, check_all, engine_of, prompts


def filled(load: Load, prompt: str, length: int, expected: float) -> int:
    count = 0
    while load.takes(prompt, length, expected):
        load.add(prompt, length, expected)
        count += 1
    return count


@pytest.mark.parametrize(
    ("responses", "tokens", "count"),
    [(100, 10**9, 110), (4, 10**9, 6), (10**6, 1000 + 93 * 100, 93 + 10), (10**6, 150, 3)],
)
def test_an_engine_is_filled_to_its_room_and_a_tenth_or_two(responses: int, tokens: int, count: int) -> None:
    """The prompt of 1,000 tokens counts once; an engine of which even one takes more than there is gets it and two."""
    assert filled(Load(Room(2000, responses, tokens)), "p", 1000 if tokens > 150 else 10, 100.0) == count


def test_what_leaves_makes_room_for_as_much() -> None:
    load = Load(Room(2000, 10, 10_000))
    for expected in (50.0, 700.0):
        load.add("p", 1000, expected)
    for expected in (50.0, 700.0):
        load.remove("p", 1000, expected)
    assert (load.responses, load.tokens, load.share) == (0, 0.0, 0.0)


def test_a_prompt_stays_at_home_unless_another_engine_is_clearly_less_loaded() -> None:
    home, other = Load(Room(100, 10, 10**6)), Load(Room(100, 10, 10**6))
    filled(home, "q", 1, 1.0)
    for count in range(12):
        found = choose([home, other], [home], lambda load: load.takes("p", 1, 1.0))
        assert found is (other if count <= 8 else None)
        other.add("p", 1, 1.0)
    home.remove("q", 1, 1.0)
    assert choose([home, other], [home], lambda load: load.takes("p", 1, 1.0)) is home
    assert choose([other], [home], lambda load: True) is other, "the home is lost"


def test_lengths_are_learnt_from_half_the_limit_on() -> None:
    lengths, request, sampling = Lengths(), GenerateRequest((1, 2), (0,)), SamplingParams(1000)
    assert lengths.expected(request, 0, sampling) == 500
    assert lengths.expected(request, 900, sampling) == 1000
    for _ in range(16):
        lengths.note(GenerateRequest((3,), (0,)), 100)
    assert lengths.expected(request, 0, sampling) == 300
    assert lengths.expected(GenerateRequest((3,), (0,)), 0, sampling) == 100


def test_the_limit_to_the_first_token_follows_the_other() -> None:
    assert limits_of(RolloutConfig()) == Limits(1800.0, 1800.0)
    assert limits_of(RolloutConfig(request_limit_s=5.0)) == Limits(600.0, 5.0)
    assert limits_of(RolloutConfig(first_token_limit_s=7.0)) == Limits(7.0, 1800.0)


def test_idle_engines_take_turns(make: Make) -> None:
    stand_ins = make(2)
    found = [stand_ins.fleet.generate([one], SAMPLING)[0][0] for one in prompts(4, samples=1)]
    assert [float(completion.policy_logp[0]) for completion in found] == [-1, -2, -1, -2]


def test_time_in_a_queue_does_not_count(make: Make) -> None:
    """8 responses of 0.1 s, one at a time, with 0.4 s for each: whoever counts the wait loses most of them."""
    stand_ins = make(1, running=1, delay=0.1, request_limit_s=0.4)
    requests = prompts(2, samples=4)
    check_all(requests, stand_ins.fleet.generate(requests, SAMPLING))
    assert stand_ins.fleet.retried == 0


def test_the_longest_come_first(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order they are sent: an engine that runs one and queues two may hear of these in any order."""
    stand_ins = make(1, running=1, delay=3600.0)
    fleet, sent, send = stand_ins.fleet, [], Router._send

    def noted(router: Router, sample: _Sample, member: Member) -> None:
        sent.append(sample.whole.request.tokens[0])
        send(router, sample, member)

    monkeypatch.setattr(Router, "_send", noted)
    first = fleet.submit(GenerateRequest((1, 7), (1, 2, 3)), SAMPLING)
    wait_until(lambda: stand_ins.command(0)["generated"] == [1] * 3)
    fresh = fleet.submit(GenerateRequest((2, 7), (1,)), SAMPLING)
    begun = [fleet.submit(GenerateRequest((3 + n, 7), (1,), ((5,) * n,)), SAMPLING) for n in (1, 3, 2)]
    stand_ins.command(0, {})
    for future in (first, fresh, *begun):
        future.result(timeout=HANG_S)
    assert sent == [1, 1, 1, 6, 5, 4, 2]


@pytest.mark.parametrize("barren", [2, 3])
def test_what_ends_without_a_token_is_sent_again_and_given_up_in_the_end(make: Make, barren: int) -> None:
    stand_ins = make(1, barren=barren)
    [completion] = stand_ins.fleet.submit(GenerateRequest((1, 7), (1,)), SAMPLING).result(timeout=HANG_S)
    ended = FinishReason.LENGTH if barren == 2 else FinishReason.ABORT
    assert (completion.finish_reason, stand_ins.fleet.retried) == (ended, 2)


def test_an_abort_finds_an_engine_whose_last_response_was_just_answered(make: Make) -> None:
    router = make(1).fleet._router
    (member,) = router._members.all
    asyncio.run_coroutine_threadsafe(router._end_on(member), router._loop).result(timeout=HANG_S)


@each_case(("tokens", "reason"), [(0, FinishReason.ABORT), (3, FinishReason.ABORT), (4, FinishReason.LENGTH)])
def test_a_response_that_is_cut_short_of_its_limit_did_not_finish(tokens: int, reason: FinishReason) -> None:
    """An engine without room in its cache says `length` as well; it would count as an answer."""
    cut = replace(Completion.unsampled(1, SAMPLING), tokens=torch.arange(tokens), finish_reason=FinishReason.LENGTH)
    judged = _short_of_its_limit(cut, 4)
    assert judged.finish_reason is reason and ("for want of room" in (judged.cause or "")) == (tokens < 4)


def test_what_an_engine_never_begins_goes_to_another(make: Make) -> None:
    """Each response is there once."""
    stand_ins = make(2, running=2, delay=3600.0, first_token_limit_s=0.3)
    requests = prompts(2, samples=4)
    futures = [stand_ins.fleet.submit(request, SAMPLING) for request in requests]
    wait_until(lambda: [stand_ins.command(index)["held"] for index in (0, 1)] == [4, 4])
    stand_ins.command(1, {})
    wait_until(lambda: stand_ins.fleet.retried >= 2)
    wait_until(futures[1].done)
    stand_ins.command(0, {})
    check_all(requests, [future.result(timeout=HANG_S) for future in futures])
    assert {engine_of(completion) for completion in futures[0].result()} == {0, 1}
