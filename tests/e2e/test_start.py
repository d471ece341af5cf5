"""A run's start imports what it uses: seconds of CPU that every command and every test pays."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from quickstart import QUICKSTART, REPOSITORY, SMALL

# Of these each takes between a tenth of a second and a whole one, and none is used before a first step ends.
NEVER = (
    "sympy",
    "math_verify",
    "pandas",
    "matplotlib",
    "ray",
    "datasets",
    "wandb",
    "triton",
    "torch._dynamo",
    "torch.distributed.tensor",
    "transformers.modeling_utils",
    "transformers.generation.utils",
)
OPTIONS = ("steps=1", "eval.at_start=false", *SMALL)
PROGRAM = """
import sys
import torch
compile_ = torch.compile
from megasharp.metrics.writers import MetricLog
write = MetricLog.write
def seen(self, step, values):
    if "policy/loss" in values:
        print("imported:", *sorted(set(NEVER) & set(sys.modules)))
        assert torch.compile is compile_
    return write(self, step, values)
MetricLog.write = seen
from megasharp.cli.main import main
main()
import pyarrow
assert list(pyarrow.table({"a": [1]}).to_pandas()["a"]) == [1]
import wandb
from megatron.core.fusions.fused_bias_swiglu import swiglu
value = torch.tensor([[1.0, 2.0]])
assert torch.equal(swiglu(value), torch.nn.functional.silu(value[:, :1]) * value[:, 1:])
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA Megatron's fused functions are compiled")
def test_a_first_step_needs_few_imports(tmp_path: Path) -> None:
    """What is kept out while Megatron is imported (`learner/lean_import.py`) is there again afterwards."""
    program = f"NEVER = {NEVER!r}\n{PROGRAM}"
    command = [sys.executable, "-c", program, "train", QUICKSTART, "--runs", str(tmp_path), *OPTIONS]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("imported:")] == ["imported:"]


@pytest.mark.long("runs")
def test_a_dry_run_needs_fewer_still(tmp_path: Path) -> None:
    options = ["--dry-run", "--runs", str(tmp_path)]
    command = [sys.executable, "-X", "importtime", "-m", "megasharp.cli", "train", QUICKSTART, *options]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "megasharp.trainer.resolve.resolved_run" in imported
    assert imported.isdisjoint({*NEVER, "megatron", "megatron.core", "megasharp.trainer.run"})


# A small GPU machine may lack them: pyarrow alone takes 150 MB.
ABSENT = ("pyarrow", "pandas", "matplotlib", "tensorboard", "datasets", "math_verify", "ray")
WITHOUT = f"""
import sys
sys.modules.update(dict.fromkeys({ABSENT!r}))
from megasharp.cli.main import main
main()
"""


@pytest.mark.long("runs")
def test_a_run_without_tables_and_pictures_needs_none_of_their_libraries(tmp_path: Path) -> None:
    """A run that keeps tables says before its first step what it lacks; with the settings that it names it trains.

    It has a memory network, of which a checkpoint keeps tokens where they are learned again.
    """
    memory = [
        "recipe.methods=[grpo,dlc]",
        f"recipe.dlc.memory.path={REPOSITORY / 'examples/quickstart/base'}",
        "recipe.dlc.memory.replay=1",
    ]
    command = [sys.executable, "-c", WITHOUT, "train", QUICKSTART, "--runs", str(tmp_path), *OPTIONS, *memory]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and not any(tmp_path.iterdir())
    told = re.search(r"pyarrow is not installed: pip install pyarrow, or train without them \((.*)\)", done.stderr)
    assert told is not None, done.stderr
    settings = told[1].split()
    assert settings == ["log.rollouts=null", "recipe.dlc.memory.replay=0"]
    done = subprocess.run([*command, *settings], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "quickstart" / "summary.json").is_file()
    assert list((tmp_path / "quickstart" / "checkpoints").glob("*/memory*"))
    assert "no pictures: matplotlib is not installed" in done.stdout
