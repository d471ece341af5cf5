"""Methods, one file each, and the table that names them.

A new method is one file here and one row below; nothing else in the package knows a method by name.
"""

from __future__ import annotations

from typing import Any

from megasharp.algos.base import Method
from megasharp.algos.clip import Clip
from megasharp.algos.dlc import DLC
from megasharp.algos.grpo import GRPO
from megasharp.algos.kl import KL

METHODS: dict[str, type[Method[Any]]] = {
    "grpo": GRPO,
    "clip": Clip,
    "kl": KL,
    "dlc": DLC,
}
DEFAULT_SURROGATE = "clip"
