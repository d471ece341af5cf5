"""Resets, stages of response length and the best evaluation, and that a resumed run decides as a whole one does."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from itertools import pairwise

from cases import each_case
from pydantic import TypeAdapter

from megasharp.common.control import (
    BestFigure,
    Control,
    ControlState,
    LengthChange,
    LengthStage,
    ResetRule,
    Rules,
    StagnationRule,
    Threshold,
    Watch,
)

PASS = "eval/dev/pass@1"
TRUNCATED = "rollout/truncated"


def watched(rule: StagnationRule, values: Sequence[float]) -> list[bool]:
    watch, found = Watch(), []
    for step, value in enumerate(values):
        watch = watch.seen(rule, step, {PASS: value})
        found.append(watch.stagnates(rule) is not None)
    return found


def by_definition(rule: StagnationRule, values: Sequence[float]) -> list[bool]:
    """Slow and plain: the record is the last value that was above the one before it by enough."""
    found = []
    for end in range(1, len(values) + 1):
        record = 0
        for index in range(end):
            if values[index] > values[record] + rule.min_improvement:
                record = index
        found.append(end - 1 - record >= rule.patience)
    return found


@each_case("seed", range(20))
def test_stagnation_is_its_definition(seed: int) -> None:
    draw = random.Random(seed)
    rule = StagnationRule(metric=PASS, patience=draw.randint(1, 4), min_improvement=draw.choice([0.0, 0.1]))
    values = [draw.choice([0.1, 0.2, 0.25, 0.3, 0.5]) for _ in range(12)]
    found = watched(rule, values)
    assert found == by_definition(rule, values)


def test_gains_that_are_too_small_add_up() -> None:
    """The value to beat is the record, so slow growth counts once it has come far enough."""
    assert (
        watched(StagnationRule(metric=PASS, patience=3, min_improvement=0.1), [0.1, 0.16, 0.19, 0.22, 0.25, 0.28])
        == [False] * 6
    )
    assert watched(StagnationRule(metric=PASS, patience=2, min_improvement=0.1), [0.1, 0.16, 0.19, 0.22]) == [
        False,
        False,
        True,
        False,
    ]


def test_an_evaluation_without_the_figure_says_nothing() -> None:
    rule = StagnationRule(metric=PASS, patience=1)
    watch = Watch().seen(rule, 1, {PASS: 0.5}).seen(rule, 2, {"eval/dev/pass@64": 0.1})
    assert watch == Watch(0.5, 1, 0.5, 1, 0)


def control(reset: ResetRule | None = None, *stages: LengthStage, state: ControlState | None = None) -> Control:
    return Control(
        Rules(reset or ResetRule(), stages or (LengthStage(max_response_tokens=8),)), state or ControlState()
    )


def test_a_degraded_policy_is_measured_from_where_it_was_reset() -> None:
    """0.5 is never reached again, but 0.2 to 0.3 is growth: no second reset."""
    found = control(ResetRule(stagnation=StagnationRule(metric=PASS, patience=2)))
    resets = []
    for step, value in enumerate([0.5, 0.3, 0.2, 0.25, 0.3, 0.35], start=1):
        due = found.reset(step)
        if due is not None:
            found.carried_out(due)
            resets.append((due.step, due.reason))
        found.evaluated(step, {PASS: value}, scheduled=True)
    reason = "eval/dev/pass@1 is 0.2, and was not above the 0.5 of step 1 in 2 evaluations"
    assert resets == [(3, reason)]


def test_a_reset_that_was_decided_waits_until_it_is_carried_out() -> None:
    """A run that is stopped while it samples has decided, not done."""
    found = control(ResetRule(every=3))
    assert found.reset(3) is None
    first, again = found.reset(4), found.reset(4)
    assert first == again is not None and found.state.resets.done == ()
    found.carried_out(first)
    assert [reset.step for reset in found.state.resets.done] == [3]


@each_case("seed", range(60))
def test_no_two_resets_come_in_consecutive_steps_and_every_counts_from_the_last_one(seed: int) -> None:
    """Random rules and evaluations. At `every: 1` each step is reset, as asked."""
    draw = random.Random(seed)
    every, interval = draw.choice([None, 1, 2, 3, 7]), draw.choice([1, 1, 2, 5])
    stagnation = StagnationRule(metric=PASS, patience=draw.randint(1, 3), min_improvement=0.1)
    found = control(ResetRule(every=every, stagnation=draw.choice([stagnation, stagnation, None])))
    for step in range(1, 60):
        if (due := found.reset(step)) is not None:
            found.carried_out(due)
        if step % interval == 0:
            found.evaluated(step, {PASS: draw.random()}, scheduled=True)
    done = found.state.resets.done
    gaps = [(second.step - first.step, second.reason) for first, second in pairwise(done)]
    assert done or (every is None and found._rules.reset.stagnation is None)
    assert every == 1 or all(gap > 1 for gap, _ in gaps)
    assert every is None or all(gap == every if reason.startswith("every") else gap <= every for gap, reason in gaps)


def test_a_reset_by_steps_counts_from_one_by_stagnation() -> None:
    """By stagnation after step 9, and every 10 steps: the next one is after step 19, not after step 10."""
    found, resets = control(ResetRule(every=10, stagnation=StagnationRule(metric=PASS, patience=2))), []
    for step in range(1, 25):
        if (due := found.reset(step)) is not None:
            found.carried_out(due)
            resets.append(due.step)
        if step % 3 == 0 and step < 10:
            found.evaluated(step, {PASS: 0.5}, scheduled=True)
    assert resets == [9, 19]


def test_stagnation_found_right_after_a_reset_waits_one_step() -> None:
    found, resets = control(ResetRule(every=4, stagnation=StagnationRule(metric=PASS, patience=1))), []
    for step in range(1, 8):
        if (due := found.reset(step)) is not None:
            found.carried_out(due)
            resets.append((due.step, due.reason.startswith("every")))
        if step >= 4:
            found.evaluated(step, {PASS: 0.5}, scheduled=True)
    assert resets == [(4, True), (6, False)]


def test_any_reset_starts_the_count_of_stagnation_anew() -> None:
    found = control(ResetRule(every=2, stagnation=StagnationRule(metric=PASS, patience=2)))
    for step in range(1, 10):
        if (due := found.reset(step)) is not None:
            found.carried_out(due)
        found.evaluated(step, {PASS: 0.1}, scheduled=step % 2 == 0)
    assert [reset.reason for reset in found.state.resets.done] == ["every 2 steps"] * 4


def test_stages_end_by_step_and_the_last_one_stays() -> None:
    found = control(
        None,
        LengthStage(max_response_tokens=8, until=2),
        LengthStage(max_response_tokens=16, until=3),
        LengthStage(max_response_tokens=4),
    )
    assert [found.stage(step).max_response_tokens for step in range(1, 7)] == [8, 8, 16, 4, 4, 4]
    assert found.state.lengths.changes == (
        LengthChange(2, 16, "step 2 is done"),
        LengthChange(3, 4, "step 3 is done"),
    )


def test_a_stage_ends_when_responses_meet_its_limit() -> None:
    """The mean of two steps is above 0.2 after the third; a later stage sees only its own steps."""
    rule = Threshold(metric=TRUNCATED, value=0.2, steps=2)
    found = control(
        None,
        LengthStage(max_response_tokens=8, above=rule),
        LengthStage(max_response_tokens=16, until=9, above=rule),
        LengthStage(max_response_tokens=32),
    )
    limits = []
    for step, share in enumerate([0.3, 0.1, 0.4, 0.5, 0.1, 0.1], start=1):
        limits.append(found.stage(step).max_response_tokens)
        found.trained({TRUNCATED: share})
    assert limits == [8, 8, 8, 16, 16, 32]
    assert found.state.lengths.changes[0].reason == "rollout/truncated is 0.25 over 2 steps, above 0.2"


def test_a_stage_ends_when_an_evaluation_stagnates() -> None:
    found = control(
        None,
        LengthStage(max_response_tokens=8, until=100, stagnation=StagnationRule(metric=PASS, patience=1)),
        LengthStage(max_response_tokens=16),
    )
    for step, value in enumerate([0.1, 0.2, 0.2], start=1):
        assert found.stage(step).max_response_tokens == 8
        found.evaluated(step, {PASS: value}, scheduled=True)
    assert found.stage(4).max_response_tokens == 16


def test_the_best_of_each_figure_is_kept_with_its_step() -> None:
    found = control()
    for step, first, many in ((0, 0.9, 0.9), (2, 0.3, 0.7), (4, 0.4, 0.6), (6, 0.4, 0.7)):
        found.evaluated(step, {PASS: first, "eval/dev/pass@64": many, "eval/dev/length_mean": 9.0}, scheduled=False)
    assert found.state.best == {PASS: BestFigure(0.4, 4), "eval/dev/pass@64": BestFigure(0.7, 2)}


ADAPTER = TypeAdapter(ControlState)


def decisions(seed: int, stop_at: int | None, after_evaluation: bool) -> tuple[list[int], ControlState]:
    """Thirty steps of a run; `stop_at`: it is stopped there, before or after the evaluation, and resumed.

    A resumed run is told the evaluation after its checkpoint's step, which an earlier attempt may have made.
    """
    draw = random.Random(seed)
    shares = [draw.random() for _ in range(31)]
    values = [draw.choice([0.1, 0.2, 0.3, 0.4]) for _ in range(31)]
    rules = ResetRule(
        every=draw.choice([None, 7]), stagnation=StagnationRule(metric=PASS, patience=2, min_improvement=0.05)
    )
    stages = (
        LengthStage(max_response_tokens=8, until=20, above=Threshold(metric=TRUNCATED, value=0.55, steps=3)),
        LengthStage(max_response_tokens=16, stagnation=StagnationRule(metric=PASS, patience=3)),
        LengthStage(max_response_tokens=32),
    )
    found, limits = control(rules, *stages), []
    for step in range(1, 31):
        limits.append(found.stage(step).max_response_tokens)
        if (due := found.reset(step)) is not None:
            found.carried_out(due)
        found.trained({TRUNCATED: shares[step]})
        saved = found.state
        scheduled = step % 2 == 0
        if scheduled:
            found.evaluated(step, {PASS: values[step]}, scheduled=True)
        if step == stop_at:
            text = ADAPTER.dump_json(found.state if after_evaluation else saved)
            found = control(rules, *stages, state=ADAPTER.validate_json(json.dumps(json.loads(text)), strict=True))
            found.evaluated(step, {PASS: values[step]} if scheduled else {}, scheduled=scheduled)
    return limits, found.state


@each_case("after_evaluation", [False, True])
@each_case("seed", range(6))
def test_stopped_at_any_step_and_resumed_it_decides_the_same(seed: int, after_evaluation: bool) -> None:
    limits, state = decisions(seed, None, after_evaluation)
    assert len(state.resets.done) > 1 and len(set(limits)) > 1
    assert [(limits, state)] * 30 == [decisions(seed, step, after_evaluation) for step in range(1, 31)]
