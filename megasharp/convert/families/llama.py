"""Llama 3.x dense: no biases, no query-key norms; positions scaled by the rule "llama3" (transformers' name)."""

from __future__ import annotations

from transformers import PretrainedConfig

from megasharp.convert.architecture import Architecture
from megasharp.convert.families import dense_decoder
from megasharp.convert.families.family import Family


def _architecture(config: PretrainedConfig) -> Architecture:
    # Megatron has one switch for the biases of the output projection and of the MLP; here each has its own.
    for key in ("attention_bias", "mlp_bias"):
        if getattr(config, key):
            raise dense_decoder.refuse(config, key, True, "false")
    return dense_decoder.read_decoder(config, "llama")


LLAMA = Family(
    hf_name="LlamaForCausalLM",
    model_types=("llama",),
    architecture=_architecture,
    rules=dense_decoder.VOCABULARY + dense_decoder.NORMS + dense_decoder.ATTENTION + dense_decoder.GATED_MLP,
)
