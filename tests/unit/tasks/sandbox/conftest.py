"""Makes the verifiers of these tests importable, here and in worker processes, which look where this process does."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
