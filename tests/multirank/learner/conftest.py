"""Makes `policies` importable in the tests of this folder, and in the ranks they start."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
