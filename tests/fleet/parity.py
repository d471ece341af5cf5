"""A float32 engine against transformers in float64: the cases, each measured as its largest absolute errors.

The long tests hold every case to its tolerance; `tools/parity_table.py` prints the figures.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from engines import VOCABULARY, Engine, closed_form, errors, make_model, prompt_and_window, running, tensors_of
from transformers import PreTrainedModel
from waiting import HANG_S

from megasharp.rollout.sglang.bucket import Stamp, checksum, new_stamp, write_bucket

Errors = dict[str, float]
TOLERANCES = {
    "sampler": 1e-5,
    "policy": 1e-5,
    "memory": 1e-5,
    "entropy": 1e-5,
    "candidates": 1e-5,
    "kl": 1e-5,
    "argmax": 0.0,
}
TRUNCATED = ({"top_p": 0.7}, {"top_k": 9}, {"top_k": 20, "top_p": 0.6}, {})
_ONE_BY_ONE = {"page_size": 16, "chunked_prefill_size": 64, "disable_overlap_schedule": True}
# Name of a setup: policy, memory and further keys of the engine's config. Page size 1 and overlapped steps are SGLang's
# defaults; `one by one` has pages of 16, prefill in chunks of 64 and one step after the other.
SETUPS: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "Qwen3": ("policy3", None, {}),
    "Qwen3, one by one": ("policy3", None, {"sglang": _ONE_BY_ONE}),
    "Qwen2, tp 2, chunks": ("policy2", None, {"tp": 2, "deterministic": True, "sglang": {"chunked_prefill_size": 64}}),
    "Llama, chunks": ("llama", None, {"sglang": {"chunked_prefill_size": 64}}),
    "OLMo 2, tp 2, chunks": ("olmo2", None, {"tp": 2, "deterministic": True, "sglang": {"chunked_prefill_size": 64}}),
    "OLMo 2 + Qwen3": ("olmo2", "memory3", {}),
    "Qwen3 + OLMo 2, tp 2": ("policy3", "memory_olmo2", {"tp": 2, "deterministic": True}),
    "Qwen3-MoE, one by one": ("experts3", None, {"returns_experts": True, "sglang": _ONE_BY_ONE}),
    "Mixtral, tp 2, chunks": (
        "mixtral",
        None,
        {"tp": 2, "returns_experts": True, "sglang": {"chunked_prefill_size": 64}},
    ),
    "Qwen3-MoE + Qwen3, tp 2": (
        "experts3",
        "memory3, heads",
        {"tp": 2, "deterministic": True, "returns_experts": True},
    ),
    "Qwen3 + Qwen3": ("policy3", "memory3", {"sleep": True}),
    "Qwen3 + Qwen3, tp 2": ("policy3", "memory3", {"tp": 2, "deterministic": True}),
    "Qwen2 + Qwen3, one by one": ("policy2", "memory3", {"sglang": _ONE_BY_ONE}),
    "Qwen3 + Qwen2, tp 2, pages": ("policy3", "memory2", {"tp": 2, "deterministic": True, "sglang": {"page_size": 16}}),
    "Qwen3 + Qwen3, window": ("policy3", "memory3", {"sleep": True, "memory_window": 16}),
    "Qwen3 + Qwen2, window, tp 2, pages, chunks": (
        "policy3",
        "memory2",
        {
            "tp": 2,
            "deterministic": True,
            "memory_window": 24,
            "sglang": {"page_size": 16, "chunked_prefill_size": 64},
        },
    ),
}

_TRIES = 5


def worst(*found: Errors) -> Errors:
    """The largest error of each figure."""
    return {name: max(each.get(name, 0.0) for each in found) for name in TOLERANCES if any(name in e for e in found)}


class Pair:
    """An engine with the models it is to match."""

    def __init__(
        self, engine: Engine, folder: Path, policy: str, memory: str | None, window: int | None = None
    ) -> None:
        self.engine = engine
        self.window = window
        self.folder = folder
        self.version = 0
        self._kinds = (policy, memory)
        self.use(1)

    def use(self, seed: int) -> None:
        """From now on the engine is to match other weights."""
        policy, memory = self._kinds
        self.policy, self.memory = models(self.folder / "policy", self.folder / "memory", policy, memory, seed)

    def measure(self, prompts: list[list[int]], sampling: list[dict[str, Any]]) -> tuple[Errors, list[dict[str, Any]]]:
        """Generate, and compare every figure of every token: the largest errors, and the answers."""
        answers = self.engine.generate(prompts, sampling)
        found = [
            errors(answer, prompt, each, self.policy, self.memory, window=self.window)
            for answer, prompt, each in zip(answers, prompts, sampling, strict=True)
        ]
        return worst(*found), answers

    def sampling(self, mu: float | None = None, length: int = 20, **fields: Any) -> dict[str, Any]:
        """Sampling at temperature 0.8, with three candidates; `mu` counts only where there is a memory network."""
        custom = {"candidates": 3} | ({} if mu is None or self.memory is None else {"mu": mu})
        return {"temperature": 0.8, "max_new_tokens": length, "ignore_eos": True, "custom_params": custom, **fields}

    def sent(self) -> list[tuple[str, torch.Tensor]]:
        return tensors_of(self.policy) + ([] if self.memory is None else tensors_of(self.memory, "memory."))

    def stamp(self, version: int) -> Stamp:
        return new_stamp(version, None if self.memory is None else version)

    def push(self, *, flush: bool = True) -> None:
        """Send all weights through bucket files, as one new version; `flush` forgets what the old ones cached."""
        self.version += 1
        stamp, tensors = self.stamp(self.version), self.sent()
        half = len(tensors) // 2
        self.engine.do("/begin_weight_update", {})
        for number, part in enumerate((tensors[:half], tensors[half:], [])):
            path = self.folder / f"bucket-{self.version}-{number}"
            write_bucket(path, stamp, part, [checksum(tensor) for _, tensor in part])
            status, answer = self.engine.load_bucket(path, None if part else self.version)
            assert status == 200 and answer["success"], answer
        self.engine.do("/end_weight_update", {})
        if flush:
            self.engine.flush()

    def load_folder(self) -> None:
        """Have the engine read all weights from one checkpoint, as one new version."""
        from safetensors.torch import save_file

        self.version += 1
        folder = self.folder / f"version-{self.version}"
        folder.mkdir()
        (folder / "config.json").write_text((self.folder / "policy" / "config.json").read_text())
        save_file({name: tensor.contiguous() for name, tensor in self.sent()}, folder / "model.safetensors")
        body = {"model_path": str(folder), "flush_cache": True, "weight_version": str(self.version)}
        self.engine.do("/update_weights_from_disk", body)

    def assert_checksums(self) -> None:
        want = {name: checksum(tensor) for name, tensor in self.sent()}
        for rank in self.engine.checksums():
            assert rank == want


def models(
    policy_folder: Path, memory_folder: Path, policy: str, memory: str | None, seed: int
) -> tuple[PreTrainedModel, PreTrainedModel | None]:
    return make_model(policy_folder, policy, seed), make_model(memory_folder, memory, seed + 1) if memory else None


@contextmanager
def pair_of(folder: Path, setup: str, **overrides: Any) -> Iterator[Pair]:
    """One of the setups, running; `overrides` are keys of its config file, and the engines' `python`."""
    policy, memory, keys = SETUPS[setup]
    models(folder / "policy", folder / "memory", policy, memory, 1)
    flags = {**keys.get("sglang", {}), **overrides.pop("sglang", {})}
    memory_folder = folder / "memory" if memory else None
    with running(folder, folder / "policy", memory_folder, **{**keys, **overrides, "sglang": flags}) as engine:
        yield Pair(engine, folder, policy, memory, {**keys, **overrides}.get("memory_window"))


