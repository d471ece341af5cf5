"""Adapters on frozen weights: the same under every layout, gradients of the plain formula, merged where they leave."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from launch import run_ranks
from policies import (
    LAYOUTS,
    learner_on,
    make_model,
    optimizer_settings,
    packed,
    ragged_sequences,
    recipe,
    save,
    save_model,
    settings,
    weights_of,
)
from safetensors.torch import load_file
from torch import Tensor
from torch.func import functional_call

from megasharp.common.errors import UserError
from megasharp.common.records import Sequence, StepStats
from megasharp.config.policy import LoraConfig
from megasharp.convert.hf_folder import HFReader, read_config
from megasharp.convert.hf_write import carry_over
from megasharp.convert.lora import MODULES, RECORD, TARGETS, is_adapter, trained_parameters
from megasharp.learner.conversion import megatron_to_hf, megatron_to_peft
from megasharp.learner.learner import LearnerSettings, RankLearner
from megasharp.learner.optimizer import parts
from megasharp.learner.verification import Probe, verify
from megasharp.learner.weights import global_parameters

STEPS = 3
ALL = LoraConfig(rank=3, alpha=6.0, targets=list(TARGETS))
SOME = LoraConfig(rank=2, alpha=1.0, targets=["proj", "fc1"])


@dataclass(frozen=True)
class Case:
    """What is trained. With its two key heads and two ranks, each rank of qwen2 holds one query group."""

    model: str
    lora: LoraConfig
    methods: tuple[str, ...] = ("grpo",)
    recompute: str = "none"


CASES = (
    Case("qwen2", ALL),
    Case("qwen3-tied", ALL, ("grpo", "kl")),
    Case("qwen3-tied", SOME),
    Case("olmo2", ALL),
)


def values(root: Path, case: Case, layout: str, **overrides: Any) -> LearnerSettings:
    """A step moves B visibly, and no clipping hides a gradient of another size."""
    optimizer = optimizer_settings(lr=3e-2, eps=1e-6, clip_grad=0.0)
    chosen = {"lora": case.lora, "recompute": case.recompute, **overrides}
    return settings(str(root / case.model), LAYOUTS[layout], recipe(case.methods).needs, optimizer, **chosen)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    for name in sorted({case.model for case in CASES}):
        save_model(folder, name)
    return folder


# The same result under every layout.


@dataclass(frozen=True)
class Result:
    """Stats of all steps, and the merged weights after them."""

    stats: list[StepStats]
    weights: dict[str, Tensor]


def train_all(
    rank: int, world: int, root: Path, sequences: list[Sequence], runs: list[tuple[Case, str]]
) -> list[Result]:
    results = []
    for case, layout in runs:
        method = recipe(case.methods)
        batch = packed(sequences, LAYOUTS[layout])
        with learner_on(values(root, case, layout)) as (learner, _):
            stats = [learner.step(learner.annotate(batch, method.annotation), method) for _ in range(STEPS)]
            results.append(Result(stats, weights_of(learner)))
    return results if rank == 0 else []


@pytest.fixture(scope="module")
def references(root: Path) -> dict[Case, Result]:
    runs = [(case, "tp1") for case in CASES]
    return dict(zip(CASES, run_ranks(1, train_all, root, ragged_sequences(), runs)[0], strict=True))


@pytest.mark.long("layouts")
@pytest.mark.parametrize(("world", "layouts"), [(2, ("tp2", "pp2", "dp2")), (4, ("tp2pp2",))])
def test_result_does_not_depend_on_the_layout(
    root: Path, references: dict[Case, Result], world: int, layouts: tuple[str, ...]
) -> None:
    runs = [(case, layout) for layout in layouts for case in (CASES if world == 2 else CASES[:1])]
    results = run_ranks(world, train_all, root, ragged_sequences(), runs)[0]
    for run, result in zip(runs, results, strict=True):
        reference, start = references[run[0]], make_model(run[0].model).state_dict()
        for got, expected in zip(result.stats, reference.stats, strict=True):
            assert got.loss == pytest.approx(expected.loss, rel=1e-4, abs=1e-6), run
            assert got.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4), run
        for name, weight in result.weights.items():
            difference = (weight - reference.weights[name]).norm()
            assert difference <= 1e-4 * reference.weights[name].norm(), (run, name)
            # What the steps changed must agree too, or a lost gradient would hide behind the frozen weight.
            assert difference <= 1e-2 * (reference.weights[name] - start[name]).norm(), (run, name)


def test_adapted_projections_move_and_everything_else_stays(root: Path, references: dict[Case, Result]) -> None:
    for case, result in references.items():
        start = make_model(case.model).state_dict()
        adapted = {name for names in projections(root, case).values() for name in names}
        for name, weight in result.weights.items():
            moved = (weight - start[name]).norm() / start[name].norm()
            assert (moved > 1e-3) if name in adapted else torch.equal(weight, start[name]), (case, name)


def projections(root: Path, case: Case) -> dict[str, tuple[str, ...]]:
    """The Hugging Face weights of every adapted Megatron map, by the map's global name."""
    _, family, arch = read_config(root / case.model)
    maps = [f"decoder.layers.{n}.{MODULES[target]}" for n in range(arch.num_layers) for target in case.lora.targets]
    rules = [(name, *family.rule_for(arch, f"{name}.weight")) for name in maps]
    return {name: tuple(at.name(hf) for hf in rule.hf) for name, rule, at in rules}


