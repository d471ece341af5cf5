"""`megasharp doctor` on this machine: what it finds, what it says, and who it names."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import util
from pathlib import Path
from typing import Literal

import pytest
import torch
from cases import each_case
from standin_nvml import StandinNvml

from megasharp.cli.doctor import doctor as doctor_command
from megasharp.cli.doctor import examine_all_nodes, examine_node
from megasharp.cluster.slurm.doctor import engines, filesystem, gpu_state
from megasharp.cluster.slurm.doctor import examine as doctor
from megasharp.cluster.slurm.doctor.all_reduce import measure
from megasharp.cluster.slurm.doctor.engines import read_card
from megasharp.cluster.slurm.doctor.examine import examine, report
from megasharp.cluster.slurm.doctor.findings import Engines, Finding, Patient, Place
from megasharp.cluster.slurm.doctor.meeting import Meeting, meet, try_shared_files
from megasharp.common.errors import UserError
from megasharp.common.files import SHARED_MEMORY, Scratch
from megasharp.planner import suggest
from megasharp.planner.records import Request
from megasharp.rollout.sglang.client.launch import FleetSettings

REPOSITORY = Path(__file__).parents[4]


def test_every_line_names_the_node_and_the_verdict_who_is_at_fault(capsys: pytest.CaptureFixture[str]) -> None:
    """By the verdict a job's file replaces nodes."""
    missing = Finding("FAIL", "nodes", "node3 did not come", at_fault=("node3",))
    assert not report([Finding("ok", "a", "fine"), Finding("FAIL", "b", "sick"), missing], print, "node1")
    assert capsys.readouterr().out.splitlines() == [
        "node1  ok    a: fine",
        "node1  FAIL  b: sick",
        "node1  FAIL  nodes: node3 did not come",
        "node1  FAIL  verdict: 2 check(s) failed; at fault: node1, node3",
    ]
    assert not report([Finding("FAIL", "all-reduce", "hangs", at_fault=())], print, "node1")
    assert capsys.readouterr().out.splitlines()[-1] == "node1  FAIL  verdict: 1 check(s) failed, of no one node"
    assert report([Finding("note", "a", "well"), Finding("warn", "b", "slow")], print, "node1")
    assert capsys.readouterr().out.splitlines()[-1] == "node1  ok    verdict: no check failed, 1 warned"


@pytest.mark.long("slurm")
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


FUSED = ("package", "module", "optimizers", "level", "adam")


@each_case(
    FUSED,
    [
        ("apex", "apex.optimizers", "FusedAdam = FusedSGD = None", "ok", "apex's fused one"),
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
    assert_imported(tmp_path, monkeypatch, package, module, optimizers, level, adam)


@pytest.mark.long("slurm")
@each_case(
    FUSED,
    [
        ("apex", "apex.optimizers", "import amp_C_that_is_not_built", "FAIL", "torch's grouped operations"),
        ("apex", "apex.optimizers", "FusedAdam = None", "FAIL", "torch's grouped operations"),
        ("apex", "apex.optimizers", "import os; os._exit(7)", "FAIL", "torch's grouped operations"),
    ],
)
def test_fused_optimizers_that_are_broken_otherwise_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, module: str, optimizers: str, level: str, adam: str
) -> None:
    assert_imported(tmp_path, monkeypatch, package, module, optimizers, level, adam)


def assert_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, module: str, optimizers: str, level: str, adam: str
) -> None:
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

    monkeypatch.setattr(gpu_state, "opened", nothing)
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


@each_case("keys", [["policy.device=cuda"], ["policy.device=auto"]])
def test_a_run_is_planned_for_the_gpu_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: list[str]
) -> None:
    """A machine without GPUs may look at a run of nodes that have some, as `plan` does."""
    asked: list[Request] = []
    real = suggest.make_plan
    monkeypatch.setattr(suggest, "make_plan", lambda request: asked.append(request) or real(request))
    monkeypatch.setattr(doctor, "examine", lambda patient: ())
    examine_node(REPOSITORY / "examples" / "quickstart" / "run.yaml", keys, tmp_path, print, "h100")
    assert [each.machines.gpu and each.machines.gpu.name for each in asked] == ["h100"]


@each_case(
    ("file", "keys", "gpu", "message"),
    [
        (None, [], "h100", "--gpu h100 is what a run is planned for: give doctor a run file"),
        (None, [], "h300", "--gpu h300: give one of h200, h100, b200"),
        ("run.yaml", ["policy.device=cpu"], "h300", "--gpu h300: give one of h200, h100, b200"),
        ("run.yaml", ["policy.device=cpu"], "h100", "run.yaml: policy.device=cpu, so no GPU is planned for"),
    ],
)
def test_a_gpu_that_nothing_is_planned_for_is_refused(
    tmp_path: Path, file: str | None, keys: list[str], gpu: str, message: str
) -> None:
    run = REPOSITORY / "examples" / "quickstart" / file if file else None
    with pytest.raises(UserError, match=message):
        doctor_command(run, keys, gpu=gpu, runs=tmp_path)


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
    with pytest.raises(
        UserError, match=r"rank 0 of 1 failed .*: (Attribute|Runtime|Assertion)Error: .*(?i:cuda|nvidia)"
    ):
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


def nodes_of(folder: Path) -> list[Meeting]:
    return [Meeting(Place(folder, number, ("node1", "node2"))) for number in range(2)]


def test_nodes_that_meet_compare_themselves_and_try_the_file_system(tmp_path: Path) -> None:
    """Two nodes of one machine, on its own file system; the second takes the lock in a process of its own."""

    def examined(node: Meeting) -> list[Finding]:
        values = {"NCCL_ALGO": "Ring"} if node.node == 1 else {}
        return [*meet(node, True, values), *try_shared_files(node)]

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(examined, nodes_of(tmp_path))
    assert [(each.level, each.check) for each in first] == [("warn", "nodes"), ("ok", "locks")]
    assert [(each.level, each.check) for each in second] == [("ok", "shared files")]


def test_no_node_waits_for_one_that_will_not_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadPoolExecutor(2) as threads:
        first, _ = threads.map(lambda node: [*meet(node, node.node == 0, {})], nodes_of(tmp_path))
    assert first == [Finding("note", "all-reduce", "not tried, because of what failed on node2")]
    monkeypatch.setattr("megasharp.cluster.slurm.doctor.meeting._MEET_S", 0.2)
    (absent,) = meet(nodes_of(tmp_path / "other")[0], True, {})
    assert absent.level == "FAIL" and absent.at_fault == ("node2",)


def test_this_machines_file_systems_have_what_runs_need(tmp_path: Path) -> None:
    """The temporary folder's, and memory's."""
    for parent in (tmp_path, SHARED_MEMORY):
        with Scratch("megasharp-test-", parent) as folder:
            assert filesystem.tried(folder) == {}
            assert filesystem.taken(folder / "free") == "free"


def test_an_engines_python_is_asked_where_no_model_is_at_hand(tmp_path: Path) -> None:
    """This Python, which has no SGLang; and one that is not there."""

    def card(python: Path) -> engines.Card | str:
        settings = FleetSettings(python=python, model=tmp_path, log_folder=tmp_path)
        return read_card(Engines(settings, "run.yaml", at_hand=False, one_group=False))

    assert "no sglang; megasharp needs exactly" in str(card(Path(sys.executable)))
    assert "/no/python does not exist; build the engines' Python" in str(card(tmp_path / "no" / "python"))
