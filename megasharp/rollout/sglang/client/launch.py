"""Engines as processes on this machine: started together, stopped together, never left behind.

Each engine is the leader of a process group of its own, writes a log of its own, and dies with the thread that started
it: start a fleet from a thread that lives as long as the fleet. Nothing of an engine is reachable from outside the
machine, and every call needs the run's key.

`EngineHandle` is an engine as its fleet sees it, wherever its process runs and whoever started it. Engines
that come one after the other under a number share its log file; `EngineLog` is the part that one of them wrote.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Protocol

from megasharp.common import signals
from megasharp.common.errors import RunFailed, UserError
from megasharp.common.files import SHARED_MEMORY, Scratch, parent_for_sockets, private, remove_abandoned
from megasharp.common.group_environment import keep_to
from megasharp.config.rollout import RolloutConfig
from megasharp.rollout.sglang.client import child
from megasharp.rollout.sglang.client.api import EngineApi, EngineFailed
from megasharp.rollout.sglang.identity import KEY_VARIABLE

_LINES = 8
_BYTES = 16_384


@dataclass(frozen=True, slots=True)
class EngineLog:
    """The part of the file `path` from byte `begin` to byte `stop`, None: to its end."""

    path: Path
    begin: int = 0
    stop: int | None = None

    @classmethod
    def from_now_on(cls, path: Path) -> EngineLog:
        """The log of a process that is yet to start."""
        return cls(path, path.stat().st_size if path.exists() else 0)

    def until_now(self) -> EngineLog:
        """The log of a process that has ended: what the file gets from now on is another's."""
        return self if self.stop is not None or not self.path.exists() else replace(self, stop=self.path.stat().st_size)

    def end(self) -> str:
        """The last 16 KiB; empty where there is nothing to read."""
        try:
            with self.path.open("rb") as file:
                stop = file.seek(0, os.SEEK_END) if self.stop is None else self.stop
                begin = file.seek(max(self.begin, stop - _BYTES))
                return file.read(max(0, stop - begin)).decode("utf-8", "replace")
        except OSError:
            return ""

    def tail(self, lines: int = _LINES) -> str:
        """The last lines that are not empty, on one line, separated by bars."""
        # A traceback's lines of carets say nothing on one line.
        found = [" ".join(line.split()) for line in self.end().splitlines() if line.strip(" ^~\t")]
        return " | ".join(found[-lines:]) or "(the log is empty)"


class EngineHandle(Protocol):
    """One running engine: its API, its log and its process."""

    @property
    def index(self) -> int:
        """Its number in the fleet."""
        ...

    @property
    def name(self) -> str:
        """Name in messages."""
        ...

    @property
    def api(self) -> EngineApi:
        """Access to its HTTP API."""
        ...

    @property
    def log(self) -> Path | str:
        """File of its output, on its own machine; words, where the run does not know it."""
        ...

    def exit_reason(self) -> str | None:
        """Say how its process ended; None while it runs."""
        ...

    def tail(self) -> str:
        """The log's last lines on one line."""
        ...

    def ask_to_end(self) -> None:
        """Ask it to end in good order; returns at once."""
        ...

    def kill(self) -> None:
        """End it and everything that it started, by force; harmless when it is gone."""
        ...


