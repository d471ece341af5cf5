"""`megasharp submit`: turns a run file into a Slurm job, and refuses what can be refused without a GPU."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from megasharp.checkpoint.recorded import CONFIG_FILE as RUN_CONFIG
from megasharp.checkpoint.run_folder import holds_no_run
from megasharp.cluster.ray_runtime.process_environment import STORE
from megasharp.cluster.slurm import job as sbatch_options
from megasharp.cluster.slurm.job import Job, Resources, Software, render, sbatch_program, submit
from megasharp.cluster.slurm.ray_node import INTERFACE
from megasharp.common.errors import UserError
from megasharp.common.exit_codes import note
from megasharp.common.files import UMASK, write_for
from megasharp.config.core import find
from megasharp.config.hub import cache_mounts, hub_is_off, job_variables, read_as_a_job
from megasharp.config.run_config import RunConfig, load_run
from megasharp.config.slurm import ClusterProfile
from megasharp.convert.hf_folder import read_config
from megasharp.convert.model_folder import CONFIG_FILE, model_folder
from megasharp.evals.groups import Settings, load_group, plan_suites
from megasharp.evals.suites import suite_source
from megasharp.planner.records import DEFAULT, Plan, find_gpu
from megasharp.planner.suggest import make_plan
from megasharp.trainer.early_checks import Nodes, refuse_early
from megasharp.trainer.eval_source import CHECKPOINT, check_measurable
from megasharp.trainer.hub_inputs import HubInputs, hub_inputs
from megasharp.trainer.plan import Options, ask, ray_store_bytes
from megasharp.trainer.resolve.devices import asks_for_gpus
from megasharp.trainer.resolve.engine_python import ENGINES_PYTHON
from megasharp.trainer.resolve.engine_settings import (
    check_context,
    check_engine_keys,
    check_window,
    cluster_layout,
    engines_on_a_node,
)

# A run ends its step and saves in this time, if its plan does not say more; an evaluation only ends its engines.
_LEAD_S, _LEAD_OF_AN_EVALUATION_S = 600, 60
# Above the high end of a prediction, because the disk's speed is taken as it is given.
_ROOM = 1.2


@dataclass(frozen=True, slots=True)
class Asked:
    """The job that a user asks for. `nodes` None takes the run file's; `suite`: evaluate instead of training.

    `options` are all of the job's, with those of the profile at `profile` where one is given. Its `lead` None takes
    what a run, or an evaluation, needs to end, by the speed of the `disk`. `restarts` bounds how often the job queues
    itself again, `retries` how often a failed run starts again inside of it. `doctor` None has it examine nodes with
    GPUs.
    """

    file: Path
    overrides: Sequence[str]
    runs: Path
    options: ClusterProfile
    profile: Path | None = None
    nodes: int | None = None
    suite: str | None = None
    checkpoint: Path | None = None


def with_given(profile: ClusterProfile, given: Mapping[str, object]) -> ClusterProfile:
    """Return a profile's options with those that are given laid over them.

    Mounts add up, and so do sbatch's options, but for one that is given anew.
    """
    found: dict[str, object] = {**dict(profile), **given}
    own = given.get("sbatch", [])
    assert isinstance(own, list)
    found["sbatch"] = [*sbatch_options.besides(profile.sbatch, own), *own]
    mounts = given.get("mount", [])
    assert isinstance(mounts, list)
    found["mount"] = [*profile.mount, *mounts]
    return ClusterProfile.model_validate(found)


def submit_run(asked: Asked, *, dry_run: bool, say: Callable[[str], None]) -> None:
    """Submit, or with `dry_run` print the sbatch file. Raises UserError in one line for what cannot fit."""
    asked = replace(asked, file=find(str(asked.file)))
    config = load_run(asked.file, asked.overrides)
    with read_as_a_job(asked.options.environment, asked.options.mount):
        if asked.suite is None:
            config = refuse_early(asked.file, asked.overrides, asked.runs / config.name, _of_nodes(asked), say=note)
        job = make_job(asked, config)
        for line in assumed(asked.options, config):
            note(line)
        if dry_run:
            say(render(job).rstrip("\n"))
            return
        if not hub_is_off():
            # Compute nodes never reach for a network.
            _hub_inputs(asked, config).fetch()
    sbatch_program()
    if holds_no_run(job.run) or (job.run / RUN_CONFIG).is_file():
        # sbatch hands the umask on to the job, whose own log Slurm makes.
        write_for(config.log.readable_by, job.run)
    number, log = submit(job)
    say(f"submitted job {number}: {job.resources.nodes} node(s), {job.resources.time}")
    say(f"log: {log}; of each attempt and node: {job.run / 'logs' / job.latest}/")


def assumed(options: ClusterProfile, config: RunConfig) -> Iterator[str]:
    """Yield a line each for a GPU that nobody named and for a Python that this machine does not see."""
    if options.gpu is None and asks_for_gpus(config):
        yield f"planned for {DEFAULT}; give --gpu, or gpu in the profile, where the nodes have another GPU"
    if options.container is None and options.python is not None and shutil.which(options.python) is None:
        yield f"{options.python} is not on this machine; it must be on the nodes"


def _hub_inputs(asked: Asked, config: RunConfig) -> HubInputs:
    """Return what the job reads of the hub; suites that only its image has, or the data of, are not looked at."""
    suites = []
    for each in config.eval.suites if asked.suite is None else _suites(asked.suite):
        group = load_group(each)
        for name in [member.suite for member in group.members] if group else [each]:
            with suppress(UserError) if asked.options.container is not None else nullcontext():
                suite_source(name)
                suites.append(name)
    return hub_inputs(config, str(asked.file), asked.runs / config.name, suites)


def make_job(asked: Asked, config: RunConfig) -> Job:
    """Make the job of a run, or of an evaluation of it. Raises UserError for what cannot fit."""
    where, options = str(asked.file), asked.options
    evaluation = asked.suite is not None
    _check_together(asked)
    nodes = _nodes(asked, config, where)
    # Paths in a run file are meant from where the command was given.
    folder, run = Path.cwd(), (asked.runs / config.name).absolute()
    if evaluation:
        _check_evaluation(asked, config, where, run)
        lead_s = options.lead or _LEAD_OF_AN_EVALUATION_S
    else:
        lead_s = lead_of(fitting_plan(config, where, options.gpu, options.disk), where, options.lead)
    gpus = config.cluster.gpus_per_node
    # By its own path this Python; in a container, the container's.
    python = options.python or ("python3" if options.container else sys.executable)
    # An image may have caches of its own, which a job that reads nothing of the hub is left with.
    caches = options.container is None or bool(_hub_inputs(asked, config))
    return Job(
        name=f"{config.name}-eval" if evaluation else config.name,
        command=_evaluation(asked, config, run) if evaluation else _training(asked),
        run=run,
        folder=folder,
        resources=Resources(
            nodes=nodes,
            time=options.time,
            gpus_per_node=gpus,
            cpus_per_node=options.cpus_per_node,
            lead_s=lead_s,
            gres=options.gres,
            partition=options.partition,
            account=options.account,
            extra=options.sbatch,
        ),
        software=Software(python, options.container, [*options.mount, *(cache_mounts() if caches else ())]),
        restarts=options.restarts,
        doctor=_doctor(asked, config) if (bool(gpus) if options.doctor is None else options.doctor) else (),
        environment={**_store(config, nodes), **(job_variables() if caches else {}), **_variables(options)},
        setup=options.setup,
        profile=asked.profile,
        umask=UMASK[config.log.readable_by],
    )


def _variables(options: ClusterProfile) -> dict[str, str]:
    """Return the variables of a profile."""
    return {**({INTERFACE: options.interface} if options.interface else {}), **options.environment}


def _store(config: RunConfig, nodes: int) -> dict[str, str]:
    """Return the size of Ray's object store on each of several nodes."""
    return {STORE: str(ray_store_bytes(config))} if nodes > 1 else {}


