"""Real runs whose engines, ranks or driver are killed: they go on, end with the reason, or are resumed."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pandas as pd
import psutil
import pytest
from example_runs import GAP, REPOSITORY, all_gone, engine_leaders, finish, rows, running, wait_for, wait_until
from waiting import HANG_S, SOON_S

from megasharp.rollout.sglang.client.api import FOREIGN
from megasharp.rollout.sglang.client.external import ExternalEngine, fault, own_identity
from megasharp.rollout.sglang.client.launch import FleetSettings, answers
from megasharp.rollout.sglang.identity import KEY_VARIABLE

pytestmark = pytest.mark.long("fleet-runs")


def test_a_run_goes_on_with_the_engine_that_is_left_until_the_other_comes_back(tmp_path: Path) -> None:
    """The first is killed in its turn once the other is back, so the run ends on one that restarted."""
    with running(tmp_path, "steps=1000") as process:
        seen = wait_for(process, "step 1/1000")
        os.kill(engine_leaders(process)[1].pid, signal.SIGKILL)
        seen += wait_for(process, "engine 1 is back; it serves once it holds the weights of the next push")
        back = len(rows(tmp_path))
        wait_until(process, lambda: len(rows(tmp_path)) > back)
        os.kill(engine_leaders(process)[0].pid, signal.SIGKILL)
        wait_until(process, lambda: len(rows(tmp_path)) > back + 5)
        process.terminate()
        output = seen + finish(process, code=143)
    # Whoever meets it first tells: the watch, a request, or the call that has it sleep.
    assert "engine 1 is lost: dead (" in output and "engine 0 is lost: dead (" in output, output
    tables = sorted((tmp_path / "fleet_on_cpu/rollouts").glob("*.parquet"))
    assert len(tables) > back + 5 and {len(pd.read_parquet(table)) for table in tables} == {32}
    assert all(row["policy/engine_gap_max"] < GAP for row in rows(tmp_path))


@pytest.mark.parametrize(("placement", "kills"), [("colocated", 2), ("disaggregated", 1)])
def test_a_step_whose_only_engine_is_killed_goes_on_with_the_one_that_restarts(
    tmp_path: Path, placement: str, kills: int
) -> None:
    """Killed while it samples, with a memory network in it; checksums are compared after each push."""
    prompts = ["data.prompts_per_step=8", "steps=4", "checkpoint.every=4", "rollout.engines=1", "policy.tp=1"]
    apart = ["policy.offload=[]", "cluster={backend: local, placement: disaggregated}"]
    arguments = [*prompts, *(["cluster.backend=local"] if placement == "colocated" else apart)]
    table = "fleet_on_cpu/rollouts/step_{:06d}.parquet"
    with running(tmp_path, *arguments) as process:
        for step in range(1, kills + 1):
            wait_until(process, (tmp_path / table.format(step)).exists)
            (leader,) = engine_leaders(process).values()
            time.sleep(0.3)
            os.kill(leader.pid, signal.SIGKILL)
            wait_until(
                process, lambda killed=leader.pid: killed not in {e.pid for e in engine_leaders(process).values()}
            )
            wait_until(process, (tmp_path / table.format(step + 1)).exists)
        output = finish(process)
    for times in (2, 1)[:kills]:
        assert f"no engine is left: the run waits for engine 0, which restarts; it may {times} times more" in output
    assert output.count("engine 0 is lost: dead (") == output.count("engine 0 is back; ") == kills, output
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4]
    assert all(row["policy/engine_gap_max"] < GAP and row["memory/calibration_kl"] > 0 for row in rows(tmp_path))
    sampled = [pd.read_parquet(tmp_path / table.format(step)) for step in (1, 2, 3, 4)]
    assert [set(each["policy_version"]) for each in sampled] == [{0}, {1}, {2}, {3}]
    groups = pd.concat(sampled).groupby("prompt_id").size()
    assert len(groups) == 32 and set(groups) == {8}


def test_a_run_without_engines_ends_and_names_them(tmp_path: Path) -> None:
    """None restarts. What was being saved at that moment is saved."""
    with running(tmp_path, "steps=50", "checkpoint.every=1", "rollout.restarts=0") as process:
        seen = wait_for(process, "step 1/50")
        family = psutil.Process(process.pid).children(recursive=True)
        killed = time.monotonic()
        for leader in engine_leaders(process).values():
            os.kill(leader.pid, signal.SIGKILL)
        output = seen + finish(process, code=1)
    assert time.monotonic() - killed < 4 * SOON_S
    last = output.splitlines()[-1]
    assert last.startswith("megasharp: no engine is left")
    # An engine that was to wake at that moment is told by the connection that it broke.
    assert "engine 0 is dead" in last and "engine 1 is dead" in last
    latest = (tmp_path / "fleet_on_cpu/checkpoints/latest").read_text()
    assert latest == f"step_{rows(tmp_path)[-1]['step']:06d}\n"
    assert all_gone(family)


def from_forkserver(process: psutil.Process | None) -> bool:
    return process is not None and "multiprocessing.forkserver" in " ".join(process.cmdline())


def test_an_engine_of_two_ranks_and_a_dead_rank_of_the_policy(tmp_path: Path) -> None:
    """Every push is verified on both ranks of the engine. A policy's rank killed in a push ends the run."""
    arguments = ("steps=50", "cluster.backend=local", "rollout.engines=1", "rollout.tp=2", "sync.transport=disk")
    with running(tmp_path, *arguments) as process:
        wait_until(process, lambda: len(rows(tmp_path)) >= 2)
        family = psutil.Process(process.pid).children(recursive=True)
        rank = next(child for child in family if from_forkserver(child) and from_forkserver(child.parent()))
        wait_until(process, lambda: any((tmp_path / "fleet_on_cpu/weights").iterdir()))
        os.kill(rank.pid, signal.SIGKILL)
        killed = time.monotonic()
        output = finish(process, code=1)
    assert time.monotonic() - killed < 4 * SOON_S
    assert re.match(r"megasharp: rank [01] ended with exit code -9 in \w+; its log is ", output.splitlines()[-1]), (
        output
    )
    assert all_gone(family)
    assert all(row["policy/engine_gap_max"] < GAP and row["memory/calibration_kl"] > 0 for row in rows(tmp_path))


