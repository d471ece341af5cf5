"""Problems of a plan, a line each: errors where the run will not work, warnings where it may be slow or fail later."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from megasharp.config.policy import Recompute
from megasharp.planner.formulas import ENGINE_KEEPS, mean_context, rows_that_hide_launches
from megasharp.planner.memory import HANDOVER, SAMPLING, TRAINING, Rows, rows_of
from megasharp.planner.records import (
    GPUS,
    Checkpoint,
    EngineMemory,
    Gpu,
    Problem,
    Request,
    StageMemory,
    StageTime,
    range_text,
    span,
)
from megasharp.planner.seconds import exchange_seconds, first_token_seconds, longest_response_seconds

_MORE_CACHE = "raise rollout.sglang.mem_fraction_static or rollout.tp"
_BUBBLE, _TIGHT, _SAVE_SECONDS = 0.10, 0.95, 60.0
# The speed of a disk is a guess: a limit within this factor of a checkpoint's time gets a warning.
_NEAR = 2.0


def find_problems(
    request: Request,
    found: Sequence[StageMemory],
    engine: EngineMemory | None,
    rows: Rows,
    bubble: float,
    save: Checkpoint,
    times: Sequence[StageTime],
) -> tuple[Problem, ...]:
    """Judge a plan: its errors, then its warnings."""
    problems = [
        *_machines(request),
        *_lengths(request),
        *_memory(request, found, engine),
        *_engines(request, engine),
        *_experts(request, found, rows),
        *_batch(request, rows, bubble),
        *_disk(request, save),
        *_limits(request, engine, times, save),
    ]
    return tuple(sorted(problems, key=lambda problem: problem.level != "error"))


def limits_of_predictions(request: Request) -> Iterator[str]:
    """Yield what a plan's seconds and bytes do not know: layouts and GPUs that no published run was fitted for."""
    gpu, split = request.machines.gpu, request.split
    if gpu is None:
        return
    if split.cp > 1:
        yield (
            f"policy.cp={split.cp}: no run with context parallelism was fitted; in the only published one learners "
            "took 3 to 5 times as long as predicted, and ranges reach that far"
        )
    if gpu.name == "b200":
        yield "b200: rates are fitted to H100s; two published steps on GB200 took 1.3 and 1.5 times as predicted"
    elif gpu.name != "h100":
        taken = "" if gpu.name in GPUS else ", and this GPU is taken for an H200 with less or more memory"
        yield f"{gpu.name}: rates are shares of the H200's data sheet, fitted to published runs on H100s{taken}"
    if any(network.architecture.experts for network in request.networks):
        yield (
            "mixtures of experts: rates are fitted to runs of dense models; that a layer waits for the rank whose "
            "experts get the most tokens, and the host for their numbers, is not counted"
        )
    if split.attention == "te":
        yield (
            "policy.attention=te: activations are counted as with fa2; Transformer Engine's attention keeps a shared "
            "prompt's keys and values once a response, which is more"
        )


def _error(text: str) -> Problem:
    return Problem("error", text)


def _warning(text: str) -> Problem:
    return Problem("warning", text)


def _machines(request: Request) -> Iterator[Problem]:
    split, machines, engines = request.split, request.machines, request.engines
    room = machines.gpus_per_node
    if not room:
        return
    for key, tp in (("policy.tp", split.tp), ("rollout.tp", engines.tp if engines else 1)):
        if tp > room:
            yield _error(f"{key}={tp} crosses nodes of {room} GPUs: every layer would wait for the network; lower it")
        elif room % tp:
            yield _error(f"{key}={tp} does not divide the {room} GPUs of a node; a group would cross nodes")
    needed, there = needed_gpus(request), machines.nodes * room
    if needed > there:
        lower = "policy.dp" if split.dp > 1 else "policy.tp, pp or cp"
        yield _error(f"the run needs {needed} GPUs, {machines.nodes} node(s) of {room} have {there}; lower {lower}")
    elif needed < there:
        yield _warning(f"{there - needed} of {there} GPUs stay idle: raise policy.dp or rollout.engines")
    if engines and engines.colocated and engines.count * engines.tp < request.layout.world:
        idle = request.layout.world - engines.count * engines.tp
        yield _warning(
            f"{idle} of the policy's GPUs have no engine and idle while others sample: raise rollout.engines"
        )
    if engines and engines.colocated and machines.nodes > 1 and engines.transport == "disk":
        yield _warning(
            "co-located engines on several nodes get their weights by way of the disk, which needs a shared file "
            "system; sync.transport=auto hands them over where each of their GPUs has a rank of the policy"
        )


