"""Pushing weights to stand-ins: what arrives, under which versions, and engines that fail in the middle."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
from cases import each_case
from torch import Tensor
from waiting import HANG_S, wait_until

from megasharp.common.errors import UserError
from megasharp.common.files import Scratch, _here
from megasharp.common.records import GenerateRequest, SamplingParams, VersionSpan
from megasharp.weight_sync import by_files
from megasharp.weight_sync.buckets import buckets, difference
from megasharp.weight_sync.by_files import PUSH_FOLDER
from megasharp.weight_sync.push import FleetSync
from tests.unit.rollout.sglang.conftest import Limited, Make
from tests.unit.weight_sync.conftest import Source, memory, source, sums, weights

KINDS = ("shared_memory", "disk")
DEEDS = ("fail", "refuse", "lie", "die")
LOADS = {"shared_memory": "/update_weights_from_tensor", "disk": "/update_weights_from_disk"}
SAMPLING = SamplingParams(max_tokens=4)
REQUESTS = [GenerateRequest((number, 7), (number,)) for number in range(6)]
MakeSync = Callable[..., FleetSync]


@each_case("kind", KINDS)
@each_case("verify", [False, True])
def test_every_tensor_reaches_every_engine(make: Make, sync: MakeSync, tmp_path: Path, kind: str, verify: bool) -> None:
    stand_ins = make(2, tp=2)
    pushing = sync(stand_ins, kind, verify=verify)
    assert (pushing.version, pushing.memory_version) == (-1, -1)
    for version in range(3):
        assert pushing.push(source(version)) == version == pushing.version == stand_ins.fleet.version
        for index in (0, 1):
            holds = stand_ins.command(index)
            assert holds["loaded"] == sums(weights(version))
            assert (holds["version"], holds["session"], holds["paused"]) == (str(version), False, False)
        found = stand_ins.fleet.generate(REQUESTS, SAMPLING)
        assert {completions[0].version_spans for completions in found} == {(VersionSpan(version, 0, 4),)}
    assert list((tmp_path / "shared").iterdir()) == []
    assert stand_ins.command(0)["flushes"] == 3


@each_case("kind", KINDS)
def test_the_memory_network_has_a_version_of_its_own(make: Make, sync: MakeSync, kind: str) -> None:
    stand_ins = make(1)
    pushing = sync(stand_ins, kind, version=6, memory_version=1, verify=True)
    pushing.push(source(7), memory(2))
    assert (pushing.version, pushing.memory_version) == (7, 2)
    pushing.push(source(8))
    assert (pushing.version, pushing.memory_version) == (8, 2)
    holds = stand_ins.command(0)
    assert holds["loaded"] == sums(weights(8)) | sums(list(memory(2).export_weights()), "memory.")
    assert holds["version"] == "8"
    if kind == "shared_memory":
        assert holds["stamps"] == [[7, 2, True], [8, None, True]]


def test_in_place_keeps_the_cache(make: Make, sync: MakeSync) -> None:
    stand_ins = make(1)
    sync(stand_ins, "shared_memory", in_flight="in_place").push(source())
    assert stand_ins.command(0)["flushes"] == 0
    assert stand_ins.fleet.healthy()


AROUND = ("/begin_weight_update", "/flush_cache", "/continue_generation")
# Each deed at the load, and once in the calls around it.
FAILURES = [*product(KINDS, ["load"], DEEDS), *(("shared_memory", *one) for one in zip(AROUND, DEEDS, strict=False))]


@each_case(("kind", "path", "deed"), FAILURES)
def test_an_engine_that_fails_anywhere_in_a_push_is_left_out(
    make: Make, sync: MakeSync, kind: str, path: str, deed: str
) -> None:
    assert_left_out(make, sync, kind, path, deed)


@pytest.mark.long("fleet-sync")
@each_case(("kind", "path", "deed"), [one for one in product(["shared_memory"], AROUND, DEEDS) if one not in FAILURES])
def test_an_engine_that_fails_otherwise_around_the_load_is_left_out_too(
    make: Make, sync: MakeSync, kind: str, path: str, deed: str
) -> None:
    assert_left_out(make, sync, kind, path, deed)


def assert_left_out(make: Make, sync: MakeSync, kind: str, path: str, deed: str) -> None:
    stand_ins = make(2)
    pushing = sync(stand_ins, kind)
    pushing.push(source(0))
    stand_ins.command(1, {LOADS[kind] if path == "load" else path: deed})
    pushing.push(source(1))
    assert stand_ins.conditions() == ["serving", "dead"]
    assert any(line.startswith("engine 1 is lost") for line in stand_ins.told)
    assert stand_ins.command(0)["loaded"] == sums(weights(1))
    found = stand_ins.fleet.generate(REQUESTS, SAMPLING)
    assert {completions[0].version_spans[0].version for completions in found} == {1}


@each_case("path", ["/pause_generation", "/end_weight_update"])
def test_every_answer_is_checked(make: Make, sync: MakeSync, path: str) -> None:
    stand_ins = make(2)
    stand_ins.command(0, {path: "lie"})
    sync(stand_ins, "shared_memory").push(source(1))
    assert stand_ins.conditions() == ["dead", "serving"]


@each_case("kind", KINDS)
def test_an_engine_that_holds_something_else(make: Make, sync: MakeSync, kind: str) -> None:
    stand_ins = make(2)
    stand_ins.command(1, {"corrupt": {"layer.3.weight": "0" * 64}})
    sync(stand_ins, kind).push(source(1))
    assert stand_ins.conditions() == ["serving", "serving"], "nobody asked"
    sync(stand_ins, kind, version=0, verify=True).push(source(1))
    assert stand_ins.conditions() == ["serving", "dead"]
    assert "engine 1 is lost" in stand_ins.told[0]
    assert "comparison of checksums: tensor layer.3.weight on rank 0 is not what was sent" in stand_ins.told[0]


def test_what_counts_as_a_difference() -> None:
    sent = {"a": "1", "lm_head.weight": "2"}
    assert difference(sent, [{"a": "1", "lm_head.weight": "2", "memory.b": "3"}]) is None
    assert difference(sent, [{"a": "1"}]) is None, "a tied model has no head"
    assert "lm_head.weight on rank 1" in str(difference(sent, [{"a": "1"}, {"a": "1", "lm_head.weight": "3"}]))
    assert difference(sent, [{"lm_head.weight": "2"}]) == "rank 0 holds no tensor a"
    assert difference(sent, []) is not None


@each_case("kind", KINDS)
def test_no_engine_takes_the_weights(make: Make, sync: MakeSync, tmp_path: Path, kind: str) -> None:
    stand_ins = make(2)
    for index in (0, 1):
        stand_ins.command(index, {LOADS[kind]: "refuse"})
    pushing = sync(stand_ins, kind, version=2, memory_version=5)
    with pytest.raises(UserError) as raised:
        pushing.push(source(), memory())
    text = str(raised.value)
    assert "no engine is left that takes weights; load of weights failed" in text
    for index in (0, 1):
        assert f"engine {index}: dead (load of weights: refused: told to refuse)" in text
        assert f"engine_{index}.log" in text
    assert "\n" not in text
    assert (stand_ins.fleet.version, pushing.version, pushing.memory_version) == (-1, 2, 5)
    assert not stand_ins.fleet.healthy()
    assert list((tmp_path / "shared").iterdir()) == []


@each_case("kind", KINDS)
def test_killed_in_the_middle_of_a_push(make: Make, sync: MakeSync, kind: str) -> None:
    stand_ins = make(2)
    victim = stand_ins.fleet.members.all[0].process

    def slow() -> Iterator[tuple[str, Tensor]]:
        for number, named in enumerate(weights(1)):
            if number == 4:
                os.kill(victim.pid, signal.SIGKILL)
                time.sleep(0.2)
            yield named

    sync(stand_ins, kind).push(Source(slow))
    assert stand_ins.conditions() == ["dead", "serving"]
    assert "killed by SIGKILL" in stand_ins.told[0]
    assert stand_ins.command(1)["loaded"] == sums(weights(1))


@each_case(("kind", "path"), [("shared_memory", "load"), ("shared_memory", "/continue_generation"), ("disk", "load")])
def test_an_engine_that_hangs_in_a_push(make: Make, sync: MakeSync, limited: Limited, kind: str, path: str) -> None:
    """After the user's limit it is given up."""
    assert_given_up(make, sync, limited, kind, path)


