"""Two real SGLang engines started by Ray's actors here: they serve, a killed one is noticed, nothing is left."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from waiting import HANG_S, SOON_S

from megasharp.cluster.ray_runtime.engine_actors import ClusterEngine, launch_on_cluster
from megasharp.cluster.ray_runtime.session import RaySession, SessionSettings
from megasharp.cluster.ray_runtime.slot_layout import Needs, make_layout
from megasharp.cluster.ray_runtime.slots import Slots
from megasharp.common.errors import UserError
from megasharp.config.rollout import ClusterConfig, RolloutConfig
from megasharp.rollout.sglang.client.launch import FleetSettings, stop

pytestmark = pytest.mark.long("fleet-sync")

REPOSITORY = Path(__file__).parents[2]
POLICY = REPOSITORY / "examples" / "quickstart" / "base"
# Two engines beside two ranks of a policy, each pair in one slot.
LAYOUT = make_layout(Needs(world=2, tp=2, engines=2, engine_tp=1), ClusterConfig())


@pytest.fixture(scope="module")
def session() -> Iterator[RaySession]:
    # multiprocessing keeps processes of its own from the first ranks on.
    others = set(psutil.Process().children(recursive=True))
    with RaySession(SessionSettings(cpus=2, gpus=0)) as session:
        family = [process for process in psutil.Process().children(recursive=True) if process not in others]
        yield session
    assert psutil.wait_procs(family, timeout=SOON_S)[1] == []


@pytest.fixture
def slots(session: RaySession) -> Iterator[Slots]:
    slots = session.reserve(LAYOUT)
    yield slots
    slots.close()


def settings(folder: Path) -> FleetSettings:
    return FleetSettings(
        python=REPOSITORY / ".venv-fleet" / "bin" / "python",
        model=POLICY,
        log_folder=folder / "logs",
        rollout=RolloutConfig(
            engines=2, sglang={"max_total_tokens": 4096, "max_running_requests": 16, "skip_tokenizer_init": True}
        ),
        start_limit_s=HANG_S,
    )


def drawn(engine: ClusterEngine) -> list[int]:
    """Eight greedy tokens over plain HTTP, with the engine's key."""
    body = {"input_ids": [6, 7, 8, 9], "sampling_params": {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True}}
    request = urllib.request.Request(f"http://{engine.api.host}:{engine.api.port}/generate", json.dumps(body).encode())
    request.add_header("Authorization", f"Bearer {engine.api.key}")
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=HANG_S) as response:
        return list(json.load(response)["output_ids"])


def leader(engine: ClusterEngine) -> psutil.Process:
    """The engine's own process: the one whose config file names this engine, in Ray's family of processes."""
    named = f"engine_{engine.index}.json"
    family = psutil.Process().children(recursive=True)
    return next(p for p in family if any(argument.endswith(named) for argument in p.cmdline()))


def engine_actors() -> list[psutil.Process]:
    return [process for process in psutil.Process().children(recursive=True) if "EngineActor" in process.name()]


def wait_for_end(engine: ClusterEngine) -> str:
    deadline = time.monotonic() + SOON_S
    while (reason := engine.exit_reason()) is None:
        assert time.monotonic() < deadline, "the engine's end is not noticed"
        time.sleep(0.1)
    return reason


def test_engines_serve_and_a_killed_one_is_noticed(slots: Slots, tmp_path: Path) -> None:
    engines = launch_on_cluster(settings(tmp_path), slots)
    leaders = [leader(engine) for engine in engines]
    family = [*leaders, *(child for process in leaders for child in process.children(recursive=True))]
    assert len(family) >= 6, "each engine has a scheduler and a detokenizer of its own"
    assert [engine.name for engine in engines] == ["engine 0", "engine 1"]
    assert {engine.api.host for engine in engines} == {"127.0.0.1"}
    assert len(drawn(engines[0])) == 8 and drawn(engines[0]) == drawn(engines[1])
    assert "RAY_AUTH_TOKEN" in os.environ
    assert not any(name.startswith("RAY_") for name in leaders[0].environ())
    assert {each.environ()["NCCL_SOCKET_IFNAME"] for each in leaders} == {"=lo"}
    assert [engine.exit_reason() for engine in engines] == [None, None]

    leaders[1].send_signal(signal.SIGKILL)
    assert wait_for_end(engines[1]) == "its process was killed by SIGKILL"
    assert engines[1].tail() != "(the log is empty)"
    assert engines[0].exit_reason() is None and len(drawn(engines[0])) == 8

    # An engine's process does not outlive its actor.
    psutil.Process(leaders[0].ppid()).kill()
    assert "Ray actor" in wait_for_end(engines[0])
    stop(engines)
    assert psutil.wait_procs(family, timeout=SOON_S)[1] == []


def test_an_engine_that_does_not_start_is_named_and_all_are_stopped(
    slots: Slots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = replace(settings(tmp_path), command=("-c", "raise OSError('no such file: the model')"))
    with pytest.raises(UserError, match=r"engine [01] of 2 did not start: it cannot load the model .*engine_[01]\.log"):
        launch_on_cluster(broken, slots)
    # The actors run in another folder than this process.
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UserError, match=rf"engine 0 of 2 did not start on 127\.0\.0\.1: rollout\.python: {tmp_path}/python"
    ):
        launch_on_cluster(replace(broken, python=Path("python")), slots)
    assert psutil.wait_procs(engine_actors(), timeout=SOON_S)[1] == []
