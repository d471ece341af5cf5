"""The endpoint engine against a stand-in server: what it sends and reads, and every way in which a server fails."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from operator import itemgetter
from threading import Barrier, Event, Semaphore
from typing import Any

import pytest
from cases import each_case
from waiting import HANG_S, wait_until

from megasharp.common.errors import RunFailed, UserError
from megasharp.common.records import Completion, FinishReason, GenerateRequest, SamplingParams
from megasharp.rollout.endpoint import Style, endpoint_engine
from megasharp.rollout.endpoint.endpoint_engine import EndpointEngine, EndpointSettings, Patience, model_of
from megasharp.rollout.endpoint.http_calls import KEY_VARIABLE, Address, Server
from tests.unit.rollout.endpoint.standin_server import Json, Script, StandinServer, chat, error, serving

PLAIN = SamplingParams(64)
ASKED = GenerateRequest((), (11, 12), turns=(("system", "Be brief."), ("user", "2+2?")))
PATIENCE = Patience(failures=4, first_wait_s=1e-4, limit_s=20.0)


@contextmanager
def engine_at(
    script: Script, style: Style = "chat", key: str = "k3y", **settings: Any
) -> Iterator[tuple[EndpointEngine, StandinServer]]:
    with serving(script) as server:
        chosen = EndpointSettings(Address.parse(server.url), "tiny", style, **{"patience": PATIENCE, **settings})
        with closing(EndpointEngine(Server(chosen.address, key), chosen)) as engine:
            yield engine, server


def texts(found: list[list[Completion]]) -> list[list[str | None]]:
    return [[one.text for one in some] for some in found]


def test_every_setting_is_sent_so_that_no_default_of_the_model_cuts() -> None:
    sampling = SamplingParams(64, 0.6, 0.95, 20, min_p=0.05, stop=("\nQ:",))
    with engine_at(lambda body, _: chat(body)) as (engine, server):
        engine.generate([ASKED], sampling)
        engine.generate([ASKED], PLAIN)
    (path, headers, first), *_, (_, _, plain) = server.asked
    assert path == "/v1/chat/completions" and headers["Authorization"] == "Bearer k3y"
    assert first == {
        "model": "tiny",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}],
        "max_tokens": 64,
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0.05,
        "stop": ["\nQ:"],
        "repetition_penalty": 1.0,
        "seed": first["seed"],
    }
    assert {body["seed"] for _, _, body in server.asked} == {11, 12}
    assert (plain["top_k"], plain["min_p"], plain["top_p"], plain["logprobs"]) == (-1, 0.0, 1.0, True)


@each_case(("style", "prompt"), [("text", "Be brief.\n\n2+2?"), ("tokens", [5, 6])])
def test_prompts_as_text_and_as_tokens(style: Style, prompt: object) -> None:
    def script(body: Json, _: int) -> tuple[int, Json, dict[str, str]]:
        logprobs = {"token_logprobs": [-0.5, -1.5]}
        choice = {"index": 0, "text": " 4", "finish_reason": "length", "logprobs": logprobs}
        return 200, {"choices": [choice], "usage": {"completion_tokens": 2}}, {}

    request = GenerateRequest((5, 6), (1,), turns=ASKED.turns)
    with engine_at(script, style) as (engine, server):
        [[found]] = engine.generate([request], PLAIN)
    path, _, body = server.asked[0]
    assert path == "/v1/completions" and body["prompt"] == prompt and body["logprobs"] == 1
    assert (found.text, found.length, found.finish_reason) == (" 4", 2, FinishReason.LENGTH)
    assert found.sampler_logp.tolist() == [-0.5, -1.5]


@each_case(
    ("message", "finish", "text"),
    [
        ({"content": "4"}, "stop", "4"),
        ({"content": None, "refusal": "I cannot."}, "stop", "I cannot."),
        ({"content": [{"type": "text", "text": "4"}]}, "stop", "4"),
        ({"content": "4", "reasoning_content": "2+2"}, "stop", "<think>2+2</think>4"),
        ({"content": "4", "reasoning": "2+2"}, "stop", "<think>2+2</think>4"),
        ({"content": None, "reasoning_content": "2+"}, "length", "<think>2+"),
        ({"content": "", "reasoning_content": "2+2"}, "stop", "<think>2+2</think>"),
        ({"content": None}, "content_filter", ""),
    ],
)
def test_texts_of_messages(message: Json, finish: str, text: str) -> None:
    with engine_at(lambda body, _: chat(body, "x", message=message, finish_reason=finish)) as (engine, _):
        [[found]] = engine.generate([GenerateRequest((), (1,), turns=ASKED.turns)], PLAIN)
    assert found.text == text
    assert found.finish_reason is (FinishReason.LENGTH if finish == "length" else FinishReason.STOP)
    assert engine.filtered == (finish == "content_filter")


@each_case(
    "answer",
    [
        error(429, "slow down", Retry_After="0"),
        error(429, "slow down"),
        error(500, "oops"),
        (503, "<html>busy</html>", {"Retry-After": "0"}),
        (200, '{"choices": [{"index": 0, "mess', {}),
        (200, '{"choices": []}', {"Content-Length": "500"}),
        (200, {"choices": []}, {}),
        (200, {"choices": [{"index": 0, "message": {"content": "no"}, "finish_reason": None}]}, {}),
        (200, "[" * 100_000, {}),
        (
            200,
            {"choices": [{"index": index, "message": {"content": "no"}, "finish_reason": "stop"} for index in (0, 1)]},
            {},
        ),
    ],
)
def test_what_fails_is_asked_again_with_the_same_seed(answer: tuple[int, Json | str, dict[str, str]]) -> None:
    with engine_at(lambda body, number: answer if number in (0, 2) else chat(body), concurrency=1) as (engine, server):
        assert texts(engine.generate([ASKED], PLAIN)) == [["yes", "yes"]]
    assert [body["seed"] for _, _, body in server.asked] == [11, 11, 12, 12]


@each_case(
    ("message", "lost"),
    [
        (
            "Unrecognized request arguments supplied: min_p, repetition_penalty, top_k",
            {"min_p", "repetition_penalty", "top_k"},
        ),
        ("'seed' is not supported by this model", {"seed"}),
        ("Extra inputs are not permitted", {"min_p", "repetition_penalty", "top_k", "seed", "temperature", "top_p"}),
    ],
)
def test_fields_that_a_server_does_not_know_are_left_out(message: str, lost: set[str]) -> None:
    def script(body: Json, _: int) -> tuple[int, Json, dict[str, str]]:
        return error(400, message) if lost & body.keys() else chat(body)

    with engine_at(script) as (engine, server):
        assert texts(engine.generate([ASKED], PLAIN)) == [["yes", "yes"]]
        assert set(engine.unknown) - {"logprobs"} == lost
    assert server.asked[-1][2]["max_tokens"] == 64


@each_case(
    ("field", "sampling"),
    [
        ("top_k", SamplingParams(64, top_k=50)),
        ("min_p", SamplingParams(64, min_p=0.1)),
        ("top_p", SamplingParams(64, top_p=0.9)),
        ("temperature", SamplingParams(64, 0.6)),
        ("stop", SamplingParams(64, stop=("Q:",))),
    ],
)
@each_case("named", [True, False])
def test_a_setting_that_was_asked_for_is_never_left_out(field: str, sampling: SamplingParams, named: bool) -> None:
    """Also after calls in which it changes nothing have been answered without it."""
    message = f"Unrecognized request argument supplied: {field}" if named else "extra inputs are not permitted"

    def script(body: Json, _: int) -> tuple[int, Json, dict[str, str]]:
        return error(400, message) if field in body else chat(body)

    with engine_at(script, concurrency=2) as (engine, server):
        engine.generate([ASKED], PLAIN)
        with pytest.raises(UserError, match=message):
            engine.generate([ASKED] * 9, sampling)
    # A refusal that names it ends the evaluation at once.
    assert not named or sum(field in body for _, _, body in server.asked) < 9


@each_case("named", [True, False])
def test_settings_that_are_refused_are_no_failures_beside_greedy_samples(named: bool) -> None:
    message = "Unrecognized request argument supplied: top_k" if named else "extra inputs are not permitted"

    def script(body: Json, _: int) -> tuple[int, Json, dict[str, str]]:
        return error(400, message) if "top_k" in body else chat(body)

    asked = [(ASKED, SamplingParams(64, 0.0)), (ASKED, SamplingParams(64, top_k=50))]
    with engine_at(script) as (engine, _):
        found = []
        with engine.stream(asked, 1) as ended, pytest.raises(UserError, match=message):
            found.extend(ended)
    # What was never sent is not known to be unknown.
    assert [place for place, _ in found] == [0] and "logprobs" not in engine.unknown


@each_case("param", [None, "temperature"])
def test_greedy_samples_that_a_server_refuses_cost_no_others(param: str | None) -> None:
    """As models of OpenAI do that think: what else is sent stays, and the server's words are a line."""
    message = "Unsupported value: 'temperature' does not support 0.0 with this model."

    def script(body: Json, _: int) -> tuple[int, Json, dict[str, str]]:
        if body["temperature"] == 1.0:
            return chat(body)
        return 400, {"error": {"message": f"{message} See seed." if param else message, "param": param}}, {}

    asked = [*[(ASKED, SamplingParams(64, 0.0))] * 9, (ASKED, PLAIN)]
    with engine_at(script, concurrency=1) as (engine, server):
        with engine.stream(asked, 1) as ended:
            found = dict(ended)
        [line] = engine.remarks()
    assert [one.text for one in found[9]] == ["yes", "yes"]
    assert all(one.finish_reason is FinishReason.ABORT for place in range(9) for one in found[place])
    assert "so there are no greedy figures: Unsupported value: 'temperature'" in line
    bodies = [body for _, _, body in server.asked]
    assert [body["temperature"] for body in bodies] == [0.0, 1.0, 1.0]
    assert all({"seed", "top_p", "logprobs", "top_k"} <= body.keys() for body in bodies[1:])


