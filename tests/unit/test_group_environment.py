"""Variables of gloo, NCCL and CUDA: what is set where, whose value counts, and that ranks and engines agree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import each_case

from megasharp.common.group_environment import (
    CUMEM,
    NVLS,
    QUEUES,
    in_order,
    keep_to,
    out_of_order,
    overruled,
    shared_with_engines,
)
from megasharp.common.records import ParallelLayout
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
    keep_to("lo", found)
    assert found == {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "=lo"}


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
    """What SGLang 0.5.21 makes of its environment (`_set_envs_and_config`), one node."""
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
    run: Any = SimpleNamespace(config=validate(RunConfig, tree, "minimal"), layout=ParallelLayout(tp=2))
    slow, ignored = summary.environment_notes(run)
    assert slow.startswith("CUDA_DEVICE_MAX_CONNECTIONS=8 is kept, but on this GPU") and slow.endswith("unset it")
    assert ignored.startswith(
        "NCCL_CUMEM_ENABLE=0 of the environment does not count: rollout.sglang.enable_symm_mem sets the other value"
    )
    for name in (QUEUES, CUMEM):
        monkeypatch.delenv(name)
    assert summary.environment_notes(run) == []
