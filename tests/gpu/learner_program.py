"""Some steps of a small learner on one device, as JSON: figures, a digest of its weights, and memory.

    export PYTHONPATH=.:tests/multirank:tests/multirank/learner
    python tests/gpu/learner_program.py FOLDER '{"dtype": "bfloat16", "deterministic": true}'

A process for each case, because deterministic algorithms, and what Megatron finds of Transformer Engine, are a
process's for good. `device` may be cpu, where the program itself can be tried. Other keys are those of LearnerSettings.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import rehearsal
import torch
import torch.distributed as dist
from policies import changed, optimizer_settings, ragged_sequences, recipe, settings
from torch._C._distributed_c10d import HashStore

from megasharp.batching.delivery import updates_of
from megasharp.batching.packing import PackLayout, pack, row_multiple
from megasharp.common.layout import ParallelLayout
from megasharp.common.records import StepBatch, as_dtype
from megasharp.learner.learner import POLICY, LearnerSettings, Rank
from megasharp.learner.parallel import device_of_rank, meet

STEPS = 3
METHOD = recipe(("grpo",), mini_batches=2)


def batch_on(kind: str) -> StepBatch:
    """Two mini-batches, whose rows fill what kernels of 8 bits ask for."""
    multiple = row_multiple(ParallelLayout(), kind)
    return pack(ragged_sequences(groups=12), PackLayout(1, 128, 2, multiple, 40.0), seed=5)


def settings_of(folder: str, given: dict[str, Any]) -> LearnerSettings:
    """Without the tests' own defaults of CPUs; LoRA and FP8 by their arguments."""
    if "fp8" in given:
        given["fp8"], given["fp8_recipe"] = given["fp8"]
    given["dtype"] = as_dtype(given.get("dtype", "bfloat16"))
    optimizer = optimizer_settings(clip_grad=0.1, weight_decay=0.1)
    own = settings(folder, ParallelLayout(), METHOD.needs, optimizer, diagnostics=None)
    return changed(own, **given)


def main(folder: str, given: dict[str, Any]) -> dict[str, Any]:
    """Steps; memory is that of torch's allocator, after the learner was built and at its peak."""
    device = device_of_rank(torch.device(given.pop("device", "cuda")), 0)
    meet(HashStore(), 0, 1, device)
    rank = Rank({POLICY: settings_of(folder, given)}, device)
    learner, on_gpu = rank.learners[POLICY], device.type == "cuda"
    built = torch.cuda.memory_allocated() if on_gpu else 0
    figures, batch = [], batch_on(device.type)
    for _ in range(STEPS):
        stats = learner.step(updates_of(batch)[0], METHOD)
        assert stats is not None
        figures.append([stats.loss, stats.grad_norm])
    weights = {name: tensor.detach().cpu() for name, tensor in learner.export_weights()}
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(weights[name].contiguous().view(torch.uint8).numpy().tobytes())
    found = {
        "figures": figures,
        "digest": digest.hexdigest(),
        "parameters": sum(tensor.numel() for tensor in weights.values()),
        "norm": float(sum(tensor.double().square().sum() for tensor in weights.values())) ** 0.5,
        "built": built,
        "peak": torch.cuda.max_memory_allocated() if on_gpu else 0,
        "fused": sum(name.endswith("layer_norm_weight") for c in learner._chunks for name, _ in c.named_parameters()),
    }
    rank.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    return found


if __name__ == "__main__":
    if rehearsal.asked():
        rehearsal.begin()
    print(json.dumps(main(sys.argv[1], json.loads(sys.argv[2]))))
