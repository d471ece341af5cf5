"""Whole runs over real engines: the shipped example, short; engines that die meanwhile; refusals before a start."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pandas as pd
import psutil
import pytest
from transformers import AutoModelForCausalLM
from waiting import HANG_S, SOON_S

from megasharp.checkpoint.run_folder import open_run

REPOSITORY = Path(__file__).parents[2]
EXAMPLE = "examples/fleet_on_cpu/run.yaml"
SHORT = ("eval.suites=[]", "eval.with_memory=false", "log.tensorboard=false", "data.prompts_per_step=4")
# Two float32 programs on one policy; each may be 6e-5 off at a sharp token (test_client.py). Other weights give 1e-2.
GAP = 3e-4

pytestmark = pytest.mark.long


@contextmanager
def running(runs: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The command on the example, in a session of its own; nothing that it started is left afterwards."""
    command = [sys.executable, "-m", "megasharp.cli", "train", EXAMPLE, "--runs", str(runs), *SHORT, *arguments]
    process = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    family: dict[int, psutil.Process] = {}
    try:
        yield process
    finally:
        if process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                family[child.pid] = child
            process.kill()
            process.wait()
        for child in family.values():
            if child.is_running():
                child.kill()


def engine_leaders(process: subprocess.Popen[str]) -> dict[int, psutil.Process]:
    """Every engine's first process by its number."""
    found = {}
    for child in psutil.Process(process.pid).children(recursive=True):
        words = child.cmdline()
        if "megasharp.serving.engine" in words and words[-1].endswith(".json"):
            found[int(Path(words[-1]).stem.removeprefix("engine_"))] = child
    return found


def wait_for(process: subprocess.Popen[str], text: str) -> str:
    """Read the output until a line has `text`; returns what was read."""
    assert process.stdout is not None
    read = ""
    deadline = time.monotonic() + HANG_S
    for line in process.stdout:
        read += line
        if text in line:
            return read
        assert time.monotonic() < deadline, read
    raise AssertionError(f"the run ended without {text!r}:\n{read}")


def wait_until(process: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANG_S
    while True:
        with suppress(FileNotFoundError):
            if condition():
                return
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.005)


def rows(runs: Path) -> list[dict[str, float]]:
    lines = (runs / "fleet_on_cpu" / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "policy/loss" in row]


def finish(process: subprocess.Popen[str], code: int = 0) -> str:
    output, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == code, output
    return output


def all_gone(family: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(family, timeout=SOON_S)
    return not alive


def test_the_example_trains_and_resumes(tmp_path: Path) -> None:
    mu = "recipe.dlc.mu={start: 0.3, end: 0.1, steps: 2}"
    with running(tmp_path, "steps=2", "checkpoint.every=1", mu) as process:
        wait_for(process, "step 1/2")
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(engine_leaders(process)) == 2
        finish(process)
    assert all_gone(family)
    first, second = rows(tmp_path)
    # Two programs, one policy: SGLang's log-probs against Megatron's.
    assert first["policy/engine_gap_max"] < GAP and second["policy/engine_gap_max"] < GAP
    # Two networks were at work, and the memory learns.
    assert first["memory/calibration_kl"] > 0 and first["policy/sampler_gap"] > 1e-3
    assert second["memory/cross_entropy"] > 0
    manifest = json.loads((tmp_path / "fleet_on_cpu/checkpoints/step_000002/manifest.json").read_text())
    assert (manifest["policy_version"], manifest["memory_version"]) == (2, 2)
    sampled = pd.read_parquet(tmp_path / "fleet_on_cpu/rollouts/step_000002.parquet")
    assert len(sampled) == 4 * 8 and set(sampled["policy_version"]) == {1}

    with running(tmp_path, "steps=3", "--resume", mu) as process:
        finish(process)
    third = rows(tmp_path)[2]
    assert [row["memory/mu"] for row in rows(tmp_path)] == pytest.approx([0.3, 0.2, 0.1])
    # Engines did as asked: the calibrated distributions' distance from the policy's goes with the square of mu.
    assert second["memory/calibration_kl"] < first["memory/calibration_kl"] / 2
    assert third["memory/calibration_kl"] < first["memory/calibration_kl"] / 6
    assert third["policy/engine_gap_max"] < GAP
    assert set(pd.read_parquet(tmp_path / "fleet_on_cpu/rollouts/step_000003.parquet")["policy_version"]) == {2}


def test_a_run_goes_on_with_the_engine_that_is_left_until_the_other_comes_back(tmp_path: Path) -> None:
    """The first is killed in its turn once the other is back, so the run ends on one that began anew."""
    with running(tmp_path, "steps=1000") as process:
        seen = wait_for(process, "step 1/1000")
        os.kill(engine_leaders(process)[1].pid, signal.SIGKILL)
        seen += wait_for(process, "engine 1 is back; it serves once it holds the weights that are pushed now")
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


def test_a_run_without_engines_ends_and_names_them(tmp_path: Path) -> None:
    """What was being saved at that moment is saved."""
    with running(tmp_path, "steps=50", "checkpoint.every=1") as process:
        seen = wait_for(process, "step 1/50")
        family = psutil.Process(process.pid).children(recursive=True)
        killed = time.monotonic()
        for leader in engine_leaders(process).values():
            os.kill(leader.pid, signal.SIGKILL)
        output = seen + finish(process, code=1)
    assert time.monotonic() - killed < 60
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
    assert time.monotonic() - killed < 60
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
    assert "2 of 302 prompts in" in output
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


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("rollout.sglang={pp_size: 2}", "run.yaml: rollout.sglang.pp_size 2 is refused: weight updates are checked"),
        ("rollout.sglang={attention_backend: fa3}", "SGLang's only one on a CPU is torch_native"),
        ("rollout.sglang={max_total_token: 5}", "max_total_token is no flag of the installed SGLang; did you mean"),
        ("rollout.sglang={log_level: info}", "SGLang would write the run's key into its log"),
        ("rollout.sglang={weight_version: '5'}", "versions are the run's to count"),
        ("rollout.python=nowhere/python", "build the engines' Python with `make fleet`"),
    ],
)
def test_refused_when_the_config_is_read(tmp_path: Path, override: str, reason: str) -> None:
    with running(tmp_path, override) as process:
        output = finish(process, code=2)
    assert reason in output.splitlines()[-1]
    assert not (tmp_path / "fleet_on_cpu").exists()


def test_a_memory_network_with_another_vocabulary(tmp_path: Path) -> None:
    memory = Path(shutil.copytree(REPOSITORY / "examples/quickstart/memory", tmp_path / "memory"))
    model = AutoModelForCausalLM.from_pretrained(memory, dtype="float32")
    model.resize_token_embeddings(64)
    model.save_pretrained(memory)
    with running(tmp_path / "runs", f"recipe.dlc.memory.path={memory}") as process:
        output = finish(process, code=2)
    assert "has a vocabulary of 64 tokens" in output.splitlines()[-1]


def test_where_an_engine_does_not_start_no_run_stands_in_the_way(tmp_path: Path) -> None:
    with running(tmp_path, "rollout.sglang={mem_fraction_static: 1.0e-5}") as process:
        output = finish(process, code=2)
    last = output.splitlines()[-1]
    assert "did not start: it lacks memory" in last
    log = tmp_path / "fleet_on_cpu/logs/attempt_1/engine_0.log"
    assert str(log.parent) in last and log.exists()
    again = open_run(tmp_path / "fleet_on_cpu", "", resume=False)
    again.close()
    assert again.attempt == 2
