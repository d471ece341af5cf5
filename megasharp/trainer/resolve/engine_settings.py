"""The settings of a run's engines: where they run, how weights reach them, and what is refused before they start."""

from __future__ import annotations

import os
from pathlib import Path

from megasharp.cluster.ray_runtime.slot_layout import Layout, Needs, make_layout
from megasharp.common.errors import UserError
from megasharp.common.group_environment import shared_with_engines
from megasharp.config.rollout import Transport
from megasharp.config.run_config import RunConfig
from megasharp.convert.model_folder import ModelFolder
from megasharp.planner.formulas import ENGINE_KEEPS
from megasharp.rollout.sglang.client.external import address_of, on_this_machine
from megasharp.rollout.sglang.client.launch import FleetSettings
from megasharp.trainer.resolve.devices import device_of
from megasharp.trainer.resolve.engine_python import engine_python

# Transports by device and placement of the engines; `auto` is the first.
_TRANSPORTS: dict[tuple[str, str], tuple[Transport, ...]] = {
    ("cpu", "colocated"): ("shared_memory", "gloo", "ipc", "disk"),
    ("cpu", "disaggregated"): ("gloo", "shared_memory", "disk"),
    ("cuda", "colocated"): ("ipc", "shared_memory", "disk"),
    ("cuda", "disaggregated"): ("nccl", "disk"),
}
# Keys that mean nothing to the engine in this process, by section.
_ENGINE_KEYS = {
    "rollout": ("python", "engines", "external", "restarts", "tp", "sglang", "overlap_annotation"),
    "sync": ("verify", "in_flight", "bucket_mb", "limit_s"),
    "cluster": ("placement",),
    "policy": ("offload",),
}


def choose_transport(config: RunConfig, where: str) -> Transport:
    """Return the transport of weights. Raises UserError for one that does not reach the engines."""
    asked, rollout, placement = config.sync.transport, config.rollout, config.cluster.placement
    if rollout.engine == "inprocess":
        if asked not in ("auto", "inprocess"):
            raise UserError(f"{where}: sync.transport={asked} needs engines of their own; set rollout.engine=sglang")
        return "inprocess"
    device = device_of(config)
    possible = _TRANSPORTS[device, placement]
    possible = tuple(way for way in possible if _leads_to_all(way, config))
    if asked == "auto":
        return possible[0]
    found = next((way for way in possible if way == asked), None)
    if found is None:
        beyond = " and beyond this machine (rollout.external)" if _beyond(config) else ""
        raise UserError(
            f"{where}: sync.transport={asked} does not reach engines on {device} that are {placement} on "
            f"{config.cluster.nodes} node(s){beyond}; use {', '.join(possible)}, or auto"
        )
    return found


def _beyond(config: RunConfig) -> bool:
    """Return whether an engine that was started by hand is on another machine."""
    return not all(map(on_this_machine, config.rollout.external))


def _leads_to_all(way: Transport, config: RunConfig) -> bool:
    """Return whether this transport reaches every engine."""
    # Files in shared memory stay on the driver's machine, and IPC handles open memory on the same device only.
    if way == "shared_memory":
        return config.cluster.nodes == 1 and not _beyond(config)
    if way in ("gloo", "nccl"):
        # Without Ray the learner's ranks and the run's engines meet at the loopback interface.
        return config.cluster.backend == "ray" or not _beyond(config)
    return way != "ipc" or ranks_beside(config) is not None


def ranks_beside(config: RunConfig) -> tuple[tuple[int, ...], ...] | None:
    """Return the policy rank whose memory each rank of each engine can open: on its GPU, or on a CPU's machine.

    None where some engine's rank has none. Empty, which stands for the ranks' order, where the run does not fit into
    its cluster, because that is refused elsewhere with its own message.
    """
    try:
        layout = cluster_layout(config)
    except UserError:
        return ()
    return layout.beside(same_slot=device_of(config) == "cuda")


def check_engine_keys(config: RunConfig, where: str) -> None:
    """Refuse keys of SGLang engines where there are none, and placements that contradict other keys."""
    cluster = config.cluster
    if config.rollout.engine == "sglang":
        _check_external(config, where)
    choose_transport(config, where)
    if config.rollout.engine == "inprocess":
        for table, keys in _ENGINE_KEYS.items():
            section = getattr(config, table)
            fields = type(section).model_fields
            for key in keys:
                if getattr(section, key) != fields[key].default:
                    raise UserError(
                        f"{where}: {table}.{key} is for engines of their own; set rollout.engine=sglang or leave it out"
                    )
    elif cluster.placement == "colocated" and config.rollout.stragglers == "keep":
        raise UserError(
            f"{where}: rollout.stragglers=keep samples while the policy trains, but co-located engines sleep then; "
            "set cluster.placement=disaggregated or stragglers=abort"
        )
    elif cluster.placement == "colocated" and config.rollout.overlap_annotation:
        raise UserError(
            f"{where}: rollout.overlap_annotation computes log-probs while engines sample, and co-located engines have "
            "the policy's devices then; set cluster.placement=disaggregated or leave it out"
        )
    if cluster.nodes > 1 and cluster.backend == "local":
        raise UserError(f"{where}: cluster.nodes={cluster.nodes} needs cluster.backend=ray")


def _check_external(config: RunConfig, where: str) -> None:
    """Refuse addresses that are none, or stand twice, and placements that engines started by hand cannot follow."""
    urls = config.rollout.external
    if not urls and not config.rollout.engines:
        raise UserError(f"{where}: rollout.engines=0 leaves no engine to sample; start one, or name rollout.external")
    found = [address_of(url) for url in urls]
    twice = next((url for url, place in zip(urls, found, strict=True) if found.count(place) > 1), None)
    if twice is not None:
        raise UserError(f"{where}: rollout.external names {twice} twice; each engine once")
    if urls and config.cluster.placement == "colocated":
        raise UserError(
            f"{where}: rollout.external: engines started by hand have devices of their own and never sleep; "
            "set cluster.placement=disaggregated"
        )


