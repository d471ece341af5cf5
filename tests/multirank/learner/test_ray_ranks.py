"""Ranks as Ray actors, with a real Ray: the same results as child processes, deaths named, nothing left behind.

Ray's own start takes seconds, so the tests share one.
"""

from __future__ import annotations

import importlib
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
import torch
from policies import CPU, LAYOUTS, packed, ragged_sequences, recipe, save_model, settings, weights_of
from ray import cloudpickle
from waiting import HANG_S, SOON_S

from megasharp.cluster.ray_runtime.ranks import RayRanks
from megasharp.cluster.ray_runtime.session import RaySession, SessionSettings, there
from megasharp.cluster.ray_runtime.slot_layout import Needs, make_layout
from megasharp.cluster.ray_runtime.slots import Slots
from megasharp.common import signals
from megasharp.common.errors import RankDied, StageTimeout, UserError
from megasharp.common.records import StepStats
from megasharp.common.watchdog import STACKS_FILE, Budget, Watchdog, Watched
from megasharp.config.rollout import ClusterConfig
from megasharp.learner.learner import POLICY, LearnerSettings, RankLearner
from megasharp.learner.ranks.all_ranks import Ranks, RanksLearner
from megasharp.learner.ranks.processes import ProcessRanks
from megasharp.metrics.clock import StageClock
from tests.soak.faults import shift_clock

REPOSITORY = Path(__file__).resolve().parents[3]

pytestmark = pytest.mark.long("ranks")

METHOD = recipe(("grpo", "kl"), mini_batches=2)
LAYOUT = LAYOUTS["tp2"]
TWO_RANKS = make_layout(Needs(world=2, tp=2, engines=0, engine_tp=1), ClusterConfig())
CPUS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("models"), "qwen3-tied")


@pytest.fixture(scope="module")
def session() -> Iterator[RaySession]:
    before = dict(os.environ)
    handler = signal.getsignal(signal.SIGTERM)
    # multiprocessing keeps a process of its own from the first spawn on.
    others = set(psutil.Process().children(recursive=True))
    with RaySession(SessionSettings(cpus=CPUS, gpus=0)) as session:
        family = [process for process in psutil.Process().children(recursive=True) if process not in others]
        assert len(family) > 2, "Ray's servers run"
        assert signal.getsignal(signal.SIGTERM) is handler
        yield session
    assert [process for process in family if process.is_running()] == []
    after = dict(os.environ)
    assert {**after, "PYTEST_CURRENT_TEST": ""} == {**before, "PYTEST_CURRENT_TEST": ""}


@pytest.fixture
def slots(session: RaySession) -> Iterator[Slots]:
    slots = session.reserve(TWO_RANKS)
    yield slots
    slots.close()


def values(folder: str) -> dict[str, LearnerSettings]:
    return {POLICY: settings(folder, LAYOUT, METHOD.needs, offload=("gradients",))}


def two_steps(ranks: Ranks) -> tuple[list[StepStats], dict[str, torch.Tensor]]:
    learner = RanksLearner(ranks)
    batch = learner.annotate(packed(ragged_sequences(), LAYOUT, mini_batches=2), METHOD.annotation)
    return [learner.step(batch, METHOD) for _ in range(2)], weights_of(learner)


def test_actors_do_what_child_processes_do(folder: str, slots: Slots, tmp_path: Path) -> None:
    children = ProcessRanks(values(folder), CPU, tmp_path / "children")
    want, want_weights = two_steps(children)
    children.close()
    actors = RayRanks(values(folder), CPU, slots, tmp_path / "actors", variables={"NCCL_CUMEM_ENABLE": "0"})
    got, got_weights = two_steps(actors)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-6)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-6)
    assert got_weights.keys() == want_weights.keys()
    for name, weight in want_weights.items():
        torch.testing.assert_close(got_weights[name], weight, rtol=1e-6, atol=1e-7)
    assert actors.call(POLICY, isinstance, RankLearner) == [True, True]
    processes = [psutil.Process(pid) for pid in actors.process_ids()]
    # From before their first import: a library may ask CUDA or NCCL when it is imported.
    assert [process.environ()["NCCL_CUMEM_ENABLE"] for process in processes] == ["0", "0"]
    with pytest.raises(RankDied, match=r"rank [01] failed in len: .*has no len"):
        actors.call(POLICY, len)
    assert "TypeError" in "".join(path.read_text() for path in (tmp_path / "actors").iterdir())
    assert psutil.wait_procs(processes, timeout=SOON_S)[1] == [], "one rank's error ends all"
    actors.close()


Found = tuple[torch.Tensor, np.ndarray[Any, Any], tuple[str, int], bool]


def find(_: RankLearner, share: tuple[torch.Tensor, np.ndarray[Any, Any]], shift: int) -> Found:
    """A rank's share, the file that the rank has mapped there, the place in it, and whether NumPy may write there."""
    ids_P, rows = share
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        span, _mode, offset, *file = line.split(maxsplit=5)
        begin, end = (int(edge, 16) for edge in span.split("-"))
        if begin <= ids_P.data_ptr() < end:
            place = " ".join(file), int(offset, 16) + ids_P.data_ptr() - begin
            return ids_P.roll(shift), rows, place, rows.flags.writeable
    raise AssertionError("a tensor that is in no mapping")


