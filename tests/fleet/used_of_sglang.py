"""What megasharp uses from inside SGLang, and whether the installed one has it; run with the engines' Python.

Prints a line for each thing that is missing or called otherwise, and nothing where all is there. Imports are read from
our files; what is replaced, and what is read of SGLang's objects, is listed here. Read from 0.5.21.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

ENGINE = Path(__file__).parents[2] / "megasharp" / "rollout" / "sglang" / "engine"
# Replaced in `sglang_patches.py` and `server_patches.py`, or overridden in a class of ours: the parameters after self.
REPLACED = {
    "SamplingBatchInfo": {
        "adjusted_from_schedule_batch": "batch vocab_size",
        "adjusted_filter_batch": "keep_indices keep_indices_device",
        "adjusted_merge_batch": "other",
        "copy_for_forward": "",
    },
    "SamplingParams": {"verify": "vocab_size"},
    "WeightUpdater": {
        "update_weights_from_tensor": "named_tensors load_format",
        "receive_weights_from_distributed": "names dtypes shapes group_name load_format",
    },
    "SchedulerWeightUpdaterManager": {"update_weights_from_disk": "recv_req"},
    "WeightChecker": {"_compute_checksum": "skip_tensor_list role"},
    "Engine": {
        "_launch_scheduler_processes": "server_args port_args run_scheduler_process_func placement_group",
        "_launch_detokenizer_subprocesses": "server_args port_args run_detokenizer_process_func",
    },
    "http_server": {"_freeze_gc_after_server_warmup": "server_args"},
    "TokenizerManager": {
        "get_internal_state": "",
        "_send_one_request": "tokenized_obj",
        "_send_batch_request": "tokenized_objs",
        "continue_generation": "obj",
        "release_memory_occupation": "obj request",
        "resume_memory_occupation": "obj request",
        "update_weights_from_tensor": "obj request",
        "update_weights_from_distributed": "obj request",
        "update_weights_from_disk": "obj request",
        "begin_weight_update": "obj request",
        "check_weights": "obj request",
    },
    "ModelConfig": {"_derive_hybrid_model": ""},
    "HybridSWAPoolConfigurator": {"__init__": "kvc", "_solve_pool_sizes": "max_total_num_tokens page_size"},
    "KVCacheConfigurator": {
        "_build_oot_mha_kv_pool": "max_total_num_tokens",
        "_build_hybrid_swa_kv_pool": "full_max_total_num_tokens swa_max_total_num_tokens mha_pool_class",
    },
    "RadixCache": {
        "match_prefix": "params",
        "_insert_cache": "req token_ids chunked key_limit split_prompt",
        "cache_unfinished_req": "req chunked",
        "on_release": "req inserted",
        "evict_sliding_windows": "req pre_len eviction_interval",
        "evict": "params",
        "full_evictable_size": "",
        "swa_evictable_size": "",
        "full_protected_size": "",
        "swa_protected_size": "",
        "supports_swa": "",
        "reset": "",
    },
    "SWAPrefillBudget": {"swa_tokens": "extend_input_len max_new_tokens chunk_limit swa_host_hit_length"},
    "SWATokenToKVPoolAllocator": {"create_prefill_budget": "tree_cache num_mixed_decode_tokens"},
    "Scheduler": {"get_internal_state": "recv_req", "_poll_timeout_aborts": ""},
    "Sampler": {
        "forward": "logits_output sampling_info return_logprob top_logprobs_nums token_ids_logprobs positions",
        "_sample_from_probs": "probs sampling_info positions simple_sampling_case",
    },
    "Qwen2ForCausalLM": {"forward": None, "load_weights": "weights"},
    "Qwen3ForCausalLM": {"forward": None, "load_weights": "weights"},
    "Qwen3MoeForCausalLM": {"forward": None, "load_weights": "weights is_mtp"},
    "RoutedExpertsCapturer": {"get_topk": "req_pool_idx seqlen req_to_token_pool start_len"},
    "SRTPlatform": {
        "get_default_attention_backend": "",
        "get_mha_kv_pool_cls": "",
        "get_paged_allocator_cls": "",
        "is_pin_memory_available": "device",
        "get_dispatch_key_name": "",
    },
    "PagedTokenToKVPoolAllocator": {
        "alloc_extend": "prefix_lens prefix_lens_cpu seq_lens seq_lens_cpu last_loc extend_num_tokens num_new_pages",
        "alloc_decode": "seq_lens seq_lens_cpu last_loc",
    },
}
# Read or set on SGLang's objects, by the class (or the module, where it has a dot) in whose source the name must stand.
READ = {
    "SamplingBatchInfo": "temperatures top_ks top_ps min_ps is_all_greedy sampling_mask_batch_indices device",
    "SamplingParams": "custom_params sampling_seed",
    "LogitsMetadata": "from_forward_batch next_token_logits_buffer extend_return_logprob extend_return_top_logprob "
    "extend_token_ids_logprob capture_hidden_mode",
    "CaptureHiddenMode": "NULL",
    "ModelConfig": "num_attention_layers is_hybrid_swa full_attention_layer_ids swa_attention_layer_ids context_len",
    "HybridSWAPoolConfigurator": "_make_pool_config",
    "KVCacheConfigurator": "pool_page_size model_config",
    "RadixCache": "evictable_size_ protected_size_ page_size evictable_size",
    "SWAPrefillBudget": "swa_offset tree_cache page_size",
    "SWATokenToKVPoolAllocator": "full_attn_allocator swa_attn_allocator full_to_swa_index_mapping "
    "full_available_size swa_available_size clear",
    "sglang.srt.mem_cache.swa_memory_pool": "full_kv_pool swa_kv_pool size_swa full_to_swa_index_mapping",
    "sglang.srt.managers.schedule_batch": "swa_evict_floor kv_allocated_len max_new_tokens maybe_evict_swa "
    "SGLANG_SWA_EVICTION_INTERVAL origin_input_ids sampling_params time_stats",
    "sglang.srt.model_executor.forward_batch_info": "out_cache_loc seq_lens extend_prefix_lens req_pool_indices "
    "sampling_info forward_mode",
    "sglang.srt.model_executor.model_runner_components.load_model_utils": "get_attention_sliding_window_size",
    "sglang.srt.runtime_context": "tp_size tp_rank tp_group kernel",
    "RadixAttention": "layer_id tp_q_head_num tp_k_head_num tp_v_head_num head_dim scaling",
    "QKVParallelLinear": "q_proj_shard_size kv_proj_shard_size total_num_heads total_num_kv_heads head_size "
    "num_kv_head_replicas",
    "MergedColumnParallelLinear": "output_sizes",
    "VocabParallelEmbedding": "org_vocab_size",
    "LlamaForCausalLM": "model lm_head logits_processor",
    "Qwen2ForCausalLM": "model lm_head logits_processor",
    "Qwen3ForCausalLM": "model lm_head logits_processor",
    "Qwen3MoeForCausalLM": "model lm_head logits_processor",
    "MixtralForCausalLM": "model lm_head",
    "FusedMoE": "num_experts num_local_experts intermediate_size_per_partition hidden_size moe_tp_size quant_method",
    "sglang.srt.layers.quantization.unquant": "w13_weight w2_weight load_up_proj_weight_first w13_swiglu_interleaved",
    "sglang.srt.models.mixtral": "block_sparse_moe topk embed_tokens",
    "sglang.srt.models.qwen3_moe": "mlp experts",
    "sglang.srt.layers.moe.topk": "layer_id capture_routed_experts_if_allowed",
    "sglang.srt.mem_cache.pool_host.common": "ALLOC_MEMORY_FUNCS",
    "Scheduler": "tree_cache token_to_kv_pool_allocator waiting_queue collect_inflight_reqs "
    "effective_max_running_requests_per_dp max_total_num_tokens max_req_input_len",
    "SchedulerWeightUpdaterManager": "tp_worker",
    "WeightUpdater": "get_model",
    "WeightChecker": "_get_model _parallelism_info",
    "TokenizerManager": "flush_cache get_internal_state config_value weight_version",
    "PagedTokenToKVPoolAllocator": "free_pages merge_and_sort_free page_size device",
    "PlatformEnum": "OOT",
    "sglang.srt.managers.io_struct": "extra_key return_routed_experts",
    "sglang.srt.managers.tokenizer_manager": "routed_experts prompt_tokens",
    "sglang.srt.observability.req_time_stats": "wait_queue_entry_time prefill_finished_time queue_duration_s",
    "sglang.srt.layers.logits_processor": "next_token_logits next_token_logprobs customized_info",
    "sglang.srt.managers.scheduler_components.batch_result_processor": "customized_info",
    "sglang.srt.model_loader.loader": "secondary_weights",
    "sglang.srt.model_executor.model_runner_components.layer_setup": "start_layer end_layer num_attention_layers",
    "sglang.srt.model_executor.model_runner_components.cuda_graph_setup": "has_standard_gqa_for_all_local_layers",
    "sglang.srt.utils.weight_checker": "_skip_weight_check",
    "sglang.srt.utils.stale_shm_cleanup": "_SGL_SHM_PREFIX",
    "sglang.srt.managers.load_snapshot": "shm_path_for",
    "sglang.srt.models.registry": "SGLANG_EXTERNAL_MODEL_PACKAGE EntryClass",
    "sglang.srt.platforms": "sglang.srt.platforms SGLANG_PLATFORM",
    "sglang.srt.layers.attention.flashattention_backend": "forward_metadata scheduler_metadata",
}
# Of ServerArgs, beside those in the tables of `engine_config.py`.
FLAGS = (
    "log_level disable_prefill_cuda_graph cuda_graph_max_bs_decode cuda_graph_bs_decode enable_weights_cpu_backup "
    "weight_cache_mode swa_full_tokens_ratio chunked_prefill_size ep_size moe_a2a_backend moe_runner_backend"
)


def main() -> None:
    """Print what does not fit."""
    os.environ |= {
        "SGLANG_PLATFORM": "megasharp_cpu",
        "SGLANG_EXTERNAL_MODEL_PACKAGE": "megasharp.rollout.sglang.engine.models",
    }
    from megasharp.rollout.sglang.engine.torchvision_ops import define_missing_ops

    define_missing_ops()
    found: dict[str, Any] = {}
    problems = [*_imports(found), *_replaced(found), *_read(found), *_flags()]
    version = metadata.version("sglang")
    for problem in problems:
        print(f"sglang {version}: {problem}")
    sys.exit(bool(problems))


def imports() -> Iterator[tuple[str, str, str]]:
    """(our file, SGLang's module, name) of every import, wherever it stands in the file."""
    for file in sorted(ENGINE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sglang":
                yield from ((file.name, str(node.module), alias.name) for alias in node.names)


def _imports(found: dict[str, Any]) -> Iterator[str]:
    for file, module, name in imports():
        try:
            owner = importlib.import_module(module)
            found[name] = getattr(owner, name) if hasattr(owner, name) else importlib.import_module(f"{module}.{name}")
        except ImportError as error:
            yield f"{file} imports {name} from {module}: {error}"


def _replaced(found: dict[str, Any]) -> Iterator[str]:
    for owner, methods in REPLACED.items():
        for name, wanted in methods.items():
            method = getattr(found.get(owner), name, None)
            if method is None:
                yield f"{owner}.{name}, which is replaced, does not exist"
                continue
            names = [each for each in inspect.signature(method).parameters if each != "self"]
            if wanted is not None and names != wanted.split():
                yield f"{owner}.{name}, which is replaced, takes {names}, not {wanted.split()}"


def _read(found: dict[str, Any]) -> Iterator[str]:
    for owner, names in READ.items():
        text = _text_of_module(owner) if "." in owner else _text_of_class(found.get(owner))
        missing = [name for name in names.split() if not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text)]
        if missing:
            yield f"{owner} says nothing of {', '.join(missing)}, which are read"


def _text_of_module(name: str) -> str:
    """Not imported: some need a GPU."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        spec = None
    return Path(spec.origin).read_text(encoding="utf-8") if spec is not None and spec.origin else ""


def _text_of_class(found: Any) -> str:
    ours = [each for each in getattr(found, "__mro__", ()) if each.__module__.startswith("sglang")]
    return "\n".join(map(inspect.getsource, ours))


def _flags() -> Iterator[str]:
    """Flags are named by their words in our files: those that we set, and those that we refuse."""
    from megasharp.rollout.sglang.engine import engine_config as flags

    tables = (
        flags._OURS,
        flags._REFUSED,
        flags._REFUSED_WITH_MEMORY,
        flags._REFUSED_WITH_WINDOW,
        flags._REFUSED_WITH_EXPERTS,
        flags._REFUSED_WITH_REPLAY,
        flags._CPU_DEFAULTS,
        flags.ATTENTION_KEYS,
    )
    known = flags.installed_flags()
    for name in sorted({name for table in tables for name in table} | set(FLAGS.split())):
        if name not in known:
            yield f"ServerArgs has no {name}"


if __name__ == "__main__":
    main()
