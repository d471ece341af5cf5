"""Which interface and which adapters are chosen, on machines that are made up."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import each_case

from megasharp.cluster.slurm.ray_node import Interface, adapters, choose, interfaces, source_address, variables
from megasharp.common.errors import UserError

ETH, IB, LO = Interface("eth0", "192.168.1.7"), Interface("ib0", "10.1.0.7"), Interface("lo", "127.0.0.1")
HERE = [ETH, IB, LO]


def source(peer: str) -> str | None:
    return {"node2": "10.1.0.7", "me": "127.0.0.1"}.get(peer)


def test_the_interface_that_leads_to_the_other_nodes() -> None:
    assert choose(HERE, ["gone", "me", "node2"], {}, source) == IB


def test_a_name_or_a_subnet_overrules_what_is_found() -> None:
    assert choose(HERE, ["node2"], {"MEGASHARP_INTERFACE": "eth0"}, source) == ETH
    assert choose(HERE, ["node2"], {"MEGASHARP_SUBNET": "192.168.0.0/16"}, source) == ETH


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({}, "no interface leads to me; set MEGASHARP_INTERFACE .* eth0 192.168.1.7, ib0 10.1.0.7, lo"),
        ({"MEGASHARP_INTERFACE": "ib9"}, "MEGASHARP_INTERFACE=ib9: node .* has no such interface; it has: eth0"),
        ({"MEGASHARP_SUBNET": "172.16.0.0/12"}, "MEGASHARP_SUBNET=172.16.0.0/12: node"),
        ({"MEGASHARP_SUBNET": "ten"}, "give a subnet such as 10.1.0.0/16"),
    ],
)
def test_where_none_is_found_one_line_says_what_there_is(environment: dict[str, str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        choose(HERE, ["me"], environment, source)


def test_this_machine_has_a_loopback_interface_and_it_comes_last() -> None:
    assert interfaces()[-1].address == "127.0.0.1"
    assert source_address("127.0.0.1") == "127.0.0.1"
    assert source_address("no.such.host.invalid") is None


# The kernel calls a port's speed by InfiniBand's name for it on Ethernet too.
NDR = ROCE_400 = "400 Gb/sec (4X NDR)"
ROCE_100 = "100 Gb/sec (4X EDR)"
INFINIBAND, ETHERNET = "InfiniBand", "Ethernet"


def stand_in_sysfs(folder: Path, *ports: tuple[str, str, str, str]) -> Path:
    """A stand-in for /sys/class/infiniband: (adapter, link layer, state, rate) of each one's only port."""
    for name, layer, state, rate in ports:
        place = folder / name / "ports" / "1"
        place.mkdir(parents=True)
        for file, text in (("link_layer", layer), ("state", state), ("rate", rate)):
            (place / file).write_text(f"{text}\n")
    return folder


UP, DOWN = "4: ACTIVE", "1: DOWN"
COMPUTE = [(f"mlx5_{number}", INFINIBAND, UP, NDR) for number in range(8)]
OVER_ETHERNET = [(f"mlx5_{number}", ETHERNET, UP, ROCE_400) for number in range(8)]
EIGHT = [f"mlx5_{number}:1" for number in range(8)]


@each_case(
    ("ports", "expected"),
    [
        # DGX H200: eight NDR adapters, and two on Ethernet that lead to the storage.
        ([*COMPUTE, ("mlx5_8", ETHERNET, UP, ROCE_100), ("mlx5_9", ETHERNET, UP, ROCE_100)], EIGHT),
        # The storage's are as fast; an adapter without its cable counts for nothing.
        ([*COMPUTE, ("mlx5_8", ETHERNET, UP, ROCE_400), ("mlx5_9", INFINIBAND, DOWN, NDR)], EIGHT),
        # Storage on InfiniBand too, at a lower rate.
        ([*COMPUTE, ("mlx5_8", INFINIBAND, UP, "200 Gb/sec (4X HDR)")], EIGHT),
        # RoCE alone: eight of 400 Gbit/s, and management at 25.
        ([*OVER_ETHERNET, ("mlx5_bond_0", ETHERNET, UP, "25 Gb/sec (1X EDR)")], EIGHT),
        # All InfiniBand is down.
        ([("mlx5_0", INFINIBAND, DOWN, NDR), ("mlx5_1", ETHERNET, UP, ROCE_100)], ["mlx5_1:1"]),
        ([], []),
    ],
)
def test_adapters_of_one_link_layer_and_one_speed(
    ports: list[tuple[str, str, str, str]], expected: list[str], tmp_path: Path
) -> None:
    assert adapters(stand_in_sysfs(tmp_path, *ports)) == expected


def test_what_is_set_already_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5_9")
    assert variables(IB, ["mlx5_0:1"]) == {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "=ib0"}
    monkeypatch.delenv("NCCL_IB_HCA")
    assert variables(IB, ["mlx5_0:1", "mlx5_1:1"])["NCCL_IB_HCA"] == "=mlx5_0:1,mlx5_1:1"
