"""Segment reductions against loops over the segments; Proposition 3 against enumeration; sums read back exactly."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
import torch
from cases import each_case
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megasharp.common.records import Mean
from megasharp.ops.segment import (
    expected_distinct,
    means_on_host,
    segment_broadcast,
    segment_mean,
    segment_quantile,
    segment_sum,
)

# Not sorted, and segments 1 and 4 are empty.
SEQ_T = torch.tensor([3, 0, 0, 2, 3, 0, 2])
SEGMENTS = 5


def tokens(seed: int = 0) -> Tensor:
    return torch.randn(7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_sum_is_a_loop_over_segments() -> None:
    x_T = tokens()
    expected = [sum(x_T[segment == SEQ_T].tolist()) for segment in range(SEGMENTS)]
    torch.testing.assert_close(segment_sum(x_T, SEQ_T, SEGMENTS), torch.tensor(expected, dtype=torch.float64))


def test_mean_is_a_loop_over_segments() -> None:
    x_T = tokens()
    expected = [x_T[segment == SEQ_T].mean().item() if (segment == SEQ_T).any() else 0.0 for segment in range(SEGMENTS)]
    torch.testing.assert_close(segment_mean(x_T, SEQ_T, SEGMENTS), torch.tensor(expected, dtype=torch.float64))


@each_case("weight_dtype", [torch.float64, torch.float32, torch.bool])
def test_weighted_mean_ignores_masked_tokens(weight_dtype: torch.dtype) -> None:
    x_T = tokens()
    weight_T = torch.tensor([1, 0, 1, 0, 1, 1, 0])
    kept_T = weight_T == 1
    expected = [
        x_T[kept_T & (segment == SEQ_T)].mean().item() if (kept_T & (segment == SEQ_T)).any() else 0.0
        for segment in range(SEGMENTS)
    ]
    assert expected[2] == 0.0
    actual = segment_mean(x_T, SEQ_T, SEGMENTS, weight_T.to(weight_dtype))
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64))


def test_mean_under_fractional_weights() -> None:
    x_T, weight_T = tokens(), tokens(1).abs() / 10
    expected = []
    for segment in range(SEGMENTS):
        members = (segment == SEQ_T).nonzero()[:, 0].tolist()
        pairs = [(x_T[i].item(), weight_T[i].item()) for i in members]
        expected.append(sum(x * w for x, w in pairs) / sum(w for _, w in pairs) if pairs else 0.0)
    actual = segment_mean(x_T, SEQ_T, SEGMENTS, weight_T)
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64))


def test_broadcast_returns_each_tokens_segment() -> None:
    x_S = torch.tensor([10.0, 11.0, 12.0, 13.0, 14.0])
    assert segment_broadcast(x_S, SEQ_T).tolist() == [13.0, 10.0, 10.0, 12.0, 13.0, 10.0, 12.0]


@each_case("q", [0.0, 0.1, 0.25, 0.5, 0.7, 0.8, 0.95, 1.0])
@each_case("seed", range(5))
def test_quantile_is_torch_quantile_of_each_segment(q: float, seed: int) -> None:
    """Segments of 0 to 40 tokens, interleaved, with ties and masked tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([0, 1, 2, 5, 6, 40, 11, 3])
    seq_T = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    seq_T = seq_T[torch.randperm(len(seq_T), generator=generator)]
    x_T = torch.randn(len(seq_T), generator=generator, dtype=torch.float64).mul(3).round() / 3
    mask_T = (torch.rand(len(seq_T), generator=generator) < 0.8).float().masked_fill(seq_T == 7, 0.0)
    members = [x_T[(seq_T == segment) & (mask_T > 0)] for segment in range(len(lengths))]
    expected = [float(torch.quantile(values, q)) if len(values) else 0.0 for values in members]
    assert segment_quantile(x_T, seq_T, len(lengths), q, mask_T).tolist() == expected
    assert expected[0] == expected[7] == 0.0


def test_quantile_without_a_mask_and_without_tokens() -> None:
    assert segment_quantile(torch.tensor([1.0, 4.0, 2.0, 9.0]), torch.tensor([0, 0, 0, 2]), 3, 0.75).tolist() == [
        3,
        0,
        9,
    ]
    assert segment_quantile(torch.zeros(0), torch.zeros(0, dtype=torch.int64), 2, 0.5).tolist() == [0.0, 0.0]


def test_quantile_ignores_what_stands_at_masked_tokens() -> None:
    x_T = torch.tensor([1.0, float("nan"), 3.0, float("inf")])
    assert segment_quantile(x_T, torch.zeros(4).long(), 1, 0.5, torch.tensor([1.0, 0.0, 1.0, 0.0])).tolist() == [2.0]


