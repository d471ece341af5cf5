"""Process groups: how ranks meet, and a rank's place in the tensor, pipeline, context and data dimensions."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch._C._distributed_c10d import Store
from torch.distributed.distributed_c10d import _set_pg_timeout as set_group_timeout

from megasharp.common.layout import ParallelLayout
from megasharp.common.random_state import seed_generators
from megasharp.learner.context_parallel import GroupExchange
from megasharp.learner.cpu_backend import on_cpu, use_where_nothing_is_fused

# The watchdog finds a rank that holds up the others, and names it: a collective that gave up first would name one of
# those that wait. Longer is not possible: gloo counts milliseconds in 31 bits.
COLLECTIVE_TIMEOUT = timedelta(days=20)
# Small things, checksums and reports, are exchanged between CPUs on GPU runs too.
_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


def device_of_rank(device: torch.device, number: int) -> torch.device:
    """Return the device of a machine's rank number `number`: the CPU for all, or a GPU for each."""
    return torch.device("cuda", number) if device.type == "cuda" else device


def meet(store: Store, rank: int, world: int, device: torch.device) -> None:
    """Join the process group of all ranks, which compute on `device`; on a GPU it becomes this process's own."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        _BACKENDS[device.type], store=store, rank=rank, world_size=world, timeout=COLLECTIVE_TIMEOUT
    )


@dataclass(frozen=True, slots=True)
class Place:
    """Numbers of this rank in each dimension; `first_stage` and `last_stage`: it is at an end of the pipeline.

    `ep` is the number of its part of the experts, `etp` that of its part of each expert, and `expert_dp` its number
    among the ranks that hold the same.
    """

    tp: int
    pp: int
    dp: int
    cp: int
    first_stage: bool
    last_stage: bool
    ep: int
    etp: int
    expert_dp: int

    @property
    def reports(self) -> bool:
        """True where this rank reports for its data-parallel rank: last stage, first tensor and context rank."""
        return self.last_stage and self.tp == self.cp == 0

    @property
    def first_copy(self) -> bool:
        """True for the first of the data and context ranks, which all hold the same weights but those of experts."""
        return self.dp == self.cp == 0

    @property
    def first_copy_of_experts(self) -> bool:
        """True for the first of the ranks that hold the same experts."""
        return self.expert_dp == 0

    @property
    def exports(self) -> bool:
        """True where this rank exports its pipeline stage's weights."""
        return self.first_copy and self.tp == 0


def megatron_device(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Return the context for calls into Megatron: on the CPU it routes device calls of CUDA there."""
    return on_cpu() if device.type == "cpu" else contextlib.nullcontext()


def initialize(layout: ParallelLayout, seed: int, gloo: bool = True) -> Place:
    """Set up Megatron's groups; torch.distributed must be initialised with `layout.world` ranks.

    Call inside `megatron_device(...)`. `gloo`: make gloo groups too, over which checkpoints are written.
    """
    use_where_nothing_is_fused()
    parallel_state.initialize_model_parallel(
        layout.tp,
        layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        create_gloo_process_groups=gloo,
        distributed_timeout_minutes=COLLECTIVE_TIMEOUT // timedelta(minutes=1),
    )
    if gloo:
        # Megatron (0.16 and 0.19) makes this one group without the limit: torch's 30 minutes would count.
        set_group_timeout(COLLECTIVE_TIMEOUT, parallel_state.get_expert_data_parallel_group_gloo())
    seed_generators(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return Place(
        tp=parallel_state.get_tensor_model_parallel_rank(),
        pp=parallel_state.get_pipeline_model_parallel_rank(),
        dp=parallel_state.get_data_parallel_rank(),
        cp=parallel_state.get_context_parallel_rank(),
        first_stage=parallel_state.is_pipeline_first_stage(),
        last_stage=parallel_state.is_pipeline_last_stage(),
        ep=parallel_state.get_expert_model_parallel_rank(),
        etp=parallel_state.get_expert_tensor_parallel_rank(),
        expert_dp=parallel_state.get_expert_data_parallel_rank(),
    )


def tensor_group() -> dist.ProcessGroup | None:
    """Return the tensor-parallel group, or None when it has one member."""
    if parallel_state.get_tensor_model_parallel_world_size() == 1:
        return None
    group: dist.ProcessGroup = parallel_state.get_tensor_model_parallel_group()
    return group


def context_place() -> tuple[int, int]:
    """Return this rank's number among the context-parallel ranks, and their count."""
    return parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()


def context_group() -> dist.ProcessGroup | None:
    """Return the context-parallel group, or None when it has one member."""
    if parallel_state.get_context_parallel_world_size() == 1:
        return None
    group: dist.ProcessGroup = parallel_state.get_context_parallel_group()
    return group


def context_exchange() -> GroupExchange | None:
    """Return the exchange of rows between context-parallel ranks, or None when there is one rank."""
    group = context_group()
    return None if group is None else GroupExchange(group)


def destroy() -> None:
    """Forget Megatron's groups, so that another learner may be made in this process."""
    # Megatron drops most of its groups without destroying them, and each gloo group keeps its threads.
    for group in parallel_state._global_process_group_list or ():
        if group is not None:
            dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()
