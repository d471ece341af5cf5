"""verl's configuration as a run file: its YAML, or the hydra overrides of a script.

verl counts prompts in batches and mini-batches, and training steps in its schedules; ours count the same, except for
`policy.optimizer.warmup_steps`, which are optimizer steps.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from megasharp.common.errors import UserError
from megasharp.config.other_trainers.configurations import is_script, read_overrides, read_text, read_tree_of
from megasharp.config.other_trainers.translation import NEVER, Translation, adapted_maps, ks, listed, run_name, trackers

_ACTOR = "actor_rollout_ref.actor"
_MODEL = "actor_rollout_ref.model"
_ROLLOUT = "actor_rollout_ref.rollout"
_CORRECTION = "algorithm.rollout_correction"
_BUFFERS = (
    "reward_model.reward_kwargs.overlong_buffer_cfg",
    "reward.reward_kwargs.overlong_buffer_cfg",
    "reward_model.overlong_buffer",
)
# Options of SGLang by those of verl's engines.
_SGLANG = {
    "gpu_memory_utilization": "mem_fraction_static",
    "max_model_len": "context_length",
    "max_num_seqs": "max_running_requests",
    "max_num_batched_tokens": "chunked_prefill_size",
    "enforce_eager": "disable_cuda_graph",
}


def translated(path: Path, training_rows: int | None) -> str:
    """Return a run file. `training_rows` turns epochs into steps. Raises UserError in one line."""
    text = read_text(path)
    written = read_overrides(path, text) if is_script(path, text) else read_tree_of(path, text, deep=True)
    parts = (_data, partial(_batch, training_rows=training_rows), _losses, _advantages, _corrections)
    return Translation("verl", written).made(path.name, (*parts, _policy, _engines, _schedules, _rewards))


def _data(t: Translation) -> None:
    """Files of training, the columns of verl's rows, the model and the name."""
    files = [str(file) for file in listed(t.take("data.train_files"))]
    columns = {"prompt_key": t.take("data.prompt_key"), "answer_key": "reward_model.ground_truth"}
    if len(files) == 1:
        t.ours["data.path"] = files[0]
        t.ours |= {f"data.{key}": value for key, value in columns.items()}
    elif files:
        names = [Path(file).stem if len({Path(each).stem for each in files}) == len(files) else None for file in files]
        named = [{"source": name} if name else {"source": f"file{n}"} for n, name in enumerate(names, 1)]
        t.ours["data.mix"] = [{**name, "path": file, **columns} for name, file in zip(named, files, strict=True)]
    t.leave("data.val_files", "a suite is a file of its own, for eval.suites: its path, prompt_key and answer_key")
    t.ours |= {"data.max_prompt_tokens": t.take("data.max_prompt_length")}
    t.ours |= {"data.max_response_tokens": t.take("data.max_response_length")}
    if name := t.take("trainer.experiment_name"):
        t.ours["name"] = run_name(name)


