"""An array's sbatch file: what it asks for, which jobs it names, and what it refuses."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from megasharp.cluster.slurm.job import Job, Resources, Software, render_array, submit_array
from megasharp.common.errors import UserError

RESOURCES = Resources(nodes=2, time="4:00:00", gpus_per_node=8, partition="gpu", extra=("--qos=high",))


def job(folder: Path, name: str, resources: Resources = RESOURCES) -> Job:
    return Job(
        name=name,
        command=("train", f"{name}.yaml", "--resume"),
        run=folder / name,
        folder=folder,
        resources=resources,
        software=Software("/usr/bin/python3"),
    )


def test_the_file_asks_once_for_what_all_runs_ask_and_names_their_numbers(tmp_path: Path) -> None:
    jobs = {0: job(tmp_path, "a"), 3: job(tmp_path, "b")}
    lines = render_array("study", jobs, tmp_path, 1).splitlines()
    asked = {line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")}
    assert {"--array=0,3%1", "--nodes=2", "--time=4:00:00", "--signal=B:USR1@600", "--qos=high", "--requeue"} <= asked
    assert {f"--output={tmp_path}/logs/%A_%a.log", "--job-name=study", f"--chdir={tmp_path}"} <= asked
    # One run would wait for another.
    assert not any("singleton" in line for line in asked)
    assert lines[-1] == f'exec bash {tmp_path}/jobs/"$SLURM_ARRAY_TASK_ID".sbatch'


def test_what_the_user_lets_it_wait_for_is_kept(tmp_path: Path) -> None:
    jobs = {0: job(tmp_path, "a", replace(RESOURCES, extra=("--dependency=afterok:7",)))}
    text = render_array("study", jobs, tmp_path, None)
    assert "#SBATCH --dependency=afterok:7\n" in text and "#SBATCH --array=0\n" in text


def test_runs_that_ask_for_different_things_are_refused(tmp_path: Path) -> None:
    jobs = {0: job(tmp_path, "a"), 1: job(tmp_path, "b", replace(RESOURCES, nodes=4))}
    with pytest.raises(UserError, match=r"runs a and b ask Slurm for different things \(--nodes=2, --nodes=4\)"):
        render_array("study", jobs, tmp_path, None)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-ins for sbatch and squeue, which say what lies in files."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, words in (("sbatch", 'echo 41; cp "$2" $(dirname $0)/given'), ("squeue", "cat $(dirname $0)/queued")):
        path = folder / name
        path.write_text(f"#!/bin/bash\n{words}\n")
        path.chmod(0o755)
    (folder / "queued").write_text("")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def test_each_run_has_its_file_and_the_array_is_submitted(tmp_path: Path, slurm: Path) -> None:
    jobs = {0: job(tmp_path, "a"), 3: job(tmp_path, "b")}
    assert submit_array("study", jobs, tmp_path / "study", None) == "41"
    assert sorted(path.name for path in (tmp_path / "study" / "jobs").iterdir()) == ["0.sbatch", "3.sbatch"]
    assert "b.yaml" in (tmp_path / "study" / "jobs" / "3.sbatch").read_text()
    assert "#SBATCH --array=0,3\n" in (slurm / "given").read_text()


def test_a_second_array_beside_one_that_is_queued_is_refused(tmp_path: Path, slurm: Path) -> None:
    (slurm / "queued").write_text("17\n17\n")
    with pytest.raises(UserError, match=r"study: jobs of it are queued or running \(17\)"):
        submit_array("study", {0: job(tmp_path, "a")}, tmp_path, None)
    assert not (slurm / "given").exists()
