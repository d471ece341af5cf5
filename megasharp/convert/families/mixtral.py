"""Mixtral: Mistral's layers with experts in place of every MLP, whose width is `intermediate_size`."""

from __future__ import annotations

from transformers import PretrainedConfig

from megasharp.convert.architecture import Architecture, Experts
from megasharp.convert.families import dense_decoder, experts
from megasharp.convert.families.family import Family


def _architecture(config: PretrainedConfig) -> Architecture:
    if config.router_jitter_noise:
        raise dense_decoder.refuse(config, "router_jitter_noise", config.router_jitter_noise, "0.0")
    mixture = Experts(
        count=int(config.num_local_experts),
        per_token=int(config.num_experts_per_tok),
        ffn=int(config.intermediate_size),
        normalised=True,
        balance_loss=float(config.router_aux_loss_coef),
    )
    experts.check(config, mixture)
    windows = (config.sliding_window,) * config.num_hidden_layers
    return dense_decoder.read_decoder(config, "mixtral", windows=windows, experts=mixture)


MIXTRAL = Family(
    hf_name="MixtralForCausalLM",
    model_types=("mixtral",),
    architecture=_architecture,
    rules=dense_decoder.VOCABULARY
    + dense_decoder.NORMS
    + dense_decoder.ATTENTION
    + experts.rules("block_sparse_moe.gate", "block_sparse_moe.experts", ("w1", "w3", "w2"), "ffn"),
)
