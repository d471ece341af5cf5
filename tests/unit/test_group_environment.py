"""Variables of gloo, NCCL and CUDA: what is set where, whose value counts, and that ranks and engines agree."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from cases import each_case

from megasharp.cluster.ray_runtime import engine_actors, rank_actor
from megasharp.cluster.ray_runtime.rank_actor import RankFacts
from megasharp.common.group_environment import (
    CUMEM,
    NVLS,
    QUEUES,
    adapters,
    in_order,
    keep_to,
    out_of_order,
    overruled,
    shared_with_engines,
)
from megasharp.common.layout import ParallelLayout
from megasharp.config.core import apply_overrides, parse_yaml, validate
from megasharp.config.run_config import RunConfig
from megasharp.learner.learner import POLICY
from megasharp.learner.ranks import processes
from megasharp.rollout.sglang.client.launch import FleetSettings, environment
from megasharp.trainer import placement
from megasharp.trainer.resolve import summary
from megasharp.trainer.resolve.engine_settings import choose_transport, group_variables

MINIMAL = """
name: minimal
steps: 3
model: {path: some/folder}
data: {task: countdown, path: train.jsonl, max_prompt_tokens: 64, max_response_tokens: 32}
rollout: {engine: sglang}
"""
GPUS, APART = "cluster.gpus_per_node=8", "cluster.placement=disaggregated"
HOPPER, BLACKWELL = (9, 0), (10, 0)


def test_one_interface_for_both_and_the_users_stays() -> None:
    found = {"GLOO_SOCKET_IFNAME": "ib0"}
    keep_to("lo", environment=found)
    assert found == {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "=lo"}


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


def actors_environment(actor: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return the variables that an actor leaves to NCCL and its children, on a node whose address is the loopback."""
    address, nothing = "127.0.0.1", lambda *_: None
    if actor == "rank":
        monkeypatch.setattr(rank_actor, "redirect_output", nothing)
        monkeypatch.setattr(rank_actor, "write_stacks_on_signal", nothing)
        monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "node"))
        facts = RankFacts(0, address, torch.device("cpu"), folder / "rank_0.log", torch.get_num_threads())
        assert rank_actor.RankActor(facts).prepare() == processes.Returned(None)
        return dict(os.environ)
    started: list[dict[str, str]] = []
    monkeypatch.setattr(engine_actors, "check_python", nothing)
    monkeypatch.setattr(
        engine_actors,
        "start_one",
        lambda settings, *_: started.append(environment(settings, 0, os.environ, "10.0.0.7")),
    )
    engine_actors.EngineActor(FleetSettings(folder, folder, folder), 0, address, "key").start()
    return started[0]


