"""Weights from Megatron's ranks to real SGLang engines, by every transport; each engine says what it holds.

The oracle is the learner's own export, hashed here.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from engines import closed_form, decided, make_model, routing
from learners import CPU, FOLDERS, REPOSITORY, die_at, interrupt, learner_settings, scale, variables_here
from parity import prompt_of
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from waiting import HANG_S, SOON_S

from megasharp.common.errors import RankDied, UserError
from megasharp.common.group_environment import CUMEM, NVLS, as_set, shared_with_engines
from megasharp.common.layout import ParallelLayout
from megasharp.common.records import GenerateRequest, SamplingParams
from megasharp.config.policy import OffloadedPart
from megasharp.config.rollout import RolloutConfig, SyncConfig
from megasharp.learner.learner import MEMORY, POLICY
from megasharp.learner.ranks.all_ranks import OneRank, Ranks, RanksLearner
from megasharp.learner.ranks.processes import ProcessRanks
from megasharp.rollout.sglang.bucket import Header, Stamp, checksum, laid_out, new_stamp, write_bucket
from megasharp.rollout.sglang.client.api import EngineApi, Refused
from megasharp.rollout.sglang.client.fleet import Fleet, FleetOptions, Sleeper, start_fleet
from megasharp.rollout.sglang.client.launch import FleetSettings
from megasharp.rollout.sglang.client.members import WatchSettings
from megasharp.rollout.sglang.identity import VARIABLES
from megasharp.rollout.sglang.shared_weights import parse_loan
from megasharp.weight_sync import broadcast
from megasharp.weight_sync.colocation import Colocated
from megasharp.weight_sync.endpoints import WeightSource
from megasharp.weight_sync.push import FleetSync, make_transport
from megasharp.weight_sync.receivers import Receivers

pytestmark = pytest.mark.long("fleet-sync")

TRANSPORTS = ("shared_memory", "disk", "gloo", "ipc")
LAYOUTS = {
    "one": ParallelLayout(),
    "tp2": ParallelLayout(tp=2),
    "tp2pp2": ParallelLayout(tp=2, pp=2),
    "ep2": ParallelLayout(dp=2, ep=2),
}
# A tensor in the middle of the policy, which is several buckets of a MiB.
MIDDLE = 20
# An engine that needs longer is taken to hang; on a busy machine a bucket takes a second.
LIMIT_S = 8.0


@contextmanager
def running(
    folder: Path,
    engines: int = 2,
    tp: int = 1,
    sleep: bool = False,
    variables: Mapping[str, str] | None = None,
    folders: Mapping[str, Path] = FOLDERS,
    returns_experts: bool = False,
    **flags: object,
) -> Iterator[tuple[Fleet, list[str]]]:
    small = {"max_total_tokens": 4096, "max_running_requests": 16}
    settings = FleetSettings(
        python=REPOSITORY / ".venv-fleet" / "bin" / "python",
        model=folders[POLICY],
        memory=folders.get(MEMORY),
        log_folder=folder / "logs",
        rollout=RolloutConfig(engines=engines, tp=tp, restarts=0, sglang={**small, **flags}),
        sleep=sleep,
        returns_experts=returns_experts,
        variables=variables or {},
        start_limit_s=HANG_S,
    )
    told: list[str] = []
    fleet = start_fleet(settings, FleetOptions(watch=WatchSettings(probe_every=2.0, suspect_every=0.5)), told.append)
    try:
        yield fleet, told
    finally:
        fleet.close()


@contextmanager
def ranks_of(
    folder: Path, layout: str, offload: tuple[OffloadedPart, ...] = (), folders: Mapping[str, Path] = FOLDERS
) -> Iterator[Ranks]:
    settings = learner_settings(LAYOUTS[layout], offload, folders)
    ranks: Ranks = OneRank(settings, CPU) if layout == "one" else ProcessRanks(settings, CPU, folder / "ranks")
    try:
        yield ranks
    finally:
        ranks.close()


def syncing(fleet: Fleet, folder: Path, transport: Any, memory_version: int = -1, **more: Any) -> FleetSync:
    made = make_transport(fleet, transport, SyncConfig(**{"bucket_mb": 1, **more}), folder=folder / "sync")
    return FleetSync(fleet, made, fleet.version, memory_version)


def hashed(source: WeightSource, prefix: str = "") -> dict[str, str]:
    return {prefix + name: checksum(tensor) for name, tensor in source.export_weights()}


def held(fleet: Fleet) -> list[dict[str, str]]:
    """What every living engine says it holds, tensor by tensor."""
    answers = [member.process.api.checksums(60.0) for member in fleet.members.alive()]
    return [rank for answer in answers for rank in answer]  # type: ignore[union-attr]


def samples(fleet: Fleet, version: int) -> None:
    """Every engine serves this version, whole groups of it."""
    requests = [GenerateRequest((6, 7 + n % 8, 8), (n, n + 1)) for n in range(8)]
    for completions in fleet.generate(requests, SamplingParams(max_tokens=6)):
        assert [[span.version for span in each.version_spans] for each in completions] == [[version]] * 2


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running(tmp_path_factory.mktemp("fleet")) as (fleet, _):
        yield fleet


@pytest.fixture(scope="module")
def versions() -> dict[str, int]:
    """The memory network's version, through the module."""
    return {"memory": -1}


