"""`guard.engine_gap_filter`: the step without some responses is the step in which they were never sampled."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import harness
import numpy as np
import pytest
import torch
from cases import each_case
from harness import HORIZON, Answer, Case, random_case, value_and_gradient

from megasharp.algos.base import Reduction
from megasharp.algos.build_recipe import build_recipe
from megasharp.batching.packing import PackLayout, pack
from megasharp.config.run_config import GuardConfig
from megasharp.trainer.guards import Guards

LIMIT = 0.5
# By group and index: one of a group, two of a group of three, a whole group, one of the group with an infra failure.
FAR = ((0, 1), (1, 0), (1, 2), (5, 0), (5, 1), (3, 1))


def far(answer: Answer) -> bool:
    return (answer.group, answer.index) in FAR


def engine_off(seed: int) -> Case:
    """The responses of `FAR` are 0.6 nats off on average, half of them no number; of others one token is off by 0.9."""
    case = random_case(seed)
    old, engine = case.logp(case.z_old), case.engine_logp.copy()
    for number, answer in enumerate(case.answers):
        if far(answer):
            engine[answer.start : answer.stop] = old[answer.start : answer.stop] - 0.6 if number % 2 else np.nan
        elif answer.length > 1:
            engine[answer.start] = old[answer.start] - 0.9
    return dataclasses.replace(case, engine_logp=engine)


def never_sampled(case: Case) -> Case:
    """The step without the responses of `FAR`, its responses numbered anew."""
    near = [a for a in case.answers if not far(a)]
    numbers = [sum(b.group == a.group for b in near[:i]) for i, a in enumerate(near)]
    answers = (dataclasses.replace(a, index=number) for a, number in zip(near, numbers, strict=True))
    return dataclasses.replace(case, answers=tuple(answers))


def filtered(
    case: Case, names: Sequence[str], cut: PackLayout, *, on_policy: bool
) -> tuple[float, np.ndarray, dict[str, float]]:
    """Loss, gradient and the filter's metrics of the step as the loop takes it; on policy, old log-probs are `z`'s."""
    recipe = build_recipe(names, {}, reduction=None, constant=HORIZON, mini_batches=1)
    guards = Guards(GuardConfig(engine_gap_filter=LIMIT))
    groups = recipe.select(harness.groups_of(case))
    samples = recipe.advantages(groups)
    numbers = [harness._flat_number(case, s.group_id, s.index) for s in samples]
    packed = pack(samples, cut, seed=0)
    annotated = harness._annotated(packed, case, numbers, guards.needs(recipe.annotation), torch.float64)
    kept, metrics = guards.filter(annotated, recipe, groups, cut)
    assert kept is not None
    # What was packed again is float32, as in a run.
    needs = recipe.annotation if on_policy else recipe.needs
    kept = harness._annotated(kept, case, numbers, needs, torch.float64)
    kept, _ = recipe.calibrate(kept)
    (mini,) = kept.mini_batches
    z, loss = torch.tensor(case.z, requires_grad=True), torch.zeros((), dtype=torch.float64)
    for micro in (micro for rank in mini.per_rank for micro in rank):
        x = harness._with_head(z[harness._rows(case, micro, numbers)], micro, recipe, case)
        loss = loss + recipe.loss(micro, x, mini.denominators, mini.statistics)[0]
    loss.backward()
    assert z.grad is not None
    return float(loss.detach()), z.grad.numpy(), {name: metric.value for name, metric in metrics.items()}


@each_case("names", [("grpo", "kl"), ("grpo", "iac", "gspo"), ("grpo", "clip_cov"), ("grpo", "casp")])
def test_loss_and_gradient_are_those_of_the_step_that_never_had_them(names: tuple[str, ...]) -> None:
    case = engine_off(0)
    expected = harness.run(never_sampled(case), names)
    for cut in (PackLayout(1, 10_000, 1, 1, HORIZON), PackLayout(2, 24, 1, 1, HORIZON, False)):
        loss, gradient, metrics = filtered(case, names, cut, on_policy=False)
        assert loss == pytest.approx(expected.loss, rel=1e-12, abs=1e-14)
        assert np.abs(gradient - expected.gradient).max() <= 1e-12
        assert metrics["policy/engine_gap_filtered"] == len(FAR)
    assert abs(loss - harness.run(case, names).loss) > 1e-6


def grpo_of_those_near(case: Case, z: np.ndarray) -> np.ndarray:
    """GRPO with its group's standard deviation, on policy, token mean, over the responses that are not far."""
    logp, tokens, total = case.logp(z), sum(a.length for a in case.scored if not far(a)), 0.0
    for group in case.groups:
        near = [a for a in group if not far(a)]
        rewards = np.array([a.reward for a in near])
        if len(near) < 2 or rewards.std() == 0.0:
            continue
        for answer, reward in zip(near, rewards, strict=True):
            advantage = (reward - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
            span = slice(answer.start, answer.stop)
            total = total - (advantage * np.exp(logp[..., span] - np.real(logp[..., span]))).sum(-1)
    return total / tokens


def test_the_formula_over_the_responses_that_are_near() -> None:
    case = engine_off(2)
    loss, gradient, metrics = filtered(case, ["grpo"], PackLayout(1, 10_000, 1, 1, HORIZON), on_policy=True)
    expected, slope = value_and_gradient(grpo_of_those_near, case)
    assert loss == pytest.approx(expected, rel=1e-9)
    assert np.abs(gradient - slope).max() <= 1e-9
    assert np.isnan(metrics["policy/engine_gap"])


def test_a_step_of_which_nothing_is_left_is_none_and_one_without_far_responses_is_itself() -> None:
    case = engine_off(0)
    recipe = build_recipe(["grpo"], {}, reduction=Reduction.TOKEN_MEAN, constant=HORIZON, mini_batches=1)
    groups, layout = harness.groups_of(case), PackLayout(1, 10_000, 1, 1, HORIZON)
    samples = recipe.advantages(groups)
    numbers = [harness._flat_number(case, s.group_id, s.index) for s in samples]
    for limit, left in ((1e-12, False), (1e12, True)):
        guards = Guards(GuardConfig(engine_gap_filter=limit))
        sound = dataclasses.replace(case, engine_logp=case.logp(case.z_old) - 0.1)
        packed = pack(recipe.advantages(harness.groups_of(sound)), layout, seed=0)
        annotated = harness._annotated(packed, sound, numbers, guards.needs(recipe.annotation), torch.float64)
        kept, metrics = guards.filter(annotated, recipe, harness.groups_of(sound), layout)
        assert (kept is not None) == left
        assert metrics["policy/engine_gap"].value == pytest.approx(0.1)
        assert metrics["policy/engine_gap_filtered"].value == (0 if left else len([a for a in case.scored if a.length]))
        # No method asked for log-probs before the update, so the loss must not see any.
        assert kept is None or all(m.inputs.old_logp_T is None for r in kept.mini_batches[0].per_rank for m in r)
