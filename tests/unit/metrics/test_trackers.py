"""Trackers with their real libraries and no network: wandb in its offline mode, MLflow with files."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from waiting import HANG_S, SOON_S, wait_until

from megasharp.common.errors import UserError
from megasharp.metrics.trackers.follow import LIMIT_S, Follower, Row, _wait_for_end
from megasharp.metrics.trackers.watch import Record, Trackers, check_installed
from megasharp.metrics.writers import MetricLog

if TYPE_CHECKING:
    from wandb.proto.wandb_internal_pb2 import Record as WandbRecord

CONFIG = "name: mine\npolicy:\n  optimizer: {lr: 1.0e-06}\nrecipe:\n  methods: [grpo]\n"


def run_folder(tmp_path: Path, environment: pytest.MonkeyPatch) -> Path:
    """A run folder; the trackers' services are files below it."""
    environment.setenv("WANDB_MODE", "offline")
    environment.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    environment.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlflow").as_uri())
    root = tmp_path / "mine"
    root.mkdir()
    (root / "config.yaml").write_text(CONFIG)
    return root


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return run_folder(tmp_path, monkeypatch)


def attempt(root: Path, name: str, resumed: int | None, steps: range, value: float = 0.0) -> list[str]:
    """One attempt of a run that writes its steps and an evaluation with the last; returns what was told.

    It ends once the library is there: a tracker's process has a minute after the run's end.
    """
    told: list[str] = []
    record = root / "trackers" / f"{name}.json"
    before = record.stat().st_mtime_ns if record.exists() else 0
    log = MetricLog(root, tensorboard=False, resumed_step=resumed, superseded=root / "superseded/attempt_2")
    trackers = Trackers({name: "project"}, root, root, told.append)
    for step in steps:
        log.write(step, {"reward/mean": value + step, "policy/gap": float("nan")})
    log.write(steps[-1], {"eval/dev/pass@4": value, "eval/dev+memory/pass@4": value})
    (process,) = [one.process for one in trackers._processes]
    wait_until(lambda: (record.exists() and record.stat().st_mtime_ns > before) or process.poll() is not None)
    trackers.close(HANG_S)
    log.close()
    return told


def wandb_records(root: Path) -> list[WandbRecord]:
    """All that lies in the offline files, in the order in which it was written."""
    from wandb.proto.wandb_internal_pb2 import Record as WandbRecord

    found = []
    for path in sorted(root.glob("trackers/wandb/offline-run-*/*.wandb")):
        found += [WandbRecord.FromString(data) for data in leveldb_records(path.read_bytes())]
    return found


def leveldb_records(log: bytes) -> Iterator[bytes]:
    """LevelDB's log format after wandb's seven bytes: 32 KiB blocks; a record has CRC, length, kind, bytes."""
    at, whole = 7, b""
    while at + 7 <= len(log):
        if at % 32768 > 32768 - 7:
            at += 32768 - at % 32768
        length, kind = struct.unpack_from("<HB", log, at + 4)
        whole += log[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield whole
            whole = b""


def wandb_points(root: Path, name: str) -> list[tuple[int, float]]:
    points = []
    for record in wandb_records(root):
        if record.WhichOneof("record_type") == "history":
            items = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
            if name in items:
                points.append((record.history.step.num, float(items[name])))
    return points


def mlflow_points(run: str, name: str) -> list[tuple[int, float]]:
    from mlflow.tracking import MlflowClient

    return [(metric.step, metric.value) for metric in MlflowClient().get_metric_history(run, name)]


CONTINUED = [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 5.0), (6, 106.0), (7, 107.0)]


