"""The figures of a step's advantages, as the update will use them."""

from __future__ import annotations

import torch

from megasharp.ops.segment import segment_sum
from megasharp.types import Mean, Metrics, MiniBatch, StepBatch


def advantage_metrics(batch: StepBatch) -> Metrics:
    """Figures over unmasked tokens, after calibration.

    - `group/zero_advantage`: share of the step's groups in which no token has an advantage, so that teach nothing.
    - `policy/advantage_positive`, `policy/advantage_negative`: sums of positive and of negative advantages per
      response token, whose balance says whether a step mostly raises or mostly lowers probabilities.
    """
    groups = len(batch.group_ids)
    moved_G = torch.zeros(groups, dtype=torch.float64)
    positive = negative = tokens = 0.0
    for mini in batch.mini_batches:
        for adv_T, group_T in _scored(mini):
            moved_G += segment_sum(adv_T.abs(), group_T, groups)
            positive += float(adv_T.clamp(min=0.0).sum())
            negative += float(adv_T.clamp(max=0.0).sum())
            tokens += adv_T.numel()
    return {
        "group/zero_advantage": Mean(float((moved_G == 0.0).sum()), float(groups)),
        "policy/advantage_positive": Mean(positive, tokens),
        "policy/advantage_negative": Mean(negative, tokens),
    }


def _scored(mini: MiniBatch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Advantages and group numbers of each micro-batch's unmasked tokens."""
    micros = [micro for rank in mini.per_rank for micro in rank]
    kept = [micro.inputs.mask_T > 0 for micro in micros]
    return [(m.advantage_T[k].double(), m.inputs.group_T[k]) for m, k in zip(micros, kept, strict=True)]
