"""Broadcasts to stand-ins: the order of things, and whose fault it is when one fails. No tensor travels here."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from cases import each_case
from torch import Tensor
from waiting import HANG_S, SOON_S, wait_until

from megasharp.common.errors import RunFailed
from megasharp.config.rollout import SyncConfig
from megasharp.rollout.sglang.bucket import new_stamp
from megasharp.rollout.sglang.client.api import EngineApi, EngineFailed, EngineSlow, Refused
from megasharp.weight_sync import broadcast
from megasharp.weight_sync.colocation import Failure, Posts, SharePlan
from megasharp.weight_sync.push import FleetSync
from tests.unit.rollout.sglang.conftest import Limited, Make
from tests.unit.weight_sync.conftest import weights

MakeSync = Callable[..., FleetSync]


@dataclass
class Place:
    pp: int
    exports: bool


class Part:
    """One rank's part: the source of each stage yields half of the tensors, its peer takes part and yields none."""

    device = torch.device("cpu")

    def __init__(self, place: Place) -> None:
        self.place = place
        self.exported = 0

    def export_weights(self, everywhere: bool = False) -> Iterator[tuple[str, Tensor]]:
        named = weights(self.exported)
        self.exported += 1
        if self.place.exports:
            yield from named[:4] if self.place.pp == 0 else named[4:]


class Ranks:
    """A learner over two stages of two ranks, in this process."""

    def __init__(self) -> None:
        self.parts = [Part(Place(pp, exports)) for pp in (0, 1) for exports in (True, False)]

    def call(self, function: Callable[..., Any], *args: object) -> list[Any]:
        return [function(part, *args) for part in self.parts]

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        raise AssertionError("the ranks send for themselves")


class Work:
    def wait(self) -> None:
        pass


class Group:
    """In place of a process group; notes what becomes of it."""

    made: list[Group] = []

    def __init__(self, meeting: object, name: str, world: int, backend: str, limit_s: float) -> None:
        self.name, self.world, self.backend = name, world, backend
        self.sent: list[int] = []
        self.open = True
        Group.made.append(self)

    def broadcast(self, tensor: Tensor) -> Work:
        self.sent.append(tensor.numel())
        return Work()

    def close(self) -> None:
        self.open = False


@pytest.fixture(autouse=True)
def groups(monkeypatch: pytest.MonkeyPatch) -> list[Group]:
    monkeypatch.setattr(Group, "made", [])
    monkeypatch.setattr(broadcast, "SenderGroup", Group)
    monkeypatch.setattr(broadcast, "_GRACE_S", 0.2)
    return Group.made


def names() -> set[str]:
    return {name for name, _ in weights()}


def test_a_group_for_each_stage_in_order_kept_between_pushes(make: Make, sync: MakeSync, groups: list[Group]) -> None:
    stand_ins = make(2, tp=2)
    pushing, policy, memory = sync(stand_ins, "gloo"), Ranks(), Ranks()
    pushing.push(policy, memory)
    pushing.push(policy)
    assert [(group.name.split("-")[1], group.world, group.backend) for group in groups] == [
        ("0", 5, "gloo"),
        ("1", 5, "gloo"),
    ]
    for index in (0, 1):
        holds = stand_ins.command(index)
        assert [seat[0] for seat in holds["groups"].values()] == [1 + 2 * index] * 2
        assert set(holds["loaded"]) == names() | {f"memory.{name}" for name in names()}
        assert {holds["loaded"][name] for name in ("layer.3.weight", "memory.layer.3.weight")} == {"0"}
        assert {holds["loaded"][name] for name in ("layer.4.weight", "memory.norm.weight")} == {"1"}
        assert (holds["version"], holds["session"], holds["paused"]) == ("1", False, False)
        closed = [stamp for stamp in holds["stamps"] if stamp[2]]
        assert closed == [[0, 0, True], [1, None, True]]
    assert [part.exported for part in policy.parts] == [2] * 4, "every rank takes part in each export once"
    sizes = sum(tensor.numel() * 4 for _, tensor in weights())
    assert sum(sum(group.sent) for group in groups) == 3 * sizes, "in float32"


@each_case("deed", ["die", "fail", "refuse", "lie"])
@each_case("path", ["/init_weights_update_group", "/update_weights_from_tensor", "/update_weights_from_distributed"])
def test_the_push_begins_anew_without_who_fails(
    make: Make, sync: MakeSync, groups: list[Group], path: str, deed: str
) -> None:
    stand_ins = make(2)
    pushing, policy = sync(stand_ins, "gloo"), Ranks()
    if path != "/init_weights_update_group":
        pushing.push(policy)
    stand_ins.command(1, {path: deed})
    version = pushing.push(policy)
    assert stand_ins.conditions() == ["serving", "dead"]
    assert any(line.startswith("engine 1 is lost") for line in stand_ins.told)
    holds = stand_ins.command(0)
    assert (holds["version"], set(holds["loaded"])) == (str(version), names())
    assert [group.world for group in groups if group.open] == [2, 2]
    assert len(holds["groups"]) == 2, "the old groups were left"


