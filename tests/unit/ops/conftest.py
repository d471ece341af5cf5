"""Makes `head_cases` importable here and in the process that runs kernels under Triton's interpreter."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
