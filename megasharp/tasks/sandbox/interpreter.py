"""A Python in a sandbox of its own that is given pieces of code one after the other, and keeps its names between them.

Pieces and answers travel over a socket, a length and so many bytes each (`inside.py` has the other end). A piece that
takes too long, ends the process, or answers too much ends the interpreter.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from contextlib import ExitStack
from dataclasses import replace

from megasharp.tasks.sandbox.programs import Process, Sandbox, started

_LENGTH = struct.Struct("!Q")
# Seconds that a busy machine may take to start a sandbox.
_START_S = 60.0
# Seconds of computing of all pieces together.
_CPU_S = 120
# Characters of an answer; what the policy reads of it is less.
CHARACTERS = 20_000
# UTF-8 has up to four bytes for one.
_MOST_BYTES = 4 * CHARACTERS


class InterpreterEnded(Exception):
    """The interpreter is no more, and its names are lost; the message says why."""


class Interpreter:
    """Starts the process; blocks until it is there. Raises RuntimeError where the sandbox does not start."""

    def __init__(self, sandbox: Sandbox) -> None:
        sandbox = replace(sandbox, limits=replace(sandbox.limits, cpu_s=_CPU_S))
        with ExitStack() as stack:
            self._socket, theirs = socket.socketpair()
            stack.callback(self._socket.close)
            with theirs:
                job = {"kind": "converse", "characters": CHARACTERS}
                self._process: Process = stack.enter_context(started(sandbox, job, theirs.fileno(), theirs.fileno()))
            if not self._process.begins(time.monotonic() + _START_S):
                self._process.kill()
                raise RuntimeError(f"the sandbox did not start: {self._process.complaint()}")
            self._socket.setblocking(False)
            self._stack = stack.pop_all()

    async def run(self, code: str, seconds: float) -> str:
        """Run a piece of code, and return what it says. Raises InterpreterEnded where that ended the interpreter."""
        piece = code.encode("utf-8", "replace")
        try:
            async with asyncio.timeout(seconds):
                await asyncio.get_running_loop().sock_sendall(self._socket, _LENGTH.pack(len(piece)) + piece)
                (length,) = _LENGTH.unpack(await self._exactly(_LENGTH.size))
                if length > _MOST_BYTES:
                    raise InterpreterEnded("its answer was too long")
                return (await self._exactly(length)).decode("utf-8", "replace")
        except TimeoutError as error:
            raise InterpreterEnded(f"the code took longer than {seconds:g} s") from error
        except OSError as error:
            why = "the code took too much memory" if self._process.ran_out() else "the code ended the interpreter"
            raise InterpreterEnded(why) from error

    async def _exactly(self, count: int) -> bytes:
        found = bytearray()
        while len(found) < count:
            part = await asyncio.get_running_loop().sock_recv(self._socket, count - len(found))
            if not part:
                raise ConnectionError("the interpreter has closed its end")
            found += part
        return bytes(found)

    def close(self) -> None:
        """End the process with all that it has started."""
        self._stack.close()