ENGINE_MODULE = "megasharp.rollout.sglang.engine"
LOOPBACK = "127.0.0.1"
_FOLDER = "megasharp-engine-"
_STOP_S = 10.0
_POLL_S = 0.2
_PROBE_S = 10.0
_NEARLY_ALL = 0.97
# While others wait for a push of weights.
GLANCE_S = 3.0
# Variables an engine must not inherit: the trainer's Python, the key of engines started by hand, and proxies, which
# would see the engines' traffic.
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
_UNWANTED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", KEY_VARIABLE, *_PROXIES)
# Ray's token is among these: an engine has no business with the cluster.
_UNWANTED_PREFIX = "RAY_"
# The last line of a traceback, uvicorn's line about its port, and what our own check says.
_ERROR = re.compile(r"^\s*[\w.]*(Error|Exception)\b|\[Errno \d+\]|^error:|out of memory", re.IGNORECASE)
_NO_PORT = "error while attempting to bind on address"
_PORT_TAKEN = "its port is taken"
# Phrases of a log and their meaning for the user; the first match counts.
_REASONS = (
    (("address already in use", "eaddrinuse", "port is already in use"), _PORT_TAKEN),
    (
        (
            "out of memory",
            "not enough memory",
            "allocate memory",
            "memoryerror",
            "mem_fraction_static",
            "mem-fraction-static",
        ),
        "it lacks memory; change rollout.sglang.mem_fraction_static or max_total_tokens, or use a smaller model",
    ),
    (
        ("no such file", "does not appear to have", "not a valid model", "unrecognized model", "config.json"),
        "it cannot load the model",
    ),
    (("no module named",), "its Python lacks a package; build it again, as docs/how-to/run-on-two-pythons.md says"),
)
_DID_NOT_START = "did not start: "
_THE_USERS = tuple(_DID_NOT_START + reason for _, reason in _REASONS if reason != _PORT_TAKEN)


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """Everything that a fleet's engines are started with.

    `memory` is the memory network's folder, `memory_window` its `MemoryNeed.window`. `rollout` is the run's section,
    with `engines` and `sglang` as resolved for this fleet; `python` is the path for its key of that name. `gpus[i]` are
    CUDA's names of the GPUs that engine `i` sees, none on a CPU. With `sleep` engines can give their device's memory to
    the learner and take it back; with `returns_experts` a response comes with the experts of its tokens. Logs are
    `log_folder`/engine_0.log and so on. `command` is what an engine's process runs after its Python; the engine's
    config file is appended. `variables` are in its environment.
    """

    python: Path
    model: Path
    log_folder: Path
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    memory: Path | None = None
    memory_window: int | None = None
    device: str = "cpu"
    dtype: str = "float32"
    deterministic: bool = False
    sleep: bool = False
    returns_experts: bool = False
    gpus: Sequence[Sequence[str]] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    start_limit_s: float = 600.0
    command: Sequence[str] = ("-m", ENGINE_MODULE)


class EngineProcess:
    """An engine on this machine; satisfies `EngineHandle`."""

    def __init__(
        self,
        index: int,
        api: EngineApi,
        output: EngineLog,
        process: subprocess.Popen[bytes],
        config: Path,
        files: ExitStack,
    ) -> None:
        self.index = index
        self.api = api
        self.output = output
        self._process = process
        self._config = config
        self._files = files

    @property
    def name(self) -> str:
        """Name in messages."""
        return f"engine {self.index}"

    @property
    def log(self) -> Path:
        """Where it writes, after those that had its number before."""
        return self.output.path

    @property
    def pid(self) -> int:
        """Process id of the group's leader, which is the group's id too."""
        return self._process.pid

    def exit_reason(self) -> str | None:
        """Say how the leader ended; None while it runs. It stays a zombie, so that its group's id stays its own."""
        if self._process.returncode is not None:
            return _describe_exit(self._process.returncode)
        try:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return "its process is gone"
        if ended is None:
            return None
        return _describe_exit(ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status)

    def tail(self) -> str:
        """The last lines that it wrote, on one line."""
        return self.output.tail()

    def settled(self) -> None:
        """It answers, so it has read its config file, which holds the key."""
        self._config.unlink(missing_ok=True)

    def ask_to_end(self) -> None:
        """SIGTERM to the leader, which ends its children in good order."""
        # Not Popen.terminate, which reaps a leader that has ended: its group's id would be anybody's.
        if self._process.returncode is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to the whole group, then reap the leader and remove its files; harmless when it is gone."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self.output = self.output.until_now()
        self._files.close()


def launch(settings: FleetSettings) -> list[EngineProcess]:
    """Start all engines and wait until all answer.

    Raises `start_error`, with every engine stopped, when one does not start: which, why, its log and its last lines.
    """
    if settings.rollout.engines:
        check_python(settings)
    key = new_key()
    engines: list[EngineProcess] = []
    try:
        with ExitStack() as stack:
            # All ports are chosen before any is let go, so no two engines get the same.
            ports = [stack.enter_context(HeldPort()) for _ in range(settings.rollout.engines)]
            for index, port in enumerate(ports):
                engines.append(start_one(settings, index, port.number, key))
            _wait_for_all(engines, settings.start_limit_s)
    except BaseException:
        stop(engines)
        raise
    return engines


