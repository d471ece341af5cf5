"""The trainer's client over real SGLang engines on this machine's CPU; the oracle is transformers in float64."""

from __future__ import annotations

import copy
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from waiting import HANG_S, SOON_S

from megasharp.common.errors import UserError
from megasharp.common.records import Completion, FinishReason, GenerateRequest, SamplingParams
from megasharp.config.rollout import RolloutConfig, SyncConfig
from megasharp.rollout.sglang.client import launch
from megasharp.rollout.sglang.client.fleet import Fleet, FleetOptions, start_fleet
from megasharp.rollout.sglang.client.launch import FleetSettings
from megasharp.rollout.sglang.client.members import WatchSettings
from megasharp.weight_sync.push import FleetSync, make_transport

pytestmark = pytest.mark.long("fleet")

REPOSITORY = Path(__file__).parents[2]
PYTHON = REPOSITORY / ".venv-fleet" / "bin" / "python"
POLICY = REPOSITORY / "examples" / "quickstart" / "base"
MEMORY = REPOSITORY / "examples" / "quickstart" / "memory"
END = 1
SAMPLING = SamplingParams(max_tokens=24, stop_token_ids=(END,), temperature=0.8)
REQUESTS = [GenerateRequest((6, 7 + n % 8, 8, 9 + n % 3), tuple(range(4 * n, 4 * n + 4))) for n in range(16)]
WATCH = WatchSettings(probe_every=2.0, suspect_every=0.5)
# What tells one push's weights from another's is above 1e-2; parity to the last digit is for the engine's own tests.
# These trained networks are sharp: over 300,000 positions transformers in float32 was up to 6e-5 from float64.
TOLERANCE = 3e-4


# An engine that may map no more than this: enough for its libraries, too little for its pool of tokens.
LITTLE_MEMORY = (
    "import resource, runpy\n"
    "resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))\n"
    "runpy.run_module('megasharp.rollout.sglang.engine', run_name='__main__')"
)


def settings(folder: Path, memory: bool = False, **keys: Any) -> FleetSettings:
    # Two engines share the machine with the tests: small pools start sooner.
    flags = {"max_total_tokens": 4096, "max_running_requests": 32}
    return FleetSettings(
        python=PYTHON,
        model=POLICY,
        memory=MEMORY if memory else None,
        log_folder=folder / "logs",
        rollout=RolloutConfig(**{"engines": 2, "restarts": 0, "sglang": flags, **keys}),
        start_limit_s=HANG_S,
    )


@contextmanager
def running(folder: Path, memory: bool = False) -> Iterator[tuple[Fleet, list[str]]]:
    told: list[str] = []
    fleet = start_fleet(settings(folder, memory), FleetOptions(watch=WATCH), told.append)
    processes = [psutil.Process(member.process.pid) for member in fleet.members.all]
    family = [*processes, *(child for process in processes for child in process.children(recursive=True))]
    assert len(family) >= 6, "each engine has a scheduler and a detokenizer of its own"
    try:
        yield fleet, told
    finally:
        fleet.close()
    _, left = psutil.wait_procs(family, timeout=SOON_S)
    assert left == [], "no process is left behind"


def model(folder: Path, scale: float) -> PreTrainedModel:
    """The network with every matrix scaled: other weights of the same shapes."""
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)
    return network  # type: ignore[no-any-return]