def test_one_prompt_that_is_refused_changes_nothing_for_others() -> None:
    def script(body: Json, _: int) -> tuple[int, Json, dict[str, str]]:
        return error(400, "unknown seed in prompt") if body["messages"][0]["content"] == "bad" else chat(body)

    requests = [GenerateRequest((), (1,), turns=(("user", word),)) for word in ("good", "bad", "good")]
    with engine_at(script, concurrency=1) as (engine, server):
        found = engine.generate(requests, PLAIN)
    assert [some[0].finish_reason is FinishReason.ABORT for some in found] == [False, True, False]
    assert len(server.asked) == 3 and "seed" in server.asked[-1][2]


def test_a_limit_by_its_newer_name() -> None:
    message = "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."
    with engine_at(lambda body, _: error(400, message) if "max_tokens" in body else chat(body)) as (engine, server):
        engine.generate([ASKED], PLAIN)
    assert server.asked[-1][2]["max_completion_tokens"] == 64


@each_case(
    ("status", "message", "said"),
    [
        (
            400,
            "top_k: Extra inputs are not permitted",
            "/v1 refuses top_k: top_k: Extra",
        ),
        (401, "bad key k3y", f"bad key .the key. .the key in {KEY_VARIABLE}"),
        (404, "no model tiny", "status 404: no model tiny"),
        (402, "pay first", "pay first"),
        (429, "insufficient_quota: you have no credit", "no credit"),
        (307, "moved", "redirects to http://elsewhere"),
    ],
)
def test_refusals_are_one_line_without_the_key(status: int, message: str, said: str) -> None:
    with (
        engine_at(lambda *_: error(status, message, Location="http://elsewhere/v1")) as (engine, _),
        pytest.raises(UserError, match=said) as raised,
    ):
        engine.generate([ASKED], SamplingParams(64, top_k=3, min_p=0.1))
    assert "\n" not in str(raised.value) and "k3y" not in str(raised.value)


