"""A model's candidates: counts by hand, a model with a known distribution, and the verdicts."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megasharp.studies.squeeze import candidates
from megasharp.studies.squeeze.candidates import Candidates, candidates_claims, candidates_table, needed
from megasharp.studies.study import Findings, Outcome


def test_candidates_needed_by_hand() -> None:
    ordered_TV = torch.tensor([[0.96, 0.03, 0.01], [0.9, 0.06, 0.04], [0.4, 0.35, 0.25]], dtype=torch.float64)
    assert needed(ordered_TV).tolist() == [1, 2, 3]
    assert needed(ordered_TV, 0.5).tolist() == [1, 1, 2]


def test_each_token_is_read_where_it_was_sampled() -> None:
    """After token u the model's logits are row u: two tokens after the prompt's last one read rows 1 and 3."""
    table_VV = torch.log(
        torch.tensor([[0.1, 0.2, 0.3, 0.4]] + [[0.7, 0.1, 0.05, 0.15]] * 2 + [[0.02, 0.02, 0.01, 0.95]])
    )

    def model(tokens: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=table_VV[tokens])

    top_TN, needed_T, sampled_T = candidates._read(model, (0, 1), (3, 3))
    np.testing.assert_allclose(top_TN.numpy(), [[0.7, 0.15, 0.1], [0.95, 0.02, 0.02]], atol=1e-6)
    assert needed_T.tolist()[0] == 3 and sampled_T.tolist() == [False, True]


def made_up(top: list[float], count: int, tokens: int = 40) -> Candidates:
    response_T = np.repeat(np.arange(tokens // 4), 4)
    return Candidates(response_T, np.tile(top, (tokens, 1)), np.full(tokens, count), np.ones(tokens, dtype=bool))


def test_the_claims_follow_the_figures() -> None:
    def judged(found: Candidates) -> list[Outcome]:
        return [claim.outcome for claim in candidates_claims(found)]

    assert judged(made_up([0.9, 0.08, 0.01], 2)) == [Outcome.REPRODUCED] * 3
    assert judged(made_up([0.5, 0.2, 0.1], 6)) == [Outcome.DIFFERS] * 3
    assert judged(made_up([0.99, 0.006, 0.003], 1))[2] is Outcome.DIFFERS
    mixed = made_up([0.9, 0.08, 0.01], 2)
    mixed.top_TN[::4] = [0.5, 0.3, 0.1]
    mixed.top_TN[1::4] = [0.998, 0.001, 0.001]
    assert judged(mixed)[:2] == [Outcome.PARTLY, Outcome.DIFFERS]


def test_bins_and_means_by_response() -> None:
    found = made_up([0.9, 0.08, 0.02], 2, tokens=8)
    found.top_TN[0] = [0.6, 0.3, 0.1]
    (_, mean, *bins), *_ = candidates_table(found).rows
    assert mean == pytest.approx((7 * 0.9 + 0.6) / 8) and bins == [0.0, 0.0, 0.0, 1 / 8, 7 / 8, 0.0]
    np.testing.assert_allclose(found.per_response(found.top_TN[:, 2]), [(0.1 + 3 * 0.02) / 4, 0.02])


def test_the_study_measures_a_model(small_run: Callable[[str], Findings]) -> None:
    findings = small_run("squeeze")
    assert findings.tables[-1].name == "candidates" and "development" in findings.settings
    assert findings.claims[-1].where.startswith("figs 11-13")


def test_the_shipped_model_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    if not candidates.DEFAULT_MODEL.is_dir():
        pytest.skip("the quickstart's model is not here")
    records = candidates.read_records(candidates.PROBLEMS)[:3]
    monkeypatch.setattr(candidates, "read_records", lambda path: records)
    found = candidates.measure_candidates(candidates.DEFAULT_MODEL, 0)
    assert len(found.per_response(found.needed_T)) == 3 * candidates.RESPONSES
    assert (np.diff(found.top_TN, axis=1) <= 0).all() and 0.5 < found.sampled_T.mean() < 1.0