def check_context(config: RunConfig, positions: int, where: str) -> None:
    """Refuse lengths at which SGLang refuses prompts or cuts responses; `positions` is max_position_embeddings."""
    flags, wanted = config.rollout.sglang, longest(config)
    asked = {f"rollout.sglang.{name}": flags.get(name) for name in ("context_length", "max_total_tokens")}
    for name, room in {f"the number of positions of {config.model.path}": positions, **asked}.items():
        if isinstance(room, int) and wanted > room - ENGINE_KEEPS:
            raise UserError(
                f"{where}: {longest_keys(config)} = {wanted}, but {name} is {room}, of "
                f"which SGLang keeps {ENGINE_KEEPS} to itself; lower the lengths to {room - ENGINE_KEEPS} in all"
            )


def check_window(config: RunConfig, window: int | None, where: str) -> None:
    """Refuse lengths beyond a network's sliding window, which SGLang 0.5.21 ignores in these families' models.

    It would sample with attention to all positions, while the learner trains with attention to the window.
    """
    if window is not None and longest(config) > window:
        raise UserError(
            f"{where}: {longest_keys(config)} = {longest(config)}, but some "
            f"layers see a window of {window} positions, which SGLang ignores; lower the lengths to "
            f"{window} in all, or set rollout.engine=inprocess"
        )


def check_room(config: RunConfig, room: int) -> None:
    """Refuse lengths that running engines cannot hold: `room` is for a prompt and its response, in tokens."""
    if longest(config) > room:
        raise UserError(
            f"{longest_keys(config)} = {longest(config)}, but the engines have room for "
            f"{room} tokens; lower the lengths, or raise max_total_tokens or mem_fraction_static in rollout.sglang"
        )


def longest(config: RunConfig) -> int:
    """Return how many tokens a prompt and its response may have together, in training and evaluation."""
    return config.data.max_prompt_tokens + max(_limits(config).values())


def longest_keys(config: RunConfig) -> str:
    """Return the keys whose sum `longest` is, for messages."""
    limits = _limits(config)
    return f"data.max_prompt_tokens + {max(limits, key=lambda key: limits[key])}"


def _limits(config: RunConfig) -> dict[str, int]:
    """Return every limit that a response may have in the run, by its key."""
    data = config.data
    stages = {f"data.stages[{i}].max_response_tokens": s.max_response_tokens for i, s in enumerate(data.stages)}
    limits = {"data.max_response_tokens": data.max_response_tokens, **stages}
    return limits | {"eval.max_response_tokens": config.eval.max_response_tokens or 0}


def cluster_layout(config: RunConfig, gpus: int | None = None) -> Layout:
    """Return the slot of each rank and engine; `gpus` is the number on a node where the file gives none.

    Raises UserError, naming the keys, for what does not fit.
    """
    policy, cluster = config.policy, config.cluster
    needs = Needs(
        world=policy.ranks,
        tp=policy.tp,
        engines=config.rollout.engines if config.rollout.engine == "sglang" else 0,
        engine_tp=config.rollout.tp,
    )
    return make_layout(needs, cluster.model_copy(update={"gpus_per_node": cluster.gpus_per_node or gpus or 0}))


def engines_on_a_node(config: RunConfig, where: str, gpus: int | None = None) -> int:
    """Return how many engines an evaluation starts: all that a node's GPUs hold. Raises UserError where that is none.

    `gpus`: how many the node has, where that is known; else the file's number.
    """
    if device_of(config) != "cuda":
        return max(1, config.rollout.engines)
    there, key = config.cluster.gpus_per_node if gpus is None else gpus, f"rollout.tp={config.rollout.tp}"
    if there < config.rollout.tp:
        named = "this machine's GPUs" if gpus is not None else "cluster.gpus_per_node"
        raise UserError(
            f"{where}: {key} is more than {named}={there}, so a node holds no engine for an evaluation; "
            "lower rollout.tp"
        )
    return there // config.rollout.tp


def group_variables(config: RunConfig) -> dict[str, str]:
    """Return the variables that ranks and engines must both have; empty where they are in no group of NCCL's.

    The driver's environment decides for all nodes: what was set on one of them only would part it from the others.
    """
    if choose_transport(config, "sync") != "nccl":
        return {}
    return shared_with_engines(config.rollout.sglang, os.environ)


def fleet_settings(
    config: RunConfig, model: ModelFolder, memory: ModelFolder | None, logs: Path, memory_window: int | None = None
) -> FleetSettings:
    """Return the settings that every engine of a run is started with."""
    # SGLang cannot read Megatron's shards, nor what a cold memory network lacks. The first push brings all weights
    # before anything is sampled, so engines of such a model start with dummy weights.
    rollout = config.rollout
    if model.is_megatron or (memory is not None and not memory.serves):
        rollout = rollout.model_copy(update={"sglang": {**rollout.sglang, "load_format": "dummy"}})
    return FleetSettings(
        python=engine_python(config).path,
        model=model.description,
        log_folder=logs,
        rollout=rollout,
        memory=memory.description if memory else None,
        memory_window=memory_window,
        device=device_of(config),
        dtype=config.model.dtype,
        deterministic=config.deterministic,
        sleep=config.cluster.placement == "colocated",
        returns_experts=config.policy.experts.replay,
    )
