"""`megasharp doctor` on one node: its checks, in order of what is needed first, and their findings with remedies.

`examine` reads the node and applies the checks: GPUs, software, mounts, disk, file system, ports, and an all-reduce. A
check is a pure function of what was read, so that tests need no GPU.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Literal

import torch

from megasharp.cluster.slurm import ray_node
from megasharp.cluster.slurm.all_reduce import MEBIBYTES, measure
from megasharp.cluster.slurm.gpus import Gpu, Node, opened
from megasharp.common.errors import UserError, one_line
from megasharp.common.files import Scratch
from megasharp.config.policy import AttentionName, Wanted
from megasharp.ops.attention_kernels import Site, choose, software_here

# CUDA 13 needs a driver of branch 580 or later (CUDA 13.0 release notes, table of minimum versions).
OLDEST_DRIVER = 580
# Below this, a GPU's memory is held by driver and context alone.
_IDLE_BYTES = 2 << 30
_GB = 1e9
# Packages whose versions change numbers, or without which nothing runs.
_PACKAGES = ("torch", "megatron-core", "transformers", "ray", "numpy", "safetensors")
_PACKAGES_ON_GPUS = ("nvidia-ml-py",)
# pip's requirement where a package's name alone is too little.
_REQUIREMENTS = {"transformer-engine": "transformer-engine[pytorch,core_cu13]"}
# An import of a library with kernels; on a cold shared disk it takes a minute.
_IMPORT_LIMIT_S = 300.0
# Bytes per second. 8 x H100 in a node: about 480 GB/s in a published log of NVIDIA's benchmarks. A node's network of
# 8 x 400 Gb/s carries 400 GB/s at most.
_IN_A_NODE, _BETWEEN_NODES = 480e9, 400e9
Level = Literal["ok", "note", "FAIL"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The finding of one check; a failure's text ends with the remedy."""

    level: Level
    check: str
    text: str


@dataclass(frozen=True, slots=True)
class Place:
    """This node, number `node` of `nodes`; `meeting` is a folder that all of them see, None where it is alone."""

    meeting: Path | None = None
    node: int = 0
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Patient:
    """The expectations of a node. Without a run file they are this machine's software alone.

    `folders` must be seen, and `inputs` says what was found of the hub's models and data; checkpoints of `checkpoint`
    bytes go to `run`, and `whole` bytes are there at its end. `limits` are the time limits that the run would meet by
    its plan, in words.
    """

    gpus_per_node: int = 0
    folders: tuple[str, ...] = ()
    inputs: tuple[Finding, ...] = ()
    run: Path | None = None
    checkpoint: int = 0
    whole: int = 0
    limits: tuple[str, ...] = ()
    constraints: str = ""
    transformer_engine: Wanted = "auto"
    attention: AttentionName = "auto"
    place: Place = Place()


def examine(patient: Patient) -> Iterator[Finding]:
    """Yield the findings of every check that applies, in order of what is needed first."""
    links = True
    for finding in _gpus(patient.gpus_per_node):
        links = links and finding.level != "FAIL"
        yield finding
    yield from _software(patient)
    yield mounts([folder for folder in patient.folders if not Path(folder).exists()])
    yield from patient.inputs
    if patient.run is not None:
        parent = _existing(patient.run)
        free = shutil.disk_usage(parent).free
        yield disk_space(str(parent), free, patient.checkpoint, patient.whole, planned_bytes(patient.run))
    yield from (Finding("note", "time limits", text) for text in patient.limits)
    canary = _canary(patient)
    yield canary
    yield _port()
    if links and canary.level != "FAIL":
        yield _all_reduce(patient)
    else:
        yield Finding("note", "all-reduce", "not tried, because of what failed above")


def report(findings: Iterable[Finding], say: Callable[[str], None]) -> bool:
    """Say each finding with the node's name; return True where none failed."""
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
    yield gpu_count(node, wanted)
    seen = torchs_gpus(torch.__version__, torch.cuda.device_count(), len(node.gpus), wanted)
    if seen is not None:
        yield seen
    yield driver(node)
    for gpu in node.gpus:
        yield from gpu_state(gpu)
    for index, reason in node.unread:
        yield gpu_unread(index, reason)


