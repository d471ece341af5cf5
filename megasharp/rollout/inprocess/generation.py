"""Drawing tokens from logits.

`draw` inverts the cumulative distribution at a uniform number hashed from (seed, position). There is no generator
state, so a sample depends on its seed and its logits and on nothing else in the batch.

With a memory network, tokens are drawn from softmax((policy - mu * memory) / T): distribution-level calibration (DLC),
2601.15609 section 4.2. [PAPER] the subtraction of logits at every token, at rollout only. [DERIVED] that T divides the
whole difference, and that top-k, top-p and min-p cut what comes out of it: the paper gives no order. [OURS]
`plausible`, a guard that is NOT in the paper: it bars tokens by the policy's own probabilities before the subtraction,
which lifts a token that the memory finds almost impossible however unlikely the policy finds it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megasharp.common.errors import UserError
from megasharp.common.records import Plausible, SamplingParams
from megasharp.ops.uniform import uniforms

# Elements of a [rows, vocabulary] block worked on at a time; the sums are float64, so this bounds the memory.
BLOCK_ELEMENTS = 1 << 22


@dataclass(frozen=True, slots=True, eq=False)
class Logits:
    """Both networks' logits of the next token, [S, V] each; `memory_SV` is None without a memory network.

    `experts_SLK`: where the policy sent the tokens behind which they stand, [S, layers, per_token]; None where nobody
    records it.
    """

    policy_SV: Tensor
    memory_SV: Tensor | None = None
    experts_SLK: Tensor | None = None

    def select(self, rows: Tensor) -> Logits:
        """Select rows of both networks (int64 indices, repeats allowed)."""
        memory_SV = None if self.memory_SV is None else self.memory_SV.index_select(0, rows)
        experts_SLK = None if self.experts_SLK is None else self.experts_SLK.index_select(0, rows)
        return Logits(self.policy_SV.index_select(0, rows), memory_SV, experts_SLK)

    def put(self, rows: Tensor, other: Logits) -> None:
        """Overwrite rows (int64 indices) with those of `other`, in order."""
        self.policy_SV[rows] = other.policy_SV
        if self.memory_SV is not None and other.memory_SV is not None:
            self.memory_SV[rows] = other.memory_SV
        if self.experts_SLK is not None and other.experts_SLK is not None:
            self.experts_SLK[rows] = other.experts_SLK

    def block(self, start: int, end: int) -> Logits:
        """Rows `[start, end)`, not copied."""
        return Logits(
            self.policy_SV[start:end],
            None if self.memory_SV is None else self.memory_SV[start:end],
            None if self.experts_SLK is None else self.experts_SLK[start:end],
        )


@dataclass(frozen=True, slots=True, eq=False)
class MemoryDraw:
    """The memory network's effect on one token per row, [S] each.

    `logp_S` float32 is its own log-prob of the token. Of the distributions before and after its subtraction (and the
    guard), before truncation: `argmax_moved_S` bool, whether their likeliest tokens differ, and `kl_S` float32,
    KL(calibrated || policy) in nats.
    """

    logp_S: Tensor
    argmax_moved_S: Tensor
    kl_S: Tensor

    def apply(self, change: Callable[[Tensor], Tensor]) -> MemoryDraw:
        """Every tensor changed alike."""
        return MemoryDraw(change(self.logp_S), change(self.argmax_moved_S), change(self.kl_S))


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """The policy's alternatives: `entropy_S` (nats) and `top_logp_SN`, the likeliest first, float32."""

    entropy_S: Tensor
    top_logp_SN: Tensor

    def apply(self, change: Callable[[Tensor], Tensor]) -> Candidates:
        """Every tensor changed alike."""
        return Candidates(change(self.entropy_S), change(self.top_logp_SN))


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """One token per row: `tokens_S` int64; the log-probs float32.

    `memory` is None without a memory network, `candidates` where `SamplingParams.record_top` does not ask for them.
    `experts_SLK` are those of the token BEFORE, which was read for this one; None where nobody records them.
    """

    tokens_S: Tensor
    sampler_logp_S: Tensor
    policy_logp_S: Tensor
    memory: MemoryDraw | None = None
    candidates: Candidates | None = None
    experts_SLK: Tensor | None = None

    def apply(self, change: Callable[[Tensor], Tensor]) -> Draw:
        """Every tensor changed alike."""
        memory = None if self.memory is None else self.memory.apply(change)
        candidates = None if self.candidates is None else self.candidates.apply(change)
        experts_SLK = None if self.experts_SLK is None else change(self.experts_SLK)
        columns = change(self.tokens_S), change(self.sampler_logp_S), change(self.policy_logp_S)
        return Draw(*columns, memory, candidates, experts_SLK)

    def columns(self) -> list[Tensor]:
        """Every tensor; in the same order for all draws of one kind of sampling."""
        memory = [self.memory.logp_S, self.memory.argmax_moved_S, self.memory.kl_S] if self.memory else []
        candidates = [self.candidates.entropy_S, self.candidates.top_logp_SN] if self.candidates else []
        experts = [] if self.experts_SLK is None else [self.experts_SLK]
        return [self.tokens_S, self.sampler_logp_S, self.policy_logp_S, *memory, *candidates, *experts]


