"""GSPO: one ratio per response, in its two forms; GSPO-N; what cannot stand beside it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from cases import each_case

from megasharp.algos.base import Needs, OldLogp, Reduction
from megasharp.algos.build_recipe import build_recipe
from megasharp.algos.casp import CaSPParams
from megasharp.algos.clip import ClipParams
from megasharp.algos.gspo import GSPO, GSPOParams
from megasharp.algos.truncated_is import TruncatedISParams
from megasharp.common.errors import UserError

NEEDS = Needs(old_logp=OldLogp.IN_LOSS)
# So wide that nothing is clipped.
OPEN = {"clip": ClipParams(low=1.0, high=1e6)}


def by_response(micro, values: list[float]):
    """The micro-batch with one advantage per response."""
    return dataclasses.replace(micro, advantage_T=torch.tensor(values, dtype=torch.float64)[micro.inputs.seq_T])


@each_case("level", ["sequence", "token"])
def test_ratio_is_the_geometric_mean_over_unmasked_tokens(make_micro, level: str) -> None:
    x = make_micro(NEEDS).inputs
    logr_T = x.logp_T - x.old_logp_T
    got_T = GSPO(GSPOParams(level=level)).log_ratio(logr_T, x, logr_T)
    for number in range(x.num_sequences):
        kept = (x.seq_T == number) & (x.mask_T > 0)
        if kept.any():
            expected = (logr_T[kept].exp().prod() ** (1.0 / int(kept.sum()))).log()
            torch.testing.assert_close(got_T[kept], expected.expand(int(kept.sum())), rtol=1e-12, atol=1e-12)


def test_gradient_of_one_response_by_hand(make_micro, grade) -> None:
    """Two tokens, A = 2, log-ratios 0.1 and 0.3: s = exp(0.2), d loss / d logp_t = -A s / 2 of the mean's half."""
    micro = make_micro(NEEDS)
    x = micro.inputs
    mask_T = (torch.arange(14) < 2).double()
    old_T = x.logp_T - torch.tensor([0.1, 0.3] + [0.0] * 12, dtype=torch.float64)
    micro = dataclasses.replace(
        micro,
        inputs=dataclasses.replace(x, mask_T=mask_T, old_logp_T=old_T),
        length_S=torch.tensor([2.0, 0.0, 0.0, 0.0], dtype=torch.float64),
        advantage_T=torch.full((14,), 2.0, dtype=torch.float64),
    )
    loss, gradient_T, _ = grade(micro, ["grpo", "gspo"], OPEN, reduction=None)
    ratio = torch.tensor(0.2, dtype=torch.float64).exp()
    assert loss == pytest.approx(-2.0 * float(ratio), rel=1e-12)
    torch.testing.assert_close(gradient_T[:2], (-ratio).expand(2), rtol=1e-12, atol=0.0)
    assert (gradient_T[2:] == 0).all()


def test_forms_agree_where_a_response_has_one_advantage(make_micro, grade) -> None:
    micro = by_response(make_micro(NEEDS), [1.0, -2.0, 0.5, -0.3])
    by_sequence = grade(micro, ["grpo", "gspo"], OPEN, reduction=None)
    by_token = grade(micro, ["grpo", "gspo"], OPEN | {"gspo": GSPOParams(level="token")}, reduction=None)
    assert by_token[0] == pytest.approx(by_sequence[0], rel=1e-12)
    torch.testing.assert_close(by_token[1], by_sequence[1], rtol=1e-12, atol=1e-15)


def test_forms_differ_where_advantages_differ_by_token(make_micro, grade) -> None:
    micro = make_micro(NEEDS)
    by_sequence = grade(micro, ["grpo", "gspo"], OPEN, reduction=None)
    by_token = grade(micro, ["grpo", "gspo"], OPEN | {"gspo": GSPOParams(level="token")}, reduction=None)
    assert by_token[0] == pytest.approx(by_sequence[0], rel=1e-12)
    assert (by_token[1] - by_sequence[1]).abs().max() > 1e-3


