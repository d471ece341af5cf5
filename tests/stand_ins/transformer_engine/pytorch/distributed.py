"""Random states and recomputation, as far as Megatron imports them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class CudaRNGStatesTracker:
    """Inherited from, never used: megasharp draws with Megatron's own."""


@contextlib.contextmanager
def activation_recompute_forward(**unused: object) -> Iterator[None]:
    """Nothing is quantized, so there is nothing to tell the modules."""
    yield
