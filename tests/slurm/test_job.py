"""The sbatch file on a real Slurm, with a stand-in for the run: signals, queueing again, giving up, cancelling."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from cluster import Cluster, wait_for
from submitting import STANDIN, Submitting
from waiting import HANG_S, SOON_S

pytestmark = pytest.mark.long("slurm")


@pytest.fixture
def submit(slurm: Cluster, tmp_path: Path) -> Submitting:
    return Submitting(slurm, tmp_path)


def test_a_warned_run_saves_and_goes_on_until_it_is_done(submit: Submitting, slurm: Cluster) -> None:
    job = submit.standin("a", "saves")
    submit.warn("a", job, 0, "saves")
    submit.warn("a", job, 1, "saves")
    done = slurm.ended(job, HANG_S)
    assert (done.state, done.exit_code, done.restarts) == ("COMPLETED", 0, 2), submit.log("a", job)
    begins = [
        line.split("begins at ")[1].split(" on ")[0] for line in submit.log("a", job).splitlines() if "begins" in line
    ]
    assert begins == ["no checkpoint", "step_000020", "step_000040"]
    assert (submit.folder / "runs/a/logs/latest").resolve().name == "restart_2"
    for path in (submit.folder / "runs/a", *(submit.folder / "runs/a").rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, f"{path}: a run is its owner's, Slurm's own log too"


def test_a_run_that_makes_no_progress_is_given_up_after_two_restarts(submit: Submitting, slurm: Cluster) -> None:
    job = submit.standin("a", "stuck")
    done = slurm.ended(job, HANG_S)
    assert (done.state, done.exit_code, done.restarts) == ("FAILED", 1, 2)
    assert "two restarts began at no checkpoint and made no progress" in submit.log("a", job)


def test_no_more_restarts_than_were_allowed(submit: Submitting, slurm: Cluster) -> None:
    job = submit.standin("a", "stuck", "--restarts", "0")
    done = slurm.ended(job, HANG_S)
    assert (done.state, done.exit_code, done.restarts) == ("FAILED", 1, 0)
    assert "0 restarts are all that were allowed" in submit.log("a", job)


def test_a_run_that_fails_is_not_queued_again_and_its_last_lines_are_told(submit: Submitting, slurm: Cluster) -> None:
    job = submit.standin("a", "fails")
    done = slurm.ended(job, HANG_S)
    assert (done.state, done.exit_code, done.restarts) == ("FAILED", 2, 0)
    assert "failed with exit code 2" in submit.log("a", job) and "the user's mistake" in submit.log("a", job)


def test_a_cancelled_job_leaves_nothing(submit: Submitting, slurm: Cluster) -> None:
    job = submit.standin("a", "waits")
    wait_for(lambda: "waits" in submit.node("a", job, 0), HANG_S, lambda: submit.log("a", job))
    left = [
        one for one in psutil.process_iter(["cmdline"]) if str(submit.folder) in " ".join(one.info["cmdline"] or [])
    ]
    assert left
    slurm.call("scancel", job)
    assert slurm.ended(job, HANG_S).state == "CANCELLED"
    assert psutil.wait_procs(left, timeout=SOON_S)[1] == []


def test_one_run_has_one_job_at_a_time(submit: Submitting, slurm: Cluster) -> None:
    first, second = submit.standin("a", "waits"), submit.standin("a", "waits")
    wait_for(lambda: "waits" in submit.node("a", first, 0), HANG_S, lambda: submit.log("a", first))
    wait_for(lambda: slurm.show(second)["Reason"] == "Dependency", HANG_S, lambda: str(slurm.show(second)))
    slurm.call("scancel", first, second)
    assert slurm.ended(first, HANG_S).state == slurm.ended(second, HANG_S).state == "CANCELLED"


def test_a_users_own_dependency_is_heeded_beside_the_runs(submit: Submitting, slurm: Cluster) -> None:
    earlier, other = submit.standin("a", "waits"), submit.standin("b", "waits")
    later = submit.standin("a", "waits", f"--sbatch=--dependency=afterany:{other}")
    wait_for(lambda: slurm.show(later)["Reason"] == "Dependency", HANG_S, lambda: str(slurm.show(later)))
    assert slurm.show(later)["Dependency"] == f"afterany:{other}(unfulfilled),singleton(unfulfilled)"
    slurm.call("scancel", earlier, other, later)
    assert {slurm.ended(job, HANG_S).state for job in (earlier, other, later)} == {"CANCELLED"}


def test_a_job_goes_on_without_a_node_that_is_not_well(submit: Submitting, slurm: Cluster) -> None:
    two = ("--doctor", "cluster.backend=ray", "cluster.nodes=2", "policy.dp=2")
    variables = {"SICK": "node2", "MEGASHARP_INTERFACE": "lo", "MEGASHARP_JOIN_SECONDS": "400"}
    job = submit("a", "--python", STANDIN, *two, STANDIN="fails", **variables)
    done = slurm.ended(job, HANG_S)
    log = submit.log("a", job)
    assert (done.state, done.exit_code, done.restarts) == ("FAILED", 2, 1), log
    assert "node2  FAIL  engines' Python" in log and "not well: node2, see" in log, log
    assert slurm.show(job)["ExcNodeList"] == "node2" and slurm.show(job)["NodeList"] == "node[1,3]"
    assert "the user's mistake" in submit.node("a", job, 1), log


def test_a_job_gives_up_where_no_other_node_is_left(submit: Submitting, slurm: Cluster) -> None:
    two = ("--doctor", "cluster.backend=ray", "cluster.nodes=2", "policy.dp=2", "--sbatch=--exclude=node3")
    job = submit("a", "--python", STANDIN, *two, STANDIN="fails", SICK="node2", MEGASHARP_INTERFACE="lo")
    done = slurm.ended(job, HANG_S)
    assert (done.state, done.exit_code, done.restarts) == ("FAILED", 1, 0), submit.log("a", job)
    hint = "not well: node2, see"
    assert hint in submit.log("a", job)
    assert "without them the partition has 1 node(s), too few for 2" in submit.log("a", job)