def needed_gpus(request: Request) -> int:
    """GPUs (or slots) of policy and engines."""
    engines = request.engines
    sampling = engines.count * engines.tp if engines else 0
    if engines is None or engines.colocated:
        return max(request.layout.world, sampling)
    return request.layout.world + sampling


def _lengths(request: Request) -> Iterator[Problem]:
    lengths, budget = request.batch.lengths, request.split.micro_batch_tokens
    longest, evaluated = lengths.longest, lengths.prompt_longest + request.longest_evaluated
    sampled = max(longest, evaluated)
    lower = f"lower data.max_prompt_tokens or {'data' if longest == sampled else 'eval'}.max_response_tokens"
    for network in request.networks:
        positions = network.architecture.max_positions
        keeps = ENGINE_KEEPS if request.engines and network is request.policy else 0
        if sampled > positions - keeps:
            but = f", of which SGLang keeps {keeps}" if keeps else ""
            yield _error(
                f"prompt and response of {sampled} tokens exceed the {positions} positions of {network.name}{but}; "
                f"{lower}"
            )
        window = network.architecture.smallest_window
        if request.engines and window is not None and sampled > window:
            yield _error(
                f"prompt and response of {sampled} tokens exceed the window of {window} positions of {network.name}, "
                f"which SGLang ignores: the run would be refused; {lower}, or set rollout.engine=inprocess"
            )
    if longest > budget:
        yield _warning(
            f"prompt and response may have {longest} tokens, policy.micro_batch_tokens is {budget}: a response is not "
            "cut, so such a micro-batch is larger than the budget, and its memory is what is planned"
        )


def _memory(request: Request, found: Sequence[StageMemory], engine: EngineMemory | None) -> Iterator[Problem]:
    gpu = request.machines.gpu
    if gpu is None:
        return
    for phase in found[0].totals:
        stage = max(found, key=lambda one: one.totals[phase])
        total = stage.totals[phase]
        where = f"{phase}, stage {stage.stage}: {total / 1e9:.1f} GB of {gpu.memory / 1e9:.0f} GB"
        if total > gpu.memory:
            yield _error(f"{where} do not fit; {_way_out(request, phase, found, engine)}")
        elif total > _TIGHT * gpu.memory:
            yield _warning(f"{where}: less than 5 % to spare, and fragmentation was only assumed")
    apart = request.engines is not None and not request.engines.colocated
    if engine is not None and apart and engine.total > gpu.memory:
        yield _error(
            f"an engine's GPU: {engine.total / 1e9:.1f} GB of {gpu.memory / 1e9:.0f} GB do not fit; lower "
            "rollout.sglang.mem_fraction_static, or raise rollout.tp"
        )


def _way_out(request: Request, phase: str, found: Sequence[StageMemory], engine: EngineMemory | None) -> str:
    if phase == SAMPLING and engine is not None and engine.fraction is not None:
        missing = sorted({name for stage in found for name in stage.must_offload or ()} - set(request.split.offload))
        if missing and all(stage.must_offload is not None for stage in found):
            return f"add {', '.join(missing)} to policy.offload"
        largest = engine.largest_fraction or 0.0
        needed = engine.weights / (request.machines.gpu.memory if request.machines.gpu else 1)
        if largest > needed:
            return f"set rollout.sglang.mem_fraction_static to {largest:.2f} (now {engine.fraction:.3f})"
        return "offload more, or raise rollout.tp"
    if phase == HANDOVER:
        return "raise policy.tp, policy.dp or rollout.tp"
    host = "" if request.split.optimizer_offload else ", or set policy.optimizer_offload=true"
    if request.split.recompute != "full":
        again = _recompute(request, found)
        return f"set policy.recompute={again}, lower policy.micro_batch_tokens, or raise policy.tp or dp{host}"
    return f"lower policy.micro_batch_tokens, or raise policy.tp, pp or dp{host}"


def _recompute(request: Request, found: Sequence[StageMemory]) -> Recompute:
    """Return selective where that is enough for training to fit, else full."""
    memory = request.machines.gpu.memory if request.machines.gpu else 0.0
    enough = all(s.totals[TRAINING] - s.activations + s.activations_by["selective"] <= memory for s in found)
    return "selective" if enough and request.split.recompute == "none" else "full"


