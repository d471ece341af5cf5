"""A mixture's routers against transformers: experts that are given to them, what they count, how they are balanced."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from launch import run_ranks
from policies import (
    LAYOUTS,
    learner_on,
    make_model,
    micro_batches,
    packed,
    ragged_sequences,
    recipe,
    save_model,
    settings,
)
from torch import Tensor

from megasharp.algos.base import Needs, OldLogp
from megasharp.batching.packing import PackLayout, pack
from megasharp.common.records import MicroBatch, StepBatch, StepStats
from megasharp.learner import layer_spec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NEEDS = Needs(old_logp=OldLogp.BEFORE_STEP)
REPLAYS: dict[str, Any] = {"experts": {"replay": True}}
# Weights of the chosen experts add up to 1 in the first model alone.
MODELS = ("qwen3moe", "qwen3moe-tied")
CASES = (
    ("tp1", {}),
    ("tp1", {"recompute": "full"}),
    ("ep2", {"recompute": "selective"}),
    ("tp2ep2", {"recompute": "full"}),
    ("cp2ep2", {}),
    ("pp2ep2", {"recompute": "full"}),
)
LAYOUTS_HERE = ("tp2ep2", "cp2ep2", "pp2ep2")
Choose = Callable[[MicroBatch, torch.nn.Module], Tensor]


def at_random(micro: MicroBatch, model: PreTrainedModel) -> Tensor:
    """Experts [P, L, K] that no router has chosen."""
    config = model.config
    generator = torch.Generator().manual_seed(micro.rows)
    noise = torch.rand(micro.rows, config.num_hidden_layers, config.num_experts, generator=generator)
    return noise.topk(config.num_experts_per_tok, dim=-1).indices.to(torch.uint8)


def its_own(micro: MicroBatch, model: PreTrainedModel) -> Tensor:
    """The experts that transformers' routers choose for every row; those of padding are any."""
    experts_PLK = at_random(micro, model)
    for rows, own in runs_of(micro):
        routed = traced(model, micro.tokens_P[rows])[1]
        experts_PLK[rows[-own:]] = torch.stack(routed, dim=1)[-own:].to(torch.uint8)
    return experts_PLK


def runs_of(micro: MicroBatch) -> list[tuple[Tensor, int]]:
    """Each run's rows after those of its prefix, and how many are its own; padding is a run, too."""
    runs = micro.segments
    spans = [torch.arange(s, s + n) for s, n in zip(runs.start.tolist(), runs.length.tolist(), strict=True)]
    before = [spans[prefix] if prefix >= 0 else spans[0][:0] for prefix in runs.prefix.tolist()]
    return [(torch.cat(pair), len(pair[1])) for pair in zip(before, spans, strict=True)]


