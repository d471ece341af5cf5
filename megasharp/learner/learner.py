"""One rank of the policy under training.

Every rank gets the whole step's batch and works on its data-parallel share. Ranks that do not speak for their share
(all but the last stage's first tensor-parallel rank) return None; `megasharp.learner.ranks` joins the others' results.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from torch import Tensor

from megasharp.algos.base import DEFAULT_QUANTILE, Needs, OldLogp
from megasharp.algos.recipe import MiniBatchStats, Recipe
from megasharp.common.files import FileHash
from megasharp.common.records import (
    Denominators,
    Metric,
    Metrics,
    MicroBatch,
    MiniBatch,
    ParallelLayout,
    StepBatch,
    StepStats,
)
from megasharp.convert.hf_folder import TensorView
from megasharp.convert.lora import LoraSettings, record_adapters
from megasharp.convert.rope import rotary_frequencies
from megasharp.learner.forward import MicroResult, Passes, StageTimers, token_inputs
from megasharp.learner.layer_spec import Wanted, uses_transformer_engine
from megasharp.learner.model import CORE_ATTENTION, Fp8, Options, build_chunks, sort_options, transformer_config
from megasharp.learner.offload import Kind, Offloader, Reference
from megasharp.learner.optimizer import OptimizerSettings, Overlap, build_optimizer, guarded_step, overlaps, parts
from megasharp.learner.output_head import HeadForm, HeadRequest, HeadSettings
from megasharp.learner.parallel import Place, megatron_device
from megasharp.learner.sharded_state import load_model, load_state, save_model, save_state
from megasharp.learner.weights import export_stage, first_weights, weight_views
from megasharp.metrics.group_metrics import Diagnostics, token_metrics
from megasharp.ops.head import HeadOutput

if TYPE_CHECKING:
    from megasharp.learner.async_checkpoint import ShardWriting


@dataclass(frozen=True, slots=True)
class LearnerSettings:
    """Everything a rank needs to build its part of a learner.

    `folder` is where the model is loaded from, of either kind (`convert/model_folder.py`).
    `temperature` divides logits before everything: the rollouts' own for the policy. `diagnostics`: what the update's
    figures tell of; None leaves them out. `lora`: train adapters on frozen weights, or all weights where it is None.
    `drawn`: begin with random weights of the model that `folder` describes. `head`: `learner/output_head.py` has both
    forms. `transformer_engine` and `overlap`: `learner/layer_spec.py` and `learner/optimizer.py` say what `auto` takes.
    `optimizer_offload`: Adam's state in host memory (`learner/optimizer_offload.py`). `recompute_modules`: of
    `selective`.
    """

    folder: str
    dtype: torch.dtype
    layout: ParallelLayout
    optimizer: OptimizerSettings
    needs: Needs
    temperature: float
    seed: int
    recompute: str
    offload: tuple[Kind, ...]
    options: Options
    diagnostics: Diagnostics | None = None
    lora: LoraSettings | None = None
    deterministic: bool = False
    drawn: bool = False
    head: HeadForm = "logits"
    transformer_engine: Wanted = "auto"
    fp8: Fp8 | None = None
    overlap: Wanted = "auto"
    optimizer_offload: bool = False
    recompute_modules: tuple[str, ...] = (CORE_ATTENTION,)


@dataclass(frozen=True, slots=True, eq=False)
class Annotation:
    """One micro-batch's results of the passes before the update; None where nothing asked for it."""

    old_logp_T: Tensor | None
    old_entropy_T: Tensor | None
    ref_logp_T: Tensor | None


# Per mini-batch, per micro-batch of this rank's share.
Annotations = list[list[Annotation]]


def _sum_gradients(models: list[torch.nn.Module], num_tokens: object = None, **kwargs: Any) -> None:
    """Megatron's own reduction, without its division by a token count: our losses are divided already."""
    finalize_model_grads(models, None, **kwargs)


