"""Python in a sandbox (`tasks/sandbox`): one interpreter for a conversation, whose variables stay from call to call."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from threading import Lock
from typing import Any, Literal

from megasharp.common.errors import UserError
from megasharp.tasks.environment import called
from megasharp.tasks.sandbox.bubblewrap import open_sandbox
from megasharp.tasks.sandbox.interpreter import Interpreter, InterpreterEnded
from megasharp.tasks.sandbox.programs import Sandbox
from megasharp.tasks.tools.tool import Tool, ToolError

Kind = Literal["bubblewrap", "none"]
_opening = Lock()


@cache
def _opened(kind: Kind) -> Sandbox:
    try:
        return open_sandbox(kind)
    except UserError as error:
        text = str(error).replace("reward.sandbox", "the tool python's sandbox")
        raise UserError(text) from error


def _interpreter(kind: Kind) -> Interpreter:
    with _opening:
        sandbox = _opened(kind)
    return Interpreter(sandbox)


class Python(Tool):
    """Runs code for up to `seconds` a call. The process starts with the first call, and ends with the conversation.

    With `sandbox: none` the code has this user's rights.
    """

    name = "python"
    description = (
        "Run Python code and read what it prints, and the value of its last line. Variables stay until the next call."
    )
    parameters = {
        "type": "object",
        "properties": {"code": {"type": "string", "description": "The code."}},
        "required": ["code"],
    }
    # What a clock says, or which side of the time limit a call falls on, is another matter the next time.
    repeats = False

    def __init__(self, seconds: float = 5.0, sandbox: Kind = "bubblewrap") -> None:
        if sandbox not in ("bubblewrap", "none"):
            raise UserError(f"tools: python: sandbox must be bubblewrap or none, got {sandbox!r}")
        self._seconds, self._kind = seconds, sandbox
        self._starting: asyncio.Future[Interpreter] | None = None

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """Return what the code says."""
        if self._starting is None:
            # The process dies with the thread that has started it: with one of `called` that were at once.
            self._starting = asyncio.ensure_future(asyncio.to_thread(_interpreter, self._kind))
        # A start that nobody waits for any more is ended by `close`.
        interpreter = await asyncio.shield(self._starting)
        try:
            said = await interpreter.run(arguments["code"], self._seconds)
            return said.rstrip() or "(the code printed nothing)"
        except InterpreterEnded as error:
            await self.close()
            raise ToolError(f"{error}; the next call begins anew, without any variables") from error

    async def close(self) -> None:
        """End the process."""
        starting, self._starting = self._starting, None
        if starting is not None:
            # Why it did not start was told to who has called.
            with suppress(RuntimeError, OSError, UserError):
                interpreter = await starting
                await called(interpreter.close)
