"""The arithmetic of drawing tokens: the memory's subtraction, truncation, the draw and the log-probs. Pure torch.

The order is that of `megasharp.rollout.inprocess.generation`: the memory's logits times mu are subtracted, the guard
bars tokens by the policy's own probabilities, the difference is divided by the temperature, and top-k, top-p and then
min-p cut what comes out. top-p is a share of what top-k left, which SGLang's own sampling does not renormalise.

`MemoryLogits` is where the memory network's forward leaves its logits for the sampler, in each process of an engine:
one buffer for the engine's whole life, because a CUDA graph writes where it wrote when it was captured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from megasharp.rollout.sglang.engine.requests import Columns


class MemoryLogits(nn.Module):
    """float32 [max_rows, V]. A buffer of the model, so that SGLang's sleep and wake keep its address and contents."""

    logits_SV: Tensor
    _present: ClassVar[MemoryLogits | None] = None

    def __init__(self, max_rows: int, vocabulary: int) -> None:
        super().__init__()
        self.register_buffer("logits_SV", torch.zeros(max_rows, vocabulary, dtype=torch.float32), persistent=False)
        # The weights' checksums are of weights.
        self.logits_SV._skip_weight_check = True  # type: ignore[attr-defined]
        MemoryLogits._present = self

    def store(self, logits_SV: Tensor) -> None:
        """Keep the rows of one step, [S, V] of any floating dtype, in the batch's order.

        Raises RuntimeError where there are more than the `max_rows` that the buffer was made for.
        """
        rows, most = logits_SV.shape[0], self.logits_SV.shape[0]
        if rows > most:
            raise RuntimeError(f"{rows} requests in one batch, but the engine was started for at most {most}")
        self.logits_SV[:rows].copy_(logits_SV)


def held(rows: int) -> Tensor | None:
    """The last step's first `rows` rows; None in an engine without a memory network."""
    present = MemoryLogits._present
    return None if present is None else present.logits_SV[:rows]


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """The tokens drawn, int64 [S], and their log-probs float32 [S] over the whole vocabulary at the temperature."""

    tokens_S: Tensor
    calibrated_logp_S: Tensor
    policy_logp_S: Tensor


# Elements of a [rows, vocabulary] block in float32 that is worked on at a time: 64 MiB.
_BLOCK_ELEMENTS = 1 << 24


def subtract_memory(logits_SV: Tensor, memory_SV: Tensor, columns: Columns, temperatures_S1: Tensor) -> Tensor:
    """Float32 [S, V], a tensor of its own: policy - mu * memory, -inf where the guard bars a token.

    `logits_SV` [S, V] the policy's, any floating dtype; `memory_SV` [S, V] float32; `temperatures_S1` [S, 1].
    """
    calibrated_SV = torch.addcmul(logits_SV.float(), memory_SV, columns.mu_S[:, None], value=-1)
    for least_S1 in _least_plausible(logits_SV, columns, temperatures_S1):
        calibrated_SV.masked_fill_(logits_SV < least_S1, float("-inf"))
    return calibrated_SV


def _least_plausible(logits_SV: Tensor, columns: Columns, temperatures_S1: Tensor) -> Iterator[Tensor]:
    """The policy logits [S, 1] that each form of the guard asks of a token, -inf in rows without it."""
    if columns.any_min_p:
        # p < share * p_max at temperature T, written for logits.
        yield logits_SV.amax(dim=-1, keepdim=True) + temperatures_S1 * columns.min_p_S[:, None]
    if columns.most_top_k:
        likeliest_SK = logits_SV.topk(min(columns.most_top_k, logits_SV.shape[1]), dim=-1).values
        last_S = at(likeliest_SK, columns.top_k_S.clamp(1, likeliest_SK.shape[1]) - 1)
        yield last_S.masked_fill(columns.top_k_S == 0, float("-inf"))[:, None]


def argmax_moved(policy_SV: Tensor, calibrated_SV: Tensor) -> Tensor:
    """float32 [S], 1.0 where the likeliest token is another one after the subtraction and the guard; logits [S, V]."""
    return (policy_SV.argmax(dim=-1) != calibrated_SV.argmax(dim=-1)).float()


def calibration_kl(
    probs_SV: Tensor, memory_SV: Tensor, columns: Columns, temperature_S: Tensor, drawn: Drawn
) -> Tensor:
    """KL(calibrated || policy) in nats, float32 [S], 0 where nothing was asked of the memory.

    `probs_SV` [S, V] are the calibrated probabilities at the temperature, `memory_SV` the memory's logits. The two
    log-probs of a token differ by -mu / T times its memory logit and by a constant of the row, which the drawn token
    gives: so their mean difference takes one product over the vocabulary instead of two more softmaxes.
    """
    step = max(1, _BLOCK_ELEMENTS // probs_SV.shape[1])
    blocks = zip(torch.split(probs_SV, step), torch.split(memory_SV, step), strict=True)
    mean_S = torch.cat([(probs * memory).sum(dim=-1) for probs, memory in blocks])
    shift_S = columns.mu_S / temperature_S * (mean_S - at(memory_SV, drawn.tokens_S))
    kl_S = (drawn.calibrated_logp_S - drawn.policy_logp_S - shift_S).clamp_(min=0.0)
    return kl_S.masked_fill_(columns.untouched_S, 0.0)


def truncate(probs_SV: Tensor, top_k_S: Tensor, top_p_S: Tensor, min_p_S: Tensor) -> tuple[Tensor, Tensor]:
    """Cut each row by top-k, then by top-p of the rest, then by min-p, without renormalising.

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


def candidates(logits_SV: Tensor, temperature_S: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Entropy in nats, float32 [S], and the `count` largest log-probs, float32 [S, N], at each row's temperature."""
    step = max(1, _BLOCK_ELEMENTS // logits_SV.shape[1])
    entropies, largest = [], []
    for logits, temperatures in zip(torch.split(logits_SV, step), torch.split(temperature_S, step), strict=True):
        logp_SV = (logits.float() / temperatures[:, None]).log_softmax(dim=-1)
        entropies.append(torch.special.entr(logp_SV.exp()).sum(dim=-1))
        largest.append(logp_SV.topk(min(count, logp_SV.shape[1]), dim=-1).values)
    return torch.cat(entropies), torch.cat(largest)


def at(values_SV: Tensor, index_S: Tensor) -> Tensor:
    """[S]: each row's value at its index."""
    return values_SV.gather(1, index_S[:, None]).squeeze(1)
