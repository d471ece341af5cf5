"""Groups with given rewards, and random token inputs holding exactly the fields that `needs` asks for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from torch import Tensor

from megasharp.algos.base import MethodParams, Needs, Reduction
from megasharp.algos.build_recipe import build_recipe
from megasharp.common.records import (
    Completion,
    Denominators,
    FinishReason,
    Group,
    MicroBatch,
    MiniBatch,
    Outcome,
    Prompt,
    Response,
    Segments,
    StepBatch,
    TaskAnswer,
    TokenInputs,
    Verdict,
)

MakeGroup = Callable[..., Group]
MakeMicro = Callable[..., MicroBatch]
Graded = tuple[float, Tensor, dict[str, float]]

# Tokens of each sequence, and which of them is masked as a whole besides single tokens of others.
LENGTHS, MASKED_SEQUENCE = (4, 1, 6, 3), 2


def response(reward: float, outcome: Outcome, length: int, answer: str | None) -> Response:
    logp = torch.full((length,), -1.0)
    completion = Completion(torch.arange(length), logp, logp - 0.5, None, (), FinishReason.STOP, seed=int(length))
    return Response(completion, "", Verdict(outcome, reward, answer))


@pytest.fixture
def make_group() -> MakeGroup:
    """`make_group(rewards, outcomes=None, answers=None)`: response i has i + 1 tokens after a prompt of two."""

    def make(
        rewards: Sequence[float],
        outcomes: Sequence[Outcome] | None = None,
        answers: Sequence[str | None] | None = None,
    ) -> Group:
        found = outcomes or [Outcome.CORRECT if reward > 0 else Outcome.WRONG for reward in rewards]
        prompt = Prompt("p0", "task", "", (5, 6), TaskAnswer(), "memory", 0, 0)
        return Group(
            "g0",
            prompt,
            tuple(
                response(reward, outcome, length, answer)
                for length, (reward, outcome, answer) in enumerate(
                    zip(rewards, found, answers or [None] * len(rewards), strict=True), start=1
                )
            ),
            policy_version=0,
        )

    return make


@pytest.fixture
def make_micro() -> MakeMicro:
    """`make_micro(needs, seed=0, dtype=float64)`: four sequences with masked tokens, fields random."""

    def make(needs: Needs, seed: int = 0, dtype: torch.dtype = torch.float64) -> MicroBatch:
        generator = torch.Generator().manual_seed(seed)
        tokens = sum(LENGTHS)
        seq_T = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))

        def logp(*shape: int) -> Tensor:
            return torch.empty(tokens, *shape, dtype=dtype).normal_(-1.5, 0.4, generator=generator)

        mask_T = ((torch.arange(tokens) % 5 != 3) & (seq_T != MASKED_SEQUENCE)).to(dtype)
        inputs = TokenInputs(
            mask_T=mask_T,
            seq_T=seq_T,
            group_T=seq_T // 2,
            reward_T=(seq_T % 2).to(dtype),
            correct_T=(seq_T % 2).to(dtype),
            group_size_T=torch.full((tokens,), 2.0, dtype=dtype),
            group_correct_T=torch.full((tokens,), 1.0, dtype=dtype),
            num_sequences=len(LENGTHS),
            logp_T=logp(),
            old_logp_T=logp() if needs.old_logp else None,
            ref_logp_T=logp() if needs.ref_logp else None,
            sampler_logp_T=logp() if needs.sampler_logp else None,
            policy_logp_T=logp() if needs.policy_logp else None,
            draw_T=torch.rand(tokens, dtype=torch.float64, generator=generator) if needs.draw else None,
            entropy_T=logp().abs() if needs.entropy else None,
            old_entropy_T=logp().abs() if needs.old_entropy else None,
            topn_logp_TN=logp(needs.topn) if needs.topn else None,
            is_top1_T=(logp() > -1.5).to(dtype) if needs.topn else None,
        )
        empty = torch.zeros(0, dtype=torch.int64)
        return MicroBatch(
            tokens_P=empty,
            positions_P=empty,
            segments=Segments(empty, empty, empty),
            rows_T=torch.arange(tokens),
            targets_T=torch.arange(tokens),
            length_S=torch.zeros(len(LENGTHS), dtype=torch.float64).index_add(0, seq_T, mask_T.double()),
            advantage_T=torch.empty(tokens, dtype=dtype).normal_(generator=generator),
            inputs=inputs,
            sequence_ids=tuple(range(len(LENGTHS))),
        )

    return make


def graded(
    micro: MicroBatch,
    names: Sequence[str],
    params: Mapping[str, MethodParams] | None = None,
    reduction: Reduction | None = Reduction.TOKEN_MEAN,
) -> Graded:
    """A recipe's loss of a step of one micro-batch, its gradient by the log-probs, and its metrics."""
    recipe = build_recipe(names, params or {}, reduction=reduction, constant=16.0, mini_batches=2)
    tokens, sequences = float(micro.inputs.mask_T.sum()), float((micro.length_S > 0).sum())
    denominators = Denominators(tokens, sequences, 16.0)
    batch, calibrated = recipe.calibrate(StepBatch((MiniBatch(((micro,),), denominators),), ("g0", "g1"), 0))
    (mini,) = batch.mini_batches
    assert micro.inputs.logp_T is not None
    logp_T = micro.inputs.logp_T.detach().clone().requires_grad_()
    x = dataclasses.replace(micro.inputs, logp_T=logp_T)
    loss, metrics = recipe.loss(mini.per_rank[0][0], x, denominators, mini.statistics)
    (gradient_T,) = torch.autograd.grad(loss, logp_T)
    return float(loss.detach()), gradient_T, {name: metric.value for name, metric in {**calibrated, **metrics}.items()}


@pytest.fixture
def grade() -> Callable[..., Graded]:
    """`grade(micro, names, params=None, reduction=TOKEN_MEAN)`: loss, gradient by the log-probs, metrics."""
    return graded
