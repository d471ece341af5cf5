"""A plan as JSON for programs, and as text for people.

The JSON tree holds all that the text says, as numbers with their unit in the key. Sizes of a stage are those of one GPU
(of one rank on CPUs), sizes of the engine those of one of its GPUs. A value that is not predicted, or does not apply,
is None. The text is one table of memory by stage, then engines, time, disk, and the problems.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Iterator, Sequence

from megasharp.planner.formulas import Lengths
from megasharp.planner.memory import ANNOTATION, HANDOVER, SAMPLING, TRAINING, run_text
from megasharp.planner.records import EngineMemory, Machines, Network, Plan, Request, StageMemory, range_text
from megasharp.planner.seconds import loss
from megasharp.planner.suggest import Suggestion, changes, doubts, gains
from megasharp.planner.transport import NETWORK, PROMPT_TOKEN, RESPONSE_TOKEN
from megasharp.planner.warnings import limits_of_predictions

Tree = dict[str, object]

# Keys of `policy` that say how it is split and how it saves memory.
_LAYOUT = (
    "dp", "tp", "pp", "cp", "vpp", "ep", "etp", "micro_batch_tokens", "recompute", "offload", "recompute_modules",
    "optimizer_offload", "head",
)  # fmt: skip


def plan_tree(request: Request, plan: Plan, notes: Sequence[str], suggestions: Sequence[Suggestion]) -> Tree:
    """Return the plan with its question, so that two plans can be distinguished."""
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
        "experts": _experts_tree(request),
        "batch": _batch(request, plan),
        "machines": {**_machines(request.machines), "gpus_in_use": plan.gpus if gpu else 0},
        "assumed": {
            "mfu_share": rates.mfu,
            "logp_mfu_share": rates.logp_mfu,
            "engine_mfu_share": rates.engine_mfu,
            "memory_bandwidth_share": rates.bandwidth,
            "engine_layer_seconds": rates.layer_s,
            "link_bandwidth_share": rates.links,
            "grouped_product_share": rates.grouped,
            "sync_bytes_per_second": rates.sync,
            "driver_seconds": rates.driver_s,
            "disk_bytes_per_second": rates.disk,
        },
        "stages": [_stage(request, plan, stage) for stage in plan.stages],
        "engines": _engines(request, plan.engine),
        "times": [
            {"part": time.name, "seconds": time.seconds, **_range("seconds", time.range), "how": time.how}
            for time in plan.times
        ],
        "transport": _transport_tree(plan),
        "dlc": _dlc_tree(request, plan),
        "step_seconds": plan.step_seconds,
        **_range("step_seconds", plan.step_range),
        "tokens_per_second_per_gpu_in_use": plan.tokens_per_second_per_gpu,
        **_range("tokens_per_second_per_gpu_in_use", plan.rate_range),
        "packed_tokens_per_second_per_gpu_in_use": plan.packed_tokens_per_second_per_gpu,
        **_range("packed_tokens_per_second_per_gpu_in_use", plan.packed_rate_range),
        "checkpoint": {
            "size_bytes": plan.checkpoint.size,
            "seconds": plan.checkpoint.seconds if gpu else None,
            "hf_copy_bytes": plan.checkpoint.exported,
            "hf_copy_seconds": plan.checkpoint.exporting if gpu else None,
        },
        "failure": _failure_tree(request, plan),
        "disk": _disk_tree(request, plan),
        "host_bytes_per_node": plan.host,
        "problems": [dataclasses.asdict(problem) for problem in plan.problems],
        "notes": [*notes, *limits_of_predictions(request)],
        "suggestions": [_suggestion(one, plan) for one in suggestions],
    }


def _failure_tree(request: Request, plan: Plan) -> Tree | None:
    """Work lost by a failure at most, and the steps between checkpoints by which that is an hour at most."""
    lost = loss(request, _longest_step(plan), plan.checkpoint)
    if lost is None:
        return None
    return {
        "checkpoint_every_steps": lost.every,
        "lost_hours": lost.seconds / _HOUR,
        "every_steps_for_an_hour": lost.fewer,
        "saving_share_then": lost.saving,
    }


def _range(key: str, found: tuple[float, float] | None) -> Tree:
    """The two ends of a prediction's range, None where there is none."""
    low, high = found or (None, None)
    return {f"{key}_low": low, f"{key}_high": high}


