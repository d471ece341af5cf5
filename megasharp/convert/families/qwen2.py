"""Qwen2 and Qwen2.5 dense: biases on query, key and value, no query-key norms."""

from __future__ import annotations

from transformers import PretrainedConfig

from megasharp.convert.architecture import Architecture
from megasharp.convert.families import dense_decoder
from megasharp.convert.families.family import Family


def _architecture(config: PretrainedConfig) -> Architecture:
    return dense_decoder.read_decoder(config, "qwen2", qkv_bias=True, windows=dense_decoder.windows_by_layer(config))


QWEN2 = Family(
    hf_name="Qwen2ForCausalLM",
    model_types=("qwen2",),
    architecture=_architecture,
    rules=dense_decoder.VOCABULARY
    + dense_decoder.NORMS
    + dense_decoder.ATTENTION
    + dense_decoder.QKV_BIAS
    + dense_decoder.GATED_MLP,
)
