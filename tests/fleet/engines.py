"""One real engine for a test: its process, plain HTTP to it, tiny random models, and transformers as the oracle.

Of megasharp only the bucket files and the small program that ties an engine's life to the test's are used here.
"""

from __future__ import annotations

import base64
import copy
import json
import os
import pickle
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    Olmo2Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from waiting import HANG_S

from megasharp.rollout.sglang.client import child

REPOSITORY = Path(__file__).parents[2]
PYTHON = REPOSITORY / ".venv-fleet" / "bin" / "python"
KEY = "a key for tests"
VOCABULARY = 320
LOADER = "megasharp.rollout.sglang.engine.receive.load_bucket"
_START_S = HANG_S
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    # Twice as large, float32's own rounding over 900 positions comes near the tolerance of 1e-5.
    "initializer_range": 0.07,
    "bos_token_id": 0,
    "eos_token_id": VOCABULARY - 1,
    "pad_token_id": None,
}
_CONFIGS = {
    "policy3": Qwen3Config(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=False,
        **_COMMON,
    ),
    # Deeper than the policy, tied, and with half its key-value heads.
    "memory3": Qwen3Config(
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        tie_word_embeddings=True,
        **_COMMON,
    ),
    # Without norms of queries and keys, larger weights make attention so sharp that float32's own rounding is 1e-5.
    "policy2": Qwen2Config(
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        **{**_COMMON, "initializer_range": 0.05},
    ),
    # Positions are scaled from far below the longest prompts on.
    "llama": LlamaConfig(
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        **{**_COMMON, "initializer_range": 0.05},
    ),
    # Weights of the chosen experts do not add up to 1.
    "experts3": Qwen3MoeConfig(
        hidden_size=64,
        intermediate_size=100,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=6,
        num_experts_per_tok=3,
        norm_topk_prob=False,
        tie_word_embeddings=True,
        **_COMMON,
    ),
    "mixtral": MixtralConfig(
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_theta=1e6,
        tie_word_embeddings=False,
        **{**_COMMON, "initializer_range": 0.05},
    ),
    # More key-value heads than the policy of experts.
    "memory3, heads": Qwen3Config(
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        tie_word_embeddings=True,
        **_COMMON,
    ),
    # Norms of queries and keys are over all heads, of which each of two ranks has half.
    "olmo2": Olmo2Config(
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        **_COMMON,
    ),
    "memory_olmo2": Olmo2Config(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        **_COMMON,
    ),
    "memory2": Qwen2Config(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        **_COMMON,
    ),
}


