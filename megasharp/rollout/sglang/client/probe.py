"""Asks the engines' own Python, before anything starts, whether it would start an engine as it is configured."""

from __future__ import annotations

import json
import os
import re
import subprocess

from megasharp.common.errors import UserError
from megasharp.common.files import Scratch
from megasharp.rollout.sglang.client.launch import (
    ENGINE_MODULE,
    FleetSettings,
    check_python,
    engine_config,
    environment,
    how_to_build,
)

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
}


def check_engines(settings: FleetSettings, where: str) -> None:
    """Raises UserError with the engine's own reason: another SGLang, unknown flags, networks that do not fit.

    `where` names the configuration file.
    """
    check_python(settings)
    with Scratch("megasharp-check-") as folder:
        config = folder / "engine.json"
        config.write_text(json.dumps(engine_config(settings, _NO_PORT, "check")), encoding="utf-8")
        try:
            ended = subprocess.run(
                [str(settings.python.absolute()), "-m", ENGINE_MODULE, "--check", str(config)],
                env=environment(settings, 0, os.environ),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise UserError(f"{settings.python} did not judge the engines' configuration in {_LIMIT_S:g} s") from error
    if ended.returncode == 0:
        return
    lines = [line for line in ended.stderr.splitlines() if line.strip()]
    last = lines[-1] if lines else f"exit code {ended.returncode}"
    reason = last.removeprefix(_REFUSAL)
    if "No module named" in last:
        reason += f"; a Python with SGLang and megasharp is built {how_to_build(settings.device)}"
    elif last.startswith(_REFUSAL) and not reason.startswith(_WRONG_PYTHON):
        raise UserError(f"{where}: {_in_the_runs_words(reason)}")
    raise UserError(f"rollout.python: {settings.python}: {reason}")


def _in_the_runs_words(reason: str) -> str:
    """The engine knows only its own keys."""
    named = _SET_BY.sub(lambda match: f"set by {_KEYS.get(match[1], 'the run')}", reason)
    return _A_FLAG.sub("rollout.sglang.", named)
