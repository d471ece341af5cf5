"""The MLP's activation: the bits of silu(gate) * up by autograd, and its input alone is kept for backward."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from cases import each_case
from torch import Tensor

from megasharp.learner.layer_spec import SwiGLU

FFN = 96


@each_case("dtype", [torch.bfloat16, torch.float32])
def test_outputs_and_gradients_are_autograds(dtype: torch.dtype) -> None:
    x = (3 * torch.randn(40, 1, 2 * FFN, generator=torch.Generator().manual_seed(3))).to(dtype)
    gradient = torch.randn(40, 1, FFN, generator=torch.Generator().manual_seed(4)).to(dtype)
    own, plain = x.clone().requires_grad_(), x.clone().requires_grad_()
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = SwiGLU(None)(own)
    assert [tensor.data_ptr() for tensor in kept] == [own.data_ptr()]
    gate, up = plain.chunk(2, dim=-1)
    # Megatron adds an offset to up, of 0.
    expected = F.silu(gate) * (up + 0.0)
    assert torch.equal(out, expected)
    out.backward(gradient)
    expected.backward(gradient)
    assert torch.equal(own.grad, plain.grad)
