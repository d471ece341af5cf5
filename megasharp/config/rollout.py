"""Sampling of responses, transfer of weights to the engines, and placement of policy and engines."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megasharp.common.section import Section

# A flag of SGLang in YAML; the installed SGLang checks names, types and choices.
EngineFlag = int | float | bool | str | list[int | float | bool | str] | None
# Transports of weights to separate engines, and all transports; `auto` stands for one of these.
FleetTransport = Literal["shared_memory", "ipc", "nccl", "gloo", "disk"]
Transport = Literal["inprocess", FleetTransport]
InFlight = Literal["retract", "in_place"]
EnginePlacement = Literal["colocated", "disaggregated"]


class EpisodesConfig(Section):
    """Responses of several turns, which environments answer."""

    max_turns: int = Field(
        default=8,
        ge=1,
        description="Most turns of the policy in a response. One that has not ended by then is cut: it is wrong, "
        "unless its environment says otherwise.",
    )
    turn_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Most tokens of one turn of the policy. null: none but data.max_response_tokens, which counts the "
        "tokens of all turns and of the environment.",
    )
    step_timeout_s: float = Field(
        default=60.0,
        gt=0.0,
        description="Seconds that one call of an environment may take. A response whose environment takes longer, or "
        "raises, is an infrastructure failure: it is masked, and counts for guard.infra_rate. A plain function that "
        "takes longer runs on in its thread, unheard, while its environment is closed. A coroutine that blocks for so "
        "long, without await, ends the run, since no other episode can go on meanwhile.",
    )
    at_once: int = Field(
        default=64,
        ge=1,
        description="Most calls of environments at the same time. Plain functions that have taken too long, and run "
        "on, are not counted.",
    )

    @property
    def identity(self) -> dict[str, str]:
        """Settings that the samples of an evaluation depend on, as text."""
        return {"max_turns": str(self.max_turns), "turn_tokens": str(self.turn_tokens or "")}


class RolloutConfig(Section):
    """Sampling of training responses, and the engine that does it.

    `oversample` is the share of prompts sampled beyond those wanted. Responses that are unfinished when enough groups
    are there are aborted between steps or kept in flight. A response has `first_token_limit_s` seconds to its first
    token, and `request_limit_s` from there. A lost engine is restarted up to `restarts` times within an hour.
    """

    engine: Literal["inprocess", "sglang"] = Field(
        default="inprocess",
        description="Program that samples responses. inprocess is this process's own engine, for small models; sglang "
        "starts SGLang servers, for real model sizes and asynchronous sampling.",
    )
    python: str | None = Field(
        default=None,
        description="Path of the Python interpreter that SGLang engines run in. null: what the variable "
        "MEGASHARP_ENGINES_PYTHON names, else .venv-engines or .venv-fleet in the current folder or beside the "
        "trainer's environment, else the trainer's own. train --dry-run prints it.",
    )
    temperature: float = Field(
        default=1.0,
        gt=0.0,
        description="Sampling temperature of training responses. The policy's log-probs and entropies in training are "
        "computed at the same temperature.",
    )
    top_p: float = Field(
        default=1.0,
        gt=0.0,
        le=1.0,
        description="Nucleus sampling: keeps the smallest set of tokens whose probability reaches this share. 1: off. "
        "Below 1 the sampler differs from the policy that is trained.",
    )
    top_k: int = Field(
        default=0,
        ge=0,
        description="Number of most likely tokens that sampling may choose from. 0: all. 1 is refused, as all "
        "responses of a prompt would be equal.",
    )
    min_p: float = Field(
        default=0.0,
        ge=0.0,
        lt=1.0,
        description="Share of the most likely token's probability that a token needs to be sampled, after top_k and "
        "top_p. 0: off. Above 0 the sampler differs from the policy that is trained.",
    )
    max_staleness: int = Field(
        default=0,
        ge=0,
        description="Number of policy versions (training steps) by which a trained token may be older than the policy "
        "that trains on it. Above 0 a response that a step leaves unfinished goes on under the next weights (a partial "
        "rollout), and a step waits for those that would grow too old: none is thrown away. 0: on-policy. Raise it to "
        "keep engines busy.",
    )
    oversample: float = Field(
        default=0.0,
        ge=0.0,
        le=4.0,
        description="Share of prompts sampled beyond prompts_per_step, so that slow ones need not be waited for; 0.25 "
        "is a quarter more. The unfinished prompts come first in the next step. It needs max_staleness above 0, of "
        "which it uses no more than prompts that can train in time. 0: none.",
    )
    allow_length_bias: bool = Field(
        default=False,
        description="Permits oversample above 0 with max_staleness 0. A step then trains on the prompts that finish "
        "first and throws the tokens of the others away, so it trains on shorter responses than the policy gives. Turn "
        "it on to study that, or to reproduce a run that had it.",
    )
    stragglers: Literal["abort", "keep"] = Field(
        default="abort",
        description="Handling of prompts that are unfinished when a step has enough groups. abort pauses them between "
        "steps; keep lets them go on during the update, which needs max_staleness above 0 and disaggregated engines.",
    )
    overlap_annotation: bool = Field(
        default=False,
        description="Computes reference and old log-probs of finished groups while the last responses of a step are "
        "being sampled, instead of after them. Needs engines of their own (cluster.placement disaggregated), beside "
        "which the policy's GPUs idle meanwhile. Log-probs are the same up to rounding, because responses are packed "
        "in another order. A response is sent to the ranks twice then. megasharp plan says how many seconds of a step "
        "it hides.",
    )
    request_limit_s: float = Field(
        default=1800.0,
        gt=0.0,
        description="Seconds that a response may take from its first token on; then it ends with the tokens it has, "
        "and is not trained on. Time in a queue does not count. Raise it for very long responses.",
    )
    first_token_limit_s: float | None = Field(
        default=None,
        gt=0.0,
        description="Seconds that an engine may take to a response's first token; then the response is sent again, to "
        "another engine if there is one. null: as long as request_limit_s, at least 600. Lower it to get away sooner "
        "from an engine that is up but begins nothing.",
    )
    engines: int = Field(
        default=1,
        ge=0,
        description="Number of SGLang engines that the run starts, each of tp ranks. Raise it to sample on more GPUs. "
        "0: only those of rollout.external.",
    )
    external: list[str] = Field(
        default=[],
        description="Addresses http://host:port of SGLang engines that were started by hand, on other machines for "
        "instance, and are used beside the run's own. Their key is read from the environment variable "
        "MEGASHARP_ENGINE_KEY; docs/how-to/engines.md has the command that starts one. Needs disaggregated engines.",
    )
    episodes: EpisodesConfig = Field(
        default=EpisodesConfig(),
        description="Limits of responses of several turns, for tasks that are environments.",
    )
    restarts: int = Field(
        default=3,
        ge=0,
        description="Number of times per hour that a lost SGLang engine is started again; where it was the last one, "
        "the step waits for it. 0: never, so a run that loses its last engine ends.",
    )
    tp: int = Field(
        default=1,
        ge=1,
        description="Number of GPUs (ranks) per SGLang engine. Raise it when the model does not fit on one GPU; it "
        "may not exceed a node's GPUs.",
    )
    sglang: dict[str, EngineFlag] = Field(
        default={},
        description="Further SGLang server arguments, by the names of its ServerArgs, such as page_size or "
        "mem_fraction_static. The installed SGLang checks them before anything starts.",
    )


class SyncConfig(Section):
    """Transfer of weights from the learner to the engines.

    An engine that does not answer one call of a push (a bucket; from disk or to verify, all weights) within `limit_s`
    seconds is given up, and the push goes on with the others. The default is enough for 64 GB at 110 MB/s.
    """

    transport: Literal["auto", Transport] = Field(
        default="auto",
        description="Way in which weights reach the engines. auto picks the fastest one that fits placement and "
        "device: ipc or nccl on GPUs, shared_memory or gloo on a CPU. Set disk when GPUs share nothing but a file "
        "system.",
    )
    verify: bool = Field(
        default=False,
        description="Compares a checksum of every tensor in the engines with the policy's after each push. Turn it on "
        "to find transfer errors; it costs some time per step.",
    )
    in_flight: InFlight = Field(
        default="retract",
        description="Handling of requests in flight when new weights arrive. retract recomputes their key-value cache "
        "with the new weights; in_place goes on with the old cache, which is faster and less exact.",
    )
    bucket_mb: int = Field(
        default=512,
        ge=1,
        description="Size in MiB of the buckets in which weights are sent; it bounds the extra memory of a push. "
        "Lower it when a push runs out of memory.",
    )
    limit_s: float = Field(
        default=600.0,
        gt=0.0,
        description="Seconds that an engine may take for one call of a push: one bucket, or all weights when loading "
        "from disk or verifying. A slower engine is given up and the push goes on without it.",
    )


class ClusterConfig(Section):
    """Placement of processes: each rank of policy and engines has a slot, which is a GPU and `cpus_per_slot` CPUs.

    Co-located engines share the policy's slots. With `gpus_per_node` 0 a slot is CPUs only.
    """

    backend: Literal["local", "ray"] = Field(
        default="local",
        description="Launcher of processes: local starts them on this machine, ray on a Ray cluster. More than one "
        "node needs ray.",
    )
    placement: EnginePlacement = Field(
        default="colocated",
        description="Placement of SGLang engines. colocated shares the policy's GPUs, engines sleep while it trains; "
        "disaggregated gives engines GPUs of their own, so both can work at once.",
    )
    nodes: int = Field(default=1, ge=1, description="Number of nodes that the run uses.")
    gpus_per_node: int = Field(
        default=0,
        ge=0,
        description="Number of GPUs per node that the run may use. 0: CPUs only with backend ray; without Ray, all "
        "GPUs of this machine where policy.device takes them.",
    )
    cpus_per_slot: float = Field(
        default=1.0,
        gt=0.0,
        description="Number of CPUs that Ray reserves for each slot: a policy rank, or an engine rank, or both where "
        "they share a GPU. Used with backend ray only.",
    )
