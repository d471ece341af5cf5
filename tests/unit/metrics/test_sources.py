"""Figures by the source of a mixture against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megasharp.common.records import FinishReason, Outcome
from megasharp.trainer.source_metrics import source_metrics


def test_each_source_has_figures_of_its_own_groups(make_response, make_group):
    right, wrong, infra = Outcome.CORRECT, Outcome.WRONG, Outcome.INFRA

    def group(source, *responses, dropped=None):
        made = make_group(*responses, dropped=dropped)
        return replace(made, prompt=replace(made.prompt, source=source))

    found = source_metrics(
        [
            group("math", make_response(right, 2), *[make_response(wrong, 4)] * 3),
            group("math", make_response(right, 2), make_response(infra, 6)),
            group("code", make_response(wrong, 8, finish=FinishReason.LENGTH), make_response(wrong, 4), dropped="hard"),
        ],
        ["math", "code", "absent"],
    )
    assert found == pytest.approx(
        {
            "group/math/prompts": 2.0,
            "group/math/dropped": 0.0,
            "reward/math/mean": 2 / 5,
            "group/math/solved_all": 0.5,
            "group/math/solved_none": 0.0,
            "group/math/pass@1": (1 / 4 + 1) / 2,
            # Of two responses one does not count, so that this group has no pass@2.
            "group/math/pass@2": 1 / 2,
            "group/math/pass@4": 1.0,
            "rollout/math/length_mean": 22 / 6,
            "rollout/math/truncated": 0.0,
            "group/code/prompts": 1.0,
            "group/code/dropped": 1.0,
            "reward/code/mean": 0.0,
            "group/code/solved_all": 0.0,
            "group/code/solved_none": 1.0,
            "group/code/pass@1": 0.0,
            "group/code/pass@2": 0.0,
            "rollout/code/length_mean": 6.0,
            "rollout/code/truncated": 0.5,
        }
    )
