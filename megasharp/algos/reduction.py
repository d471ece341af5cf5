"""From losses per token to one number, applied once and with counts over the whole optimizer step.

The result does not depend on packing, micro-batch size or the number of ranks, because no count here is local.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megasharp.algos.base import Reduction
from megasharp.types import Denominators


def token_coefficients(
    reduction: Reduction, mask_T: Tensor, seq_T: Tensor, length_S: Tensor, denominators: Denominators
) -> Tensor:
    """The factor of each token's loss, so that the loss is `sum(loss_T * coefficient_T)`; [T], no gradient.

    `length_S` counts unmasked tokens per sequence of the micro-batch; a sequence without any gets no weight.
    With N tokens, S sequences, |y| tokens of a sequence and a constant horizon C in the whole step:
    token_mean 1/N; seq_mean_token_mean 1/(S |y|); seq_mean_token_sum 1/S; token_sum_over_constant 1/(S C).
    """
    tokens, sequences = max(denominators.tokens, 1.0), max(denominators.sequences, 1.0)
    if reduction is Reduction.TOKEN_MEAN:
        return mask_T / tokens
    if reduction is Reduction.SEQ_MEAN_TOKEN_MEAN:
        per_sequence = torch.clamp(length_S, min=1.0).to(mask_T.dtype)[seq_T]
        return mask_T / (per_sequence * sequences)
    if reduction is Reduction.SEQ_MEAN_TOKEN_SUM:
        return mask_T / sequences
    return mask_T / (sequences * denominators.constant)
