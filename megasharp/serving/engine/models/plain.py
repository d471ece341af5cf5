"""SGLang's own Qwen models under their own names, for engines without a memory network."""

from __future__ import annotations

from megasharp.serving.engine.seams import Qwen2ForCausalLM, Qwen3ForCausalLM

EntryClass = [Qwen2ForCausalLM, Qwen3ForCausalLM]
