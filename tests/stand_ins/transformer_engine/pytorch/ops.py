"""Names that Megatron's annotations and classes read at import; nothing here computes."""

import torch


class FusibleOperation(torch.nn.Module):
    """One operation."""


class Sequential(torch.nn.Sequential):
    """Several operations."""
