"""One call to several engines at the same time, made by a rank that goes on with its own part meanwhile."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from megasharp.serving.client.api import EngineApi, EngineFailed, EngineSlow, Refused


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an engine did not do its part: it refused, it did not answer in time, or it cannot be reached any more."""

    kind: Literal["refused", "slow", "gone"]
    reason: str


Action = Callable[[int, EngineApi], Refused | None]


class Posts:
    """Calls under way, one to each engine, by the engines' numbers."""

    def __init__(self, engines: Sequence[tuple[int, EngineApi]], action: Action) -> None:
        self._pending = {number for number, _ in engines}
        self._answers: queue.SimpleQueue[tuple[int, Failure | None]] = queue.SimpleQueue()
        for number, api in engines:
            # Daemons: an engine that hangs must not keep this process from its end.
            threading.Thread(target=self._post, args=(number, api, action), daemon=True).start()

    def _post(self, number: int, api: EngineApi, action: Action) -> None:
        try:
            refused = action(number, api)
        except EngineSlow as error:
            self._answers.put((number, Failure("slow", str(error))))
        except EngineFailed as error:
            self._answers.put((number, Failure("gone", str(error))))
        except Exception as error:
            # A thread that ends without a word would be waited for.
            self._answers.put((number, Failure("gone", repr(error))))
        else:
            self._answers.put((number, None if refused is None else Failure("refused", f"refused: {refused.message}")))

    def failures(self, limit_s: float, grace_s: float) -> dict[int, Failure]:
        """Wait until all have answered, at most `limit_s`; after a failure only `grace_s` more.

        An engine that has not answered by then is slow: it may be waiting for the one that failed.
        """
        found: dict[int, Failure] = {}
        deadline = time.monotonic() + limit_s
        while self._pending:
            try:
                number, failure = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            self._pending.discard(number)
            if failure is not None:
                found[number] = failure
                deadline = min(deadline, time.monotonic() + grace_s)
        return found | {number: Failure("slow", f"no answer within {limit_s:g} s") for number in self._pending}
