"""Everything that can be refused before SGLang starts, without starting it; asked when a run's config is read.

The engines' Python must hold the one version of SGLang that the seams were read from, and megasharp as a package.
"""

from __future__ import annotations

import runpy
from importlib import metadata, util
from pathlib import Path

from megasharp.common.errors import UserError
from megasharp.common.group_environment import compute_capability
from megasharp.rollout.sglang.engine.engine_config import (
    EngineConfig,
    check_config,
    check_flags,
    installed_flags,
    skip_the_packages_own_imports,
)

PINNED = "0.5.21"
# The CPU platform's name in megasharp's packaging, by which SGLang finds it.
PLATFORM_NAME = "megasharp_cpu"
_PLATFORMS = "sglang.srt.platforms"
_KERNELS = "sglang-kernel"
_NONE = "none"
_HOW_TO_BUILD = {
    "cpu": "`make fleet` in a clone builds a Python that has it",
    "cuda": "`make gpu` in a clone builds a Python that has it",
}


def check_installed(device: str) -> None:
    """Raises UserError where the engines' Python lacks SGLang in its one version, or megasharp's own packaging."""
    check_version(device)
    if device == "cpu" and PLATFORM_NAME not in {each.name for each in metadata.entry_points(group=_PLATFORMS)}:
        raise UserError(
            "the engines' Python does not have megasharp installed as a package; "
            "run `pip install --no-deps --no-build-isolation -e .` with it, or `make fleet`"
        )


def check_version(device: str) -> None:
    """Raises UserError where the installed SGLang is another one, or none."""
    found = _installed("sglang")
    if found != PINNED:
        has = "no sglang; " if found == _NONE else f"sglang {found}, but "
        raise UserError(f"the engines' Python has {has}megasharp needs exactly {PINNED}; {_HOW_TO_BUILD[device]}")


def check_build(device: str) -> None:
    """Raises UserError where the engines' Python is a CPU's and `device` is not; needs no GPU and imports no torch."""
    if device == "cpu":
        return
    torch = util.find_spec("torch")
    if torch is None or torch.origin is None:
        raise UserError(f"the engines' Python lacks torch; {_HOW_TO_BUILD[device]}")
    # The build's own record: importing torch takes seconds, on a cold shared disk a minute.
    build = runpy.run_path(str(Path(torch.origin).with_name("version.py")))
    if build["cuda"] is None:
        raise UserError(
            f"the engines' Python has torch {build['__version__']}, which knows no CUDA; {_HOW_TO_BUILD[device]}"
        )
    if _installed(_KERNELS) == _NONE:
        raise UserError(
            f"the engines' Python lacks {_KERNELS}, without which SGLang has no GPU; {_HOW_TO_BUILD[device]}"
        )


def _installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return _NONE


def check(config: EngineConfig) -> None:
    """Raises UserError with the first thing that is wrong, as an engine would at its start; no port need be free.

    For a process that then ends: SGLang cannot be used in it afterwards.
    """
    check_installed(config.device)
    check_config(config, None if config.device == "cpu" else compute_capability())
    skip_the_packages_own_imports()
    check_flags(config, installed_flags())
    check_build(config.device)
