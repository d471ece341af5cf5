"""Each of doctor's checks, on what a sick node would tell."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megasharp.cluster.slurm.doctor import engines, filesystem, gpu_state, host_memory, meeting, network, software
from megasharp.cluster.slurm.doctor.engines import Card
from megasharp.cluster.slurm.doctor.findings import Engines, Finding, Memory
from megasharp.cluster.slurm.gpus import Gpu, Node
from megasharp.rollout.sglang.client.launch import FleetSettings

GPU = Gpu(0, "NVIDIA H200", 141 * 10**9, 140 * 10**9, 0.0, 75.0, 1.0, 0, (), False)
NODE = Node("580.95.05", (GPU,) * 8)


GB = 10**9


def failed(finding: Finding, *words: str) -> bool:
    return finding.level == "FAIL" and all(word in finding.text for word in words)


def warned(finding: Finding, *words: str) -> bool:
    return finding.level == "warn" and all(word in finding.text for word in words)


def test_a_missing_gpu_fails() -> None:
    assert gpu_state.gpu_count(NODE, 8) == Finding("ok", "gpus", "8 x NVIDIA H200, driver 580.95.05")
    assert failed(gpu_state.gpu_count(replace(NODE, gpus=(GPU,) * 7), 8), "7 GPU(s)", "wants 8 (cluster.gpus_per_node")


@pytest.mark.parametrize(
    ("version", "libcuda", "cuda", "level"),
    [
        ("580.65", None, "13.0", "ok"),
        ("575.57.08", None, "13.0", "FAIL"),
        ("575.57.08", None, "12.9", "ok"),
        # Of NVIDIA's compatibility package, which is newer than the driver.
        ("575.57.08", 13000, "13.0", "ok"),
        ("unknown", None, "13.0", "FAIL"),
        ("580.65", None, None, "note"),
    ],
)
def test_the_driver_runs_what_torch_needs(version: str, libcuda: int | None, cuda: str | None, level: str) -> None:
    found = gpu_state.driver(replace(NODE, driver=version, cuda=libcuda), cuda, "the engines' torch")
    assert found.level == level
    assert level != "FAIL" or "CUDA 13.0 of the engines' torch needs branch 580 or later; update" in found.text


def test_a_gpu_in_good_order_has_one_line() -> None:
    assert gpu_state.gpu_state(GPU) == [Finding("ok", "gpu 0", "140 of 141 GB free, 75 W")]


@pytest.mark.parametrize(
    ("sick", "word"),
    [
        (replace(GPU, free=100 * 10**9), "41.0 of 141 GB are taken"),
        (replace(GPU, ecc_errors=2), "2 uncorrected memory errors"),
        (replace(GPU, slowed=("heat",)), "held down: heat"),
    ],
)
def test_a_gpu_that_is_sick_says_of_what(sick: Gpu, word: str) -> None:
    (finding,) = gpu_state.gpu_state(sick)
    assert failed(finding, word)


def test_a_gpu_that_cannot_be_read_fails_by_its_number() -> None:
    finding = gpu_state.gpu_unread(1, "GPU is lost")
    assert finding.check == "gpu 1" and failed(finding, "GPU is lost", "take the node out")


def test_versions_are_compared_with_the_tested_ones() -> None:
    tested = software.tested_versions(
        "# text\ntorch==2.13.0\nRay==2.60.0  # x\nmegatron-core==0.16.1; python_version < '3.12'\n"
    )
    assert tested == {"torch": "2.13.0", "ray": "2.60.0"}
    found = software.versions({"torch": "2.13.0+cpu", "ray": "2.50.1", "numpy": None, "other": "1"}, tested)
    assert [finding.level for finding in found] == ["ok", "note", "FAIL", "ok"]
    assert "tested is 2.60.0" in found[1].text


def test_pypis_apex_is_the_wrong_one() -> None:
    assert failed(software.apex("Pyramid toolkit", ["lib", "forms"], ""), "pip uninstall apex")
    assert software.apex("", ["optimizers", "normalization"], "").level == "ok"
    assert software.apex(None, [], "").level == "ok"


def test_fused_optimizers_that_cannot_be_imported_are_no_fused_ones() -> None:
    failure = "ImportError: undefined symbol: c10"
    assert failed(software.apex("", ["optimizers"], failure), failure, "build it for this torch, or pip uninstall apex")
    assert failed(software.transformer_engine(failure), failure, "pip uninstall transformer-engine")


def test_fused_optimizers_are_imported_after_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in of Transformer Engine 2.20, whose library cannot be loaded before torch has loaded NCCL."""
    (tmp_path / "torch.py").touch()
    (tmp_path / "engine.py").write_text("import sys\nsys.modules['torch']\nFusedAdam = FusedSGD = None\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert software._import_failure("engine") == ""
    assert "No module named 'apex'" in software._import_failure("apex")


def test_which_adam_is_fused_and_why() -> None:
    assert "Transformer Engine's" in software.fused_paths(True, True, True, False)[0].text
    assert "apex's fused" in software.fused_paths(False, True, True, False)[0].text
    on_cpu, on_gpu = (software.fused_paths(False, False, gpu, False) for gpu in (False, True))
    assert "torch's grouped operations, because neither" in on_cpu[0].text
    assert "torch's fused kernel, because neither" in on_gpu[0].text


def test_which_kernels_attention_would_have() -> None:
    on_cpu, on_gpu = (software.attention_kernels("auto", on_gpu=gpu).text for gpu in (False, True))
    assert on_cpu.startswith("attention: torch's scaled-dot-product attention")
    assert on_gpu.startswith("attention: FlashAttention-2, torch's own (fa2)")
    wanted = software.attention_kernels("fa4", on_gpu=True)
    assert failed(wanted, "policy.attention=fa4", "pip install --pre flash-attn-4")


def test_whose_norms_a_models_layers_have() -> None:
    local, engines = (software.fused_paths(True, False, True, layers) for layers in (False, True))
    assert "norms: torch's" in local[1].text and "Transformer Engine" not in local[2].text
    assert "norms: Transformer Engine's" in engines[1].text and "Transformer Engine's matrix" in engines[2].text


def test_a_torch_that_does_not_see_the_gpus() -> None:
    assert failed(gpu_state.torchs_gpus("2.13.0+cpu", 0, 8, 8), "2.13.0+cpu finds 0 GPU(s) of the 8", "built for CUDA")
    assert failed(gpu_state.torchs_gpus("2.13.0", 2, 8, 8), "CUDA_VISIBLE_DEVICES")
    assert gpu_state.torchs_gpus("2.13.0+cpu", 0, 1, 0).level == "note"
    assert gpu_state.torchs_gpus("2.13.0", 1, 8, 1).level == "ok"
    assert gpu_state.torchs_gpus("2.13.0+cpu", 0, 0, 0) is None


def test_two_checkpoints_must_fit() -> None:
    assert filesystem.disk_space("/runs", 918, 459, 900, 0).level == "ok"
    assert failed(filesystem.disk_space("/runs", 917, 459, 900, 0), "/runs")
    small = filesystem.disk_space("/runs", 2_000_000, 1_500_000, 0, 0)
    assert failed(small, "2.0 MB free, two checkpoints take 3.0 MB")


def test_a_run_that_would_fill_the_disk_in_its_course_is_told(tmp_path: Path) -> None:
    """What a resumed run has written counts; what it moved out of its way does not."""
    assert filesystem.planned_bytes(tmp_path / "run") == 0
    for name in ("checkpoints/step_000002/policy/a", "rollouts/step_000001.parquet", "metrics.jsonl", "superseded/b"):
        path = tmp_path / "run" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 1_000_000)
    there = filesystem.planned_bytes(tmp_path / "run")
    assert there == 3_000_000
    full = filesystem.disk_space("/runs", 6_000_000, 1_000_000, 10_000_000, there)
    assert (
        full.level == "warn" and "whole run about 10.0 MB, 3.0 MB of them written: it would fill the disk" in full.text
    )
    assert filesystem.disk_space("/runs", 7_000_000, 1_000_000, 10_000_000, there).level == "ok"
    # Both of a resumed run's checkpoints are there already.
    assert filesystem.disk_space("/runs", 1_000_000, 1_000_000, 3_000_000, there).level == "ok"


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    """8 ranks, 1 GB in 10 ms: 100 GB/s of algorithm bandwidth, 175 GB/s on the bus."""
    assert network.bus_bandwidth(10**9, 0.01, 8) == pytest.approx(175e9)
    assert network.all_reduce(8, 400e9, 480e9, "on this node").level == "ok"
    slow = network.all_reduce(8, 200e9, 480e9, "on this node")
    assert warned(slow, "200.00 GB/s, expected about 480: a run works, and steps take longer", "NCCL_DEBUG=INFO")
    assert network.all_reduce(2, 1e6, None, "here").level == "ok"


