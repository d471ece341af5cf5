"""A plan of one layout, and a search over many: those that fit are ranked by the predicted seconds of a step.

Predictions within 5 % of each other say nothing: among such layouts the one of fewer context-parallel ranks, then of
fewer pipeline stages, is first.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import get_args

from megasharp.common.errors import UserError
from megasharp.config.policy import HeadForm, PolicyConfig, Recompute, RecomputeModule
from megasharp.planner.formulas import bubble_share
from megasharp.planner.memory import (
    ANNOTATION,
    TRAINING,
    host_bytes,
    left_while_sampling,
    ranks_of_node,
    rows_of,
    stage_memory,
    with_engine,
)
from megasharp.planner.mixtures import faults_of_layout
from megasharp.planner.records import Engines, Network, Plan, Request, StageMemory, range_text
from megasharp.planner.seconds import (
    checkpoint,
    disk_bytes,
    dlc_cost,
    engine_memory,
    step_seconds,
    step_times,
    tokens_per_second_per_gpu,
)
from megasharp.planner.transport import transport
from megasharp.planner.warnings import find_problems, needed_gpus


def make_plan(request: Request) -> Plan:
    """Apply every formula. Problems are part of the plan; nothing is raised for a run that will not work.

    Raises UserError where the networks cannot be cut as asked (`Architecture.check_parallel`).
    """
    split, gpu, networks = request.split, request.machines.gpu, request.networks
    request.policy.architecture.check_parallel(split.tp, split.pp, vpp=split.vpp, ep=split.ep, etp=split.etp)
    for network in networks:
        network.architecture.check_parallel(split.tp, split.pp, vpp=split.vpp)
        if request.engines is not None:
            network.architecture.check_parallel(request.engines.tp, 1, "rollout.")
    rows = rows_of(request)
    found = stage_memory(request, rows)
    # Engines are sized by what the learners leave, then the stages by what the engines take.
    left = _left(request, found)
    engine = engine_memory(request, left)
    if request.engines is not None and request.engines.colocated and engine is not None:
        found = [with_engine(stage, request, engine) for stage in found]
    bubble = bubble_share(split.pp, split.vpp, rows.micro_batches)
    host = host_bytes(found, request)
    gpus = needed_gpus(request)
    ranks, held = ranks_of_node(request), max(stage.optimizer_on_host for stage in found)
    reference = max(stage.reference_on_host for stage in found)
    times = step_times(request, rows, engine, host // ranks, held, reference)
    seconds = step_seconds(request, times)
    save = checkpoint(request)
    return Plan(
        name=request.name,
        world=request.layout.world,
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
        disk=disk_bytes(request, save),
        host=host + ranks * (held + reference),
        dlc=dlc_cost(request, engine, left),
        transport=transport(request, rows),
        problems=find_problems(request, found, engine, rows, bubble, save, times),
    )


def _left(request: Request, found: Sequence[StageMemory]) -> int:
    """Return the bytes that learners leave on a GPU while co-located engines sample, at most."""
    if request.engines is None or not request.engines.colocated:
        return 0
    return max(left_while_sampling(stage, request, request.split.offload) for stage in found)


_SIZES = (1, 2, 4, 8)
# Budgets of a micro-batch in multiples of the longest sequence, rounded up to whole thousands (of 1,024).
_BUDGETS = (1, 2, 4)
# Co-located engines get what is left, in steps of this share, and this much is kept free; of a GPU whose learners
# compute more, because fragmentation is only assumed.
_FRACTION, _FREE, _LEARNERS_FREE = 0.05, 0.03, 0.10
# Of the learners, while co-located engines sample.
_OFFLOAD = ("weights", "gradients", "optimizer")
# Parts into which experts are cut: within a node first, as large as a few nodes.
_EXPERT_SIZES = (*_SIZES, 16, 32)
# Predictions closer than by this factor say nothing.
_EQUAL = 1.05

Value = int | float | str | list[str]


@dataclass(frozen=True, slots=True)
class Alternative:
    """A layout with another way to save memory. `learning`: most bytes of a GPU while learners compute.

    `range`: that of a step's seconds.
    """

    recompute: Recompute
    head: HeadForm
    learning: int
    seconds: float | None
    range: tuple[float, float] | None
    fits: bool


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A layout that fits: the keys to set, what was planned and its plan, and why it is here.

    `alternatives` are all settings of recompute and head with this layout, its own among them.
    """

    request: Request
    keys: dict[str, Value]
    plan: Plan
    reasons: tuple[str, ...]
    alternatives: tuple[Alternative, ...]


