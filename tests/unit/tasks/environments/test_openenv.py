"""OpenEnv's protocol, as a server of version 0.10 speaks it: what is sent, and what each kind of answer means."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection, serve

from megasharp.common.errors import UserError
from megasharp.tasks.environments.openenv import OpenEnv


def seen(reward: float | None = None, done: bool = False, **fields: object) -> dict[str, Any]:
    return {"type": "observation", "data": {"observation": {"metadata": {}, **fields}, "reward": reward, "done": done}}


def refused(kind: str, place: str, message: str, code: str = "VALIDATION_ERROR") -> dict[str, Any]:
    errors = [{"type": kind, "loc": [place], "msg": message}]
    return {"type": "error", "data": {"message": "Invalid message", "code": code, "errors": errors}}


def with_server(answers: list[dict[str, Any]], play: Callable[[str], Awaitable[None]]) -> list[dict[str, Any]]:
    """Play against a server with these answers; returns what it was sent."""
    sent: list[dict[str, Any]] = []
    left = iter(answers)

    async def session(socket: ServerConnection) -> None:
        assert socket.request is not None and socket.request.path == "/game/ws"
        async for message in socket:
            sent.append(json.loads(message))
            await socket.send(json.dumps(next(left)))

    async def run() -> None:
        async with serve(session, "127.0.0.1", 0) as server:
            await play(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/game/")

    asyncio.run(run())
    return sent


def test_a_game_is_a_session_whose_rewards_and_fields_are_read() -> None:
    async def play(url: str) -> None:
        environment = OpenEnv(url, "word", "said", {"loud": True}, prompt="{}? ", answer="[{}] ")
        assert (await environment.reset({"id": "a", "seed": 3, "level": 2})).text == "guess? "
        first, last = await environment.step(" no\n"), await environment.step("yes")
        assert (first.text, first.reward, first.done) == ("[wrong] ", 0.0, False)
        assert (last.text, last.reward, last.done) == ('[{"a": 1}] ', 0.5, True)
        assert last.info == {"correct": True, "answer": "no yes"}
        await environment.close()

    sent = with_server([seen(said="guess"), seen(said="wrong"), seen(0.5, True, said={"a": 1})], play)
    assert sent == [
        {"type": "reset", "data": {"seed": 3, "level": 2}},
        {"type": "step", "data": {"word": "no", "loud": True}},
        {"type": "step", "data": {"word": "yes", "loud": True}},
    ]


def test_what_the_schema_refuses_is_told_to_the_policy() -> None:
    async def play(url: str) -> None:
        environment = OpenEnv(url, action=None)
        assert (await environment.reset({})).text == '{"said": "guess"}'
        for action, told in (("7", "It must be a JSON object."), ("{", "It must be a JSON object (Expecting")):
            assert (await environment.step(action)).text.startswith(f"No such action. {told}")
        answer = await environment.step('{"word": 1}')
        assert answer.text == "No such action. word: Input should be a valid string." and not answer.done
        await environment.close()

    assert (
        len(with_server([seen(said="guess"), refused("string_type", "word", "Input should be a valid string")], play))
        == 2
    )


def test_wrong_options_end_the_run_and_a_servers_errors_are_the_environments() -> None:
    async def play(url: str) -> None:
        environment = OpenEnv(url, "word", "sad")
        with pytest.raises(UserError, match="no field 'sad', but metadata, said"):
            await environment.reset({})
        environment = OpenEnv(url, "wrod", "said")
        await environment.reset({})
        with pytest.raises(UserError, match=r"other fields than wrod \(word: Field required\)"):
            await environment.step("no")
        with pytest.raises(RuntimeError, match="the server failed: word: lost"):
            await environment.step("no")
        await environment.close()
        full = OpenEnv(url)
        with pytest.raises(RuntimeError, match="cannot begin: Server at capacity"):
            await full.reset({})
        await full.close()

    full = {"type": "error", "data": {"message": "Server at capacity", "code": "CAPACITY_REACHED"}}
    missing, lost = refused("missing", "word", "Field required"), refused("x", "word", "lost", "EXECUTION_ERROR")
    with_server([seen(said="guess"), seen(said="guess"), missing, lost, full], play)
    with pytest.raises(UserError, match="no address such as"):
        OpenEnv("localhost:8000")
