"""Engines against transformers in float32, to 1e-5: with a memory network and without, before and after updates."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import VOCABULARY, Engine, closed_form, errors, make_model, running, tensors_of
from transformers import PreTrainedModel

from megasharp.ops.uniform import seeds_to_int64
from megasharp.rollout.inprocess.sampling import Logits
from megasharp.rollout.inprocess.sampling import draw as draw_inprocess
from megasharp.serving.bucket import checksum, write_bucket
from megasharp.types import SamplingParams

pytestmark = pytest.mark.long

TOLERANCE = 1e-5
TRUNCATED = [{"top_p": 0.7}, {"top_k": 9}, {"top_k": 20, "top_p": 0.6}, {}]


class Pair:
    """An engine with the models it is to match."""

    def __init__(self, engine: Engine, folder: Path, policy: PreTrainedModel, memory: PreTrainedModel | None) -> None:
        self.engine = engine
        self.folder = folder
        self.policy = policy
        self.memory = memory
        self.version = 0

    def check(self, prompts: list[list[int]], sampling: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Generate, and compare every log-prob of every token."""
        answers = self.engine.generate(prompts, sampling)
        for answer, prompt, each in zip(answers, prompts, sampling, strict=True):
            found = errors(answer, prompt, each, self.policy, self.memory)
            assert max(found.values()) <= TOLERANCE, (found, each, len(prompt))
        return answers

    def sent(self) -> list[tuple[str, torch.Tensor]]:
        return tensors_of(self.policy) + ([] if self.memory is None else tensors_of(self.memory, "memory."))

    def push(self, *, flush: bool = True) -> None:
        """Send both models through bucket files, as one new version; `flush` forgets what the old ones cached."""
        self.version += 1
        tensors = self.sent()
        half = len(tensors) // 2
        self.engine.do("/begin_weight_update", {})
        for number, part in enumerate((tensors[:half], tensors[half:], [])):
            path = self.folder / f"bucket-{self.version}-{number}"
            write_bucket(path, self.version, part, checksums=True)
            status, answer = self.engine.load_bucket(path, None if part else self.version)
            assert status == 200 and answer["success"], answer
        self.engine.do("/end_weight_update", {})
        if flush:
            self.engine.flush()

    def assert_checksums(self) -> None:
        want = {name: checksum(tensor) for name, tensor in self.sent()}
        for rank in self.engine.checksums():
            assert rank == want


def prompt_of(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCABULARY), k=length)


def sampling_of(mu: float | None = None, length: int = 20, **fields: Any) -> dict[str, Any]:
    custom = {} if mu is None else {"custom_params": {"mu": mu}}
    return {"temperature": 0.8, "max_new_tokens": length, "ignore_eos": True, **custom, **fields}


def pair(folder: Path, policy: str, memory: str | None, **keys: Any) -> Iterator[Pair]:
    models = [make_model(folder / "policy", policy, seed=1), memory and make_model(folder / "memory", memory, seed=2)]
    with running(folder, folder / "policy", folder / "memory" if memory else None, **keys) as engine:
        yield Pair(engine, folder, *models)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Qwen3 with a Qwen3 memory whose key-value head stands in the pool twice; page size 1, overlapped steps."""
    yield from pair(tmp_path_factory.mktemp("qwen3"), "policy3", "memory3")


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Qwen2 with a Qwen3 memory; pages of 16, prefill in chunks of 64, steps one after the other."""
    flags = {"page_size": 16, "chunked_prefill_size": 64, "disable_overlap_schedule": True}
    yield from pair(tmp_path_factory.mktemp("qwen2"), "policy2", "memory3", sglang=flags)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Qwen3 with a Qwen2 memory over two ranks, seeds honoured."""
    yield from pair(tmp_path_factory.mktemp("tp2"), "policy3", "memory2", tp=2, deterministic=True)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Qwen2 without a memory."""
    yield from pair(tmp_path_factory.mktemp("plain"), "policy2", None)