def join(draws: Sequence[Draw], combine: Callable[[list[Tensor]], Tensor]) -> Draw:
    """Join draws, which have no experts yet, tensor by tensor, along S or along a new dimension, as `combine` does it.

    Either all of them come with a memory network or none; so it is with candidates.
    """
    memory = [part.memory for part in draws if part.memory is not None]
    candidates = [part.candidates for part in draws if part.candidates is not None]
    assert len(memory) in (0, len(draws)) and len(candidates) in (0, len(draws))
    joined_memory, joined_candidates = None, None
    if memory:
        joined_memory = MemoryDraw(
            combine([part.logp_S for part in memory]),
            combine([part.argmax_moved_S for part in memory]),
            combine([part.kl_S for part in memory]),
        )
    if candidates:
        joined_candidates = Candidates(
            combine([part.entropy_S for part in candidates]), combine([part.top_logp_SN for part in candidates])
        )
    return Draw(
        combine([part.tokens_S for part in draws]),
        combine([part.sampler_logp_S for part in draws]),
        combine([part.policy_logp_S for part in draws]),
        joined_memory,
        joined_candidates,
    )


def split(drawn: Draw, lengths: list[int]) -> list[Draw]:
    """Cut a `Draw` of [T] into parts that follow each other, not copied."""
    memory: list[MemoryDraw] | list[None] = [None] * len(lengths)
    candidates: list[Candidates] | list[None] = [None] * len(lengths)
    if drawn.memory is not None:
        effect = (drawn.memory.logp_S, drawn.memory.argmax_moved_S, drawn.memory.kl_S)
        memory = [MemoryDraw(*parts) for parts in zip(*(torch.split(each, lengths) for each in effect), strict=True)]
    if drawn.candidates is not None:
        both = (drawn.candidates.entropy_S, drawn.candidates.top_logp_SN)
        candidates = [Candidates(*parts) for parts in zip(*(torch.split(each, lengths) for each in both), strict=True)]
    columns = (drawn.tokens_S, drawn.sampler_logp_S, drawn.policy_logp_S)
    experts: Sequence[Tensor | None] = [None] * len(lengths)
    if drawn.experts_SLK is not None:
        experts = torch.split(drawn.experts_SLK, lengths)
    parts = zip(*(torch.split(each, lengths) for each in columns), memory, candidates, experts, strict=True)
    return [Draw(*part) for part in parts]


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
    if not 0.0 <= sampling.min_p <= 1.0:
        raise UserError(f"sampling.min_p is {sampling.min_p}; it must be in [0, 1]")
    if not all(sampling.stop):
        raise UserError("sampling.stop holds an empty string; leave it out")
    if sampling.record_top is not None and sampling.record_top < 1:
        raise UserError(f"sampling.record_top is {sampling.record_top}; it must be at least 1")
    if sampling.memory_mu is not None and not 0.0 <= sampling.memory_mu < float("inf"):
        raise UserError(f"sampling.memory_mu is {sampling.memory_mu}; it must be 0 or above, and finite")
    if sampling.plausible is not None:
        _check_guard(sampling.plausible)


def _check_guard(guard: Plausible) -> None:
    if (guard.min_p is None) == (guard.top_k is None):
        raise UserError("sampling.plausible must name one of min_p and top_k")
    if guard.min_p is not None and not 0.0 < guard.min_p <= 1.0:
        raise UserError(f"sampling.plausible.min_p is {guard.min_p}; it must be in (0, 1]")
    if guard.top_k is not None and guard.top_k < 1:
        raise UserError(f"sampling.plausible.top_k is {guard.top_k}; it must be at least 1")


