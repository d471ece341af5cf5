"""The policy in Megatron equals transformers on the same weights, and its weights come back bit for bit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from launch import run_ranks
from megatron.core import parallel_state
from policies import (
    LAYOUTS,
    MIXTURES,
    MODELS,
    VOCAB,
    by_sequence,
    learner_on,
    packed,
    ragged_sequences,
    save_model,
    settings,
    weights_of,
)
from safetensors.torch import load_file
from torch import Tensor

from megasharp.algos.base import Needs, OldLogp
from megasharp.common.layout import ParallelLayout
from megasharp.common.records import MicroBatch, Sequence, StepBatch
from megasharp.convert.hf_folder import read_config
from megasharp.learner.learner import RankLearner
from megasharp.learner.weights import global_parameters

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NEEDS = Needs(old_logp=OldLogp.BEFORE_STEP, old_entropy=True)
BF16_MODELS = ("qwen3-tied", "qwen2", "llama-tied", "mistral-window", "olmo2")
# What is peculiar to these is in their settings, not in how rows are packed: once will do.
ONCE = ("llama", "mistral")
# Windows begin at the second or third layer.
OF_UNLIKE_LAYERS = ("qwen2-window", "ministral")
LAYOUTS_IN_A_SLICE = ("tp1", "tp2", "pp2", "tp2pp2")
LAYOUTS_OF_EXPERTS = ("ep2", "tp2ep2", "tp2etp2", "pp2ep2", "ep2etp2")
# Measured: below 3e-5 at every layout, of logits up to 8.
LOGITS_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Observed:
    """One rank's view of one model at one layout; `logits`, of its own share, is None off the last stage."""

    model: str
    layout: str
    shared: bool
    batch: StepBatch
    share: int
    logits: list[Tensor] | None
    weights: dict[str, Tensor]


class LogitsTap:
    """Keeps every forward pass's logits over the real vocabulary, [P, V]."""

    def __init__(self, rank: RankLearner) -> None:
        self.passes: list[Tensor] = []
        if parallel_state.is_pipeline_last_stage():
            rank._chunks[-1].output_layer.register_forward_hook(self._keep)

    def _keep(self, module: torch.nn.Module, inputs: object, output: tuple[Tensor, object]) -> None:
        shard = output[0][:, 0].contiguous()
        group = parallel_state.get_tensor_model_parallel_group()
        shards = [torch.empty_like(shard) for _ in range(dist.get_world_size(group))]
        dist.all_gather(shards, shard, group=group)
        self.passes.append(torch.cat(shards, dim=1)[:, :VOCAB].float())


def observe(
    rank: int,
    world: int,
    layout: str,
    packings: tuple[bool, ...],
    exact: dict[str, str],
    rounded: dict[str, str],
    sequences: list[Sequence],
) -> tuple[list[Observed], list[Observed]]:
    """Every model in fp32, in each of the packings (True: with shared prompts); the rounded ones in bf16."""
    return (
        [
            observe_one(model, folder, layout, sequences, shared, torch.float32)
            for model, folder in exact.items()
            for shared in (packings[:1] if model in ONCE else packings)
        ],
        [observe_one(model, folder, layout, sequences, True, torch.bfloat16) for model, folder in rounded.items()],
    )


def observe_one(
    model: str, folder: str, layout_name: str, sequences: list[Sequence], shared: bool, dtype: torch.dtype
) -> Observed:
    layout = LAYOUTS[layout_name]
    batch = packed(sequences, layout, share_prompts=shared)
    with learner_on(settings(folder, layout, NEEDS, dtype=dtype)) as (learner, rank):
        tap = LogitsTap(rank)
        annotated = learner.annotate(batch, NEEDS)
        assert_shapes_are_the_tables(folder, rank, layout)
        last = parallel_state.is_pipeline_last_stage()
        passes = tap.passes if last else None
        return Observed(model, layout_name, shared, annotated, rank.place.dp, passes, weights_of(learner))


