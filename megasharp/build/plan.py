"""`megasharp plan`: a run file, which need not be able to start here, to the planner's request, and its answer."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from megasharp.algos.base import OldLogp
from megasharp.build.adapters import lora_settings
from megasharp.build.engines import choose_transport, device_of
from megasharp.build.recipes import build_recipes
from megasharp.config.paths import REPOSITORY, find
from megasharp.config.run import RunConfig
from megasharp.config.unbuilt import unbuilt
from megasharp.convert.hf_folder import read_config
from megasharp.convert.weight_files import CONFIG_FILE
from megasharp.errors import UserError
from megasharp.plan.formulas import Lengths
from megasharp.plan.hardware import DEFAULT, find_gpu
from megasharp.plan.make import make_plan
from megasharp.plan.request import Batch, Engines, Machines, Network, Passes, Rates, Request, Split
from megasharp.plan.result import Plan
from megasharp.plan.shares import stages
from megasharp.plan.suggest import Suggestion, suggest
from megasharp.plan.text import plan_text, suggestions_text
from megasharp.types import as_dtype

SHIPPED = REPOSITORY / "configs" / "model"
_GPUS_PER_NODE = 8
# Megatron's import is most of it.
_MODEL_SECONDS = 300
# Of what `--json` prints.
UNITS = {
    "sizes": "bytes of one GPU (or CPU rank); checkpoint.size of all ranks together, host of a node",
    "seconds": "seconds",
    "lengths": "tokens",
    "rates": "shares of the data sheet; disk in bytes per second",
    "parameters": "numbers; in stages, of one rank",
}


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line adds to a run file: None leaves the file's, or the planner's default."""

    nodes: int | None = None
    gpu: str | None = None
    mfu: float | None = None
    response: int | None = None
    disk_gb: float | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, the folders its networks were read from, and what was derived or replaced on the way, a line each."""

    request: Request
    folders: tuple[Path, ...]
    notes: tuple[str, ...]


def ask(config: RunConfig, where: str, options: Options) -> Asked:
    """The planner's request for a run. Raises UserError for a model that is not known, and for keys that contradict."""
    recipes = build_recipes(config, where)
    needs = recipes.needs
    policy, policy_folder = _network(config.model.path, where)
    _check_cut(config, policy)
    folders = [policy_folder]
    memory = None
    if needs.memory is not None:
        memory, memory_folder = _network(needs.memory.path, where)
        _check_cut(config, memory)
        folders.append(memory_folder)
        if memory.architecture.vocab != policy.architecture.vocab:
            raise UserError(
                f"{where}: the memory network {memory.name} has a vocabulary of {memory.architecture.vocab} tokens, "
                f"the policy {policy.name} one of {policy.architecture.vocab}; they must be the same"
            )
    config, notes = _fill_nodes(config, where, options)
    for folder, path in zip(folders, (config.model.path, needs.memory.path if needs.memory else ""), strict=False):
        if folder.parent == SHIPPED and not (find(path) / CONFIG_FILE).is_file():
            notes.append(f"{path} is not a folder here: its sizes are those of configs/model/{folder.name}")
    notes += [f"{key} is not built yet: the run cannot start" for key in unbuilt(config)]
    before = [recipe.annotation for recipe in recipes.all]
    passes = Passes(
        methods=tuple(config.recipe.methods),
        old_logp=any(annotation.old_logp is not OldLogp.NONE or annotation.old_entropy for annotation in before),
        reference=needs.ref_logp,
    )
    return Asked(_request(config, where, options, passes, policy, memory), tuple(folders), tuple(notes))


def _network(path: str, where: str) -> tuple[Network, Path]:
    """From the folder, or where there is none from the shipped config of that name."""
    folder = find(path)
    if not (folder / CONFIG_FILE).is_file():
        folder = SHIPPED / Path(path).name.lower()
    if not (folder / CONFIG_FILE).is_file():
        known = ", ".join(sorted(config.parent.name for config in SHIPPED.glob(f"*/{CONFIG_FILE}")))
        raise UserError(
            f"{where}: {path} is no folder with a {CONFIG_FILE}, and configs/model has none of that name: {known}"
        )
    _, family, architecture = read_config(folder)
    return Network(Path(path).name, family, architecture), folder


