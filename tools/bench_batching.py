"""How well and how fast a training step is packed: padding, balance over data-parallel ranks, seconds of planning.

    python tools/bench_batching.py                          # all cases, a few minutes on one core
    python tools/bench_batching.py --seeds 1 --dp 8 64      # fewer

Groups of 16 responses whose lengths are drawn from four distributions (in tokens; prompts evenly from 50 to 500), with
prompts shared within a group and not, for every number of data-parallel ranks and every token budget asked for. FLOPs
are those of --model, a folder of configs/model. Of a distribution the table has the worst of all cases:

    padding        rows that only make lengths divide, over all rows, if they must divide by 16 (a GPU, no tensor
                   parallelism) and by 128 (a GPU with tp 8, or a CPU)
    DP imbalance   FLOPs of the largest rank over the ranks' mean, minus 1, without padding. Where one response alone is
                   more than 5 % above the mean no plan can keep the bar, and the note says so
    micro-batches  of a rank, above the least that tokens and budget allow: each group's prompt as often as a group that
                   long needs it, responses over the budget alone, and nothing lost where one ends; median of all cases
    in step        if ranks met after every micro-batch, how much longer than the mean of ranks that would take
    prompt copies  FLOPs of further copies of prompts, over all FLOPs
    planning       milliseconds of CPU time of one thread to decide what goes where, median of all cases; as timeit has
                   it, without Python's garbage collection, which now and then goes through all of a process's objects
    pack()         the same for all of a step, tensors included
"""

from __future__ import annotations

import argparse
import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from results import Figure, report, unusual

from megasharp.batching.packing import GPU_ROWS, PackLayout, pack
from megasharp.batching.planning import Draft, Flops, Sizes, imbalance, loads, measure, plan
from megasharp.common.records import Sequence as TrainSequence
from megasharp.convert.hf_folder import read_config
from megasharp.planner.formulas import packing_flops

MODELS = Path(__file__).resolve().parents[1] / "configs" / "model"
GROUP = 16
LONGEST_PROMPT = 500
PADDING_BAR, IMBALANCE_BAR, PLANNING_BAR = 3.0, 5.0, 100.0
MULTIPLES = (GPU_ROWS, 128)


def _bimodal(rng: random.Random) -> int:
    return rng.randint(6000, 8192) if rng.random() < 0.1 else max(1, round(rng.gauss(600, 200)))


