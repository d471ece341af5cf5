"""The fleet over stand-ins: sampling, outcomes of single prompts, engines that die, hang or misbehave meanwhile."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from waiting import HANG_S, wait_until

from megasharp.common.errors import EnginesLost, RunFailed, UserError
from megasharp.common.records import Completion, FinishReason, GenerateRequest, Plausible, SamplingParams, VersionSpan
from megasharp.rollout.sglang.client.router import RouterSettings
from tests.unit.rollout.sglang.conftest import HASTY, Limited, Make
from tests.unit.rollout.sglang.standin import sampled

SAMPLING = SamplingParams(max_tokens=4)


def prompts(count: int, samples: int = 3) -> list[GenerateRequest]:
    return [GenerateRequest((number, 7), tuple(range(100 * number, 100 * number + samples))) for number in range(count)]


def check_all(requests: Sequence[GenerateRequest], found: list[list[Completion]]) -> None:
    """Every sample is there, in its place, with its seed's tokens."""
    assert len(found) == len(requests)
    for request, completions in zip(requests, found, strict=True):
        assert [c.seed for c in completions] == list(request.seeds)
        for completion in completions:
            assert completion.tokens.tolist() == sampled(list(request.tokens), completion.seed, 4)
            assert completion.finish_reason is FinishReason.LENGTH


def engine_of(completion: Completion) -> int:
    return -int(completion.policy_logp[0]) - 1


def test_samples_come_back_in_order_with_everything(make: Make) -> None:
    fleet = make(2).fleet
    requests = prompts(9)
    found = fleet.generate(requests, SAMPLING)
    check_all(requests, found)
    first = found[0][0]
    assert first.tokens.dtype == torch.int64
    assert first.sampler_logp.dtype == first.policy_logp.dtype == torch.float32
    assert first.memory_logp is None
    assert first.version_spans == (VersionSpan(-1, 0, 4),)
    assert fleet.version == -1
    assert fleet.healthy()


def test_no_requests_and_no_samples(make: Make) -> None:
    fleet = make(1).fleet
    assert fleet.generate([], SAMPLING) == []


def test_memory_fields_arrive(make: Make) -> None:
    fleet = make(1, memory=True).fleet
    sampling = SamplingParams(max_tokens=4, memory_mu=0.25, plausible=Plausible(min_p=0.1))
    completion = fleet.generate(prompts(1), sampling)[0][0]
    assert completion.sampler_logp.tolist() == [-0.25] * 4
    assert completion.policy_logp.tolist() == [-1.0] * 4
    assert completion.memory_logp is not None
    assert completion.memory_logp.tolist() == [-9.0] * 4


def test_memory_asked_of_engines_without_one(make: Make) -> None:
    fleet = make(1).fleet
    with pytest.raises(UserError, match=r"memory_mu is 0\.5, but the engines hold no memory network"):
        fleet.generate(prompts(1), SamplingParams(max_tokens=4, memory_mu=0.5))


def test_log_probs_that_are_not_finite(make: Make) -> None:
    fleet = make(1, memory=True, nan=True).fleet
    with pytest.raises(UserError, match="the memory network's logits are not finite"):
        fleet.generate(prompts(1), SamplingParams(max_tokens=4, memory_mu=0.5))


def test_a_prompts_samples_share_an_engine_and_engines_share_the_prompts(make: Make) -> None:
    stand_ins = make(3, delay=3600.0)
    futures = [stand_ins.fleet.submit(request, SAMPLING) for request in prompts(18)]
    wait_until(lambda: [stand_ins.command(index)["at_once"] for index in range(3)] == [18, 18, 18])
    for index in range(3):
        stand_ins.command(index, {})
    engines = [{engine_of(completion) for completion in future.result(timeout=HANG_S)} for future in futures]
    assert Counter(engine for (engine,) in engines) == {0: 6, 1: 6, 2: 6}


def test_the_least_loaded_engine_is_the_one_with_the_fewest_tokens(make: Make) -> None:
    """One prompt of many samples weighs as much as many prompts of one."""
    stand_ins = make(2, delay=3600.0)
    light = [GenerateRequest((2 + number, 7), (number,)) for number in range(10)]
    futures = [stand_ins.fleet.submit(GenerateRequest((1, 7), tuple(range(20))), SAMPLING)]
    wait_until(lambda: stand_ins.command(0)["generated"] == [1] * 20)
    futures += [stand_ins.fleet.submit(request, SAMPLING) for request in light]
    wait_until(lambda: sorted(stand_ins.command(1)["generated"]) == [request.tokens[0] for request in light])
    stand_ins.fleet.abort(futures)


