"""Figures of groups against numbers worked out by hand."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace

import pytest
import torch

from megasharp.common.records import THINKING_OPEN, FinishReason, Outcome
from megasharp.metrics.group_metrics import group_metrics


def test_a_step_worked_out_by_hand(make_response, make_group):
    right, wrong, infra = Outcome.CORRECT, Outcome.WRONG, Outcome.INFRA
    groups = [
        make_group(make_response(right, 2, "1+2"), make_response(right, 4, "1+2", gap=0.5)),
        make_group(make_response(right, 6, "3*4"), make_response(right, 6, "4+8"), make_response(wrong, 6, "9")),
        make_group(make_response(wrong, 8, finish=FinishReason.LENGTH), make_response(infra, 4), dropped="hard"),
        make_group(make_response(Outcome.FORMAT, 2), make_response(Outcome.TIMEOUT, 2), dropped="hard"),
    ]
    figures = group_metrics(groups)
    assert figures["reward/mean"] == pytest.approx(4 / 8)
    shares = {"correct": 4, "wrong": 2, "format": 1, "error": 0, "timeout": 1, "infra": 1}
    assert {o: figures[f"reward/outcome_{o}"] for o in shares} == pytest.approx(
        {outcome: count / 9 for outcome, count in shares.items()}
    )
    assert figures["group/solved_all"] == 0.25
    assert figures["group/solved_none"] == 0.5
    assert figures["group/uniform"] == 0.75
    assert figures["group/distinct_correct"] == pytest.approx((1 + 2 + 0 + 0) / 4)
    # Correct responses: 2 of a group without a wrong one, 2 of a group with a third of them wrong.
    hardness = [figures[f"group/hardness_{low}"] for low in ("0.0_0.2", "0.2_0.4", "0.4_0.6", "0.6_0.8", "0.8_1.0")]
    assert hardness == [0.5, 0.5, 0.0, 0.0, 0.0]
    # One class; three classes; two responses of which the infra failure does not count; two without an answer.
    assert figures["group/answer_entropy"] == pytest.approx((0.0 + math.log(3) + 0.0 + 0.0) / 4)
    assert figures["group/dropped"] == 2.0
    assert figures["group/dropped_hard"] == 2.0
    assert figures["rollout/tokens"] == 40.0
    assert figures["rollout/length_mean"] == pytest.approx(40 / 9)
    assert figures["rollout/length_max"] == 8.0
    assert figures["rollout/truncated"] == pytest.approx(1 / 9)
    assert figures["rollout/sampler_policy_gap"] == pytest.approx(0.5 * 4 / 40)


def test_invalid_answers_are_one_class_of_the_answer_entropy(make_response, make_group):
    group = make_group(
        make_response(Outcome.CORRECT, answer="1+2"),
        make_response(Outcome.WRONG, answer="9"),
        make_response(Outcome.FORMAT),
        make_response(Outcome.TIMEOUT),
    )
    shares = [0.25, 0.25, 0.5]
    expected = -sum(share * math.log(share) for share in shares)
    assert group_metrics([group])["group/answer_entropy"] == pytest.approx(expected)


def test_refusals_of_open_thinking_are_counted_apart_from_other_formats(make_response, make_group):
    refused = make_response(Outcome.FORMAT)
    refused = replace(refused, verdict=replace(refused.verdict, detail=THINKING_OPEN))
    figures = group_metrics([make_group(refused, make_response(Outcome.FORMAT))])
    assert (figures["reward/thinking_open"], figures["reward/outcome_format"]) == (0.5, 1.0)


def test_a_correct_response_without_an_answer_is_no_distinct_one(make_response, make_group):
    right, silent = make_response(Outcome.CORRECT, answer="1+2"), make_response(Outcome.CORRECT)
    figures = group_metrics([make_group(right, silent), make_group(silent, silent)])
    assert figures["group/distinct_correct"] == pytest.approx((1 + 0) / 2)


def test_infra_failures_do_not_touch_rewards_or_groups(make_response, make_group):
    right, infra = make_response(Outcome.CORRECT, answer="1+2"), make_response(Outcome.INFRA)
    figures = group_metrics([make_group(right, right, infra), make_group(infra, infra)])
    assert figures["reward/mean"] == 1.0
    assert figures["group/solved_all"] == 1.0
    assert figures["reward/outcome_infra"] == pytest.approx(3 / 5)


def test_verifiers_that_fail_are_a_share_of_what_came_to_one(make_response, make_group):
    def failed(outcome):
        response = make_response(outcome)
        return dataclasses.replace(
            response, verdict=dataclasses.replace(response.verdict, failure="ValueError at mine.py:3")
        )

    right, aborted = make_response(Outcome.CORRECT), make_response(Outcome.INFRA)
    program = make_response(Outcome.ERROR)
    groups = [make_group(right, program, aborted), make_group(failed(Outcome.ERROR), failed(Outcome.INFRA))]
    assert group_metrics(groups)["reward/errors"] == 2 / 4
    assert group_metrics([make_group(right, program)])["reward/errors"] == 0.0
    assert "reward/errors" not in group_metrics([make_group(aborted)])


def test_all_infra_has_no_mean_reward(make_response, make_group):
    figures = group_metrics([make_group(make_response(Outcome.INFRA))])
    assert "reward/mean" not in figures
    assert "group/solved_all" not in figures
    assert figures["reward/outcome_infra"] == 1.0


def test_no_groups_have_no_figures():
    assert group_metrics([]) == {}


def test_what_the_memory_network_did_to_the_sampling(make_response, make_group):
    def sampled(moved, kl):
        response = make_response(Outcome.WRONG, length=len(moved))
        parts = {"argmax_moved": torch.tensor(moved), "calibration_kl": torch.tensor(kl)}
        return dataclasses.replace(response, completion=dataclasses.replace(response.completion, **parts))

    figures = group_metrics([make_group(sampled([True, False, True], [0.5, 0.0, 0.25]), sampled([False], [0.25]))])
    assert figures["memory/argmax_moved"] == 2 / 4
    assert figures["memory/responses_moved"] == 1 / 2
    assert figures["memory/calibration_kl"] == pytest.approx(1.0 / 4)
    assert not any(name.startswith("memory/") for name in group_metrics([make_group(make_response(Outcome.WRONG))]))