def make_model(folder: Path, name: str, seed: int = 0) -> PreTrainedModel:
    """A random model of one of the shapes above in float32, also written to `folder`."""
    torch.manual_seed(seed)
    # Other implementations of experts have no float64.
    eager = {"experts_implementation": "eager"} if hasattr(_CONFIGS[name], "num_experts_per_tok") else {}
    model = AutoModelForCausalLM.from_config(_CONFIGS[name], dtype=torch.float32, **eager).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Biases and norms start out alike otherwise, and a mix-up would not show.
            parameter.add_(model.config.initializer_range * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


def tensors_of(model: PreTrainedModel, prefix: str = "") -> list[tuple[str, Tensor]]:
    """Every weight once, under its name in a checkpoint, where each expert has its own tensors."""
    found: list[tuple[str, Tensor]] = []
    for name, parameter in model.named_parameters():
        found += _of_experts(name, parameter) if ".experts." in name else [(name, parameter)]
    if model.config.model_type == "mixtral":
        for projection, short in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
            found = [(name.replace(f".{projection}.", f".{short}."), tensor) for name, tensor in found]
        found = [(name.replace(".mlp.", ".block_sparse_moe."), tensor) for name, tensor in found]
    return [(prefix + name, tensor.detach().clone()) for name, tensor in found]


def _of_experts(name: str, fused: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of each expert, which transformers fuses: [experts, rows, columns]."""
    stem, _, maps = name.rpartition(".")
    for number, expert in enumerate(fused):
        if maps == "down_proj":
            yield f"{stem}.{number}.down_proj.weight", expert
        else:
            for projection, half in zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True):
                yield f"{stem}.{number}.{projection}.weight", half


@dataclass
class Engine:
    """A running engine and the calls that tests make."""

    port: int
    log: Path
    tp: int
    device: str

    def call(self, path: str, body: object = None, key: str = KEY) -> tuple[int, Any]:
        """Status and JSON (or text) of one request."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}")
        request.add_header("Authorization", f"Bearer {key}")
        if body is not None:
            request.add_header("Content-Type", "application/json")
            request.data = json.dumps(body).encode()
        try:
            with urllib.request.urlopen(request, timeout=HANG_S) as response:
                return response.status, _parsed(response.read())
        except urllib.error.HTTPError as error:
            return error.code, _parsed(error.read())

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sequence[dict[str, Any]], **fields: Any
    ) -> list[dict[str, Any]]:
        body = {
            "input_ids": [list(prompt) for prompt in prompts],
            "sampling_params": list(sampling),
            "return_logprob": True,
            **fields,
        }
        status, answer = self.call("/generate", body)
        assert status == 200, answer
        return answer

    def do(self, path: str, body: object) -> str:
        """A call that must succeed; returns its message."""
        status, answer = self.call(path, body)
        assert status == 200 and (not isinstance(answer, dict) or answer.get("success", True)), answer
        return str(answer)

    def flush(self) -> None:
        """Forget cached prefixes, now: with a time limit SGLang would also wait for requests that are paused."""
        deadline = time.monotonic() + HANG_S
        while self.call("/flush_cache", {})[0] != 200:
            assert time.monotonic() < deadline, "the cache cannot be flushed"
            time.sleep(0.1)

    def load_bucket(self, path: Path, version: int | None = None) -> tuple[int, Any]:
        body: dict[str, Any] = {
            "serialized_named_tensors": [_path_payload(path)] * self.tp,
            "load_format": LOADER,
            "flush_cache": False,
        }
        return self.call(
            "/update_weights_from_tensor", body if version is None else {**body, "weight_version": str(version)}
        )

    def checksums(self) -> list[dict[str, str]]:
        """By tensor, as each rank has it."""
        status, answer = self.call("/weights_checker", {"action": "checksum"})
        assert status == 200, answer
        return [rank["checksums"] for rank in answer["ranks"]]


@contextmanager
def running(folder: Path, model: Path, memory: Path | None, python: Path = PYTHON, **keys: Any) -> Iterator[Engine]:
    """An engine of these models until the block ends; `keys` are further keys of its config file."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    small = {"max_total_tokens": 4096, "max_running_requests": 16, "skip_tokenizer_init": True}
    config = {
        "model": str(model),
        "memory": None if memory is None else str(memory),
        "host": "127.0.0.1",
        "port": port,
        "api_key": KEY,
        "device": "cpu",
        "dtype": "float32",
        "tp": 1,
        **keys,
        "sglang": {**small, **keys.get("sglang", {})},
    }
    folder.mkdir(parents=True, exist_ok=True)
    path, log = folder / "engine.json", folder / "engine.log"
    path.write_text(json.dumps(config))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                str(python),
                child.__file__,
                str(os.getpid()),
                str(python),
                "-m",
                "megasharp.rollout.sglang.engine",
                str(path),
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    engine = Engine(port, log, config["tp"], config["device"])
    try:
        _wait(engine, process)
        yield engine
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(engine: Engine, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, engine.log.read_text()[-3000:]
        try:
            if engine.call("/health")[0] == 200:
                return
        except OSError:
            time.sleep(0.3)
    raise AssertionError(f"no engine within {_START_S} s: {engine.log.read_text()[-3000:]}")


@dataclass
class Logps:
    """What the closed form says of every next token, [T, V] each, in float64."""

    sampler: Tensor
    policy: Tensor
    memory: Tensor | None
    moved: Tensor
    """[T]: whether the likeliest token of the calibrated distribution is another than the policy's."""
    kl: Tensor
    """[T]: KL(calibrated || policy) before top-k and top-p."""
    margin: Tensor
    """[T]: by how much the likeliest token leads, in the distribution where it leads by less."""