def test_an_engine_gets_what_it_can_run_and_a_small_queue(make: Make) -> None:
    stand_ins = make(2, delay=3600.0, running=3)
    futures = [stand_ins.fleet.submit(request, SAMPLING) for request in prompts(20)]
    wait_until(lambda: [stand_ins.command(index)["at_once"] for index in (0, 1)] == [3, 3])
    for index in (0, 1):
        stand_ins.command(index, {})
    check_all(prompts(20), [future.result(timeout=HANG_S) for future in futures])
    assert [stand_ins.command(index)["most_held"] for index in (0, 1)] == [5, 5]


@pytest.mark.parametrize(
    ("tokens", "why"),
    [
        ((), "it is empty"),
        (tuple([5] * 100), "it has 100 tokens, and the engines take fewer than 100"),
        (tuple([5] * 100_000), "it has 100000 tokens"),
        ((5, 50), "the engine refused it: token ids outside the vocabulary"),
    ],
)
def test_a_bad_prompt_is_an_outcome_of_its_own(make: Make, tokens: tuple[int, ...], why: str) -> None:
    stand_ins = make(2)
    good = prompts(3)
    found = stand_ins.fleet.generate([good[0], GenerateRequest(tokens, (1, 2)), *good[1:]], SAMPLING)
    bad = found.pop(1)
    check_all(good, found)
    assert [(c.finish_reason, c.tokens.numel(), c.seed) for c in bad] == [
        (FinishReason.ABORT, 0, 1),
        (FinishReason.ABORT, 0, 2),
    ]
    assert all(c.sampler_logp.numel() == c.policy_logp.numel() == 0 for c in bad)
    assert [line for line in stand_ins.told if why in line]
    assert stand_ins.conditions() == ["serving", "serving"]


def test_a_stream_answers_each_prompt_and_knows_what_engines_run(make: Make) -> None:
    """A prompt that is refused is one prompt's failure, told once another is sampled; a lost engine counts only
    where no other is left."""
    stand_ins = make(2, running=3)
    assert stand_ins.fleet.capacity == 6
    requests = [GenerateRequest((5, 50), (1, 2)), *prompts(12)]
    with stand_ins.fleet.stream([(request, SAMPLING) for request in requests], 9) as ended:
        found = list(ended)
    assert found[0][0] != 0
    done = dict(found)
    check_all(requests[1:], [done[place] for place in range(1, 13)])
    assert [(c.finish_reason, c.seed) for c in done[0]] == [(FinishReason.ABORT, 1), (FinishReason.ABORT, 2)]
    assert "outside the vocabulary" in done[0][0].cause
    for number, left in ((0, 3), (1, 6)):
        os.kill(stand_ins.fleet.members.all[number].process.pid, signal.SIGKILL)
        wait_until(lambda expected=left: stand_ins.fleet.capacity == expected)


@pytest.mark.parametrize("token", [60, -1])
def test_a_token_outside_the_vocabulary_never_reaches_an_engine(make: Make, token: int) -> None:
    stand_ins = make(1)
    with pytest.raises(UserError, match="but the model's vocabulary has 60; check that the tokenizer belongs"):
        stand_ins.fleet.generate([*prompts(2), GenerateRequest((3, token), (1,))], SAMPLING)
    assert stand_ins.command(0)["generated"] == []


def test_only_bad_prompts_are_no_dead_step_either(make: Make) -> None:
    stand_ins = make(1)
    found = stand_ins.fleet.generate([GenerateRequest((), (1,)), GenerateRequest((5,) * 5000, (2,))], SAMPLING)
    assert [completions[0].finish_reason for completions in found] == [FinishReason.ABORT] * 2
    assert len(stand_ins.told) == 1, "one line for all of them"


def test_engines_that_refuse_every_prompt_are_a_mistake_of_the_setup(make: Make) -> None:
    fleet = make(2, **{"/generate": "refuse"}).fleet
    with pytest.raises(UserError, match="sampled none of 3 requests; the first: the engine refused it: told to refuse"):
        fleet.generate(prompts(3), SAMPLING)


def test_a_prompt_over_its_time_limit_keeps_what_it_has(make: Make) -> None:
    stand_ins = make(1, delay=3600.0, request_limit_s=0.5)
    found = stand_ins.fleet.generate(prompts(1, samples=2), SAMPLING)
    assert [(c.finish_reason, c.tokens.numel()) for c in found[0]] == [(FinishReason.ABORT, 1)] * 2
    assert stand_ins.command(0)["aborts"] == 0, "the engine keeps the limit"
    assert stand_ins.conditions() == ["serving"]


