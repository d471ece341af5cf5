"""One rank of a run and its part of a learner: passes before the update, optimizer steps, weights, checkpoints.

Every rank gets its data-parallel share of a step and, between the passes before the update and the step, keeps it with
their results. Ranks that do not report for their share (all but the last stage's first tensor-parallel rank) return
None; `megasharp.learner.ranks` joins the others' results.
The policy and DLC's memory network are two learners that share the rank's process groups.
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
from megasharp.batching.delivery import HandMade, Held, Update, joined, opened
from megasharp.batching.packing import row_multiple
from megasharp.batching.share import Share
from megasharp.batching.views import Annotation
from megasharp.common.files import FileHash
from megasharp.common.layout import ParallelLayout
from megasharp.common.random_state import compute_deterministically
from megasharp.common.records import Denominators, Metric, Metrics, MicroBatch, StepStats
from megasharp.config.policy import PolicyConfig
from megasharp.convert.hf_folder import TensorView
from megasharp.convert.lora import record_adapters
from megasharp.convert.rope import rotary_frequencies
from megasharp.learner.attention_setup import Shape, take_up
from megasharp.learner.cpu_backend import reuse_freed_memory
from megasharp.learner.forward import Finish, MicroResult, Passes, StageTimers, token_inputs
from megasharp.learner.layer_spec import fuse_gradient_sums, uses_transformer_engine
from megasharp.learner.model import build_chunks, sort_options, transformer_config
from megasharp.learner.offload import Offloader, Reference
from megasharp.learner.optimizer import Overlap, build_optimizer, guarded_step, overlaps, parts
from megasharp.learner.output_head import HeadRequest, HeadSettings
from megasharp.learner.parallel import Place, destroy, initialize, megatron_device
from megasharp.learner.replicas import Checksums, checksums
from megasharp.learner.routers import Routers
from megasharp.learner.sharded_state import load_model, load_state, save_model, save_state
from megasharp.learner.weights import export_stage, first_weights, weight_views
from megasharp.learner.without_advantage import split
from megasharp.metrics.group_metrics import Diagnostics, token_metrics
from megasharp.ops.attention_kernels import Kernels
from megasharp.ops.head import HeadOutput

if TYPE_CHECKING:
    from megasharp.learner.async_checkpoint import ShardWriting

# The learners of a run by name.
POLICY = "policy"
MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class LearnerSettings:
    """Everything a rank needs to build its part of a learner.

    `folder` is where the model is loaded from, of either kind (`convert/model_folder.py`). `policy`: the section of the
    run file, where the layout's keys are not read but `layout`; a memory network has its own learning rate there.
    `total_steps`: optimizer steps, after which the learning rate has decayed. `temperature` divides logits before
    everything: the rollouts' own for the policy. `diagnostics`: settings of the update's metrics; None leaves them out.
    `response_window`: a response's token attends to its prompt and to so many last tokens, itself among them; None: to
    all. `drawn`: start with random weights of the model that `folder` describes; `cold`: with those of `seed`, which
    are the same under every layout.
    """

    folder: str
    policy: PolicyConfig
    dtype: torch.dtype
    layout: ParallelLayout
    total_steps: int
    needs: Needs
    temperature: float
    seed: int
    diagnostics: Diagnostics | None = None
    deterministic: bool = False
    drawn: bool = False
    response_window: int | None = None
    cold: bool = False


def _sum_gradients(models: list[torch.nn.Module], num_tokens: object = None, **kwargs: Any) -> None:
    """Reduce gradients as Megatron does, without its division by a token count: our losses are divided already."""
    finalize_model_grads(models, None, **kwargs)


class RankLearner:
    """A learner's part on this rank; `place` comes from `initialize`.

    Raises UserError where the model cannot be read, or the policy section asks for what this Python or model cannot do.
    `kernels`: of attention, set by `Rank`, which takes them up for all learners of the process.
    """

    kernels = Kernels("fa2", "none were taken up")

    def __init__(self, settings: LearnerSettings, place: Place, device: torch.device) -> None:
        self._settings = settings
        self._place = place
        self._device = device
        policy = settings.policy
        with self._on_device():
            options = sort_options(policy.megatron)
            with first_weights(settings.folder, settings.drawn, settings.seed if settings.cold else None) as source:
                self._family, self._arch = source.family, source.architecture
                config = transformer_config(
                    self._arch, settings.layout, settings.dtype, policy, options.model, settings.deterministic
                )
                engine = uses_transformer_engine(policy, device)
                self._chunks = build_chunks(
                    config,
                    self._arch,
                    self._place,
                    policy.lora,
                    settings.seed,
                    transformer_engine=engine,
                    engine_attention=policy.attention == "te",
                )
                for chunk in self._chunks:
                    chunk.to(device)
                source.fill(self._chunks, self._place)
            overlapped = overlaps(policy.overlap, settings.layout, device)
            reduction = DistributedDataParallelConfig(
                use_distributed_optimizer=True,
                grad_reduce_in_fp32=True,
                overlap_grad_reduce=overlapped,
                overlap_param_gather=overlapped,
                **options.ddp,
            )
            self._ddp = [DistributedDataParallel(config, reduction, chunk) for chunk in self._chunks]
            fuse_gradient_sums(self._chunks)
            config.finalize_model_grads_func = _sum_gradients
            self._overlap = Overlap(self._ddp, config) if overlapped else None
            self._timers = StageTimers(device)
            config.timers = self._timers
            self._optimizer, self._scheduler = build_optimizer(
                self._ddp,
                policy.optimizer,
                settings.total_steps,
                settings.dtype,
                options.optimizer,
                on_host=device if policy.optimizer_offload else None,
            )
            self._passes = Passes(
                self._ddp,
                rotary_frequencies(self._arch, device),
                HeadSettings(settings.temperature, self._arch.vocab, policy.head),
                settings.response_window,
            )
        self._routers = None
        if self._arch.experts is not None:
            balance = policy.experts.balance_loss
            coefficient = self._arch.experts.balance_loss if balance == "model" else balance
            self._routers = Routers(self._chunks, policy.experts.replay, coefficient)
        self._offloader = Offloader(self._ddp, self._optimizer)
        self._reference: Reference | None = None
        self._writings: list[ShardWriting] = []
        self._held: Held | None = None
        self.set_reference()

    @property
    def place(self) -> Place:
        """This rank's place in the layout, which says whether it exports weights, and of which pipeline stage."""
        return self._place

    @property
    def device(self) -> torch.device:
        """The device of this rank's weights."""
        return self._device

    @property
    def attention_shape(self) -> Shape:
        """This rank's part of the model's attention."""
        arch, tp = self._arch, self._settings.layout.tp
        window = self._settings.response_window
        return Shape(arch.heads // tp, arch.kv_heads // tp, arch.head_dim, arch.smallest_window, window)

    def _on_device(self) -> AbstractContextManager[None]:
        return megatron_device(self._device)

    def annotate(
        self, share: Share | HandMade, ticket: int, needs: Needs, returned: frozenset[str]
    ) -> Annotation | None:
        """Run the passes before the update that `needs` asks for, and keep share and results for the step.

        They are kept under the number `ticket`, unless the share was made by hand. Returns the fields `returned` over
        all tokens of this share; None on ranks that do not report.
        """
        self._held = None
        minis = opened(share, draws=False)
        old = reference = [list[MicroResult]()] * len(minis)
        with self._on_device():
            if needs.old_logp is not OldLogp.NONE or needs.old_entropy:
                old = [self._passes.annotate(micros) for micros in minis]
            if needs.ref_logp:
                # The weights change places once, whatever the number of mini-batches.
                with self._reference_weights():
                    reference = [self._passes.annotate(micros) for micros in minis]
        found = tuple(_annotations(*each, needs) for each in zip(old, reference, strict=True))
        if isinstance(share, Share):
            self._held = Held(ticket, share, found)
        return joined(found, returned) if self._place.reports else None

    def step(self, update: Update, recipe: Recipe, norm_limit: float | None = None) -> StepStats | None:
        """Take one optimizer step per mini-batch, without those whose gradient norm is above `norm_limit`.

        Returns this share's loss (a part of the global sum) and metrics; None on ranks that do not report. What the
        rank kept of the step's share is let go.
        """
        minis = update.micro_batches(self._held, recipe.needs.draw)
        self._held = None
        with self._on_device():
            stats = [
                self._update(micros, recipe, denominators, statistics, norm_limit)
                for micros, (denominators, statistics) in zip(minis, update.steps, strict=True)
            ]
            if self._overlap is not None:
                self._overlap.gather()
        return _join_steps(stats) if self._place.reports else None

    def forget(self) -> None:
        """Let go of the share that `annotate` kept."""
        self._held = None

    def _update(
        self,
        micros: Sequence[MicroBatch],
        recipe: Recipe,
        denominators: Denominators,
        statistics: MiniBatchStats,
        norm_limit: float | None,
    ) -> StepStats:
        self._timers.reset()
        for chunk in self._ddp:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        finish = partial(_finish, recipe, denominators, statistics, self._settings.diagnostics)
        request = self._request(recipe.needs)
        if self._routers is not None:
            self._routers.begin(micros)
        trained, results = self._without_backward(micros, recipe, finish, request)
        results += self._passes.update(trained, finish, request)
        loss = math.fsum(result.loss for result in results)
        with self._timers.stage("optimizer"):
            stepped = guarded_step(
                self._optimizer,
                self._scheduler,
                self._settings.policy.optimizer.clip_grad,
                math.isfinite(loss),
                norm_limit,
            )
        if self._overlap is not None:
            self._overlap.gather_in_forward()
        metrics = add_metrics([result.metrics for result in results])
        if self._routers is not None:
            metrics |= self._routers.metrics()
        norm, skipped, spikes = stepped.grad_norm, int(not stepped.applied), int(stepped.spike)
        return StepStats(
            loss, norm, stepped.learning_rate, skipped, metrics, (norm,), spikes, seconds=self._timers.take()
        )

    def _without_backward(
        self, micros: Sequence[MicroBatch], recipe: Recipe, finish: Finish, request: HeadRequest
    ) -> tuple[Sequence[MicroBatch], list[MicroResult]]:
        """Run forward passes alone of what has no gradient (`without_advantage`), on CPUs, where it was measured.

        Returns what is left to train on, never nothing, and those passes' results.
        """
        layout = self._settings.layout
        # Ranks that share layers or experts must make the same passes, and a load-balancing loss has gradients in all.
        shared = layout.pp * layout.ep * layout.etp > 1 or (self._routers is not None and self._routers.balances)
        if self._device.type != "cpu" or shared or self._overlap is not None or recipe.penalises:
            return micros, []
        trained, silent = zip(*(split(micro, row_multiple(layout, "cpu")) for micro in micros), strict=True)
        kept = [micro for micro in trained if micro is not None]
        alone = [micro for micro in silent if micro is not None]
        results = self._passes.without_backward(alone, finish, request) if kept and alone else None
        return (micros, []) if results is None else (kept, results)

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
        """Yield this stage's whole Hugging Face tensors on the ranks that export, or `everywhere`.

        Every rank must iterate to the end, because the tensors are gathered by collectives.
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
        """True where `offload` leaves the weights where they are."""
        return "weights" not in self._settings.policy.offload

    def weights_state(self) -> tuple[int, ...]:
        """Return a key that changes whenever the weights' memory may have moved: emptied and filled, or replaced."""
        places = (parameter.data_ptr() for chunk in self._chunks for parameter in chunk.parameters())
        return (self._offloader.moves, *places)

    def weight_views(self) -> list[TensorView] | None:
        """Return this rank's weights as parts of Hugging Face tensors in the parameters' own memory.

        None where memory does not hold them as such (adapters), or where other ranks hold other stages or experts.
        """
        layout = self._settings.layout
        if layout.pp > 1 or layout.ep > 1 or layout.etp > 1:
            return None
        with self._on_device():
            return weight_views(self._chunks, self._family, self._arch, self._place)

    def begin_save(self, folder: Path, copy: bool) -> None:
        """Begin to write this rank's shards; with `copy` training may go on meanwhile. Ends with `finish_saves`."""
        with self._on_device():
            self._writings.append(save_state(folder, self._ddp, self._optimizer, self._scheduler, copy=copy))
        lora = self._settings.policy.lora
        if lora is not None and dist.get_rank() == 0:
            record_adapters(folder, lora, Path(self._settings.folder))

    def saves_are_written(self) -> bool:
        """Return True where nothing that was begun is still being written on this rank."""
        return all(writing.done for writing in self._writings)

    def finish_saves(self) -> dict[str, FileHash]:
        """Wait for what was begun and complete it; returns this rank's files by absolute path."""
        writings, self._writings = self._writings, []
        with self._on_device():
            return {path: written for writing in writings for path, written in writing.finish().items()}

    def load(self, folder: Path) -> None:
        """Load weights, optimizer and schedule from shards, written under any layout."""
        with self._on_device():
            load_state(folder, self._ddp, self._optimizer, self._scheduler)

    def replica_checksums(self) -> Checksums:
        """Sum up what other ranks hold copies of; `replicas.difference` compares the sums of all ranks."""
        with self._on_device():
            return checksums(self._chunks, self._optimizer, self._place, self._settings.layout)

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
        """Load the reference from shards, written under any layout; nothing where no method reads one."""
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
        """Free the parts that `policy.offload` names; returns the bytes freed on this rank."""
        return self._offloader.offload(self._settings.policy.offload)

    def onload(self) -> None:
        """Undo `offload`."""
        self._offloader.onload()

    def _trained(self) -> list[torch.nn.Parameter]:
        return [parameter for chunk in self._chunks for parameter in chunk.parameters() if parameter.requires_grad]

    def _reference_weights(self) -> AbstractContextManager[None]:
        """Put the reference's weights in place of the policy's while the block runs."""
        return nullcontext() if self._reference is None else self._reference.in_place()


def kernels_of(learner: RankLearner) -> Kernels:
    """Return the kernels of attention on this rank."""
    return learner.kernels


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
    diagnosed = token_metrics(x, max(diagnostics.candidates, recipe.needs.topn)) if diagnostics else {}
    return loss, MicroResult(loss=float(loss.detach()), metrics={**metrics, **diagnosed})


def add_metrics(parts: Sequence[Metrics]) -> dict[str, Metric]:
    """Add the metrics of several micro-batches, mini-batches or ranks, by name and in their order."""
    joined: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            joined[name] = joined[name] + metric if name in joined else metric  # type: ignore[operator]
    return joined


def _annotations(old: Sequence[MicroResult], reference: Sequence[MicroResult], needs: Needs) -> tuple[Annotation, ...]:
    """Join one mini-batch's results of both passes; a pass that did not run has none."""
    return tuple(
        Annotation(
            old_logp_T=old[i].logp_T if needs.old_logp is not OldLogp.NONE else None,
            old_entropy_T=old[i].entropy_T if needs.old_entropy else None,
            ref_logp_T=reference[i].logp_T if needs.ref_logp else None,
        )
        for i in range(max(len(old), len(reference)))
    )


def _join_steps(stats: Sequence[StepStats]) -> StepStats:
    """Join the optimizer steps of one training step: mean loss and norm, last learning rate, skips added."""
    stages = dict.fromkeys(chain.from_iterable(s.seconds for s in stats))
    return StepStats(
        loss=math.fsum(s.loss for s in stats) / len(stats),
        grad_norm=math.fsum(s.grad_norm for s in stats) / len(stats),
        learning_rate=stats[-1].learning_rate,
        skipped=sum(s.skipped for s in stats),
        metrics=add_metrics([s.metrics for s in stats]),
        norms=tuple(norm for s in stats for norm in s.norms),
        spikes=sum(s.spikes for s in stats),
        seconds={stage: math.fsum(s.seconds.get(stage, 0.0) for s in stats) for stage in stages},
    )


class Rank:
    """Builds this rank's learners by name, all in the policy's layout; torch.distributed must be initialised.

    `kernels`: of attention, of all of them.
    """

    def __init__(self, settings: Mapping[str, LearnerSettings], device: torch.device) -> None:
        policy = settings[POLICY]
        assert all(other.layout == policy.layout for other in settings.values()), "learners of a run share one layout"
        self._device = device
        if policy.deterministic:
            compute_deterministically()
        if device.type == "cpu":
            reuse_freed_memory()
        with megatron_device(device):
            place = initialize(policy.layout, policy.seed)
        self.learners = {name: RankLearner(own, place, device) for name, own in settings.items()}
        shapes = [learner.attention_shape for learner in self.learners.values()]
        self.kernels = take_up(policy.policy.attention, shapes, policy.dtype, device, policy.deterministic)
        for learner in self.learners.values():
            learner.kernels = self.kernels

    def close(self) -> None:
        """Forget the parallel groups."""
        with megatron_device(self._device):
            destroy()
