"""Packing against a straight-line reading of it: every token once, right rows, budget, balance, denominators."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import each_case
from train_sequences import layout, micros, random_sequences, sequence

from megasharp.batching.packing import pack
from megasharp.common.records import MicroBatch, Sequence


def context_of(micro: MicroBatch, row: int) -> list[int]:
    """The tokens that the packed row sees, itself last, read from the segment table alone."""
    runs = micro.segments
    for start, length, prefix in zip(runs.start.tolist(), runs.length.tolist(), runs.prefix.tolist(), strict=True):
        if start <= row < start + length:
            before = []
            if prefix >= 0:
                first = int(runs.start[prefix])
                before = micro.tokens_P[first : first + int(runs.length[prefix])].tolist()
            return before + micro.tokens_P[start : row + 1].tolist()
    raise AssertionError(f"row {row} lies in no run")


def check_micro(micro: MicroBatch, sequences: list[Sequence], group_ids: tuple[str, ...]) -> None:
    """Every response token: predicted from exactly its own past, with its own numbers."""
    inputs = micro.inputs
    assert inputs.num_sequences == len(micro.sequence_ids)
    for local, flat in enumerate(micro.sequence_ids):
        own = sequences[flat]
        chosen = (inputs.seq_T == local).nonzero()[:, 0]
        assert len(chosen) == own.response_length
        for offset, place in enumerate(chosen.tolist()):
            end = own.prompt_length + offset
            row = int(micro.rows_T[place])
            assert context_of(micro, row) == own.tokens[:end].tolist()
            assert int(micro.positions_P[row]) == end - 1
            assert int(micro.targets_T[place]) == int(own.tokens[end])
        assert torch.equal(micro.advantage_T[chosen], own.advantage_T)
        assert torch.equal(inputs.mask_T[chosen], own.mask_T)
        assert inputs.sampler_logp_T is not None
        assert torch.equal(inputs.sampler_logp_T[chosen], own.sampler_logp_T)
        assert (inputs.reward_T[chosen] == own.reward).all()
        assert (inputs.correct_T[chosen] == float(own.correct)).all()
        assert all(group_ids[group] == own.group_id for group in inputs.group_T[chosen].tolist())
        assert float(micro.length_S[local]) == float(own.mask_T.sum())


@each_case("seed", range(4))
@each_case("share_prompts", [True, False])
@each_case(("dp", "mini_batches", "row_multiple"), [(1, 1, 1), (2, 1, 4), (3, 2, 2), (1, 3, 8)])
def test_every_token_once_and_right(
    seed: int, share_prompts: bool, dp: int, mini_batches: int, row_multiple: int
) -> None:
    sequences = random_sequences(seed)
    cut = layout(dp=dp, mini_batches=mini_batches, row_multiple=row_multiple, share_prompts=share_prompts)
    batch = pack(sequences, cut, seed=9)
    assert batch.seed == 9 and batch.group_ids == tuple(dict.fromkeys(s.group_id for s in sequences))
    assert sorted(flat for micro in micros(batch) for flat in micro.sequence_ids) == list(range(len(sequences)))
    for micro in micros(batch):
        check_micro(micro, sequences, batch.group_ids)
        assert len(micro.tokens_P) == len(micro.positions_P) > 0 and len(micro.tokens_P) % row_multiple == 0
        assert int(micro.segments.length.sum()) == len(micro.tokens_P)


@each_case("seed", range(4))
@each_case("dp", [1, 2, 3])
def test_ranks_meet_and_bins_keep_the_budget(seed: int, dp: int) -> None:
    sequences = random_sequences(seed)
    (mini,) = pack(sequences, layout(dp=dp), seed=0).mini_batches
    assert len(mini.per_rank) == dp and len({len(rank) for rank in mini.per_rank}) == 1
    for rank in mini.per_rank:
        for micro in rank:
            assert len(micro.tokens_P) <= 40 or len(micro.sequence_ids) == 1


@each_case("dp", [1, 2])
def test_every_rank_gets_a_multiple_of_micro_batches_where_stages_interleave(dp: int) -> None:
    def count(multiple: int) -> int:
        (mini,) = pack(random_sequences(1), layout(dp=dp, micro_batch_multiple=multiple), seed=0).mini_batches
        (per_rank,) = {len(share) for share in mini.per_rank}
        return per_rank

    assert count(1) % 5 != 0
    assert count(5) == -(-count(1) // 5) * 5


def test_a_response_over_the_budget_is_alone_and_raises_nobody_elses_budget() -> None:
    long = sequence(0, 0, [1, 2], list(range(100, 128)))
    short = [sequence(group, 0, [3, 4], list(range(11))) for group in (1, 2, 3)]
    (mini,) = pack([long, *short], layout(micro_batch_tokens=23), seed=0).mini_batches
    sizes = {micro.sequence_ids: len(micro.tokens_P) for micro in mini.per_rank[0]}
    assert sizes == {(0,): 29, (1,): 12, (2,): 12, (3,): 12}


def test_no_bins_are_made_that_must_stay_empty() -> None:
    long = [sequence(0, index, [1, 2], list(range(50))) for index in range(5)]
    (mini,) = pack(long, layout(micro_batch_tokens=10), seed=0).mini_batches
    assert [len(micro.sequence_ids) for micro in mini.per_rank[0]] == [1] * 5


def test_prompts_are_shared_within_the_budget_only() -> None:
    group = [sequence(0, index, [1, 2, 3, 4], [5, 6, 7]) for index in range(6)]
    shared = micros(pack(group, layout(micro_batch_tokens=1000), seed=0))
    assert [len(micro.tokens_P) for micro in shared] == [4 + 6 * 2]
    assert shared[0].segments.prefix.tolist() == [-1, 0, 0, 0, 0, 0, 0]
    repeated = micros(pack(group, layout(micro_batch_tokens=1000, share_prompts=False), seed=0))
    assert [len(micro.tokens_P) for micro in repeated] == [6 * (4 + 2)]
    cut = micros(pack(group, layout(micro_batch_tokens=13), seed=0))
    assert [len(micro.tokens_P) for micro in cut] == [4 + 3 * 2] * 2


def test_example_row_by_row() -> None:
    """The worked example of `Segments`: a prompt of five with responses of three and two, then padding."""
    group = [sequence(0, 0, [1, 2, 3, 4, 5], [10, 11, 12]), sequence(0, 1, [1, 2, 3, 4, 5], [20, 21])]
    (micro,) = micros(pack(group, layout(row_multiple=6), seed=0))
    assert micro.tokens_P.tolist() == [1, 2, 3, 4, 5, 10, 11, 20, 0, 0, 0, 0]
    assert micro.positions_P.tolist() == [0, 1, 2, 3, 4, 5, 6, 5, 0, 1, 2, 3]
    assert micro.segments.start.tolist() == [0, 5, 7, 8]
    assert micro.segments.length.tolist() == [5, 2, 1, 4]
    assert micro.segments.prefix.tolist() == [-1, 0, 0, -1]
    assert micro.rows_T.tolist() == [4, 5, 6, 4, 7] and micro.targets_T.tolist() == [10, 11, 12, 20, 21]


@each_case("mini_batches", [1, 2, 3])
@each_case("dp", [1, 2])
def test_denominators_are_global(mini_batches: int, dp: int) -> None:
    sequences = random_sequences(seed=5)
    batch = pack(sequences, layout(dp=dp, mini_batches=mini_batches), seed=0)
    for mini in batch.mini_batches:
        flats = [flat for rank in mini.per_rank for micro in rank for flat in micro.sequence_ids]
        counts = [float(sequences[flat].mask_T.sum()) for flat in flats]
        assert mini.denominators.tokens == sum(counts)
        assert mini.denominators.sequences == sum(count > 0 for count in counts)
        assert mini.denominators.constant == 32.0


def test_mini_batches_are_runs_of_whole_groups() -> None:
    sequences = random_sequences(seed=6)
    batch = pack(sequences, layout(mini_batches=3, dp=2), seed=0)
    names = [
        [sequences[flat].group_id for rank in mini.per_rank for micro in rank for flat in micro.sequence_ids]
        for mini in batch.mini_batches
    ]
    groups = [sorted(set(part)) for part in names]
    assert [group for part in groups for group in part] == sorted(batch.group_ids)
    assert max(map(len, groups)) - min(map(len, groups)) <= 1
    assert len(pack(sequences, layout(mini_batches=8), seed=0).mini_batches) == 7
    with pytest.raises(ValueError, match="there is no sequence to pack"):
        pack([], layout(), seed=0)


def test_ranks_without_work_get_empty_micro_batches() -> None:
    batch = pack([sequence(0, 0, [1, 2], [3, 4, 5])], layout(dp=3, row_multiple=2), seed=0)
    (mini,) = batch.mini_batches
    assert [len(rank) for rank in mini.per_rank] == [1, 1, 1]
    work = [rank[0].inputs.num_sequences for rank in mini.per_rank]
    assert sorted(work) == [0, 0, 1]
    for (micro,) in mini.per_rank:
        if not micro.sequence_ids:
            assert len(micro.tokens_P) == 2 and len(micro.rows_T) == len(micro.targets_T) == 0
            assert micro.inputs.mask_T.shape == micro.advantage_T.shape == (0,)


def test_work_is_spread_evenly() -> None:
    """Longest first: with many units no bin is more than one unit above the mean."""
    sequences = [sequence(group, 0, [1], list(range(1 + group % 7))) for group in range(60)]
    (mini,) = pack(sequences, layout(dp=4, micro_batch_tokens=80), seed=0).mini_batches
    loads = [len(micro.tokens_P) for rank in mini.per_rank for micro in rank]
    assert max(loads) - min(loads) <= 7


@each_case("share_prompts", [True, False])
def test_a_response_without_tokens_costs_nothing(share_prompts: bool) -> None:
    group = [sequence(0, 0, [1, 2], []), sequence(0, 1, [1, 2], [7])]
    batch = pack(group, layout(share_prompts=share_prompts), seed=0)
    assert sum(len(micro.targets_T) for micro in micros(batch)) == 1
    for micro in micros(batch):
        check_micro(micro, group, batch.group_ids)


@each_case("trained", [0, 1, 20, 60])
def test_groups_without_advantages_are_apart_and_each_rank_has_as_many_of_the_others(trained: int) -> None:
    """Ranks pass silent micro-batches forward alone: the others must be even by themselves, not only in sum."""
    sequences = [
        replace(one, advantage_T=one.advantage_T * (number < trained))
        for number, one in enumerate(sequence(group + 1, 0, [1], list(range(1, 3 + group % 7))) for group in range(60))
    ]
    batch = pack(sequences, layout(dp=2, micro_batch_tokens=80, silent_apart=True), seed=0)
    tokens = []
    for rank in batch.mini_batches[0].per_rank:
        silent = [not any(bool(sequences[flat].advantage_T.any()) for flat in micro.sequence_ids) for micro in rank]
        for micro, is_silent in zip(rank, silent, strict=True):
            check_micro(micro, sequences, batch.group_ids)
            assert is_silent or all(bool(sequences[flat].advantage_T.any()) for flat in micro.sequence_ids)
        tokens.append(
            sum(micro.response_tokens for micro, is_silent in zip(rank, silent, strict=True) if not is_silent)
        )
    assert sum(micro.response_tokens for micro in micros(batch)) == sum(one.response_length for one in sequences)
    assert max(tokens) - min(tokens) <= 8
