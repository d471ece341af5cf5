"""Transfer between questions: hand calculations, a model whose values are linear in its weights, and the verdicts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megasharp.studies.bounds import gradients, transfer
from megasharp.studies.bounds.gradients import READINGS
from megasharp.studies.bounds.transfer import SIZES, UPDATES, Transfer, effective_number, proportional, transfer_claims
from megasharp.studies.study import Findings, Outcome
from megasharp.tasks.tokenizer import TextTokenizer


class Linear(nn.Module):
    """The logit of token v after token u is a weight of its own, plus one that all share: linear in the weights."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = nn.Parameter(torch.randn(6, 6, generator=generator))
        self.shared = nn.Parameter(torch.randn(6, generator=generator))

    def forward(self, tokens: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.table[tokens] + self.shared)


@pytest.fixture
def samples() -> gradients.Samples:
    """Two questions, 0 and 1, with eight responses of two tokens each."""
    pairs = [(a, b) for a in (2, 3, 4, 5) for b in (2, 3)]
    responses = tuple((question, pair) for question in (0, 1) for pair in pairs)
    # Nothing here reads or writes text.
    tokenizer = cast(TextTokenizer, None)
    return gradients.Samples(Linear(), tokenizer, ((0,), (1,)), responses, np.arange(16) % 3 == 0)


def test_effective_number_by_hand() -> None:
    """Equal ones all count; weights 1, 2, 3 count as 36 / 14."""
    np.testing.assert_allclose(effective_number(np.log([[0.5, 0.5, 0.5], [1.0, 1 / 2, 1 / 3]])), [3.0, 36 / 14])


def test_proportional_is_least_squares() -> None:
    x, y = np.array([1.0, 2.0, 0.0]), np.array([2.0, 4.0, 5.0])
    assert proportional(x, y) == (pytest.approx(2.0), pytest.approx(20 / 45))
    assert proportional(x, -3.0 * x) == (pytest.approx(-3.0), pytest.approx(1.0))


def test_logits_that_are_linear_follow_the_prediction(samples: gradients.Samples) -> None:
    """Any size, for the least-norm update; a gradient step on them is another update."""
    kernel = gradients.measure(samples, 0)
    before = [weight.clone() for weight in samples.model.parameters()]
    followed = transfer._follow(samples, kernel, 0, "logit")
    np.testing.assert_allclose(followed[0], 1.0, atol=1e-6)
    assert (followed[1] < 0.999).all() and (followed <= 1.0 + 1e-9).all()
    assert all(torch.equal(old, new) for old, new in zip(before, samples.model.parameters(), strict=True))
    # Log-probs are not linear: small steps follow, large ones do not.
    followed = transfer._follow(samples, kernel, 0, "log-prob")
    assert followed[0, 0] > 0.9999 > 0.999 > followed[0, -1]


def test_the_least_norm_update_reaches_the_wanted_shifts(samples: gradients.Samples) -> None:
    """On its own responses, by the pseudo-inverse of the Jacobian."""
    kernel = gradients.measure(samples, 0)
    responses = [response for question, response in samples.responses if question == 0]
    jacobian_RD = torch.stack(
        [gradients.flat_gradient(samples.model, (0,), response, "logit", 0) for response in responses]
    ).double()
    wanted_R = jacobian_RD.numpy() @ np.random.default_rng(1).normal(size=jacobian_RD.shape[1])
    dual_R = np.linalg.pinv(kernel.gram_RR["logit"][:8, :8], rcond=transfer.SINGULAR, hermitian=True) @ wanted_R
    update = transfer._direction(samples, 0, responses, dual_R, "logit")
    flat_D = torch.cat([part.flatten() for part in update]).double().numpy()
    np.testing.assert_allclose(flat_D, np.linalg.pinv(jacobian_RD.numpy()) @ wanted_R, atol=1e-4)
    np.testing.assert_allclose(jacobian_RD.numpy() @ flat_D, wanted_R, atol=1e-4)


def test_prompts_that_share_all_or_nothing(samples: gradients.Samples, monkeypatch: pytest.MonkeyPatch) -> None:
    """One factor of 1 where both questions have one prompt; another one where the first token's weights differ."""
    monkeypatch.setattr(transfer, "PAIRS", 1)
    factors = transfer._factors(replace(samples, prompts=((0,), (0,))), "logit", 0)
    np.testing.assert_allclose(factors, [[1.0, 1.0]], atol=1e-6)
    # The first token's own weights are those of another prompt then; the rest of both gradients is the same.
    (factor, explained), *_ = transfer._factors(samples, "logit", 0)
    assert 0.5 < factor < 1.0 and 0.9 < explained < 1.0


def test_the_claims_can_go_either_way(small_run: Callable[[str], Findings]) -> None:
    def judged(share: float, effective: float) -> list[Outcome]:
        share_Q, by_reading = np.full(6, share), dict.fromkeys(READINGS, np.full(6, share))
        followed = {(r, u, s): share_Q for r in READINGS for u in UPDATES for s in SIZES}
        found = Transfer(by_reading, by_reading, followed, np.full(6, effective))
        return [claim.outcome for claim in transfer_claims(found)]

    assert judged(0.95, 20.0) == [Outcome.REPRODUCED] * 5
    assert judged(0.8, 40.0) == [Outcome.PARTLY] * 2 + [Outcome.DIFFERS] * 3
    assert judged(0.3, 20.0) == [Outcome.DIFFERS] * 4 + [Outcome.REPRODUCED]
    assert {table.name for table in small_run("bounds").tables} >= {"assumption_3_2", "appendix_e", "skewed", "iac"}
