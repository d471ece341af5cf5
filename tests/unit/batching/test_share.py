"""Shares and their views against micro-batches that are built field by field; what of a step is sent, and when."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import pickle
import weakref

import pytest
import torch
from cases import each_case
from eager_packing import eager_micro_batch
from torch import Tensor
from train_sequences import layout, micros, random_sequences

from megasharp.batching.delivery import (
    HandMade,
    Held,
    Update,
    annotated,
    opened,
    shares_of,
    updates_of,
    with_annotations,
)
from megasharp.batching.packing import PackLayout, pack
from megasharp.batching.share import Member, Share
from megasharp.batching.views import Annotation, Kept, MicroView
from megasharp.common.records import MicroBatch, Sequence, StepBatch

OLD = frozenset({"old_logp_T"})


def bits(record: object) -> dict[str, object]:
    """Every field by its name; of tensors the dtype and the bytes, so that a NaN equals itself."""
    found: dict[str, object] = {}
    for field in dataclasses.fields(record):  # type: ignore[arg-type]
        value = getattr(record, field.name)
        if isinstance(value, Tensor):
            found[field.name] = value.dtype, tuple(value.shape), value.contiguous().numpy().tobytes()
        elif dataclasses.is_dataclass(value):
            found |= {f"{field.name}.{name}": part for name, part in bits(value).items()}
        else:
            found[field.name] = value
    return found


def eager(batch: StepBatch, sequences: list[Sequence], cut: PackLayout) -> list[list[list[MicroBatch]]]:
    """The micro-batches of each rank and mini-batch, of the same responses."""

    def built(micro: MicroBatch) -> MicroBatch:
        chosen = [
            Member(sequences[flat], flat, batch.group_ids.index(sequences[flat].group_id))
            for flat in micro.sequence_ids
        ]
        if not cut.share_prompts:
            return eager_micro_batch([[member] for member in chosen], cut.row_multiple)
        return eager_micro_batch(
            [list(unit) for _, unit in itertools.groupby(chosen, lambda member: member.group)], cut.row_multiple
        )

    return [[[built(micro) for micro in mini.per_rank[rank]] for mini in batch.mini_batches] for rank in range(cut.dp)]


def constant(sequences: list[Sequence], masked: int) -> list[Sequence]:
    """The same with one advantage and one mask a response, some of them strange."""
    values = itertools.cycle([0.1, -0.0, 0.0, float("nan"), -1e300])
    return [
        dataclasses.replace(
            one,
            seed=(1 << 63) + 7 * place,
            advantage_T=torch.tensor(next(values), dtype=torch.float64).expand(one.response_length),
            mask_T=torch.full((one.response_length,), float(place % 4 != masked)),
        )
        for place, one in enumerate(sequences)
    ]


@each_case("by_token", [True, False])
@each_case("share_prompts", [True, False])
@each_case(
    ("seed", "dp", "mini_batches", "row_multiple", "groups"),
    [(0, 1, 1, 1, 7), (1, 2, 1, 4, 7), (2, 3, 2, 2, 7), (3, 4, 3, 8, 9), (4, 4, 1, 16, 1), (5, 1, 3, 5, 7)],
)
def test_opened_shares_are_what_was_packed(
    seed: int, dp: int, mini_batches: int, row_multiple: int, groups: int, share_prompts: bool, by_token: bool
) -> None:
    """All fields, bit for bit, as a rank sees them after pickling: with masks, empty responses and micro-batches."""
    sequences = random_sequences(seed, groups)
    if not by_token:
        sequences = constant(sequences, masked=seed % 4)
    cut = layout(dp=dp, mini_batches=mini_batches, row_multiple=row_multiple, share_prompts=share_prompts)
    batch = pack(sequences, cut, seed=0)
    for share, expected in zip(shares_of(batch), eager(batch, sequences, cut), strict=True):
        assert isinstance(share, Share)
        assert by_token or (share.labels.advantage.constant and share.labels.mask.constant)
        received = opened(pickle.loads(pickle.dumps(share, 5)), draws=True)
        for minis, wanted in zip(received, expected, strict=True):
            for micro, other in zip(minis, wanted, strict=True):
                assert (micro.rows, micro.response_tokens) == (other.tokens_P.numel(), other.targets_T.numel())
                assert bits(micro) == bits(other)
        (first, *_), *_ = opened(share, draws=False)
        assert first.inputs.draw_T is None
    plain = [dataclasses.replace(micro) for micro in micros(batch)]
    assert all(type(micro) is MicroBatch for micro in plain)
    assert [bits(micro) for micro in plain] == [bits(micro) for micro in pickle.loads(pickle.dumps(micros(batch)))]


def test_a_share_is_small_and_linear() -> None:
    """Of long responses: 4 bytes an id and 8 of log-probs; per sequence and micro-batch a few numbers."""

    def size(responses: int, length: int, dp: int) -> list[int]:
        made = [
            Sequence(
                group_id=f"g{number // 4}",
                index=number % 4,
                group_size=4,
                group_correct=2,
                seed=number,
                tokens=torch.zeros(length + 100, dtype=torch.int64),
                prompt_length=100,
                reward=1.0,
                correct=True,
                advantage_T=torch.full((length,), 0.5, dtype=torch.float64),
                mask_T=torch.ones(length),
                sampler_logp_T=torch.rand(length),
                policy_logp_T=torch.rand(length),
            )
            for number in range(responses)
        ]
        cut = layout(dp=dp, micro_batch_tokens=4 * length + 200, row_multiple=64)
        return [share.bytes for share in shares_of(pack(made, cut, seed=0)) if isinstance(share, Share)]

    (whole,) = size(16, 2000, 1)
    assert whole / (16 * 2000) < 13
    quarters = size(16, 2000, 4)
    assert len(quarters) == 4 and sum(quarters) < 1.05 * whole and max(quarters) < 1.05 * whole / 4
    (double,) = size(32, 2000, 1)
    assert abs(double - 2 * whole) < 0.01 * whole


def test_a_step_leaves_memory_without_a_collection() -> None:
    """Python looks for cycles rarely, and a step has hundreds of MB: views that refer to their owners keep them."""
    batch = pack(random_sequences(0), layout(dp=2, mini_batches=2), seed=0)
    batch = annotated(batch, None, [Annotation()] * 2)
    for micro in micros(batch):
        dataclasses.replace(micro, inputs=dataclasses.replace(micro.inputs))
    (share, *_) = shares_of(batch)
    assert isinstance(share, Share)
    ids = weakref.ref(share.packed.ids)
    gc.disable()
    try:
        del batch, micro, share
        assert ids() is None
    finally:
        gc.enable()


def test_a_mask_between_0_and_1_is_refused() -> None:
    one, *others = random_sequences(0)
    sequences = [dataclasses.replace(one, mask_T=torch.full((one.response_length,), 0.5)), *others]
    with pytest.raises(ValueError, match="a mask is 0 or 1"):
        pack(sequences, layout(), seed=0)


def annotated_batch(returned: bool) -> tuple[StepBatch, list[Held]]:
    """A batch on two ranks, annotated as number 5, and what the ranks hold."""
    batch = pack(random_sequences(3), layout(dp=2, mini_batches=2), seed=0)
    shares, held, found = shares_of(batch), [], []
    for share in shares:
        assert isinstance(share, Share)
        values = torch.rand(int(share.packed.lengths_S.sum()))
        parts = iter(torch.split(values, [micro.response_tokens for minis in opened(share, False) for micro in minis]))
        annotations = tuple(tuple(Annotation(next(parts)) for _ in minis) for minis in opened(share, False))
        held.append(Held(5, share, annotations))
        found.append(Annotation(values) if returned else Annotation())
    return annotated(batch, Kept(5, OLD), found), held


def test_an_update_on_a_kept_share_has_its_labels_alone() -> None:
    """The micro-batches are those of the driver's batch, with the advantages that it was given after `annotate`."""
    batch, held = annotated_batch(returned=True)

    def changed(micro: MicroBatch) -> MicroBatch:
        return micro.with_advantages(micro.advantage_T * 3.0)

    batch = dataclasses.replace(
        batch,
        mini_batches=tuple(
            dataclasses.replace(mini, per_rank=tuple(tuple(map(changed, rank)) for rank in mini.per_rank))
            for mini in batch.mini_batches
        ),
    )
    updates = updates_of(batch, held=5)
    assert all(update.share is None for update in updates)
    for place, (update, own) in enumerate(zip(updates, held, strict=True)):
        sent: Update = pickle.loads(pickle.dumps(update, 5))
        for mini, micro_batches in zip(batch.mini_batches, sent.micro_batches(own, draws=True), strict=True):
            assert [bits(micro) for micro in micro_batches] == [bits(micro) for micro in mini.per_rank[place]]
    for wrong in (None, dataclasses.replace(held[0], ticket=4)):
        with pytest.raises(RuntimeError, match=r"share number 5, and this rank has (none|number 4)"):
            updates[0].micro_batches(wrong, draws=False)
    # Ranks that have let the share go get everything again.
    for update, own in zip(updates_of(batch, held=None), updates, strict=True):
        assert isinstance(update.share, HandMade) and own.share is None
        assert all(type(micro) is MicroBatch for minis in update.share.minis for micro in minis)


