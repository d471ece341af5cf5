"""Megatron parameters by our tables against mbridge's, an independent converter, for tiny random models.

    python tools/compare_with_mbridge.py

mbridge and einops, which it forgets to ask for, come with the extra `test`.
Compared for every parameter: which Hugging Face tensors it is made of, its value whole, and each rank's part at
tp = 2 (of experts: expert tensor parallelism); and of Megatron's configuration every field that both set from
config.json. The program fails at a difference. mbridge reads the names that Transformer Engine gives norms, which our
tables have as aliases, and those of its grouped experts. Of a router's settings it takes some from no config: these are
compared with transformers elsewhere.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from megasharp.convert.hf_folder import HFReader, megatron_tensor
from megasharp.learner.meta_models import alone, blank_model

TP = 2
_SIZES: dict[str, Any] = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    # mbridge pads no vocabulary by itself.
    "vocab_size": 54,
    "max_position_embeddings": 64,
}
# mbridge notes a tied head in a table that all models of a family share, so the tied ones come last.
MODELS: dict[str, PreTrainedConfig] = {
    "qwen2": Qwen2Config(**_SIZES, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**_SIZES, head_dim=8, tie_word_embeddings=False),
    "llama": LlamaConfig(**_SIZES, tie_word_embeddings=False),
    "qwen3_moe": Qwen3MoeConfig(
        **_SIZES, head_dim=8, tie_word_embeddings=False, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
    "mixtral": MixtralConfig(
        **_SIZES, head_dim=8, tie_word_embeddings=False, num_local_experts=4, num_experts_per_tok=2
    ),
    "qwen2, tied": Qwen2Config(**_SIZES, tie_word_embeddings=True),
    "qwen3, tied": Qwen3Config(**_SIZES, head_dim=8, tie_word_embeddings=True),
}
_SETTINGS = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "ffn_hidden_size",
    "layernorm_epsilon",
    "add_qkv_bias",
    "add_bias_linear",
    "qk_layernorm",
    "gated_linear_unit",
    "normalization",
)
_EXPERTS_SETTINGS = ("num_moe_experts", "moe_ffn_hidden_size", "moe_router_topk", "moe_router_load_balancing_type")
_LOCAL_EXPERT = re.compile(r"\.local_experts\.(\d+)\.(linear_fc[12])\.weight$")


def main() -> int:
    """Compare every model; returns the exit code."""
    print(f"mbridge {version('mbridge')}, megatron-core {version('megatron-core')}")
    failed = False
    for name, config in MODELS.items():
        with tempfile.TemporaryDirectory(prefix="compare-with-mbridge-") as folder:
            save(Path(folder), config)
            found = list(compare(Path(folder)))
        differing = [line for line in found if line is not None]
        failed |= bool(differing)
        print(f"{name}: {len(found)} parameters and settings, {len(differing)} differ")
        print("".join(f"  {line}\n" for line in differing), end="")
    return 1 if failed else 0


def save(folder: Path, config: PreTrainedConfig) -> None:
    """A model of that config, every parameter random."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.save_pretrained(folder)


def compare(folder: Path) -> Iterator[str | None]:
    """For each setting and parameter: what differs, or None."""
    # Imported here because megasharp itself does not need it.
    from mbridge import AutoBridge

    with alone() as place, HFReader(folder) as reader:
        model = blank_model(reader.architecture, place, torch.float32)
        bridge = AutoBridge.from_config(reader.config, dtype=torch.float32)
        for key in (*_SETTINGS, *(_EXPERTS_SETTINGS if reader.architecture.experts else ())):
            ours, theirs = getattr(model.config, key), getattr(bridge.config, key)
            yield None if ours == theirs else f"{key}: {ours}, theirs {theirs}"
        for name, _ in model.named_parameters():
            yield compare_parameter(reader, bridge, name)


def compare_parameter(reader: HFReader, bridge: Any, name: str) -> str | None:
    """What differs of one parameter."""
    family, arch = reader.family, reader.architecture
    rule, at = family.rule_for(arch, name)
    # Before a router a norm stands alone.
    fused = rule.aliases and not (arch.experts and "pre_mlp_layernorm" in name)
    alias = at.name(rule.aliases[0]) if fused else _LOCAL_EXPERT.sub(r".\2.weight\1", name)
    sources = [at.name(source) for source in rule.hf]
    named = bridge._weight_name_mapping_mcore_to_hf(alias)
    if named != sources:
        return f"{name}: made of {sources}, theirs of {named}"
    theirs = bridge._weight_to_mcore_format(alias, [reader.tensor(source).clone() for source in named])
    if not torch.equal(megatron_tensor(reader, family, arch, name, 0, 1), theirs):
        return f"{name}: another value"
    parts = [megatron_tensor(reader, family, arch, name, rank, TP) for rank in range(TP)]
    split = bridge._weight_split_across_tp(alias, theirs, parts[0], TP)
    same = all(torch.equal(part, other) for part, other in zip(parts, split, strict=True))
    return None if same else f"{name}: another part at tp={TP}"


if __name__ == "__main__":
    sys.exit(main())
