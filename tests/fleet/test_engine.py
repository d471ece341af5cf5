"""Float32 engines against transformers in float64, to 1e-5: with a memory network and without, around updates."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import PYTHON, VOCABULARY, closed_form, errors, make_model, routed
from parity import CASES, SETUPS, TOLERANCES, Errors, Pair, pair_of, prompt_of
from transformers import PreTrainedModel
from waiting import HANG_S, SOON_S

from megasharp.common.records import SamplingParams
from megasharp.ops.uniform import seeds_to_int64
from megasharp.rollout.inprocess.generation import Logits
from megasharp.rollout.inprocess.generation import draw as draw_inprocess
from megasharp.rollout.sglang.bucket import checksum, write_bucket

pytestmark = pytest.mark.long("fleet")

WITH_MEMORY, PLAIN, RANKS = "Qwen3 + Qwen3", "Qwen3", "Qwen3 + Qwen2, tp 2, pages"


@pytest.fixture(scope="module", params=SETUPS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """One engine at a time."""
    with pair_of(tmp_path_factory.mktemp("engine"), request.param) as started:
        yield started


@pytest.mark.parametrize("case", CASES)
def test_parity(pair: Pair, case: str) -> None:
    assert_close(CASES[case](pair))


def assert_close(*found: Errors) -> None:
    assert found and all(error <= TOLERANCES[name] for each in found for name, error in each.items()), found


def check(pair: Pair, prompts: list[list[int]], sampling: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found, answers = pair.measure(prompts, sampling)
    assert_close(found)
    return answers


@pytest.mark.parametrize("pair", [WITH_MEMORY, RANKS, "Qwen2 + Qwen3, one by one"], indirect=True)
def test_guard_bars_what_the_policy_finds_implausible(pair: Pair) -> None:
    """Either form, per request, in one batch; the closed form is in float64."""
    custom: list[dict[str, float]] = [
        {"mu": 0.8},
        {"mu": 0.8, "plausible_min_p": 0.2},
        {"mu": 0.0, "plausible_min_p": 0.5},
        {"mu": 0.8, "plausible_top_k": 5},
        {"mu": 0.0, "plausible_top_k": 2},
        {"mu": 0.5, "plausible_min_p": 1.0},
        {"mu": 0.5, "plausible_top_k": 1},
    ]
    prompts = [prompt_of(10, seed) for seed in range(len(custom))]
    answers = check(pair, prompts, [pair.sampling(custom_params=each) for each in custom])
    # Only the likeliest token is as likely as itself.
    for answer in answers[-2:]:
        assert max(abs(value) for value in answer["meta_info"]["sampler_logprob"]) <= TOLERANCES["sampler"]
        assert not any(answer["meta_info"]["argmax_moved"])
    assert any(answers[0]["meta_info"]["argmax_moved"]), "a mu of 0.8 changes the likeliest token now and then"


@pytest.mark.parametrize("pair", [WITH_MEMORY], indirect=True)
def test_empirical_distribution(pair: Pair) -> None:
    """Drawn tokens against the closed form by Pearson's chi-square, and far from the policy's own distribution."""
    prompt, sampling, draws = prompt_of(6, 21), pair.sampling(0.7, 1, top_p=0.95), 4000
    answers = pair.engine.generate([prompt] * draws, [sampling] * draws)
    counts = torch.bincount(
        torch.tensor([answer["output_ids"][0] for answer in answers]), minlength=VOCABULARY
    ).double()
    table = closed_form(pair.policy, pair.memory, prompt, sampling)
    want = table.sampler[-1].exp() * draws
    assert float(counts[want == 0].sum()) == 0
    kept = want >= 5
    rest = (counts[~kept].sum() - want[~kept].sum()) ** 2 / want[~kept].sum().clamp(min=1)
    freedom = int(kept.sum())
    chi_square = float(((counts - want) ** 2 / want)[kept].sum() + rest)
    # Five standard deviations of a chi-square of so many degrees of freedom.
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5
    policy = table.policy[-1].exp() * draws
    assert float(((counts - policy) ** 2 / policy).sum()) > 10 * freedom


@pytest.mark.parametrize("pair", [RANKS, "Qwen2, tp 2, chunks"], indirect=True)
def test_seeds_fix_the_tokens_and_are_the_in_process_engines(pair: Pair) -> None:
    """In any batch; the oracle draws from transformers' logits with the in-process engine's own function."""
    prompt, seeds = prompt_of(8, 41), (5, -3, 2**63 - 1)
    sampling = [pair.sampling(0.5, 12, sampling_seed=seed) for seed in seeds]
    together = check(pair, [prompt] * 3, sampling)
    for other in (pair.sampling(0.1, 3), pair.sampling(0.1, 30, top_k=5), pair.sampling(0.1, 30, temperature=0.0)):
        among_others = [check(pair, [prompt_of(30, 42), prompt], [other, each])[1] for each in sampling]
        assert [a["output_ids"] for a in together] == [a["output_ids"] for a in among_others], other
    for seed, answer in zip(seeds, together, strict=True):
        assert answer["output_ids"] == drawn_in_process(pair, prompt, seed, 12)


@torch.no_grad()
def drawn_in_process(pair: Pair, prompt: list[int], seed: int, length: int) -> list[int]:
    sampling = SamplingParams(length, temperature=0.8, memory_mu=0.5 if pair.memory else None)
    tokens = list(prompt)
    for position in range(length):
        ids = torch.tensor([tokens])
        logits = Logits(pair.policy(ids).logits[:, -1], pair.memory(ids).logits[:, -1] if pair.memory else None)
        tokens.append(int(draw_inprocess(logits, seeds_to_int64([seed]), position, sampling).tokens_S))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("pair", [RANKS], indirect=True)
def test_what_a_continued_response_is_without_begun(pair: Pair) -> None:
    """Its numbers start anew at the continued prompt's end, so `begun` is what makes the parity case pass."""
    prompt, seed = prompt_of(15, 61), {"sampling_seed": 77}
    [whole] = pair.engine.generate([prompt], [pair.sampling(0.5, 24, **seed)])
    [rest] = pair.engine.generate([[*prompt, *whole["output_ids"][:9]]], [pair.sampling(0.5, 15, **seed)])
    assert rest["output_ids"] != whole["output_ids"][9:]