def gpu_count(node: Node, wanted: int) -> Finding:
    """Check for as many GPUs as the run file asks of a node."""
    there = len(node.gpus)
    names = ", ".join(sorted({gpu.name for gpu in node.gpus}))
    if there < wanted:
        return Finding(
            "FAIL",
            "gpus",
            f"{there} GPU(s) are here, the run wants {wanted} (cluster.gpus_per_node or, without it, its ranks and "
            f"engines); ask Slurm for them (--gpus-per-node={wanted}), or take the node out: a GPU that fell off the "
            "bus is missing until the node is rebooted",
        )
    return Finding("ok", "gpus", f"{there} x {names}, driver {node.driver}")


def torchs_gpus(version: str, found: int, there: int, wanted: int) -> Finding | None:
    """Compare torch's GPUs with the driver's; None where there is nothing to find."""
    if found < wanted or (there and not found):
        level: Level = "FAIL" if wanted else "note"
        remedy = "set CUDA_VISIBLE_DEVICES right, or install a torch that is built for CUDA (pip install torch)"
        return Finding(level, "torch", f"{version} finds {found} GPU(s) of the {there} that are here; {remedy}")
    return Finding("ok", "torch", f"{version} finds {found} GPU(s)") if found else None


def driver(node: Node) -> Finding:
    """Check that the driver is new enough for CUDA 13."""
    branch = int(node.driver.split(".")[0]) if node.driver.split(".")[0].isdigit() else 0
    if branch < OLDEST_DRIVER:
        return Finding("FAIL", "driver", f"{node.driver}: CUDA 13 needs {OLDEST_DRIVER} or later; update the driver")
    return Finding("ok", "driver", f"{node.driver} (CUDA 13 needs {OLDEST_DRIVER})")


def gpu_state(gpu: Gpu) -> list[Finding]:
    """Check a GPU for memory that others hold, memory errors, and clocks that are held down."""
    name, found = f"gpu {gpu.index}", []
    used = gpu.memory - gpu.free
    if used > _IDLE_BYTES:
        found.append(
            Finding(
                "FAIL", name, f"{used / _GB:.1f} of {gpu.memory / _GB:.0f} GB are taken; end what runs (nvidia-smi)"
            )
        )
    if gpu.ecc_errors:
        found.append(
            Finding("FAIL", name, f"{gpu.ecc_errors} uncorrected memory errors; take the node out and reset this GPU")
        )
    if gpu.slowed:
        found.append(
            Finding("FAIL", name, f"its clocks are held down: {', '.join(gpu.slowed)}; look at cooling and power")
        )
    if not found:
        found.append(Finding("ok", name, f"{gpu.free / _GB:.0f} of {gpu.memory / _GB:.0f} GB free, {gpu.power:.0f} W"))
    return found


def gpu_unread(index: int, reason: str) -> Finding:
    """Report a GPU that NVML counts but cannot read."""
    return Finding(
        "FAIL",
        f"gpu {index}",
        f"it cannot be read ({reason}); take the node out until it is rebooted, or this GPU reset",
    )


def _software(patient: Patient) -> Iterator[Finding]:
    summary, there = _summary("apex"), util.find_spec("transformer_engine") is not None
    names = (*_PACKAGES, *(_PACKAGES_ON_GPUS if patient.gpus_per_node else ()))
    # Without it layers are Megatron's local ones, unless the run file insists.
    names += ("transformer-engine",) if patient.gpus_per_node and (there or patient.transformer_engine is True) else ()
    yield from versions({name: _version(name) for name in names}, tested_versions(patient.constraints))
    spec = None if summary is None else util.find_spec("apex")
    folders = spec.submodule_search_locations or [] if spec else []
    modules = [path.stem for folder in folders for path in Path(folder).iterdir()]
    ours = "optimizers" in modules
    apex_failure = _import_failure("apex.optimizers") if ours else ""
    yield apex(summary, modules, apex_failure)
    engine = _import_failure("transformer_engine.pytorch.optimizers") if there else ""
    if engine:
        yield transformer_engine(engine)
    on_gpu, layers = patient.gpus_per_node > 0, patient.transformer_engine
    layers = there and (on_gpu if layers == "auto" else layers)
    yield from fused_paths(there and not engine, ours and not apex_failure, on_gpu, layers)
    yield attention_kernels(patient.attention, on_gpu)


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


