"""Makes importable here too: the head's oracle, the learners' small models, the benchmarks' stand-in for an engine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parents[1]
PLACES = (
    TESTS / "unit" / "ops",
    TESTS / "unit" / "learner",
    TESTS / "multirank" / "learner",
    TESTS / "multirank",
    TESTS / "gpu",
    TESTS.parent / "tools",
)
sys.path[:0] = [str(place) for place in PLACES]

import rehearsal  # noqa: E402

if rehearsal.asked():
    # Before the tests' modules ask for CUDA.
    rehearsal.begin()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out of a rehearsal what only a GPU can show."""
    if rehearsal.asked():
        left = [item for item in items if any(name in item.nodeid for name in rehearsal.ONLY_ON_A_GPU)]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Before what a test needs of a GPU: two of them, Transformer Engine, FP8."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA")
