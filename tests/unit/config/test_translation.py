"""Configurations of verl and TRL as run files: what a user of them computes by hand, and that no key is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from cases import each_case

from megasharp.common.errors import UserError
from megasharp.config.core import flat
from megasharp.config.other_trainers import from_trl, from_verl
from megasharp.config.synonyms import read_table, rows

# In the manner of verl's script of DAPO on a 32B model: variables, arithmetic, defaults, quotes.
DAPO = """#!/usr/bin/env bash
clip_ratio_high=0.28
max_prompt_length=$((1024 * 2))
max_response_length=$((1024 * 20))
NNODES=${NNODES:-16}
MODEL_PATH=${MODEL_PATH:-"${HOME}/models/Qwen2.5-32B"}
python3 -m recipe.dapo.main_dapo \\
    data.train_files="data/dapo.parquet" data.val_files="${TEST_FILE}" \\
    data.max_prompt_length=${max_prompt_length} data.max_response_length=${max_response_length} \\
    data.train_batch_size=512 data.gen_batch_size=1536 actor_rollout_ref.rollout.n=16 \\
    algorithm.adv_estimator=grpo algorithm.filter_groups.enable=True \\
    actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.actor.clip_ratio_high=${clip_ratio_high} \\
    actor_rollout_ref.actor.optim.lr_warmup_steps=10 actor_rollout_ref.actor.ulysses_sequence_parallel_size=8 \\
    actor_rollout_ref.actor.use_dynamic_bsz=True \\
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$((max_prompt_length + max_response_length)) \\
    actor_rollout_ref.model.path="${MODEL_PATH}" +actor_rollout_ref.actor.own=1 \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 reward_model.overlong_buffer.enable=True \\
    reward_model.overlong_buffer.len=$((1024 * 4)) trainer.logger='["console","wandb"]' \\
    custom_reward_function.path=rewards/dapo.py custom_reward_function.name=score \\
    trainer.nnodes=$NNODES trainer.test_freq=5 trainer.save_freq=-1 trainer.total_epochs=2