def prompt_of(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCABULARY), k=length)


def prefill_and_decode(pair: Pair) -> Errors:
    """Six requests of different lengths in one batch, each with its own mu."""
    lengths, mus = (3, 33, 7, 150, 1, 90), (0.0, 0.25, 1.0, 0.5, 0.7, None)
    prompts = [prompt_of(length, seed) for seed, length in enumerate(lengths)]
    return pair.measure(prompts, [pair.sampling(mu, 5 + 4 * row) for row, mu in enumerate(mus)])[0]


def long_prompt(pair: Pair) -> Errors:
    return pair.measure([prompt_of(700, 5), prompt_of(10, 6)], [pair.sampling(0.6), pair.sampling(0.2)])[0]


def cached_prefixes(pair: Pair) -> Errors:
    """A prompt and its response, and then two prompts that begin with them."""
    prompt = prompt_of(64, 11)
    first, [answer] = pair.measure([prompt], [pair.sampling(0.5, 40)])
    longer = [[*prompt, *answer["output_ids"], *prompt_of(5, 12)], [*prompt, *prompt_of(9, 13)]]
    second, answers = pair.measure(longer, [pair.sampling(0.9), pair.sampling(0.1)])
    assert all(each["meta_info"]["cached_tokens"] >= 60 for each in answers)
    return worst(first, second)


