"""One scan of the model files gives the import structure of two, and the function is restored afterwards."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
from pathlib import Path
import transformers
from transformers.utils import import_utils
scan = import_utils.create_import_structure_from_path
models = Path(transformers.__file__).parent / "models"
import megasharp.common.lean_transformers
assert import_utils.create_import_structure_from_path is scan
assert scan.cache_info().misses < 600, "each model's folder once"
folder = import_utils.define_import_structure(str(models / "__init__.py"))
scan.cache_clear()
import_utils.define_import_structure.cache_clear()
assert import_utils.define_import_structure(str(models / "__init__.py")) == folder
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3ForCausalLM, LlamaForCausalLM
print("the same")
"""


@pytest.mark.long("runs")
def test_the_models_are_those_of_two_scans() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.stdout == "the same\n", done.stderr
