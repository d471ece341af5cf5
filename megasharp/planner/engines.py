"""The memory of one SGLang engine's rank: weights, cache, CUDA graphs, and how many requests that serves."""

from __future__ import annotations

from dataclasses import dataclass

from megasharp.planner.formulas import (
    engine_default_fraction,
    engine_graph_bytes,
    engine_workspace_bytes,
    kv_bytes_per_token,
)
from megasharp.planner.request import Engines, Request
from megasharp.planner.result import EngineMemory

_GIB = 2**30
# What our engines take on a CPU, and with a memory network on a GPU (rollout/sglang/engine/config.py).
_CPU_POOL, _MEMORY_ROWS = 16_384, 256
# CUDA context and NCCL's buffers of an engine's process, which stay while it sleeps. An assumption, not measured.
CONTEXT = 1_000_000_000


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
    """The first rank of one engine. `learners_leave`: bytes that stay on its GPU beside it, in any stage at most.

    SGLang sizes its cache as `mem_fraction_static` of the GPU less the weights: engines start on an empty GPU.
    """
    engines = request.engines
    if engines is None:
        return None
    networks = [network.architecture for network in (request.policy, request.memory) if network is not None]
    weights = sum(request.width * arch.parameter_count() // engines.tp for arch in networks)
    per_token = sum(kv_bytes_per_token(arch, engines.tp, request.width) for arch in networks)
    requests = request.batch.sequences * (1 + request.batch.oversample) / engines.count
    gpu = request.machines.gpu
    if gpu is None:
        return _on_cpu(request, engines, weights, per_token, requests)
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
    return _filled(
        request,
        engines,
        EngineSizes(weights, cache, graphs, workspace, per_token),
        fraction=fraction,
        largest_fraction=int(room / gpu.memory * 100) / 100 if engines.colocated else None,
        requests=requests,
        most=most,
    )


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """Bytes of one rank's parts, and of one token in its cache."""

    weights: int
    cache: int
    graphs: int
    workspace: int
    per_token: int


def _on_cpu(request: Request, engines: Engines, weights: int, per_token: int, requests: float) -> EngineMemory:
    cache = (engines.pool_tokens or _CPU_POOL) * per_token
    return _filled(
        request,
        engines,
        EngineSizes(weights, cache, 0, 0, per_token),
        fraction=None,
        largest_fraction=None,
        requests=requests,
        most=engines.most_requests or 64,
    )


def _filled(
    request: Request,
    engines: Engines,
    sizes: EngineSizes,
    *,
    fraction: float | None,
    largest_fraction: float | None,
    requests: float,
    most: int | None,
) -> EngineMemory:
    lengths = request.batch.lengths
    tokens = sizes.cache // sizes.per_token
    mean = int(tokens / lengths.context)
    return EngineMemory(
        count=engines.count,
        tp=engines.tp,
        weights=sizes.weights,
        cache=sizes.cache,
        graphs=sizes.graphs,
        workspace=sizes.workspace,
        context=CONTEXT if request.machines.gpu else 0,
        total=sizes.weights + sizes.cache + sizes.graphs + sizes.workspace,
        fraction=fraction,
        largest_fraction=largest_fraction,
        bytes_per_token=sizes.per_token,
        tokens=tokens,
        sequences_mean=mean,
        sequences_longest=tokens // lengths.longest,
        requests=requests,
        at_once=int(max(0, min(requests, mean, most or requests))),
    )
