"""`megasharp doctor` on one node: read what is here, apply the checks, and say each finding with the node's name."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Literal

import torch

from megasharp.cluster.slurm import checks, ray_node
from megasharp.cluster.slurm.all_reduce import MEBIBYTES, measure
from megasharp.cluster.slurm.checks import Finding
from megasharp.cluster.slurm.gpus import opened
from megasharp.common.errors import UserError, one_line
from megasharp.common.files import Scratch

# Those whose versions change numbers, or whether it runs at all.
_PACKAGES = ("torch", "megatron-core", "transformers", "ray", "numpy", "safetensors")
_PACKAGES_ON_GPUS = ("nvidia-ml-py",)
# An import of a library with kernels; on a cold shared disk it takes a minute.
_IMPORT_LIMIT_S = 300.0
# Bytes per second. 8 x H100 in a node: about 480 GB/s in a published log of NVIDIA's benchmarks. A node's network of
# 8 x 400 Gb/s carries 400 GB/s at most.
_IN_A_NODE, _BETWEEN_NODES = 480e9, 400e9


@dataclass(frozen=True, slots=True)
class Place:
    """This node, number `node` of `nodes`; `meeting` is a folder that all of them see, None where it is alone."""

    meeting: Path | None = None
    node: int = 0
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Patient:
    """What is expected of a node. Without a run file: nothing but this machine's software.

    `folders` must be seen; `run` is where checkpoints of `checkpoint` bytes go.
    """

    gpus_per_node: int = 0
    folders: tuple[str, ...] = ()
    run: Path | None = None
    checkpoint: int = 0
    constraints: str = ""
    transformer_engine: Literal["auto"] | bool = "auto"
    place: Place = Place()


def examine(patient: Patient) -> Iterator[Finding]:
    """Every check that applies, in order of what is needed first."""
    links = True
    for finding in _gpus(patient.gpus_per_node):
        links = links and finding.level != "FAIL"
        yield finding
    yield from _software(patient)
    yield checks.mounts([folder for folder in patient.folders if not Path(folder).exists()])
    if patient.run is not None:
        parent = _existing(patient.run)
        yield checks.disk_space(str(parent), shutil.disk_usage(parent).free, patient.checkpoint)
    canary = _canary(patient)
    yield canary
    yield _port()
    if links and canary.level != "FAIL":
        yield _all_reduce(patient)
    else:
        yield Finding("note", "all-reduce", "not tried, because of what failed above")


def report(findings: Iterable[Finding], say: Callable[[str], None]) -> bool:
    """Say each finding; whether none failed."""
    host, healthy = socket.gethostname(), True
    for finding in findings:
        say(f"{host}  {finding.level:4}  {finding.check}: {finding.text}")
        healthy = healthy and finding.level != "FAIL"
    return healthy


def _gpus(wanted: int) -> Iterator[Finding]:
    try:
        with opened() as nvml:
            node = nvml.read()
    except UserError as error:
        yield Finding("FAIL" if wanted else "note", "gpus", str(error))
        return
    yield checks.gpu_count(node, wanted)
    seen = checks.torchs_gpus(torch.__version__, torch.cuda.device_count(), len(node.gpus), wanted)
    if seen is not None:
        yield seen
    yield checks.driver(node)
    for gpu in node.gpus:
        yield from checks.gpu_state(gpu)
    for index, reason in node.unread:
        yield checks.gpu_unread(index, reason)


def _software(patient: Patient) -> Iterator[Finding]:
    summary, there = _summary("apex"), util.find_spec("transformer_engine") is not None
    names = (*_PACKAGES, *(_PACKAGES_ON_GPUS if patient.gpus_per_node else ()))
    # Without it layers are Megatron's local ones, unless the run file insists.
    names += ("transformer-engine",) if patient.gpus_per_node and (there or patient.transformer_engine is True) else ()
    yield from checks.versions({name: _version(name) for name in names}, checks.tested_versions(patient.constraints))
    modules = [] if summary is None else _modules("apex")
    ours = "optimizers" in modules
    apex = _import_failure("apex.optimizers") if ours else ""
    yield checks.apex(summary, modules, apex)
    engine = _import_failure("transformer_engine.pytorch.optimizers") if there else ""
    if engine:
        yield checks.transformer_engine(engine)
    on_gpu, layers = patient.gpus_per_node > 0, patient.transformer_engine
    layers = there and (on_gpu if layers == "auto" else layers)
    yield from checks.fused_paths(there and not engine, ours and not apex, on_gpu, layers)


def _import_failure(module: str) -> str:
    """Why Megatron cannot have its optimizers from there; empty where it can. It tries the same at its own import.

    In a process of its own: such an import can end the process.
    """
    command = [sys.executable, "-P", "-c", f"from {module} import FusedAdam, FusedSGD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"it takes more than {_IMPORT_LIMIT_S:.0f} s"
    if done.returncode == 0:
        return ""
    return " ".join(done.stderr.strip().splitlines()[-1:]) or f"exit code {done.returncode}"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _summary(name: str) -> str | None:
    try:
        return str(metadata.metadata(name)["Summary"])
    except metadata.PackageNotFoundError:
        # Built from its source into a folder on the path, it may have no metadata.
        return "" if util.find_spec(name) is not None else None


def _modules(name: str) -> list[str]:
    spec = util.find_spec(name)
    folders = spec.submodule_search_locations or [] if spec else []
    return [path.stem for folder in folders for path in Path(folder).iterdir()]


def _existing(path: Path) -> Path:
    """The nearest above that exists: the run's own folder may come later, but not below what is no folder."""
    return next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())


