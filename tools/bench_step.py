"""Seconds of a training step, stage by stage, and the share of the hardware's FLOPs that it uses.

    python tools/bench_step.py --model qwen3-4b --random-init --tokens 8192                     # one GPU
    python tools/bench_step.py --model qwen3-8b --random-init --optimizer-offload --recompute full --head chunked
    python tools/bench_step.py --model qwen3-4b --random-init --fp8 hybrid                      # Transformer Engine
    python tools/bench_step.py --model qwen3-4b --random-init --attention fa2                   # instead of the best
    torchrun --nproc-per-node 8 tools/bench_step.py --model qwen3-8b --random-init --tp 2       # several
    python tools/bench_step.py --model quickstart --dtype float32 --tokens 2048                 # a CPU

`--model` is a Hugging Face folder, `quickstart`, or with --random-init the name of a folder of configs/model or any
folder with a config.json. Responses are random: what they say does not change the work. A step is that of a run:
`annotate` (old log-probs, with --annotate), forward and backward of every micro-batch with entropy and --topn
candidates, the optimizer, and `export`: all weights as Hugging Face tensors in flat buckets on the device, which is the
learner's half of a sync (the engines' half: tools/bench_sync.py).

MFU = model FLOPs / (seconds of forward, backward, gradient sync and optimizer) / (GPUs x dense bf16 peak of the data
sheet). Model FLOPs are 3 x (2 N + 4 L q s) a token (2204.02311, appendix B): N weights that are multiplied, L layers, q
query size, s the mean number of positions attended to, within a layer's window where it has one; nothing is added for
what is computed twice, and with `--head chunked` the output layer counts for the rows of responses alone, which it
multiplies. With FP8 it is a share of the bf16 peak too.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from described import drawn, saved
from results import Figure, keep, machine, report
from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from megasharp.algos.base import Needs, OldLogp
from megasharp.algos.build_recipe import build_recipe
from megasharp.algos.recipe import Recipe
from megasharp.batching.delivery import shares_of, updates_of
from megasharp.batching.packing import PackLayout, pack, row_multiple
from megasharp.common.errors import UserError
from megasharp.common.group_environment import compute_capability, in_order
from megasharp.common.layout import ParallelLayout
from megasharp.common.records import MicroBatch, StepBatch, StepStats, as_dtype
from megasharp.common.records import Sequence as TrainSequence
from megasharp.config.policy import (
    AttentionName,
    Fp8Format,
    Fp8Recipe,
    HeadForm,
    PolicyConfig,
    Recompute,
    RecomputeModule,
    Wanted,
)
from megasharp.convert.architecture import Architecture
from megasharp.convert.hf_folder import read_config
from megasharp.learner.layer_spec import uses_transformer_engine
from megasharp.learner.learner import POLICY, LearnerSettings, Rank, RankLearner
from megasharp.learner.parallel import device_of_rank, meet
from megasharp.metrics.group_metrics import Diagnostics
from megasharp.ops.attention_kernels import Kernels
from megasharp.planner.formulas import packing_flops
from megasharp.planner.records import GPUS, Gpu
from megasharp.weight_sync.buckets import bucket_memory, buckets

MFU_BAR = 40.0
BUCKET_MB = 512
WANTED: dict[str, Wanted] = {"auto": "auto", "true": True, "false": False}


@dataclass(frozen=True, slots=True)
class Setting:
    """What is measured; lengths in tokens, `tokens` is a micro-batch's budget."""

    model: str
    random_init: bool
    layers: int | None
    dtype: str
    tokens: int
    prompt: int
    response: int
    micro_batches: int
    topn: int
    annotate: bool
    recompute: Recompute
    head: HeadForm
    recompute_modules: tuple[RecomputeModule, ...]
    optimizer_offload: bool
    transformer_engine: Wanted
    attention: AttentionName
    fp8: Fp8Format | None
    fp8_recipe: Fp8Recipe
    overlap: Wanted
    tp: int
    pp: int
    cp: int
    steps: int
    warm_up: int
    options: dict[str, int | float | bool | str | None]

    def layout(self, world: int) -> ParallelLayout:
        """The rest of the ranks is data-parallel. Raises UserError where they are not a whole number of layouts."""
        size = self.tp * self.pp * self.cp
        if world % size:
            raise UserError(
                f"--tp x --pp x --cp = {size} does not divide {world} process(es); start them with torchrun"
            )
        return ParallelLayout(dp=world // (self.tp * self.pp * self.cp), tp=self.tp, pp=self.pp, cp=self.cp)


def main() -> None:
    """Measure, and print on the first rank."""
    setting = arguments()
    rank, world, store = place()
    # As a run's ranks have it, before CUDA reads it.
    os.environ |= in_order(setting.layout(world).splits_tensors, compute_capability(), os.environ)
    kind = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = device_of_rank(kind, int(os.environ.get("LOCAL_RANK", "0")))
    meet(store, rank, world, device)
    with tempfile.TemporaryDirectory() as name:
        model, drew = setting.model, setting.random_init
        description = drawn(model, setting.layers, Path(name)) if drew else saved(model)
        architecture = read_config(description)[2]
        recipe = build_recipe(("grpo",), {}, reduction=None, constant=float(setting.response), mini_batches=1)
        parts = Rank({POLICY: learner_settings(setting, description, world, recipe)}, device)
        learner = parts.learners[POLICY]
        batch = random_batch(setting, architecture, setting.layout(world))
        for _ in range(setting.warm_up):
            step(learner, batch, recipe, setting, device)
        shown, slowest = modules(setting, parts.kernels, device), []
        for number in range(setting.steps):
            slowest.append(over_ranks(step(learner, batch, recipe, setting, device)))
            peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
            if rank == 0:
                tell(setting, architecture, batch, slowest, world, peak, shown, done=number + 1 == setting.steps)
        parts.close()
    dist.destroy_process_group()


def place() -> tuple[int, int, Store]:
    """This rank, how many there are, and where they meet: torchrun's environment, or one process alone."""
    if "RANK" not in os.environ:
        return 0, 1, HashStore()
    store, rank, world = next(rendezvous("env://"))
    return rank, world, PrefixStore("bench_step", store)


def policy_keys(setting: Setting) -> PolicyConfig:
    """The options that are keys of a run's policy section."""
    return PolicyConfig(
        recompute=setting.recompute,
        recompute_modules=list(setting.recompute_modules),
        head=setting.head,
        transformer_engine=setting.transformer_engine,
        attention=setting.attention,
        fp8=setting.fp8,
        fp8_recipe=setting.fp8_recipe,
        overlap=setting.overlap,
        optimizer_offload=setting.optimizer_offload,
        megatron=setting.options,
    )


def learner_settings(setting: Setting, folder: Path, world: int, recipe: Recipe) -> LearnerSettings:
    """A learner as a run makes it."""
    return LearnerSettings(
        folder=str(folder),
        policy=policy_keys(setting),
        dtype=as_dtype(setting.dtype),
        layout=setting.layout(world),
        total_steps=1000,
        needs=recipe.needs,
        temperature=1.0,
        seed=0,
        diagnostics=Diagnostics(setting.topn, 8),
        drawn=setting.random_init,
    )


def random_batch(setting: Setting, architecture: Architecture, layout: ParallelLayout) -> StepBatch:
    """Responses of the same length, each with a prompt of its own, that fill `micro_batches` a data-parallel rank."""
    generator = torch.Generator().manual_seed(0)
    each = setting.tokens // (setting.prompt + setting.response)
    length = setting.prompt + setting.response

    def sequence(number: int) -> TrainSequence:
        values = torch.full((setting.response,), -1.0)
        return TrainSequence(
            group_id=f"group-{number}",
            index=0,
            group_size=8,
            group_correct=4,
            seed=number,
            tokens=torch.randint(0, architecture.vocab, (length,), generator=generator),
            prompt_length=setting.prompt,
            reward=float(number % 2),
            correct=bool(number % 2),
            advantage_T=torch.full((setting.response,), 1.0 - 2.0 * (number % 2), dtype=torch.float64),
            mask_T=torch.ones(setting.response),
            sampler_logp_T=values,
            policy_logp_T=values,
        )

    sequences = [sequence(number) for number in range(each * setting.micro_batches * layout.dp)]
    cut = PackLayout(
        dp=layout.dp,
        micro_batch_tokens=setting.tokens,
        mini_batches=1,
        row_multiple=row_multiple(layout, "cuda" if torch.cuda.is_available() else "cpu"),
        constant=float(setting.response),
        micro_batch_multiple=layout.micro_batch_multiple,
    )
    return pack(sequences, cut, seed=0)


def step(
    learner: RankLearner, batch: StepBatch, recipe: Recipe, setting: Setting, device: torch.device
) -> dict[str, float]:
    """Seconds of this rank by stage, and of all."""
    seconds: dict[str, float] = {}

    def timed(name: str, work: Callable[[], object]) -> object:
        waited(device)
        began = time.perf_counter()
        result = work()
        waited(device)
        seconds[name] = time.perf_counter() - began
        return result

    place = learner.place.dp
    if setting.annotate:
        share, needs = shares_of(batch)[place], Needs(old_logp=OldLogp.BEFORE_STEP)
        timed("annotate", lambda: learner.annotate(share, 1, needs, frozenset()))
    stats = timed("update", lambda: learner.step(updates_of(batch)[place], recipe))
    # Ranks before the last pipeline stage report nothing.
    seconds |= stats.seconds if isinstance(stats, StepStats) else {}
    timed("export", lambda: export(learner))
    seconds["step"] = sum(seconds.get(name, 0.0) for name in ("annotate", "update", "export"))
    return seconds


def export(learner: RankLearner) -> None:
    """All weights in flat buckets on the device, one after another."""
    with bucket_memory(learner.device, BUCKET_MB) as room:
        for bucket in buckets(learner.export_weights(everywhere=True), BUCKET_MB):
            room.filled(bucket, bucket[0][1].dtype)


def waited(device: torch.device) -> None:
    """Until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def data_sheet(gpu: str) -> Gpu | None:
    """The planner's figures of a GPU by its name, which are those of the SXM form."""
    name = gpu.lower()
    if any(other in name for other in ("pcie", "nvl", "mig", "gh200", "gb200", "gb300")):
        return None
    return next((sheet for known, sheet in GPUS.items() if known in name), None)


def modules(setting: Setting, kernels: Kernels, device: torch.device) -> dict[str, str]:
    """Whose layers and which attention were measured."""
    engine = uses_transformer_engine(policy_keys(setting), device)
    return {
        "layer_spec": "Transformer Engine's" if engine else "Megatron's local",
        "attention": kernels.name,
        "attention_reason": kernels.reason,
    }


def over_ranks(seconds: dict[str, float]) -> dict[str, float]:
    """The slowest rank's, stage by stage."""
    found: list[dict[str, float]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, seconds)
    return {name: max(each.get(name, 0.0) for each in found) for name in dict.fromkeys(n for f in found for n in f)}


def model_flops(architecture: Architecture, batch: StepBatch, head: HeadForm) -> float:
    """Forward and backward passes of all rows that are computed for a token, as the module's docstring has it."""
    flops, total = packing_flops(architecture, chunked_head=False), 0.0
    for micro in (micro for mini in batch.mini_batches for share in mini.per_rank for micro in share):
        before, rows = runs(micro)
        total += 3.0 * float(flops.of_runs(before, rows).sum())
        if head == "chunked":
            without = int(rows.sum()) - micro.rows_T.numel()
            total -= 6.0 * architecture.vocab * architecture.hidden * without
    return total


def runs(micro: MicroBatch) -> tuple[Tensor, Tensor]:
    """Of a micro-batch's runs how many rows stand before each and how many it has, the filling left out."""
    segments = micro.segments
    before = torch.where(segments.prefix >= 0, segments.length[segments.prefix], 0)
    filled = int(micro.tokens_P.numel()) - int(micro.rows_T.max()) - 1
    kept = len(before) - int(bool(filled) and int(segments.length[-1]) == filled)
    return before[:kept], segments.length[:kept]


def tell(
    setting: Setting,
    architecture: Architecture,
    batch: StepBatch,
    rows: Sequence[dict[str, float]],
    world: int,
    peak: int | None,
    shown_modules: dict[str, str],
    done: bool,
) -> None:
    """The JSON of the step that took the median time, and once all steps are `done` the table."""
    # Of one step, so that the parts belong together; over several ranks each is that of the slowest.
    medians = sorted(rows, key=lambda row: row["step"])[(len(rows) - 1) // 2]
    micros = [micro for mini in batch.mini_batches for share in mini.per_rank for micro in share]
    tokens = sum(int(runs(micro)[1].sum()) for micro in micros)
    flops = model_flops(architecture, batch, setting.head)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU"
    known = data_sheet(gpu)
    mfu = None if known is None else 100.0 * flops / medians["update"] / (known.flops * world)
    held = "optimizer's state on the host" if setting.optimizer_offload else ""
    said = [f"{name.replace('_', ' ')} {shown_modules[name]}" for name in ("layer_spec", "attention")]
    said += [f"recompute {' '.join(recomputed(setting))}", f"head {setting.head}"]
    said += [] if setting.fp8 is None else [f"FP8 {setting.fp8}"]
    other = why_no_bar(setting, gpu)
    notes = dict.fromkeys(("update", "optimizer", "step"), held)
    figures = [Figure(name, value, "s", repeats=len(rows), note=notes.get(name, "")) for name, value in medians.items()]
    figures += [
        Figure(f"tokens/s per rank, {name}", tokens / value / world, "1/s", better="higher", repeats=len(rows))
        for name, value in medians.items()
        if value
    ]
    figures += [
        Figure("FLOPs of the update", flops / 1e12, "TFLOP"),
        Figure(
            "achieved per rank",
            flops / medians["update"] / world / 1e12,
            "TFLOP/s",
            better="higher",
            repeats=len(rows),
        ),
        Figure(
            "MFU",
            mfu,
            "%",
            bar=None if other else MFU_BAR,
            better="higher",
            repeats=len(rows),
            note="; ".join(filter(None, ["of the dense bf16 peak" if known else "no data sheet", other, held, *said])),
        ),
        Figure(
            "peak memory",
            None if peak is None else peak / 2**30,
            "GiB",
            note="; ".join(filter(None, ["torch's allocator, first rank", held])),
        ),
    ]
    shown = {
        **{field: getattr(setting, field) for field in Setting.__slots__ if field != "options"},
        "parameters": architecture.parameter_count(),
        **shown_modules,
        "world": world,
        **{f"megatron.{key}": value for key, value in setting.options.items()},
    }
    subject = " ".join([Path(setting.model).name, *variant(setting, world)])
    if done:
        report("bench_step", figures, shown, subject=subject)
    else:
        keep("bench_step", figures, shown, machine(), subject=subject)


def recomputed(setting: Setting) -> tuple[str, ...]:
    """What is computed a second time, by name."""
    return setting.recompute, *(setting.recompute_modules if setting.recompute == "selective" else ())


def variant(setting: Setting, world: int) -> list[str]:
    """What changes a step's cost: each has a results file of its own."""
    cuts = {"tp": setting.tp, "pp": setting.pp, "cp": setting.cp}
    found = {
        f"{setting.layers} layers": setting.layers is not None,
        f"recompute {' '.join(recomputed(setting))}": setting.recompute != "none",
        f"head {setting.head}": setting.head != "logits",
        "optimizer on host": setting.optimizer_offload,
        f"fp8 {setting.fp8} {setting.fp8_recipe}": setting.fp8 is not None,
        f"transformer engine {setting.transformer_engine}": setting.transformer_engine != "auto" and not setting.fp8,
        f"attention {setting.attention}": setting.attention != "auto",
        f"overlap {setting.overlap}": setting.overlap != "auto",
        f"{world} ranks": world > 1,
        " ".join(f"{name}{size}" for name, size in cuts.items() if size > 1): max(cuts.values()) > 1,
    }
    return [text for text, holds in found.items() if holds]


def why_no_bar(setting: Setting, gpu: str) -> str:
    """The bar is for one step: 4B whole, bfloat16, micro-batches of 8,192 tokens, an H200, its state there."""
    if not gpu.startswith("NVIDIA H200"):
        return "the bar is for an H200"
    asked = setting.model, setting.layers, setting.dtype, setting.tokens, setting.fp8, setting.optimizer_offload
    return "" if asked == ("qwen3-4b", None, "bfloat16", 8192, None, False) else "the bar is for another step"


def keys(text: str) -> dict[str, int | float | bool | str | None]:
    """A JSON object; argparse tells what a ValueError says of another text."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"{text} is no object")
    return value


def arguments() -> Setting:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-4b")
    parser.add_argument("--random-init", action="store_true", help="draw weights instead of reading them")
    parser.add_argument("--layers", type=int, default=None, help="with --random-init: another number of layers")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--tokens", type=int, default=8192, help="budget of a micro-batch")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--response", type=int, default=1792)
    parser.add_argument("--micro-batches", type=int, default=4, help="of each data-parallel rank")
    parser.add_argument("--topn", type=int, default=3)
    parser.add_argument("--annotate", action="store_true", help="with the pass for old log-probs")
    parser.add_argument("--recompute", default="none", choices=["none", "selective", "full"])
    parser.add_argument("--head", default="logits", choices=["logits", "chunked"])
    parser.add_argument(
        "--recompute-modules", nargs="+", default=["mlp"], choices=["mlp", "core_attn"], help="of selective"
    )
    parser.add_argument(
        "--optimizer-offload", action="store_true", help="its state on the host: 8B on one GPU needs it"
    )
    parser.add_argument("--transformer-engine", choices=WANTED, default="auto", help="whose layers")
    parser.add_argument(
        "--attention", default="auto", choices=["auto", "fa2", "fa3", "fa4", "te"], help="kernels, as policy.attention"
    )
    parser.add_argument("--overlap", choices=WANTED, default="auto", help="of communication with computing")
    parser.add_argument("--fp8", choices=["hybrid", "e4m3"], default=None, help="by Transformer Engine")
    parser.add_argument("--fp8-recipe", choices=["tensorwise", "blockwise"], default="blockwise")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--cp", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--megatron", type=keys, default={}, help="as policy.megatron: '{\"key\": value}'")
    given = vars(parser.parse_args())
    counts = ("tokens", "prompt", "response", "micro_batches", "tp", "pp", "cp", "steps")
    small = [name for name in counts if given[name] < 1]
    if small or given["warm_up"] < 0:
        parser.error(f"--{(small or ['warm_up'])[0].replace('_', '-')} is too small")
    if given["layers"] is not None and not given["random_init"]:
        parser.error("--layers is for --random-init: a saved model has its own")
    if given["tokens"] < given["prompt"] + given["response"]:
        parser.error(
            f"--tokens {given['tokens']} holds no --prompt {given['prompt']} with --response {given['response']}"
        )
    given["recompute_modules"] = tuple(given["recompute_modules"])
    # FP8 is Transformer Engine's.
    given["transformer_engine"] = given["fp8"] is not None or WANTED[given["transformer_engine"]]
    given["overlap"] = WANTED[given["overlap"]]
    return Setting(options=given.pop("megatron"), **given)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"bench_step: {error}")