def prompts_log_probs(pair: Pair) -> Errors:
    """They are the policy's own at temperature 1, whatever mu."""
    prompt = prompt_of(40, 3)
    [answer] = pair.engine.generate([prompt], [pair.sampling(0.5)], logprob_start_len=0)
    got = torch.tensor([entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]]).double()
    want = closed_form(pair.policy, None, prompt, {}).policy
    rows = torch.arange(len(prompt) - len(got) - 1, len(prompt) - 1)
    assert len(got) > 30
    return {"policy": float((got - want[rows, torch.tensor(prompt)[rows + 1]]).abs().max())}


def greedy(pair: Pair) -> Errors:
    """Alone, and in a batch with a request that samples; the tokens must be the likeliest of the closed form."""
    asked, found = pair.sampling(0.6, temperature=0.0), []
    for others in ([], [pair.sampling(0.3)]):
        prompts = [prompt_of(12, seed) for seed in range(1 + len(others))]
        error, [answer, *_] = pair.measure(prompts, [asked, *others])
        tokens = [*prompts[0], *answer["output_ids"]]
        sees = None if pair.window is None else prompt_and_window(len(tokens), len(prompts[0]), pair.window)
        table = closed_form(pair.policy, pair.memory, tokens, asked, sees).sampler
        assert table[11:-1].argmax(-1).tolist() == answer["output_ids"]
        found.append(error)
    return worst(*found)


def truncation(pair: Pair) -> Errors:
    """top-k and top-p cut the calibrated distribution; an untruncated request in the same batch."""
    prompts = [prompt_of(10, seed) for seed in range(len(TRUNCATED))]
    return pair.measure(prompts, [pair.sampling(0.5, **fields) for fields in TRUNCATED])[0]


def continued(pair: Pair) -> Errors:
    """A response that was cut off and goes on in a second request; with seeds, it is the uninterrupted one."""
    prompt, seed = prompt_of(15, 61), {"sampling_seed": 77}
    whole, [uninterrupted] = pair.measure([prompt], [pair.sampling(0.5, 24, **seed)])
    [first] = pair.engine.generate([prompt], [pair.sampling(0.5, 9, **seed)])
    asked = pair.sampling(0.5, 15, **seed)
    asked["custom_params"] = {**asked.get("custom_params", {}), "begun": 9}
    second, [rest] = pair.measure([[*prompt, *first["output_ids"]]], [asked])
    if SEEDED in pair.engine.log.with_name("engine.json").read_text():
        assert first["output_ids"] + rest["output_ids"] == uninterrupted["output_ids"]
        for name in ("sampler", "policy"):
            one, two = (torch.tensor(each["meta_info"][f"{name}_logprob"]) for each in (uninterrupted, rest))
            second = worst(second, {name: float((one[9:] - two).abs().max())})
    return worst(whole, second)


