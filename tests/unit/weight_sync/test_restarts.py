"""Engines that were lost and restart: they serve nothing before they hold the current weights, or stay out."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
from waiting import HANG_S, wait_until

from megasharp.common.errors import RunFailed, UserError
from megasharp.common.records import GenerateRequest, SamplingParams
from megasharp.rollout.sglang.client.fleet import LocalStarter, LocalStarting, Sleeper
from megasharp.rollout.sglang.client.members import Member, Members
from megasharp.weight_sync.colocation import Colocated
from megasharp.weight_sync.push import FleetSync
from tests.unit.rollout.sglang.conftest import HASTY, Limited, Make, StandIns, running
from tests.unit.weight_sync.conftest import memory, source, sums, weights

SAMPLING = SamplingParams(max_tokens=4)
REQUESTS = [GenerateRequest((number, 7), (number,)) for number in range(12)]
MakeSync = Callable[..., FleetSync]


def lose(stand_ins: StandIns, index: int, how: signal.Signals = signal.SIGKILL) -> None:
    member = stand_ins.fleet.members.all[index]
    os.kill(stand_ins.command(index)["pid"], how)
    wait_until(lambda: not member.health.alive)


def push_until(stand_ins: StandIns, pushing: FleetSync, line: str) -> int:
    """Push again and again until a line begins so; returns the last version."""
    deadline = time.monotonic() + HANG_S
    while True:
        version = pushing.push(source(pushing.version + 1))
        if any(told.startswith(line) for told in stand_ins.told):
            return version
        assert time.monotonic() < deadline, stand_ins.told
        time.sleep(0.05)


@pytest.mark.parametrize("kind", ["shared_memory", "disk"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_that_was_lost_serves_again_once_it_holds_the_weights(
    make: Make, sync: MakeSync, limited: Limited, kind: str, how: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_ins = make(2, restarts=3, watch=HASTY)
    pushing = sync(stand_ins, kind)
    pushing.push(source(0))
    limited(stand_ins.fleet.members.all[1].process.api, "/health", "/model_info")
    first = stand_ins.fleet.members.all[1].process.pid  # type: ignore[attr-defined]
    lose(stand_ins, 1, how)
    deliver, before = type(pushing._transport).deliver, []

    def look_and_deliver(*arguments: object) -> None:
        before.append((stand_ins.conditions(), stand_ins.command(0)["generated"]))
        if stand_ins.conditions()[1] != "dead":
            assert stand_ins.command(1)["generated"] == []
        deliver(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(type(pushing._transport), "deliver", look_and_deliver)
    version = push_until(stand_ins, pushing, "engine 1 is back")
    assert [conditions for conditions, _ in before] == [["stale", "dead"]] * (len(before) - 1) + [["stale", "stale"]]
    assert stand_ins.conditions() == ["serving", "serving"]
    assert stand_ins.command(1)["loaded"] == sums(weights(version))
    found = stand_ins.fleet.generate(REQUESTS, SAMPLING)
    assert {completions[0].version_spans[0].version for completions in found} == {version}
    assert {int(completions[0].policy_logp[0]) for completions in found} == {-1, -2}, "both engines sample"
    assert not running(first)


def test_between_its_return_and_the_push_it_gets_nothing(
    make: Make, sync: MakeSync, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_ins = make(2, restarts=1)
    sync(stand_ins, "shared_memory").push(source(0))
    lose(stand_ins, 1)
    restarts = stand_ins.fleet._restarts
    assert restarts is not None

    def looked() -> bool:
        restarts.look()
        return stand_ins.conditions()[1] != "dead"

    wait_until(looked)
    probe, probed = Members.probe, list[Member]()

    def note(members: Members, member: Member) -> None:
        probe(members, member)
        probed.append(member)

    monkeypatch.setattr(Members, "probe", note)
    wait_until(lambda: probed.count(stand_ins.fleet.members.all[1]) == 2)
    assert stand_ins.conditions() == ["serving", "stale"], "probes change nothing"
    stand_ins.fleet.generate(REQUESTS, SAMPLING)
    assert stand_ins.command(1)["generated"] == []


def test_an_engine_that_is_lost_again_and_again_stays_out(make: Make, sync: MakeSync) -> None:
    stand_ins = make(2, restarts=2)
    pushing = sync(stand_ins, "shared_memory")
    pushing.push(source(0))
    for _ in range(2):
        lose(stand_ins, 1)
        push_until(stand_ins, pushing, "engine 1 is back")
        stand_ins.told.clear()
    lose(stand_ins, 1)
    version = push_until(stand_ins, pushing, "engine 1 stays out: lost 3 times within 60 minutes")
    told = list(stand_ins.told)
    for _ in range(3):
        version = pushing.push(source(version + 1))
    assert stand_ins.told == told and stand_ins.conditions() == ["serving", "dead"]
    stand_ins.fleet.generate(REQUESTS, SAMPLING)


def test_an_engine_lost_while_it_starts_counts_too(make: Make, sync: MakeSync, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins = make(2, restarts=2)
    pushing = sync(stand_ins, "shared_memory")
    pushing.push(source(0))
    lose(stand_ins, 1)

    def refuse(*_: object) -> None:
        raise UserError("no room")

    monkeypatch.setattr(LocalStarter, "begin", refuse)
    push_until(stand_ins, pushing, "engine 1 stays out")
    # Its end may be told once more between.
    restarts = [line for line in stand_ins.told if "did not restart" in line]
    assert restarts == ["engine 1 did not restart: no room"] * 2


def test_where_nothing_is_to_begin_anew_nothing_does(make: Make, sync: MakeSync) -> None:
    stand_ins = make(2)
    pushing = sync(stand_ins, "shared_memory")
    pushing.push(source(0))
    lose(stand_ins, 1)
    for version in range(1, 4):
        pushing.push(source(version))
    assert stand_ins.conditions() == ["serving", "dead"] and len(stand_ins.told) == 1


def test_a_push_of_one_network_of_two_lets_nobody_in(make: Make, sync: MakeSync) -> None:
    """The engine would hold the memory network that it was started with."""
    stand_ins = make(2, memory=True, restarts=1)
    pushing = sync(stand_ins, "shared_memory")
    pushing.push(source(0), memory(0))
    lose(stand_ins, 1)
    pushing.push(source(1), memory(1))
    (starting,) = stand_ins.fleet._restarts._starting.values()  # type: ignore[union-attr]
    wait_until(starting.answered)
    pushing.push(source(2))
    assert stand_ins.conditions() == ["serving", "dead"]
    pushing.push(source(3), memory(2))
    assert stand_ins.conditions() == ["serving", "serving"]
    assert stand_ins.command(1)["loaded"] == stand_ins.command(0)["loaded"]


def test_closing_ends_those_on_their_way_too(make: Make, sync: MakeSync) -> None:
    stand_ins = make(2, restarts=1)
    pushing = sync(stand_ins, "shared_memory")
    pushing.push(source(0))
    lose(stand_ins, 1)
    pushing.push(source(1))
    (starting,) = stand_ins.fleet._restarts._starting.values()  # type: ignore[union-attr]
    group = starting._engine.pid  # type: ignore[attr-defined]
    assert running(group)
    stand_ins.fleet.close()
    assert not running(group)


class Learner:
    """A stand-in that notes how often it left the devices, and whether any engine was alive then."""

    def __init__(self, stand_ins: StandIns) -> None:
        self.stand_ins = stand_ins
        self.here = True
        self.left: list[bool] = []

    def offload(self) -> None:
        self.here = False
        self.left.append(bool(self.stand_ins.fleet.members.alive()))

    def onload(self) -> None:
        self.here = True


def test_requests_wait_for_the_only_engine_and_it_gets_the_weights_of_before_again(make: Make, sync: MakeSync) -> None:
    stand_ins = make(1, restarts=1, memory=True, delay=0.1)
    pushing = sync(stand_ins, "shared_memory")
    stand_ins.fleet.push_again_with(lambda: pushing.push_again(source(4), memory(3)))
    version = pushing.push(source(4), memory(3))
    held = stand_ins.command(0)["loaded"]
    killing = stand_ins.once_sampling(0, lambda: os.kill(stand_ins.command(0)["pid"], signal.SIGKILL))
    found = stand_ins.fleet.generate(REQUESTS, SAMPLING)
    killing.join()
    assert len(found) == len(REQUESTS) and all(len(group) == 1 for group in found)
    assert {group[0].version_spans[0].version for group in found} == {version} == {pushing.version}
    assert stand_ins.command(0)["loaded"] == held == sums(weights(4)) | sums([*memory(3).tensors()], "memory.")
    assert stand_ins.command(0)["stamps"] == [[version, 0, True]], "under the versions of the push before"
    assert stand_ins.fleet.retried >= 1
    assert [line.partition(":")[0] for line in stand_ins.told] == [
        "engine 0 is lost",
        "no engine is left",
        "engine 0 is back; it serves once it holds the weights of the next push",
        "the weights of version 0 were pushed again",
    ]
    lose(stand_ins, 0)
    with pytest.raises(RunFailed, match="no engine is left to sample with: engine 0 is dead"):
        stand_ins.fleet.generate(REQUESTS, SAMPLING)


def on_shared_devices(stand_ins: StandIns, sync: MakeSync) -> tuple[StandIns, Learner, FleetSync, Colocated]:
    """Engines that hold the first weights and no cache, and a learner that has the devices, as between two steps."""
    learner, pushing = Learner(stand_ins), sync(stand_ins, "shared_memory")
    sleeper = Sleeper(stand_ins.fleet.members, stand_ins.fleet.settle)
    sleeper.sleep()
    phases = Colocated([learner], sleeper)
    stand_ins.fleet.push_again_with(lambda: None, phases.lent)
    phases.handover()
    pushing.push(source(0))
    return stand_ins, learner, pushing, phases


def test_on_shared_devices_the_learner_leaves_for_the_only_engine_that_was_lost_asleep(
    make: Make, sync: MakeSync
) -> None:
    stand_ins, learner, pushing, phases = on_shared_devices(make(1, restarts=1, sleep=True), sync)
    phases.sampling()
    phases.training()
    lose(stand_ins, 0)
    stand_ins.fleet.tend()
    assert stand_ins.conditions() == ["dead"] and learner.here, "the learner has the devices"
    phases.handover()
    assert pushing.push(source(1)) == 1
    assert learner.left == [True, False] and learner.here
    assert stand_ins.command(0)["asleep"] == ["kv_cache"], "as engines are while weights come"
    phases.sampling()
    assert stand_ins.command(0)["asleep"] == [] and stand_ins.conditions() == ["serving"]
    assert stand_ins.command(0)["loaded"] == sums(weights(1))


def test_on_shared_devices_one_of_two_restarts_while_engines_sample_and_the_learner_waits_for_it(
    make: Make, sync: MakeSync
) -> None:
    stand_ins, learner, pushing, phases = on_shared_devices(make(2, restarts=1, sleep=True), sync)
    lose(stand_ins, 1)
    stand_ins.fleet.tend()
    assert not stand_ins.fleet._restarts._starting, "a start beside the learner"  # type: ignore[union-attr]
    phases.sampling()
    stand_ins.fleet.tend()
    assert stand_ins.conditions() == ["serving", "dead"]
    phases.training()
    assert stand_ins.conditions() == ["serving", "stale"] and learner.left == [True]
    assert [stand_ins.command(index)["asleep"] for index in (0, 1)] == [["kv_cache", "weights"]] * 2
    assert "the policy waits for engine 1, which shares its devices and still starts" in stand_ins.told
    phases.handover()
    pushing.push(source(1))
    phases.sampling()
    assert stand_ins.conditions() == ["serving", "serving"]
    # The size that its place had at the run's start, not what is free now.
    assert [engine.process.api.cache_size() for engine in stand_ins.fleet.members.all] == [777, 777]
    assert stand_ins.fleet._restarts._caches == {0: 777, 1: 777}  # type: ignore[union-attr]


def test_requests_do_not_go_to_an_engine_that_sleeps_with_the_newest_weights(make: Make, sync: MakeSync) -> None:
    """As in a push in the middle of a step: it serves the version that is wanted, and has no cache yet."""
    stand_ins = make(1, sleep=True)
    sleeper = Sleeper(stand_ins.fleet.members)
    sleeper.rest()
    sync(stand_ins, "shared_memory").push(source(0))
    (future,) = [stand_ins.fleet.submit(request, SAMPLING) for request in REQUESTS[:1]]
    time.sleep(0.1)
    assert stand_ins.conditions() == ["serving"] and stand_ins.command(0)["generated"] == []
    sleeper.wake_cache()
    assert len(future.result(HANG_S)) == 1


def test_where_all_were_lost_asleep_none_still_starts_when_the_learner_is_back(make: Make, sync: MakeSync) -> None:
    stand_ins = make(2, restarts=1, sleep=True)
    learner, pushing = Learner(stand_ins), sync(stand_ins, "shared_memory")
    sleeper = Sleeper(stand_ins.fleet.members, stand_ins.fleet.settle)
    sleeper.sleep()
    phases = Colocated([learner], sleeper)
    stand_ins.fleet.push_again_with(lambda: None, phases.lent)
    for index in (0, 1):
        lose(stand_ins, index)
    phases.handover()
    restarts = stand_ins.fleet._restarts
    assert restarts is not None
    answered = LocalStarting.answered
    left = {0: 0, 1: 2}

    def late(starting: LocalStarting) -> object:
        number = starting._engine.index
        left[number] -= 1
        return answered(starting) if left[number] < 0 else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStarting, "answered", late)
        patch.setattr(learner, "onload", lambda: learner.left.append(not restarts._starting))
        pushing.push(source(0))
    assert learner.left == [False, True], "it left with no engine alive, and came back with none that starts"
    assert stand_ins.conditions() == ["serving", "serving"]
