"""The studies' softmax policy against autograd and torch's optimizers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megasharp.studies.softmax import Adam, Ascent, Optimizer, entropy, policy_gradient, sample, softmax, uniforms


def test_policy_gradient_is_autograds() -> None:
    rng = np.random.default_rng(1)
    logit_RV, action_RG, weight_RG = rng.normal(size=(3, 5)), rng.integers(0, 5, (3, 7)), rng.normal(size=(3, 7))
    z = torch.tensor(logit_RV, requires_grad=True)
    logp_RG = torch.log_softmax(z, -1).gather(1, torch.tensor(action_RG))
    (torch.tensor(weight_RG) * logp_RG).mean(1).sum().backward()
    assert z.grad is not None
    np.testing.assert_allclose(policy_gradient(softmax(logit_RV), action_RG, weight_RG), z.grad.numpy(), atol=1e-14)


def torch_optimizer(name: str, parameter: torch.Tensor) -> torch.optim.Optimizer:
    if name == "AdamW":
        return torch.optim.AdamW([parameter], lr=0.3, weight_decay=0.05, maximize=True)
    return torch.optim.SGD([parameter], lr=0.3, momentum=0.9 if name == "momentum" else 0.0, maximize=True)


@pytest.mark.parametrize("name", ["SGD", "momentum", "AdamW"])
def test_optimizers_are_torchs(name: str) -> None:
    ours: Optimizer = {"SGD": Ascent(0.3), "momentum": Ascent(0.3, 0.9), "AdamW": Adam(0.3, 0.05)}[name]
    start = np.array([0.5, -1.0, 2.0])
    reference = torch.tensor(start, requires_grad=True)
    theirs = torch_optimizer(name, reference)
    for _ in range(30):
        theirs.zero_grad()
        (-torch.log(torch.cosh(reference - 1.0)).sum()).backward()
        theirs.step()
        start = start + ours.change(-np.tanh(start - 1.0), start)
        assert np.isfinite(start).all()
        np.testing.assert_allclose(start, reference.detach().numpy(), rtol=1e-12, atol=1e-12)


def test_samples_follow_the_policy() -> None:
    policy_RV = np.array([[0.5, 0.2, 0.0, 0.3], [0.0, 0.0, 1.0, 0.0]])
    action_RG = sample(policy_RV, uniforms([0, 1], 1, 20_000)[:, 0])
    frequency_RV = np.stack([np.bincount(actions, minlength=4) / 20_000 for actions in action_RG])
    np.testing.assert_allclose(frequency_RV, policy_RV, atol=0.015)
    assert frequency_RV[0, 2] == 0.0 and frequency_RV[1, 2] == 1.0


def test_a_seed_draws_the_same_numbers_in_any_company() -> None:
    np.testing.assert_array_equal(uniforms([3, 7], 5, 4)[1], uniforms([7], 5, 4)[0])


def test_entropy() -> None:
    np.testing.assert_allclose(entropy(np.array([[0.25] * 4, [1.0, 0.0, 0.0, 0.0]])), [np.log(4.0), 0.0], atol=1e-12)
