"""Environments of the `verifiers` package, version 0.4 (its v1 API): those of prime-rl and of its Environments Hub.

    use: verifiers
    options:
      taskset: gsm8k-v1      # an installed package, or a module beside this file
      env: {}                # further keys of verifiers' own `env` block
    count: 500               # tasks 1 to 500 of the taskset; or rows with `index`

Such an environment calls the model itself. So it runs as a task of its own, and each of its calls waits: the messages
that are new in it are an observation, and the policy's turn is its answer. Its reward is its rubric's of that
conversation, at the end; a response that meets a limit before has none.

The harness of each role is a plain chat in this process, unless the taskset or `env` name another; the runtime is a
subprocess of this machine's unless `env` names another local one. Roles without a client of their own are the policy,
which has one conversation. Refused are calls with tools, and a conversation that is not the last one, longer.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any

from megasharp.common.errors import UserError, one_line
from megasharp.tasks.environment import Observation, Row
from megasharp.tasks.environments.text_play import TextPlay

Messages = tuple[tuple[str, str], ...]
# The address of a client that is not called: its place among a server's clients is taken by the policy.
_POLICY_URL = "http://policy.invalid/v1"
_CHAT = "megasharp_chat"


class Policy:
    """In the place of a client of verifiers': hands each call over, and waits for its answer."""

    def __init__(self) -> None:
        self.calls: asyncio.Queue[Messages | UserError] = asyncio.Queue()
        self.answer: asyncio.Future[str] | None = None
        # The id of the trace that its calls are in.
        self.conversation: str | None = None

    async def get_response(self, dialect: Any, body: dict[str, Any], *_: object, **call: Any) -> Any:
        """Answer a call, as `verifiers.v1.Client` does."""
        from verifiers.v1.clients.train import serialize_completion
        from verifiers.v1.types import AssistantMessage, Response, Usage, content_text

        request = dialect.parse_request(body)
        self.conversation = self.conversation or call.get("session_id")
        self.answer = asyncio.get_running_loop().create_future()
        if request.tools:
            await self._refuse("offers the policy tools, which this adapter cannot write")
        if call.get("session_id") != self.conversation:
            await self._refuse("has two conversations with the policy; give the other role a client of its own")
        messages = tuple((message.role, content_text(message.content)) for message in request.messages)
        self.calls.put_nowait(messages)
        text = await self.answer
        response = Response(
            id="megasharp",
            created=0,
            model="policy",
            message=AssistantMessage(content=text),
            finish_reason="stop",
            usage=Usage(prompt_tokens=0, completion_tokens=0),
        )
        response.raw = serialize_completion(response, "policy")
        return response

    async def _refuse(self, why: str) -> None:
        self.calls.put_nowait(UserError(f"verifiers: the environment {why}"))
        await asyncio.Event().wait()


class Verifiers(TextPlay):
    """An environment of verifiers' around tasks of a `taskset`; without `chat`, messages are joined to texts."""

    def __init__(
        self, taskset: str, env: Mapping[str, Any] | None = None, chat: bool = True, correct_above: float = 0.0
    ) -> None:
        super().__init__(chat=chat, correct_above=correct_above)
        _library()
        self._config = json.dumps({**(env or {}), "taskset": {**(env or {}).get("taskset", {}), "id": taskset}})
        self._heard: Messages = ()
        self._episode: asyncio.Task[Any] | None = None

    async def reset(self, row: Row) -> Observation:
        """Begin task `index` of the taskset, from 0; a row of a seed alone stands for the task before it."""
        await self.close()
        self._begin()
        index = int(row["index"] if "index" in row else row["seed"] - 1)
        self._heard, self._policy = (), Policy()
        self._episode = asyncio.create_task(_played(self._config, index, self._policy))
        return await self._following()

    async def step(self, action: str) -> Observation:
        """Give the answer to the call that is waiting, and wait for the next one, or for the end."""
        assert self._policy.answer is not None
        self._heard += (("assistant", action),)
        self._actions.append(action)
        # The environment may have given up on it, by a limit of time of its own.
        if not self._policy.answer.done():
            self._policy.answer.set_result(action)
        return await self._following()

    async def close(self) -> None:
        """End the environment's task."""
        if self._episode is not None:
            episode, self._episode = self._episode, None
            episode.cancel()
            await asyncio.gather(episode, return_exceptions=True)

    async def _following(self) -> Observation:
        """Wait for the next call, or for the end."""
        assert self._episode is not None
        call = asyncio.ensure_future(self._policy.calls.get())
        try:
            await asyncio.wait({call, self._episode}, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                return self._ended(self._episode.result())
            heard = call.result()
        finally:
            call.cancel()
        if isinstance(heard, UserError):
            raise heard
        if heard[: len(self._heard)] != self._heard:
            raise UserError("verifiers: the environment rewrites what was said before in its conversation")
        new, self._heard = heard[len(self._heard) :], heard
        return self._told(new)

    def _told(self, new: Messages) -> Observation:
        return Observation(messages=new) if self._chat else Observation("\n\n".join(text for _, text in new))

    def _ended(self, episode: Any) -> Observation:
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in errors) or "it has failed")
        reward = sum(float(trace.reward) for trace in episode.traces if trace.id == self._policy.conversation)
        info = {"correct": reward > self._correct_above, "answer": "\n".join(self._actions)}
        return Observation(reward=reward, done=True, info=info)


