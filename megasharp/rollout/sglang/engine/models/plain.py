"""SGLang's own models under their own names, for engines without a memory network."""

from __future__ import annotations

from typing import Any

from megasharp.rollout.sglang.engine import sglang_internals
from megasharp.rollout.sglang.engine.sglang_internals import (
    LlamaForCausalLM,
    Olmo2ForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)


class MistralForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
    """As in SGLang, whose file imports image models. `trainer/resolve/engine_settings.py` refuses sliding windows."""


class MinistralForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
    """The same layers; SGLang has no class of this name."""


class Qwen3MoeForCausalLM(sglang_internals.Qwen3MoeForCausalLM):  # type: ignore[misc]
    """As in SGLang, which leaves a tied model's head as it was drawn."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__(config, quant_config=quant_config, prefix=prefix)
        tie_head(self, config)


class MixtralForCausalLM(sglang_internals.MixtralForCausalLM):  # type: ignore[misc]
    """As in SGLang, whose routers do not know their layers, by which routed experts are recorded."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__(config, quant_config=quant_config, prefix=prefix)
        tie_head(self, config)
        for number, layer in enumerate(self.model.layers):
            layer.block_sparse_moe.topk.layer_id = number


def tie_head(model: Any, config: Any) -> None:
    """Let a tied model's head be its embedding."""
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight


EntryClass = [
    LlamaForCausalLM,
    MinistralForCausalLM,
    MistralForCausalLM,
    MixtralForCausalLM,
    Olmo2ForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
]
