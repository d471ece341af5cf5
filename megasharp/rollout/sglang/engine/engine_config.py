"""One engine's config file, checked: what SGLang is started with, and what is refused before it is.

    {"model": "/runs/7/policy", "memory": "/runs/7/memory", "host": "127.0.0.1", "port": 30000, "api_key": "k3y",
     "device": "cpu", "dtype": "float32", "tp": 1, "sglang": {"page_size": 16}, "deterministic": false, "sleep": false,
     "shared": "/dev/shm/megasharp-engine-1"}

`memory` and `shared` may be null, and `api_key` be left out where the environment has it as MEGASHARP_ENGINE_KEY, so
that it is in no file; `memory`, `shared`, `sglang`, `deterministic` and `sleep` may be left out. With a `memory_window`
N the memory network attends to the prompt and the last N tokens alone; null: to all. `sglang` takes any field of the
installed ServerArgs that is not set by another key. With `sleep` the engine can give its GPU's memory back for a while;
its weights are gone then, and must be sent again. `shared` is a folder in shared memory: what the engine's processes
share is in it or begins with its name.

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

from megasharp.common.errors import UserError
from megasharp.rollout.sglang.engine.attention_backends import (
    ATTENTION_KEYS,
    Capability,
    check_attention,
    check_kernels,
    default_attention,
)
from megasharp.rollout.sglang.identity import KEY_VARIABLE, identity

_VARIABLE = "MEGASHARP_ENGINE"


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings that SGLang's child processes need; they travel in the environment, as JSON.

    `memory` is the memory network's folder, `memory_window` the tokens that it sees behind the prompt (None: all);
    `max_rows` the most requests that can be in one batch.

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


COMPOSITES = {"Qwen2ForCausalLM": "Qwen2WithMemory", "Qwen3ForCausalLM": "Qwen3WithMemory"}


def check_pair(policy: Any, memory: Any, tp: int) -> None:
    """Raises UserError with the reason why `memory` cannot share an engine of `tp` ranks with `policy`."""
    for whose, config in (("policy", policy), ("memory network", memory)):
        _check_network(whose, config, tp)
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
    kv_repeats(policy, memory, tp)


def kv_repeats(policy: Any, memory: Any, tp: int) -> int:
    """Return how often each of the memory's key-value heads stands in the pool of one rank.

    Raises UserError where copies of its heads cannot fill the policy's.
    """
    ours, theirs = (max(1, int(config.num_key_value_heads) // tp) for config in (policy, memory))
    queries: int = memory.num_attention_heads // tp
    where = f"(per rank, tp={tp}) " if tp > 1 else ""
    if ours % theirs:
        raise UserError(
            f"the memory network has {theirs} key-value heads {where}and the policy {ours}; "
            "the policy's must be a multiple of the memory's, because they share one cache"
        )
    if (queries // theirs) % (ours // theirs):
        raise UserError(
            f"the memory network's {queries} query heads {where}on {theirs} key-value heads cannot be shared among the "
            f"policy's {ours}; take a memory network with {ours} key-value heads"
        )
    return ours // theirs


def _check_network(whose: str, config: Any, tp: int) -> None:
    if _architecture(config) not in (*COMPOSITES, *COMPOSITES.values()):
        raise UserError(
            f"the {whose} is a {_architecture(config)}; an engine with a memory network holds "
            f"{' and '.join(COMPOSITES)} only"
        )
    if getattr(config, "use_sliding_window", False):
        raise UserError(f"the {whose} has sliding-window attention, which does not share a cache with another network")
    if config.num_attention_heads % tp:
        raise UserError(f"the {whose} has {config.num_attention_heads} query heads, which tp={tp} does not divide")
    if config.intermediate_size % tp:
        raise UserError(
            f"the {whose} has an intermediate_size of {config.intermediate_size}, which tp={tp} does not divide"
        )


def _architecture(config: Any) -> str:
    return str((getattr(config, "architectures", None) or ["(none)"])[0])


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
    shared: str | None = None
    sglang: Mapping[str, Any] = field(default_factory=dict)

    def settings(self) -> EngineSettings:
        """The settings for SGLang's child processes."""
        return EngineSettings(self.memory, self._rows(), self.deterministic, self.shared, self.memory_window)

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
        if self.memory is not None:
            composite = COMPOSITES[_model_config(self.model).architectures[0]]
            args["json_model_override_args"] = json.dumps({"architectures": [composite]})
            # The buffer of memory logits has a row for each request of the largest batch, captured ones included.
            args["max_running_requests"] = self._rows()
            # A prefill graph finds an attention layer by its number among those of `model.layers`: the policy's, where
            # the memory's numbers are past the end. SGLang would leave it out too, having counted fewer layers there
            # than the pool has; that count is not made for this.
            args["disable_prefill_cuda_graph"] = True
            if self.memory_window is not None:
                args["radix_cache_backend"] = PROMPT_CACHE
            if self.device != "cpu":
                args["cuda_graph_max_bs_decode"] = self._rows()
                attention = default_attention(_model_config(self.model), _model_config(self.memory), capability)
                args |= {} if attention is None else {"attention_backend": attention}
        return args | dict(self.sglang)

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
        raise UserError(f"{path}: not a readable JSON file: {error}") from error
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


def check_flags(config: EngineConfig, flags: Mapping[str, Flag]) -> None:
    """Raises UserError for what stands in the `sglang` table and does not exist, does not fit or must not be set.

    `flags` are those of the installed SGLang.
    """
    refused = dict(_REFUSED)
    refused |= {} if config.memory is None else _REFUSED_WITH_MEMORY
    refused |= {} if config.memory_window is None else _REFUSED_WITH_WINDOW
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
    width, heads = getattr(policy, "intermediate_size", 0), getattr(policy, "num_key_value_heads", config.tp)
    if width % (_CPU_WIDTH * config.tp):
        raise UserError(
            f"{config.model} has intermediate_size {width}; on a CPU it must be a multiple of "
            f"{_CPU_WIDTH} x tp ({config.tp})"
        )
    if heads % config.tp:
        raise UserError(f"{config.model} has {heads} key-value heads; on a CPU tp ({config.tp}) must divide them")


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
    check_attention(SimpleNamespace(**chosen), policy_config, memory_config, capability)
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
