"""IAC's weights against published values, by hand, and in the cases where there is nothing to weigh."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from cases import each_case
from torch import Tensor

from megasharp.algos.grpo import GRPO, GRPOParams
from megasharp.algos.iac import IAC, IACParams
from megasharp.common.records import TokenInputs

FORMS = ["normalized", "literal", "budget", "inverse"]
# Positive advantages of a group of eight by the number of correct ones, alpha = 1: normalized and literal.
VECTORS = {1: (2.1655, 17.3241), 2: (1.2151, 9.7211), 4: (0.4677, 3.7417), 7: (0.0442, 0.3536)}


def step(correct: list[list[int]], lengths: list[list[int]] | None = None, dtype=torch.float64) -> TokenInputs:
    """Groups with these verdicts; response i of each has i + 1 tokens unless `lengths` says otherwise."""
    lengths = lengths or [[i + 1 for i in range(len(group))] for group in correct]
    counts = torch.tensor(list(itertools.chain(*lengths)))

    def spread(values: list[list[int]]) -> Tensor:
        return torch.repeat_interleave(torch.tensor(list(itertools.chain(*values))), counts)

    correct_T = spread(correct).to(dtype)
    return TokenInputs(
        mask_T=torch.ones_like(correct_T),
        seq_T=torch.repeat_interleave(torch.arange(len(counts)), counts),
        group_T=spread([[g] * len(group) for g, group in enumerate(correct)]),
        reward_T=correct_T,
        correct_T=correct_T,
        group_size_T=spread([[len(group)] * len(group) for group in correct]).to(dtype),
        group_correct_T=spread([[sum(group)] * len(group) for group in correct]).to(dtype),
        num_sequences=len(counts),
    )


def grpo(x: TokenInputs) -> Tensor:
    """GRPO's advantages for a step of one group, token by token."""
    first = [int((x.seq_T == i).nonzero()[0]) for i in range(x.num_sequences)]
    rewards_G = x.reward_T[first].double()
    return GRPO(GRPOParams()).advantages(rewards_G, None)[x.seq_T]


def calibrate(adv_T: Tensor, x: TokenInputs, **params: object) -> Tensor:
    return IAC(IACParams(**params)).calibrate(adv_T, x)[0]


@each_case("correct", VECTORS)
def test_published_values(correct: int) -> None:
    x = step([[1] * correct + [0] * (8 - correct)])
    adv_T, positive_T = grpo(x), x.correct_T > 0
    normalized, literal = VECTORS[correct]
    for form, expected in (("normalized", normalized), ("literal", literal)):
        got_T = calibrate(adv_T, x, form=form)
        assert got_T[positive_T].tolist() == pytest.approx([expected] * int(positive_T.sum()), abs=5e-5)
        assert torch.equal(got_T[~positive_T], adv_T[~positive_T])


@each_case("alpha", [0.5, 1.0, 1.5, 2.0])
@each_case("dtype", [torch.float32, torch.float64])
def test_closed_form_in_float64_whatever_the_inputs_are(alpha: float, dtype: torch.dtype) -> None:
    x = step([[1, 0, 0, 0, 0, 1, 0]], dtype=dtype)
    adv_T = torch.where(x.correct_T > 0, 0.7, -0.3).double()
    normalized_T, literal_T = (calibrate(adv_T, x, alpha=alpha, form=form) for form in ("normalized", "literal"))
    expected = [a * (5 / 7) ** alpha if a > 0 else a for a in adv_T.tolist()]
    assert normalized_T.tolist() == pytest.approx(expected, rel=1e-14)
    expected = [a * 5**alpha if a > 0 else a for a in adv_T.tolist()]
    assert literal_T.tolist() == pytest.approx(expected, rel=1e-14)
    inverse_T = calibrate(adv_T, x, alpha=alpha, form="inverse")
    expected = [a * (2 / 7) ** -alpha if a > 0 else a for a in adv_T.tolist()]
    assert inverse_T.tolist() == pytest.approx(expected, rel=1e-14)


def test_budget_redistributes_and_counts_responses_not_tokens() -> None:
    """(1 - p) is 3/4 once and 1/4 three times, mean 3/8: weights 2 and 2/3."""
    x = step([[1, 0, 0, 0], [1, 1, 0, 1]], lengths=[[9, 1, 1, 1], [1, 2, 3, 4]])
    weight_T = calibrate(torch.ones_like(x.mask_T), x, form="budget")
    hard_T, easy_T = (x.correct_T > 0) & (x.group_T == 0), (x.correct_T > 0) & (x.group_T == 1)
    assert weight_T[hard_T].tolist() == pytest.approx([2.0] * 9)
    assert weight_T[easy_T].tolist() == pytest.approx([2 / 3] * 7)
    assert (weight_T[x.correct_T == 0] == 1.0).all()


