"""`policy.device=cpu` on a machine that has a GPU: the run is that of a machine without one."""

from __future__ import annotations

import pytest
from quickstart import Command
from waiting import HANG_S

# CUDA answers by the variable, as it stands when torch first asks.
HAS_A_GPU = """
import functools, os, torch
torch.cuda.is_available = functools.cache(lambda: os.environ.get("CUDA_VISIBLE_DEVICES") != "")
torch.cuda.device_count = lambda: int(torch.cuda.is_available())
from megasharp.cli.main import main
main()
"""


@pytest.mark.long("runs")
def test_a_run_on_the_cpu_leaves_the_gpu_alone(command: Command) -> None:
    arguments = command.train("policy.device=cpu", "name=beside", "steps=1", "eval.probe=0")
    running = command.start(*arguments, environment={"CUDA_VISIBLE_DEVICES": "0"}, program=("-c", HAS_A_GPU))
    _, error = running.communicate(timeout=HANG_S)
    assert running.returncode == 0, error
    assert len(command.rows("beside")) == 1