# Against the plain formula in float64.


@dataclass(frozen=True)
class Part:
    """A parameter of one rank before a step, the step's gradient, and the dimension it is split in."""

    value: Tensor
    gradient: Tensor
    split: int | None


@dataclass(frozen=True)
class Inside:
    """What one rank held: adapters at the last step, what it exported before it, and how much of what there was."""

    adapters: dict[str, Part]
    exported: dict[str, Tensor]
    buffer: int
    moments: int


def look_inside(
    rank: int, world: int, root: Path, sequences: list[Sequence], runs: list[tuple[Case, str]]
) -> list[Inside]:
    """After one step B is not zero any more, so that the second one's gradient reaches A."""
    found = []
    for case, layout in runs:
        method = recipe(case.methods)
        batch = packed(sequences, LAYOUTS[layout])
        with learner_on(values(root, case, layout)) as (learner, own):
            learner.step(learner.annotate(batch, method.annotation), method)
            exported, before = weights_of(learner), adapters_of(own)
            learner.step(learner.annotate(batch, method.annotation), method)
            found.append(inside(own, before, exported))
    return found


def adapters_of(own: RankLearner) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in global_parameters(own._chunks) if is_adapter(name)}


def inside(own: RankLearner, before: dict[str, Tensor], exported: dict[str, Tensor]) -> Inside:
    adapters = {}
    for name, parameter in global_parameters(own._chunks):
        assert hasattr(parameter, "main_grad") == is_adapter(name), name
        if is_adapter(name):
            split = getattr(parameter, "partition_dim", None) if parameter_is_split(parameter) else None
            adapters[name] = Part(before[name], parameter.main_grad.clone(), split)
    states = [state for part in parts(own._optimizer) for state in part.optimizer.state.values()]
    return Inside(
        adapters,
        exported,
        buffer=sum(buffer.grad_data.numel() for chunk in own._ddp for buffer in chunk.buffers),
        moments=sum(moment.numel() for state in states for moment in state.values()),
    )


def parameter_is_split(parameter: torch.nn.Parameter) -> bool:
    return bool(getattr(parameter, "tensor_model_parallel", False))


def whole(ranks: list[Part], field: str) -> list[Tensor]:
    """All ranks' parts in float64; a parameter that is the same on all must have the same gradient on all."""
    tensors = [getattr(part, field).double() for part in ranks]
    if ranks[0].split is None:
        assert all(torch.equal(tensor, tensors[0]) for tensor in tensors), field
        return tensors[:1]
    return tensors


def by_projection(root: Path, case: Case, ranks: list[Inside], field: str) -> dict[str, tuple[Tensor, Tensor]]:
    """(A, B) or their gradients of every Hugging Face weight, from all tensor-parallel ranks' parts."""
    _, family, arch = read_config(root / case.model)
    found = {}
    for name, hf_names in projections(root, case).items():
        a = torch.cat(whole([rank.adapters[f"{name}.lora_A"] for rank in ranks], field), dim=1)
        b_parts = whole([rank.adapters[f"{name}.lora_B"] for rank in ranks], field)
        rule = family.rule_for(arch, f"{name}.weight")[0]
        b = rule.merge(b_parts, arch) if len(hf_names) > 1 else b_parts
        found.update(zip(hf_names, zip(a.chunk(len(hf_names)), b, strict=True), strict=True))
    return found


