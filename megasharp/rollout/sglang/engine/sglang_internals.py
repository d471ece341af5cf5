"""Every part of SGLang that is used from inside. Read from 0.5.21; look here first when the version changes.

What each is used for:
- model: `LlamaForCausalLM`, `Olmo2ForCausalLM`, `Qwen2ForCausalLM`, `Qwen3ForCausalLM`, `Qwen3MoeForCausalLM` and
  `MixtralForCausalLM` are subclassed; `RadixAttention` of the memory network gets layer ids after the policy's;
  `ModelConfig` counts attention layers; `DefaultModelLoader.Source` is how a model asks for a second checkpoint
  (`secondary_weights`); `LogitsMetadata` says which rows become logits; `get_attn_backend` gives the step's attention
  plan.
- experts: `FusedMoE` says where a layer's experts are and how they are cut; `RoutedExpertsCapturer` gives the experts
  of a request's tokens, and has its host memory from `ALLOC_MEMORY_FUNCS`.
- cache: `memory_pool.py` subclasses `RadixCache`, registered by `register_radix_cache_backend`, `SWAPrefillBudget` and
  `SWATokenToKVPoolAllocator`, and replaces how `HybridSWAPoolConfigurator` and `KVCacheConfigurator` size and build
  pools; `get_token_to_kv_pool`, `get_req_to_token_pool` and `KVWriteLoc` are what an attention layer reads and writes.
- sampling: `Sampler` is subclassed and registered under the built-in back-ends' names, which are looked up first;
  `SamplingBatchInfo` has three methods meant to be overridden; `SamplingParams.verify` judges a request in the server.
- weights: `WeightUpdater` and `SchedulerWeightUpdaterManager` receive updates, `WeightChecker` answers checksums; the
  parallel layers say how a parameter is cut over ranks.
- limits: `Scheduler` is asked at each step for the `AbortReq` of requests that have had their time.
- launch: `ServerArgs`, `launch_server` and the two processes' functions; `Engine` starts them, and `http_server` has
  their objects frozen. `server.py` comes before this file.
- requests: `TokenizerManager` is the server's side of the scheduler; health checks are requests whose names start with
  `HEALTH_CHECK_RID_PREFIX`; a `HTTPException` is answered with its status.
- shared memory: `load_snapshot` and `stale_shm_cleanup` name what an engine's processes share.
`cpu_platform.py` and `arguments.py` have imports of their own, and say why.
"""

from __future__ import annotations

from fastapi import HTTPException
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.distributed import tensor_model_parallel_all_gather
from sglang.srt.entrypoints import http_server
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.entrypoints.http_server import launch_server
from sglang.srt.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from sglang.srt.layers.logits_processor import LogitsMetadata
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.sampler import Sampler, register_sampler_backend
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from sglang.srt.managers import load_snapshot
from sglang.srt.managers.detokenizer_manager import run_detokenizer_process
from sglang.srt.managers.io_struct import AbortReq, UpdateWeightFromDiskReqOutput
from sglang.srt.managers.scheduler import Scheduler, run_scheduler_process
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool
from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS
from sglang.srt.mem_cache.prefill_budget import SWAPrefillBudget
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.mem_cache.registry import register_radix_cache_backend
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.model_executor.forward_context import get_attn_backend, get_req_to_token_pool, get_token_to_kv_pool
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.model_executor.pool_configurator import HybridSWAPoolConfigurator
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.models.llama import LlamaForCausalLM
from sglang.srt.models.mixtral import MixtralForCausalLM
from sglang.srt.models.olmo2 import Olmo2ForCausalLM
from sglang.srt.models.qwen2 import Qwen2ForCausalLM
from sglang.srt.models.qwen3 import Qwen3ForCausalLM
from sglang.srt.models.qwen3_moe import Qwen3MoeForCausalLM
from sglang.srt.runtime_context import get_exec, get_parallel, get_schedule, get_serving
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.state_capturer.routed_experts import RoutedExpertsCapturer
from sglang.srt.utils import stale_shm_cleanup
from sglang.srt.utils.weight_checker import ChecksumInfo, WeightChecker, overall_checksum

from megasharp.rollout.sglang.engine.arguments import ServerArgs

__all__ = [
    "ALLOC_MEMORY_FUNCS",
    "AbortReq",
    "CaptureHiddenMode",
    "ChecksumInfo",
    "DefaultModelLoader",
    "Engine",
    "EvictParams",
    "FusedMoE",
    "HEALTH_CHECK_RID_PREFIX",
    "HTTPException",
    "HybridSWAPoolConfigurator",
    "KVCacheConfigurator",
    "KVWriteLoc",
    "LlamaForCausalLM",
    "LogitsMetadata",
    "MHATokenToKVPool",
    "MergedColumnParallelLinear",
    "MixtralForCausalLM",
    "ModelConfig",
    "Olmo2ForCausalLM",
    "QKVParallelLinear",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "RadixAttention",
    "RadixCache",
    "RoutedExpertsCapturer",
    "RowParallelLinear",
    "SWAPrefillBudget",
    "SWATokenToKVPoolAllocator",
    "Sampler",
    "SamplingBatchInfo",
    "SamplingParams",
    "Scheduler",
    "SchedulerWeightUpdaterManager",
    "ServerArgs",
    "TokenizerManager",
    "UpdateWeightFromDiskReqOutput",
    "VocabParallelEmbedding",
    "WeightChecker",
    "WeightUpdater",
    "get_attn_backend",
    "get_exec",
    "get_parallel",
    "get_req_to_token_pool",
    "get_schedule",
    "get_serving",
    "get_token_to_kv_pool",
    "http_server",
    "launch_server",
    "load_snapshot",
    "overall_checksum",
    "register_radix_cache_backend",
    "register_sampler_backend",
    "run_detokenizer_process",
    "run_scheduler_process",
    "stale_shm_cleanup",
    "tensor_model_parallel_all_gather",
]