def test_an_engine_killed_while_it_samples(make: Make) -> None:
    stand_ins = make(2, delay=3600.0)
    victim = stand_ins.fleet.members.all[0].process

    def kill() -> None:
        os.kill(victim.pid, signal.SIGKILL)
        stand_ins.command(1, {})

    killer = stand_ins.once_sampling(0, kill)
    requests = prompts(8)
    found = stand_ins.fleet.generate(requests, SAMPLING)
    killer.join()
    check_all(requests, found)
    assert {engine_of(c) for completions in found for c in completions} == {1}
    wait_until(lambda: stand_ins.conditions() == ["dead", "serving"])
    assert "engine 0 is lost: dead (its process was killed by SIGKILL)" in stand_ins.told[0]
    check_all(requests, stand_ins.fleet.generate(requests, SAMPLING))


def test_an_engine_that_hangs_while_it_samples(make: Make, limited: Limited) -> None:
    """Stopped, so that its sockets stay open: only the probes notice."""
    stand_ins = make(2, delay=3600.0, watch=HASTY)
    victim = stand_ins.fleet.members.all[0].process
    limited(victim.api, "/health", "/model_info")

    def stop() -> None:
        os.kill(victim.pid, signal.SIGSTOP)
        stand_ins.command(1, {})

    stopper = stand_ins.once_sampling(0, stop)
    requests = prompts(8)
    check_all(requests, stand_ins.fleet.generate(requests, SAMPLING))
    stopper.join()
    assert stand_ins.conditions() == ["dead", "serving"]


def test_an_engine_that_answers_with_errors(make: Make) -> None:
    stand_ins = make(2)
    stand_ins.command(0, {"/generate": "fail"})
    requests = prompts(8)
    found = stand_ins.fleet.generate(requests, SAMPLING)
    check_all(requests, found)
    assert {engine_of(c) for completions in found for c in completions} == {1}


def test_an_engine_killed_while_idle(make: Make) -> None:
    stand_ins = make(2)
    os.kill(stand_ins.fleet.members.all[1].process.pid, signal.SIGKILL)
    requests = prompts(4)
    check_all(requests, stand_ins.fleet.generate(requests, SAMPLING))
    wait_until(lambda: stand_ins.conditions() == ["serving", "dead"])
    assert stand_ins.fleet.healthy()


def test_all_engines_lost(make: Make) -> None:
    stand_ins = make(2, delay=3600.0)
    for member in stand_ins.fleet.members.all:
        threading.Timer(0.3, os.kill, (member.process.pid, signal.SIGKILL)).start()
    with pytest.raises(RunFailed) as raised:
        stand_ins.fleet.generate(prompts(5), SAMPLING)
    text = str(raised.value)
    assert "no engine is left to sample with" in text
    for index in (0, 1):
        assert f"engine {index} is dead (its process was killed by SIGKILL)" in text
        assert f"engine_{index}.log" in text
    assert "\n" not in text
    assert not stand_ins.fleet.healthy()


def test_a_prompt_that_kills_engines_is_given_up(make: Make) -> None:
    """Two engines are lost over it, the third goes on."""
    stand_ins = make(3, die_on_token=13, router=RouterSettings(attempts=2))
    good = prompts(6)
    with pytest.raises(EnginesLost):
        stand_ins.fleet.submit(GenerateRequest((13,), (1,)), SAMPLING).result(timeout=HANG_S)
    check_all(good, stand_ins.fleet.generate(good, SAMPLING))
    wait_until(lambda: sorted(stand_ins.conditions()) == ["dead", "dead", "serving"])


def test_an_engine_that_claims_other_weights_gets_no_requests(make: Make) -> None:
    stand_ins = make(2)
    stand_ins.command(1, {"version": "7"})
    wait_until(lambda: stand_ins.conditions() == ["serving", "stale"])
    found = stand_ins.fleet.generate(prompts(6), SAMPLING)
    assert {engine_of(completions[0]) for completions in found} == {0}
    stand_ins.command(1, {})
    wait_until(lambda: stand_ins.conditions() == ["serving", "serving"])


def test_an_engine_that_fails_right_after_its_start(make: Make) -> None:
    with pytest.raises(
        UserError, match=r"the engines started, but one then failed: status 500: told to fail; see .*logs"
    ):
        make(2, **{"/server_info": "fail"})


def test_a_closed_fleet(make: Make) -> None:
    stand_ins = make(2)
    stand_ins.fleet.close()
    stand_ins.fleet.close()
    assert not stand_ins.fleet.healthy()
    with pytest.raises(RuntimeError, match="closed"):
        stand_ins.fleet.generate(prompts(1), SAMPLING)
    with pytest.raises(RuntimeError, match="closed"):
        stand_ins.fleet.updating(1).__enter__()
