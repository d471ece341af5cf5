"""Remark 4 of 2510.04028 on the three actions: momentum, a reset of the optimizer at a1's peak, an entropy bonus.

The paper runs none of them. Momentum is compared at equal size of the steps: a plain gradient of momentum m has the
learning rate times 1 - m, and Adam's first beta is 0 where there is no momentum. A reset empties the optimizer's state
at the step at which a1 had its peak in the same run without a reset; up to there the two runs are one. The bonus adds
coefficient * (the gradient of the policy's entropy), which moves the plain gradient's point of rest to the softmax of
(1 - 1/G) r / coefficient.

Cases are rows of one array, since a step of NumPy takes nearly as long for 32 seeds as for a few hundred.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megasharp.studies.actions.experiments import (
    BASE,
    EXPLORED,
    FIGURE_1,
    OPTIMAL,
    OPTIMIZERS,
    OptimizerName,
    Setting,
    slashed,
)
from megasharp.studies.claims import settle
from megasharp.studies.softmax import (
    Adam,
    Ascent,
    Counts,
    Floats,
    Optimizer,
    entropy,
    policy_gradient,
    sample,
    softmax,
    uniforms,
)
from megasharp.studies.study import Cell, Claim, Table

# Averages over some 10 and 100 steps; Adam's own first beta is the smaller one.
MOMENTA = (0.9, 0.99)
# With the largest one the best action rests at .92 for rewards .5, 1, 0 and a plain gradient.
COEFFICIENTS = (0.01, 0.03, 0.1)


@dataclass(frozen=True, slots=True)
class Case:
    """One run. `momentum`: the plain gradient's, or Adam's first beta; `bonus`: the entropy's coefficient."""

    setting: Setting
    momentum: float = 0.0
    bonus: float = 0.0
    reset: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Stages:
    """Figures of one case, by seed. `takeover_R` is the first step with a2 above half, the number of steps + 1 if none.

    `peak_R`, `peak_step_R`: a1's highest probability and its step; `end_R`: the best action's last probability;
    `optimal_R`: its mean over steps, the larger, the sooner it takes over.
    """

    peak_R: Floats
    peak_step_R: Counts
    takeover_R: Counts
    optimal_R: Floats
    end_R: Floats


Found = Mapping[Case, Stages]


def train(cases: Sequence[Case], seeds: Sequence[int], reset_CR: Sequence[Counts] | None = None) -> Floats:
    """Run cases of one optimizer and group size together, at temperature 1; return the policies [C, R, T, V].

    `reset_CR` has the step before which each case and seed forgets its optimizer's state.
    """
    first = cases[0].setting
    assert all(case.setting.optimizer == first.optimizer for case in cases)
    uniform_RTG = np.tile(uniforms(seeds, first.steps, first.group_size), (len(cases), 1, 1))
    reward_RV, start_RV = (
        np.repeat(np.array(each), len(seeds), axis=0)
        for each in ([case.setting.rewards for case in cases], [case.setting.start for case in cases])
    )
    bonus_R1, negative_R1 = (
        np.repeat(np.array(each), len(seeds))[:, None]
        for each in ([case.bonus for case in cases], [case.setting.negative_only for case in cases])
    )
    optimizer, logit_RV = _optimizer(cases, len(seeds)), np.log(start_RV)
    reset_R1 = None if reset_CR is None else np.concatenate(list(reset_CR))[:, None]
    policy_RTV = np.empty((len(logit_RV), first.steps + 1, logit_RV.shape[1]))
    for step in range(first.steps):
        policy_RV = policy_RTV[:, step] = softmax(logit_RV)
        action_RG = sample(policy_RV, uniform_RTG[:, step])
        reward_RG = np.take_along_axis(reward_RV, action_RG, axis=1)
        advantage_RG = reward_RG - reward_RG.mean(axis=-1, keepdims=True)
        advantage_RG = np.where(negative_R1, np.minimum(advantage_RG, 0.0), advantage_RG)
        gradient_RV = policy_gradient(policy_RV, action_RG, advantage_RG) + bonus_R1 * entropy_gradient(policy_RV)
        if reset_R1 is not None and (reset_R1 == step).any():
            optimizer.reset(reset_R1 == step)
        logit_RV = logit_RV + optimizer.change(gradient_RV, logit_RV)
    policy_RTV[:, -1] = softmax(logit_RV)
    return policy_RTV.reshape(len(cases), len(seeds), *policy_RTV.shape[1:])