def assert_shapes_are_the_tables(folder: str, rank: RankLearner, layout: ParallelLayout) -> None:
    """The family's table says, of this stage, exactly the parameters that Megatron built."""
    if rank.place.ep:
        return  # The table is of the first rank's experts.
    _, family, arch = read_config(folder)
    numbers = [layer.layer_number - 1 for chunk in rank._chunks for layer in chunk.decoder.layers]
    told = family.parameter_shapes(
        arch,
        layout.tp,
        layers=numbers,
        first_stage=parallel_state.is_pipeline_first_stage(),
        last_stage=parallel_state.is_pipeline_last_stage(),
        ep=layout.ep,
        etp=layout.etp,
    )
    assert told == {name: tuple(parameter.shape) for name, parameter in global_parameters(rank._chunks)}


def long_group() -> list[Sequence]:
    """Two responses of 18 tokens after a prompt of 26: far beyond every window and all original positions."""
    generator = torch.Generator().manual_seed(1)
    one = ragged_sequences()[0]
    prompt = torch.randint(0, VOCAB, (26,), generator=generator)
    return [
        replace(
            one,
            group_id="long",
            index=index,
            tokens=torch.cat([prompt, torch.randint(0, VOCAB, (18,), generator=generator)]),
            prompt_length=26,
            advantage_T=one.advantage_T[:1].repeat(18),
            mask_T=torch.ones(18),
            sampler_logp_T=torch.full((18,), -1.0),
            policy_logp_T=torch.full((18,), -1.0),
        )
        for index in range(2)
    ]


def reference_logits(model: PreTrainedModel, sequences: list[Tensor]) -> list[Tensor]:
    """transformers' logits [T, V] of each, from one padded batch."""
    length = max(map(len, sequences))
    tokens = torch.stack([F.pad(tokens, (0, length - len(tokens))) for tokens in sequences])
    real = torch.stack([torch.arange(length) < len(tokens) for tokens in sequences])
    with torch.no_grad():
        logits = model(tokens, attention_mask=real.long()).logits
    return [rows[: len(tokens)] for rows, tokens in zip(logits, sequences, strict=True)]


def largest_logit_error(model: PreTrainedModel, observed: Observed) -> float:
    """Over every packed row: to transformers, each run is a sequence of its prefix and itself."""
    assert observed.logits is not None
    micros = [micro for mini in observed.batch.mini_batches for micro in mini.per_rank[observed.share]]
    assert len(observed.logits) == len(micros) > 1
    errors = [micro_error(model, micro, logits) for micro, logits in zip(micros, observed.logits, strict=True)]
    return max(errors)


def micro_error(model: PreTrainedModel, micro: MicroBatch, logits_PV: Tensor) -> float:
    runs = micro.segments
    rows = [
        torch.arange(start, start + length)
        for start, length in zip(runs.start.tolist(), runs.length.tolist(), strict=True)
    ]
    before = [rows[prefix] if prefix >= 0 else rows[0][:0] for prefix in runs.prefix.tolist()]
    sequences = [micro.tokens_P[torch.cat(pair)] for pair in zip(before, rows, strict=True)]
    return max(
        float((logits_PV[own] - expected_TV[-len(own) :]).abs().max())
        for own, expected_TV in zip(rows, reference_logits(model, sequences), strict=True)
    )


def assert_annotations_match(model: PreTrainedModel, sequences: list[Sequence], observed: Observed) -> None:
    """Straight from the sequences, so the packing's rows and targets are checked with it."""
    logp, entropy = by_sequence(observed.batch, "old_logp_T"), by_sequence(observed.batch, "old_entropy_T")
    assert logp.keys() == set(range(len(sequences)))
    reference = reference_logits(model, [sequence.tokens for sequence in sequences])
    for flat, (sequence, logits_TV) in enumerate(zip(sequences, reference, strict=True)):
        all_TV = logits_TV[sequence.prompt_length - 1 : -1].log_softmax(-1)
        expected_T = all_TV.gather(1, sequence.tokens[sequence.prompt_length :, None])[:, 0]
        torch.testing.assert_close(logp[flat], expected_T, atol=1e-4, rtol=0)
        torch.testing.assert_close(entropy[flat], -(all_TV.exp() * all_TV).sum(1), atol=1e-4, rtol=0)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def assert_same_bits(weights: dict[str, Tensor], folder: str, dtype: torch.dtype) -> None:
    expected = {name: tensor.to(dtype) for name, tensor in load_file(Path(folder, "model.safetensors")).items()}
    assert weights.keys() == expected.keys()
    for name, tensor in weights.items():
        assert tensor.dtype == expected[name].dtype and tensor.shape == expected[name].shape, name
        assert torch.equal(bits(tensor), bits(expected[name])), name


