"""Packed attention and its gradients against attention written out over all rows at once, in float64."""

from __future__ import annotations

import torch
from cases import each_case
from torch import Tensor

from megasharp.common.records import Segments
from megasharp.learner.attention import PackedAttention, rotary_tables, rotate
from megasharp.learner.packed import packed_rows

HEADS, GROUPS, DIM = 4, 2, 6
# A prompt of 9 rows with responses of 14 and 3, and a run that shares nothing.
SEGMENTS = Segments(torch.tensor([0, 9, 23, 26]), torch.tensor([9, 14, 3, 11]), torch.tensor([-1, 0, 0, -1]))
POSITIONS = torch.cat([torch.arange(9), torch.arange(9, 23), torch.arange(9, 12), torch.arange(11)])
RUN = torch.repeat_interleave(SEGMENTS.length)
FREQUENCIES = torch.tensor([1.0, 0.3, 0.05], dtype=torch.float64)


def visible(window: int | None) -> Tensor:
    """bool [P, P]: which rows each row sees."""
    same = (RUN[:, None] == RUN) | (SEGMENTS.prefix[RUN][:, None] == RUN)
    distance = POSITIONS[:, None] - POSITIONS
    return same & (distance >= 0) & (distance < (window or 1000))


def written_out(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    cos, sin = rotary_tables(FREQUENCIES, 1.0, POSITIONS)
    query, key = rotate(query, cos, sin), rotate(key, cos, sin)
    key, value = (x.repeat_interleave(HEADS // GROUPS, dim=1) for x in (key, value))
    scores = torch.einsum("phd,qhd->hpq", query, key) / DIM**0.5
    weights = scores.masked_fill(~visible(window), float("-inf")).softmax(-1)
    return torch.einsum("hpq,qhd->phd", weights, value).flatten(1)


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = len(POSITIONS)
    shapes = ((rows, HEADS, DIM), (rows, GROUPS, DIM), (rows, GROUPS, DIM))
    query, key, value = (
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes
    )
    return query, key, value


@each_case("window", [None, 1, 2, 5, 8, 10, 22, 23])
def test_outputs_and_gradients_are_those_of_plain_attention(window: int | None) -> None:
    attention = PackedAttention(None, 2, None, "self", DIM**-0.5, windows=(3, window))
    rows = packed_rows(SEGMENTS, *rotary_tables(FREQUENCIES, 1.0, POSITIONS))
    cotangent = torch.randn(len(POSITIONS), HEADS * DIM, generator=torch.Generator().manual_seed(1)).double()
    results = []
    for packed in (True, False):
        query, key, value = inputs()
        out = (
            attention(query, key, value, None, packed_seq_params=rows)
            if packed
            else written_out(query, key, value, window)
        )
        results.append((out, *torch.autograd.grad(out, (query, key, value), cotangent)))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)


def test_a_window_that_hides_nothing_costs_nothing() -> None:
    rows = packed_rows(SEGMENTS, *rotary_tables(FREQUENCIES, 1.0, POSITIONS))
    assert rows.plan(23) is rows.plan(None)
    assert rows.plan(22) is not rows.plan(None)
    assert rows.plan(22) is rows.plan(22)
