"""Starting and stopping engines: all or none, in bounded time, with nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from cases import each_case
from waiting import HANG_S, SOON_S, wait_until

from megasharp.common.errors import RunFailed, UserError
from megasharp.rollout.sglang.client import launch as module
from megasharp.rollout.sglang.client.fleet import LocalStarter
from megasharp.rollout.sglang.client.launch import EngineLog, HeldPort, environment, launch, stop
from tests.unit.rollout.sglang.conftest import running, settings


def test_start_and_stop(tmp_path: Path) -> None:
    engines = launch(settings(tmp_path, 2))
    try:
        assert [engine.log.name for engine in engines] == ["engine_0.log", "engine_1.log"]
        assert len({engine.api.port for engine in engines}) == 2
        assert len({os.getpgid(engine.pid) for engine in engines} | {os.getpgrp()}) == 3
        assert [engine.exit_reason() for engine in engines] == [None, None]
    finally:
        stop(engines)
    assert not any(running(engine.pid) for engine in engines)
    assert all("SIGTERM" in str(engine.exit_reason()) for engine in engines)


def test_the_key_is_nowhere_to_be_read(tmp_path: Path) -> None:
    """Not on the command line, not in the log, and the config file is gone once the engine answers."""
    engine = launch(settings(tmp_path, 1))[0]
    try:
        command = Path(f"/proc/{engine.pid}/cmdline").read_bytes().split(b"\0")
        assert engine.api.key.encode() not in b" ".join(command)
        assert not Path(command[-2].decode()).exists()
        assert engine.api.key not in engine.log.read_text()
        assert engine.log.stat().st_mode & 0o077 == 0
    finally:
        stop([engine])


def test_every_fleet_has_a_key_of_its_own(tmp_path: Path) -> None:
    first, second = launch(settings(tmp_path, 1))[0], launch(settings(tmp_path, 1))[0]
    try:
        assert first.api.key != second.api.key
        wrong = replace(first.api, key=second.api.key)
        with pytest.raises(module.EngineFailed, match="status 401"):
            wrong.version()
    finally:
        stop([first, second])


def test_one_that_does_not_start_stops_all(tmp_path: Path, groups: list[int]) -> None:
    started = time.monotonic()
    with pytest.raises(RunFailed) as raised:
        launch(settings(tmp_path, 3, start="exit"))
    assert time.monotonic() - started < SOON_S
    text = str(raised.value)
    assert "engine 1 of 3 did not start: its port is taken (its process ended with exit code 1)" in text
    assert "engine_1.log" in text
    assert "last lines: Traceback ... | OSError: [Errno 98] Address already in use" in text
    assert "\n" not in text
    assert len(groups) == 3
    assert not any(map(running, groups))


def test_one_that_never_answers_ends_in_bounded_time(
    tmp_path: Path, groups: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher's clock jumps ahead when both have begun to load."""

    def now() -> float:
        begun = [log for log in tmp_path.glob("logs/*.log") if "loading forever" in log.read_text()]
        return time.monotonic() + (1e6 if len(begun) == 2 else 0.0)

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=now, sleep=time.sleep))
    late = rf"engine 0 of 2 did not start: no answer within {HANG_S:g} s.*loading forever"
    with pytest.raises(RunFailed, match=late):
        launch(settings(tmp_path, 2, start="silent"))
    assert not any(map(running, groups))


def test_one_whose_server_ended_while_its_process_stays(tmp_path: Path, groups: list[int]) -> None:
    started = time.monotonic()
    with pytest.raises(RunFailed, match=r"engine 0 of 1 did not start: its port is taken \(its server has ended\)"):
        launch(settings(tmp_path, 1, start="portless"))
    assert time.monotonic() - started < SOON_S
    assert not any(map(running, groups))


def test_no_python(tmp_path: Path) -> None:
    wrong = replace(settings(tmp_path), python=tmp_path / "bin" / "python")
    with pytest.raises(UserError, match=r"rollout\.python: .*bin/python does not exist; build .* `make fleet`"):
        launch(wrong)


def test_the_whole_group_goes(tmp_path: Path) -> None:
    """A stand-in whose child does not listen to its leader."""
    engine = launch(settings(tmp_path, 1, start="children"))[0]
    os.kill(engine.pid, signal.SIGKILL)
    wait_until(engine.exit_reason)
    assert engine.exit_reason() == "its process was killed by SIGKILL"
    assert running(engine.pid), "the child is still there"
    stop([engine])
    wait_until(lambda: not running(engine.pid))


def test_engines_die_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    script = (
        "import sys, time\nsys.path.append('tests/support')\nfrom pathlib import Path\n"
        "from megasharp.rollout.sglang.client.launch import launch\n"
        "from tests.unit.rollout.sglang.conftest import settings\n"
        f"engines = launch(settings(Path({str(tmp_path)!r}), 2))\n"
        "print(*(engine.pid for engine in engines), flush=True)\ntime.sleep(3600)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[4]
    )
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    assert all(map(running, pids))
    parent.kill()
    parent.wait()
    wait_until(lambda: not any(map(running, pids)))


def test_a_held_port_is_free_for_the_engine_only() -> None:
    with HeldPort() as port, socket.socket() as engine:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port.number))
        engine.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        engine.bind(("127.0.0.1", port.number))
        engine.listen()


