"""What a checkpoint costs: times of a save that is waited for, and of what training loses to one in the background.

    python tools/measure_saves.py --parameters 0.1 --repeats 5

One rank with random float32 weights and Adam's moments, saved as a run saves them (shards, hashes, manifest, fsync).
"Waited for" is all of a save. In the background the loop waits while the state is copied, while it asks after each step
whether all is written, and while the save is completed: their sum is the stall. Steps are timed with no save, and with
one under way. Every figure is a median. It needs 28 bytes of memory a parameter, and three checkpoints' room on the
disk of --folder (12 bytes a parameter each).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from megasharp.algos.base import Needs
from megasharp.algos.dlc import cross_entropy_recipe
from megasharp.batching.packing import PackLayout, pack
from megasharp.checkpoint.store import CheckpointStore, RunState, Writing
from megasharp.common.layout import ParallelLayout
from megasharp.common.records import Sequence, StepBatch
from megasharp.config.policy import OptimizerConfig, PolicyConfig
from megasharp.convert.hf_folder import expected_hf_shapes, read_config
from megasharp.convert.hf_write import write_hf_folder
from megasharp.convert.model_folder import CONFIG_FILE
from megasharp.convert.record import software_versions
from megasharp.learner.learner import POLICY, LearnerSettings
from megasharp.learner.ranks.all_ranks import OneRank, RanksLearner

MIB = 2**20
# Qwen2.5-0.5B's layers, with a small vocabulary; their number makes the size.
CONFIG: dict[str, object] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 8192,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


def main() -> int:
    """Make a model, save it both ways, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=0.1, help="about how many, in 10^9")
    parser.add_argument("--repeats", type=int, default=5, help="saves of each kind")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a training step")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--folder", type=Path, default=None, help="where the folders are made; removed at the end")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory(prefix="measure-saves-", dir=arguments.folder) as name:
        folder = Path(name)
        parameters = make_model(folder / "model", arguments.parameters)
        learner = RanksLearner(OneRank({POLICY: settings(folder / "model")}, torch.device("cpu")))
        try:
            measured = measure(learner, folder / "checkpoints", batch(arguments.tokens), arguments.repeats)
        finally:
            learner.close()
    report(measured, parameters, arguments.repeats, arguments.threads)
    return 0


def make_model(folder: Path, billions: float) -> int:
    """Write random weights of about that many parameters; returns how many."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        description = Path(name)

        def parameters(layers: int) -> int:
            (description / CONFIG_FILE).write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
            return read_config(description)[2].parameter_count()

        one = parameters(1)
        total = parameters(max(1, 1 + round((billions * 1e9 - one) / (parameters(2) - one))))
        _, family, architecture = read_config(description)
        generator = torch.Generator().manual_seed(0)
        shapes = expected_hf_shapes(family, architecture).items()
        weights = ((name, torch.empty(shape).normal_(0.0, 0.02, generator=generator)) for name, shape in shapes)
        write_hf_folder(folder, description, weights)
    return total


def settings(model: Path) -> LearnerSettings:
    """One rank in float32, trained by Adam."""
    return LearnerSettings(
        folder=str(model),
        policy=PolicyConfig(optimizer=OptimizerConfig(lr=1e-5)),
        dtype=torch.float32,
        layout=ParallelLayout(),
        total_steps=1,
        needs=Needs(),
        temperature=1.0,
        seed=0,
    )


def batch(tokens: int) -> StepBatch:
    """One random sequence, of which all tokens but the first are learned."""
    generator = torch.Generator().manual_seed(1)
    ones = torch.ones(tokens - 1)
    sequence = Sequence(
        group_id="only",
        index=0,
        group_size=1,
        group_correct=0,
        seed=0,
        tokens=torch.randint(0, 8192, (tokens,), generator=generator),
        prompt_length=1,
        reward=0.0,
        correct=False,
        advantage_T=ones.double(),
        mask_T=ones,
        sampler_logp_T=-ones,
        policy_logp_T=-ones,
    )
    return pack([sequence], PackLayout(1, tokens, 1, 1, float(tokens)), seed=0)


@dataclass(frozen=True)
class Measured:
    """Seconds of each repeat; `size` is a checkpoint's bytes."""

    size: int
    waited: list[float]
    copy: list[float]
    polls: list[float]
    finish: list[float]
    until_written: list[float]
    step_alone: list[float]
    step_meanwhile: list[float]

    @property
    def stall(self) -> list[float]:
        """What the loop waits for a save in the background."""
        return [sum(parts) for parts in zip(self.copy, self.polls, self.finish, strict=True)]


class Shards:
    """A learner's shards on their way to the disk."""

    def __init__(self, learner: RanksLearner) -> None:
        self.is_written = learner.saves_are_written
        self.finish = learner.finish_saves


def measure(learner: RanksLearner, folder: Path, step_batch: StepBatch, repeats: int) -> Measured:
    """Save `repeats` times and one more each way, training meanwhile; the first of each is not counted."""
    store = CheckpointStore(folder, keep_last=1, keep_every=None)
    recipe = cross_entropy_recipe()
    measured = Measured(0, [], [], [], [], [], [], [])

    def begin(step: int, copy: bool) -> None:
        def write(partial: Path) -> Writing:
            learner.begin_save(partial, copy)
            return Shards(learner)

        store.begin(RunState(reference="base", step=step), write)

    def waited(step: int) -> None:
        begin(step, copy=False)
        store.finish()

    def train() -> None:
        learner.step(step_batch, recipe)

    train()
    for number in range(repeats + 1):
        measured.step_alone.extend(seconds(train) for _ in range(3))
        measured.waited.append(seconds(lambda number=number: waited(2 * number + 1)))  # type: ignore[misc]
        began = time.perf_counter()
        measured.copy.append(seconds(lambda number=number: begin(2 * number + 2, copy=True)))  # type: ignore[misc]
        polls = 0.0
        while True:
            measured.step_meanwhile.append(seconds(train))
            polls += seconds(learner.saves_are_written)
            if learner.saves_are_written():
                break
        measured.until_written.append(time.perf_counter() - began)
        measured.polls.append(polls)
        measured.finish.append(seconds(store.finish))
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return Measured(
        size,
        measured.waited[1:],
        measured.copy[1:],
        measured.polls[1:],
        measured.finish[1:],
        measured.until_written[1:],
        measured.step_alone[3:],
        measured.step_meanwhile,
    )


def seconds(work: Callable[[], object]) -> float:
    """How long it takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def report(measured: Measured, parameters: int, repeats: int, threads: int) -> None:
    """Print the table."""
    versions = software_versions()
    print(
        f"{parameters / 1e9:.3f} B parameters, float32, one rank on {threads} thread(s); a checkpoint is "
        f"{measured.size / MIB:,.0f} MiB; medians of {repeats} saves"
    )
    print(f"{platform.machine()}, {os.cpu_count()} cores; " + ", ".join(f"{n} {v}" for n, v in versions.items()))
    rows = (
        ("save, waited for", measured.waited),
        ("save in the background: the loop waits (stall)", measured.stall),
        ("    while the state is copied", measured.copy),
        ("    asking whether all is written", measured.polls),
        ("    while it is completed (hashes are known; index, manifest, fsync)", measured.finish),
        ("    from its start until all is written, training meanwhile", measured.until_written),
        ("a training step, no save under way", measured.step_alone),
        ("a training step, a save under way", measured.step_meanwhile),
    )
    for name, values in rows:
        print(f"{name:<70} {median(values):8.3f} s  ({min(values):.3f} to {max(values):.3f})")


if __name__ == "__main__":
    sys.exit(main())
