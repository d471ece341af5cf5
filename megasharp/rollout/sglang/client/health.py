"""Health of one engine, before its start and while it runs.

`check_engines` asks the engines' own Python, before anything starts, whether it would start an engine as it is
configured. `after` is a pure state machine over probe answers, missed probes and process exits of an engine that runs:

    STARTING --answered--> SERVING          (or STALE, where it holds other weights than wanted)
    SERVING  --missed----> SUSPECT          gets no new requests until it answers again
    SERVING  --doubted---> SUSPECT          a request failed; whether the engine is at fault is for the probes to say
    any      --missed too often, exited---> DEAD, for good
    any      --other weights wanted-------> STALE until it answers with the wanted version

An engine that misses while it starts is still starting: the launcher limits how long a start may take.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from megasharp.common.errors import RunFailed, UserError
from megasharp.common.files import Scratch
from megasharp.rollout.sglang.client.launch import (
    ENGINE_MODULE,
    FleetSettings,
    check_python,
    engine_config,
    environment,
    how_to_build,
)


class Condition(StrEnum):
    """Only a SERVING engine gets requests."""

    STARTING = "starting"
    SERVING = "serving"
    SUSPECT = "suspect"
    STALE = "stale"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Answered:
    """A probe was answered; `version` is the weights' version that the engine says it serves."""

    version: int


@dataclass(frozen=True, slots=True)
class Missed:
    """A probe went unanswered, or was answered with an error of the server's own."""

    reason: str


@dataclass(frozen=True, slots=True)
class Doubted:
    """A request failed. Many fail at the same moment, so they do not count as misses."""

    reason: str


@dataclass(frozen=True, slots=True)
class Lost:
    """The process ended by itself (`ended`), or what the engine holds can no longer be known."""

    reason: str
    ended: bool = False


@dataclass(frozen=True, slots=True)
class Wanted:
    """Only weights of this version may be served from now on; those that the engine holds count as older."""

    version: int


Event = Answered | Missed | Doubted | Lost | Wanted


@dataclass(frozen=True, slots=True)
class Health:
    """One engine's state. `missed` counts the probes missed in a row; `reason` says why it is suspect or dead.

    `ended`: its process ended by itself.
    """

    condition: Condition = Condition.STARTING
    wanted: int = -1
    missed: int = 0
    reason: str = ""
    ended: bool = False

    @property
    def serving(self) -> bool:
        """True where the engine may get requests."""
        return self.condition is Condition.SERVING

    @property
    def alive(self) -> bool:
        """True where the engine is not given up."""
        return self.condition is not Condition.DEAD


def after(health: Health, event: Event, dead_after: int) -> Health:
    """The state after an event; `dead_after` is the number of misses in a row that make an engine dead."""
    if not health.alive:
        return health
    match event:
        case Lost(reason, ended):
            return replace(health, condition=Condition.DEAD, reason=reason, ended=ended)
        case Answered(version):
            condition = Condition.SERVING if version == health.wanted else Condition.STALE
            return replace(health, condition=condition, missed=0, reason="")
        case Missed(reason):
            return _missed(health, reason, dead_after)
        case Doubted(reason):
            serving = health.condition is Condition.SERVING
            return replace(health, condition=Condition.SUSPECT, reason=reason) if serving else health
        case Wanted(version):
            starting = health.condition is Condition.STARTING
            return replace(health, wanted=version, condition=Condition.STARTING if starting else Condition.STALE)


def _missed(health: Health, reason: str, dead_after: int) -> Health:
    if health.condition is Condition.STARTING:
        return health
    missed = health.missed + 1
    if missed >= dead_after:
        return replace(health, condition=Condition.DEAD, missed=missed, reason=reason)
    # A stale engine that misses stays stale: the answer that ends its suspicion would not make its weights newer.
    condition = Condition.STALE if health.condition is Condition.STALE else Condition.SUSPECT
    return replace(health, condition=condition, missed=missed, reason=reason)


# On a cold shared disk torch alone takes a minute.
_LIMIT_S = 300.0
# Nothing listens during a check.
_NO_PORT = 1
_REFUSAL = "error: "
_WRONG_PYTHON = "the engines' Python"
_A_FLAG = re.compile(r"(?<![\w./])sglang\.(?=[a-z])")
_SET_BY = re.compile(r"set by the engine's key (\w+)")
# A run's keys by the engine's; what is not here no key sets.
_KEYS = {
    "model": "model.path",
    "device": "policy.device",
    "dtype": "model.dtype",
    "tp": "rollout.tp",
    "deterministic": "deterministic",
    "sleep": "cluster.placement",
    "returns_experts": "policy.experts.replay",
}


# Runs in the engines' Python; imports neither torch nor SGLang.
_INSTALLED = """
import sys
from megasharp.common.errors import UserError
from megasharp.rollout.sglang.engine.check import check_build, check_installed
try:
    check_installed(sys.argv[1])
    check_build(sys.argv[1])
except UserError as error:
    sys.exit(f"error: {error}")
"""


def check_installed_engines(settings: FleetSettings) -> None:
    """Raises UserError where the engines' Python is missing, or has another SGLang, or a build for another device.

    Takes part of a second, and needs no GPU.
    """
    _ask(settings, ["-c", _INSTALLED, settings.device], "")


def check_engines(settings: FleetSettings, where: str) -> None:
    """Raises UserError with the engine's own reason: another SGLang, unknown flags, networks that do not fit.

    `where` names the configuration file.
    """
    with Scratch("megasharp-check-") as folder:
        config = folder / "engine.json"
        config.write_text(json.dumps(engine_config(settings, _NO_PORT, "check")), encoding="utf-8")
        _ask(settings, ["-m", ENGINE_MODULE, "--check", str(config)], where)


def run_python(settings: FleetSettings, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run the engines' Python with an engine's environment, to its end. Raises UserError where it does not come to one.

    It must not outlive the caller's patience on a disk that is gone, so its time is limited.
    """
    check_python(settings)
    try:
        return subprocess.run(
            [str(settings.python.absolute()), *arguments],
            env=environment(settings, 0, os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
    except OSError as error:
        raise UserError(f"rollout.python: {settings.python}: it does not run ({error.strerror})") from error
    except subprocess.TimeoutExpired as error:
        slow = f"it did not answer in {_LIMIT_S:g} s; is its disk slow, or gone?"
        raise RunFailed(f"rollout.python: {settings.python}: {slow}") from error


def _ask(settings: FleetSettings, arguments: Sequence[str], where: str) -> None:
    """Run the engines' Python; its last line, where it fails, is the error's reason."""
    ended = run_python(settings, arguments)
    if ended.returncode == 0:
        return
    if ended.returncode < 0:
        # Nothing is wrong with the configuration: the out-of-memory killer, say, took the process.
        raise RunFailed(f"{settings.python} was ended by signal {-ended.returncode} over the engines' configuration")
    lines = [line for line in ended.stderr.splitlines() if line.strip()]
    last = lines[-1] if lines else f"exit code {ended.returncode}"
    reason = last.removeprefix(_REFUSAL)
    if "No module named" in last:
        reason += f"; a Python with SGLang and megasharp is built {how_to_build(settings.device)}"
    elif last.startswith(_REFUSAL) and not reason.startswith(_WRONG_PYTHON):
        # The engine knows only its own keys.
        reason = _SET_BY.sub(lambda match: f"set by {_KEYS.get(match[1], 'the run')}", reason)
        raise UserError(f"{where}: {_A_FLAG.sub('rollout.sglang.', reason)}")
    raise UserError(f"rollout.python: {settings.python}: {reason}")
