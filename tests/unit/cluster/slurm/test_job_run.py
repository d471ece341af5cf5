"""A Slurm job's file as bash runs it. Stand-ins for `srun`, which starts a program once, here, and for `scontrol`
and `sinfo`.

As with pyxis the stand-in looks a program's name up on the host, and starts what it found in the container.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from waiting import HANG_S

from megasharp.cluster.slurm.job import Job, Resources, Software, render

_SRUN = """#!/bin/bash
while [[ $1 == -* ]]; do shift; done
# As srun says it where a slurmd does not answer.
if [[ ${HANGS:-} && " $* " == *"$HANGS"* ]]; then
  echo "srun: error: Task launch for StepId=1.0 failed on node node2: Socket timed out on send/recv operation" >&2
  exit 140
fi
program=$(command -v "$1") || exit 127
PATH=$IN_CONTAINER:$PATH exec "$program" "${@:2}"
"""
_SCONTROL = """#!/bin/bash
[[ $1 == show ]] && exec tr , "\n" <<<"$3"
echo "scontrol $*"
exit "${REFUSES:-0}"
"""
_SINFO = """#!/bin/bash
printf "node%s\\n" 1 2 ${SPARE:-}
"""
# Says where it ran, and leaves the exit code of the run.
_PYTHON = """#!/bin/bash
echo "$0 $3"
while [[ $1 != --folder ]]; do [[ $# -gt 0 ]] || exit 0; shift; done
[[ ${LOST:-} ]] || echo "$ENDS_WITH" >"$2/exit_code"
[[ -z ${RAY_ENDED:-} ]] || echo "$RAY_ENDED" >"$2/ray_ended"
"""


def program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def run(folder: Path, job: Job, code: int, **more: str) -> tuple[int, str]:
    """Exit code of the job whose run ends with `code`, and all that it said."""
    program(folder / "host" / "srun", _SRUN)
    program(folder / "host" / "scontrol", _SCONTROL)
    program(folder / "host" / "sinfo", _SINFO)
    program(folder / "host" / "python3", _PYTHON)
    program(folder / "image" / "python3", _PYTHON)
    variables = {
        "PATH": f"{folder / 'host'}:{os.environ['PATH']}",
        "IN_CONTAINER": str(folder / "image"),
        "ENDS_WITH": str(code),
        **dict.fromkeys(("SLURM_JOB_ID", "SLURM_JOB_NUM_NODES"), "1"),
        "SLURM_JOB_NODELIST": "node1",
        **more,
    }
    done = subprocess.run(
        ["bash", "-c", render(job)], env=variables, capture_output=True, text=True, check=False, timeout=HANG_S
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job("a", ("train",), tmp_path / "a", tmp_path, Resources(1, "60"), Software("python3"), doctor=("a.yaml",))


def test_a_python_without_a_path_is_the_containers(tmp_path: Path, job: Job) -> None:
    code, said = run(tmp_path, replace(job, software=Software("python3", "/image.sqsh")), 0)
    image = tmp_path / "image" / "python3"
    assert code == 0 and f"{image} megasharp.cli" in said and f"{image} megasharp.cluster.slurm.node" in said, said


def test_a_job_that_slurm_does_not_queue_again_says_so_and_fails(tmp_path: Path, job: Job) -> None:
    code, said = run(tmp_path, job, 75)
    assert code == 75 and "scontrol requeue 1" in said and "gave up" not in said, said
    code, said = run(tmp_path, job, 75, REFUSES="1")
    assert code == 1 and "gave up: Slurm did not queue it again; submit again" in said, said


def test_a_run_that_leaves_no_exit_code_is_not_done(tmp_path: Path, job: Job) -> None:
    """srun returns 0 where a node is lost."""
    code, said = run(tmp_path, job, 0, LOST="1")
    assert code == 1 and "left no exit code" in said and "failed with exit code 1" in said and "done" not in said, said


@pytest.mark.parametrize(("code", "again"), [(1, True), (143, True), (2, False), (0, False)])
def test_a_run_under_which_a_nodes_ray_ended_is_queued_again(tmp_path: Path, job: Job, code: int, again: bool) -> None:
    ended, said = run(tmp_path, job, code, RAY_ENDED="node2")
    told = f"Ray ended on node2; stopped at no checkpoint with exit code {code}: to be queued again"
    assert (ended, told in said, "scontrol requeue" in said) == (code, again, again), said


def test_restarts_of_slurms_own_count_too(tmp_path: Path, job: Job) -> None:
    """It queues a job again whose node is lost."""
    code, said = run(tmp_path, replace(job, restarts=2), 0, SLURM_RESTART_COUNT="3")
    assert code == 1 and "gave up: 2 restarts are all that were allowed, at no checkpoint" in said, said
    assert run(tmp_path, replace(job, restarts=2), 0, SLURM_RESTART_COUNT="2")[0] == 0


def test_only_training_turns_the_link_to_its_newest_attempt(tmp_path: Path, job: Job) -> None:
    logs = tmp_path / "a" / "logs"
    assert run(tmp_path, job, 0)[0] == 0
    assert run(tmp_path, replace(job, command=("eval", "a")), 0, SLURM_JOB_ID="2")[0] == 0
    assert (logs / "latest").readlink() == Path("slurm_1/restart_0")
    assert (logs / "latest_eval").readlink() == Path("slurm_2/restart_0")


@pytest.mark.parametrize("step", [" doctor ", "megasharp.cluster.slurm.node"])
def test_a_node_on_which_srun_starts_nothing_is_left_out_of_the_next_attempt(
    step: str, tmp_path: Path, job: Job
) -> None:
    two = {"SLURM_JOB_NODELIST": "node1,node2", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_PARTITION": "p", "HANGS": step}
    code, said = run(tmp_path, job, 0, **two, SPARE="3")
    assert code == 75 and "not well: node2, see" in said and "restart_0/srun.log; to be queued again without" in said
    assert "scontrol requeue 1\nscontrol update JobId=1 ExcNodeList=node2\n" in said
    code, said = run(tmp_path, job, 0, **two)
    assert code == 1 and "without them the partition has 1 node(s), too few for 2" in said and "requeue" not in said