def test_one_prompt_that_always_fails_is_not_sampled_and_the_others_are() -> None:
    good = Semaphore(0)

    def script(body: Json, _: int) -> tuple[int, Json, dict[str, str]]:
        if body["messages"][0]["content"] == "bad":
            # Before it fails for the last time another one has been answered.
            assert all(good.acquire(timeout=HANG_S) for _ in range(2))
            return error(500, "poison")
        good.release()
        return chat(body)

    requests = [GenerateRequest((), (1,), turns=(("user", word),)) for word in ("good", "bad", *["good"] * 20)]
    with engine_at(script, concurrency=2) as (engine, _):
        found = engine.generate(requests, PLAIN)
    assert [some[0].finish_reason is FinishReason.ABORT for some in found] == [False, True, *[False] * 20]
    assert "4 tries failed, the last: status 500: poison" in found[1][0].cause


def test_a_server_that_answers_nothing_ends_the_evaluation() -> None:
    with (
        engine_at(lambda *_: error(502, "bad gateway")) as (engine, _),
        pytest.raises(RunFailed, match="4 tries failed, the last: status 502: bad gateway; nothing else was"),
    ):
        engine.generate([ASKED], PLAIN)


def test_a_server_that_hangs_is_tried_twice() -> None:
    hasty = Patience(failures=8, first_wait_s=1e-4, limit_s=0.05)
    with engine_at(lambda body, _: chat(body), patience=hasty) as (engine, server):
        server.hold.clear()
        with pytest.raises(RunFailed, match=r"2 tries failed, the last: no answer within 0\.05 s"):
            engine.generate([ASKED], PLAIN)
        server.hold.set()


