"""Seconds of a training step, stage by stage, and the share of the hardware's FLOPs that it uses.

    python tools/bench_step.py --model qwen3-4b --random-init --tokens 8192                     # one GPU
    python tools/bench_step.py --model qwen3-8b --random-init --optimizer-offload --recompute full --head chunked
    torchrun --nproc-per-node 8 tools/bench_step.py --model qwen3-8b --random-init --tp 2       # several
    python tools/bench_step.py --model quickstart --dtype float32 --tokens 2048                 # a CPU

`--model` is a Hugging Face folder, `quickstart`, or with --random-init the name of a folder of configs/model or any
folder with a config.json. Responses are random: what they say does not change the work. A step is that of a run:
`annotate` (old log-probs, with --annotate), forward and backward of every micro-batch with entropy and --topn
candidates, the optimizer, and `export`: all weights as Hugging Face tensors in flat buckets on the device, which is the
learner's half of a sync (the engines' half: tools/bench_sync.py).

MFU = model FLOPs / (seconds of forward, backward, gradient sync and optimizer) / (GPUs x dense bf16 peak of the data
sheet). Model FLOPs are 3 x (2 N + 4 L q s) a token (2204.02311, appendix B): N weights that are multiplied, L layers, q
query size, s the mean number of positions attended to; nothing is added for what is computed twice, and with
`--head chunked` the output layer counts for the rows of responses alone, which it multiplies.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from results import Figure, report
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from megasharp.algos.base import Needs, OldLogp
from megasharp.algos.build import build_recipe
from megasharp.algos.recipe import Recipe
from megasharp.batching.layout import PackLayout, row_multiple
from megasharp.batching.pack import pack
from megasharp.convert.architecture import Architecture
from megasharp.convert.hf_folder import read_config
from megasharp.convert.weight_files import CONFIG_FILE
from megasharp.mcore.head import HeadForm
from megasharp.mcore.learner import LearnerSettings, RankLearner
from megasharp.mcore.optimizer import OptimizerSettings
from megasharp.mcore.parallel import device_of_rank, meet
from megasharp.mcore.rank import POLICY, Rank
from megasharp.metrics.tokens import Diagnostics
from megasharp.plan.formulas import forward_flops_per_token
from megasharp.plan.hardware import GPUS
from megasharp.sync.bucket_memory import bucket_memory
from megasharp.sync.buckets import buckets
from megasharp.types import MicroBatch, ParallelLayout, StepBatch, StepStats, as_dtype
from megasharp.types import Sequence as TrainSequence

REPOSITORY = Path(__file__).resolve().parents[1]
MFU_BAR = 40.0
BUCKET_MB = 512


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
    recompute: str
    head: HeadForm
    recompute_modules: tuple[str, ...]
    optimizer_offload: bool
    tp: int
    pp: int
    cp: int
    steps: int
    warm_up: int
    options: dict[str, int | float | bool | str | None]

    def layout(self, world: int) -> ParallelLayout:
        """The rest of the ranks is data-parallel."""
        return ParallelLayout(dp=world // (self.tp * self.pp * self.cp), tp=self.tp, pp=self.pp, cp=self.cp)


def main() -> None:
    """Measure, and print on the first rank."""
    setting = arguments()
    rank, world, store = place()
    kind = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = device_of_rank(kind, int(os.environ.get("LOCAL_RANK", "0")))
    meet(store, rank, world, device)
    with tempfile.TemporaryDirectory() as name:
        description = describe(setting, Path(name))
        architecture = read_config(description)[2]
        recipe = build_recipe(("grpo",), {}, reduction=None, constant=float(setting.response), mini_batches=1)
        parts = Rank({POLICY: learner_settings(setting, description, world, recipe)}, device)
        learner = parts.learners[POLICY]
        batch = random_batch(setting, architecture, setting.layout(world))
        rows = [step(learner, batch, recipe, setting, device) for _ in range(setting.warm_up + setting.steps)]
        slowest = [over_ranks(row) for row in rows[setting.warm_up :]]
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
        if rank == 0:
            tell(setting, architecture, batch, slowest, world, peak)
        parts.close()
    dist.destroy_process_group()


def place() -> tuple[int, int, Store]:
    """This rank, how many there are, and where they meet: torchrun's environment, or one process alone."""
    if "RANK" not in os.environ:
        return 0, 1, HashStore()
    store, rank, world = next(rendezvous("env://"))
    return rank, world, PrefixStore("bench_step", store)


def describe(setting: Setting, folder: Path) -> Path:
    """The model's folder; of one to be drawn a folder with its config.json, and as many layers as were asked for."""
    named = REPOSITORY / "examples" / "quickstart" / "base" if setting.model == "quickstart" else Path(setting.model)
    if not setting.random_init:
        return named
    found = named if (named / CONFIG_FILE).is_file() else REPOSITORY / "configs" / "model" / setting.model
    config = json.loads((found / CONFIG_FILE).read_text())
    if setting.layers is not None:
        config |= {"num_hidden_layers": setting.layers}
        # Its kinds of layers are read anew from the rest.
        config.pop("layer_types", None)
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    return folder


def learner_settings(setting: Setting, folder: Path, world: int, recipe: Recipe) -> LearnerSettings:
    """A learner as a run makes it."""
    return LearnerSettings(
        folder=str(folder),
        dtype=as_dtype(setting.dtype),
        layout=setting.layout(world),
        optimizer=OptimizerSettings(1e-6, (0.9, 0.95), 1e-8, 0.0, 1.0, 0, "constant", 1000),
        needs=recipe.needs,
        temperature=1.0,
        seed=0,
        recompute=setting.recompute,
        offload=(),
        options=setting.options,
        diagnostics=Diagnostics(setting.topn, 8),
        drawn=setting.random_init,
        head=setting.head,
        recompute_modules=setting.recompute_modules,
        optimizer_offload=setting.optimizer_offload,
    )