class RankLearner:
    """A learner's part on this rank; `place` is what `initialize` found."""

    def __init__(self, settings: LearnerSettings, place: Place, device: torch.device) -> None:
        self._settings = settings
        self._place = place
        self._device = device
        with self._on_device():
            options = sort_options(settings.options)
            with first_weights(settings.folder, settings.drawn) as source:
                self._family, self._arch = source.family, source.architecture
                config = transformer_config(
                    self._arch,
                    settings.layout,
                    settings.dtype,
                    settings.recompute,
                    options.model,
                    settings.deterministic,
                    settings.fp8,
                    settings.recompute_modules,
                )
                engine = uses_transformer_engine(settings.transformer_engine, device)
                self._chunks = build_chunks(
                    config, self._arch, self._place, settings.lora, settings.seed, transformer_engine=engine
                )
                for chunk in self._chunks:
                    chunk.to(device)
                source.fill(self._chunks, self._place)
            overlapped = overlaps(settings.overlap, settings.layout, device)
            reduction = DistributedDataParallelConfig(
                use_distributed_optimizer=True,
                grad_reduce_in_fp32=True,
                overlap_grad_reduce=overlapped,
                overlap_param_gather=overlapped,
                **options.ddp,
            )
            self._ddp = [DistributedDataParallel(config, reduction, chunk) for chunk in self._chunks]
            config.finalize_model_grads_func = _sum_gradients
            self._overlap = Overlap(self._ddp, config) if overlapped else None
            self._timers = StageTimers(device)
            config.timers = self._timers
            self._optimizer, self._scheduler = build_optimizer(
                self._ddp,
                settings.optimizer,
                settings.dtype,
                options.optimizer,
                on_host=device if settings.optimizer_offload else None,
            )
            self._passes = Passes(
                self._ddp,
                rotary_frequencies(self._arch, device),
                HeadSettings(settings.temperature, self._arch.vocab, settings.head),
            )
        self._offloader = Offloader(self._ddp, self._optimizer)
        self._reference: Reference | None = None
        self._writings: list[ShardWriting] = []
        self.set_reference()

    @property
    def place(self) -> Place:
        """Where this rank stands; says which ranks export weights, and of which pipeline stage."""
        return self._place

    @property
    def device(self) -> torch.device:
        """Where this rank's weights are."""
        return self._device

    def _on_device(self) -> AbstractContextManager[None]:
        return megatron_device(self._device)

    def annotate(self, batch: StepBatch, needs: Needs) -> Annotations | None:
        """Passes before the update, for what `needs` asks; None on ranks that do not report."""
        shares = [mini.per_rank[self._place.dp] for mini in batch.mini_batches]
        old = reference = [list[MicroResult]()] * len(shares)
        with self._on_device():
            if needs.old_logp is not OldLogp.NONE or needs.old_entropy:
                old = [self._passes.annotate(share) for share in shares]
            if needs.ref_logp:
                # The weights change places once, whatever the number of mini-batches.
                with self._reference_weights():
                    reference = [self._passes.annotate(share) for share in shares]
        found = [_annotations(*each, needs) for each in zip(old, reference, strict=True)]
        return found if self._place.reports else None

    def step(self, batch: StepBatch, recipe: Recipe, norm_limit: float | None = None) -> StepStats | None:
        """One optimizer step per mini-batch, but not with a gradient norm above the limit.

        Returns None on ranks that do not report.
        """
        with self._on_device():
            stats = [self._update(mini, recipe, norm_limit) for mini in batch.mini_batches]
            if self._overlap is not None:
                self._overlap.gather()
        return _join_steps(stats) if self._place.reports else None

    def _update(self, mini: MiniBatch, recipe: Recipe, norm_limit: float | None) -> StepStats:
        self._timers.reset()
        for chunk in self._ddp:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        finish = partial(_finish, recipe, mini.denominators, mini.statistics, self._settings.diagnostics)
        results = self._passes.update(mini.per_rank[self._place.dp], finish, self._request(recipe.needs))
        loss = math.fsum(result.loss for result in results)
        with self._timers.stage("optimizer"):
            stepped = guarded_step(
                self._optimizer, self._scheduler, self._settings.optimizer.clip_grad, math.isfinite(loss), norm_limit
            )
        if self._overlap is not None:
            self._overlap.gather_in_forward()
        metrics = add_metrics([result.metrics for result in results])
        norm, skipped, spikes = stepped.grad_norm, int(not stepped.applied), int(stepped.spike)
        return StepStats(
            loss, norm, stepped.learning_rate, skipped, metrics, (norm,), spikes, seconds=self._timers.take()
        )

    def _request(self, needs: Needs) -> HeadRequest:
        diagnostics = self._settings.diagnostics
        return HeadRequest(
            entropy=needs.entropy or diagnostics is not None,
            entropy_gradient=needs.entropy_gradient,
            topn=max(needs.topn, diagnostics.candidates if diagnostics else 0),
            distinct_samples=diagnostics.samples if diagnostics else 0,
            gate=DEFAULT_QUANTILE if needs.gate is None else needs.gate,
        )

    def export_weights(self, everywhere: bool = False) -> Iterator[tuple[str, Tensor]]:
        """This stage's whole Hugging Face tensors on the ranks that export, or `everywhere`.

        Every rank must iterate to the end.
        """
        with self._on_device():
            exported = export_stage(self._chunks, self._family, self._arch, self._place, everywhere)
        # The generator runs between the caller's own work, which must not see the routed device calls.
        while True:
            with self._on_device():
                item = next(exported, None)
            if item is None:
                return
            yield item

    @property
    def weights_stay(self) -> bool:
        """Whether `offload` leaves the weights where they are."""
        return "weights" not in self._settings.offload

    def weights_state(self) -> tuple[int, ...]:
        """Differs whenever the weights' memory may have moved: emptied and filled again, or another parameter's."""
        places = (parameter.data_ptr() for chunk in self._chunks for parameter in chunk.parameters())
        return (self._offloader.moves, *places)

    def weight_views(self) -> list[TensorView] | None:
        """This rank's weights as parts of Hugging Face tensors in the parameters' own memory.

        None where they do not lie there (adapters), or where the model has other stages.
        """
        if not (self._place.first_stage and self._place.last_stage):
            return None
        with self._on_device():
            return weight_views(self._chunks, self._family, self._arch, self._place)

    def begin_save(self, folder: Path, copy: bool) -> None:
        """Begin to write this rank's shards; with `copy` training may go on meanwhile. Ends with `finish_saves`."""
        with self._on_device():
            self._writings.append(save_state(folder, self._ddp, self._optimizer, self._scheduler, copy=copy))
        if self._settings.lora is not None and dist.get_rank() == 0:
            record_adapters(folder, self._settings.lora, Path(self._settings.folder))

    def saves_are_written(self) -> bool:
        """Whether nothing that was begun is still being written on this rank."""
        return all(writing.done for writing in self._writings)

    def finish_saves(self) -> dict[str, FileHash]:
        """Wait for what was begun and complete it; returns this rank's files by absolute path."""
        writings, self._writings = self._writings, []
        with self._on_device():
            return {path: written for writing in writings for path, written in writing.finish().items()}

    def load(self, folder: Path) -> None:
        """Read shards written under any layout."""
        with self._on_device():
            load_state(folder, self._ddp, self._optimizer, self._scheduler)

    def set_reference(self) -> None:
        """Keep a copy of the present weights as the reference, where some method reads one.

        Only of what is trained: frozen weights are the reference's too.
        """
        if self._settings.needs.ref_logp:
            # The former one's memory first: the host may not hold two.
            self._reference = None
            self._reference = Reference(self._trained())

    def begin_save_reference(self, folder: Path) -> None:
        """Begin to write the reference's shards; training may go on meanwhile. Ends with `finish_saves`."""
        with self._on_device(), self._reference_weights():
            self._writings.append(save_model(folder, self._chunks, copy=True))

    def load_reference(self, folder: Path) -> None:
        """Read a reference's shards, under any layout."""
        if self._reference is not None:
            with self._on_device(), self._reference.in_place():
                load_model(folder, self._chunks)

    def reset_optimizer(self) -> None:
        """Forget moments and step count; weights and the learning-rate schedule stay."""
        for part in parts(self._optimizer):
            part.optimizer.state.clear()
            for group in part.optimizer.param_groups:
                group.pop("step", None)

    def offload(self) -> int:
        """Free what the settings name; returns the bytes freed on this rank."""
        return self._offloader.offload(self._settings.offload)

    def onload(self) -> None:
        """Undo `offload`."""
        self._offloader.onload()

    def _trained(self) -> list[torch.nn.Parameter]:
        return [parameter for chunk in self._chunks for parameter in chunk.parameters() if parameter.requires_grad]

    def _reference_weights(self) -> AbstractContextManager[None]:
        """The reference's weights in place of the policy's while the block runs."""
        return nullcontext() if self._reference is None else self._reference.in_place()