def _batch(t: Translation, training_rows: int | None) -> None:
    prompts = int(t.take("data.train_batch_size"))
    mini = int(t.take(f"{_ACTOR}.ppo_mini_batch_size"))
    t.ours |= {
        "data.prompts_per_step": prompts,
        "data.responses_per_prompt": t.first(f"{_ROLLOUT}.n", f"{_ACTOR}.rollout_n"),
        "recipe.mini_batches": t.whole(f"{_ACTOR}.ppo_mini_batch_size", prompts, mini, "recipe.mini_batches"),
    }
    if t.given("data.gen_batch_size") and t.take("data.gen_batch_size") not in (None, prompts):
        t.leave("data.gen_batch_size", "dynamic_sampling replaces dropped groups in rounds, as many as are missing")
    t.without_use("the step has as many prompts", "data.gen_batch_size")
    steps = t.first("trainer.total_training_steps", f"{_ACTOR}.optim.total_training_steps")
    epochs = float(t.take("trainer.total_epochs"))
    if steps is None or int(steps) < 1:
        # verl's loader gives so many rows a step, of which dynamic sampling leaves the rest.
        read = int(t.take("data.gen_batch_size") or prompts)
        steps = None if training_rows is None else max(1, int(epochs * (training_rows // read)))
        if steps is None:
            t.to_fill_in["steps"] = f"there are {epochs:g} epochs of (rows / {read}) steps; give --rows N"
    t.ours |= {} if steps is None else {"steps": int(steps)}
    warmup = t.take(f"{_ACTOR}.optim.lr_warmup_steps")
    share = float(t.take(f"{_ACTOR}.optim.lr_warmup_steps_ratio") or 0)
    if warmup is None or int(warmup) < 0:
        warmup = int(share * int(steps or 0))
        if share and not steps:
            t.leave(f"{_ACTOR}.optim.lr_warmup_steps_ratio", "a share of steps, which are not known here")
    t.ours["policy.optimizer.warmup_steps"] = int(warmup) * t.ours["recipe.mini_batches"]


def _losses(t: Translation) -> None:
    """The surrogate, its bounds, and terms of the loss."""
    methods = t.ours["recipe.methods"] = []
    surrogate = t.named(f"{_ACTOR}.policy_loss.loss_mode")
    low, high = t.take(f"{_ACTOR}.clip_ratio_low"), t.take(f"{_ACTOR}.clip_ratio_high")
    both = t.take(f"{_ACTOR}.clip_ratio")
    if both is not None and None not in (low, high):
        t.leave(f"{_ACTOR}.clip_ratio", "verl reads clip_ratio_low and clip_ratio_high, which are set or at their 0.2")
    low, high = both if low is None else low, both if high is None else high
    table = "cispo" if surrogate == "cispo" else "clip"
    bounds = {f"recipe.{table}.low": low, f"recipe.{table}.high": high}
    dual = t.take(f"{_ACTOR}.clip_ratio_c")
    if surrogate in (None, "clip"):
        bounds["recipe.clip.dual"] = dual
    methods += [surrogate] if surrogate not in (None, "clip") else []
    for name, keys in {
        "clip_cov": {"clip_cov_ratio": "share", "clip_cov_lb": "low", "clip_cov_ub": "high"},
        "kl_cov": {"kl_cov_ratio": "share", "ppo_kl_coef": "coefficient"},
    }.items():
        theirs = [f"{_ACTOR}.policy_loss.{key}" for key in keys]
        if surrogate == name:
            bounds |= {f"recipe.{name}.{ours}": t.take(key) for key, ours in zip(theirs, keys.values(), strict=True)}
        t.without_use(f"policy_loss.loss_mode is not {name}", *theirs)
    t.ours |= {key: value for key, value in bounds.items() if value is not None}
    _terms(t, methods)


def _terms(t: Translation, methods: list[str]) -> None:
    if coefficient := t.take(f"{_ACTOR}.entropy_coeff"):
        methods.append("entropy_bonus")
        t.ours["recipe.entropy_bonus.coefficient"] = coefficient
    of_loss = (f"{_ACTOR}.kl_loss_coef", f"{_ACTOR}.kl_loss_type")
    of_reward = ("algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty")
    if t.take("algorithm.use_kl_in_reward"):
        t.leave("algorithm.use_kl_in_reward", "the divergence is a term of the loss: kl in recipe.methods")
        for key in of_reward:
            t.leave(key, "a penalty of the reward; that of the loss has recipe.kl")
    t.without_use("use_kl_in_reward is false", *of_reward, "algorithm.use_kl_in_reward")
    if t.take(f"{_ACTOR}.use_kl_loss"):
        methods.append("kl")
        form = t.named(of_loss[1])
        t.ours |= {"recipe.kl.coefficient": t.take(of_loss[0])} | ({"recipe.kl.form": form} if form else {})
    t.without_use("use_kl_loss is false", *of_loss)


def _advantages(t: Translation) -> None:
    """The estimator, and which groups and lengths count."""
    estimator = t.named("algorithm.adv_estimator")
    if estimator is None:
        reason = t.left.get("algorithm.adv_estimator", ("", "the default gae needs a critic, which is not there"))[1]
        t.to_fill_in["recipe.methods"] = f"an estimator of advantages, such as grpo, for verl's has none here: {reason}"
    if not t.take("algorithm.norm_adv_by_std_in_grpo") and estimator == "grpo":
        estimator = "dr_grpo"
    t.ours["recipe.methods"][:0] = [estimator] if estimator else []
    if t.take("algorithm.filter_groups.enable"):
        t.ours["recipe.methods"].append("dynamic_sampling")
        rounds = t.take("algorithm.filter_groups.max_num_gen_batches")
        t.ours |= {"recipe.dynamic_sampling.max_rounds": rounds} if rounds else {}
    t.without_use("filter_groups.enable is false, or 0", "algorithm.filter_groups.max_num_gen_batches")
    lengths = [f"{buffer.rpartition('.')[0]}.max_resp_len" for buffer in _BUFFERS[:2]]
    if t.first(*(f"{buffer}.enable" for buffer in _BUFFERS)):
        t.ours["recipe.methods"].append("soft_overlong")
        found = {
            "cache_tokens": t.first(*(f"{buffer}.len" for buffer in _BUFFERS)),
            "factor": t.first(*(f"{buffer}.penalty_factor" for buffer in _BUFFERS)),
            "max_tokens": t.first(*lengths),
        }
        t.ours |= {f"recipe.soft_overlong.{key}": value for key, value in found.items() if value is not None}
    t.without_use(
        "the overlong buffer is off",
        *(f"{buffer}.{key}" for buffer in _BUFFERS for key in ("len", "penalty_factor")),
        *lengths,
    )


def _corrections(t: Translation) -> None:
    methods = t.ours["recipe.methods"]
    if t.take(f"{_CORRECTION}.bypass_mode"):
        methods.append("bypass")
    if (level := t.named(f"{_CORRECTION}.rollout_is")) is not None:
        methods.append("truncated_is")
        low, high = _bounds(t.take(f"{_CORRECTION}.rollout_is_threshold"))
        mask = {"recipe.truncated_is.mode": "mask", "recipe.truncated_is.low": low} if low is not None else {}
        t.ours |= {"recipe.truncated_is.level": level, "recipe.truncated_is.high": high, **mask}
    t.without_use("rollout_is is null", f"{_CORRECTION}.rollout_is_threshold")
    kind = t.take(f"{_CORRECTION}.rollout_rs")
    if (level := t.named(f"{_CORRECTION}.rollout_rs")) is not None:
        methods.append("ratio_mask")
        low, high = _bounds(t.take(f"{_CORRECTION}.rollout_rs_threshold"))
        t.ours["recipe.ratio_mask.level"] = level
        if str(kind).endswith("k3"):
            t.ours |= {"recipe.ratio_mask.k3": high, "recipe.ratio_mask.low": 0.0, "recipe.ratio_mask.high": 1e9}
        elif high is not None:
            t.ours |= {"recipe.ratio_mask.low": 1 / high if low is None else low, "recipe.ratio_mask.high": high}
    t.without_use("rollout_rs is null", f"{_CORRECTION}.rollout_rs_threshold")


def _bounds(value: Any) -> tuple[float | None, float | None]:
    """Read a bound of a ratio, or two: "0.5_2.0"."""
    if value is None:
        return None, None
    low, bar, high = str(value).partition("_")
    try:
        return (float(low), float(high)) if bar else (None, float(low))
    except ValueError:
        raise UserError(f"{_CORRECTION}: {value!r} is no bound such as 2.0, and no two such as 0.5_2.0") from None


def _policy(t: Translation) -> None:
    """Ranks, memory and adapters."""
    megatron, fsdp = f"{_ACTOR}.megatron", f"{_ACTOR}.fsdp_config"
    nodes, per_node = int(t.take("trainer.nnodes")), int(t.take("trainer.n_gpus_per_node"))
    sizes = {
        "tp": int(t.take(f"{megatron}.tensor_model_parallel_size") or 1),
        "pp": int(t.take(f"{megatron}.pipeline_model_parallel_size") or 1),
        "cp": int(
            t.first(
                f"{megatron}.context_parallel_size",
                f"{_ACTOR}.ulysses_sequence_parallel_size",
                f"{fsdp}.ulysses_sequence_parallel_size",
            )
            or 1
        ),
    }
    split = sizes["tp"] * sizes["pp"] * sizes["cp"]
    for key, theirs in (("ep", "expert_model_parallel_size"), ("etp", "expert_tensor_parallel_size")):
        ranks = int(t.take(f"{megatron}.{theirs}") or 1)
        # A dense model has neither.
        sizes |= {key: ranks} if ranks > 1 else {}
    t.ours |= {f"policy.{key}": value for key, value in sizes.items()}
    if t.take(f"{megatron}.override_transformer_config.moe_enable_deepep") in (True, "true", "True"):
        t.ours["policy.experts.dispatcher"] = "deepep"
    t.ours["policy.dp"] = t.whole("trainer.n_gpus_per_node", nodes * per_node, split, "policy.dp")
    if sizes["tp"] * sizes["pp"] == 1 and nodes * per_node > 1:
        t.notes.append(
            "FSDP has weights in pieces; here each rank of policy.dp has all: megasharp plan proposes tp and pp"
        )
    t.ours |= {"cluster.nodes": nodes, "cluster.gpus_per_node": per_node, "policy.device": "cuda"}
    t.ours |= {"cluster.backend": "ray"} if nodes > 1 else {}
    parts = {"weights": "param_offload", "gradients": "grad_offload", "optimizer": "optimizer_offload"}
    t.ours["policy.offload"] = [
        part for part, key in parts.items() if t.first(f"{megatron}.{key}", f"{fsdp}.{key}") in (True, "true", "True")
    ]
    tokens = t.take(f"{_ACTOR}.ppo_max_token_len_per_gpu")
    if tokens and t.take(f"{_ACTOR}.use_dynamic_bsz"):
        t.ours["policy.micro_batch_tokens"] = int(tokens) * sizes["cp"]
    t.without_use("use_dynamic_bsz is false", f"{_ACTOR}.ppo_max_token_len_per_gpu", f"{_ACTOR}.use_dynamic_bsz")
    for key in (f"{_ACTOR}.ppo_micro_batch_size", f"{_ACTOR}.ppo_micro_batch_size_per_gpu"):
        t.leave(key, "micro-batches count tokens here (policy.micro_batch_tokens), or are planned")
    if t.take(f"{_MODEL}.enable_gradient_checkpointing"):
        t.ours["policy.recompute"] = "full"
    if t.take(f"{_MODEL}.use_fused_kernels") or t.take(f"{_ACTOR}.use_fused_kernels"):
        t.ours["policy.head"] = "chunked"
    t.without_use("fused kernels are off", f"{_MODEL}.use_fused_kernels", f"{_ACTOR}.use_fused_kernels")
    _adapters(t)


def _adapters(t: Translation) -> None:
    rank = t.first(f"{_MODEL}.lora_rank", f"{_MODEL}.lora.rank")
    alpha = t.first(f"{_MODEL}.lora_alpha", f"{_MODEL}.lora.alpha")
    targets = [key for key in (f"{_MODEL}.target_modules", f"{_MODEL}.lora.target_modules") if t.given(key)]
    if rank:
        t.ours |= {"policy.lora.rank": rank, "policy.lora.alpha": alpha}
        for key in targets:
            adapted_maps(t, key)
    t.without_use("there are no adapters, or they are of all linear maps", *targets)


def _engines(t: Translation) -> None:
    engine = t.named(f"{_ROLLOUT}.name") or "sglang"
    tp = int(t.take(f"{_ROLLOUT}.tensor_model_parallel_size"))
    gpus = t.ours["cluster.nodes"] * t.ours["cluster.gpus_per_node"]
    given: dict[str, Any] = {}
    for key, ours in _SGLANG.items():
        value = t.take(f"{_ROLLOUT}.{key}")
        if value is not None and value is not False:
            given[ours] = value
    if t.given(f"{_ROLLOUT}.enable_prefix_caching") and not t.take(f"{_ROLLOUT}.enable_prefix_caching"):
        given["disable_radix_cache"] = True
    t.take(f"{_ROLLOUT}.enable_prefix_caching")
    experts = f"{_ROLLOUT}.expert_parallel_size"
    spread = int(t.take(experts) or 1)
    if spread > 1 and tp % spread:
        t.leave(experts, f"engines of rollout.tp {tp} spread experts by a divisor of it")
    elif spread > 1:
        given["ep_size"] = spread
    given |= t.below(f"{_ROLLOUT}.engine_kwargs.sglang")
    t.ours["rollout.engine"] = engine
    if engine == "sglang":
        t.ours |= {"rollout.tp": tp, "rollout.engines": t.whole(f"{_ROLLOUT}.tp", gpus, tp, "rollout.engines")}
        t.ours |= {"rollout.sglang": given} if given else {}
    top_k = t.take(f"{_ROLLOUT}.top_k")
    t.ours["rollout.top_k"] = max(0, int(top_k or 0))
    t.without_use("colocated engines always sleep in training", f"{_ROLLOUT}.free_cache_engine")
    if t.given("actor_rollout_ref.hybrid_engine"):
        hybrid = t.take("actor_rollout_ref.hybrid_engine")
        t.ours["cluster.placement"] = "colocated" if hybrid else "disaggregated"


def _schedules(t: Translation) -> None:
    """Checkpoints, evaluations and trackers."""
    saves, tests = int(t.take("trainer.save_freq")), int(t.take("trainer.test_freq"))
    t.ours |= {"checkpoint.every": saves if saves > 0 else t.ours.get("steps", NEVER), "eval.every": max(0, tests)}
    kept = t.take("trainer.max_actor_ckpt_to_keep")
    t.ours |= {"checkpoint.keep_last": kept} if kept else {"checkpoint.keep_every": t.ours["checkpoint.every"]}
    validation = f"{_ROLLOUT}.val_kwargs"
    temperature, samples = t.take(f"{validation}.temperature"), int(t.take(f"{validation}.n"))
    if not t.take(f"{validation}.do_sample"):
        temperature = 0.0
    t.ours |= {"eval.temperature": float(temperature or 0.0), "eval.n": samples, "eval.k": ks(samples)}
    t.ours["eval.top_k"] = max(0, int(t.take(f"{validation}.top_k") or 0))
    trackers(t, "trainer.logger", "trainer.project_name", ("console", "file"))
    t.without_use("responses are always recorded", "trainer.rollout_data_dir")


def _rewards(t: Translation) -> None:
    places = ("custom_reward_function", "reward.custom_reward_function")
    path = t.first(*(f"{place}.path" for place in places))
    name = t.first(*(f"{place}.name" for place in places)) or "compute_score"
    if path:
        t.ours["reward.function"] = f"{path}:{name}"
    else:
        t.to_fill_in["reward.function, or data.task"] = (
            "verl's own compute_score chooses a verifier by the rows' data_source; data.task=math judges mathematics"
        )