def _network(network: Network | None) -> Tree | None:
    if network is None:
        return None
    arch = network.architecture
    return {
        "name": network.name,
        "family": arch.family,
        "parameters": arch.parameter_count(),
        "active_parameters": arch.active_parameter_count(),
        "layers": arch.num_layers,
        "layers_with_window": sum(window is not None for window in arch.windows),
        "smallest_window_positions": arch.smallest_window,
    }


def _experts_tree(request: Request) -> Tree | None:
    """The policy's experts, of each layer, and how they are spread; None in a dense model."""
    experts, layout, asked = request.policy.architecture.experts, request.layout, request.split.experts
    if experts is None:
        return None
    held = {"on_a_rank": experts.count // layout.ep, "other_ranks_with_the_same": layout.expert_shards - 1}
    return {"count": experts.count, "per_token": experts.per_token, "ffn": experts.ffn, **held, **asked.model_dump()}


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
        "longest_tokens": lengths.longest,
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
        "experts_parameters": stage.experts,
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
        "dispatch_bytes": stage.dispatch,
        "twice_the_tokens_bytes": stage.by_routing,
        "memory_network_step_bytes": stage.memory_step,
        "reserved_bytes": stage.reserved,
        "sleeping_engine_bytes": plan.engine.asleep if beside and plan.engine else 0,
        "total_bytes_by_phase": dict(stage.totals),
        "must_offload": None if stage.must_offload is None else list(stage.must_offload),
    }


def _disk_tree(request: Request, plan: Plan) -> Tree:
    """All files at the run's end. Responses are kept of so many steps."""
    disk, kept = plan.disk, request.kept
    return {
        "steps": kept.steps,
        "checkpoints": kept.checkpoints,
        "checkpoints_bytes": disk.checkpoints,
        "rollouts_steps": kept.tables,
        "rollouts_bytes": disk.rollouts,
        "rollout_tokens_steps": kept.token_tables,
        "rollout_tokens_bytes": disk.rollout_tokens,
        "metrics_bytes": disk.metrics,
        "tensorboard_bytes": disk.tensorboard,
        "samples_bytes_per_problem": kept.samples,
        "samples_bound_bytes": kept.samples_bound,
        "total_bytes": disk.total,
    }


def _transport_tree(plan: Plan) -> Tree | None:
    """A step's batch on its way to the ranks; its seconds are among the driver's."""
    sent = plan.transport
    if sent is None:
        return None
    return {
        "response_token_bytes": RESPONSE_TOKEN,
        "prompt_token_bytes": PROMPT_TOKEN,
        "step_bytes": sent.step,
        "node_bytes": sent.node,
        "seconds": sent.seconds,
        "ray_store_bytes": sent.store,
        "route_token_bytes": sent.route,
        "routes_bytes": sent.routes,
    }


def _dlc_tree(request: Request, plan: Plan) -> Tree | None:
    """Factors are against engines that hold the policy alone."""
    if plan.dlc is None:
        return None
    return {
        "memory_window": request.memory_window,
        "responses_at_once": plan.dlc.at_once,
        "decode_step_factor": plan.dlc.step,
        "rollout_factor": plan.dlc.rollout,
        "cache_bytes": plan.dlc.cache,
    }


