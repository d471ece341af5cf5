"""Rotary position embedding at given positions, with transformers' own frequency rules (llama3, yarn, ... scaling)."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_tables(inverse_frequency: Tensor, scaling: float, positions_P: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [P, head_dim], of each position; both halves of the head share the frequencies."""
    angles = torch.outer(positions_P.to(torch.float32), inverse_frequency.to(positions_P.device))
    doubled = torch.cat([angles, angles], dim=-1)
    return doubled.cos() * scaling, doubled.sin() * scaling


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotation to [P, heads, head_dim]; `cos`, `sin` are [P, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return x * cos[:, None].to(x.dtype) + turned * sin[:, None].to(x.dtype)
