"""SGLang's out-of-tree platform for a CPU without SGLang's own CPU kernels, for which there is no package.

SGLang finds `activate` by the entry point group `sglang.srt.platforms`, in every process. It is called in the middle of
SGLang's own imports, so this file does not go through `sglang_internals.py`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor


def activate() -> str | None:
    """Name the platform's class for SGLang; None where CUDA is there, which SGLang's own platform serves."""
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
            """Return the name of SGLang's attention in plain torch."""
            return "torch_native"

        def get_mha_kv_pool_cls(self) -> Any:
            """Return SGLang's own class of key-value pools."""
            from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

            return MHATokenToKVPool

        def get_paged_allocator_cls(self) -> Any:
            """Return the class of the page allocator that needs no Triton; of both pools where the memory has one."""
            from megasharp.rollout.sglang.engine.engine_config import published

            if published().memory_window is None:
                return _paged_allocator()
            from megasharp.rollout.sglang.engine.memory_pool import WindowAllocator

            return partial(WindowAllocator, paged=_paged_allocator())

        def is_pin_memory_available(self, device: Any = None) -> bool:
            """Return False: there is no device to copy to from pinned memory."""
            return False

        def get_dispatch_key_name(self) -> str:
            """Return the key under which SGLang's layers have their forward in plain torch."""
            return "native"

    return PlainCpuPlatform


def _paged_allocator() -> type:
    """SGLang's allocator of pages, whose two kernels are Triton's, over SGLang's own plain form of them."""
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, alloc_extend_naive
    from sglang.srt.utils import get_num_new_pages

    class PlainPagedAllocator(PagedTokenToKVPoolAllocator):  # type: ignore[misc]
        """int64 indices of token slots, on the CPU."""

        free_pages: Tensor

        def alloc_extend(
            self,
            prefix_lens: Tensor,
            prefix_lens_cpu: Tensor,
            seq_lens: Tensor,
            seq_lens_cpu: Tensor,
            last_loc: Tensor,
            extend_num_tokens: int,
            num_new_pages: int | None = None,
        ) -> Tensor | None:
            """Slots for the tokens past each request's prefix; None where pages are short."""
            if num_new_pages is None:
                num_new_pages = get_num_new_pages(
                    seq_lens=seq_lens_cpu, page_size=self.page_size, prefix_lens=prefix_lens_cpu
                )
            if num_new_pages > len(self.free_pages):
                self.merge_and_sort_free()
            if num_new_pages > len(self.free_pages):
                return None
            slots = torch.empty(extend_num_tokens, dtype=torch.int64)
            alloc_extend_naive(prefix_lens, seq_lens, last_loc, self.free_pages, slots, self.page_size, self.device)
            self.free_pages = self.free_pages[num_new_pages:]
            return slots

        def alloc_decode(self, seq_lens: Tensor, seq_lens_cpu: Tensor, last_loc: Tensor) -> Tensor | None:
            """One slot per request: its last token's."""
            return self.alloc_extend(seq_lens - 1, seq_lens_cpu - 1, seq_lens, seq_lens_cpu, last_loc, len(seq_lens))

    return PlainPagedAllocator
