"""Telemetry on readings that are made up: sums, units, the thread's end, and nothing without a GPU."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import replace

import pytest
from standin_nvml import StandinNvml
from waiting import HANG_S

from megasharp.cluster.slurm import gpus
from megasharp.cluster.slurm.gpus import Gpu, Node, Telemetry, open_telemetry, summed_up, total_energy
from megasharp.common.errors import UserError

GPU = Gpu(0, "NVIDIA H200", 141 * 10**9, 100 * 10**9, 0.5, 400.0, 1000.0, 0, (), False)


def test_figures_are_over_gpus_and_readings() -> None:
    hot = replace(GPU, utilisation=1.0, free=10**9, power=600.0, slowed=("heat",), power_capped=True)
    assert summed_up([(GPU, GPU), (GPU, hot)]) == {
        "gpu/utilisation": 0.625,
        "gpu/memory_gb": 140.0,
        "gpu/power": 900.0,
        "gpu/slowed": 0.25,
        "gpu/power_capped": 0.25,
    }


def test_energy_is_known_only_where_all_tell() -> None:
    assert total_energy((GPU, GPU)) == 2000.0
    assert total_energy((GPU, replace(GPU, energy=None))) is None


def until(ready: threading.Event) -> None:
    assert ready.wait(HANG_S)


def test_energy_of_a_step_is_the_counters_difference_and_goes_by_its_tokens() -> None:
    energy, read = [1000.0], threading.Event()

    def reading() -> Node:
        read.set()
        return Node("580", (replace(GPU, energy=energy[0]),))

    found = Telemetry(reading, every_s=0.001)
    try:
        until(read)
        assert "gpu/energy" not in next_figures(found, 0.0), "there is no difference yet"
        energy[0] = 1500.0
        # The first of two readings that begin from now on is there when the second begins.
        for _ in range(2):
            read.clear()
            until(read)
        figures = next_figures(found, 2000.0)
        assert (figures["gpu/energy"], figures["gpu/energy_per_1000_tokens"]) == (500.0, 250.0)
    finally:
        found.close()
    assert not any(thread.name == "gpu telemetry" for thread in threading.enumerate())


def next_figures(found: Telemetry, tokens: float) -> dict[str, float]:
    deadline = time.monotonic() + HANG_S
    while not (figures := found.take(tokens)):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return figures


def test_a_gpu_that_cannot_be_read_any_more_ends_the_figures_not_the_run() -> None:
    def broken() -> Node:
        raise RuntimeError("GPU is lost")

    found = Telemetry(broken, every_s=0.001)
    time.sleep(0.02)
    assert found.take(1.0) == {}
    found.close()


@pytest.mark.parametrize("lost_at", ["handle", "memory"])
def test_a_gpu_that_is_lost_before_the_start_ends_no_run(monkeypatch: pytest.MonkeyPatch, lost_at: str) -> None:
    library = StandinNvml()
    library.lost_at = lost_at
    monkeypatch.setitem(sys.modules, "pynvml", library)
    with ExitStack() as stack:
        assert open_telemetry(stack) is None


def test_figures_end_with_the_first_gpu_that_is_lost() -> None:
    nodes = iter([Node("580", (GPU, GPU))])
    found = Telemetry(lambda: next(nodes, Node("580", (GPU,), ((1, "GPU is lost"),))), every_s=0.001)
    assert next_figures(found, 1.0)["gpu/power"] == 800.0
    time.sleep(0.02)
    assert found.take(1.0) == {}
    found.close()


def test_without_a_gpu_there_is_no_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing() -> object:
        raise UserError("no driver")

    monkeypatch.setattr(gpus, "opened", nothing)
    with ExitStack() as stack:
        assert open_telemetry(stack) is None
