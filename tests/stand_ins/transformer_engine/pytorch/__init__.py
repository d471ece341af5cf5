"""The modules that Megatron's classes inherit from."""

from . import distributed, fp8, ops
from .fp8 import fp8_autocast, fp8_model_init
from .layers import DotProductAttention, GroupedLinear, LayerNorm, LayerNormLinear, Linear, RMSNorm

__all__ = [
    "DotProductAttention",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "Linear",
    "RMSNorm",
    "distributed",
    "fp8",
    "fp8_autocast",
    "fp8_model_init",
    "ops",
]
