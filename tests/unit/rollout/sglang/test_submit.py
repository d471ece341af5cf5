"""Requests to a fleet of stand-ins one at a time: continued, aborted, sent again, given up."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import wait
from dataclasses import replace
from typing import Any

import pytest
from waiting import HANG_S, wait_until

from megasharp.common import signals
from megasharp.common.errors import EnginesLost, NotSampled, RunFailed, UserError
from megasharp.common.records import FinishReason, GenerateRequest, TaskAnswer
from megasharp.rollout.sglang.client import router
from megasharp.rollout.sglang.client.api import EngineApi
from megasharp.rollout.sglang.client.router import RouterSettings
from tests.unit.rollout.sglang.conftest import Make
from tests.unit.rollout.sglang.standin import sampled
from tests.unit.rollout.sglang.test_fleet import SAMPLING, check_all, engine_of, prompts


def test_requests_are_answered_as_they_come(make: Make) -> None:
    fleet = make(2).fleet
    requests = prompts(6)
    futures = [fleet.submit(request, SAMPLING) for request in requests]
    check_all(requests, [future.result(timeout=HANG_S) for future in futures])
    assert fleet.retried == 0


def test_a_continued_response_is_only_what_is_new(make: Make) -> None:
    fleet = make(1).fleet
    begun, fresh = fleet.submit(GenerateRequest((6, 7), (1, 2), ((8, 9, 10), ())), SAMPLING).result(timeout=HANG_S)
    assert begun.tokens.tolist() == sampled([6, 7, 8, 9, 10], 1, 1)
    assert fresh.tokens.tolist() == sampled([6, 7], 2, 4)


def test_what_was_begun_counts_for_length_and_vocabulary(make: Make) -> None:
    stand_ins = make(1)
    long = GenerateRequest((5,) * 60, (1, 2), ((), (6,) * 40))
    found = stand_ins.fleet.submit(long, SAMPLING).result(timeout=HANG_S)
    assert [(c.finish_reason, c.tokens.numel()) for c in found] == [(FinishReason.ABORT, 0)] * 2
    assert "it has 100 tokens" in stand_ins.told[0]
    with pytest.raises(UserError, match="vocabulary has 60"):
        stand_ins.fleet.submit(GenerateRequest((5,), (1,), ((60,),)), SAMPLING)
    assert stand_ins.command(0)["generated"] == []


def test_aborted_requests_end_with_what_they_have_and_the_others_go_on(make: Make) -> None:
    stand_ins = make(2, delay=3600.0)
    requests = prompts(6)
    futures = [stand_ins.fleet.submit(request, SAMPLING) for request in requests]
    wait_until(lambda: sum(stand_ins.command(index)["at_once"] for index in (0, 1)) == 18)
    stand_ins.fleet.abort(futures[:4])
    assert [future.done() for future in futures] == [True] * 4 + [False] * 2
    for future in futures[:4]:
        assert [(c.finish_reason, c.tokens.numel()) for c in future.result()] == [(FinishReason.ABORT, 1)] * 3
    for index in (0, 1):
        stand_ins.command(index, {})
    check_all(requests[4:], [future.result(timeout=HANG_S) for future in futures[4:]])
    stand_ins.fleet.abort(futures)


def test_an_abort_does_not_overtake_its_request(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang forgets an abort of a request that it does not have yet."""
    sent, aborted = dict[str, float](), dict[str, float]()
    generate, abort = EngineApi.generate, EngineApi.abort

    async def generating(*arguments: Any) -> Any:
        sent[arguments[3][0]] = time.monotonic()
        return await generate(*arguments)

    async def aborting(api: EngineApi, name: str | None = None) -> None:
        assert name is not None, "the other request goes on"
        aborted.setdefault(name, time.monotonic())
        await abort(api, name)

    monkeypatch.setattr(EngineApi, "generate", generating)
    monkeypatch.setattr(EngineApi, "abort", aborting)
    stand_ins = make(1, delay=3600.0)
    future, _ = [stand_ins.fleet.submit(request, SAMPLING) for request in prompts(2)]
    wait_until(lambda: len(sent) == 6)
    stand_ins.fleet.abort([future])
    assert len(aborted) == 3 and min(aborted[name] - sent[name] for name in aborted) >= router._ABORT_S - 0.05
    assert [c.tokens.numel() for c in future.result()] == [1, 1, 1]