def traced(
    model: PreTrainedModel, tokens_T: Tensor, given_TLK: Tensor | None = None
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """transformers' logits [T, V], and each layer's experts [T, K] and router logits [T, E]; experts as given."""
    chosen, scores = [], []

    def route(module: Any, args: tuple[Tensor], output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, experts = output
        if given_TLK is not None:
            experts = given_TLK[:, len(chosen)].long()
            weights = logits.softmax(-1).gather(1, experts)
            weights = weights / weights.sum(1, keepdim=True) if model.config.norm_topk_prob else weights
        chosen.append(experts)
        scores.append(logits)
        return logits, weights, experts

    hooks = [layer.mlp.gate.register_forward_hook(route) for layer in model.model.layers]
    logits = model(tokens_T[None]).logits[0]
    for hook in hooks:
        hook.remove()
    return logits, chosen, scores


def given(batch: StepBatch, choose: Choose, model: PreTrainedModel) -> StepBatch:
    """The batch with each micro-batch's experts."""

    def changed(micro: MicroBatch) -> MicroBatch:
        return dataclasses.replace(micro, experts_PLK=choose(micro, model))

    minis = [
        dataclasses.replace(mini, per_rank=tuple(tuple(map(changed, rank)) for rank in mini.per_rank))
        for mini in batch.mini_batches
    ]
    return dataclasses.replace(batch, mini_batches=tuple(minis))


def on_ranks(
    rank: int, world: int, folder: str, name: str, layout_name: str, choose: Choose | None, changes: dict[str, Any]
) -> tuple[StepBatch, StepStats]:
    """The annotated batch, and the figures of one step."""
    layout = LAYOUTS[layout_name]
    batch = packed(ragged_sequences(), layout)
    if choose is not None:
        batch = given(batch, choose, make_model(name))
    with learner_on(settings(folder, layout, NEEDS, diagnostics=None, **changes)) as (learner, _):
        annotated = learner.annotate(batch, NEEDS)
        return annotated, learner.step(annotated, recipe())


@pytest.mark.costly("log-probs, loss and gradients of two mixtures against transformers, on two ranks")
@pytest.mark.parametrize(
    ("layout", "changes"),
    [CASES[2], *(pytest.param(*CASES[n], marks=pytest.mark.long("layouts")) for n in (0, 1, 3, 4, 5))],
)
def test_given_experts_are_used_in_both_passes(tmp_path: Path, layout: str, changes: dict[str, Any]) -> None:
    """Log-probs before the update, loss and gradient norm are those of transformers with the same experts."""
    for name in MODELS:
        folder = save_model(tmp_path, name)
        args = (folder, name, layout, at_random, {**REPLAYS, **changes})
        batch, stats = run_ranks(LAYOUTS[layout].world, on_ranks, *args)[0]
        model = make_model(name)
        worst, loss = compare(batch, model)
        assert worst < 1e-4
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        assert stats.loss == pytest.approx(float(loss.detach()), rel=1e-4, abs=1e-6)
        assert stats.grad_norm == pytest.approx(float(norm), rel=3e-4)
        # Of four or eight experts, few random sets are the router's own.
        assert stats.metrics["experts/moved"].value > 0.5


def compare(batch: StepBatch, model: PreTrainedModel) -> tuple[float, Tensor]:
    """The largest error of a log-prob, and GRPO's loss at ratio 1, of transformers with the batch's experts."""
    worst, losses = 0.0, []
    tokens = batch.mini_batches[0].denominators.tokens
    for micro in micro_batches(batch):
        assert micro.experts_PLK is not None and micro.inputs.old_logp_T is not None
        logp_PV = torch.zeros(micro.rows, model.config.vocab_size)
        for rows, own in runs_of(micro):
            logits, _, _ = traced(model, micro.tokens_P[rows], micro.experts_PLK[rows])
            logp_PV = logp_PV.index_add(0, rows[-own:], logits[-own:].log_softmax(-1))
        logp_T = logp_PV[micro.rows_T].gather(1, micro.targets_T[:, None])[:, 0]
        if logp_T.numel():
            worst = max(worst, float((logp_T.detach() - micro.inputs.old_logp_T).abs().max()))
        ratio_T = (logp_T - logp_T.detach()).exp()
        losses.append(-(ratio_T * micro.advantage_T * micro.inputs.mask_T).sum() / tokens)
    return worst, torch.stack(losses).sum()


def test_the_routers_own_choice_changes_nothing(tmp_path: Path) -> None:
    """Neither the result, nor is any row counted as moved; without replay there is no such figure."""
    name = MODELS[0]
    folder = save_model(tmp_path, name)
    _, plain = run_ranks(1, on_ranks, folder, name, "tp1", None, {})[0]
    _, replayed = run_ranks(1, on_ranks, folder, name, "tp1", its_own, REPLAYS)[0]
    assert replayed.metrics["experts/moved"].value == 0.0 and "experts/moved" not in plain.metrics
    assert (replayed.loss, replayed.grad_norm) == (plain.loss, plain.grad_norm)


@pytest.mark.parametrize("layout", ["tp1", *(pytest.param(n, marks=pytest.mark.long("layouts")) for n in LAYOUTS_HERE)])
def test_counts_are_those_of_the_routers(tmp_path: Path, layout: str) -> None:
    """Over all ranks and layers, without padding."""
    name = MODELS[0]
    args = (save_model(tmp_path, name), name, layout, None, {"recompute": "full"})
    batch, stats = run_ranks(LAYOUTS[layout].world, on_ranks, *args)[0]
    model = make_model(name)
    experts = model.config.num_experts
    loads = torch.zeros(model.config.num_hidden_layers, experts)
    entropies = []
    for micro in micro_batches(batch):
        for rows, own in runs_of(micro):
            if int(rows[-1]) >= micro.rows - micro.padding:
                continue
            with torch.no_grad():
                _, chosen, scores = traced(model, micro.tokens_P[rows])
            for layer, (experts_TK, logits_TE) in enumerate(zip(chosen, scores, strict=True)):
                loads[layer] += F.one_hot(experts_TK[-own:], experts).sum((0, 1))
                entropies.append(torch.distributions.Categorical(logits=logits_TE[-own:]).entropy())
    relative = loads / loads.mean(1, keepdim=True)
    shares = loads / loads.sum(1, keepdim=True)
    spread = torch.distributions.Categorical(probs=shares).entropy().exp() / experts
    found = {metric: value.value for metric, value in stats.metrics.items()}
    assert found["experts/load_max"] == pytest.approx(float(relative.max()))
    assert found["experts/load_max_2"] == pytest.approx(float(relative[2].max()))
    assert found["experts/load_entropy"] == pytest.approx(float(spread.mean()), rel=1e-5)
    assert found["experts/router_entropy"] == pytest.approx(float(torch.cat(entropies).mean()), rel=1e-4)
    assert found["experts/unused"] == float((loads == 0).float().mean())
    assert found["experts/dropped"] == 0.0


def grouped(rank: int, world: int, folder: str, layout_name: str) -> list[tuple[StepBatch, StepStats, set[str]]]:
    """A step with experts one after another, and with torch's grouped products, as on GPUs."""
    layout = LAYOUTS[layout_name]
    found = []
    for joint in (False, True):
        layer_spec.groups_products = lambda config, joint=joint: joint
        with learner_on(settings(folder, layout, NEEDS, diagnostics=None)) as (learner, own):
            annotated = learner.annotate(packed(ragged_sequences(), layout), NEEDS)
            kinds = {type(layer.mlp.experts).__name__ for chunk in own._chunks for layer in chunk.decoder.layers}
            found.append((annotated, learner.step(annotated, recipe()), kinds))
    return found


@pytest.mark.parametrize("layout", ["tp1", pytest.param("ep2etp2", marks=pytest.mark.long("layouts"))])
def test_grouped_products_are_those_of_the_experts_one_by_one(tmp_path: Path, layout: str) -> None:
    """Also where some expert has no row. On a CPU, in float32: a GPU's product was not run."""
    folder = save_model(tmp_path, "qwen3moe", num_experts=16, num_experts_per_tok=2)
    one, joint = run_ranks(LAYOUTS[layout].world, grouped, folder, layout)[0]
    assert (one[2], joint[2]) == ({"SequentialMLP"}, {"GroupedExperts"})
    assert one[1].metrics["experts/unused"].value > 0
    for mine, theirs in zip(micro_batches(joint[0]), micro_batches(one[0]), strict=True):
        torch.testing.assert_close(mine.inputs.old_logp_T, theirs.inputs.old_logp_T, atol=1e-4, rtol=0)
    assert joint[1].grad_norm == pytest.approx(one[1].grad_norm, rel=1e-4)


def balanced(rank: int, world: int, folder: str, layout_name: str, coefficient: float) -> tuple[StepBatch, StepStats]:
    """One step on responses without any advantage: all of its gradient is the load-balancing loss's."""
    layout = LAYOUTS[layout_name]
    sequences = [
        dataclasses.replace(sequence, advantage_T=torch.zeros_like(sequence.advantage_T))
        for sequence in ragged_sequences()
        if sequence.index == 0
    ]
    # A third of the rows are padding.
    batch = pack(sequences, PackLayout(layout.dp, 4096, 1, 64, 40.0), seed=5)
    changes = {"experts": {"balance_loss": coefficient}}
    with learner_on(settings(folder, layout, NEEDS, diagnostics=None, **changes)) as (learner, _):
        return batch, learner.step(learner.annotate(batch, NEEDS), recipe())


@pytest.mark.parametrize("layout", ["tp1", pytest.param("tp2ep2", marks=pytest.mark.long("layouts"))])
def test_a_load_balancing_loss_is_its_formula(tmp_path: Path, layout: str) -> None:
    """Its gradient is that of coefficient * experts * sum(share of choices * mean probability), summed over layers."""
    coefficient, name = 0.3, "qwen3moe"
    batch, stats = run_ranks(LAYOUTS[layout].world, balanced, save_model(tmp_path, name), layout, coefficient)[0]
    (micro,) = micro_batches(batch)
    model = make_model(name)
    layers: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(model.config.num_hidden_layers)]
    assert micro.padding > 0.2 * micro.rows
    for rows, own in runs_of(micro):
        if int(rows[-1]) >= micro.rows - micro.padding:
            continue
        _, chosen, scores = traced(model, micro.tokens_P[rows])
        for found, experts_TK, logits_TE in zip(layers, chosen, scores, strict=True):
            found.append((experts_TK[-own:], logits_TE[-own:]))
    losses = []
    for found in layers:
        experts_PK, logits_PE = (torch.cat(parts) for parts in zip(*found, strict=True))
        share_E = F.one_hot(experts_PK, logits_PE.shape[1]).float().mean((0, 1))
        losses.append(logits_PE.shape[1] * (share_E * logits_PE.softmax(-1).mean(0)).sum())
    (coefficient * torch.stack(losses).sum()).backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    assert stats.loss == 0.0
    assert stats.grad_norm == pytest.approx(float(norm), rel=3e-4)
