"""Prints, as JSON, the bytes that autograd keeps for one more layer of the real Megatron model, per token and rank.

Once with the CPU's operators, once with stand-ins for those of a GPU: the variable-length kernels, and the fused norm,
which exists on CUDA alone. A program of its own: torch's fake process group is global state. Used by test_plan.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from megasharp.common.layout import ParallelLayout
from megasharp.common.records import Segments, as_dtype
from megasharp.config.policy import PolicyConfig
from megasharp.convert.architecture import Architecture, Experts, RopeParameters
from megasharp.learner.attention import rotary_tables
from megasharp.learner.model import build_chunks, transformer_config
from megasharp.learner.packed import packed_rows
from megasharp.learner.parallel import destroy, initialize, megatron_device

sys.path.insert(0, str(Path(__file__).parents[2] / "unit" / "learner"))

import stand_in_flash

CPU = torch.device("cpu")


# Families differ in their norms of queries and keys: there are none, or each head has its own, or all have one.
NORMS = ("head", "none", "whole")


def architecture(layers: int, norms: str, experts: Experts | None = None) -> Architecture:
    return Architecture(
        family="qwen3", num_layers=layers, hidden=64, heads=8, kv_heads=2, head_dim=16, ffn=160, vocab=128,
        norm_eps=1e-6, rope_parameters=RopeParameters(1e4), max_positions=512, tied=False,
        qkv_bias=norms == "none", qk_norm=norms == "head", dtype="float32", qk_norm_whole=norms == "whole",
        post_norm=norms == "whole", experts=experts,
    )  # fmt: skip


class StandInNorm(torch.autograd.Function):
    """Keeps what torch's derivatives.yaml says of `_fused_rms_norm`: input, weight, and float32 deviations."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: tuple[int, ...], weight: Tensor, eps: float) -> Tensor:
        deviation = (x.float().square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(x, weight, deviation)
        return (x * deviation * weight).to(x.dtype)


def use_gpu_operators(patch: pytest.MonkeyPatch) -> None:
    stand_in_flash.use_stand_in(patch)
    patch.setattr(F, "rms_norm", StandInNorm.apply)


def kept(
    arch: Architecture,
    layout: ParallelLayout,
    dtype: torch.dtype,
    recompute: str,
    tokens: int,
    modules: Sequence[str],
    fused: bool,
) -> int:
    """Bytes of all storages that autograd keeps after a forward pass, weights left out, each counted once.

    `fused`: experts compute SwiGLU and the router's weight as on a GPU, in one function.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=layout.world)
    with megatron_device(CPU):
        place = initialize(layout, 1, gloo=False)
        policy = PolicyConfig(recompute=recompute, recompute_modules=list(modules))
        config = transformer_config(arch, layout, dtype, policy, {})
        config.bias_activation_fusion, config.use_te_activation_func = fused, not fused
        (model,) = build_chunks(config, arch, place)
        for parameter in model.parameters():
            torch.nn.init.ones_(parameter)
        known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        found: dict[int, Tensor] = {}

        def pack(tensor: Tensor) -> Tensor:
            # Holding the tensor keeps its address from being used again.
            if tensor.untyped_storage().data_ptr() not in known:
                found.setdefault(tensor.untyped_storage().data_ptr(), tensor)
            return tensor

        cos, sin = rotary_tables(torch.ones(arch.head_dim // 2), 1.0, torch.arange(tokens))
        one_run = Segments(torch.tensor([0]), torch.tensor([tokens]), torch.tensor([-1]))
        rows = packed_rows(one_run, cos, sin)
        ids = torch.arange(tokens)[None]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = model(ids % arch.vocab, ids, None, packed_seq_params=rows)
        assert output.requires_grad
        total = sum(tensor.untyped_storage().nbytes() for tensor in found.values())
        destroy()
    dist.destroy_process_group()
    return total


def cases(every: bool) -> list[tuple[str, tuple[str, ...], int]]:
    """Recompute, its modules, and tp; without `every` the modules that are recomputed by default."""
    found = [(recompute, ("core_attn",), tp) for recompute in ("none", "selective", "full") for tp in (1, 2)]
    others = [("mlp",), ("core_attn", "mlp")] if every else []
    return found + [("selective", modules, 1) for modules in others]


# Mixtures in place of the MLP: more experts, more of them a token, and a softmax before the choice.
MIXTURES = {"8of2": Experts(8, 2, 48, True), "16of4": Experts(16, 4, 32, True), "8of3": Experts(8, 3, 48, False)}


def measured(device: str, dtype: str, norms: str, mixture: str = "none") -> dict[str, float]:
    """Bytes per token of one more layer, by case."""
    tokens, results, experts = 256, {}, MIXTURES.get(mixture)
    for recompute, modules, tp in cases(norms != "none"):
        layout, fused = ParallelLayout(tp=tp), device == "cuda" and experts is not None
        sizes = [
            kept(architecture(layers, norms, experts), layout, as_dtype(dtype), recompute, tokens, modules, fused)
            for layers in (2, 3)
        ]
        key = f"{device} {norms} {dtype} {recompute} {','.join(modules)} {tp} {mixture}"
        results[key] = (sizes[1] - sizes[0]) / tokens
    return results


def main() -> None:
    results = {}
    for norms in NORMS:
        for dtype in ("bfloat16", "float32"):
            results |= measured("cpu", dtype, norms)
        with pytest.MonkeyPatch.context() as patch:
            use_gpu_operators(patch)
            results |= measured("cuda", "bfloat16", norms)
            for mixture in MIXTURES if norms == "head" else ():
                results |= measured("cuda", "bfloat16", norms, mixture)
    results |= measured("cpu", "bfloat16", "head", "8of2") | measured("cpu", "float32", "head", "8of2")
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
