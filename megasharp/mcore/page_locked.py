"""Host memory whose pages are locked, so that a GPU copies to and from it by itself, at exactly the size asked for.

torch's own allocator of such memory rounds each size up to a power of two, which can take almost twice as much. Here
ordinary memory is registered with the driver instead.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from megasharp.errors import UserError


def page_locked_zeros(size: int, owner: object, device: torch.device, key: str) -> Tensor:
    """float32 [size] on the host. Its pages are locked as long as `owner` lives, if `device` is a GPU.

    Raises:
        UserError: the driver will not lock that much; `key` is the setting that asked for it.
    """
    memory = torch.zeros(size, dtype=torch.float32)
    if device.type == "cuda" and size:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        address, count = memory.data_ptr(), memory.numel() * memory.element_size()
        error = int(runtime.cudaHostRegister(address, count, 0))
        if error:
            raise UserError(
                f"{key}: {count / 1e9:.1f} GB of host memory could not be page-locked (CUDA error {error}); ask for "
                f"more memory (sbatch --mem), or set {key}=false"
            )
        weakref.finalize(owner, _unlock, runtime, memory)
    return memory


def _unlock(runtime: object, memory: Tensor) -> None:
    # The registry of finalizers holds the memory until then.
    runtime.cudaHostUnregister(memory.data_ptr())  # type: ignore[attr-defined]