def _check_together(asked: Asked) -> None:
    """Refuse options that mean nothing without another."""
    if asked.checkpoint is not None and asked.suite is None:
        raise UserError(
            f"--checkpoint {asked.checkpoint} is for --eval; add --eval SUITE, or leave it out: a run goes on from its "
            "own newest checkpoint"
        )
    if asked.options.mount and asked.options.container is None:
        raise UserError(f"--mount {asked.options.mount[0]} is for --container; add --container IMAGE, or leave it out")


def _check_evaluation(asked: Asked, config: RunConfig, where: str, run: Path) -> None:
    """Raise UserError for what `megasharp eval` would refuse on the node, as far as this machine can see it."""
    assert asked.suite is not None
    if config.rollout.engine != "sglang":
        raise UserError(
            f"{where}: rollout.engine={config.rollout.engine} starts no engines, on which --eval samples; set "
            "rollout.engine=sglang, or use `megasharp eval` without --engines"
        )
    engines_on_a_node(config, where)
    if not _is_in_the_image(asked, Path(asked.suite)):
        plan_suites(_suites(asked.suite), _settings(asked.suite, config), config.seed)
    source = asked.checkpoint or run
    # A job that this one depends on may write the folder, so it need not exist yet.
    if _is_in_the_image(asked, source) or sbatch_options.waits(asked.options.sbatch):
        return
    try:
        check_measurable(source)
    except UserError as error:
        raise UserError(
            f"{error}; give --checkpoint, or wait for the job that writes it: --sbatch=--dependency=afterok:JOB"
        ) from None
    description = model_folder(source).description
    if (description / CONFIG_FILE).is_file():
        _, _, architecture = read_config(description)
        check_context(config, architecture.max_positions, where)
        check_window(config, architecture.smallest_window, where)