def test_an_annotation_that_stayed_on_ranks_is_missed_once_they_have_let_it_go() -> None:
    batch, held = annotated_batch(returned=False)
    assert all(micro.inputs.old_logp_T is None for micro in micros(batch))
    kept = updates_of(batch, held=5)[0].micro_batches(held[0], draws=False)
    assert kept[0][0].inputs.old_logp_T is held[0].annotations[0][0].old_logp_T
    with pytest.raises(RuntimeError, match="old_logp_T stayed on the ranks, which have another share by now"):
        updates_of(batch, held=6)
    with pytest.raises(RuntimeError, match="which hold it no longer; annotate the batch again"):
        updates_of(batch, held=None)
    part = dataclasses.replace(batch, mini_batches=batch.mini_batches[:1])
    with pytest.raises(RuntimeError, match="keep it for other micro-batches"):
        updates_of(part, held=5)


def test_changes_by_hand_are_sent_as_they_are() -> None:
    """Of a view with another field nothing that ranks keep is used."""
    batch, _ = annotated_batch(returned=True)
    first, *others = batch.mini_batches
    (micro, *rest), *ranks = first.per_rank
    assert isinstance(micro, MicroView)
    other = dataclasses.replace(micro, inputs=dataclasses.replace(micro.inputs, old_logp_T=-micro.inputs.old_logp_T))
    mini = dataclasses.replace(first, per_rank=((other, *rest), *ranks))
    update, unchanged = updates_of(dataclasses.replace(batch, mini_batches=(mini, *others)), held=5)
    assert isinstance(update.share, HandMade) and unchanged.share is None
    assert bits(update.micro_batches(None, draws=True)[0][0]) == bits(other)


@each_case("old_logp", [True, False])
def test_a_step_packed_again_keeps_what_ranks_have(old_logp: bool) -> None:
    """With other masks, as the filter of distant responses makes: labels are new, tokens and annotations are not."""
    batch, held = annotated_batch(returned=True)
    sequences = [
        dataclasses.replace(one, mask_T=torch.zeros(one.response_length), reward=0.0) if place % 3 == 0 else one
        for place, one in enumerate(random_sequences(3))
    ]
    again = pack(sequences, layout(dp=2, mini_batches=2), seed=0)
    kept = with_annotations(again, batch, old_logp=old_logp)
    for found, own, before in zip(micros(kept), micros(again), micros(batch), strict=True):
        x = dataclasses.replace(own.inputs, old_logp_T=before.inputs.old_logp_T if old_logp else None)
        assert bits(found) == bits(dataclasses.replace(own, inputs=x))
    for place, update in enumerate(updates_of(kept, held=5)):
        assert update.share is None
        for mini, sent in zip(kept.mini_batches, update.micro_batches(held[place], draws=True), strict=True):
            assert [bits(micro) for micro in sent] == [bits(micro) for micro in mini.per_rank[place]]
