"""A mixture of experts made of a dense Qwen3 folder: every expert is the dense MLP, changed a little."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

_MLP = re.compile(r"(model\.layers\.\d+\.mlp\.)((?:gate|up|down)_proj\.weight)")
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def upcycle(
    dense: Path, target: Path, *, experts: int = 8, per_token: int = 2, apart: float = 0.1, sharp: float = 1.0
) -> Path:
    """Write the mixture; `apart` is the norm of an expert's change over its weight's, `sharp` a router logit's spread.

    Weights of the chosen experts add up to 1, so with experts equal to each other it is the dense model.
    """
    config = json.loads((dense / "config.json").read_text())
    config |= {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": experts,
        "num_experts_per_tok": per_token,
        "moe_intermediate_size": config["intermediate_size"],
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "router_aux_loss_coef": 0.001,
    }
    for key in ("layer_types", "max_window_layers"):
        config.pop(key, None)
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for name, weight in load_file(dense / "model.safetensors").items():
        mlp = _MLP.fullmatch(name)
        if mlp is None:
            tensors[name] = weight
            continue
        for expert in range(experts):
            noise = torch.randn(weight.shape, generator=generator) * weight.norm() / weight.numel() ** 0.5
            tensors[f"{mlp[1]}experts.{expert}.{mlp[2]}"] = weight + apart * noise
    for layer in range(config["num_hidden_layers"]):
        router = torch.randn(experts, config["hidden_size"], generator=generator)
        tensors[f"model.layers.{layer}.mlp.gate.weight"] = router * sharp / config["hidden_size"] ** 0.5
    target.mkdir(parents=True)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(config, indent=1))
    for name in _TOKENIZER:
        if (dense / name).is_file():
            shutil.copy(dense / name, target)
    return target
