"""The MLP's activation: the bits of silu(gate) * up by autograd, and its input alone is kept; Megatron's on GPUs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from cases import each_case
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl
from torch import Tensor

from megasharp.common.layout import ParallelLayout
from megasharp.config.policy import PolicyConfig
from megasharp.learner.layer_spec import SwiGLU
from megasharp.learner.model import _ANY_ARCHITECTURE, transformer_config

FFN = 96


def kept(activation: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, list[int]]:
    """The output, and the addresses of the tensors that backward gets."""
    found: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        found.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        return activation(x), found


@each_case("dtype", [torch.bfloat16, torch.float32])
def test_outputs_and_gradients_are_autograds(dtype: torch.dtype) -> None:
    x = (3 * torch.randn(40, 1, 2 * FFN, generator=torch.Generator().manual_seed(3))).to(dtype)
    gradient = torch.randn(40, 1, FFN, generator=torch.Generator().manual_seed(4)).to(dtype)
    own, plain = x.clone().requires_grad_(), x.clone().requires_grad_()
    out, addresses = kept(SwiGLU(None), own)
    assert addresses == [own.data_ptr()]
    gate, up = plain.chunk(2, dim=-1)
    # Megatron adds an offset to up, of 0.
    expected = F.silu(gate) * (up + 0.0)
    assert torch.equal(out, expected)
    out.backward(gradient)
    expected.backward(gradient)
    assert torch.equal(own.grad, plain.grad)


def test_with_a_gpu_megatrons_fused_one_is_called_and_keeps_as_little(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4, 1, 2 * FFN, requires_grad=True)
    assert kept(lambda x: bias_swiglu_impl(x, None), x)[1] == [x.data_ptr()]
    for there in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        config = transformer_config(_ANY_ARCHITECTURE, ParallelLayout(), torch.bfloat16, PolicyConfig(), {})
        assert (config.bias_activation_fusion, config.use_te_activation_func) == (there, not there)
