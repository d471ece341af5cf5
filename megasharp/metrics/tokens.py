"""The figures of every update's tokens: how sure the policy is, and where its probability lies among candidates."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megasharp.ops.segment import segment_mean, segment_sum
from megasharp.types import Maximum, Mean, Metrics, TokenInputs


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
    kept = x.mask_T > 0
    logp_T, entropy_T = x.logp_T.detach()[kept], x.entropy_T.detach()[kept]
    correct_T = x.correct_T[kept] > 0
    responses = _Responses(x, kept)
    engine_gap_T = (x.before_T[kept] - x.policy_logp_T[kept]).abs()
    return {
        "entropy/policy": _mean(entropy_T),
        "entropy/response_mean": responses.mean(entropy_T),
        "entropy/correct": _mean(entropy_T[correct_T]),
        "entropy/incorrect": _mean(entropy_T[~correct_T]),
        "policy/sampler_gap": _mean((logp_T - x.sampler_logp_T[kept]).abs()),
        "policy/engine_gap": _mean(engine_gap_T),
        **({"policy/engine_gap_max": Maximum(float(engine_gap_T.max()))} if engine_gap_T.numel() else {}),
        **_candidate_metrics(x, kept, responses, candidates),
    }


class _Responses:
    """Means over a micro-batch's responses, each by its own unmasked tokens; a response without any does not count."""

    def __init__(self, x: TokenInputs, kept: Tensor) -> None:
        self._seq_T = x.seq_T[kept]
        self._count = x.num_sequences
        ones_T = torch.ones_like(self._seq_T, dtype=torch.float64)
        self._present_S = segment_sum(ones_T, self._seq_T, self._count) > 0

    def mean(self, value_T: Tensor) -> Mean:
        """Mean over responses of token means; adds up over micro-batches, because responses are never split."""
        mean_S = segment_mean(value_T.double(), self._seq_T, self._count)
        return Mean(float(mean_S[self._present_S].sum()), float(self._present_S.sum()))


def _candidate_metrics(x: TokenInputs, kept: Tensor, responses: _Responses, candidates: int) -> Metrics:
    assert x.logp_T is not None and x.topn_logp_TN is not None and x.is_top1_T is not None
    topn_logp_TN = x.topn_logp_TN.detach()[kept]
    lambdas = {f"candidates/lambda_{n + 1}": responses.mean(topn_logp_TN[:, n]) for n in range(candidates)}
    return {
        **lambdas,
        "candidates/lambda_sample": responses.mean(x.logp_T.detach()[kept]),
        "candidates/top1_rate": _mean(x.is_top1_T[kept]),
    }


def _mean(value_T: Tensor) -> Mean:
    return Mean(float(value_T.double().sum()), float(value_T.numel()))