def _engines(request: Request, engine: EngineMemory | None) -> Iterator[Problem]:
    if engine is None or request.machines.gpu is None:
        return
    if engine.cache <= 0:
        yield _error(
            f"the engines' weights ({engine.weights / 1e9:.1f} GB a GPU) leave no room for a cache at "
            f"mem_fraction_static {engine.fraction}; raise it, or rollout.tp"
        )
        return
    if request.memory_window is not None:
        yield _error(
            "recipe.dlc.window is refused by SGLang engines on GPUs: cache and times above are those of engines that "
            "would have it; leave it out"
        )
    longest = request.batch.lengths.longest
    if engine.sequences_longest < 1:
        yield _error(
            f"one response of {longest} tokens does not fit into the cache of {engine.tokens:,} tokens; {_MORE_CACHE}"
        )
    elif engine.sequences_longest < engine.at_once:
        yield _warning(
            f"the cache holds {engine.sequences_longest} responses of full length, {engine.at_once} are decoded at "
            "once: if most of them grow long, SGLang retracts requests and computes them again; set "
            "rollout.sglang.max_running_requests where that happens"
        )
    if engine.at_once < engine.requests:
        yield _warning(
            f"{engine.requests:.0f} responses come to an engine, {engine.at_once} at once: they are sampled in "
            f"{engine.requests / max(1, engine.at_once):.1f} waves, and the last wave waits for its longest response; "
            f"more at once: {_MORE_CACHE}, or raise rollout.sglang.max_running_requests where it is set"
        )


def _experts(request: Request, found: Sequence[StageMemory], rows: Rows) -> Iterator[Problem]:
    arch, split, gpu = request.policy.architecture, request.split, request.machines.gpu
    if arch.experts is None:
        return
    if split.etp > 1 and arch.experts.count % (split.ep * split.etp) == 0:
        yield _warning(
            f"policy.etp={split.etp} cuts experts of width {arch.experts.ffn}, and gathers each copy of a token over "
            f"{split.etp} ranks; policy.ep={split.ep * split.etp} policy.etp=1 needs as much memory for weights"
        )
    yield from _expert_engines(request)
    if gpu is not None:
        if split.transformer_engine is False:
            yield _warning(
                f"policy.transformer_engine=false copies the weights of a rank's {arch.experts.count // split.ep} "
                "experts side by side in every pass, for torch's grouped product; that is not predicted"
            )
        yield from _exchange(request, gpu, rows)
        yield from _imbalance(gpu, found)


