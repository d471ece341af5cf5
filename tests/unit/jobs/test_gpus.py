"""Reading GPUs through a stand-in for NVML; its figures are made up, its names and units are NVML's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megasharp.errors import UserError
from megasharp.jobs.gpus import opened


class StandinNvml:
    """Two GPUs; the second tells neither energy nor ECC."""

    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0

    class NVMLError(Exception):
        pass

    class NVMLError_NotSupported(NVMLError):  # noqa: N801
        pass

    def __init__(self, reasons: int = 0, driver: bool = True) -> None:
        self.reasons = reasons
        self.driver = driver
        self.open = False

    def nvmlInit(self) -> None:
        if not self.driver:
            raise self.NVMLError("NVML Shared Library Not Found")
        self.open = True

    def nvmlShutdown(self) -> None:
        self.open = False

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"580.95.05"

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA H200"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(total=141 * 10**9, free=140 * 10**9)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=80, memory=40)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return 412_500

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        if handle == 1:
            raise self.NVMLError_NotSupported
        return 7_000_000

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:
        if handle == 1:
            raise self.NVMLError_NotSupported
        assert (kind, counter) == (1, 0)
        return 3

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        return self.reasons


def test_units_are_bytes_watts_joules_and_shares() -> None:
    library = StandinNvml()
    with opened(library) as nvml:
        node = nvml.read()
    first, second = node.gpus
    assert (node.driver, first.name, first.memory, first.free) == ("580.95.05", "NVIDIA H200", 141 * 10**9, 140 * 10**9)
    assert (first.utilisation, first.power, first.energy, first.ecc_errors) == (0.8, 412.5, 7000.0, 3)
    assert (second.energy, second.ecc_errors) == (None, None)
    assert not library.open


def test_reasons_for_slow_clocks_are_told_and_a_power_cap_apart() -> None:
    with opened(StandinNvml(reasons=0x40 | 0x04 | 0x01)) as nvml:
        gpu = nvml.read().gpus[0]
    assert (gpu.slowed, gpu.power_capped) == (("heat (hardware)",), True)


def test_without_a_driver_one_line_says_so() -> None:
    words = r"NVML does not start \(.*Not Found\): no NVIDIA driver is seen here"
    with pytest.raises(UserError, match=words), opened(StandinNvml(driver=False)):
        pass
