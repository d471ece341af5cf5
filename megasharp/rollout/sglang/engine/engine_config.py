"""One engine's config file, checked: what SGLang is started with, and what is refused before it is.

    {"model": "/runs/7/policy", "memory": "/runs/7/memory", "host": "127.0.0.1", "port": 30000, "api_key": "k3y",
     "device": "cpu", "dtype": "float32", "tp": 1, "sglang": {"page_size": 16}, "deterministic": false, "sleep": false,
     "returns_experts": false, "shared": "/dev/shm/megasharp-engine-1"}

`memory` and `shared` may be null, and `api_key` be left out where the environment has it as MEGASHARP_ENGINE_KEY, so
that it is in no file; `memory`, `shared`, `sglang`, `deterministic`, `sleep`, `returns_experts` may be left out. With a
`memory_window` N the memory network attends to the prompt and the last N tokens alone; null: to all. `sglang` takes any
field of the installed ServerArgs that is not set by another key. With `sleep` the engine can give its GPU's memory back
for a while; its weights are gone then, and must be sent again. With `returns_experts` it can tell the experts to which
a mixture of experts sent each token. `shared` is a folder in shared memory: what the engine's processes share is in it
or begins with its name.

In a reader's order: `EngineSettings`, the part that SGLang's child processes inherit in their environment; `Flag`, a
field of the installed ServerArgs (the only part that imports sglang, and only when asked for the flags); `check_pair`
and its like, which refuse a memory network that does not fit its policy (configs are those of transformers, or anything
with the same attributes); and `EngineConfig`, the file itself, with its checks.
"""

from __future__ import annotations

import difflib
import importlib.util
import ipaddress
import json
import os
import socket
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from megasharp.common.errors import UserError, reason_at
from megasharp.rollout.sglang.engine.attention_backends import (
    ATTENTION_KEYS,
    Capability,
    check_attention,
    check_kernels,
    default_attention,
    heads_in_pool,
)
from megasharp.rollout.sglang.identity import KEY_VARIABLE, identity
from megasharp.rollout.sglang.routed_experts import routed_experts

