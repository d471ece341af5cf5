"""One state's next-token distribution: distinct samples of it, Lemma 2 by autograd, and repeated updates.

A softmax over V candidates with free logits; an update on a sampled token y with advantage A moves the logits by
`lr * A * (e_y - p)`, the gradient of `A * gamma` at gamma = 1. The start is Zipf-like: p_v proportional to
(v + 1)^-1.5, so that candidate 0 is rank 1. Suffixes as in `megasharp.studies.softmax`.

Proposition 3 is applied to two distributions of one entropy, as in 2510.14807 figure 4c. The figure's own numbers are
not in the paper's text. Ours: a plateau, three equally probable candidates and no others, and a peak, one dominant
candidate over an even tail, its height solved for the same entropy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megasharp.ops.segment import expected_distinct
from megasharp.studies.softmax import Floats, sample, softmax, uniforms

PLATEAU = 3


def plateau() -> Floats:
    """Return three candidates with a third each, [V]; entropy ln 3."""
    return np.concatenate([np.full(PLATEAU, 1.0 / PLATEAU), np.zeros(VOCABULARY - PLATEAU)])


def peak(entropy: float = math.log(PLATEAU)) -> Floats:
    """Return one candidate above an even tail of the others, with the given entropy in nats (at most ln V), [V]."""
    low, high = 1.0 / VOCABULARY, 1.0
    for _ in range(200):
        middle = (low + high) / 2.0
        rest = 1.0 - middle
        spread = rest * math.log(rest / (VOCABULARY - 1)) if rest > 0.0 else 0.0
        # The entropy falls as the top grows from 1/V to 1.
        low, high = (middle, high) if -middle * math.log(middle) - spread > entropy else (low, middle)
    return with_top(low)


def with_top(top: float) -> Floats:
    """Return a distribution whose rank 1 has `top` and whose others share the rest evenly, [V]."""
    return np.concatenate([[top], np.full(VOCABULARY - 1, (1.0 - top) / (VOCABULARY - 1))])


def distinct(p_V: Floats, samples: int) -> float:
    """Return the expected number of distinct tokens among `samples` (Proposition 3), by `megasharp.ops.segment`."""
    return float(expected_distinct(torch.from_numpy(p_V).log(), samples))


def drawn_distinct(p_V: Floats, samples: int, draws: int, seed: int) -> float:
    """The same by simulation: the mean number of distinct tokens over `draws` sets of `samples` tokens."""
    counts_DV = np.random.default_rng(seed).multinomial(samples, p_V / p_V.sum(), size=draws)
    return float((counts_DV > 0).sum(axis=-1).mean())


def budgets(p_V: Floats, samples: Sequence[int]) -> list[float]:
    """`distinct` for several numbers of samples."""
    return [distinct(p_V, k) for k in samples]


# All ours: the paper's lemma is about one step and has no experiment of this kind.
VOCABULARY = 50
EXPONENT = 1.5
REPEATED_STEPS, REPEATED_LR = 60, 0.2
SAMPLED_STEPS, SAMPLED_LR = 2000, 0.3


@dataclass(frozen=True, slots=True, eq=False)
class LemmaTrials:
    """Random distributions and penalised tokens. `error`: the largest gap between autograd and -p_y p_v.

    Shares over trials where y is not rank 1: rank 1 gets the largest increase of its logit, of its probability.
    `losing`: share of the alternatives whose probability falls although their logit rises.
    """

    error: float
    logit_share: float
    probability_share: float
    losing: float


def start_logits() -> Floats:
    """Return log-probs of the Zipf-like start, up to a constant."""
    return np.asarray(-EXPONENT * np.log(np.arange(VOCABULARY) + 1.0))


def penalty_gradient(logit_SV: Tensor, token_S: Tensor) -> Tensor:
    """Return by autograd the gradient of -p_y with respect to the logits: a negative advantage moves along it."""
    logit_SV = logit_SV.detach().requires_grad_()
    penalised_S = torch.softmax(logit_SV, dim=-1).gather(-1, token_S[:, None])
    (gradient_SV,) = torch.autograd.grad(-penalised_S.sum(), logit_SV)
    return gradient_SV


def probability_change(logit_SV: Tensor, change_SV: Tensor) -> Tensor:
    """Return the first-order change of probabilities along `change_SV`: p_v (dz_v - sum_u p_u dz_u)."""
    p_SV = torch.softmax(logit_SV, dim=-1)
    return p_SV * (change_SV - (p_SV * change_SV).sum(dim=-1, keepdim=True))


def lemma_trials(seed: int, trials: int = 2000) -> LemmaTrials:
    """Try Lemma 2 on random distributions of several sharpnesses, with a random token penalised in each."""
    rng = np.random.default_rng(seed)
    scale_S1 = rng.uniform(0.5, 4.0, size=(trials, 1))
    logit_SV = torch.from_numpy(scale_S1 * rng.normal(size=(trials, VOCABULARY)))
    token_S = torch.from_numpy(rng.integers(VOCABULARY, size=trials))
    gradient_SV = penalty_gradient(logit_SV, token_S)
    p_SV = torch.softmax(logit_SV, dim=-1)
    chosen_SV = torch.nn.functional.one_hot(token_S, VOCABULARY).bool()
    expected_SV = (p_SV * chosen_SV).sum(-1, keepdim=True) * p_SV
    change_SV = probability_change(logit_SV, gradient_SV)
    lower_S = p_SV.argmax(-1) != token_S
    top_S = p_SV.argmax(-1)[lower_S]
    return LemmaTrials(
        error=float((gradient_SV - expected_SV)[~chosen_SV].abs().max()),
        logit_share=_share(gradient_SV[lower_S].argmax(-1) == top_S),
        probability_share=_share(change_SV[lower_S].argmax(-1) == top_S),
        losing=_share(change_SV[lower_S][~chosen_SV[lower_S]] < 0),
    )


def _share(hits: Tensor) -> float:
    return float(hits.double().mean())


def repeated_penalty(rank: int) -> Floats:
    """Penalise the token that holds this rank (1 is the most probable) at every step; return the policies [T, V]."""
    logit_V = start_logits()
    policies = [softmax(logit_V)]
    for _ in range(REPEATED_STEPS):
        token = np.argsort(-policies[-1], kind="stable")[rank - 1]
        logit_V = logit_V - REPEATED_LR * (np.eye(VOCABULARY)[token] - policies[-1])
        policies.append(softmax(logit_V))
    return np.stack(policies)


def on_policy(advantage: float, seeds: Sequence[int]) -> Floats:
    """Update on one sampled token per step, always with the same advantage; return the policies [T, R, V].

    Every token is equally right (or wrong), so the expected update, sum_y p_y (e_y - p), is zero: all change comes from
    sampling.
    """
    uniform_RTG = uniforms(seeds, SAMPLED_STEPS, 1)
    logit_RV = np.tile(start_logits(), (len(seeds), 1))
    policies = [softmax(logit_RV)]
    for step in range(SAMPLED_STEPS):
        token_R = sample(policies[-1], uniform_RTG[:, step])[:, 0]
        logit_RV = logit_RV + SAMPLED_LR * advantage * (np.eye(VOCABULARY)[token_R] - policies[-1])
        policies.append(softmax(logit_RV))
    return np.stack(policies)