@pytest.mark.parametrize("layout", ["one", "tp2pp2"])
def test_every_transport_brings_every_tensor_to_every_engine(
    fleet: Fleet, versions: dict[str, int], tmp_path: Path, layout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with ranks_of(tmp_path, layout) as ranks:
        policy, memory = RanksLearner(ranks, POLICY), RanksLearner(ranks, MEMORY)
        stays = hashed(memory, "memory.")
        for transport in TRANSPORTS:
            pushing = syncing(fleet, tmp_path, transport, versions["memory"], verify=True)
            for both in (True, False, True):
                policy.call(scale, 1.02)
                memory.call(scale, 0.98)
                began = time.monotonic()
                version = pushing.push(policy, memory if both else None)
                with capsys.disabled():
                    print(f"\n{layout} {transport} both={both} verified: {time.monotonic() - began:.2f} s", end="")
                stays = hashed(memory, "memory.") if both else stays
                want = hashed(policy) | stays
                assert held(fleet) == [want, want]
                assert fleet.version == version
            samples(fleet, version)
            versions["memory"] = pushing.memory_version


def variables_of(fleet: Fleet) -> list[object]:
    """Return the variables of NCCL's groups as the engines' servers have them, once SGLang has set its own."""
    return [(member.process.api.identity(HANG_S) or {})[VARIABLES] for member in fleet.members.alive()]


def test_ranks_and_engines_of_one_group_have_the_same_variables(fleet: Fleet, tmp_path: Path) -> None:
    """By default what SGLang sets itself, which ranks are given too; otherwise what the run decides, in all of them."""
    assert variables_of(fleet) == [shared_with_engines({}, {})] * 2
    shared = shared_with_engines({}, {CUMEM: "1", NVLS: "2"})
    ranks = ProcessRanks(learner_settings(LAYOUTS["tp2"]), CPU, tmp_path / "ranks", variables=shared)
    try:
        assert ranks.call(POLICY, variables_here) == [shared] * 2
        assert as_set(os.environ) == {CUMEM: None, NVLS: None}, "the driver's own environment is as it was"
    finally:
        ranks.close()
    with running(tmp_path, engines=1, variables=shared) as (other, _):
        assert variables_of(other) == [shared]


def test_a_rank_killed_in_the_middle_of_a_push(fleet: Fleet, versions: dict[str, int], tmp_path: Path) -> None:
    """The push ends soon and names it; engines serve nothing until a push is whole."""
    for transport, rank in (("shared_memory", 1), ("gloo", 0), ("ipc", 1)):
        with ranks_of(tmp_path, "tp2") as ranks:
            policy = RanksLearner(ranks, POLICY)
            policy.call(die_at, rank, MIDDLE)
            began = time.monotonic()
            with pytest.raises(RankDied, match=rf"rank {rank} ended with exit code -9 in .*rank_{rank}\.log"):
                syncing(fleet, tmp_path, transport).push(policy)
            assert time.monotonic() - began < SOON_S
        assert not fleet.healthy() and len(fleet.members.alive()) == 2
    with ranks_of(tmp_path, "one") as ranks:
        policy, memory = RanksLearner(ranks, POLICY), RanksLearner(ranks, MEMORY)
        pushing = syncing(fleet, tmp_path, "gloo", versions["memory"])
        version = pushing.push(policy, memory)
        versions["memory"] = pushing.memory_version
        assert held(fleet) == [hashed(policy) | hashed(memory, "memory.")] * 2
        samples(fleet, version)


def leader(engine: int) -> list[int]:
    """An engine's own process."""
    return [engine]


def scheduler(engine: int) -> list[int]:
    """The last of the processes that hold its model: the only one, or that of rank 1."""
    names = {child.pid: " ".join([child.name(), *child.cmdline()]) for child in psutil.Process(engine).children()}
    return [pid for pid, name in names.items() if "scheduler" in name][-1:]


def everything(engine: int) -> list[int]:
    """All of its processes."""
    return [engine, *(child.pid for child in psutil.Process(engine).children(recursive=True))]


def lose_one(fleet: Fleet, ranks: OneRank, pushing: FleetSync, loss: Loss) -> None:
    """The first living engine is struck in a push of both networks.

    The push ends soon, the engine is named, the others hold and serve the new weights.
    """
    policy, memory = RanksLearner(ranks, POLICY), RanksLearner(ranks, MEMORY)
    policy.call(scale, 1.05)
    memory.call(scale, 0.98)
    victim, *others = fleet.members.alive()

    def strike() -> None:
        for pid in loss.whom(victim.process.pid):  # type: ignore[attr-defined]
            os.kill(pid, loss.how)

    interrupt(ranks, loss.during, MIDDLE, strike)
    began = time.monotonic()
    version = pushing.push(policy, memory)
    assert time.monotonic() - began < SOON_S
    assert fleet.members.alive() == others
    assert fleet.members.describe(victim).startswith("dead")
    want = hashed(policy) | hashed(memory, "memory.")
    assert held(fleet) == [want] * len(others)
    samples(fleet, version)


@dataclass(frozen=True)
class Loss:
    """Which processes of an engine get which signal, while which network is exported for which transport."""

    transport: str
    whom: Callable[[int], list[int]]
    how: signal.Signals
    during: str = POLICY


STOP, KILL = signal.SIGSTOP, signal.SIGKILL


@pytest.mark.parametrize(
    "losses",
    [
        [
            Loss("shared_memory", leader, KILL, MEMORY),
            Loss("disk", leader, KILL),
            Loss("ipc", leader, KILL, MEMORY),
            Loss("gloo", scheduler, KILL, MEMORY),
        ],
        [
            Loss("shared_memory", scheduler, STOP),
            Loss("disk", everything, STOP, MEMORY),
            Loss("ipc", everything, STOP),
            Loss("gloo", scheduler, STOP),
        ],
    ],
    ids=["killed", "stopped"],
)
def test_engines_lost_in_the_middle_of_a_push(
    tmp_path: Path, losses: list[Loss], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after another; the last is left."""
    monkeypatch.setattr(broadcast, "SETTLE_S", 5.0)
    count = len(losses) + 1
    with running(tmp_path, engines=count) as (fleet, told), ranks_of(tmp_path, "one") as ranks:
        assert isinstance(ranks, OneRank)
        policy, memory = RanksLearner(ranks, POLICY), RanksLearner(ranks, MEMORY)
        pushing = syncing(fleet, tmp_path, "shared_memory")
        pushing.push(policy, memory)
        for number, loss in enumerate(losses):
            pushing = syncing(fleet, tmp_path, loss.transport, pushing.memory_version, limit_s=LIMIT_S)
            lose_one(fleet, ranks, pushing, loss)
            assert told[number].startswith(f"engine {number} is lost: dead ("), told
        assert pushing.push(policy, memory) == count
        assert held(fleet) == [hashed(policy) | hashed(memory, "memory.")]
        older = FleetSync(fleet, make_transport(fleet, "shared_memory", SyncConfig(), folder=tmp_path), -1)
        with pytest.raises(UserError, match=rf"weights version 0 is older than {count}"):
            older.push(policy)


def test_what_an_engine_holds_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over engines of two ranks: one tensor becomes another on one engine only; then the other loses a rank."""
    with running(tmp_path, tp=2) as (fleet, told), ranks_of(tmp_path, "one") as ranks:
        assert isinstance(ranks, OneRank)
        policy, memory = RanksLearner(ranks, POLICY), RanksLearner(ranks, MEMORY)
        pushing = syncing(fleet, tmp_path, "gloo", memory_version=4, verify=True)
        end = Receivers.end

        def spoil_and_end(receivers: Receivers, stamp: Stamp) -> None:
            name, tensor = next(item for item in policy.export_weights() if item[0] == "model.norm.weight")
            write_bucket(tmp_path / "spoiled", stamp, [(name, tensor + 1)])
            assert fleet.members.all[1].process.api.load_file(tmp_path / "spoiled", 2, HANG_S) is None
            end(receivers, stamp)

        monkeypatch.setattr(Receivers, "end", spoil_and_end)
        pushing.push(policy, memory)
        monkeypatch.undo()
        assert [member.health.condition.value for member in fleet.members.all] == ["serving", "dead"]
        assert "engine 1 is lost" in told[0]
        assert "comparison of checksums: tensor model.norm.weight on rank 0 is not what was sent" in told[0]
        assert held(fleet) == [hashed(policy) | hashed(memory, "memory.")] * 2
        [rank] = scheduler(fleet.members.all[0].process.pid)  # type: ignore[attr-defined]
        interrupt(ranks, POLICY, MIDDLE, lambda: os.kill(rank, signal.SIGKILL))
        began = time.monotonic()
        with pytest.raises(UserError, match=r"no engine is left .*engine 0 is dead \(broadcast of weights: "):
            pushing.push(policy, memory)
        assert time.monotonic() - began < SOON_S


def loans(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What engines are told from now on, one letter a call: a loan with pieces, with handles, or bare; or a bucket."""
    told: list[str] = []
    load = EngineApi.load_lent

    def noted(api: EngineApi, ranks: Sequence[Sequence[tuple[str, str]]], limit: float) -> Refused | None:
        kind, text = ranks[0][0]
        loan = parse_loan(text) if kind == "loan" else None
        told.append("b" if loan is None else "p" if loan.pieces else "h" if loan.memory.handles else "-")
        return load(api, ranks, limit)

    monkeypatch.setattr(EngineApi, "load_lent", noted)
    return told


def test_weights_are_lent_to_an_engine_of_two_ranks_that_sleeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learner's memory is spoiled while the engine samples; what it holds after each push is the oracle's."""
    told = loans(monkeypatch)
    everything: tuple[OffloadedPart, ...] = ("weights", "gradients", "optimizer")
    with running(tmp_path, engines=1, tp=2, sleep=True) as (fleet, _):
        memory_version = -1
        for offload, want in ((everything, ["p", "p", *"hhhh"]), ((), ["p", "p", *"----"])):
            with ranks_of(tmp_path, "one", offload) as ranks:
                policy, memory = RanksLearner(ranks, POLICY), RanksLearner(ranks, MEMORY)
                sleeper = Sleeper(fleet.members)
                sleeper.sleep()
                phases = Colocated([policy, memory], sleeper)
                pushing = syncing(fleet, tmp_path, "ipc", memory_version)
                for _ in range(3):
                    phases.training()
                    policy.call(scale, 1.02)
                    memory.call(scale, 0.98)
                    expected = hashed(policy) | hashed(memory, "memory.")
                    phases.handover()
                    version = pushing.push(policy, memory)
                    assert held(fleet) == [expected] * 2
                    phases.sampling()
                    samples(fleet, version)
                    assert held(fleet) == [expected] * 2
                memory_version = pushing.memory_version
            assert told == want
            told.clear()
        with ranks_of(tmp_path, "tp2") as ranks:
            # Rows of the vocabulary are cut elsewhere than the engine cuts them.
            policy, memory = RanksLearner(ranks, POLICY), RanksLearner(ranks, MEMORY)
            pushing = syncing(fleet, tmp_path, "ipc", memory_version, verify=True)
            version = pushing.push(policy, memory)
            assert held(fleet) == [hashed(policy) | hashed(memory, "memory.")] * 2
            norm = laid_out([item for item in policy.export_weights() if item[0] == "model.norm.weight"])
        # What rank 1 alone refuses is refused, though SGLang answers for rank 0.
        api = fleet.members.all[0].process.api
        good = [("announced", Header(new_stamp(version + 1, None), norm).to_json())]
        assert api.begin_update() is None
        answer = api.load_lent([good, [("loan", "{}")]], 60.0)
        assert answer is not None and "no description of lent weights" in answer.message
        assert api.end_update(60.0) is None


@pytest.mark.parametrize(("family", "layouts"), [("experts3", ("one", "tp2", "ep2")), ("mixtral", ("one",))])
def test_every_transport_brings_every_expert(
    tmp_path: Path, family: str, layouts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To an engine of two ranks, which fuses experts and cuts each; in place where a rank has all of them."""
    folders = {POLICY: tmp_path / "model"}
    make_model(folders[POLICY], family)
    told, flags = loans(monkeypatch), {"returns_experts": True, "skip_tokenizer_init": True}
    with running(tmp_path, engines=1, tp=2, folders=folders, **flags) as (fleet, _):
        for layout in layouts:
            with ranks_of(tmp_path / layout, layout, folders=folders) as ranks:
                policy = RanksLearner(ranks, POLICY)
                for transport in TRANSPORTS:
                    pushing = syncing(fleet, tmp_path, transport, verify=True)
                    for _ in range(2):
                        policy.call(scale, 1.02)
                        pushing.push(policy)
                        assert held(fleet) == [hashed(policy)] * 2
                    check_experts(fleet, policy, folders[POLICY], tmp_path / f"{layout}-{transport}")
    # Of a learner in this process: all at first, and nothing but a word from then on.
    assert told == ["p", "-"]


def check_experts(fleet: Fleet, policy: WeightSource, described: Path, folder: Path) -> None:
    """Log-probs and experts of a group's samples are transformers' with the learner's weights."""
    shutil.copytree(described, folder)
    save_file({name: tensor.clone() for name, tensor in policy.export_weights()}, folder / "model.safetensors")
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
    prompt = prompt_of(70, 1)
    [found] = fleet.generate([GenerateRequest(tuple(prompt), (1, 2, 3))], SamplingParams(max_tokens=20))
    for completion in found:
        tokens = [*prompt, *completion.tokens.tolist()]
        wanted, end = routing(network, tokens[:-1])[0], decided(network, tokens[:-1])
        assert completion.experts is not None and completion.experts.shape == wanted.shape and end > len(prompt)
        assert torch.equal(completion.experts.sort(dim=-1).values[:end], wanted[:end])
        logp_T = closed_form(network, None, tokens, {}).policy[len(prompt) - 1 : end]
        count = len(logp_T)
        logp_T = logp_T.gather(1, completion.tokens[:count, None])[:, 0]
        assert (completion.policy_logp[:count] - logp_T).abs().max() < 1e-5


def test_an_older_memory_network_is_refused(fleet: Fleet, versions: dict[str, int], tmp_path: Path) -> None:
    """The last test with these engines: they are lost over it."""
    with ranks_of(tmp_path, "one") as ranks:
        policy, memory = RanksLearner(ranks, POLICY), RanksLearner(ranks, MEMORY)
        newest = syncing(fleet, tmp_path, "gloo", versions["memory"])
        newest.push(policy, memory)
        newest.push(policy, memory)
        with pytest.raises(UserError, match=rf"memory version {newest.memory_version - 1} is older than"):
            syncing(fleet, tmp_path, "gloo", newest.memory_version - 2).push(policy, memory)
