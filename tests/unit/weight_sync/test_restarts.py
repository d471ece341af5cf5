"""Engines that were lost and restart: they serve nothing before they hold the current weights, or stay out."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
from waiting import HANG_S, wait_until

from megasharp.common.errors import UserError
from megasharp.common.records import GenerateRequest, SamplingParams
from megasharp.rollout.sglang.client.fleet import LocalStarter
from megasharp.rollout.sglang.client.members import Member, Members
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
    assert stand_ins.told[1:3] == ["engine 1 did not restart: no room"] * 2


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
