"""Which of a node's addresses the other nodes reach, and which InfiniBand adapters are up. Found, not configured.

`MEGASHARP_INTERFACE` (a name) or `MEGASHARP_SUBNET` (as 10.1.0.0/16) overrule what is found, and so does any variable
of gloo or NCCL that is set already.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from megasharp.errors import UserError

INTERFACE, SUBNET = "MEGASHARP_INTERFACE", "MEGASHARP_SUBNET"
_INFINIBAND = Path("/sys/class/infiniband")
# Any port: nothing is sent, the kernel only says which of its addresses it would send from.
_PORT = 9


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface and one of its IPv4 addresses."""

    name: str
    address: str


def interfaces() -> list[Interface]:
    """Those of this machine, the loopback interface last; without link-local addresses, which reach nobody."""
    found = [
        Interface(name, one.address)
        for name, addresses in psutil.net_if_addrs().items()
        for one in addresses
        if one.family == socket.AF_INET and not ipaddress.ip_address(one.address).is_link_local
    ]
    return sorted(found, key=lambda one: ipaddress.ip_address(one.address).is_loopback)


def source_address(peer: str) -> str | None:
    """From which of its addresses this machine would send to `peer`; None where it knows no way."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            asked.connect((peer, _PORT))
        except OSError:
            return None
        return str(asked.getsockname()[0])


def choose(
    here: Sequence[Interface],
    peers: Sequence[str],
    environment: Mapping[str, str],
    source: Callable[[str], str | None] = source_address,
) -> Interface:
    """The interface by which the other nodes `peers` (host names) are reached. Raises UserError where there is none."""
    named, subnet = environment.get(INTERFACE), environment.get(SUBNET)
    if named:
        return _first([one for one in here if one.name == named], f"{INTERFACE}={named}", here)
    if subnet:
        return _first([one for one in here if _inside(one, subnet)], f"{SUBNET}={subnet}", here)
    for peer in peers:
        address = source(peer)
        found = next((one for one in here if one.address == address), None)
        # The machine's own name leads to itself, which tells nothing.
        if found is not None and not ipaddress.ip_address(found.address).is_loopback:
            return found
    raise UserError(
        f"node {socket.gethostname()}: no interface leads to {', '.join(peers) or 'other nodes'}; "
        f"set {INTERFACE} or {SUBNET} to one of: {_listed(here)}"
    )


def _inside(one: Interface, subnet: str) -> bool:
    try:
        return ipaddress.ip_address(one.address) in ipaddress.ip_network(subnet, strict=False)
    except ValueError:
        raise UserError(f"{SUBNET}={subnet}: give a subnet such as 10.1.0.0/16") from None


def _first(found: Sequence[Interface], asked: str, here: Sequence[Interface]) -> Interface:
    if not found:
        raise UserError(f"{asked}: node {socket.gethostname()} has no such interface; it has: {_listed(here)}")
    return found[0]


def _listed(here: Sequence[Interface]) -> str:
    return ", ".join(f"{one.name} {one.address}" for one in here)


def adapters(folder: Path = _INFINIBAND) -> list[str]:
    """InfiniBand adapters with an active port, as NCCL_IB_HCA names them; of several speeds the fastest ones."""
    rates: dict[str, float] = {}
    for state in sorted(folder.glob("*/ports/*/state")):
        if "ACTIVE" in _text(state):
            name = f"{state.parts[-4]}:{state.parts[-2]}"
            rates[name] = _rate(_text(state.with_name("rate")))
    best = max(rates.values(), default=0.0)
    return [name for name, rate in rates.items() if rate == best]


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""


def _rate(text: str) -> float:
    """The kernel writes "400 Gb/sec (4X NDR)"."""
    first = text.split(maxsplit=1)[0] if text.strip() else "0"
    return float(first) if first.replace(".", "", 1).isdigit() else 0.0


def variables(interface: Interface, hcas: Sequence[str]) -> dict[str, str]:
    """What gloo and NCCL are told, where nothing else was set before."""
    found = {"GLOO_SOCKET_IFNAME": interface.name, "NCCL_SOCKET_IFNAME": f"={interface.name}"}
    if hcas:
        found["NCCL_IB_HCA"] = "=" + ",".join(hcas)
    return {name: value for name, value in found.items() if name not in os.environ}
