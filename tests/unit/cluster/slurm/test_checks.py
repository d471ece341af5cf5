"""Each of doctor's checks, on what a sick node would tell."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megasharp.cluster.slurm import doctor
from megasharp.cluster.slurm.doctor import Finding
from megasharp.cluster.slurm.gpus import Gpu, Node

GPU = Gpu(0, "NVIDIA H200", 141 * 10**9, 140 * 10**9, 0.0, 75.0, 1.0, 0, (), False)
NODE = Node("580.95.05", (GPU,) * 8)


def failed(finding: Finding, *words: str) -> bool:
    return finding.level == "FAIL" and all(word in finding.text for word in words)


def test_a_missing_gpu_fails() -> None:
    assert doctor.gpu_count(NODE, 8) == Finding("ok", "gpus", "8 x NVIDIA H200, driver 580.95.05")
    assert failed(doctor.gpu_count(replace(NODE, gpus=(GPU,) * 7), 8), "7 GPU(s)", "wants 8 (cluster.gpus_per_node")


@pytest.mark.parametrize(("version", "level"), [("580.65", "ok"), ("575.57.08", "FAIL"), ("unknown", "FAIL")])
def test_the_driver_is_new_enough(version: str, level: str) -> None:
    assert doctor.driver(replace(NODE, driver=version)).level == level


def test_a_gpu_in_good_order_has_one_line() -> None:
    assert doctor.gpu_state(GPU) == [Finding("ok", "gpu 0", "140 of 141 GB free, 75 W")]


@pytest.mark.parametrize(
    ("sick", "word"),
    [
        (replace(GPU, free=100 * 10**9), "41.0 of 141 GB are taken"),
        (replace(GPU, ecc_errors=2), "2 uncorrected memory errors"),
        (replace(GPU, slowed=("heat",)), "held down: heat"),
    ],
)
def test_a_gpu_that_is_sick_says_of_what(sick: Gpu, word: str) -> None:
    (finding,) = doctor.gpu_state(sick)
    assert failed(finding, word)


def test_a_gpu_that_cannot_be_read_fails_by_its_number() -> None:
    finding = doctor.gpu_unread(1, "GPU is lost")
    assert finding.check == "gpu 1" and failed(finding, "GPU is lost", "take the node out")


def test_versions_are_compared_with_the_tested_ones() -> None:
    tested = doctor.tested_versions(
        "# text\ntorch==2.13.0\nRay==2.60.0  # x\nmegatron-core==0.16.1; python_version < '3.12'\n"
    )
    assert tested == {"torch": "2.13.0", "ray": "2.60.0"}
    found = doctor.versions({"torch": "2.13.0+cpu", "ray": "2.50.1", "numpy": None, "other": "1"}, tested)
    assert [finding.level for finding in found] == ["ok", "note", "FAIL", "ok"]
    assert "tested is 2.60.0" in found[1].text


def test_pypis_apex_is_the_wrong_one() -> None:
    assert failed(doctor.apex("Pyramid toolkit", ["lib", "forms"], ""), "pip uninstall apex")
    assert doctor.apex("", ["optimizers", "normalization"], "").level == "ok"
    assert doctor.apex(None, [], "").level == "ok"


def test_fused_optimizers_that_cannot_be_imported_are_no_fused_ones() -> None:
    failure = "ImportError: undefined symbol: c10"
    assert failed(doctor.apex("", ["optimizers"], failure), failure, "build it for this torch, or pip uninstall apex")
    assert failed(doctor.transformer_engine(failure), failure, "pip uninstall transformer-engine")


def test_which_adam_is_fused_and_why() -> None:
    assert "Transformer Engine's" in doctor.fused_paths(True, True, True, False)[0].text
    assert "apex's fused" in doctor.fused_paths(False, True, True, False)[0].text
    on_cpu, on_gpu = (doctor.fused_paths(False, False, gpu, False) for gpu in (False, True))
    assert "torch's grouped operations, because neither" in on_cpu[0].text
    assert "torch's fused kernel, because neither" in on_gpu[0].text


def test_which_kernels_attention_would_have() -> None:
    on_cpu, on_gpu = (doctor.attention_kernels("auto", on_gpu=gpu).text for gpu in (False, True))
    assert on_cpu.startswith("attention: torch's scaled-dot-product attention")
    assert on_gpu.startswith("attention: FlashAttention-2, torch's own (fa2)")
    wanted = doctor.attention_kernels("fa4", on_gpu=True)
    assert failed(wanted, "policy.attention=fa4", "pip install --pre flash-attn-4")


def test_whose_norms_a_models_layers_have() -> None:
    assert "norms: torch's" in doctor.fused_paths(True, False, True, False)[1].text
    assert "norms: Transformer Engine's" in doctor.fused_paths(True, False, True, True)[1].text


def test_a_torch_that_does_not_see_the_gpus() -> None:
    assert failed(doctor.torchs_gpus("2.13.0+cpu", 0, 8, 8), "2.13.0+cpu finds 0 GPU(s) of the 8", "built for CUDA")
    assert failed(doctor.torchs_gpus("2.13.0", 2, 8, 8), "CUDA_VISIBLE_DEVICES")
    assert doctor.torchs_gpus("2.13.0+cpu", 0, 1, 0).level == "note"
    assert doctor.torchs_gpus("2.13.0", 1, 8, 1).level == "ok"
    assert doctor.torchs_gpus("2.13.0+cpu", 0, 0, 0) is None


def test_two_checkpoints_must_fit() -> None:
    assert doctor.disk_space("/runs", 918, 459, 900, 0).level == "ok"
    assert failed(doctor.disk_space("/runs", 917, 459, 900, 0), "/runs")
    assert failed(doctor.disk_space("/runs", 2_000_000, 1_500_000, 0, 0), "2.0 MB free, two checkpoints take 3.0 MB")


def test_a_run_that_would_fill_the_disk_in_its_course_is_told(tmp_path: Path) -> None:
    """What a resumed run has written counts; what it moved out of its way does not."""
    assert doctor.planned_bytes(tmp_path / "run") == 0
    for name in ("checkpoints/step_000002/policy/a", "rollouts/step_000001.parquet", "metrics.jsonl", "superseded/b"):
        path = tmp_path / "run" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 1_000_000)
    there = doctor.planned_bytes(tmp_path / "run")
    assert there == 3_000_000
    full = doctor.disk_space("/runs", 6_000_000, 1_000_000, 10_000_000, there)
    assert (
        full.level == "note" and "whole run about 10.0 MB, 3.0 MB of them written: it would fill the disk" in full.text
    )
    assert doctor.disk_space("/runs", 7_000_000, 1_000_000, 10_000_000, there).level == "ok"
    # Both of a resumed run's checkpoints are there already.
    assert doctor.disk_space("/runs", 1_000_000, 1_000_000, 3_000_000, there).level == "ok"


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    """8 ranks, 1 GB in 10 ms: 100 GB/s of algorithm bandwidth, 175 GB/s on the bus."""
    assert doctor.bus_bandwidth(10**9, 0.01, 8) == pytest.approx(175e9)
    assert doctor.all_reduce(8, 400e9, 480e9, "on this node").level == "ok"
    assert failed(doctor.all_reduce(8, 200e9, 480e9, "on this node"), "200.00 GB/s, expected about 480")
    assert doctor.all_reduce(2, 1e6, None, "here").level == "ok"


def test_folders_that_a_container_lacks_are_named() -> None:
    assert failed(doctor.mounts(["/data/train.jsonl"]), "/data/train.jsonl", "--mount")
    assert doctor.mounts([]).level == "ok"
