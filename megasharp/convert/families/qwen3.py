"""Qwen3 dense: per-head RMS norms on queries and keys, head_dim free of hidden/heads, no biases."""

from __future__ import annotations

from transformers import PretrainedConfig

from megasharp.convert.architecture import Architecture
from megasharp.convert.families import dense_decoder
from megasharp.convert.families.family import Family


def _architecture(config: PretrainedConfig) -> Architecture:
    # It also biases the output projection, which Megatron cannot have without biasing the MLP.
    if config.attention_bias:
        raise dense_decoder.refuse(config, "attention_bias", True, "false")
    return dense_decoder.read_decoder(config, "qwen3", qk_norm=True, windows=dense_decoder.windows_by_layer(config))


QWEN3 = Family(
    hf_name="Qwen3ForCausalLM",
    model_types=("qwen3",),
    architecture=_architecture,
    rules=dense_decoder.VOCABULARY
    + dense_decoder.NORMS
    + dense_decoder.ATTENTION
    + dense_decoder.QK_NORM
    + dense_decoder.GATED_MLP,
)
