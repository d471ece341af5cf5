"""Makes importable here too: the head's oracle, the learners' small models, the benchmarks' stand-in for an engine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parents[1]
PLACES = (
    TESTS / "unit" / "ops",
    TESTS / "multirank" / "learner",
    TESTS / "multirank",
    TESTS / "gpu",
    TESTS.parent / "tools",
)
sys.path[:0] = [str(place) for place in PLACES]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Before what a test needs of a GPU: two of them, Transformer Engine, FP8."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA")
