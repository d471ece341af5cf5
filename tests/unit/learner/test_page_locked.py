"""Memory that the host does not have is told in one line."""

from __future__ import annotations

import pytest
import torch

from megasharp.common.errors import UserError
from megasharp.learner.optimizer_offload import PageLocked


def test_more_than_the_host_has() -> None:
    told = r"^policy\.offload: the host has no 4000000000\.0 GB of memory left for it; ask .*, or list less there$"
    with pytest.raises(UserError, match=told):
        PageLocked(10**18, torch.float32, torch.device("cpu"), "policy.offload", "list less there")


def test_beside_a_cpu_nothing_is_locked() -> None:
    assert PageLocked(3, torch.bfloat16, torch.device("cpu"), "", "").memory.tolist() == [0.0, 0.0, 0.0]
