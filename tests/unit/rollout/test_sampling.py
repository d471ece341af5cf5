"""Drawing from extreme logits, ties, and in blocks."""

from __future__ import annotations

import pytest
import torch

from megasharp.rollout.inprocess import sampling as module
from megasharp.rollout.inprocess.sampling import Logits, draw
from megasharp.types import SamplingParams


def test_a_token_without_mass_is_never_drawn() -> None:
    logits = torch.full((20_000, 5), float("-inf"))
    logits[:, 1], logits[:, 3] = 0.0, -1.0
    drawn = draw(Logits(logits), torch.arange(20_000), 0, SamplingParams(max_tokens=1))
    assert set(drawn.tokens_S.tolist()) == {1, 3}


def test_large_and_equal_logits_stay_exact() -> None:
    logits = torch.tensor([[-1e4, 3e4, -2e4], [-9e3, -9e3, -9e3]])
    drawn = draw(Logits(logits), torch.tensor([1, 2]), 0, SamplingParams(max_tokens=1))
    assert drawn.tokens_S[0] == 1
    assert drawn.policy_logp_S.tolist() == pytest.approx([0.0, -1.0986123], abs=1e-6)


def test_ties_at_the_cut_keep_exactly_k_tokens() -> None:
    drawn = draw(Logits(torch.zeros(4000, 6)), torch.arange(4000), 0, SamplingParams(max_tokens=1, top_k=2))
    assert set(drawn.tokens_S.tolist()) == {0, 1}
    assert torch.allclose(drawn.sampler_logp_S, torch.tensor(0.5).log())
    assert torch.allclose(drawn.policy_logp_S, torch.tensor(1 / 6).log())


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(1),
        SamplingParams(1, top_p=0.8),
        SamplingParams(1, 0.0),
        SamplingParams(1, memory_mu=0.5, plausible=0.1),
        SamplingParams(1, memory_mu=0.5, top_k=3),
    ],
    ids=str,
)
def test_blocks_do_not_change_the_draw(monkeypatch: pytest.MonkeyPatch, params: SamplingParams) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = Logits(torch.randn(23, 11, generator=generator), torch.randn(23, 11, generator=generator))
    whole = draw(logits, torch.arange(23), 4, params)
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", 5 * 11)
    parts = draw(logits, torch.arange(23), 4, params)
    assert torch.equal(whole.tokens_S, parts.tokens_S)
    assert torch.equal(whole.sampler_logp_S, parts.sampler_logp_S)
    assert torch.equal(whole.policy_logp_S, parts.policy_logp_S)
    assert torch.equal(whole.memory_logp_S, parts.memory_logp_S)
