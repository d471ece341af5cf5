"""The planner's formulas against the real Megatron model: parameters of large layouts, memory of one layer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megasharp.convert.hf_folder import read_config
from megasharp.plan.formulas import layer_bytes_per_token
from megasharp.plan.request import Network
from megasharp.plan.shares import stages
from tests.dist.mcore.layer_memory import architecture

REPOSITORY = Path(__file__).parents[3]
MODELS = REPOSITORY / "configs" / "model"


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def built(names: list[str], **layout: int) -> list[list[int]]:
    request = {"folders": [str(MODELS / name) for name in names], "dp": 1, "tp": 1, "pp": 1, "cp": 1, "vpp": 1, **layout}
    found: list[list[int]] = json.loads(run("-m", "megasharp.mcore.meta", json.dumps(request)))
    return found


def test_qwen3_32b_at_full_world_size_has_the_measured_parameters() -> None:
    """Measured with Megatron by itself: ranks 0 and 31 of 32."""
    assert built(["qwen3-32b"], tp=8, pp=2, dp=2) == [[2_047_926_272, 2_047_931_392]]


@pytest.mark.parametrize(("tp", "pp", "vpp"), [(1, 1, 1), (4, 4, 1), (4, 4, 2)])
def test_tables_count_what_megatron_builds(tp: int, pp: int, vpp: int) -> None:
    """To the last element on first, middle and last stages, tied and untied; Qwen2.5-7B's heads allow no 8."""
    every = sorted(folder.parent.name for folder in MODELS.glob("*/config.json"))
    assert {"qwen2.5-32b", "qwen3-1.7b"} <= set(every)
    names = [name for name in every if read_config(MODELS / name)[2].num_layers % (pp * vpp) == 0]
    table = []
    for name in names:
        _, family, arch = read_config(MODELS / name)
        table.append([stage.parameters for stage in stages(Network(name, family, arch), tp, pp, vpp)])
    assert built(names, tp=tp, pp=pp, vpp=vpp) == table


def test_a_layer_keeps_what_the_formula_says() -> None:
    """Within a thousandth (exactly, but for rounding), with the norms of a CPU, and one run, so that no block is padded."""
    measured = json.loads(run("-m", "tests.dist.mcore.layer_memory"))
    assert len(measured) == 24
    for case, size in measured.items():
        qk_norm, dtype, recompute, tp = case.split()
        arch = architecture(2, qk_norm == "True")
        width = 2 if dtype == "bfloat16" else 4
        planned = layer_bytes_per_token(arch, int(tp), width, recompute, fused_norms=False, padded=1.0)
        assert size == pytest.approx(planned, rel=1e-3), case
