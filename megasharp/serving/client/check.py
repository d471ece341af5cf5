"""Asks the engines' own Python, before anything starts, whether it would start an engine as it is configured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from megasharp.errors import UserError
from megasharp.scratch import Scratch
from megasharp.serving.client.launch import (
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


def check_engines(settings: FleetSettings) -> None:
    """Raises UserError with the engine's own reason: another SGLang, unknown flags, networks that do not fit."""
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
    last = lines[-1].removeprefix("error: ") if lines else f"exit code {ended.returncode}"
    if "No module named" in last or settings.python == Path(sys.executable):
        how = how_to_build(settings.device)
        last = f"{last}; rollout.python must name a Python with SGLang and megasharp; build one {how}"
    raise UserError(f"rollout.python: {settings.python}: {last}")
