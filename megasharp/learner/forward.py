"""Run micro-batches through Megatron's pipeline schedules, with our head and loss at the last stage.

`Passes` runs forward passes with or without backward. `StageTimers` measures an update's parts on this rank: forward
and backward passes, gradients over ranks, the optimizer. Megatron's schedules start and stop timers that a model's
configuration brings. On a GPU the parts are marked by events in its stream, so that nothing waits for it until the
seconds are read.
"""

from __future__ import annotations

import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megasharp.algos.base import gated
from megasharp.common.records import Mean, Metrics, MicroBatch, TokenInputs
from megasharp.learner.attention import rotary_tables
from megasharp.learner.output_head import (
    HeadRequest,
    HeadResult,
    HeadSettings,
    RankShare,
    evaluate,
    prepare,
    rank_share,
    whole_head,
)
from megasharp.learner.packed import moved, packed_rows
from megasharp.learner.parallel import context_exchange, context_group, context_place
from megasharp.ops.chunked_head import CHUNK_TOKENS
from megasharp.ops.head import HeadOutput
from megasharp.ops.segment import expected_distinct

# The timers of Megatron's that are kept, and their names here; it has more of them.
_STAGES = {"forward-compute": "forward", "backward-compute": "backward", "all-grads-sync": "gradient_sync"}


class _Mark(Protocol):
    """A moment of this rank's device."""

    def until(self, later: _Mark) -> float:
        """Return the seconds from here to `later`; both have passed."""
        ...


class _Now:
    """A moment of the CPU, where calls return when their work is done."""

    def __init__(self) -> None:
        self.at = time.perf_counter()

    def until(self, later: _Mark) -> float:
        """Return the seconds between."""
        assert isinstance(later, _Now)
        return later.at - self.at