def _engines(request: Request, engine: EngineMemory | None) -> Tree | None:
    """Settings are None where SGLang's own default stands; tokens and responses are those of one engine."""
    asked = request.engines
    if asked is None or engine is None:
        return None
    return {
        "count": engine.count,
        "tp": engine.tp,
        "ep_size": asked.ep,
        "colocated": asked.colocated,
        "transport": asked.transport,
        "samples_while_policy_trains": asked.overlap,
        "max_running_requests": asked.most_requests,
        "max_total_tokens": asked.pool_tokens,
        "chunked_prefill_tokens": asked.chunk,
        "weights_bytes": engine.weights,
        "experts_bytes": engine.experts,
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


def _suggestion(one: Suggestion, own: Plan) -> Tree:
    return {
        "keys": one.keys,
        "step_seconds": one.plan.step_seconds,
        **_range("step_seconds", one.plan.step_range),
        "tokens_per_second_per_gpu_in_use": one.plan.tokens_per_second_per_gpu,
        **_range("tokens_per_second_per_gpu_in_use", one.plan.rate_range),
        "packed_tokens_per_second_per_gpu_in_use": one.plan.packed_tokens_per_second_per_gpu,
        **_range("packed_tokens_per_second_per_gpu_in_use", one.plan.packed_rate_range),
        "seconds_beside_own": changes(one.plan, own),
        "bubble_share": one.plan.bubble,
        "fullest_bytes": one.plan.fullest,
        "reasons": list(one.reasons),
        "alternatives": [
            {
                "recompute": other.recompute,
                "head": other.head,
                "learners_bytes": other.learning,
                "step_seconds": other.seconds,
                **_range("step_seconds", other.range),
                "fits": other.fits,
            }
            for other in one.alternatives
        ],
    }


_WIDTH, _LABEL, _COLUMN, _STAGES = 100, 40, 15, 4
_HOUR = 3600.0
_PHASES = {
    TRAINING: "in training",
    ANNOTATION: "in annotation (passes before)",
    HANDOVER: "in handover (weights are pushed)",
    SAMPLING: "in sampling",
}


def plan_text(request: Request, plan: Plan, notes: Sequence[str]) -> str:
    """Print the whole plan, at most 100 columns wide."""
    # A tiny model's sizes would all be 0.0 GB.
    unit = (1e9, "GB") if plan.fullest >= 1e9 else (1e6, "MB")
    lines = [*_head(request, plan), "", *_memory(request, plan, unit)]
    if plan.engine is not None:
        lines += ["", *_engine(request, plan, plan.engine, unit), *_dlc(request, plan, unit)]
    lines += [
        "",
        *_time(request, plan),
        *_transport(plan),
        *_checkpoint(request, plan),
        *_failure(request, plan),
        *_disk(request, plan),
    ]
    notes = [*notes, *limits_of_predictions(request)]
    if notes or plan.problems:
        lines.append("")
    lines += [line for note in notes for line in _wrapped("note", note)]
    lines += [line for problem in plan.problems for line in _wrapped(problem.level, problem.text)]
    return "\n".join(line.rstrip() for line in lines)


def suggestions_text(found: Sequence[Suggestion], own: Plan) -> str:
    """Print layouts as overrides that can be copied, each with its reasons, beside the file's own."""
    lines = ["Layouts that fit, the fastest first, within 5 % that of fewer cp ranks and stages (predicted):", ""]
    room = f", {own.fullest / 1e9:.0f} of {own.gpu_memory / 1e9:.0f} GB at the fullest moment" if own.gpu_memory else ""
    lines += _wrapped("file", f"the run file's own layout: {range_text(own.step_range)} s a step{room}")
    for number, one in enumerate(found, 1):
        # A shell would read the brackets of a list.
        keys = " ".join(
            f"'{key}=[{','.join(value)}]'" if isinstance(value, list) else f"{key}={value}"
            for key, value in one.keys.items()
        )
        lines += ["", *_wrapped(f"{number}", keys), *_wrapped("", "; ".join([*one.reasons, *gains(one.plan, own)]))]
        lines += _alternatives(one) if number == 1 else []
    for told in doubts(found, own):
        lines += ["", *_wrapped("note", told)]
    return "\n".join(line.rstrip() for line in lines)


def _alternatives(one: Suggestion) -> Iterator[str]:
    """Yield a table of recompute and head with this layout: the fullest GPU while learners compute, seconds a step."""
    split = one.request.split
    yield f"            {'policy.recompute':<18}{'policy.head':<13}{'GB in training':>14}{'s a step':>16}"
    for other in one.alternatives:
        chosen = (other.recompute, other.head) == (split.recompute, split.head)
        said = "chosen" if chosen else "" if other.fits else "does not fit"
        row = f"{other.recompute:<18}{other.head:<13}{other.learning / 1e9:>14.1f}{range_text(other.range):>16}"
        yield f"            {row}  {said}"


def _wrapped(label: str, text: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=f"{label:<11} ", subsequent_indent=" " * 12, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip


def _head(request: Request, plan: Plan) -> Iterator[str]:
    split, batch, machines, lengths = request.split, request.batch, request.machines, request.batch.lengths
    models = "; ".join(
        f"{role} {network.name}, {_parameters(network)}"
        for role, network in zip(("policy", "memory"), request.networks, strict=False)
    )
    yield from _wrapped("run", f"{plan.name}: {models}, {8 * request.width}-bit weights")
    where = f"{plan.world} CPU rank(s)"
    if machines.gpu is not None:
        where = (
            f"{plan.gpus} of {machines.nodes * machines.gpus_per_node} GPUs, {machines.nodes} node(s) x "
            f"{machines.gpus_per_node} {machines.gpu.name}"
        )
    modules = f" ({', '.join(split.recompute_modules)})" if split.recompute == "selective" else ""
    yield from _wrapped(
        "layout",
        f"{where}; policy dp {split.dp} x tp {split.tp} x pp {split.pp}"
        + (f" (vpp {split.vpp})" if split.vpp > 1 else "")
        + f" x cp {split.cp}"
        + (f", ep {split.ep} x etp {split.etp}" if request.policy.architecture.experts else "")
        + f", recompute {split.recompute}{modules}, offload {_offload(request)}"
        + ("; the optimizer's state on the host" if request.optimizer_on_host else "")
        + ("; logits by chunks" if split.head == "chunked" else ""),
    )
    yield from _wrapped(
        "step",
        f"{batch.prompts} prompts x {batch.responses} = {batch.sequences} responses, {batch.mini_batches} optimizer "
        f"step(s); prompts of {lengths.prompt:.0f} tokens (<= {lengths.prompt_longest}), responses of "
        f"{lengths.response:.0f} on average ({_spread(lengths)}) are assumed; {plan.rows:,} packed tokens, at least "
        f"{plan.micro_batches} micro-batch(es) of <= {plan.micro_batch_rows:,} tokens a rank and optimizer step (whole "
        "responses do not fill them)",
    )
    if request.lora is not None:
        targets = ", ".join(request.lora.targets)
        yield from _wrapped("lora", f"rank {request.lora.rank}, alpha {request.lora.alpha:g} on {targets}")
    yield from _windows(request)
    yield from _experts(request)
    names = " and ".join(request.passes.before)
    extra = f"passes before the update for {names} log-probs" if names else "no pass before the update"
    yield from _wrapped("recipe", f"{', '.join(request.passes.methods)}; {extra}")
    yield from _wrapped(
        "checked", f"Megatron's own model of every stage ({split.pp}), built without memory: the same parameters"
    )


def _parameters(network: Network) -> str:
    arch = network.architecture
    active = f" ({arch.active_parameter_count():,} active)" if arch.experts else ""
    return f"{arch.parameter_count():,} parameters{active}"


def _experts(request: Request) -> Iterator[str]:
    """Yield how a mixture of experts is spread, and what is assumed of it."""
    experts, layout, asked = request.policy.architecture.experts, request.layout, request.split.experts
    if experts is None:
        return
    held = f"{experts.count // layout.ep} (ep {layout.ep} x etp {layout.etp})"
    balance = f"balance loss {asked.balance_loss}" if asked.balance_loss else "no balance loss"
    replay = ", routes of engines are replayed" if asked.replay else ""
    yield from _wrapped(
        "experts",
        f"{experts.count} a layer, {experts.per_token} for each token; a rank holds {held}, and "
        f"{layout.expert_shards - 1} other rank(s) the same; dispatcher {asked.dispatcher}, {balance}{replay}. "
        "Assumed: every expert gets as many tokens, and experts' products reach "
        f"{request.rates.grouped:.0%} of dense ones' rate",
    )


def _offload(request: Request) -> str:
    asked = ", ".join(request.split.offload)
    if asked and not request.offloaded:
        return f"nothing (policy.offload: {asked} is without effect, no engine shares the policy's GPUs)"
    return asked or "nothing"


def _spread(lengths: Lengths) -> str:
    longest = lengths.response_longest
    if lengths.k == 0.0:
        return f"all of {longest}"
    if lengths.k == 1.0:
        return f"evenly spread up to {longest}"
    return f"<= {longest}; a share (n / {longest})^(1 / {lengths.k:.3f}) of them has at most n tokens"


def _windows(request: Request) -> Iterator[str]:
    """Yield the effect of sliding windows on the plan, and what they leave as it is."""
    for network in request.networks:
        arch = network.architecture
        if arch.smallest_window is None:
            continue
        layers = sum(window is not None for window in arch.windows)
        yield from _wrapped(
            "windows",
            f"{layers} of {arch.num_layers} layers of {network.name} see {arch.smallest_window:,} positions. Counted "
            "in the time of passes, not in activations (a window's keys are gathered up to twice). Engines keep and "
            "see every position: SGLang ignores sliding windows, and longer sequences are refused",
        )


_Cell = Callable[[StageMemory], str]


def _memory(request: Request, plan: Plan, unit: tuple[float, str]) -> Iterator[str]:
    gpu = request.machines.gpu
    where = "one GPU" if gpu else "one rank"
    of = f", of {gpu.memory / 1e9:.0f} GB" if gpu else ""
    for first in range(0, len(plan.stages), _STAGES):
        shown = plan.stages[first : first + _STAGES]
        heads = [f"{stage.stage}" + ("" if stage.kind == "only" else f" {stage.kind}") for stage in shown]
        yield _line(f"Memory of {where}, {unit[1]}{of}; stage", heads)
        yield from _layers(shown)
        for label, cell in _rows(request, plan, unit):
            yield _line(f"  {label}", [cell(stage) for stage in shown])


def _layers(shown: Sequence[StageMemory]) -> Iterator[str]:
    """A line for each run of layers: a virtual pipeline's stages have several, of the same number each."""
    for number, runs in enumerate(zip(*(stage.layers for stage in shown), strict=True)):
        yield _line("  layers" if number == 0 else "", [run_text(run) for run in runs])


def _line(label: str, cells: Sequence[str]) -> str:
    return f"{label:<{_LABEL}}" + "".join(f"{cell:>{_COLUMN}}" for cell in cells)


def _rows(request: Request, plan: Plan, unit: tuple[float, str]) -> list[tuple[str, _Cell]]:
    """The rows of the table of memory: a label, and the text of a stage's cell."""

    def size(name: str) -> _Cell:
        return lambda stage: f"{getattr(stage, name) / unit[0]:.1f}"

    def size_by(table: str, key: str) -> _Cell:
        return lambda stage: f"{getattr(stage, table)[key] / unit[0]:.1f}"

    def count(name: str) -> _Cell:
        return lambda stage: f"{getattr(stage, name):,}"

    on_gpu, reference, memory = request.machines.gpu is not None, request.passes.reference, request.memory is not None
    asleep = plan.engine.asleep if plan.engine is not None else 0
    first, asked, experts = plan.stages[0], request.split.recompute, request.policy.architecture.experts is not None
    rows: list[tuple[bool, str, _Cell]] = [
        (True, "parameters of the policy", count("parameters")),
        (experts, "of them experts'", count("experts")),
        (request.lora is not None, "of them trained (adapters)", count("trained")),
        *((True, name, size(name)) for name in ("weights", "gradients", "optimizer")),
        (reference and on_gpu, "reference, on the host", size("reference_on_host")),
        (reference and not on_gpu, "reference", size("reference")),
        (memory, "parameters of the memory network", count("memory_parameters")),
        (memory, "its weights, gradients, optimizer", size("memory_network")),
        (request.optimizer_on_host, "  on the host instead", size("optimizer_on_host")),
        (True, f"activations (recompute {asked})", size("activations")),
        *(
            (by != asked, f"  with recompute {by} instead", size_by("activations_by", by))
            for by in first.activations_by
        ),
        (True, "logits head", size("logits")),
        (experts, "one layer's tokens to experts and back", size("dispatch")),
        (memory, "the memory network's step instead", size("memory_step")),
        (on_gpu, "CUDA, NCCL, fragmentation (assumed)", size("reserved")),
        (_colocated_on_gpus(request), "a sleeping engine's graphs and context", lambda _: f"{asleep / unit[0]:.1f}"),
        *((True, _PHASES[phase], size_by("totals", phase)) for phase in first.totals),
    ]
    return [(label, cell) for shown, label, cell in rows if shown]


def _colocated_on_gpus(request: Request) -> bool:
    return request.engines is not None and request.engines.colocated and request.machines.gpu is not None


def _must(stages: Sequence[StageMemory]) -> str:
    """The least of policy.offload that makes room for engines, and on which stages, where these differ."""
    found: dict[str, list[str]] = {}
    for stage in stages:
        names = "even all is not enough" if stage.must_offload is None else ", ".join(stage.must_offload) or "nothing"
        found.setdefault(names, []).append(str(stage.stage))
    if len(found) == 1:
        return next(iter(found))
    return "; ".join(f"{names} (stage {', '.join(numbers)})" for names, numbers in found.items())


def _engine(request: Request, plan: Plan, engine: EngineMemory, unit: tuple[float, str]) -> Iterator[str]:
    assert request.engines is not None
    scale, name = unit
    placed = "beside the policy" if request.engines.colocated else "on GPUs of their own"
    where = "a GPU" if request.machines.gpu else "a rank"
    both = " (policy and memory network)" if request.memory else ""
    mixed = f" (of experts {engine.experts / scale:.1f} {name})" if engine.experts else ""
    parts = [f"weights {engine.weights / scale:.1f} {name}{both}{mixed}", f"cache {engine.cache / scale:.1f} {name}"]
    if request.machines.gpu:
        parts += [f"CUDA graphs {engine.graphs / scale:.1f} {name}", f"workspace {engine.workspace / scale:.1f} {name}"]
        parts.append(f"its process {engine.context / scale:.1f} {name} (CUDA context and NCCL, assumed)")
    by_hand = request.engines.external
    placed += f", {by_hand} more by hand elsewhere" if by_hand else ""
    size = f"tp {engine.tp}" + (f" (ep_size {request.engines.ep})" if request.engines.ep > 1 else "")
    yield from _wrapped("engines", f"{engine.count} x {size} {placed}; of {where}: {', '.join(parts)}")
    if engine.fraction is not None:
        asked = request.engines.memory_fraction
        said = "" if asked is not None else ", SGLang's default (its prefill graphs are left out)"
        most = f"; {engine.largest_fraction:.2f} is the most that fits" if engine.largest_fraction is not None else ""
        yield from _wrapped("", f"mem_fraction_static {engine.fraction:.3f}{said}{most}")
    if _colocated_on_gpus(request):
        yield from _wrapped("", f"must leave the GPU while engines sample (policy.offload): {_must(plan.stages)}")
    yield from _wrapped(
        "cache",
        f"{engine.tokens:,} tokens an engine: {engine.sequences_mean} responses in progress (on average "
        f"{request.batch.lengths.context:,.0f} tokens, prompt and what is written), {engine.sequences_longest} at full "
        f"length ({request.batch.lengths.longest:,} tokens); "
        f"{engine.requests:.0f} come to an engine, {engine.at_once} at once",
    )


def _dlc(request: Request, plan: Plan, unit: tuple[float, str]) -> Iterator[str]:
    if plan.dlc is None or plan.engine is None or request.machines.gpu is None:
        return
    (scale, name), cost, window = unit, plan.dlc, request.memory_window
    per_token = plan.engine.caches[1].bytes_per_token / 1024
    kept = "all tokens" if window is None else f"the prompt and the last {window:,} tokens (recipe.dlc.window)"
    rollout = "" if cost.rollout is None else f" and the rollout {cost.rollout:.2f} times"
    yield from _wrapped(
        "dlc",
        f"predicted: a decode step of {cost.at_once} responses takes {cost.step:.2f} times{rollout} as long as with "
        f"the policy alone; {cost.cache / scale:.1f} {name} of the cache are the memory network's, {per_token:,.0f} "
        f"KiB a token, for {kept} of a response; the factors have no range, as no published run has two networks",
    )


def _time(request: Request, plan: Plan) -> Iterator[str]:
    if request.machines.gpu is None:
        yield from _wrapped("time", "not predicted on CPUs")
        return
    rates = request.rates
    yield from _wrapped(
        "time",
        f"predicted, not measured, in seconds from low to high, as far as published runs of others were from their "
        f"predictions; MFU {rates.mfu:.2f} outside of bubbles and exchanges, {rates.bandwidth:.0%} of the memory's and "
        f"{rates.links:.0%} of the links' bandwidth",
    )
    for time in plan.times:
        label = f"  {time.name:<10}{range_text(time.range):>16} s  "
        yield from textwrap.wrap(time.how, _WIDTH, initial_indent=label, subsequent_indent=" " * len(label))
    if plan.step_range is not None and plan.rate_range is not None:
        together = "sampling beside training" if request.engines and request.engines.overlap else "one after the other"
        yield f"  {'step':<10}{range_text(plan.step_range):>16} s  {together}"
        yield from _wrapped(
            "rate",
            f"{range_text(plan.rate_range)} tokens/s/GPU with a prompt counted for each of its responses, as other "
            f"trainers count; packed, a shared prompt once, {range_text(plan.packed_rate_range)}; over the {plan.gpus} "
            "GPUs of the run (idle ones of its nodes are not counted)",
        )
    if request.engines is None:
        yield "            rollouts by the engine in this process are not predicted"


def _transport(plan: Plan) -> Iterator[str]:
    """Yield what the driver sends to ranks in a step, and Ray's store for it."""
    sent = plan.transport
    if sent is None:
        return
    text = (
        f"{_size(sent.step)} a step to the ranks, at most {_size(sent.node)} to a node: {RESPONSE_TOKEN} bytes a "
        f"response token at most, {PROMPT_TOKEN} a prompt token"
    )
    if sent.seconds is not None:
        text += f"; {sent.seconds:.2f} of the driver's seconds at {NETWORK / 1e9:g} GB/s between nodes (assumed)"
    if sent.route:
        text += f"; {sent.route} a token more for its route (policy.experts.replay), {_size(sent.routes)} in the driver"
    yield from _wrapped("transport", f"{text}; Ray's object store takes up to {_size(sent.store)} of a node's memory")


def _checkpoint(request: Request, plan: Plan) -> Iterator[str]:
    text = f"{_size(plan.checkpoint.size)} on disk"
    if request.machines.gpu is not None:
        text += f", {plan.checkpoint.seconds:.0f} s at {request.rates.disk / 1e9:g} GB/s"
    if plan.checkpoint.exported:
        text += f", and {_size(plan.checkpoint.exported)} of a Hugging Face copy"
        text += f", {plan.checkpoint.exporting:.0f} s" if request.machines.gpu is not None else ""
    if plan.host:
        text += f"; a node's host memory holds {plan.host / 1e9:.0f} GB of what is offloaded"
    yield from _wrapped("checkpoint", text)


def _failure(request: Request, plan: Plan) -> Iterator[str]:
    """Yield the work that a failure may lose, and the number of steps between checkpoints that keeps it to an hour."""
    longest = _longest_step(plan)
    lost = loss(request, longest, plan.checkpoint)
    if lost is None or longest is None:
        return
    text = (
        f"loses the steps since the last checkpoint: at most checkpoint.every={lost.every} x {longest:.0f} s "
        f"= {lost.seconds / _HOUR:.1f} h, half of it on average"
    )
    if lost.fewer is not None:
        text += f"; checkpoint.every={lost.fewer} loses an hour at most, and saves for {lost.saving:.1%} of the time"
    yield from _wrapped("failure", text)


def _longest_step(plan: Plan) -> float | None:
    return None if plan.step_range is None else plan.step_range[1]


def _disk(request: Request, plan: Plan) -> Iterator[str]:
    """Yield what the run has on disk at its end, with the keys that keep it."""
    disk, kept = plan.disk, request.kept
    parts = [f"{_size(disk.checkpoints)} of {kept.checkpoints} checkpoint(s) (checkpoint.keep_*, one being written)"]
    if kept.tables:
        tokens = f" and {_size(disk.rollout_tokens)} of tokens" if disk.rollout_tokens else ""
        parts.append(f"{_size(disk.rollouts)} of responses{tokens}, of {kept.tables:,} steps (log.rollouts)")
    boards = f", TensorBoard {_size(disk.tensorboard)}" if disk.tensorboard else ""
    parts.append(f"metrics {_size(disk.metrics)}{boards}")
    if kept.samples:
        most = f"{kept.samples / 1e6:.1f} MB" if kept.samples >= 1e6 else f"{kept.samples / 1e3:.1f} kB"
        most = f"besides, at most {most} of samples for each problem that is evaluated"
        parts.append(f"{most}, texts up to {_size(kept.samples_bound)} in all (eval.keep, eval.keep_mb)")
    yield from _wrapped("disk", f"{_size(disk.total)} after {kept.steps:,} steps: {'; '.join(parts)}")


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