def check_ragged(pair: Pair) -> None:
    lengths, mus = (3, 33, 7, 150, 1, 90), (0.0, 0.25, 1.0, 0.5, 0.7, None)
    prompts = [prompt_of(length, seed) for seed, length in enumerate(lengths)]
    pair.check(prompts, [sampling_of(mu, 5 + 4 * row) for row, mu in enumerate(mus)])


def test_prefill_and_decode_with_each_requests_own_mu(qwen3: Pair) -> None:
    check_ragged(qwen3)


def test_qwen2_policy_in_pages_chunks_and_single_steps(qwen2: Pair) -> None:
    check_ragged(qwen2)
    qwen2.check([prompt_of(700, 5), prompt_of(10, 6)], [sampling_of(0.6), sampling_of(0.2)])


def test_two_ranks(two_ranks: Pair) -> None:
    check_ragged(two_ranks)


@pytest.mark.parametrize("name", ["qwen3", "qwen2"])
def test_cached_prefixes_are_both_networks(name: str, request: pytest.FixtureRequest) -> None:
    pair: Pair = request.getfixturevalue(name)
    prompt = prompt_of(64, 11)
    [first] = pair.check([prompt], [sampling_of(0.5, 40)])
    longer = [[*prompt, *first["output_ids"], *prompt_of(5, 12)], [*prompt, *prompt_of(9, 13)]]
    answers = pair.check(longer, [sampling_of(0.9), sampling_of(0.1)])
    assert all(answer["meta_info"]["cached_tokens"] >= 60 for answer in answers)


def test_prompts_log_probs_stay_the_policys(qwen3: Pair) -> None:
    prompt = prompt_of(40, 3)
    [answer] = qwen3.engine.generate([prompt], [sampling_of(0.5)], logprob_start_len=0)
    got = torch.tensor([entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]]).double()
    want = closed_form(qwen3.policy, None, prompt, {}).policy
    rows = torch.arange(len(prompt) - len(got) - 1, len(prompt) - 1)
    assert float((got - want[rows, torch.tensor(prompt)[rows + 1]]).abs().max()) <= TOLERANCE


def test_greedy_takes_the_largest_difference(qwen3: Pair) -> None:
    """Alone, and in a batch with requests that sample."""
    greedy = sampling_of(0.6, temperature=0.0)
    for others in ([], [sampling_of(0.3)]):
        prompts = [prompt_of(12, seed) for seed in range(1 + len(others))]
        answer = qwen3.check(prompts, [greedy, *others])[0]
        table = closed_form(qwen3.policy, qwen3.memory, [*prompts[0], *answer["output_ids"]], greedy).sampler
        assert table[11:-1].argmax(-1).tolist() == answer["output_ids"]


def test_truncation_cuts_the_calibrated_distribution(qwen3: Pair) -> None:
    """In one batch, untruncated requests among them."""
    prompts = [prompt_of(10, seed) for seed in range(len(TRUNCATED))]
    qwen3.check(prompts, [sampling_of(0.5, **fields) for fields in TRUNCATED])


def test_guard_bars_what_the_policy_finds_implausible(qwen3: Pair) -> None:
    custom = [{"mu": 0.8, "plausible": 0.2}, {"mu": 0.0, "plausible": 0.5}, {"mu": 0.8}, {"mu": 0.5, "plausible": 1.0}]
    prompts = [prompt_of(10, seed) for seed in range(len(custom))]
    answers = qwen3.check(prompts, [sampling_of(custom_params=each) for each in custom])
    # Only the likeliest token is as likely as itself.
    assert max(abs(value) for value in answers[-1]["meta_info"]["sampler_logprob"]) <= TOLERANCE


