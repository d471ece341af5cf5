"""An engine on a CPU forks its processes from the first one, which has done SGLang's imports.

SGLang spawns them: each then imports all of SGLang again, some ten seconds of computing, for a scheduler per rank and a
detokenizer. With CUDA that is how it must be; a process without CUDA and, until its server starts, without threads can
be forked.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from megasharp.rollout.sglang.engine import sglang_internals

Launch = Callable[..., Any]


def fork_processes() -> None:
    """From now on the processes of an engine that this process launches are forked."""
    engine: Any = sglang_internals.Engine
    engine._launch_scheduler_processes = _forked(engine._launch_scheduler_processes)
    engine._launch_detokenizer_subprocesses = _forked(engine._launch_detokenizer_subprocesses)


def _forked(launch: Launch) -> Launch:
    def launched(*args: Any, **kwargs: Any) -> Any:
        with _forking():
            return launch(*args, **kwargs)

    return launched


@contextmanager
def _forking() -> Iterator[None]:
    method = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("fork", force=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method(method, force=True)
