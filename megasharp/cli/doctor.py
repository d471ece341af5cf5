"""`megasharp doctor`: examine this node, or all nodes of a Slurm job, for what a run expects."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megasharp.cli.options import Overrides, RunsFolder
from megasharp.common.errors import NotAtHand, UserError, reason_at
from megasharp.common.exit_codes import Say, status

if TYPE_CHECKING:
    from megasharp.cluster.slurm.doctor.findings import Engines, Memory, Patient, Place
    from megasharp.config.run_config import RunConfig
    from megasharp.planner.records import Plan


def doctor(
    config: Annotated[Path | None, typer.Argument(help="Run file; its needs are checked too.")] = None,
    overrides: Overrides = None,
    nodes: Annotated[
        bool, typer.Option(help="Check every node of this Slurm job, and the links between them.", show_default=False)
    ] = False,
    gpu_smoke: Annotated[
        bool,
        typer.Option(
            help="Instead, train two tiny models on this machine's GPU: with the engine in this process, and with "
            "SGLang. Takes minutes; needs no model and no network.",
            show_default=False,
        ),
    ] = False,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="GPU of the nodes, for the plan of the run file: h200, h100, b200, or its memory in MiB. Without it: "
            "h200.",
            show_default=False,
        ),
    ] = None,
    runs: RunsFolder = Path("runs"),
) -> None:
    """Check GPUs, versions, disk, ports and links before a run. Exit code 1: something must be fixed first."""
    if gpu is not None:
        from megasharp.planner.records import find_gpu

        find_gpu(gpu)
        if config is None:
            raise UserError(f"--gpu {gpu} is what a run is planned for: give doctor a run file, or leave --gpu out")
    if gpu_smoke:
        if config is not None or nodes:
            raise UserError(
                "doctor --gpu-smoke takes no run file and examines one machine; for several nodes start it on each: "
                "srun --ntasks-per-node=1 megasharp doctor --gpu-smoke"
            )
        raise typer.Exit(smoke_gpu(runs, typer.echo))
    if nodes:
        raise typer.Exit(examine_all_nodes(config, overrides or [], runs, gpu))
    if not examine_node(config, overrides or [], runs, typer.echo, gpu):
        raise typer.Exit(1)


def smoke_gpu(runs: Path, say: Say) -> int:
    """Train two tiny models on this machine's GPU; return the exit code. Raises UserError without a GPU."""
    status("loading PyTorch")
    from megasharp.trainer.gpu_smoke import new_folder, smoke

    failed = False
    for outcome in smoke(new_folder(runs), "cuda"):
        say(f"{socket.gethostname()}  {outcome.how:4}  {outcome.part}: {outcome.text}")
        failed = failed or outcome.how == "FAIL"
    return int(failed)


def examine_node(file: Path | None, overrides: Sequence[str], runs: Path, say: Say, gpu: str | None = None) -> bool:
    """Examine this node, also as one of several of `examine_all_nodes`; return whether no check failed.

    The run is planned for `gpu`; None is the planner's default. Raises UserError for one of a run on CPUs.
    """
    status("loading PyTorch, then checking this machine")
    from megasharp.cluster.slurm.doctor import examine as doctor
    from megasharp.cluster.slurm.doctor.findings import Patient, Place
    from megasharp.config.core import SHIPPED

    meeting, place = os.environ.get("MEGASHARP_MEETING"), Place()
    if meeting is not None:
        names = tuple(os.environ["MEGASHARP_NODES"].split(","))
        place = Place(Path(meeting), int(os.environ["SLURM_NODEID"]), names)
    # The tested versions are in the repository and in the wheel; without them none are compared.
    tested = SHIPPED / "constraints.txt"
    constraints = tested.read_text(encoding="utf-8") if tested.is_file() else ""
    if file is None:
        patient = Patient(constraints=constraints, place=place)
    else:
        patient = _patient_of_run(file, overrides, runs, constraints, place, gpu)
    return doctor.report(doctor.examine(patient), say, doctor.name_of(place))


