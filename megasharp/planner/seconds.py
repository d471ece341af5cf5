"""SGLang's engines and the time of a step.

An engine first: the memory of one of its ranks (weights, cache, CUDA graphs) and the number of requests that this
serves at once. From that follows a step's time, part by part: decoding by memory bandwidth, passes by FLOPs, weights by
bytes over links. Rates are shares of the data sheet's (`Rates`). Every number is a prediction; on CPUs there is none.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from megasharp.batching.packing import MICRO_BATCHES_AHEAD
from megasharp.config.policy import Dispatcher
from megasharp.convert.lora import trained_parameters
from megasharp.planner.formulas import (
    Decoding,
    KvCache,
    Lengths,
    bubble_share,
    checkpoint_bytes,
    context_bytes_per_row,
    decode_course,
    decode_seconds,
    engine_default_fraction,
    engine_graph_bytes,
    engine_workspace_bytes,
    forward_flops_per_token,
    kv_bytes_per_token,
    left_over,
    mean_context,
    metrics_bytes,
    recompute_share,
    response_table_bytes,
    tensor_bytes_per_row,
    tensorboard_bytes,
    token_table_bytes,
)
from megasharp.planner.memory import Rows, rows_of
from megasharp.planner.mixtures import (
    computes_experts_again,
    exchanged_bytes_per_token,
    expert_parameters,
    weights_read,
)
from megasharp.planner.records import (
    CONTEXT_LONGEST,
    Checkpoint,
    Disk,
    DlcCost,
    EngineMemory,
    Engines,
    Gpu,
    Loss,
    Network,
    Request,
    StageTime,
)
from megasharp.planner.transport import more_seconds

_GIB = 2**30
# Our engines' own defaults (rollout/sglang/engine/engine_config.py): tokens of cache and requests at once on a CPU, and
# requests at once with a memory network on a GPU.
_CPU_POOL, _CPU_REQUESTS, _MEMORY_ROWS = 16_384, 64, 256
# CUDA context and NCCL's buffers of an engine's process, which stay while it sleeps. An assumption, not measured.
CONTEXT = 1_000_000_000
# Of what an engine runs, so much more is sent to it as a queue (rollout/sglang/client/admission.py).
_QUEUE_SHARE = 0.1
# PCIe 5.0 x16, one direction, at what copies from pinned memory reach.
_HOST_LINK = 50e9
_HOUR = 3600.0
# A key that would hide less of the annotation than this share is not spoken of.
_WORTH = 0.1
# Bytes of a token that the memory network learns again (`records.Sampled`).
_TOKEN = 4


@dataclass(frozen=True, slots=True)
class _Defaults:
    """SGLang 0.5.21's choices by the GPU's memory: tokens of a prefill chunk, largest captured decode batch."""

    chunk: int
    batch: int


def _defaults(memory: float, tp: int) -> _Defaults:
    gib = memory / _GIB
    if gib < 20:
        return _Defaults(2048, 8)
    if gib < 35:
        return _Defaults(4096, 48 if tp < 4 else 160)
    if gib < 60:
        return _Defaults(4096, 32 if tp < 4 else 160)
    return _Defaults(8192, 256 if tp < 4 else 512) if gib < 160 else _Defaults(16384, 512)


def engine_memory(request: Request, learners_leave: int) -> EngineMemory | None:
    """The memory of one engine's first rank. `learners_leave`: bytes that stay on its GPU, in any stage at most.

    SGLang sizes its cache as `mem_fraction_static` of the GPU less the weights: engines start on an empty GPU.
    """
    engines = request.engines
    if engines is None:
        return None
    networks = [network.architecture for network in request.networks]
    # With ep_size above 1 a rank has whole experts instead of a part of each: as many bytes.
    weights = sum(request.width * arch.parameter_count() // engines.tp for arch in networks)
    windows = (None, request.memory_window)
    caches = tuple(
        KvCache(kv_bytes_per_token(arch, engines.tp, request.width), window)
        for arch, window in zip(networks, windows, strict=False)
    )
    lengths = request.batch.lengths
    per_token = round(sum(cache.mean_bytes(lengths) for cache in caches) / lengths.context)
    gpu = request.machines.gpu
    if gpu is None:
        cache = (engines.pool_tokens or _CPU_POOL) * per_token
        sizes = _Sizes(weights, cache, caches, per_token)
        return _filled(request, engines, sizes, most=engines.most_requests or _CPU_REQUESTS)
    defaults = _defaults(gpu.memory, engines.tp)
    most = engines.most_requests or (_MEMORY_ROWS if request.memory else None)
    batch = min(defaults.batch, most or defaults.batch)
    graphs = engine_graph_bytes(batch)
    workspace = int(engine_workspace_bytes(engines.chunk or defaults.chunk, engines.tp))
    fraction = engines.memory_fraction or engine_default_fraction(graphs + workspace, gpu.memory)
    cache = int(max(0, fraction * gpu.memory - weights))
    if engines.pool_tokens is not None:
        cache = min(cache, engines.pool_tokens * per_token)
    room = gpu.memory - graphs - workspace - CONTEXT - learners_leave
    largest = int(room / gpu.memory * 100) / 100 if engines.colocated else None
    sizes = _Sizes(weights, cache, caches, per_token, graphs, workspace, fraction, largest)
    return _filled(request, engines, sizes, most)


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Bytes of one rank's parts, and of one token in its cache; on a GPU, shares of it as in `EngineMemory`."""

    weights: int
    cache: int
    caches: tuple[KvCache, ...]
    per_token: int
    graphs: int = 0
    workspace: int = 0
    fraction: float | None = None
    largest_fraction: float | None = None


