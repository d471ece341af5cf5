"""A learner's ways on a GPU beside its plain one: layer specs, FP8, overlap, recomputation, the optimizer on the host.

What a machine cannot show is skipped with the reason (`pytest -rs`).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from programs import run, small_model

from megasharp.learner.layer_spec import transformer_engine_is_there

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")]
ENGINE = pytest.mark.skipif(not transformer_engine_is_there(), reason="Transformer Engine is not installed")
HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
    reason="FP8 needs a GPU of compute capability 9.0 or later",
)
Found = dict[str, Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return small_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def plain(model: str) -> Found:
    return run(model, transformer_engine=False)


def assert_close(found: Found, expected: Found, loose: float) -> None:
    for mine, theirs in zip(found["figures"], expected["figures"], strict=True):
        assert mine == pytest.approx(theirs, rel=loose, abs=loose)
    assert found["norm"] == pytest.approx(expected["norm"], rel=loose)


def test_the_optimizer_on_the_host(model: str) -> None:
    """The same bits where Adam is torch's own kernel in both, and 12 bytes a parameter less on the GPU."""
    # Sums of gradients by atomic additions are another run's bits.
    plain, held = (
        run(model, transformer_engine=False, deterministic=True, optimizer_offload=offload) for offload in (False, True)
    )
    if transformer_engine_is_there():
        # Without offload Megatron takes Transformer Engine's Adam then.
        assert_close(held, plain, 1e-3)
    else:
        assert held["figures"] == plain["figures"] and held["digest"] == plain["digest"]
    # Main weights are made with the learner, moments in its first step.
    assert plain["built"] - held["built"] == pytest.approx(4 * held["parameters"], rel=0.1)


def test_main_weights_are_built_in_the_gradients_room(model: str) -> None:
    whole, held = (
        run(model, transformer_engine=False, deterministic=True, optimizer_offload=offload, dtype="float32")
        for offload in (False, True)
    )
    assert held["digest"] == whole["digest"] or transformer_engine_is_there()


@pytest.mark.parametrize("modules", [["core_attn"], ["mlp"], ["core_attn", "mlp"]])
def test_recomputation(model: str, plain: Found, modules: list[str]) -> None:
    again = run(model, transformer_engine=False, recompute="selective", recompute_modules=modules)
    assert_close(again, plain, 1e-2)


def test_overlapped_communication(model: str, plain: Found) -> None:
    """On one GPU with itself; several buckets, two mini-batches a step."""
    assert_close(run(model, transformer_engine=False, overlap=True, megatron={"bucket_size": 100_000}), plain, 1e-2)


@ENGINE
def test_transformer_engines_layers(model: str, plain: Found) -> None:
    found = run(model, transformer_engine=True)
    assert found["fused"] == 8 and plain["fused"] == 0
    assert_close(found, plain, 2e-2)


@ENGINE
@HOPPER
@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
@pytest.mark.parametrize("kind", ["hybrid", "e4m3"])
def test_fp8(model: str, plain: Found, kind: str, recipe: str) -> None:
    found = run(model, transformer_engine=True, fp8=[kind, recipe])
    # Three bits of mantissa: figures of the same size.
    assert_close(found, plain, 0.25)
    assert found["digest"] != plain["digest"]


@ENGINE
def test_overlapped_communication_of_transformer_engines_layers(model: str, plain: Found) -> None:
    found = run(model, transformer_engine=True, overlap=True, megatron={"bucket_size": 100_000})
    assert_close(found, plain, 2e-2)
