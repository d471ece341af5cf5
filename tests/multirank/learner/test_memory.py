"""The memory network beside the policy on the same ranks: its loss is transformers' own, the policy never notices.

With a window the learner, the in-process engine and transformers under the same mask say the same of every token.
Also the reference's own checkpoint, which a reset makes necessary.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

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

from megasharp.algos.base import Needs, OldLogp
from megasharp.algos.dlc import MemoryParams, cross_entropy_recipe
from megasharp.algos.recipe import training_sequence
from megasharp.batching.packing import PackLayout, row_multiple
from megasharp.common.records import (
    Completion,
    FinishReason,
    GenerateRequest,
    Group,
    Metrics,
    Outcome,
    Prompt,
    Response,
    SamplingParams,
    Sequence,
    TaskAnswer,
    Verdict,
)
from megasharp.learner.learner import MEMORY, POLICY, Rank
from megasharp.learner.ranks.all_ranks import MemoryNetwork, RanksLearner
from megasharp.rollout.inprocess import InProcessEngine

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
    network = MemoryNetwork(RanksLearner(ranks, MEMORY), cut, MemoryParams())
    try:
        batch = packed(ragged_sequences(), layout)
        for step in range(STEPS):
            learner.step(learner.annotate(batch, method.annotation), method)
            if with_memory:
                metrics.append(network.observe(groups(), step + 1, seed=step))
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


NEEDS = Needs(old_logp=OldLogp.BEFORE_STEP)
# Of responses of up to 20 tokens after prompts of 2 to 9.
WINDOWS = (1, 2, 5)


@dataclass(frozen=True)
class Windowed:
    """A memory network's log-probs by sequence, then one cross-entropy step: its loss, gradient norm and weights."""

    logp: dict[int, Tensor]
    loss: float
    grad_norm: float
    weights: dict[str, Tensor]


def train_windowed(
    rank: int, world: int, folder: str, sequences: list[Sequence], layout_names: list[str], windows: list[int | None]
) -> dict[tuple[str, int | None], Windowed]:
    found = {}
    for name, window in product(layout_names, windows):
        own = settings(folder, LAYOUTS[name], NEEDS, optimizer_settings(eps=1e-6), diagnostics=None)
        with learner_on(dataclasses.replace(own, response_window=window)) as (learner, _):
            batch = packed(sequences, LAYOUTS[name])
            logp = by_sequence(learner.annotate(batch, NEEDS), "old_logp_T")
            stats = learner.step(batch, cross_entropy_recipe())
            found[name, window] = Windowed(logp, stats.loss, stats.grad_norm, weights_of(learner))
    return found if rank == 0 else {}


def sampled(models: tuple[str, str], window: int | None) -> tuple[list[Sequence], dict[int, Tensor]]:
    """Two responses to each of four prompts by the in-process engine, and the memory's log-probs that it recorded."""
    engine = InProcessEngine(
        Path(models[0]), dtype=torch.float32, device=CPU, memory_folder=Path(models[1]), memory_window=window
    )
    networks = zip(("", "memory."), map(transformers_model, models), strict=True)
    engine.load_weights(0, [(prefix + name, x) for prefix, model in networks for name, x in model.named_parameters()])
    prompts = [(5, 9), (7, 3, 3, 1, 20, 31, 8, 2, 2), (50, 2, 11), (4, 4, 4, 4, 6)]
    requests = [GenerateRequest(tokens, (2 * i, 2 * i + 1)) for i, tokens in enumerate(prompts)]
    drawn = engine.generate(requests, SamplingParams(20, memory_mu=0.4, stop_token_ids=(7, 13)))
    sequences = []
    for number, (tokens, group) in enumerate(zip(prompts, drawn, strict=True)):
        prompt = Prompt(f"p{number}", "t", "", tokens, TaskAnswer(), "s", 0, number)
        responses = tuple(Response(completion, "", Verdict(Outcome.WRONG, 0.0)) for completion in group)
        sequences += [training_sequence(Group(f"g{number}", prompt, responses, 0), i, torch.zeros(1)) for i in range(2)]
    logp = dict(enumerate(completion.memory_logp for group in drawn for completion in group))
    assert all(each is not None for each in logp.values())
    return sequences, logp


