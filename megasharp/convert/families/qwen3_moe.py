"""Qwen3's mixtures of experts (30B-A3B, 235B-A22B): its dense layers with experts in place of every MLP.

Coder and the 2507 models are of this kind too. A layer without experts, which the config allows, no published model
has.
"""

from __future__ import annotations

from transformers import PretrainedConfig

from megasharp.convert.architecture import Architecture, Experts
from megasharp.convert.families import dense_decoder, experts
from megasharp.convert.families.family import Family


def _architecture(config: PretrainedConfig) -> Architecture:
    if config.attention_bias:
        raise dense_decoder.refuse(config, "attention_bias", True, "false")
    if config.mlp_only_layers:
        raise dense_decoder.refuse(config, "mlp_only_layers", config.mlp_only_layers, "[]")
    if config.decoder_sparse_step != 1:
        raise dense_decoder.refuse(config, "decoder_sparse_step", config.decoder_sparse_step, "1")
    if config.use_sliding_window:
        raise dense_decoder.refuse(config, "use_sliding_window", True, "false")
    mixture = Experts(
        count=int(config.num_experts),
        per_token=int(config.num_experts_per_tok),
        ffn=int(config.moe_intermediate_size),
        normalised=bool(config.norm_topk_prob),
        balance_loss=float(config.router_aux_loss_coef),
    )
    experts.check(config, mixture)
    return dense_decoder.read_decoder(config, "qwen3_moe", qk_norm=True, experts=mixture)


QWEN3_MOE = Family(
    hf_name="Qwen3MoeForCausalLM",
    model_types=("qwen3_moe",),
    architecture=_architecture,
    rules=dense_decoder.VOCABULARY
    + dense_decoder.NORMS
    + dense_decoder.ATTENTION
    + dense_decoder.QK_NORM
    + experts.rules("mlp.gate", "mlp.experts", ("gate_proj", "up_proj", "down_proj"), "expert_ffn"),
)
