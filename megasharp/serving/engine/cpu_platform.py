"""SGLang's out-of-tree platform for a CPU without SGLang's own CPU kernels, for which there is no package.

SGLang finds `activate` by the entry point group `sglang.srt.platforms`, in every process. It is called in the middle of
SGLang's own imports, so this file does not go through `seams.py`.
"""

from __future__ import annotations

from typing import Any

import torch

PLATFORM_NAME = "megasharp_cpu"


def activate() -> str | None:
    """Where SGLang finds the platform's class; None where CUDA is there, which SGLang's own platform serves."""
    return None if torch.cuda.is_available() else f"{__name__}:PlainCpuPlatform"


def __getattr__(name: str) -> Any:
    """The class is made when SGLang asks for it: its bases are SGLang's."""
    if name == "PlainCpuPlatform":
        return _plain_cpu_platform()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _plain_cpu_platform() -> type:
    from sglang.srt.platforms.cpu import CpuDeviceMixin
    from sglang.srt.platforms.device_mixin import PlatformEnum
    from sglang.srt.platforms.interface import SRTPlatform

    class PlainCpuPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]
        """Everything in plain torch."""

        _enum = PlatformEnum.OOT

        def get_default_attention_backend(self) -> str:
            return "torch_native"

        def get_mha_kv_pool_cls(self) -> Any:
            from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

            return MHATokenToKVPool

        def get_paged_allocator_cls(self) -> Any:
            from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator

            return PagedTokenToKVPoolAllocator

        def is_pin_memory_available(self, device: Any = None) -> bool:
            return False

        def get_dispatch_key_name(self) -> str:
            return "native"

    return PlainCpuPlatform