@pytest.mark.long("fleet-sync")
@each_case(
    "path",
    ["/pause_generation", "/begin_weight_update", "/end_weight_update", "/weights_checker", "/flush_cache"],
)
def test_an_engine_that_hangs_in_a_push_elsewhere(make: Make, sync: MakeSync, limited: Limited, path: str) -> None:
    assert_given_up(make, sync, limited, "shared_memory", path)


def assert_given_up(make: Make, sync: MakeSync, limited: Limited, kind: str, path: str) -> None:
    stand_ins = make(2)
    path = LOADS[kind] if path == "load" else path
    stand_ins.command(0, {path: "hang"})
    limited(stand_ins.fleet.members.all[0].process.api, path)
    sync(stand_ins, kind, verify=True, limit_s=0.5).push(source())
    assert stand_ins.conditions() == ["dead", "serving"]
    assert f": no answer to {path} within 0.5 s" in stand_ins.told[0]
    assert stand_ins.command(1)["loaded"] == sums(weights())


def test_an_engine_that_says_another_version(make: Make, sync: MakeSync) -> None:
    stand_ins = make(2)
    stand_ins.command(1, {"version": "4"})
    with pytest.raises(UserError, match="engine 1 serves weights version 4 after version 5 was pushed to it"):
        sync(stand_ins, "shared_memory", version=4).push(source())