def draw(logits: Logits, seeds_S: Tensor, positions: Tensor | int, sampling: SamplingParams) -> Draw:
    """Draw response token number `positions` of every row; `seeds_S` int64 [S], as `positions` where it is a tensor.

    `policy_logp` and `memory_logp` are each network's own at the sampling temperature over the whole vocabulary.
    `sampler_logp` is that of the distribution drawn from: after the memory's subtraction, the plausibility guard,
    top-k, top-p and then min-p, with what is left renormalised. Greedy takes the largest (policy - mu * memory);
    log-probs are then at temperature 1, without truncation.
    """
    rows, vocabulary = logits.policy_SV.shape
    step = max(1, BLOCK_ELEMENTS // vocabulary)
    uniform_S = uniforms(seeds_S, positions)
    starts = range(0, max(rows, 1), step)
    blocks = [_draw_block(logits.block(i, i + step), uniform_S[i : i + step], sampling) for i in starts]
    drawn = blocks[0] if len(blocks) == 1 else join(blocks, torch.cat)
    return replace(drawn, experts_SLK=logits.experts_SLK)


def _draw_block(logits: Logits, uniform_S: Tensor, sampling: SamplingParams) -> Draw:
    policy_SV = _log_probs(logits.policy_SV, sampling)
    memory_SV = None if logits.memory_SV is None else _log_probs(logits.memory_SV, sampling)
    sampler_SV = policy_SV if sampling.memory_mu is None else _calibrated(policy_SV, memory_SV, sampling)
    tokens_S, sampler_S = _choose(sampler_SV, uniform_S, sampling)
    memory = None
    if memory_SV is not None:
        moved_S = sampler_SV.argmax(dim=-1) != policy_SV.argmax(dim=-1)
        # Tokens that the guard masks have probability 0; their 0 * -inf would be NaN, so they are left out of the sum.
        terms_SV = sampler_SV.exp() * (sampler_SV - policy_SV)
        kl_S = terms_SV.masked_fill_(sampler_SV == float("-inf"), 0.0).sum(dim=-1)
        memory = MemoryDraw(_at(memory_SV, tokens_S).float(), moved_S, kl_S.float())
    candidates = None
    if sampling.record_top is not None:
        top_SN = policy_SV.topk(min(sampling.record_top, policy_SV.shape[1]), dim=-1).values
        candidates = Candidates(torch.special.entr(policy_SV.exp()).sum(dim=-1).float(), top_SN.float())
    return Draw(tokens_S, sampler_S.float(), _at(policy_SV, tokens_S).float(), memory, candidates)


def _log_probs(logits_SV: Tensor, sampling: SamplingParams) -> Tensor:
    """float64, at the sampling temperature; at 1 for greedy."""
    wide = logits_SV.to(torch.float64)
    return torch.log_softmax(wide / sampling.temperature if sampling.temperature else wide, dim=-1)


def _calibrated(policy_SV: Tensor, memory_SV: Tensor | None, sampling: SamplingParams) -> Tensor:
    """Log-probs of softmax((z_policy - mu z_memory) / T), from both networks' log-probs at T.

    Exact: log-probs at T are logits / T up to a constant per row, and softmax does not see constants.
    """
    assert sampling.memory_mu is not None and memory_SV is not None, "the engine refuses a mu without a memory"
    difference_SV = policy_SV - sampling.memory_mu * memory_SV
    if sampling.plausible is not None:
        difference_SV.masked_fill_(policy_SV < _least_plausible(policy_SV, sampling.plausible), float("-inf"))
    return torch.log_softmax(difference_SV, dim=-1)


def _least_plausible(policy_SV: Tensor, guard: Plausible) -> Tensor:
    """The log-prob [S, 1] that the guard asks of a token, from the policy's own at the temperature."""
    if guard.min_p is not None:
        return policy_SV.amax(dim=-1, keepdim=True) + math.log(guard.min_p)
    assert guard.top_k is not None, "checked with the parameters"
    return policy_SV.topk(min(guard.top_k, policy_SV.shape[1]), dim=-1).values[:, -1:]


def _choose(logp_SV: Tensor, uniform_S: Tensor, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
    """One token per row from `logp_SV`, and the log-prob it was drawn with."""
    greedy = sampling.temperature == 0.0
    truncated = sampling.top_p < 1.0 or 0 < sampling.top_k < logp_SV.shape[1] or sampling.min_p > 0.0
    if truncated and not greedy:
        return _choose_truncated(logp_SV, uniform_S, sampling)
    tokens_S = logp_SV.argmax(dim=-1) if greedy else _invert(logp_SV.exp().cumsum(dim=-1), uniform_S)
    return tokens_S, _at(logp_SV, tokens_S)


def _choose_truncated(logp_SV: Tensor, uniform_S: Tensor, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
    """Among the most likely tokens only; ties go to the lower token id."""
    ranked_SV, token_of_rank_SV = logp_SV.sort(dim=-1, descending=True, stable=True)
    if sampling.top_k:
        ranked_SV = ranked_SV[:, : sampling.top_k]
    probs_SV = ranked_SV.exp()
    cumulative_SV = probs_SV.cumsum(dim=-1)
    before_SV = torch.cat([torch.zeros_like(cumulative_SV[:, :1]), cumulative_SV[:, :-1]], dim=-1)
    kept_SV = before_SV < sampling.top_p * cumulative_SV[:, -1:]
    if sampling.min_p:
        kept_SV &= probs_SV >= sampling.min_p * probs_SV[:, :1]
    # Past the last kept rank the sum stays flat, so the inversion cannot land there.
    cumulative_SV = cumulative_SV.where(kept_SV, 0.0).cummax(dim=-1).values
    rank_S = _invert(cumulative_SV, uniform_S)
    return _at(token_of_rank_SV, rank_S), _at(ranked_SV, rank_S) - cumulative_SV[:, -1].log()


def _at(values_SV: Tensor, index_S: Tensor) -> Tensor:
    """[S]: each row's value at its index."""
    return values_SV.gather(1, index_S[:, None]).squeeze(1)


def _invert(cumulative_SV: Tensor, uniform_S: Tensor) -> Tensor:
    """The first index whose cumulative sum exceeds `uniform` times the total; its own mass is never zero."""
    target_S = uniform_S * cumulative_SV[:, -1]
    index_S = torch.searchsorted(cumulative_SV, target_S[:, None], right=True).squeeze(1)
    # Only rows of NaN get past the end; the caller reports those by their log-probs.
    return index_S.clamp_(max=cumulative_SV.shape[1] - 1)
