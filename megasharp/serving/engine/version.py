"""The one version of SGLang that the seams were read from and are tested with."""

from __future__ import annotations

from importlib import metadata

from megasharp.errors import UserError

PINNED = "0.5.21"


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
