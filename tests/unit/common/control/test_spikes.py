"""Gradient spikes: the limit against NumPy, too few norms, a change for good, and what a resume brings back."""

from __future__ import annotations

import numpy as np
import pytest

from megasharp.common.control import Control, ControlState, LengthStage, Reset, ResetRule, Rules, SpikeRule, SpikeState

RULE = SpikeRule(sigma=6.0, window=30)


def test_the_limit_is_that_of_the_last_norms() -> None:
    norms = np.random.default_rng(0).gamma(40.0, size=80)
    state = SpikeState().seen(RULE, norms[:50].tolist()).seen(RULE, norms[50:].tolist())
    last = norms[-30:]
    assert state.limit(RULE) == pytest.approx(last.mean() + 6.0 * last.std(), rel=1e-12)


def test_a_few_norms_tell_nothing_and_infinite_ones_neither() -> None:
    state = SpikeState().seen(RULE, [1.0] * 19)
    assert state.limit(RULE) is None
    state = state.seen(RULE, [float("nan"), float("inf")])
    assert state.limit(RULE) is None
    assert state.seen(RULE, [1.0]).limit(RULE) == 1.0


def test_where_rewards_are_rare_the_steps_that_learn_are_no_spikes() -> None:
    chance = np.random.default_rng(0)
    state, left_out = SpikeState(), 0
    for _ in range(3000):
        norm = chance.uniform(0.8, 1.2) if chance.random() < 0.02 else 0.0
        limit = state.limit(RULE)
        left_out += limit is not None and norm > limit
        state = state.seen(RULE, [norm])
    assert left_out == 0


def left_out_of(norm: float) -> int:
    """How often a norm that comes again and again is left out, by a rule of the default window."""
    rule = SpikeRule(sigma=6.0)
    state = SpikeState().seen(rule, np.random.default_rng(0).normal(1.0, 0.1, size=128).tolist())
    count = 0
    while (state.limit(rule) or 0.0) < norm:
        state = state.seen(rule, [norm])
        count += 1
    return count


def test_norms_that_have_grown_for_good_are_no_spikes_for_long_and_much_too_large_ones_end_a_run() -> None:
    """`guard.nan_limit` is 5."""
    assert [left_out_of(norm) for norm in (1.5, 2.0, 3.0)] == [0, 3, 4]
    assert left_out_of(50.0) > 5 and left_out_of(1e6) > 20


@pytest.mark.parametrize("norm", [50.0, 1e6])
def test_a_spike_lets_no_second_one_through(norm: float) -> None:
    healthy = SpikeState().seen(RULE, np.random.default_rng(0).normal(1.0, 0.1, size=30).tolist())
    after = healthy.seen(RULE, [norm])
    before, now = healthy.limit(RULE), after.limit(RULE)
    assert before is not None and now is not None and before < now < 4.0
    assert SpikeState().seen(RULE, [1.0] * 30).seen(RULE, [norm]).norms[-1] == 2.0


def test_what_came_before_a_reset_or_another_stage_sets_no_limit() -> None:
    stages = (LengthStage(max_response_tokens=8, until=3), LengthStage(max_response_tokens=16))
    control = Control(Rules(ResetRule(), stages, RULE), ControlState())
    for step in (1, 3):
        control.stage(step)
        control.updated([1.0, 2.0] * 15)
        assert control.norm_limit() is not None
    control.stage(4)
    assert control.norm_limit() is None
    control.updated([1.0, 2.0] * 15)
    control.stage(5)
    assert control.norm_limit() is not None
    control.carried_out(Reset(5, "every 5 steps", ("reference",)))
    assert control.norm_limit() is None


def test_a_resumed_run_has_the_same_limit_and_without_a_rule_there_is_none() -> None:
    rules = Rules(ResetRule(), (LengthStage(max_response_tokens=8),), RULE)
    control = Control(rules, ControlState())
    control.updated([1.0, 2.0] * 15)
    assert Control(rules, control.state).norm_limit() == control.norm_limit() == pytest.approx(1.5 + 6 * 0.5)
    free = Control(Rules(ResetRule(), (LengthStage(max_response_tokens=8),)), ControlState())
    free.updated([1.0] * 99)
    assert free.norm_limit() is None and free.state == ControlState()
