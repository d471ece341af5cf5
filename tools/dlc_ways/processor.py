"""A memory network as SGLang's custom logit processor. Imported by the engine's scheduler, in the engines' Python.

SGLang hands a processor the logits of the rows that asked for it, and the requests themselves. The network is
transformers', with a cache for each request: SGLang's own cache, batching and CUDA graph are out of a processor's
reach. It needs a server without the overlap schedule, under which a request's last token is not there yet.
"""

from __future__ import annotations

import os
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

MEMORY, MU = "DLC_WAYS_MEMORY", "DLC_WAYS_MU"


class MemoryProcessor:
    """The memory network of this process, and what it has cached of each request; SGLang makes one for each batch."""

    _network: Any = None
    _caches: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    @torch.inference_mode()
    def __call__(self, logits: Tensor, custom_param_list: list[dict[str, Any]]) -> Tensor:
        """The logits [rows, V] minus mu times the memory's."""
        mu = float(os.environ[MU])
        rows = [self._last_logits(params["__req__"]) for params in custom_param_list]
        return logits - mu * torch.stack(rows)

    def _last_logits(self, request: Any) -> Tensor:
        from transformers import DynamicCache

        cache = self._caches.setdefault(request, DynamicCache())
        tokens = [*request.origin_input_ids, *request.output_ids]
        new = torch.tensor([tokens[cache.get_seq_length() :]])
        logits: Tensor = self._loaded()(new, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
        return logits

    def _loaded(self) -> Any:
        if MemoryProcessor._network is None:
            from transformers import AutoModelForCausalLM

            MemoryProcessor._network = AutoModelForCausalLM.from_pretrained(os.environ[MEMORY]).eval()
        return MemoryProcessor._network
