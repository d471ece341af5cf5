"""SHA-256 of weights: of each tensor's bytes in its Hugging Face layout, and of all of them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor


def tensor_sha256(tensor: Tensor) -> str:
    """Hex digest of a tensor's elements in row-major order; says nothing of shape or dtype."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).hexdigest()


def weights_sha256(tensors: Mapping[str, str]) -> str:
    """Hex digest of a whole model, from its tensors' names and digests; files and their order do not count."""
    lines = "".join(f"{name} {digest}\n" for name, digest in sorted(tensors.items()))
    return hashlib.sha256(lines.encode()).hexdigest()
