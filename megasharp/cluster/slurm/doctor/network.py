"""Network of a node: ports, the variables of NCCL, an all-reduce over all ranks, and clocks."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from megasharp.cluster.slurm import ray_node
from megasharp.cluster.slurm.doctor.all_reduce import MEBIBYTES, measure
from megasharp.cluster.slurm.doctor.findings import GB, Finding, Patient
from megasharp.common.errors import UserError, one_line
from megasharp.common.files import Scratch
from megasharp.common.group_environment import adapters, network_variables

# Bytes per second. 8 x H100 in a node: about 480 GB/s in a published log of NVIDIA's benchmarks. Between nodes each GPU
# has an adapter of 400 Gb/s at most.
_IN_A_NODE, _OF_AN_ADAPTER = 480e9, 50e9
# Nodes with a time server differ by milliseconds.
_SKEW_S = 2.0
_PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "CUDA_LAUNCH", "CUDA_DEVICE_MAX")
# Values that cost speed, and what they cost.
_SLOW_VALUES = {
    ("NCCL_P2P_DISABLE", "1"): "GPUs of a node would copy by way of the host",
    ("NCCL_SHM_DISABLE", "1"): "GPUs without NVLink would speak over the network inside of a node",
    ("NCCL_NET_GDR_LEVEL", "LOC"): "adapters would copy by way of the host",
    ("NCCL_NET_GDR_LEVEL", "0"): "adapters would copy by way of the host",
    ("TORCH_NCCL_BLOCKING_WAIT", "1"): "every collective would be waited for",
    ("CUDA_LAUNCH_BLOCKING", "1"): "every kernel would be waited for",
    ("NCCL_DEBUG", "TRACE"): "every call would be logged",
}


def chosen_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that NCCL, gloo and CUDA's queues read."""
    return {name: value for name, value in sorted(environment.items()) if name.startswith(_PREFIXES)}


def nccl_values(found: Mapping[str, str], nodes: int, hcas: int) -> Iterator[Finding]:
    """Yield warnings for values that cost speed; `hcas` adapters for RDMA are up."""
    costs = dict(_SLOW_VALUES)
    if nodes > 1 and hcas:
        costs["NCCL_IB_DISABLE", "1"] = "nodes would speak TCP beside their InfiniBand"
    for (name, value), cost in costs.items():
        if found.get(name) == value:
            yield Finding("warn", "nccl", f"{name}={value}: {cost}; unset it, or measure what it is for")


def nccl_interfaces(found: Mapping[str, str], names: Sequence[str], nodes: int) -> Finding | None:
    """Check that the interface set for gloo and NCCL is here, and leads to other nodes; None if all are."""
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        text = found.get(variable)
        if not text:
            continue
        chosen = [name for name in names if _matches(text, name, exact=variable.startswith("GLOO"))]
        if not chosen:
            remedy = f"unset it, or set it to one of {', '.join(names)}"
            return Finding("FAIL", "nccl", f"{variable}={text}: this node has no such interface; {remedy}")
        if nodes > 1 and chosen == ["lo"]:
            return Finding("FAIL", "nccl", f"{variable}={text}: loopback leads to no other node; unset it")
    return None


def _matches(text: str, name: str, *, exact: bool) -> bool:
    """NCCL's rule: beginnings of names with commas between, whole names behind "=", all others behind "^"."""
    negative, exact = text.startswith("^"), exact or "=" in text[:2]
    parts = text.lstrip("^=").split(",")
    return negative != any(name == part if exact else name.startswith(part) for part in parts)


def nccl_sides(ranks: Mapping[str, str], engines: Mapping[str, str], one_group: bool) -> Finding:
    """Compare NCCL's variables of ranks with those of engines; in `one_group` they must be the same."""
    names = sorted({name for name in (*ranks, *engines) if name.startswith("NCCL_")})
    differ = [
        f"{name} is {ranks.get(name, 'not set')} and {engines.get(name, 'not set')}"
        for name in names
        if ranks.get(name) != engines.get(name)
    ]
    if not differ:
        return Finding("ok", "nccl", f"ranks and engines get the same {len(names)} variable(s) of NCCL")
    text = f"of ranks and of engines: {'; '.join(differ)}"
    if one_group:
        return Finding(
            "FAIL",
            "nccl",
            f"{text}; weights go through one group of both (sync.transport=nccl), which hangs or fails so: export "
            "them alike before the job",
        )
    return Finding("ok", "nccl", f"{text}; they share no group, so that is fine")


