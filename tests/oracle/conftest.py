"""The oracles' cases: three random steps at three temperatures, one after the other under `each_step`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# Test modules import their harness by name, as pytest's importlib mode leaves folders off the path.
sys.path.insert(0, str(Path(__file__).parent))

from harness import Case, random_case


@pytest.fixture
def case(seed: int) -> Case:
    return random_case(seed)
