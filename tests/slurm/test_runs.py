"""Real runs as jobs of a real Slurm: on two nodes over Ray, and through its time limit to the end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cluster import Cluster, wait_for
from submitting import Submitting

pytestmark = pytest.mark.long

SMALL = ("eval.suites=[]", "eval.every=0", "log.tensorboard=false", "data.prompts_per_step=8")


@pytest.fixture
def submit(slurm: Cluster, tmp_path: Path) -> Submitting:
    return Submitting(slurm, tmp_path)


def steps(submit: Submitting, name: str) -> list[int]:
    """Recorded training steps, in the order in which they were written."""
    lines = (submit.folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [row["step"] for row in map(json.loads, lines) if "policy/loss" in row]


def test_two_nodes_are_examined_and_share_a_ray(submit: Submitting, slurm: Cluster) -> None:
    cluster = ("cluster.backend=ray", "cluster.nodes=2", "policy.dp=2")
    job = submit("two", *SMALL, *cluster, "steps=2", "--doctor", MEGASHARP_INTERFACE="lo", MEGASHARP_JOIN_SECONDS="200")
    done = slurm.ended(job, 400)
    said = submit.node("two", job, 0) + submit.node("two", job, 0, node=1)
    assert (done.state, done.exit_code) == ("COMPLETED", 0), submit.log("two", job) + said
    assert steps(submit, "two") == [1, 2]
    examined = (submit.folder / f"runs/two/logs/slurm_{job}/restart_0/doctor.log").read_text()
    assert "2 ranks on 2 nodes: bus bandwidth" in examined and "took part as node 1 of 2" in examined


def test_a_node_that_is_not_well_begins_nothing(submit: Submitting, slurm: Cluster) -> None:
    job = submit.standin("sick", "waits", "--doctor", "rollout.python=/no/such/python", "rollout.engine=sglang")
    done = slurm.ended(job, 200)
    assert (done.state, done.exit_code, done.restarts) == ("FAILED", 1, 0)
    assert "FAIL  mounts: not seen here: /no/such/python" in submit.log("sick", job)
    assert submit.node("sick", job, 0) == ""


@pytest.mark.timeout(960)
def test_a_run_is_asked_by_its_time_limit_and_queues_itself_again_to_the_end(
    submit: Submitting, slurm: Cluster
) -> None:
    """60 steps: Slurm's shortest limit that leaves room for a warning ends the first attempt, `scancel` the second."""
    job = submit("long", *SMALL, "steps=60", "data.prompts_per_step=144", "--time", "2", "--lead", "50")
    wait_for(lambda: "queued again" in submit.log("long", job), 150, lambda: submit.log("long", job))
    first = len(steps(submit, "long"))
    assert 0 < first < 60, submit.log("long", job)
    wait_for(lambda: len(steps(submit, "long")) > first, 150, lambda: submit.log("long", job))
    submit.warn("long", job, 1)
    done = slurm.ended(job, 600)
    log = submit.log("long", job)
    assert (done.state, done.exit_code) == ("COMPLETED", 0) and done.restarts >= 2, log
    assert log.count("time is nearly up") == log.count("queued again") == done.restarts
    assert steps(submit, "long") == list(range(1, 61))


def test_nodes_that_do_not_join_in_time_are_named(submit: Submitting, slurm: Cluster) -> None:
    cluster = ("cluster.backend=ray", "cluster.nodes=2", "policy.dp=2")
    job = submit("late", *SMALL, *cluster, "steps=2", MEGASHARP_INTERFACE="lo", MEGASHARP_JOIN_SECONDS="0.1")
    done = slurm.ended(job, 120)
    assert (done.state, done.restarts) == ("FAILED", 0)
    assert "node2 did not join Ray at 127.0.0.1:" in submit.log("late", job)


def test_a_node_without_the_interface_says_which_it_has(submit: Submitting, slurm: Cluster) -> None:
    cluster = ("cluster.backend=ray", "cluster.nodes=2", "policy.dp=2")
    job = submit("none", *SMALL, *cluster, "steps=2", MEGASHARP_INTERFACE="ib9")
    done = slurm.ended(job, 120)
    assert (done.state, done.restarts) == ("FAILED", 0)
    assert "MEGASHARP_INTERFACE=ib9: node" in submit.log("none", job)
