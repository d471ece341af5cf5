"""Weights from Megatron's ranks to real SGLang engines, by every transport; each engine says what it holds.

The oracle is the learner's own export, hashed here.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from learners import CPU, FOLDERS, REPOSITORY, interrupt, learner_settings, scale

from megasharp.errors import UserError
from megasharp.mcore.rank import MEMORY, POLICY
from megasharp.protocols import WeightSource
from megasharp.ranks.inprocess import OneRank
from megasharp.ranks.learner import Ranks, RanksLearner
from megasharp.ranks.processes import ProcessRanks
from megasharp.serving.bucket import Stamp, checksum, write_bucket
from megasharp.serving.client.fleet import Fleet, FleetOptions, start_fleet
from megasharp.serving.client.launch import FleetSettings
from megasharp.serving.client.members import WatchSettings
from megasharp.sync.fleet import FleetSync, make_transport
from megasharp.sync.receivers import Receivers
from megasharp.sync.settings import SyncSettings
from megasharp.types import GenerateRequest, ParallelLayout, SamplingParams

pytestmark = pytest.mark.long

TRANSPORTS = ("shared_memory", "disk", "gloo", "ipc")
LAYOUTS = {"one": ParallelLayout(), "tp2pp2": ParallelLayout(tp=2, pp=2)}
# A tensor in the middle of the policy, which is several buckets of a MiB.
MIDDLE = 20


@contextmanager
def running(folder: Path, memory: bool, engines: int = 2) -> Iterator[tuple[Fleet, list[str]]]:
    settings = FleetSettings(
        python=REPOSITORY / ".venv-fleet" / "bin" / "python",
        model=FOLDERS[POLICY],
        memory=FOLDERS[MEMORY] if memory else None,
        log_folder=folder / "logs",
        engines=engines,
        sglang={"max_total_tokens": 4096, "max_running_requests": 16},
        start_limit_s=300.0,
    )
    told: list[str] = []
    fleet = start_fleet(settings, FleetOptions(watch=WatchSettings(probe_every=2.0, suspect_every=0.5)), told.append)
    try:
        yield fleet, told
    finally:
        fleet.close()


@contextmanager
def ranks_of(folder: Path, layout: str) -> Iterator[Ranks]:
    settings = learner_settings(LAYOUTS[layout])
    ranks: Ranks = OneRank(settings, CPU) if layout == "one" else ProcessRanks(settings, CPU, folder / "ranks")
    try:
        yield ranks
    finally:
        ranks.close()


def syncing(fleet: Fleet, folder: Path, transport: str, memory_version: int = -1, **more: object) -> FleetSync:
    settings = {"transport": transport, "bucket_mb": 1, "folder": folder / "sync", **more}
    made = make_transport(fleet, SyncSettings(**settings))  # type: ignore[arg-type]
    return FleetSync(fleet, made, fleet.version, memory_version)


def hashed(source: WeightSource, prefix: str = "") -> dict[str, str]:
    return {prefix + name: checksum(tensor) for name, tensor in source.export_weights()}


def held(fleet: Fleet) -> list[dict[str, str]]:
    """What every living engine says it holds, tensor by tensor."""
    answers = [member.process.api.checksums() for member in fleet.members.alive()]
    return [rank for answer in answers for rank in answer]  # type: ignore[union-attr]


def samples(fleet: Fleet, version: int) -> None:
    """Every engine serves this version, whole groups of it."""
    requests = [GenerateRequest((6, 7 + n % 8, 8), (n, n + 1)) for n in range(8)]
    for completions in fleet.generate(requests, SamplingParams(max_tokens=6)):
        assert [[span.version for span in each.version_spans] for each in completions] == [[version]] * 2


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running(tmp_path_factory.mktemp("fleet"), memory=True) as (fleet, _):
        yield fleet


@pytest.fixture(scope="module")
def versions() -> dict[str, int]:
    """The memory network's version, through the module."""
    return {"memory": -1}


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_every_transport_brings_every_tensor_to_every_engine(
    fleet: Fleet, versions: dict[str, int], tmp_path: Path, layout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with ranks_of(tmp_path, layout) as ranks:
        policy, memory = RanksLearner(ranks, POLICY), RanksLearner(ranks, MEMORY)
        stays = hashed(memory, "memory.")
        for transport in TRANSPORTS:
            pushing = syncing(fleet, tmp_path, transport, versions["memory"], verify=True)
            for both in (True, False, True):
                policy.apply(scale, 1.02)
                memory.apply(scale, 0.98)
                began = time.monotonic()
                version = pushing.push(policy, memory if both else None)
                with capsys.disabled():
                    print(f"\n{layout} {transport} both={both} verified: {time.monotonic() - began:.2f} s", end="")
                stays = hashed(memory, "memory.") if both else stays
                want = hashed(policy) | stays
                assert held(fleet) == [want, want]
                assert fleet.version == version
            samples(fleet, version)
            versions["memory"] = pushing.memory_version


def leader(fleet: Fleet) -> int:
    return fleet.members.all[0].process.pid  # type: ignore[attr-defined,no-any-return]


def scheduler(fleet: Fleet) -> int:
    """The process of the first engine that holds the model."""
    children = psutil.Process(leader(fleet)).children()
    return int(next(child for child in children if "scheduler" in " ".join([child.name(), *child.cmdline()])).pid)


@pytest.mark.parametrize(
    ("transport", "victim", "deed"),
    [
        ("shared_memory", leader, signal.SIGKILL),
        ("disk", leader, signal.SIGKILL),
        ("ipc", leader, signal.SIGKILL),
        ("gloo", leader, signal.SIGKILL),
        ("gloo", scheduler, signal.SIGKILL),
        ("gloo", scheduler, signal.SIGSTOP),
    ],
)
def test_an_engine_lost_in_the_middle_of_a_push(
    tmp_path: Path, transport: str, victim: Callable[[Fleet], int], deed: signal.Signals
) -> None:
    """The push ends soon, the engine is named, the other one holds and serves the new weights, and none older."""
    with running(tmp_path, memory=False) as (fleet, told), ranks_of(tmp_path, "one") as ranks:
        assert isinstance(ranks, OneRank)
        policy = RanksLearner(ranks, POLICY)
        pushing = syncing(fleet, tmp_path, transport, limit_s=10.0, settle_s=5.0)
        pushing.push(policy)
        policy.apply(scale, 1.05)
        interrupt(ranks, MIDDLE, lambda: os.kill(victim(fleet), deed))
        began = time.monotonic()
        version = pushing.push(policy)
        assert time.monotonic() - began < 60
        assert [member.health.condition.value for member in fleet.members.all] == ["dead", "serving"]
        assert told[0].startswith("engine 0 is lost")
        assert held(fleet) == [hashed(policy)]
        samples(fleet, version)
        policy.apply(scale, 1.05)
        assert pushing.push(policy) == version + 1
        assert held(fleet) == [hashed(policy)]
        older = FleetSync(fleet, make_transport(fleet, SyncSettings(folder=tmp_path)), -1)
        with pytest.raises(UserError, match=rf"weights version 0 is older than {version + 1}"):
            older.push(policy)


def test_what_an_engine_holds_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One tensor becomes another on one engine only; an older memory network is refused by the other."""
    with running(tmp_path, memory=True) as (fleet, told), ranks_of(tmp_path, "one") as ranks:
        policy, memory = RanksLearner(ranks, POLICY), RanksLearner(ranks, MEMORY)
        pushing = syncing(fleet, tmp_path, "gloo", memory_version=4, verify=True)
        end = Receivers.end

        def spoil_and_end(receivers: Receivers, stamp: Stamp) -> None:
            name, tensor = next(item for item in policy.export_weights() if item[0] == "model.norm.weight")
            write_bucket(tmp_path / "spoiled", stamp, [(name, tensor + 1)])
            assert fleet.members.all[1].process.api.load_file(tmp_path / "spoiled", 1) is None
            end(receivers, stamp)

        monkeypatch.setattr(Receivers, "end", spoil_and_end)
        pushing.push(policy, memory)
        monkeypatch.undo()
        assert [member.health.condition.value for member in fleet.members.all] == ["serving", "dead"]
        assert "engine 1 is lost" in told[0]
        assert "comparison of checksums: tensor model.norm.weight on rank 0 is not what was sent" in told[0]
        assert held(fleet) == [hashed(policy) | hashed(memory, "memory.")]
        with pytest.raises(UserError, match="memory version 4 is older than 5, which this engine has"):
            syncing(fleet, tmp_path, "gloo", memory_version=3).push(policy, memory)
