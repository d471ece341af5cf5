"""TRL's configuration as a run file: the YAML or JSON of `trl grpo`, its flags, or `GRPOConfig(...)` of a script.

TRL counts responses in batches, and optimizer steps in its schedules; ours count prompts, and batches of responses,
except for `policy.optimizer.warmup_steps`. It has no number of processes: that is accelerate's.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from megasharp.common.errors import UserError
from megasharp.config.other_trainers.configurations import is_script, read_flags, read_python, read_text, read_tree_of
from megasharp.config.other_trainers.translation import NEVER, Translation, adapted_maps, ks, listed, run_name, trackers

# Rewards that come with TRL.
_THEIR_REWARDS = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward", "get_soft_overlong_punishment")
_SGLANG = {"vllm_gpu_memory_utilization": "mem_fraction_static", "vllm_max_model_length": "context_length"}
# Added to the standard deviation of a group's rewards.
_EPSILON = 1e-4


def translated(path: Path, training_rows: int | None, processes: int) -> str:
    """Return a run file. `training_rows` turns epochs into steps. Raises UserError in one line."""
    text = read_text(path)
    if path.suffix == ".py":
        written = read_python(path, text)
    else:
        written = read_flags(path, text) if is_script(path, text) else read_tree_of(path, text, deep=False)
    parts = (_model, partial(_batch, processes=processes), partial(_steps, training_rows=training_rows))
    return Translation("trl", written).made(path.name, (*parts, _schedules, _losses, _corrections, _engines, _rewards))


def _on(value: Any) -> bool:
    return value is True or str(value).lower() in ("true", "1", "yes")


def _model(t: Translation) -> None:
    """The model, its dtype and adapters, rows, and the name."""
    inside = t.take("model_init_kwargs") or {}
    given = [key for key in ("dtype", "torch_dtype") if t.given(key)]
    dtype = next((t.named(key) for key in given), None) or (inside.get("dtype") if isinstance(inside, dict) else None)
    if _on(t.take("bf16")) or dtype:
        t.ours["model.dtype"] = dtype or "bfloat16"
    if isinstance(inside, dict) and inside.keys() - {"dtype"}:
        t.leave("model_init_kwargs", f"of {', '.join(sorted(inside.keys() - {'dtype'}))}: the model is its folder's")
    adapters = ("lora_r", "lora_alpha", "lora_target_modules", "lora_dropout")
    if _on(t.take("use_peft")):
        t.ours |= {"policy.lora.rank": t.take("lora_r"), "policy.lora.alpha": float(t.take("lora_alpha"))}
        adapted_maps(t, "lora_target_modules")
        t.take("lora_dropout")
        t.notes.append("adapters are trained without dropout; TRL's lora_dropout is 0.05 where it is not set")
    t.without_use("use_peft is false", *adapters)
    if t.given("datasets"):
        t.leave("datasets", "write them as entries of data.mix: path, name, split, weight")
    t.take("datasets")
    name = t.take("run_name")
    folder = t.take("output_dir")
    if name or folder:
        t.ours["name"] = run_name(name or folder)
    t.ours |= {"data.prompt_key": "prompt"} if t.given("dataset_name") else {}


def _batch(t: Translation, processes: int) -> None:
    """A step is a generation of TRL's: `steps_per_generation` micro-batches of each process."""
    group = int(t.take("num_generations"))
    accumulated = int(t.take("gradient_accumulation_steps"))
    per_device = int(t.take("per_device_train_batch_size"))
    steps = t.take("steps_per_generation")
    generation = t.take("generation_batch_size")
    processes = int(t.take("num_processes") or processes)
    if generation:
        steps = max(1, int(generation) // (per_device * processes))
    # An optimizer step never has less than its own micro-batches, of several generations where they are that small.
    steps = max(int(steps or accumulated), accumulated)
    responses = per_device * processes * steps
    if responses % group:
        raise UserError(
            f"num_generations: {group} does not divide the {responses} responses of a batch, which are {per_device} of "
            f"{processes} process(es) x {steps}; is --gpus right?"
        )
    t.ours |= {
        "policy.dp": processes,
        "data.responses_per_prompt": group,
        "data.prompts_per_step": responses // group,
        "recipe.mini_batches": t.whole("gradient_accumulation_steps", steps, accumulated, "recipe.mini_batches"),
        "data.max_response_tokens": int(t.take("max_completion_length")),
    }
    t.notes.append(f"reckoned with {processes} process(es), which TRL's file does not say: --gpus N")
    if processes > 1:
        t.ours |= {"cluster.gpus_per_node": processes}


def _optimizer_steps(t: Translation) -> int:
    """Return how many optimizer steps TRL makes of a batch of responses: those of samples used again too."""
    return int(t.ours["recipe.mini_batches"]) * int(t.take("num_iterations"))


def _steps(t: Translation, training_rows: int | None) -> None:
    """Length of the run and of its warm-up: optimizer steps there, batches of responses here."""
    each, prompts = _optimizer_steps(t), t.ours["data.prompts_per_step"]
    if each != t.ours["recipe.mini_batches"]:
        t.leave("num_iterations", "each sample is used once; steps are as many batches of responses as there")
    steps, epochs = t.take("max_steps"), float(t.take("num_train_epochs"))
    if steps is not None and int(steps) > 0:
        t.ours["steps"] = t.whole("max_steps", int(steps), each, "steps")
    elif training_rows is not None:
        t.ours["steps"] = max(1, int(epochs * training_rows / prompts))
    else:
        t.to_fill_in["steps"] = f"there are {epochs:g} epochs of (rows / {prompts}) steps; give --rows N"
    warmup, share = t.take("warmup_steps") or 0, float(t.take("warmup_ratio") or 0)
    if 0 < float(warmup) < 1:
        warmup, share = 0, float(warmup)
    if share and not warmup and "steps" in t.ours:
        warmup = share * t.ours["steps"] * t.ours["recipe.mini_batches"]
    elif share and not warmup:
        t.leave("warmup_ratio", "a share of steps, which are not known here")
    t.ours["policy.optimizer.warmup_steps"] = int(warmup)
    t.ours["policy.optimizer.betas"] = [float(t.take("adam_beta1")), float(t.take("adam_beta2"))]


def _schedules(t: Translation) -> None:
    """Checkpoints, evaluations and trackers."""
    total = t.ours.get("steps", NEVER)
    for strategy, every, ours, never in (
        ("save_strategy", "save_steps", "checkpoint.every", total),
        ("eval_strategy", "eval_steps", "eval.every", 0),
    ):
        kind, count = str(t.take(strategy)).lower(), t.take(every) or t.take("logging_steps")
        if kind in ("no", "false"):
            t.ours[ours] = never
        elif kind == "steps" and float(count) >= 1:
            t.ours[ours] = t.whole(every, float(count), _optimizer_steps(t), ours)
        elif kind == "steps" and "steps" in t.ours:
            t.ours[ours] = max(1, round(float(count) * total))
        else:
            t.leave(every if kind == "steps" else strategy, f"{ours} counts steps")
    if t.take("save_total_limit") is None:
        t.ours["checkpoint.keep_every"] = t.ours.get("checkpoint.every", 50)
    else:
        t.ours["checkpoint.keep_last"] = t.take("save_total_limit")
    t.without_use("eval_strategy says it", "do_eval")
    samples = t.take("num_generations_eval") or t.ours["data.responses_per_prompt"]
    t.ours |= {"eval.n": int(samples), "eval.k": ks(int(samples))}
    trackers(t, "report_to", "project", ("all", "none"))
    t.without_use("responses are always recorded", "log_completions")


def _losses(t: Translation) -> None:
    """Estimator, surrogate, bounds, and terms of the loss."""
    estimator = t.named("scale_rewards") or "grpo"
    methods = t.ours["recipe.methods"] = [estimator]
    kind, reduction = t.take("loss_type"), t.named("loss_type")
    t.ours |= {"recipe.reduction": reduction} if reduction else {}
    t.ours |= {"recipe.grpo.epsilon": _EPSILON} if estimator == "grpo" else {}
    low = float(t.take("epsilon"))
    high = float(t.first("epsilon_high") or low)
    level = t.named("importance_sampling_level")
    if kind == "cispo":
        methods.append("cispo")
        # TRL bounds the weight by epsilon_high itself, from above alone.
        if high < 1:
            raise UserError(f"epsilon_high: cispo bounds weights by it, and {high:g} is below 1: TRL asks for 5 or so")
        t.ours |= {"recipe.cispo.low": 1.0, "recipe.cispo.high": high - 1.0}
        t.without_use("cispo has no lower bound", "epsilon", "delta")
    else:
        methods += ["gspo"] if level == "gspo" or kind == "luspo" else []
        t.ours |= {"recipe.clip.low": low, "recipe.clip.high": high}
        dual = t.take("delta")
        t.ours |= {"recipe.clip.dual": float(dual)} if dual is not None else {}
    if float(t.take("beta") or 0):
        methods.append("kl")
        t.ours["recipe.kl.coefficient"] = float(t.take("beta"))
        if not t.given("use_bias_correction_kl") or t.take("use_bias_correction_kl"):
            t.notes.append("TRL weights the penalty of kl by the ratio where use_bias_correction_kl is on, its default")
    t.without_use("beta is 0", "use_bias_correction_kl")
    if float(t.take("top_entropy_quantile")) < 1:
        methods.append("forking_tokens")
        t.ours["recipe.forking_tokens.share"] = float(t.take("top_entropy_quantile"))
    if float(t.take("entropy_coef") or 0):
        methods.append("entropy_bonus")
        t.ours["recipe.entropy_bonus.coefficient"] = float(t.take("entropy_coef"))
    if _on(t.take("sync_ref_model")):
        every = float(t.take("ref_model_sync_steps"))
        t.ours["recipe.reset.every"] = t.whole("ref_model_sync_steps", every, _optimizer_steps(t), "recipe.reset.every")
        t.to_fill_in["recipe.reset.every"] = "a reset replaces the reference whole; TRL mixes by ref_model_mixup_alpha"
    t.without_use("sync_ref_model is false", "ref_model_sync_steps", "ref_model_mixup_alpha")


def _corrections(t: Translation) -> None:
    methods = t.ours["recipe.methods"]
    names = ("vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min")
    cap = t.take("vllm_importance_sampling_cap")
    if _on(t.take("use_vllm")) and _on(t.take("vllm_importance_sampling_correction")):
        level, _, mode = str(t.take(names[0])).partition("_")
        if level not in ("token", "sequence") or mode not in ("mask", "truncate"):
            raise UserError(f"vllm_importance_sampling_mode: {level}_{mode} is none of TRL's")
        methods.append("truncated_is")
        found = {"level": level, "mode": mode, "high": float(cap or t.take(names[1])), "low": t.take(names[2])}
        t.ours |= {f"recipe.truncated_is.{key}": value for key, value in found.items() if value is not None}
        t.take(names[1])
    t.without_use("there is no vLLM, or no correction", *names)
    threshold = t.take("off_policy_mask_threshold")
    if threshold is not None:
        methods.append("off_policy_mask")
        t.ours["recipe.off_policy_mask.threshold"] = float(threshold)


def _engines(t: Translation) -> None:
    server = ("vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout")
    if _on(t.take("use_vllm")):
        tp = int(t.take("vllm_tensor_parallel_size") or 1)
        placement = t.named("vllm_mode")
        t.ours |= {"rollout.engine": "sglang", "rollout.tp": tp, "cluster.placement": placement or "colocated"}
        t.ours["rollout.engines"] = t.whole("vllm_tensor_parallel_size", t.ours["policy.dp"], tp, "rollout.engines")
        flags = {name: t.take(key) for key, name in _SGLANG.items()}
        t.ours["rollout.sglang"] = {name: value for name, value in flags.items() if value is not None}
        for key in server:
            t.leave(key, "engines are SGLang's: the run starts them, or rollout.external names those started by hand")
    else:
        t.without_use("use_vllm is false", "vllm_mode", "vllm_tensor_parallel_size", *_SGLANG, *server)
        for key in ("use_transformers_continuous_batching", "use_transformers_paged"):
            t.without_use("the engine of the run batches by itself", key)
    t.without_use("colocated engines always sleep in training", "vllm_enable_sleep_mode")
    if _on(t.take("gradient_checkpointing")) or _on(t.take("activation_checkpointing")):
        t.ours["policy.recompute"] = "full"
    if _on(t.take("use_liger_kernel")):
        t.ours["policy.head"] = "chunked"
    if _on(t.take("use_cpu")):
        t.ours["policy.device"] = "cpu"


def _rewards(t: Translation) -> None:
    given = listed(t.take("reward_funcs"))
    weights = listed(t.take("reward_weights")) or [1.0] * len(given)
    if given and len(weights) != len(given):
        raise UserError(f"reward_weights: there are {len(weights)}, of {len(given)} reward_funcs")
    own, theirs = [], []
    for name, weight in zip(given, weights, strict=False):
        module, _, function = str(name).replace(":", ".").rpartition(".")
        if name in _THEIR_REWARDS or not module:
            theirs.append(str(name))
        else:
            own.append({"function": f"{module}:{function}", "weight": float(weight)})
    if theirs:
        t.leave("reward_funcs", f"of {', '.join(theirs)}: TRL has it; here data.task=math judges mathematics")
    if len(own) == 1 and own[0]["weight"] == 1.0:
        t.ours["reward.function"] = own[0]["function"]
    elif own:
        t.ours["reward.functions"] = own
    if not own:
        t.to_fill_in["reward.function, or data.task"] = "no reward of the file is a module and a function"