def _import_failure(module: str) -> str:
    """Return why Megatron cannot import its optimizers from there; empty where it can. It tries the same import.

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


def tested_versions(text: str) -> dict[str, str]:
    """Return version by package, of a file of constraints. A line for another Python is left out."""
    found = re.findall(r"^([A-Za-z0-9_.-]+)==([^\s;#]+)\s*(?:#.*)?$", text, flags=re.MULTILINE)
    return {name.lower().replace("_", "-"): version for name, version in found}


def versions(installed: Mapping[str, str | None], tested: Mapping[str, str]) -> list[Finding]:
    """Compare the packages that decide about numbers with those that the tests ran with; None is not installed."""
    found = []
    for name, version in installed.items():
        wanted = tested.get(name)
        plain = version.partition("+")[0] if version else None
        if version is None:
            wanted = _REQUIREMENTS.get(name, name)
            found.append(Finding("FAIL", "versions", f"{name} is not installed; pip install '{wanted}'"))
        elif wanted is not None and plain != wanted:
            found.append(Finding("note", "versions", f"{name} {version}; tested is {wanted} (constraints.txt)"))
        else:
            found.append(Finding("ok", "versions", f"{name} {version}"))
    return found


def apex(summary: str | None, modules: Sequence[str], failure: str) -> Finding:
    """Tell which package is called apex. `summary`: of the installed distribution, None where there is none.

    NVIDIA's has `apex.optimizers`; the one on PyPI is a web framework of that name. `failure`: why NVIDIA's cannot be
    imported, empty where it can.
    """
    if summary is None:
        return Finding("ok", "apex", "not installed, which is fine: NVIDIA's is used where it is")
    if "optimizers" not in modules:
        return Finding(
            "FAIL",
            "apex",
            f"this is PyPI's unrelated package ({summary or 'no summary'}), and Megatron would import it; "
            "pip uninstall apex",
        )
    if failure:
        return _not_imported("apex", failure)
    return Finding("ok", "apex", "NVIDIA's")


def transformer_engine(failure: str) -> Finding:
    """Report an installed Transformer Engine that cannot be imported because of `failure`."""
    return _not_imported("transformer-engine", failure)


def _not_imported(package: str, failure: str) -> Finding:
    """Megatron goes on without where the import says that something is missing, and ends at any other error."""
    return Finding(
        "FAIL",
        package,
        f"installed, but Megatron cannot import its optimizers ({failure}); build it for this torch, or pip uninstall "
        f"{package}",
    )


def fused_paths(transformer_engine: bool, nvidia_apex: bool, on_gpu: bool, layers: bool) -> list[Finding]:
    """Name the computations that are fused, and why.

    `transformer_engine`, `nvidia_apex`: Megatron can import optimizers from there. `layers`: those of the model are
    Transformer Engine's.
    """
    if transformer_engine or nvidia_apex:
        whose = "Transformer Engine's" if transformer_engine else "apex's"
        adam = f"{whose} fused one, because it is installed and can be imported"
    else:
        ours = "torch's fused kernel" if on_gpu else "torch's grouped operations"
        adam = f"{ours}, because neither Transformer Engine's nor NVIDIA apex's can be imported"
    where = "" if on_gpu else " (no GPU is used)"
    norms = (
        "Transformer Engine's, with the linear maps behind them (policy.transformer_engine)"
        if layers
        else "torch's rms_norm, because the layers are Megatron's local ones"
    )
    return [
        Finding("ok", "fused", f"Adam: {adam}{where}"),
        Finding("ok", "fused", f"norms: {norms}"),
        Finding("ok", "fused", "gradient accumulation: not fused; the model sets gradient_accumulation_fusion=False"),
    ]


def attention_kernels(wanted: AttentionName, on_gpu: bool) -> Finding:
    """Name the kernels that a run would take here in bfloat16, without its model; ranks try them when they start."""
    capability = torch.cuda.get_device_capability() if on_gpu and torch.cuda.is_available() else None
    site = Site(gpu=on_gpu, dtype="bfloat16", capability=capability)
    try:
        kernels = choose(wanted, site, software_here())
    except UserError as error:
        return Finding("FAIL", "fused", f"attention: {error}")
    return Finding("ok", "fused", f"attention: {kernels}")


def mounts(missing: Sequence[str]) -> Finding:
    """Check that the folders that the run names are seen from here, in a container too."""
    if missing:
        return Finding(
            "FAIL", "mounts", f"not seen here: {', '.join(missing)}; mount them into the container (submit --mount)"
        )
    return Finding("ok", "mounts", "every folder that the run file names is seen")


def disk_space(path: str, free: int, checkpoint: int, whole: int, there: int) -> Finding:
    """Check for room for two checkpoints (the newest stays until the next is complete), then for the whole run.

    Bytes: `whole` are predicted of the run at its end, of which `there` are written already.
    """
    needed, left = 2 * checkpoint, max(whole - there, 0)
    text = f"{path}: {_size(free)} free, two checkpoints take {_size(needed)}"
    if free < needed and there < needed:
        return Finding("FAIL", "disk", f"{text}; free space or set --runs")
    written = f", {_size(there)} of them written" if there else ""
    text = f"{text}, the whole run about {_size(whole)}{written}"
    if free < left:
        keys = "checkpoint.keep_last, keep_every and log.rollouts.keep_last say what stays (megasharp plan)"
        return Finding("note", "disk", f"{text}: it would fill the disk; {keys}, or free space")
    return Finding("ok", "disk", text)


# The parts of a run's folder that a plan counts.
_PLANNED = ("checkpoints", "rollouts", "rollout_tokens", "metrics.jsonl", "tensorboard")


def planned_bytes(run: Path) -> int:
    """Return the size of what a run has written so far of that; 0 before it begins. Files may go meanwhile."""
    total = 0
    for part in _PLANNED:
        for path in (run / part, *(run / part).rglob("*")):
            with suppress(OSError):
                total += path.stat().st_size if path.is_file() else 0
    return total


def _size(count: int) -> str:
    """Bytes as text in which a small model's are not 0.0."""
    return f"{count / _GB:.1f} GB" if count >= _GB else f"{count / 1e6:.1f} MB"


