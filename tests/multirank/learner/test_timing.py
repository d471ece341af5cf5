"""An update's parts: each is timed, none twice, and passes before the update are none of them."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from policies import packed, ragged_sequences, recipe, save_model, settings

from megasharp.algos.base import Needs, OldLogp
from megasharp.common.layout import ParallelLayout
from megasharp.learner.forward import StageTimers
from megasharp.learner.learner import POLICY
from megasharp.learner.ranks.all_ranks import OneRank, RanksLearner


def test_parts_add_up_to_less_than_the_update(tmp_path: Path) -> None:
    chosen, layout = recipe(), ParallelLayout()
    own = settings(save_model(tmp_path, "qwen3-tied"), layout, chosen.needs)
    learner = RanksLearner(OneRank({POLICY: own}, torch.device("cpu")))
    try:
        shares = []
        for _ in range(4):
            batch = learner.annotate(packed(ragged_sequences(), layout), Needs(old_logp=OldLogp.BEFORE_STEP))
            began = time.perf_counter()
            stats = learner.step(batch, chosen)
            taken = time.perf_counter() - began
            assert stats.seconds.keys() == {"forward", "backward", "gradient_sync", "optimizer"}
            assert min(stats.seconds.values()) > 0
            shares.append(sum(stats.seconds.values()) / taken)
        # Whatever else runs takes its time where it likes.
        assert 0.3 < max(shares) < 1.0
    finally:
        learner.close()


def test_a_timer_adds_up_and_begins_anew() -> None:
    timers = StageTimers(torch.device("cpu"))
    for _ in range(2):
        timers("forward-compute", log_level=2).start()
        time.sleep(0.01)
        timers("forward-compute").stop()
        timers("not-told-of").start()
        timers("not-told-of").stop()
    with timers.stage("optimizer"):
        time.sleep(0.01)
    found = timers.take()
    assert found.keys() == {"forward", "optimizer"} and found["forward"] >= 0.02 and timers.take() == {}
