"""Estimators of the baselines: each formula in plain NumPy, under PPO's clip and the reduction it is used with."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
from cases import each_case
from harness import HORIZON, Answer, Case, Complex, check, clip, each_step, maximum

from megasharp.algos.base import MethodParams
from megasharp.algos.passk_training import PassKTrainingParams
from megasharp.algos.pkpo import PKPOParams
from megasharp.algos.reinforce_pp_baseline import ReinforcePPBaselineParams
from megasharp.algos.w_reinforce import WReinforceParams

Advantages = dict[Answer, float]
Coefficient = Callable[[Case], float]


def ppo(case: Case, z: Complex, advantages: Advantages, coefficient: float):
    """Sum over scored tokens of coefficient * max(-A rho, -A clip(rho, 0.8, 1.2))."""
    logp, old = case.logp(z), case.logp(case.z_old)
    total = 0.0
    for answer in case.scored:
        A = advantages[answer]
        for t in range(answer.start, answer.stop):
            rho = np.exp(logp[..., t] - old[t])
            total = total + coefficient * maximum(-A * rho, -A * clip(rho, 0.8, 1.2))
    return total


def check_estimator(
    case: Case,
    name: str,
    formula: Callable[[Case], Advantages],
    params: MethodParams | None = None,
    coefficient: Coefficient = lambda case: 1.0 / case.tokens,
) -> None:
    tables = {} if params is None else {name: params}
    check(case, lambda c, z: ppo(c, z, formula(c), coefficient(c)), [name], tables)


def by_group(formula: Callable[[list[Answer], Answer], float]) -> Callable[[Case], Advantages]:
    """From the formula of one response in its group."""
    return lambda case: {answer: formula(group, answer) for group in case.groups for answer in group}


def others(group: list[Answer], answer: Answer) -> list[float]:
    return [other.reward for other in group if other is not answer]


def centred(group: list[Answer], answer: Answer) -> float:
    return answer.reward - float(np.mean([a.reward for a in group]))


@each_step
def test_dr_grpo(case: Case) -> None:
    def per_token(c: Case) -> float:
        return 1.0 / (sum(1 for a in c.scored if a.length) * HORIZON)

    check_estimator(case, "dr_grpo", by_group(centred), coefficient=per_token)


@each_step
def test_rloo(case: Case) -> None:
    def formula(group: list[Answer], answer: Answer) -> float:
        return answer.reward - float(np.mean(others(group, answer))) if len(group) > 1 else 0.0

    check_estimator(case, "rloo", by_group(formula))


@each_step
@each_case(("std", "ddof"), [("unbiased", 1), ("population", 0)])
def test_reinforce_pp_baseline(case: Case, std: str, ddof: int) -> None:
    def formula(c: Case) -> Advantages:
        x = by_group(centred)(c)
        tokens = [x[answer] for answer in c.scored for _ in range(answer.length)]
        mu, var = np.mean(tokens), np.var(tokens, ddof=ddof)
        return {answer: float((value - mu) / np.sqrt(var + 1e-8)) for answer, value in x.items()}

    check_estimator(case, "reinforce_pp_baseline", formula, ReinforcePPBaselineParams(std=std))


@each_step
@each_case(
    ("name", "positive", "negative", "params"),
    [
        ("psr", 1.0, 0.0, None),
        ("nsr", 0.0, -1.0, None),
        ("w_reinforce", 0.1, -1.0, None),
        ("w_reinforce", 0.7, -1.0, WReinforceParams(positive_weight=0.7)),
    ],
)
def test_by_outcome(case: Case, name: str, positive: float, negative: float, params) -> None:
    check_estimator(case, name, by_group(lambda group, answer: positive if answer.correct else negative), params)


@each_step
@each_case("name", ["passk_training", "gr_pkpo"])
@each_case("k", [1, 2, 4])
def test_passk_training(case: Case, name: str, k: int) -> None:
    def comb(n: int, chosen: int) -> float:
        return math.comb(n, chosen) if n >= 0 else 0.0

    def formula(group: list[Answer], answer: Answer) -> float:
        N, c = len(group), sum(a.correct for a in group)
        size = min(k, N)
        R = 1.0 - comb(N - c, size) / comb(N, size)
        sigma = math.sqrt(R * (1.0 - R))
        if answer.correct:
            return (1.0 - R) / (sigma + 1e-6)
        return (1.0 - R - comb(N - c - 1, size - 1) / comb(N - 1, size - 1)) / (sigma + 1e-6)

    check_estimator(case, name, by_group(formula), PassKTrainingParams(k=k))


@each_step
@each_case("k", [2, 3, 4])
@each_case("form", ["paper", "fork"])
def test_pkpo(case: Case, k: int, form: str) -> None:
    """Over all subsets of k responses: what a response adds to the best of the others in it."""

    def formula(group: list[Answer], answer: Answer) -> float:
        size = min(k, len(group))
        if size < 2:
            return 0.0
        gain = 0.0
        for subset in itertools.combinations(others(group, answer), size - 1):
            gain += max(answer.reward, *subset) - max(subset)
        scale = 1.0 if form == "paper" else len(group) / size
        return scale * gain / math.comb(len(group), size)

    check_estimator(case, "pkpo", by_group(formula), PKPOParams(k=k, form=form))


@each_step
def test_grpo_best_of(case: Case) -> None:
    def formula(group: list[Answer], answer: Answer) -> float:
        if len(group) < 2:
            return 0.0
        return max(a.reward for a in group) - max(others(group, answer))

    check_estimator(case, "grpo_best_of", by_group(formula))
