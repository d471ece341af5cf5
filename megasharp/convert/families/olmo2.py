"""OLMo 2 (arXiv 2501.00656): norms behind attention and MLP, not before, and over all heads of queries and of keys.

OLMo 3 has the same layers, with windows in three of four. Its rotary positions are scaled in the others alone, and here
a model has one table of them.
"""

from __future__ import annotations

from transformers import PretrainedConfig

from megasharp.convert.architecture import Architecture
from megasharp.convert.families import dense_decoder
from megasharp.convert.families.family import Family


def _architecture(config: PretrainedConfig) -> Architecture:
    # It also biases the output projection, which Megatron cannot have without biasing the MLP.
    if config.attention_bias:
        raise dense_decoder.refuse(config, "attention_bias", True, "false")
    # Its configuration has no such key; transformers reads one that is there all the same, and SGLang does not.
    head_dim, derived = getattr(config, "head_dim", None), config.hidden_size // config.num_attention_heads
    if head_dim not in (None, derived):
        raise dense_decoder.refuse(config, "head_dim", head_dim, f"hidden_size / num_attention_heads = {derived}")
    return dense_decoder.read_decoder(config, "olmo2", qk_norm_whole=True, post_norm=True)


OLMO2 = Family(
    hf_name="Olmo2ForCausalLM",
    model_types=("olmo2",),
    architecture=_architecture,
    rules=dense_decoder.VOCABULARY
    + dense_decoder.POST_NORMS
    + dense_decoder.ATTENTION
    + dense_decoder.QK_NORM_WHOLE
    + dense_decoder.GATED_MLP,
)
