"""NVIDIA GPUs of this node, as NVML tells; only this module imports `pynvml` (package nvidia-ml-py)."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megasharp.errors import UserError, one_line

# Bits of nvmlDeviceGetCurrentClocksThrottleReasons that cost speed for a reason worth knowing (nvml.h).
_SLOW = {0x08: "hardware slowdown", 0x20: "heat", 0x40: "heat (hardware)", 0x80: "power brake"}
_POWER_CAP = 0x04
# NVML's errors for what a GPU, or this user's rights, do not tell; any other means that the GPU is sick.
_UNTOLD = ("NVMLError_NotSupported", "NVMLError_NoPermission")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU now. Memory in bytes, power in watts, utilisation in 0..1, energy in joules since the driver was loaded.

    `ecc_errors`: uncorrected ones since the last reset of the GPU, None where ECC is not supported. `slowed`: why its
    clocks are held down; a power cap, which full load reaches, is told apart.
    """

    index: int
    name: str
    memory: int
    free: int
    utilisation: float
    power: float
    energy: float | None
    ecc_errors: int | None
    slowed: tuple[str, ...]
    power_capped: bool


@dataclass(frozen=True, slots=True)
class Node:
    """All GPUs of this node, and the driver; of `unread` ones only the number and NVML's reason."""

    driver: str
    gpus: tuple[Gpu, ...]
    unread: tuple[tuple[int, str], ...] = ()


class Nvml:
    """NVML, opened. `library` is the module `pynvml`, or what stands in for it in a test."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def read(self) -> Node:
        """Everything now; some milliseconds a GPU. Raises UserError where NVML tells nothing at all."""
        nvml, gpus, unread = self._library, [], []
        try:
            driver, count = _text(nvml.nvmlSystemGetDriverVersion()), int(nvml.nvmlDeviceGetCount())
        except nvml.NVMLError as error:
            raise UserError(f"NVML does not answer ({one_line(error)}); reboot the node, or take it out") from None
        for index in range(count):
            # One that fell off the bus is still counted, and fails here or at any figure.
            try:
                gpus.append(self._gpu(index))
            except nvml.NVMLError as error:
                unread.append((index, one_line(error)))
        return Node(driver, tuple(gpus), tuple(unread))

    def _gpu(self, index: int) -> Gpu:
        nvml = self._library
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        reasons = int(self._optional("nvmlDeviceGetCurrentClocksThrottleReasons", handle) or 0)
        energy = self._optional("nvmlDeviceGetTotalEnergyConsumption", handle)
        utilisation = self._optional("nvmlDeviceGetUtilizationRates", handle)
        errors = self._optional(
            "nvmlDeviceGetTotalEccErrors", handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        )
        return Gpu(
            index=index,
            name=_text(nvml.nvmlDeviceGetName(handle)),
            memory=int(memory.total),
            free=int(memory.free),
            utilisation=utilisation.gpu / 100.0 if utilisation is not None else 0.0,
            # NVML counts in milliwatts and millijoules.
            power=(self._optional("nvmlDeviceGetPowerUsage", handle) or 0) / 1e3,
            energy=None if energy is None else energy / 1e3,
            ecc_errors=None if errors is None else int(errors),
            slowed=tuple(reason for bit, reason in _SLOW.items() if reasons & bit),
            power_capped=bool(reasons & _POWER_CAP),
        )

    def _optional(self, function: str, *arguments: Any) -> Any:
        """What not every GPU tells, or not everybody, is None."""
        try:
            return getattr(self._library, function)(*arguments)
        except self._library.NVMLError as error:
            if type(error).__name__ not in _UNTOLD:
                raise
            return None


@contextmanager
def opened(library: Any = None) -> Iterator[Nvml]:
    """NVML while the block runs. Raises UserError, in one line, where there is no driver or no nvidia-ml-py."""
    if library is None:
        try:
            library = importlib.import_module("pynvml")
        except ImportError:
            raise UserError("nvidia-ml-py is not installed, so no GPU can be asked: pip install nvidia-ml-py") from None
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        raise UserError(
            f"NVML does not start ({one_line(error)}): no NVIDIA driver is seen here; load it, or start the container "
            "with the GPUs (pyxis: NVIDIA_VISIBLE_DEVICES=all)"
        ) from None
    try:
        yield Nvml(library)
    finally:
        library.nvmlShutdown()


def _text(value: bytes | str) -> str:
    """Older versions of nvidia-ml-py return bytes."""
    return value.decode() if isinstance(value, bytes) else value
