"""The reference policy's weights, which change places with the policy's while something reads them.

One copy is kept, in the host's memory: a second one on the GPU would take what activations or a co-located engine need,
and the exchange, once a step, costs what it takes to move the weights over the bus and back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from megasharp.mcore.page_locked import PageLocked


class Reference:
    """A copy of the parameters' present values, in their dtypes; page-locked where they are on a GPU.

    Raises:
        UserError: the host's memory could not be locked.
    """

    @torch.no_grad()
    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._locked: list[PageLocked] = []
        self._held = [torch.empty(0)] * len(parameters)
        for dtype, device in dict.fromkeys((p.dtype, p.device) for p in parameters):
            self._hold([i for i, p in enumerate(parameters) if (p.dtype, p.device) == (dtype, device)])

    def _hold(self, alike: Sequence[int]) -> None:
        """Copies of parameters of one dtype, one after another in one piece of memory."""
        parameters = [self._parameters[i] for i in alike]
        sizes = [parameter.numel() for parameter in parameters]
        instead = "leave out the methods that read a reference"
        locked = PageLocked(sum(sizes), parameters[0].dtype, parameters[0].device, "the reference policy", instead)
        self._locked.append(locked)
        for i, flat, parameter in zip(alike, locked.memory.split_with_sizes(sizes), parameters, strict=True):
            self._held[i] = flat.view(parameter.shape).copy_(parameter)

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