@torch.no_grad()
def closed_form(
    policy: PreTrainedModel,
    memory: PreTrainedModel | None,
    tokens: Sequence[int],
    sampling: dict[str, Any],
    memory_sees: Tensor | None = None,
) -> Logps:
    """Log-probs after each of `tokens`, written out: softmax((z_p - mu z_m) / T), the guard's forms, top-k, top-p.

    `memory_sees` bool [T, T]: which token (column) the memory's attention of a token (row) sees; None: all before it.
    """
    temperature = sampling.get("temperature", 1.0) or 1.0
    custom = sampling.get("custom_params") or {}
    ids = torch.tensor([list(tokens)])
    z_policy = _logits(policy, ids)
    z_memory = None if memory is None else _logits(memory, ids, memory_sees)
    own = (z_policy / temperature).log_softmax(-1)
    z = z_policy.clone()
    if z_memory is not None and "mu" in custom:
        z -= custom["mu"] * z_memory
        p = own.exp()
        if "plausible_min_p" in custom:
            z[p < custom["plausible_min_p"] * p.amax(-1, keepdim=True)] = float("-inf")
        if "plausible_top_k" in custom:
            least = [sorted(row.tolist())[-custom["plausible_top_k"]] for row in p]
            z[p < torch.tensor(least, dtype=torch.float64)[:, None]] = float("-inf")
    sampler = (z / temperature).softmax(-1)
    leads = torch.stack([table.topk(2).values for table in (own, (z / temperature).log_softmax(-1))])
    effect = {
        "moved": own.argmax(-1) != sampler.argmax(-1),
        "kl": torch.xlogy(sampler, sampler).sum(-1) - (sampler * own).sum(-1),
        "margin": (leads[..., 0] - leads[..., 1]).amin(0),
    }
    if sampling.get("temperature", 1.0) > 0:
        sampler = torch.stack([_cut(row, sampling.get("top_k", -1), sampling.get("top_p", 1.0)) for row in sampler])
    z_memory = None if z_memory is None else (z_memory / temperature).log_softmax(-1)
    return Logps(sampler.log(), own, z_memory, **effect)


def _logits(model: PreTrainedModel, ids: Tensor, sees: Tensor | None = None) -> Tensor:
    """In float64, so that only the engine rounds."""
    mask = {} if sees is None else {"attention_mask": sees[None, None]}
    return copy.deepcopy(model).double()(ids, **mask).logits[0]


# Routers' logits that are nearer to each other than this may be the other way round in float32.
_NEAR = 1e-5