"""
DAPO_HERE = {
    "steps": 22,  # 2 epochs of 17,000 // 1,536 steps
    "model.path": "~/models/Qwen2.5-32B",
    "data.path": "data/dapo.parquet",
    "data.answer_key": "reward_model.ground_truth",
    "data.max_prompt_tokens": 2048,
    "data.max_response_tokens": 20480,
    "data.prompts_per_step": 512,
    "data.responses_per_prompt": 16,
    "recipe.mini_batches": 16,
    "recipe.methods": ["grpo", "dynamic_sampling", "soft_overlong"],
    "recipe.clip.low": 0.2,
    "recipe.clip.high": 0.28,
    "recipe.clip.dual": 3.0,
    "recipe.soft_overlong.cache_tokens": 4096,
    "policy.cp": 8,
    "policy.dp": 16,  # 16 nodes x 8 / cp 8
    "policy.micro_batch_tokens": 22528 * 8,
    "policy.optimizer.warmup_steps": 160,  # 10 training steps of 16 mini-batches
    "policy.optimizer.betas": [0.9, 0.999],
    "policy.optimizer.weight_decay": 0.01,
    "rollout.engines": 32,
    "rollout.tp": 4,
    "checkpoint.every": 22,
    "checkpoint.keep_every": 22,
    "eval.every": 5,
    "eval.temperature": 0.0,
    "reward.function": "rewards/dapo.py:score",
    "log.wandb": "verl_examples",
}
GRPO = """
model_name_or_path: Qwen/Qwen2.5-1.5B-Instruct
dataset_name: trl-lib/DeepMath-103K
reward_funcs: [my_lib.rewards.correct, my_lib.rewards.brief]
reward_weights: [1.0, 0.5]
use_vllm: true
learning_rate: 2.0e-05
warmup_ratio: 0.1
beta: 0.001
epsilon_high: 0.28
delta: 4.0
loss_type: dr_grpo
scale_rewards: false
gradient_accumulation_steps: 4
steps_per_generation: 8
per_device_train_batch_size: 16
num_generations: 16
max_steps: 1000
save_steps: 100
num_iterations: 2
sync_ref_model: true
use_peft: true
lora_target_modules: [q_proj, v_proj, down_proj]
output_dir: data/Qwen-GRPO
odd_key: 3
"""
GRPO_HERE = {
    "name": "Qwen-GRPO",
    "seed": 42,
    "steps": 250,  # 1,000 optimizer steps, 2 a batch, each sample twice
    "data.prompts_per_step": 32,  # 16 x 4 processes x 8 / 16
    "data.responses_per_prompt": 16,
    "data.max_response_tokens": 512,
    "recipe.mini_batches": 2,
    "recipe.methods": ["dr_grpo", "kl", "truncated_is"],
    "recipe.reduction": "token_sum_over_constant",
    "recipe.clip.high": 0.28,
    "recipe.clip.dual": 4.0,
    "recipe.reset.every": 128,  # 512 optimizer steps
    "recipe.truncated_is.level": "sequence",
    "recipe.truncated_is.mode": "mask",
    "recipe.truncated_is.high": 3.0,
    "policy.dp": 4,
    "policy.optimizer.lr": 2e-05,
    "policy.optimizer.decay": "linear",
    "policy.optimizer.warmup_steps": 50,
    "policy.recompute": "full",
    "policy.lora.rank": 16,
    "policy.lora.targets": ["qkv", "fc2"],
    "checkpoint.every": 25,
    "checkpoint.keep_every": 25,
    "eval.every": 0,
    "reward.functions": [
        {"function": "my_lib.rewards:correct", "weight": 1.0},
        {"function": "my_lib.rewards:brief", "weight": 0.5},
    ],
}
TRANSLATE: dict[str, Callable[[Path], str]] = {
    "verl": lambda path: from_verl.translated(path, 17_000),
    "trl": lambda path: from_trl.translated(path, 17_000, 4),
}


def of(trainer: str, text: str, path: Path) -> tuple[str, dict[str, Any]]:
    path.write_text(text)
    said = TRANSLATE[trainer](path)
    tree = yaml.safe_load(said)
    return said, dict(flat(tree))


@each_case(
    ("trainer", "name", "text", "here", "left"),
    [
        (
            "verl",
            "dapo.sh",
            DAPO,
            DAPO_HERE,
            [
                "data.val_files: its value has $TEST_FILE, which dapo.sh does not set",
                "actor_rollout_ref.actor.own: 1: no key of verl",
            ],
        ),
        (
            "trl",
            "grpo.yaml",
            GRPO,
            GRPO_HERE,
            ["num_iterations: 2: each sample is used once", "odd_key: 3: no key of TRL"],
        ),
        (
            "trl",
            "small.yaml",
            "{gradient_accumulation_steps: 4, steps_per_generation: 1}",
            {"data.prompts_per_step": 16, "recipe.mini_batches": 1, "recipe.grpo.epsilon": 1e-4, "steps": 3187},
            ["model.path: small.yaml does not say it", "data.path: small.yaml does not say it"],
        ),
        ("trl", "grpo.py", "args = GRPOConfig(beta=0.01, max_steps=n)", {"recipe.kl.coefficient": 0.01}, ["max_steps"]),
        (
            "trl",
            "run.sh",
            "trl grpo --model_name_or_path m --loss_type cispo \\\n --epsilon_high=5.0 --bf16",
            {"recipe.methods": ["grpo", "cispo"], "recipe.cispo.high": 4.0, "model.dtype": "bfloat16"},
            [],
        ),
        (
            "verl",
            "experts.yaml",
            "actor_rollout_ref: {actor: {megatron: {tensor_model_parallel_size: 2, expert_model_parallel_size: 4}},"
            " rollout: {enable_rollout_routing_replay: true}}",
            {"policy.tp": 2, "policy.dp": 4, "policy.ep": 4, "policy.etp": None, "policy.experts.replay": True},
            [],
        ),
        (
            "verl",
            "run.sh",
            "python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.tensor_model_parallel_size=8 \\\n"
            "  actor_rollout_ref.rollout.expert_parallel_size=4 \\\n"
            "  +actor_rollout_ref.actor.megatron.override_transformer_config.moe_token_dispatcher_type=flex \\\n"
            "  +actor_rollout_ref.actor.megatron.override_transformer_config.moe_enable_deepep=True",
            {"rollout.tp": 8, "rollout.sglang.ep_size": 4, "policy.experts.dispatcher": "deepep"},
            [],
        ),
        (
            "verl",
            "wide.yaml",
            "actor_rollout_ref: {rollout: {tensor_model_parallel_size: 4, expert_parallel_size: 16},"
            " actor: {megatron: {override_transformer_config:"
            " {moe_token_dispatcher_type: allgather, moe_enable_deepep: false}}}}",
            {"rollout.tp": 4, "rollout.sglang.ep_size": None, "policy.experts.dispatcher": "allgather"},
            ["actor_rollout_ref.rollout.expert_parallel_size: 16: engines of rollout.tp 4"],
        ),
        (
            "verl",
            "adapters.sh",
            "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.lora_rank=16 \\\n"
            "  actor_rollout_ref.model.target_modules='[q_proj,v_proj,down_proj,embed_tokens]'",
            {"policy.lora.rank": 16, "policy.lora.targets": ["qkv", "fc2"]},
            [
                "actor_rollout_ref.model.target_modules: ",
                "2: policy.lora.targets: qkv is q_proj, k_proj, v_proj, so adapters are on k_proj too",
            ],
        ),
        (
            "verl",
            "gates.yaml",
            "actor_rollout_ref: {model: {lora: {rank: 8, target_modules: [gate_proj, linear_qkv]}}}",
            {"policy.lora.targets": ["fc1", "qkv"]},
            ["2: policy.lora.targets: fc1 is gate_proj, up_proj, so adapters are on up_proj too"],
        ),
        (
            "verl",
            "embeddings.yaml",
            "actor_rollout_ref: {model: {lora_rank: 8, target_modules: [embed_tokens]}}",
            {"policy.lora.rank": 8, "policy.lora.targets": None},
            [
                "policy.lora.targets: actor_rollout_ref.model.target_modules names no map",
                "actor_rollout_ref.model.target_modules: ['embed_tokens']: known here are q_proj",
            ],
        ),
        (
            "trl",
            "one.yaml",
            "{use_peft: true, lora_target_modules: up_proj}",
            {"policy.lora.targets": ["fc1"]},
            ["1: policy.lora.targets: fc1 is gate_proj, up_proj, so adapters are on gate_proj too"],
        ),
        (
            "verl",
            "r.yaml",
            "data: {train_batch_size: 8}",
            {"recipe.methods": []},
            ["recipe.methods: an estimator"],
        ),
    ],
)
def test_a_configuration_of_another_trainer_is_a_run(
    trainer: str, name: str, text: str, here: dict[str, Any], left: list[str], tmp_path: Path
) -> None:
    said, found = of(trainer, text, tmp_path / name)
    assert {key: found.get(key) for key in here} == here
    assert [line for line in left if f"#   {line}" not in said] == []


def value_of(row_values: list[str], default: Any) -> list[Any]:
    return [*row_values[:1]] or ([default] if default is not None else [2, "x", True, ["core_attn"]])


@each_case("trainer", ["verl", "trl"])
def test_no_key_is_lost(trainer: str, tmp_path: Path) -> None:
    """Of the tables' keys each is in the run file, or named below it, with the first value that it takes."""
    usual = read_table(trainer)["defaults"]
    path = tmp_path / "one.yaml"
    lost: list[str] = []
    for row in (row for row in rows(trainer) if "*" not in row.theirs):
        for value in value_of(list(row.values), usual.get(row.theirs)):
            tree: dict[str, Any] = {row.theirs: value}
            for part in reversed(row.theirs.split(".")) if trainer == "verl" else ():
                tree = {part: tree.get(row.theirs, tree)}
            try:
                path.write_text(yaml.dump(tree))
                said = TRANSLATE[trainer](path)
            except UserError:
                continue
            found = dict(flat(yaml.safe_load(said)))
            if f"#   {row.theirs}: " not in said and not any(f"{key}.".startswith(row.ours) for key in found):
                lost.append(row.theirs)
            break
        else:
            lost.append(row.theirs)
    assert lost == []