async def _played(config: str, index: int, policy: Policy) -> Any:
    """Play an episode of a task, with the policy as the model of all roles that have none."""
    from verifiers.v1 import ModelContext, TrainClientConfig
    from verifiers.v1.utils.loaders import load_environment

    client = TrainClientConfig(base_url=_POLICY_URL)
    environment = load_environment(_env_config(config))
    async with environment.serving():
        # The server that the harnesses call keeps its clients by their configurations.
        environment._interception.clients[client.model_dump_json()] = policy
        return await environment.run_episode(_task(config, index), ModelContext(model="policy", client=client))


def _env_config(config: str) -> Any:
    """Read the `env` block, with harness and runtime for roles that name none."""
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.loaders import default_harness_id, env_config_type, resolve_env_config

    _offer_chat()
    raw: dict[str, Any] = {**json.loads(config), "interception": {"type": "server"}}
    taskset = raw["taskset"]["id"]
    kind = env_config_type(taskset, raw.get("id") or "")
    for role in agent_config_fields(kind()):
        own = raw.setdefault(role, {})
        own.setdefault("runtime", {"type": "subprocess"})
        if default_harness_id(taskset) != taskset:
            own.setdefault("harness", {"id": _CHAT})
    return resolve_env_config(raw)


def _task(config: str, index: int) -> Any:
    tasks, unread = _tasks(config)
    while len(tasks) <= index:
        try:
            tasks.append(next(unread))
        except StopIteration:
            raise UserError(f"verifiers: the taskset has {len(tasks)} tasks, and a row asks for {index}") from None
    return tasks[index]


@lru_cache(maxsize=16)
def _tasks(config: str) -> tuple[list[Any], Iterator[Any]]:
    """The tasks read so far, and the others: some tasksets have no end."""
    from verifiers.v1.utils.loaders import load_taskset

    return [], iter(load_taskset(_env_config(config).taskset))


@lru_cache(maxsize=1)
def _offer_chat() -> None:
    """Put a harness where verifiers looks for it by its id: one that says what it is told to, and no tools."""
    import httpx
    from verifiers.v1 import Harness, HarnessConfig
    from verifiers.v1.dialects.chat import message_to_wire
    from verifiers.v1.runtimes import ProgramResult

    class Chat(Harness[HarnessConfig]):  # type: ignore[misc]
        APPENDS_SYSTEM_PROMPT = SUPPORTS_RESUME = True
        EXECUTES_CODE = NEEDS_CONTAINER = False

        async def launch(self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, *rest: Any) -> Any:
            system, prompt = self.resolve_prompt(rest[-1])
            said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else _wire(prompt or ())
            messages = [*([{"role": "system", "content": system}] if system else []), *said]
            # The address is this machine's; reading certificates would take longer than all else here.
            async with httpx.AsyncClient(timeout=None, trust_env=False, verify=False) as http:
                answer = await http.post(
                    f"{endpoint}/chat/completions",
                    json={"model": ctx.model, "messages": messages},
                    headers={"Authorization": f"Bearer {secret}"},
                )
            return ProgramResult(int(answer.is_error), "", answer.text if answer.is_error else "")

    def _wire(messages: Sequence[Any]) -> list[dict[str, Any]]:
        return [message_to_wire(message) for message in messages]

    module = ModuleType(_CHAT)
    module.__dict__.update(Chat=Chat, __all__=["Chat"])
    sys.modules[_CHAT] = module


def _library() -> None:
    try:
        import verifiers.v1  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"environments of verifiers need that package ({one_line(error)}); pip install 'megasharp[verifiers]'"
        ) from error
