"""An engine's config file: what is passed on to SGLang, and what is refused before it starts. No SGLang here."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from cases import each_case

from megasharp.common.errors import UserError
from megasharp.rollout.sglang.client.api import BUCKET_LOADER
from megasharp.rollout.sglang.engine.check import PINNED, check_build, check_version
from megasharp.rollout.sglang.engine.engine_config import (
    LOADER,
    EngineConfig,
    Flag,
    check_config,
    check_flags,
    check_host,
    cpu_binding,
    read_config,
)


def whole_number(value: object) -> str | None:
    return None if isinstance(value, int) else "expected `int`"


# Some fields of SGLang's ServerArgs with their values where nothing is said.
DEFAULTS = {
    "page_size": None,
    "chunked_prefill_size": None,
    "mem_fraction_static": None,
    "max_running_requests": None,
    "cuda_graph_max_bs_decode": None,
    "cuda_graph_bs_decode": None,
    "cuda_graph_backend_prefill": None,
    "cuda_graph_config": None,
    "disable_prefill_cuda_graph": False,
    "disable_radix_cache": False,
    "dp_size": 1,
    "pp_size": 1,
    "speculative_algorithm": None,
    "host": "127.0.0.1",
    "tp_size": 1,
    "attention_backend": None,
    "prefill_attention_backend": None,
    "enable_memory_saver": False,
    "weight_cache_mode": "off",
    "enable_weights_cpu_backup": False,
    "ep_size": 1,
    "moe_runner_backend": "auto",
    "moe_a2a_backend": "none",
    "enable_eplb": False,
    "enable_mixed_chunk": False,
    "enable_return_routed_experts": False,
}
FLAGS = {name: Flag(default) for name, default in DEFAULTS.items()} | {"page_size": Flag(None, whole_number)}
NETWORK = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 22,
    "hidden_size": 64,
    "intermediate_size": 128,
    "head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
}


EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "moe_intermediate_size": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
MIXTRAL = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "hidden_size": 128}


def model(folder: Path, **changes: Any) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(NETWORK | changes))
    return str(folder)


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Any]:
    return {
        "model": model(tmp_path / "policy"),
        "memory": model(tmp_path / "memory"),
        "host": "127.0.0.1",
        "port": 30000,
        "api_key": "k3y",
        "device": "cpu",
        "dtype": "float32",
        "tp": 1,
        "sglang": {"page_size": 16},
    }


def check(keys: dict[str, Any]) -> EngineConfig:
    config = EngineConfig(**keys)
    check_config(config)
    check_flags(config, FLAGS)
    return config


def test_flags_pass_through(keys: dict[str, Any]) -> None:
    args = check(keys).server_args()
    assert args["page_size"] == 16 and args["attention_backend"] == "torch_native"
    assert json.loads(args["json_model_override_args"]) == {"architectures": ["Qwen3WithMemory"]}
    assert args["max_running_requests"] == check(keys).settings().max_rows
    assert args["custom_weight_loader"] == [LOADER] == [BUCKET_LOADER]


def test_own_flags_win_over_our_defaults(keys: dict[str, Any]) -> None:
    config = check({**keys, "sglang": {"max_running_requests": 7}})
    assert config.server_args()["max_running_requests"] == config.settings().max_rows == 7


def test_cuda_keeps_sglangs_own_choices(keys: dict[str, Any]) -> None:
    args = check({**keys, "device": "cuda", "deterministic": True}).server_args()
    assert "attention_backend" not in args and args["enable_deterministic_inference"]
    assert args["cuda_graph_max_bs_decode"] == args["max_running_requests"] == 256
    plain = check({**keys, "device": "cuda", "memory": None}).server_args()
    assert not {"json_model_override_args", "max_running_requests", "enable_deterministic_inference"} & plain.keys()


def test_a_memory_network_turns_prefill_graphs_off_by_name(keys: dict[str, Any]) -> None:
    assert check({**keys, "device": "cuda"}).server_args()["disable_prefill_cuda_graph"] is True
    assert "disable_prefill_cuda_graph" not in check({**keys, "device": "cuda", "memory": None}).server_args()


@each_case(
    ("changes", "words"),
    [
        ({"sglang": {"page_sise": 16}}, "did you mean page_size"),
        ({"sglang": {"host": "0.0.0.0"}}, "set by the engine's key host"),
        ({"sglang": {"tp_size": 2}}, "set by the engine's key tp"),
        ({"sglang": {"dp_size": 2}}, "start more engines"),
        ({"sglang": {"pp_size": 2}}, "whole networks"),
        ({"sglang": {"speculative_algorithm": "EAGLE"}}, "verified without"),
        ({"sglang": {"max_running_requests": 8, "cuda_graph_max_bs_decode": 16}}, "have room"),
        ({"sglang": {"max_running_requests": 8, "cuda_graph_bs_decode": [1, 9]}}, "have room"),
        ({"sglang": {"disable_prefill_cuda_graph": False}}, "False is refused: a prefill graph knows the policy's"),
        ({"sglang": {"cuda_graph_backend_prefill": "breakable"}}, "knows the policy's attention layers only"),
        ({"sglang": {"cuda_graph_config": {"prefill": {"backend": "full"}}}}, "may ask for a prefill graph"),
        ({"memory_window": 8, "device": "cuda"}, "works in engines on a CPU only"),
        ({"memory_window": 8, "sglang": {"disable_radix_cache": True}}, "without prefixes frees prompts"),
        ({"api_key": ""}, "api_key"),
        ({"device": "tpu"}, "device is tpu"),
        ({"memory": None, "memory_window": 8}, "memory_window is 8: it is that of a memory network"),
        ({"memory_window": 0}, "memory_window is 0: .* at least 1"),
        ({"memory": "/nowhere"}, "no config.json"),
        ({"tp": 3, "device": "cuda"}, "does not divide"),
        ({"tp": 4}, r"2 key-value heads; on a CPU tp \(4\)"),
        ({"tp": 3}, "intermediate_size 128; on a CPU"),
        ({"sglang": {"page_size": "16"}}, "page_size is '16': expected `int`"),
        ({"sglang": {"page_size": 0}}, r"sglang\.page_size is 0: it must be at least 1"),
        ({"sglang": {"max_running_requests": 0}}, r"sglang\.max_running_requests is 0: it must be at least 1"),
        ({"sglang": {"mem_fraction_static": 1.5}}, "is 1.5: it must be between 0 and 1"),
        ({"sglang": {"chunked_prefill_size": 100, "page_size": 16}}, r"\(100\) must be a multiple .* \(16\)"),
        ({"sglang": {"enable_memory_saver": True}}, "set by the engine's key sleep"),
        ({"sglang": {"attention_backend": "triton"}}, "attention_backend is triton, but .* a CPU is torch_native"),
        ({"memory": None, "sglang": {"prefill_attention_backend": "fa3"}}, "prefill_attention_backend is fa3"),
        ({"device": "cuda", "sglang": {"attention_backend": "flashmla"}}, "attention_backend flashmla is not known"),
        ({"device": "cuda", "sleep": True}, "torch-memory-saver"),
    ],
)
def test_refusals(keys: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        check({**keys, **changes})


def test_attention_of_unequal_heads(keys: dict[str, Any]) -> None:
    model(Path(keys["memory"]), num_attention_heads=8)
    for backend, words in (("triton", "not more query heads"), ("flashinfer", "as many query heads")):
        with pytest.raises(UserError, match=words):
            check({**keys, "device": "cuda", "sglang": {"attention_backend": backend}})
    check({**keys, "device": "cuda", "sglang": {"attention_backend": "fa3"}})


@each_case(
    ("capability", "heads", "expected"),
    [
        (None, 4, None),
        ((9, 0), 8, None),
        ((10, 0), 4, "flashinfer"),
        ((10, 3), 2, "triton"),
        ((12, 0), 4, None),
        ((12, 0), 2, "triton"),
        ((8, 0), 4, None),
        ((8, 0), 8, "fa3"),
    ],
)
def test_attention_of_a_memory_network_by_gpu(
    keys: dict[str, Any], capability: tuple[int, int] | None, heads: int, expected: str | None
) -> None:
    """SGLang's choice on B200, trtllm_mha, serves no memory network."""
    model(Path(keys["memory"]), num_attention_heads=heads)
    config = EngineConfig(**{**keys, "device": "cuda"})
    check_config(config, capability)
    assert config.server_args(capability).get("attention_backend") == expected
    own = EngineConfig(**{**keys, "device": "cuda", "sglang": {"attention_backend": "triton"}})
    assert own.server_args(capability)["attention_backend"] == "triton"
    alone = EngineConfig(**{**keys, "device": "cuda", "memory": None})
    assert "attention_backend" not in alone.server_args(capability), "without a memory network SGLang's choice stands"


