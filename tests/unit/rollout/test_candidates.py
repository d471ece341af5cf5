"""A given text's candidates against transformers' own forward pass in float64, and against a distribution by hand."""

from __future__ import annotations

import math

import pytest
import torch
from cases import each_case

from megasharp.common.errors import UserError
from megasharp.rollout.inprocess import engine as module
from megasharp.rollout.inprocess.engine import candidates_of
from tests.unit.families import CLASSES
from tests.unit.rollout.conftest import MakeModel, engine_of

PROMPT, RESPONSE = (3, 7, 1, 9, 4), (2, 11, 12, 5, 0, 6, 22)


@each_case("family", CLASSES)
@each_case("rows", [1, 3, 1000])
def test_candidates_equal_transformers_logits(
    make_model: MakeModel, monkeypatch: pytest.MonkeyPatch, family: str, rows: int
) -> None:
    """In blocks of any size."""
    model, folder = make_model(family)
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", 23 * rows)
    found = engine_of(model, folder).candidates(PROMPT, RESPONSE, 5)
    if model._can_set_experts_implementation():
        # The grouped product knows no float64.
        model.set_experts_implementation("eager")
    with torch.no_grad():
        logits = model.double()(torch.tensor([[*PROMPT, *RESPONSE]])).logits[0, len(PROMPT) - 1 : -1]
    logp = logits - logits.logsumexp(dim=-1, keepdim=True)
    given = torch.tensor(RESPONSE)
    expected = logp.gather(1, given[:, None]).squeeze(1)
    torch.testing.assert_close(found.logp_T.double(), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.entropy_T.double(), -(logp.exp() * logp).sum(-1), atol=1e-5, rtol=0)
    top = logp.topk(5, dim=-1)
    assert found.tokens_TN.tolist() == top.indices.tolist()
    torch.testing.assert_close(found.topn_logp_TN.double(), top.values, atol=1e-5, rtol=0)
    assert found.rank_T.tolist() == [(row > row[token]).sum().item() for row, token in zip(logp, given, strict=True)]


def test_a_distribution_by_hand() -> None:
    """1/2, 1/4, 1/8, 1/8: entropy is 7/4 bits, and of two equal ones the lower id is first."""
    logits_TV = torch.tensor([[0.125, 0.5, 0.125, 0.25]]).log() + 3.0
    found = candidates_of(logits_TV, torch.tensor([2]), 4)
    assert found.tokens_TN.tolist() == [[1, 3, 0, 2]]
    assert found.rank_T.tolist() == [2]
    assert found.logp_T.item() == pytest.approx(math.log(0.125))
    assert found.entropy_T.item() == pytest.approx(1.75 * math.log(2.0))


def test_a_text_beyond_the_positions_is_refused(make_model: MakeModel) -> None:
    model, folder = make_model(max_position_embeddings=8)
    with pytest.raises(UserError, match="max_position_embeddings 8"):
        engine_of(model, folder).candidates(PROMPT, RESPONSE, 3)
