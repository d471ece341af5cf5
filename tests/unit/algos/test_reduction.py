"""Each reduction against its sum written out, and micro-batches of any number against the whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import each_case

from megasharp.algos.base import Reduction
from megasharp.algos.recipe import token_coefficients
from megasharp.common.records import Denominators

CONSTANT = 16.0


def sequences(seed: int = 0, count: int = 9) -> list[tuple[np.ndarray, np.ndarray]]:
    """(loss, mask) per sequence; the third is masked as a whole."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(count):
        length = int(rng.integers(1, 8))
        mask = rng.integers(0, 2, length) if i != 2 else np.zeros(length)
        made.append((rng.normal(size=length), mask.astype(float)))
    return made


def straight(reduction: Reduction, made: list[tuple[np.ndarray, np.ndarray]]) -> float:
    """The definition, sequence by sequence."""
    kept = [(loss[mask > 0], mask) for loss, mask in made if mask.any()]
    if reduction is Reduction.TOKEN_MEAN:
        return float(np.concatenate([loss for loss, _ in kept]).mean())
    if reduction is Reduction.SEQ_MEAN_TOKEN_MEAN:
        return float(np.mean([loss.mean() for loss, _ in kept]))
    if reduction is Reduction.SEQ_MEAN_TOKEN_SUM:
        return float(np.mean([loss.sum() for loss, _ in kept]))
    return float(np.mean([loss.sum() / CONSTANT for loss, _ in kept]))


def denominators(made: list[tuple[np.ndarray, np.ndarray]]) -> Denominators:
    return Denominators(
        tokens=float(sum(mask.sum() for _, mask in made)),
        sequences=float(sum(mask.any() for _, mask in made)),
        constant=CONSTANT,
    )


def reduced(reduction: Reduction, part: list[tuple[np.ndarray, np.ndarray]], counts: Denominators) -> float:
    if not part:
        return 0.0
    loss_T = torch.tensor(np.concatenate([loss for loss, _ in part]))
    mask_T = torch.tensor(np.concatenate([mask for _, mask in part]))
    lengths = torch.tensor([len(loss) for loss, _ in part])
    seq_T = torch.repeat_interleave(torch.arange(len(part)), lengths)
    length_S = torch.tensor([mask.sum() for _, mask in part])
    return float((loss_T * token_coefficients(reduction, mask_T, seq_T, length_S, counts)).sum())


@each_case("reduction", Reduction)
def test_against_the_definition(reduction: Reduction) -> None:
    made = sequences()
    assert reduced(reduction, made, denominators(made)) == pytest.approx(straight(reduction, made), rel=1e-12)


@each_case("pieces", [2, 3, 12])
@each_case("reduction", Reduction)
def test_micro_batches_add_up_to_the_whole(reduction: Reduction, pieces: int) -> None:
    made = sequences(seed=1)
    counts = denominators(made)
    parts = [reduced(reduction, made[i::pieces], counts) for i in range(pieces)]
    assert sum(parts) == pytest.approx(straight(reduction, made), rel=1e-12)


@each_case("reduction", Reduction)
def test_a_step_without_any_scored_token_is_zero(reduction: Reduction) -> None:
    made = [(loss, np.zeros_like(mask)) for loss, mask in sequences()]
    assert reduced(reduction, made, denominators(made)) == 0.0
