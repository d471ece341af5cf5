"""`deterministic: true` in a process that computes: the same numbers from the same start, bit for bit.

torch then takes deterministic kernels, and raises where it has none. Its flash attention's backward, which otherwise
adds up queries' gradients as tiles happen to end, takes another algorithm (`_flash_attention_backward` in torch's
attention_backward.cu asks for this very setting; with `warn_only` it would only warn). Our own kernels have no atomic
additions. Megatron, told by `deterministic_mode` of its own configuration, looks rows of the embedding up by indexing,
whose gradient does not depend on the order of additions. On a CPU a process computes on one thread
(`build/threads.py`), because sums depend on how many there are.
"""

from __future__ import annotations

import os

import torch

# What cuBLAS, NCCL and Transformer Engine read when a process first uses them. With NCCL's own choice, which may be
# sums inside the switches (NVLS), the order of additions is not fixed; Megatron asks for one of the others too.
VARIABLES = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
}


def compute_deterministically() -> None:
    """Switch this process over, before its first product on a GPU. Variables that are set already stay."""
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True)