def check_python(settings: FleetSettings) -> None:
    """Raise UserError when this machine lacks the engines' Python."""
    if not settings.python.is_file():
        how = how_to_build(settings.device)
        raise UserError(f"rollout.python: {settings.python} does not exist; build the engines' Python {how}")


def how_to_build(device: str) -> str:
    """Tell a user without the engines' Python how to get it."""
    if device == "cpu":
        return "with `make fleet`, which makes .venv-fleet/bin/python"
    return "with `make gpu`, which makes .venv-engines/bin/python"


def new_key() -> str:
    """A key that every call of a run's engines needs."""
    return secrets.token_urlsafe(32)


def stop(engines: Sequence[EngineHandle], limit: float = _STOP_S) -> None:
    """End all engines, those that do not end within `limit` seconds by force; returns when all are gone."""
    for engine in engines:
        engine.ask_to_end()
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline and any(engine.exit_reason() is None for engine in engines):
        time.sleep(_POLL_S)
    for engine in engines:
        engine.kill()


class HeldPort:
    """A free port of one of this machine's addresses, kept from other programs that ask the system for a free one.

    It is bound, not listened on, and both sides allow reuse, which uvicorn does: so the engine can take it over.
    """

    def __init__(self, address: str = LOOPBACK) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((address, 0))
        self.number: int = self._socket.getsockname()[1]

    def __enter__(self) -> HeldPort:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()


def environment(
    settings: FleetSettings, index: int, inherited: Mapping[str, str], address: str = LOOPBACK
) -> dict[str, str]:
    """The environment of engine `index`, which listens at `address`."""
    kept = {
        name: value
        for name, value in inherited.items()
        if name.upper() not in _UNWANTED and not name.upper().startswith(_UNWANTED_PREFIX)
    }
    # Models are folders; nothing is to be fetched.
    kept |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    # A folder called megasharp, or a json.py, where the user happens to be is none of an engine's modules.
    kept["PYTHONSAFEPATH"] = "1"
    # SGLang compiles kernels by the `ninja` of its own environment, which nobody needs to have activated.
    kept["PATH"] = os.pathsep.join((str(settings.python.absolute().parent), kept.get("PATH", os.defpath)))
    # Compiled kernels are kept between runs, so they must not be in an engine's temporary folder.
    kept.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")))
    kept |= settings.variables
    if address == LOOPBACK:
        keep_to("lo", environment=kept)
    if settings.device == "cpu":
        # With more threads than free cores GNU OpenMP spins: decoding fell from 440 to 18 tokens/s.
        kept["OMP_NUM_THREADS"] = "1"
        kept["CUDA_VISIBLE_DEVICES"] = ""
    elif settings.gpus:
        kept["CUDA_VISIBLE_DEVICES"] = ",".join(settings.gpus[index])
    return kept


def engine_config(
    settings: FleetSettings, port: int, key: str, address: str = LOOPBACK, shared: Path | None = None
) -> dict[str, object]:
    """Make the config file that `python -m megasharp.rollout.sglang.engine` reads."""
    # Engines of an earlier installation do not know these keys; without what they ask for they need not.
    window = {} if settings.memory_window is None else {"memory_window": settings.memory_window}
    experts = {"returns_experts": True} if settings.returns_experts else {}
    return {
        "model": str(settings.model.absolute()),
        "memory": None if settings.memory is None else str(settings.memory.absolute()),
        **window,
        **experts,
        "host": address,
        "port": port,
        "api_key": key,
        "device": settings.device,
        "dtype": settings.dtype,
        "tp": settings.rollout.tp,
        "sglang": dict(settings.rollout.sglang),
        "deterministic": settings.deterministic,
        "sleep": settings.sleep,
        "shared": None if shared is None else str(shared),
    }


def with_cache(settings: FleetSettings, tokens: int | None) -> FleetSettings:
    """Settings for an engine whose cache has so many tokens, whatever is free beside it; None: as they are.

    SGLang 0.5.21 takes for its cache what is free after its weights, less the share (1 - mem_fraction_static) of what
    was free before them, and at most `max_total_tokens`. What a learner leaves on the device would make the same share
    a smaller cache, so here the share only has to be large enough: the number of tokens decides.
    """
    if tokens is None:
        return settings
    flags = {**settings.rollout.sglang, "max_total_tokens": tokens}
    if settings.device != "cpu":
        flags["mem_fraction_static"] = _NEARLY_ALL
    return replace(settings, rollout=settings.rollout.model_copy(update={"sglang": flags}))