def _check_cut(config: RunConfig, network: Network) -> None:
    """Before nodes are filled: a layout that cuts no model is not a question of how many GPUs there are."""
    policy, architecture = config.policy, network.architecture
    architecture.check_parallel(policy.tp, policy.pp, vpp=policy.vpp)
    if config.rollout.engine == "sglang":
        architecture.check_parallel(config.rollout.tp, 1, "rollout")


def _fill_nodes(config: RunConfig, where: str, options: Options) -> tuple[RunConfig, list[str]]:
    """With --nodes, data-parallel ranks and engines that fill them; without it, the file as it is."""
    cluster = config.cluster
    if options.nodes is None:
        return config, []
    room = cluster.gpus_per_node or _GPUS_PER_NODE
    notes = [] if cluster.gpus_per_node else [f"cluster.gpus_per_node is not set: {room} are assumed"]
    policy, rollout = config.policy, config.rollout
    model_ranks, gpus = policy.tp * policy.pp * policy.cp, options.nodes * room
    if cluster.placement == "colocated" or rollout.engine == "inprocess":
        if gpus % model_ranks or gpus % rollout.tp:
            raise UserError(
                f"{where}: {gpus} GPUs cannot be filled with policy.tp x pp x cp = {model_ranks} and rollout.tp = "
                f"{rollout.tp}: both must divide {gpus}, or give another --nodes"
            )
        dp, engines = gpus // model_ranks, gpus // rollout.tp
    else:
        if policy.dp * options.nodes % cluster.nodes or rollout.engines * options.nodes % cluster.nodes:
            raise UserError(
                f"{where}: policy.dp and rollout.engines of {cluster.nodes} node(s) do not scale to {gpus} GPUs"
            )
        dp, engines = policy.dp * options.nodes // cluster.nodes, rollout.engines * options.nodes // cluster.nodes
    if dp != policy.dp:
        notes.append(f"policy.dp={dp} fills {options.nodes} node(s) of {room} GPUs (the file says {policy.dp})")
    if rollout.engine == "sglang" and engines != rollout.engines:
        notes.append(f"rollout.engines={engines} fill them (the file says {rollout.engines})")
    return config.model_copy(
        update={
            "cluster": cluster.model_copy(update={"nodes": options.nodes, "gpus_per_node": room}),
            "policy": policy.model_copy(update={"dp": dp}),
            "rollout": rollout.model_copy(update={"engines": engines} if rollout.engine == "sglang" else {}),
        }
    ), notes


def _request(
    config: RunConfig, where: str, options: Options, passes: Passes, policy: Network, memory: Network | None
) -> Request:
    on_gpu = options.gpu is not None or device_of(config) == "cuda"
    default = Rates()
    return Request(
        name=config.name,
        policy=policy,
        memory=memory,
        width=as_dtype(config.model.dtype).itemsize,
        lora=lora_settings(config),
        split=Split(
            dp=config.policy.dp,
            tp=config.policy.tp,
            pp=config.policy.pp,
            vpp=config.policy.vpp,
            cp=config.policy.cp,
            micro_batch_tokens=config.policy.micro_batch_tokens,
            recompute=config.policy.recompute,
            offload=tuple(config.policy.offload),
        ),
        batch=_batch(config, where, options),
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
            disk=options.disk_gb * 1e9 if options.disk_gb else default.disk,
        ),
    )


def _batch(config: RunConfig, where: str, options: Options) -> Batch:
    data = config.data
    mean = options.response or data.max_response_tokens / 2
    if mean > data.max_response_tokens:
        raise UserError(f"{where}: --response {mean} is more than data.max_response_tokens={data.max_response_tokens}")
    return Batch(
        prompts=data.prompts_per_step,
        responses=data.responses_per_prompt,
        mini_batches=config.recipe.mini_batches,
        oversample=config.rollout.oversample,
        lengths=Lengths(data.max_prompt_tokens / 2, data.max_prompt_tokens, mean, data.max_response_tokens),
    )


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
        tp=rollout.tp,
        colocated=not apart,
        transport=choose_transport(config, where),
        overlap=apart and rollout.max_staleness > 0,
        memory_fraction=float(fraction) if isinstance(fraction, int | float) else None,
        most_requests=number("max_running_requests"),
        pool_tokens=number("max_total_tokens"),
        chunk=number("chunked_prefill_size"),
    )


