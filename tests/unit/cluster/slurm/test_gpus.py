"""Reading GPUs through a stand-in for NVML: units, what a GPU does not tell, and one that is lost."""

from __future__ import annotations

import pytest
from standin_nvml import StandinNvml

from megasharp.cluster.slurm.gpus import opened
from megasharp.common.errors import UserError


def test_units_are_bytes_watts_joules_and_shares() -> None:
    library = StandinNvml()
    with opened(library) as nvml:
        node = nvml.read()
    first, second = node.gpus
    assert (node.driver, first.name, first.memory, first.free) == ("580.95.05", "NVIDIA H200", 141 * 10**9, 140 * 10**9)
    assert (first.utilisation, first.power, first.energy, first.ecc_errors) == (0.8, 412.5, 7000.0, 3)
    assert (second.energy, second.ecc_errors) == (None, None)
    assert not library.open


@pytest.mark.parametrize("lost_at", ["handle", "memory", "power"])
def test_a_gpu_that_is_lost_does_not_hide_the_others(lost_at: str) -> None:
    library = StandinNvml()
    library.lost_at = lost_at
    with opened(library) as nvml:
        node = nvml.read()
    assert [gpu.index for gpu in node.gpus] == [0] and node.unread == ((1, "GPU is lost"),)


def test_nvml_that_tells_nothing_is_one_line() -> None:
    library = StandinNvml()

    def silent() -> int:
        raise library.NVMLError("Unknown Error")

    library.nvmlDeviceGetCount = silent  # type: ignore[method-assign]
    with opened(library) as nvml, pytest.raises(UserError, match=r"NVML does not answer \(Unknown Error\); reboot"):
        nvml.read()


def test_reasons_for_slow_clocks_are_told_and_a_power_cap_apart() -> None:
    with opened(StandinNvml(reasons=0x40 | 0x04 | 0x01)) as nvml:
        gpu = nvml.read().gpus[0]
    assert (gpu.slowed, gpu.power_capped) == (("heat (hardware)",), True)


def test_without_a_driver_one_line_says_so() -> None:
    words = r"NVML does not start \(.*Not Found\): no NVIDIA driver is seen here"
    with pytest.raises(UserError, match=words), opened(StandinNvml(driver=False)):
        pass
