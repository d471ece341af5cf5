"""The bonus on uncertain tokens: closed form, bound, sign."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from cases import each_case
from torch import Tensor

from megasharp.algos.base import Needs
from megasharp.algos.entropy_adv import EntropyAdv, EntropyAdvParams
from megasharp.common.records import TokenInputs

ADVANTAGES = [1.0, 1.0, -1.0, -1.0, 0.0, 0.5, 0.0]
ENTROPIES = [0.5, 3.0, 0.5, 3.0, 3.0, 0.0, 0.0]
# a = 0.4 and kappa = 2: the smaller of 0.4 H and |A| / 2.
EXPECTED = [1.2, 1.5, -0.8, -0.5, 0.0, 0.5, 0.0]


@pytest.fixture
def x(make_micro) -> TokenInputs:
    """The first seven tokens, unmasked."""
    inputs = make_micro(Needs()).inputs
    old_entropy_T = torch.zeros_like(inputs.mask_T)
    old_entropy_T[:7] = torch.tensor(ENTROPIES, dtype=torch.float64)
    return dataclasses.replace(inputs, mask_T=(torch.arange(14) < 7).double(), old_entropy_T=old_entropy_T)


def advantages(values: list[float]) -> Tensor:
    return torch.tensor(values + [0.0] * (14 - len(values)), dtype=torch.float64)


def test_by_hand(x: TokenInputs) -> None:
    got_T, metrics = EntropyAdv(EntropyAdvParams()).calibrate(advantages(ADVANTAGES), x)
    torch.testing.assert_close(got_T, advantages(EXPECTED))
    averages = {name: float((m.value_T * m.weight_T).sum() / m.weight_T.sum()) for name, m in metrics.items()}
    assert averages == pytest.approx({"method/entropy_adv/bonus": 1.4 / 7, "method/entropy_adv/bounded": 3 / 7})


@each_case("kappa", [1.01, 2.0, 10.0])
@each_case("a", [0.1, 0.4, 100.0])
def test_sign_and_zero_are_kept(x: TokenInputs, a: float, kappa: float) -> None:
    adv_T = torch.randn(14, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    adv_T[3] = 0.0
    got_T, _ = EntropyAdv(EntropyAdvParams(a=a, kappa=kappa)).calibrate(adv_T, x)
    assert torch.equal(got_T.sign(), adv_T.sign())
    assert (got_T >= adv_T).all() and (got_T - adv_T <= adv_T.abs() / kappa + 1e-15).all()


def test_a_zero_is_the_estimator_alone(x: TokenInputs) -> None:
    adv_T = torch.randn(14, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert torch.equal(EntropyAdv(EntropyAdvParams(a=0.0)).calibrate(adv_T, x)[0], adv_T)


def test_reads_the_entropy_before_the_update() -> None:
    assert EntropyAdv(EntropyAdvParams()).needs() == Needs(old_entropy=True)
