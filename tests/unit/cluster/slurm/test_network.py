"""The interface that is chosen, on machines that are made up, and what of the network is set."""

from __future__ import annotations

import pytest

from megasharp.cluster.slurm.ray_node import Interface, choose, interfaces, source_address, variables
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


def test_what_is_set_already_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5_9")
    assert variables(IB, ["mlx5_0:1"]) == {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "=ib0"}
    monkeypatch.delenv("NCCL_IB_HCA")
    assert variables(IB, ["mlx5_0:1", "mlx5_1:1"])["NCCL_IB_HCA"] == "=mlx5_0:1,mlx5_1:1"
