"""Memory of a step's tensors is reused from step to step on a CPU."""

from __future__ import annotations

import ctypes
import resource

import pytest
import torch

from megasharp.learner.cpu_backend import reuse_freed_memory

TENSOR_MIB, TIMES = 48, 16


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="malloc is not glibc's")
def test_freed_memory_is_not_mapped_again() -> None:
    """Catches a parameter of malloc's with a wrong number or value, which nothing but page faults would show.

    By default glibc maps tensors of this size anew each time, with a fault for each of 12,288 pages. The heap may have
    several places for one, and each is mapped when it is first used.
    """
    reuse_freed_memory()
    numbers = TENSOR_MIB * 2**18
    torch.zeros(numbers).fill_(1.0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(TIMES):
        torch.empty(numbers).fill_(1.0)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert faults < TIMES / 2 * TENSOR_MIB * 2**20 / resource.getpagesize(), "half of the tensors were mapped"
