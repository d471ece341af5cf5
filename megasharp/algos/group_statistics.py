"""Quantities that several methods share: of a group's responses, of the importance ratio, and of what was recorded.

Of a group: the scored responses' rewards and which of them are correct, the centred rewards, a response's mean
log-prob, and the base of estimators that read which responses are correct and no reward. Of the ratio pi / pi_old, as
the surrogates use it: its bound, its metrics, and a log-prob with its gradient. Rollouts record two log-probs of each
token; `Compared` is the base of methods that compare the policy with one of them.
"""

from __future__ import annotations

from typing import Any, Literal, Self, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from megasharp.algos.base import Method, MethodParams, Needs, ParamsT, TokenMetric
from megasharp.common.records import Group, Outcome, Response, TokenInputs
from megasharp.ops.segment import segment_broadcast, segment_mean, segment_sum

# Of a variance: the number of values minus 1, or the number.
Divisor = Literal["unbiased", "population"]


def is_scored(response: Response) -> bool:
    """Tell if the verdict says something about the policy; an infra failure does not."""
    return response.verdict.outcome is not Outcome.INFRA


def rewards_of(group: Group) -> Tensor:
    """Return the verdicts' rewards of the scored responses, float64 [G]."""
    return torch.tensor([r.verdict.reward for r in group.responses if is_scored(r)], dtype=torch.float64)


def correct_of(group: Group) -> Tensor:
    """Return 1 for each correct and 0 for each other scored response, float64 [G]."""
    correct = [r.verdict.outcome is Outcome.CORRECT for r in group.responses if is_scored(r)]
    return torch.tensor(correct, dtype=torch.float64)


def uniform(rewards_G: Tensor) -> bool:
    """Tell if there is nothing to compare: fewer than two rewards, or all of them equal."""
    # Compared with each other: the mean of equal rewards may differ from them in the last bit.
    return rewards_G.numel() < 2 or bool((rewards_G == rewards_G[0]).all())


def centred(rewards_G: Tensor) -> Tensor:
    """Return the rewards less their mean, [G]; exactly zero in a uniform group."""
    return torch.zeros_like(rewards_G) if uniform(rewards_G) else rewards_G - rewards_G.mean()


def normalized(rewards_G: Tensor, divisor: Divisor, epsilon: float) -> Tensor:
    """Return (r - mean(r)) / (std(r) + epsilon), [G]; zeros in a uniform group."""
    if uniform(rewards_G):
        return torch.zeros_like(rewards_G)
    return centred(rewards_G) / (rewards_G.std(correction=1 if divisor == "unbiased" else 0) + epsilon)


def mean_logp(response: Response) -> float:
    """Return the mean log-prob per token (nats) of a response, as the engine recorded it; 0 without tokens."""
    logp_T = response.completion.of_policy(response.completion.policy_logp)
    return float(logp_T.double().sum()) / max(logp_T.numel(), 1)


class OutcomeEstimator(Method[ParamsT]):
    """Base of estimators that read which responses are correct, and no reward.

    A method that reshapes rewards is refused beside them: they would never see its rewards.
    """

    def refuses(self, name: str, other: Method[Any]) -> str | None:
        """Refuse every method that reshapes rewards, with its parameters as they are."""
        if not other.reshapes_rewards():
            return None
        return "the first reads only which responses are correct, so the second's rewards would have no effect"


LOG_RATIO_BOUND = 20.0


def bounded(logr_T: Tensor) -> Tensor:
    """Clamp log-ratios [T] to [-20, 20], so that one stray token cannot overflow the step; no gradient outside."""
    return logr_T.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def logp_along(x: TokenInputs, logr_T: Tensor) -> Tensor:
    """Return log pi [T] with the gradient of the log-ratio, which other methods may have changed."""
    assert x.logp_T is not None
    return x.logp_T.detach() + (logr_T - logr_T.detach())


def ratio_metrics(x: TokenInputs, logr_T: Tensor) -> dict[str, TokenMetric]:
    """Return `policy/ratio` rho and `policy/kl_old`, rho - 1 - log rho, an estimate of KL(pi_old || pi) in nats.

    `logr_T` [T] is the bounded log rho. Where a method changes the ratio (`gspo`, `bypass`, `casp`), both
    are of that one.
    """
    logr_T = logr_T.detach()
    ratio_T = torch.exp(logr_T)
    return {
        "policy/ratio": TokenMetric(ratio_T, x.mask_T),
        "policy/kl_old": TokenMetric(ratio_T - 1.0 - logr_T, x.mask_T),
    }


def clip_metrics(x: TokenInputs, too_high_T: Tensor, too_low_T: Tensor) -> dict[str, TokenMetric]:
    """Return `policy/clip_high` and `policy/clip_low`, the shares of tokens that a bound acted on; bool [T] each."""
    return {
        "policy/clip_high": TokenMetric(too_high_T.to(x.mask_T.dtype), x.mask_T),
        "policy/clip_low": TokenMetric(too_low_T.to(x.mask_T.dtype), x.mask_T),
    }


class ComparedParams(MethodParams):
    """`against` names the recorded log-probs."""

    against: Literal["policy", "sampler"] | None = Field(
        default=None,
        description="Recorded log-probs that the policy is compared with. policy: the policy's own, of the version "
        "that sampled each token; this corrects staleness and differences between engine and learner, and leaves the "
        "shift of dlc, top_p, top_k and min_p. sampler: those of the distribution that tokens were drawn from; this "
        "undoes that shift too. null: policy where the recipe has dlc, else sampler.",
    )


ComparedT = TypeVar("ComparedT", bound=ComparedParams)


class Compared(Method[ComparedT]):
    """Base of methods that compare the policy with what rollouts recorded of it, or of the sampler."""

    def beside(self, needs: Needs) -> Self:
        """Return this method with `against` settled: policy beside a memory network, whose shift is intended."""
        if self.params.against is not None:
            return self
        against = "sampler" if needs.memory is None else "policy"
        return type(self)(self.params.model_copy(update={"against": against}))

    def needs(self) -> Needs:
        """Ask for the recorded log-probs, the sampler's unless `against` is policy."""
        policy = self.params.against == "policy"
        return Needs(policy_logp=policy, sampler_logp=not policy)

    def recorded(self, x: TokenInputs) -> Tensor:
        """Return the recorded log-probs, [T], nats."""
        logp_T = x.policy_logp_T if self.params.against == "policy" else x.sampler_logp_T
        assert logp_T is not None
        return logp_T


Level = Literal["token", "sequence", "geometric"]


def at_level(value_T: Tensor, x: TokenInputs, level: Level) -> Tensor:
    """Return values [T] by token, summed over each response (sequence), or averaged over it (geometric); [T].

    Only unmasked tokens count in a response. The names are those of the ratio whose log the values are.
    """
    if level == "sequence":
        return segment_broadcast(segment_sum(value_T * x.mask_T, x.seq_T, x.num_sequences), x.seq_T)
    if level == "geometric":
        return segment_broadcast(segment_mean(value_T, x.seq_T, x.num_sequences, x.mask_T), x.seq_T)
    return value_T