def _patient_of_run(
    file: Path, overrides: Sequence[str], runs: Path, constraints: str, place: Place, gpu: str | None
) -> Patient:
    """Return what a run file expects of a node; sizes on disk are its plan's, none where its model is unknown."""
    from megasharp.cluster.slurm.doctor.findings import Patient
    from megasharp.config.core import find
    from megasharp.config.run_config import load_run, run_tree
    from megasharp.planner.suggest import make_plan
    from megasharp.trainer.hub_inputs import hub_inputs
    from megasharp.trainer.plan import Options, ask
    from megasharp.trainer.resolve.devices import device_of, gpus_needed
    from megasharp.trainer.stored_config import resumed_config

    config = load_run(file, overrides)
    config = resumed_config(runs / config.name, run_tree(file, overrides), str(file), lambda line: None)
    if gpu is not None and config.policy.device == "cpu":
        raise UserError(f"{file}: policy.device=cpu, so no GPU is planned for; leave --gpu {gpu} out")
    inputs = hub_inputs(config, str(file), runs / config.name)
    of_hub = {*(model.path for model in inputs.models), *(source.hub for source in inputs.sets)}
    named = (config.model.path, *(source.path for source in config.data.sources))
    folders = [path for path in named if path and path not in of_hub]
    # Where the file leaves the number of GPUs to the machine, the run needs these at least.
    gpus = 0 if device_of(config) == "cpu" else config.cluster.gpus_per_node or gpus_needed(config)
    plan = None
    # A finding says what is not at hand.
    with suppress(NotAtHand):
        plan = make_plan(ask(config, str(file), Options(gpu=gpu)).request)
    return Patient(
        gpus_per_node=gpus,
        folders=tuple(str(find(folder)) for folder in folders),
        inputs=tuple(inputs.look()),
        run=runs / config.name if plan else None,
        checkpoint=plan.checkpoint.size if plan else 0,
        whole=plan.disk.total if plan else 0,
        limits=tuple(problem.text for problem in plan.problems if problem.limit) if plan else (),
        constraints=constraints,
        transformer_engine=config.policy.transformer_engine if config.policy.fp8 is None else True,
        attention=config.policy.attention,
        engines=_engines_of_run(config, str(file)),
        memory=_memory_of_run(config, gpus, plan),
        place=place,
        run_nodes=config.cluster.nodes,
    )


def _engines_of_run(config: RunConfig, where: str) -> Engines | None:
    """Return the engines that a run starts; None where it starts none."""
    from megasharp.cluster.slurm.doctor.findings import Engines
    from megasharp.config.core import find
    from megasharp.config.hub import cached_model
    from megasharp.convert.model_folder import CONFIG_FILE, ModelFolder, model_folder
    from megasharp.trainer.resolve.engine_settings import choose_transport, fleet_settings, group_variables
    from megasharp.trainer.resolve.models import memory_path
    from megasharp.trainer.resolve.recipes import build_recipes

    if config.rollout.engine != "sglang" or not config.rollout.engines:
        return None

    def folder(path: str, revision: str | None) -> ModelFolder:
        return model_folder(cached_model(path, revision) or find(path))

    need = build_recipes(config, where).needs.memory
    networks = [folder(config.model.path, config.model.revision)]
    if need is not None:
        networks.append(folder(memory_path(need.network.path), need.network.revision))
    model, memory = networks[0], networks[1] if need is not None else None
    settings = fleet_settings(config, model, memory, Path(), need.window if need is not None else None)
    return Engines(
        settings=replace(settings, variables=group_variables(config)),
        where=where,
        at_hand=all((each.description / CONFIG_FILE).is_file() for each in networks),
        one_group=choose_transport(config, where) == "nccl",
    )


def _memory_of_run(config: RunConfig, gpus: int, plan: Plan | None) -> Memory:
    """Return what a run asks of a node's memory: the plan's figures, and those of processes and of /dev/shm."""
    from megasharp.cluster.ray_runtime.process_environment import SMALLEST_STORE
    from megasharp.cluster.slurm.doctor.findings import Memory
    from megasharp.trainer.plan import ray_store_bytes
    from megasharp.trainer.resolve.engine_settings import choose_transport

    on_ray = config.cluster.backend == "ray"
    shared = SMALLEST_STORE if on_ray else 0
    if choose_transport(config, config.name) == "shared_memory":
        shared += config.sync.bucket_mb << 20
    # Of a node's shared memory Ray's store takes half at most.
    store = 2 * ray_store_bytes(config) if on_ray else 0
    # On a GPU each rank has a process, and each rank of an engine another.
    both = config.rollout.engine == "sglang" and config.cluster.placement == "colocated"
    return Memory(host=plan.host if plan else 0, processes=gpus * (2 if both else 1), shared=shared, store=store)


def examine_all_nodes(file: Path | None, overrides: Sequence[str], runs: Path, gpu: str | None = None) -> int:
    """Examine every node of this Slurm job, planning the run for `gpu`; return the exit code.

    Raises UserError outside of a job.
    """
    from megasharp.cluster.slurm.doctor.examine import across, node_names

    listed = os.environ.get("SLURM_JOB_NODELIST")
    if listed is None:
        raise UserError("doctor --nodes looks at the nodes of a Slurm job: run it inside one (salloc, or submit)")
    names = node_names(subprocess.check_output(["scontrol", "show", "hostnames", listed], text=True))
    try:
        runs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--runs {runs} cannot be made ({reason_at(error, runs)}); give a folder that all nodes see"
        ) from None
    arguments = [str(file), *overrides] if file is not None else []
    arguments += ["--gpu", gpu] if gpu is not None else []
    command = [sys.executable, "-P", "-m", "megasharp.cli", "doctor", *arguments, "--runs", str(runs)]
    # In the runs' folder, because all nodes have to see that one.
    with tempfile.TemporaryDirectory(prefix=".megasharp-doctor-", dir=runs.absolute()) as meeting:
        variables = {"MEGASHARP_MEETING": meeting, "MEGASHARP_NODES": ",".join(names)}
        return subprocess.run(across(names, command), env={**os.environ, **variables}, check=False).returncode
