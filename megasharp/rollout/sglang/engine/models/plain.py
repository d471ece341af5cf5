"""SGLang's own models under their own names, for engines without a memory network."""

from __future__ import annotations

from megasharp.rollout.sglang.engine.sglang_internals import LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM


class MistralForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
    """As in SGLang, whose file imports image models. `trainer/resolve/engine_settings.py` refuses sliding windows."""


class MinistralForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
    """The same layers; SGLang has no class of this name."""


EntryClass = [LlamaForCausalLM, MinistralForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM]