def plain_gradients(
    case: Case, adapters: dict[str, tuple[Tensor, Tensor]], sequences: list[Sequence]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Gradients of the policy-gradient loss on transformers' model in float64, W + alpha / r B A in place of each W."""
    model = make_model(case.model).double()
    leaves = {name: (a.clone().requires_grad_(), b.clone().requires_grad_()) for name, (a, b) in adapters.items()}
    weights = dict(model.named_parameters())
    for name, (a, b) in leaves.items():
        weights[name] = weights[name].detach() + case.lora.alpha / case.lora.rank * b @ a
    tokens = sum(float(sequence.mask_T.sum()) for sequence in sequences)
    loss = torch.zeros((), dtype=torch.float64)
    for sequence in sequences:
        logits = functional_call(model, weights, args=(sequence.tokens[None],)).logits[0]
        first = sequence.prompt_length
        logp_T = F.log_softmax(logits, dim=-1)[first - 1 : -1].gather(1, sequence.tokens[first:, None])[:, 0]
        loss = loss - (sequence.advantage_T * sequence.mask_T * logp_T).sum() / tokens
    flat = torch.autograd.grad(loss, [leaf for pair in leaves.values() for leaf in pair])
    return dict(zip(leaves, zip(flat[::2], flat[1::2], strict=True), strict=True))


GRADIENTS = (
    CASES[0],
    Case("qwen3-tied", SOME, recompute="selective"),
    CASES[2],
    CASES[3],
    Case("qwen3-tied", ALL, recompute="full"),
)


# At tp2 half of the gradients are sums over ranks.
@pytest.mark.parametrize(
    ("layout", "count"),
    [("tp2", 2), *(pytest.param(one, len(GRADIENTS), marks=pytest.mark.long("layouts")) for one in ("tp1", "tp2"))],
)
def test_gradients_and_merged_weights_are_those_of_the_plain_formula(root: Path, layout: str, count: int) -> None:
    sequences, cases = ragged_sequences(), GRADIENTS[:count]
    by_rank = run_ranks(LAYOUTS[layout].world, look_inside, root, sequences, [(case, layout) for case in cases])
    for number, case in enumerate(cases):
        ranks = [found[number] for found in by_rank]
        adapters, gradients = (by_projection(root, case, ranks, field) for field in ("value", "gradient"))
        for name, expected in plain_gradients(case, adapters, sequences).items():
            for got, exact in zip(gradients[name], expected, strict=True):
                assert exact.norm() > 0.0
                assert (got - exact).norm() <= 1e-4 * exact.norm(), (case, name)
        start = make_model(case.model).state_dict()
        for name, (a, b) in adapters.items():
            merged = start[name].double() + case.lora.scale * b @ a
            assert (ranks[0].exported[name].double() - merged).abs().max() <= 1e-6, (case, name)
            assert (merged - start[name]).abs().max() > 1e-3


def test_only_adapters_have_gradients_and_moments(root: Path) -> None:
    ((found,),) = run_ranks(1, look_inside, root, ragged_sequences(), [(CASES[0], "tp1")])
    trained = trained_parameters(ALL, read_config(root / CASES[0].model)[2])
    assert sum(part.value.numel() for part in found.adapters.values()) == trained
    # Megatron begins every parameter at a multiple of 64 elements; Adam has two moments of each.
    assert trained <= found.buffer < trained + 64 * (len(found.adapters) + 1)
    assert found.moments == 2 * trained


# The reference.


def follow_the_reference(rank: int, world: int, root: Path, sequences: list[Sequence]) -> list[dict[str, Tensor] | int]:
    """Reference log-probs before and after training, after a reset, and the policy's own there; then its size."""
    case = CASES[1]
    method = recipe(case.methods)
    batch = packed(sequences, LAYOUTS["tp1"])
    with learner_on(values(root, case, "tp1", offload=("weights", "gradients", "optimizer"))) as (learner, own):

        def logp(field: str) -> Tensor:
            done = learner.annotate(batch, recipe(case.methods, mini_batches=2).annotation)
            return torch.cat([getattr(micro.inputs, field) for mini in done.mini_batches for micro in mini.per_rank[0]])

        seen = [logp("ref_logp_T"), logp("old_logp_T")]
        learner.step(learner.annotate(batch, method.annotation), method)
        seen += [logp("ref_logp_T"), logp("old_logp_T")]
        learner.set_reference()
        assert own.offload() > 0
        own.onload()
        learner.step(learner.annotate(batch, method.annotation), method)
        seen += [logp("ref_logp_T"), logp("old_logp_T")]
        assert own._reference is not None
        return [*seen, sum(tensor.numel() for tensor in own._reference._held)]


def test_the_reference_is_the_frozen_model_until_a_reset(root: Path) -> None:
    (found,) = run_ranks(1, follow_the_reference, root, ragged_sequences())
    base, start, still_base, stepped, reset, later, held = found
    assert torch.equal(base, start) and torch.equal(base, still_base)
    assert (stepped - base).abs().max() > 1e-2
    assert torch.equal(reset, stepped) and (later - reset).abs().max() > 1e-2
    assert held == trained_parameters(ALL, read_config(root / CASES[1].model)[2])


# A checkpoint by itself.


def save_after_training(
    rank: int, world: int, root: Path, folder: Path, sequences: list[Sequence]
) -> dict[str, Tensor]:
    method = recipe()
    with learner_on(values(root, CASES[0], "tp2pp2")) as (learner, _):
        learner.step(packed(sequences, LAYOUTS["tp2pp2"]), method)
        save(learner, folder)
        return weights_of(learner)


def assert_adapts(checkpoint: Path, base: Path, start: dict[str, Tensor], exported: dict[str, Tensor]) -> None:
    """The PEFT folder's A and B on the first weights, by PEFT's own names and formula, give what was exported."""
    megatron_to_peft(checkpoint, checkpoint / "peft")
    config = json.loads((checkpoint / "peft" / "adapter_config.json").read_text())
    tensors = load_file(checkpoint / "peft" / "adapter_model.safetensors")
    modules = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert config["base_model_name_or_path"] == str(base)
    assert config["target_modules"] == modules and len(tensors) == 2 * 7 * 4
    for name, tensor in tensors.items():
        if ".lora_A." in name:
            weight = name.removeprefix("base_model.model.").replace(".lora_A", "")
            change = tensors[name.replace("lora_A", "lora_B")].double() @ tensor.double()
            merged = start[weight] + config["lora_alpha"] / config["r"] * change
            assert (merged - exported[weight]).abs().max() <= 1e-6, name


@pytest.mark.long("layouts")
def test_a_checkpoint_alone_gives_the_merged_model(root: Path, tmp_path: Path) -> None:
    """Saved by four ranks, read as one stream by the conversion, which knows of the adapters from the record alone."""
    (tmp_path / "policy").mkdir()
    exported = run_ranks(4, save_after_training, root, tmp_path / "policy", ragged_sequences())[0]
    (tmp_path / "hf").mkdir()
    carry_over(root / CASES[0].model, tmp_path / "hf")
    megatron_to_hf(tmp_path, tmp_path / "exported")
    start = make_model(CASES[0].model).state_dict()
    with HFReader(tmp_path / "exported") as reader:
        assert set(reader.names()) == exported.keys()
        for name, weight in exported.items():
            assert (reader.tensor(name) - weight).abs().max() <= 1e-6, name
        assert sum(not torch.equal(reader.tensor(name), start[name]) for name in exported) == 7 * 4
    assert_adapts(tmp_path, root / CASES[0].model, start, exported)
    found = verify(tmp_path / "exported", tmp_path, Probe(tokens=24))
    assert found.equal, "transformers with the merged weights, Megatron with the adapters beside them: " + str(found)
    (tmp_path / "policy" / RECORD).unlink()
    with pytest.raises(UserError, match=r"extra tensor decoder\.layers\..*lora_[AB]"):
        megatron_to_hf(tmp_path, tmp_path / "base")
    assert not (tmp_path / "base").exists()