SEEDED = '"deterministic": true'


def tensor_update(pair: Pair) -> Errors:
    """Bucket files; every tensor then has the checksum of what was sent, on every rank."""
    pair.assert_checksums()
    pair.use(7)
    pair.push()
    pair.assert_checksums()
    error, [answer] = pair.measure([prompt_of(20, 1)], [pair.sampling(0.5)])
    assert answer["meta_info"]["weight_versions"] == [{"version": str(pair.version), "start": 0, "end": 20}]
    return error


def disk_update(pair: Pair) -> Errors:
    pair.use(8 + pair.version)
    pair.load_folder()
    pair.assert_checksums()
    return pair.measure([prompt_of(20, 2)], [pair.sampling(0.5)])[0]


def retracted(pair: Pair) -> Errors:
    """An update in flight: old weights before the switch, new ones with a cache of their own after it."""
    answer, before, after = _update_in_flight(pair, "retract")
    assert answer["meta_info"]["num_retractions"] == 1
    return worst(before, after)


def updated_in_place(pair: Pair) -> Errors:
    """Tokens before the switch; those after it are of new weights over a cache of the old ones, and nobody's."""
    answer, before, after = _update_in_flight(pair, "in_place")
    assert answer["meta_info"]["num_retractions"] == 0
    assert not after or after["policy"] > 1e-2
    pair.engine.flush()
    return before


def _update_in_flight(pair: Pair, mode: str) -> tuple[dict[str, Any], Errors, Errors]:
    length = 300 if pair.engine.tp > 1 or pair.window else 900
    prompt, sampling = prompt_of(9, 31), pair.sampling(0.5, length)
    for _ in range(_TRIES):
        old_policy, old_memory = pair.policy, pair.memory
        answer = _pushed_while_it_samples(pair, mode, prompt, sampling)
        versions = answer["meta_info"]["weight_versions"]
        # On a busy machine the push may come before the first token, or after the last.
        if len(versions) > 1:
            break
    first, second = versions
    assert second["version"] == str(pair.version) and first["version"] != second["version"]
    switch = first["end"]
    assert 0 < switch < length
    before = errors(answer, prompt, sampling, old_policy, old_memory, end=switch, window=pair.window)
    after = errors(answer, prompt, sampling, pair.policy, pair.memory, start=switch, window=pair.window)
    return answer, before, after


def _pushed_while_it_samples(pair: Pair, mode: str, prompt: list[int], sampling: dict[str, Any]) -> dict[str, Any]:
    answers: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: answers.extend(pair.engine.generate([prompt], [sampling])))
    thread.start()
    time.sleep(0.5)
    pair.engine.do("/pause_generation", {"mode": mode})
    pair.use(40 + pair.version)
    pair.push(flush=mode == "retract")
    pair.engine.do("/continue_generation", {"torch_empty_cache": False})
    thread.join(timeout=HANG_S)
    [answer] = answers
    return answer


# The last ones change the weights.
CASES: dict[str, Callable[[Pair], Errors]] = {
    "prefill and decode, ragged batch and mu": prefill_and_decode,
    "700-token prompt": long_prompt,
    "cached prefixes": cached_prefixes,
    "log-probs of the prompt": prompts_log_probs,
    "greedy": greedy,
    "top-k, top-p": truncation,
    "interrupted and continued": continued,
    "update from tensors": tensor_update,
    "update from disk": disk_update,
    "update in flight, retract": retracted,
    "update in flight, in place": updated_in_place,
}
