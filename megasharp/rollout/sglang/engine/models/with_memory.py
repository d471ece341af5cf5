"""A policy and its memory network as one SGLang model, so that a decode step of both is one step of the engine.

The policy's parameters keep their Hugging Face names and the memory's stand under `memory.`, in checkpoints and in
updates. The memory's attention layers are numbered after the policy's. `start_layer` and `end_layer` span both, which
sizes SGLang's paged key-value pool, and so does the configuration's `num_attention_layers` (`sglang_patches.py`);
`num_hidden_layers` is the policy's, like the names of its weights. So one page table, one radix tree and one allocator
serve both networks, and prefix reuse, chunked prefill, retraction and flushing keep them in step by themselves.

SGLang's sleep drops both networks' weights and its wake brings none back: an update after it must bring both, and
`sleeping.py` keeps requests out until it has come.

The memory's logits go to a buffer (`sampling_math.py`); the sampler subtracts them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from megasharp.common.group_environment import compute_capability
from megasharp.common.records import MEMORY_PREFIX
from megasharp.rollout.sglang.engine.attention_backends import check_attention, heads_in_pool
from megasharp.rollout.sglang.engine.engine_config import check_pair, published
from megasharp.rollout.sglang.engine.memory_window import Seen, attend, seen_in_step
from megasharp.rollout.sglang.engine.models.plain import Qwen3MoeForCausalLM
from megasharp.rollout.sglang.engine.sampling_math import MemoryLogits
from megasharp.rollout.sglang.engine.sglang_internals import (
    CaptureHiddenMode,
    DefaultModelLoader,
    KVWriteLoc,
    LogitsMetadata,
    Olmo2ForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    RadixAttention,
    get_attn_backend,
    get_exec,
    get_parallel,
    get_req_to_token_pool,
    get_token_to_kv_pool,
)

_NETWORKS = {each.__name__: each for each in (Olmo2ForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)}


class _WithMemory(nn.Module):
    """The memory network beside a policy's class, which comes after this one in the order of bases."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__(config, quant_config=quant_config, prefix=prefix)
        settings = published()
        assert settings.memory is not None
        memory_config = AutoConfig.from_pretrained(settings.memory, trust_remote_code=False)
        ranks = get_parallel().tp_size
        check_pair(config, memory_config, ranks)
        check_attention(get_exec().kernel, config, memory_config, ranks, compute_capability())
        # The policy's quantisation says nothing about another checkpoint.
        self.memory = _NETWORKS[memory_config.architectures[0]](memory_config, quant_config=None, prefix="memory")
        self._window = None if settings.memory_window is None else Window(settings.memory_window)
        _move_into_pool(self.memory, config, memory_config, self._window)
        self.memory_logits = MemoryLogits(settings.max_rows, config.vocab_size)
        self.secondary_weights = [
            DefaultModelLoader.Source(model_or_path=settings.memory, revision=None, prefix=MEMORY_PREFIX)
        ]
        self._layers: int = config.num_hidden_layers + settings.memory_layers

    @property
    def end_layer(self) -> int:
        """One past the last attention layer of both networks: the pool's depth."""
        return self._layers

    def get_attention_sliding_window_size(self) -> int | None:
        """The memory's window, by which SGLang frees the cache of layers that have one; None: no such layers."""
        return published().memory_window

    @torch.no_grad()
    def forward(self, input_ids: Tensor, positions: Tensor, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """The policy's output, as its own class gives it; the memory's logits go to their buffer."""
        output = super().forward(input_ids, positions, forward_batch, *args, **kwargs)
        if self._window is not None:
            self._window.begin_step(forward_batch)
        with _without_the_policys_schedule():
            hidden = self.memory.model(input_ids, positions, forward_batch)
        # Logits of each request's last token only, in a tensor of their own: prompt log-probs are the policy's.
        rows = LogitsMetadata.from_forward_batch(forward_batch)
        rows.next_token_logits_buffer = None
        rows.extend_return_logprob = False
        rows.extend_return_top_logprob = False
        rows.extend_token_ids_logprob = False
        rows.capture_hidden_mode = CaptureHiddenMode.NULL
        logits = self.memory.logits_processor(input_ids, hidden, self.memory.lm_head, rows).next_token_logits
        self.memory_logits.store(logits)
        return output

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Hand each tensor to its network; the tensors are read one by one, never held together."""
        for of_memory, run in groupby(weights, key=lambda item: item[0].startswith(MEMORY_PREFIX)):
            if of_memory:
                self.memory.load_weights((name.removeprefix(MEMORY_PREFIX), tensor) for name, tensor in run)
            else:
                super().load_weights(run)  # type: ignore[misc]

    def should_apply_lora(self, name: str) -> bool:
        """LoRA adapters are refused at start; none may wrap the memory."""
        return False


class Olmo2WithMemory(_WithMemory, Olmo2ForCausalLM):  # type: ignore[misc]
    """An OLMo 2 policy."""


class Qwen2WithMemory(_WithMemory, Qwen2ForCausalLM):  # type: ignore[misc]
    """A Qwen2 policy."""


class Qwen3WithMemory(_WithMemory, Qwen3ForCausalLM):  # type: ignore[misc]
    """A Qwen3 policy."""


class Qwen3MoeWithMemory(_WithMemory, Qwen3MoeForCausalLM):
    """A Qwen3 policy of experts; the memory is dense."""


class Window:
    """The part of their cache that the running step's requests see in the memory's layers, the same in each."""

    def __init__(self, length: int) -> None:
        self._length = length
        self.written_T: Tensor = torch.empty(0, dtype=torch.int64)
        self.seen: list[tuple[Seen, Tensor]] = []

    def begin_step(self, batch: Any) -> None:
        """Find each request's slots in the memory's pool: `written_T` for the step's tokens, `seen` for its keys."""
        slots: Tensor = get_token_to_kv_pool().full_to_swa_index_mapping
        self.written_T = slots[batch.out_cache_loc]
        ends = batch.seq_lens.tolist()
        begins = [end - 1 for end in ends] if batch.forward_mode.is_decode() else batch.extend_prefix_lens.tolist()
        prompts = batch.sampling_info.megasharp.prompt_S.tolist()
        names: Tensor = get_req_to_token_pool().req_to_token[batch.req_pool_indices]
        seen_S = seen_in_step(prompts, begins, ends, self._length)
        self.seen = [(seen, slots[names[row, seen.keys_K].long()]) for row, seen in enumerate(seen_S)]


class _WindowedAttention(nn.Module):
    """An attention layer whose keys are in the memory's pool; of `layer`, SGLang's own, only number and sizes count."""

    def __init__(self, layer: Any, window: Window) -> None:
        super().__init__()
        self._layer, self._window = layer, window

    def forward(self, q: Tensor, k: Tensor, v: Tensor, forward_batch: Any, **kwargs: Any) -> Tensor:
        """Attend with `q` [tokens, heads * head_dim]; returns the same shape."""
        pool, number, size = get_token_to_kv_pool(), self._layer.layer_id, self._layer.head_dim
        where = KVWriteLoc(forward_batch.out_cache_loc, self._window.written_T)
        pool.set_kv_buffer(self._layer, where, k.view(len(k), -1, size), v.view(len(v), -1, size))
        keys, values, queries = pool.get_key_buffer(number), pool.get_value_buffer(number), q.view(len(q), -1, size)
        parts = [
            attend(queries[seen.queries], keys[slots], values[slots], seen, self._layer.scaling)
            for seen, slots in self._window.seen
        ]
        return torch.cat(parts).reshape(q.shape)


class _RepeatedHeads(nn.Module):
    """An attention layer that gets each key-value head several times, so that it fills the policy's heads in the pool.

    Query heads of a key-value head are adjacent, and so are its copies: each copy serves an equal share of them.
    """

    def __init__(self, inner: nn.Module, head_dim: int, repeats: int) -> None:
        super().__init__()
        self._inner, self._head_dim, self._repeats = inner, head_dim, repeats

    def forward(self, q: Tensor, k: Tensor, v: Tensor, forward_batch: Any, **kwargs: Any) -> Any:
        """Attend with `q` [tokens, heads * head_dim] to `k` and `v` [tokens, kv_heads * head_dim], each head repeated.

        Returns what the inner layer does.
        """
        return self._inner(q, self._repeated(k), self._repeated(v), forward_batch, **kwargs)

    def _repeated(self, heads: Tensor) -> Tensor:
        split = heads.view(heads.shape[0], -1, self._head_dim)
        return split.repeat_interleave(self._repeats, dim=1).flatten(1)


class _SplitHeads(nn.Module):
    """An attention layer in parts, each with as many key-value heads as a layer of the pool, and a layer of its own.

    Query heads of a key-value head are adjacent, so equal parts of both belong together.
    """

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        super().__init__()
        self._parts = nn.ModuleList(parts)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, forward_batch: Any, **kwargs: Any) -> Tensor:
        """Attend with `q` [tokens, heads * head_dim]; returns the same shape."""
        split = zip(*(heads.chunk(len(self._parts), dim=1) for heads in (q, k, v)), strict=True)
        outputs = [
            part(*(heads.contiguous() for heads in some), forward_batch, **kwargs)
            for part, some in zip(self._parts, split, strict=True)
        ]
        return torch.cat(outputs, dim=1)