def test_budget_leaves_out_what_has_no_advantage() -> None:
    """The all-correct group has weight zero; counted, it would double the other group's weight of one."""
    x = step([[1, 0], [1, 1]])
    adv_T = torch.where(x.group_T == 0, 2.0 * x.correct_T - 1.0, 0.0)
    assert torch.equal(calibrate(adv_T, x, form="budget"), adv_T)


@each_case("form", FORMS)
def test_alpha_zero_is_the_estimator_alone(form: str) -> None:
    x = step([[1, 0, 0], [1, 1], [0, 0], [1]])
    adv_T = torch.linspace(-1.0, 1.3, x.mask_T.numel(), dtype=torch.float64)
    assert torch.equal(calibrate(adv_T, x, alpha=0.0, form=form), adv_T)


@each_case("form", FORMS)
def test_only_positive_advantages_of_correct_responses_change(form: str) -> None:
    """Wrong responses with a positive one, and correct ones that another rule made negative, stay."""
    x = step([[1, 1, 0, 0, 0], [1, 0]], lengths=[[1] * 5, [1] * 2])
    adv_T = torch.tensor([0.5, -0.4, 0.3, -0.2, 0.0, 0.5, -0.5], dtype=torch.float64)
    changed_T = calibrate(adv_T, x, alpha=2.0, form=form) != adv_T
    # A literal weight of a single wrong response is 1.
    assert changed_T.tolist() == [True, False, False, False, False, form != "literal", False]


@each_case("form", FORMS)
@each_case("correct", [[[0, 0, 0]], [[1, 1, 1]], [[0]], [[1]]])
def test_nothing_to_compare(form: str, correct: list[list[int]]) -> None:
    """Zero advantages stay zero, without NaN, in groups that are all correct, all wrong or alone."""
    x = step(correct)
    weighed_T, metrics = IAC(IACParams(form=form)).calibrate(torch.zeros_like(x.mask_T), x)
    assert torch.equal(weighed_T, torch.zeros_like(x.mask_T))
    assert all(metric.value_T.isfinite().all() and not metric.weight_T.any() for metric in metrics.values())


@each_case(("alpha", "weight"), [(0.0, 1.0), (1.0, 0.0)])
def test_zero_to_the_power_of_zero_is_one(alpha: float, weight: float) -> None:
    """All correct, under an estimator that gives such a group an advantage; also where nothing else is positive."""
    x = step([[1, 1]])
    for form in FORMS:
        # Only this form is a power of the success rate, which is 1.
        expected = 1.0 if form == "inverse" else weight
        assert (calibrate(torch.ones_like(x.mask_T), x, alpha=alpha, form=form) == expected).all()


def test_masked_tokens_count_nowhere() -> None:
    x = step([[1, 0, 0, 0], [1, 1, 0, 1]])
    mask_T = (x.seq_T != 0).double()
    adv_T = torch.ones_like(mask_T)
    weight_T = calibrate(adv_T, dataclasses.replace(x, mask_T=mask_T), form="budget")
    assert torch.equal(weight_T[mask_T == 0], adv_T[mask_T == 0])
    assert weight_T[mask_T > 0].tolist() == pytest.approx([1.0] * int(mask_T.sum()))


@each_case("form", FORMS)
def test_metrics_are_over_positive_trajectories(form: str) -> None:
    """One trajectory where 4/5 are wrong, four where 1/5 are and three where 2/5 are."""
    x = step([[1, 0, 0, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 0, 0]])
    _, metrics = IAC(IACParams(form=form)).calibrate(2.0 * x.correct_T - 1.0, x)
    averages = {name: float((m.value_T * m.weight_T).sum() / m.weight_T.sum()) for name, m in metrics.items()}
    mean = {
        "normalized": (0.8 + 4 * 0.2 + 3 * 0.4) / 8,
        "literal": (4 + 4 * 1 + 3 * 2) / 8,
        "budget": 1.0,
        # Each group of five with a correct one adds 5.
        "inverse": (5 / 1 + 4 * 5 / 4 + 3 * 5 / 3) / 8,
    }[form]
    assert averages == pytest.approx(
        {
            "method/iac/weight": mean,
            "method/iac/weight_0.0_0.2": 0.0,
            "method/iac/weight_0.2_0.4": 4 / 8,
            "method/iac/weight_0.4_0.6": 3 / 8,
            "method/iac/weight_0.6_0.8": 0.0,
            "method/iac/weight_0.8_1.0": 1 / 8,
        }
    )
    assert all(float(m.weight_T.sum()) == pytest.approx(8.0) for m in metrics.values())


def test_a_weight_of_one_is_in_the_last_bin() -> None:
    x = step([[1, 0, 0]])
    _, metrics = IAC(IACParams(alpha=0.0)).calibrate(x.correct_T, x)
    last = metrics["method/iac/weight_0.8_1.0"]
    assert torch.equal(last.value_T, torch.ones_like(x.mask_T))