def _existing(path: Path) -> Path:
    """The nearest above that exists: the run's own folder may come later, but not below what is no folder."""
    return next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())


def _canary(patient: Patient) -> Finding:
    """Write and read a file where checkpoints go; between nodes, in their meeting folder."""
    place = patient.place.meeting or _existing(patient.run or Path.cwd())
    written = f"{socket.gethostname()} {os.getpid()}"
    try:
        with Scratch(".megasharp-canary-", place) as folder:
            (folder / "canary").write_text(written)
            read = (folder / "canary").read_text()
    except OSError as error:
        return Finding("FAIL", "file system", f"{place} cannot be written ({one_line(error)}); repair it or set --runs")
    if read != written:
        return Finding("FAIL", "file system", f"{place} gave back something else than was written; do not train on it")
    return Finding("ok", "file system", f"{place}: a file was written and read")


def _port() -> Finding:
    """Open a port, as servers will."""
    try:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
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
        variables = _links(patient)
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
    return all_reduce(world, bus_bandwidth(MEBIBYTES[device] << 20, seconds, world), expected, where)


def _links(patient: Patient) -> Mapping[str, str]:
    if len(patient.place.nodes) < 2:
        names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        return {name: "lo" for name in names if name not in os.environ}
    others = [name for number, name in enumerate(patient.place.nodes) if number != patient.place.node]
    return ray_node.variables(ray_node.choose(ray_node.interfaces(), others, os.environ), ray_node.adapters())


def bus_bandwidth(size: int, seconds: float, ranks: int) -> float:
    """Return bytes/s of an all-reduce of `size` bytes: size / time x 2 (n - 1) / n (nccl-tests, PERFORMANCE.md)."""
    return size / seconds * 2 * (ranks - 1) / ranks


def all_reduce(ranks: int, bandwidth: float, expected: float | None, where: str) -> Finding:
    """Judge a bandwidth by `expected` bytes per second, of which half is demanded; None: nothing to compare with."""
    text = f"{ranks} ranks {where}: bus bandwidth {bandwidth / _GB:.2f} GB/s"
    if expected is None:
        return Finding("ok", "all-reduce", f"{text}; no expected value for gloo on CPUs")
    if bandwidth < expected / 2:
        return Finding(
            "FAIL",
            "all-reduce",
            f"{text}, expected about {expected / _GB:.0f}; NCCL_DEBUG=INFO says which interface and adapters are used",
        )
    return Finding("ok", "all-reduce", f"{text}, expected about {expected / _GB:.0f}")


def across(names: Sequence[str], command: Sequence[str]) -> list[str]:
    """Return the srun command that runs a doctor on each node of this job."""
    return ["srun", f"--nodes={len(names)}", "--ntasks-per-node=1", "--cpu-bind=none", "--mpi=none", *command]


def node_names(listed: str) -> list[str]:
    """Return the names that `scontrol show hostnames` printed."""
    return re.findall(r"\S+", listed)