def test_all_that_an_engine_has_ends_in_one_call(make: Make) -> None:
    """A waiting response gets its place only afterwards."""
    stand_ins = make(1, delay=3600.0, running=20)
    ended, others = prompts(9)[:8], prompts(9)[8:]
    futures = [stand_ins.fleet.submit(request, SAMPLING) for request in ended]
    wait_until(lambda: stand_ins.command(0)["held"] == 22)
    going_on = [stand_ins.fleet.submit(request, SAMPLING) for request in others]
    stand_ins.fleet.abort(futures)
    assert stand_ins.command(0)["aborts"] <= 2, "asked again after a while"
    stand_ins.command(0, {})
    check_all(others, [future.result(timeout=HANG_S) for future in going_on])


def test_requests_that_no_engine_has_yet_are_answered_at_once_without_tokens(make: Make) -> None:
    stand_ins = make(1, delay=3600.0, running=1)
    requests = prompts(4)
    futures = [stand_ins.fleet.submit(request, SAMPLING) for request in requests]
    wait_until(lambda: stand_ins.command(0)["generated"] == [0] * 3)
    stand_ins.fleet.abort(futures[1:])
    assert [[c.tokens.numel() for c in future.result()] for future in futures[1:]] == [[0, 0, 0]] * 3
    stand_ins.command(0, {})
    check_all(requests[:1], [futures[0].result(timeout=HANG_S)])
    assert stand_ins.command(0)["generated"] == [0] * 3, "what was aborted was not sent"


def test_engines_are_idle_after_a_save_was_asked_for(make: Make) -> None:
    """An evaluation is cut short. The signal comes twice, as where both a job and its step are sent one."""
    stand_ins = make(1, delay=3600.0, running=2)

    def send() -> None:
        wait_until(lambda: stand_ins.command(0)["held"] == 4)
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGUSR1)

    sender = threading.Thread(target=send)
    try:
        with signals.save_heard(), pytest.raises(signals.SaveAsked), signals.interruptible():
            sender.start()
            stand_ins.fleet.generate(prompts(5), SAMPLING)
    finally:
        sender.join()
        signals._State.save = None
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    found = stand_ins.command(0)
    assert found["held"] == 0 and len(found["generated"]) == 4, "the others were not sent"


def test_aborting_on_an_engine_that_dies(make: Make) -> None:
    stand_ins = make(2, delay=3600.0)
    futures = [stand_ins.fleet.submit(request, SAMPLING) for request in prompts(4)]
    wait_until(lambda: all(stand_ins.command(index)["at_once"] == 6 for index in (0, 1)))
    victim = stand_ins.fleet.members.all[0].process
    os.kill(victim.pid, signal.SIGKILL)
    stand_ins.fleet.abort(futures)
    found = [future.result() for future in futures]
    assert {c.finish_reason for completions in found for c in completions} == {FinishReason.ABORT}
    # What the dead engine had is lost, or was sent to the other one before the abort met it.
    counts = sorted(completions[0].tokens.numel() for completions in found)
    assert counts[2:] == [1, 1] and set(counts) <= {0, 1}


def test_what_a_lost_engine_had_is_sent_again_and_counted(make: Make) -> None:
    stand_ins = make(2, delay=3600.0)
    requests = prompts(4)
    futures = [stand_ins.fleet.submit(request, SAMPLING) for request in requests]
    wait_until(lambda: stand_ins.command(0)["at_once"] == 6)
    os.kill(stand_ins.fleet.members.all[0].process.pid, signal.SIGKILL)
    stand_ins.command(1, {})
    found = [future.result(timeout=HANG_S) for future in futures]
    check_all(requests, found)
    assert {engine_of(c) for completions in found for c in completions} == {1}
    assert stand_ins.fleet.retried == 6
    lost = sorted(seed for request in requests[::2] for seed in request.seeds)
    assert (sorted(stand_ins.fleet.take_retried()), stand_ins.fleet.take_retried()) == (lost, [])


