"""A request in, a plan out."""

from __future__ import annotations

from megasharp.plan.engines import engine_memory
from megasharp.plan.formulas import bubble_share
from megasharp.plan.memory import host_bytes, left_while_sampling, ranks_of_node, stage_memory, with_engine
from megasharp.plan.problems import find_problems, needed_gpus
from megasharp.plan.request import Request
from megasharp.plan.result import Plan
from megasharp.plan.seconds import checkpoint, step_seconds, step_times, tokens_per_second_per_gpu
from megasharp.plan.shares import rows_of


def make_plan(request: Request) -> Plan:
    """Apply every formula. Problems are part of the plan; nothing is raised for a run that will not work.

    Raises UserError where the networks cannot be cut as asked (`Architecture.check_parallel`).
    """
    split, gpu = request.split, request.machines.gpu
    for network in (request.policy, request.memory):
        if network is not None:
            network.architecture.check_parallel(split.tp, split.pp, vpp=split.vpp)
            if request.engines is not None:
                network.architecture.check_parallel(request.engines.tp, 1, "rollout.")
    rows = rows_of(request.batch, split, "cpu" if gpu is None else "cuda")
    found = stage_memory(request, rows)
    colocated = request.engines is not None and request.engines.colocated
    left = max(left_while_sampling(stage, request, split.offload) for stage in found) if colocated else 0
    engine = engine_memory(request, left)
    if colocated and engine is not None:
        found = [with_engine(stage, request, engine) for stage in found]
    bubble = bubble_share(split.pp, split.vpp, rows.micro_batches)
    host = host_bytes(found, request)
    gpus = needed_gpus(request)
    ranks, held = ranks_of_node(request), max(stage.optimizer_on_host for stage in found)
    reference = max(stage.reference_on_host for stage in found)
    times = step_times(request, rows, engine, host // ranks, held, reference)
    seconds = step_seconds(request, times)
    save = checkpoint(request)
    networks = [network for network in (request.policy, request.memory) if network is not None]
    return Plan(
        name=request.name,
        world=split.world,
        gpus=gpus,
        gpu_memory=int(gpu.memory) if gpu else None,
        parameters={network.name: network.architecture.parameter_count() for network in networks},
        stages=tuple(found),
        engine=engine,
        rows=rows.step,
        micro_batches=rows.micro_batches,
        micro_batch_rows=rows.largest,
        bubble=bubble,
        times=tuple(times),
        step_seconds=seconds,
        tokens_per_second_per_gpu=tokens_per_second_per_gpu(request, gpus, seconds),
        checkpoint=save,
        host=host + ranks * (held + reference),
        problems=find_problems(request, found, engine, rows, bubble, save),
    )