APART = (
    "cluster={backend: local, placement: disaggregated}",
    "policy.offload=[]",
    "recipe.methods=[grpo]",
    "rollout.max_staleness=1",
    "rollout.stragglers=keep",
    "rollout.oversample=0.5",
    "deterministic=false",
    "checkpoint.every=1",
)


def test_a_killed_run_loses_no_prompt_and_trains_on_none_twice(tmp_path: Path) -> None:
    """Disaggregated, by broadcast, with stale tokens allowed; the data holds prompts far too long."""
    data = tmp_path / "data.jsonl"
    records = [{"id": f"🙂 {number}", "numbers": [3, 5, 7], "target": 1 + number} for number in range(300)]
    too_long = [{"id": f"long {n}", "numbers": [1] * n, "target": n} for n in (20, 50_000)]
    data.write_text("\n".join(map(json.dumps, [*records[:100], *too_long, *records[100:]])))
    with running(tmp_path, "steps=90", f"data.path={data}", *APART) as process:
        wait_until(process, (tmp_path / "fleet_on_cpu/checkpoints/step_000002/manifest.json").exists)
        family = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
        assert all_gone(family)
    before = max((tmp_path / "fleet_on_cpu/checkpoints").glob("*/manifest.json"))
    manifest = json.loads(before.read_text())
    waiting, done = [entry["position"] for entry in manifest["pending"]], manifest["step"]
    assert waiting

    with running(tmp_path, f"steps={done + 2}", f"data.path={data}", *APART, "--resume") as process:
        output = finish(process)
    assert "weights by gloo" in output
    assert "300 of 302 prompts of" in output
    assert [row["step"] for row in rows(tmp_path)] == list(range(1, done + 3))
    assert all(row["rollout/staleness_max"] <= 1 and row["rollout/unsampled"] == 0 for row in rows(tmp_path))
    tables = sorted((tmp_path / "fleet_on_cpu/rollouts").glob("*.parquet"))
    sampled = pd.concat([pd.read_parquet(table) for table in tables])
    order = [record["id"] for record in records]
    random.Random("prompts-1-0").shuffle(order)
    positions = {name: position for position, name in enumerate(order)}
    trained = [positions[name] for name in sampled.drop_duplicates("group_id")["prompt_id"]]
    last = json.loads((tmp_path / f"fleet_on_cpu/checkpoints/step_{done + 2:06}/manifest.json").read_text())
    left = [entry["position"] for entry in last["pending"]]
    assert len(trained) == 4 * (done + 2)
    assert sorted([*trained, *left]) == list(range(last["cursor"]["position"]))
    assert set(waiting) <= {*trained[4 * done :], *left}


