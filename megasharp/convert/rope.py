"""Rotary frequencies of an architecture, by transformers' own rules."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megasharp.convert.architecture import Architecture


def rotary_frequencies(arch: Architecture, device: torch.device | None = None) -> tuple[Tensor, float]:
    """Return inverse frequencies, float32 [head_dim / 2], and the factor on cos and sin.

    transformers' table has no entry for the plain embedding (RoPE, arXiv 2104.09864), so that one is computed here.
    """
    rope = arch.rope_parameters
    if rope.rope_type == "default":
        steps = torch.arange(0, arch.head_dim, 2, dtype=torch.int64).to(device=device, dtype=torch.float)
        return 1.0 / (rope.theta ** (steps / arch.head_dim)), 1.0
    config = PretrainedConfig(
        rope_parameters=rope.as_dict(),
        head_dim=arch.head_dim,
        hidden_size=arch.hidden,
        num_attention_heads=arch.heads,
        max_position_embeddings=arch.max_positions,
    )
    frequencies, scaling = ROPE_INIT_FUNCTIONS[rope.rope_type](config, device)
    return frequencies.float(), float(scaling)