def nccl_versions(trainer: str, engines: str, one_group: bool) -> Finding:
    """Compare NCCL's versions in both Pythons, of which the first two numbers must be the same in `one_group`."""
    text = f"{trainer} in the trainer's Python, {engines} in the engines'"
    if one_group and trainer.split(".")[:2] != engines.split(".")[:2]:
        return Finding(
            "FAIL",
            "nccl",
            f"{text}: both are in one group (sync.transport=nccl); install nvidia-nccl of one version in both",
        )
    return Finding("ok", "nccl", text)


def port() -> Finding:
    """Open a port, as servers will."""
    try:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            one.listen()
            number = one.getsockname()[1]
    except OSError as error:
        return Finding("FAIL", "ports", f"no port can be opened ({one_line(error)}); look at limits and firewall")
    return Finding("ok", "ports", f"free ones are given out (just now {number})")


def links(patient: Patient) -> Mapping[str, str]:
    """Return the variables by which ranks of this node find the others. Raises UserError where no interface does."""
    if len(patient.place.nodes) < 2:
        return {name: value for name, value in network_variables("lo").items() if name not in os.environ}
    others = [name for number, name in enumerate(patient.place.nodes) if number != patient.place.node]
    return ray_node.variables(ray_node.choose(ray_node.interfaces(), others, os.environ), adapters())


def try_all_reduce(patient: Patient) -> Iterator[Finding]:
    """Measure an all-reduce over all ranks; all nodes of a meeting call it."""
    place = patient.place
    nodes = max(len(place.nodes), 1)
    local = patient.gpus_per_node or (2 if nodes == 1 else 1)
    device = "cuda" if patient.gpus_per_node else "cpu"
    world = nodes * local
    if world == 1:
        yield Finding("ok", "all-reduce", "one rank has nobody to reduce with")
        return
    try:
        variables = links(patient)
        if place.meeting is not None:
            measured = measure(place.meeting / "all_reduce", place.node * local, local, world, device, variables)
        else:
            with Scratch("megasharp-doctor-") as folder:
                measured = measure(folder / "all_reduce", 0, local, world, device, variables)
    except UserError as error:
        alone = "GPUs" if patient.gpus_per_node else "processes of this node (the loopback interface)"
        where = ", ".join(place.nodes) or alone
        at_fault = () if nodes > 1 else None
        yield Finding("FAIL", "all-reduce", f"{error}; look at the links between {where}", at_fault)
        return
    if measured is None:
        text = f"took part as node {place.node} of {nodes}; the first node says how fast"
        yield Finding("ok", "all-reduce", text)
        return
    expected = None if device == "cpu" else _IN_A_NODE if nodes == 1 else _OF_AN_ADAPTER * local
    where = "on this node" if nodes == 1 else f"on {nodes} nodes"
    yield all_reduce(world, bus_bandwidth(MEBIBYTES[device] << 20, measured.seconds, world), expected, where)
    if nodes > 1:
        yield clocks(dict(zip(place.nodes, measured.clocks[::local], strict=True)))


def bus_bandwidth(size: int, seconds: float, ranks: int) -> float:
    """Return bytes/s of an all-reduce of `size` bytes: size / time x 2 (n - 1) / n (nccl-tests, PERFORMANCE.md)."""
    return size / seconds * 2 * (ranks - 1) / ranks


def all_reduce(ranks: int, bandwidth: float, expected: float | None, where: str) -> Finding:
    """Judge a bandwidth by `expected` bytes per second, below half of which is a warning; None: nothing to compare."""
    text = f"{ranks} ranks {where}: bus bandwidth {bandwidth / GB:.2f} GB/s"
    if expected is None:
        return Finding("ok", "all-reduce", f"{text}; no expected value for gloo on CPUs")
    text = f"{text}, expected about {expected / GB:.0f}"
    if bandwidth < expected / 2:
        remedy = "NCCL_DEBUG=INFO says which interface and adapters are used"
        slower = "a run works, and steps take longer than megasharp plan says"
        return Finding("warn", "all-reduce", f"{text}: {slower}; {remedy}")
    return Finding("ok", "all-reduce", text)


def clocks(times: Mapping[str, float]) -> Finding:
    """Compare the nodes' clocks, in seconds since 1970, read at one moment."""
    middle = median(times.values())
    off = {name: time - middle for name, time in times.items()}
    spread = max(off.values()) - min(off.values())
    if spread <= _SKEW_S:
        return Finding("ok", "clocks", f"all nodes are within {spread:.3f} s of each other")
    furthest = max(off, key=lambda name: abs(off[name]))
    return Finding(
        "warn",
        "clocks",
        f"{furthest} is {off[furthest]:+.1f} s from the middle of all nodes, which are {spread:.1f} s apart: times in "
        "logs and of files mislead; have a time server set them (chronyc tracking)",
    )