@pytest.fixture(scope="module")
def resumed_in_wandb(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was resumed two steps before its end."""
    with pytest.MonkeyPatch.context() as environment:
        root = run_folder(tmp_path_factory.mktemp("wandb"), environment)
        assert attempt(root, "wandb", None, range(1, 6)) == []
        assert attempt(root, "wandb", 3, range(4, 8), 100.0) == []
    return root


def test_a_resumed_run_goes_on_in_the_same_run_of_wandb(resumed_in_wandb: Path) -> None:
    root = resumed_in_wandb
    records = wandb_records(root)
    runs = {record.run.run_id for record in records if record.WhichOneof("record_type") == "run"}
    assert runs == {Record.model_validate_json((root / "trackers/wandb.json").read_text()).id}
    assert wandb_points(root, "reward/mean") == CONTINUED
    assert wandb_points(root, "eval/dev/pass@4") == [(5, 0.0), (7, 100.0)]
    assert wandb_points(root, "policy/gap") == []


def test_wandb_is_told_the_configuration_once(resumed_in_wandb: Path) -> None:
    runs = [record.run for record in wandb_records(resumed_in_wandb) if record.WhichOneof("record_type") == "run"]
    told = [{item.key: item.value_json for item in run.config.update} for run in runs]
    assert [run.display_name for run in runs] == ["mine", "mine"]
    assert told[0]["policy"] == '{"optimizer":{"lr":1e-6}}' and "policy" not in told[-1]


def test_a_resumed_run_goes_on_in_the_same_run_of_mlflow(root: Path) -> None:
    from mlflow.tracking import MlflowClient

    assert attempt(root, "mlflow", None, range(1, 6)) == []
    assert attempt(root, "mlflow", 3, range(4, 8), 100.0) == []
    client = MlflowClient()
    experiment = client.get_experiment_by_name("project")
    (run,) = client.search_runs([experiment.experiment_id])
    assert mlflow_points(run.info.run_id, "reward/mean") == CONTINUED
    assert mlflow_points(run.info.run_id, "eval/dev/pass_at_4") == [(5, 0.0), (7, 100.0)]
    assert mlflow_points(run.info.run_id, "eval/dev_with_memory/pass_at_4") == [(5, 0.0), (7, 100.0)]
    assert run.data.params == {"name": "mine", "policy.optimizer.lr": "1e-06", "recipe.methods": "['grpo']"}
    assert (run.info.run_name, run.info.status) == ("mine", "FINISHED")
    last = client.get_metric_history(run.info.run_id, "reward/mean")[-1]
    assert abs(last.timestamp / 1000 - (root / "metrics.jsonl").stat().st_mtime) < 60, "the time of its row"


def mlflow_id(root: Path) -> str:
    return Record.model_validate_json((root / "trackers/mlflow.json").read_text()).id


@pytest.mark.long("runs")
def test_a_copied_folder_is_a_run_of_its_own_there(root: Path) -> None:
    """It has all steps, the original gets none of them, and both go on in their own afterwards."""
    from mlflow.tracking import MlflowClient

    attempt(root, "mlflow", None, range(1, 4))
    fork = root.with_name("fork")
    shutil.copytree(root, fork)
    (line,) = attempt(fork, "mlflow", 3, range(4, 6), 100.0)
    assert line == f"log.mlflow: this folder was copied or moved from {root}: a run of its own begins there"
    assert attempt(fork, "mlflow", 5, range(6, 7), 100.0) == []
    assert attempt(root, "mlflow", 3, range(4, 5)) == []
    assert mlflow_points(mlflow_id(root), "reward/mean") == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]
    continued = [(1, 1.0), (2, 2.0), (3, 3.0), (4, 104.0), (5, 105.0), (6, 106.0)]
    assert mlflow_points(mlflow_id(fork), "reward/mean") == continued
    assert MlflowClient().get_run(mlflow_id(fork)).info.run_name == "fork"


@pytest.mark.long("runs")
def test_a_folder_that_was_moved_goes_on_in_the_same_run(root: Path) -> None:
    """Whatever is copied from it, or to where it lay, later."""
    attempt(root, "mlflow", None, range(1, 3))
    first = mlflow_id(root)
    moved = root.parent / "archive" / "mine"
    moved.parent.mkdir()
    root.rename(moved)
    assert attempt(moved, "mlflow", 2, range(3, 4)) == []
    assert mlflow_id(moved) == first
    shutil.copytree(moved, root)
    assert len(attempt(root, "mlflow", 3, range(4, 5))) == 1
    assert attempt(moved, "mlflow", 3, range(4, 5)) == []
    assert mlflow_id(moved) == first != mlflow_id(root)


@pytest.mark.long("runs")
def test_a_folder_under_two_names_is_one(root: Path) -> None:
    """As where a link is left at the old place, or the same disk is mounted twice."""
    attempt(root, "mlflow", None, range(1, 3))
    first = mlflow_id(root)
    moved = root.rename(root.with_name("moved"))
    root.symlink_to(moved)
    assert attempt(moved, "mlflow", 2, range(3, 4)) == []
    assert mlflow_id(moved) == first


@pytest.mark.long("runs")
def test_of_a_folder_that_was_renamed_and_its_copy_in_its_place_only_one_goes_on(root: Path) -> None:
    attempt(root, "mlflow", None, range(1, 3))
    first = mlflow_id(root)
    kept = root.rename(root.with_name("kept"))
    shutil.copytree(kept, root)
    assert len(attempt(kept, "mlflow", 2, range(3, 4))) == 1
    assert attempt(root, "mlflow", 2, range(3, 4)) == []
    assert mlflow_id(root) == first != mlflow_id(kept)


def test_a_record_that_does_not_read_is_told_and_ends_nothing(root: Path) -> None:
    (root / "trackers").mkdir()
    (root / "trackers/mlflow.json").write_text("{")
    (line,) = attempt(root, "mlflow", None, range(1, 2))
    assert line.startswith("log.mlflow: exit code 1: ValidationError")


@pytest.mark.long("runs")
def test_a_new_run_of_the_same_name_is_another_one_there(root: Path) -> None:
    attempt(root, "mlflow", None, range(1, 2))
    first = (root / "trackers/mlflow.json").read_text()
    for path in (root / "trackers/mlflow.json", root / "metrics.jsonl"):
        path.unlink()
    attempt(root, "mlflow", None, range(1, 2))
    assert Record.model_validate_json((root / "trackers/mlflow.json").read_text()).id not in first


def test_without_a_login_there_is_one_line_and_the_run_goes_on(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("HOME", str(root))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    told: list[str] = []
    log = MetricLog(root, tensorboard=False, resumed_step=None)
    trackers = Trackers({"wandb": "project"}, root, root, told.append)

    def written() -> bool:
        log.write(1, {"reward/mean": 1.0})
        trackers.look()
        return bool(told)

    wait_until(written)
    trackers.look()
    trackers.close(10.0)
    (line,) = told
    assert line.startswith("log.wandb: exit code 1: ") and "\n" not in line
    assert "api" in line.lower() and "the run goes on without it" in line


@pytest.mark.long("runs")
def test_what_a_server_that_was_down_has_missed_goes_with_the_next_attempt(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as down, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        down.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{closed.getsockname()[1]}")
        down.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        (line,) = attempt(root, "mlflow", None, range(1, 4))
        assert line.startswith("log.mlflow: exit code 1: ")
    assert attempt(root, "mlflow", 3, range(4, 6)) == []
    run = Record.model_validate_json((root / "trackers/mlflow.json").read_text()).id
    assert mlflow_points(run, "reward/mean") == [(step, float(step)) for step in range(1, 6)]


def test_a_tracker_that_hangs_delays_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that takes the connection and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{deaf.getsockname()[1]}")
        told: list[str] = []
        log = MetricLog(root, tensorboard=False, resumed_step=None)
        trackers = Trackers({"mlflow": "project"}, root, root, told.append)
        (process,) = [one.process for one in trackers._processes]
        try:
            began = time.monotonic()
            for step in range(1, 1001):
                log.write(step, {"reward/mean": float(step)})
                trackers.look()
            trackers.close(0.5)
            assert time.monotonic() - began < SOON_S
            assert ["is not done sending" in line for line in told] == [True]
        finally:
            process.kill()
            process.wait()


def test_the_rows_of_a_killed_run_arrive(root: Path) -> None:
    """SIGKILL: nobody closes anything, and the process of the tracker ends by itself."""
    program = (
        "import sys, time; from pathlib import Path\n"
        "from megasharp.metrics.trackers.watch import Trackers\n"
        "from megasharp.metrics.writers import MetricLog\n"
        "root = Path(sys.argv[1]); log = MetricLog(root, tensorboard=False, resumed_step=None)\n"
        "trackers = Trackers({'mlflow': 'project'}, root, root, print)\n"
        "while not (root / 'trackers/mlflow.json').exists(): time.sleep(0.02)\n"
        "[log.write(step, {'reward/mean': step}) for step in range(1, 6)]\n"
        "print(trackers._processes[0].process.pid, flush=True); time.sleep(3600)\n"
    )
    run = subprocess.Popen([sys.executable, "-c", program, str(root)], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    follower = int(run.stdout.readline())
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    run.stdout.close()
    wait_until(lambda: not Path(f"/proc/{follower}").exists())
    record = Record.model_validate_json((root / "trackers/mlflow.json").read_text())
    assert mlflow_points(record.id, "reward/mean") == [(step, float(step)) for step in range(1, 6)]


class Kept:
    """A tracker that keeps what it is sent, and fails once where it is told to."""

    id = "one"

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def log(self, rows: list[Row]) -> None:
        self.rows += rows

    def close(self) -> None:
        pass


def test_a_library_that_never_answers_is_ended_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it is in the middle of when the run ends: nothing but the kernel bounds that."""
    ours, theirs = os.pipe()
    alarms: list[int] = []
    monkeypatch.setattr(signal, "alarm", alarms.append)
    over = threading.Event()
    with os.fdopen(ours) as ends:
        waiting = threading.Thread(target=_wait_for_end, args=(ends, over))
        waiting.start()
        assert not over.wait(0.1) and alarms == []
        os.close(theirs)
        waiting.join(HANG_S)
    assert over.is_set() and alarms == [LIMIT_S]


def test_a_line_that_is_half_written_is_sent_when_it_is_whole(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    kept = Kept()
    with metrics.open("w") as file:
        file.write('{"step":1,"time":5.0,"a":1.0}\n{"step":2,"ti')
        file.flush()
        follower = Follower(metrics, Record(id="one", folder="", inode=0), tmp_path / "one.json", kept)
        follower.follow()
        assert [row.step for row in kept.rows] == [1]
        file.write('me":6.0,"a":2.0}\n')
        file.flush()
        follower.follow()
    assert kept.rows == [Row(1, 5.0, {"a": 1.0}), Row(2, 6.0, {"a": 2.0})]
    assert Record.model_validate_json((tmp_path / "one.json").read_text()).sent == {"a": 2}


def test_a_library_that_is_missing_is_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a folder of its name lies in the way, as a run without it may leave one."""
    (tmp_path / "not_a_tracker").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("not_a_tracker", "nor_this"):
        with pytest.raises(UserError, match=rf"^mine\.yaml: log\.{name}: .*pip install 'megasharp\[trackers\]'$"):
            check_installed({name: "project"}, "mine.yaml")
    check_installed({"wandb": "project", "mlflow": "project"}, "mine.yaml")
