"""Transformer Engine's layer spec: Megatron's real extension over a stand-in of the package, against the local spec."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from policies import make_model, save_model
from torch import Tensor
from transformer_engine_program import MIXTURE, MODELS, STEPS, Trained
from waiting import HANG_S

if TYPE_CHECKING:
    Results = dict[int, list[dict[str, dict[bool, Trained]]]]

pytestmark = pytest.mark.long("layouts")

STAND_INS = Path(__file__).resolve().parents[2] / "stand_ins"
PROGRAM = Path(__file__).with_name("transformer_engine_program.py")
# As many norms are fused as stand before a linear map that is not adapted.
# Before a router a norm stands alone.
FUSED = {
    **dict.fromkeys((*MODELS, "selective", "full", "bfloat16"), 8),
    "lora": 4,
    MIXTURE: 4,
    "olmo2": 0,
    "olmo2-lora": 0,
}
# All four maps of each of four layers, but none of a weight that is frozen beside adapters. A layer's experts are two.
SUMS = {**dict.fromkeys(FUSED, 16), "lora": 0, "olmo2-lora": 0}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("engine")
    for name in (*MODELS, MIXTURE):
        save_model(folder, name)
    path = os.pathsep.join([str(STAND_INS), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, str(PROGRAM), str(folder), str(folder / "results")]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False, timeout=HANG_S
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: Results = torch.load(folder / "results", weights_only=False)
    return found


def pairs(results: Results) -> list[tuple[str, int, dict[bool, Trained]]]:
    """Every case that both specs ran, as each rank saw it."""
    return [
        (name, world, both)
        for world, ranks in results.items()
        for rank in ranks
        for name, both in rank.items()
        if len(both) == 2
    ]


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_the_engines_modules_are_used_where_they_are_asked_for(results: Results) -> None:
    cases = pairs(results)
    assert {name for name, _, _ in cases} == FUSED.keys() and {world for _, world, _ in cases} == {1, 2}
    for name, _, both in cases:
        assert (both[False].fused, both[True].fused) == (0, FUSED[name])
        assert (both[False].sums, both[True].sums) == (0, SUMS[name])


def test_weights_come_in_and_go_out_bit_for_bit(results: Results) -> None:
    models = {name: dict(make_model(name).named_parameters()) for name in MODELS}
    for name, _, both in pairs(results):
        assert same_bits(both[True].start, both[False].start)
        if name in models:
            assert same_bits(both[True].start, {k: v.detach() for k, v in models[name].items()})


def test_training_is_the_local_specs(results: Results) -> None:
    for name, world, both in pairs(results):
        local, engine = both[False], both[True]
        loose = 0.05 if name == "bfloat16" else 1e-5
        assert len(engine.losses) == STEPS and max(abs(norm) for norm in engine.norms) > 0
        for a, b in zip(local.logp, engine.logp, strict=True):
            torch.testing.assert_close(b, a, rtol=0, atol=loose, msg=f"{name} {world}: log-probs")
        assert engine.losses == pytest.approx(local.losses, abs=loose)
        assert engine.norms == pytest.approx(local.norms, rel=loose)
        steps = {key: (tensor - local.start[key]).float() for key, tensor in local.end.items()}
        assert max(float(step.abs().max()) for step in steps.values()) > 1e-3
        for key, tensor in local.end.items():
            # Adam makes a step of the learning rate out of an element's rounding, so that elements prove nothing.
            difference = (engine.end[key].float() - tensor.float()).norm()
            assert difference <= (0.5 if name == "bfloat16" else 1e-2) * steps[key].norm(), key


def test_each_spec_goes_on_from_the_others_checkpoint(results: Results) -> None:
    for name, _, both in pairs(results):
        for engine in (False, True):
            assert both[engine].loaded is not None
            assert same_bits(both[engine].loaded or {}, both[not engine].end)
        loose = 0.05 if name == "bfloat16" else 1e-5
        assert both[True].one_more == pytest.approx(both[False].one_more, rel=loose)


def test_recomputation_changes_nothing(results: Results) -> None:
    (rank,) = results[1]
    plain = rank[MODELS[0]][True].norms
    for recompute in ("selective", "full"):
        norms = rank[recompute][True].norms
        # Recomputed tensors have other strides, and products round otherwise; Adam makes more of it from step to step.
        assert norms[0] == pytest.approx(plain[0], rel=1e-6) and norms == pytest.approx(plain, rel=1e-5)


def test_its_attention_is_ours(results: Results) -> None:
    """In local layers, with shared prompts; its checkpoint has nothing of the module."""
    (rank,) = results[1]
    local, engine = rank[MODELS[0]][False], rank["attention"][True]
    for a, b in zip(local.logp, engine.logp, strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=1e-5)
    assert engine.losses == pytest.approx(local.losses, abs=1e-4)
    assert engine.norms == pytest.approx(local.norms, rel=1e-3)
    assert engine.loaded is not None and same_bits(engine.loaded, engine.end)


def test_fp8_is_asked_of_the_engine_and_weights_leave_in_bfloat16(results: Results) -> None:
    (rank,) = results[1]
    trained = rank["fp8"][True]
    assert trained.fused > 0 and trained.norms[0] > 0
    assert {tensor.dtype for tensor in trained.end.values()} == {torch.bfloat16}
