"""Our Adam against torch's own, in both its ways of updating and with both kinds of weight decay."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megasharp.learner.cpu_backend import Adam

SETTINGS = {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def fused(self: Adam, group: dict[str, Any], params: list[Tensor]) -> None:
    for p in params:
        if not self.state[p]:
            self.state[p] = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
    gradients = [p.grad for p in params if p.grad is not None]
    states = [self.state[p] for p in params]
    moments, squares = [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states]
    self._update_fused(group, params, gradients, moments, squares)


@pytest.mark.parametrize("on_gpu", [False, True], ids=["grouped", "fused"])
@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "adam"])
def test_five_steps(decoupled: bool, on_gpu: bool) -> None:
    """The kernel of GPUs has a twin for CPUs, which is what runs here."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 4), (5,), (2, 2)]
    mine = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    theirs = [p.detach().clone().double().requires_grad_() for p in mine]
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    own, oracle = Adam(mine, adam_w_mode=decoupled, **SETTINGS), kind(theirs, **SETTINGS)
    for step in range(5):
        for p, q in zip(mine, theirs, strict=True):
            # One parameter without a gradient at first, as a frozen one would be.
            if step or p.dim() > 1:
                p.grad = torch.randn(p.shape, generator=generator)
                q.grad = p.grad.double()
        with mock.patch.object(Adam, "_update", fused if on_gpu else Adam._update):
            own.step()
        oracle.step()
    for p, q in zip(mine[::2], theirs[::2], strict=True):
        assert torch.allclose(p.double(), q, atol=1e-6)