class ModelCheck:
    """The real Megatron model of every pipeline stage, built without memory in a process that starts at once.

    It runs while the plan is made; `counts` waits for it.
    """

    def __init__(self, asked: Asked) -> None:
        split, lora = asked.request.split, asked.request.lora
        message = {
            "folders": [str(folder.absolute()) for folder in asked.folders],
            **{name: getattr(split, name) for name in ("dp", "tp", "pp", "cp", "vpp")},
            "lora": dataclasses.asdict(lora) if lora else None,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "megasharp.mcore.meta", json.dumps(message)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def counts(self) -> list[list[int]]:
        """Parameters by network and stage. Raises UserError with Megatron's own words where it cannot be built."""
        try:
            out, errors = self._process.communicate(timeout=_MODEL_SECONDS)
        except subprocess.TimeoutExpired:
            self.stop()
            raise UserError(f"Megatron's model was not built in {_MODEL_SECONDS} s") from None
        if self._process.returncode:
            last = (errors.strip().splitlines() or ["it said nothing"])[-1]
            raise UserError(f"Megatron cannot build this model in this layout: {last}")
        found: list[list[int]] = json.loads(out.strip().splitlines()[-1])
        return found

    def stop(self) -> None:
        """End the process if it runs."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def formula_counts(asked: Asked) -> list[list[int]]:
    """What `ModelCheck.counts` should find, from the families' tables."""
    split = asked.request.split
    policy, memory = asked.request.policy, asked.request.memory
    found = [stages(policy, split.tp, split.pp, split.vpp, asked.request.lora)]
    found += [stages(memory, split.tp, split.pp, split.vpp)] if memory else []
    return [[stage.parameters for stage in one] for one in found]


@dataclass(frozen=True, slots=True)
class Answer:
    """A plan, how it is printed, and whether the run would work."""

    text: str
    works: bool


def plan_run(config: RunConfig, where: str, options: Options, *, as_json: bool, suggestions: bool) -> Answer:
    """Plan a run; the real model's parameters are compared with the tables'. Raises UserError in one line."""
    asked = ask(config, where, options)
    check = ModelCheck(asked)
    try:
        plan = make_plan(asked.request)
        found = suggest(asked.request) if suggestions else []
        compare(check.counts(), formula_counts(asked))
    finally:
        check.stop()
    if as_json:
        return Answer(json.dumps(_tree(asked, plan, found), indent=2, allow_nan=False), plan.works)
    parts = [plan_text(asked.request, plan, asked.notes)]
    if suggestions:
        parts.append(suggestions_text(found))
    return Answer("\n\n".join(parts), plan.works)


def _tree(asked: Asked, plan: Plan, found: list[Suggestion]) -> dict[str, object]:
    """The plan for programs: with what it was asked for, so that two plans can be told apart."""
    request = asked.request
    engines, gpu = request.engines, request.machines.gpu
    return {
        "units": UNITS,
        "layout": dataclasses.asdict(request.split),
        "engines": dataclasses.asdict(engines) if engines else None,
        "machines": {**dataclasses.asdict(request.machines), "gpu": gpu.name if gpu else None},
        "rates": dataclasses.asdict(request.rates),
        "lengths": dataclasses.asdict(request.batch.lengths),
        **dataclasses.asdict(plan),
        "works": plan.works,
        "notes": asked.notes,
        "suggestions": [{"keys": one.keys, "reasons": one.reasons} for one in found],
    }


def compare(built: list[list[int]], table: list[list[int]]) -> None:
    """Raises UserError for the first stage whose real model differs from the family's table."""
    for of_built, of_table in zip(built, table, strict=True):
        for stage, (there, expected) in enumerate(zip(of_built, of_table, strict=True)):
            if there != expected:
                raise UserError(
                    f"stage {stage}: Megatron's model has {there:,} parameters on its first rank, the family's table "
                    f"{expected:,}: please report this"
                )
