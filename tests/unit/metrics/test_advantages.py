"""Figures of advantages against sums worked out by hand, over packed micro-batches of several ranks and updates."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from megasharp.common.records import Denominators, Mean, MicroBatch, MiniBatch, Segments, StepBatch, TokenInputs
from megasharp.metrics.group_metrics import advantage_metrics

Token = tuple[int, float, float]  # group, advantage, mask


def micro_batch(tokens: Sequence[Token]) -> MicroBatch:
    group_T = torch.tensor([group for group, _, _ in tokens], dtype=torch.int64)
    advantage_T = torch.tensor([advantage for _, advantage, _ in tokens], dtype=torch.float64)
    mask_T = torch.tensor([mask for _, _, mask in tokens], dtype=torch.float64)
    rows_T, empty = torch.arange(len(tokens)), torch.zeros(0, dtype=torch.int64)
    zero_T = torch.zeros_like(mask_T)
    inputs = TokenInputs(
        mask_T=mask_T,
        seq_T=torch.zeros_like(group_T),
        group_T=group_T,
        reward_T=zero_T,
        correct_T=zero_T,
        group_size_T=zero_T,
        group_correct_T=zero_T,
        num_sequences=1,
    )
    return MicroBatch(
        tokens_P=empty,
        positions_P=empty,
        segments=Segments(empty, empty, empty),
        rows_T=rows_T,
        targets_T=rows_T,
        length_S=mask_T.sum().reshape(1),
        advantage_T=advantage_T,
        inputs=inputs,
        sequence_ids=(0,),
    )


def step(groups: int, *minis: Sequence[Sequence[Token]]) -> StepBatch:
    """One mini-batch per argument, one data-parallel rank per list of tokens in it."""
    batches = tuple(
        MiniBatch(tuple((micro_batch(tokens),) for tokens in ranks), Denominators(1.0, 1.0, 1.0)) for ranks in minis
    )
    return StepBatch(batches, tuple(f"g{i}" for i in range(groups)), seed=0)


def test_a_group_whose_advantages_cancel_still_teaches() -> None:
    figures = advantage_metrics(step(2, [[(0, 1.5, 1.0), (0, -1.5, 1.0), (1, 0.0, 1.0)]]))
    assert figures["group/zero_advantage"] == Mean(1.0, 2.0)


def test_advantages_of_ranks_and_updates_add_up() -> None:
    first = [[(0, 2.0, 1.0), (1, 0.0, 1.0)], [(2, -0.5, 1.0)]]
    second = [[(0, -1.0, 1.0)], [(1, 0.0, 1.0), (2, 0.25, 1.0)]]
    figures = advantage_metrics(step(4, first, second))
    # Group 1 has only zeros, and group 3 no token at all.
    assert figures["group/zero_advantage"] == Mean(2.0, 4.0)
    assert figures["policy/advantage_positive"].value == pytest.approx(2.25 / 6)
    assert figures["policy/advantage_negative"].value == pytest.approx(-1.5 / 6)


def test_masked_tokens_do_not_count() -> None:
    tokens = [(0, 1.0, 1.0), (0, 4.0, 0.0), (0, -8.0, 0.0), (1, 0.0, 1.0), (1, 3.0, 0.0)]
    figures = advantage_metrics(step(2, [tokens]))
    assert figures["group/zero_advantage"] == Mean(1.0, 2.0)
    assert figures["policy/advantage_positive"] == Mean(1.0, 2.0)
    assert figures["policy/advantage_negative"] == Mean(0.0, 2.0)