@each_case(
    ("changes", "words"),
    [
        ({"sglang": {"attention_backend": "fa3"}}, r"fa3 has no kernels for .*capability 10\.0\); use flashinfer"),
        (
            {"memory": None, "sglang": {"decode_attention_backend": "fa3"}},
            "decode_attention_backend fa3 has no kernels",
        ),
        ({"sglang": {"attention_backend": "trtllm_mha"}}, "trtllm_mha is not known .*; use flashinfer or triton$"),
    ],
)
def test_back_ends_that_blackwell_lacks_name_the_one_that_works(
    keys: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    config = EngineConfig(**{**keys, "device": "cuda", **changes})
    with pytest.raises(UserError, match=words):
        check_config(config, (10, 0))
    model(Path(keys["memory"]), num_attention_heads=8)
    with pytest.raises(UserError, match=r"only fa3 serves more .* take a memory network with at most 4"):
        check_config(EngineConfig(**{**keys, "device": "cuda"}), (10, 0))


def test_sleep(keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    config = check({**keys, "device": "cuda", "sleep": True})
    assert config.server_args()["enable_memory_saver"] and config.loses_weights
    backed_up = check({**keys, "device": "cuda", "sleep": True, "sglang": {"enable_weights_cpu_backup": True}})
    assert not backed_up.loses_weights
    on_cpu = check({**keys, "sleep": True})
    assert "enable_memory_saver" not in on_cpu.server_args() and not on_cpu.loses_weights
    with pytest.raises(UserError, match="weight_cache_mode"):
        check({**keys, "device": "cuda", "sleep": True, "sglang": {"weight_cache_mode": "read"}})
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(UserError, match="expandable_segments"):
        check({**keys, "device": "cuda", "sleep": True})


def test_refused_flags_may_say_their_default(keys: dict[str, Any]) -> None:
    check({**keys, "sglang": {"dp_size": 1, "pp_size": 1, "speculative_algorithm": None}})
    with pytest.raises(UserError, match="whole networks"):
        check({**keys, "memory": None, "sglang": {"pp_size": 2}})


@each_case(
    ("changes", "words"),
    [
        ({"vocab_size": 23}, "vocabulary of 23, the policy of 22"),
        ({"head_dim": 64}, "heads of size 64"),
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"num_key_value_heads": 3}, "one must be a multiple of the other"),
        (EXPERTS, r"memory network is a mixture of experts \(Qwen3MoeForCausalLM\)"),
        ({"num_key_value_heads": 1, "num_attention_heads": 3}, "cannot be shared"),
    ],
)
def test_memory_networks_that_do_not_fit(keys: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    model(Path(keys["memory"]), **changes)
    with pytest.raises(UserError, match=words):
        check(keys)


@each_case(("heads", "layers"), [(1, 3), (2, 3), (4, 6), (8, 12)])
def test_a_memory_of_more_key_value_heads_takes_more_layers_of_the_pool(
    keys: dict[str, Any], heads: int, layers: int
) -> None:
    model(Path(keys["memory"]), num_key_value_heads=heads, num_attention_heads=8, num_hidden_layers=3)
    assert check(keys).settings().memory_layers == layers


def test_attention_of_a_part_of_the_memorys_heads(keys: dict[str, Any]) -> None:
    """Each layer of the pool serves half of the memory's query heads: as many as the policy has, or fewer."""
    model(Path(keys["memory"]), num_key_value_heads=4, num_attention_heads=8)
    check({**keys, "device": "cuda", "sglang": {"attention_backend": "flashinfer"}})
    model(Path(keys["memory"]), num_key_value_heads=4, num_attention_heads=4)
    with pytest.raises(UserError, match=r"as many query heads in the memory network \(2\)"):
        check({**keys, "device": "cuda", "sglang": {"attention_backend": "flashinfer"}})


def test_an_engine_of_experts(keys: dict[str, Any]) -> None:
    model(Path(keys["model"]), **EXPERTS, intermediate_size=100)
    config = check({**keys, "returns_experts": True})
    args = config.server_args()
    assert json.loads(args["json_model_override_args"]) == {"architectures": ["Qwen3MoeWithMemory"]}
    assert args["enable_return_routed_experts"] is True and config.settings().experts == "uint8"
    assert "moe_runner_backend" not in args
    quiet = check({**keys, "memory": None})
    assert "enable_return_routed_experts" not in quiet.server_args() and quiet.settings().experts is None


def test_experts_on_a_gpu_keep_their_layout(keys: dict[str, Any]) -> None:
    """Where tokens travel to their experts' ranks, the runner is SGLang's choice; `ep_size` and others pass through."""
    gpu = {**keys, "memory": None, "device": "cuda"}
    assert "moe_runner_backend" not in check(gpu).server_args()
    model(Path(keys["model"]), **EXPERTS)
    assert check({**gpu, "sglang": {"ep_size": 2}, "tp": 2}).server_args()["moe_runner_backend"] == "triton"
    deep = check({**gpu, "sglang": {"ep_size": 2, "moe_a2a_backend": "deepep"}, "tp": 2}).server_args()
    assert (deep["ep_size"], deep["moe_a2a_backend"]) == (2, "deepep") and "moe_runner_backend" not in deep
    own = check({**gpu, "sglang": {"moe_runner_backend": "flashinfer_cutlass"}}).server_args()
    assert own["moe_runner_backend"] == "flashinfer_cutlass"


@each_case(
    ("network", "changes", "words"),
    [
        (EXPERTS, {"sglang": {"ep_size": 2}, "tp": 2}, "ep_size is for GPUs"),
        (EXPERTS, {"sglang": {"ep_size": 3}, "tp": 4, "device": "cuda"}, r"ep_size 3 must divide tp \(4\)"),
        (EXPERTS | {"num_experts": 6}, {"sglang": {"ep_size": 4}, "tp": 4, "device": "cuda"}, "the 6 experts"),
        (EXPERTS | {"moe_intermediate_size": 6}, {"tp": 4, "device": "cuda"}, r"ep_size \(4\) does not divide; raise"),
        (EXPERTS, {"sglang": {"moe_runner_backend": "flashinfer_trtllm"}}, "a layout of its own"),
        (EXPERTS, {"sglang": {"enable_eplb": True}}, "each expert on one rank"),
        (EXPERTS | {"moe_intermediate_size": 48}, {}, "moe_intermediate_size 48; on a CPU"),
        (EXPERTS, {"returns_experts": True, "sglang": {"enable_mixed_chunk": True}}, "no room for more than a chunk"),
        (EXPERTS, {"returns_experts": True, "sglang": {"chunked_prefill_size": -1}}, "must be positive"),
        (EXPERTS, {"sglang": {"enable_return_routed_experts": True}}, "set by the engine's key returns_experts"),
        ({}, {"returns_experts": True}, "no mixture of experts"),
        (MIXTRAL | {"head_dim": 64}, {}, "has head_dim 64; SGLang's Mixtral"),
        (MIXTRAL | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, {}, "scaled rotary positions"),
    ],
)
def test_refusals_of_experts(
    keys: dict[str, Any], network: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    model(Path(keys["model"]), **network)
    with pytest.raises(UserError, match=words):
        check({**keys, "memory": None, **changes})


def test_a_mixtral_is_served(keys: dict[str, Any]) -> None:
    model(Path(keys["model"]), **MIXTRAL)
    check({**keys, "memory": None, "sglang": {"moe_runner_backend": "triton"}})
    with pytest.raises(UserError, match="only, as its policy"):
        check(keys)


@each_case("host", ["127.0.0.1", "localhost", "10.1.2.3", "192.168.7.7", "::1", "fd00::7"])
def test_private_addresses(host: str) -> None:
    check_host(host)


@each_case("host", ["0.0.0.0", "::", "8.8.8.8", "2001:4860:4860::8888", ""])
def test_public_addresses_are_refused(host: str) -> None:
    with pytest.raises(UserError, match="public address"):
        check_host(host)


@each_case(
    ("text", "words"),
    [
        ("{", "JSON"),
        ("[]", "not a JSON object"),
        ('{"modell": "x"}', "unknown key modell; did you mean model"),
        ('{"model": "x"}', "key host is missing"),
    ],
)
def test_files_that_are_no_config(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "engine.json").write_text(text)
    with pytest.raises(UserError, match=words):
        read_config(tmp_path / "engine.json")


def test_types(tmp_path: Path, keys: dict[str, Any]) -> None:
    path = tmp_path / "engine.json"
    for name, value in (("port", "30000"), ("tp", True), ("deterministic", 1), ("sglang", []), ("model", None)):
        path.write_text(json.dumps({**keys, name: value}))
        with pytest.raises(UserError, match=f"{name} is"):
            read_config(path)
    path.write_text(json.dumps({**keys, "memory": None}))
    assert read_config(path).memory is None


def test_more_ranks_than_cores_share_them() -> None:
    assert len(cpu_binding(1000).split("|")) == 1000


def test_another_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _: "0.5.23")
    for device, advice in (("cpu", "`make fleet`"), ("cuda", "`make gpu`")):
        with pytest.raises(UserError, match=rf"sglang 0.5.23, but megasharp needs exactly {PINNED}; .*{advice}"):
            check_version(device)


def test_a_python_without_sglang_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr("importlib.metadata.version", version)
    with pytest.raises(UserError, match=rf"^the engines' Python has no sglang; megasharp needs exactly {PINNED}; "):
        check_version("cuda")


def test_a_python_for_a_cpu_serves_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the record of torch's build, of which there is a stand-in here."""
    build: dict[str, str | None] = {"__version__": "2.13.0", "cuda": None}
    monkeypatch.setattr("runpy.run_path", lambda path: build if path.endswith("version.py") else {})
    check_build("cpu")
    with pytest.raises(UserError, match=r"has torch \S+, which knows no CUDA; `make gpu`"):
        check_build("cuda")
    build["cuda"] = "13.0"
    with pytest.raises(UserError, match=r"lacks sglang-kernel, without .*; `make gpu`"):
        check_build("cuda")
    monkeypatch.setattr("importlib.metadata.version", lambda _: "0.4.7")
    check_build("cuda")
