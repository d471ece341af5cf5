"""The tangent kernel: closed forms of a linear model, torch's own Jacobian, and verdicts on made-up measurements."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from megasharp.studies.actions import tangent
from megasharp.studies.actions.tangent import Drift, FirstOrder, Measured, drift, first_order, judge
from megasharp.studies.study import Outcome

X = torch.tensor([[1.0, -2.0, 0.5], [0.3, 0.1, -1.0]], dtype=torch.float64)


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 5, dtype=torch.float64)


def test_a_linear_models_kernel_is_a_multiple_of_one() -> None:
    """J of W x + b is x by logit and 1 for the bias: K = (|x|^2 + 1) I, so K dz is dz but for its size."""
    model = linear()
    parameters = list(model.parameters())
    scale = float(X[0] @ X[0]) + 1.0
    kernel_VV = tangent.tangent_kernel(model(X[0]), parameters)
    torch.testing.assert_close(kernel_VV.detach(), scale * torch.eye(5, dtype=torch.float64))
    start = parameters_to_vector(parameters).detach().clone()
    found = first_order(lambda: model(X[0]), parameters, 2)
    assert (found.cosine, found.gain) == (pytest.approx(1.0), pytest.approx(scale))
    torch.testing.assert_close(parameters_to_vector(parameters).detach(), start)


def test_the_error_of_a_linear_model_is_that_of_the_softmax() -> None:
    """Logits move by exactly rate * scale * (one_hot - pi); what is left is log-softmax's own second order."""
    model = linear()
    found = first_order(lambda: model(X[0]), list(model.parameters()), 2)
    logits_V = model(X[0]).detach()
    pull_V = torch.eye(5, dtype=torch.float64)[2] - logits_V.softmax(-1)
    unit_V = tangent.to_log_probs(logits_V.softmax(-1), pull_V)
    for size, error in zip(tangent.SIZES, found.errors, strict=True):
        rate = size / unit_V.square().mean().sqrt()
        moved_V = (logits_V + rate * pull_V).log_softmax(-1) - logits_V.log_softmax(-1)
        assert error == pytest.approx(float((moved_V - rate * unit_V).norm() / (rate * unit_V).norm()), rel=1e-6)
    assert found.errors[2] / found.errors[0] == pytest.approx(10.0, rel=0.1)


def test_log_probs_follow_logits_by_autograd() -> None:
    logits_V = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64)
    change_V = torch.tensor([1.0, 0.5, -2.0], dtype=torch.float64)
    _, moved_V = torch.func.jvp(lambda z: z.log_softmax(-1), (logits_V,), (change_V,))
    torch.testing.assert_close(tangent.to_log_probs(logits_V.softmax(-1), change_V), moved_V)


def network() -> tuple[nn.Sequential, list[nn.Parameter]]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5)).double()
    return model, list(model.parameters())


def test_the_jacobian_is_torchs() -> None:
    model, parameters = network()
    named = dict(model.named_parameters())
    ours = tangent.jacobian(model(X[0]), parameters)
    whole = torch.func.jacrev(lambda given: torch.func.functional_call(model, given, (X[0],)))(named)
    torch.testing.assert_close(ours, torch.cat([whole[name].flatten(1) for name in named], dim=1).detach())


def test_drift_is_none_for_a_linear_model_and_sgd_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tangent, "STEPS", (1, 3))
    weight = torch.zeros(2, 5, dtype=torch.float64)
    weight[0, 1], weight[1, 4] = 0.5, -0.25
    line = linear()
    still = drift([lambda: line(X[0])], lambda: line(X).log_softmax(-1), weight, list(line.parameters()))
    assert [one.changes for one in still] == [pytest.approx((0.0,), abs=1e-12)] * 2
    (model, parameters), (other, own) = network(), network()
    before = tangent.tangent_kernel(other(X[1]), own)
    found = drift([lambda: model(X[1])], lambda: model(X).log_softmax(-1), weight, parameters)
    optimizer, start = torch.optim.SGD(own, lr=tangent.LR), other(X).log_softmax(-1).detach()
    for _ in range(3):
        optimizer.zero_grad()
        loss: Tensor = -(weight * other(X).log_softmax(-1)).sum()
        torch.autograd.backward(loss)
        optimizer.step()
    moved = (other(X).log_softmax(-1).detach() - start)[weight != 0].abs().mean()
    after = tangent.tangent_kernel(other(X[1]), own)
    assert (found[1].steps, found[1].moved) == (3, pytest.approx(float(moved)))
    assert found[1].changes == pytest.approx((float((after - before).norm() / before.norm()),))


def made(errors: tuple[float, ...], change: float, cosine: float, gains: tuple[float, float]) -> Measured:
    places = tuple(FirstOrder(errors, cosine, gain) for gain in gains)
    return Measured(places, (Drift(2, 0.1, (0.0, 0.0)), Drift(6, 0.4, (change, 0.05))))


def test_the_claims_can_hold_and_fail() -> None:
    good = made((0.01, 0.03, 0.1, 0.3, 1.0), 0.05, 0.99, (1.0, 1.5))
    bad = made((0.5, 0.5, 0.5, 0.5, 0.5), 0.9, 0.2, (1.0, 90.0))
    mixed = made((0.01, 0.03, 0.1, 0.3, 1.0), 0.12, 0.2, (1.0, 1.5))
    assert [claim.outcome for claim in judge(good)] == [Outcome.REPRODUCED] * 3
    assert [claim.outcome for claim in judge(bad)] == [Outcome.DIFFERS] * 3
    assert [claim.outcome for claim in judge(mixed)] == [Outcome.REPRODUCED, Outcome.PARTLY, Outcome.PARTLY]


def test_no_model_no_measurement(tmp_path: Path) -> None:
    assert tangent.measure(0, tmp_path / "none") is None


def test_a_short_run_on_the_shipped_model(monkeypatch: pytest.MonkeyPatch) -> None:
    if not tangent.MODEL.is_dir():
        pytest.skip("the quickstart's model is not here")
    for name, value in (("QUESTIONS", 2), ("PLACES", 1), ("STEPS", (1,))):
        monkeypatch.setattr(tangent, name, value)
    measured = tangent.measure(3)
    assert measured is not None and judge(measured)[0].outcome is Outcome.REPRODUCED
    assert [len(measured.places), len(measured.drifts)] == [1, 1]
