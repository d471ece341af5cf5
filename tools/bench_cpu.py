"""Seconds per GRPO step on one CPU machine: megasharp beside TRL's GRPOTrainer.

    make bench        (or: python tools/bench_cpu.py --rounds 3 --steps 12)

The same model, task, verifier, batch, sampling and number of steps; the two in turn, A B A B, each in a process of its
own, so that a noisy machine is noisy for both. A step is everything between two optimizer steps: sampling,
verification, forward, backward, update and (ours) handing the weights to the engine. The first steps are warm-up and do
not count.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
WARM_UP = 2


@dataclass(frozen=True, slots=True)
class Setting:
    """What both trainers do: 48 prompts x 8 responses of at most 18 tokens, Adam at 2e-4, no KL."""

    steps: int
    threads: int
    prompts: int = 48
    responses: int = 8
    max_new_tokens: int = 18
    lr: float = 2.0e-4
    seed: int = 1


def run_megasharp(setting: Setting) -> list[float]:
    """Seconds of each step, from the run's own clock."""
    from megasharp.config.run_config import load_run
    from megasharp.trainer.resolve.resolved_run import check
    from megasharp.trainer.run import train

    overrides = [
        "name=bench",
        f"seed={setting.seed}",
        f"steps={setting.steps}",
        f"data.prompts_per_step={setting.prompts}",
        f"data.responses_per_prompt={setting.responses}",
        f"data.max_response_tokens={setting.max_new_tokens}",
        f"policy.optimizer.lr={setting.lr}",
        "eval.suites=[]",
        f"checkpoint.every={setting.steps}",
        "log.tensorboard=false",
        "log.rollouts=false",
    ]
    config = REPOSITORY / "examples" / "quickstart" / "run.yaml"
    with tempfile.TemporaryDirectory() as folder:
        run = train(check(load_run(config, overrides), str(config)), Path(folder) / "bench", resume=False, say=_silent)
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["time/step"] for row in rows if "time/step" in row]


def _silent(line: str) -> None:
    """The benchmark prints its own table."""


def run_trl(setting: Setting) -> list[float]:
    """Seconds between the ends of TRL's steps."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from megasharp.tasks.countdown import verify
    from megasharp.tasks.table import load_items

    folder = REPOSITORY / "examples" / "quickstart"
    items = load_items("countdown", folder / "data" / "train.jsonl")[: setting.prompts * (setting.steps + 1)]
    answers = {item.text: item.answer for item in items}

    def reward(prompts: list[str], completions: list[str], **_: object) -> list[float]:
        return [verify(c, answers[p]).reward for p, c in zip(prompts, completions, strict=True)]

    class Clock(TrainerCallback):  # type: ignore[misc]
        ends: list[float] = []

        def on_step_end(self, *args: object, **kwargs: object) -> None:
            self.ends.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as output:
        arguments = GRPOConfig(
            output_dir=output,
            per_device_train_batch_size=setting.prompts * setting.responses,
            num_generations=setting.responses,
            max_completion_length=setting.max_new_tokens,
            max_steps=setting.steps,
            learning_rate=setting.lr,
            adam_beta2=0.95,
            lr_scheduler_type="constant",
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
            model=AutoModelForCausalLM.from_pretrained(folder / "base"),
            processing_class=AutoTokenizer.from_pretrained(folder / "base"),
            reward_funcs=reward,
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": [item.text for item in items]}),
            callbacks=[Clock()],
        )
        start = time.perf_counter()
        trainer.train()
    ends = [start, *Clock.ends]
    return [after - before for before, after in pairwise(ends)]


TRAINERS = {"megasharp": run_megasharp, "trl": run_trl}


def measure(trainer: str, setting: Setting) -> float:
    """Median seconds per step of one fresh process, warm-up left out."""
    command = [sys.executable, __file__, "--only", trainer, "--steps", str(setting.steps)]
    command += ["--threads", str(setting.threads)]
    # A machine's GPUs are for neither.
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    if setting.threads:
        environment["OMP_NUM_THREADS"] = str(setting.threads)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{trainer} failed:\n{done.stderr[-3000:]}")
    seconds: list[float] = json.loads(done.stdout.splitlines()[-1])
    return statistics.median(seconds[WARM_UP:])


def main() -> None:
    """Parse, measure in turn, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="how often each trainer runs")
    parser.add_argument("--steps", type=int, default=12, help="steps a run")
    parser.add_argument("--threads", type=int, default=0, help="0: as each trainer chooses on this machine")
    parser.add_argument("--only", choices=TRAINERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    setting = Setting(steps=arguments.steps, threads=arguments.threads)
    if arguments.only:
        print(json.dumps(TRAINERS[arguments.only](setting)))
        return
    ratios = []
    print(f"{'round':>5}  {'megasharp s/step':>16}  {'TRL s/step':>10}  {'ratio':>6}")
    for round_ in range(arguments.rounds):
        ours, theirs = measure("megasharp", setting), measure("trl", setting)
        ratios.append(ours / theirs)
        print(f"{round_ + 1:>5}  {ours:>16.3f}  {theirs:>10.3f}  {ratios[-1]:>6.2f}", flush=True)
    print(f"median ratio {statistics.median(ratios):.2f} (bar 1.0, goal 0.7)")


if __name__ == "__main__":
    main()
