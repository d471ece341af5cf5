"""Cases of the adapter of verifiers: environments that do what others do not; run by `test_environments.py`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from megasharp.common.errors import UserError
from megasharp.tasks.environment import Observation
from megasharp.tasks.environments.verifiers_package import Policy, Verifiers

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples" / "environments" / "verifiers"))

TASKSET = """
import verifiers.v1 as vf


class Task(vf.Task[vf.TaskData]):
    @vf.reward(weight=0.5)
    async def talked(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class Tasks(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        return [Task(vf.TaskData(prompt="begin", system_prompt="be brief"), self.config.task)]


class Config(vf.EnvConfig):
    one: vf.AgentConfig = vf.AgentConfig()
    other: vf.AgentConfig = vf.AgentConfig()


class Env(vf.Env[Config]):
    async def run(self, task, agents):
        {run}


__all__ = ["Tasks", "Env"]
"""
PLAIN = TASKSET.partition("class Config")[0] + '__all__ = ["Tasks"]\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def played(taskset: str, actions: Sequence[str], index: int = 0, chat: bool = True) -> list[Observation]:
    async def play() -> list[Observation]:
        environment = Verifiers(taskset, chat=chat)
        try:
            found = [await environment.reset({"index": index})]
            return found + [await environment.step(action) for action in actions]
        finally:
            await environment.close()
            assert len(asyncio.all_tasks()) == 1

    return asyncio.run(play())


def test_the_same_actions_are_answered_alike_and_only_what_is_new_is_an_observation() -> None:
    games = [played("guess-number", ("0", "9", "4"), index=3) for _ in range(2)]
    assert games[0] == games[1]
    first, *others = games[0]
    assert first.messages == (("user", "0 to 9:"),)
    assert all(len(one.messages) <= 1 for one in others)


def test_a_taskset_without_an_environment_is_one_turn_with_its_rubrics_weights(folder: Path) -> None:
    (folder / "one_turn.py").write_text(PLAIN)
    first, last = played("one-turn", ("hello",))
    assert first.messages == (("system", "be brief"), ("user", "begin"))
    assert (last.reward, last.done, last.info) == (0.5, True, {"correct": True, "answer": "hello"})
    assert played("one-turn", (), chat=False)[0] == Observation("be brief\n\nbegin")
    with pytest.raises(UserError, match="the taskset has 1 tasks, and a row asks for 1"):
        played("one-turn", (), index=1)


def test_two_conversations_with_the_policy_are_refused(folder: Path) -> None:
    (folder / "two_talks.py").write_text(TASKSET.format(run="[await a.run(task) for a in (agents.one, agents.other)]"))
    with pytest.raises(UserError, match="has two conversations with the policy"):
        played("two-talks", ("hello",))


def test_a_role_with_a_client_of_its_own_is_not_the_policy_nor_rewarded(folder: Path) -> None:
    run = "[await a.run(task) for a in (agents.other, agents.one)]"
    (folder / "with_other.py").write_text(TASKSET.format(run=run))
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append((await request.json())["messages"][-1]["content"])
        message = {"role": "assistant", "content": "I am another"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response(
            {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        )

    async def play() -> Observation:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", answer)
        async with TestServer(app) as server:
            client = {"type": "eval", "base_url": str(server.make_url("/v1")), "api_key_var": "NO_KEY"}
            environment = Verifiers("with-other", {"other": {"client": client}})
            await environment.reset({"index": 0})
            last = await environment.step("hello")
            await environment.close()
            return last

    last = asyncio.run(play())
    assert (last.done, last.reward, asked) == (True, 0.5, ["begin"])


def test_an_environment_that_raises_has_failed(folder: Path) -> None:
    (folder / "raising.py").write_text(TASKSET.format(run="await agents.one.run(task); raise ValueError('no board')"))
    with pytest.raises(RuntimeError, match="no board"):
        played("raising", ("hello",))


def test_tools_and_other_histories_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "one_turn.py").write_text(PLAIN)
    from verifiers.v1.dialects import ChatDialect
    from verifiers.v1.types import Tool

    read = ChatDialect.parse_request
    tools = [Tool(name="look", description="", parameters={})]
    monkeypatch.setattr(
        ChatDialect, "parse_request", lambda self, body: read(self, body).model_copy(update={"tools": tools})
    )
    with pytest.raises(UserError, match="offers the policy tools"):
        played("one-turn", ("hello",))
    monkeypatch.undo()
    monkeypatch.syspath_prepend(folder)

    async def rewritten() -> None:
        environment = Verifiers("one-turn")
        await environment.reset({"index": 0})
        environment._policy, policy = Policy(), environment._policy
        environment._policy.answer = asyncio.get_running_loop().create_future()
        environment._policy.calls.put_nowait((("user", "another"), ("assistant", "hello"), ("user", "on")))
        try:
            await environment.step("hello")
        finally:
            environment._policy = policy
            await environment.close()

    with pytest.raises(UserError, match="rewrites what was said before"):
        asyncio.run(rewritten())
