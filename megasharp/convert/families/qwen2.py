"""Qwen2 and Qwen2.5 dense: biases on query, key and value, no query-key norms."""

from __future__ import annotations

from transformers import PretrainedConfig

from megasharp.convert.architecture import Architecture
from megasharp.convert.families import decoder
from megasharp.convert.families.base import Family


def _architecture(config: PretrainedConfig) -> Architecture:
    return decoder.read_decoder(config, "qwen2", qkv_bias=True, windows=decoder.windows_by_layer(config))


QWEN2 = Family(
    hf_name="Qwen2ForCausalLM",
    model_types=("qwen2",),
    architecture=_architecture,
    rules=decoder.VOCABULARY + decoder.NORMS + decoder.ATTENTION + decoder.QKV_BIAS + decoder.GATED_MLP,
)
