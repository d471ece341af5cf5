"""An engine on a CPU forks its processes from the first one, which has done SGLang's imports.

SGLang spawns them: each then imports all of SGLang again, some ten seconds of computing, for a scheduler per rank and a
detokenizer. With CUDA that is how it must be; a process without CUDA and, until its server starts, without threads can
be forked.

What the imports made is frozen before: on a CPU SGLang collects garbage at each flush and release, half a second if it
looks at all objects of its imports. SGLang asks its own server to freeze them; without a warm-up, that server may not
listen yet.
"""

from __future__ import annotations

import gc
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
    http_server: Any = sglang_internals.http_server
    http_server._freeze_gc_after_server_warmup = _frozen_already


def _forked(launch: Launch) -> Launch:
    def launched(*args: Any, **kwargs: Any) -> Any:
        gc.freeze()
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


def _frozen_already(server_args: Any) -> None:
    """Take the place of SGLang's request to its own server."""