def test_a_share_is_stored_once_for_its_ranks(
    folder: str, slots: Slots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peers on a node read the same bytes of Ray's store, which has room again after each call."""
    actors = RayRanks(values(folder), CPU, slots, tmp_path)
    share = (torch.arange(10_000_000, dtype=torch.int32), np.arange(100_000.0))
    stored, put = [], ray.put

    def noted(value: object) -> object:
        stored.append(value)
        return put(value)

    monkeypatch.setattr(ray, "put", noted)
    # The actors do not have this file's folder on their path.
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    # Together more than the store holds.
    for _ in range(16):
        found = actors.call_shared(POLICY, find, [share], 2)
        for ids_P, rows, (file, _place), writable in found:
            assert torch.equal(ids_P, share[0].roll(2)) and np.array_equal(rows, share[1])
            assert "/dev/shm/plasma" in file and not writable
            ids_P.zero_()
        assert found[0][2] == found[1][2]
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    assert len(stored) == 16
    # Ray pickles only the rest: the arrays are beside its pickle too.
    buffers: list[pickle.PickleBuffer] = []
    assert len(cloudpickle.dumps(stored[0], protocol=5, buffer_callback=buffers.append)) < 2000
    assert sum(buffer.raw().nbytes for buffer in buffers) == 40_800_000
    actors.close()


def test_a_killed_actor_is_named_at_once(folder: str, slots: Slots, tmp_path: Path) -> None:
    actors = RayRanks(values(folder), CPU, slots, tmp_path)
    processes = [psutil.Process(pid) for pid in actors.process_ids()]
    batch, one_step = packed(ragged_sequences(), LAYOUT, micro_batch_tokens=16), recipe()
    RanksLearner(actors).step(batch, one_step)
    killer = threading.Timer(0.5, processes[1].kill)
    killer.start()
    with pytest.raises(RankDied, match=r"rank 1 ended in step; its log is .*rank_1\.log"):
        while True:
            RanksLearner(actors).step(batch, one_step)
    died = time.monotonic()
    assert psutil.wait_procs(processes, timeout=SOON_S)[1] == []
    actors.close()
    assert time.monotonic() - died < SOON_S


def test_a_stopped_actor_is_found_on_its_node(
    folder: str, slots: Slots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 is looked at by a task of Ray's, as a rank of another machine is."""
    monkeypatch.setattr(signals._State, "failure", None)
    clock = StageClock()
    actors = RayRanks(values(folder), CPU, slots, tmp_path)
    processes = [psutil.Process(pid) for pid in actors.process_ids()]
    batch, one_step = packed(ragged_sequences(), LAYOUT, micro_batch_tokens=16), recipe()
    RanksLearner(actors).step(batch, one_step)
    record = tmp_path / "rank_1.process"
    record.write_text(record.read_text().replace(socket.gethostname(), "elsewhere"))
    processes[1].suspend()
    began = time.monotonic()
    with (
        # What is raised inside Ray's compiled wait comes out of it as a SystemError: `train` asks signals.failure().
        pytest.raises((RankDied, StageTimeout, SystemError)),
        Watchdog(Watched(clock.present, tmp_path, 2, there), Budget(1.0, "guard.stage_timeout_s"), {}),
        clock.stage("update"),
    ):
        RanksLearner(actors).step(batch, one_step)
    actors.close()
    assert time.monotonic() - began < 4 * SOON_S
    assert "(guard.stage_timeout_s): rank 1 is stopped (state T, as by SIGSTOP); stacks" in str(signals.failure())
    text = (tmp_path / STACKS_FILE).read_text()
    assert (
        "megasharp/cluster/ray_runtime/rank_actor.py"
        in text.partition("==== rank 0: ")[2].partition("==== rank 1: ")[0]
    )
    assert f"==== rank 1: process {processes[1].pid} on elsewhere, state T ====" in text
    assert psutil.wait_procs(processes, timeout=SOON_S)[1] == []


def test_a_users_mistake_arrives_as_such(slots: Slots, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no-such-folder .* it does not exist"):
        RayRanks(values(str(tmp_path / "no-such-folder")), CPU, slots, tmp_path)


def test_what_does_not_fit_is_refused_before_anything_starts(session: RaySession) -> None:
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    started = time.monotonic()
    with pytest.raises(UserError, match=rf"needs 4 CPUs free on one node .* 127\.0\.0\.1: [0-3] of {CPUS} CPUs"):
        session.reserve(make_layout(Needs(2, 2, 2, 1), ClusterConfig(placement="disaggregated")))
    assert time.monotonic() - started < SOON_S
    assert {process.pid for process in psutil.Process().children(recursive=True)} <= before


def test_everything_listens_on_the_loopback_only(session: RaySession) -> None:
    ports = set()
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        # A worker of the test before may be on its way out.
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            ports |= {c.laddr for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    assert len(ports) >= 4
    assert {address.ip.removeprefix("::ffff:") for address in ports} == {"127.0.0.1"}


def joining(address: str, token: str, limit: float = HANG_S) -> str:
    """What a process of its own says that joins the cluster."""
    script = (
        "import sys\n"
        "from megasharp.cluster.ray_runtime.session import RaySession, SessionSettings\n"
        "from megasharp.common.errors import UserError\n"
        "try:\n"
        f"    with RaySession(SessionSettings({address!r}, start_limit_s={limit!r})) as session:\n"
        "        print('joined', session.nodes())\n"
        "except UserError as error:\n"
        "    print('refused', error)\n"
    )
    environment = {**os.environ, "RAY_AUTH_TOKEN": token, "RAY_AUTH_TOKEN_PATH": os.devnull}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True, timeout=HANG_S
    )
    return done.stdout


def test_joining_takes_the_right_token(session: RaySession) -> None:
    assert joining(session.address, os.environ["RAY_AUTH_TOKEN"]).startswith("joined [NodeCapacity(address='127.0.0.1'")
    assert f"the Ray cluster at {session.address} needs a token" in joining(session.address, "")
    refused = joining(session.address, "0" * 64)
    assert refused.startswith("refused") and "does not take our token" in refused and refused.count("\n") == 1


def test_a_port_that_never_answers_is_given_up(session: RaySession) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        said = joining(address, "0" * 64, limit=4.0)
        given_up = re.search(rf"no Ray cluster answers at {address} \(given up after (\d+) s\)", said)
        assert given_up is not None and int(given_up[1]) >= 4, said


DRIVER = """
import time
from pathlib import Path
from megasharp.cluster.ray_runtime.engine_actors import EngineActor
from megasharp.cluster.ray_runtime.slot_layout import Needs, make_layout
from megasharp.cluster.ray_runtime.session import RaySession, SessionSettings
from megasharp.config.rollout import ClusterConfig
from megasharp.rollout.sglang.client.launch import FleetSettings
import ray

session = RaySession(SessionSettings(cpus=1, gpus=0))
slots = session.reserve(make_layout(Needs(0, 1, 1, 1), ClusterConfig()))
here = Path("/")
actor = slots.actor(EngineActor, 0, FleetSettings(python=here, model=here, log_folder=here), 0, "127.0.0.1", "key")
print(ray.get(actor.start.remote()).text, flush=True)
while True:
    time.sleep(2)
    ray.get(ray.put(0))
"""


@contextmanager
def driver(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """The driver, whose wall clock is shifted by what the file `offset` says."""
    script, library = tmp_path / "driver.py", tmp_path / "clock.so"
    script.write_text(DRIVER)
    source = REPOSITORY / "tests/soak/shifted_clock.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl", "-lpthread"], check=True)
    shift_clock(tmp_path / "offset", 0)
    environment = {**os.environ, "LD_PRELOAD": str(library), "SHIFTED_CLOCK": str(tmp_path / "offset")}
    pipe, command = subprocess.PIPE, [sys.executable, str(script)]
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(("victim", "shift"), [("driver", 0), ("raylet", 0), ("driver", -3600)])
def test_ray_and_its_driver_end_together(tmp_path: Path, victim: str, shift: int) -> None:
    """It has a Ray of its own, beside the one of these tests. A server's end is told, and only that.

    By itself Ray would let the actor live for an hour after a clock that was set back by one.
    """
    with driver(tmp_path) as process:
        assert process.stdout is not None and "rollout.python" in process.stdout.readline()
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 5, "servers and an actor"
        shift_clock(tmp_path / "offset", shift)
        # Ray's next timers are set by the new time.
        time.sleep(2.0 * bool(shift))
        next((child for child in family if child.name() == victim), process).kill()
        assert psutil.wait_procs(family, timeout=SOON_S)[1] == []
        _, said = process.communicate(timeout=HANG_S)
    told = [line for line in said.splitlines() if line.startswith("megasharp: ")]
    expected = f"megasharp: Ray's {victim} ended, and with it this run; continue with --resume"
    assert told == ([] if victim == "driver" else [expected]), said


@pytest.fixture
def without_token(tmp_path: Path) -> Iterator[str]:
    """A Ray's first server, which asks for no token."""
    ray: Any = importlib.import_module("ray")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = Path(ray.__file__).parent / "core/src/ray/gcs/gcs_server"
    command = [str(server), f"--log_dir={tmp_path}", f"--session-dir={tmp_path}", f"--gcs_server_port={port}"]
    command += ["--node-ip-address=127.0.0.1", "--session-name=test", "--config_list=e30=", "--node-id=" + "0" * 56]
    with subprocess.Popen(command, env={"RAY_AUTH_MODE": "disabled"}) as process:
        yield f"127.0.0.1:{port}"
        process.kill()


def test_a_ray_that_asks_for_no_token_is_refused(without_token: str) -> None:
    said = joining(without_token, "0" * 64)
    assert said.startswith(f"refused the Ray cluster at {without_token} asks nobody for a token; "), said
