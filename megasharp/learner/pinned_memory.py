"""Host memory whose pages are locked, so that a GPU copies to and from it by itself, at exactly the size asked for.

torch's own allocator of such memory rounds each size up to a power of two, which can take almost twice as much. Here
ordinary memory is registered with the driver instead.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from megasharp.common.errors import UserError


class PageLocked:
    """`memory`: `size` zeros of `dtype` on the host. Its pages are locked as long as this lives, if `device` is a GPU.

    Raises:
        UserError: the driver will not lock that much; `asker` is what asked for it, `instead` what can be done.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device, asker: str, instead: str) -> None:
        try:
            self.memory = torch.zeros(size, dtype=dtype)
        except RuntimeError as failure:
            raise UserError(
                f"{asker}: the host has no {size * dtype.itemsize / 1e9:.1f} GB of memory left for it; ask for more "
                f"(sbatch --mem), or {instead}"
            ) from failure
        if device.type == "cuda" and size:
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            error = int(runtime.cudaHostRegister(self.memory.data_ptr(), self.memory.nbytes, 0))
            if error:
                raise UserError(
                    f"{asker}: {self.memory.nbytes / 1e9:.1f} GB of host memory could not be page-locked (CUDA error "
                    f"{error}); ask for more memory (sbatch --mem), or {instead}"
                )
            weakref.finalize(self, _unlock, runtime, self.memory)


def _unlock(runtime: object, memory: Tensor) -> None:
    # The registry of finalizers holds the memory until then.
    runtime.cudaHostUnregister(memory.data_ptr())  # type: ignore[attr-defined]
