"""`megasharp plan`: turns a run file, which need not be able to start here, into the planner's request, and answers it.

The planner's parameter counts are compared with Megatron's own model of every pipeline stage, which a process beside
this one builds without memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from megasharp.algos.base import OldLogp
from megasharp.common.errors import NotAtHand, RunFailed, UserError
from megasharp.common.layout import ParallelLayout
from megasharp.common.records import as_dtype
from megasharp.config.core import PRESETS, find
from megasharp.config.hub import cached_model, is_hub_id, model_place
from megasharp.config.run_config import RunConfig
from megasharp.convert.hf_folder import read_config
from megasharp.convert.model_folder import CONFIG_FILE, model_folder
from megasharp.evals.keeping import expected_bytes
from megasharp.planner.formulas import Lengths
from megasharp.planner.memory import stages
from megasharp.planner.mixtures import replay_bytes_per_token
from megasharp.planner.records import (
    DEFAULT,
    Batch,
    Engines,
    Kept,
    Limits,
    Machines,
    Network,
    Passes,
    Problem,
    Rates,
    Request,
    find_gpu,
)
from megasharp.planner.suggest import make_plan, suggest
from megasharp.planner.text import plan_text, plan_tree, suggestions_text
from megasharp.planner.transport import store_bytes
from megasharp.rollout.sglang.client.admission import limits_of
from megasharp.tasks.problems import task_of
from megasharp.trainer.resolve import engine_python
from megasharp.trainer.resolve.derived import derived
from megasharp.trainer.resolve.devices import asks_for_gpus
from megasharp.trainer.resolve.engine_settings import check_engine_keys, choose_transport
from megasharp.trainer.resolve.experts_choice import check_experts
from megasharp.trainer.resolve.models import memory_path
from megasharp.trainer.resolve.recipes import build_recipes, correction_notes
from megasharp.trainer.resolve.resolved_run import check_precision_keys
from megasharp.trainer.resolve.summary import environment_notes
from megasharp.trainer.reward_judge import check_functions

if TYPE_CHECKING:
    from megasharp.config.policy import LoraConfig
    from megasharp.convert.architecture import Architecture


# The counting process has that long; importing Megatron takes most of it.
_SECONDS = 300


class ModelCheck:
    """The process that counts parameters: it starts when this is made and ends with the `with` block.

    Call `ask` once; `counts` then waits for the answer.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "megasharp.learner.meta_program"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        with self._process:
            self._process.kill()

    def ask(self, networks: Sequence[Architecture], layout: ParallelLayout, lora: LoraConfig | None) -> None:
        """Have the parameters of these networks counted; `lora`: adapters of the first."""
        assert self._process.stdin is not None
        # A process that has ended says why in `counts`.
        with contextlib.suppress(BrokenPipeError), self._process.stdin as question:
            pickle.dump((tuple(networks), layout, lora), question)
        self._process.stdin = None

    def counts(self) -> list[list[int]]:
        """Parameters by network and stage. Raises UserError with Megatron's own words where it cannot be built."""
        try:
            out, errors = self._process.communicate(timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            raise RunFailed(f"Megatron's model was not built in {_SECONDS} s") from None
        if self._process.returncode < 0:
            # Nothing is wrong with the model: the out-of-memory killer, say, took the process.
            raise RunFailed(f"the process that counts parameters was ended by signal {-self._process.returncode}")
        if self._process.returncode:
            last = (errors.decode().strip().splitlines() or ["it said nothing"])[-1]
            raise UserError(f"Megatron cannot build this model in this layout: {last}")
        found: list[list[int]] = json.loads(out.strip().splitlines()[-1])
        return found


SHIPPED_MODELS = PRESETS / "model"
_GPUS_PER_NODE = 8


@dataclass(frozen=True, slots=True)
class Options:
    """The options of the command line; None keeps the run file's value, or the planner's default."""

    nodes: int | None = None
    gpu: str | None = None
    mfu: float | None = None
    response: int | None = None
    disk_gb: float | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, and a line for each value that was derived or replaced."""

    request: Request
    notes: tuple[str, ...]


class NotFilled(UserError):
    """A file's layout cannot fill the nodes that were given."""


def _check_sets(config: RunConfig, where: str) -> None:
    """Raise UserError for a set that there is not; no row is read."""
    for source in config.data.sources:
        try:
            task_of(source)
        except UserError as error:
            raise UserError(f"{where}: data.{error}") from None


def ask(config: RunConfig, where: str, options: Options, *, fill: bool = True) -> Asked:
    """Return the planner's request for a run; without `fill`, --nodes are its machines whatever its layout fills.

    Raises:
        NotFilled: the layout cannot fill them.
        UserError: a model is not known, or keys contradict.
    """
    _check_sets(config, where)
    policy, notes = _network(config.model.path, config.model.revision, where)
    if options.gpu is not None and config.policy.device == "auto":
        config = config.model_copy(update={"policy": config.policy.model_copy(update={"device": "cuda"})})
    config, clauses = derived(config, policy.architecture, (), options.gpu)
    notes += [f"derived: {clause}" for clause in clauses]
    recipes = build_recipes(config, where)
    needs = recipes.needs
    _check_cut(config, policy)
    memory = None
    if needs.memory is not None:
        network = needs.memory.network
        memory, its_notes = _network(memory_path(network.path), network.revision, where)
        notes += its_notes
        _check_cut(config, memory, of_policy=False)
        if memory.architecture.vocab != policy.architecture.vocab:
            raise UserError(
                f"{where}: the memory network {memory.name} has a vocabulary of {memory.architecture.vocab} tokens, "
                f"the policy {policy.name} one of {policy.architecture.vocab}; they must be the same"
            )
    config, changed = _fill_nodes(config, where, options) if fill else (_on_nodes(config, options), [])
    notes += changed
    if fill:
        policy.architecture.check_layout(config.policy.layout)
    check_precision_keys(config, policy.architecture, where)
    check_experts(config, policy.architecture, where, here=False)
    check_engine_keys(config, where)
    if config.data.stages:
        notes.append(f"data.stages: planned for the largest limit, {config.data.largest_response} tokens a response")
    if config.policy.fp8:
        notes.append("policy.fp8: predicted as in bfloat16, times too")
    notes += correction_notes(config, recipes)
    before = [recipe.annotation for recipe in recipes.all]
    passes = Passes(
        methods=tuple(config.recipe.methods),
        old_logp=config.guard.engine_gap_filter is not None
        or any(annotation.old_logp is not OldLogp.NONE or annotation.old_entropy for annotation in before),
        reference=needs.ref_logp,
        memory_steps=needs.memory.network.steps if needs.memory else 1,
        replay=needs.memory.network.replay if needs.memory else 0,
    )
    request = _request(config, where, options, passes, policy, memory)
    window = needs.memory.window if needs.memory is not None else None
    return Asked(dataclasses.replace(request, memory_window=window), tuple(notes))


def _network(path: str, revision: str | None, where: str) -> tuple[Network, list[str]]:
    """Read a model's sizes: of its folder or the hub's cache, else with a note of the shipped config of that name.

    A model of the hub that neither has is asked for.
    """
    folder, notes = model_folder(find(path)).description, []
    shipped = SHIPPED_MODELS / Path(path).name.lower()
    known = ", ".join(sorted(config.parent.name for config in SHIPPED_MODELS.glob(f"*/{CONFIG_FILE}")))
    if not folder.exists() and is_hub_id(path):
        folder = cached_model(path, revision) or folder
        if not folder.exists() and not (shipped / CONFIG_FILE).is_file():
            try:
                folder = model_place(path, revision, weights=False)
            except NotAtHand as absent:
                raise NotAtHand(f"{where}: {absent}; configs/model has none of that name: {known}") from None
    if not (folder / CONFIG_FILE).is_file():
        folder = shipped
        notes.append(f"{path} is not a folder here: its sizes are those of configs/model/{folder.name}")
    if not (folder / CONFIG_FILE).is_file():
        raise UserError(
            f"{where}: {path} is no folder with a {CONFIG_FILE}, and configs/model has none of that name: {known}"
        )
    _, family, architecture = read_config(folder)
    return Network(Path(path).name, family, architecture), notes


def _check_cut(config: RunConfig, network: Network, *, of_policy: bool = True) -> None:
    """Refuse a layout that cannot cut this model, before nodes are filled: more GPUs would not help.

    A dense memory network has no part in the layout of the policy's experts.
    """
    architecture, policy = network.architecture, config.policy
    ep, etp = (policy.ep, policy.etp) if of_policy or architecture.experts else (1, 1)
    architecture.check_parallel(policy.tp, policy.pp, vpp=policy.vpp, ep=ep, etp=etp)
    if config.rollout.engine == "sglang":
        architecture.check_parallel(config.rollout.tp, 1, "rollout.")


def _fill_nodes(config: RunConfig, where: str, options: Options) -> tuple[RunConfig, list[str]]:
    """Set data-parallel ranks and engines so that they fill --nodes; without --nodes, keep the file as it is."""
    cluster = config.cluster
    if options.nodes is None:
        return config, []
    room = cluster.gpus_per_node or _GPUS_PER_NODE
    notes = [] if cluster.gpus_per_node else [f"cluster.gpus_per_node is not set: {room} are assumed"]
    policy, rollout = config.policy, config.rollout
    model_ranks, gpus = policy.tp * policy.pp * policy.cp, options.nodes * room
    if cluster.placement == "colocated" or rollout.engine == "inprocess":
        if gpus % model_ranks or gpus % rollout.tp:
            raise NotFilled(
                f"{where}: {gpus} GPUs cannot be filled with policy.tp x pp x cp = {model_ranks} and rollout.tp = "
                f"{rollout.tp}: both must divide {gpus}, or give another --nodes"
            )
        dp, engines = gpus // model_ranks, gpus // rollout.tp
    else:
        dp, engines = _shared_out(config, where, gpus)
    if dp != policy.dp:
        notes.append(f"policy.dp={dp} fills {options.nodes} node(s) of {room} GPUs (the file says {policy.dp})")
    if rollout.engine == "sglang" and engines != rollout.engines:
        notes.append(f"rollout.engines={engines} fill them (the file says {rollout.engines})")
    return _on_nodes(config, options).model_copy(
        update={
            "policy": policy.model_copy(update={"dp": dp}),
            "rollout": rollout.model_copy(update={"engines": engines} if rollout.engine == "sglang" else {}),
        }
    ), notes


def _on_nodes(config: RunConfig, options: Options) -> RunConfig:
    room = config.cluster.gpus_per_node or _GPUS_PER_NODE
    cluster = config.cluster.model_copy(update={"nodes": options.nodes, "gpus_per_node": room})
    return config.model_copy(update={"cluster": cluster})


def _shared_out(config: RunConfig, where: str, gpus: int) -> tuple[int, int]:
    """Return data-parallel ranks and engines that fill `gpus` GPUs in about the file's own proportion.

    They do not share GPUs. Of several numbers equally close, the fewest ranks.
    """
    policy, rollout = config.policy, config.rollout
    ranks = policy.tp * policy.pp * policy.cp
    share = policy.dp * ranks / (policy.dp * ranks + rollout.engines * rollout.tp)
    filling = [dp for dp in range(1, -(-gpus // ranks)) if (gpus - dp * ranks) % rollout.tp == 0]
    if not filling:
        raise NotFilled(
            f"{where}: {gpus} GPUs cannot be filled with policy.tp x pp x cp = {ranks} and engines of their own of "
            f"rollout.tp = {rollout.tp}; change one of them, or give another --nodes"
        )
    dp = min(filling, key=lambda dp: abs(dp * ranks - share * gpus))
    return dp, (gpus - dp * ranks) // rollout.tp


def _request(
    config: RunConfig, where: str, options: Options, passes: Passes, policy: Network, memory: Network | None
) -> Request:
    on_gpu = options.gpu is not None or asks_for_gpus(config)
    default = Rates()
    largest = config.data.largest_response
    # Half of the limit stands for the mean where --response does not give it.
    mean = options.response or largest / 2
    if mean > largest:
        raise UserError(f"{where}: --response {mean} is more than data.max_response_tokens={largest}")
    return Request(
        name=config.name,
        policy=policy,
        memory=memory,
        width=as_dtype(config.model.dtype).itemsize,
        split=config.policy,
        batch=_batch(config, mean),
        passes=passes,
        engines=_engines(config, where),
        machines=Machines(
            nodes=config.cluster.nodes,
            gpus_per_node=config.cluster.gpus_per_node or (_GPUS_PER_NODE if on_gpu else 0),
            gpu=find_gpu(options.gpu or DEFAULT) if on_gpu else None,
        ),
        rates=dataclasses.replace(
            default,
            mfu=options.mfu or default.mfu,
            logp_mfu=options.mfu or default.logp_mfu,
            disk=options.disk_gb * 1e9 if options.disk_gb else default.disk,
        ),
        kept=_kept(config),
        limits=_limits(config),
        longest_evaluated=config.eval.max_response_tokens or 0,
    )


def _batch(config: RunConfig, mean: float) -> Batch:
    """Return a step's batch with responses of `mean` tokens."""
    data = config.data
    return Batch(
        prompts=data.prompts_per_step,
        responses=data.largest_group,
        mini_batches=config.recipe.mini_batches,
        oversample=config.rollout.oversample,
        lengths=Lengths(data.max_prompt_tokens / 2, data.max_prompt_tokens, mean, data.largest_response),
    )


def ray_store_bytes(config: RunConfig) -> int:
    """Return the bytes that Ray's object store needs on a node for this run's batches and streamed weights."""
    route = 0
    if config.policy.experts.replay:
        network, _ = _network(config.model.path, config.model.revision, config.name)
        route = replay_bytes_per_token(network.architecture)
    return store_bytes(_batch(config, config.data.largest_response), config.policy.layout, route)


def _limits(config: RunConfig) -> Limits:
    """Return the limits of the parts of a step by the stages of the watchdog in which they run."""
    guard = config.guard
    of_any = ("guard.stage_timeout_s", guard.stage_timeout_s)
    long_stages = {
        name: (f"guard.long_stages.{name}", seconds)
        for name, seconds in guard.long_stages.model_dump().items()
        if name in ("rollout", "checkpoint")
    }
    parts = dict.fromkeys(("annotate", "update", "memory", "sync"), of_any)
    limits = limits_of(config.rollout)
    return Limits(limits.response_s, limits.first_token_s, parts | long_stages)


def _kept(config: RunConfig) -> Kept:
    """Count the files that retention leaves at the run's end."""
    steps, save, tables = config.steps, config.checkpoint, config.log.rollouts
    saved = sorted({*range(save.every, steps + 1, save.every), steps})
    kept = set(saved[-save.keep_last :]) | {step for step in saved if save.keep_every and step % save.keep_every == 0}
    # The best step may have a checkpoint beyond the schedule; the oldest goes when the newest is complete.
    best = save.keep_best is not None
    done = range(1, steps + 1)
    return Kept(
        steps=steps,
        every=save.every,
        checkpoints=min(len(saved), len(kept) + 1) + best,
        export_hf=save.export_hf,
        tables=sum(tables.keeps(step, steps) for step in done) if tables else 0,
        token_tables=sum(tables.keeps_tokens(step, steps) for step in done) if tables and tables.tokens else 0,
        tokens=tables.tokens if tables else 0,
        tensorboard=config.log.tensorboard,
        samples=_samples_of_a_problem(config),
        samples_bound=config.eval.keep_mb << 20,
    )


def _samples_of_a_problem(config: RunConfig) -> int:
    """Return the bytes that the samples of one problem take in all evaluations of the run, at most."""
    asked = config.eval
    if not asked.suites:
        return 0
    longest = asked.max_response_tokens or config.data.largest_response
    each = expected_bytes(asked.n + 1, longest, asked.keep)
    return evaluations_of(config) * (1 + asked.with_memory) * each


def evaluations_of(config: RunConfig) -> int:
    """Return how many times a run is evaluated on all of its suites."""
    asked = config.eval
    scheduled = range(asked.every, config.steps + 1, asked.every) if asked.every else ()
    return len({*scheduled, config.steps, *([0] if asked.at_start else [])})


def _engines(config: RunConfig, where: str) -> Engines | None:
    rollout, flags = config.rollout, config.rollout.sglang
    if rollout.engine == "inprocess":
        return None

    def number(name: str) -> int | None:
        value = flags.get(name)
        return value if isinstance(value, int) and value > 0 else None

    fraction = flags.get("mem_fraction_static")
    apart = config.cluster.placement == "disaggregated"
    return Engines(
        count=rollout.engines,
        external=len(rollout.external),
        tp=rollout.tp,
        colocated=not apart,
        transport=choose_transport(config, where),
        overlap=apart and rollout.max_staleness > 0,
        memory_fraction=float(fraction) if isinstance(fraction, int | float) else None,
        most_requests=number("max_running_requests"),
        pool_tokens=number("max_total_tokens"),
        chunk=number("chunked_prefill_size"),
        ep=number("ep_size") or 1,
        overlap_annotation=rollout.overlap_annotation,
    )


def limits_that_bite(config: RunConfig, where: str) -> list[str]:
    """Say which time limits the run would meet by its plan, a line each; nothing is predicted on CPUs.

    Raises UserError for what `ask` refuses.
    """
    if not asks_for_gpus(config):
        return []
    return [problem.text for problem in make_plan(ask(config, where, Options()).request).problems if problem.limit]


def described_without(config: RunConfig, where: str, absent: UserError) -> list[str]:
    """Describe a run whose model or data are not at hand, as far as config.json tells, a line each.

    Raises UserError for what `ask` refuses, such as a model of which nothing is known here, for a reward function that
    cannot be imported, and for an engines' Python whose packages do not serve.
    """
    check_functions(config, where)
    asked = ask(config, where, Options())
    architecture, split = asked.request.policy.architecture, asked.request.split
    return [
        f"model      {architecture.family}, {architecture.parameter_count():,} parameters",
        f"policy     dp {split.dp} x tp {split.tp} x pp {split.pp} x cp {split.cp}"
        + (f", experts ep {split.ep} x etp {split.etp}" if architecture.experts else ""),
        *engine_python.described(config),
        *(f"note       {note}" for note in (*asked.notes, *environment_notes(config, asked.request.layout))),
        *(f"limit      {text}" for text in limits_that_bite(config, where)),
        f"not checked: {_unchecked(config)}, for {absent}",
    ]


def _unchecked(config: RunConfig) -> str:
    """Check the engines' Python, which needs no model, and name what is left."""
    if not engine_python.starts_engines(config):
        return "weights, tokenizer, prompts and suites"
    python = engine_python.engine_python(config)
    if not (python.found and python.path.is_file()):
        # It may be only the nodes', or their image's.
        return "weights, tokenizer, prompts, suites, and the engines' packages and flags (their Python is not here)"
    engine_python.check_packages(config)
    return "weights, tokenizer, prompts, suites and the engines' flags"


def formula_counts(asked: Asked) -> list[list[int]]:
    """Return the parameters by network and stage that the families' tables give, to compare with Megatron's own."""
    layout, memory = asked.request.layout, asked.request.memory
    found = [stages(asked.request.policy, layout, asked.request.lora)]
    found += [stages(memory, layout)] if memory else []
    return [[stage.parameters for stage in one] for one in found]


@dataclass(frozen=True, slots=True)
class Answer:
    """A plan as text, and whether the run would work."""

    text: str
    works: bool


def plan_run(
    config: RunConfig, where: str, options: Options, check: ModelCheck, *, as_json: bool, suggestions: bool
) -> Answer:
    """Plan a run, and compare the parameters that `check` counts with the tables'. Raises UserError in one line.

    Where its layout cannot fill the nodes, the first suggestion is planned instead, with the error as a problem.
    """
    try:
        asked = ask(config, where, options)
    except NotFilled as error:
        if not suggestions:
            raise
        asked = ask(config, where, options, fill=False)
        found = suggest(asked.request, share_out=True)
        asked = dataclasses.replace(asked, request=found[0].request)
        unfilled = [Problem("error", f"{error}; planned is the first of the layouts that --suggest found")]
    else:
        found = suggest(asked.request) if suggestions else []
        unfilled = []
    request = asked.request
    networks = [network.architecture for network in (request.policy, request.memory) if network is not None]
    check.ask(networks, request.layout, request.lora)
    plan = make_plan(request)
    plan = dataclasses.replace(plan, problems=(*unfilled, *plan.problems))
    compare(check.counts(), formula_counts(asked))
    if as_json:
        return Answer(json.dumps(plan_tree(request, plan, asked.notes, found), indent=2, allow_nan=False), plan.works)
    parts = [plan_text(request, plan, asked.notes)]
    if suggestions:
        parts.append(suggestions_text(found, plan))
    return Answer("\n\n".join(parts), plan.works)


def compare(built: list[list[int]], table: list[list[int]]) -> None:
    """Raise UserError for the first stage whose real model differs from the family's table."""
    for of_built, of_table in zip(built, table, strict=True):
        for stage, (there, expected) in enumerate(zip(of_built, of_table, strict=True)):
            if there != expected:
                raise UserError(
                    f"stage {stage}: Megatron's model has {there:,} parameters on its first rank, the family's table "
                    f"{expected:,}: please report this"
                )
