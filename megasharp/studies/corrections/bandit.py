"""Small bandits of several tokens, and the exact expected gradient of any recipe on them.

All responses of `LENGTH` tokens over `VOCABULARY` candidates are enumerated in float64, so an expectation is a sum and
an estimator's bias no estimate. Each problem has a present policy, the policy of an earlier version that sampled, the
noise of an engine that computes it otherwise, and a memory network whose logits DLC subtracts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from megasharp.algos.base import MethodParams, Reduction
from megasharp.algos.build_recipe import build_recipe
from megasharp.common.records import Denominators, MicroBatch, Segments, TokenInputs

VOCABULARY = 4
# How far the sampler is from the policy: standard deviations of logits, and DLC's mu.
STALE, ENGINE, MU = 0.5, 0.1, 0.5


@dataclass(frozen=True, slots=True)
class Situation:
    """The causes for which the sampler is not the present policy."""

    name: str
    stale: bool = False
    engine: bool = False
    dlc: bool = False


SITUATIONS = (
    Situation("on-policy"),
    Situation("engine", engine=True),
    Situation("stale", stale=True, engine=True),
    Situation("dlc", dlc=True),
    Situation("dlc, stale", stale=True, engine=True, dlc=True),
)


@dataclass(frozen=True, slots=True, eq=False)
class Bandit:
    """One problem: logits of the present policy [states, V], recorded log-probs [S, L], rewards less their mean [S].

    A state is the tokens so far; `state_SL` and `token_SL` number states and tokens of every response.
    """

    logits: Tensor
    state_SL: Tensor
    token_SL: Tensor
    policy_logp_SL: Tensor
    sampler_logp_SL: Tensor
    fresh_logp_SL: Tensor
    advantage_S: Tensor

    def logp(self, logits: Tensor) -> Tensor:
        """Return the log-prob of every response's tokens, [S, L]."""
        return logits.log_softmax(-1)[self.state_SL, self.token_SL]

    def gradient(self, probability_S: Tensor) -> Tensor:
        """Return sum_y p(y) A(y) grad log pi(y), [states, V]: the policy gradient over any measure of responses."""
        logits = self.logits.clone().requires_grad_()
        (gradient,) = torch.autograd.grad((probability_S * self.advantage_S * self.logp(logits).sum(1)).sum(), logits)
        return gradient

    @property
    def on_policy(self) -> Tensor:
        """The on-policy gradient: the claim of what is against the sampler."""
        return self.gradient(self.logp(self.logits).sum(1).exp())

    @property
    def shift_kept(self) -> Tensor:
        """The claim of what is against the policy: the present policy times the shift that was recorded.

        The shift is pi_sampler / pi_recorded of each response; without one this is the on-policy gradient.
        """
        shift_S = (self.sampler_logp_SL - self.policy_logp_SL).sum(1)
        return self.gradient((self.logp(self.logits).sum(1) + shift_S).exp())

    @property
    def sampled_afresh(self) -> Tensor:
        """The gradient that sampling anew would give, from the present policy with the memory's logits subtracted."""
        return self.gradient(self.fresh_logp_SL.sum(1).exp())

    def expected(self, names: Sequence[str], params: Mapping[str, MethodParams]) -> Tensor:
        """Return the expectation over the sampler of minus the recipe's gradient, [states, V], by its own code."""
        recipe = build_recipe(names, params, reduction=Reduction.SEQ_MEAN_TOKEN_SUM, constant=1.0, mini_batches=1)
        logits = self.logits.clone().requires_grad_()
        responses, length = self.token_SL.shape
        logp_T = self.logp(logits).flatten()
        constant_T, empty = torch.ones_like(logp_T.detach()), torch.zeros(0, dtype=torch.int64)
        x = TokenInputs(
            mask_T=constant_T,
            seq_T=torch.arange(responses).repeat_interleave(length),
            group_T=torch.zeros(responses * length, dtype=torch.int64),
            reward_T=constant_T,
            correct_T=constant_T,
            group_size_T=constant_T,
            group_correct_T=constant_T,
            num_sequences=responses,
            logp_T=logp_T,
            sampler_logp_T=self.sampler_logp_SL.flatten(),
            policy_logp_T=self.policy_logp_SL.flatten(),
        )
        # Losses here are homogeneous in the advantage, so a response's probability may stand in it.
        advantage_S = self.advantage_S * self.sampler_logp_SL.sum(1).exp()
        micro = MicroBatch(
            tokens_P=empty,
            positions_P=empty,
            segments=Segments(empty, empty, empty),
            rows_T=empty,
            targets_T=empty,
            length_S=torch.full((responses,), float(length), dtype=torch.float64),
            advantage_T=advantage_S.repeat_interleave(length),
            inputs=x,
            sequence_ids=tuple(range(responses)),
        )
        loss, _ = recipe.loss(micro, x, Denominators(1.0, 1.0, 1.0), ())
        (gradient,) = torch.autograd.grad(loss, logits)
        return -gradient


def make_bandit(seed: int, situation: Situation, length: int) -> Bandit:
    """Make a random problem; situations of one seed share the present policy, the noises and the memory."""
    generator = torch.Generator().manual_seed(seed)
    responses = list(product(range(VOCABULARY), repeat=length))
    states = {prefix: n for n, prefix in enumerate(dict.fromkeys(y[:t] for y in responses for t in range(length)))}

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(len(states), VOCABULARY, generator=generator, dtype=torch.float64)

    logits, stale, engine, memory = normal(1.0), normal(STALE), normal(ENGINE), normal(1.0)
    # A memory network has learned what the policy says, more or less.
    memory = MU * (logits + memory) * situation.dlc
    recorded = logits + stale * situation.stale + engine * situation.engine
    state_SL = torch.tensor([[states[y[:t]] for t in range(length)] for y in responses])
    token_SL = torch.tensor(responses)
    reward_S = torch.rand(len(responses), generator=generator, dtype=torch.float64)

    def logp(of: Tensor) -> Tensor:
        return of.log_softmax(-1)[state_SL, token_SL]

    return Bandit(
        logits=logits,
        state_SL=state_SL,
        token_SL=token_SL,
        policy_logp_SL=logp(recorded),
        sampler_logp_SL=logp(recorded - memory),
        fresh_logp_SL=logp(logits - memory),
        advantage_S=reward_S - reward_S.mean(),
    )
