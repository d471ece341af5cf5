"""The reference policy's weights, which change places with the policy's while something reads them.

One copy is kept, in the host's memory: a second one on the GPU would take what activations or a co-located engine need,
and the exchange, once a step, costs what it takes to move the weights over the bus and back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


class Reference:
    """A copy of the parameters' present values, in their dtypes; page-locked where they are on a GPU."""

    @torch.no_grad()
    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._held = [torch.empty(p.shape, dtype=p.dtype, pin_memory=p.is_cuda).copy_(p) for p in parameters]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The held values are the parameters' while the block runs, and what it makes of them is held afterwards."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for parameter, held in zip(self._parameters, self._held, strict=True):
            value = parameter.clone()
            parameter.copy_(held, non_blocking=True)
            held.copy_(value)