@each_case("kind", KINDS)
def test_a_learner_that_fails_in_the_middle(make: Make, sync: MakeSync, tmp_path: Path, kind: str) -> None:
    """No engine serves what may be half of the weights; the next push mends it."""
    stand_ins = make(2)
    pushing = sync(stand_ins, kind)
    pushing.push(source(0))

    def broken() -> Iterator[tuple[str, Tensor]]:
        yield from weights(2)[:5]
        raise ArithmeticError("the learner broke")

    with pytest.raises(ArithmeticError):
        pushing.push(Source(broken))
    time.sleep(0.6)
    assert stand_ins.conditions() == ["stale", "stale"]
    assert not stand_ins.fleet.healthy()
    assert pushing.version == stand_ins.fleet.version == 0
    with pytest.raises(UserError, match="no engine is left to sample with: engine 0 is stale"):
        stand_ins.fleet.generate(REQUESTS, SAMPLING)
    assert list((tmp_path / "shared").iterdir()) == []
    assert pushing.push(source(2)) == 1
    assert stand_ins.fleet.healthy()
    assert stand_ins.command(1)["loaded"] == sums(weights(2))
    assert stand_ins.command(1)["paused"] is False


def test_weights_and_samples_at_the_same_time(make: Make, sync: MakeSync) -> None:
    """Requests that arrive in a push wait for it, and no request is lost."""
    stand_ins = make(2, delay=0.05)
    pushing = sync(stand_ins, "shared_memory")
    versions: list[int] = []
    ended = threading.Event()

    def sample() -> None:
        while not ended.is_set():
            found = stand_ins.fleet.generate(REQUESTS, SAMPLING)
            versions.extend(completions[0].version_spans[0].version for completions in found)

    thread = threading.Thread(target=sample)
    thread.start()
    for version in range(4):
        pushing.push(source(version))
    wait_until(lambda: max(versions, default=0) == 3)
    ended.set()
    thread.join(HANG_S)
    assert not thread.is_alive()
    assert len(versions) % len(REQUESTS) == 0


def test_full_shared_memory(make: Make, sync: MakeSync, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins = make(1)
    pushing = sync(stand_ins, "shared_memory")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(by_files, "write_bucket", full)
    with pytest.raises(UserError, match=r"No space left on device.*lower sync\.bucket_mb \(1\)"):
        pushing.push(source())
    monkeypatch.undo()
    pushing.push(source())
    assert stand_ins.fleet.healthy()


@each_case("kind", KINDS)
def test_what_killed_trainers_left_is_removed(make: Make, sync: MakeSync, tmp_path: Path, kind: str) -> None:
    dead = tmp_path / "shared" / f"{PUSH_FOLDER}{_here()}abcd1234"
    dead.mkdir(parents=True)
    with Scratch(PUSH_FOLDER, tmp_path / "shared") as alive:
        dead.mkdir()
        sync(make(1), kind)
        assert not dead.exists()
        assert alive.exists()


@each_case("limit", [1, 2, 100])
def test_buckets_keep_order_and_size(limit: int) -> None:
    named = weights()
    made = list(buckets(iter(named), limit))
    assert [name for bucket in made for name, _ in bucket] == [name for name, _ in named]
    for bucket in made:
        assert bucket
        assert len(bucket) == 1 or sum(tensor.nbytes for _, tensor in bucket) <= limit << 20
    total = sum(tensor.nbytes for _, tensor in named)
    assert len(made) <= total // (limit << 19) + 1, "buckets are at least half full"


def test_a_tensor_above_the_limit_is_a_bucket_of_its_own() -> None:
    big = torch.zeros(3 << 18)
    assert [len(bucket) for bucket in buckets([("a", big[:1]), ("big", big), ("b", big[:1])], 1)] == [1, 1, 1]
    assert list(buckets([], 1)) == []


@each_case(
    ("change", "message"), [({"kind": "disk", "folder": None}, "needs a folder"), ({"kind": "nccl"}, "use gloo")]
)
def test_settings_that_do_not_fit(make: Make, sync: MakeSync, change: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        sync(make(1), **change)
