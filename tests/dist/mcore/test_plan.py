"""The planner's formulas against the real Megatron model: parameters of large layouts, memory of one layer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megasharp.convert.hf_folder import read_config
from megasharp.convert.lora import LoraSettings, Target
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


def built(names: list[str], **layout: object) -> list[list[int]]:
    request = {
        "folders": [str(MODELS / name) for name in names],
        "dp": 1,
        "tp": 1,
        "pp": 1,
        "cp": 1,
        "vpp": 1,
        **layout,
    }
    found: list[list[int]] = json.loads(run("-m", "megasharp.mcore.meta", json.dumps(request)))
    return found


def test_tables_count_what_megatron_builds() -> None:
    """To the last element on first, middle and last virtual stages, of every shipped model that can be cut so."""
    every = sorted(folder.parent.name for folder in MODELS.glob("*/config.json"))
    names = [name for name in every if read_config(MODELS / name)[2].num_layers % 8 == 0]
    assert {"qwen2.5-32b", "qwen3-32b", "qwen3-14b"} <= set(names)
    table = []
    for name in names:
        _, family, arch = read_config(MODELS / name)
        table.append([stage.parameters for stage in stages(Network(name, family, arch), 4, 4, 2)])
    assert built(names, tp=4, pp=4, vpp=2) == table


def test_adapters_are_counted_as_megatron_has_them() -> None:
    """On the first model alone; the other one is tied and has its embedding on both stages."""
    targets: tuple[Target, ...] = ("qkv", "proj", "fc1", "fc2")
    table = []
    for name, lora in (("qwen3-8b", LoraSettings(16, 32.0, targets)), ("qwen3-1.7b", None)):
        _, family, arch = read_config(MODELS / name)
        table.append([stage.parameters for stage in stages(Network(name, family, arch), 4, 2, 1, lora)])
    given = {"rank": 16, "alpha": 32.0, "targets": targets}
    assert built(["qwen3-8b", "qwen3-1.7b"], tp=4, pp=2, lora=given) == table


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
