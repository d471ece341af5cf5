"""Modules that are computed twice leave every figure as it is, and are recomputed; adapters inside them train too."""

from __future__ import annotations

from pathlib import Path

import torch
from launch import run_ranks
from megatron.core.transformer.mlp import MLP
from policies import LAYOUTS, changed, learner_on, packed, ragged_sequences, recipe, save_model, settings, weights_of
from torch import Tensor

from megasharp.algos.base import Needs
from megasharp.config.policy import LoraConfig
from megasharp.learner.attention import PackedAttention

# Adapters of MLPs alone: the first layer's has an input that wants no gradient.
LORA = LoraConfig(rank=2, alpha=4.0, targets=["fc1", "fc2"])
MODULES = {"none": (), "attention": ("core_attn",), "mlp": ("mlp",), "both": ("core_attn", "mlp")}
Result = dict[str, tuple[float, float, int, int, dict[str, Tensor]]]


def on_rank(rank: int, world: int, folder: str) -> dict[str, Result]:
    batch, method = packed(ragged_sequences(), LAYOUTS["tp1"]), recipe()
    results: dict[str, Result] = {}
    for name, lora in (("whole", None), ("adapters", LORA)):
        results[name] = {}
        for kind, modules in MODULES.items():
            values = settings(folder, LAYOUTS["tp1"], Needs(), lora=lora, diagnostics=None)
            if modules:
                values = changed(values, recompute="selective", recompute_modules=modules)
            with learner_on(values) as (learner, own):
                calls = {MLP: 0, PackedAttention: 0}

                def count(module: torch.nn.Module, *_: object, calls: dict[type, int] = calls) -> None:
                    calls[type(module)] += 1

                for chunk in own._chunks:
                    for module in chunk.modules():
                        if type(module) in calls:
                            module.register_forward_hook(count)
                stats = learner.step(batch, method)
                found = (calls[MLP], calls[PackedAttention], weights_of(learner))
            results[name][kind] = (stats.loss, stats.grad_norm, *found)
    return results


def test_figures_and_weights(tmp_path: Path) -> None:
    folder = save_model(tmp_path, "qwen3-tied")
    (found,) = run_ranks(1, on_rank, folder)
    for name, result in found.items():
        loss, norm, mlps, attentions, weights = result["none"]
        assert norm > 0 and mlps == attentions > 0
        for kind, modules in MODULES.items():
            again = result[kind]
            assert again[:2] == (loss, norm), (name, kind)
            # Core attention is recomputed by a part of itself, which is counted once.
            assert again[2] == mlps * (2 if "mlp" in modules else 1), (name, kind)
            assert all(torch.equal(again[4][key], tensor) for key, tensor in weights.items()), (name, kind)
