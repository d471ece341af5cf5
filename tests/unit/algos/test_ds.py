"""Differential smoothing by hand in every form, its two sides, and the bundle."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from cases import each_case
from pydantic import ValidationError
from torch import Tensor

from megasharp.algos.base import Needs, OldLogp, Ramp, Reduction
from megasharp.algos.build_recipe import build_recipe
from megasharp.algos.clip import Clip, ClipParams
from megasharp.algos.ds import DS, DSParams
from megasharp.algos.ds_grpo import DSGRPO
from megasharp.algos.grpo import GRPO, GRPOParams
from megasharp.common.errors import UserError
from megasharp.common.records import Group, Outcome, TokenInputs
from megasharp.config.core import validate

TOKEN_FORMS = ["token", "seq_mean", "seq_sum"]
# Two responses, the first correct; the last token of each is masked.
LOGP = [[-1.0, -0.5, -9.0], [-2.0, -3.0, -0.1, -9.0]]
TERMS = {
    "token": [[0.3, 0.15], [-0.4, -0.6, -0.02]],
    "seq_mean": [[0.225, 0.225], [-0.34, -0.34, -0.34]],
    "seq_sum": [[0.45, 0.45], [-1.02, -1.02, -1.02]],
}


def two_responses(dtype: torch.dtype = torch.float64) -> TokenInputs:
    logp_T = torch.tensor([value for row in LOGP for value in row], dtype=torch.float64)
    correct_T = torch.tensor([1.0] * 3 + [0.0] * 4, dtype=dtype)
    return TokenInputs(
        mask_T=torch.tensor([1, 1, 0, 1, 1, 1, 0], dtype=dtype),
        seq_T=torch.tensor([0] * 3 + [1] * 4),
        group_T=torch.zeros(7).long(),
        reward_T=correct_T,
        correct_T=correct_T,
        group_size_T=torch.full((7,), 2.0, dtype=dtype),
        group_correct_T=torch.ones(7, dtype=dtype),
        num_sequences=2,
        policy_logp_T=logp_T,
        old_logp_T=2.0 * logp_T,
        ref_logp_T=3.0 * logp_T,
    )


def term(x: TokenInputs, **params: object) -> Tensor:
    """Return the terms that calibration adds to the unmasked tokens of an advantage of 0.25."""
    adv_T = torch.full((7,), 0.25, dtype=torch.float64)
    return (DS(DSParams(**params)).calibrate(adv_T, x)[0] - adv_T)[x.mask_T > 0]


@each_case("dtype", [torch.float32, torch.float64])
@each_case("form", TOKEN_FORMS)
def test_terms_by_hand(form: str, dtype: torch.dtype) -> None:
    expected = [value for row in TERMS[form] for value in row]
    assert term(two_responses(dtype), gamma_p=0.3, gamma_n=0.2, form=form).tolist() == pytest.approx(expected)


@each_case("form", TOKEN_FORMS)
def test_two_sides(form: str) -> None:
    """The correct response gains and the wrong one loses; each side is one gamma's."""
    x = two_responses()
    correct, other = slice(0, 2), slice(2, 5)
    both_T = term(x, gamma_p=0.3, gamma_n=0.2, form=form)
    assert (both_T[correct] > 0).all() and (both_T[other] < 0).all()
    positive_T, negative_T = term(x, gamma_p=0.3, gamma_n=0.0, form=form), term(x, gamma_p=0.0, gamma_n=0.2, form=form)
    assert torch.equal(positive_T[correct], both_T[correct]) and not positive_T[other].any()
    assert torch.equal(negative_T[other], both_T[other]) and not negative_T[correct].any()


@each_case("form", TOKEN_FORMS)
def test_the_record_of_the_policy(form: str) -> None:
    """Recomputed log-probs are twice the engine's here, the reference's three times; needs say which pass runs."""
    params = {"gamma_p": 0.3, "gamma_n": 0.2, "form": form}
    once_T = term(two_responses(), logp="engine", **params)
    torch.testing.assert_close(term(two_responses(), logp="policy", **params), 2.0 * once_T)
    torch.testing.assert_close(term(two_responses(), logp="reference", **params), 3.0 * once_T)
    assert DS(DSParams(form=form)).needs() == Needs(policy_logp=True)
    assert DS(DSParams(form=form, logp="policy")).needs() == Needs(old_logp=OldLogp.BEFORE_STEP)
    assert DS(DSParams(form=form, logp="reference")).needs() == Needs(ref_logp=True)
    assert DS(DSParams(form="reward_seq_mean")).needs() == Needs()


def test_metrics_tell_the_sides_apart() -> None:
    _, metrics = DS(DSParams(gamma_p=0.3, gamma_n=0.2)).calibrate(torch.zeros(7, dtype=torch.float64), two_responses())
    averages = {name: float((m.value_T * m.weight_T).sum() / m.weight_T.sum()) for name, m in metrics.items()}
    assert averages == pytest.approx({"method/ds/term_correct": 0.225, "method/ds/term_other": -0.34})


