"""Conversions stream: what a model takes beyond a tiny one is a small part of its weights, in either direction."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megasharp.convert.hf_folder import expected_hf_shapes, read_config
from megasharp.convert.hf_write import write_hf_folder

# The largest parameter is 17 MB, a fiftieth of the large model's weights.
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 64,
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
LAYERS = 26
# Without waiting for the disk, which takes no memory: a tiny model there and back, then the large one.
# After each comes the highest resident memory so far, in kB.
PEAKS = """
import json, os, sys
from pathlib import Path
from megasharp.learner.conversion import hf_to_megatron, megatron_to_hf

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))

os.fsync = lambda _: None
peaks = []
for model in map(Path, sys.argv[1:]):
    megatron, back = model.with_suffix(".megatron"), model.with_suffix(".back")
    hf_to_megatron(model, megatron)
    peaks.append(peak())
    megatron_to_hf(megatron, back)
    peaks.append(peak())
print(json.dumps(peaks))
"""


def make(folder: Path, layers: int) -> int:
    """A checkpoint of many files; returns its weights' bytes."""
    described = folder.with_suffix(".config")
    described.mkdir()
    (described / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
    _, family, arch = read_config(described)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for number, (name, shape) in enumerate(expected_hf_shapes(family, arch).items()):
            yield name, torch.full(shape, number, dtype=torch.bfloat16)

    write_hf_folder(folder, described, tensors(), max_shard_bytes=200_000_000)
    return 2 * arch.parameter_count()


@pytest.fixture
def folder() -> Iterator[Path]:
    """Goes at the end: gigabytes, of which pytest would keep three."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.mark.long("ranks")
def test_a_model_takes_less_than_a_quarter_of_its_weights_beyond_a_tiny_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    make(folder / "tiny", 1)
    size = make(folder / "large", LAYERS)
    assert size > 0.8e9 and len(list((folder / "large").glob("*.safetensors"))) > 3
    models = [str(folder / name) for name in ("tiny", "large")]
    done = subprocess.run([sys.executable, "-c", PEAKS, *models], check=True, stdout=subprocess.PIPE, text=True)
    _, baseline, there, back = (1024 * kilobytes for kilobytes in json.loads(done.stdout))
    assert there - baseline < 0.25 * size, f"hf-to-megatron: {there - baseline} of {size} bytes"
    assert back - baseline < 0.25 * size, f"megatron-to-hf: {back - baseline} of {size} bytes"
    print(f"beyond {baseline}: {there - baseline} and {back - baseline} bytes for {size} bytes of weights")