def test_quantile_has_no_loop_over_tokens_or_segments() -> None:
    """The number of tensor operations is the same for ten tokens and for a thousand."""

    class Counter(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.calls += 1
            return function(*args, **(kwargs or {}))

    counts = []
    for tokens_each, segments in ((2, 5), (10, 100)):
        seq_T = torch.arange(segments).repeat(tokens_each)
        x_T = torch.randn(len(seq_T), generator=torch.Generator().manual_seed(0))
        with Counter() as counter:
            segment_quantile(x_T, seq_T, segments, 0.8)
        counts.append(counter.calls)
    assert counts[0] == counts[1] > 0


def test_gradients() -> None:
    x_T = tokens().requires_grad_()
    weight_T = tokens(1).abs().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: segment_sum(x, SEQ_T, SEGMENTS), (x_T,))
    assert torch.autograd.gradcheck(lambda x, w: segment_mean(x, SEQ_T, SEGMENTS, w), (x_T, weight_T))
    x_S = tokens(2)[:SEGMENTS].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: segment_broadcast(x, SEQ_T), (x_S,))
    assert torch.autograd.gradcheck(lambda x: segment_quantile(x, SEQ_T, SEGMENTS, 0.7), (x_T,))


def test_masked_segment_passes_a_zero_gradient() -> None:
    x_T = tokens().requires_grad_()
    segment_mean(x_T, SEQ_T, SEGMENTS, (SEQ_T != 2).double()).sum().backward()
    assert x_T.grad is not None
    assert x_T.grad[SEQ_T == 2].tolist() == [0.0, 0.0]
    torch.testing.assert_close(x_T.grad[SEQ_T == 0], torch.full((3,), 1 / 3, dtype=torch.float64))


def test_no_tokens() -> None:
    nothing_T = torch.zeros(0)
    nowhere_T = torch.zeros(0, dtype=torch.int64)
    assert segment_sum(nothing_T, nowhere_T, 2).tolist() == [0.0, 0.0]
    assert segment_mean(nothing_T, nowhere_T, 2).tolist() == [0.0, 0.0]
    assert segment_broadcast(torch.ones(2), nowhere_T).shape == (0,)


def test_unknown_segment_is_refused() -> None:
    with pytest.raises((IndexError, RuntimeError)):
        segment_sum(tokens(), SEQ_T, 3)


def random_logp(seed: int, vocabulary: int, scale: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.log_softmax(scale * torch.randn(vocabulary, generator=generator, dtype=torch.float64), dim=-1)


@each_case("samples", [1, 2, 3, 4])
def test_distinct_equals_the_enumeration_of_all_draws(samples: int) -> None:
    logp_V = random_logp(0, 4)
    expected = sum(
        logp_V[list(draw)].sum().exp().item() * len(set(draw)) for draw in itertools.product(range(4), repeat=samples)
    )
    assert abs(expected_distinct(logp_V, samples).item() - expected) < 1e-12


def test_distinct_of_a_coin_and_certainty_and_impossible_tokens() -> None:
    assert expected_distinct(torch.tensor([0.5, 0.5]).log(), 2).item() == pytest.approx(1.5)
    certain_V = torch.tensor([0.0, -torch.inf, -torch.inf])
    assert expected_distinct(certain_V, 1024).item() == 1.0


@each_case("exponent", [3, 9, 15])
def test_distinct_keeps_its_digits_for_tiny_and_for_nearly_certain_tokens(exponent: int) -> None:
    tiny, samples = Fraction(1, 10**exponent), 64
    exact = (1 - (1 - tiny) ** samples) + (1 - tiny**samples)
    logp_V = torch.tensor([float(tiny)], dtype=torch.float64)
    logp_V = torch.cat([torch.log1p(-logp_V), logp_V.log()])
    assert abs(expected_distinct(logp_V, samples).item() - 1.0) == pytest.approx(float(exact - 1), rel=1e-6, abs=3e-16)


def test_distinct_leading_shape_dtype_and_no_gradient() -> None:
    logits = torch.randn(3, 5, 7, requires_grad=True)
    got = expected_distinct(torch.log_softmax(logits, dim=-1), 8)
    assert got.shape == (3, 5) and got.dtype == torch.float32 and not got.requires_grad
    assert ((got >= 1.0 - 1e-6) & (got <= 7.0)).all()


def test_distinct_of_parts_of_the_vocabulary_adds_up() -> None:
    logp_V = random_logp(1, 12)
    parts = sum(expected_distinct(shard, 16) for shard in logp_V.split(5))
    torch.testing.assert_close(parts, expected_distinct(logp_V, 16))


def test_every_pair_arrives_under_its_own_name_and_exactly() -> None:
    sums = {
        "a": (torch.tensor(0.1, dtype=torch.float32), torch.tensor(2**40 + 1)),
        "b": (torch.tensor(0.1, dtype=torch.float64), torch.tensor(True)),
    }
    assert means_on_host(sums) == {"a": Mean(float(torch.tensor(0.1)), 2.0**40 + 1), "b": Mean(0.1, 1.0)}
    assert means_on_host({}) == {}
