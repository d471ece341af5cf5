"""The PEFT library itself reads what `megatron-to-peft` writes: the same model as the merged export."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megasharp.learner.conversion import megatron_to_hf, megatron_to_peft
from tests.unit.convert.adapted import save_adapted
from tests.unit.convert.conftest import SIZES
from tests.unit.families import new_model


@pytest.mark.long("ranks")
@pytest.mark.parametrize(("family", "tied"), [("qwen2", True), ("qwen2", False), ("olmo2", False)])
def test_peft_finds_the_base_and_makes_the_merged_exports_logits(tmp_path: Path, family: str, tied: bool) -> None:
    # Of no concern to who collects the other tests.
    from peft import AutoPeftModelForCausalLM

    torch.manual_seed(0)
    sizes = {**SIZES, "initializer_range": 0.2, "tie_word_embeddings": tied}
    new_model(family, sizes, head_dim=6).save_pretrained(tmp_path / "base")
    save_adapted(tmp_path / "base", tmp_path / "checkpoint", scale=0.3)
    megatron_to_hf(tmp_path / "checkpoint", tmp_path / "exported")
    megatron_to_peft(tmp_path / "checkpoint", tmp_path / "adapter")
    adapted = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    base, exported = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("base", "exported"))
    tokens = torch.arange(53)[None]
    with torch.no_grad():
        expected = exported(tokens).logits
        assert (adapted(tokens).logits - expected).abs().max() < 1e-5 * expected.abs().max()
        assert (base(tokens).logits - expected).abs().max() > 1e-2 * expected.abs().max()
    merged = adapted.merge_and_unload().state_dict()
    for name, tensor in load_file(tmp_path / "exported" / "model.safetensors").items():
        assert torch.allclose(merged[name], tensor, rtol=0.0, atol=1e-6), name
