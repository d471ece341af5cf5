"""The experts to which an engine sent each token, as they travel to the run: SGLang's base64 of a flat array.

The engine narrows SGLang's int32 to the dtype of `Routing`; both halves know the shape by the model's config.json. An
engine's check imports this file, so torch is imported where a response is read.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import TYPE_CHECKING

from megasharp.common.records import Routing

if TYPE_CHECKING:
    from torch import Tensor


def decode(routing: Routing, text: str, positions: int) -> Tensor:
    """Return the experts of a response, [positions, layers, per_token].

    Raises ValueError for an answer of another size.
    """
    import torch

    raw = bytearray(base64.b64decode(text, validate=True))
    shape, wanted = (positions, routing.layers, routing.per_token), positions * routing.bytes_per_token
    if len(raw) != wanted:
        raise ValueError(f"{len(raw)} bytes of routed experts; {wanted} are of {positions} positions")
    # An empty buffer is none to torch.
    return torch.frombuffer(raw, dtype=routing.dtype).view(shape) if raw else torch.empty(shape, dtype=routing.dtype)


def routed_experts(model: Path) -> Routing | None:
    """Read a model folder's config.json; None for a dense model.

    Raises OSError or ValueError where it is unreadable.
    """
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    # Mixtral has the second name, and transformers has begun to write it for others.
    count = config.get("num_experts") or config.get("num_local_experts")
    if not count:
        return None
    return Routing(int(config["num_hidden_layers"]), int(config["num_experts_per_tok"]), int(count))
