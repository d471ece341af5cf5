"""A stand-in for NVML; its figures are made up, its names and units are NVML's."""

from __future__ import annotations

from types import SimpleNamespace


class StandinNvml:
    """Two GPUs; the second tells neither energy nor ECC, and is lost where `lost_at` says so."""

    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0

    class NVMLError(Exception):
        pass

    class NVMLError_NotSupported(NVMLError):  # noqa: N801
        pass

    class NVMLError_NoPermission(NVMLError):  # noqa: N801
        pass

    class NVMLError_GpuIsLost(NVMLError):  # noqa: N801
        pass

    # Raised for the second GPU by the function of this name.
    lost_at: str = ""

    def _answer(self, function: str, handle: int) -> None:
        if handle == 1 and function == self.lost_at:
            raise self.NVMLError_GpuIsLost("GPU is lost")

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
        self._answer("handle", index)
        return index

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"580.95.05"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 13000

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA H200"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        self._answer("memory", handle)
        return SimpleNamespace(total=141 * 10**9, free=140 * 10**9)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=80, memory=40)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        self._answer("power", handle)
        return 412_500

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        if handle == 1:
            raise self.NVMLError_NotSupported
        return 7_000_000

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:
        if handle == 1:
            raise self.NVMLError_NoPermission
        assert (kind, counter) == (1, 0)
        return 3

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        return self.reasons