@each_case(
    ("trainer", "name", "text", "message"),
    [
        ("verl", "empty.yaml", "", "empty.yaml is empty"),
        ("verl", "list.yaml", "[1]", "expected a table of keys, found list"),
        ("verl", "plain.sh", "echo hello", "no overrides of verl in it"),
        (
            "verl",
            "odd.yaml",
            "data: {train_batch_size: many}",
            "odd.yaml: data.train_batch_size: 'many' is not of the kind",
        ),
        ("trl", "odd.yaml", "temperature: hot", "odd.yaml: rollout.temperature: "),
        ("verl", "other.yaml", "learning_rate: 1", "other.yaml: no key of verl v0.9.0 in it"),
        ("trl", "odd.yaml", "num_generations: 7", "num_generations: 7 does not divide the 32 responses of a batch"),
        ("trl", "odd.yaml", "{reward_funcs: a.b, reward_weights: [1, 2]}", "there are 2, of 1 reward_funcs"),
        ("trl", "odd.yaml", "loss_type: cispo", "epsilon_high: cispo bounds weights by it, and 0.2 is below 1"),
        ("trl", "odd.py", "args = (", "not valid Python"),
        (
            "verl",
            "odd.yaml",
            "actor_rollout_ref: {actor: {optim: {lr: -1.0}}}",
            "odd.yaml: policy.optimizer.lr: expected number > 0, found -1.0 (made of actor_rollout_ref.actor.optim.lr)",
        ),
        ("trl", "binary.yaml", "\0\1", "is no text"),
    ],
)
def test_what_is_no_configuration_is_refused_in_one_line(
    trainer: str, name: str, text: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as refused:
        of(trainer, text, tmp_path / name)
    assert message in str(refused.value) and "\n" not in str(refused.value)