def _expert_engines(request: Request) -> Iterator[Problem]:
    """Yield what SGLang refuses: it cuts a layer's experts over ep_size, and each of them over the rest of tp."""
    experts, engines = request.policy.architecture.experts, request.engines
    if engines is None or experts is None:
        return
    if engines.tp % engines.ep:
        yield _error(f"rollout.sglang.ep_size={engines.ep} does not divide rollout.tp={engines.tp}")
    elif experts.count % engines.ep or experts.ffn % (engines.tp // engines.ep):
        yield _error(
            f"rollout.tp={engines.tp} with rollout.sglang.ep_size={engines.ep} does not divide {experts.count} experts "
            f"of width {experts.ffn}"
        )


def _exchange(request: Request, gpu: Gpu, rows: Rows) -> Iterator[Problem]:
    split, room = request.split, request.machines.gpus_per_node
    ranks = split.ep * split.etp
    if ranks == 1:
        return
    seconds, _ = exchange_seconds(request, gpu, rows, split.experts.dispatcher)
    if ranks > room:
        yield _warning(
            f"policy.ep x etp = {ranks} crosses nodes of {room} GPUs: tokens go to their experts and back over the "
            f"network, {seconds:.0f} s of a step; lower policy.ep and raise policy.pp or tp, or dp with "
            "policy.optimizer_offload"
        )
    elif room % ranks:
        yield _warning(
            f"policy.ep x etp = {ranks} does not divide the {room} GPUs of a node; a group would cross nodes"
        )
    shorter = exchange_seconds(request, gpu, rows, "alltoall")[0]
    if split.experts.dispatcher == "allgather" and shorter < seconds:
        yield _warning(
            f"policy.experts.dispatcher=allgather exchanges tokens for {seconds:.1f} s of a step, alltoall for "
            f"{shorter:.1f} s"
        )


def _imbalance(gpu: Gpu, found: Sequence[StageMemory]) -> Iterator[Problem]:
    stage = max(found, key=lambda one: one.totals[TRAINING] + one.by_routing)
    total = stage.totals[TRAINING] + stage.by_routing
    if stage.totals[TRAINING] <= gpu.memory < total:
        yield _warning(
            f"{TRAINING}, stage {stage.stage}: {total / 1e9:.1f} GB of {gpu.memory / 1e9:.0f} GB if a rank's experts "
            "get twice as many tokens as others': lower policy.micro_batch_tokens, or set policy.recompute=selective"
        )


def _batch(request: Request, rows: Rows, bubble: float) -> Iterator[Problem]:
    batch, split = request.batch, request.split
    if batch.prompts % batch.mini_batches:
        yield _warning(
            f"data.prompts_per_step={batch.prompts} is not divisible by recipe.mini_batches={batch.mini_batches}: "
            "optimizer steps differ in size"
        )
    if batch.sequences % (split.dp * batch.mini_batches):
        yield _warning(
            f"{batch.sequences} responses are not divisible by policy.dp x recipe.mini_batches = "
            f"{split.dp * batch.mini_batches}: some ranks wait for others"
        )
    yield from _launches(request, rows)
    if bubble > _BUBBLE:
        yield _warning(
            f"pipeline ranks idle for up to {bubble:.0%} of a pass ({split.pp} stages, at least {rows.micro_batches} "
            "micro-batch(es) a rank and optimizer step): lower policy.pp or policy.micro_batch_tokens"
        )


def _launches(request: Request, rows: Rows) -> Iterator[Problem]:
    gpu, split = request.machines.gpu, request.split
    if gpu is None or rows.micro_batches == 1:
        return
    arch, flops = request.policy.architecture, gpu.flops * request.rates.mfu
    if math.isinf(flops):
        # The fit of rates (tools/calibrate_plan.py) asks for plans in which computing takes no time.
        return
    least = rows_that_hide_launches(arch, mean_context(arch, request.batch.lengths), split.tp * split.cp, flops)
    mean = _filled(request, rows)
    if mean >= least:
        return
    budget = _budget_that_fills(request, least)
    way_out = f"policy.micro_batch_tokens to {budget:,}" if budget else "data.prompts_per_step"
    yield _warning(
        f"micro-batches of {mean:,.0f} tokens: a layer's forward pass takes less time than to launch its kernels, and "
        f"the GPU waits; raise {way_out}"
    )


def _filled(request: Request, rows: Rows) -> float:
    """Packed tokens of a micro-batch on average, fewer than its budget: the last one is rarely full."""
    return rows.step / (request.split.dp * request.batch.mini_batches * rows.micro_batches)


def _budget_that_fills(request: Request, least: int) -> int | None:
    """Return a budget whose micro-batches have `least` tokens on average, or a rank's whole optimizer step in one.

    None where an interleaved pipeline cuts that in more and smaller ones whatever the budget.
    """
    budget = max(least, request.split.micro_batch_tokens)
    while True:
        rows = rows_of(
            dataclasses.replace(request, split=request.split.model_copy(update={"micro_batch_tokens": budget}))
        )
        if rows.micro_batches == 1 or _filled(request, rows) >= least:
            return budget
        if rows.micro_batches == request.layout.micro_batch_multiple:
            return None
        budget += max(1, least // 16)


def _disk(request: Request, save: Checkpoint) -> Iterator[Problem]:
    if request.machines.gpu is not None and save.seconds > _SAVE_SECONDS:
        yield _warning(
            f"a checkpoint of {save.size / 1e9:.0f} GB takes {save.seconds:.0f} s at {request.rates.disk / 1e9:g} "
            "GB/s; training waits for it, and a job that ends within a minute of its signal loses it"
        )


def _limits(
    request: Request, engine: EngineMemory | None, times: Sequence[StageTime], save: Checkpoint
) -> Iterator[Problem]:
    """Compare predicted times with the run's time limits: an error is beyond one, a warning where the range is.

    A response's limit counts from its first token, so it does not grow with the number that wait.
    """
    if request.machines.gpu is None:
        return
    predicted = {time.name: (time.seconds, time.range) for time in times}
    predicted["checkpoint"] = save.seconds, (save.seconds, _NEAR * save.seconds)
    end = "the watchdog ends the run there"
    checks = [
        (f"the {name}", *predicted[name], key, limit, end)
        for name, (key, limit) in request.limits.parts.items()
        if name in predicted
    ]
    if engine is not None:
        what = f"a response of {request.batch.lengths.response_longest:,} tokens, from its first to its last,"
        seconds, limit = longest_response_seconds(request, engine), request.limits.response
        end = "it ends there and is not trained on"
        checks.append((what, seconds, _of_engine(seconds), "rollout.request_limit_s", limit, end))
        seconds, limit = first_token_seconds(request, engine), request.limits.first_token
        what, end = "the first token of a queued response", "it is sent again, three times at most"
        checks.append((what, seconds, _of_engine(seconds), "rollout.first_token_limit_s", limit, end))
    for what, seconds, found, key, limit, consequence in checks:
        if seconds is None or found is None or limit is None or found[1] <= limit:
            continue
        text = f"{what} takes {range_text(found)} s as predicted, and {key} is {limit:g}: {consequence}; raise it"
        yield Problem("error" if seconds > limit else "warning", text, key)


def _of_engine(seconds: float | None) -> tuple[float, float] | None:
    return None if seconds is None else span("rollout", seconds)
