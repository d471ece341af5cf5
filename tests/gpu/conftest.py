"""Makes the oracle of the head's tests importable here too, and the benchmarks' stand-in for an engine."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "ops"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
