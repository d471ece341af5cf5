"""Messages between the driver and ranks in a step: shares, updates, annotations.

A share goes to its ranks once. `annotate` leaves it there, with its results, under a number (`Kept.ticket`); the step's
`Update` then names that number and brings the labels alone, which may have changed in between. Micro-batches that are
no views of one share (made by hand) are sent as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from megasharp.batching.share import Labels, Share
from megasharp.batching.views import ANNOTATION_FIELDS, Annotation, Kept, MicroView, extents, open_share
from megasharp.common.records import Denominators, MicroBatch, MiniBatch, StepBatch

# One rank's micro-batches by mini-batch.
Micros = Sequence[Sequence[MicroBatch]]


@dataclass(frozen=True, slots=True, eq=False)
class HandMade:
    """One rank's micro-batches as they are."""

    minis: tuple[tuple[MicroBatch, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A share on its rank between `annotate` and the step, with each micro-batch's annotation by mini-batch.

    The annotations are empty on ranks that compute none.
    """

    ticket: int
    share: Share
    annotations: tuple[tuple[Annotation, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """One rank's part of the optimizer steps of a training step, each with its denominators and statistics.

    Either `share` comes along, with what the driver has of its `annotation` (over all tokens in order), or the rank has
    it under the number of `kept`: then only its `labels` do, and `kept` names the fields of the annotation that the
    step reads.
    """

    steps: tuple[tuple[Denominators, tuple[Mapping[str, Tensor], ...]], ...]
    share: Share | HandMade | None = None
    labels: Labels | None = None
    kept: Kept | None = None
    annotation: Annotation | None = None

    def micro_batches(self, held: Held | None, draws: bool) -> Micros:
        """Return the micro-batches of each mini-batch. Raises RuntimeError where the rank has not what it should."""
        if isinstance(self.share, Share) and self.annotation is not None:
            views = open_share(self.share, draws)
            pieces = _split(self.annotation, [micro.response_tokens for micros in views for micro in micros])
            return [[micro.changed(annotation=next(pieces)) for micro in micros] for micros in views]
        if self.share is not None:
            return opened(self.share, draws)
        assert self.labels is not None and self.kept is not None
        if held is None or held.ticket != self.kept.ticket:
            has = "none" if held is None else f"number {held.ticket}"
            raise RuntimeError(f"the step is on share number {self.kept.ticket}, and this rank has {has}")
        views = open_share(Share(held.share.packed, self.labels), draws)
        if not any(held.annotations):
            return views
        fields = self.kept.fields
        return [
            [micro.changed(annotation=_only(found, fields)) for micro, found in zip(*each, strict=True)]
            for each in zip(views, held.annotations, strict=True)
        ]


def opened(share: Share | HandMade, draws: bool) -> Micros:
    """Return the micro-batches of each mini-batch."""
    return share.minis if isinstance(share, HandMade) else open_share(share, draws)


def shares_of(batch: StepBatch) -> list[Share | HandMade]:
    """Return every data-parallel rank's share."""
    return [_share_of(minis) or HandMade(minis) for minis in _by_rank(batch)]


def updates_of(batch: StepBatch, held: int | None = None) -> list[Update]:
    """Return every data-parallel rank's part of a step, where ranks hold the share number `held`.

    `held` is None where they hold none. Raises RuntimeError where an annotation stayed on ranks that cannot use it.
    """
    steps = tuple((mini.denominators, mini.statistics) for mini in batch.mini_batches)
    updates = []
    for minis in _by_rank(batch):
        share = _share_of(minis)
        # What ranks keep, where it is the same for all of these.
        every = {micro.kept if isinstance(micro, MicroView) else None for micros in minis for micro in micros}
        kept = every.pop() if len(every) == 1 else None
        if share is not None and kept is not None and kept.ticket == held:
            updates.append(Update(steps, labels=share.labels, kept=kept))
        elif share is not None and kept is None:
            found = [[micro.annotation for micro in micros if isinstance(micro, MicroView)] for micros in minis]
            updates.append(Update(steps, share, annotation=joined(found, frozenset(ANNOTATION_FIELDS))))
        else:
            whole = tuple(tuple(_whole(micro, held) for micro in micros) for micros in minis)
            updates.append(Update(steps, HandMade(whole)))
    return updates


def annotated(batch: StepBatch, kept: Kept | None, found: Sequence[Annotation]) -> StepBatch:
    """Return the batch with what each data-parallel rank found and returned, over all of its tokens in order.

    `kept` says what the ranks keep of it; None where they keep nothing.
    """
    pieces = []
    for minis, annotation in zip(_by_rank(batch), found, strict=True):
        counts = [micro.response_tokens for micros in minis for micro in micros]
        pieces.append(_split(annotation, counts))

    def filled(micro: MicroBatch, piece: Annotation) -> MicroBatch:
        return micro.changed(annotation=piece, kept=kept) if isinstance(micro, MicroView) else _plain(micro, piece)

    mini_batches = []
    for mini in batch.mini_batches:
        per_rank = tuple(
            tuple(filled(micro, next(rank)) for micro in micros)
            for micros, rank in zip(mini.per_rank, pieces, strict=True)
        )
        mini_batches.append(replace(mini, per_rank=per_rank))
    return replace(batch, mini_batches=tuple(mini_batches))


def with_annotations(batch: StepBatch, annotated: StepBatch, *, old_logp: bool) -> StepBatch:
    """Return `batch` with what passes over `annotated` found: the same responses, packed alike, with other masks.

    Without `old_logp` the log-probs of the policy before the update are left out. Ranks that keep the share keep it.
    """
    fields = frozenset(ANNOTATION_FIELDS) if old_logp else frozenset(ANNOTATION_FIELDS) - {"old_logp_T"}
    shares = [_relabelled(*each) for each in zip(_by_rank(batch), _by_rank(annotated), strict=True)]

    def filled(micro: MicroBatch, found: MicroBatch, share: Share | None) -> MicroBatch:
        assert micro.sequence_ids == found.sequence_ids, "packing depends on lengths alone"
        if share is None or not isinstance(micro, MicroView) or not isinstance(found, MicroView):
            own = Annotation(**{name: getattr(found.inputs, name) for name in ANNOTATION_FIELDS})
            return _plain(micro, _only(own, fields))
        kept = found.kept and replace(found.kept, fields=found.kept.fields & fields)
        return micro.changed(share=share, annotation=_only(found.annotation, fields), kept=kept)

    def joined(mini: MiniBatch, known: MiniBatch) -> MiniBatch:
        ranks = zip(mini.per_rank, known.per_rank, shares, strict=True)
        per_rank = tuple(
            tuple(filled(micro, found, share) for micro, found in zip(micros, others, strict=True))
            for micros, others, share in ranks
        )
        return replace(mini, per_rank=per_rank)

    pairs = zip(batch.mini_batches, annotated.mini_batches, strict=True)
    return replace(batch, mini_batches=tuple(joined(*pair) for pair in pairs))


def joined(annotations: Sequence[Sequence[Annotation]], fields: frozenset[str]) -> Annotation:
    """Join the micro-batches' annotations over a rank's tokens, only these fields."""
    parts = list(chain.from_iterable(annotations))

    def column(name: str) -> Tensor | None:
        values = [value for part in parts if (value := getattr(part, name)) is not None]
        return torch.cat(values) if values and name in fields else None

    return Annotation(**{name: column(name) for name in ANNOTATION_FIELDS})


def _split(annotation: Annotation, counts: Sequence[int]) -> Iterator[Annotation]:
    """Yield each micro-batch's part of an annotation; `counts` are their response tokens."""
    columns: list[Sequence[Tensor | None]] = []
    for name in ANNOTATION_FIELDS:
        value_T: Tensor | None = getattr(annotation, name)
        columns.append([None] * len(counts) if value_T is None else torch.split(value_T, list(counts)))
    for piece in zip(*columns, strict=True):
        yield Annotation(*piece)


def _only(annotation: Annotation, fields: frozenset[str]) -> Annotation:
    return Annotation(**{name: getattr(annotation, name) for name in ANNOTATION_FIELDS if name in fields})


def _plain(micro: MicroBatch, annotation: Annotation) -> MicroBatch:
    """Return the micro-batch with this annotation as a plain record."""
    values = {name: getattr(annotation, name) for name in ANNOTATION_FIELDS}
    return replace(micro, inputs=replace(micro.inputs, **values))


def _whole(micro: MicroBatch, held: int | None) -> MicroBatch:
    """Return the micro-batch as a plain record. Raises RuntimeError where ranks have a part of its annotation alone."""
    if not isinstance(micro, MicroView):
        return micro
    kept = micro.kept.fields if micro.kept else frozenset[str]()
    absent = [name for name in ANNOTATION_FIELDS if name in kept and getattr(micro.annotation, name) is None]
    if absent:
        assert micro.kept is not None
        since = "keep it for other micro-batches than these"
        if micro.kept.ticket != held:
            since = "hold it no longer" if held is None else "have another share by now"
        raise RuntimeError(f"{', '.join(absent)} stayed on the ranks, which {since}; annotate the batch again")
    return replace(micro)


def _by_rank(batch: StepBatch) -> Iterator[tuple[tuple[MicroBatch, ...], ...]]:
    """Yield each data-parallel rank's micro-batches by mini-batch."""
    return zip(*(mini.per_rank for mini in batch.mini_batches), strict=True)


def _share_of(minis: Micros) -> Share | None:
    """Return the share that these micro-batches are views of, with their advantages; None where it is no single one."""
    micros = list(chain.from_iterable(minis))
    views = [micro for micro in micros if isinstance(micro, MicroView)]
    if not views or len(views) < len(micros) or any(view.share is not views[0].share for view in views):
        return None
    share = views[0].share
    if tuple(map(len, minis)) != share.packed.minis or [view.extent for view in views] != extents(share.packed):
        return None
    if all(view.advantages is None for view in views):
        return share
    return share.with_advantages(torch.cat([view.advantage_T for view in views]))


def _relabelled(minis: Micros, known: Micros) -> Share | None:
    """Return the share of `known`, with the labels of `minis`; None where either is no share."""
    share, other = _share_of(minis), _share_of(known)
    return None if share is None or other is None else Share(other.packed, share.labels)
