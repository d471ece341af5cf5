"""Engines that others started: their addresses, what they say of themselves, and how a lost one is let in again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from waiting import HANG_S, wait_until

from megasharp.common.errors import RunFailed, UserError
from megasharp.common.records import GenerateRequest, SamplingParams
from megasharp.config.rollout import SyncConfig
from megasharp.rollout.sglang.client import external
from megasharp.rollout.sglang.client.api import FOREIGN, EngineApi, WeightLabel
from megasharp.rollout.sglang.client.external import (
    ExternalEngine,
    WithExternal,
    address_of,
    check_served,
    fault,
    join,
    on_this_machine,
    own_identity,
    take_key,
)
from megasharp.rollout.sglang.client.fleet import Fleet, FleetOptions
from megasharp.rollout.sglang.client.launch import EngineHandle, FleetSettings, answers, launch, start_one
from megasharp.rollout.sglang.identity import KEY_VARIABLE, VARIABLES, difference
from megasharp.weight_sync.push import FleetSync, make_transport
from tests.unit.rollout.sglang.conftest import HASTY, settings

SAMPLING = SamplingParams(max_tokens=4)
REQUESTS = [GenerateRequest((number, 7), (number,)) for number in range(12)]


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external, "_AGAIN_S", 0.05)


@pytest.fixture
def started(tmp_path: Path) -> FleetSettings:
    (tmp_path / "config.json").write_text('{"vocab_size": 60, "hidden_size": 8}')
    plain = settings(tmp_path, 2, restarts=0)
    said = own_identity(plain)
    flags = {"identity": json.dumps(said)}
    return replace(plain, rollout=plain.rollout.model_copy(update={"sglang": flags}))


def test_an_address_is_host_and_port_alone() -> None:
    assert address_of("http://10.0.0.5:30000") == ("10.0.0.5", 30000)
    assert address_of("http://[::1]:30000/") == ("::1", 30000)
    for wrong in (
        "10.0.0.5:30000",
        "http://10.0.0.5",
        "http://a:1/v1",
        "http://u:p@a:1",
        "http://a:99999",
        "http://a:0",
        "ftp://a:1",
    ):
        with pytest.raises(UserError, match="is no address of an engine; write http://host:port"):
            address_of(wrong)
    with pytest.raises(UserError, match="use http through a tunnel"):
        address_of("https://10.0.0.5:30000")
    assert [on_this_machine(f"http://{host}:1") for host in ("127.0.0.1", "localhost", "10.0.0.5", "node7")] == [
        *(True, True),
        *(False, False),
    ]


def test_the_key_is_taken_out_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    assert take_key() == "secret"
    with pytest.raises(UserError, match="needs the engines' key in the environment variable MEGASHARP_ENGINE_KEY"):
        take_key()
    monkeypatch.setenv(KEY_VARIABLE, "geheim\u20ac")
    with pytest.raises(UserError, match="printable ASCII characters only"):
        take_key()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"source": "0"}, "it has another version of megasharp's engine; install the run's there"),
        ({"model": {"vocab_size": 61, "hidden_size": 8}}, "its model is another one: vocab_size 61 instead of 60"),
        ({"memory": {"vocab_size": 60}}, "it has a memory network, and the run has none"),
        ({"tp": 2}, "its tp is 2, and the run's 1"),
        ({"deterministic": True}, "its deterministic is true, and the run's false"),
    ],
)
def test_an_engine_that_is_another_one_is_refused_by_what_differs(
    started: FleetSettings, change: dict[str, Any], said: str
) -> None:
    wanted = own_identity(started)
    assert difference(wanted, wanted) is None
    assert difference({**wanted, **change}, wanted) == said


def test_an_engine_in_a_group_has_the_runs_variables(started: FleetSettings) -> None:
    said = {**own_identity(started), VARIABLES: {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}}
    assert difference(said, own_identity(started)) is None
    wanted = own_identity(replace(started, variables={"NCCL_CUMEM_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}))
    assert difference(said, wanted) == (
        "its NCCL_CUMEM_ENABLE is 0 and the run's 1: start both with NCCL_CUMEM_ENABLE=1"
    )


def test_what_a_config_says_of_its_file_is_no_difference(tmp_path: Path, started: FleetSettings) -> None:
    wanted = own_identity(started)
    (tmp_path / "config.json").write_text('{"hidden_size": 8, "vocab_size": 60, "torch_dtype": "bfloat16"}')
    assert difference(own_identity(started), wanted) is None


def test_each_reason_not_to_join_is_one_line(started: FleetSettings) -> None:
    (engine,) = launch(with_engines(started, 1))
    url, key, wanted = f"http://127.0.0.1:{engine.api.port}", engine.api.key, own_identity(started)
    try:
        (joined,) = join([url], 1, key, wanted)
        assert (joined.name, joined.exit_reason()) == (f"engine 1 at {url}", None)
        check_served([joined], 0)
        for problem, asked, as_wanted in (
            ("refuses the key of MEGASHARP_ENGINE_KEY", ExternalEngine(1, url, "no"), wanted),
            (r"its tp is 1, and the run's 2", joined, {**wanted, "tp": 2}),
        ):
            said = fault(asked, as_wanted)
            assert said is not None and problem in said and said.startswith(f"rollout.external: {url}")
        behave(joined, {"version": "40"})
        with pytest.raises(UserError, match="holds weights of version 40, and the run pushes 3 next"):
            check_served([joined], 3)
        behave(joined, {"identity": "null"})
        with pytest.raises(UserError, match="is no engine of megasharp; start it by"):
            join([url], 1, key, wanted)
    finally:
        engine.kill()
    with pytest.raises(UserError, match=r"does not answer \(.*Connection refused\); start the engine there"):
        join([url], 1, key, wanted)


def behave(engine: EngineHandle, behaviour: dict[str, Any]) -> None:
    engine.api._call("POST", "/standin", behaviour, HANG_S)


class ByHand:
    """A fleet of `own` engines and one that was started by hand."""

    def __init__(self, started: FleetSettings, own: int, stack: ExitStack) -> None:
        *ours, self.by_hand = launch(with_engines(started, own + 1))
        stack.callback(self.end)
        self.settings, self.index, self.api, self.told = started, own, self.by_hand.api, list[str]()
        joined = ExternalEngine(own, f"http://127.0.0.1:{self.api.port}", self.api.key)
        self.name = joined.name
        starter = WithExternal(None, [joined], own_identity(started), self.told.append)
        options = FleetOptions(watch=replace(HASTY, dead_after=1), external=1)
        self.fleet = Fleet([*ours, joined], started, options, self.told.append, starter)
        stack.callback(self.fleet.close)
        self.sync = FleetSync(self.fleet, make_transport(self.fleet, "shared_memory", SyncConfig(bucket_mb=1)))
        self.fleet.push_again_with(lambda: self.sync.push_again(Weights()))

    def conditions(self) -> list[str]:
        return [member.health.condition.value for member in self.fleet.members.all]

    def sampled_by(self) -> set[int]:
        found = self.fleet.generate(REQUESTS, SAMPLING)
        return {-1 - int(completions[0].policy_logp[0]) for completions in found}

    def end(self) -> None:
        self.by_hand.kill()

    def lose(self) -> None:
        self.by_hand.kill()
        wait_until(lambda: self.conditions()[self.index] == "dead")

    def start_again(self, **behaviour: Any) -> None:
        flags = {**self.settings.rollout.sglang, **behaviour}
        rollout = self.settings.rollout.model_copy(update={"sglang": flags})
        self.by_hand = start_one(replace(self.settings, rollout=rollout), self.index, self.api.port, self.api.key)
        wait_until(lambda: answers(self.api))


class Weights:
    """A learner without ranks."""

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "norm.weight", torch.ones(3)


def with_engines(started: FleetSettings, engines: int) -> FleetSettings:
    return replace(started, rollout=started.rollout.model_copy(update={"engines": engines}))


def test_tokens_of_another_runs_weights_are_never_taken(started: FleetSettings, hasty: None) -> None:
    """Both runs' versions are equal."""
    with ExitStack() as stack:
        fleet = ByHand(started, 1, stack)
        version = fleet.sync.push(Weights())
        other = EngineApi("127.0.0.1", fleet.api.port, fleet.api.key, "another")
        behave(fleet.by_hand, {"version": str(WeightLabel(version, "another"))})
        assert (other.version(), fleet.by_hand.api.version()) == (version, FOREIGN)
        assert fleet.sampled_by() == {0}
        # The condition comes before the word about it, from another thread.
        wait_until(lambda: fleet.conditions() == ["serving", "stale"] and bool(fleet.told))
        assert f"{fleet.name} holds weights that another run pushed" in fleet.told[0]
        behave(fleet.by_hand, {})
        fleet.sync.push(Weights())
        assert fleet.sampled_by() == {0, 1}