def _is_in_the_image(asked: Asked, path: Path) -> bool:
    """Return whether only the container sees this path: it has the job's folder and the runs under their own names."""
    known = [Path.cwd(), asked.runs.absolute()]
    return asked.options.container is not None and not any(path.absolute().is_relative_to(folder) for folder in known)


def _nodes(asked: Asked, config: RunConfig, where: str) -> int:
    if asked.suite is not None:
        if asked.nodes not in (None, 1):
            raise UserError(f"--nodes {asked.nodes}: an evaluation's engines are on one node; leave it out")
        return 1
    nodes, cluster = asked.nodes or config.cluster.nodes, config.cluster
    room = f" x cluster.gpus_per_node={cluster.gpus_per_node}" if cluster.gpus_per_node else ""
    if cluster.nodes > nodes:
        raise UserError(
            f"{where}: cluster.nodes={cluster.nodes}{room} is more than the {nodes} node(s) of --nodes; give "
            f"--nodes {cluster.nodes}, or make the run smaller"
        )
    if cluster.nodes < nodes:
        also = "" if cluster.backend == "ray" else ", cluster.backend=ray"
        raise UserError(
            f"{where}: cluster.nodes={cluster.nodes}, so {nodes - cluster.nodes} of the {nodes} nodes of --nodes would "
            f"idle; set cluster.nodes={nodes}{also}, and policy.dp and rollout.engines to fill them (megasharp plan "
            "--nodes)"
        )
    return nodes


def fitting_plan(config: RunConfig, where: str, gpu: str | None, disk_gb: float | None) -> Plan:
    """Return the plan of a run, on `gpu` if it asks for GPUs. Raises UserError when slots or memory do not suffice."""
    if gpu is not None:
        find_gpu(gpu)
    check_engine_keys(config, where)
    if config.cluster.backend == "ray":
        cluster_layout(config)
    plan = make_plan(ask(config, where, Options(gpu=gpu if asks_for_gpus(config) else None, disk_gb=disk_gb)).request)
    errors = [problem.text for problem in plan.problems if problem.level == "error"]
    if errors:
        more = f" (and {len(errors) - 1} more: megasharp plan)" if len(errors) > 1 else ""
        raise UserError(f"{where}: {errors[0]}{more}")
    return plan