def named(network: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in network.named_parameters():
        yield name, parameter.detach()


@torch.no_grad()
def logits(network: PreTrainedModel, request: GenerateRequest, completion: Completion) -> Tensor:
    """[T, V]: what predicts each response token, at the sampling temperature."""
    ids = torch.tensor([[*request.tokens, *completion.tokens.tolist()]])
    rows = copy.deepcopy(network).double()(ids).logits[0, len(request.tokens) - 1 : -1]
    return rows / SAMPLING.temperature


def at(logits_TV: Tensor, completion: Completion) -> Tensor:
    return logits_TV.log_softmax(-1).gather(1, completion.tokens[:, None])[:, 0]


def check_samples(found: list[list[Completion]], requests: list[GenerateRequest], version: int) -> None:
    """Every group is whole, ended as it may, and is of one version."""
    assert [len(completions) for completions in found] == [len(request.seeds) for request in requests]
    for completion in (completion for completions in found for completion in completions):
        ended = completion.tokens[-1].item() == END
        assert completion.finish_reason is (FinishReason.STOP if ended else FinishReason.LENGTH)
        assert [span.version for span in completion.version_spans] == [version]
        assert completion.version_spans[0].end == completion.tokens.numel()


def worst(found: list[list[Completion]], policy: PreTrainedModel) -> float:
    """The largest distance of the engines' policy log-probs from the oracle's."""
    pairs = [(request, c) for request, completions in zip(REQUESTS, found, strict=True) for c in completions]
    return max((at(logits(policy, r, c), c) - c.policy_logp).abs().max().item() for r, c in pairs)


class Source:
    """A learner whose weights are a network's of transformers."""

    def __init__(self, tensors: Callable[[], Iterator[tuple[str, Tensor]]]) -> None:
        self.export_weights = tensors


def push(fleet: Fleet, version: int, *networks: PreTrainedModel, transport: Any = "shared_memory", **more: Any) -> None:
    """Push these networks, the policy first, as `version`."""
    folder = more.pop("folder", None)
    config = SyncConfig(bucket_mb=1, **more)
    made = make_transport(fleet, transport, config, folder=folder)
    sources = [Source(partial(named, network)) for network in networks]
    FleetSync(fleet, made, version - 1, version - 1).push(*sources)


@pytest.mark.parametrize("kind", ["shared_memory", "disk"])
def test_policy_and_memory_follow_every_push(tmp_path: Path, kind: str) -> None:
    sampling = replace(SAMPLING, memory_mu=0.6)
    with running(tmp_path, memory=True) as (fleet, _):
        for version, scale in ((0, 1.0), (1, 1.15)):
            policy, memory = model(POLICY, scale), model(MEMORY, 2 - scale)
            push(fleet, version, policy, memory, transport=kind, verify=True, folder=tmp_path / "sync")
            assert fleet.version == version
            found = fleet.generate(REQUESTS, sampling)
            check_samples(found, REQUESTS, version)
            for request, completions in zip(REQUESTS, found, strict=True):
                for completion in completions:
                    check_dlc(request, completion, policy, memory)
    assert list((tmp_path / "sync").iterdir()) == []


def check_dlc(
    request: GenerateRequest, completion: Completion, policy: PreTrainedModel, memory: PreTrainedModel
) -> None:
    policy_TV, memory_TV = logits(policy, request, completion), logits(memory, request, completion)
    assert completion.memory_logp is not None
    for got, expected in (
        (completion.policy_logp, policy_TV),
        (completion.memory_logp, memory_TV),
        (completion.sampler_logp, policy_TV - 0.6 * memory_TV),
    ):
        assert (got - at(expected, completion)).abs().max() < TOLERANCE


def test_bad_prompts_are_outcomes_of_their_own(tmp_path: Path) -> None:
    with running(tmp_path) as (fleet, told):
        bad = [(), (5,) * 100_000, (5,) * 63, (5,) * 50]
        requests = [REQUESTS[0], *(GenerateRequest(tokens, (1, 2)) for tokens in bad), REQUESTS[1]]
        found = fleet.generate(requests, SAMPLING)
        check_samples([found[0], found[-1]], REQUESTS[:2], -1)
        assert {c.finish_reason for completions in found[1:-1] for c in completions} == {FinishReason.ABORT}
        assert fleet.capacity == 2 * 32
        with fleet.stream([(request, SAMPLING) for request in requests], 8) as ended:
            streamed = dict(ended)
        check_samples([streamed[0], streamed[5]], REQUESTS[:2], -1)
        assert {c.finish_reason for place in range(1, 5) for c in streamed[place]} == {FinishReason.ABORT}
        assert len(told) == 1
        assert len(fleet.members.serving()) == 2


def leader(fleet: Fleet) -> int:
    return fleet.members.all[0].process.pid


def scheduler(fleet: Fleet) -> int:
    """The process that holds the first engine's model: the largest of the leader's children."""
    children = psutil.Process(leader(fleet)).children()
    return int(next(child for child in children if "scheduler" in " ".join([child.name(), *child.cmdline()])).pid)


@pytest.mark.parametrize("victim", [leader, scheduler])
def test_an_engine_killed_while_it_samples(tmp_path: Path, victim: Callable[[Fleet], int]) -> None:
    policy = model(POLICY, 1.0)
    with running(tmp_path) as (fleet, told):
        push(fleet, 3, policy)
        threading.Timer(0.5, os.kill, (victim(fleet), signal.SIGKILL)).start()
        started = time.monotonic()
        for _ in range(4):
            found = fleet.generate(REQUESTS, SAMPLING)
            check_samples(found, REQUESTS, 3)
            assert worst(found, policy) < TOLERANCE
        assert time.monotonic() - started < HANG_S
        assert [member.health.condition.value for member in fleet.members.all] == ["dead", "serving"]
        assert told[0].startswith("engine 0 is lost")
        push(fleet, 4, policy)
        check_samples(fleet.generate(REQUESTS, SAMPLING), REQUESTS, 4)


def test_both_engines_killed_while_idle_and_after(tmp_path: Path) -> None:
    with running(tmp_path) as (fleet, told):
        os.kill(leader(fleet), signal.SIGKILL)
        check_samples(fleet.generate(REQUESTS, SAMPLING), REQUESTS, -1)
        deadline = time.monotonic() + HANG_S
        while not told and time.monotonic() < deadline:
            time.sleep(0.1)
        assert told[0].startswith("engine 0 is lost: dead (its process was killed by SIGKILL)")
        os.kill(fleet.members.all[1].process.pid, signal.SIGKILL)
        with pytest.raises(UserError, match=r"no engine is left to sample with: engine 0 is dead .*engine 1 is dead"):
            fleet.generate(REQUESTS, SAMPLING)
        assert not fleet.healthy()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model": MEMORY.parent / "no_such_model"}, "it cannot load the model"),
        ({"rollout": RolloutConfig(engines=2, sglang={"max_total_token": 4096})}, "max_total_token is no flag"),
        (
            {
                "command": ("-c", LITTLE_MEMORY),
                "rollout": RolloutConfig(engines=2, sglang={"max_total_tokens": 4_000_000}),
            },
            "it lacks memory",
        ),
    ],
)
def test_engines_that_do_not_start(tmp_path: Path, change: dict[str, object], reason: str) -> None:
    with pytest.raises(UserError) as raised:
        launch.launch(replace(settings(tmp_path), **change))  # type: ignore[arg-type]
    text = str(raised.value)
    assert "of 2 did not start" in text
    assert reason in text
    assert "\n" not in text
    assert_nothing_is_left(tmp_path)


