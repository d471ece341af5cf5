"""A conversation with tools: the policy calls them as often as it likes, and a turn without a call is its answer.

Each call is answered by a message of role `tool`, in the order of the calls; a malformed one by what is wrong with it.
The answer is judged by the problem's own task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from megasharp.tasks.environment import Environment, Observation, Row
from megasharp.tasks.final_answer import final_text
from megasharp.tasks.tools.calls import SHORT_ANSWER, SHORT_END, Call, Malformed, Notation, json_calls, short_call
from megasharp.tasks.tools.tool import Tool, ToolError, check_arguments

# In `short`, where words may be no tokens, what is wrong is a sign.
_SHORT_ERROR = "!"


class ToolEnvironment(Environment):
    """One conversation. Of the calls in a turn the first `calls` are made; an answer is cut to `characters`."""

    def __init__(self, tools: Sequence[Tool], notation: Notation, calls: int, characters: int) -> None:
        self.repeats = all(tool.repeats for tool in tools)
        self._tools = {tool.name: tool for tool in tools}
        self._notation = notation
        self._calls, self._characters = calls, characters

    async def reset(self, row: Row) -> Observation:
        """Return the prompt."""
        return Observation(row["text"], tuple((role, text) for role, text in row["turns"]))

    async def step(self, action: str) -> Observation:
        """Answer the calls of a turn; one without any is the last."""
        found = self._found(action)
        if not found:
            return Observation(done=True, info={"judge": True})
        if self._notation == "short":
            (text,) = [await self._answer(call) for call in found]
            return Observation(f"{SHORT_ANSWER}{text}{SHORT_END}")
        return Observation(messages=tuple([("tool", await self._answer(call)) for call in self._made(found)]))

    async def close(self) -> None:
        """Close every tool, one that fails among them; the first failure is raised then."""
        closed = await asyncio.gather(*(tool.close() for tool in self._tools.values()), return_exceptions=True)
        if (error := next((each for each in closed if each is not None), None)) is not None:
            raise error

    def _found(self, action: str) -> list[Call | Malformed]:
        if self._notation == "short":
            (tool,) = self._tools.values()
            return short_call(action, tool.name, next(iter(tool.parameters["properties"])))
        # A call that is only thought of is none.
        return json_calls(final_text(action).text or "")

    def _made(self, found: Sequence[Call | Malformed]) -> list[Call | Malformed]:
        late = Malformed(f"at most {self._calls} calls a turn are answered")
        return [call if place < self._calls else late for place, call in enumerate(found[: self._calls + 1])]

    async def _answer(self, call: Call | Malformed) -> str:
        try:
            if isinstance(call, Malformed):
                raise ToolError(call.why)
            if call.name not in self._tools:
                raise ToolError(f"there is no tool {call.name!r}; there are: {', '.join(self._tools)}")
            tool = self._tools[call.name]
            check_arguments(call.arguments, tool.parameters)
            answer = await tool.call(call.arguments)
        except ToolError as error:
            return _SHORT_ERROR if self._notation == "short" else f"error: {error}"
        return answer if len(answer) <= self._characters else f"{answer[: self._characters]} [cut here]"
