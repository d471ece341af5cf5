"""A plan for programs: all that the text says, as numbers with their unit in the key.

Sizes of a stage are those of one GPU (of one rank on CPUs), sizes of the engine those of one of its GPUs. What is not
predicted, or does not apply, is None.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from megasharp.planner.plan_result import EngineMemory, Plan, StageMemory
from megasharp.planner.request import Machines, Network, Request
from megasharp.planner.suggest import Suggestion

Tree = dict[str, object]

# Keys of `policy` that say how it is split and how it saves memory.
_LAYOUT = (
    "dp", "tp", "pp", "cp", "vpp", "micro_batch_tokens", "recompute", "offload", "recompute_modules",
    "optimizer_offload", "head",
)  # fmt: skip


def plan_tree(request: Request, plan: Plan, notes: Sequence[str], suggestions: Sequence[Suggestion]) -> Tree:
    """Return the plan with its question, so that two plans can be told apart."""
    lora, gpu, rates, layout = request.lora, request.machines.gpu, request.rates, request.split
    return {
        "name": plan.name,
        "works": plan.works,
        "policy": _network(request.policy),
        "memory": _network(request.memory),
        "weight_bits": 8 * request.width,
        "lora": lora.model_dump() if lora else None,
        "recipe": {
            "methods": list(request.passes.methods),
            "pass_for_old_logp": request.passes.old_logp,
            "pass_for_reference_logp": request.passes.reference,
        },
        "layout": {
            **{key: getattr(layout, key) for key in _LAYOUT},
            "ranks": plan.world,
            "offloaded": list(request.offloaded),
        },
        "batch": _batch(request, plan),
        "machines": {**_machines(request.machines), "gpus_in_use": plan.gpus if gpu else 0},
        "assumed": {
            "mfu_share": rates.mfu,
            "memory_bandwidth_share": rates.bandwidth,
            "link_bandwidth_share": rates.links,
            "disk_bytes_per_second": rates.disk,
        },
        "stages": [_stage(request, plan, stage) for stage in plan.stages],
        "engines": _engines(request, plan.engine),
        "times": [{"part": time.name, "seconds": time.seconds, "how": time.how} for time in plan.times],
        "step_seconds": plan.step_seconds,
        "tokens_per_second_per_gpu_in_use": plan.tokens_per_second_per_gpu,
        "checkpoint": {"size_bytes": plan.checkpoint.size, "seconds": plan.checkpoint.seconds if gpu else None},
        "host_bytes_per_node": plan.host,
        "problems": [dataclasses.asdict(problem) for problem in plan.problems],
        "notes": list(notes),
        "suggestions": [_suggestion(one) for one in suggestions],
    }


def _network(network: Network | None) -> Tree | None:
    if network is None:
        return None
    arch = network.architecture
    return {
        "name": network.name,
        "family": arch.family,
        "parameters": arch.parameter_count(),
        "layers": arch.num_layers,
        "layers_with_window": sum(window is not None for window in arch.windows),
        "smallest_window_positions": arch.smallest_window,
    }


def _batch(request: Request, plan: Plan) -> Tree:
    """One training step; micro-batches, at least so many, are those of one rank in one optimizer step.

    A share (n / longest)^(1 / k) of responses has at most n tokens. One in progress has its prompt with it.
    """
    batch, lengths = request.batch, request.batch.lengths
    return {
        "prompts": batch.prompts,
        "responses_per_prompt": batch.responses,
        "responses": batch.sequences,
        "oversample_share": batch.oversample,
        "mini_batches": batch.mini_batches,
        "prompt_mean_tokens": lengths.prompt,
        "prompt_longest_tokens": lengths.prompt_longest,
        "response_mean_tokens": lengths.response,
        "response_longest_tokens": lengths.response_longest,
        "response_spread_k": lengths.k,
        "response_in_progress_mean_tokens": lengths.context,
        "packed_tokens": plan.rows,
        "micro_batches_least": plan.micro_batches,
        "micro_batch_largest_tokens": plan.micro_batch_rows,
        "bubble_share": plan.bubble,
    }


def _machines(machines: Machines) -> Tree:
    gpu = machines.gpu
    return {
        "nodes": machines.nodes,
        "gpus_per_node": machines.gpus_per_node,
        "gpu": gpu.name if gpu else None,
        "gpu_memory_bytes": int(gpu.memory) if gpu else None,
    }


def _stage(request: Request, plan: Plan, stage: StageMemory) -> Tree:
    beside = plan.engine is not None and request.engines is not None and request.engines.colocated
    return {
        "stage": stage.stage,
        "kind": stage.kind,
        "first_and_last_layers": [[run[0], run[-1]] for run in stage.layers],
        "parameters": stage.parameters,
        "trained_parameters": stage.trained,
        "weights_bytes": stage.weights,
        "gradients_bytes": stage.gradients,
        "optimizer_bytes": stage.optimizer,
        "optimizer_on_host_bytes": stage.optimizer_on_host,
        "optimizer_staging_bytes": stage.staging,
        "reference_bytes": stage.reference,
        "reference_on_host_bytes": stage.reference_on_host,
        "memory_network_parameters": stage.memory_parameters,
        "memory_network_bytes": stage.memory_network,
        "activations_bytes": stage.activations,
        "activations_bytes_by_recompute": dict(stage.activations_by),
        "logits_bytes": stage.logits,
        "memory_network_step_bytes": stage.memory_step,
        "reserved_bytes": stage.reserved,
        "sleeping_engine_bytes": plan.engine.asleep if beside and plan.engine else 0,
        "total_bytes_by_phase": dict(stage.totals),
        "must_offload": None if stage.must_offload is None else list(stage.must_offload),
    }


def _engines(request: Request, engine: EngineMemory | None) -> Tree | None:
    """Settings are None where SGLang's own default stands; tokens and responses are those of one engine."""
    asked = request.engines
    if asked is None or engine is None:
        return None
    return {
        "count": engine.count,
        "tp": engine.tp,
        "colocated": asked.colocated,
        "transport": asked.transport,
        "samples_while_policy_trains": asked.overlap,
        "max_running_requests": asked.most_requests,
        "max_total_tokens": asked.pool_tokens,
        "chunked_prefill_tokens": asked.chunk,
        "weights_bytes": engine.weights,
        "cache_bytes": engine.cache,
        "graphs_bytes": engine.graphs,
        "workspace_bytes": engine.workspace,
        "context_bytes": engine.context,
        "mem_fraction_static": engine.fraction,
        "mem_fraction_static_is_default": engine.fraction is not None and asked.memory_fraction is None,
        "mem_fraction_static_largest": engine.largest_fraction,
        "cache_bytes_per_token": engine.bytes_per_token,
        "cache_tokens": engine.tokens,
        "cache_mean_responses": engine.sequences_mean,
        "cache_longest_responses": engine.sequences_longest,
        "responses_in_a_step": engine.requests,
        "responses_at_once": engine.at_once,
    }


def _suggestion(one: Suggestion) -> Tree:
    return {
        "keys": one.keys,
        "step_seconds": one.plan.step_seconds,
        "tokens_per_second_per_gpu_in_use": one.plan.tokens_per_second_per_gpu,
        "bubble_share": one.plan.bubble,
        "fullest_bytes": one.plan.fullest,
        "reasons": list(one.reasons),
    }