@pytest.mark.parametrize("pair", [PLAIN], indirect=True)
def test_without_the_deterministic_mode_seeds_do_not_count(pair: Pair) -> None:
    """The log-probs are as exact as with it; the tokens are drawn anew each time."""
    asked = [pair.sampling(None, 40, sampling_seed=5)] * 2
    one, two = check(pair, [prompt_of(8, 41)] * 2, asked)
    assert one["output_ids"] != two["output_ids"]


@pytest.mark.parametrize("pair", [WITH_MEMORY], indirect=True)
def test_mistakes_in_a_request_are_answers(pair: Pair) -> None:
    mistakes: tuple[dict[str, object], ...] = (
        {"mu": "0.5"},
        {"mu": 1e30},
        {"mu": -1},
        {"mu": True},
        {"plausible_min_p": 0},
        {"plausible_top_k": 0},
        {"plausible_top_k": 1.5},
        {"begun": -1},
        {"begun": 10**30},
        {"candidates": 0},
        {"candidates": 9},
        {"candidates": 1.5},
        {"nu": 1},
        {"mu": [1]},
    )
    for custom in mistakes:
        body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 2, "custom_params": custom}}
        status, answer = pair.engine.call("/generate", body)
        assert status == 400 and "custom_params" in str(answer), (custom, answer)
    assert pair.engine.call("/model_info", key="another key")[0] == 401
    check(pair, [[1, 2]], [pair.sampling(0.5)])


@pytest.mark.parametrize("pair", [PLAIN], indirect=True)
def test_a_mu_needs_a_memory_and_a_sleep_its_key(pair: Pair) -> None:
    body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 2, "custom_params": {"mu": 0.5}}}
    status, answer = pair.engine.call("/generate", body)
    assert status == 400 and "holds none" in str(answer)
    status, answer = pair.engine.call("/release_memory_occupation", {})
    assert status == 400 and "sleep: true" in str(answer)
    check(pair, [[1, 2]], [pair.sampling()])


