"""The oracles' cases: three random steps at three temperatures."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# Test modules import their harness by name, as pytest's importlib mode leaves folders off the path.
sys.path.insert(0, str(Path(__file__).parent))

from harness import Case, random_case


@pytest.fixture(params=[0, 1, 2])
def case(request: pytest.FixtureRequest) -> Case:
    return random_case(request.param)