def suggest(request: Request, count: int = 3, *, share_out: bool = False) -> list[Suggestion]:
    """Find the `count` best layouts that fit into the request's machines, each of another tp x pp x cp.

    They are ordered by seconds of a step in classes of 5 %, the simplest of a class first. Engines on GPUs of their own
    keep as many as they have; with `share_out` quarters of all are tried for them.

    Raises UserError where nothing fits, or the run is not on GPUs or has no engines.
    """
    if request.machines.gpu is None or not request.machines.gpus_per_node:
        raise UserError("--suggest ranks layouts on GPUs: give --nodes and --gpu, or cluster.gpus_per_node in the file")
    if request.engines is None:
        raise UserError("--suggest ranks layouts by whole steps, with engines of their own: set rollout.engine=sglang")
    fitting = [(plan.step_seconds or 0.0, candidate, plan) for candidate, plan in _plans(request, share_out)]
    if not fitting:
        there = f"{request.machines.nodes} node(s) of {request.machines.gpus_per_node} GPUs"
        raise UserError(f"--suggest found no layout that fits {there}; give it more nodes, or shorter responses")
    fastest = min(seconds for seconds, _, _ in fitting)

    def order(item: tuple[float, Request, Plan]) -> tuple[float, ...]:
        seconds, split = item[0], item[1].split
        # Within a class of 5 % the simplest comes first: no context parallel, then no pipeline, then fewer parts of
        # experts.
        return int(math.log(seconds / fastest) / math.log(_EQUAL)), split.cp, split.pp, split.ep, seconds

    fitting.sort(key=order)
    best: dict[tuple[int, int, int], tuple[Request, Plan]] = {}
    for _, candidate, plan in fitting:
        split = candidate.split
        best.setdefault((split.tp, split.pp, split.cp), (candidate, plan))
    chosen = list(best.values())[:count]
    first = chosen[0][1].step_seconds or 1.0
    return [
        Suggestion(one, _keys(one, request), plan, _reasons(one, plan, first), _alternatives(one))
        for one, plan in chosen
    ]


def changes(plan: Plan, own: Plan) -> dict[str, float]:
    """Return by how many seconds the parts of a step differ from the file's own, the largest change first.

    The rollout follows from `rollout.*`, `annotate` and `update` from `policy.*`. A part that one of the two does not
    have, such as `offload`, takes no time there.
    """
    after, before = ({time.name: time.seconds or 0.0 for time in each.times} for each in (plan, own))
    changes = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in after | before}
    return dict(sorted(changes.items(), key=lambda item: -abs(item[1])))


def gains(plan: Plan, own: Plan) -> Iterator[str]:
    """Yield the changes of a step's parts that are 1 % of the file's own step or more."""
    least = 0.01 * (own.step_seconds or 0.0)
    parts = [
        f"{name} {by:{'+.0f' if abs(by) >= 10 else '+.2g'}} s"
        for name, by in changes(plan, own).items()
        if abs(by) >= least > 0.0
    ]
    if parts:
        yield f"beside the file's own: {', '.join(parts)}"


def doubts(found: Sequence[Suggestion], own: Plan) -> Iterator[str]:
    """Yield which layouts are not known to be slower than the first, because their ranges have seconds in common."""
    others = {"file": own, **{str(number): one.plan for number, one in enumerate(found[1:], 2)}}
    first = found[0].plan.step_range if found else None
    ranges = [(label, plan.step_range) for label, plan in others.items()]
    near = [label for label, two in ranges if first and two and first[0] <= two[1] and two[0] <= first[1]]
    if near:
        yield f"the range of 1 overlaps with {', '.join(near)}: measure some steps of each before you choose"