@pytest.mark.parametrize("pair", [WITH_MEMORY], indirect=True)
def test_weights_that_do_not_fit_change_nothing(pair: Pair) -> None:
    pair.push()
    named = dict(pair.sent())
    name = "model.layers.1.self_attn.k_proj.weight"
    other = torch.randn_like(named[name])
    bad = {
        "no weight": [("model.layers.9.self_attn.k_proj.weight", other)],
        "shape": [("model.norm.weight", torch.ones(64)), (name, other[:-1].clone())],
        "older": [(name, other)],
        "checksum": [(name, other)],
        "not complete": [],
    }
    pair.engine.do("/begin_weight_update", {})
    for word, tensors in bad.items():
        path = pair.folder / f"bad-{word}".replace(" ", "-")
        stamp = pair.stamp(pair.version - 1 if word == "older" else pair.version + 1)
        write_bucket(path, stamp, tensors, [checksum(tensor) for _, tensor in tensors])
        if word == "checksum":
            raw = bytearray(path.read_bytes())
            raw[-1] ^= 1
            path.write_bytes(raw)
        status, answer = pair.engine.load_bucket(path)
        assert status == 400 and word in answer["message"], (word, answer)
    assert pair.engine.load_bucket(pair.folder / "absent")[0] == 400
    pair.engine.do("/end_weight_update", {})
    pair.assert_checksums()
    body = {"model_path": str(pair.folder / "policy"), "weight_version": str(pair.version - 1)}
    status, answer = pair.engine.call("/update_weights_from_disk", body)
    assert status == 400 and "older" in json.dumps(answer)
    pair.assert_checksums()
    check(pair, [prompt_of(5, 51)], [pair.sampling(0.5)])


@pytest.mark.parametrize("pair", [PLAIN, WITH_MEMORY, RANKS], indirect=True)
def test_weights_of_nan_are_seen_and_end_nothing(pair: Pair) -> None:
    """The client tells the user by the log-probs, which JSON has as null."""
    with torch.no_grad():
        pair.policy.model.norm.weight.fill_(float("nan"))
    pair.push()
    sampling = [pair.sampling(0.5, 3, **fields) for fields in ({}, {"top_p": 0.5}, {"temperature": 0.0})]
    for answer in pair.engine.generate([[1, 2]] * 3, sampling):
        assert answer["meta_info"]["policy_logprob"] == [None] * 3
    pair.use(3)
    pair.push()
    check(pair, [prompt_of(5, 52)], [pair.sampling(0.5)])


@pytest.mark.parametrize("pair", [WITH_MEMORY], indirect=True)
def test_sleep_and_wake(pair: Pair) -> None:
    """On a CPU nothing is given back; the calls, their order and what is refused are those of a GPU."""
    engine, prompt, greedy = pair.engine, prompt_of(30, 71), pair.sampling(0.5, temperature=0.0)
    [before] = check(pair, [prompt], [greedy])
    assert engine.call("/resume_memory_occupation", {})[0] == 400
    assert engine.call("/release_memory_occupation", {"tags": ["weights", "kv_cache"]})[0] == 200
    status, answer = engine.call("/generate", {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1}})
    assert status == 503 and "sleeps" in str(answer)
    started = time.monotonic()
    assert engine.call("/health")[0] == 200 and time.monotonic() - started < SOON_S
    for path, body in (
        ("/release_memory_occupation", {"tags": ["weights"]}),
        ("/resume_memory_occupation", {"tags": ["cuda_graph"]}),
        ("/weights_checker", {"action": "checksum"}),
        ("/begin_weight_update", {}),
    ):
        status, answer = engine.call(path, body)
        assert status == 400 and "sleep" in str(answer), (path, answer)
    assert engine.call("/resume_memory_occupation", {"tags": ["weights"]})[0] == 200
    pair.push(flush=False)
    assert engine.call("/generate", {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1}})[0] == 503
    assert engine.call("/resume_memory_occupation", {"tags": ["kv_cache"]})[0] == 200
    [after] = check(pair, [prompt], [greedy])
    assert after["output_ids"] == before["output_ids"] and after["meta_info"]["cached_tokens"] == 0