def _move_into_pool(memory: Any, policy_config: Any, memory_config: Any, window: Window | None) -> None:
    """Number the memory's attention layers after the policy's, with the policy's number of key-value heads."""
    plan = heads_in_pool(policy_config, memory_config, get_parallel().tp_size)
    for layer in memory.model.layers:
        whole = layer.self_attn.attn
        assert isinstance(whole, RadixAttention)
        first, heads = policy_config.num_hidden_layers + whole.layer_id * plan.layers, whole.tp_k_head_num
        whole.layer_id = first
        whole.tp_k_head_num = whole.tp_v_head_num = heads * plan.repeats // plan.layers
        whole.tp_q_head_num = plan.queries
        others = [
            RadixAttention(plan.queries, whole.head_dim, whole.scaling, heads // plan.layers, number)
            for number in range(first + 1, first + plan.layers)
        ]
        parts = [each if window is None else _WindowedAttention(each, window) for each in (whole, *others)]
        layer.self_attn.attn = parts[0] if plan.layers == 1 else _SplitHeads(parts)
        if plan.repeats > 1:
            layer.self_attn.attn = _RepeatedHeads(parts[0], whole.head_dim, plan.repeats)


@contextmanager
def _without_the_policys_schedule() -> Iterator[None]:
    """FlashAttention-3 plans a step by the policy's head counts; the memory's layers let each call plan for itself."""
    metadata = getattr(get_attn_backend(), "forward_metadata", None)
    schedule = getattr(metadata, "scheduler_metadata", None)
    if schedule is None:
        yield
        return
    assert metadata is not None
    metadata.scheduler_metadata = None
    try:
        yield
    finally:
        metadata.scheduler_metadata = schedule


EntryClass = [Olmo2WithMemory, Qwen2WithMemory, Qwen3MoeWithMemory, Qwen3WithMemory]
