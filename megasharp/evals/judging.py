"""Judging finished requests beside sampling, in a thread of its own; their samples are committed as they are judged."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from megasharp.common.records import Completion
from megasharp.common.signals import held
from megasharp.evals.stored_samples import StoredSample

# Tokens that wait for judging; sampling waits where there are more, so that a slow verifier fills no memory.
_MOST_WAITING = 1 << 21
# After an error or a request to save, what has been sampled is judged for so long.
_GRACE_S = 10.0
_LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class Finished:
    """A request's completions: samples `indexes` of problem `number`, or its greedy one, asked `sampled_s` ago."""

    number: int
    greedy: bool
    indexes: Sequence[int]
    completions: Sequence[Completion]
    sampled_s: float

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return sum(completion.tokens.numel() for completion in self.completions)


class Judging:
    """Judges what is `put`, several requests together, and commits them.

    `judge` runs in a thread; so does `commit`, never after the block's end. At its end all that was put is committed;
    where an exception leaves it, what can be judged in a few seconds.
    """

    def __init__(
        self,
        judge: Callable[[Sequence[Finished]], list[StoredSample]],
        commit: Callable[[Sequence[StoredSample]], None],
    ) -> None:
        self._judge, self._commit = judge, commit
        self._changed = threading.Condition()
        self._waiting: list[Finished] = []
        self._tokens = 0
        self._busy = False
        self._ended = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="judging", daemon=True)

    def __enter__(self) -> Judging:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        try:
            self._settle(None if kind is None else _GRACE_S)
        except BaseException:
            self._settle(_GRACE_S)
            raise
        finally:
            with held():
                with self._changed:
                    self._ended = True
                    self._changed.notify_all()
                # It holds tensors, which a thread must not drop while the interpreter ends: that aborts the process.
                self._thread.join(_LOOK_S)
        if kind is None:
            self._check()

    def put(self, finished: Finished) -> None:
        """Have a request judged; waits where the thread is far behind. Raises what judging or committing raised."""
        self._check()
        with held(), self._changed:
            self._waiting.append(finished)
            self._tokens += finished.tokens
            self._changed.notify_all()
        while self._tokens > _MOST_WAITING and self._error is None:
            self._wait()

    def _settle(self, seconds: float | None) -> None:
        """Wait until all is committed, or for so long."""
        until = None if seconds is None else time.monotonic() + seconds
        while (self._waiting or self._busy) and self._error is None and (until is None or time.monotonic() < until):
            self._wait()

    def _wait(self) -> None:
        with self._changed:
            self._changed.wait(_LOOK_S)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._ended:
                    self._changed.wait(_LOOK_S)
                if self._ended:
                    return
                batch, self._waiting, self._busy = self._waiting, [], True
            try:
                samples = self._judge(batch)
                with self._changed:
                    if self._ended:
                        return
                    self._commit(samples)
            # A user's verifier may raise anything; the main thread raises it again.
            except BaseException as error:
                self._error = error
            with self._changed:
                self._busy = False
                self._tokens -= sum(one.tokens for one in batch)
                self._changed.notify_all()
                if self._error is not None:
                    return