@torch.no_grad()
def routing(model: PreTrainedModel, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The experts of each token in each layer, ascending, [T, layers, K]; and where they are certain, [T, layers]."""
    output = copy.deepcopy(model).double()(torch.tensor([list(tokens)]), output_router_logits=True)
    most = model.config.num_experts_per_tok
    ranked = torch.stack(output.router_logits, dim=1).sort(dim=-1, descending=True)
    margin = ranked.values[..., most - 1] - ranked.values[..., most]
    return ranked.indices[..., :most].sort(dim=-1).values, margin > _NEAR


def decided(model: PreTrainedModel, tokens: Sequence[int]) -> int:
    """The first position that a near tie of a router may send to another expert; all of them where there is none."""
    if not hasattr(model.config, "num_experts_per_tok"):
        return len(tokens)
    certain_T = routing(model, tokens)[1].all(dim=1)
    return int(certain_T.int().cumprod(dim=0).sum())


def routed(answer: dict[str, Any], prompt: Sequence[int], model: PreTrainedModel) -> tuple[int, int]:
    """Count the experts that an engine returned and transformers' routers do not choose, and all that it returned.

    Near ties, and what follows them, are left out.
    """
    tokens = [*prompt, *answer["output_ids"]][:-1]
    want, _ = routing(model, tokens)
    raw = bytearray(base64.b64decode(answer["meta_info"]["routed_experts"]))
    got = torch.frombuffer(raw, dtype=torch.uint8).view(want.shape).sort(dim=-1).values
    end = decided(model, tokens)
    return int((got != want).any(dim=-1)[:end].sum()), end * want.shape[1]


def prompt_and_window(length: int, prompt: int, window: int) -> Tensor:
    """Bool [T, T]: token i sees token j <= i of the prompt, and those of the last `window` ones up to itself."""
    return torch.tensor([[j <= i and (j < prompt or j > i - window) for j in range(length)] for i in range(length)])


def _cut(p: Tensor, top_k: int, top_p: float) -> Tensor:
    order = sorted(range(len(p)), key=lambda token: (-p[token].item(), token))
    order = order[:top_k] if top_k > 0 else order
    total, mass, kept = float(p[order].sum()), 0.0, []
    for token in order:
        if mass >= top_p * total:
            break
        kept.append(token)
        mass += float(p[token])
    result = torch.zeros_like(p)
    result[kept] = p[kept] / mass
    return result


def errors(
    answer: dict[str, Any],
    prompt: Sequence[int],
    sampling: dict[str, Any],
    policy: PreTrainedModel,
    memory: PreTrainedModel | None,
    start: int = 0,
    end: int | None = None,
    window: int | None = None,
) -> dict[str, float]:
    """The largest difference of each figure from the closed form, over response tokens `[start, end)`.

    `window` is that of the memory network, behind the prompt without its `begun` tokens. A wrong `argmax_moved` counts
    1, where no two tokens are too close to say.
    """
    drawn, meta = answer["output_ids"], answer["meta_info"]
    certain = decided(policy, [*prompt, *drawn]) - len(prompt) + 1
    if certain <= start:
        return {}
    end = min(certain, len(drawn) if end is None else end)
    begun, sees = (sampling.get("custom_params") or {}).get("begun", 0), None
    if window is not None:
        sees = prompt_and_window(len(prompt) + len(drawn), len(prompt) - begun, window)
    want = closed_form(policy, memory, [*prompt, *drawn], sampling, sees)
    rows, tokens = torch.arange(len(prompt) - 1, len(prompt) + len(drawn) - 1), torch.tensor(drawn)
    pairs = {"sampler": (meta["sampler_logprob"], want.sampler), "policy": (meta["policy_logprob"], want.policy)}
    if want.memory is not None:
        pairs["memory"] = (meta["memory_logprob"], want.memory)
    assert all(len(got) == len(drawn) for got, _ in pairs.values()), meta
    found = {
        name: float((torch.tensor(got).double() - table[rows, tokens])[start:end].abs().max())
        for name, (got, table) in pairs.items()
    }
    if count := (sampling.get("custom_params") or {}).get("candidates"):
        entropy_T = -torch.xlogy(want.policy.exp(), want.policy.exp()).sum(-1)[rows]
        got = torch.tensor([meta[f"candidate_logprob_{rank}"] for rank in range(1, count + 1)]).T.double()
        top = want.policy[rows].topk(count).values
        found["entropy"] = float((torch.tensor(meta["policy_entropy"]).double() - entropy_T)[start:end].abs().max())
        found["candidates"] = float((got - top)[start:end].abs().max())
    if want.memory is not None:
        found["kl"] = float((torch.tensor(meta["calibration_kl"]).double() - want.kl[rows])[start:end].abs().max())
        wrong = (torch.tensor(meta["argmax_moved"]).bool() != want.moved[rows]) & (want.margin[rows] > 1e-4)
        found["argmax"] = float(wrong[start:end].any())
    return found


def _parsed(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return raw.decode("utf-8", "replace")


class _Path:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[list[int]]]:
        return torch.ByteTensor, (list(str(self.path).encode()),)


def _path_payload(path: Path) -> str:
    return base64.b64encode(pickle.dumps([("file", _Path(path))])).decode()
