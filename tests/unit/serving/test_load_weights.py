"""Pushing weights to stand-ins: what arrives, under which version, and engines that fail in the middle."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megasharp.errors import UserError
from megasharp.serving.bucket import checksum
from megasharp.serving.client import transport
from megasharp.serving.client.api import EngineApi
from megasharp.serving.client.transport import SyncSettings, buckets
from megasharp.types import GenerateRequest, SamplingParams, VersionSpan
from tests.unit.serving.conftest import Make

KINDS = ("shared_memory", "disk")
DEEDS = ("fail", "refuse", "lie", "die")
SAMPLING = SamplingParams(max_tokens=4)
REQUESTS = [GenerateRequest((number, 7), (number,)) for number in range(6)]


def weights(seed: int = 0) -> list[tuple[str, Tensor]]:
    """Some of a megabyte, so that one MiB per bucket makes several; with a memory network and a tied pair."""
    generator = torch.Generator().manual_seed(seed)
    named = [(f"layer.{n}.weight", torch.randn(300, 400, generator=generator)) for n in range(6)]
    named += [("norm.weight", torch.randn(7, generator=generator).to(torch.bfloat16))]
    named += [("tied.weight", named[0][1]), ("memory.norm.weight", torch.randn(3, generator=generator))]
    return named


def sums(named: list[tuple[str, Tensor]]) -> dict[str, str]:
    return {name: checksum(tensor) for name, tensor in named}


def sync(tmp_path: Path, kind: str, **more: object) -> SyncSettings:
    shared = tmp_path / "shared"
    shared.mkdir(exist_ok=True)
    return SyncSettings(transport=kind, bucket_mb=1, folder=shared, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("verify", [False, True])
def test_every_tensor_reaches_every_engine(make: Make, tmp_path: Path, kind: str, verify: bool) -> None:
    stand_ins = make(2, sync=sync(tmp_path, kind, verify=verify), tp=2)
    for version in (0, 1, 7):
        stand_ins.fleet.load_weights(version, iter(weights(version)))
        assert stand_ins.fleet.version == version
        for index in (0, 1):
            holds = stand_ins.command(index)
            assert holds["loaded"] == sums(weights(version))
            assert (holds["version"], holds["session"], holds["paused"]) == (str(version), False, False)
        found = stand_ins.fleet.generate(REQUESTS, SAMPLING)
        assert {completions[0].version_spans for completions in found} == {(VersionSpan(version, 0, 4),)}
    assert list((tmp_path / "shared").iterdir()) == []
    assert stand_ins.command(0)["flushes"] == 3


def test_in_place_keeps_the_cache(make: Make, tmp_path: Path) -> None:
    stand_ins = make(1, sync=sync(tmp_path, "shared_memory", in_flight="in_place"))
    stand_ins.fleet.load_weights(1, weights())
    assert stand_ins.command(0)["flushes"] == 0
    assert stand_ins.fleet.healthy()


@pytest.mark.parametrize(
    ("kind", "path", "deed"),
    [
        *product(["shared_memory"], ["/begin_weight_update", "load", "/flush_cache", "/continue_generation"], DEEDS),
        *product(["disk"], ["load"], DEEDS),
    ],
)
def test_an_engine_that_fails_anywhere_in_a_push_is_left_out(
    make: Make, tmp_path: Path, kind: str, path: str, deed: str
) -> None:
    load = "/update_weights_from_tensor" if kind == "shared_memory" else "/update_weights_from_disk"
    stand_ins = make(2, sync=sync(tmp_path, kind))
    stand_ins.fleet.load_weights(0, weights(0))
    stand_ins.command(1, {load if path == "load" else path: deed})
    stand_ins.fleet.load_weights(1, weights(1))
    assert stand_ins.conditions() == ["serving", "dead"]
    assert any(line.startswith("engine 1 is lost") for line in stand_ins.told)
    assert stand_ins.command(0)["loaded"] == sums(weights(1))
    found = stand_ins.fleet.generate(REQUESTS, SAMPLING)
    assert {completions[0].version_spans[0].version for completions in found} == {1}


@pytest.mark.parametrize("path", ["/pause_generation", "/end_weight_update"])
def test_every_answer_is_checked(make: Make, tmp_path: Path, path: str) -> None:
    stand_ins = make(2, sync=sync(tmp_path, "shared_memory"))
    stand_ins.command(0, {path: "lie"})
    stand_ins.fleet.load_weights(1, weights(1))
    assert stand_ins.conditions() == ["dead", "serving"]


@pytest.mark.parametrize("kind", KINDS)
def test_no_engine_takes_the_weights(make: Make, tmp_path: Path, kind: str) -> None:
    load = "/update_weights_from_tensor" if kind == "shared_memory" else "/update_weights_from_disk"
    stand_ins = make(2, sync=sync(tmp_path, kind))
    for index in (0, 1):
        stand_ins.command(index, {load: "refuse"})
    with pytest.raises(UserError) as raised:
        stand_ins.fleet.load_weights(3, weights())
    text = str(raised.value)
    assert "no engine is left that takes weights; load of weights failed" in text
    for index in (0, 1):
        assert f"engine {index}: dead (load of weights: refused: told to refuse)" in text
        assert f"engine_{index}.log" in text
    assert "\n" not in text
    assert stand_ins.fleet.version == -1
    assert not stand_ins.fleet.healthy()
    assert list((tmp_path / "shared").iterdir()) == []


@pytest.mark.parametrize("kind", KINDS)
def test_killed_in_the_middle_of_a_push(make: Make, tmp_path: Path, kind: str) -> None:
    stand_ins = make(2, sync=sync(tmp_path, kind))
    victim = stand_ins.fleet.members.all[0].process

    def slow() -> Iterator[tuple[str, Tensor]]:
        for number, named in enumerate(weights(1)):
            if number == 4:
                os.kill(victim.pid, signal.SIGKILL)
                time.sleep(0.2)
            yield named

    stand_ins.fleet.load_weights(1, slow())
    assert stand_ins.conditions() == ["dead", "serving"]
    assert "killed by SIGKILL" in stand_ins.told[0]
    assert stand_ins.command(1)["loaded"] == sums(weights(1))


def test_an_engine_that_hangs_in_a_push(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins = make(2, sync=sync(tmp_path, "shared_memory"))
    stand_ins.command(0, {"/begin_weight_update": "hang"})
    monkeypatch.setattr(EngineApi._do, "__defaults__", (1.0,))
    stand_ins.fleet.load_weights(1, weights())
    assert stand_ins.conditions() == ["dead", "serving"]
    assert "begin of the weight update: no answer to /begin_weight_update within 1 s" in stand_ins.told[0]


def test_an_engine_that_says_another_version(make: Make) -> None:
    stand_ins = make(2)
    stand_ins.command(1, {"version": "4"})
    with pytest.raises(UserError, match="engine 1 serves weights version 4 after version 5 was pushed to it"):
        stand_ins.fleet.load_weights(5, weights())


@pytest.mark.parametrize("kind", KINDS)
def test_a_learner_that_fails_in_the_middle(make: Make, tmp_path: Path, kind: str) -> None:
    """No engine serves what may be half of the weights; the next push mends it."""
    stand_ins = make(2, sync=sync(tmp_path, kind))
    stand_ins.fleet.load_weights(1, weights(1))

    def broken() -> Iterator[tuple[str, Tensor]]:
        yield from weights(2)[:5]
        raise ArithmeticError("the learner broke")

    with pytest.raises(ArithmeticError):
        stand_ins.fleet.load_weights(2, broken())
    time.sleep(0.6)
    assert stand_ins.conditions() == ["stale", "stale"]
    assert not stand_ins.fleet.healthy()
    assert stand_ins.fleet.version == 1
    with pytest.raises(UserError, match="no engine is left to sample with: engine 0 is stale"):
        stand_ins.fleet.generate(REQUESTS, SAMPLING)
    assert list((tmp_path / "shared").iterdir()) == []
    stand_ins.fleet.load_weights(2, weights(2))
    assert stand_ins.fleet.healthy()
    assert stand_ins.command(1)["loaded"] == sums(weights(2))
    assert stand_ins.command(1)["paused"] is False


def test_weights_and_samples_at_the_same_time(make: Make, tmp_path: Path) -> None:
    """Requests that arrive in a push wait for it, and no request is lost."""
    stand_ins = make(2, sync=sync(tmp_path, "shared_memory"), delay=0.05)
    versions = []
    ended = threading.Event()

    def sample() -> None:
        while not ended.is_set():
            found = stand_ins.fleet.generate(REQUESTS, SAMPLING)
            versions.extend(completions[0].version_spans[0].version for completions in found)

    thread = threading.Thread(target=sample)
    thread.start()
    for version in range(4):
        stand_ins.fleet.load_weights(version, weights(version))
    ended.set()
    thread.join(20)
    assert not thread.is_alive()
    assert len(versions) % len(REQUESTS) == 0
    assert max(versions) >= 2


def test_full_shared_memory(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins = make(1, sync=sync(tmp_path, "shared_memory"))

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(transport, "write_bucket", full)
    with pytest.raises(UserError, match=r"No space left on device.*lower sync\.bucket_mb \(1\)"):
        stand_ins.fleet.load_weights(1, weights())
    monkeypatch.undo()
    stand_ins.fleet.load_weights(1, weights())
    assert stand_ins.fleet.healthy()


def test_orphans_of_killed_trainers_are_removed(make: Make, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    dead, alive = shared / "megasharp-weights-999999999-ab", shared / f"megasharp-weights-{os.getpid()}-ab"
    for folder in (dead, alive):
        folder.mkdir(parents=True)
        (folder / "bucket").write_text("x")
    make(1)
    assert not dead.exists()
    assert (alive / "bucket").exists()


@pytest.mark.parametrize("limit", [1, 2, 100])
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
