"""PSR, NSR and their weighted sum: constants by outcome, and what cannot stand beside them."""

from __future__ import annotations

import pytest
import torch
from cases import each_case

from megasharp.algos import METHODS
from megasharp.algos.build_recipe import build_recipe
from megasharp.algos.ds import DSParams
from megasharp.algos.w_reinforce import WReinforceParams
from megasharp.common.errors import UserError
from megasharp.common.records import Outcome

OUTCOMES = [Outcome.CORRECT, Outcome.WRONG, Outcome.FORMAT, Outcome.TIMEOUT, Outcome.ERROR, Outcome.CORRECT]


def advantages(make_group, name: str, outcomes: list[Outcome], **params: float) -> list[float]:
    group = make_group([0.3] * len(outcomes), outcomes)
    method = METHODS[name](METHODS[name].Params(**params))
    return method.advantages(torch.full((len(outcomes),), 0.3, dtype=torch.float64), group).tolist()


def test_by_outcome_and_not_by_reward(make_group) -> None:
    assert advantages(make_group, "psr", OUTCOMES) == [1, 0, 0, 0, 0, 1]
    assert advantages(make_group, "nsr", OUTCOMES) == [0, -1, -1, -1, -1, 0]
    assert advantages(make_group, "w_reinforce", OUTCOMES) == [0.1, -1, -1, -1, -1, 0.1]


@each_case("outcomes", [OUTCOMES, [Outcome.CORRECT] * 3, [Outcome.WRONG] * 3, [Outcome.CORRECT], []])
@each_case("weight", [0.0, 0.3, 1.0])
def test_weighted_sum_of_both(make_group, outcomes: list[Outcome], weight: float) -> None:
    positive, negative = (advantages(make_group, name, outcomes) for name in ("psr", "nsr"))
    expected = [weight * p + n for p, n in zip(positive, negative, strict=True)]
    got = advantages(make_group, "w_reinforce", outcomes, positive_weight=weight)
    assert got == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_infra_failures_are_masked(make_group) -> None:
    recipe = build_recipe(["nsr"], {}, reduction=None, constant=8.0, mini_batches=1)
    group = make_group([0.0] * 3, [Outcome.WRONG, Outcome.INFRA, Outcome.CORRECT])
    sequences = recipe.advantages([group])
    assert [s.advantage_T[0].item() for s in sequences] == [-1.0, 0.0, 0.0]
    assert [s.mask_T[0].item() for s in sequences] == [1.0, 0.0, 1.0]


@each_case("estimator", ["psr", "nsr", "w_reinforce", "passk_training", "gr_pkpo"])
@each_case("reshaping", ["unlikeliness", "soft_overlong"])
def test_reshaped_rewards_are_refused_as_they_would_have_no_effect(estimator: str, reshaping: str) -> None:
    with pytest.raises(UserError, match=f"'{estimator}' and '{reshaping}' cannot be combined: .* only which responses"):
        build_recipe([estimator, reshaping], {}, reduction=None, constant=8.0, mini_batches=1)


def test_differential_smoothing_is_refused_in_its_reward_form_only() -> None:
    def build(form: str) -> None:
        params = {"ds": DSParams(form=form), "w_reinforce": WReinforceParams()}
        build_recipe(["w_reinforce", "ds"], params, reduction=None, constant=8.0, mini_batches=1)

    build("token")
    with pytest.raises(UserError, match="'w_reinforce' and 'ds' cannot be combined"):
        build("reward_seq_mean")
