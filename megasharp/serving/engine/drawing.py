"""The arithmetic of drawing tokens: the memory's subtraction, truncation, the draw and the log-probs. Pure torch.

The order is that of `megasharp.rollout.inprocess.sampling`: the memory's logits times mu are subtracted, the guard bars
tokens by the policy's own probabilities, the difference is divided by the temperature, and top-k, then top-p, cut what
comes out. top-p is a share of what top-k left, which SGLang's own sampling does not renormalise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megasharp.serving.engine.requests import Columns

# Elements of a [rows, vocabulary] block in float32 that is worked on at a time: 64 MiB.
_BLOCK_ELEMENTS = 1 << 24


def subtract_memory(logits_SV: Tensor, memory_SV: Tensor, columns: Columns, temperatures_S1: Tensor) -> None:
    """In place: the policy's logits become policy - mu * memory, -inf where the guard bars a token.

    `logits_SV` [S, V], any floating dtype; `memory_SV` [S, V] float32; `temperatures_S1` [S, 1].
    """
    barred_SV = None
    if columns.guarded:
        # p < share * p_max at temperature T, written for logits.
        least_S1 = logits_SV.amax(dim=-1, keepdim=True) + temperatures_S1 * columns.plausible_S[:, None]
        barred_SV = logits_SV < least_S1
    logits_SV.sub_((columns.mu_S[:, None] * memory_SV).to(logits_SV.dtype))
    if barred_SV is not None:
        logits_SV.masked_fill_(barred_SV, float("-inf"))


def calibration(policy_SV: Tensor, calibrated_SV: Tensor, temperature_S: Tensor) -> tuple[Tensor, Tensor]:
    """What the subtraction did to each row, from the logits [S, V] before it and after it and the guard.

    Returns `argmax_moved` float32 [S], 1.0 where the likeliest token is another one, and `calibration_kl` float32 [S],
    KL(calibrated || policy) in nats at the temperature, over the whole vocabulary.
    """
    moved_S = (policy_SV.argmax(dim=-1) != calibrated_SV.argmax(dim=-1)).float()
    step = max(1, _BLOCK_ELEMENTS // policy_SV.shape[1])
    blocks = zip(*(torch.split(each, step) for each in (policy_SV, calibrated_SV, temperature_S)), strict=True)
    return moved_S, torch.cat([_kl(*block) for block in blocks])


def _kl(policy_SV: Tensor, calibrated_SV: Tensor, temperature_S: Tensor) -> Tensor:
    policy_SV = (policy_SV.float() / temperature_S[:, None]).log_softmax(dim=-1)
    calibrated_SV = (calibrated_SV.float() / temperature_S[:, None]).log_softmax(dim=-1)
    # A barred token counts for nothing, not for 0 times infinity.
    gain_SV = (calibrated_SV - policy_SV).masked_fill_(calibrated_SV == float("-inf"), 0.0)
    return (calibrated_SV.exp_() * gain_SV).sum(dim=-1).clamp_(min=0.0)


def truncate(probs_SV: Tensor, top_k_S: Tensor, top_p_S: Tensor, min_p_S: Tensor) -> tuple[Tensor, Tensor]:
    """What top-k, then top-p of the rest, then min-p leave of each row, not renormalised.

    Returns float32 [S, V] probabilities from the likeliest token down, 0 where cut, and the tokens of those ranks;
    ties go to the lower token id.
    """
    ranked_SV, token_of_rank_SV = probs_SV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(ranked_SV.shape[1], device=ranked_SV.device)
    ranked_SV = ranked_SV.masked_fill(rank_V >= top_k_S[:, None], 0.0)
    cumulative_SV = ranked_SV.cumsum(dim=-1, dtype=torch.float64)
    cut_SV = cumulative_SV - ranked_SV >= top_p_S[:, None] * cumulative_SV[:, -1:]
    cut_SV |= ranked_SV < min_p_S[:, None] * ranked_SV[:, :1]
    cut_SV[:, 0] = False
    return ranked_SV.masked_fill(cut_SV, 0.0), token_of_rank_SV


def drawable(weights_SV: Tensor) -> Tensor:
    """Weights of NaN become 1: torch ends the process rather than draw from them. Their log-probs tell of them."""
    return torch.nan_to_num(weights_SV, nan=1.0)


def draw(weights_SV: Tensor, uniform_S: Tensor | None) -> Tensor:
    """One column per row, int64 [S], with probability proportional to its weight.

    With `uniform_S` (float64 in [0, 1)), the first whose cumulative sum exceeds that share of the total.
    """
    if uniform_S is None:
        return torch.multinomial(drawable(weights_SV), num_samples=1).squeeze(1)
    cumulative_SV = weights_SV.cumsum(dim=-1, dtype=torch.float64)
    column_S = torch.searchsorted(cumulative_SV, (uniform_S * cumulative_SV[:, -1])[:, None], right=True).squeeze(1)
    # Only rows of NaN get past the end; they are seen by their log-probs.
    return column_S.clamp_(max=weights_SV.shape[1] - 1)


def logp_at(logits_SV: Tensor, tokens_S: Tensor, temperature_S: Tensor) -> Tensor:
    """float32 [S]: each row's log-prob of its token at its temperature, over the whole vocabulary."""
    scaled_SV = logits_SV.float() / temperature_S[:, None]
    return at(scaled_SV, tokens_S.long()) - scaled_SV.logsumexp(dim=-1)


def at(values_SV: Tensor, index_S: Tensor) -> Tensor:
    """[S]: each row's value at its index."""
    return values_SV.gather(1, index_S[:, None]).squeeze(1)