@cache
def loaded(folder: str, dtype: torch.dtype) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    return model


@pytest.mark.costly("each of sixteen models of every family against transformers")
def test_logits_annotations_and_round_trip(tmp_path: Path) -> None:
    """Of every family at one layout and packing, with two layers where all are alike; a slice has all else."""
    assert_parity(tmp_path, "tp2", (True,), (), few_layers=True)


def test_experts_on_two_ranks(tmp_path: Path) -> None:
    assert_parity(tmp_path, "ep2", (True,), (), MIXTURES)


@pytest.mark.long("layouts")
@pytest.mark.parametrize("layout", LAYOUTS_OF_EXPERTS)
def test_every_layout_of_experts(tmp_path: Path, layout: str) -> None:
    assert_parity(tmp_path, layout, (True, False), MIXTURES[:1], MIXTURES)


@pytest.mark.long("layouts")
@pytest.mark.parametrize("layout", LAYOUTS_IN_A_SLICE)
def test_every_layout_packing_and_dtype(tmp_path: Path, layout: str) -> None:
    assert_parity(tmp_path, layout, (True, False), BF16_MODELS)


def assert_parity(
    tmp_path: Path,
    layout: str,
    packings: tuple[bool, ...],
    in_bf16_too: tuple[str, ...],
    models: Iterable[str] = MODELS,
    few_layers: bool = False,
) -> None:
    few = {"num_hidden_layers": 2} if few_layers else {}
    exact = {name: save_model(tmp_path, name, **({} if name in OF_UNLIKE_LAYERS else few)) for name in models}
    rounded = {name: save_model(tmp_path / "bf16", name, dtype="bfloat16") for name in in_bf16_too}
    sequences = ragged_sequences() + long_group()
    by_rank = run_ranks(LAYOUTS[layout].world, observe, layout, packings, exact, rounded, sequences)
    checked = 0
    for in_fp32, in_bf16 in by_rank:
        for observed in in_fp32:
            checked += check_fp32(exact[observed.model], observed, sequences)
        for observed in in_bf16:
            check_bf16(rounded[observed.model], observed, sequences)
    once = len(set(ONCE) & exact.keys()) if len(packings) > 1 else 0
    ranks = LAYOUTS[layout].tp * LAYOUTS[layout].dp
    assert checked == ranks * (len(exact) * len(packings) - once)


def check_fp32(folder: str, observed: Observed, sequences: list[Sequence]) -> bool:
    """Returns whether this rank had logits to compare."""
    model = loaded(folder, torch.float32)
    assert_annotations_match(model, sequences, observed)
    assert_same_bits(observed.weights, folder, torch.float32)
    if observed.logits is None:
        return False
    error = largest_logit_error(model, observed)
    where = f"{observed.model} at {observed.layout}, shared={observed.shared}"
    assert error < LOGITS_TOLERANCE, f"{where}: {error}"
    return True


def check_bf16(folder: str, observed: Observed, sequences: list[Sequence]) -> None:
    """The error against fp32 is at most twice that of transformers in bf16 (measured: 0.5 to 1.7 times)."""
    rounded, exact = loaded(folder, torch.bfloat16), loaded(folder, torch.float32)
    assert_same_bits(observed.weights, folder, torch.bfloat16)
    if observed.logits is None:
        return
    tokens = [sequence.tokens for sequence in sequences]
    pairs = zip(reference_logits(rounded, tokens), reference_logits(exact, tokens), strict=True)
    theirs = max(float((in_bf16.float() - in_fp32).abs().max()) for in_bf16, in_fp32 in pairs)
    ours = largest_logit_error(exact, observed)
    assert theirs > 0 and ours < 2 * theirs, f"{observed.model} at {observed.layout}: {ours} against {theirs}"
