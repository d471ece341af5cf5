"""Annotation while engines sample, over a stand-in learner: the columns of one pass, in any order, with what it costs.

That a real learner's columns agree is in `tests/multirank/learner/test_annotation_ahead.py`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megasharp.algos.base import Needs, OldLogp
from megasharp.algos.build_recipe import build_recipe
from megasharp.batching.packing import PackLayout, pack
from megasharp.common.records import (
    Completion,
    FinishReason,
    Group,
    Mean,
    MicroBatch,
    Outcome,
    Prompt,
    Response,
    StepBatch,
    TaskAnswer,
    Verdict,
    VersionSpan,
)
from megasharp.trainer.annotation_ahead import AnnotationAhead

NEEDS = Needs(old_logp=OldLogp.IN_LOSS, ref_logp=True)
READ = Needs(ref_logp=True)
RECIPE = build_recipe(("grpo", "kl"), {}, reduction=None, constant=4.0, mini_batches=2)
LAYOUT = PackLayout(dp=2, micro_batch_tokens=40, mini_batches=2, row_multiple=1, constant=4.0)


class StandInLearner:
    """A token's log-probs are numbers made of it and of its place in its response, whatever it is packed with."""

    def __init__(self) -> None:
        self.asked: list[StepBatch] = []
        self.returned: list[Needs | None] = []

    def annotate(self, batch: StepBatch, needs: Needs, returned: Needs | None = None) -> StepBatch:
        self.asked.append(batch)
        self.returned.append(returned)
        assert needs == NEEDS
        minis = [
            replace(mini, per_rank=tuple(tuple(map(annotated, rank)) for rank in mini.per_rank))
            for mini in batch.mini_batches
        ]
        return replace(batch, mini_batches=tuple(minis))


def annotated(micro: MicroBatch) -> MicroBatch:
    offset_T = torch.cat([torch.arange(int(n)) for n in torch.bincount(micro.inputs.seq_T)] or [torch.zeros(0)])
    old_T = micro.targets_T.float() + offset_T / 64
    return replace(micro, inputs=replace(micro.inputs, old_logp_T=old_T, ref_logp_T=-old_T))


def group(number: int, lengths: Sequence[int], dropped: str | None = None) -> Group:
    prompt = Prompt(str(number), "t", "", tuple(range(3 + number % 4)), TaskAnswer(), "s", 0, number)
    return Group(f"step1-{number}", prompt, tuple(_response(number, n) for n in lengths), 0, dropped_reason=dropped)


def _response(number: int, length: int) -> Response:
    tokens, logp = torch.arange(length) + 100 * number, torch.zeros(length)
    spans = (VersionSpan(0, 0, length),) if length else ()
    completion = Completion(tokens, logp, logp, None, spans, FinishReason.STOP, seed=number)
    verdict = Verdict(Outcome.CORRECT, 1.0) if length % 2 else Verdict(Outcome.WRONG, 0.0)
    return Response(completion, "", verdict)


def columns(batch: StepBatch) -> list[Tensor | None]:
    micros = [micro for mini in batch.mini_batches for rank in mini.per_rank for micro in rank]
    return [column for m in micros for column in (m.inputs.old_logp_T, m.inputs.ref_logp_T, m.inputs.old_entropy_T)]


def step(numbers: Sequence[int]) -> list[Group]:
    chance = random.Random(3)
    lengths = [[chance.randrange(0, 19) for _ in range(4)] for _ in range(12)]
    return [group(number, lengths[number]) for number in numbers]


@pytest.mark.parametrize("seed", range(3))
def test_columns_are_those_of_one_pass_in_whatever_order_groups_end(seed: int) -> None:
    """Also where responses are empty, and where the last groups come too late for a piece."""
    groups, learner, plain = step(range(12)), StandInLearner(), StandInLearner()
    samples = RECIPE.advantages(groups)
    batch = pack(samples, LAYOUT, 7)
    expected = plain.annotate(batch, NEEDS)
    ahead = AnnotationAhead(learner.annotate, NEEDS, READ, LAYOUT, 7)
    order = groups[:]
    random.Random(seed).shuffle(order)
    for number, one in enumerate(order):
        ahead.finished(one)
        if number % (seed + 1) == 0 and number < 10:
            ahead.work()
    pieces = len(learner.asked)
    found = ahead.complete(batch, samples)
    assert pieces >= 2 and len(learner.asked) == pieces + 1
    for mine, its in zip(columns(found), columns(expected), strict=True):
        assert (mine is None and its is None) or torch.equal(mine, its)  # type: ignore[arg-type]
    told = ahead.metrics(samples)
    tokens, share = sum(sample.response_length for sample in samples), told["rollout/annotated_ahead"]
    assert isinstance(share, Mean) and 0 < share.total < share.weight == tokens
    assert told["rollout/annotated_unused"] == Mean(0.0, 1.0)


def test_without_a_piece_the_step_is_annotated_as_ever() -> None:
    """The step's own batch goes to the learner in one call: its bits are those of a run without the key."""
    groups, learner = step(range(3)), StandInLearner()
    samples = RECIPE.advantages(groups)
    batch = pack(samples, LAYOUT, 7)
    ahead = AnnotationAhead(learner.annotate, NEEDS, READ, replace(LAYOUT, micro_batch_tokens=10_000), 7)
    for one in groups:
        ahead.finished(one)
    assert not ahead.work()
    ahead.complete(batch, samples)
    assert learner.asked == [batch] and learner.returned == [READ]


def test_a_piece_fills_every_rank_and_is_bounded() -> None:
    """80 rows are a micro-batch on both ranks; of groups of 41 rows the most is 320 rows, which is 7 groups."""
    learner = StandInLearner()
    ahead = AnnotationAhead(learner.annotate, NEEDS, READ, LAYOUT, 7)
    ahead.finished(group(0, [19, 19]))
    assert not ahead.work()
    for number in range(4, 64, 4):
        ahead.finished(group(number, [19, 19]))
    worked = [ahead.work() for _ in range(4)]
    assert worked == [True, True, True, False]
    groups = [len(batch.group_ids) for batch in learner.asked]
    assert groups == [7, 7, 2]


def test_what_the_step_leaves_out_is_counted_and_not_in_its_batch() -> None:
    groups, learner = [group(number, [19, 18]) for number in range(0, 24, 4)], StandInLearner()
    ahead = AnnotationAhead(learner.annotate, NEEDS, READ, LAYOUT, 7)
    for one in groups:
        ahead.finished(one)
    while ahead.work():
        pass
    samples = RECIPE.advantages([replace(groups[0], dropped_reason="late"), *groups[1:]])
    ahead.complete(pack(samples, LAYOUT, 7), samples)
    told = ahead.metrics(samples)
    assert told["rollout/annotated_unused"] == Mean(37.0, 1.0)


def test_a_recipe_without_passes_before_the_update_has_nothing_to_do() -> None:
    def never(batch: StepBatch, needs: Needs, returned: Needs | None) -> StepBatch:
        raise AssertionError("nothing is asked for")

    ahead = AnnotationAhead(never, Needs(), Needs(), LAYOUT, 7)
    for one in step(range(12)):
        ahead.finished(one)
    assert not ahead.work()
