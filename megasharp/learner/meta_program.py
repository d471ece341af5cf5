"""Count a layout's parameters in a process of its own, because torch's fake group is global state.

    python -m megasharp.learner.meta_program

reads pickled (networks, layout, adapters or None) from standard input and prints, per network, the parameters on the
first rank of each pipeline stage, as JSON. It imports Megatron first, while its caller still reads a run file.
"""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable
from typing import Any

import torch


def _uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def main() -> None:
    """Read one layout and print its counts."""
    # Megatron decorates its fused functions at import, and torch's compiler takes longer to import than Megatron.
    # Nothing is computed here.
    torch.compile = _uncompiled  # type: ignore[assignment]
    from megasharp.learner.meta_models import stage_parameters

    print(json.dumps(stage_parameters(*pickle.load(sys.stdin.buffer))))


if __name__ == "__main__":
    main()