def entropy_gradient(policy_RV: Floats) -> Floats:
    """The gradient of the entropy with respect to the logits: -pi (log pi + entropy), [R, V]."""
    log_RV = np.log(np.maximum(policy_RV, np.finfo(np.float64).tiny))
    return np.asarray(-policy_RV * (log_RV + entropy(policy_RV)[:, None]))


def _optimizer(cases: Sequence[Case], seeds: int) -> Optimizer:
    momentum_R1 = np.repeat([case.momentum for case in cases], seeds)[:, None]
    setting = cases[0].setting
    if setting.optimizer == "Adam":
        return Adam(setting.lr, betas=(momentum_R1, 0.999))
    return Ascent(setting.lr * (1.0 - momentum_R1), momentum_R1)


def summarise(policy_RTV: Floats) -> Stages:
    """Compute one case's figures."""
    explored_RT, optimal_RT = policy_RTV[..., EXPLORED], policy_RTV[..., OPTIMAL]
    past_RT = optimal_RT > 0.5
    return Stages(
        peak_R=explored_RT.max(axis=1),
        peak_step_R=explored_RT.argmax(axis=1),
        takeover_R=np.where(past_RT.any(axis=1), past_RT.argmax(axis=1), past_RT.shape[1]),
        optimal_R=optimal_RT.mean(axis=1),
        end_R=optimal_RT[:, -1],
    )


def momentum_cases(optimizer: OptimizerName) -> tuple[Case, ...]:
    """Figure 1's settings without momentum and with each."""
    settings = [replace(setting, optimizer=optimizer) for setting in FIGURE_1]
    return tuple(Case(setting, momentum) for setting in settings for momentum in (0.0, *MOMENTA))


def bonus_cases(optimizer: OptimizerName) -> tuple[Case, ...]:
    """Figure 1's settings with each bonus, and one with -N, without a bonus and with each."""
    momentum = default_momentum(optimizer)
    settings = [replace(setting, optimizer=optimizer) for setting in FIGURE_1]
    negative = replace(BASE, optimizer=optimizer, negative_only=True)
    return (
        *(Case(setting, momentum, bonus) for setting in settings for bonus in COEFFICIENTS),
        *(Case(negative, momentum, bonus) for bonus in (0.0, *COEFFICIENTS)),
    )


def default_momentum(optimizer: OptimizerName) -> float:
    """The study's own: none for the plain gradient, the usual first beta for Adam."""
    return MOMENTA[0] if optimizer == "Adam" else 0.0


def run_all(seeds: Sequence[int]) -> Found:
    """Run every case of remark 4, for all seeds."""
    found: dict[Case, Stages] = {}
    for optimizer in OPTIMIZERS:
        for cases in (momentum_cases(optimizer), bonus_cases(optimizer)):
            found |= dict(zip(cases, map(summarise, train(cases, seeds)), strict=True))
        # Without momentum there is nothing to forget for the plain gradient.
        kept = [case for case in momentum_cases(optimizer) if case.momentum or optimizer == "Adam"]
        resets = [replace(case, reset=True) for case in kept]
        policies = train(resets, seeds, [found[case].peak_step_R for case in kept])
        found |= dict(zip(resets, map(summarise, policies), strict=True))
    return found


def tabulate(found: Found) -> tuple[Table, ...]:
    """Make a table of momentum and resets, and one of the bonus."""
    momentum: list[tuple[Cell, ...]] = []
    bonus: list[tuple[Cell, ...]] = []
    for optimizer in OPTIMIZERS:
        for case in momentum_cases(optimizer):
            for one in (case, replace(case, reset=True)):
                if one in found:
                    row = (one.momentum, "at peak" if one.reset else "no", *_figures(found[one], one.setting.steps))
                    momentum.append((*_head(one.setting), *row))
        settings = dict.fromkeys(case.setting for case in bonus_cases(optimizer))
        for setting in settings:
            for coefficient in (0.0, *COEFFICIENTS):
                stages = found[Case(setting, default_momentum(optimizer), coefficient)]
                variant = "< 0" if setting.negative_only else "all"
                bonus.append((*_head(setting), variant, coefficient, *_figures(stages, setting.steps)))
    figures = ("peak a1", "step a2 > .5", "end a2")
    return (
        Table(
            "momentum",
            "remark 4 (G=2): momentum at equal size of steps, and a reset of the optimizer at a1's peak; medians",
            ("update", "r", "start", "momentum", "reset", *figures),
            tuple(momentum),
        ),
        Table(
            "entropy_bonus",
            "remark 4 (G=2): an entropy bonus; A < 0: negative samples only; medians over seeds",
            ("update", "r", "start", "A", "bonus", *figures),
            tuple(bonus),
        ),
    )


