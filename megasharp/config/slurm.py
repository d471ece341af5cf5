"""Options of a Slurm job, and cluster profiles: YAML files with the options that one cluster needs.

A profile is given by its path, or by its name in `~/.config/megasharp/profiles` (`$XDG_CONFIG_HOME` in place of
`~/.config`). What the command line or a sweep's file gives counts before a profile.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

from pydantic import Field, StringConstraints, field_validator

from megasharp.common.errors import UserError
from megasharp.common.section import Section
from megasharp.config.core import read_tree, validate

# Job files leave variables that are set as they are: these always are, or add up.
_PATHS = ("PATH", "LD_LIBRARY_PATH")
_Line = Annotated[str, StringConstraints(pattern=r"^[^\n]*\S[^\n]*$")]


class JobOptions(Section):
    """The options of a Slurm job that `submit`, a sweep and a profile have in common."""

    time: str = Field(
        default="24:00:00",
        description="Time limit of one attempt of a run, as HH:MM:SS, D-HH:MM:SS or minutes, in quotes. The run saves "
        "before it and the job is queued again.",
    )
    cpus_per_node: int | None = Field(
        default=None,
        ge=1,
        description="Number of CPUs per node to ask for. null: whole nodes.",
    )
    partition: str | None = Field(default=None, description="Slurm partition. null: the cluster's default.")
    account: str | None = Field(default=None, description="Slurm account. null: the cluster's default.")
    sbatch: list[str] = Field(
        default=[],
        description="Further options of sbatch, such as --qos=high. Options that other keys set are refused.",
    )
    lead: int | None = Field(
        default=None,
        ge=1,
        description="Seconds before the time limit at which a run is asked to save and end. null: 600, or more where "
        "the plan says that ending a step and saving takes long.",
    )
    gpu: str | None = Field(
        default=None,
        description="GPU of the nodes, for which a run is planned: h200, h100, b200, or its memory in MiB, in quotes. "
        "null: h200.",
    )
    disk: float | None = Field(
        default=None,
        gt=0.0,
        description="Speed of the shared disk in GB/s, by which a plan predicts the last save. null: 10.",
    )
    restarts: int = Field(
        default=20,
        ge=0,
        description="Number of times that a job may be queued again, after its time limit or a lost node. 0: never.",
    )
    retries: int = Field(
        default=3,
        ge=0,
        description="Number of times that a failed run is started again inside its job. 0: never.",
    )
    python: str | None = Field(
        default=None,
        description="Path of the Python with megasharp on the nodes. null: this Python, or python3 in a container.",
    )
    container: str | None = Field(default=None, description="Container image for pyxis. null: no container.")
    mount: list[str] = Field(
        default=[],
        description="Folders seen in the container, as /from:/to. Only with container.",
    )
    doctor: bool | None = Field(
        default=None,
        description="Checks the nodes with megasharp doctor before each attempt. null: only where the run has GPUs.",
    )

    @field_validator("time", mode="before")
    @classmethod
    def _is_text(cls, value: object) -> object:
        if isinstance(value, int):
            raise ValueError('YAML reads this as a number; write it in quotes, as "4:00:00" or "240" minutes')
        return value


class ClusterProfile(JobOptions):
    """A cluster: the options of every job there, and what a job does there before it starts anything."""

    gres: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9_.:-]+$",
        description="Name of GPUs in --gres, such as gpu or gpu:h200, where the cluster does not take --gpus-per-node. "
        "null: --gpus-per-node.",
    )
    interface: str | None = Field(
        default=None,
        pattern=r"^\S+$",
        description="Network interface between nodes, as MEGASHARP_INTERFACE. null: the one that leads to them.",
    )
    setup: list[_Line] = Field(
        default=[],
        description="Lines of shell that the job runs first on its first node, outside of a container, such as module "
        "loads. Variables that they export reach all nodes; a command that fails ends the job.",
    )
    environment: dict[Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], str] = Field(
        default={},
        description="Environment variables of the job, by name; numbers in quotes. A variable that is set where the "
        "job is submitted keeps its value, so PATH and LD_LIBRARY_PATH belong in setup.",
    )

    @field_validator("environment", mode="before")
    @classmethod
    def _can_be_set(cls, value: object) -> object:
        for name, text in value.items() if isinstance(value, dict) else ():
            if not isinstance(text, str):
                raise ValueError(f'{name}: YAML reads its value, {text}, as no text; write it in quotes, as "{text}"')
            if name in _PATHS:
                raise ValueError(
                    f"{name}: a variable that is set where you submit keeps its value; write a line of setup instead, "
                    f"as export {name}={text}:${name}"
                )
        return value


def find_profile(name: str, beside: Path | None = None) -> Path:
    """Return the file of a profile, given by its path (from `beside` or from here) or by its name.

    Raises UserError with the nearest name.
    """
    path = Path(name).expanduser()
    named = _folder() / f"{name}.yaml"
    for found in (*([beside / path] if beside is not None else []), path, named):
        if found.is_file():
            return found
    known = [*_names()]
    near = get_close_matches(name, known, n=1)
    hint = f"nearest is {near[0]}" if near else f"profiles there: {', '.join(known) or 'none'}"
    raise UserError(f"--profile {name}: neither this file nor {named} exists; {hint}")


def load_profile(file: Path) -> ClusterProfile:
    """Read a profile. Raises UserError in one line."""
    return validate(ClusterProfile, read_tree(file), str(file), file)


def _folder() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "megasharp" / "profiles"


def _names() -> Iterator[str]:
    yield from (path.stem for path in sorted(_folder().glob("*.yaml")))