def _filled(request: Request, engines: Engines, sizes: _Sizes, most: int | None) -> EngineMemory:
    """Fill an engine's cache with requests: responses of mean size, at most `most` at once."""
    policy = request.policy.architecture
    requests = request.batch.sequences * (1 + request.batch.oversample) / (engines.count + engines.external)
    lengths = request.batch.lengths
    tokens = sizes.cache // sizes.per_token
    mean = int(tokens / lengths.context)
    longest = sum(cache.bytes_at(lengths.prompt_longest, lengths.response_longest) for cache in sizes.caches)
    return EngineMemory(
        count=engines.count,
        tp=engines.tp,
        weights=sizes.weights,
        cache=sizes.cache,
        graphs=sizes.graphs,
        workspace=sizes.workspace,
        context=CONTEXT if request.machines.gpu else 0,
        total=sizes.weights + sizes.cache + sizes.graphs + sizes.workspace,
        fraction=sizes.fraction,
        largest_fraction=sizes.largest_fraction,
        caches=sizes.caches,
        bytes_per_token=sizes.per_token,
        tokens=tokens,
        sequences_mean=mean,
        sequences_longest=int(sizes.cache // longest),
        requests=requests,
        at_once=int(max(0, min(requests, mean, most or requests))),
        experts=request.width * expert_parameters(policy) // engines.tp,
        expert_share=policy.experts.per_token / policy.experts.count if policy.experts else 1.0,
    )


def step_times(
    request: Request, rows: Rows, engine: EngineMemory | None, offloaded: int, held: int = 0, reference: int = 0
) -> list[StageTime]:
    """The time of every part of a step.

    Bytes of a rank: `offloaded` go to its host and back; `held` are there, and read for an update; those of the
    `reference` are there too and change places with the weights twice.
    """
    gpu = request.machines.gpu
    if gpu is None:
        return []
    times = [_rollout(request, gpu, engine)] if engine is not None else []
    longest = CONTEXT_LONGEST if request.split.cp > 1 else 1.0
    exchange = 4 * reference / _HOST_LINK
    learning = [*_passes(request, gpu, rows), *_context(request, gpu, rows), *_experts(request, gpu, rows)]
    if engine is not None:
        learning = [_overlapped(request, gpu, rows, engine, time, exchange) for time in learning]
    times += [dataclasses.replace(time, longest=longest) for time in learning]
    if reference:
        # There and back, one after the other (`learner/offload.py`).
        how = "changes places with the weights and back, 50 GB/s a GPU"
        times.append(StageTime("reference", exchange, how))
    if held:
        how = "its state from the host and back at the same time, 50 GB/s a GPU"
        times.append(StageTime("optimizer", request.batch.mini_batches * held / _HOST_LINK, how))
    if request.engines is not None:
        times.append(_sync(request, gpu, request.engines))
        times.append(_driver(request, rows))
        if offloaded:
            times.append(StageTime("offload", 2 * offloaded / _HOST_LINK, "to the host and back, 50 GB/s a GPU"))
    return times


def _driver(request: Request, rows: Rows) -> StageTime:
    more = more_seconds(request, rows)
    how = "rewards, advantages, batches and metrics"
    if more:
        how += f", {more:.1f} s of it because a larger batch is sent than in the published runs"
    return StageTime("driver", request.rates.driver_s + more, how)


def longest_response_seconds(request: Request, engine: EngineMemory) -> float | None:
    """Seconds from the first to the last token of a response of the greatest length, in a full batch.

    None on CPUs, and where no response fits into the cache.
    """
    gpu, lengths = request.machines.gpu, request.batch.lengths
    if gpu is None or engine.at_once < 1:
        return None
    mean = sum(cache.mean_bytes(lengths) for cache in engine.caches)
    return lengths.response_longest * _decoding(request, gpu, engine).step_seconds(engine.at_once, mean)


def first_token_seconds(request: Request, engine: EngineMemory) -> float | None:
    """Seconds that an engine has the last response of its queue before it begins; None on CPUs, and where none waits.

    The queue is a tenth of what runs, and responses end one by one: a tenth of a response of mean length.
    """
    longest, lengths = longest_response_seconds(request, engine), request.batch.lengths
    if longest is None or engine.requests <= engine.at_once:
        return None
    return _QUEUE_SHARE * longest * lengths.response / lengths.response_longest


def step_bytes(engine: EngineMemory, lengths: Lengths, at_once: int | None = None) -> float:
    """Bytes that a rank reads in a decode step: weights, and the cache of `at_once` responses (None: the engine's)."""
    live = engine.at_once if at_once is None else at_once
    weights = weights_read(engine.weights, engine.experts, engine.expert_share, live)
    return weights + live * sum(cache.mean_bytes(lengths) for cache in engine.caches)


def dlc_cost(request: Request, engine: EngineMemory | None, learners_leave: int) -> DlcCost | None:
    """Compare the engine with one that holds the policy alone; None without a memory network or engines."""
    alone = dataclasses.replace(request, memory=None)
    without = engine_memory(alone, learners_leave)
    if request.memory is None or engine is None or without is None or engine.at_once < 1:
        return None
    gpu, lengths, live = request.machines.gpu, request.batch.lengths, engine.at_once
    rollout = None
    if gpu is not None:
        seconds, before = _rollout(request, gpu, engine).seconds, _rollout(alone, gpu, without).seconds
        rollout = seconds / before if seconds and before else None
    return DlcCost(
        at_once=live,
        step=step_bytes(engine, lengths) / step_bytes(without, lengths, live),
        rollout=rollout,
        cache=live * engine.caches[1].mean_bytes(lengths),
    )


def step_seconds(request: Request, times: Sequence[StageTime]) -> float | None:
    """Seconds of all parts one after the other; where engines sample while the policy trains, of the longer of both.

    None where a part is not predicted, as for the engine in the trainer's process.
    """
    if request.engines is None or not times or any(time.seconds is None for time in times):
        return None
    rollout = sum(time.seconds or 0.0 for time in times if time.name == "rollout")
    others = sum(time.seconds or 0.0 for time in times if time.name != "rollout")
    return max(rollout, others) if request.engines.overlap else rollout + others


def tokens_per_second_per_gpu(request: Request, gpus: int, seconds: float | None) -> float | None:
    """Rate of prompt and response tokens of the responses that are trained on, as NeMo-RL counts them."""
    if not seconds:
        return None
    lengths = request.batch.lengths
    return request.batch.sequences * (lengths.prompt + lengths.response) / seconds / gpus


def checkpoint(request: Request) -> Checkpoint:
    """Size and time of a checkpoint: policy, memory network and reference, and beside them a Hugging Face copy."""
    arch, lora = request.policy.architecture, request.lora
    adapters = trained_parameters(lora, arch) if lora else 0
    policy = arch.parameter_count() + adapters
    size = checkpoint_bytes(policy, adapters or policy, request.width)
    if request.memory is not None:
        memory = request.memory.architecture.parameter_count()
        size += checkpoint_bytes(memory, memory, request.width)
    size += request.width * policy if request.passes.reference else 0
    exported = request.width * arch.parameter_count() if request.kept.export_hf else 0
    return Checkpoint(size, size / request.rates.disk, exported, exported / request.rates.disk)


def loss(request: Request, step: float | None, save: Checkpoint) -> Loss | None:
    """Return the work that a failure loses at most, with steps of `step` seconds; None where these are not known."""
    if step is None:
        return None
    every = min(request.kept.every, request.kept.steps)
    fewer = int(_HOUR / step)
    if not 0 < fewer < every:
        return Loss(every, every * step)
    return Loss(every, every * step, fewer, save.seconds / (fewer * step))


def disk_bytes(request: Request, save: Checkpoint) -> Disk:
    """Bytes of all files that the run has at its end; `save` is one of its checkpoints."""
    kept, batch = request.kept, request.batch
    sampled = 1 + batch.oversample
    responses, group = round(batch.sequences * sampled), batch.responses * batch.lengths.response
    tokens = group * batch.prompts * sampled
    # Whole groups are written token by token, as many as the limit has room for.
    by_token = min(kept.tokens // group, batch.prompts * sampled) * group
    return Disk(
        checkpoints=kept.checkpoints * (save.size + save.exported),
        rollouts=kept.tables * response_table_bytes(responses, tokens),
        rollout_tokens=kept.token_tables * token_table_bytes(by_token),
        metrics=metrics_bytes(kept.steps),
        tensorboard=tensorboard_bytes(kept.steps) if kept.tensorboard else 0,
    )


def _decoding(request: Request, gpu: Gpu, engine: EngineMemory) -> Decoding:
    """The engine's decoding at the rates that are assumed."""
    rates = request.rates
    # Attention is memory's matter here: its bytes are counted as the cache's.
    flops = sum(forward_flops_per_token(network.architecture, 0.0, rates.grouped) for network in request.networks)
    layers = sum(network.architecture.num_layers for network in request.networks)
    return Decoding(
        weights=engine.weights,
        caches=engine.caches,
        bandwidth=gpu.bandwidth * rates.bandwidth,
        token=flops / (engine.tp * gpu.flops * rates.engine_mfu),
        step=layers * rates.layer_s if engine.tp > 1 else 0.0,
        experts=engine.experts,
        share=engine.expert_share,
    )


def _rollout(request: Request, gpu: Gpu, engine: EngineMemory) -> StageTime:
    if engine.at_once < 1:
        return StageTime("rollout", None, "no response fits into the cache")
    decoding = decode_seconds(engine.requests, engine.at_once, request.batch.lengths, _decoding(request, gpu, engine))
    # Prefill, where a group's responses share that of their prompt.
    lengths, grouped = request.batch.lengths, request.rates.grouped
    archs = [network.architecture for network in request.networks]
    per_token = sum(forward_flops_per_token(arch, lengths.prompt / 2, grouped) for arch in archs)
    prompts = engine.requests / request.batch.responses * lengths.prompt
    reading = prompts * per_token / (engine.tp * gpu.flops * request.rates.engine_mfu)
    how = f"{engine.at_once} of {engine.requests:.0f} responses at once in an engine: reading and FLOPs"
    return StageTime("rollout", decoding + reading, how)


def _overlapped(
    request: Request, gpu: Gpu, rows: Rows, engine: EngineMemory, time: StageTime, exchange: float
) -> StageTime:
    """Return the annotation without what `rollout.overlap_annotation` hides, or with what it would; other parts as is.

    A piece of it costs an `exchange` of weights and reference besides, and the last one comes after sampling. Nothing
    is hidden where the policy has no device meanwhile, or trains then.
    """
    engines = request.engines
    assert engines is not None
    if time.name != "annotate" or engines.colocated or engines.overlap or engine.at_once < 1:
        return time
    assert time.seconds is not None
    micro_batches = rows.micro_batches * request.batch.mini_batches
    work = time.seconds + exchange * math.ceil(micro_batches / MICRO_BATCHES_AHEAD)
    decoding = _decoding(request, gpu, engine)
    course = decode_course(engine.requests, engine.at_once, request.batch.lengths, decoding, request.batch.responses)
    after = min(time.seconds, left_over(course, work, min(micro_batches, request.batch.prompts)))
    hidden = time.seconds - after
    if engines.overlap_annotation:
        return dataclasses.replace(time, seconds=after, how=f"{time.how}; {hidden:.1f} s more while engines sample")
    if hidden < _WORTH * time.seconds:
        return time
    return dataclasses.replace(time, how=f"{time.how}; rollout.overlap_annotation=true would hide {hidden:.1f} s of it")


def _passes(request: Request, gpu: Gpu, rows: Rows) -> list[StageTime]:
    split = request.split
    idle = bubble_share(split.pp, split.vpp, rows.micro_batches)
    rates = request.rates
    peak = request.layout.world * gpu.flops * (1 - idle)
    forward = rows.step * _forward(request, request.policy) / peak
    times = []
    before = request.passes.before
    if before:
        how = f"forward pass for {' and '.join(before)} log-probs"
        passes = len(before)
        times.append(StageTime("annotate", passes * (forward / rates.logp_mfu + _tensor(request, gpu, rows)), how))
    again = "" if split.recompute == "none" else f", recompute {split.recompute}"
    update = forward * _work(request, request.policy) / rates.mfu
    update += (3 if split.recompute == "full" else 2) * _tensor(request, gpu, rows)
    times.append(StageTime("update", update, "forward and backward" + again))
    if request.memory is not None:
        once = (1 + request.passes.replay) * rows.step * _forward(request, request.memory) / (peak * rates.mfu)
        times.append(StageTime("memory", once * _work(request, request.memory), _learning(request)))
    return times


def _tensor(request: Request, gpu: Gpu, rows: Rows) -> float:
    """Seconds of one pass's exchange between the policy's tensor-parallel ranks; nothing overlaps."""
    split = request.split
    working = split.dp * split.cp * split.pp * (1 - bubble_share(split.pp, split.vpp, rows.micro_batches))
    moved = rows.step * tensor_bytes_per_row(request.policy.architecture, split.tp, request.width)
    return moved / working / (gpu.nvlink / 2 * request.rates.links)


def _learning(request: Request) -> str:
    """Say what the memory network learns in a step, and what the driver keeps for that."""
    steps, replay = request.passes.memory_steps, request.passes.replay
    text = "the memory network's " + ("step" if steps == 1 else f"{steps} steps")
    if not replay:
        return text
    lengths, batch = request.batch.lengths, request.batch
    tokens = batch.prompts * (lengths.prompt + batch.responses * lengths.response)
    return (
        f"{text}, with {replay} earlier step(s) again, kept in {replay * tokens * _TOKEN / 1e6:,.0f} MB of the driver"
    )


def _context(request: Request, gpu: Gpu, rows: Rows) -> list[StageTime]:
    """Time of keys and values between context-parallel ranks, and of their gradients; nothing overlaps."""
    split = request.split
    if split.cp == 1:
        return []
    inside = split.tp * split.cp <= request.machines.gpus_per_node
    link = (gpu.nvlink / 2 if inside else gpu.network) * request.rates.links
    # Attention that is computed again gathers its keys and values again.
    again = split.recompute == "full" or (split.recompute == "selective" and "core_attn" in split.recompute_modules)
    update = 3 if again else 2
    exchanged = (len(request.passes.before) + update) * _row_bytes(request, request.policy)
    if request.memory is not None:
        exchanged += (1 + request.passes.replay) * update * _row_bytes(request, request.memory)
    working = split.dp * split.pp * (1 - bubble_share(split.pp, split.vpp, rows.micro_batches))
    how = f"keys and values of every layer over {'NVLink' if inside else 'the network'}"
    return [StageTime("context", rows.step * exchanged / working / link, how)]


def _experts(request: Request, gpu: Gpu, rows: Rows) -> list[StageTime]:
    """Time of tokens to the ranks of their experts and back in the policy's passes; nothing overlaps."""
    split = request.split
    if request.policy.architecture.experts is None or split.ep * split.etp == 1:
        return []
    seconds, link = exchange_seconds(request, gpu, rows, split.experts.dispatcher)
    how = f"tokens to their experts and back by {split.experts.dispatcher} over {link}"
    return [StageTime("experts", seconds, how)]


def exchange_seconds(request: Request, gpu: Gpu, rows: Rows, dispatcher: Dispatcher) -> tuple[float, str]:
    """Return the seconds of a step's exchange with the policy's experts, and the links that it takes.

    Ranks of a node exchange over NVLink while those of other nodes do over the network: the longer of both counts.
    """
    split, arch, links = request.split, request.policy.architecture, request.rates.links
    assert arch.experts is not None
    ranks, room = split.ep * split.etp, request.machines.gpus_per_node
    of_layer = exchanged_bytes_per_token(
        arch.experts, arch.hidden, request.width, dispatcher, ep=split.ep, etp=split.etp
    )
    passes = len(request.passes.before) + (3 if computes_experts_again(split) else 2)
    idle = bubble_share(split.pp, split.vpp, rows.micro_batches)
    moved = passes * rows.step * arch.num_layers * of_layer / (request.layout.world * (1 - idle))
    # Of the other ranks those beyond the node.
    beyond = max(0, ranks - room) / (ranks - 1)
    within = moved * (1 - beyond) / (gpu.nvlink / 2 * links)
    seconds = max(within, moved * beyond / (gpu.network * links))
    return seconds, "NVLink and the network" if beyond else "NVLink"


def _row_bytes(request: Request, network: Network) -> float:
    return context_bytes_per_row(network.architecture, request.split.tp, request.split.cp, request.width)


def _forward(request: Request, network: Network) -> float:
    return forward_flops_per_token(network.architecture, _mean_context(request, network), request.rates.grouped)


def _mean_context(request: Request, network: Network) -> float:
    lengths, window = request.batch.lengths, request.memory_window
    if network is request.policy or window is None:
        return mean_context(network.architecture, lengths)
    return lengths.context_within(math.ceil(lengths.prompt) + window)


def _work(request: Request, network: Network) -> float:
    """The work of an update in forward passes: one forward, two for backward, and what is computed again.

    Frozen weights need no gradients of their own, which is half of the backward pass.
    """
    arch = network.architecture
    context, split = _mean_context(request, network), request.split
    share = recompute_share(arch, context, split.recompute, split.recompute_modules, request.rates.grouped)
    frozen = request.lora is not None and network is request.policy
    return (2.0 if frozen else 3.0) + share + _chunked_head(request, network)


def _chunked_head(request: Request, network: Network) -> float:
    """The work of logits by chunks beyond that of the whole head, in forward passes.

    They are computed for response tokens only, and once more in backward: four products instead of three.
    """
    if request.split.head != "chunked":
        return 0.0
    arch, batch = network.architecture, request.batch
    responses = batch.sequences * batch.lengths.response / rows_of(request).step
    return (4 * responses - 3) * 2.0 * arch.vocab * arch.hidden / _forward(request, network)


def _sync(request: Request, gpu: Gpu, engines: Engines) -> StageTime:
    size = request.width * sum(network.architecture.parameter_count() for network in request.networks)
    rates, links = request.rates, request.rates.links
    # Over the network a bucket is gathered, sent and loaded in turn; co-located ranks gather and load their own.
    ways = 2 if engines.transport in ("nccl", "gloo") else 1
    handing = ways * size / rates.sync
    match engines.transport:
        case "ipc" if request.split.pp > 1 and request.machines.nodes > 1:
            how, moving = "every stage's weights broadcast to all GPUs", size / (gpu.network * links)
        case "ipc" | "shared_memory":
            how, moving = "whole weights gathered over NVLink", size / (gpu.nvlink / 2 * links)
        case "nccl" | "gloo":
            how, moving = "whole weights broadcast over one adapter", size / (gpu.network * links)
        case "disk":
            how = f"written once, read by {engines.count} engine(s)"
            moving = size * (1 + engines.count) / rates.disk
        case "inprocess":
            return StageTime("sync", 0.0, "handed over in the process")
    return StageTime("sync", moving + handing, f"{how}, then loaded by engines")