def test_empirical_distribution(qwen3: Pair) -> None:
    """Drawn tokens against the closed form by Pearson's chi-square, and far from the policy's own distribution."""
    prompt, sampling, draws = prompt_of(6, 21), sampling_of(0.7, 1, top_p=0.95), 4000
    answers = qwen3.engine.generate([prompt] * draws, [sampling] * draws)
    counts = torch.bincount(
        torch.tensor([answer["output_ids"][0] for answer in answers]), minlength=VOCABULARY
    ).double()
    table = closed_form(qwen3.policy, qwen3.memory, prompt, sampling)
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


def test_plain_engine(plain: Pair) -> None:
    prompts = [prompt_of(length, length) for length in (4, 50, 9, 17)]
    plain.check(prompts, [sampling_of(**fields) for fields in TRUNCATED])
    plain.check(prompts[:1], [sampling_of(temperature=0.0)])
    plain.push()
    plain.assert_checksums()


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "two_ranks"])
def test_updates_of_both_networks(name: str, request: pytest.FixtureRequest) -> None:
    """From bucket files and from a folder; every tensor then has the checksum of what was sent, on every rank."""
    pair: Pair = request.getfixturevalue(name)
    pair.assert_checksums()
    kinds = {"qwen3": ("policy3", "memory3"), "qwen2": ("policy2", "memory3"), "two_ranks": ("policy3", "memory2")}
    pair.policy, pair.memory = (make_model(pair.folder / "next", kind, seed=7) for kind in kinds[name])
    pair.push()
    pair.assert_checksums()
    [answer] = pair.check([prompt_of(20, 1)], [sampling_of(0.5)])
    assert answer["meta_info"]["weight_versions"] == [{"version": str(pair.version), "start": 0, "end": 20}]
    pair.policy, pair.memory = (make_model(pair.folder / "later", kind, seed=8) for kind in kinds[name])
    pair.version += 1
    folder = write_folder(pair)
    body = {"model_path": str(folder), "flush_cache": True, "weight_version": str(pair.version)}
    pair.engine.do("/update_weights_from_disk", body)
    pair.assert_checksums()
    pair.check([prompt_of(20, 2)], [sampling_of(0.5)])


