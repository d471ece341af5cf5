"""The k3 penalty: value, gradient, and that its mean under the policy is the divergence itself."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from megasharp.algos.base import Needs
from megasharp.algos.kl import KL, KLParams


def penalty(make_micro, logp_T: Tensor, ref_logp_T: Tensor, coefficient: float):
    x = make_micro(Needs(ref_logp=True)).inputs
    x = dataclasses.replace(x, mask_T=torch.ones_like(logp_T), logp_T=logp_T, ref_logp_T=ref_logp_T)
    return KL(KLParams(coefficient=coefficient)).penalty(x)


def test_value_and_gradient(make_micro) -> None:
    logp_T = torch.tensor([-1.0, -0.5, -2.0], dtype=torch.float64, requires_grad=True)
    ref_T = torch.tensor([-1.0, -1.5, -0.3], dtype=torch.float64)
    loss_T, metrics = penalty(make_micro, logp_T, ref_T, 0.25)
    loss_T.sum().backward()
    ratio_T = (ref_T - logp_T).exp().detach()
    k3_T = ratio_T - 1 + (logp_T - ref_T).detach()
    torch.testing.assert_close(loss_T, 0.25 * k3_T)
    torch.testing.assert_close(logp_T.grad, 0.25 * (1 - ratio_T))
    torch.testing.assert_close(metrics["policy/kl_ref"].value_T, k3_T)
    assert loss_T[0] == 0 and (loss_T[1:] > 0).all()


def test_expectation_under_the_policy_is_the_divergence(make_micro) -> None:
    """Enumerated over a vocabulary of five."""
    generator = torch.Generator().manual_seed(0)
    logp_V, ref_V = torch.randn(2, 5, generator=generator, dtype=torch.float64).log_softmax(-1)
    loss_V, _ = penalty(make_micro, logp_V, ref_V, 1.0)
    expected = (logp_V.exp() * (logp_V - ref_V)).sum()
    assert float((logp_V.exp() * loss_V).sum()) == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize("ref", [1e6, -1e6])
def test_stray_difference_is_bounded(make_micro, ref: float) -> None:
    logp_T = torch.tensor([-1.0], requires_grad=True)
    loss_T, _ = penalty(make_micro, logp_T, torch.tensor([ref]), 1.0)
    loss_T.sum().backward()
    assert loss_T.isfinite().all() and logp_T.grad is not None and float(logp_T.grad) == 0.0