def transformers_model(folder: str) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def oracle(folder: str, sequences: list[Sequence], window: int) -> tuple[dict[int, Tensor], float, float]:
    """Log-probs by sequence, mean cross-entropy and its gradient's norm; in float64, by a mask of loops."""
    model = transformers_model(folder).double()
    logp = {}
    for number, sequence in enumerate(sequences):
        tokens, prompt = sequence.tokens, sequence.prompt_length
        rows = range(len(tokens))
        seen = [[key <= query and (key < prompt or key > query - window) for key in rows] for query in rows]
        mask = torch.zeros(len(tokens), len(tokens)).double().masked_fill(~torch.tensor(seen), float("-inf"))
        logits = model(tokens[None], attention_mask=mask[None, None]).logits[0, prompt - 1 : -1]
        logp[number] = logits.log_softmax(-1).gather(1, tokens[prompt:, None])[:, 0]
    loss = -torch.cat(list(logp.values())).mean()
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    return {number: each.detach() for number, each in logp.items()}, loss.item(), norm.item()


def assert_windowed(models: tuple[str, str], window: int, layout: str = "tp1") -> None:
    sequences, recorded = sampled(models, window)
    assert max(map(len, recorded.values())) > window + 2
    (found,) = run_ranks(1, train_windowed, models[1], sequences, [layout], [window, None, 20])
    got, expected = found[layout, window], oracle(models[1], sequences, window)
    for number, logp in expected[0].items():
        torch.testing.assert_close(got.logp[number].double(), logp, atol=1e-5, rtol=0)
        torch.testing.assert_close(got.logp[number], recorded[number], atol=1e-5, rtol=0)
    assert (got.loss, got.grad_norm) == pytest.approx(expected[1:], rel=1e-5)
    # Without a window it is another network; with one of the longest response it is the same, bit for bit.
    plain, whole = found[layout, None], found[layout, 20]
    assert abs(plain.loss - got.loss) > 1e-3
    assert whole.loss == plain.loss and whole.grad_norm == plain.grad_norm
    assert all(torch.equal(whole.weights[name], weight) for name, weight in plain.weights.items())


def test_with_a_window_learner_engine_and_transformers_agree_on_every_token(models: tuple[str, str]) -> None:
    assert_windowed(models, 2)


@pytest.mark.long("layouts")
@pytest.mark.parametrize("window", [1, 5, 13])
def test_with_any_window_learner_engine_and_transformers_agree(models: tuple[str, str], window: int) -> None:
    assert_windowed(models, window)


@pytest.mark.long("layouts")
@pytest.mark.parametrize(("world", "layouts"), [(2, ["tp2", "pp2", "cp2", "dp2"]), (4, ["tp2cp2", "pp2cp2", "tp2pp2"])])
def test_with_a_window_every_layout_trains_the_same_memory(
    models: tuple[str, str], world: int, layouts: list[str]
) -> None:
    sequences, _ = sampled(models, 2)
    (plain,) = run_ranks(1, train_windowed, models[1], sequences, ["tp1"], [*WINDOWS])
    split = run_ranks(world, train_windowed, models[1], sequences, layouts, [*WINDOWS])[0]
    assert len(split) == len(layouts) * len(WINDOWS)
    for (layout, window), got in split.items():
        expected = plain["tp1", window]
        for number, logp in expected.logp.items():
            torch.testing.assert_close(got.logp[number], logp, atol=1e-5, rtol=0)
        assert got.loss == pytest.approx(expected.loss, rel=1e-6), (layout, window)
        assert got.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5), (layout, window)
        for name, weight in expected.weights.items():
            assert (got.weights[name] - weight).norm() <= 1e-4 * weight.norm(), (layout, window, name)


def cold_weights(rank: int, world: int, folder: str, layout_name: str) -> dict[str, Tensor]:
    own = dataclasses.replace(settings(folder, LAYOUTS[layout_name], Needs()), cold=True)
    with learner_on(own) as (learner, _):
        return weights_of(learner)


@pytest.mark.long("layouts")
def test_a_cold_network_is_the_same_under_every_layout(models: tuple[str, str]) -> None:
    """Bit for bit, tied and with a vocabulary that is padded; no weight is that of the folder."""
    for folder in models:
        (alone,) = run_ranks(1, cold_weights, folder, "tp1")
        for layout in ("tp2", "pp2"):
            split = run_ranks(2, cold_weights, folder, layout)[0]
            assert split.keys() == alone.keys()
            assert all(torch.equal(split[name], weight) for name, weight in alone.items())
        assert 0.01 < float(alone["model.embed_tokens.weight"].std()) < 0.03


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
