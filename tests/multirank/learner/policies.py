"""What the tests of this folder share: tiny Hugging Face models, one step's batch, and a learner on every rank."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from megasharp.algos.base import MethodParams, Needs, Reduction
from megasharp.algos.build_recipe import build_recipe
from megasharp.algos.kl import KLParams
from megasharp.algos.recipe import Recipe
from megasharp.batching.packing import PackLayout, pack
from megasharp.common.layout import ParallelLayout
from megasharp.common.records import MicroBatch, Sequence, StepBatch
from megasharp.config.policy import OptimizerConfig, PolicyConfig
from megasharp.learner.learner import POLICY, LearnerSettings, Rank, RankLearner
from megasharp.learner.ranks.all_ranks import RanksLearner
from megasharp.metrics.group_metrics import Diagnostics

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CPU = torch.device("cpu")
# Odd, so that two tensor-parallel ranks need a padded row.
VOCAB = 53
SIZES = {
    "hidden_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
# What a row's name begins with says its family. Windows and original positions are several times shorter than the
# sequences of the tests.
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"tie_word_embeddings": False, "head_dim": 8},
    "qwen3-tied": {"tie_word_embeddings": True, "head_dim": 8},
    "qwen3-yarn": {"tie_word_embeddings": True, "head_dim": 16, "rope_parameters": YARN},
    # The settings of Qwen2.5-Math-7B and DeepSeek-R1-Distill-Qwen-7B, at other sizes.
    "qwen2": {
        "tie_word_embeddings": False,
        "rope_theta": 10000,
        "rms_norm_eps": 1e-6,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "qwen2-tied": {"tie_word_embeddings": True},
    "qwen2-window": {
        "tie_word_embeddings": True,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 2,
    },
    "llama": {"tie_word_embeddings": False, "rope_parameters": LLAMA3},
    "llama-tied": {"tie_word_embeddings": True, "rope_parameters": LLAMA3, "head_dim": 8},
    "mistral": {"tie_word_embeddings": False, "sliding_window": None, "rope_theta": 1e6},
    "mistral-window": {"tie_word_embeddings": False, "sliding_window": 6, "head_dim": 8},
    "ministral": {
        "tie_word_embeddings": False,
        "sliding_window": 7,
        "head_dim": 8,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "sliding_attention"],
        "rope_theta": 1e8,
    },
    "olmo2": {"tie_word_embeddings": False, "rope_theta": 500000},
    "olmo2-tied": {"tie_word_embeddings": True, "num_key_value_heads": 4},
    "qwen3moe": {
        "tie_word_embeddings": False,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
    },
    # Weights of the chosen experts that do not add up to 1.
    "qwen3moe-tied": {
        "tie_word_embeddings": True,
        "head_dim": 8,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 12,
        "norm_topk_prob": False,
    },
    "mixtral": {
        "tie_word_embeddings": False,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 6,
        "rope_theta": 1e6,
    },
}
# The rows of MODELS that are mixtures of experts.
MIXTURES = ("qwen3moe", "qwen3moe-tied", "mixtral")
LAYOUTS = {
    "tp1": ParallelLayout(),
    "tp2": ParallelLayout(tp=2),
    "pp2": ParallelLayout(pp=2),
    "pp3vpp2": ParallelLayout(pp=3, vpp=2),
    "dp2": ParallelLayout(dp=2),
    "tp2pp2": ParallelLayout(tp=2, pp=2),
    "tp2dp2": ParallelLayout(tp=2, dp=2),
    "cp2": ParallelLayout(cp=2),
    "cp4": ParallelLayout(cp=4),
    "tp2cp2": ParallelLayout(tp=2, cp=2),
    "pp2cp2": ParallelLayout(pp=2, cp=2),
    "dp2cp2": ParallelLayout(dp=2, cp=2),
    "ep2": ParallelLayout(dp=2, ep=2),
    "tp2ep2": ParallelLayout(tp=2, ep=2),
    "cp2ep2": ParallelLayout(cp=2, ep=2),
    "pp2ep2": ParallelLayout(dp=2, pp=2, ep=2),
    "tp2etp2": ParallelLayout(tp=2, etp=2),
    "ep2etp2": ParallelLayout(dp=2, tp=2, ep=2, etp=2),
    "tp2dp2ep2": ParallelLayout(dp=2, tp=2, ep=2),
    "ep4": ParallelLayout(dp=4, ep=4),
}


_CLASSES = {
    "qwen3": "Qwen3",
    "qwen2": "Qwen2",
    "llama": "Llama",
    "mistral": "Mistral",
    "ministral": "Ministral",
    "qwen3moe": "Qwen3Moe",
    "mixtral": "Mixtral",
    "olmo2": "Olmo2",
}


def make_model(name: str, **overrides: object) -> PreTrainedModel:
    """The model of that row of MODELS, every parameter random: norms and biases too."""
    # The ranks import this file too, and do not need transformers' models.
    import transformers

    family = _CLASSES[name.partition("-")[0]]
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **MODELS[name], **overrides})
    torch.manual_seed(sum(map(ord, name)))
    model: PreTrainedModel = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.3)
            if "norm" in parameter_name:
                parameter.add_(1.0)
    return model.eval()


def save_model(folder: Path, name: str, **overrides: object) -> str:
    """Write it below `folder` as transformers does; returns its path."""
    path = folder / name
    make_model(name, **overrides).save_pretrained(path)
    return str(path)


def recipe(methods: tuple[str, ...] = ("grpo",), mini_batches: int = 1, reduction: Reduction | None = None) -> Recipe:
    """A recipe whose KL term, if it has one, is large enough to be seen in the gradient."""
    params: dict[str, MethodParams] = {"kl": KLParams(coefficient=0.3)}
    return build_recipe(methods, params, reduction=reduction, constant=40.0, mini_batches=mini_batches)


def ragged_sequences(seed: int = 0, groups: int = 6, masked: bool = True, turns: bool = False) -> list[Sequence]:
    """Groups of one to four responses of 1 to 13 tokens after prompts of 1 to 9.

    One response is masked. With `turns` those of a group have an environment's tokens in the middle, and an advantage
    for each turn.
    """
    generator = torch.Generator().manual_seed(seed)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    sequences = []
    for group in range(groups):
        prompt = torch.randint(0, VOCAB, (1 + (group * 7) % 9,), generator=generator)
        for index in range(1 + (group + 2) % 4):
            length = 1 if (group, index) == (1, 1) else integer(1, 13)
            tokens = torch.cat([prompt, torch.randint(0, VOCAB, (length,), generator=generator)])
            mask_T = torch.full((length,), 0.0 if masked and (group, index) == (2, 0) else 1.0)
            advantage_T = torch.randn(1, generator=generator, dtype=torch.float64).repeat(length)
            if turns and group == 3:
                said = slice(length // 3, 2 * length // 3)
                mask_T[said], advantage_T[said.stop :] = 0.0, -0.5 * advantage_T[:1]
            sequences.append(
                Sequence(
                    group_id=f"group-{group}",
                    index=index,
                    group_size=4,
                    group_correct=2,
                    seed=100 * group + index,
                    tokens=tokens,
                    prompt_length=int(prompt.numel()),
                    reward=float(index % 2),
                    correct=bool(index % 2),
                    advantage_T=advantage_T,
                    mask_T=mask_T,
                    sampler_logp_T=torch.full((length,), -1.0),
                    policy_logp_T=torch.full((length,), -1.0),
                )
            )
    return sequences


def packed(
    sequences: list[Sequence],
    layout: ParallelLayout,
    *,
    micro_batch_tokens: int = 64,
    mini_batches: int = 1,
    share_prompts: bool = True,
) -> StepBatch:
    """One step's batch as the given layout needs it."""
    multiple = layout.tp * (2 * layout.cp if layout.cp > 1 else 1)
    cut = PackLayout(
        layout.dp, micro_batch_tokens, mini_batches, multiple, 40.0, share_prompts, layout.micro_batch_multiple
    )
    return pack(sequences, cut, seed=5)