def random_batch(setting: Setting, architecture: Architecture, layout: ParallelLayout) -> StepBatch:
    """Responses of the same length, each with a prompt of its own, that fill `micro_batches` a data-parallel rank."""
    generator = torch.Generator().manual_seed(0)
    each = max(1, setting.tokens // (setting.prompt + setting.response))
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

    if setting.annotate:
        timed("annotate", lambda: learner.annotate(batch, Needs(old_logp=OldLogp.BEFORE_STEP)))
    stats = timed("update", lambda: learner.step(batch, recipe))
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


def over_ranks(seconds: dict[str, float]) -> dict[str, float]:
    """The slowest rank's, stage by stage."""
    found: list[dict[str, float]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, seconds)
    return {name: max(each.get(name, 0.0) for each in found) for name in dict.fromkeys(n for f in found for n in f)}


def model_flops(architecture: Architecture, batch: StepBatch, head: HeadForm) -> float:
    """Forward and backward passes of all rows that are computed for a token, as the module's docstring has it."""
    total = 0.0
    for micro in (micro for mini in batch.mini_batches for share in mini.per_rank for micro in share):
        rows = runs(micro)
        total += sum(3.0 * length * forward_flops_per_token(architecture, context) for length, context in rows)
        if head == "chunked":
            without = sum(length for length, _ in rows) - micro.rows_T.numel()
            total -= 6.0 * architecture.vocab * architecture.hidden * without
    return total


def runs(micro: MicroBatch) -> list[tuple[int, float]]:
    """Lengths of a micro-batch's runs and how many positions their rows attend to on average, the filling left out."""
    segments = micro.segments
    found = []
    for length, prefix in zip(segments.length.tolist(), segments.prefix.tolist(), strict=True):
        before = int(segments.length[prefix]) if prefix >= 0 else 0
        found.append((length, before + (length + 1) / 2))
    filled = int(micro.tokens_P.numel()) - int(micro.rows_T.max()) - 1
    return found[:-1] if filled and found[-1][0] == filled else found


def tell(
    setting: Setting,
    architecture: Architecture,
    batch: StepBatch,
    rows: Sequence[dict[str, float]],
    world: int,
    peak: int | None,
) -> None:
    """The table and its JSON: figures of the step that took the median time."""
    # Of one step, so that the parts belong together; over several ranks each is that of the slowest.
    medians = sorted(rows, key=lambda row: row["step"])[(len(rows) - 1) // 2]
    micros = [micro for mini in batch.mini_batches for share in mini.per_rank for micro in share]
    tokens = sum(length for micro in micros for length, _ in runs(micro))
    flops = model_flops(architecture, batch, setting.head)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU"
    known = next((sheet for name, sheet in GPUS.items() if name in gpu.lower()), None)
    mfu = None if known is None else 100.0 * flops / medians["update"] / (known.flops * world)
    # Said beside what it changes: the bar of 40 % is for a step without.
    held = "optimizer's state on the host" if setting.optimizer_offload else ""
    notes = dict.fromkeys(("update", "optimizer", "step"), held)
    figures = [Figure(name, value, "s", repeats=len(rows), note=notes.get(name, "")) for name, value in medians.items()]
    figures += [
        Figure("tokens/s per rank, whole step", tokens / medians["step"] / world, "1/s", better="higher"),
        Figure("tokens/s per rank, update", tokens / medians["update"] / world, "1/s", better="higher"),
        Figure("FLOPs of the update", flops / 1e12, "TFLOP"),
        Figure("achieved per rank", flops / medians["update"] / world / 1e12, "TFLOP/s", better="higher"),
        Figure(
            "MFU",
            mfu,
            "%",
            bar=MFU_BAR,
            better="higher",
            note="; ".join(filter(None, ["of the dense bf16 peak" if known else "no data sheet", held])),
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
        "attention": "torch",
        "world": world,
        **{f"megatron.{key}": value for key, value in setting.options.items()},
    }
    ranks = f" {world} ranks" if world > 1 else ""
    report("bench_step", figures, shown, subject=Path(setting.model).name + ranks)


def arguments() -> Setting:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-4b")
    parser.add_argument("--random-init", action="store_true", help="draw weights instead of reading them")
    parser.add_argument("--layers", type=int, default=None, help="with --random-init: another number of layers")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=8192, help="budget of a micro-batch")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--response", type=int, default=1792)
    parser.add_argument("--micro-batches", type=int, default=4, help="of each data-parallel rank")
    parser.add_argument("--topn", type=int, default=3)
    parser.add_argument("--annotate", action="store_true", help="with the pass for old log-probs")
    parser.add_argument("--recompute", default="none", choices=["none", "selective", "full"])
    parser.add_argument("--head", default="logits", choices=["logits", "chunked"])
    parser.add_argument(
        "--recompute-modules", nargs="+", default=["core_attn"], choices=["core_attn", "mlp"], help="of selective"
    )
    parser.add_argument(
        "--optimizer-offload", action="store_true", help="its state on the host: 8B on one GPU needs it"
    )
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--cp", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--megatron", type=json.loads, default={}, help="as policy.megatron: '{\"key\": value}'")
    given = vars(parser.parse_args())
    modules = tuple(given.pop("recompute_modules"))
    return Setting(options=given.pop("megatron"), recompute_modules=modules, **given)


if __name__ == "__main__":
    main()
