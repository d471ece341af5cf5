"""The memory network beside the policy on the same ranks: its loss is transformers' own, the policy never notices.

Also the reference's own checkpoint, which a reset makes necessary.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from launch import run_ranks
from policies import (
    CPU,
    LAYOUTS,
    GatheredRanks,
    by_sequence,
    learner_on,
    optimizer_settings,
    packed,
    ragged_sequences,
    recipe,
    save_model,
    settings,
    weights_of,
)
from torch import Tensor

from megasharp.algos.base import Needs
from megasharp.batching.packing import PackLayout, row_multiple
from megasharp.common.records import (
    Completion,
    FinishReason,
    Group,
    Metrics,
    Outcome,
    Prompt,
    Response,
    TaskAnswer,
    Verdict,
)
from megasharp.learner.learner import MEMORY, POLICY, Rank
from megasharp.learner.ranks.all_ranks import MemoryNetwork, RanksLearner

STEPS = 3
TEMPERATURE = 0.7


def groups() -> list[Group]:
    """Three groups: one dropped by selection, one with an infra failure, one response empty."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for number, lengths in enumerate([(4, 7), (1, 5, 3), (6, 0)]):
        responses = []
        for length in lengths:
            tokens = torch.randint(0, 53, (length,), generator=generator)
            logp = torch.zeros(length)
            completion = Completion(tokens, logp, logp, None, (), FinishReason.STOP, seed=number)
            outcome = Outcome.INFRA if length == 3 else Outcome.WRONG
            responses.append(Response(completion, "", Verdict(outcome, 0.0)))
        prompt = Prompt(f"p{number}", "t", "", (5, 9, 2 + number), TaskAnswer(), "s", 0, number)
        made.append(Group(f"g{number}", prompt, tuple(responses), 0, "uniform" if number == 0 else None))
    return made


@dataclass(frozen=True)
class Result:
    """What three steps of both networks leave behind."""

    metrics: list[Metrics]
    memory: dict[str, Tensor]
    policy: dict[str, Tensor]


def train_both(rank: int, world: int, policy: str, memory: str, layout_name: str, with_memory: bool) -> Result:
    layout = LAYOUTS[layout_name]
    method = recipe()
    own = settings(policy, layout, method.needs, optimizer_settings(eps=1e-6), temperature=TEMPERATURE)
    values = {POLICY: own}
    if with_memory:
        values[MEMORY] = dataclasses.replace(own, folder=memory, needs=Needs(), temperature=1.0, diagnostics=None)
    ranks = GatheredRanks(Rank(values, CPU))
    learner, metrics = RanksLearner(ranks), []
    cut = PackLayout(layout.dp, 16, 2, row_multiple(layout, "cpu"), 40.0)
    network = MemoryNetwork(RanksLearner(ranks, MEMORY), cut)
    try:
        batch = packed(ragged_sequences(), layout)
        for step in range(STEPS):
            learner.step(learner.annotate(batch, method.annotation), method)
            if with_memory:
                metrics.append(network.observe(groups(), seed=step))
        return Result(metrics, weights_of(RanksLearner(ranks, MEMORY)) if with_memory else {}, weights_of(learner))
    finally:
        learner.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return save_model(folder, "qwen3-tied"), save_model(folder, "qwen3", num_hidden_layers=2, hidden_size=16)


@pytest.fixture(scope="module")
def alone(models: tuple[str, str]) -> Result:
    return run_ranks(1, train_both, *models, "tp1", True)[0]


def cross_entropy(folder: str) -> float:
    """Of the saved network, over all response tokens of all groups, by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    total = count = 0.0
    for group in groups():
        for response in group.responses:
            tokens = torch.tensor([*group.prompt.tokens, *response.completion.tokens.tolist()])
            logp = model(tokens[None]).logits[0].detach().log_softmax(-1)
            first = len(group.prompt.tokens)
            total -= sum(float(logp[i - 1, tokens[i]]) for i in range(first, len(tokens)))
            count += len(tokens) - first
    return total / count


def test_loss_is_the_cross_entropy_of_everything_sampled(models: tuple[str, str], alone: Result) -> None:
    """At temperature 1, whatever the rollouts' is; dropped groups and infra failures were sampled too."""
    assert alone.metrics[0]["memory/cross_entropy"].value == pytest.approx(cross_entropy(models[1]), rel=1e-5)
    losses = [metrics["memory/cross_entropy"].value for metrics in alone.metrics]
    assert losses[0] > losses[1] > losses[2]
    assert {name.split("/")[0] for name in alone.metrics[0]} == {"memory"}


def test_policy_does_not_notice_the_memory(models: tuple[str, str], alone: Result) -> None:
    (without,) = run_ranks(1, train_both, *models, "tp1", False)
    assert all(torch.equal(without.policy[name], weight) for name, weight in alone.policy.items())


@pytest.mark.parametrize(
    "layout", ["tp2", *(pytest.param(layout, marks=pytest.mark.long("layouts")) for layout in ("pp2", "dp2", "cp2"))]
)
def test_every_layout_trains_the_same_memory(models: tuple[str, str], alone: Result, layout: str) -> None:
    split = run_ranks(2, train_both, *models, layout, True)[0]
    for got, expected in zip(split.metrics, alone.metrics, strict=True):
        for name, metric in expected.items():
            assert got[name].value == pytest.approx(metric.value, rel=1e-4), name
    assert split.memory.keys() == alone.memory.keys()
    for name, weight in alone.memory.items():
        assert (split.memory[name] - weight).norm() <= 1e-4 * weight.norm(), name


def reference_logp(
    rank: int, world: int, folder: str, layout_name: str, save_to: str | None, load_from: str | None
) -> dict[int, Tensor]:
    """Log-probs of the reference: after a step and `set_reference`, or as read from a folder by a fresh learner."""
    layout, method = LAYOUTS[layout_name], recipe(("grpo", "kl"))
    with learner_on(settings(folder, layout, method.needs)) as (learner, _):
        batch = packed(ragged_sequences(), layout)
        if load_from is None:
            learner.step(learner.annotate(batch, method.annotation), method)
            learner.set_reference()
            # The policy moves on, so that saving it in the reference's place would be seen.
            learner.step(learner.annotate(batch, method.annotation), method)
        else:
            before = weights_of(learner)
            learner.load_reference(Path(load_from))
            assert all(torch.equal(before[name], weight) for name, weight in weights_of(learner).items())
        if save_to is not None:
            learner.begin_save_reference(Path(save_to))
            learner.finish_saves()
        return by_sequence(learner.annotate(batch, method.annotation), "ref_logp_T")


def test_a_moved_reference_is_saved_and_read_under_another_layout(models: tuple[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "reference"
    folder.mkdir()
    (moved,) = run_ranks(1, reference_logp, models[0], "tp1", str(folder), None)
    again = run_ranks(2, reference_logp, models[0], "tp2", None, str(folder))[0]
    (first,) = run_ranks(1, reference_logp, models[0], "tp1", None, str(folder))
    for flat, logp_T in moved.items():
        torch.testing.assert_close(first[flat], logp_T, atol=0, rtol=0)
        torch.testing.assert_close(again[flat], logp_T, atol=1e-5, rtol=0)
