"""`megasharp doctor` on this machine: what it finds, what it says, and who it names."""

from __future__ import annotations

import socket
import sys
from importlib import util
from pathlib import Path
from typing import Literal

import pytest
import torch
from cases import each_case
from standin_nvml import StandinNvml

from megasharp.cli.doctor import examine_all_nodes, examine_node
from megasharp.cluster.slurm import doctor
from megasharp.cluster.slurm.all_reduce import measure
from megasharp.cluster.slurm.doctor import Finding, Patient, Place, examine, report
from megasharp.common.errors import UserError

REPOSITORY = Path(__file__).parents[4]


def test_every_line_names_the_node_and_a_failure_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert not report([Finding("ok", "a", "fine"), Finding("FAIL", "b", "sick")], print)
    host = socket.gethostname()
    assert capsys.readouterr().out == f"{host}  ok    a: fine\n{host}  FAIL  b: sick\n"
    assert report([Finding("note", "a", "well")], print)


def test_this_machine_is_examined_with_an_all_reduce_of_two_ranks(tmp_path: Path) -> None:
    found = {finding.check: finding for finding in examine(Patient(run=tmp_path / "runs" / "a", checkpoint=1))}
    assert found["file system"].level == found["disk"].level == "ok"
    assert found["all-reduce"].level == "ok" and "2 ranks on this node: bus bandwidth" in found["all-reduce"].text


def test_a_folder_that_cannot_be_written_is_found_and_no_rank_starts(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    found = {finding.check: finding for finding in examine(Patient(place=Place(tmp_path / "file" / "meeting")))}
    assert found["file system"].level == "FAIL"
    assert found["all-reduce"].text == "not tried, because of what failed above"


def test_runs_below_a_file_are_found(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    found = {finding.check: finding for finding in examine(Patient(run=tmp_path / "file" / "runs" / "a", checkpoint=1))}
    assert found["file system"].level == "FAIL" and "set --runs" in found["file system"].text
    assert found["all-reduce"].text == "not tried, because of what failed above"


@each_case(
    ("package", "module", "optimizers", "level", "adam"),
    [
        ("apex", "apex.optimizers", "FusedAdam = FusedSGD = None", "ok", "apex's fused one"),
        ("apex", "apex.optimizers", "import amp_C_that_is_not_built", "FAIL", "torch's grouped operations"),
        ("apex", "apex.optimizers", "FusedAdam = None", "FAIL", "torch's grouped operations"),
        ("apex", "apex.optimizers", "import os; os._exit(7)", "FAIL", "torch's grouped operations"),
        (
            *("transformer-engine", "transformer_engine.pytorch.optimizers"),
            *("raise OSError('libcudart.so')", "FAIL", "torch's grouped operations"),
        ),
    ],
)
def test_fused_optimizers_are_imported_as_megatron_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, module: str, optimizers: str, level: str, adam: str
) -> None:
    """Stand-ins for NVIDIA's packages, well and broken."""
    folder = tmp_path / "packages"
    file = folder / module.replace(".", "/") / "__init__.py"
    file.parent.mkdir(parents=True)
    file.write_text(optimizers)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    # Below a file, so that no ranks are started for an all-reduce.
    found = [*examine(Patient(run=file / "a"))]
    assert [finding.level for finding in found if finding.check == package] == [level]
    assert any(finding.check == "fused" and f"Adam: {adam}" in finding.text for finding in found)


def test_missing_gpus_fail_where_the_run_wants_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing() -> object:
        raise UserError("NVML does not start")

    monkeypatch.setattr(doctor, "opened", nothing)
    monkeypatch.chdir(tmp_path)
    found = {finding.check: finding for finding in examine(Patient(gpus_per_node=8))}
    assert found["gpus"] == Finding("FAIL", "gpus", "NVML does not start")
    assert found["all-reduce"].level == "note"


@each_case(
    ("keys", "wanted"),
    [
        ([], 0),
        (["policy.device=cuda"], 1),
        (["policy.device=cuda", "policy.cp=2"], 2),
        (["cluster.gpus_per_node=8"], 8),
        (["policy.device=cpu", "cluster.gpus_per_node=8"], 0),
    ],
)
def test_what_a_run_wants_of_a_node_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: list[str], wanted: int
) -> None:
    """Without `cluster.gpus_per_node` too: `train` refuses such a run where there is no GPU."""
    asked: list[Patient] = []
    monkeypatch.setattr(doctor, "examine", lambda patient: asked.append(patient) or ())
    examine_node(REPOSITORY / "examples" / "quickstart" / "run.yaml", keys, tmp_path, print)
    assert [patient.gpus_per_node for patient in asked] == [wanted]


def test_a_lost_gpu_is_a_finding_and_the_other_checks_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = StandinNvml()
    library.lost_at = "memory"
    monkeypatch.setitem(sys.modules, "pynvml", library)
    (tmp_path / "file").touch()
    found = [*examine(Patient(gpus_per_node=2, run=tmp_path / "file" / "a"))]
    sick = [finding for finding in found if finding.check == "gpu 1"]
    assert [finding.level for finding in sick] == ["FAIL"] and "GPU is lost" in sick[0].text
    assert {"gpus", "versions", "disk", "all-reduce"} <= {finding.check for finding in found}


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a GPU where there is none")
def test_ranks_use_what_the_run_does_not_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rank 0 of 1 failed .*: (Attribute|Runtime|Assertion)Error: .*(?i:cuda)"):
        measure(tmp_path / "meeting", 0, 1, 1, "cuda", {})


@pytest.mark.skipif(util.find_spec("transformer_engine") is not None, reason="has Transformer Engine")
def test_transformer_engine_is_missed_where_the_run_insists(tmp_path: Path) -> None:
    """`auto` trains without."""

    def missed(wanted: bool | Literal["auto"]) -> bool:
        (tmp_path / "file").touch()
        found = examine(Patient(gpus_per_node=1, transformer_engine=wanted, run=tmp_path / "file" / "a"))
        return any(each.level == "FAIL" and "transformer-engine is not installed" in each.text for each in found)

    assert missed(True)
    assert not missed("auto") and not missed(False)


def test_nodes_are_those_of_a_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    with pytest.raises(UserError, match="doctor --nodes looks at the nodes of a Slurm job"):
        examine_all_nodes(None, [], tmp_path)


def test_runs_below_a_file_are_refused_where_nodes_are_to_meet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho a\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "a")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(UserError, match=r"--runs .*scontrol/runs cannot be made .*; give a folder that all nodes see"):
        examine_all_nodes(None, [], tmp_path / "scontrol" / "runs")
