"""The memory of one rank of each pipeline stage, by part and by phase of a step.

First a network is cut into pipeline stages and a step into micro-batches; then the formulas give the bytes of each
part, and the parts that are there together give those of each phase. Phases are those of `weight_sync/colocation.py`.
The reference (of what is trained) stays in the host's memory and changes places with the policy's own weights while it
computes, one parameter at a time (`learner/offload.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import get_args

from megasharp.batching.packing import row_multiple
from megasharp.common.layout import ParallelLayout
from megasharp.config.policy import LoraConfig, Recompute
from megasharp.convert.families.family import is_of_expert
from megasharp.planner.formulas import (
    adapter_parameters,
    chunked_logits_bytes,
    gradient_bytes,
    in_flight,
    layer_bytes_per_token,
    logits_bytes,
    micro_batches,
    optimizer_bytes,
    staging_bytes,
)
from megasharp.planner.mixtures import computes_experts_again, copied_bytes_per_token, dispatched_bytes_per_token
from megasharp.planner.records import EngineMemory, Network, Request, StageKind, StageMemory


def runs_of_layers(count: int, layout: ParallelLayout, stage: int) -> tuple[range, ...]:
    """Layers (from 0) of a pipeline stage, of a model's `count`: with vpp > 1 every pp-th of shorter runs."""
    length = count // (layout.pp * layout.vpp)
    starts = [(chunk * layout.pp + stage) * length for chunk in range(layout.vpp)]
    return tuple(range(start, start + length) for start in starts)


def run_text(run: range) -> str:
    """Return the numbers of a run of layers as text: "8-15", or "8" alone."""
    return f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0])


@dataclass(frozen=True, slots=True)
class Stage:
    """Runs of layers and parameters of a pipeline stage's rank, and how many of them are trained.

    `experts`: how many of them are of experts, which adapters leave frozen.
    """

    runs: tuple[range, ...]
    parameters: int
    trained: int
    experts: int = 0

    @property
    def layers(self) -> int:
        """The number of its layers."""
        return sum(map(len, self.runs))


@lru_cache(maxsize=256)
def stages(network: Network, layout: ParallelLayout, lora: LoraConfig | None = None) -> tuple[Stage, ...]:
    """Cut a network into its pipeline stages, by the family's table of parameters."""
    arch, family, last = network.architecture, network.family, layout.pp - 1
    found = []
    for stage in range(layout.pp):
        runs = runs_of_layers(arch.num_layers, layout, stage)
        layers = tuple(chain.from_iterable(runs))
        shapes = family.parameter_shapes(
            arch,
            layout.tp,
            layers=layers,
            first_stage=stage == 0,
            last_stage=stage == last,
            ep=layout.ep,
            etp=layout.etp,
        )
        count = sum(math.prod(shape) for shape in shapes.values())
        experts = sum(math.prod(shape) for name, shape in shapes.items() if is_of_expert(name))
        adapters = len(layers) * adapter_parameters(arch, lora, layout.tp) if lora else 0
        found.append(Stage(runs, count + adapters, adapters if lora else count, experts))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Rows:
    """Packed tokens of a whole step; micro-batches of one rank in one optimizer step, and the tokens of the largest."""

    step: int
    micro_batches: int
    largest: int


def rows_of(request: Request) -> Rows:
    """Count a step's packed tokens and micro-batches.

    A group's responses share one copy of the prompt in every micro-batch that has some of them.
    """
    batch, split, lengths = request.batch, request.split, request.batch.lengths
    room = max(lengths.response, split.micro_batch_tokens - lengths.prompt)
    copies = math.ceil(batch.responses * lengths.response / room)
    step = batch.prompts * (copies * lengths.prompt + batch.responses * lengths.response)
    count = micro_batches(
        step / batch.mini_batches,
        batch.sequences / batch.mini_batches,
        budget=split.micro_batch_tokens,
        ranks=split.dp,
        multiple=request.layout.micro_batch_multiple,
    )
    # A response that is longer than the budget is alone in its micro-batch.
    largest = max(min(split.micro_batch_tokens, step / (batch.mini_batches * split.dp)), lengths.longest)
    # Packed tokens are padded less on a GPU.
    unit = row_multiple(request.layout, "cpu" if request.machines.gpu is None else "cuda")
    return Rows(math.ceil(step), count, math.ceil(largest / unit) * unit)


TRAINING, ANNOTATION, HANDOVER, SAMPLING = "training", "annotation", "handover", "sampling"
# In the order in which offloading costs least: gradients are dropped, the others are copied to the host and back.
OFFLOAD_ORDER = ("gradients", "optimizer", "weights")
# CUDA context, NCCL's buffers and fragmentation of a training process. An assumption, not measured: slime reports 3 to
# 5 GB left in a Megatron process whose groups are destroyed.
RESERVED = 4_000_000_000