def lead_of(plan: Plan, where: str, asked_s: int | None) -> int:
    """Return how many seconds before its limit a run is asked to end: as asked, else with room by its plan.

    It abandons a rollout, ends a step that is past that, and saves. Raises UserError where `asked_s` is too short.
    """
    if not plan.times:
        return asked_s or _LEAD_S
    (needed, longest), save = plan.ending_seconds, plan.checkpoint.seconds
    enough = min(max(_LEAD_S, math.ceil(_ROOM * longest / 60) * 60), sbatch_options.LONGEST_LEAD_S)
    if asked_s is not None and asked_s < needed:
        raise UserError(
            f"{where}: a run that is asked to end takes about {needed:.0f} s, as planned ({needed - save:.0f} s for "
            f"what is left of a step, {save:.0f} s for its checkpoint), but it is asked {asked_s} s before the limit; "
            f"raise --lead (without it: {enough}), or give the disk's speed (--disk)"
        )
    return asked_s or enough


def _of_nodes(asked: Asked) -> Nodes:
    options = asked.options
    contained = options.container is not None
    return Nodes(
        sees=lambda path: not _is_in_the_image(asked, path),
        container=contained,
        other_python=contained or options.python is not None,
        other_engines=contained or options.python is not None or ENGINES_PYTHON in options.environment,
        waits=sbatch_options.waits(options.sbatch),
    )


def _training(asked: Asked) -> list[str]:
    runs = ["--runs", str(asked.runs.absolute())]
    retries = ["--retries", str(asked.options.retries)] if asked.options.retries else []
    return ["train", str(asked.file.absolute()), *asked.overrides, *runs, "--resume", *retries]


def _doctor(asked: Asked, config: RunConfig) -> list[str]:
    # A profile may name its nodes' GPU for a run on CPUs too.
    named = asked.options.gpu if asks_for_gpus(config) else None
    gpu = ["--gpu", named] if named is not None else []
    return [str(asked.file.absolute()), *asked.overrides, "--runs", str(asked.runs.absolute()), *gpu]


def _evaluation(asked: Asked, config: RunConfig, run: Path) -> list[str]:
    """Return the command that evaluates as the run does, into a folder of its own."""
    assert asked.suite is not None
    source = (asked.checkpoint or run).absolute()
    names = (str(Path(name).absolute()) if Path(name).is_file() else name for name in _suites(asked.suite))
    settings = _settings(asked.suite, config).model_dump(exclude_none=True)
    flags = (part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", f"{value}"))
    return [
        "eval",
        str(source),
        *("--suite", ",".join(names)),
        *("--engines", str(asked.file.absolute())),
        *(part for override in asked.overrides for part in ("--set", override)),
        *flags,
        *("--seed", str(config.seed)),
        # Its own folder, because a resumed run reads, and removes, what is beside it.
        *("--out", str(run / "evals" / "by_hand" / CHECKPOINT)),
    ]


def _suites(names: str) -> list[str]:
    return [name.strip() for name in names.split(",")]


def _settings(names: str, config: RunConfig) -> Settings:
    """Return the run's own settings; none where a group of suites is named, whose paper has them."""
    if any(load_group(name) is not None for name in _suites(names)):
        return Settings()
    data = config.data
    return Settings(
        n=config.eval.n,
        k=",".join(map(str, config.eval.k)),
        temperature=config.eval.temperature,
        top_p=config.eval.top_p,
        max_tokens=config.eval.max_response_tokens or (data.max_response_tokens and data.largest_response),
    )
