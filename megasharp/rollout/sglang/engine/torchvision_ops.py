"""Lets SGLang import torchvision beside a torch without CUDA.

The torchvision of the package index is built for CUDA: its library does not load beside a CPU torch, and its import
then ends at two operators that nobody defined. Nothing here ever calls them. Imports no sglang: SGLang's first import
is too late.
"""

from __future__ import annotations

import torch

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def define_missing_ops() -> None:
    """Define torchvision's two operators where CUDA is absent; harmless when called again."""
    if torch.cuda.is_available():
        return
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", _SCHEMA)