def stage_memory(request: Request, rows: Rows) -> list[StageMemory]:
    """The memory of every stage without engines: `totals` has the phases in which learners compute."""
    layout = request.layout
    policy = stages(request.policy, layout, request.lora)
    memory = stages(request.memory, layout) if request.memory else (None,) * layout.pp
    return [_stage(request, rows, number, policy[number], memory[number]) for number in range(layout.pp)]


def _stage(request: Request, rows: Rows, number: int, policy: Stage, memory: Stage | None) -> StageMemory:
    split, width, on_host = request.split, request.width, request.optimizer_on_host
    last = number == split.pp - 1
    counts = _Trained(policy.trained, 0 if request.lora else policy.experts)
    trained = (counts, _Trained(memory.parameters, memory.experts)) if memory else (counts,)
    dispatch = _dispatch(request, rows)
    activations: dict[str, int] = {
        setting: _activations(request, request.policy, policy, number, rows, setting) for setting in get_args(Recompute)
    }
    memory_step = 0
    if memory is not None and request.memory is not None:
        memory_step = _activations(request, request.memory, memory, number, rows, split.recompute)
        memory_step += _logits(request, request.memory, rows, entropy=False) if last else 0
    stage = StageMemory(
        stage=number,
        kind=_kind(number, split.pp),
        layers=policy.runs,
        parameters=policy.parameters,
        trained=policy.trained,
        weights=width * policy.parameters,
        gradients=gradient_bytes(policy.trained),
        optimizer=_optimizer_on_gpu(request, counts),
        activations=activations[split.recompute],
        activations_by=activations,
        logits=_logits(request, request.policy, rows, entropy=True) if last else 0,
        reference=_reference(request, policy) if request.machines.gpu is None else 0,
        memory_parameters=memory.parameters if memory else 0,
        memory_network=sum(_memory_parts(request, trained[-1]).values()) if memory else 0,
        memory_step=memory_step,
        reserved=RESERVED if request.machines.gpu else 0,
        totals={},
        must_offload=(),
        optimizer_on_host=sum(_optimizer(request, count) for count in trained) if on_host else 0,
        # One network's optimizer steps at a time.
        staging=max(staging_bytes(count.of_rank(request.layout)) for count in trained) if on_host else 0,
        reference_on_host=0 if request.machines.gpu is None else _reference(request, policy),
        experts=policy.experts,
        memory_experts=memory.experts if memory else 0,
        dispatch=dispatch,
        # A rank that holds all experts computes as many copies whatever the routes.
        by_routing=dispatch + _copies(request, policy, number, rows) if split.ep > 1 else 0,
    )
    return replace(stage, totals=_learning(request, stage, rows))


def _reference(request: Request, policy: Stage) -> int:
    return request.width * policy.trained if request.passes.reference else 0


@dataclass(frozen=True, slots=True)
class _Trained:
    """A network's trained parameters on a rank, and those of them that are of experts."""

    parameters: int
    experts: int

    def of_rank(self, layout: ParallelLayout) -> int:
        """The parameters whose optimizer's state this rank has."""
        return (self.parameters - self.experts) // layout.shards + self.experts // layout.expert_shards


def _memory_parts(request: Request, trained: _Trained) -> dict[str, int]:
    """Bytes of what the memory network keeps, by the names of `policy.offload`."""
    return {
        "weights": request.width * trained.parameters,
        "gradients": gradient_bytes(trained.parameters),
        "optimizer": _optimizer_on_gpu(request, trained),
    }


def _optimizer(request: Request, trained: _Trained) -> int:
    layout, dense = request.layout, trained.parameters - trained.experts
    state = optimizer_bytes(dense, request.width, layout.shards)
    return int(state + optimizer_bytes(trained.experts, request.width, layout.expert_shards))


def _optimizer_on_gpu(request: Request, trained: _Trained) -> int:
    return 0 if request.optimizer_on_host else _optimizer(request, trained)


def _learning(request: Request, stage: StageMemory, rows: Rows) -> dict[str, int]:
    """Bytes of the phases in which learners compute."""
    kept = stage.static + stage.reference + stage.memory_network + stage.reserved
    # Logits come after the last layer's exchange. Policy, memory network and optimizer take turns: the most that one of
    # them adds counts.
    moment = max(stage.logits, stage.dispatch)
    totals = {TRAINING: kept + max(stage.activations + moment, stage.memory_step, stage.staging)}
    if request.passes.old_logp or request.passes.reference:
        totals[ANNOTATION] = kept + _one_layer(request, request.policy, rows) + moment
    return totals


def _tokens(request: Request, rows: Rows) -> float:
    """Packed tokens of a micro-batch on one rank of a context-parallel group."""
    return rows.largest / request.split.cp


def _one_layer(request: Request, network: Network, rows: Rows) -> int:
    on_gpu = request.machines.gpu is not None
    arch, split = network.architecture, request.split
    per_token = layer_bytes_per_token(arch, split.tp, request.width, "none", on_gpu=on_gpu, etp=split.etp)
    return int(_tokens(request, rows) * per_token)