def _canary(patient: Patient) -> Finding:
    """A file that this node writes and reads, where checkpoints go; between nodes, the meeting itself is one."""
    place = patient.place.meeting or _existing(patient.run or Path.cwd())
    written = f"{socket.gethostname()} {os.getpid()}"
    try:
        with Scratch(".megasharp-canary-", place) as folder:
            (folder / "canary").write_text(written)
            read = (folder / "canary").read_text()
    except OSError as error:
        return Finding("FAIL", "file system", f"{place} cannot be written ({one_line(error)}); mend it or set --runs")
    if read != written:
        return Finding("FAIL", "file system", f"{place} gave back something else than was written; do not train on it")
    return Finding("ok", "file system", f"{place}: a file was written and read")


def _port() -> Finding:
    """Whether servers can have ports here at all, and from which range."""
    try:
        with socket.socket() as one:
            one.bind(("", 0))
            one.listen()
            number = one.getsockname()[1]
    except OSError as error:
        return Finding("FAIL", "ports", f"no port can be opened ({one_line(error)}); look at limits and firewall")
    return Finding("ok", "ports", f"free ones are given out (just now {number})")


def _all_reduce(patient: Patient) -> Finding:
    nodes = max(len(patient.place.nodes), 1)
    local = patient.gpus_per_node or (2 if nodes == 1 else 1)
    device = "cuda" if patient.gpus_per_node else "cpu"
    world = nodes * local
    if world == 1:
        return Finding("ok", "all-reduce", "one rank has nobody to reduce with")
    try:
        variables = _links(patient, device)
        if patient.place.meeting is not None:
            meeting = patient.place.meeting / "all_reduce"
            seconds = measure(meeting, patient.place.node * local, local, world, device, variables)
        else:
            with Scratch("megasharp-doctor-") as folder:
                seconds = measure(folder / "all_reduce", 0, local, world, device, variables)
    except UserError as error:
        alone = "GPUs" if patient.gpus_per_node else "processes of this node (the loopback interface)"
        return Finding(
            "FAIL", "all-reduce", f"{error}; look at the links between {', '.join(patient.place.nodes) or alone}"
        )
    if seconds == 0.0:
        return Finding(
            "ok", "all-reduce", f"took part as node {patient.place.node} of {nodes}; the first node says how fast"
        )
    expected = None if device == "cpu" else _IN_A_NODE if nodes == 1 else _BETWEEN_NODES
    where = "on this node" if nodes == 1 else f"on {nodes} nodes"
    return checks.all_reduce(world, checks.bus_bandwidth(MEBIBYTES[device] << 20, seconds, world), expected, where)


def _links(patient: Patient, device: str) -> Mapping[str, str]:
    if len(patient.place.nodes) < 2:
        return {"GLOO_SOCKET_IFNAME": "lo"} if device == "cpu" else {}
    others = [name for number, name in enumerate(patient.place.nodes) if number != patient.place.node]
    return ray_node.variables(ray_node.choose(ray_node.interfaces(), others, os.environ), ray_node.adapters())


def across(names: Sequence[str], command: Sequence[str]) -> list[str]:
    """The srun command that runs a doctor on each node of this job."""
    return ["srun", f"--nodes={len(names)}", "--ntasks-per-node=1", "--cpu-bind=none", "--mpi=none", *command]


def node_names(listed: str) -> list[str]:
    """Names out of what `scontrol show hostnames` prints."""
    return re.findall(r"\S+", listed)