def write_folder(pair: Pair) -> Path:
    """Both networks in one checkpoint."""
    from safetensors.torch import save_file

    folder = pair.folder / f"version-{pair.version}"
    folder.mkdir()
    (folder / "config.json").write_text((pair.folder / "policy" / "config.json").read_text())
    save_file({name: tensor.contiguous() for name, tensor in pair.sent()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_update_while_a_request_is_in_flight(qwen3: Pair, mode: str) -> None:
    """Retracting is exact: old weights before the switch, new ones with a cache of their own after it."""
    prompt, sampling = prompt_of(9, 31), sampling_of(0.5, 300)
    answers: list[dict[str, Any]] = []
    old_policy, old_memory, old_version = qwen3.policy, qwen3.memory, qwen3.version
    thread = threading.Thread(target=lambda: answers.extend(qwen3.engine.generate([prompt], [sampling])))
    thread.start()
    time.sleep(0.4)
    qwen3.engine.do("/pause_generation", {"mode": mode})
    qwen3.policy = make_model(qwen3.folder / "next", "policy3", seed=40 + len(mode))
    qwen3.memory = make_model(qwen3.folder / "next", "memory3", seed=50 + len(mode))
    qwen3.push(flush=mode == "retract")
    qwen3.engine.do("/continue_generation", {"torch_empty_cache": False})
    thread.join(timeout=120)
    [answer] = answers
    first, second = answer["meta_info"]["weight_versions"]
    assert second["version"] == str(qwen3.version) and first["version"] in ("default", str(old_version))
    switch = first["end"]
    assert 0 < switch < 300
    before = errors(answer, prompt, sampling, old_policy, old_memory, end=switch)
    assert max(before.values()) <= TOLERANCE
    after = errors(answer, prompt, sampling, qwen3.policy, qwen3.memory, start=switch)
    if mode == "retract":
        assert answer["meta_info"]["num_retractions"] == 1
        assert max(after.values()) <= TOLERANCE
    else:
        assert answer["meta_info"]["num_retractions"] == 0
        assert max(after.values()) > 1e-2, "the new weights read a cache of the old ones"
    qwen3.engine.flush()


def test_seeds_fix_the_tokens_and_are_the_in_process_engines(two_ranks: Pair) -> None:
    """In any batch; the oracle draws from transformers' logits with the in-process engine's own function."""
    prompt, seeds = prompt_of(8, 41), (5, -3, 2**63 - 1)
    sampling = [sampling_of(0.5, 12, sampling_seed=seed) for seed in seeds]
    together = two_ranks.check([prompt] * 3, sampling)
    alone = [two_ranks.check([prompt, prompt_of(30, 42)], [each, sampling_of(0.1, 3)])[0] for each in sampling]
    assert [a["output_ids"] for a in together] == [a["output_ids"] for a in alone]
    for seed, answer in zip(seeds, together, strict=True):
        assert answer["output_ids"] == drawn_in_process(two_ranks, prompt, seed, 12)


@torch.no_grad()
def drawn_in_process(pair: Pair, prompt: list[int], seed: int, length: int) -> list[int]:
    assert pair.memory is not None
    sampling = SamplingParams(length, temperature=0.8, memory_mu=0.5)
    tokens = list(prompt)
    for position in range(length):
        ids = torch.tensor([tokens])
        logits = Logits(pair.policy(ids).logits[:, -1], pair.memory(ids).logits[:, -1])
        tokens.append(int(draw_inprocess(logits, seeds_to_int64([seed]), position, sampling).tokens_S))
    return tokens[len(prompt) :]


def test_sampling_mistakes_are_answers(qwen3: Pair, plain: Pair) -> None:
    for custom in (
        {"mu": "0.5"},
        {"mu": float("1e400")},
        {"mu": -1},
        {"mu": True},
        {"plausible": 0},
        {"nu": 1},
        {"mu": [1]},
    ):
        body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 2, "custom_params": custom}}
        status, answer = qwen3.engine.call("/generate", body)
        assert status == 400 and "custom_params" in str(answer), (custom, answer)
    body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 2, "custom_params": {"mu": 0.5}}}
    status, answer = plain.engine.call("/generate", body)
    assert status == 400 and "holds none" in str(answer)
    assert qwen3.engine.call("/model_info", key="another key")[0] == 401
    qwen3.check([[1, 2]], [sampling_of(0.5)])


def test_weights_that_do_not_fit_change_nothing(qwen3: Pair) -> None:
    qwen3.push()
    named = dict(qwen3.sent())
    name = "model.layers.1.self_attn.k_proj.weight"
    other = torch.randn_like(named[name])
    bad = {
        "no weight": [("model.layers.9.self_attn.k_proj.weight", other)],
        "shape": [("model.norm.weight", torch.ones(64)), (name, other[:-1].clone())],
        "older": [(name, other)],
        "checksum": [(name, other)],
        "not complete": [],
    }
    qwen3.engine.do("/begin_weight_update", {})
    for word, tensors in bad.items():
        path = qwen3.folder / f"bad-{word}".replace(" ", "-")
        write_bucket(path, qwen3.version - 1 if word == "older" else qwen3.version + 1, tensors, checksums=True)
        if word == "checksum":
            raw = bytearray(path.read_bytes())
            raw[-1] ^= 1
            path.write_bytes(raw)
        status, answer = qwen3.engine.load_bucket(path)
        assert status == 400 and word in answer["message"], (word, answer)
    assert qwen3.engine.load_bucket(qwen3.folder / "absent")[0] == 400
    qwen3.engine.do("/end_weight_update", {})
    qwen3.assert_checksums()
    body = {"model_path": str(qwen3.folder / "policy"), "weight_version": str(qwen3.version - 1)}
    status, answer = qwen3.engine.call("/update_weights_from_disk", body)
    assert status == 400 and "older" in json.dumps(answer)
    qwen3.assert_checksums()
    qwen3.check([prompt_of(5, 51)], [sampling_of(0.5)])