def test_folders_that_a_container_lacks_are_named() -> None:
    assert failed(filesystem.mounts(["/data/train.jsonl"]), "/data/train.jsonl", "--mount")
    assert filesystem.mounts([]).level == "ok"


def test_an_engines_python_that_lacks_something_says_how_it_is_built() -> None:
    settings = FleetSettings(Path("/opt/engines/bin/python"), Path("/m"), Path("/l"), device="cuda")
    asked = Engines(settings, "run.yaml", at_hand=False, one_group=True)
    broken = engines.not_usable(asked, "ImportError: libcudart.so.13")
    assert failed(broken, "/opt/engines/bin/python: ImportError", "built")
    there = Card("0.5.21", "2.11.0+cu130", "13.0", 7)
    assert failed(engines.usable(asked, there, 8), "finds 7 of 8 GPU(s)", "CUDA_VISIBLE_DEVICES")
    assert engines.usable(asked, replace(there, gpus=8), 8).level == "ok"
    without = replace(there, gpus=8, lacks=["ninja", "nvcc"])
    assert warned(engines.usable(asked, without, 8), "lacks ninja (install it", "nvcc (load CUDA's module")


def test_the_memory_of_a_job_holds_what_the_plan_offloads() -> None:
    """164 GB on a node of 2 TB, of which Slurm gives what the partition says unless all is asked for."""
    asked = Memory(host=164 * GB, processes=16)
    assert host_memory.host_memory(None, 2000 * GB, asked).level == "ok"
    assert failed(host_memory.host_memory(64 * GB, 2000 * GB, asked), "may take 64 of the node's 2000 GB", "--mem=0")
    assert warned(host_memory.host_memory(200 * GB, 2000 * GB, asked), "16 processes take some 4 GB each", "--mem=0")
    assert failed(host_memory.host_memory(None, 100 * GB, asked), "use more nodes")


