"""Makes the helpers of the shorter tests importable here, and in the processes these tests start."""

from __future__ import annotations

import sys
from pathlib import Path

_TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [
    str(_TESTS / "multirank"),
    str(_TESTS / "multirank" / "learner"),
    str(_TESTS / "e2e"),
    str(Path(__file__).parent),
]
