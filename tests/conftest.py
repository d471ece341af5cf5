"""On a machine with a GPU the suite tests what runs on CPUs; only `pytest tests/gpu`, by name, sees the GPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "support"))

# Workers have it from the process that started them, and another command line.
if "PYTEST_XDIST_WORKER" not in os.environ and not any("tests/gpu" in argument for argument in sys.argv):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
