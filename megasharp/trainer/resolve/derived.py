"""The values that a run file leaves open: dtype by the device, lengths by the data, micro-batches by the plan.

What is derived is printed, and stored with the run, so that a resume, on other machines too, goes on with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megasharp.config.run_config import RunConfig
from megasharp.convert.architecture import Architecture
from megasharp.planner.formulas import ENGINE_KEEPS
from megasharp.planner.memory import ANNOTATION, TRAINING
from megasharp.planner.records import DEFAULT
from megasharp.planner.suggest import make_plan
from megasharp.tasks.own_reward import OWN_TASK
from megasharp.tasks.problems import response_of, task_of
from megasharp.trainer.resolve.devices import (
    MOST_REPLICAS,
    PROMPTS_EACH,
    available_cores,
    device_of,
    gpu_memory_mib,
    machine_memory,
    splits_over_cores,
)

# Of a large set this share of the prompts is kept, so that a few outliers do not size every buffer.
_KEPT = 0.999
_PROMPT_MULTIPLE = 16
# Without prompts at hand, as for a plan.
_PROMPT_WITHOUT_DATA = 1024
# On a CPU nothing is planned.
_MICRO_BATCH = 8192
# Multiples of the longest sequence that are tried on GPUs, and the share of a GPU's memory that the plan may fill.
_BUDGETS = (4, 2, 1)
_FULL = 0.95
# Replicas on a CPU fill at most this share of the memory. A parameter has weight, gradient and two moments, and is in
# the engine and maybe in the reference too, in float32; a process has its libraries and activations.
_SHARE_OF_MEMORY, _BYTES_A_PARAMETER, _BYTES_A_PROCESS = 0.5, 24, 2**30


def derived(
    config: RunConfig, architecture: Architecture, lengths: Sequence[int], gpu: str | None = None
) -> tuple[RunConfig, list[str]]:
    """Return the configuration with a value for every key that it leaves open, and a clause for each one.

    `lengths` are those of the prompts in tokens; empty where no prompt was read. `gpu` is the GPU to plan for, by its
    name or its MiB; None: this machine's.
    """
    found: dict[str, dict[str, Any]] = {"model": {}, "data": {}, "policy": {}}
    clauses: list[str] = []

    def take(section: str, key: str, value: object, why: str) -> None:
        found[section][key] = value
        clauses.append(f"{section}.{key} {value} ({why})")

    device, data = device_of(config), config.data
    if config.policy.dp is None:
        replicas = replicas_on_cpu(config, architecture) if splits_over_cores(config) else 1
        if replicas > 1:
            take("policy", "dp", replicas, f"on {available_cores()} cores")
        found["policy"]["dp"] = replicas
    if config.model.dtype == "auto":
        on = "a GPU" if device == "cuda" else "the CPU"
        take("model", "dtype", "bfloat16" if device == "cuda" else "float32", f"on {on}")
    if data.max_prompt_tokens is None:
        take("data", "max_prompt_tokens", *_prompt_limit(lengths, architecture.max_positions))
    prompt = found["data"].get("max_prompt_tokens", data.max_prompt_tokens)
    if data.max_response_tokens is None:
        keeps = ENGINE_KEEPS if config.rollout.engine == "sglang" else 0
        room = max(1, architecture.max_positions - keeps - prompt)
        wanted, task = max((response_of(task), task) for task in map(task_of, data.sources))
        why = "for your own rows" if task == OWN_TASK else f"for task {task}"
        if wanted > room:
            kept = f" and {keeps} that SGLang keeps" if keeps else ""
            why = f"the positions of the model less {prompt} of the prompt{kept}"
        take("data", "max_response_tokens", min(wanted, room), why)
    if config.policy.micro_batch_tokens is None:
        longest = prompt + max(found["data"].get("max_response_tokens", 0), data.largest_response)
        take("policy", "micro_batch_tokens", *_micro_batch(_with(config, found), longest, gpu))
    return _with(config, found), clauses


def replicas_on_cpu(config: RunConfig, architecture: Architecture) -> int:
    """Return how many replicas of the policy this machine has cores, prompts and memory for, at least one."""
    room = _SHARE_OF_MEMORY * machine_memory()
    each = _BYTES_A_PARAMETER * architecture.parameter_count() + _BYTES_A_PROCESS
    most = (MOST_REPLICAS, available_cores(), config.data.prompts_per_step // PROMPTS_EACH, int(room // each))
    return max(1, min(most))


def _with(config: RunConfig, found: dict[str, dict[str, Any]]) -> RunConfig:
    """Return the configuration with these values in its sections."""
    sections = {name: getattr(config, name).model_copy(update=values) for name, values in found.items() if values}
    return config.model_copy(update=sections) if sections else config


def _prompt_limit(lengths: Sequence[int], positions: int) -> tuple[int, str]:
    """Return the limit that nearly all prompts keep, at most half of the model's positions, and why."""
    if not lengths:
        return min(_PROMPT_WITHOUT_DATA, positions // 2), "assumed, no prompt was read"
    ordered = sorted(lengths)
    most = ordered[min(len(ordered) - 1, int(_KEPT * len(ordered)))]
    rounded = -(-most // _PROMPT_MULTIPLE) * _PROMPT_MULTIPLE
    why = f"the longest of {len(ordered)} prompts has {ordered[-1]}"
    if rounded > positions // 2:
        return max(1, positions // 2), f"half of the model's positions; {why}"
    return rounded, why


def _micro_batch(config: RunConfig, longest: int, gpu: str | None) -> tuple[int, str]:
    """Return the budget of a micro-batch: on GPUs the largest multiple of the longest sequence that the plan fits."""
    if device_of(config) == "cpu":
        return _MICRO_BATCH, "on the CPU"
    # Imported here, because it imports this file.
    from megasharp.trainer.plan import Options, ask

    memory = None if gpu else gpu_memory_mib()
    gpu = gpu or (str(memory) if memory else DEFAULT)
    name = f"a GPU of {gpu} MiB" if gpu.isdecimal() else f"a GPU like the {gpu}"
    for times in _BUDGETS:
        budget = -(-longest * times // 1024) * 1024
        sized = _with(config, {"policy": {"micro_batch_tokens": budget}})
        plan = make_plan(ask(sized, config.name, Options(nodes=config.cluster.nodes, gpu=gpu), fill=False).request)
        # What engines take while they sample depends on other keys.
        most = max(stage.totals.get(phase, 0) for stage in plan.stages for phase in (TRAINING, ANNOTATION))
        if most <= _FULL * (plan.gpu_memory or 0):
            return budget, f"by the plan {times} x the longest sequence of {longest} fits {name}"
    return budget, f"the longest sequence has {longest}; by the plan it does not fit {name}"