def _finish(
    recipe: Recipe,
    denominators: Denominators,
    stats: MiniBatchStats,
    diagnostics: Diagnostics | None,
    micro: MicroBatch,
    head: HeadOutput,
) -> tuple[Tensor, MicroResult]:
    x = token_inputs(micro, head)
    loss, metrics = recipe.loss(micro, x, denominators, stats)
    figures = token_metrics(x, max(diagnostics.candidates, recipe.needs.topn)) if diagnostics else {}
    return loss, MicroResult(loss=float(loss.detach()), metrics={**metrics, **figures})


def add_metrics(parts: Sequence[Metrics]) -> dict[str, Metric]:
    """Metrics of several micro-batches, mini-batches or ranks as one."""
    joined: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            joined[name] = joined[name] + metric if name in joined else metric  # type: ignore[operator]
    return joined


def _summed(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """By name, over all parts that have it."""
    return {name: math.fsum(part.get(name, 0.0) for part in parts) for name in dict.fromkeys(chain(*parts))}


def _annotations(old: Sequence[MicroResult], reference: Sequence[MicroResult], needs: Needs) -> list[Annotation]:
    """Of a mini-batch's micro-batches; a pass that did not run gave nothing."""
    return [
        Annotation(
            old_logp_T=old[i].logp_T if needs.old_logp is not OldLogp.NONE else None,
            old_entropy_T=old[i].entropy_T if needs.old_entropy else None,
            ref_logp_T=reference[i].logp_T if needs.ref_logp else None,
        )
        for i in range(max(len(old), len(reference)))
    ]


def _join_steps(stats: Sequence[StepStats]) -> StepStats:
    """Several optimizer steps of one training step: mean loss and norm, last learning rate, skips added."""
    return StepStats(
        loss=math.fsum(s.loss for s in stats) / len(stats),
        grad_norm=math.fsum(s.grad_norm for s in stats) / len(stats),
        learning_rate=stats[-1].learning_rate,
        skipped=sum(s.skipped for s in stats),
        metrics=add_metrics([s.metrics for s in stats]),
        norms=tuple(norm for s in stats for norm in s.norms),
        spikes=sum(s.spikes for s in stats),
        seconds=_summed([s.seconds for s in stats]),
    )