def test_infiniband_needs_locked_memory() -> None:
    assert failed(host_memory.locked_memory(8 << 20, 8, 2), "8.4 MB", "ibv_reg_mr", "LimitMEMLOCK=infinity")
    assert warned(host_memory.locked_memory(64 << 30, 8, 2), "ulimit -l unlimited")
    assert "enough without" in host_memory.locked_memory(8 << 20, 8, 1).text
    assert host_memory.locked_memory(8 << 20, 0, 2).level == host_memory.locked_memory(None, 8, 2).level == "ok"


def test_shared_memory_has_room_for_weights_and_nccl() -> None:
    docker = 64 << 20
    assert failed(host_memory.shared_memory(docker, docker, 600 * 10**6, 8), "67.1 MB free", "--shm-size")
    assert warned(host_memory.shared_memory(10**9, 10**9, 600 * 10**6, 8), "NCCL may find no room", "--shm-size")
    assert failed(host_memory.shared_memory(64 * GB, 10**6, 600 * 10**6, 0), "remove what ended processes left")
    assert host_memory.shared_memory(64 * GB, 60 * GB, 600 * 10**6, 8, 40 * GB).level == "ok"
    assert warned(host_memory.shared_memory(64 * GB, 30 * GB, 600 * 10**6, 8, 40 * GB), "wants 20.0 GB", "goes to disk")


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        ({"lock": "Function not implemented"}, ["two processes could run one run", "Lustre: -o flock", "--runs"]),
        ({"rename": "Invalid argument"}, ["set --runs to another file system"]),
        ({"fsync": "Invalid argument"}, ["could be lost", "--runs"]),
    ],
)
def test_a_file_system_without_what_runs_need(problem: dict[str, str], words: list[str]) -> None:
    assert failed(filesystem.file_system(Path("/runs"), problem), "/runs: ", *words)
    assert filesystem.file_system(Path("/runs"), {}).level == "ok"


