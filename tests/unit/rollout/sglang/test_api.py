"""One server's API, over a stand-in: values, refusals and failures are three different things."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from waiting import HANG_S

from megasharp.common.records import GenerateRequest, SamplingParams
from megasharp.rollout.sglang.bucket import Header, Stamp, checksum, laid_out, write_bucket
from megasharp.rollout.sglang.client.api import EngineApi, EngineFailed, EngineSlow, GroupSeat, Refused, Room
from tests.unit.rollout.sglang.standin import Handler, Server, State

SAMPLING = SamplingParams(max_tokens=4)


@pytest.fixture
def state() -> State:
    return State({"api_key": "k3y", "sglang": {"index": 0}, "tp": 1})


@pytest.fixture
def api(state: State) -> Iterator[EngineApi]:
    """Over a stand-in in a thread of this process."""
    server = Server(("127.0.0.1", 0), type("Handler", (Handler,), {"state": state}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield EngineApi("127.0.0.1", server.server_port, "k3y")
    server.shutdown()
    server.server_close()
    thread.join()


def test_values(api: EngineApi, state: State) -> None:
    assert api.healthy(HANG_S)
    assert api.version() == -1
    assert api.room() == Room(100, 64, 777)
    found = asyncio.run(api.generate(GenerateRequest((1, 2), (5,)), SAMPLING, ("a",), HANG_S))
    assert isinstance(found, list)
    assert [completion.seed for completion in found] == [5]
    asyncio.run(api.abort("b"))
    assert state.aborted == {"b"}
    asyncio.run(api.abort())
    assert state.aborted == {"a", "b"}


def test_the_room_of_data_parallel_ranks_is_their_sum(api: EngineApi, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [{"effective_max_running_requests_per_dp": 8}] * 3
    info = {
        "max_req_input_len": 100,
        "max_total_num_tokens": 500,
        "max_running_requests": None,
        "internal_states": ranks,
    }
    monkeypatch.setattr(Handler, "server_info", lambda *_: (200, info))
    assert api.room() == Room(100, 24, 1500)
    del info["max_total_num_tokens"]
    with pytest.raises(EngineFailed, match="does not say what the engine can take"):
        api.room()


def test_a_whole_update(api: EngineApi, state: State, tmp_path: Path) -> None:
    path = tmp_path / "bucket"
    stamp = Stamp(3, None, "ab")
    write_bucket(path, stamp, [("a", torch.ones(2))])
    assert api.pause("retract") is None
    assert state.paused
    assert api.begin_update() is None
    assert api.load_file(path, 1, HANG_S) is None
    assert api.version() == -1
    assert api.announce(Header(stamp).to_json(), 1, 5.0, 3) is None
    assert api.version() == 3
    assert api.checksums(HANG_S) == [{"a": checksum(torch.ones(2))}]
    assert api.end_update(HANG_S) is None
    assert api.flush() is None
    assert api.proceed() is None
    assert (list(state.loaded), state.paused, state.session, state.flushes) == (["a"], False, False, 1)


def test_a_broadcast(api: EngineApi, state: State) -> None:
    entries = laid_out([("a", torch.ones(2)), ("b", torch.ones(3, 4))])
    assert api.join_group(GroupSeat("sync-0-ab", "gloo", "127.0.0.1", 1234, 3, 5), HANG_S) is None
    assert state.groups == {"sync-0-ab": [3, 5, "gloo"]}
    assert api.begin_update() is None
    assert api.announce(Header(Stamp(3, 1, "ab"), entries).to_json(), 1, HANG_S) is None
    assert api.receive_broadcast(entries, "sync-0-ab", HANG_S) is None
    assert (list(state.loaded), state.stamps) == (["a", "b"], [[3, 1, False]])
    assert api.leave_group("sync-0-ab", HANG_S) is None
    assert api.leave_group("sync-0-ab", HANG_S) == Refused("The group to be destroyed does not exist.")


@pytest.mark.parametrize("deed", ["refuse", "lie"])
def test_refusals_are_values(api: EngineApi, state: State, tmp_path: Path, deed: str) -> None:
    paths = ("/pause_generation", "/continue_generation", "/flush_cache", "/begin_weight_update", "/end_weight_update")
    state.behaviour |= dict.fromkeys((*paths, "/update_weights_from_tensor", "/update_weights_from_disk"), deed)
    answers = (
        api.pause("in_place"),
        api.proceed(),
        api.flush(),
        api.begin_update(),
        api.end_update(HANG_S),
        api.load_file(tmp_path, 1, HANG_S),
        api.load_folder(tmp_path, 1, HANG_S),
    )
    assert set(answers) == {Refused(f"told to {deed}")}


def test_tensors_outside_an_update_are_refused(api: EngineApi, tmp_path: Path) -> None:
    assert api.load_file(tmp_path, 1, HANG_S) == Refused("must run between begin and end")


def test_a_prompt_that_is_refused(api: EngineApi) -> None:
    answer = asyncio.run(api.generate(GenerateRequest((99,), (1,)), SAMPLING, ("a",), HANG_S))
    assert answer == Refused("token ids outside the vocabulary")


def test_failures_are_exceptions(api: EngineApi, state: State) -> None:
    state.behaviour |= {"/generate": "fail", "/health": "fail", "/pause_generation": "fail"}
    assert not api.healthy(HANG_S)
    for call in (
        lambda: asyncio.run(api.generate(GenerateRequest((1,), (1,)), SAMPLING, ("a",), HANG_S)),
        lambda: api.pause("retract"),
        lambda: replace(api, key="wrong").version(),
    ):
        with pytest.raises(EngineFailed, match="status"):
            call()


def test_slowness_is_a_failure_of_its_own(api: EngineApi, state: State) -> None:
    state.behaviour["delay"] = 5.0
    with pytest.raises(EngineSlow, match=r"no answer to /generate within 0\.3 s"):
        asyncio.run(api.generate(GenerateRequest((1,), (1,)), SAMPLING, ("a",), 0.3))


def test_nobody_there() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        nobody = EngineApi("127.0.0.1", held.getsockname()[1], "k3y")
        with pytest.raises(EngineFailed, match=r"/model_info: .*refused"):
            nobody.version()


def test_an_answer_that_is_none(api: EngineApi, state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    state.behaviour["version"] = "mine"
    with pytest.raises(EngineFailed, match="names no weights version we know"):
        api.version()
    monkeypatch.setattr(Handler, "generate", lambda *_: (200, {"surprise": 1}))
    with pytest.raises(EngineFailed, match="asked for 1 samples, got"):
        asyncio.run(api.generate(GenerateRequest((1,), (1,)), SAMPLING, ("a",), HANG_S))