def test_one_that_answers_again_is_pushed_to_before_it_serves(started: FleetSettings, hasty: None) -> None:
    with ExitStack() as stack:
        fleet = ByHand(started, 1, stack)
        version = fleet.sync.push(Weights())
        assert fleet.sampled_by() == {0, 1}
        fleet.lose()
        fleet.fleet.tend()
        # It says the version that is wanted: whose weights these are, nobody knows.
        fleet.start_again(version=str(version))
        back = f"{fleet.name} is back; it serves once it holds the weights of the next push"

        def let_in() -> bool:
            fleet.fleet.tend()
            return back in fleet.told

        wait_until(let_in)
        fleet.fleet.members.probe(fleet.fleet.members.all[1])
        assert fleet.conditions() == ["serving", "stale"] and fleet.sampled_by() == {0}
        behave(fleet.fleet.members.all[1].process, {})
        fleet.sync.push(Weights())
        assert fleet.conditions() == ["serving", "serving"] and fleet.sampled_by() == {0, 1}
        fleet.fleet.close()
        assert fleet.by_hand.exit_reason() is None, "the run leaves it running"


def test_a_run_without_engines_of_its_own_waits_for_one_to_answer_again(started: FleetSettings, hasty: None) -> None:
    with ExitStack() as stack:
        fleet = ByHand(started, 0, stack)
        version = fleet.sync.push(Weights())
        fleet.lose()
        fleet.fleet.tend()
        fleet.start_again()
        assert fleet.sampled_by() == {0} and fleet.sync.version == version
        assert fleet.told[-1] == f"the weights of version 0 were pushed again: the run goes on with {fleet.name}"
        fleet.fleet._restarts._patience_s = 0.1  # type: ignore[union-attr]
        fleet.lose()
        with pytest.raises(RunFailed, match="no engine is left to sample with: engine 0 at http"):
            fleet.sampled_by()


def test_another_engine_at_the_address_is_not_let_in(started: FleetSettings, hasty: None) -> None:
    with ExitStack() as stack:
        fleet = ByHand(started, 1, stack)
        fleet.sync.push(Weights())
        fleet.lose()
        fleet.fleet.tend()
        fleet.start_again(identity=json.dumps({**own_identity(started), "tp": 2}))
        wait_until(lambda: fleet.told[-1].endswith("its tp is 2, and the run's 1"))
        fleet.fleet.tend()
        assert fleet.told[-1].startswith(f"{fleet.name} is not let in: ") and fleet.conditions() == ["serving", "dead"]