class _InStream:
    """A moment of the GPU's stream."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record()

    def until(self, later: _Mark) -> float:
        """Return the seconds between; the GPU must be done with both."""
        assert isinstance(later, _InStream)
        return float(self._event.elapsed_time(later._event)) / 1e3


class StageTimers:
    """The object that Megatron calls `timers`, for one learner."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: defaultdict[str, list[tuple[_Mark, _Mark]]] = defaultdict(list)
        self._timers: dict[str, _Timer] = {}

    def __call__(self, name: str, log_level: int = 0) -> _Timer:
        """Return Megatron's timer of that name."""
        return self._timers.setdefault(name, _Timer(self, _STAGES.get(name)))

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the body's seconds for the stage `name`."""
        began = self.mark()
        yield
        self.add(name, began)

    def mark(self) -> _Mark:
        """Mark now, on this rank's device."""
        return _InStream() if self._device.type == "cuda" else _Now()

    def add(self, name: str, began: _Mark) -> None:
        """Count the time from `began` until now for the stage `name`."""
        self._marks[name].append((began, self.mark()))

    def reset(self) -> None:
        """Forget the times so far: passes before an update are none of its parts."""
        self._marks.clear()

    def take(self) -> dict[str, float]:
        """Return seconds by stage since the last call; on a GPU it waits until all of it is done."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        found = {name: sum(began.until(ended) for began, ended in marks) for name, marks in self._marks.items()}
        self._marks.clear()
        return found


class _Timer:
    """A timer as Megatron calls it, one start and stop after the other; without a stage it keeps nothing."""

    def __init__(self, timers: StageTimers, stage: str | None) -> None:
        self._timers = timers
        self._stage = stage
        self._began: _Mark | None = None

    def start(self, barrier: bool = False) -> None:
        """Begin. Ranks do not wait for each other, whatever `barrier` says: that would change what is measured."""
        if self._stage is not None:
            self._began = self._timers.mark()

    def stop(self, barrier: bool = False) -> None:
        """End what `start` began."""
        if self._stage is not None:
            assert self._began is not None, f"{self._stage} was not started"
            self._timers.add(self._stage, self._began)


@dataclass(frozen=True, slots=True, eq=False)
class MicroResult:
    """The results of one micro-batch on the last stage.

    Annotation passes keep `logp_T` and `entropy_T` (float32, no gradient); update passes keep `loss` and `metrics`.
    """

    logp_T: Tensor | None = None
    entropy_T: Tensor | None = None
    loss: float = 0.0
    metrics: Metrics = dataclasses.field(default_factory=dict)


# Passes before the update: log-probs and entropies only.
_ANNOTATION = HeadRequest(entropy=True, entropy_gradient=False, topn=0)


# From a micro-batch and the head's outputs to the loss (a scalar) and the results that are kept.
Finish = Callable[[MicroBatch, HeadOutput], tuple[Tensor, MicroResult]]


class Passes:
    """Runs forward passes, with or without backward, of a rank's model chunks.

    All ranks of a model must make the same calls with equally many micro-batches. `frequencies`: the rotary embedding's
    inverse frequencies and scaling, on the rank's device. `response_window`: that of `LearnerSettings`.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        frequencies: tuple[Tensor, float],
        head: HeadSettings,
        response_window: int | None = None,
    ) -> None:
        self._chunks = list(chunks)
        self._frequencies = frequencies
        self._head = head
        self._response_window = response_window
        for chunk in self._chunks:
            prepare(chunk, head.form)
        self._run = get_forward_backward_func()

    def annotate(self, micro_batches: Sequence[MicroBatch]) -> list[MicroResult]:
        """Compute log-probs and entropies without gradient; empty except on the last stage."""
        with torch.no_grad():
            return self._schedule(micro_batches, _keep_logp, _ANNOTATION, forward_only=True)

    def update(self, micro_batches: Sequence[MicroBatch], finish: Finish, request: HeadRequest) -> list[MicroResult]:
        """Run forward and backward; gradients are summed into the model's buffers and reduced over ranks.

        `finish` makes each micro-batch's loss. The results are empty except on the last stage.
        """
        return self._schedule(micro_batches, finish, request, forward_only=False)

    def without_backward(
        self, micro_batches: Sequence[MicroBatch], finish: Finish, request: HeadRequest
    ) -> list[MicroResult] | None:
        """Return what `update` does of losses without any gradient, by forward passes alone; None if there is one.

        Without pipeline parallelism only.
        """
        silent: list[bool] = []
        with torch.no_grad():
            results = self._schedule(
                micro_batches, partial(_finish_silent, finish, request, silent), request, forward_only=True
            )
        return results if all(silent) else None

    def _schedule(
        self, micro_batches: Sequence[MicroBatch], finish: Finish, request: HeadRequest, *, forward_only: bool
    ) -> list[MicroResult]:
        results: list[MicroResult] = self._run(
            forward_step_func=partial(self._forward_step, finish, request),
            data_iterator=[iter(micro_batches) for _ in self._chunks],
            model=self._chunks,
            num_microbatches=len(micro_batches),
            # Lengths differ by micro-batch; the schedules exchange real shapes (variable_seq_lengths).
            seq_length=int(micro_batches[0].tokens_P.numel()),
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return results if parallel_state.is_pipeline_last_stage() else []

    def _forward_step(
        self, finish: Finish, request: HeadRequest, micro_batches: Iterator[MicroBatch], model: GPTModel
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, MicroResult]]]:
        planned = next(micro_batches)
        device = self._frequencies[0].device
        share = moved(rank_share(planned, *context_place()), device)
        if share.experts is not None and device.type != "cpu":
            # The share has this rank's part, and nothing reads the others'.
            planned = dataclasses.replace(planned, experts_PLK=None)
        micro = moved(planned, device)
        cos, sin = rotary_tables(*self._frequencies, share.positions_L)
        # From segments on the CPU, so that planning attention need not wait for the GPU to send lengths.
        rows = packed_rows(
            planned.segments,
            cos,
            sin,
            share.cut,
            context_exchange(),
            self._response_window,
            share.experts,
            share.is_real_L,
        )
        output = model(share.tokens_L[None], share.positions_L[None], None, packed_seq_params=rows)
        return output, partial(self._loss, finish, request, micro, share, model)

    def _loss(
        self,
        finish: Finish,
        request: HeadRequest,
        micro: MicroBatch,
        share: RankShare,
        model: GPTModel,
        output_BLX: Tensor,
    ) -> tuple[Tensor, Tensor, MicroResult]:
        own = evaluate(model, output_BLX, share, self._head, request)
        head = whole_head(own.output, share.tokens, context_exchange())
        loss, result = finish(micro, head)
        if request.distinct_samples:
            gated_T = gated(token_inputs(micro, head), request.gate)
            branching = self._branching(micro, share, own, gated_T, request.distinct_samples)
            result = dataclasses.replace(result, metrics={**result.metrics, **branching})
        # Megatron adds token counts up; denominators are in the loss already, and the learner ignores these.
        return loss, torch.tensor(0, dtype=torch.int), result

    @torch.no_grad()
    def _branching(
        self, micro: MicroBatch, share: RankShare, own: HeadResult, gated_T: Tensor, samples: int
    ) -> Metrics:
        """Measure the share of gated positions and the expected distinct next tokens there (2510.14807 Prop. 3)."""
        normaliser = own.output.normaliser_T
        rows = share.own(gated_T).nonzero()[:, 0]
        total = normaliser.new_zeros(())
        for part in torch.split(rows, CHUNK_TOKENS):
            logits_RV = own.logits(part)[:, : own.shard.valid].to(normaliser.dtype)
            logp_RV = logits_RV / self._head.temperature - normaliser[part, None]
            total += expected_distinct(logp_RV, samples).sum()
        # A tensor-parallel rank has its part of the vocabulary, a context-parallel rank the logits of its own tokens.
        for group in (own.shard.group, context_group()):
            if group is not None:
                dist.all_reduce(total, group=group)
        count = float(gated_T.sum())
        return {
            "candidates/distinct_next": Mean(float(total), count),
            "candidates/gate_rate": Mean(count, float((micro.inputs.mask_T > 0).sum())),
        }


def _finish_silent(
    finish: Finish, request: HeadRequest, silent: list[bool], micro: MicroBatch, head: HeadOutput
) -> tuple[Tensor, MicroResult]:
    """Finish without gradient, and note whether the loss's gradient by the head's outputs is zero throughout."""
    names = ["logp_T", "topn_logp_TN", *(["entropy_T"] if request.entropy_gradient else [])]
    leaves = {name: value.detach().requires_grad_() for name in names if (value := getattr(head, name)) is not None}
    with torch.enable_grad():
        loss, result = finish(micro, dataclasses.replace(head, **leaves))
        used = loss.requires_grad
        gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True) if used else ()
    # A gradient that is no number is not zero either.
    silent.append(not any(bool(gradient.any()) for gradient in gradients if gradient is not None))
    return loss.detach(), result


def _keep_logp(micro: MicroBatch, head: HeadOutput) -> tuple[Tensor, MicroResult]:
    assert head.entropy_T is not None
    return head.logp_T.sum(), MicroResult(head.logp_T.detach().float().cpu(), head.entropy_T.detach().float().cpu())


def token_inputs(micro: MicroBatch, head: HeadOutput) -> TokenInputs:
    """Return the micro-batch's inputs with the head's outputs filled in."""
    return dataclasses.replace(
        micro.inputs,
        logp_T=head.logp_T,
        entropy_T=head.entropy_T,
        topn_logp_TN=head.topn_logp_TN,
        is_top1_T=head.is_top1_T,
    )
