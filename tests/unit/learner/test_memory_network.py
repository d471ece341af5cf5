"""The memory network between the loop and its learner: what it learns in a step, again, and not at all."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from megasharp.algos.dlc import MemoryParams
from megasharp.algos.recipe import Recipe
from megasharp.batching.packing import PackLayout
from megasharp.checkpoint.rollout_store import read_replay, write_replay
from megasharp.common.records import (
    Completion,
    Episode,
    FinishReason,
    Group,
    Outcome,
    Prompt,
    Response,
    Sampled,
    StepBatch,
    StepStats,
    TaskAnswer,
    Turn,
    Verdict,
)
from megasharp.learner.ranks.all_ranks import MemoryNetwork, RanksLearner, _sequences
from megasharp.learner.weights import first_weights

LAYOUT = PackLayout(dp=1, micro_batch_tokens=64, mini_batches=7, row_multiple=8, constant=8.0)
MODEL = Path(__file__).parents[3] / "examples" / "quickstart" / "memory"


class Learner:
    """Notes the targets of every optimizer step."""

    def __init__(self) -> None:
        self.learned: list[list[int]] = []

    def step(self, batch: StepBatch, recipe: Recipe) -> StepStats:
        micros = [[micro for rank in mini.per_rank for micro in rank] for mini in batch.mini_batches]
        self.learned += [[int(t) for micro in mini for t in micro.targets_T] for mini in micros]
        return StepStats(1.0, 2.0, 0.5, 0, {}, tuple(2.0 for _ in micros))


def group(step: int, number: int, *responses: list[int], ended: FinishReason = FinishReason.STOP) -> Group:
    """A group whose first response has ended as `ended`, which an engine's failure does before the end token."""
    made = []
    for tokens in responses:
        logp = torch.zeros(len(tokens))
        completion = Completion(torch.tensor(tokens, dtype=torch.int64), logp, logp, None, (), ended, 0)
        outcome = Outcome.INFRA if ended is FinishReason.ABORT else Outcome.WRONG
        made.append(Response(completion, "", Verdict(outcome, 0.0)))
        ended = FinishReason.STOP
    prompt = Prompt(f"p{number}", "t", "", (5, 9), TaskAnswer(), "s", 0, number)
    return Group(f"step{step}-{number}", prompt, tuple(made), 0, "uniform" if number else None)


def network(**keys: Any) -> tuple[MemoryNetwork, Learner]:
    learner = Learner()
    return MemoryNetwork(cast(RanksLearner, learner), LAYOUT, MemoryParams(**keys)), learner


def two(step: int) -> list[Group]:
    """Two groups whose tokens say of which step they are."""
    return [group(step, number, [10 * step + number] * (number + 1)) for number in range(2)]


def test_what_was_begun_and_aborted_is_learned_and_nothing_is_asked_of_groups_without_a_token() -> None:
    memory, learner = network()
    metrics = memory.observe([group(1, 0, [3, 4], [5], ended=FinishReason.ABORT), group(1, 1, [], [])], 1, 0)
    assert learner.learned == [[3, 4, 5]]
    assert {name: metric.value for name, metric in metrics.items()} == {
        "memory/optimizer_steps": 1.0,
        "memory/tokens": 3.0,
        "memory/replayed_tokens": 0.0,
        "memory/grad_norm": 2.0,
        "memory/learning_rate": 0.5,
        "memory/skipped": 0.0,
    }
    assert memory.observe([group(2, 0, [])], 2, 0)["memory/optimizer_steps"].value == 0.0
    assert len(learner.learned) == 1


def test_steps_share_out_the_groups_and_learn_each_once() -> None:
    memory, learner = network(steps=2)
    assert memory.observe(two(1), 1, 0)["memory/optimizer_steps"].value == 2.0
    assert learner.learned == [[10], [11, 11]]


def test_replay_learns_the_last_steps_again_mixed_with_the_new() -> None:
    memory, learner = network(steps=2, replay=2)
    for step in (1, 2, 3, 4):
        metrics = memory.observe(two(step), step, 0)
    assert [sorted(tokens) for tokens in learner.learned[-2:]] == [[20, 30, 40], [21, 21, 31, 31, 41, 41]]
    assert (metrics["memory/tokens"].value, metrics["memory/replayed_tokens"].value) == (9.0, 6.0)


def test_a_frozen_network_learns_nothing_and_remembers_what_to_replay() -> None:
    memory, learner = network(freeze_until=2, replay=1)
    for step in (1, 2):
        assert memory.observe(two(step), step, 0)["memory/optimizer_steps"].value == 0.0
    assert learner.learned == []
    memory.observe(two(3), 3, 0)
    assert sorted(learner.learned[0]) == [20, 21, 21, 30, 31, 31]


@pytest.mark.parametrize("replay", [0, 2])
def test_a_resumed_network_replays_what_the_uninterrupted_one_does(tmp_path: Path, replay: int) -> None:
    memory, learner = network(replay=replay)
    for step in (1, 2, 3):
        memory.observe(two(step), step, 0)
    write_replay(tmp_path, memory.recent)
    assert any(tmp_path.iterdir()) == (replay > 0)
    again, resumed = network(replay=replay)
    again.take_up(read_replay(tmp_path))
    for step in (4, 5):
        assert again.observe(two(step), step, 0) == memory.observe(two(step), step, 0)
    assert resumed.learned == learner.learned[3:]
    for one, other in zip(chain(*memory.recent), chain(*again.recent), strict=True):
        assert one.group_id == other.group_id and one.prompt.dtype == other.prompt.dtype == torch.int32
        assert all(map(torch.equal, (one.prompt, *one.responses), (other.prompt, *other.responses)))


def test_what_an_environment_said_is_no_token_to_learn_also_after_a_resume(tmp_path: Path) -> None:
    """Places [1, 3) of the first response are its environment's; the second has none."""
    plain = group(1, 0, [3, 4, 5, 6], [7, 8])
    first, second = plain.responses
    answered = replace(first.completion, episode=Episode((Turn(0, 1, 3),)))
    sampled = Sampled.of(replace(plain, responses=(replace(first, completion=answered), second)))
    write_replay(tmp_path, [[sampled], [Sampled.of(plain)]])
    for found, masks in zip(
        chain([sampled], *read_replay(tmp_path)), ([1, 0, 0, 1], [1, 0, 0, 1], [1] * 4), strict=True
    ):
        assert [sequence.mask_T.tolist() for sequence in _sequences([found])] == [masks, [1, 1]]
        assert found.tokens == sum(masks) + 2


def test_a_cold_network_is_drawn_by_name_from_the_seed(tmp_path: Path) -> None:
    """Of a folder without weights; whole tensors, of which every layout takes its parts."""
    (tmp_path / "config.json").write_bytes((MODEL / "config.json").read_bytes())
    names = ("model.embed_tokens.weight", "model.layers.0.mlp.gate_proj.weight", "model.layers.1.mlp.gate_proj.weight")
    drawn = []
    for seed in (1, 1, 2):
        with first_weights(tmp_path, cold=seed) as source:
            drawn.append([source.tensor(name) for name in names])
            assert torch.equal(source.tensor("model.norm.weight"), torch.ones(source.architecture.hidden))
    assert all(map(torch.equal, drawn[0], drawn[1])) and not any(map(torch.equal, drawn[0], drawn[2]))
    assert not torch.equal(drawn[0][1], drawn[0][2])
    assert all(float(tensor.std()) == pytest.approx(0.02, rel=0.05) for tensor in drawn[0])
