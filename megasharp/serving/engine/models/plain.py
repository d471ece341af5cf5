"""SGLang's own models under their own names, for engines without a memory network."""

from __future__ import annotations

from megasharp.serving.engine.seams import LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM


class MistralForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
    """As SGLang's, whose file imports image models besides. Windows are not heeded: `build/engines.py` refuses them."""


class MinistralForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
    """The same layers; SGLang has no class of this name."""


EntryClass = [LlamaForCausalLM, MinistralForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM]