def test_a_wait_until_tomorrow_is_not_waited_for() -> None:
    with (
        engine_at(lambda *_: error(429, "daily limit", Retry_After="86400")) as (engine, _),
        pytest.raises(RunFailed, match="asks to wait for 86400 s"),
    ):
        engine.generate([ASKED], PLAIN)


def test_as_many_calls_are_under_way_as_asked_for() -> None:
    """Each is answered only once three are there, and a fourth never is."""
    together = Barrier(3)

    def script(body: Json, _: int) -> tuple[int, Json, dict[str, str]]:
        together.wait(HANG_S)
        return chat(body)

    requests = [GenerateRequest((), (number,), turns=ASKED.turns) for number in range(9)]
    with engine_at(script, concurrency=3) as (engine, server):
        assert len(engine.generate(requests, PLAIN)) == 9
    assert server.busiest == 3


def test_a_slow_call_holds_up_no_other() -> None:
    """The first sample is answered only once all others are; requests are taken as there is room for their calls."""
    others, taken, slow = Semaphore(0), [0], [True]

    def script(body: Json, _: int) -> tuple[int, Json, dict[str, str]]:
        if body["seed"]:
            others.release()
        else:
            slow[0] = all(others.acquire(timeout=HANG_S) for _ in range(11))
        return chat(body)

    def asked() -> Iterator[tuple[GenerateRequest, SamplingParams]]:
        for number in range(3):
            taken[0] += 1
            yield GenerateRequest((), tuple(range(4 * number, 4 * number + 4)), turns=ASKED.turns), PLAIN

    with engine_at(script, concurrency=4) as (engine, server):
        server.hold.clear()
        with engine.stream(asked(), engine.capacity) as ended, ThreadPoolExecutor() as beside:
            found = beside.submit(list, ended)
            wait_until(lambda: server.now == 4)
            assert taken == [2]
            server.hold.set()
            found.result()
    assert slow == [True] and server.busiest == 4
    assert [one.seed for _, some in sorted(found.result(), key=itemgetter(0)) for one in some] == [*range(12)]


