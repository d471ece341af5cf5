"""Reshaped rewards and dropped groups, each formula in plain NumPy, under GRPO and PPO's clip."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from cases import each_case
from harness import Answer, Case, Complex, check, clip, each_step, maximum, minimum, run

from megasharp.algos.base import MethodParams
from megasharp.algos.clip import ClipParams
from megasharp.algos.difficulty_filter import DifficultyFilterParams
from megasharp.algos.soft_overlong import SoftOverlongParams
from megasharp.algos.unlikeliness import UnlikelinessParams

Rewards = Callable[[Case, list[Answer]], list[float]]
Groups = Callable[[Case], list[list[Answer]]]


def loss(
    case: Case,
    z: Complex,
    rewards: Rewards,
    groups: Groups = lambda case: case.groups,
    bounds: tuple[float, float] = (0.2, 0.2),
    dual: float = np.inf,
):
    """GRPO on these groups and rewards, a token mean over their tokens."""
    logp, old = case.logp(z), case.logp(case.z_old)
    kept = groups(case)
    tokens = sum(answer.length for group in kept for answer in group)
    total = 0.0 * logp[..., 0]
    for group in kept:
        values = rewards(case, group)
        uniform = len(set(values)) == 1
        for answer, value in zip(group, values, strict=True):
            A = 0.0 if uniform else (value - np.mean(values)) / (np.std(values, ddof=1) + 1e-6)
            for t in range(answer.start, answer.stop):
                rho = np.exp(logp[..., t] - old[t])
                term = maximum(-A * rho, -A * clip(rho, 1 - bounds[0], 1 + bounds[1]))
                total = total + (minimum(term, -A * dual + 0 * rho) if A < 0 and dual < np.inf else term) / tokens
    return total


def verdicts(case: Case, group: list[Answer]) -> list[float]:
    return [answer.reward for answer in group]


def overlong(max_tokens: int, cache_tokens: int, factor: float) -> Rewards:
    def penalty(length: int) -> float:
        if length <= max_tokens - cache_tokens:
            return 0.0
        return -factor if length > max_tokens else (max_tokens - cache_tokens - length) / cache_tokens * factor

    return lambda case, group: [answer.reward + penalty(answer.length) for answer in group]


@each_step
@each_case("form", ["code", "paper"])
def test_unlikeliness(case: Case, form: str) -> None:
    def rewards(c: Case, group: list[Answer]) -> list[float]:
        likelihood = [np.mean(c.engine_logp[a.start : a.stop]) if a.length else 0.0 for a in group]
        G, found = len(group), []
        for answer, own in zip(group, likelihood, strict=True):
            less_likely = sum(other < own for other in likelihood)
            more_likely = G - 1 - less_likely
            share = less_likely / G if form == "code" else (G - more_likely) / G
            found.append(answer.reward * (1 - 0.4 * share))
        return found

    params = {"unlikeliness": UnlikelinessParams(beta=0.4, form=form)}
    check(case, lambda c, z: loss(c, z, rewards), ["grpo", "unlikeliness"], params)


@each_step
@each_case("factor", [1.0, 0.5])
def test_soft_overlong(case: Case, factor: float) -> None:
    params = {"soft_overlong": SoftOverlongParams(max_tokens=6, cache_tokens=4, factor=factor)}
    check(case, lambda c, z: loss(c, z, overlong(6, 4, factor)), ["grpo", "soft_overlong"], params)


def differing(case: Case) -> list[list[Answer]]:
    return [group for group in case.groups if 0 < sum(a.correct for a in group) < len(group)]


@each_step
def test_dynamic_sampling(case: Case) -> None:
    assert 0 < len(differing(case)) < len(case.groups)
    check(case, lambda c, z: loss(c, z, verdicts, differing), ["grpo", "dynamic_sampling"])


@each_step
@each_case(
    "params",
    [
        DifficultyFilterParams(low=0.25, high=0.7),
        DifficultyFilterParams(low=None, high=None, drop_easiest=0.43),
        DifficultyFilterParams(low=0.0, high=None, drop_easiest=0.3),
    ],
)
def test_difficulty_filter(case: Case, params: DifficultyFilterParams) -> None:
    def kept(c: Case) -> list[list[Answer]]:
        rate = {i: float(np.mean([a.correct for a in group])) for i, group in enumerate(c.groups)}
        easiest = sorted(rate, key=lambda i: (-rate[i], i))[: int(params.drop_easiest * len(rate))]
        low = -1.0 if params.low is None else params.low
        high = 2.0 if params.high is None else params.high
        return [c.groups[i] for i in rate if low < rate[i] < high and i not in easiest]

    assert 0 < len(kept(case)) < len(case.groups)
    names, tables = ["grpo", "difficulty_filter"], {"difficulty_filter": params}
    check(case, lambda c, z: loss(c, z, verdicts, kept), names, tables)


@each_step
def test_dapo(case: Case) -> None:
    """All four parts; bounds tight enough for the dual clip to act."""
    params = {
        "clip": ClipParams(low=0.1, high=0.15, dual=1.3),
        "soft_overlong": SoftOverlongParams(max_tokens=6, cache_tokens=4),
    }

    def oracle(c: Case, z: Complex):
        return loss(c, z, overlong(6, 4, 0.5), differing, (0.1, 0.15), 1.3)

    check(case, oracle, ["dapo"], params)


def identical(case: Case, names: Sequence[str], params: Mapping[str, MethodParams], others: Sequence[str]) -> None:
    got, expected = run(case, names, params), run(case, others)
    assert abs(got.loss - expected.loss) <= 1e-12
    assert np.abs(got.gradient - expected.gradient).max() <= 1e-12


@each_step
def test_at_zero_both_reward_methods_are_grpo(case: Case) -> None:
    identical(case, ["grpo", "unlikeliness"], {"unlikeliness": UnlikelinessParams(beta=0.0)}, ["grpo"])
    none = SoftOverlongParams(max_tokens=6, cache_tokens=4, factor=0.0)
    identical(case, ["grpo", "soft_overlong"], {"soft_overlong": none}, ["grpo"])
    everything = DifficultyFilterParams(low=None, high=None)
    identical(case, ["grpo", "difficulty_filter"], {"difficulty_filter": everything}, ["grpo"])
