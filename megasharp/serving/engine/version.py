"""What the engines' Python must hold: the one version of SGLang that the seams were read from, and megasharp itself."""

from __future__ import annotations

from importlib import metadata

from megasharp.errors import UserError

PINNED = "0.5.21"
# The CPU platform's name in megasharp's packaging, by which SGLang finds it.
PLATFORM_NAME = "megasharp_cpu"
_PLATFORMS = "sglang.srt.platforms"


def check_installed(device: str) -> None:
    """Raises UserError where an engine on `device` lacks something that `make fleet` installs."""
    check_version()
    if device == "cpu" and PLATFORM_NAME not in {each.name for each in metadata.entry_points(group=_PLATFORMS)}:
        raise UserError(
            "the engines' Python does not have megasharp installed as a package; "
            "run `pip install --no-deps --no-build-isolation -e .` with it, or `make fleet`"
        )


def check_version() -> None:
    """Raises UserError where the installed SGLang is another one, or none."""
    try:
        found = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        found = "none"
    if found != PINNED:
        raise UserError(
            f"the engines' Python has sglang {found}, but megasharp needs exactly {PINNED}; "
            f"install it with `pip install --no-deps sglang=={PINNED}`, or build that Python anew with `make fleet`"
        )
