"""Llama 3.x dense: no biases, no query-key norms; positions scaled by the rule "llama3" (transformers' name)."""

from __future__ import annotations

from transformers import PretrainedConfig

from megasharp.convert.architecture import Architecture
from megasharp.convert.families import decoder
from megasharp.convert.families.base import Family


def _architecture(config: PretrainedConfig) -> Architecture:
    # Megatron has one switch for the biases of the output projection and of the MLP; here each has its own.
    for key in ("attention_bias", "mlp_bias"):
        if getattr(config, key):
            raise decoder.refuse(config, key, True, "false")
    return decoder.read_decoder(config, "llama")


LLAMA = Family(
    hf_name="LlamaForCausalLM",
    model_types=("llama",),
    architecture=_architecture,
    rules=decoder.VOCABULARY + decoder.NORMS + decoder.ATTENTION + decoder.GATED_MLP,
)
