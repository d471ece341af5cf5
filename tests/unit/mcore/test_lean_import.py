"""What a process brings in with Megatron, and what it finds as it was afterwards."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

AFTER = """
import sys
import torch
compile_ = torch.compile
import megasharp.mcore.learner
assert torch.compile is compile_
print(*(name for name in ("torch._inductor.compile_fx", "wandb") if name in sys.modules))
import wandb
from megatron.core.fusions.fused_bias_swiglu import swiglu
value = torch.tensor([[1.0, 2.0]])
assert torch.equal(swiglu(value), torch.nn.functional.silu(value[:, :1]) * value[:, 1:])
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA Megatron's fused functions are compiled")
def test_neither_torchs_compiler_nor_wandb_comes_with_megatron() -> None:
    done = subprocess.run([sys.executable, "-c", AFTER], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