def test_responses_of_one_token_are_grpo(make_micro, grade) -> None:
    micro = make_micro(NEEDS)
    first_T = (torch.arange(14)[:, None] == torch.tensor([0, 4, 5, 11])).any(1).double()
    inputs = dataclasses.replace(micro.inputs, mask_T=first_T)
    micro = dataclasses.replace(micro, inputs=inputs, length_S=torch.ones(4, dtype=torch.float64))
    clip = {"clip": ClipParams(low=0.2, high=0.2)}
    one, other = (grade(micro, names, clip) for names in (["grpo", "gspo"], ["grpo"]))
    assert one[0] == pytest.approx(other[0], rel=1e-12)
    torch.testing.assert_close(one[1], other[1], rtol=1e-12, atol=0.0)


def test_a_response_is_clipped_as_a_whole(make_micro, grade) -> None:
    """A positive response above 1 + 4e-4 has no gradient at any token, though single ratios may be below 1."""
    micro = by_response(make_micro(NEEDS), [1.0] * 4)
    gap_T = torch.tensor([-0.5, 0.5, 0.1], dtype=torch.float64)[torch.arange(14) % 3]
    x = dataclasses.replace(micro.inputs, old_logp_T=micro.inputs.logp_T - gap_T)
    _, gradient_T, metrics = grade(dataclasses.replace(micro, inputs=x), ["grpo", "gspo"], reduction=None)
    for number in range(4):
        kept = (x.seq_T == number) & (x.mask_T > 0)
        clipped = kept.any() and float(gap_T[kept].mean()) > 4e-4
        assert not clipped or (gradient_T[kept] == 0).all()
    assert 0.0 < metrics["policy/clip_high"] < 1.0


def test_bundle_has_the_papers_reduction_and_only_negatives(make_micro, grade) -> None:
    recipe = build_recipe(["gspo_n"], {}, reduction=None, constant=1.0, mini_batches=1)
    assert recipe.reduction is Reduction.SEQ_MEAN_TOKEN_MEAN
    assert {"grpo", "gspo", "negative_only", "clip"} <= recipe.methods.keys()
    assert (recipe.methods["clip"].params.low, recipe.methods["clip"].params.high) == (3e-4, 4e-4)
    micro = by_response(make_micro(NEEDS), [1.0, -2.0, 0.5, -0.3])
    _, gradient_T, _ = grade(micro, ["gspo_n"], OPEN, reduction=None)
    only_T = torch.where(micro.advantage_T < 0, micro.advantage_T, 0.0)
    _, expected_T, _ = grade(dataclasses.replace(micro, advantage_T=only_T), ["grpo", "gspo"], OPEN, reduction=None)
    torch.testing.assert_close(gradient_T, expected_T, rtol=1e-12, atol=0.0)
    assert (gradient_T[micro.advantage_T > 0] == 0).all() and (gradient_T != 0).any()


@each_case(
    ("names", "params"),
    [
        (["grpo", "gspo", "truncated_is"], {}),
        (["grpo", "truncated_is", "gspo"], {"gspo": GSPOParams(level="token")}),
        (["grpo", "gspo", "casp"], {}),
        (["grpo", "gspo", "bypass"], {}),
        (["gspo_n", "truncated_is"], {}),
        (["grpo", "gspo", "cispo"], {}),
        (["grpo", "gspo", "kl_cov"], {}),
        (["grpo", "gspo", "reinforce"], {}),
    ],
)
def test_refused_naming_both(names: list[str], params) -> None:
    with pytest.raises(UserError, match="'gspo'") as refused:
        build_recipe(names, params, reduction=Reduction.TOKEN_MEAN, constant=1.0, mini_batches=1)
    (other,) = set(names) & {"truncated_is", "casp", "bypass", "cispo", "kl_cov", "reinforce"}
    assert repr(other) in str(refused.value) and "\n" not in str(refused.value)


@each_case(
    "params",
    [
        {"truncated_is": TruncatedISParams(level="sequence")},
        {"truncated_is": TruncatedISParams(level="geometric")},
        {"casp": CaSPParams(penalty_on="advantage")},
    ],
)
def test_what_speaks_of_whole_responses_may_stand_beside_it(params) -> None:
    names = ["grpo", "gspo", *params]
    assert set(names) <= build_recipe(names, params, reduction=None, constant=1.0, mini_batches=1).methods.keys()
