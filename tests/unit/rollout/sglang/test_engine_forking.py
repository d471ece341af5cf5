"""An engine's processes are forked from one whose imports are frozen; a stand-in for SGLang starts them."""

from __future__ import annotations

import gc
import multiprocessing
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

from megasharp.rollout.sglang import engine


@pytest.fixture
def standin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    class Engine:
        def _launch_scheduler_processes(self) -> tuple[str | None, int]:
            return multiprocessing.get_start_method(), gc.get_freeze_count()

        _launch_detokenizer_subprocesses = _launch_scheduler_processes

    sglang = types.SimpleNamespace(Engine=Engine, http_server=types.SimpleNamespace())
    monkeypatch.setitem(sys.modules, f"{engine.__name__}.sglang_internals", sglang)  # type: ignore[arg-type]
    monkeypatch.setattr(engine, "sglang_internals", sglang, raising=False)
    monkeypatch.delitem(sys.modules, f"{engine.__name__}.forking", raising=False)
    monkeypatch.delattr(engine, "forking", raising=False)
    yield sglang
    gc.unfreeze()
    # It holds the stand-in: the next import finds SGLang's own parts.
    del sys.modules[f"{engine.__name__}.forking"], engine.forking  # type: ignore[attr-defined]


def test_a_process_is_forked_with_what_is_there_frozen(standin: Any) -> None:
    from megasharp.rollout.sglang.engine import forking

    forking.fork_processes()
    before = multiprocessing.get_start_method(allow_none=True)
    method, frozen = standin.Engine()._launch_scheduler_processes()
    assert (method, frozen > 10_000) == ("fork", True)
    assert multiprocessing.get_start_method(allow_none=True) == before
    # SGLang's own request for it would go to a server that may not listen yet.
    assert standin.http_server._freeze_gc_after_server_warmup(None) is None