@pytest.mark.parametrize("pair", [WITH_MEMORY], indirect=True)
def test_sleep_while_a_request_is_in_flight(pair: Pair) -> None:
    """Refused while it has a cache; once retracted it waits, and goes on after the wake."""
    engine, prompt, sampling = pair.engine, prompt_of(9, 72), pair.sampling(0.5, 900)
    answers: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: answers.extend(engine.generate([prompt], [sampling])))
    thread.start()
    time.sleep(0.5)
    engine.do("/pause_generation", {"mode": "in_place"})
    status, answer = engine.call("/release_memory_occupation", {})
    assert status == 400 and "in flight" in str(answer)
    engine.do("/continue_generation", {"torch_empty_cache": False})
    engine.do("/pause_generation", {"mode": "retract"})
    assert engine.call("/release_memory_occupation", {})[0] == 200
    assert engine.call("/continue_generation", {"torch_empty_cache": False})[0] == 503
    assert engine.call("/resume_memory_occupation", {})[0] == 200
    engine.do("/continue_generation", {"torch_empty_cache": False})
    thread.join(timeout=HANG_S)
    [answer] = answers
    assert answer["meta_info"]["num_retractions"] == 1
    assert_close(errors(answer, prompt, sampling, pair.policy, pair.memory))


MIXTURES = ("Qwen3-MoE, one by one", "Mixtral, tp 2, chunks", "Qwen3-MoE + Qwen3, tp 2")


def assert_routed(pair: Pair, prompts: list[list[int]], answers: list[dict[str, Any]]) -> None:
    """The experts of every position that was fed are those of transformers' routers."""
    for prompt, answer in zip(prompts, answers, strict=True):
        wrong, compared = routed(answer, prompt, pair.policy)
        assert wrong == 0 and compared >= len(prompt), (wrong, compared)


@pytest.mark.parametrize("pair", MIXTURES, indirect=True)
def test_experts_are_those_of_transformers_routers(pair: Pair) -> None:
    """In a ragged batch and in chunks, where the prompt is cached, and where a response goes on; only if asked for."""
    asked = {"return_routed_experts": True}
    prompts = [prompt_of(length, 100 + length) for length in (3, 150, 40, 90)]
    samplings = [pair.sampling(0.5, 10 + 7 * row) for row in range(4)]
    answers = pair.engine.generate(prompts, samplings, **asked)
    assert_routed(pair, prompts, answers)
    longer = [[*prompts[1], *answers[1]["output_ids"], 7, 9], [*prompts[3], 5]]
    begun = pair.sampling(0.5, 15)
    begun["custom_params"] = {**begun["custom_params"], "begun": 19}
    again = pair.engine.generate(longer, [begun, pair.sampling(0.5, 15)], **asked)
    assert all(each["meta_info"]["cached_tokens"] >= 80 for each in again)
    assert_routed(pair, longer, again)
    [plain] = pair.engine.generate([prompts[0]], [pair.sampling()])
    assert "routed_experts" not in plain["meta_info"]


@pytest.mark.parametrize("pair", MIXTURES, indirect=True)
def test_experts_of_requests_that_are_retracted_and_aborted(pair: Pair) -> None:
    prompt = prompt_of(30, 111)
    answers: list[dict[str, Any]] = []
    ask = partial(pair.engine.generate, [prompt], [pair.sampling(0.5, 600)], return_routed_experts=True)
    thread = threading.Thread(target=lambda: answers.extend(ask()))
    thread.start()
    time.sleep(0.5)
    pair.engine.do("/pause_generation", {"mode": "retract"})
    pair.engine.do("/continue_generation", {"torch_empty_cache": False})
    time.sleep(0.5)
    pair.engine.do("/abort_request", {"abort_all": True, "rid": ""})
    thread.join(timeout=HANG_S)
    [answer] = answers
    assert answer["meta_info"]["num_retractions"] == 1 and answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert answer["output_ids"]
    assert_routed(pair, [prompt], answers)


WINDOWED = ("Qwen3 + Qwen3, window", "Qwen3 + Qwen2, window, tp 2, pages, chunks")


def slots(pair: Pair) -> dict[str, int]:
    """Free ones of each pool, and those of prompts that no request uses."""
    status, told = pair.engine.call("/server_info")
    assert status == 200, told
    return dict(told["internal_states"][0]["free_slots"])


@contextmanager
def sampled_meanwhile(pair: Pair, prompts: list[list[int]], length: int) -> Iterator[threading.Thread]:
    """The requests are checked when the block ends."""
    found: list[Errors] = []
    asked = [pair.sampling(0.5, length)] * len(prompts)
    thread = threading.Thread(target=lambda: found.append(pair.measure(prompts, asked)[0]))
    thread.start()
    yield thread
    thread.join(timeout=HANG_S)
    assert_close(*found)


