"""Ray itself: one of our own on this machine, or the cluster that RAY_ADDRESS names; and the slots reserved in it.

Always with Ray's token: a cluster that asks for none is refused. Our own has a token nobody else knows, listens on the
loopback interface only, has its own ports and folder, no dashboard and no usage reports, and ends with this process,
however that ends. `there` calls a function on a node of the cluster, outside the slots, to look at something there.
"""

from __future__ import annotations

import importlib
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import psutil

from megasharp.cluster.ray_runtime import reaper
from megasharp.cluster.ray_runtime.process_environment import object_store_bytes, quiet, server_environment, usable
from megasharp.cluster.ray_runtime.slot_layout import Layout, NodeCapacity, check_capacity
from megasharp.cluster.ray_runtime.slots import Slots, reserve
from megasharp.common import output, signals
from megasharp.common.errors import RunFailed, UserError, one_line
from megasharp.common.files import Scratch, parent_for_sockets
from megasharp.rollout.sglang.client.launch import remove_leftovers

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_MEBIBYTE = 1 << 20
_STOP_S = 15.0
_NEWS_S = 2.0
_POLL_S = 0.1
_RAY_SETS = ("PYTHONBREAKPOINT",)
# Where Ray ends the process that asks without one.
_NO_TOKEN = "authentication_token_loader"
_TOKEN_REFUSED = ("InvalidAuthToken", "Unauthenticated", "AuthenticationError")


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """The Ray to use. `address` ("host:port") and RAY_ADDRESS name a cluster to join; with neither, one is started.

    "auto" is the one that runs on this machine.

    For one that is started: its CPUs and GPUs (None: what Ray finds) and the size of its object store, which shared
    memory may limit. `start_limit_s` bounds the wait for either.
    """

    address: str | None = None
    cpus: int | None = None
    gpus: int | None = None
    object_store_bytes: int = 512 * _MEBIBYTE
    start_limit_s: float = 60.0


