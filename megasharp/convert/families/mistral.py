"""Mistral and Ministral: Llama's layers, and a window over positions in every layer (Mistral) or in some (Ministral).

transformers has a class for each. A config of model_type "mistral" with `layer_types` is a Ministral to it, whatever
its `architectures` says, so the windows are read from what the config has.
"""

from __future__ import annotations

from dataclasses import replace

from transformers import PretrainedConfig

from megasharp.convert.architecture import Architecture
from megasharp.convert.families import dense_decoder
from megasharp.convert.families.family import Family


def _architecture(config: PretrainedConfig) -> Architecture:
    if getattr(config, "layer_types", None):
        windows = dense_decoder.windows_by_layer(config)
    else:
        windows = (config.sliding_window,) * config.num_hidden_layers
    return dense_decoder.read_decoder(config, "mistral", windows=windows)


MISTRAL = Family(
    hf_name="MistralForCausalLM",
    model_types=("mistral", "ministral"),
    architecture=_architecture,
    rules=dense_decoder.VOCABULARY + dense_decoder.NORMS + dense_decoder.ATTENTION + dense_decoder.GATED_MLP,
)
MINISTRAL = replace(MISTRAL, hf_name="MinistralForCausalLM")