def with_logp(group: Group, logp: list[list[float]]) -> Group:
    responses = tuple(
        dataclasses.replace(
            response,
            completion=dataclasses.replace(
                response.completion, tokens=torch.arange(len(row)), policy_logp=torch.tensor(row)
            ),
        )
        for response, row in zip(group.responses, logp, strict=True)
    )
    return dataclasses.replace(group, responses=responses)


def reshaped(group: Group, rewards: list[float], **params: object) -> list[float]:
    method = DS(DSParams(form="reward_seq_mean", **params))
    return method.rewards(group, torch.tensor(rewards, dtype=torch.float64)).tolist()


def test_reward_form_by_hand(make_group) -> None:
    """A reward for format alone is not a correct response; a response without tokens has no term."""
    rewards, outcomes = [1.0, 0.0, 0.1, 0.0], [Outcome.CORRECT, Outcome.WRONG, Outcome.FORMAT, Outcome.WRONG]
    group = with_logp(make_group(rewards, outcomes), [[-1.0, -3.0], [-4.0], [-0.5, -0.25, -0.75], []])
    expected = [1.0 + 0.3 * 2.0, 0.0 - 0.2 * 4.0, 0.1 - 0.2 * 0.5, 0.0]
    assert reshaped(group, rewards, gamma_p=0.3, gamma_n=0.2) == pytest.approx(expected)
    assert reshaped(group, rewards, gamma_p=0.0, gamma_n=0.0) == rewards


def test_hooks_of_the_other_forms_are_neutral(make_group) -> None:
    rewards_G = torch.tensor([1.0, 0.0], dtype=torch.float64)
    for form in TOKEN_FORMS:
        assert torch.equal(DS(DSParams(form=form)).rewards(make_group([1.0, 0.0]), rewards_G), rewards_G)
    adv_T = torch.randn(7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(DS(DSParams(form="reward_seq_mean")).calibrate(adv_T, two_responses())[0], adv_T)


def test_division_by_the_deviation_undoes_gamma_in_a_uniform_group(make_group) -> None:
    """The trap that the docstring names: all correct, and any gamma gives advantages of size one."""
    group = with_logp(make_group([1.0, 1.0, 1.0]), [[-1.0], [-2.0], [-3.0]])
    for gamma in (0.001, 0.1):
        rewards_G = torch.tensor(reshaped(group, [1.0] * 3, gamma_p=gamma), dtype=torch.float64)
        advantages_G = GRPO(GRPOParams(epsilon=0.0)).advantages(rewards_G, group)
        assert advantages_G.tolist() == pytest.approx([-1.0, 0.0, 1.0], abs=1e-9)


@each_case("form", TOKEN_FORMS)
def test_gammas_at_zero_are_the_estimator_alone(form: str) -> None:
    assert (term(two_responses(), gamma_p=0.0, gamma_n=0.0, form=form) == 0.0).all()


def test_gamma_may_change_with_the_step() -> None:
    method = DS(DSParams(gamma_p=Ramp(start=0.0, end=0.4, steps=4), gamma_n=0.0))
    adv_T = torch.zeros(7, dtype=torch.float64)
    got_T = method.at(4).calibrate(adv_T, two_responses())[0]
    torch.testing.assert_close(got_T, DS(DSParams(gamma_p=0.3, gamma_n=0.0)).calibrate(adv_T, two_responses())[0])


@each_case(
    ("tree", "message"),
    [
        ({"form": "reward_seq_mean", "logp": "policy"}, "set logp: engine"),
        ({"form": "reward_seq_mean", "logp": "reference"}, "set logp: engine"),
        ({"gamma_p": -0.02}, "gamma_p: expected number >= 0"),
        ({"form": "sequence"}, "form"),
    ],
)
def test_what_is_refused(tree: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message) as refused:
        validate(DSParams, tree, "run.yaml")
    assert "\n" not in str(refused.value)
    with pytest.raises(ValidationError):
        DSParams(**tree)


def test_bundle() -> None:
    recipe = build_recipe(["ds_grpo"], {}, reduction=None, constant=8.0, mini_batches=1)
    assert set(recipe.methods) == {"grpo", "clip", "ds", "ds_grpo"} and recipe.reduction is Reduction.TOKEN_MEAN
    clip, smoothing = recipe.methods["clip"], recipe.methods["ds"]
    assert isinstance(clip, Clip) and clip.params == ClipParams(low=0.2, high=0.25)
    assert isinstance(smoothing, DS) and (smoothing.params.gamma_p, smoothing.params.gamma_n) == (0.01, 0.01)
    assert DSGRPO.paper == DS.paper
    own = {"ds": DSParams(gamma_n=0.5)}
    chosen = build_recipe(["ds_grpo"], own, reduction=None, constant=8.0, mini_batches=1).methods["ds"]
    assert isinstance(chosen, DS) and (chosen.params.gamma_p, chosen.params.gamma_n) == (0.01, 0.5)