class RaySession:
    """A connection to Ray; one per process. Closing it ends a Ray that we started, and leaves one that we joined."""

    def __init__(self, settings: SessionSettings) -> None:
        address = settings.address or os.environ.get("RAY_ADDRESS") or "local"
        self.started = address == "local"
        self.address = address
        self._stack = signals.ClosingStack()
        ray = sys.modules.get("ray")
        if ray is not None and ray.is_initialized():
            raise UserError("this process is connected to Ray already; close that connection first (ray.shutdown())")
        try:
            if self.started:
                self._start(settings)
            else:
                self._join(address, settings.start_limit_s)
        except BaseException:
            self.close()
            raise

    def _start(self, settings: SessionSettings) -> None:
        scratch = Scratch("msray-", parent_for_sockets())
        folder = scratch.path
        self._stack.callback(scratch.close)
        # An actor that is ended by force does not come to it.
        self._stack.callback(remove_leftovers)
        warden = _start_reaper(folder)
        self._stack.callback(lambda: _end_reaper(warden))
        environment = {
            # A token that nobody else has.
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            # Ray's own name for "loopback only"; otherwise it listens on every interface.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            **server_environment(settings.start_limit_s),
        }
        self._stack.callback(_set_environment(environment))
        self._stack.callback(lambda: _end(folder))
        self._stack.callback(lambda: _tell_reaper(warden, reaper.CLOSING))
        options = {
            "num_cpus": settings.cpus,
            "num_gpus": settings.gpus,
            "object_store_memory": object_store_bytes(settings.object_store_bytes),
            "include_dashboard": False,
            "_temp_dir": str(folder),
        }
        try:
            self.address = _init("local", options)
            _tell_reaper(warden, reaper.described(_family(folder)))
        except Exception as error:
            raise UserError(
                f"cluster.backend: ray: Ray did not start on this machine: {one_line(error)}; is there room in "
                f"{folder.parent} and in /dev/shm?"
            ) from error

    def _join(self, address: str, limit: float) -> None:
        if address == "auto":
            address = _running_here()
        host, colon, port = address.rpartition(":")
        if "://" in address or not colon or not port.isdigit():
            raise UserError(
                f"RAY_ADDRESS = {address}: give host:port of the cluster's head, or unset it to start Ray here"
            )
        self._stack.callback(_set_environment({"RAY_AUTH_MODE": "token", **quiet()}))
        head = _ask(address, limit)
        if host.strip("[]") in _LOOPBACK:
            if head in _LOOPBACK:
                self._stack.callback(_set_environment({"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}))
            elif head:
                # The shell of a head's pod: other nodes reach the driver only at the address by which Ray knows it.
                address = f"{head}:{port}"
        # A Ray that takes a token made up here asks for none: whoever reaches it could run programs in it.
        code, text = _question(address, limit, {**os.environ, "RAY_AUTH_TOKEN": secrets.token_hex(32)})
        if code == 0 and not _refused(text):
            raise UserError(
                f"the Ray cluster at {address} asks nobody for a token; start it with RAY_AUTH_MODE=token and a token "
                "in RAY_AUTH_TOKEN, and give this run the same token"
            )
        self._stack.callback(_shutdown)
        try:
            self.address = _init(address, {})
        except Exception as error:
            raise UserError(f"cannot join the Ray cluster at {address}: {one_line(error)}") from error

    def nodes(self) -> list[NodeCapacity]:
        """List the living nodes, with the free resources of each now."""
        ray: Any = importlib.import_module("ray")
        free: Mapping[str, Mapping[str, float]] = ray._private.state.available_resources_per_node()
        found = []
        for node in ray.nodes():
            if node["Alive"]:
                all_, left = node["Resources"], free.get(node["NodeID"], {})
                found.append(
                    NodeCapacity(
                        address=node["NodeManagerAddress"],
                        cpus=all_.get("CPU", 0.0),
                        free_cpus=left.get("CPU", 0.0),
                        gpus=all_.get("GPU", 0.0),
                        free_gpus=left.get("GPU", 0.0),
                        store=all_.get("object_store_memory", 0.0),
                    )
                )
        return found

    def reserve(self, layout: Layout, limit_s: float = 60.0) -> Slots:
        """Reserve all slots within `limit_s`. Raises UserError for what Ray lacks, RunFailed for what is taken."""
        self._check(layout)
        return reserve(layout, limit_s)

    def _check(self, layout: Layout) -> None:
        # Resources that were given back a moment ago are reported as free a moment later.
        deadline = time.monotonic() + _NEWS_S
        while True:
            # One look for both questions: between two, what is missing may come back.
            nodes = self.nodes()
            try:
                return check_capacity(layout, nodes)
            except UserError as error:
                if all((node.free_cpus, node.free_gpus) == (node.cpus, node.gpus) for node in nodes):
                    raise
                if time.monotonic() > deadline:
                    # Whoever holds the rest, another run or one that was killed, gives it back one day.
                    raise RunFailed(one_line(error)) from error
            time.sleep(_POLL_S)

    def close(self) -> None:
        """Leave Ray, and end it and everything in it when it is ours; harmless when it is closed."""
        self._stack.close()

    def __enter__(self) -> RaySession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _init(address: str, options: Mapping[str, Any]) -> str:
    """`ray.init` that leaves the process's signal handlers and logging alone; returns the cluster's address."""
    ray: Any = importlib.import_module("ray")
    # Ray read this variable when it was first imported, which may be long ago.
    ray._private.ray_constants.ENABLE_RAY_CLUSTER = os.environ.get("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER") != "0"
    # It also keeps its configuration and token from the first look; a second session has others.
    raylet: Any = importlib.import_module("ray._raylet")
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()
    # Ray would print paragraphs about a worker that ended; who it was and what it means is ours to say, in one line.
    ray._private.worker.print_to_stdstream = lambda *_, **__: None
    # Ray takes SIGTERM for itself, in Python and in C++; how a run ends is not Ray's to decide.
    ray._private.utils.set_sigterm_handler = lambda _: None
    ray._private.ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER = True
    # A signal for this process and its children would end Ray's servers before anything could be closed.
    ray._private.services.ConsolePopen = partial(subprocess.Popen, start_new_session=True)
    # A Ray that is half started cannot be ended in good order; one that is joined may let us wait for ever.
    with signals.held() if address == "local" else nullcontext(), signals.save_kept_from_children():
        context = ray.init(address=address, configure_logging=False, log_to_driver=False, **options)
    return str(context.address_info["gcs_address"])


def _set_environment(values: Mapping[str, str]) -> Any:
    """Set variables; return a function that puts the old ones back."""
    before = {name: os.environ.get(name) for name in (*values, *_RAY_SETS)}
    os.environ.update(values)

    def put_back() -> None:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    return put_back


def _running_here() -> str:
    """Return the address of the Ray that `ray start` started last on this machine, else of one that runs on it."""
    services: Any = importlib.import_module("ray._private.services")
    try:
        return str(services.get_ray_address_from_environment("auto", None))
    except ConnectionError:
        raise UserError(
            "RAY_ADDRESS = auto: no Ray runs on this machine; give host:port of the cluster's head, or unset it to "
            "start Ray here"
        ) from None


def _ask(address: str, limit: float) -> str:
    """Return the address by which the cluster knows its head, "" where it names none.

    A process that can be ended asks: Ray itself may wait for ever for an answer.
    """
    began = time.monotonic()
    code, text = _question(address, limit, os.environ)
    refused = _refused(text)
    if refused or _NO_TOKEN in text:
        fault = "does not take our token" if refused else "needs a token"
        raise UserError(
            f"the Ray cluster at {address} {fault}; set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the token that the "
            "cluster was started with (RAY_AUTH_MODE=token there)"
        )
    if code != 0:
        raise UserError(
            f"no Ray cluster answers at {address} (given up after {time.monotonic() - began:.0f} s); "
            "check RAY_ADDRESS, or unset it to start Ray here"
        )
    return next((line.removeprefix(_HEAD) for line in text.splitlines() if line.startswith(_HEAD)), "")


def _question(address: str, limit: float, environment: Mapping[str, str]) -> tuple[int | None, str]:
    with tempfile.TemporaryFile() as output:
        command = [sys.executable, "-P", "-c", _QUESTION, address]
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        try:
            return _answer(process, output, limit)
        finally:
            process.kill()
            process.wait()


def _refused(text: str) -> bool:
    return any(word in text for word in _TOKEN_REFUSED)


_HEAD = "head "
_QUESTION = f"""
import sys, ray
from ray._raylet import GcsClient
for node in GcsClient(address=sys.argv[1]).get_all_node_info().values():
    if node.is_head_node and node.state == 0:
        print("{_HEAD}" + node.node_manager_address)
"""


def _answer(process: subprocess.Popen[bytes], output: IO[bytes], limit: float) -> tuple[int | None, str]:
    """Exit code (None: not within `limit` seconds) and output; at once where a refused token shows: Ray would retry."""
    deadline = time.monotonic() + limit
    while True:
        code = process.poll()
        text = os.pread(output.fileno(), _MEBIBYTE, 0).decode("utf-8", "replace")
        if code is not None or time.monotonic() > deadline or _refused(text):
            return code, text
        time.sleep(_POLL_S)


def _shutdown() -> None:
    import ray

    ray.shutdown()


def _end(folder: Path) -> None:
    """End our own Ray, and see that nothing of it is left: its servers, its workers and what those started."""
    family = _family(folder)
    if not usable():
        _kill(family)
    _shutdown()
    _, left = psutil.wait_procs(family, timeout=_STOP_S)
    _kill(left)
    psutil.wait_procs(left, timeout=_STOP_S)


def _kill(family: Sequence[psutil.Process]) -> None:
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _start_reaper(folder: Path) -> subprocess.Popen[str]:
    """Start the reaper in a session of its own: a signal that interrupts the driver must not end it."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", reaper.__name__, str(folder)],
        stdin=subprocess.PIPE,
        # It says why a driver was ended by Ray, which has to be seen.
        stderr=output.error_stream(),
        text=True,
        start_new_session=True,
    )


def _tell_reaper(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdin is not None
    # Where it was killed, the driver goes on without it.
    with suppress(BrokenPipeError):
        print(text, file=process.stdin, flush=True)


def _end_reaper(process: subprocess.Popen[str]) -> None:
    """Wait for the reaper's end; it removes the folder too."""
    assert process.stdin is not None
    process.stdin.close()
    process.wait()


def _family(folder: Path) -> list[psutil.Process]:
    """Ray's servers are children of this process that name their folder; the rest are theirs."""
    family: list[psutil.Process] = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
            if str(folder) in " ".join(child.cmdline()) and reaper.__name__ not in child.cmdline():
                family += [child, *child.children(recursive=True)]
    return family


def there(node: str, limit_s: float, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Call `function(*arguments)` on the node of that Ray ID; the function must be one of a module.

    Raises Ray's GetTimeoutError after `limit_s` seconds, and another RayError where the node is gone.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task = ray.remote(function).options(
        num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
    )
    return ray.get(task.remote(*arguments), timeout=limit_s)