def test_files_between_nodes_that_are_not_the_same() -> None:
    assert warned(meeting.locks_between({"b": "held", "c": "free"}), "c could take a lock", "-o flock")
    assert failed(meeting.locks_between({"b": "OSError: No locks available"}), "b: OSError", "NFS: a lock server")
    assert failed(meeting.replaced("a", None), "a file that a replaced is the old one here", "actimeo")
    assert warned(meeting.replaced("a", 31.0), "after 31 s", "less caching")
    absent = meeting.not_met(["c"])
    assert failed(absent, "c did not come within", "--sbatch=--exclude") and absent.at_fault == ("c",)


def test_nodes_that_are_not_alike_are_named() -> None:
    driver = {"the driver": "580.1"}
    (found,) = meeting.differing({"a": {**driver, "NCCL_ALGO": "Ring"}, "b": driver, "c": driver})
    assert warned(found, "NCCL_ALGO differs: Ring on a; not set on b, c", "make it alike")


def test_variables_of_nccl_that_cost_speed_or_a_start() -> None:
    found = {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
    slow = [*network.nccl_values(found, nodes=2, hcas=8)]
    assert [warned(each, "unset it") for each in slow] == [True, True] and "TCP beside" in slow[1].text
    assert len([*network.nccl_values(found, nodes=1, hcas=8)]) == 1
    names = ["ib0", "eth0", "lo"]
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        wrong = network.nccl_interfaces({name: "bond0"}, names, 2)
        assert wrong and failed(wrong, f"{name}=bond0: this node has no such interface", "one of ib0, eth0")
    loopback = network.nccl_interfaces({"NCCL_SOCKET_IFNAME": "=lo"}, names, 2)
    assert loopback and failed(loopback, "leads to no other node")
    for right in ("ib", "=eth0", "^lo", "mlx,ib"):
        assert network.nccl_interfaces({"NCCL_SOCKET_IFNAME": right}, names, 2) is None


def test_ranks_and_engines_of_one_group_are_told_the_same() -> None:
    ranks, sglangs = {"NCCL_NVLS_ENABLE": "0"}, {"NCCL_NVLS_ENABLE": "1"}
    apart = network.nccl_sides(ranks, sglangs, one_group=True)
    assert failed(apart, "NCCL_NVLS_ENABLE is 0 and 1", "export them alike")
    assert network.nccl_sides(ranks, sglangs, one_group=False).level == "ok"
    assert network.nccl_sides(ranks, ranks, one_group=True).level == "ok"
    assert failed(network.nccl_versions("2.28.3", "2.27.7", one_group=True), "install nvidia-nccl of one version")
    assert network.nccl_versions("2.28.3", "2.27.7", one_group=False).level == "ok"


def test_a_clock_that_is_wrong_is_named() -> None:
    assert network.clocks({"a": 1e9, "b": 1e9 + 0.01}).level == "ok"
    assert warned(network.clocks({"a": 1e9, "b": 1e9 + 31, "c": 1e9 + 0.1}), "b is +30.9 s", "chronyc")
