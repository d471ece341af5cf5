"""FlashAttention-4's two functions as torch's registration calls them.

torch (2.11 to 2.13) unpacks two results of `_flash_attn_fwd` and three of `_flash_attn_bwd`. flash-attn-4 returned so
many up to 4.0.0b16; 4.0.0b20 returns four of the first and 4.0.0b36 five, of which the new ones are of other kernels.
"""

from __future__ import annotations

from typing import Any

from flash_attn.cute import interface
from torch import Tensor


def _flash_attn_fwd(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exps."""
    out, log_sum = interface._flash_attn_fwd(*args, **kwargs)[:2]
    return out, log_sum


def _flash_attn_bwd(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values."""
    of_queries, of_keys, of_values = interface._flash_attn_bwd(*args, **kwargs)[:3]
    return of_queries, of_keys, of_values
