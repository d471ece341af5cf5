"""Keys that parse today but whose part is not built yet: each is refused at start with one line.

A line here goes away with the work that builds its part.
"""

from __future__ import annotations

from collections.abc import Callable

from megasharp.config.run import RunConfig
from megasharp.errors import UserError

_Check = tuple[str, Callable[[RunConfig], bool]]

_UNBUILT: tuple[_Check, ...] = (("policy.cp > 1", lambda c: c.policy.cp > 1),)


def unbuilt(config: RunConfig) -> list[str]:
    """Every key, with its value, that asks for a part which does not exist yet."""
    return [key for key, asked in _UNBUILT if asked(config)]


def refuse_unbuilt(config: RunConfig, where: str) -> None:
    """Raise UserError for the first key that asks for a part which does not exist yet."""
    for key in unbuilt(config):
        raise UserError(f"{where}: {key} is not built yet; leave this key at its default")
