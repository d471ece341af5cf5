"""FLOPs of packed rows against a sum over rows, and the metrics of a packed step against counting."""

from __future__ import annotations

import pytest
import torch

from megasharp.batching.packing import PackLayout, micro_batch_flops, pack, packing_metrics, rank_flops, row_multiple
from megasharp.batching.planning import Flops, measure
from megasharp.common.layout import ParallelLayout
from megasharp.common.records import Sequence

FLOPS = Flops(3.0, ((None, 2.0), (4, 5.0)))


def by_rows(before: int, rows: int) -> float:
    """One row at a time, one layer group at a time."""
    seen = [before + j for j in range(1, rows + 1)]
    return sum(3.0 + 2.0 * s + 5.0 * min(s, 4) for s in seen)


def test_flops_are_those_of_every_row() -> None:
    cases = [(before, rows) for before in (0, 1, 3, 4, 5, 9) for rows in (0, 1, 2, 5, 12)]
    before, rows = torch.tensor(cases).T
    assert FLOPS.of_runs(before, rows).tolist() == [by_rows(*case) for case in cases]


def sequence(group: int, prompt: int, response: int) -> Sequence:
    zeros = torch.zeros(response)
    return Sequence(
        group_id=f"g{group}",
        index=0,
        group_size=1,
        group_correct=0,
        seed=0,
        tokens=torch.arange(prompt + response),
        prompt_length=prompt,
        reward=0.0,
        correct=False,
        advantage_T=zeros,
        mask_T=zeros + 1,
        sampler_logp_T=zeros,
        policy_logp_T=zeros,
    )


def test_metrics_of_a_packed_step() -> None:
    """Two ranks: one with a prompt of 4 and responses of 5 and 3 (4 + 2 rows), one with 6 and 2 (6 + 1 rows)."""
    sequences = [sequence(0, 4, 5), sequence(0, 4, 3), sequence(1, 6, 2)]
    layout = PackLayout(2, 12, 1, row_multiple=8, constant=1.0, flops=FLOPS)
    batch = pack(sequences, layout, seed=0)
    first, second = batch.mini_batches[0].per_rank
    assert [micro.sequence_ids for micro in (*first, *second)] == [(0, 1), (2,)]
    assert [micro.padding for micro in (*first, *second)] == [6, 1]
    large = by_rows(0, 4) + by_rows(4, 4) + by_rows(4, 2) + by_rows(0, 6)
    small = by_rows(0, 6) + by_rows(6, 1) + by_rows(0, 1)
    assert rank_flops(batch.mini_batches[0], FLOPS) == [large, small]
    assert micro_batch_flops(first[0], FLOPS) == large
    metrics = {name: mean.value for name, mean in packing_metrics(batch, FLOPS).items()}
    assert metrics == {
        "batch/padding": pytest.approx(7 / 24),
        "batch/imbalance": pytest.approx(large / ((large + small) / 2) - 1),
        "batch/micro_batches": 1.0,
    }


def test_what_each_response_token_costs_counts_in_plans_and_metrics() -> None:
    """A long prompt with one token, and a short one with many: even by rows, and not by tokens."""
    flops = Flops(1.0, per_token=10.0)
    sequences = [sequence(0, 40, 1), sequence(1, 1, 40), sequence(2, 40, 1), sequence(3, 1, 40)]
    batch = pack(sequences, PackLayout(2, 100, 1, row_multiple=1, constant=1.0, flops=flops), seed=0)
    assert rank_flops(batch.mini_batches[0], flops) == [40 + 1 + 39 + 10 * 41] * 2
    assert measure([0, 1], [40, 1], [1, 40], flops).flops == [10.0, 39 + 10.0 * 40]


def test_of_several_mini_batches_the_largest_ranks_add_up() -> None:
    sequences = [sequence(group, 4, 5 + 3 * group) for group in range(4)]
    batch = pack(sequences, PackLayout(2, 100, 2, row_multiple=1, constant=1.0, flops=FLOPS), seed=0)
    loads = [rank_flops(mini, FLOPS) for mini in batch.mini_batches]
    metrics = {name: mean.value for name, mean in packing_metrics(batch, FLOPS).items()}
    assert len(loads) == 2 and metrics["batch/micro_batches"] == 2.0 and metrics["batch/padding"] == 0.0
    assert metrics["batch/imbalance"] == pytest.approx(sum(map(max, loads)) / sum(sum(x) / 2 for x in loads) - 1)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_rows_divide_by_what_tensor_and_context_parallelism_cut(device: str) -> None:
    for tp, cp in [(1, 1), (8, 1), (1, 4), (3, 2), (8, 8)]:
        multiple = row_multiple(ParallelLayout(tp=tp, cp=cp), device)
        assert multiple % (2 * cp * tp) == 0 and (multiple // cp) % 16 == 0
    assert row_multiple(ParallelLayout(), "cpu") == 128
