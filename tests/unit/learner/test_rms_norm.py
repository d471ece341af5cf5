"""The norm's own backward on CPUs against autograd of its formula in float64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megasharp.learner.norms import NormedAdd, RMSNorm


def plain(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("shape", [(96, 1, 128), (96, 4, 32)])
def test_gradients_are_those_of_the_formula(shape: tuple[int, ...], frozen: bool) -> None:
    """Rows are of sizes from 1e-3, where eps counts, to 1e2, and the input is a view of a wider tensor, as queries are.

    No other test tells a term that is missing for small rows from rounding.
    """
    generator = torch.Generator().manual_seed(3)
    sizes = torch.logspace(-3, 2, shape[0]).view(-1, *[1] * (len(shape) - 1))
    wide = torch.randn(*shape[:-1], 2 * shape[-1], generator=generator) * sizes
    x = wide[..., : shape[-1]].detach().requires_grad_()
    norm = RMSNorm(SimpleNamespace(params_dtype=torch.float32, sequence_parallel=False), shape[-1], eps=1e-5)
    with torch.no_grad():
        norm.weight.normal_(1.0, 0.3, generator=generator)
    norm.weight.requires_grad_(not frozen)
    cotangent = torch.randn(shape, generator=generator)
    out = norm(x)
    out.backward(cotangent)
    x64, weight64 = (value.detach().double().requires_grad_() for value in (x, norm.weight))
    exact = plain(x64, weight64, 1e-5)
    exact.backward(cotangent.double())
    assert x.grad is not None and x64.grad is not None and weight64.grad is not None
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-6)
    # Against the size of each row's gradient, where terms nearly cancel.
    scale = x64.grad.abs().amax(-1, keepdim=True)
    assert float(((x.grad.double() - x64.grad) / scale).abs().max()) < 1e-5
    if frozen:
        assert norm.weight.grad is None
    else:
        torch.testing.assert_close(norm.weight.grad.double(), weight64.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("trained", [True, False])
def test_a_norm_behind_keeps_nothing_where_gradients_are_off(trained: bool) -> None:
    """Megatron turns them on around the sum, whatever they are around the layer."""
    config = SimpleNamespace(
        params_dtype=torch.float32, sequence_parallel=False, hidden_size=32, layernorm_epsilon=1e-5
    )
    module = NormedAdd(config)
    torch.nn.init.normal_(module.norm.weight)
    output, residual = torch.randn(5, 1, 32, requires_grad=trained), torch.randn(5, 1, 32)
    with torch.no_grad(), torch.enable_grad():
        total = module(training=trained, fused=False)((output, None), residual, 0.0)
    assert total.requires_grad == trained
    torch.testing.assert_close(total, residual + plain(output, module.norm.weight, 1e-5))