def remove_leftovers() -> None:
    """Remove the files of engines on this machine whose starters ended without stopping them."""
    for parent in (parent_for_sockets(), SHARED_MEMORY):
        remove_abandoned(_FOLDER, parent)


def start_one(settings: FleetSettings, index: int, port: int, key: str, address: str = LOOPBACK) -> EngineProcess:
    """Start engine `index`, which will listen on `port` of this machine's `address`.

    Raises OSError where its log, its folder or its process cannot be made.
    """
    log = settings.log_folder / f"engine_{index}.log"
    settings.log_folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as files:
        own = files.enter_context(Scratch(_FOLDER, parent_for_sockets()))
        # Its name is in the names of all that the engine's processes share.
        shared = files.enter_context(Scratch(_FOLDER, SHARED_MEMORY))
        config = own / f"engine_{index}.json"
        config.write_text(json.dumps(engine_config(settings, port, key, address, shared)), encoding="utf-8")
        output = EngineLog.from_now_on(log)
        with open(log, "ab", opener=private) as file:
            variables = environment(settings, index, os.environ, address) | {"TMPDIR": str(own)}
            process = _start(settings, config, file, variables)
        return EngineProcess(index, EngineApi(address, port, key), output, process, config, files.pop_all())


def _start(
    settings: FleetSettings, config: Path, output: IO[bytes], variables: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    # Not resolved: a virtual environment's Python is a link, and knows its packages by its own path.
    python = str(settings.python.absolute())
    with signals.save_kept_from_children():
        return subprocess.Popen(
            [python, child.__file__, str(os.getpid()), python, *settings.command, str(config)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=variables,
            start_new_session=True,
        )


def _wait_for_all(engines: Sequence[EngineProcess], limit: float) -> None:
    deadline = time.monotonic() + limit
    waiting = list(engines)
    while waiting:
        for engine in waiting:
            ended = start_problem(engine)
            if ended is not None or time.monotonic() > deadline:
                raise start_error(start_failure(engine, len(engines), ended or f"no answer within {limit:g} s"))
        answered = [engine for engine in waiting if answers(engine.api)]
        for engine in answered:
            engine.settled()
        waiting = [engine for engine in waiting if engine not in answered]
        if waiting:
            time.sleep(_POLL_S)


def start_problem(engine: EngineProcess) -> str | None:
    """Say how an engine that has not answered yet has ended; None while it may still start."""
    # SGLang's server ends without its port, but its process stays: its other threads and children go on.
    return engine.exit_reason() or ("its server has ended" if _NO_PORT in engine.output.end() else None)


def answers(api: EngineApi, limit: float = _PROBE_S) -> bool:
    """Return True where it is up and takes our key: a stranger on the port does not."""
    try:
        return api.healthy(limit) and api.label(limit).version >= -1
    except EngineFailed:
        return False


def start_failure(engine: EngineProcess, total: int, ended: str) -> str:
    """The message for an engine that did not start, so that none does: which, why, its log and its last lines."""
    return f"{engine.name} of {total} {_DID_NOT_START}{why_not_started(engine, ended, 'all engines are stopped; ')}"


def start_error(message: str) -> UserError:
    """The error of such a message: a UserError where the log names a mistake; else another start may succeed."""
    return UserError(message) if any(words in message for words in _THE_USERS) else RunFailed(message)


def why_not_started(engine: EngineProcess, ended: str, outcome: str = "") -> str:
    """Why an engine that ended so did not start, its log and its last lines; `outcome` is said in between."""
    reason = _reason(engine.output.end())
    why = f"{reason} ({ended})" if reason else ended
    return f"{why}; {outcome}see {engine.log}; last lines: {engine.tail()}"


def _reason(log: str) -> str | None:
    """Explain the log's last known error in the user's terms; None where there is none."""
    for line in reversed([line.lower() for line in log.splitlines() if _ERROR.search(line)]):
        found = next((reason for words, reason in _REASONS if any(word in line for word in words)), None)
        if found is not None:
            return found
    return None


def vocabulary(model: Path) -> int | None:
    """The number of token ids that the model in this Hugging Face folder knows; None where its config does not say."""
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        return int(config["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"its process ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"its process was killed by {name}"
