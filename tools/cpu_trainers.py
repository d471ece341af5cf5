"""One run of megasharp or of TRL for `bench_cpu.py`, in a process of its own: prints the figures of its steps as JSON.

    python tools/cpu_trainers.py megasharp '{"folder": "examples/quickstart/base", "steps": 12}'
    python tools/cpu_trainers.py trl '{...}' --processes 2

`Ticks` are taken where a step begins. With two processes, TRL's first one starts the other, so that each trainer is a
process with all that it started below it.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

QUICKSTART = Path(__file__).resolve().parents[1] / "examples" / "quickstart"
WARM_UP = 2


@dataclass(frozen=True, slots=True)
class Setting:
    """The work of both trainers: 48 prompts x 8 responses of at most 18 tokens, Adam at 2e-4, no KL, one update a step.

    `folder`: the model. `random`: its weights are, so that it solves nothing, and `digits` is the reward. The loss is
    the mean over the step's tokens; TRL calls it dapo.
    """

    folder: str
    steps: int
    random: bool = False
    prompts: int = 48
    responses: int = 8
    max_new_tokens: int = 18
    lr: float = 2.0e-4
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Figures:
    """Of the steps after the warm-up: a step's median wall seconds, and means of its CPU seconds and response tokens.

    `others` is the number of cores that other processes used meanwhile.
    """

    wall: float
    cpu: float
    tokens: float
    others: float


class Ticks:
    """Moments at which steps begin, each with the CPU seconds of this process's tree and of the machine until then."""

    def __init__(self) -> None:
        self._marks: list[tuple[float, float, float]] = []

    def mark(self) -> None:
        """Note the beginning of a step."""
        busy = psutil.cpu_times()
        machine = busy.user + busy.nice + busy.system + busy.irq + busy.softirq
        self._marks.append((time.perf_counter(), _tree_seconds(), machine))

    def figures(self, tokens: Sequence[float]) -> Figures:
        """Return the figures; `tokens` are the response tokens of each step."""
        marks = self._marks[WARM_UP:]
        wall, cpu, machine = (last - first for first, last in zip(marks[0], marks[-1], strict=True))
        return Figures(
            wall=statistics.median(after[0] - before[0] for before, after in pairwise(marks)),
            cpu=cpu / (len(marks) - 1),
            tokens=statistics.fmean(tokens[WARM_UP:]),
            others=max(0.0, machine - cpu) / wall,
        )


def _tree_seconds() -> float:
    root = psutil.Process()
    times = [process.cpu_times() for process in (root, *root.children(recursive=True)) if process.is_running()]
    return sum(each.user + each.system for each in times)


def digits(prompts: list[str], completions: list[str], **_: object) -> list[float]:
    """Reward the share of digits among a response's characters: a random model has some of every value."""
    return [sum(map(str.isdigit, text)) / max(len(text), 1) for text in completions]


def run_megasharp(setting: Setting) -> Figures:
    """Train as `megasharp train` does; a step begins where the loop begins it."""
    from megasharp.config.run_config import load_run
    from megasharp.trainer import loop
    from megasharp.trainer.resolve.resolved_run import check
    from megasharp.trainer.run import train

    overrides = [
        "name=bench",
        f"seed={setting.seed}",
        f"steps={setting.steps + 1}",
        f"model.path={setting.folder}",
        f"data.prompts_per_step={setting.prompts}",
        f"data.responses_per_prompt={setting.responses}",
        f"data.max_response_tokens={setting.max_new_tokens}",
        f"policy.optimizer.lr={setting.lr}",
        "policy.optimizer.warmup_steps=0",
        "policy.optimizer.decay=constant",
        "recipe.reduction=token_mean",
        "eval.suites=[]",
        f"checkpoint.every={setting.steps + 1}",
        "log.tensorboard=false",
        "log.rollouts=false",
    ]
    if setting.random:
        overrides.append(f"reward.function={Path(__file__).resolve()}:{digits.__name__}")
    ticks, train_step = Ticks(), loop.train_step

    def marked(*arguments: Any) -> Any:
        ticks.mark()
        return train_step(*arguments)

    loop.train_step = marked  # type: ignore[assignment]
    config = QUICKSTART / "run.yaml"
    with tempfile.TemporaryDirectory() as folder:
        run = train(check(load_run(config, overrides), str(config)), Path(folder) / "bench", resume=False, say=_silent)
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return ticks.figures([row["rollout/tokens"] for row in rows if "rollout/tokens" in row][: setting.steps])


def _silent(line: str) -> None:
    """The benchmark prints its own table."""


def run_trl(setting: Setting, processes: int) -> Figures | None:
    """Train with TRL on as many data-parallel processes; None but for the first of them."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from megasharp.tasks.countdown import verify
    from megasharp.tasks.table import load_items

    items = load_items("countdown", QUICKSTART / "data" / "train.jsonl")[: setting.prompts * (setting.steps + 2)]
    answers = {item.text: item.answer for item in items}
    ticks = Ticks()

    def solved(prompts: list[str], completions: list[str], **_: object) -> list[float]:
        return [verify(c, answers[p]).reward for p, c in zip(prompts, completions, strict=True)]

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: object, **__: object) -> None:
            ticks.mark()

    with tempfile.TemporaryDirectory() as output:
        arguments = GRPOConfig(
            output_dir=output,
            per_device_train_batch_size=setting.prompts * setting.responses // processes,
            num_generations=setting.responses,
            max_completion_length=setting.max_new_tokens,
            max_steps=setting.steps + 1,
            learning_rate=setting.lr,
            adam_beta2=0.95,
            lr_scheduler_type="constant",
            loss_type="dapo",
            temperature=1.0,
            beta=0.0,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            seed=setting.seed,
            save_strategy="no",
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(setting.folder),
            processing_class=AutoTokenizer.from_pretrained(setting.folder),
            reward_funcs=digits if setting.random else solved,
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": [item.text for item in items]}),
            callbacks=[Clock()],
        )
        trainer.train()
    if not trainer.is_world_process_zero():
        return None
    lengths = [row["completions/mean_length"] for row in trainer.state.log_history if "completions/mean_length" in row]
    responses = setting.prompts * setting.responses
    return ticks.figures([length * responses for length in lengths[: setting.steps]])


def _meet(processes: int, peers: ExitStack) -> None:
    """Start the other processes of a data-parallel run, where this is the first; torch meets by these variables."""
    if "RANK" in os.environ:
        return
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(world)
    for rank in reversed(range(processes)):
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        if rank:
            peers.enter_context(subprocess.Popen([sys.executable, *sys.argv], stdout=subprocess.DEVNULL))


def main() -> None:
    """Run one trainer, and print its figures as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainer", choices=("megasharp", "trl"))
    parser.add_argument("setting", help="the fields of Setting as JSON")
    parser.add_argument("--processes", type=int, default=1, help="data-parallel processes of TRL")
    arguments = parser.parse_args()
    setting = Setting(**json.loads(arguments.setting))
    figures: Figures | None
    with ExitStack() as peers:
        if arguments.trainer == "megasharp":
            figures = run_megasharp(setting)
        else:
            if arguments.processes > 1:
                _meet(arguments.processes, peers)
            figures = run_trl(setting, arguments.processes)
    if figures is not None:
        print(json.dumps({name: getattr(figures, name) for name in Figures.__slots__}))


if __name__ == "__main__":
    main()
