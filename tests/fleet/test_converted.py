"""SGLang reads a folder that was converted to Megatron and back, with its several files, as the model it came from."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import errors, make_model, running, tensors_of

from megasharp.learner.conversion import hf_to_megatron, megatron_to_hf
from megasharp.rollout.sglang.bucket import checksum

pytestmark = pytest.mark.long("fleet-runs")


def test_an_engine_starts_from_a_converted_folder(tmp_path: Path) -> None:
    source, back = tmp_path / "source", tmp_path / "back"
    model = make_model(source, "policy2")
    hf_to_megatron(source, tmp_path / "megatron", tp=2)
    megatron_to_hf(tmp_path / "megatron", back, max_shard_bytes=400_000)
    assert len(list(back.glob("model-*-of-*.safetensors"))) > 1
    prompt, sampling = list(range(1, 30)), {"max_new_tokens": 12, "ignore_eos": True}
    with running(tmp_path / "engine", back, None) as engine:
        assert engine.checksums() == [{name: checksum(tensor) for name, tensor in tensors_of(model)}]
        (answer,) = engine.generate([prompt], [sampling])
    assert errors(answer, prompt, sampling, model, None)["policy"] <= 1e-5
