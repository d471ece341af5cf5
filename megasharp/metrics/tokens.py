"""The figures of every update's tokens: how sure the policy is, and where its probability lies among candidates."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megasharp.ops.read_back import means
from megasharp.ops.segment import segment_mean, segment_sum
from megasharp.types import Maximum, Metrics, TokenInputs


@dataclass(frozen=True, slots=True)
class Diagnostics:
    """What an update's figures tell of: the `candidates` most probable tokens, and `samples` draws of a next token."""

    candidates: int
    samples: int


def token_metrics(x: TokenInputs, candidates: int) -> Metrics:
    """Figures of one micro-batch at the current policy; add those of a step's micro-batches to have the step's.

    Only unmasked tokens count: what a masked one holds need not even be finite.

    - `entropy/policy`: mean over tokens, in nats. `entropy/response_mean`: mean over responses of the mean over their
      tokens (2510.04028 C.5). `entropy/correct`, `entropy/incorrect`: over tokens of correct and of other responses.
    - `candidates/lambda_1` .. `lambda_<candidates>`: response mean of token means of the log-prob of the n-th most
      probable token; `candidates/lambda_sample`: the same of the sampled token (2510.14807 equation 2).
    - `candidates/top1_rate`: share of sampled tokens that are the most probable one.
    - `policy/sampler_gap`: mean |log-prob now - log-prob of the sampler|, in nats.
    - `policy/engine_gap`, `policy/engine_gap_max`: mean and largest |log-prob before the update - the engine's record
      of the policy's own|, in nats.
    """
    assert x.logp_T is not None and x.entropy_T is not None
    assert x.sampler_logp_T is not None and x.policy_logp_T is not None
    kept_K = (x.mask_T > 0).nonzero()[:, 0]
    logp_K, entropy_K = x.logp_T.detach()[kept_K], x.entropy_T.detach()[kept_K]
    correct_K = x.correct_T[kept_K] > 0
    responses = _Responses(x, kept_K)
    engine_gap_K = (x.before_T[kept_K] - x.policy_logp_T[kept_K]).abs()
    sums = {
        "entropy/policy": _sums(entropy_K),
        "entropy/response_mean": responses.sums(entropy_K),
        "entropy/correct": _sums(entropy_K, correct_K),
        "entropy/incorrect": _sums(entropy_K, ~correct_K),
        "policy/sampler_gap": _sums((logp_K - x.sampler_logp_T[kept_K]).abs()),
        "policy/engine_gap": _sums(engine_gap_K),
        **_candidate_sums(x, kept_K, responses, candidates),
    }
    largest = {"policy/engine_gap_max": Maximum(float(engine_gap_K.max()))} if engine_gap_K.numel() else {}
    return {**means(sums), **largest}


# A total and a weight.
_Sums = tuple[Tensor, Tensor]


class _Responses:
    """Means over a micro-batch's responses, each by its own unmasked tokens; a response without any does not count."""

    def __init__(self, x: TokenInputs, kept_K: Tensor) -> None:
        self._seq_K = x.seq_T[kept_K]
        self._count = x.num_sequences
        ones_K = torch.ones_like(self._seq_K, dtype=torch.float64)
        self._present_S = segment_sum(ones_K, self._seq_K, self._count) > 0

    def sums(self, value_K: Tensor) -> _Sums:
        """Of responses' means over tokens; adds up over micro-batches, because responses are never split."""
        mean_S = segment_mean(value_K.double(), self._seq_K, self._count)
        # Without tokens a response's mean is 0.
        return mean_S.sum(), self._present_S.sum()


def _candidate_sums(x: TokenInputs, kept_K: Tensor, responses: _Responses, candidates: int) -> dict[str, _Sums]:
    assert x.logp_T is not None and x.topn_logp_TN is not None and x.is_top1_T is not None
    topn_logp_KN = x.topn_logp_TN.detach()[kept_K]
    lambdas = {f"candidates/lambda_{n + 1}": responses.sums(topn_logp_KN[:, n]) for n in range(candidates)}
    return {
        **lambdas,
        "candidates/lambda_sample": responses.sums(x.logp_T.detach()[kept_K]),
        "candidates/top1_rate": _sums(x.is_top1_T[kept_K]),
    }


def _sums(value_K: Tensor, counts_K: Tensor | None = None) -> _Sums:
    """Over all tokens, or over those that count."""
    counts_K = torch.ones_like(value_K, dtype=torch.bool) if counts_K is None else counts_K
    return torch.where(counts_K, value_K.double(), 0.0).sum(), counts_K.sum()
