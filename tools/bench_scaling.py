"""How a step's cost on a CPU grows with the length of responses and with their number: slopes in log-log.

    python tools/bench_scaling.py               (part of: make bench)

The quickstart's network with random weights and room for long responses. Sampling (the in-process engine) and the
update (annotation, forward, backward, optimizer) are timed apart. Each slope stands beside that of the FLOPs, in which
attention grows with the square of the length; a slope below it says that there is a constant part.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from results import Figure, report

from megasharp.algos.base import Needs, OldLogp
from megasharp.algos.build_recipe import build_recipe
from megasharp.algos.recipe import Recipe
from megasharp.batching.packing import PackLayout, pack, row_multiple
from megasharp.common.layout import ParallelLayout
from megasharp.common.records import GenerateRequest, SamplingParams, Sequence
from megasharp.config.policy import PolicyConfig
from megasharp.convert.hf_folder import read_config
from megasharp.convert.model_folder import CONFIG_FILE
from megasharp.learner.learner import POLICY, LearnerSettings
from megasharp.learner.ranks.all_ranks import OneRank, RanksLearner
from megasharp.planner.formulas import forward_flops_per_token
from megasharp.rollout.inprocess import InProcessEngine

BASE = Path(__file__).resolve().parents[1] / "examples" / "quickstart" / "base"
CPU = torch.device("cpu")
# By how much a slope may be above that of the FLOPs: small matrices are slow, and so are those that leave the caches.
ROOM = 0.15
PROMPT = 16
# Of the responses whose number changes.
LENGTH = 128


@dataclass(frozen=True, slots=True)
class Point:
    """Seconds of one size: `count` responses of `length` tokens."""

    length: int
    count: int
    sampling: float
    update: float


class Bench:
    """An engine and a learner with the same random weights."""

    def __init__(self, folder: Path, longest: int) -> None:
        config = json.loads((BASE / CONFIG_FILE).read_text())
        (folder / CONFIG_FILE).write_text(json.dumps(config | {"max_position_embeddings": longest + PROMPT}))
        self._recipe: Recipe = build_recipe(("grpo",), {}, reduction=None, constant=1.0, mini_batches=1)
        settings = LearnerSettings(
            folder=str(folder),
            policy=PolicyConfig(),
            dtype=torch.float32,
            layout=ParallelLayout(),
            total_steps=1000,
            needs=self._recipe.needs,
            temperature=1.0,
            seed=0,
            drawn=True,
        )
        self._learner = RanksLearner(OneRank({POLICY: settings}, CPU))
        self._engine = InProcessEngine(folder, dtype=torch.float32, device=CPU)
        self._engine.load_weights(0, self._learner.export_weights())
        self._architecture = read_config(folder)[2]

    def flops(self, point: Point) -> float:
        """Of one forward pass over the responses and as many prompts."""
        tokens = PROMPT + point.length
        return point.count * tokens * forward_flops_per_token(self._architecture, tokens / 2)

    def point(self, length: int, count: int, repeats: int) -> Point:
        """Medians; one step more goes before, which does not count."""
        rows = [self._step(length, count) for _ in range(repeats + 1)][1:]
        return Point(length, count, *(statistics.median(column) for column in zip(*rows, strict=True)))

    def _step(self, length: int, count: int) -> tuple[float, float]:
        prompts = [tuple(2 + (group + i) % 20 for i in range(PROMPT)) for group in range(count // 4)]
        requests = [GenerateRequest(prompt, tuple(range(4 * g, 4 * g + 4))) for g, prompt in enumerate(prompts)]
        began = time.perf_counter()
        groups = self._engine.generate(requests, SamplingParams(max_tokens=length))
        sampled = time.perf_counter()
        sequences = [
            Sequence(
                group_id=f"group-{number}",
                index=index,
                group_size=4,
                group_correct=2,
                seed=4 * number + index,
                tokens=torch.cat([torch.tensor(prompts[number]), completion.tokens]),
                prompt_length=PROMPT,
                reward=float(index % 2),
                correct=bool(index % 2),
                advantage_T=torch.full((length,), 1.0 - 2.0 * (index % 2), dtype=torch.float64),
                mask_T=torch.ones(length),
                sampler_logp_T=completion.sampler_logp,
                policy_logp_T=completion.policy_logp,
            )
            for number, group in enumerate(groups)
            for index, completion in enumerate(group)
        ]
        batch = pack(sequences, PackLayout(1, 8192, 1, row_multiple(ParallelLayout(), "cpu"), float(length)), seed=0)
        batch = self._learner.annotate(batch, Needs(old_logp=OldLogp.BEFORE_STEP))
        self._learner.step(batch, self._recipe)
        return sampled - began, time.perf_counter() - sampled


def slope(points: list[tuple[float, float]]) -> float:
    """Of the least-squares line through the logarithms."""
    x, y = zip(*[(math.log(size), math.log(seconds)) for size, seconds in points], strict=True)
    return statistics.linear_regression(x, y).slope


def main() -> None:
    """Measure both ways and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 128, 256, 512, 1024])
    parser.add_argument("--counts", type=int, nargs="+", default=[16, 32, 64, 128, 256])
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), max(LENGTH, *arguments.lengths))
        by_length = [bench.point(length, 16, arguments.repeats) for length in arguments.lengths]
        by_count = [bench.point(LENGTH, count, arguments.repeats) for count in arguments.counts]
    figures = []
    for name, points in (("length", by_length), ("count", by_count)):
        for point in points:
            size = f"{point.count} responses of {point.length}"
            figures.append(Figure(f"sampling, {size}", point.sampling, "s", repeats=arguments.repeats))
            figures.append(Figure(f"update, {size}", point.update, "s", repeats=arguments.repeats))
        work = slope([(float(getattr(point, name)), bench.flops(point)) for point in points])
        figures.append(Figure(f"slope of FLOPs with {name}", work, ""))
        for stage in ("sampling", "update"):
            pairs = [(float(getattr(point, name)), float(getattr(point, stage))) for point in points]
            figures.append(Figure(f"slope of {stage} with {name}", slope(pairs), "", bar=work + ROOM))
    report("bench_scaling", figures, {"threads": 1, "prompt": PROMPT, "model": "quickstart, random weights"})


if __name__ == "__main__":
    main()
