"""`megasharp doctor`: what a run expects of a node, looked at on this one or, inside a Slurm job, on all of its."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from megasharp.cluster.slurm.doctor import Patient, Place, across, examine, node_names, report
from megasharp.common.errors import UserError, one_line
from megasharp.config.core import SHIPPED, find
from megasharp.config.run_config import RunConfig, load_run
from megasharp.planner.suggest import make_plan
from megasharp.trainer.plan import Options, ask
from megasharp.trainer.resolve.devices import device_of, gpus_needed
from megasharp.trainer.resolve.engine_settings import engine_python

CONSTRAINTS = SHIPPED / "constraints.txt"


def doctor(file: Path | None, overrides: Sequence[str], runs: Path, say: Callable[[str], None]) -> bool:
    """Examine this node; whether all is well. Inside a job's `doctor --nodes` it is one of several."""
    patient = _patient(load_run(file, overrides), runs, str(file)) if file is not None else _bare()
    return report(examine(patient), say)


def doctor_on_all_nodes(file: Path | None, overrides: Sequence[str], runs: Path) -> int:
    """The same on every node of this Slurm job; returns the exit code. Raises UserError outside of a job."""
    listed = os.environ.get("SLURM_JOB_NODELIST")
    if listed is None:
        raise UserError("doctor --nodes looks at the nodes of a Slurm job: run it inside one (salloc, or submit)")
    names = node_names(subprocess.check_output(["scontrol", "show", "hostnames", listed], text=True))
    try:
        runs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--runs {runs} cannot be made ({one_line(error)}); give a folder that all nodes see") from None
    arguments = [str(file), *overrides] if file is not None else []
    command = [sys.executable, "-P", "-m", "megasharp.cli", "doctor", *arguments, "--runs", str(runs)]
    # In the runs' folder, because all nodes have to see that one.
    with tempfile.TemporaryDirectory(prefix=".megasharp-doctor-", dir=runs.absolute()) as meeting:
        variables = {"MEGASHARP_MEETING": meeting, "MEGASHARP_NODES": ",".join(names)}
        return subprocess.run(across(names, command), env={**os.environ, **variables}, check=False).returncode


def _bare() -> Patient:
    return Patient(constraints=_constraints(), place=_place())


def _patient(config: RunConfig, runs: Path, where: str) -> Patient:
    """What a run file expects. Its plan says how large a checkpoint is."""
    data = [config.data.path] if config.data.path else []
    folders = [config.model.path, *data]
    if config.rollout.engine == "sglang":
        folders.append(str(engine_python(config)))
    return Patient(
        gpus_per_node=_gpus_of_a_node(config),
        folders=tuple(str(find(folder)) for folder in folders),
        run=runs / config.name,
        checkpoint=make_plan(ask(config, where, Options()).request).checkpoint.size,
        constraints=_constraints(),
        transformer_engine=config.policy.transformer_engine if config.policy.fp8 is None else True,
        place=_place(),
    )


def _gpus_of_a_node(config: RunConfig) -> int:
    """As many as the file says or, where it leaves the number to the machine, as the run needs there at least."""
    if device_of(config) == "cpu":
        return 0
    return config.cluster.gpus_per_node or gpus_needed(config)


def _constraints() -> str:
    """The tested set; an installation without the repository has none to compare with."""
    return CONSTRAINTS.read_text(encoding="utf-8") if CONSTRAINTS.is_file() else ""


def _place() -> Place:
    """Which node of how many this is, where several are examined together."""
    meeting = os.environ.get("MEGASHARP_MEETING")
    if meeting is None:
        return Place()
    nodes = tuple(os.environ["MEGASHARP_NODES"].split(","))
    return Place(Path(meeting), int(os.environ["SLURM_NODEID"]), nodes)
