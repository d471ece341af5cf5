"""GPUs of this node during a run: read in a thread of its own, summed up for each step as `gpu/...`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from statistics import fmean

from megasharp.errors import UserError
from megasharp.jobs.gpus import Gpu, Node, opened

_EVERY_S = 2.0


class Telemetry:
    """Reads until it is closed; `take` gives what was read since the last `take`.

    Only the driver's node is read: on several nodes the figures are a sample, not the sum.
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
                # A GPU that fell off the bus is the run's to notice; figures end here, for sums would jump.
                return
            with self._lock:
                self._readings.append(node.gpus)
            self._end.wait(self._every)

    def take(self, tokens: float) -> dict[str, float]:
        """The step's figures by name; `tokens` are those it sampled. Nothing where nothing was read."""
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
    """Over GPUs and readings: mean utilisation, most memory in use in GB, mean watts of all GPUs, share slowed down."""
    flat = [gpu for reading in readings for gpu in reading]
    return {
        "gpu/utilisation": fmean(gpu.utilisation for gpu in flat),
        "gpu/memory_gb": max(gpu.memory - gpu.free for gpu in flat) / 1e9,
        "gpu/power": fmean(sum(gpu.power for gpu in reading) for reading in readings),
        "gpu/slowed": fmean(bool(gpu.slowed) for gpu in flat),
        "gpu/power_capped": fmean(gpu.power_capped for gpu in flat),
    }


def total_energy(gpus: Sequence[Gpu]) -> float | None:
    """Joules of all GPUs since the driver was loaded; None where one does not tell."""
    found = [gpu.energy for gpu in gpus]
    return sum(energy for energy in found if energy is not None) if None not in found else None


def open_telemetry(stack: ExitStack) -> Telemetry | None:
    """Telemetry that the stack closes; None without GPUs, driver or nvidia-ml-py, and where a GPU cannot be read."""
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
