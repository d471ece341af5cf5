"""NVIDIA GPUs of this node, as NVML reports them: once, for the doctor, and during a run.

In a run they are read in a thread of its own and summed up for each step as the metrics `gpu/...`. Only this module
imports `pynvml` (package nvidia-ml-py).
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from megasharp.common.errors import UserError, one_line

# Bits of nvmlDeviceGetCurrentClocksThrottleReasons that cost speed for a reason worth knowing (nvml.h).
_SLOW = {0x08: "hardware slowdown", 0x20: "heat", 0x40: "heat (hardware)", 0x80: "power brake"}
_POWER_CAP = 0x04
# NVML's errors for values that this GPU does not have or this user may not read; any other means that the GPU is sick.
_UNTOLD = ("NVMLError_NotSupported", "NVMLError_NoPermission")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU now. Memory in bytes, power in watts, utilisation in 0..1, energy in joules since the driver was loaded.

    `ecc_errors`: uncorrected ones since the last reset of the GPU, None where ECC is not supported. `slowed`: why its
    clocks are held down; a power cap, which full load reaches, has a field of its own.
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
    """All GPUs of this node, and the driver; of `unread` ones only the number and NVML's reason.

    `cuda`: the version that libcuda here runs, as 13000 for 13.0, which a compatibility package raises; None: unknown.
    """

    driver: str
    gpus: tuple[Gpu, ...]
    unread: tuple[tuple[int, str], ...] = ()
    cuda: int | None = None


class Nvml:
    """NVML, opened. `library` is the module `pynvml`, or a test's stand-in."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def read(self) -> Node:
        """Read all GPUs now; some milliseconds each. Raises UserError where NVML does not answer at all."""
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
        cuda = None
        with suppress(nvml.NVMLError):
            cuda = int(nvml.nvmlSystemGetCudaDriverVersion_v2())
        return Node(driver, tuple(gpus), tuple(unread), cuda)

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
        """A value that not every GPU, or not every user, can read; None then."""
        try:
            return getattr(self._library, function)(*arguments)
        except self._library.NVMLError as error:
            if type(error).__name__ not in _UNTOLD:
                raise
            return None


@contextmanager
def opened(library: Any = None) -> Iterator[Nvml]:
    """Open NVML while the block runs. Raises UserError, in one line, where there is no driver or no nvidia-ml-py."""
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


_EVERY_S = 2.0


class Telemetry:
    """Reads GPUs until it is closed; `take` sums up the readings since the last `take`.

    Only the driver's node is read: on several nodes the metrics are a sample, not the sum.
    """

    def __init__(self, read: Callable[[], Node], every_s: float = _EVERY_S) -> None:
        self._read = read
        self._every = every_s
        self._lock = threading.Lock()
        self._readings: list[tuple[Gpu, ...]] = []
        self._energy: float | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu telemetry", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.is_set():
            try:
                node = self._read()
            except Exception:
                return
            if node.unread:
                # The run notices a GPU that fell off the bus; metrics end here, for sums would jump.
                return
            with self._lock:
                self._readings.append(node.gpus)
            self._end.wait(self._every)

    def take(self, tokens: float) -> dict[str, float]:
        """Return the step's metrics by name; `tokens` are those it sampled. Nothing where nothing was read."""
        with self._lock:
            readings, self._readings = self._readings, []
        if not readings:
            return {}
        figures = summed_up(readings)
        energy = total_energy(readings[-1])
        if energy is not None and self._energy is not None:
            figures["gpu/energy"] = energy - self._energy
            if tokens:
                figures["gpu/energy_per_1000_tokens"] = (energy - self._energy) * 1000.0 / tokens
        self._energy = energy
        return figures

    def close(self) -> None:
        """End the thread."""
        self._end.set()
        self._thread.join()


def summed_up(readings: Sequence[Sequence[Gpu]]) -> dict[str, float]:
    """Sum up GPUs and readings: mean utilisation, most memory in use in GB, mean watts of all GPUs, share slowed."""
    flat = [gpu for reading in readings for gpu in reading]
    return {
        "gpu/utilisation": fmean(gpu.utilisation for gpu in flat),
        "gpu/memory_gb": max(gpu.memory - gpu.free for gpu in flat) / 1e9,
        "gpu/power": fmean(sum(gpu.power for gpu in reading) for reading in readings),
        "gpu/slowed": fmean(bool(gpu.slowed) for gpu in flat),
        "gpu/power_capped": fmean(gpu.power_capped for gpu in flat),
    }


def total_energy(gpus: Sequence[Gpu]) -> float | None:
    """Return the joules of all GPUs since the driver was loaded; None where one does not report them."""
    found = [gpu.energy for gpu in gpus]
    return sum(energy for energy in found if energy is not None) if None not in found else None


def open_telemetry(stack: ExitStack) -> Telemetry | None:
    """Open telemetry that `stack` closes; None without GPUs, driver or nvidia-ml-py, or with a GPU that is not read."""
    try:
        nvml = stack.enter_context(opened())
        node = nvml.read()
    except UserError:
        return None
    if not node.gpus or node.unread:
        return None
    telemetry = Telemetry(nvml.read)
    stack.callback(telemetry.close)
    return telemetry
