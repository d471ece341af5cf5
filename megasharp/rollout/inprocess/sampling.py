"""Drawing tokens: the cumulative distribution inverted at a uniform number hashed from (seed, position).

There is no generator state, so a sample depends on its seed and its logits and on nothing else in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megasharp.errors import UserError
from megasharp.types import SamplingParams

# Elements of a [rows, vocabulary] block worked on at a time; the sums are float64, so this bounds the memory.
BLOCK_ELEMENTS = 1 << 22


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """One token per row: `tokens_S` int64; `sampler_logp_S`, `policy_logp_S` float32."""

    tokens_S: Tensor
    sampler_logp_S: Tensor
    policy_logp_S: Tensor


def check_sampling(sampling: SamplingParams) -> None:
    """Raises UserError for parameters outside their range."""
    if sampling.max_tokens < 1:
        raise UserError(f"sampling.max_tokens is {sampling.max_tokens}; it must be at least 1")
    if not 0.0 <= sampling.temperature < float("inf"):
        raise UserError(f"sampling.temperature is {sampling.temperature}; it must be 0 (greedy) or above")
    if not 0.0 < sampling.top_p <= 1.0:
        raise UserError(f"sampling.top_p is {sampling.top_p}; it must be in (0, 1]")
    if sampling.top_k < 0:
        raise UserError(f"sampling.top_k is {sampling.top_k}; it must be 0 (off) or above")


def seeds_to_int64(seeds: Sequence[int], device: torch.device) -> Tensor:
    """Python integers of any size as int64, modulo 2^64."""
    wrapped = [((seed + (1 << 63)) % (1 << 64)) - (1 << 63) for seed in seeds]
    return torch.tensor(wrapped, dtype=torch.int64, device=device)


def uniforms(seeds_S: Tensor, position: int) -> Tensor:
    """float64 [S] in [0, 1), multiples of 2^-52: splitmix64 (Steele et al. 2014) of seed and position.

    The seed is mixed once before the position enters, so that seeds and positions do not trade off.
    """
    offset = ((position + 1) * 0x9E3779B97F4A7C15) % (1 << 64)
    signed = offset - (1 << 64) if offset >> 63 else offset
    mixed = _splitmix64(_splitmix64(seeds_S) + signed)
    return _shift(mixed, 12).to(torch.float64) * 2.0**-52


def draw(logits_SV: Tensor, seeds_S: Tensor, position: int, sampling: SamplingParams) -> Draw:
    """Draw response token number `position` of every row.

    `policy_logp` is at the sampling temperature over the whole vocabulary, `sampler_logp` after top-k and
    then top-p with what is left renormalised. Greedy takes the largest logit; log-probs are then at
    temperature 1.
    """
    step = max(1, BLOCK_ELEMENTS // logits_SV.shape[1])
    if logits_SV.shape[0] <= step:
        return _draw_block(logits_SV, uniforms(seeds_S, position), sampling)
    blocks = [
        _draw_block(logits_SV[i : i + step], uniforms(seeds_S[i : i + step], position), sampling)
        for i in range(0, logits_SV.shape[0], step)
    ]
    return Draw(
        torch.cat([block.tokens_S for block in blocks]),
        torch.cat([block.sampler_logp_S for block in blocks]),
        torch.cat([block.policy_logp_S for block in blocks]),
    )


def _draw_block(logits_SV: Tensor, uniform_S: Tensor, sampling: SamplingParams) -> Draw:
    greedy = sampling.temperature == 0.0
    wide = logits_SV.to(torch.float64)
    logp_SV = torch.log_softmax(wide if greedy else wide / sampling.temperature, dim=-1)
    truncated = sampling.top_p < 1.0 or 0 < sampling.top_k < logits_SV.shape[1]
    if truncated and not greedy:
        return _draw_truncated(logp_SV, uniform_S, sampling)
    tokens_S = logits_SV.argmax(dim=-1) if greedy else _invert(logp_SV.exp().cumsum(dim=-1), uniform_S)
    logp_S = logp_SV.gather(1, tokens_S[:, None]).squeeze(1).float()
    return Draw(tokens_S, logp_S, logp_S)


def _draw_truncated(logp_SV: Tensor, uniform_S: Tensor, sampling: SamplingParams) -> Draw:
    """Among the most likely tokens only; ties go to the lower token id."""
    ranked_SV, token_of_rank_SV = logp_SV.sort(dim=-1, descending=True, stable=True)
    if sampling.top_k:
        ranked_SV = ranked_SV[:, : sampling.top_k]
    cumulative_SV = ranked_SV.exp().cumsum(dim=-1)
    before_SV = torch.cat([torch.zeros_like(cumulative_SV[:, :1]), cumulative_SV[:, :-1]], dim=-1)
    kept_SV = before_SV < sampling.top_p * cumulative_SV[:, -1:]
    # Past the last kept rank the sum stays flat, so the inversion cannot land there.
    cumulative_SV = cumulative_SV.where(kept_SV, 0.0).cummax(dim=-1).values
    rank_S = _invert(cumulative_SV, uniform_S)[:, None]
    policy_S = ranked_SV.gather(1, rank_S).squeeze(1)
    sampler_S = policy_S - cumulative_SV[:, -1].log()
    return Draw(token_of_rank_SV.gather(1, rank_S).squeeze(1), sampler_S.float(), policy_S.float())


def _invert(cumulative_SV: Tensor, uniform_S: Tensor) -> Tensor:
    """The first index whose cumulative sum exceeds `uniform` times the total; its own mass is never zero."""
    target_S = uniform_S * cumulative_SV[:, -1]
    index_S = torch.searchsorted(cumulative_SV, target_S[:, None], right=True).squeeze(1)
    # Only rows of NaN get past the end; the caller reports those by their log-probs.
    return index_S.clamp_(max=cumulative_SV.shape[1] - 1)


def _splitmix64(x: Tensor) -> Tensor:
    x = x + (0x9E3779B97F4A7C15 - (1 << 64))
    x = (x ^ _shift(x, 30)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    x = (x ^ _shift(x, 27)) * (0x94D049BB133111EB - (1 << 64))
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64 (torch's own keeps the sign)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