@contextmanager
def by_hand(folder: Path, port: int, key: str) -> Iterator[subprocess.Popen[bytes]]:
    """An engine, started by hand as docs/how-to/engines.md says; its whole group is killed at the end."""
    config = {"model": str(REPOSITORY / "examples/quickstart/base"), "host": "127.0.0.1", "port": port, "tp": 1}
    config |= {"memory": str(REPOSITORY / "examples/quickstart/memory"), "device": "cpu", "dtype": "float32"}
    file = folder / "engine.json"
    file.write_text(json.dumps({**config, "deterministic": True}))
    process = subprocess.Popen(
        [REPOSITORY / ".venv-fleet/bin/python", "-m", "megasharp.rollout.sglang.engine", file],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {KEY_VARIABLE: key},
        stdout=(folder / "engine.log").open("ab"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def ready(url: str, key: str) -> ExternalEngine:
    engine, deadline = ExternalEngine(1, url, key), time.monotonic() + HANG_S
    while not answers(engine.api):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return engine


def test_an_engine_started_by_hand_is_used_like_ones_own_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables of two steps equal those of a run with two engines of its own; then it is killed and started again."""
    port, key, table = free_port(), "its own key", "fleet_on_cpu/rollouts/step_{:06d}.parquet"
    url = f"http://127.0.0.1:{port}"
    apart = ["policy.offload=[]", "policy.tp=1", "cluster={backend: local, placement: disaggregated}"]
    monkeypatch.setenv(KEY_VARIABLE, key)
    with by_hand(tmp_path, port, key) as engine:
        with running(tmp_path / "own", "steps=2", *apart) as process:
            finish(process)
        wanted = own_identity(settings_of_example())
        joined = ready(url, key)
        assert fault(joined, wanted) is None
        assert "refuses the key of MEGASHARP_ENGINE_KEY" in str(fault(ExternalEngine(1, url, "no"), wanted))
        other = own_identity(replace(settings_of_example(), model=REPOSITORY / "examples/quickstart/memory"))
        assert "its model is another one: hidden_size " in str(fault(joined, other))
        assert "it has a memory network, and the run has none" in str(fault(joined, {**wanted, "memory": None}))
        arguments = ["steps=1000", "rollout.engines=1", f"rollout.external=[{url}]", *apart]
        with running(tmp_path, *arguments) as process:
            seen = wait_for(process, "step 1/1000")
            wait_until(process, lambda: len(rows(tmp_path)) > 1)
            assert joined.api.version() == FOREIGN, "the run's weights, not this process's"
            assert key not in Path(f"/proc/{engine_leaders(process)[0].pid}/environ").read_text()
            for step in (1, 2):
                ours, theirs = (pd.read_parquet(root / table.format(step)) for root in (tmp_path / "own", tmp_path))
                same = ["prompt_id", "text", "reward", "policy_version"]
                pd.testing.assert_frame_equal(ours[same], theirs[same])
            os.killpg(engine.pid, signal.SIGKILL)
            seen += wait_for(process, f"engine 1 at {url} is lost: dead (")
            with by_hand(tmp_path, port, key):
                seen += wait_for(process, f"engine 1 at {url} is back; it serves once it holds the weights of the next")
                back = len(rows(tmp_path))
                wait_until(process, lambda: len(rows(tmp_path)) > back + 2)
                assert joined.api.label().version >= back
                process.terminate()
                seen += finish(process, code=143)
                assert answers(joined.api), "the run leaves it running"
    assert all(row["policy/engine_gap_max"] < GAP for row in rows(tmp_path))
    written = [path.read_bytes() for path in (tmp_path / "fleet_on_cpu").rglob("*") if path.is_file()]
    assert not any(key.encode() in text for text in [*written, seen.encode()])
    with running(tmp_path / "gone", *arguments) as process:
        output = finish(process, code=2)
    assert f"rollout.external: {url} does not answer (" in output.splitlines()[-1]


def settings_of_example() -> FleetSettings:
    quickstart = REPOSITORY / "examples/quickstart"
    return FleetSettings(Path(), quickstart / "base", Path(), memory=quickstart / "memory", deterministic=True)
