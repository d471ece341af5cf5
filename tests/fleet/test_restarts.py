"""Real engines that are lost and restart: what they sampled goes to the others, and they serve nothing too early."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from learners import CPU, FOLDERS, REPOSITORY, learner_settings, scale
from waiting import HANG_S

from megasharp.common.layout import ParallelLayout
from megasharp.common.records import Completion, GenerateRequest, SamplingParams
from megasharp.config.rollout import RolloutConfig, SyncConfig
from megasharp.learner.learner import MEMORY, POLICY
from megasharp.learner.ranks.all_ranks import OneRank, RanksLearner
from megasharp.rollout.sglang.bucket import checksum
from megasharp.rollout.sglang.client.fleet import Fleet, FleetOptions, start_fleet
from megasharp.rollout.sglang.client.launch import FleetSettings
from megasharp.rollout.sglang.client.members import WatchSettings
from megasharp.weight_sync.endpoints import WeightSource
from megasharp.weight_sync.push import FleetSync, make_transport

pytestmark = pytest.mark.long("fleet-sync")

SAMPLING = SamplingParams(max_tokens=48)
REQUESTS = [GenerateRequest((6, 7 + n % 8, 8, 9 + n % 3), (2 * n, 2 * n + 1)) for n in range(48)]


def hashed(source: WeightSource, prefix: str = "") -> dict[str, str]:
    return {prefix + name: checksum(tensor) for name, tensor in source.export_weights()}


def whole(found: list[list[Completion]], version: int) -> bool:
    """Every group has all its samples, each whole and of this version alone."""
    spans = [[(s.version, s.start, s.end) for s in each.version_spans] for group in found for each in group]
    tokens = [each.tokens.numel() for group in found for each in group]
    return len(spans) == 2 * len(REQUESTS) and spans == [[(version, 0, count)] for count in tokens]


def lost_while_sampling(fleet: Fleet, index: int, how: signal.Signals) -> list[list[Completion]]:
    """What is sampled while an engine with requests in flight is struck."""
    member, found = fleet.members.all[index], []
    sampling = threading.Thread(target=lambda: found.extend(fleet.generate(REQUESTS, SAMPLING)))
    sampling.start()
    deadline = time.monotonic() + HANG_S
    while not member.requests:
        assert time.monotonic() < deadline
    os.kill(member.process.pid, how)  # type: ignore[attr-defined]
    sampling.join(HANG_S)
    assert not sampling.is_alive() and not member.health.alive
    return found


@pytest.mark.parametrize("transport", ["gloo"])
def test_an_engine_that_came_back_is_like_the_others_and_one_that_hangs_comes_back_too(
    tmp_path: Path, transport: str
) -> None:
    """Killed, then another stopped, both while they sample; weights by broadcast, so all groups are formed anew."""
    settings = FleetSettings(
        python=REPOSITORY / ".venv-fleet" / "bin" / "python",
        model=FOLDERS[POLICY],
        memory=FOLDERS[MEMORY],
        log_folder=tmp_path / "logs",
        rollout=RolloutConfig(engines=2, restarts=1, sglang={"max_total_tokens": 8192, "max_running_requests": 16}),
        start_limit_s=HANG_S,
    )
    told: list[str] = []
    options = FleetOptions(watch=WatchSettings(probe_every=2.0, suspect_every=0.5, probe_limit=6.0))
    fleet = start_fleet(settings, options, told.append)
    ranks = OneRank(learner_settings(ParallelLayout()), CPU)
    try:
        policy, memory = RanksLearner(ranks, POLICY), RanksLearner(ranks, MEMORY)
        pushing = FleetSync(fleet, make_transport(fleet, transport, SyncConfig(bucket_mb=1, verify=True)))
        version = pushing.push(policy, memory)
        for index, deed in enumerate((signal.SIGKILL, signal.SIGSTOP)):
            assert whole(lost_while_sampling(fleet, index, deed), version)
            deadline = time.monotonic() + HANG_S
            while f"engine {index} is back; it serves once it holds the weights of the next push" not in told:
                assert time.monotonic() < deadline, told
                policy.call(scale, 1.02)
                memory.call(scale, 0.98)
                version = pushing.push(policy, memory)
                time.sleep(0.5)
            want = hashed(policy) | hashed(memory, "memory.")
            answers = [member.process.api.checksums(HANG_S) for member in fleet.members.alive()]
            assert [rank for answer in answers for rank in answer] == [want, want]  # type: ignore[union-attr]
            assert [member.health.condition.value for member in fleet.members.all] == ["serving", "serving"]
            assert whole(fleet.generate(REQUESTS, SAMPLING), version)
        assert [line.split(":")[0] for line in told if "is lost" in line] == ["engine 0 is lost", "engine 1 is lost"]
        assert whole(lost_while_sampling(fleet, 0, signal.SIGKILL), version)
        version = pushing.push(policy, memory)
        assert told[-1].startswith("engine 0 stays out: lost 2 times within 60 minutes")
        assert whole(fleet.generate(REQUESTS, SAMPLING), version)
    finally:
        ranks.close()
        fleet.close()
