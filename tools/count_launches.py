"""Kernels that one layer launches on a GPU, counted by operator on a CPU, and row counts of packed micro-batches.

    python tools/count_launches.py              # both tables of decision 62; seconds on one core, no GPU

Launches: one layer of a run's learner goes forward and backward in bfloat16, and torch's operators that compute are
counted; those that only view or allocate are not. Stand-ins count what a GPU is assumed to launch where a CPU differs:
one kernel for a norm and two backward, one each for the MLP's activation, one and three for attention.
Shapes: steps of 512 and 1,024 responses of `tools/bench_batching.py`, planned for 4 and 16 ranks, with rows of each
micro-batch rounded up: padding, and different row counts in a step and in four, of the best case to the worst.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from bench_batching import DISTRIBUTIONS, MODELS, draw
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.utils._python_dispatch import TorchDispatchMode

from megasharp.algos.base import Needs
from megasharp.batching.planning import plan
from megasharp.common.layout import ParallelLayout
from megasharp.common.records import Segments
from megasharp.config.policy import PolicyConfig
from megasharp.convert.hf_folder import read_config
from megasharp.learner import attention
from megasharp.learner.layer_spec import SwiGLU
from megasharp.learner.learner import POLICY, LearnerSettings, Rank
from megasharp.learner.norms import RMSNorm
from megasharp.learner.packed import packed_rows
from megasharp.learner.parallel import meet
from megasharp.planner.formulas import packing_flops

BUDGET, STEPS, _ROWS, _HEAD = 20_480, 4, 64, 16
_LENGTHS = [name for name in DISTRIBUTIONS if name != "equal"]
_SIZES = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
_SIZES |= {"head_dim": _HEAD, "intermediate_size": 128, "vocab_size": 64}


class Launches(TorchDispatchMode):
    """Counts the operators that compute, by name, while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Count the operator, and run it."""
        name = func.overloadpacket.__name__
        views = any(each.alias_info and not each.alias_info.is_write for each in func._schema.returns)
        if not views and not name.startswith(("empty", "new_empty", "detach", "_unsafe_view")):
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


class _StandIn(torch.autograd.Function):
    """[..., columns] of any values, by one kernel of inputs [..., any]; `backward` kernels lead back."""

    @staticmethod
    def forward(ctx: Any, launches: Launches, name: str, backward: int, columns: int, *inputs: Tensor) -> Tensor:
        ctx.launches, ctx.name, ctx.count, ctx.shapes = launches, name, backward, [each.shape for each in inputs]
        launches.found[name] += 1
        return inputs[0].new_empty((*inputs[0].shape[:-1], columns))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.launches.found[ctx.name] += ctx.count
        return None, None, None, None, *(gradients[0].new_empty(shape) for shape in ctx.shapes)


@contextmanager
def gpu_kernels(launches: Launches) -> Iterator[None]:
    """Put stand-ins in the place of what a GPU computes by kernels of its own."""
    apply: Any = partial(_StandIn.apply, launches)
    with (
        mock.patch.object(
            attention, "attend", lambda q, *kv: apply("attention", 3, q[0].numel(), q.flatten(1), *kv[:2])
        ),
        mock.patch.object(RMSNorm, "forward", lambda norm, x: apply("norm", 2, x.shape[-1], x, norm.weight)),
        mock.patch.object(SwiGLU, "forward", lambda _, x: apply("activation", 1, x.shape[-1] // 2, x)),
        launches,
    ):
        yield


def count_layer(model: str) -> tuple[Counter[str], Counter[str]]:
    """The kernels of a layer's forward and backward pass; `model` is a folder of configs/model, and made small."""
    with tempfile.TemporaryDirectory() as folder:
        config = json.loads((MODELS / model / "config.json").read_text()) | _SIZES
        (Path(folder) / "config.json").write_text(json.dumps({k: config[k] for k in config if k != "layer_types"}))
        keys = PolicyConfig(transformer_engine=False)
        settings = LearnerSettings(folder, keys, torch.bfloat16, ParallelLayout(), 1, Needs(), 1.0, 0, drawn=True)
        rank = Rank({POLICY: settings}, torch.device("cpu"))
        layer = rank.learners[POLICY]._chunks[0].decoder.layers[0]
        cos, sin = attention.rotary_tables(torch.ones(_HEAD // 2), 1.0, torch.arange(_ROWS))
        rows = packed_rows(Segments(torch.tensor([0]), torch.tensor([_ROWS]), torch.tensor([-1])), cos, sin)
        hidden = torch.zeros(_ROWS, 1, _SIZES["hidden_size"], dtype=torch.bfloat16, requires_grad=True)
        launches, gradient = Launches(), torch.ones_like(hidden)
        with gpu_kernels(launches):
            out = layer(hidden, attention_mask=None, packed_seq_params=rows)[0]
            forward = launches.found.copy()
            out.backward(gradient)
        rank.close()
    return forward, launches.found - forward


def cases() -> Iterator[list[list[int]]]:
    """Yield the rows of every micro-batch, step by step, of each distribution, size of a step and number of ranks."""
    flops = packing_flops(read_config(MODELS / "qwen3-8b")[2], chunked_head=False)
    for name, responses, ranks in product(_LENGTHS, (512, 1024), (4, 16)):
        steps = []
        for sizes in (draw(name, responses, seed).sizes(flops, shared=True) for seed in range(STEPS)):
            drafts = [draft for rank in plan(sizes, ranks, BUDGET, 1) for draft in rank]
            rows = [sum(sizes.prompt_tokens[group] for group in draft.members) for draft in drafts]
            own = [sum(sizes.tokens[i] - 1 for i in draft.responses()) for draft in drafts]
            steps.append(list(map(sum, zip(rows, own, strict=True))))
        yield steps


def main() -> None:
    """Count, and print both tables."""
    torch.set_num_threads(1)
    meet(HashStore(), 0, 1, torch.device("cpu"))
    for model in ("qwen3-8b", "qwen2.5-0.5b"):
        for way, found in zip(("forward", "backward"), count_layer(model), strict=True):
            print(f"{model:13} {way:9}{found.total():3} kernels:", *(f"{n} {name}" for name, n in found.most_common()))
    dist.destroy_process_group()
    print(f"\n{'rows in steps of':>16} {'padding':>17} {'shapes in a step':>17} {'in four steps':>14}")
    found_cases = list(cases())
    for multiple in (16, 512, 2048, 5120, BUDGET):
        rounded = [[[max(1, -(-n // multiple)) * multiple for n in step] for step in case] for case in found_cases]
        padding = [1 - sum(map(sum, a)) / sum(map(sum, b)) for a, b in zip(found_cases, rounded, strict=True)]
        one = [len(set(step)) for case in rounded for step in case]
        four = [len(set(chain(*case))) for case in rounded]
        spans = " ".join(f"{min(found):>8} to {max(found):<5}" for found in (one, four))
        print(f"{multiple:16} {min(padding):8.1%} to {max(padding):5.1%} {spans}")


if __name__ == "__main__":
    main()
