"""Keys that parse today but whose part is not built yet: each is refused at start with one line.

A line here goes away with the work that builds its part.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megasharp.config.run import RunConfig
from megasharp.errors import UserError

_Check = tuple[str, Callable[[RunConfig], bool]]

_UNBUILT: tuple[_Check, ...] = (
    ("policy.device: cuda", lambda c: c.policy.device == "cuda"),
    ("policy.cp > 1", lambda c: c.policy.cp > 1),
    ("cluster.gpus_per_node > 0", lambda c: c.cluster.gpus_per_node > 0),
)


def unbuilt(config: RunConfig) -> list[str]:
    """Every key, with its value, that asks for a part which does not exist yet."""
    return [key for key, asked in _UNBUILT if asked(config)]


def refuse_unbuilt(config: RunConfig, where: str) -> None:
    """Raise UserError for the first key that asks for a part which does not exist yet."""
    for key in unbuilt(config):
        raise UserError(f"{where}: {key} is not built yet; leave this key at its default")
    if config.policy.device == "auto" and torch.cuda.is_available():
        raise UserError(f"{where}: training on CUDA is not built yet; set policy.device=cpu and hide the GPUs")