def _head(setting: Setting) -> tuple[Cell, ...]:
    return setting.optimizer, slashed(setting.rewards), slashed(setting.start)


def _figures(stages: Stages, steps: int) -> tuple[Cell, ...]:
    return float(np.median(stages.peak_R)), _step(stages, steps), float(np.median(stages.end_R))


def _step(stages: Stages, steps: int) -> Cell:
    middle = int(np.sort(stages.takeover_R)[len(stages.takeover_R) // 2])
    return middle if middle <= steps else "none"


def judge(found: Found) -> tuple[Claim, ...]:
    """Judge remark 4's three sentences."""
    return _momentum(found), _reset(found), _bonus(found)


def _momentum(found: Found) -> Claim:
    pairs = [
        (replace(case, momentum=0.0), case) for o in OPTIMIZERS for case in momentum_cases(o) if case.momentum > 0.0
    ]
    delays = [found[without].optimal_R - found[with_it].optimal_R for without, with_it in pairs]
    ours = f"steps until a2 has half, as a multiple of those without momentum: {_slower(found, pairs)}"
    statement = "momentum of early gradients is suboptimal, as a1's probability first rises and then falls"
    return Claim("remark 4", statement, "suboptimal", ours, settle(delays))


def _reset(found: Found) -> Claim:
    pairs = [(replace(case, reset=False), case) for case in found if case.reset and case.momentum > 0.0]
    gains = [found[reset].optimal_R - found[kept].optimal_R for kept, reset in pairs]
    ours = f"steps until a2 has half, as a multiple of those without a reset: {_slower(found, pairs)}"
    statement = "resetting the optimizer's state (here at a1's peak) helps the second stage"
    return Claim("remark 4", statement, "in contrast, reset periodically", ours, settle(gains))


def _bonus(found: Found) -> Claim:
    pairs = [(replace(case, bonus=0.0), case) for case in found if case.bonus > 0.0 and not case.setting.negative_only]
    sooner = [np.log(found[without].takeover_R / found[with_it].takeover_R) for without, with_it in pairs]
    ends = [
        float(np.median(np.concatenate([found[c].end_R for _, c in pairs if c.bonus == bonus])))
        for bonus in COEFFICIENTS
    ]
    shown = []
    for optimizer in OPTIMIZERS:
        rows = [case for case in bonus_cases(optimizer) if case.setting.negative_only]
        shown.append(f"{optimizer} {'/'.join(str(_step(found[row], row.setting.steps)) for row in rows)}")
    ours = (
        f"steps until a2 has half, as a multiple of those without: {_slower(found, pairs)}; a2's last probability "
        f"{slashed(round(end, 3) for end in ends)} at bonus {slashed(COEFFICIENTS)}; with -N the step at bonus "
        f"{slashed((0.0, *COEFFICIENTS))}: {', '.join(shown)}"
    )
    statement = "entropy control keeps training useful: with a bonus the second stage comes sooner"
    return Claim("remark 4", statement, "extends training", ours, settle(sooner))


def _slower(found: Found, pairs: Iterable[tuple[Case, Case]]) -> str:
    """Say for each optimizer and each strength how the take-over's step changes: the least and the largest ratio."""
    ratios: dict[str, list[float]] = {}
    for one, other in pairs:
        strength = f"momentum {other.momentum:g}" if other.bonus == 0.0 else f"bonus {other.bonus:g}"
        first, second = (float(np.median(found[case].takeover_R)) for case in (one, other))
        ratios.setdefault(f"{other.setting.optimizer}, {strength}", []).append(second / first)
    return "; ".join(f"{name}: {min(each):.2f} to {max(each):.2f}" for name, each in ratios.items())
