"""SIGKILL at fifty random points of a run that saves all the time: what `latest` names is always complete and true.

Each life takes up where the one before was killed, trains and saves in the background without a pause. What a
checkpoint holds is compared with a journal that was written before its save began.
"""

from __future__ import annotations

import multiprocessing
import random
import shutil
import time
from pathlib import Path

import pytest
import torch
from launch import forked_environment
from policies import CPU, LAYOUTS, packed, ragged_sequences, recipe, save_model, settings, weights_of
from waiting import HANG_S

from megasharp.checkpoint.recorded import LATEST
from megasharp.checkpoint.store import CheckpointStore, RunState, Writing
from megasharp.convert.record import tensor_sha256, weights_sha256
from megasharp.learner.learner import POLICY
from megasharp.learner.ranks.all_ranks import OneRank, RanksLearner

KILLS = 50
pytestmark = [pytest.mark.long("saves"), pytest.mark.timeout(900)]


class Shards:
    """The learner's shards on their way."""

    def __init__(self, learner: RanksLearner) -> None:
        self.is_written = learner.saves_are_written
        self.finish = learner.finish_saves


def digest(learner: RanksLearner) -> str:
    return weights_sha256({name: tensor_sha256(weight) for name, weight in weights_of(learner).items()})


def live(root: Path, model: str) -> None:
    """Take up, check, then train and save until the end comes."""
    torch.set_num_threads(1)
    learner = RanksLearner(OneRank({POLICY: settings(model, LAYOUTS["tp1"], recipe().needs)}, CPU))
    store = CheckpointStore(root / "checkpoints", keep_last=2, keep_every=None)
    found = store.take_up(lambda problem: (root / "damaged").write_text(problem) and None)
    step = 0
    if found is not None:
        folder, state = found
        learner.load(folder)
        step = state.step
        if f"{step} {digest(learner)}" not in (root / "journal").read_text().splitlines():
            (root / "another").write_text(f"the weights of step {step} are not those that were saved")
    batch = packed(ragged_sequences(), LAYOUTS["tp1"])

    def begin(folder: Path) -> Writing:
        learner.begin_save(folder, copy=True)
        return Shards(learner)

    while True:
        step += 1
        learner.step(batch, recipe())
        with (root / "journal").open("a") as journal:
            journal.write(f"{step} {digest(learner)}\n")
        store.begin(RunState(reference="base", step=step), begin)
        store.poll()


def newest(root: Path) -> int:
    """The step that `latest` names, whose files are whole; 0 before the first."""
    latest = root / "checkpoints" / LATEST
    if not latest.exists():
        return 0
    folder = root / "checkpoints" / latest.read_text().strip()
    assert CheckpointStore.problem(folder) is None
    return int(folder.name.removeprefix("step_"))


def test_latest_is_whole_after_every_kill(tmp_path: Path) -> None:
    model = save_model(tmp_path, "qwen3-tied")
    choice = random.Random(0)
    context = multiprocessing.get_context("forkserver")
    steps, torn = [0], 0
    for _ in range(KILLS):
        with forked_environment():
            process = context.Process(target=live, args=(tmp_path, model))
            process.start()
        deadline = time.monotonic() + HANG_S
        while newest(tmp_path) == steps[-1]:
            assert process.is_alive() and time.monotonic() < deadline, "a life saves at least once"
            time.sleep(0.01)
        time.sleep(choice.uniform(0.0, 0.4))
        process.kill()
        process.join()
        torn += any((tmp_path / "checkpoints").glob(".step_*.partial"))
        steps.append(newest(tmp_path))
    print(f"{KILLS} kills, {torn} in the middle of a save; {steps[-1]} steps saved")
    assert steps == sorted(set(steps)), "no save is lost"
    assert torn > KILLS / 4, "the kills met saves"
    assert not (tmp_path / "damaged").exists() and not (tmp_path / "another").exists()
    shutil.rmtree(tmp_path / "checkpoints")
