"""Calls a user's reward in its own style, with the arguments that its signature asks for.

`Running` is a reward as one process has it: a class is made there once and set up, and `async def` functions share one
event loop.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from megasharp.tasks.judge import Item
from megasharp.tasks.reward_signature import ANSWER, Style, signature_of
from megasharp.tasks.user_import import imported


class TooLate(Exception):
    """An asynchronous call was given up after its seconds."""


class Running:
    """The reward at `path` in this process. Raises UserError where it cannot be imported, and what `setup` raises."""

    def __init__(self, path: str) -> None:
        self.signature = signature_of(path)
        made: Any = imported(path)
        if inspect.isclass(made):
            made = made()
        setup = getattr(made, "setup", None)
        if callable(setup) and not inspect.isroutine(made):
            setup()
        self._made = made
        method = self.signature.method
        self._call: Callable[..., Any] = getattr(made, method) if method not in ("", "__call__") else made

    def one(self, item: Item) -> Any:
        """Return what it returns for one response; of an `async def`, a coroutine."""
        signature, answer = self.signature, item.answer.given
        if signature.style is Style.PLAIN:
            return self._call(item.text, answer)
        row = item.row or {}
        model = row.get("reward_model")
        known = model.get("ground_truth", answer) if isinstance(model, Mapping) else answer
        given = {
            "data_source": row.get("data_source", item.task.rpartition("/")[2]),
            "solution_str": item.text,
            "ground_truth": known,
            "extra_info": row.get("extra_info") or {},
        }
        return self._call(**{name: given[name] for name in signature.given})

    def several(self, items: Sequence[Item]) -> Any:
        """Return what it returns for a batch, by TRL's convention; of an `async def`, a coroutine.

        Where the row's prompt is a list of messages, prompt and completion are such lists, else texts.
        """
        signature = self.signature
        given: dict[str, list[Any]] = {
            "prompts": [
                [{"role": role, "content": text} for role, text in item.turns] if item.turns else item.prompt
                for item in items
            ],
            "completions": [
                [{"role": "assistant", "content": item.text}] if item.turns else item.text for item in items
            ],
            "completion_ids": [list(item.tokens) for item in items],
        }
        # A column that some rows lack is None there.
        columns = dict.fromkeys(name for item in items for name in signature.columns_of(item.row))
        rows = [{ANSWER: item.answer.given, **(item.row or {})} for item in items]
        return self._call(
            **{name: given[name] for name in signature.given},
            **{name: [row.get(name) for row in rows] for name in columns},
        )

    def close(self) -> None:
        """Call its `close`, where it is an object that has one."""
        close = getattr(self._made, "close", None)
        if callable(close) and not inspect.isroutine(self._made):
            close()


_lock = threading.RLock()
_running: dict[str, Running] = {}


def running(path: str) -> Running:
    """Return the reward at `path`, made and set up at the first call in this process."""
    with _lock:
        if path not in _running:
            _running[path] = Running(path)
        return _running[path]


@lru_cache(maxsize=1)
def _loop() -> asyncio.AbstractEventLoop:
    # One for all calls: a user's client belongs to the loop in which it was made.
    return asyncio.new_event_loop()


def waited(made: Any) -> Any:
    """Return the result of a coroutine."""
    with _lock:
        return _loop().run_until_complete(made)


def gathered(
    calls: Sequence[Callable[[], Any]], at_once: int, seconds: float | None
) -> list[tuple[Any, BaseException | None]]:
    """Return each call's result or error, in order, of at most `at_once` coroutines at a time.

    A call that takes more than `seconds` has the error TooLate.
    """

    async def all_of_them() -> list[tuple[Any, BaseException | None]]:
        room = asyncio.Semaphore(at_once)

        async def one(call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
            async with room:
                limit = asyncio.timeout(seconds)
                try:
                    async with limit:
                        return await call(), None
                # An exit, or a cancellation that it lets through, is its own; the loop would end by one.
                except BaseException as error:
                    late = isinstance(error, TimeoutError) and limit.expired()
                    return None, TooLate(f"no verdict in {seconds:g} s") if late else error

        return await asyncio.gather(*map(one, calls))

    found: list[tuple[Any, BaseException | None]] = waited(all_of_them())
    return found