def test_environment(tmp_path: Path) -> None:
    inherited = {"http_proxy": "x", "HTTPS_PROXY": "y", "PYTHONPATH": "z", "HOME": "/home/me", "OMP_NUM_THREADS": "8"}
    on_cpu = environment(settings(tmp_path), 0, inherited)
    assert {"http_proxy", "HTTPS_PROXY", "PYTHONPATH"}.isdisjoint(on_cpu)
    assert (on_cpu["HOME"], on_cpu["OMP_NUM_THREADS"], on_cpu["HF_HUB_OFFLINE"]) == ("/home/me", "1", "1")
    assert on_cpu["GLOO_SOCKET_IFNAME"] == "lo"
    engines_own = replace(settings(tmp_path), python=Path("/e/bin/python"))
    assert environment(engines_own, 0, {"PATH": "/t/bin:/bin"})["PATH"] == "/e/bin:/t/bin:/bin"
    assert "GLOO_SOCKET_IFNAME" not in environment(settings(tmp_path), 0, inherited, "10.0.0.7")
    on_gpu = replace(settings(tmp_path), device="cuda", gpus=(("0", "1"), ("2", "3")))
    assert environment(on_gpu, 1, inherited)["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert environment(on_gpu, 1, inherited)["OMP_NUM_THREADS"] == "8"


@each_case(
    ("log", "reason"),
    [
        ("[Errno 98] error while attempting to bind: address already in use", "its port is taken"),
        ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", "it lacks memory"),
        ("torch.OutOfMemoryError: CUDA out of memory.", "it lacks memory"),
        ("OSError: /models/x does not appear to have a file named config.json", "it cannot load the model"),
        ("ModuleNotFoundError: No module named 'sglang'", "its Python lacks a package"),
    ],
)
def test_reasons(tmp_path: Path, log: str, reason: str) -> None:
    assert str(module._reason(f"INFO starting\n{log}\n")).startswith(reason)


@each_case(
    ("start", "kind"),
    [
        ("it cannot load the model (its process ended)", UserError),
        ("its port is taken", RunFailed),
        ("no answer within 600 s", RunFailed),
        ("its process was killed by SIGKILL; last lines: it cannot load the model", RunFailed),
        ("its Ray actor, or its node, is gone", RunFailed),
    ],
)
def test_what_the_user_must_change_is_told_from_what_another_start_may_mend(start: str, kind: type) -> None:
    assert type(module.start_error(f"engine 0 of 2 did not start: {start}")) is kind


def test_only_the_last_error_gives_the_reason() -> None:
    """Libraries write of missing packages and files while all is well."""
    noise = "Ignore import error: No module named 'decord'\nconfig.json read\nNo such file: /dev/nvidia0\n"
    assert module._reason(f"{noise}ServerArgs(mem_fraction_static=0.3)\n") is None
    unknown = "RuntimeError: the sky fell"
    assert module._reason(f"{noise}Traceback (most recent call last):\n  File x\n{unknown}\n") is None
    assert "memory" in str(module._reason(f"{noise}{unknown}\nMemoryError\n"))


def test_tail(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    assert EngineLog(log).tail() == EngineLog.from_now_on(log).tail() == "(the log is empty)"
    log.write_bytes(b"x" * 100_000 + b"\n" + b"\n".join(b"line  %d" % n for n in range(30)) + b"\n\n\xff\xfe\n")
    assert EngineLog(log).tail(3) == "line 28 | line 29 | \N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}"


def test_an_engine_is_not_judged_by_what_those_before_it_wrote(tmp_path: Path) -> None:
    """They share a log."""
    started = replace(settings(tmp_path, 1), log_folder=tmp_path)
    (tmp_path / "engine_0.log").write_text(f"MemoryError\nERROR: {module._NO_PORT} ('127.0.0.1', 40001)\n")
    starting = LocalStarter(started).begin(0)
    deadline = time.monotonic() + HANG_S
    while (engine := starting.answered()) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert engine is not None
    engine.kill()
    last_words = module.why_not_started(engine, "it was stopped")
    assert "MemoryError" not in last_words
    with engine.log.open("a") as file:
        file.write("what the next one writes\n")
    assert module.why_not_started(engine, "it was stopped") == last_words
    assert "MemoryError" in engine.log.read_text()


def test_config_is_what_the_engine_reads(tmp_path: Path) -> None:
    config = module.engine_config(settings(tmp_path, memory=True, tp=2, page_size=16), 31000, "secret")
    assert json.loads(json.dumps(config)) == {
        "model": str(tmp_path),
        "memory": str(tmp_path),
        "host": "127.0.0.1",
        "port": 31000,
        "api_key": "secret",
        "device": "cpu",
        "dtype": "float32",
        "tp": 2,
        "sglang": {"page_size": 16},
        "deterministic": False,
        "sleep": False,
        "shared": None,
    }
    returning = module.engine_config(replace(settings(tmp_path), returns_experts=True), 31000, "secret")
    assert returning["returns_experts"] is True


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The process groups of all engines that a failing launch started."""
    found: list[int] = []
    start = module.start_one

    def recording(*args: object) -> module.EngineProcess:
        engine = start(*args)  # type: ignore[arg-type]
        found.append(engine.pid)
        return engine

    monkeypatch.setattr(module, "start_one", recording)
    return found
