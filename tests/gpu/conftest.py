"""Makes importable here too: the head's oracle, the learners' small models, the benchmarks' stand-in for an engine."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
PLACES = (TESTS / "unit" / "ops", TESTS / "dist" / "mcore", TESTS / "dist", TESTS / "gpu", TESTS.parent / "tools")
sys.path[:0] = [str(place) for place in PLACES]