_VARIABLE = "MEGASHARP_ENGINE"


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings that SGLang's child processes need; they travel in the environment, as JSON.

    `memory` is the memory network's folder, `memory_window` the tokens that it sees behind the prompt (None: all),
    `memory_layers` the layers of the key-value pool that it takes; `max_rows` the most requests that can be in one
    batch. `experts` is the dtype in which the experts of tokens are returned; None: they are not.

    `deterministic`: each token is drawn with a number hashed from the request's seed and the token's place, as
    `megasharp.rollout.inprocess.generation` does it. `shared` is the folder in shared memory whose name all that the
    engine's processes share there must carry, so that it can be removed.

    A record of its own, not a section of the run's configuration: these processes import neither pydantic nor yaml, and
    know one engine only.
    """

    memory: str | None
    max_rows: int
    deterministic: bool
    shared: str | None = None
    memory_window: int | None = None
    memory_layers: int = 0
    experts: str | None = None

    def publish(self) -> None:
        """Put them where this process and all children that start from now on find them."""
        os.environ[_VARIABLE] = json.dumps(asdict(self))


# The name under which `memory_pool.py` registers its tree of prefixes.
PROMPT_CACHE = "megasharp_prompts"


def eviction_interval(window: int) -> int:
    """By how many tokens a response may outgrow the memory's window before its cache is freed: each call has a price.

    128 is SGLang's own.
    """
    return max(1, min(128, window // 4))


def published() -> EngineSettings:
    """Read what `publish` wrote. Raises KeyError in a process that no engine of ours started."""
    return EngineSettings(**json.loads(os.environ[_VARIABLE]))


def _no_fault(value: object) -> str | None:
    return None


@dataclass(frozen=True, slots=True)
class Flag:
    """One field of ServerArgs. `fault` says what is wrong with a value, None where nothing is."""

    default: Any
    fault: Callable[[object], str | None] = _no_fault


def installed_flags() -> dict[str, Flag]:
    """Every flag of the installed SGLang, by name."""
    from megasharp.rollout.sglang.engine import arguments

    return {each.name: Flag(each.default, arguments.judge(each.type)) for each in arguments.fields()}


def skip_the_packages_own_imports() -> None:
    """Let `installed_flags` take half the time, in a process that does nothing else with SGLang and then ends.

    SGLang's package imports transformers, Triton and its language front end before any of its modules; the module of
    its arguments needs none of them.
    """
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations is not None, "whether it is installed is checked first"
    package = ModuleType("sglang")
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules["sglang"] = package


COMPOSITES = {
    "Olmo2ForCausalLM": "Olmo2WithMemory",
    "Qwen2ForCausalLM": "Qwen2WithMemory",
    "Qwen3ForCausalLM": "Qwen3WithMemory",
    "Qwen3MoeForCausalLM": "Qwen3MoeWithMemory",
}
_DENSE = ("Olmo2ForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def check_pair(policy: Any, memory: Any, tp: int) -> None:
    """Raises UserError with the reason why `memory` cannot share an engine of `tp` ranks with `policy`."""
    if _experts(memory):
        raise UserError(
            f"the memory network is a mixture of experts ({_architecture(memory)}); an engine has one table of where "
            "experts are, the policy's, so take a dense memory network"
        )
    _check_network("policy", policy, tp, COMPOSITES)
    _check_network("memory network", memory, tp, _DENSE)
    if memory.vocab_size != policy.vocab_size:
        raise UserError(
            f"the memory network has a vocabulary of {memory.vocab_size}, the policy of {policy.vocab_size}; "
            "they must share one"
        )
    if _head_size(memory) != _head_size(policy):
        raise UserError(
            f"the memory network has heads of size {_head_size(memory)}, the policy of {_head_size(policy)}; "
            "they must be equal, because both networks share one cache"
        )
    heads_in_pool(policy, memory, tp)


def _check_network(whose: str, config: Any, tp: int, known: Collection[str]) -> None:
    if _architecture(config) not in (*known, *(COMPOSITES[name] for name in known)):
        raise UserError(
            f"the {whose} is a {_architecture(config)}; an engine with a memory network holds {', '.join(known)} only, "
            f"as its {whose}"
        )
    if getattr(config, "use_sliding_window", False):
        raise UserError(f"the {whose} has sliding-window attention, which does not share a cache with another network")
    if config.num_attention_heads % tp:
        raise UserError(f"the {whose} has {config.num_attention_heads} query heads, which tp={tp} does not divide")
    name, width = _width(config)
    if width % tp and not _experts(config):
        raise UserError(f"the {whose} has {name} {width}, which tp={tp} does not divide")


def _architecture(config: Any) -> str:
    return str((getattr(config, "architectures", None) or ["(none)"])[0])


def _experts(config: Any) -> int:
    """The number of a model's experts; 0 in a dense one."""
    return int(getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 0)


def _width(config: Any) -> tuple[str, int]:
    """The key and the number of an MLP's columns, which ranks share; of an expert's in a mixture."""
    name = "intermediate_size" if getattr(config, "moe_intermediate_size", None) is None else "moe_intermediate_size"
    return name, int(getattr(config, name, 0))


