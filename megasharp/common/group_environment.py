"""Variables of processes that compute together: what gloo, NCCL and CUDA read once, before a process first uses them.

Trainer, engines and jobs take them from here, however they are started. Unless said otherwise a value that the user has
set stays.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_INFINIBAND = Path("/sys/class/infiniband")
_NVML = "libnvidia-ml.so.1"
# From this compute capability on (Blackwell) kernels begin in the order in which they were launched by themselves.
_ORDERED_FROM = 10
_ORDERS_BY_QUEUE = (9, 0)
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
CUMEM, NVLS = "NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE"
# Flags of SGLang that set these variables in its processes, whatever was set before.
OVERRULING = ("enable_symm_mem", "enable_nccl_nvls")


def network_variables(interface: str, hcas: Sequence[str] = ()) -> dict[str, str]:
    """Return the variables that keep gloo and NCCL on one network interface, and NCCL on these adapters.

    NCCL takes a name for the beginning of one, unless an equals sign comes before it.
    """
    found = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
    return found | ({"NCCL_IB_HCA": "=" + ",".join(hcas)} if hcas else {})


def keep_to(interface: str, hcas: Sequence[str] = (), environment: MutableMapping[str, str] = os.environ) -> None:
    """Keep gloo and NCCL on this interface and these adapters, where no other is set.

    By themselves gloo listens at the address of the machine's name, wherever that leads, and NCCL at the first found.
    """
    for name, value in network_variables(interface, hcas).items():
        environment.setdefault(name, value)


def adapters(folder: Path = _INFINIBAND) -> list[str]:
    """List the adapters that NCCL is to use, as NCCL_IB_HCA names them: of one link layer and one speed, never mixed.

    The fastest active InfiniBand ports; where there is none, the fastest of RDMA over Ethernet (RoCE), whose GID NCCL
    chooses itself from 2.21 on. Ethernet beside InfiniBand is a node's way to its storage.
    """
    ports = [_port(state) for state in sorted(folder.glob("*/ports/*/state")) if "ACTIVE" in _text(state)]
    of_one_kind = [port for port in ports if port.infiniband] or ports
    best = max((port.rate for port in of_one_kind), default=0.0)
    return [port.name for port in of_one_kind if port.rate == best]


@dataclass(frozen=True, slots=True)
class _Port:
    """An adapter's port, in NCCL's words, and its Gbit/s."""

    name: str
    infiniband: bool
    rate: float


def _port(state: Path) -> _Port:
    # The kernel writes "400 Gb/sec (4X NDR)".
    rate = (_text(state.with_name("rate")).split(maxsplit=1) or ["0"])[0]
    return _Port(
        name=f"{state.parts[-4]}:{state.parts[-2]}",
        infiniband=_text(state.with_name("link_layer")).strip() == "InfiniBand",
        rate=float(rate) if rate.replace(".", "", 1).isdigit() else 0.0,
    )


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""


def shared_with_engines(flags: Mapping[str, object], environment: Mapping[str, str]) -> dict[str, str]:
    """Return what ranks and SGLang's engines must both have where NCCL joins them in one group.

    Processes of one node that allocate in different ways cannot open each other's memory. SGLang 0.5.21 sets both to 0
    where they are not set, and what `flags` (those of its ServerArgs) ask for in any case.
    """
    symmetric, multicast = (bool(flags.get(name)) for name in OVERRULING)
    return {
        CUMEM: "1" if symmetric else environment.get(CUMEM, "0"),
        NVLS: "1" if symmetric or multicast else environment.get(NVLS, "0"),
    }


def as_set(environment: Mapping[str, str]) -> dict[str, str | None]:
    """Return what this process has of `shared_with_engines`; None where NCCL chooses."""
    return {name: environment.get(name) for name in (CUMEM, NVLS)}


def overruled(flags: Mapping[str, object], environment: Mapping[str, str]) -> list[str]:
    """Return the variables of the user's that `flags` overrule, each as NAME=VALUE."""
    shared = shared_with_engines(flags, environment)
    return [f"{name}={environment[name]}" for name in shared if environment.get(name, shared[name]) != shared[name]]


def in_order(split: bool, capability: tuple[int, int] | None, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variable by which a rank's kernels begin in the order in which they are launched.

    `split`: ranks share tensors (tp or cp above 1). Megatron launches a collective before the product that hides it
    (`megatron.core.tensor_parallel.layers`); with CUDA's usual eight queues the product may begin first. Nothing is set
    without such collectives, from Blackwell on, and where no GPU answers (`capability` None).
    """
    if not split or capability is None or capability[0] >= _ORDERED_FROM:
        return {}
    return {QUEUES: environment.get(QUEUES, "1")}


def out_of_order(split: bool, capability: tuple[int, int] | None, environment: Mapping[str, str]) -> str | None:
    """Return the user's number of queues where it costs overlap of communication; None where it does not.

    Without a GPU here (`capability` None) it is taken for one where it would.
    """
    chosen = in_order(split, capability or _ORDERS_BY_QUEUE, environment).get(QUEUES, "1")
    return None if chosen == "1" else chosen


def compute_capability() -> tuple[int, int] | None:
    """Return the compute capability of this machine's first GPU; None where NVML finds none.

    Asks NVML, not CUDA, which would read its variables and keep them.
    """
    try:
        nvml = ctypes.CDLL(_NVML)
    except OSError:
        return None
    if nvml.nvmlInit_v2() != 0:
        return None
    try:
        handle, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
        found = nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle)) == 0
        found = found and nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor)) == 0
        return (major.value, minor.value) if found else None
    finally:
        nvml.nvmlShutdown()