def test_several_samples_a_call_share_its_tokens() -> None:
    """Only the sum is known without log-probs; their text and order are each one's own."""
    with engine_at(lambda body, _: chat(body, "a", "bcd"), samples_per_call=2) as (engine, server):
        [found] = engine.generate([ASKED], SamplingParams(64, 0.7))
    assert [(one.text, one.length, one.seed) for one in found] == [("a", 2, 11), ("bcd", 2, 12)]
    assert server.asked[0][2]["n"] == 2 and len(server.asked) == 1


def test_what_is_under_way_is_hung_up_on() -> None:
    with engine_at(lambda body, _: chat(body)) as (engine, server):
        server.hold.clear()
        future = engine.submit(ASKED, PLAIN)
        wait_until(lambda: server.now == 1)
        engine.abort([future])
        assert future.done() and future.exception() is not None
        server.hold.set()
        assert texts(engine.generate([ASKED], PLAIN)) == [["yes", "yes"]]


def endpoint_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "endpoint"]


@each_case("hung", [False, True])
def test_no_thread_is_left_at_the_end(hung: bool) -> None:
    """One that drops a tensor while the interpreter ends aborts the process."""
    with engine_at(lambda body, _: chat(body)) as (engine, server):
        engine.generate([ASKED] * 8, PLAIN)
        if hung:
            server.hold.clear()
            future = engine.submit(ASKED, PLAIN)
            wait_until(lambda: server.now == 1)
        engine.close()
        assert not endpoint_threads()
        assert not hung or future.done()


def test_a_call_that_cannot_be_hung_up_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    connecting, connected = Event(), Event()
    connect = HTTPConnection.connect

    def slowly(connection: HTTPConnection) -> None:
        connecting.set()
        assert connected.wait(HANG_S)
        connect(connection)

    monkeypatch.setattr(HTTPConnection, "connect", slowly)
    monkeypatch.setattr(endpoint_engine, "_CLOSE_S", 0.01)
    with engine_at(lambda body, _: chat(body)) as (engine, server):
        engine.submit(ASKED, PLAIN)
        assert connecting.wait(HANG_S)
        engine.close()
        [thread] = endpoint_threads()
        connected.set()
        thread.join(HANG_S)
        assert not thread.is_alive() and not server.asked


@each_case(
    ("url", "wanted"),
    [
        ("localhost:30000", "http://localhost:30000/v1"),
        ("https://api.example.com/openai/v1/", "https://api.example.com/openai/v1"),
        ("http://[::1]:8000/v1/chat/completions", "http://[::1]:8000/v1"),
        ("https://a.example/deployments/x?api-version=1", "https://a.example/deployments/x"),
    ],
)
def test_addresses(url: str, wanted: str) -> None:
    assert str(Address.parse(url)) == wanted


@each_case("url", ["ftp://a/v1", "http://", "http://a:99999/v1", "https://me:secret@a.example/v1"])
def test_addresses_that_are_refused(url: str) -> None:
    with pytest.raises(UserError) as raised:
        Address.parse(url)
    assert "secret" not in str(raised.value)


@each_case(
    ("models", "asked", "wanted"),
    [
        (["one"], None, "one"),
        (["one", "two"], "two", "two"),
        ([], "mine", "mine"),
    ],
)
def test_the_model(models: list[str], asked: str | None, wanted: str) -> None:
    sent = json.dumps({"data": [{"id": name} for name in models]})
    with serving(lambda *_: (200, sent, {})) as server:
        assert model_of(Server(Address.parse(server.url), ""), asked) == wanted


def test_a_model_that_must_be_named() -> None:
    sent = '{"data": [{"id": "one"}, {"id": "two"}]}'
    with (
        serving(lambda *_: (200, sent, {})) as server,
        pytest.raises(UserError, match="--endpoint-model; it has one, two"),
    ):
        model_of(Server(Address.parse(server.url), ""), None)
    with pytest.raises(UserError, match="refused"):
        model_of(Server(Address.parse(server.url), ""), "mine")