def _dispatch(request: Request, rows: Rows) -> int:
    """Bytes that the exchange of one of the policy's layers with its experts holds at once."""
    split, arch = request.split, request.policy.architecture
    if arch.experts is None:
        return 0
    per_token = dispatched_bytes_per_token(
        arch.experts, arch.hidden, request.width, split.experts.dispatcher, ep=split.ep, etp=split.etp
    )
    return int(_tokens(request, rows) * per_token / split.tp)


def _copies(request: Request, stage: Stage, number: int, rows: Rows) -> int:
    """Bytes of activations that are copies of tokens in the policy's experts: of one layer where it is recomputed."""
    split, arch = request.split, request.policy.architecture
    if arch.experts is None:
        return 0
    held = in_flight(number, split.pp, split.vpp, rows.micro_batches) * stage.layers
    layers = 1.0 if computes_experts_again(split) else held
    on_gpu = request.machines.gpu is not None
    per_token = copied_bytes_per_token(arch.experts, arch.hidden, request.width, etp=split.etp, on_gpu=on_gpu)
    return int(_tokens(request, rows) * layers * per_token / split.tp)


def _activations(
    request: Request, network: Network, stage: Stage, number: int, rows: Rows, recompute: Recompute
) -> int:
    split, arch = request.split, network.architecture
    on_gpu, modules = request.machines.gpu is not None, split.recompute_modules
    per_token = layer_bytes_per_token(arch, split.tp, request.width, recompute, modules, on_gpu=on_gpu, etp=split.etp)
    held = in_flight(number, split.pp, split.vpp, rows.micro_batches) * stage.layers * per_token
    final_norm = 2 * request.width * arch.hidden / split.tp if number == split.pp - 1 else 0
    total = int(_tokens(request, rows) * (held + final_norm))
    # A layer that is computed a second time holds all of its own for that moment.
    return total + max(0, _one_layer(request, network, rows) - int(_tokens(request, rows) * per_token))


def _logits(request: Request, network: Network, rows: Rows, entropy: bool) -> int:
    split, arch = request.split, network.architecture
    columns, tokens, kernels = -(-arch.vocab // split.tp), _tokens(request, rows), request.machines.gpu is not None
    if split.head == "chunked":
        return int(chunked_logits_bytes(tokens, columns, arch.hidden, request.width, entropy, kernels))
    return int(logits_bytes(tokens, columns, request.width, entropy, kernels))


def left_while_sampling(stage: StageMemory, request: Request, offload: Iterable[str]) -> int:
    """Bytes of the learners that stay on the GPU when `offload` has left it."""
    offload = set(offload)
    parts = {"weights": stage.weights, "gradients": stage.gradients, "optimizer": stage.optimizer}
    memory = _memory_parts(request, _Trained(stage.memory_parameters, stage.memory_experts))
    kept = sum(parts[name] + memory[name] for name in parts if name not in offload)
    return kept + stage.reference + stage.reserved


def with_engine(stage: StageMemory, request: Request, engine: EngineMemory) -> StageMemory:
    """Add a co-located engine's rank to the stage's GPU: asleep while learners compute, awake while it samples."""
    gpu = request.machines.gpu
    learners = stage.static + stage.reference + stage.memory_network + stage.reserved
    totals = {
        **{phase: total + engine.asleep for phase, total in stage.totals.items()},
        HANDOVER: learners + engine.asleep + engine.weights,
        SAMPLING: left_while_sampling(stage, request, request.split.offload) + engine.total + engine.context,
    }
    must: tuple[str, ...] | None = ()
    if gpu is not None:
        choices = [OFFLOAD_ORDER[:count] for count in range(len(OFFLOAD_ORDER) + 1)]
        room = gpu.memory - engine.total - engine.context
        fitting = (c for c in choices if left_while_sampling(stage, request, c) <= room)
        must = next(fitting, None)
    return replace(stage, totals=totals, must_offload=must)


def host_bytes(found: Iterable[StageMemory], request: Request) -> int:
    """Bytes that the ranks of one node copy to its memory while engines sample, all stages taken as the largest."""
    # Gradients are dropped, not copied.
    copied = set(request.split.offload) - {"gradients"}
    if request.machines.gpu is None or request.engines is None or not request.engines.colocated or not copied:
        return 0
    largest = max(
        left_while_sampling(stage, request, ()) - left_while_sampling(stage, request, copied) for stage in found
    )
    return largest * ranks_of_node(request)


def ranks_of_node(request: Request) -> int:
    """The policy's ranks on one node, at most."""
    return min(request.machines.gpus_per_node or request.layout.world, request.layout.world)


def _kind(number: int, pp: int) -> StageKind:
    if pp == 1:
        return "only"
    return "first" if number == 0 else "last" if number == pp - 1 else "middle"
