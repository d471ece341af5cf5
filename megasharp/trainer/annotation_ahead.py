"""Annotation of a step's finished groups while engines still sample its last ones (`rollout.overlap_annotation`).

Old and reference log-probs depend on a response and on weights that stay as they are from a push to the update. So a
group's can be computed as soon as it is finished, on GPUs that would idle until the last response is there. Pieces of
the step are packed by themselves; what is found is kept by response and put into the step's own batch, whose packing
is as ever. The columns differ from those of one pass at the end as they differ between any two packings: by rounding.

A piece is worth its fixed cost, for which the reference's weights go to the GPUs and back, from a full micro-batch on
every data-parallel rank. It is bounded too: while it runs, the driver starts no prompt in place of a dropped group.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megasharp.algos.base import Needs
from megasharp.algos.recipe import training_sequence
from megasharp.batching.delivery import annotated
from megasharp.batching.packing import MICRO_BATCHES_AHEAD, PackLayout, pack
from megasharp.batching.views import ANNOTATION_FIELDS, Annotation
from megasharp.common.records import Group, Mean, Metrics, StepBatch
from megasharp.common.records import Sequence as TrainSequence

# A response's group and its number there.
_Response = tuple[str, int]


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A finished group, and its packed tokens: the prompt once, and all responses."""

    sequences: list[TrainSequence]
    rows: int


class AnnotationAhead:
    """One step's annotation, in pieces. Satisfies `Meanwhile` of the rollouts; the order of groups does not matter.

    `annotate` is the learner's; its weights and its reference must stay the same until `complete` returns. `read` is
    what the driver itself reads of what `needs` asks for. `layout` and `seed` are those of the step.
    """

    def __init__(
        self,
        annotate: Callable[[StepBatch, Needs, Needs | None], StepBatch],
        needs: Needs,
        read: Needs,
        layout: PackLayout,
        seed: int,
    ) -> None:
        self._annotate = annotate
        self._needs = needs
        self._read = read
        self._layout = replace(layout, mini_batches=1)
        self._seed = seed
        self._waiting: list[_Waiting] = []
        self._found: dict[_Response, Annotation] = {}
        # Response tokens that a piece had.
        self._ahead: dict[_Response, int] = {}
        self._seconds = 0.0

    def finished(self, group: Group) -> None:
        """Take a group that the step keeps, if anything of it is to be annotated."""
        if not self._needs.annotation_fields:
            return
        sequences = [training_sequence(group, index, None) for index in range(len(group.responses))]
        rows = len(group.prompt.tokens) + sum(sequence.response_length for sequence in sequences)
        self._waiting.append(_Waiting(sequences, rows))

    def work(self) -> bool:
        """Annotate a piece, where one is worth it; returns False where not."""
        least = self._layout.dp * self._layout.micro_batch_tokens
        if sum(waiting.rows for waiting in self._waiting) < least:
            return False
        began = time.perf_counter()
        sequences: list[TrainSequence] = []
        rows = 0
        while self._waiting and (not rows or rows + self._waiting[0].rows <= MICRO_BATCHES_AHEAD * least):
            group = self._waiting.pop(0)
            sequences += group.sequences
            rows += group.rows
        self._find(sequences)
        self._ahead |= _lengths(sequences)
        self._seconds += time.perf_counter() - began
        return True

    def complete(self, batch: StepBatch, samples: Sequence[TrainSequence]) -> StepBatch:
        """Return the step's `batch`, packed of `samples`, with all columns; annotates what no piece had."""
        self._waiting.clear()
        if not self._found:
            return self._annotate(batch, self._needs, self._read)
        missing = [sample for sample in samples if _key(sample) not in self._found]
        if missing:
            self._find(missing)

        found, like = [], next(iter(self._found.values()))
        for rank in zip(*(mini.per_rank for mini in batch.mini_batches), strict=True):
            flats = [flat for micros in rank for micro in micros for flat in micro.sequence_ids]
            found.append(_joined([self._found[_key(samples[flat])] for flat in flats], like))
        return annotated(batch, None, found)

    def metrics(self, samples: Sequence[TrainSequence]) -> Metrics:
        """Return the share of the step's response tokens that were annotated ahead, tokens in vain, and seconds."""
        trained = _lengths(samples)
        ahead = sum(length for key, length in trained.items() if key in self._ahead)
        unused = sum(length for key, length in self._ahead.items() if key not in trained)
        return {
            "rollout/annotated_ahead": Mean(float(ahead), float(sum(trained.values()))),
            "rollout/annotated_unused": Mean(float(unused), 1.0),
            "rollout/annotation_seconds": Mean(self._seconds, 1.0),
        }

    def _find(self, sequences: Sequence[TrainSequence]) -> None:
        """Annotate a batch of these alone, and keep the columns by response."""
        batch = self._annotate(pack(sequences, self._layout, self._seed), self._needs, None)
        for micro in (micro for mini in batch.mini_batches for rank in mini.per_rank for micro in rank):
            chosen = [sequences[flat] for flat in micro.sequence_ids]
            lengths = [sequence.response_length for sequence in chosen]
            columns = [getattr(micro.inputs, name) for name in ANNOTATION_FIELDS]
            parts = [[None] * len(chosen) if column is None else column.split(lengths) for column in columns]
            for sequence, *own in zip(chosen, *parts, strict=True):
                self._found[_key(sequence)] = Annotation(*own)


def _key(sequence: TrainSequence) -> _Response:
    return sequence.group_id, sequence.index


def _lengths(sequences: Sequence[TrainSequence]) -> dict[_Response, int]:
    """Return response tokens by response."""
    return {_key(sequence): sequence.response_length for sequence in sequences}


def _joined(found: Sequence[Annotation], like: Annotation) -> Annotation:
    """Join the columns of a rank's responses, those that `like` has; empty ones of a rank without any response."""

    def column(name: str) -> Tensor | None:
        if getattr(like, name) is None:
            return None
        return torch.cat([*(getattr(each, name) for each in found), torch.zeros(0)])

    return Annotation(*map(column, ANNOTATION_FIELDS))
