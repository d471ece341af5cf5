"""The memory network's own pool of cache pages, in an engine whose memory has a window.

SGLang keeps two pools for models that mix full attention with sliding windows: a request's tokens have slots in the
full pool, by which everything is named, and each of these may have a peer in the other pool, which is freed when the
token has left the window. Here the policy's layers are the full ones and the memory's the sliding ones, and freeing
begins behind the prompt. So a request's cache in the memory's layers is its prompt, the window and what is not yet
freed: frees are made in groups of `eviction_interval`, and a response that is prefilled again (retracted, or begun in
another request) has all its tokens until it is decoded on.

SGLang's own tree of prefixes for such models frees windows too, but has no prompts, and shares a response with any
request that begins with it. That would be wrong here: behind the prompt the memory's keys depend on where the prompt
ends. So `PromptCache` shares prompts only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megasharp.rollout.sglang.engine.engine_config import PROMPT_CACHE, EngineSettings, eviction_interval, published
from megasharp.rollout.sglang.engine.requests import begun, prompt_length
from megasharp.rollout.sglang.engine.sglang_internals import (
    EvictParams,
    HybridSWAPoolConfigurator,
    KVCacheConfigurator,
    MHATokenToKVPool,
    RadixCache,
    Scheduler,
    SWAPrefillBudget,
    SWATokenToKVPoolAllocator,
    get_schedule,
    register_radix_cache_backend,
)


class PromptCache(RadixCache):  # type: ignore[misc]
    """SGLang's tree of prefixes, with prompts alone in it: their keys are the same whatever follows."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.sliding_window_size: int = params.sliding_window_size
        self._running: dict[str, Any] = {}

    def supports_swa(self) -> bool:
        """Return True: SGLang then asks for `evict_sliding_windows`."""
        return True

    def reset(self) -> None:
        """Forget all prefixes."""
        super().reset()
        self._running = {}

    def match_prefix(self, params: Any) -> Any:
        """Find no more than the request's own prompt."""
        if params.req is not None:
            params = replace(params, key=params.key[: prompt_length(params.req)])
        return super().match_prefix(params)

    def _insert_cache(self, req: Any, token_ids: Any, **kwargs: Any) -> Any:
        limit = prompt_length(req) // self.page_size * self.page_size
        return super()._insert_cache(req, token_ids, **{**kwargs, "key_limit": limit, "split_prompt": False})

    def cache_unfinished_req(self, req: Any, chunked: bool = False) -> None:
        """Keep what is filled of the prompt, and count the request among those that will fill a window."""
        super().cache_unfinished_req(req, chunked=chunked)
        self._running[req.rid] = req

    def on_release(self, req: Any, *, inserted: bool) -> None:
        """Forget a request that is over or retracted."""
        super().on_release(req, inserted=inserted)
        self._running.pop(req.rid, None)

    def evict_sliding_windows(self, req: Any, pre_len: int, *, eviction_interval: int = 1) -> None:
        """Free the memory's slots behind the prompt that no query from position `pre_len` on sees."""
        req.kv.swa_evict_floor = prompt_length(req)
        super().evict_sliding_windows(req, pre_len, eviction_interval=eviction_interval)

    def evict(self, params: Any) -> Any:
        """Drop prefixes: each has as many slots in one pool as in the other."""
        return super().evict(EvictParams(num_tokens=max(params.num_tokens, params.swa_num_tokens)))

    def full_evictable_size(self) -> int:
        """Slots of the policy's pool that no running request needs."""
        return int(self.evictable_size_)

    def swa_evictable_size(self) -> int:
        """The same of the memory's pool."""
        return int(self.evictable_size_)

    def full_protected_size(self) -> int:
        """Slots of the policy's pool that a running request shares."""
        return int(self.protected_size_)

    def swa_protected_size(self) -> int:
        """The same of the memory's pool."""
        return int(self.protected_size_)

    def still_to_fill(self) -> int:
        """Slots of the memory's pool that running requests will yet take before they free as many."""
        return sum(_still_to_fill(req) for req in self._running.values())