def test_an_engine_killed_while_its_processes_start(tmp_path: Path) -> None:
    with launch.HeldPort() as port:
        engine = launch.start_one(settings(tmp_path), 0, port.number, "key")
    try:
        first = psutil.Process(engine.pid)
        deadline = time.monotonic() + HANG_S
        while len(children := first.children()) < 2:
            assert time.monotonic() < deadline and engine.exit_reason() is None, engine.tail()
            time.sleep(0.02)
        os.kill(engine.pid, signal.SIGKILL)
        # At once; on a loaded machine the kernel takes its time to give back what they mapped.
        assert psutil.wait_procs(children, timeout=SOON_S)[1] == []
    finally:
        engine.kill()


# What a process is started with is unpickled before its function runs, and that imports the module of the server.
SPAWNS = """
import multiprocessing, time
from megasharp.rollout.sglang.engine import lifeline, server
if __name__ == "__main__":
    lifeline.publish()
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
    child.brings = server.run_scheduler
    child.start()
    time.sleep(3600)
"""


def test_a_spawned_process_ends_with_its_engine_before_it_knows_sglang() -> None:
    """As engines with CUDA start theirs."""
    with subprocess.Popen([PYTHON, "-c", SPAWNS]) as engine:
        first = psutil.Process(engine.pid)
        deadline = time.monotonic() + HANG_S
        try:
            # Multiprocessing's own process, which counts shared memory, ends by itself.
            while not (spawned := [each for each in first.children() if "spawn_main" in " ".join(each.cmdline())]):
                assert time.monotonic() < deadline
                time.sleep(0.02)
            time.sleep(2.0)
        finally:
            engine.kill()
    assert psutil.wait_procs(spawned, timeout=SOON_S)[1] == []


def test_nothing_of_an_engine_listens_beyond_the_loopback(tmp_path: Path) -> None:
    """Its server, and where its two ranks meet."""
    fleet = start_fleet(settings(tmp_path, memory=True, engines=1, tp=2), FleetOptions(watch=WATCH))
    try:
        leader = psutil.Process(fleet.members.all[0].process.pid)
        family = [leader, *leader.children(recursive=True)]
        listening = [c.laddr.ip for p in family for c in p.net_connections(kind="inet") if c.status == "LISTEN"]
        assert len(listening) >= 3 and set(listening) == {"127.0.0.1"}
    finally:
        fleet.close()


def test_a_taken_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        monkeypatch.setattr(launch.HeldPort, "__enter__", lambda port: take(port, other.getsockname()[1]))
        with pytest.raises(UserError, match=r"of 2 did not start: its port is taken \(its server has ended\)"):
            launch.launch(settings(tmp_path))
    assert_nothing_is_left(tmp_path)


def take(port: launch.HeldPort, number: int) -> launch.HeldPort:
    port.number = number
    return port


def assert_nothing_is_left(folder: Path) -> None:
    """No process that has one of this test's logs open."""
    deadline = time.monotonic() + HANG_S
    while holders(folder) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert holders(folder) == []


def holders(folder: Path) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            links = [str(Path(f"/proc/{process.pid}/fd/{number}").readlink()) for number in (1, 2)]
        except OSError:
            continue
        if process.pid != os.getpid() and any(link.startswith(str(folder)) for link in links):
            found.append(process.pid)
    return found