def optimizer_settings(**overrides: Any) -> OptimizerConfig:
    """A learning rate that moves the tiny models visibly."""
    return OptimizerConfig(**{"lr": 1e-2, **overrides})


def settings(
    folder: str, layout: ParallelLayout, needs: Needs, optimizer: OptimizerConfig | None = None, **overrides: Any
) -> LearnerSettings:
    """Settings of a rank in fp32 at temperature 1; `overrides` may be keys of the policy section."""
    values = LearnerSettings(
        folder=folder,
        policy=PolicyConfig(optimizer=optimizer or optimizer_settings()),
        dtype=torch.float32,
        layout=layout,
        total_steps=10,
        needs=needs,
        temperature=1.0,
        seed=3,
        diagnostics=Diagnostics(candidates=2, samples=4),
    )
    return changed(values, **overrides)


def changed(values: LearnerSettings, **overrides: Any) -> LearnerSettings:
    """The same settings with other values, of keys of the policy section too."""
    keys = {name: overrides.pop(name) for name in [*overrides] if name in PolicyConfig.model_fields}
    keys = {name: list(value) if isinstance(value, tuple) else value for name, value in keys.items()}
    return replace(values, policy=PolicyConfig(**{**dict(values.policy), **keys}), **overrides)


class GatheredRanks:
    """Satisfies `learner.ranks.learner.Ranks` on every rank at once: what one rank returns, all of them get."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank

    def call(self, learner: str, function: Callable[..., Any], *args: object, **kwargs: object) -> list[Any]:
        return self._gather(function(self.rank.learners[learner], *args, **kwargs))

    def call_shared(
        self, learner: str, function: Callable[..., Any], shares: Seq[Any], *args: object, **kwargs: object
    ) -> list[Any]:
        part = self.rank.learners[learner]
        return self._gather(function(part, shares[part.place.dp], *args, **kwargs))

    def stream(
        self, learner: str, function: Callable[[RankLearner], Iterator[tuple[str, Tensor]]]
    ) -> Iterator[tuple[str, Tensor]]:
        # Copies: what a rank yields may share memory with its weights, which the next step changes.
        items = [(name, tensor.clone()) for name, tensor in function(self.rank.learners[learner])]
        return iter([item for rank in self._gather(items) for item in rank])

    def close(self) -> None:
        self.rank.close()

    @staticmethod
    def _gather(value: object) -> list[Any]:
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, value)
        return gathered


@contextlib.contextmanager
def learner_on(values: LearnerSettings) -> Iterator[tuple[RanksLearner, RankLearner]]:
    """The joined learner and this rank's own part of it."""
    rank = Rank({POLICY: values}, CPU)
    learner = RanksLearner(GatheredRanks(rank))
    try:
        yield learner, rank.learners[POLICY]
    finally:
        learner.close()
        # Cycles hold its groups, and each group of gloo's keeps three threads.
        gc.collect()


def save(learner: RanksLearner | RankLearner, folder: Path) -> None:
    """Write a learner's shards into an existing folder, and wait until they are there."""
    learner.begin_save(folder, copy=False)
    learner.finish_saves()


def weights_of(learner: RanksLearner) -> dict[str, Tensor]:
    """All weights by Hugging Face name; no name may come twice."""
    pairs = list(learner.export_weights())
    weights = dict(pairs)
    assert len(weights) == len(pairs), "a weight was exported twice"
    return weights


def micro_batches(batch: StepBatch) -> list[MicroBatch]:
    """All of a batch's micro-batches, in order of mini-batch and data-parallel rank."""
    return [micro for mini in batch.mini_batches for rank in mini.per_rank for micro in rank]


def by_sequence(batch: StepBatch, field: str) -> dict[int, Tensor]:
    """A per-token field of the batch's inputs, by the sequences' flat numbers."""
    found: dict[int, Tensor] = {}
    for micro in micro_batches(batch):
        values_T = getattr(micro.inputs, field)
        for local, flat in enumerate(micro.sequence_ids):
            found[flat] = values_T[micro.inputs.seq_T == local]
    return found