def _still_to_fill(req: Any) -> int:
    prompt, most = prompt_length(req), begun(req) + req.sampling_params.max_new_tokens
    return max(0, _reserved(most) - max(0, int(req.kv.kv_allocated_len) - prompt))


def _reserved(new_tokens: int) -> int:
    """Slots of the memory's pool that so many response tokens take at most."""
    window = published().memory_window
    assert window is not None
    return min(new_tokens, window + eviction_interval(window))


class WindowBudget(SWAPrefillBudget):  # type: ignore[misc]
    """The budget of a prefill: SGLang's own takes a prompt for something that leaves the window."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.swa_offset += self.tree_cache.still_to_fill()

    def swa_tokens(self, extend_input_len: int, max_new_tokens: int, **_: Any) -> int:
        """Slots of the memory's pool that a request needs: all that is prefilled, and its window."""
        return int(extend_input_len + _reserved(max_new_tokens) + self.page_size)


class WindowAllocator(SWATokenToKVPoolAllocator):  # type: ignore[misc]
    """SGLang's allocator of both pools, with our budget; `paged` is the class for pages of more than one token."""

    def __init__(self, size: int, *, kvcache: Any, paged: Callable[..., Any], **kwargs: Any) -> None:
        super().__init__(size, kvcache.size_swa, kvcache=kvcache, **kwargs)
        if self.page_size > 1:
            self.full_attn_allocator = paged(size, kvcache=kvcache.full_kv_pool, **kwargs)
            self.swa_attn_allocator = paged(kvcache.size_swa, kvcache=kvcache.swa_kv_pool, **kwargs)
            self.clear()

    def create_prefill_budget(self, tree_cache: Any, *, num_mixed_decode_tokens: int = 0) -> WindowBudget:
        """Return the budget of one round of prefill."""
        return WindowBudget(self, tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens)


def memory_tokens(policy_tokens: int, page_size: int, longest: int, share: float) -> int:
    """Slots of the memory's pool: a share of the policy's, and no less than the longest request needs alone.

    That is all its tokens, when a response of any length is prefilled again. A smaller pool would never take it.
    """
    alone = min(longest, policy_tokens) + 2 * page_size
    return -(-max(int(policy_tokens * share), alone) // page_size) * page_size


def apply(settings: EngineSettings) -> None:
    """Give the memory network a pool of its own in this process, where it has a window."""
    if settings.memory_window is None:
        return
    register_radix_cache_backend(PROMPT_CACHE, lambda context: PromptCache(context.params))
    start: Callable[[Any, Any], None] = HybridSWAPoolConfigurator.__init__

    def started(self: Any, kvc: Any) -> None:
        start(self, kvc)
        self.megasharp_longest = kvc.model_config.context_len

    def solved(self: Any, max_total_num_tokens: int, page_size: int) -> Any:
        full = max_total_num_tokens // page_size * page_size
        share = get_schedule().swa_full_tokens_ratio
        return self._make_pool_config(full, memory_tokens(full, page_size, self.megasharp_longest, share))

    def built(self: Any, *, max_total_num_tokens: int) -> Any:
        share, longest = get_schedule().swa_full_tokens_ratio, self.model_config.context_len
        return self._build_hybrid_swa_kv_pool(
            full_max_total_num_tokens=max_total_num_tokens,
            swa_max_total_num_tokens=memory_tokens(max_total_num_tokens, self.pool_page_size, longest, share),
            mha_pool_class=MHATokenToKVPool,
        )

    tell: Callable[[Any, Any], Any] = Scheduler.get_internal_state

    def told(self: Any, request: Any) -> Any:
        answer, allocator = tell(self, request), self.token_to_kv_pool_allocator
        answer.internal_state["free_slots"] = {
            "policy": allocator.full_available_size(),
            "memory": allocator.swa_available_size(),
            "prompts": self.tree_cache.evictable_size(),
        }
        return answer

    Scheduler.get_internal_state = told
    HybridSWAPoolConfigurator.__init__ = started
    HybridSWAPoolConfigurator._solve_pool_sizes = solved
    # A platform that is not SGLang's own gets one pool for all layers otherwise.
    KVCacheConfigurator._build_oot_mha_kv_pool = built
