"""Entropy bonus, entropy penalty, differential entropy: the gradient through the whole distribution."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from cases import each_case
from harness import HORIZON, Answer, Case, Complex, check, clip, each_step, maximum
from test_base import grpo_advantages

from megasharp.algos.base import MethodParams, Reduction
from megasharp.algos.differential_entropy import DifferentialEntropyParams
from megasharp.algos.entropy_bonus import EntropyBonusParams
from megasharp.algos.entropy_penalty import EntropyPenaltyParams

CASES: dict[str, tuple[MethodParams, Callable[[Answer], float]]] = {
    "entropy_bonus": (EntropyBonusParams(coefficient=0.3), lambda a: -0.3),
    "entropy_penalty": (EntropyPenaltyParams(coefficient=0.3), lambda a: 0.3),
    "differential_entropy": (
        DifferentialEntropyParams(correct=0.3, incorrect=0.2),
        lambda a: -0.3 if a.correct else 0.2,
    ),
}


@each_step
@each_case("reduction", Reduction)
@each_case("name", CASES)
def test_entropy_term(case: Case, name: str, reduction: Reduction) -> None:
    params, sign = CASES[name]
    sequences = sum(1 for a in case.scored if a.length)

    def coefficient(a: Answer) -> float:
        return {
            Reduction.TOKEN_MEAN: 1.0 / case.tokens,
            Reduction.SEQ_MEAN_TOKEN_MEAN: 1.0 / (sequences * max(a.length, 1)),
            Reduction.SEQ_MEAN_TOKEN_SUM: 1.0 / sequences,
            Reduction.TOKEN_SUM_OVER_CONSTANT: 1.0 / (sequences * HORIZON),
        }[reduction]

    def oracle(c: Case, z: Complex) -> Any:
        logp, old, entropy, advantage = c.logp(z), c.logp(c.z_old), c.entropy(z), grpo_advantages(c)
        total = 0.0
        for a in c.scored:
            for t in range(a.start, a.stop):
                rho = np.exp(logp[..., t] - old[t])
                policy = maximum(-advantage[a] * rho, -advantage[a] * clip(rho, 0.8, 1.2))
                total = total + coefficient(a) * (policy + sign(a) * entropy[..., t])
        return total

    check(case, oracle, ["grpo", name], {name: params}, reduction)
