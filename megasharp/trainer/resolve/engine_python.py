"""The Python that SGLang engines run in, and why it is that one."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from megasharp.common.errors import UserError
from megasharp.config.core import find
from megasharp.config.run_config import RunConfig
from megasharp.rollout.sglang.client.health import check_installed_engines
from megasharp.rollout.sglang.client.launch import FleetSettings
from megasharp.trainer.resolve.devices import device_of

# Set by an image whose engines have an environment of their own.
ENGINES_PYTHON = "MEGASHARP_ENGINES_PYTHON"
# The environments that `make gpu` and `make fleet` build; the first that is there counts. Each is built for one device.
_ENVIRONMENTS = {"cuda": (".venv-engines", ".venv-fleet"), "cpu": (".venv-fleet", ".venv-engines")}


@dataclass(frozen=True, slots=True)
class EnginePython:
    """A Python interpreter, and in words what chose it; `found` is False for the trainer's own."""

    path: Path
    reason: str
    found: bool = True


def engine_python(config: RunConfig) -> EnginePython:
    """Return `rollout.python`, else what the variable names, else an environment that is found, else this Python.

    Environments are looked up in the current folder, then beside the environment that this Python belongs to. Raises
    UserError where the variable names no file.
    """
    if config.rollout.python is not None:
        return EnginePython(find(config.rollout.python), "rollout.python")
    named = os.environ.get(ENGINES_PYTHON)
    if named:
        if not Path(named).is_file():
            raise UserError(f"{ENGINES_PYTHON}={named} does not exist; correct it, unset it, or set rollout.python")
        return EnginePython(Path(named), f"the variable {ENGINES_PYTHON}")
    for name in _ENVIRONMENTS[device_of(config)]:
        for folder in (Path.cwd(), Path(sys.prefix).parent):
            python = folder / name / "bin" / "python"
            if python.is_file():
                return EnginePython(python, f"{name} in {folder}")
    return EnginePython(Path(sys.executable), "the trainer's own, as no other was found", found=False)


def starts_engines(config: RunConfig) -> bool:
    """Return True where the run starts SGLang engines."""
    return config.rollout.engine == "sglang" and config.rollout.engines > 0


def check_packages(config: RunConfig) -> None:
    """Raises UserError where the engines' Python is missing, or its packages do not serve the run's device.

    No model is needed, and no GPU.
    """
    check_installed_engines(FleetSettings(engine_python(config).path, Path(), Path(), device=device_of(config)))


def described(config: RunConfig) -> list[str]:
    """Return a line for the Python of the engines that the run starts and why it is that one; none without engines."""
    if not starts_engines(config):
        return []
    python = engine_python(config)
    return [f"           engines run in {python.path} ({python.reason})"]