@pytest.mark.parametrize("pair", WINDOWED, indirect=True)
def test_the_memorys_cache_is_freed_behind_its_window(pair: Pair) -> None:
    """While a response grows the policy's pool shrinks and the memory's does not: prompt, window, what waits, pages."""
    pair.engine.flush()
    assert pair.window is not None
    before, prompt, page = slots(pair), prompt_of(50, 5), 16
    most = len(prompt) + pair.window + pair.window // 4 + 2 * page
    used: list[tuple[int, int]] = []
    with sampled_meanwhile(pair, [prompt], 250) as thread:
        while thread.is_alive():
            now = slots(pair)
            used.append((before["policy"] - now["policy"], before["memory"] - now["memory"]))
    assert max(policy for policy, _ in used) > most + 50, "it was not seen while it ran"
    assert max(memory for _, memory in used) <= most, used


@pytest.mark.parametrize("pair", WINDOWED, indirect=True)
def test_no_slot_of_either_pool_is_lost(pair: Pair) -> None:
    """After requests that end, are retracted by a pause and for want of room, are begun, are aborted."""
    pair.engine.flush()
    before, engine, abort = slots(pair), pair.engine, {"abort_all": True, "rid": ""}
    with sampled_meanwhile(pair, [prompt_of(20 + 15 * seed, seed) for seed in range(3)], 150):
        time.sleep(0.5)
        engine.do("/pause_generation", {"mode": "retract"})
        engine.do("/continue_generation", {"torch_empty_cache": False})
    asked = pair.sampling(0.5, 15)
    asked["custom_params"] = {**asked["custom_params"], "begun": 37}
    check(pair, [prompt_of(90, 8)] * 2, [asked] * 2)
    body = {"input_ids": [prompt_of(30, 9)] * 16, "sampling_params": [pair.sampling(0.5, 400)] * 16}
    thread = threading.Thread(target=lambda: engine.call("/generate", body))
    thread.start()
    # Sixteen at a time do not have room for so many tokens.
    time.sleep(4)
    engine.do("/abort_request", abort)
    thread.join(timeout=HANG_S)
    assert slots(pair)["prompts"] > 0
    engine.flush()
    assert slots(pair) == before


REFUSALS: dict[str, dict[str, Any]] = {
    "weight updates are checked against whole networks": {"sglang": {"pp_size": 2}},
    "verified without the memory's subtraction": {"sglang": {"speculative_algorithm": "EAGLE"}},
    "is flashmla, but SGLang's only one on a CPU is torch_native": {"sglang": {"attention_backend": "flashmla"}},
    "did you mean page_size": {"sglang": {"page_sise": 16}},
    "page_size is '16': Expected `int | null`": {"sglang": {"page_size": "16"}},
    "it must be one of": {"device": "cuda", "memory": None, "sglang": {"attention_backend": "fa5"}},
    "which knows no CUDA; `make gpu`": {"device": "cuda"},
    "memory_window works in engines on a CPU only": {"device": "cuda", "memory_window": 8},
    "attention_backend flashmla is not known to serve a memory": {
        "device": "cuda",
        "sglang": {"attention_backend": "flashmla"},
    },
}


@pytest.fixture(scope="module")
def networks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("networks")
    kinds: dict[str, str] = {"model": "policy3", "memory": "memory3"}
    networks: dict[str, PreTrainedModel] = {key: make_model(folder / key, kind) for key, kind in kinds.items()}
    return {key: str(folder / key) for key in networks}


def checked(tmp_path: Path, networks: dict[str, str], **keys: Any) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "engine.json"
    basic = {"host": "127.0.0.1", "port": 1, "api_key": "k", "device": "cpu", "dtype": "float32", "tp": 1}
    path.write_text(json.dumps({**networks, **basic, **keys}))
    command = [str(PYTHON), "-m", "megasharp.rollout.sglang.engine", "--check", str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.parametrize("words", REFUSALS)
def test_check_refuses_in_one_line(tmp_path: Path, networks: dict[str, str], words: str) -> None:
    done = checked(tmp_path, networks, **REFUSALS[words])
    assert done.returncode == 2 and words in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def test_check_passes_a_good_config(tmp_path: Path, networks: dict[str, str]) -> None:
    done = checked(tmp_path, networks, sglang={"page_size": 16, "max_running_requests": 4})
    assert (done.returncode, done.stderr) == (0, "")
