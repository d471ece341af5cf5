"""Qwen3 dense: per-head RMS norms on queries and keys, head_dim free of hidden/heads, no biases."""

from __future__ import annotations

from transformers import PretrainedConfig

from megasharp.convert.architecture import Architecture
from megasharp.convert.families import decoder
from megasharp.convert.families.base import Family


def _architecture(config: PretrainedConfig) -> Architecture:
    # It also biases the output projection, which Megatron cannot have without biasing the MLP.
    if config.attention_bias:
        raise decoder.refuse(config, "attention_bias", True, "false")
    return decoder.read_decoder(config, "qwen3", qk_norm=True, windows=decoder.windows_by_layer(config))


QWEN3 = Family(
    hf_name="Qwen3ForCausalLM",
    model_types=("qwen3",),
    architecture=_architecture,
    rules=decoder.VOCABULARY + decoder.NORMS + decoder.ATTENTION + decoder.QK_NORM + decoder.GATED_MLP,
)
