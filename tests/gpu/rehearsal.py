"""A rehearsal of this folder on a CPU, which `check_gpu.py --minimal --rehearse` asks for by a variable.

Tensors say that they are on a GPU (`pretended_cuda.py`), and flash attention's kernels are the tests' own
(`stand_in_flash.py`). The tests' programs run in the processes and with the files that they have on a GPU; their
figures are none of a GPU's, and tests of what only CUDA does are left out.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor

from megasharp.learner import flash_varlen

VARIABLE = "MEGASHARP_REHEARSAL"
# Memory of the device, its queue, handles for other processes, and sizes for which a CPU takes minutes.
ONLY_ON_A_GPU = (
    "test_sync.py",
    "test_layers_do_not_wait_for_the_gpu",
    "test_memory_does_not_grow_with_the_square_of_the_length",
    "test_no_memory_of_the_logits_size",
    "test_more_elements_than_int32_and_more_rows_than_a_grid_has_elsewhere",
    "test_the_optimizer_on_the_host",
    "test_determinism.py::test_attention",
    "test_determinism.py::test_head[151936]",
    "test_determinism.py::test_sampling[64-",
    "-4-4-64]",
    "-16-2-256]",
)
_STACK = ExitStack()


class _Generator(torch.Generator):
    """Of the CPU, whatever device is named."""

    def __new__(cls, device: object = None) -> _Generator:
        return super().__new__(cls)


def _forward(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, ...]:
    import stand_in_flash

    out, *statistics = stand_in_flash.forward(query.float(), key.float(), value.float(), *others)
    return out.to(query.dtype), *statistics


def _backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, *others: Any
) -> tuple[Tensor, ...]:
    import stand_in_flash

    given = (each.float() for each in (gradient, query, key, value, out))
    return tuple(each.to(query.dtype) for each in stand_in_flash.backward(*given, *others))


def asked() -> bool:
    """Return True where this process rehearses."""
    return VARIABLE in os.environ


def begin() -> None:
    """Pretend for the rest of this process."""
    import stand_in_flash
    from pretended_cuda import pretended_cuda

    patch = pytest.MonkeyPatch()
    stand_in_flash.use_stand_in(patch)
    # As exact as the kernels, which sum in float32.
    patch.setattr(flash_varlen, "flash_forward", _forward)
    patch.setattr(flash_varlen, "flash_backward", _backward)
    patch.setattr(torch, "Generator", _Generator)
    # FP8 asks for it.
    patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    _STACK.enter_context(pretended_cuda())
