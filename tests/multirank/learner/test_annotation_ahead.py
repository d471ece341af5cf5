"""Groups from a stand-in engine, annotated by a real learner while it samples: the log-probs of one pass after it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from policies import CPU, LAYOUTS, by_sequence, ragged_sequences, recipe, save_model, settings
from waiting import HANG_S

from megasharp.algos.base import Needs
from megasharp.batching.packing import PackLayout, pack
from megasharp.common.records import Outcome, Prompt, SamplingParams, StepBatch, TaskAnswer, Verdict
from megasharp.config.rollout import RolloutConfig
from megasharp.learner.learner import POLICY
from megasharp.learner.ranks.all_ranks import OneRank, RanksLearner
from megasharp.rollout.async_collector import AsyncRollouts
from megasharp.rollout.step_request import GroupMaker, StepRequest
from megasharp.tasks.judge import DirectJudge
from megasharp.trainer.annotation_ahead import AnnotationAhead
from tests.unit.rollout.standin_engine import StandInEngine

METHOD = recipe(("grpo", "kl"), mini_batches=2)
LAYOUT = PackLayout(dp=1, micro_batch_tokens=24, mini_batches=2, row_multiple=1, constant=12.0)


class Prompts:
    """Prompts 0, 1, 2, ..."""

    def __init__(self) -> None:
        self.taken = 0

    def take(self, count: int) -> list[Prompt]:
        numbers = range(self.taken, self.taken + count)
        self.taken += count
        return [Prompt(f"p{n}", "odd", "", (n, n + 1), TaskAnswer(), "s", 0, n) for n in numbers]


def judge(text: str, answer: TaskAnswer) -> Verdict:
    return Verdict(Outcome.CORRECT, 1.0) if len(text) % 2 else Verdict(Outcome.WRONG, 0.0)


def test_log_probs_of_finished_groups_are_those_of_a_pass_after_sampling(tmp_path: Path) -> None:
    """The last prompt goes on until two pieces are annotated; weights and reference differ by an update.

    The columns go to the ranks with the step, which have another share by then.
    """
    pieces, annotated = [0], threading.Event()

    def pace(prompt: int) -> float:
        if prompt == 7:
            assert annotated.wait(HANG_S), "nothing was annotated while engines sampled"
        return 0.0005

    def annotate(batch: StepBatch, needs: Needs, returned: Needs | None) -> StepBatch:
        found = learner.annotate(batch, needs, returned)
        pieces[0] += 1
        if pieces[0] == 2:
            annotated.set()
        return found

    sampling = SamplingParams(max_tokens=12)
    maker = GroupMaker(DirectJudge({"odd": judge}), lambda rows: ["x" * len(row) for row in rows], sampling, 3, seed=5)
    rollouts = AsyncRollouts(StandInEngine(pace), maker, RolloutConfig())
    values = settings(save_model(tmp_path, "qwen3-tied"), LAYOUTS["tp1"], METHOD.needs)
    learner = RanksLearner(OneRank({POLICY: values}, CPU))
    try:
        ahead = AnnotationAhead(annotate, METHOD.annotation, METHOD.annotation, LAYOUT, 2)
        learner.step(pack(ragged_sequences(), LAYOUT, 1), recipe())
        groups = rollouts.collect(Prompts(), StepRequest(2, 8, list, meanwhile=ahead)).groups
        samples = METHOD.advantages(groups)
        batch = pack(samples, LAYOUT, 2)
        found, expected = ahead.complete(batch, samples), learner.annotate(batch, METHOD.annotation)
        for column in ("old_logp_T", "ref_logp_T"):
            theirs = by_sequence(expected, column)
            for flat, logp_T in by_sequence(found, column).items():
                torch.testing.assert_close(logp_T, theirs[flat], atol=1e-5, rtol=0)
        old, reference = (by_sequence(found, column) for column in ("old_logp_T", "ref_logp_T"))
        # No update is applied above a gradient norm of 0, so that both have the same weights.
        losses = [learner.step(each, METHOD, norm_limit=0.0).loss for each in (found, expected)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
        assert max(float((old[flat] - reference[flat]).abs().max()) for flat in old if old[flat].numel()) > 0.01
    finally:
        learner.close()
