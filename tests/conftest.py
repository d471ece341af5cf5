"""What holds for all tests: no GPU but for tests/gpu, the helpers' folder, and signals as they were.

On a machine with a GPU the suite tests what runs on CPUs; only `pytest tests/gpu`, by name, sees the GPU.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))

# Workers have it from the process that started them, and another command line.
if "PYTEST_XDIST_WORKER" not in os.environ and not any("tests/gpu" in argument for argument in sys.argv):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """A command ignores SIGUSR1 when it ends, and what a later test starts would inherit that."""
    before = signal.getsignal(signal.SIGUSR1)
    try:
        return (yield)
    finally:
        signal.signal(signal.SIGUSR1, before)