@each_case("actor", ["rank", "engine"])
@each_case(("given", "expected"), [(None, "=" + ",".join(EIGHT)), ("mlx5_9", "mlx5_9")])
def test_actors_of_any_ray_choose_the_adapters_of_their_own_node(
    actor: str, given: str | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Ray job's too, whose nodes no program of ours has started."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA"):
        monkeypatch.setenv(name, given or "")
        if given is None:
            monkeypatch.delenv(name)
    found = adapters(stand_in_sysfs(tmp_path / "sys", *COMPUTE, ("mlx5_8", ETHERNET, UP, ROCE_400)))
    monkeypatch.setattr(rank_actor if actor == "rank" else engine_actors, "adapters", lambda: found)
    assert actors_environment(actor, tmp_path, monkeypatch)["NCCL_IB_HCA"] == expected


@each_case(
    ("split", "capability", "given", "expected", "slow"),
    [
        (True, HOPPER, {}, {QUEUES: "1"}, None),
        (True, HOPPER, {QUEUES: "8"}, {QUEUES: "8"}, "8"),
        (False, HOPPER, {}, {}, None),
        (False, HOPPER, {QUEUES: "8"}, {}, None),
        (True, BLACKWELL, {}, {}, None),
        (True, BLACKWELL, {QUEUES: "32"}, {}, None),
        (True, None, {}, {}, None),
        (True, None, {QUEUES: "8"}, {}, "8"),
    ],
)
def test_one_queue_where_collectives_hide_behind_products(
    split: bool,
    capability: tuple[int, int] | None,
    given: dict[str, str],
    expected: dict[str, str],
    slow: str | None,
) -> None:
    assert in_order(split, capability, given) == expected
    assert out_of_order(split, capability, given) == slow


def sglangs_own(flags: Mapping[str, bool], inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment as SGLang 0.5.21 changes it (`_set_envs_and_config`), on one node."""
    found = dict(inherited)
    symmetric, multicast = flags.get("enable_symm_mem", False), flags.get("enable_nccl_nvls", False)
    if CUMEM not in found or symmetric:
        found[CUMEM] = str(int(symmetric))
    if NVLS not in found or multicast or symmetric:
        found[NVLS] = str(int(multicast or symmetric))
    return {name: found[name] for name in (CUMEM, NVLS)}


@each_case("flags", [{}, {"enable_symm_mem": True}, {"enable_nccl_nvls": True}])
@each_case("given", [{}, {CUMEM: "1"}, {NVLS: "1"}, {CUMEM: "1", NVLS: "2"}, {CUMEM: "0", NVLS: "0"}])
@each_case(
    ("overrides", "transport"),
    [
        ([], "shared_memory"),
        ([APART], "gloo"),
        (["sync.transport=ipc"], "ipc"),
        (["sync.transport=disk"], "disk"),
        ([GPUS], "ipc"),
        ([GPUS, APART, "sync.transport=disk"], "disk"),
        ([GPUS, APART], "nccl"),
        ([GPUS, APART, "cluster.backend=ray"], "nccl"),
    ],
)
def test_ranks_and_engines_agree_where_they_share_a_group(
    overrides: list[str],
    transport: str,
    given: dict[str, str],
    flags: dict[str, bool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in (CUMEM, NVLS):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    config = validate(RunConfig, apply_overrides(parse_yaml(MINIMAL, "minimal"), overrides), "minimal")
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"sglang": flags})})
    assert choose_transport(config, "minimal") == transport
    shared = group_variables(config)
    # On another node the engine's actor has another environment than the driver.
    settings = FleetSettings(Path(), tmp_path, tmp_path, config.rollout, variables=shared)
    elsewhere = sglangs_own(flags, environment(settings, 0, {CUMEM: "7", NVLS: "7"}, "10.0.0.7"))
    if transport != "nccl":
        assert shared == {}, "ranks keep NCCL's own choice where no engine is in a group of theirs"
        return
    assert elsewhere == shared
    wanted = {CUMEM: "0", NVLS: "0", **given}
    assert flags or shared == wanted, "the user's value wins"
    assert overruled(flags, given) == [f"{name}={given[name]}" for name in given if given[name] != shared[name]]


def test_an_engine_without_variables_has_those_of_the_process_that_starts_it(tmp_path: Path) -> None:
    plain = FleetSettings(Path(), tmp_path, tmp_path)
    assert environment(plain, 0, {CUMEM: "1"})[CUMEM] == "1"
    assert environment(replace(plain, variables={CUMEM: "0"}), 0, {CUMEM: "1"})[CUMEM] == "0"
    assert shared_with_engines({}, {}) == {CUMEM: "0", NVLS: "0"}


def test_ranks_of_this_machine_are_started_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever starts the run: neither a job's file nor a launcher sets anything."""
    started: list[dict[str, str]] = []
    monkeypatch.setattr(processes, "ProcessRanks", lambda *given: started.append(given[-1]))
    monkeypatch.setattr(placement, "check_enough", lambda *given: None)
    monkeypatch.setattr(placement, "gpus_here", lambda config: [str(number) for number in range(8)])
    monkeypatch.setattr(placement, "compute_capability", lambda: HOPPER)
    for name in (QUEUES, CUMEM, NVLS):
        monkeypatch.delenv(name, raising=False)
    tree = apply_overrides(parse_yaml(MINIMAL, "minimal"), [GPUS, APART, "policy.tp=2", "rollout.engines=2"])
    shape: Any = SimpleNamespace(config=validate(RunConfig, tree, "minimal"), architecture=None)
    monkeypatch.setattr(placement, "cpu_threads", lambda *given: 1)
    settings: Any = {POLICY: SimpleNamespace(layout=ParallelLayout(tp=2))}
    placement.LocalPlacement(shape).ranks(settings, torch.device("cuda"), tmp_path)
    assert started == [{QUEUES: "1", CUMEM: "0", NVLS: "0"}]


def test_values_that_cost_or_do_not_count_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary, "compute_capability", lambda: HOPPER)
    monkeypatch.delenv(NVLS, raising=False)
    monkeypatch.setenv(CUMEM, "0")
    monkeypatch.setenv(QUEUES, "8")
    tree = apply_overrides(parse_yaml(MINIMAL, "minimal"), [GPUS, APART, "rollout.sglang.enable_symm_mem=true"])
    run = (validate(RunConfig, tree, "minimal"), ParallelLayout(tp=2))
    slow, ignored = summary.environment_notes(*run)
    assert slow.startswith("CUDA_DEVICE_MAX_CONNECTIONS=8 is kept, but on this GPU") and slow.endswith("unset it")
    monkeypatch.setattr(summary, "compute_capability", lambda: None)
    on_a_login_node, _ = summary.environment_notes(*run)
    assert on_a_login_node == slow.replace("this GPU", "Hopper and older (no GPU is here to ask)")
    assert ignored.startswith(
        "NCCL_CUMEM_ENABLE=0 of the environment does not count: rollout.sglang.enable_symm_mem sets the other value"
    )
    for name in (QUEUES, CUMEM):
        monkeypatch.delenv(name)
    assert summary.environment_notes(*run) == []
