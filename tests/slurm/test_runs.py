"""Real runs as jobs of a real Slurm: on two nodes over Ray, and through its time limit to the end."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from cluster import Cluster, wait_for
from submitting import QUICKSTART, REPOSITORY, STANDIN, Submitting
from waiting import HANG_S

pytestmark = pytest.mark.long("slurm")

SMALL = ("eval.suites=[]", "eval.every=0", "log.tensorboard=false", "data.prompts_per_step=8")


@pytest.fixture
def submit(slurm: Cluster, tmp_path: Path) -> Submitting:
    return Submitting(slurm, tmp_path)


def steps(submit: Submitting, name: str) -> list[int]:
    """Recorded training steps, in the order in which they were written."""
    lines = (submit.folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [row["step"] for row in map(json.loads, lines) if "policy/loss" in row]


@contextmanager
def held(submit: Submitting, name: str, job: str, step: int) -> Iterator[None]:
    """The run stands still inside, from `step` on or a little later."""

    def recorded() -> int:
        metrics = submit.folder / "runs" / name / "metrics.jsonl"
        return len(steps(submit, name)) if metrics.exists() else 0

    wait_for(lambda: recorded() >= step, HANG_S, lambda: submit.log(name, job))
    runs = str(submit.folder / "runs")
    (run,) = [
        one
        for one in psutil.process_iter(["cmdline"])
        if {"megasharp.cli", "train", f"name={name}", runs} <= set(one.info["cmdline"] or [])
        # Nor the one that would start it again.
        and not {"megasharp.cluster.slurm.node", "--retries"} & set(one.info["cmdline"])
    ]
    run.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        run.send_signal(signal.SIGCONT)


def test_two_nodes_are_examined_and_share_a_ray(submit: Submitting, slurm: Cluster) -> None:
    cluster = ("cluster.backend=ray", "cluster.nodes=2", "policy.dp=2")
    job = submit("two", *SMALL, *cluster, "steps=2", "--doctor", MEGASHARP_INTERFACE="lo", MEGASHARP_JOIN_SECONDS="400")
    done = slurm.ended(job, HANG_S)
    said = submit.node("two", job, 0) + submit.node("two", job, 0, node=1)
    assert (done.state, done.exit_code) == ("COMPLETED", 0), submit.log("two", job) + said
    assert steps(submit, "two") == [1, 2]
    examined = (submit.folder / f"runs/two/logs/slurm_{job}/restart_0/doctor.log").read_text()
    assert "2 ranks on 2 nodes: bus bandwidth" in examined and "took part as node 1 of 2" in examined


def test_engines_on_two_nodes_copy_weights_from_the_ranks_beside_them(submit: Submitting, slurm: Cluster) -> None:
    """Handles of memory go through the first node to the engine of the second; every push is verified by checksums."""
    example, python = (
        REPOSITORY / "examples" / "fleet_on_cpu" / "run.yaml",
        REPOSITORY / ".venv-fleet" / "bin" / "python",
    )
    layout = ("cluster.nodes=2", "policy.tp=1", "policy.dp=2", "sync.transport=ipc", f"rollout.python={python}")
    variables = {"MEGASHARP_INTERFACE": "lo", "MEGASHARP_JOIN_SECONDS": "400"}
    job = submit("lent", *SMALL, *layout, "steps=2", file=str(example), **variables)
    done = slurm.ended(job, HANG_S)
    said = submit.node("lent", job, 0) + submit.node("lent", job, 0, node=1)
    assert (done.state, done.exit_code) == ("COMPLETED", 0), submit.log("lent", job) + said
    assert steps(submit, "lent") == [1, 2]
    assert "colocated, weights by ipc" in said, said


def test_a_node_that_is_not_well_begins_nothing(submit: Submitting, slurm: Cluster) -> None:
    one = "--sbatch=--exclude=node2,node3"
    job = submit("sick", "--python", STANDIN, "--doctor", one, STANDIN="waits", SICK="node1")
    done = slurm.ended(job, HANG_S)
    assert (done.state, done.exit_code, done.restarts) == ("FAILED", 1, 0)
    assert "FAIL  engines' Python: rollout.python: /no/such/python does not exist" in submit.log("sick", job)
    assert "if others would be better: submit again with --sbatch=--exclude=node1" in submit.log("sick", job)
    assert submit.node("sick", job, 0) == ""


@pytest.mark.timeout(960)
def test_a_run_is_asked_by_its_time_limit_and_queues_itself_again_to_the_end(
    submit: Submitting, slurm: Cluster
) -> None:
    """60 steps: Slurm's shortest limit that leaves room for a warning ends the first attempt, `scancel` the second.

    However fast the machine is, the run stands still after some steps until it has been warned.
    """

    def said(text: str, times: int) -> bool:
        return submit.log("long", job).count(text) >= times

    job = submit("long", *SMALL, "steps=60", "--time", "2", "--lead", "50")
    with held(submit, "long", job, 10):
        wait_for(lambda: said("time is nearly up", 1), HANG_S, lambda: submit.log("long", job))
    wait_for(lambda: said("queued again", 1), HANG_S, lambda: submit.log("long", job))
    with held(submit, "long", job, len(steps(submit, "long")) + 10):
        submit.warn("long", job, 1)
        wait_for(lambda: said("time is nearly up", 2), HANG_S, lambda: submit.log("long", job))
    done = slurm.ended(job, HANG_S)
    log = submit.log("long", job)
    assert (done.state, done.exit_code) == ("COMPLETED", 0) and done.restarts >= 2, log
    assert log.count("time is nearly up") == log.count("queued again") == done.restarts
    assert steps(submit, "long") == list(range(1, 61))


def test_a_job_under_which_a_nodes_ray_is_killed_queues_itself_again(submit: Submitting, slurm: Cluster) -> None:
    """The raylet of the second node, as the kernel kills one for memory; the run goes on from its checkpoint."""
    cluster = ("cluster.backend=ray", "cluster.nodes=2", "policy.dp=2", "checkpoint.every=5")
    job = submit("bereft", *SMALL, *cluster, "steps=30", MEGASHARP_INTERFACE="lo", MEGASHARP_JOIN_SECONDS="400")
    latest = submit.folder / "runs/bereft/checkpoints/latest"
    wait_for(latest.exists, HANG_S, lambda: submit.log("bereft", job))
    (raylet,) = [
        one
        for one in psutil.process_iter(["cmdline"])
        if (one.info["cmdline"] or [""])[0].endswith("/raylet")
        and one.environ().get("SLURM_NODEID") == "1"
        and one.environ().get("SLURM_JOB_ID") == job
    ]
    raylet.kill()
    done = slurm.ended(job, HANG_S)
    log = submit.log("bereft", job)
    assert (done.state, done.exit_code, done.restarts) == ("COMPLETED", 0, 1), log
    assert "Ray ended on node" in log and steps(submit, "bereft") == list(range(1, 31))


def test_a_job_that_misses_its_checkpoints_ends_and_is_not_queued_again(submit: Submitting, slurm: Cluster) -> None:
    """It would begin at step 0. They go while it waits: `submit` refuses a run whose checkpoints are missing before."""
    assert slurm.ended(submit("lost", *SMALL, "steps=2"), HANG_S).state == "COMPLETED"
    root = submit.folder / "runs" / "lost"
    job = submit("lost", *SMALL, "steps=4", "--sbatch=--hold")
    (root / "checkpoints").rename(submit.folder / "kept")
    rows = (root / "metrics.jsonl").read_bytes()
    slurm.call("scontrol", "release", job)
    done = slurm.ended(job, HANG_S)
    log = submit.log("lost", job)
    assert (done.state, done.exit_code, done.restarts) == ("FAILED", 2, 0), log
    assert "metrics.jsonl has rows up to step 2" in log and "checkpoints is not there; bring" in log, log
    assert (root / "metrics.jsonl").read_bytes() == rows and not (root / "checkpoints").exists()


def test_nodes_that_do_not_join_in_time_are_named(submit: Submitting, slurm: Cluster) -> None:
    cluster = ("cluster.backend=ray", "cluster.nodes=2", "policy.dp=2")
    job = submit("late", *SMALL, *cluster, "steps=2", MEGASHARP_INTERFACE="lo", MEGASHARP_JOIN_SECONDS="0.1")
    done = slurm.ended(job, HANG_S)
    assert (done.state, done.restarts) == ("FAILED", 0)
    assert "node2 did not join Ray at 127.0.0.1:" in submit.log("late", job)


def test_a_node_without_the_interface_says_which_it_has(submit: Submitting, slurm: Cluster) -> None:
    cluster = ("cluster.backend=ray", "cluster.nodes=2", "policy.dp=2")
    job = submit("none", *SMALL, *cluster, "steps=2", MEGASHARP_INTERFACE="ib9")
    done = slurm.ended(job, HANG_S)
    assert (done.state, done.restarts) == ("FAILED", 0)
    assert "MEGASHARP_INTERFACE=ib9: node" in submit.log("none", job)


def test_an_evaluation_is_a_job_of_its_own_on_engines(submit: Submitting, slurm: Cluster) -> None:
    """SGLang's, in their own Python; the model is the folder that every run of the quickstart begins with."""
    example = str(REPOSITORY / "examples" / "fleet_on_cpu" / "run.yaml")
    python = REPOSITORY / ".venv-fleet" / "bin" / "python"
    base = REPOSITORY / "examples" / "quickstart" / "base"
    asked = ("--eval", "countdown_test", "--checkpoint", str(base), "eval.n=1", "eval.k=[1]")
    job = submit("judged", *asked, f"rollout.python={python}", "rollout.engines=1", file=example)
    done = slurm.ended(job, HANG_S)
    assert (done.state, done.exit_code) == ("COMPLETED", 0), submit.log("judged", job) + submit.node("judged", job, 0)
    measured = submit.folder / "runs/judged/evals/by_hand/base"
    found = json.loads((measured / "countdown_test.json").read_text())
    assert found["n"] == 1 and 0.0 < found["pass_at_k"]["1"] < 0.4
    assert (measured / "logs/engine_0.log").stat().st_size > 0, "no engine was started"
    assert slurm.show(job)["JobName"] == "judged-eval"


def test_the_nodes_of_an_allocation_are_examined_by_hand(submit: Submitting, slurm: Cluster, tmp_path: Path) -> None:
    """`megasharp doctor --nodes` inside one: every node, and an all-reduce over both."""
    doctor = [sys.executable, "-P", "-m", "megasharp.cli", "doctor", QUICKSTART, "--nodes", "--runs", str(tmp_path)]
    allocation = ("salloc", "--quiet", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1")
    variables = {"PYTHONPATH": str(REPOSITORY), "MEGASHARP_INTERFACE": "lo"}
    said = slurm.call(*allocation, *doctor, environment=variables, cwd=tmp_path)
    assert "2 ranks on 2 nodes: bus bandwidth" in said and "took part as node 1 of 2" in said
    assert "FAIL" not in said
