"""The forking tokens' mask: which tokens, how many, and that the token mean is over them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from cases import each_case

from megasharp.algos.base import Needs, OldLogp, Reduction
from megasharp.algos.forking_tokens import ForkingTokens, ForkingTokensParams

NEEDS = Needs(old_logp=OldLogp.IN_LOSS, old_entropy=True)


def with_entropies(micro, entropy_T: torch.Tensor, mask_T: torch.Tensor | None = None):
    mask_T = torch.ones(14, dtype=torch.float64) if mask_T is None else mask_T
    inputs = dataclasses.replace(micro.inputs, old_entropy_T=entropy_T, mask_T=mask_T)
    length_S = torch.zeros(4, dtype=torch.float64).index_add(0, inputs.seq_T, mask_T)
    return dataclasses.replace(micro, inputs=inputs, length_S=length_S)


@each_case(("share", "count"), [(0.2, 3), (0.5, 7), (1 / 14, 1), (0.01, 1), (1.0, 14)])
def test_share_of_tokens_rounded_up(make_micro, grade, share: float, count: int) -> None:
    entropy_T = torch.randperm(14, generator=torch.Generator().manual_seed(1)).double()
    micro = with_entropies(make_micro(NEEDS), entropy_T)
    _, gradient_T, metrics = grade(
        micro, ["grpo", "forking_tokens"], {"forking_tokens": ForkingTokensParams(share=share)}
    )
    assert metrics["method/forking_tokens/selected"] == pytest.approx(count / 14)
    top = set(entropy_T.argsort(descending=True)[:count].tolist())
    assert set(gradient_T.nonzero().flatten().tolist()) <= top


def test_round_shares_are_not_raised_by_binary_fractions(make_micro) -> None:
    """0.07 * 100 and 0.14 * 50 are above 7 as floats."""
    for share, tokens in ((0.07, 100), (0.14, 50)):
        entropy_T = torch.arange(tokens, dtype=torch.float64)
        x = dataclasses.replace(make_micro(NEEDS).inputs, old_entropy_T=entropy_T, mask_T=torch.ones_like(entropy_T))
        stats = ForkingTokens(ForkingTokensParams(share=share)).prepare(entropy_T, x)
        assert float(stats["threshold"]) == tokens - 7 and float(stats["scale"]) == pytest.approx(tokens / 7)


def test_token_mean_is_over_selected_tokens(make_micro, grade) -> None:
    """The same as masking the others away before the loss."""
    micro = make_micro(NEEDS)
    entropy_T = torch.linspace(0.0, 2.0, 14, dtype=torch.float64).flip(0)
    params = {"forking_tokens": ForkingTokensParams(share=0.3)}
    whole = with_entropies(micro, entropy_T)
    loss, gradient_T, _ = grade(whole, ["grpo", "forking_tokens"], params, reduction=None)
    masked = with_entropies(micro, entropy_T, (torch.arange(14) < 5).double())
    expected_loss, expected_T, _ = grade(masked, ["grpo"])
    assert loss == pytest.approx(expected_loss, rel=1e-12)
    torch.testing.assert_close(gradient_T, expected_T, rtol=1e-12, atol=1e-16)


def test_other_reductions_are_scaled_by_the_same_constant(make_micro, grade) -> None:
    micro = with_entropies(make_micro(NEEDS), torch.arange(14, dtype=torch.float64))
    params = {"forking_tokens": ForkingTokensParams(share=0.5)}
    for reduction in Reduction:
        _, gradient_T, _ = grade(micro, ["grpo", "forking_tokens"], params, reduction=reduction)
        _, plain_T, _ = grade(micro, ["grpo"], reduction=reduction)
        expected_T = torch.where(torch.arange(14) >= 7, 2.0 * plain_T, 0.0)
        torch.testing.assert_close(gradient_T, expected_T, rtol=1e-12, atol=0.0)


def test_masked_tokens_are_not_in_the_pool(make_micro, grade) -> None:
    mask_T = (torch.arange(14) % 2 == 0).double()
    entropy_T = torch.where(mask_T > 0, torch.arange(14.0, dtype=torch.float64), 100.0)
    _, _, metrics = grade(with_entropies(make_micro(NEEDS), entropy_T, mask_T), ["grpo", "forking_tokens"])
    assert metrics["method/forking_tokens/selected"] == pytest.approx(2 / 7)


@each_case(("share", "equal"), [(0.2, True), (1.0, False)])
def test_equal_entropies_or_the_whole_share_are_the_plain_recipe(make_micro, grade, share: float, equal: bool) -> None:
    micro = make_micro(NEEDS)
    entropy_T = torch.zeros(14, dtype=torch.float64) if equal else micro.inputs.old_entropy_T
    micro = with_entropies(micro, entropy_T, micro.inputs.mask_T)
    one = grade(micro, ["grpo", "forking_tokens"], {"forking_tokens": ForkingTokensParams(share=share)})
    other = grade(micro, ["grpo"])
    assert one[0] == pytest.approx(other[0], rel=1e-12)
    torch.testing.assert_close(one[1], other[1], rtol=1e-12, atol=0.0)