def test_a_request_that_kills_engines_says_so(make: Make) -> None:
    stand_ins = make(3, die_on_token=13, router=RouterSettings(attempts=2))
    future = stand_ins.fleet.submit(GenerateRequest((13,), (1,)), SAMPLING)
    with pytest.raises(EnginesLost, match=r"given up after several engines failed: engine \d"):
        future.result(timeout=HANG_S)
    assert stand_ins.fleet.retried == 1
    assert any("a prompt got no samples: it was given up" in line for line in stand_ins.told)


def test_a_refusal_is_not_the_engines_fault(make: Make) -> None:
    stand_ins = make(1)
    future = stand_ins.fleet.submit(GenerateRequest((5, 50), (1,)), SAMPLING)
    with pytest.raises(NotSampled, match="the engine refused it: token ids outside the vocabulary") as raised:
        future.result(timeout=HANG_S)
    assert not isinstance(raised.value, EnginesLost)
    assert stand_ins.conditions() == ["serving"]


def test_all_engines_lost_is_a_failure_of_the_run(make: Make) -> None:
    stand_ins = make(1, delay=3600.0)
    future = stand_ins.fleet.submit(prompts(1)[0], SAMPLING)
    wait_until(lambda: stand_ins.command(0)["at_once"] == 3)
    os.kill(stand_ins.fleet.members.all[0].process.pid, signal.SIGKILL)
    with pytest.raises(RunFailed, match="no engine is left to sample with"):
        future.result(timeout=HANG_S)


def test_closing_ends_what_is_in_flight(make: Make) -> None:
    stand_ins = make(1, delay=3600.0)
    futures = [stand_ins.fleet.submit(request, SAMPLING) for request in prompts(2)]
    wait_until(lambda: stand_ins.command(0)["at_once"] == 6)
    stand_ins.fleet.close()
    assert not wait(futures, timeout=HANG_S).not_done


@pytest.mark.parametrize(("length", "samples", "requests"), [(64, 3, 4), (63, 3, 3), (64, 1, 1)])
def test_a_long_prompt_is_read_once_before_its_samples(make: Make, length: int, samples: int, requests: int) -> None:
    stand_ins = make(1)
    request = GenerateRequest((5,) * length, tuple(range(samples)))
    check_all([request], [stand_ins.fleet.submit(request, SAMPLING).result(timeout=HANG_S)])
    assert stand_ins.command(0)["generated"] == [5] * requests


def test_a_long_prompt_that_is_refused_is_not_sampled(make: Make) -> None:
    stand_ins = make(1)
    future = stand_ins.fleet.submit(GenerateRequest((55,) * 70, (1, 2)), SAMPLING)
    with pytest.raises(NotSampled, match="the engine refused it: token ids outside the vocabulary"):
        future.result(timeout=HANG_S)


def test_the_next_turn_goes_to_the_engine_that_has_read_the_turns_before(make: Make) -> None:
    """Idle engines take turns, so without that the second round would come to the other one of each."""
    stand_ins = make(2)
    first = [GenerateRequest((10 + seed, 7), (seed,), episode=TaskAnswer()) for seed in range(1, 5)]
    answers = [stand_ins.fleet.submit(request, SAMPLING).result(timeout=HANG_S)[0].tokens.tolist() for request in first]
    had = [len(stand_ins.command(index)["generated"]) for index in (0, 1)]
    assert had == [2, 2]
    for request, said in [*zip(first, answers, strict=True)][::-1]:
        later = replace(request, begun=((*said[:2], 9),))
        stand_ins.fleet.submit(later, SAMPLING).result(timeout=HANG_S)
    for index in (0, 1):
        prompts_begin = stand_ins.command(index)["generated"]
        assert prompts_begin[had[index] :] == prompts_begin[: had[index]][::-1]