def _head_size(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


LOADER = "megasharp.rollout.sglang.engine.receive.load_bucket"
# SGLang rounds the MLP's width up to a multiple of this many columns per rank.
_CPU_WIDTH = 32
_DEFAULT_ROWS = {"cpu": 64, "cuda": 256}
# At a lower level SGLang writes its arguments into the log.
_QUIET_LEVELS = ("warning", "error", "critical")
_TYPES = {"int": int, "str": str, "bool": bool}
# Fields of ServerArgs that a key of ours sets.
_OURS = {
    "model_path": "model",
    "host": "host",
    "port": "port",
    "api_key": "api_key",
    "device": "device",
    "dtype": "dtype",
    "tp_size": "tp",
    "enable_deterministic_inference": "deterministic",
    "enable_memory_saver": "sleep",
    "enable_return_routed_experts": "returns_experts",
    "json_model_override_args": "memory",
    "custom_weight_loader": "(the engine's own weight loader)",
}
# Flags that no engine may set, with the reason.
_REFUSED = {
    "dp_size": "SGLang cannot update the weights of data-parallel replicas; start more engines instead",
    "enable_custom_logit_processor": "it runs code that comes with a request",
    "enable_lora": "weight updates would miss the adapters",
    "lora_paths": "weight updates would miss the adapters",
    "grpc_mode": "engines speak HTTP with a key only",
    "smg_grpc_mode": "engines speak HTTP with a key only",
    "admin_api_key": "an engine has one key, the run's",
    "ssl_keyfile": "engines listen on the loopback or a private address, without TLS",
    "ssl_certfile": "engines listen on the loopback or a private address, without TLS",
    "nnodes": "an engine's ranks are on one node",
    "node_rank": "an engine's ranks are on one node",
    "dist_init_addr": "an engine's ranks meet on their own machine, at a port of their own",
    "pp_size": "weight updates are checked against whole networks; use tp",
    "disaggregation_mode": "prefill and decoding are one engine's; start more engines instead",
    "is_embedding": "engines sample",
    "tokenizer_worker_num": "what an engine changes in SGLang's server would be missing in further workers",
    "weight_version": "versions are the run's to count",
    "quantization": "quantised weights have no checkpoint's layout, which updates and checksums need",
}
# SGLang takes less without a word, and then dies at its start or never samples.
_AT_LEAST_ONE = (
    *("max_running_requests", "max_queued_requests", "max_total_tokens", "max_prefill_tokens", "context_length"),
    *("page_size", "stream_interval", "num_continuous_decode_steps"),
)
# Flags that an engine with a memory network may not set, with the reason.
_REFUSED_WITH_MEMORY = {
    "speculative_algorithm": "drafted tokens would be verified without the memory's subtraction",
    "enable_dp_attention": "the memory's logits would be gathered in the policy's order",
    "enable_hierarchical_cache": "it has not been tried with two networks in one cache",
    "enable_two_batch_overlap": "both half-batches would write to one buffer of memory logits",
    "enable_pdmux": "its prefill goes layer by layer through the policy alone",
    "enable_torch_compile": "it has not been tried with two networks",
    "rl_on_policy_target": "its bfloat16 logits would be taken before the memory's subtraction",
    "enable_mis": "it asks for logits of many rows of one request",
    # These two would win over disable_prefill_cuda_graph; the second also over the flags for the decode graph's sizes.
    "cuda_graph_backend_prefill": "a prefill graph knows the policy's attention layers only",
    "cuda_graph_config": "it may ask for a prefill graph, which knows the policy's attention layers only",
}
# Further ones where that has a window, with the reason.
_REFUSED_WITH_WINDOW = {
    "disable_radix_cache": "SGLang's cache without prefixes frees prompts that left the window",
    "radix_cache_backend": "prompts have a cache of their own, because responses cannot be shared",
    "enable_unified_memory": "it has one pool for what must be freed apart",
    "disable_hybrid_swa_memory": "the memory network's window needs a pool of its own",
}


# Flags that an engine of a mixture of experts may not set, with the reason.
_MOVED = "updates and checksums look for each expert on one rank, by its number"
_REFUSED_WITH_EXPERTS = {
    "enable_eplb": _MOVED,
    "ep_num_redundant_experts": _MOVED,
    "init_expert_location": _MOVED,
    "elastic_ep_backend": _MOVED,
    "moe_dp_size": _MOVED,
    "dwdp_size": _MOVED,
}
# MoE runners that keep weights in a layout of their own.
_REARRANGING = ("triton_kernel", "flashinfer_trtllm", "flashinfer_trtllm_routed", "experimental_sgl_trtllm")
# Flags that an engine which returns the experts of tokens may not set, with the reason.
_REFUSED_WITH_REPLAY = {
    "speculative_algorithm": "SGLang's record of routed experts has no room for drafted tokens",
    "enable_mixed_chunk": "SGLang's record of routed experts has no room for more than a chunk of tokens",
    "enable_hierarchical_cache": "cached tokens come back without the experts that they went to",
    "enable_lmcache": "cached tokens come back without the experts that they went to",
    "enable_two_batch_overlap": "both half-batches would write to one record of routed experts",
    "enable_pdmux": "prefill and decoding would write to one record of routed experts",
}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The file's keys, each of the right type. `tp` is the number of ranks that the model is cut over.

    A record of its own that repeats keys of the run: it is read in the engines' Python, which imports neither pydantic
    nor yaml, and its names are frozen, because the two Pythons may be of two installations.
    """

    model: str
    host: str
    port: int
    api_key: str
    device: str
    dtype: str
    tp: int
    memory: str | None = None
    memory_window: int | None = None
    deterministic: bool = False
    sleep: bool = False
    returns_experts: bool = False
    shared: str | None = None
    sglang: Mapping[str, Any] = field(default_factory=dict)

    def settings(self) -> EngineSettings:
        """The settings for SGLang's child processes."""
        layers = 0
        if self.memory is not None:
            policy, memory = _model_config(self.model), _model_config(self.memory)
            layers = memory.num_hidden_layers * heads_in_pool(policy, memory, self.tp).layers
        experts = routed_experts(Path(self.model)) if self.returns_experts else None
        return EngineSettings(
            memory=self.memory,
            max_rows=self._rows(),
            deterministic=self.deterministic,
            shared=self.shared,
            memory_window=self.memory_window,
            memory_layers=layers,
            experts=None if experts is None else experts.dtype_name,
        )

    def identity(self) -> dict[str, Any]:
        """Describe the engine for runs that did not start it. Raises OSError or ValueError for an unreadable model."""
        return identity(
            model=Path(self.model),
            memory=None if self.memory is None else Path(self.memory),
            memory_window=self.memory_window,
            device=self.device,
            dtype=self.dtype,
            tp=self.tp,
            deterministic=self.deterministic,
            returns_experts=self.returns_experts,
        )

    @property
    def loses_weights(self) -> bool:
        """True where the weights are gone when the engine wakes."""
        return self.sleep and self.device != "cpu" and not self.sglang.get("enable_weights_cpu_backup")

    def server_args(self, capability: Capability | None = None) -> dict[str, Any]:
        """Keyword arguments of SGLang's ServerArgs, for a GPU of this compute capability."""
        args: dict[str, Any] = {
            "model_path": self.model,
            "host": self.host,
            "port": self.port,
            "api_key": self.api_key,
            "device": self.device,
            "dtype": self.dtype,
            "tp_size": self.tp,
            "custom_weight_loader": [LOADER],
            # At the level of information it writes its arguments into the log, the key among them.
            "log_level": "warning",
        }
        args |= _CPU_DEFAULTS if self.device == "cpu" else {}
        if self.deterministic and self.device != "cpu":
            # Kernels whose sums do not depend on the batch; a CPU has none.
            args["enable_deterministic_inference"] = True
        if self.sleep and self.device != "cpu":
            args["enable_memory_saver"] = True
        if self.returns_experts:
            args["enable_return_routed_experts"] = True
        if self.device != "cpu" and _experts(_model_config(self.model)) and not self.exchanges_tokens:
            # SGLang's own choice, except on Blackwell, where it takes a runner that rearranges weights.
            args["moe_runner_backend"] = "triton"
        if self.memory is not None:
            args |= self._memory_args(self.memory, capability)
        return args | dict(self.sglang)

    def _memory_args(self, memory: str, capability: Capability | None) -> dict[str, Any]:
        policy_config, memory_config = _model_config(self.model), _model_config(memory)
        composite = COMPOSITES[policy_config.architectures[0]]
        args: dict[str, Any] = {
            "json_model_override_args": json.dumps({"architectures": [composite]}),
            # The buffer of memory logits has a row for each request of the largest batch, captured ones included.
            "max_running_requests": self._rows(),
            # A prefill graph finds an attention layer by its number among those of `model.layers`: the policy's, where
            # the memory's numbers are past the end. SGLang would leave it out too, having counted fewer layers there
            # than the pool has; that count is not made for this.
            "disable_prefill_cuda_graph": True,
        }
        if self.memory_window is not None:
            args["radix_cache_backend"] = PROMPT_CACHE
        if self.device != "cpu":
            args["cuda_graph_max_bs_decode"] = self._rows()
            attention = default_attention(policy_config, memory_config, self.tp, capability)
            args |= {} if attention is None else {"attention_backend": attention}
        return args

    @property
    def exchanges_tokens(self) -> bool:
        """True where tokens travel to the ranks of their experts, with runners of their own."""
        return self.sglang.get("moe_a2a_backend") not in (None, "none")

    def _rows(self) -> int:
        return int(self.sglang.get("max_running_requests") or _DEFAULT_ROWS[self.device])


# Defaults for a CPU: its only back-ends, and a KV cache small enough for several engines beside a trainer.
_CPU_DEFAULTS: dict[str, Any] = {
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "skip_server_warmup": True,
    # Its scheduler otherwise asks for work as fast as it can: an idle engine takes a core from the learner.
    "sleep_on_idle": True,
    "mem_fraction_static": 0.3,
    "max_total_tokens": 16_384,
    "max_running_requests": _DEFAULT_ROWS["cpu"],
}


def read_config(path: Path) -> EngineConfig:
    """Read the file. Raises UserError for one that is no JSON object, and for unknown, missing or mistyped keys."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not a readable JSON file: {reason_at(error, path)}") from error
    if not isinstance(raw, dict):
        raise UserError(f"{path}: not a JSON object")
    if KEY_VARIABLE in os.environ:
        raw.setdefault("api_key", os.environ[KEY_VARIABLE])
    known = {each.name: each for each in fields(EngineConfig)}
    for name in raw:
        if name not in known:
            raise UserError(f"{path}: unknown key {name}{_nearest(name, known)}")
    for name, each in known.items():
        if name not in raw and each.default is MISSING and each.default_factory is MISSING:
            other = f"; or set {KEY_VARIABLE} in the environment" if name == "api_key" else ""
            raise UserError(f"{path}: key {name} is missing{other}")
    for name, value in raw.items():
        if not _fits(value, str(known[name].type)):
            raise UserError(f"{path}: {name} is {value!r}; it must be {known[name].type}")
    return EngineConfig(**raw)


def check_config(config: EngineConfig, capability: Capability | None = None) -> None:
    """Raises UserError for what cannot be served, or must not, the names in the `sglang` table left aside.

    `capability` is that of the GPU; None where it is not known.
    """
    check_host(config.host)
    if not config.api_key:
        raise UserError(f"an engine takes requests with a key only; set api_key, or {KEY_VARIABLE} in the environment")
    if config.device not in _DEFAULT_ROWS:
        raise UserError(f"device is {config.device}; engines run on {' or '.join(_DEFAULT_ROWS)}")
    for folder in (config.model, config.memory):
        if folder is not None and not (Path(folder) / "config.json").is_file():
            raise UserError(f"{folder} is no model: it has no config.json")
    if config.device == "cpu":
        _check_cpu(config)
    else:
        check_kernels(config.sglang, capability)
        if config.sleep:
            _check_sleep(config)
    if config.memory_window is not None and (config.memory is None or config.memory_window < 1):
        raise UserError(f"memory_window is {config.memory_window}: it is that of a memory network, and at least 1")
    if config.memory_window is not None and config.device != "cpu":
        raise UserError(
            "memory_window works in engines on a CPU only: SGLang's attention on a GPU (fa3, flashinfer, triton) keeps "
            "no prompt beside a window in some layers alone; leave it out"
        )
    if config.memory is not None:
        _check_memory(config, config.memory, capability)
    _check_experts(config)


def check_flags(config: EngineConfig, flags: Mapping[str, Flag]) -> None:
    """Raises UserError for what stands in the `sglang` table and does not exist, does not fit or must not be set.

    `flags` are those of the installed SGLang.
    """
    refused = dict(_REFUSED)
    refused |= {} if config.memory is None else _REFUSED_WITH_MEMORY
    refused |= {} if config.memory_window is None else _REFUSED_WITH_WINDOW
    refused |= _REFUSED_WITH_EXPERTS if _experts(_model_config(config.model)) else {}
    refused |= _REFUSED_WITH_REPLAY if config.returns_experts else {}
    for name, value in config.sglang.items():
        if name in _OURS:
            raise UserError(f"sglang.{name} is set by the engine's key {_OURS[name]}; leave it out")
        if name not in flags:
            raise UserError(f"sglang.{name} is no flag of the installed SGLang{_nearest(name, flags)}")
        if name == "log_level" and value not in _QUIET_LEVELS:
            raise UserError(
                f"sglang.log_level is {value!r}: SGLang would write the run's key into its log; "
                f"use {' or '.join(_QUIET_LEVELS)}"
            )
        if name in refused and value != flags[name].default:
            raise UserError(f"sglang.{name} {value!r} is refused: {refused[name]}")
        fault = flags[name].fault(value)
        if fault is not None:
            raise UserError(f"sglang.{name} is {value!r}: {fault}")
        if name in _AT_LEAST_ONE and isinstance(value, int) and value < 1:
            raise UserError(f"sglang.{name} is {value}: it must be at least 1")
        if name == "mem_fraction_static" and isinstance(value, int | float) and not 0 < value < 1:
            raise UserError(f"sglang.{name} is {value}: it must be between 0 and 1")
    chunk, page = config.sglang.get("chunked_prefill_size") or 0, config.sglang.get("page_size") or 1
    if chunk > 0 and chunk % page:
        raise UserError(f"sglang.chunked_prefill_size ({chunk}) must be a multiple of sglang.page_size ({page})")


def check_host(host: str) -> None:
    """Raises UserError unless `host` is one address, of this machine or of a private network."""
    try:
        address = ipaddress.ip_address(socket.gethostbyname(host) if not _is_address(host) else host)
    except OSError as error:
        raise UserError(f"host {host} is not known: {error}") from error
    if address.is_unspecified or not (address.is_loopback or address.is_private):
        raise UserError(f"host {host} is a public address; engines listen on 127.0.0.1 or a private one")


def cpu_binding(tp: int) -> str:
    """The cores of each rank on a CPU, as SGLang's SGLANG_CPU_OMP_THREADS_BIND has it; shared where there are too few.

    Without it SGLang refuses more ranks than the machine has NUMA nodes.
    """
    cores = sorted(os.sched_getaffinity(0))
    return "|".join(str(cores[rank % len(cores)]) for rank in range(tp))


def _check_cpu(config: EngineConfig) -> None:
    for name in ATTENTION_KEYS:
        if config.sglang.get(name) not in (None, "torch_native"):
            raise UserError(
                f"sglang.{name} is {config.sglang[name]}, but SGLang's only one on a CPU is torch_native; leave it out"
            )
    # On a CPU SGLang pads these dimensions, so updates and checksums would not match a checkpoint's shapes.
    policy = _model_config(config.model)
    name, width = _width(policy)
    heads = getattr(policy, "num_key_value_heads", config.tp)
    if width % (_CPU_WIDTH * config.tp):
        raise UserError(
            f"{config.model} has {name} {width}; on a CPU it must be a multiple of {_CPU_WIDTH} x tp ({config.tp})"
        )
    if heads % config.tp:
        raise UserError(f"{config.model} has {heads} key-value heads; on a CPU tp ({config.tp}) must divide them")
    if config.exchanges_tokens:
        raise UserError("sglang.moe_a2a_backend is for GPUs: on a CPU no tokens travel; leave it out")
    if (config.sglang.get("ep_size") or 1) > 1:
        raise UserError("sglang.ep_size is for GPUs: SGLang's experts in plain torch are whole on every rank, or cut")


def _check_experts(config: EngineConfig) -> None:
    """Refuse layouts of experts that updates do not know, and what SGLang's Mixtral computes in another way."""
    policy = _model_config(config.model)
    runner = config.sglang.get("moe_runner_backend")
    if _experts(policy):
        _check_expert_ranks(config, policy)
    if _experts(policy) and runner in _REARRANGING:
        raise UserError(
            f"sglang.moe_runner_backend {runner} keeps experts in a layout of its own, which updates and checksums do "
            "not know; use triton, or leave it out"
        )
    if config.returns_experts and not _experts(policy):
        raise UserError(
            f"returns_experts (a run's policy.experts.replay): {config.model} is no mixture of experts; leave it out"
        )
    if config.returns_experts and (config.sglang.get("chunked_prefill_size") or 1) < 1:
        raise UserError(
            "sglang.chunked_prefill_size must be positive with returns_experts: SGLang's record of routed experts has "
            "room for one chunk of tokens"
        )
    if _architecture(policy) != "MixtralForCausalLM":
        return
    rope = getattr(policy, "rope_parameters", None) or getattr(policy, "rope_scaling", None) or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise UserError(f"{config.model} has scaled rotary positions, which SGLang's Mixtral does not compute")
    if _head_size(policy) * policy.num_attention_heads != policy.hidden_size:
        raise UserError(
            f"{config.model} has head_dim {policy.head_dim}; SGLang's Mixtral takes hidden_size / num_attention_heads"
        )


def _check_expert_ranks(config: EngineConfig, policy: SimpleNamespace) -> None:
    """Refuse numbers of ranks over which experts cannot be spread, or cut."""
    # Where tokens travel, SGLang spreads the experts over all ranks.
    ep = config.tp if config.exchanges_tokens else int(config.sglang.get("ep_size") or 1)
    experts, (name, width) = _experts(policy), _width(policy)
    if ep < 1 or config.tp % ep or experts % ep:
        raise UserError(
            f"sglang.ep_size {ep} must divide tp ({config.tp}) and the {experts} experts of {config.model}, which it "
            "spreads over ranks"
        )
    if width % (config.tp // ep):
        raise UserError(
            f"{config.model} has {name} {width}, which tp / sglang.ep_size ({config.tp // ep}) does not divide; raise "
            "sglang.ep_size, or lower tp"
        )


def _check_sleep(config: EngineConfig) -> None:
    if importlib.util.find_spec("torch_memory_saver") is None:
        raise UserError("sleep needs the package torch-memory-saver in the engines' Python, which lacks it")
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:true" in os.environ.get(name, "").lower():
            raise UserError(f"sleep does not work with expandable_segments:True in {name}; unset it for the engines")
    if config.sglang.get("weight_cache_mode", "off") != "off":
        raise UserError("sleep is refused with sglang.weight_cache_mode: the weights are another process's")


def _check_memory(config: EngineConfig, memory: str, capability: Capability | None) -> None:
    policy_config, memory_config = _model_config(config.model), _model_config(memory)
    check_pair(policy_config, memory_config, config.tp)
    chosen = {name: config.sglang.get(name) for name in ATTENTION_KEYS}
    check_attention(SimpleNamespace(**chosen), policy_config, memory_config, config.tp, capability)
    if config.sglang.get("disable_prefill_cuda_graph") is False:
        reason = _REFUSED_WITH_MEMORY["cuda_graph_backend_prefill"]
        raise UserError(f"sglang.disable_prefill_cuda_graph False is refused: {reason}")
    captured = config.sglang.get("cuda_graph_max_bs_decode") or 0
    if max(captured, *(config.sglang.get("cuda_graph_bs_decode") or [0])) > config.settings().max_rows:
        raise UserError(
            "sglang.cuda_graph_max_bs_decode is above sglang.max_running_requests "
            f"({config.settings().max_rows}), for which the memory network's logits have room; lower it"
        )


def _model_config(folder: str) -> SimpleNamespace:
    return SimpleNamespace(**json.loads((Path(folder) / "config.json").read_text(encoding="utf-8")))


def _fits(value: object, wanted: str) -> bool:
    if wanted.startswith("Mapping"):
        return isinstance(value, dict)
    if value is None:
        return wanted.endswith("None")
    kind = _TYPES[wanted.partition(" ")[0]]
    return isinstance(value, kind) and isinstance(value, bool) == (kind is bool)


def _nearest(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, known, n=3)
    return f"; did you mean {', '.join(near)}?" if near else ""


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
