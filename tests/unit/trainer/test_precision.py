"""Keys of precision that cannot be done are refused in one line that says what to do."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from cases import each_case

from megasharp.common.errors import UserError
from megasharp.config.run_config import run_of
from megasharp.convert.architecture import Architecture, RopeParameters
from megasharp.trainer.resolve.resolved_run import check_precision

ARCHITECTURE = Architecture(
    family="qwen3", num_layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=96, vocab=64, norm_eps=1e-6,
    rope_parameters=RopeParameters(1e4), max_positions=64, tied=True, qkv_bias=False, qk_norm=True, dtype="bfloat16",
)  # fmt: skip


def check(policy: dict[str, Any], dtype: str = "bfloat16", architecture: Architecture = ARCHITECTURE) -> None:
    text = {"name": "x", "steps": 1, "recipe": {"methods": ["grpo"]}, "policy": policy}
    text |= {"model": {"path": "m", "dtype": dtype}, "data": {"task": "countdown", "path": "d"}}
    check_precision(run_of(text, Path("run.yaml")), architecture, "run.yaml")


def test_defaults_need_nothing() -> None:
    check({}, "float32")


@each_case(
    ("policy", "dtype", "told"),
    [
        (
            {"transformer_engine": True, "device": "cuda"},
            "float32",
            r"policy.transformer_engine=true needs Transformer Engine.* or leave policy.transformer_engine at auto$",
        ),
        ({"transformer_engine": True, "device": "cpu"}, "float32", "true needs a GPU; on a CPU leave it at auto"),
        ({"fp8_recipe": "tensorwise"}, "bfloat16", "no effect while policy.fp8 is null; set policy.fp8 too"),
        (
            {"recompute_modules": ["core_attn", "mlp"]},
            "float32",
            "no effect with policy.recompute=none; set policy.recompute=sel",
        ),
        ({"recompute": "selective", "recompute_modules": []}, "float32", "is empty; name one"),
        ({"recompute": "selective", "recompute_modules": ["mlp", "mlp"]}, "float32", "names one twice"),
        ({"fp8": "hybrid", "device": "cuda"}, "bfloat16", "policy.fp8=hybrid needs .* leave policy.fp8 null$"),
        ({"fp8": "hybrid", "device": "cuda"}, "float32", "set model.dtype=bfloat16"),
        ({"fp8": "e4m3", "device": "cpu"}, "bfloat16", "needs a GPU"),
        ({"fp8": "e4m3", "transformer_engine": False}, "bfloat16", "transformer_engine=false leaves out"),
        ({"fp8": "e4m3", "device": "cuda", "tp": 4}, "bfloat16", "ffn size 96 of m over tp 4 is no multiple of 16"),
        (
            {"attention": "fa3", "device": "cpu"},
            "bfloat16",
            "it needs a GPU; set policy.device=cuda, or leave",
        ),
        ({"attention": "fa2", "device": "cuda"}, "float32", "its kernels take no float32; set model.dtype=bfloat16"),
        (
            {"attention": "fa3", "device": "cuda"},
            "bfloat16",
            "needs flash_attn_3 .*which this Python has not, or",
        ),
    ],
)
def test_refusals(policy: dict[str, Any], dtype: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # As where it is not installed.
    monkeypatch.setattr("megasharp.learner.layer_spec.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=told) as error:
        check(policy, dtype, dataclasses.replace(ARCHITECTURE, hidden=128))
    assert "\n" not in str(error.value) and str(error.value).startswith("run.yaml: policy.")


def test_an_engine_that_is_installed_is_refused_on_a_cpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megasharp.learner.layer_spec.util.find_spec", lambda name: object())
    check({"transformer_engine": True, "device": "cuda"}, "float32")
    with pytest.raises(UserError, match="needs a GPU"):
        check({"transformer_engine": True, "device": "cpu"}, "float32")


def test_modules_of_other_models_are_refused() -> None:
    check({"recompute": "selective", "recompute_modules": ["core_attn", "mlp"]})
    with pytest.raises(UserError, match=r"policy.recompute_modules.*core_attn or mlp"):
        check({"recompute": "selective", "recompute_modules": ["moe"]})
