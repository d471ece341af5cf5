"""Runs one function on several real processes joined by gloo, as the tests of parallel code need.

    from launch import RankError, run_ranks

    def ranks_sum(rank: int, world: int, scale: float) -> float:  # at the module's top level
        x = torch.tensor([scale * rank])
        torch.distributed.all_reduce(x)
        return x.item()

    def test_sum() -> None:
        assert run_ranks(2, ranks_sum, 3.0) == [3.0, 3.0]

Each rank is a process of its own, forked from one that has imported torch and Megatron and done nothing else: the
imports take longer than most tests. It loads the function's module from its file when it cannot be imported by name.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import importlib.util
import inspect
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

Result = TypeVar("Result")
_LOG_TAIL = 4000
# What ranks share: imported once, before the first of them is forked.
_IMPORTED_ONCE = (
    "torch.distributed",
    "transformers",
    "megasharp.learner.learner",
    "megasharp.learner.async_checkpoint",
    "megatron.core.dist_checkpointing.strategies.torch",
)
_VARIABLES = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}


class RankError(RuntimeError):
    """A rank raised, died or hung; the message holds its traceback and the end of its output."""


@dataclass(frozen=True)
class _Job:
    """What a rank must know before it can unpickle the arguments."""

    sys_path: list[str]
    file: str
    module: str
    function: str
    world: int
    timeout_s: float


def run_ranks(
    world: int,
    fn: Callable[..., Result],
    *args: Any,
    timeout_s: float = 500.0,
) -> list[Result]:
    """Call `fn(rank, world, *args)` on `world` processes; return what each returned, by rank.

    `fn` stands at the top level of a file; `args` and results are pickled (tensors travel by value). The
    default process group is initialised (gloo, FileStore, loopback) before the call and destroyed after it;
    RANK, WORLD_SIZE and LOCAL_RANK are set, and torch has one thread.

    Raises RankError with the traceback of the rank that failed first, or after `timeout_s` seconds with the
    stack of every rank that still runs. No process outlives the call.
    """
    job = _Job(sys.path.copy(), inspect.getfile(fn), fn.__module__, fn.__qualname__, world, timeout_s)
    if "<" in job.function or job.module == "__main__":
        raise ValueError(f"{job.function} must be at the top level of a module that is not the main script")
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        (folder / "job").write_bytes(pickle.dumps((vars(job), pickle.dumps(args))))
        ranks: list[ForkServerProcess] = []
        # Its other end closes when this process is gone, however it goes.
        alive, ours = multiprocessing.Pipe(duplex=False)
        try:
            for rank in range(world):
                ranks.append(_start(folder, rank, world, alive))
            _wait(folder, ranks, timeout_s)
            return [pickle.loads((folder / f"result{rank}").read_bytes()) for rank in range(world)]
        finally:
            for process in ranks:
                _kill(process)
            alive.close()
            ours.close()


def _start(folder: Path, rank: int, world: int, alive: Connection) -> ForkServerProcess:
    variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=_run, args=(folder, rank, {**os.environ, **_VARIABLES, **variables}, alive))
    with forked_environment():
        process.start()
    return process


@contextlib.contextmanager
def forked_environment() -> Iterator[None]:
    """Processes of the fork server that start inside have its imports: libraries read some variables meanwhile."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([*_IMPORTED_ONCE])
    before = dict(os.environ)
    os.environ.update(_VARIABLES)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _wait(folder: Path, ranks: list[ForkServerProcess], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        codes = [process.exitcode for process in ranks]
        if any(codes):
            raise RankError(_explain(folder, codes))
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline:
            hung = [rank for rank, code in enumerate(codes) if code is None]
            logs = "\n".join(f"--- rank {rank} ---\n{_tail(folder, rank)}" for rank in hung)
            raise RankError(f"ranks {hung} still ran after {timeout_s:g} s\n{logs}")
        time.sleep(0.02)


def _explain(folder: Path, codes: list[int | None]) -> str:
    """The first failure in time: a rank that dies makes its peers fail too, with errors that say nothing."""
    errors = sorted(folder.glob("error*"), key=lambda path: pickle.loads(path.read_bytes())[0])
    if errors:
        rank = int(errors[0].name.removeprefix("error"))
        text = pickle.loads(errors[0].read_bytes())[1]
    else:
        rank = next(rank for rank, code in enumerate(codes) if code)
        text = f"exit code {codes[rank]}, no Python exception\n"
    return f"rank {rank} of {len(codes)} failed\n{text}--- its output ---\n{_tail(folder, rank)}"


def _tail(folder: Path, rank: int) -> str:
    return (folder / f"log{rank}").read_text(errors="replace")[-_LOG_TAIL:]


def _kill(process: ForkServerProcess) -> None:
    assert process.pid is not None
    with contextlib.suppress(ProcessLookupError):
        # What the rank started goes with it.
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def _write(path: Path, value: object) -> None:
    part = path.with_name(f"part-{path.name}")
    part.write_bytes(pickle.dumps(value))
    part.rename(path)


def _end_with(alive: Connection) -> None:
    # The parent sends nothing: what arrives is the end of the pipe.
    with contextlib.suppress(EOFError, OSError):
        alive.recv_bytes()
    os._exit(1)


def _load(job: _Job) -> Callable[..., object]:
    """The function, its module under the name it has in the parent, so that its classes pickle both ways."""
    try:
        found = importlib.util.find_spec(job.module)
    except ModuleNotFoundError:
        found = None
    if found is not None and found.origin == job.file:
        module = importlib.import_module(job.module)
    else:
        module = _load_file(job.module, job.file)
    function: Callable[..., object] = getattr(module, job.function)
    return function


def _load_file(name: str, file: str) -> ModuleType:
    parents = name.split(".")[:-1]
    for depth in range(1, len(parents) + 1):
        parent = ".".join(parents[:depth])
        # Unpickling a class imports its module by name, which asks for the packages above it.
        sys.modules.setdefault(parent, ModuleType(parent))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _call(folder: Path, rank: int) -> None:
    fields, pickled_args = pickle.loads((folder / "job").read_bytes())
    job = _Job(**fields)
    sys.path[:] = job.sys_path
    faulthandler.dump_traceback_later(max(job.timeout_s - 2.0, 0.5))
    function = _load(job)

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    # What was imported stays: a collection need not look at it.
    gc.freeze()
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(folder / "store"), job.world),
        rank=rank,
        world_size=job.world,
        timeout=timedelta(seconds=job.timeout_s),
    )
    # Gloo's connecting fails on the others if a rank that has its connections ends at once.
    dist.barrier()
    result = function(rank, job.world, *pickle.loads(pickled_args))
    _write(folder / f"result{rank}", result)
    dist.destroy_process_group()


def _run(folder: Path, rank: int, environment: dict[str, str], alive: Connection) -> None:
    """A rank, from start to end."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    with (folder / f"log{rank}").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    threading.Thread(target=_end_with, args=(alive,), daemon=True).start()
    try:
        _call(folder, rank)
    except BaseException:
        _write(folder / f"error{rank}", (time.monotonic(), traceback.format_exc()))
        raise
