"""Applies to all tests: no GPU but for tests/gpu, helpers to import, slices, CPU seconds, and signals as they were.

On a machine with a GPU the suite tests what runs on CPUs; only `pytest tests/gpu`, by name, sees the GPU.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Generator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))
sys.path.append(str(Path(__file__).parents[1] / "tools"))

from cpu_seconds import cpu_seconds

# Tests of the hub start one of their own, on loopback.
os.environ["HF_HUB_OFFLINE"] = "1"
# Workers have it from the process that started them, and another command line.
if "PYTEST_XDIST_WORKER" not in os.environ and not any("tests/gpu" in argument for argument in sys.argv):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


_BEGAN = pytest.StashKey[float]()
_CPU_AT_START = pytest.StashKey[float]()
_ALLOWED_SKIPS = ("no CUDA",)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slice", help="of the tests marked long(NAME), run those of this name")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the long tests of other slices than the one that was asked for."""
    asked = config.getoption("--slice")
    if asked is None:
        return
    others = [item for item in items if (mark := item.get_closest_marker("long")) is None or mark.args != (asked,)]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in set(others)]


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Keep what is imported and collected, millions of objects, out of every later collection of garbage."""
    gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, object, object]:
    """Add to the report file what a test cost in seconds of CPU, its fixtures and processes included."""
    if call.when == "teardown":
        # What outlives its parent is no descendant any more, and its seconds are gone: never less than nothing.
        spent = max(0.0, cpu_seconds() - item.stash[_CPU_AT_START])
        item.user_properties.append(("cpu_s", f"{spent:.3f}"))
        # The report's own time has a loop's cases twice.
        item.user_properties.append(("wall_s", f"{time.monotonic() - item.stash[_BEGAN]:.3f}"))
        item.user_properties.extend(("costly", mark.args[0]) for mark in item.iter_markers("costly"))
    report = yield
    assert isinstance(report, pytest.TestReport)
    _refuse_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _refuse_skip(report)
    return report


def _refuse_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Fail in CI what is skipped for another reason than a missing GPU: nobody else runs it."""
    if report.skipped and "CI" in os.environ and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if not reason.startswith(_ALLOWED_SKIPS):
            report.outcome, report.longrepr = "failed", f"{report.nodeid} was skipped: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    item.stash[_BEGAN] = time.monotonic()
    item.stash[_CPU_AT_START] = cpu_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """A command ignores SIGUSR1 when it ends and has a run's umask: what a later test starts would inherit both."""
    before, mask = signal.getsignal(signal.SIGUSR1), os.umask(0o022)
    os.umask(mask)
    try:
        return (yield)
    finally:
        signal.signal(signal.SIGUSR1, before)
        os.umask(mask)