DISTRIBUTIONS: dict[str, tuple[str, Callable[[random.Random], int]]] = {
    "uniform": ("1 to 4096", lambda rng: rng.randint(1, 4096)),
    "lognormal": ("median 812, sigma 0.8, cut at 8192", lambda rng: min(8192, round(rng.lognormvariate(6.7, 0.8)) + 1)),
    "bimodal": ("600 +- 200, a tenth from 6000 to 8192", _bimodal),
    "equal": ("all 1000", lambda rng: 1000),
}


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of a step's prompts, one a group, and of its responses, `GROUP` a group."""

    prompts: list[int]
    responses: list[int]

    def sizes(self, flops: Flops, shared: bool) -> Sizes:
        """What planning is told."""
        group = [i // GROUP for i in range(len(self.responses))]
        if shared:
            return measure(group, self.prompts, self.responses, flops)
        return measure(list(range(len(group))), [self.prompts[g] for g in group], self.responses, flops)


def draw(name: str, responses: int, seed: int) -> Lengths:
    """A step's lengths."""
    rng = random.Random(f"{name}-{seed}")
    prompts = [rng.randint(50, LONGEST_PROMPT) for _ in range(responses // GROUP)]
    return Lengths(prompts, [DISTRIBUTIONS[name][1](rng) for _ in range(responses)])


@dataclass(slots=True)
class Cases:
    """Figures of every case of a distribution, in percent and milliseconds."""

    padding: dict[int, list[float]] = field(default_factory=lambda: {multiple: [] for multiple in MULTIPLES})
    imbalance: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    more: list[float] = field(default_factory=list)
    counts: list[tuple[int, int]] = field(default_factory=list)
    in_step: list[float] = field(default_factory=list)
    copies: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)

    def add(self, sizes: Sizes, dp: int, budget: int) -> None:
        """Plan a case."""
        gc.disable()
        wall, cpu = time.perf_counter(), time.thread_time()
        ranks = plan(sizes, dp, budget, 1)
        self.cpu.append(1e3 * (time.thread_time() - cpu))
        self.wall.append(1e3 * (time.perf_counter() - wall))
        gc.enable()
        rank_loads = loads(ranks)
        mean = sum(rank_loads) / dp
        self.imbalance.append(100 * imbalance(rank_loads))
        self.alone.append(100 * (largest_response(sizes) / mean - 1))
        least = fewest(sizes, dp, budget)
        self.more.append(100 * (len(ranks[0]) / least - 1))
        self.counts.append((len(ranks[0]), least))
        steps = [[rank[k].flops for rank in ranks] for k in range(len(ranks[0]))]
        self.in_step.append(100 * (sum(max(step) for step in steps) / mean - 1))
        once = sum(sizes.prompt_flops) + sum(sizes.flops)
        self.copies.append(100 * (1 - once / sum(rank_loads)))
        for multiple, shares in self.padding.items():
            shares.append(100 * padding(ranks, sizes, multiple))


def largest_response(sizes: Sizes) -> float:
    """FLOPs of the largest response with its prompt: no rank that has it can have less."""
    return max(sizes.prompt_flops[group] + flops for group, flops in zip(sizes.group, sizes.flops, strict=True))


def fewest(sizes: Sizes, dp: int, budget: int) -> int:
    """Micro-batches of a rank that no plan can do with less than."""
    totals = [0] * len(sizes.prompt_tokens)
    alone = 0
    for group, tokens in zip(sizes.group, sizes.tokens, strict=True):
        if sizes.prompt_tokens[group] + tokens > budget:
            alone += 1
        else:
            totals[group] += tokens
    tokens = sum(
        total + prompt * math.ceil(total / (budget - prompt))
        for total, prompt in zip(totals, sizes.prompt_tokens, strict=True)
    )
    return math.ceil((alone + tokens / budget) / dp)


def padding(ranks: Sequence[Sequence[Draft]], sizes: Sizes, multiple: int) -> float:
    """Share of rows that packing will add."""
    real = padded = 0
    for draft in (draft for rank in ranks for draft in rank):
        rows = sum(sizes.prompt_tokens[group] for group in draft.members)
        rows += sum(max(0, sizes.tokens[i] - 1) for i in draft.responses())
        real += rows
        padded += max(multiple, math.ceil(rows / multiple) * multiple)
    return 1 - real / padded


def figures(name: str, shared: bool, cases: Cases) -> list[Figure]:
    """Rows of the table."""
    start = f"{name}, prompts {'shared' if shared else 'repeated'}: "
    count = len(cases.cpu)
    possible = [found for found, alone in zip(cases.imbalance, cases.alone, strict=True) if alone <= IMBALANCE_BAR]
    note, dominated = "worst case", count - len(possible)
    if dominated:
        note += f"; in {dominated} (left out) one response alone is up to {max(cases.alone):.0f} % above"
    rows = [
        Figure(f"{start}padding, rows by {multiple}", max(shares), "%", PADDING_BAR, repeats=count, note="worst case")
        for multiple, shares in cases.padding.items()
    ]
    most, least = max(cases.counts, key=lambda pair: pair[0] / pair[1])
    more = f"median; worst {most} for {least}"
    wall = f"slowest {max(cases.cpu):.0f}; by the clock {statistics.median(cases.wall):.0f}"
    return [
        *rows,
        Figure(
            f"{start}DP imbalance",
            max(possible or cases.imbalance),
            "%",
            IMBALANCE_BAR if possible else None,
            repeats=count,
            note=note,
        ),
        Figure(f"{start}micro-batches above the least", statistics.median(cases.more), "%", repeats=count, note=more),
        Figure(f"{start}in step", statistics.median(cases.in_step), "%", repeats=count, note="median"),
        Figure(f"{start}prompt copies", statistics.median(cases.copies), "%", repeats=count, note="median"),
        Figure(f"{start}planning", statistics.median(cases.cpu), "ms", PLANNING_BAR, repeats=count, note=wall),
    ]


def sequences(lengths: Lengths) -> list[TrainSequence]:
    """Training sequences of these lengths; what they hold does not change the work."""
    made = []
    for i, length in enumerate(lengths.responses):
        prompt, zeros = lengths.prompts[i // GROUP], torch.zeros(length)
        tokens = torch.zeros(prompt + length, dtype=torch.int64)
        made.append(
            TrainSequence(
                group_id=f"g{i // GROUP}",
                index=i % GROUP,
                group_size=GROUP,
                group_correct=0,
                seed=i,
                tokens=tokens,
                prompt_length=prompt,
                reward=0.0,
                correct=False,
                advantage_T=zeros.double(),
                mask_T=zeros + 1,
                sampler_logp_T=zeros,
                policy_logp_T=zeros,
            )
        )
    return made


def whole_pack(name: str, responses: int, flops: Flops, repeats: int) -> Figure:
    """Milliseconds of pack() at 8 ranks and a budget of 16,384."""
    step = sequences(draw(name, responses, seed=0))
    layout = PackLayout(8, 16384, 1, GPU_ROWS, 1.0, flops=flops)
    seconds = []
    for _ in range(repeats):
        start = time.thread_time()
        pack(step, layout, seed=0)
        seconds.append(time.thread_time() - start)
    tokens = sum(sequence.response_length for sequence in step)
    note = f"{tokens / 1e6:.1f} million response tokens; dp 8, budget 16384"
    return Figure(f"{name}, prompts shared: pack()", 1e3 * statistics.median(seconds), "ms", repeats=repeats, note=note)


def main() -> None:
    """Parse, plan every case, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="qwen3-1.7b", help="a folder of configs/model; attention weighs more in small"
    )
    parser.add_argument("--responses", type=int, default=4096, help="of a step; a multiple of 16")
    parser.add_argument("--dp", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], help="data-parallel ranks")
    parser.add_argument("--budgets", type=int, nargs="+", default=[8192, 16384, 32768], help="tokens of a micro-batch")
    parser.add_argument("--seeds", type=int, default=3, help="how many steps of each distribution")
    parser.add_argument("--repeats", type=int, default=5, help="how often pack() is timed")
    arguments = parser.parse_args()
    if arguments.responses < GROUP or arguments.responses % GROUP:
        parser.error(f"--responses must be a multiple of {GROUP}")
    if min(*arguments.dp, arguments.seeds, arguments.repeats, 1) < 1:
        parser.error("--dp, --seeds and --repeats must be 1 or more")
    if min(arguments.budgets) <= LONGEST_PROMPT:
        parser.error(f"--budgets must be above the longest prompt, {LONGEST_PROMPT} tokens")
    if not (MODELS / arguments.model).is_dir():
        parser.error(f"--model {arguments.model}: no folder of configs/model")
    torch.set_num_threads(1)
    flops = packing_flops(read_config(MODELS / arguments.model)[2], chunked_head=False)
    rows: list[Figure] = []
    for name in DISTRIBUTIONS:
        for shared in (True, False):
            cases = Cases()
            for seed in range(arguments.seeds):
                sizes = draw(name, arguments.responses, seed).sizes(flops, shared)
                for dp in arguments.dp:
                    for budget in arguments.budgets:
                        cases.add(sizes, dp, budget)
            rows += figures(name, shared, cases)
    rows += [whole_pack(name, arguments.responses, flops, arguments.repeats) for name in DISTRIBUTIONS]
    settings = {
        "model": arguments.model,
        "responses": arguments.responses,
        "group": GROUP,
        "dp": " ".join(map(str, arguments.dp)),
        "budgets": " ".join(map(str, arguments.budgets)),
        "seeds": arguments.seeds,
        **{f"lengths, {name}": text for name, (text, _) in DISTRIBUTIONS.items()},
    }
    subject = unusual(parser, arguments, ("model", "responses", "dp", "budgets", "seeds"))
    report("bench_batching", rows, settings, subject=subject)


if __name__ == "__main__":
    main()