def _fits(plan: Plan) -> bool:
    memory = plan.gpu_memory or 0
    return plan.works and plan.fullest <= (1 - _FREE) * memory and _learners_fit(plan.stages, memory)


def _learners_fit(stages: Sequence[StageMemory], memory: int) -> bool:
    if any(stage.totals[TRAINING] + stage.by_routing > memory for stage in stages):
        return False
    return _learning(stages) <= (1 - _LEARNERS_FREE) * memory


def _learning(stages: Sequence[StageMemory]) -> int:
    """Return the most bytes of a GPU while learners compute."""
    return max(stage.totals.get(phase, 0) for stage in stages for phase in (TRAINING, ANNOTATION))


def _alternatives(request: Request) -> tuple[Alternative, ...]:
    found = []
    for recompute, head in product(get_args(Recompute), get_args(HeadForm)):
        split = _saving(request.split, request.split.recompute_modules, recompute, head)
        plan = make_plan(dataclasses.replace(request, split=split))
        found.append(
            Alternative(recompute, head, _learning(plan.stages), plan.step_seconds, plan.step_range, _fits(plan))
        )
    return tuple(found)


def _plans(request: Request, share_out: bool) -> Iterator[tuple[Request, Plan]]:
    machines, engines = request.machines, request.engines
    gpus, memory = machines.nodes * machines.gpus_per_node, int(machines.gpu.memory) if machines.gpu else 0
    # GPUs of the policy and of the engines; co-located ones have the same.
    shares = [(gpus, gpus)]
    if engines is not None and not engines.colocated:
        quarters = [gpus * quarter // 4 for quarter in (1, 2, 3)]
        of_engines = quarters if share_out else [engines.count * engines.tp]
        shares = [(gpus - apart, apart) for apart in of_engines if 0 < apart < gpus]
    for policy, apart in shares:
        of_size = [*_engines(request, apart)]
        for split in _splits(request, policy):
            alone = dataclasses.replace(request, split=split)
            found = stage_memory(alone, rows_of(alone))
            # Engines beside them only take more.
            if not _learners_fit(found, memory):
                continue
            for engines in of_size:
                candidate = _with_fitting_cache(dataclasses.replace(alone, engines=engines), found)
                plan = make_plan(candidate)
                if _fits(plan):
                    yield candidate, plan


def _with_fitting_cache(request: Request, found: Sequence[StageMemory]) -> Request:
    """Give co-located engines the largest cache that fits beside what the learners leave."""
    engine = engine_memory(request, _left(request, found))
    if engine is None or request.engines is None or not request.engines.colocated:
        return request
    room = (engine.largest_fraction or 0.0) - _FREE
    fraction = round(int(room / _FRACTION) * _FRACTION, 2)
    if fraction <= 0.0:
        return request
    engines = dataclasses.replace(request.engines, memory_fraction=min(fraction, 0.9))
    return dataclasses.replace(request, engines=engines)


def _splits(request: Request, gpus: int) -> Iterator[PolicyConfig]:
    machines, networks = request.machines, request.networks
    longest = request.batch.lengths.longest
    budgets = {-(-longest * times // 1024) * 1024 for times in _BUDGETS}
    for tp, pp, cp in product(_SIZES, _SIZES, (1, 2, 4)):
        if tp > machines.gpus_per_node or machines.gpus_per_node % tp or gpus % (tp * pp * cp):
            continue
        if not all(_can_cut(network, tp, pp) for network in networks):
            continue
        keys = {"dp": gpus // (tp * pp * cp), "tp": tp, "pp": pp, "cp": cp, "vpp": 1, "offload": list(_OFFLOAD)}
        parts = _expert_parts(request, gpus // pp)
        for ep, budget, recompute, head in product(parts, sorted(budgets), get_args(Recompute), get_args(HeadForm)):
            split = request.split.model_copy(update=keys | {"ep": ep, "etp": 1, "micro_batch_tokens": budget})
            candidate = _saving(split, request.split.recompute_modules, recompute, head)
            if request.policy.architecture.experts is None or next(faults_of_layout(candidate), None) is None:
                yield candidate


def _expert_parts(request: Request, ranks: int) -> tuple[int, ...]:
    """Numbers of parts into which a stage's `ranks` may cut the policy's experts: within a node, or of whole nodes."""
    experts, room = request.policy.architecture.experts, request.machines.gpus_per_node
    if experts is None:
        return (1,)
    fitting = (size for size in _EXPERT_SIZES if experts.count % size == 0 and ranks % size == 0)
    return tuple(size for size in fitting if room % size == 0 or size % room == 0)


def _saving(split: PolicyConfig, modules: list[RecomputeModule], recompute: Recompute, head: HeadForm) -> PolicyConfig:
    """Set recompute and head; modules, which are refused where they have no effect, with selective only."""
    default: list[RecomputeModule] = PolicyConfig.model_fields["recompute_modules"].default
    modules = modules if recompute == "selective" else default
    return split.model_copy(update={"recompute": recompute, "recompute_modules": modules, "head": head})


def _engines(request: Request, gpus: int) -> Iterator[Engines | None]:
    engines, machines = request.engines, request.machines
    if engines is None:
        yield None
        return
    for tp in _SIZES:
        fits = machines.gpus_per_node % tp == 0 and gpus % tp == 0 and tp % engines.ep == 0
        if fits and all(_can_cut(network, tp, 1) for network in request.networks):
            yield dataclasses.replace(engines, tp=tp, count=gpus // tp)


def _can_cut(network: Network, tp: int, pp: int) -> bool:
    arch = network.architecture
    ffn = arch.experts.ffn if arch.experts else arch.ffn
    return not any(size % tp for size in (arch.heads, arch.kv_heads, ffn)) and arch.num_layers % pp == 0


def _keys(request: Request, asked: Request) -> dict[str, Value]:
    split, engines = request.split, request.engines
    keys: dict[str, Value] = {
        "policy.tp": split.tp,
        "policy.pp": split.pp,
        "policy.vpp": split.vpp,
        "policy.cp": split.cp,
        "policy.dp": split.dp,
        **({"policy.ep": split.ep, "policy.etp": split.etp} if request.policy.architecture.experts else {}),
        "policy.micro_batch_tokens": split.micro_batch_tokens,
        "policy.recompute": split.recompute,
        "policy.head": split.head,
    }
    if split.recompute_modules != asked.split.recompute_modules:
        keys["policy.recompute_modules"] = list(split.recompute_modules)
    if engines is not None:
        keys |= {"rollout.engines": engines.count, "rollout.tp": engines.tp}
        if engines.colocated:
            keys["policy.offload"] = list(split.offload)
            keys["rollout.sglang.mem_fraction_static"] = engines.memory_fraction or 0.0
    return keys


def _reasons(request: Request, plan: Plan, first: float) -> tuple[str, ...]:
    split, seconds = request.split, plan.step_seconds or 0.0
    compared = f", {abs(seconds / first - 1):.0%} {'more' if seconds > first else 'less'} than the first"
    reasons = [f"{range_text(plan.step_range)} s a step" + (compared if seconds != first else "")]
    if split.ep > 1:
        where = "inside a node" if split.ep <= request.machines.gpus_per_node else "over several nodes"
        reasons.append(f"experts in {split.ep} parts {where}")
    reasons.append(
        "no pipeline, so no bubble" if split.pp == 1 else f"{split.pp} pipeline stages idle {plan.bubble:.0%} of a pass"
    )
    spare = (plan.gpu_memory or 0) - plan.fullest
    reasons.append(f"{spare / 1e9:.0f} GB of each GPU to spare at the fullest moment")
    if plan.engine is not None:
        reasons.append(
            f"an engine's cache holds {plan.engine.sequences_mean} responses in progress, {plan.engine.at_once} of "
            f"{plan.engine.requests:.0f} at once"
        )
    return tuple(reasons)
