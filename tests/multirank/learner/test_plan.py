"""The planner's formulas against the real Megatron model: parameters of large layouts, memory of one layer."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from cases import each_case
from waiting import HANG_S

from megasharp.common.layout import ParallelLayout
from megasharp.config.policy import LoraConfig
from megasharp.convert.architecture import Architecture
from megasharp.convert.hf_folder import read_config
from megasharp.planner.formulas import layer_bytes_per_token
from megasharp.planner.memory import stages
from megasharp.planner.records import Network
from tests.multirank.learner.layer_memory import MIXTURES, architecture

REPOSITORY = Path(__file__).parents[3]
MODELS = REPOSITORY / "configs" / "model"


def run(*command: str, question: bytes = b"") -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        capture_output=True,
        input=question,
        check=False,
        timeout=HANG_S,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().strip().splitlines()[-1]


def built(
    names: list[str],
    layout: ParallelLayout,
    lora: LoraConfig | None = None,
    *program: str,
) -> list[list[int]]:
    question = pickle.dumps(([read_config(MODELS / name)[2] for name in names], layout, lora))
    found: list[list[int]] = json.loads(run(*(program or ("-m", "megasharp.learner.meta_program")), question=question))
    return found


def counted(name: str, layout: ParallelLayout, lora: LoraConfig | None = None) -> list[int]:
    _, family, arch = read_config(MODELS / name)
    return [stage.parameters for stage in stages(Network(name, family, arch), layout, lora)]


def can_be_cut() -> dict[str, Architecture]:
    """Every shipped model whose layers fit into `CUT`."""
    every = sorted(folder.parent.name for folder in MODELS.glob("*/config.json"))
    archs = {name: read_config(MODELS / name)[2] for name in every}
    return {name: arch for name, arch in archs.items() if arch.num_layers % 8 == 0 and arch.heads % 4 == 0}


CUT = ParallelLayout(tp=4, pp=4, vpp=2)


def test_tables_count_what_megatron_builds() -> None:
    """To the last element on first, middle and last virtual stages, of each family's model of fewest layers."""
    names: dict[str, str] = {}
    for name, arch in sorted(can_be_cut().items(), key=lambda item: item[1].num_layers):
        names.setdefault(arch.family, name)
    assert {"qwen2", "qwen3", "llama", "olmo2", "qwen3_moe", "mixtral"} == names.keys()
    assert built([*names.values()], CUT) == [counted(name, CUT) for name in names.values()]


@pytest.mark.long("ranks")
def test_tables_count_what_megatron_builds_of_every_shipped_model() -> None:
    names = [*can_be_cut()]
    assert {"qwen2.5-32b", "qwen3-32b", "qwen3-14b"} <= set(names)
    assert built(names, CUT) == [counted(name, CUT) for name in names]


# Experts over data-parallel and tensor-parallel ranks in virtual stages; then each in parts, over data-parallel ranks
# alone, and in parts beside context-parallel ones.
SPREAD = [("qwen3-30b-a3b", ParallelLayout(dp=4, tp=4, pp=4, vpp=2, ep=16))]
SPREAD_OTHERWISE = [
    ("mixtral-8x7b-v0.1", ParallelLayout(dp=2, tp=8, pp=2, ep=4, etp=4)),
    ("qwen3-30b-a3b", ParallelLayout(dp=8, ep=8)),
    ("qwen3-235b-a22b", ParallelLayout(dp=4, tp=2, pp=2, cp=2, ep=8, etp=2)),
]


@each_case(("name", "layout"), SPREAD)
def test_tables_count_the_experts_of_a_rank_as_megatron_builds_them(name: str, layout: ParallelLayout) -> None:
    assert built([name], layout) == [counted(name, layout)]


@pytest.mark.long("ranks")
@each_case(("name", "layout"), SPREAD_OTHERWISE)
def test_tables_count_experts_that_are_spread_otherwise(name: str, layout: ParallelLayout) -> None:
    assert built([name], layout) == [counted(name, layout)]


def test_adapters_are_counted_as_megatron_has_them() -> None:
    """On the first model alone; the other one is tied and has its embedding on both stages."""
    lora, layout = LoraConfig(rank=16, alpha=32.0, targets=["qkv", "proj", "fc1", "fc2"]), ParallelLayout(tp=4, pp=2)
    table = [counted("qwen3-8b", layout, lora), counted("qwen3-1.7b", layout)]
    assert built(["qwen3-8b", "qwen3-1.7b"], layout, lora) == table


# On a machine with GPUs none of them is touched: they may be another program's, or too small.
WITH_CUDA = """
import torch
torch.cuda.is_available = lambda: True
from megasharp.learner import meta_program
meta_program.main()
"""


@pytest.mark.long("ranks")
def test_models_are_built_where_there_is_a_gpu_too() -> None:
    """A process that believes in one: whatever asks for it would fail here."""
    lora, layout = LoraConfig(rank=16, alpha=32.0, targets=["qkv"]), ParallelLayout(dp=2, tp=4, pp=3, vpp=4)
    assert built(["qwen3-8b"], layout, lora, "-c", WITH_CUDA) == [counted("qwen3-8b", layout, lora)]


@pytest.mark.long("ranks")
def test_a_layer_keeps_what_the_formula_says() -> None:
    """Within a thousandth (but for rounding), as on a CPU and as on a GPU, and one run, so that no block is padded."""
    measured = json.loads(run("-m", "tests.multirank.learner.layer_memory"))
    assert len(measured) == 66 + 5 * 8
    for case, size in measured.items():
        device, norms, dtype, recompute, modules, tp, mixture = case.split()
        arch = architecture(2, norms, MIXTURES.get(mixture))
        width = 2 if dtype == "bfloat16" else 4
        again, on_gpu = tuple(modules.split(",")), device == "cuda"
        planned = layer_bytes_per_token(arch, int(tp), width, recompute, again, on_gpu=on_gpu, padded=1.0)
        assert size == pytest.approx(planned, rel=1e-3), case