def test_a_death_that_the_watch_has_seen_before(
    make: Make, sync: MakeSync, groups: list[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_ins = make(2)
    failures = Posts.failures

    def late(posts: Posts, limit_s: float, grace_s: float) -> dict[int, Failure]:
        found = failures(posts, limit_s, grace_s)
        if found:
            wait_until(lambda: stand_ins.conditions()[1] == "dead")
        return found

    monkeypatch.setattr(Posts, "failures", late)
    stand_ins.command(1, {"/update_weights_from_distributed": "die"})
    assert sync(stand_ins, "gloo").push(Ranks()) == 0
    assert stand_ins.conditions() == ["serving", "dead"]
    holds = stand_ins.command(0)
    assert (holds["version"], set(holds["loaded"])) == ("0", names())


def test_one_that_hangs_is_found(
    make: Make, sync: MakeSync, groups: list[Group], limited: Limited, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both were waited for in vain, as in a collective; the one that does not leave it either is at fault."""
    stand_ins, failures = make(2), Posts.failures
    pushing, policy = sync(stand_ins, "gloo", limit_s=1.0), Ranks()
    # Only the calls that hang have these limits.
    monkeypatch.setattr(broadcast, "SETTLE_S", 0.5)
    monkeypatch.setattr(Posts, "failures", lambda posts, _, grace_s: failures(posts, HANG_S, grace_s))
    limited(stand_ins.fleet.members.all[0].process.api)
    pushing.push(policy)
    paths = ("/update_weights_from_distributed", "/destroy_weights_update_group")
    limited(stand_ins.fleet.members.all[0].process.api, *paths)
    stand_ins.command(0, dict.fromkeys(paths, "hang"))
    pushing.push(policy)
    assert stand_ins.conditions() == ["dead", "serving"]
    assert "broadcast of weights: no answer" in stand_ins.told[0]
    assert set(stand_ins.command(1)["loaded"]) == names()


def test_nobody_takes_a_broadcast(make: Make, sync: MakeSync, groups: list[Group]) -> None:
    stand_ins = make(2)
    pushing = sync(stand_ins, "gloo", version=4)
    for index in (0, 1):
        stand_ins.command(index, {"/update_weights_from_distributed": "fail"})
    with pytest.raises(RunFailed, match=r"no engine is left.*engine 0 is dead \(broadcast of weights: status 500"):
        pushing.push(Ranks())
    assert pushing.version == 4
    assert not any(group.open for group in groups)


def test_a_broadcast_that_fails_with_no_engine_at_fault_fails_the_run(
    make: Make, sync: MakeSync, groups: list[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("connection reset")

    stand_ins = make(2)
    monkeypatch.setattr(Group, "__init__", fail)
    with pytest.raises(RunFailed, match=r"the weights could not be broadcast: .*connection reset"):
        sync(stand_ins, "gloo").push(Ranks())


def test_engines_that_come_and_go_change_the_groups(make: Make, sync: MakeSync, groups: list[Group]) -> None:
    stand_ins = make(2)
    pushing, policy = sync(stand_ins, "gloo"), Ranks()
    pushing.push(policy)
    stand_ins.fleet.members.all[0].process.kill()
    wait_until(lambda: stand_ins.conditions()[0] == "dead")
    pushing.push(policy)
    assert [group.world for group in groups] == [3, 3, 2, 2]
    assert [group.open for group in groups] == [False, False, True, True]
    assert stand_ins.command(1)["version"] == "1"


def answering(value: Refused | Exception | float | None, together: threading.Barrier) -> Refused | None:
    if isinstance(value, float):
        time.sleep(value)
        return None
    # What comes long after the first failure is not waited for.
    together.wait(HANG_S)
    if isinstance(value, Exception):
        raise value
    return value


def test_posts_sort_failures() -> None:
    answers = {0: None, 1: Refused("no"), 2: EngineFailed("cut"), 3: EngineSlow("late"), 4: 900.0, 5: ValueError("bug")}
    api, together = EngineApi("127.0.0.1", 1, ""), threading.Barrier(len(answers) - 1)
    posts = Posts([(number, api) for number in answers], lambda number, _: answering(answers[number], together))
    began = time.monotonic()
    found = posts.failures(limit_s=3600.0, grace_s=2.0)
    assert time.monotonic() - began < SOON_S
    assert found == {
        1: Failure("refused", "refused: no"),
        2: Failure("gone", "cut"),
        3: Failure("slow", "late"),
        4: Failure("slow", "no answer within 3600 s"),
        5: Failure("gone", "ValueError('bug')"),
    }


def test_each_rank_serves_the_engines_on_its_device() -> None:
    """Engine 2 is lost: the third of those that are left is still where engine 3 is."""
    engines = tuple((number, EngineApi("127.0.0.1", number, "")) for number in (0, 1, 3))
    plan = SharePlan(new_stamp(1, None), "", torch.float32, SyncConfig(), engines, tp=2)
    assert [plan.seats(rank, 4) for rank in range(4)] == [[0], [1], [2, 4], [3, 5]]
    assert plan.seats(0, 1) == [0, 1, 2, 3, 4, 5]
    told = dataclasses.replace(plan, beside=((0, 1), (3, 2), (4, 5), (7, 6)))
    assert [told.seats(rank, 8) for rank in range(8)] == [[0], [1], [3], [2], [], [], [5], [4]]
