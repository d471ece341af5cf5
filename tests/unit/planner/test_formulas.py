"""The planner's formulas: published figures, closed forms, and the head measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import each_case
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megasharp.config.policy import LoraConfig
from megasharp.convert.architecture import Architecture
from megasharp.convert.hf_folder import read_config
from megasharp.convert.lora import trained_parameters
from megasharp.ops.chunked_head import CHUNK_TOKENS, chunked_token_head
from megasharp.ops.head import VocabShard, token_head
from megasharp.planner import formulas
from megasharp.planner.formulas import KvCache, Lengths

MODELS = Path(__file__).parents[3] / "configs" / "model"
# As their authors publish them; a tied head counts once.
PUBLISHED = {
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-7b-instruct": 7_615_616_512,
    "qwen2.5-3b-instruct": 3_085_938_688,
    "qwen2.5-math-7b": 7_615_616_512,
    "qwen3-32b": 32_762_123_264,
    "qwen3-14b": 14_768_307_200,
    "qwen3-14b-base": 14_768_307_200,
    "qwen3-8b": 8_190_735_360,
    "qwen3-4b": 4_022_468_096,
    "qwen3-1.7b": 1_720_574_976,
    "qwen2.5-math-1.5b": 1_543_714_304,
    "qwen2.5-0.5b": 494_032_768,
    "deepseek-r1-distill-qwen-1.5b": 1_777_088_000,
    "deepseek-r1-distill-qwen-7b": 7_615_616_512,
    "llama-3.2-3b-instruct": 3_212_749_824,
    "llama-3.1-8b-instruct": 8_030_261_248,
    "ministral-8b-instruct-2410": 8_019_808_256,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-30b-a3b-base": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "mixtral-8x7b-v0.1": 46_702_792_704,
    "olmo-2-0425-1b": 1_484_916_736,
    "olmo-2-1124-7b": 7_298_617_344,
    "olmo-2-1124-13b": 13_716_198_400,
    "olmo-2-0325-32b": 32_234_279_936,
}
# Billions in all and of a token's path, as model cards round them.
CARDS = {
    "qwen3-30b-a3b": (30.5, 3.3),
    "qwen3-235b-a22b": (235, 22),
    "mixtral-8x7b-v0.1": (46.7, 12.9),
}


def model(name: str) -> Architecture:
    return read_config(MODELS / name)[2]


def test_shipped_configs_have_the_published_parameters() -> None:
    shipped = {folder.parent.name for folder in MODELS.glob("*/config.json")}
    assert {name: model(name).parameter_count() for name in shipped} == PUBLISHED


@each_case("name", CARDS)
def test_mixtures_have_the_published_parameters_in_all_and_active(name: str) -> None:
    arch, (whole, active) = model(name), CARDS[name]
    assert arch.parameter_count() / 1e9 == pytest.approx(whole, rel=2e-3)
    assert arch.active_parameter_count() / 1e9 == pytest.approx(active, rel=0.02)


@each_case(("shards", "expected"), [(1, 18.0), (2, 12.0), (4, 9.0), (8, 7.5)])
def test_static_bytes_of_a_parameter_are_those_of_megatrons_guide(shards: int, expected: float) -> None:
    count = 1_000_000
    found = 2 * count + formulas.gradient_bytes(count) + formulas.optimizer_bytes(count, 2, shards)
    assert found / count == expected


def test_float32_keeps_no_second_copy_of_the_weights_but_in_checkpoints() -> None:
    """The measured one is of 596,864 parameters: the quickstart's, `policy/` alone."""
    assert formulas.optimizer_bytes(10, 4, 1) == 80
    assert formulas.checkpoint_bytes(10, 10, 4) == 160
    assert formulas.checkpoint_bytes(596_864, 596_864, 4) == pytest.approx(9_816_012, rel=0.03)
    assert formulas.checkpoint_bytes(32_760_000_000, 32_760_000_000, 2) == pytest.approx(459e9, rel=1e-3)


def test_adapters_of_all_ranks_are_those_of_the_model() -> None:
    """Halves that are the same on every rank are counted once in the whole."""
    arch, lora = model("qwen3-8b"), LoraConfig(rank=16, alpha=32.0, targets=["qkv", "proj", "fc1", "fc2"])
    assert arch.num_layers * formulas.adapter_parameters(arch, lora, 1) == trained_parameters(lora, arch)
    whole_a = 3 * 16 * arch.hidden + 2 * 16 * arch.hidden
    whole_b = 2 * 16 * arch.hidden
    one, four = formulas.adapter_parameters(arch, lora, 1), formulas.adapter_parameters(arch, lora, 4)
    assert 4 * four - 3 * (whole_a + whole_b) == one


def test_key_values_of_qwen3_32b_take_256_kib_a_token() -> None:
    assert formulas.kv_bytes_per_token(model("qwen3-32b"), 1, 2) == 256 * 1024
    assert formulas.kv_bytes_per_token(model("qwen3-32b"), 8, 2) == 32 * 1024
    assert formulas.kv_bytes_per_token(model("qwen3-32b"), 16, 2) == 32 * 1024


def test_flops_of_qwen3_32b_are_six_per_weight_and_the_causal_attention() -> None:
    """192 GF and 13 GF at 4,096 tokens, whose mean context is half."""
    arch = model("qwen3-32b")
    assert 3 * formulas.forward_flops_per_token(arch, 0.0) == pytest.approx(192e9, rel=0.01)
    attention = formulas.forward_flops_per_token(arch, 2048.0) - formulas.forward_flops_per_token(arch, 0.0)
    assert 3 * attention == pytest.approx(13e9, rel=0.02)
    assert formulas.recompute_share(arch, 2048.0, "selective", ["core_attn"]) == pytest.approx(13 / 205, rel=0.03)


def test_a_tied_embedding_is_multiplied_as_the_head() -> None:
    arch = model("qwen3-1.7b")
    assert formulas.forward_flops_per_token(arch, 0.0) == 2 * arch.parameter_count()


@each_case("windows", [(), (64, None, 64, 16)])
def test_batching_counts_the_same_flops_with_every_rows_own_context(windows: tuple[int | None, ...]) -> None:
    arch = replace(model("qwen3-1.7b"), num_layers=4, windows=windows)
    before, rows = 50, 40
    seen = [[min(before + j, arch.window(layer) or before + j) for layer in range(4)] for j in range(1, rows + 1)]
    expected = sum(formulas.forward_flops_per_token(arch, sum(layers) / 4) for layers in seen)
    found = formulas.packing_flops(arch, False).of_runs(torch.tensor([before]), torch.tensor([rows]))
    assert float(found) == pytest.approx(expected, rel=1e-12)


@each_case("window", [1, 7, 40, 100])
def test_batching_counts_what_a_response_window_leaves(window: int) -> None:
    arch = model("qwen3-1.7b")
    flops, plain = (formulas.packing_flops(arch, False, each) for each in (window, None))
    before, rows = torch.tensor([50, 0]), torch.tensor([40, 40])
    seen = sum(50 + min(j, window) for j in range(1, 41))
    expected = 40 * formulas.forward_flops_per_token(arch, seen / 40)
    # A prompt sees all of itself.
    assert flops.of_runs(before, rows).tolist() == pytest.approx([expected, float(plain.of_runs(before, rows)[1])])


def test_batching_counts_the_chunked_heads_logits_by_response_token() -> None:
    """Of rows the layers alone; of tokens four products of the output layer in place of three, a third of them each."""
    arch = model("qwen3-1.7b")
    whole, chunked = formulas.packing_flops(arch, False), formulas.packing_flops(arch, True)
    assert whole.per_token == 0.0 and whole.attention == chunked.attention
    assert 3 * (whole.per_row - chunked.per_row) == 3 * 2 * arch.vocab * arch.hidden
    assert 3 * chunked.per_token == pytest.approx(4 * 2 * arch.vocab * arch.hidden)


def test_bubble_and_micro_batches_in_flight_follow_1f1b() -> None:
    assert formulas.bubble_share(1, 1, 5) == 0.0
    assert formulas.bubble_share(4, 1, 9) == 3 / 12
    assert formulas.bubble_share(4, 3, 3) == 3 / 12
    assert [formulas.in_flight(stage, 4, 1, 100) for stage in range(4)] == [4, 3, 2, 1]
    assert [formulas.in_flight(stage, 4, 1, 2) for stage in range(4)] == [2, 2, 2, 1]
    # Interleaved, Korthikanti et al. have 1 + (pp - 1) / (pp vpp) of the whole model on the first stage.
    assert formulas.in_flight(0, 4, 2, 100) == (2 * 3 + 4 + 1) / 2
    assert formulas.in_flight(0, 4, 2, 100) / 4 == pytest.approx(1 + 3 / 8)


@each_case("mean", [500.0, 250.0, 1000.0])
def test_lengths_have_their_mean_and_mean_context(mean: float) -> None:
    """By numerical integration of the share of responses that are longer."""
    lengths = Lengths(100.0, 200, mean, 1000)
    shares = [lengths.longer_than(n + 0.5) for n in range(1000)]
    assert sum(shares) == pytest.approx(mean, rel=2e-3)
    context = sum((100.0 + n + 0.5) * share for n, share in enumerate(shares)) / sum(shares)
    assert lengths.context == pytest.approx(context, rel=2e-3)
    assert lengths.longer_than(1000) == 0.0


@each_case("mean", [500.0, 250.0, 1000.0])
@each_case("window", [50, 100, 300, 1099, 1100, 5000])
def test_a_token_attends_to_no_more_than_its_window(mean: float, window: int) -> None:
    """By numerical integration; a window of the longest sequence is none."""
    lengths = Lengths(100.0, 200, mean, 1000)
    shares = [lengths.longer_than(n + 0.5) for n in range(1000)]
    context = sum(min(100.0 + n + 0.5, window) * share for n, share in enumerate(shares)) / mean
    assert lengths.context_within(window) == pytest.approx(context, rel=2e-3)
    assert lengths.context_within(None) == lengths.context
    if window >= 1100:
        assert lengths.context_within(window) == pytest.approx(lengths.context, rel=1e-12)


def test_only_layers_with_a_window_attend_to_less() -> None:
    lengths = Lengths(100.0, 200, 500.0, 1000)
    arch = replace(model("qwen3-1.7b"), windows=(None,) * 21 + (200,) * 7)
    expected = 0.75 * lengths.context + 0.25 * lengths.context_within(200)
    assert formulas.mean_context(arch, lengths) == pytest.approx(expected)
    assert formulas.mean_context(model("qwen3-1.7b"), lengths) == pytest.approx(lengths.context)


# 1,000 bytes of weights and 2 for a token's cache at 10 bytes a second; 0.25 s of computing a token, 0.5 s a step.
ENGINE = formulas.Decoding(weights=1000.0, caches=(KvCache(2),), bandwidth=10.0, token=0.25, step=0.5)


def test_decoding_equal_lengths_reads_weights_and_a_growing_cache_each_step() -> None:
    """All responses of 100 tokens: 100 steps, caches of 10 + n + 1/2 tokens."""
    lengths = Lengths(10.0, 10, 100.0, 100)
    seconds = formulas.decode_seconds(4.0, 4.0, lengths, ENGINE)
    read = (100 * 1000.0 + 4 * 2.0 * (100 * 10 + 100**2 / 2)) / 10.0
    assert seconds == pytest.approx(read + 4 * 100 * 0.25 + 100 * 0.5)


def test_decoding_in_waves_costs_what_its_tokens_cost_in_a_full_batch() -> None:
    lengths = Lengths(0.0, 0, 100.0, 100)

    def decode(requests: float) -> float:
        return formulas.decode_seconds(requests, 4.0, lengths, ENGINE)

    assert decode(12.0) - decode(8.0) == pytest.approx(decode(4.0))


@each_case(("requests", "group"), [(4.0, 1), (4.0, 8), (12.0, 4)])
def test_groups_end_with_their_longest_response(requests: float, group: int) -> None:
    """Lengths spread evenly: a share (n / 100)^group of the groups has nothing longer than n."""
    lengths = Lengths(0.0, 0, 50.0, 100)
    course = formulas.decode_course(requests, 4.0, lengths, ENGINE, group)
    assert (
        course[0] == (0.0, 0.0) and course == sorted(course) and [s for _, s in course] == sorted(s for _, s in course)
    )
    assert course[-1] == (formulas.decode_seconds(requests, 4.0, lengths, ENGINE), 1.0)
    if requests == 4.0:
        # 256 positions and the start.
        assert course[129][1] == pytest.approx(0.5**group)
    else:
        # Those that begin at once are a third, and have been decoded for 100 steps, the length of the full batch.
        (at,) = [share for seconds, share in course if seconds == pytest.approx(course[16][0])]
        later = sum(((100 * (i + 0.5) / 16) / 100) ** group for i in range(16)) / 16
        assert at == pytest.approx(1 / 3 + 2 / 3 * later)


def test_work_that_comes_early_is_done_and_work_that_comes_last_is_left() -> None:
    early, late = [(0.0, 0.0), (0.0, 1.0), (100.0, 1.0)], [(0.0, 0.0), (99.0, 0.0), (100.0, 1.0)]
    assert [formulas.left_over(early, work, 4) for work in (30.0, 130.0)] == [0.0, 30.0]
    assert formulas.left_over(late, 30.0, 4) == 30.0
    # Half is there after 80 s, the rest at the end: of 60 s of work 20 are done by then, and none of a single part.
    half = [(0.0, 0.0), (80.0, 0.5), (100.0, 1.0)]
    assert [formulas.left_over(half, 60.0, parts) for parts in (1_000, 2, 1)] == pytest.approx([40.0, 40.0, 60.0])


class _Peak(TorchDispatchMode):
    """The most bytes of all results alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._live = {key: value for key, value in self._live.items() if not value[0].expired()}
        self.most = max(self.most, sum(size for _, size in self._live.values()))
        return result


@each_case("dtype", [torch.bfloat16, torch.float32])
@each_case(("entropy", "gradient"), [(False, False), (True, False), (True, True)])
def test_the_head_holds_as_much_at_once_as_the_formula_says(dtype: torch.dtype, entropy: bool, gradient: bool) -> None:
    """The learner's way: logits of all rows, then those that predict, then `token_head`, then backward."""
    tokens, vocab = 256, 4096
    hidden = torch.randn(tokens, 8, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, 8, dtype=dtype, requires_grad=True)

    def loss() -> torch.Tensor:
        logits = hidden @ weight.T
        rows = logits.index_select(0, torch.arange(tokens))
        target = torch.zeros(tokens, dtype=torch.int64)
        head = token_head(rows, target, VocabShard(0, vocab, None), entropy=entropy, entropy_gradient=gradient, topn=3)
        return head.logp_T.sum() + (head.entropy_T.sum() if gradient and head.entropy_T is not None else 0.0)

    with _Peak() as peak:
        loss().backward()  # type: ignore[no-untyped-call]
    planned = formulas.logits_bytes(tokens, vocab, dtype.itemsize, entropy, kernels=False)
    assert 1.0 <= peak.most / planned < 1.02


@each_case("dtype", [torch.bfloat16, torch.float32])
@each_case("vocab", [1024, 4096])
def test_the_chunked_head_holds_as_much_at_once_as_the_formula_says(dtype: torch.dtype, vocab: int) -> None:
    """Once the chunk's logits are the most, once the weight's gradient; hidden states are copied as a learner does."""
    tokens, hidden = 2 * CHUNK_TOKENS + 100, 256
    given = torch.randn(tokens, hidden, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, hidden, dtype=dtype, requires_grad=True)
    buffer, target = torch.zeros(vocab, hidden), torch.zeros(tokens, dtype=torch.int64)
    with _Peak() as peak:
        rows = given.index_select(0, torch.arange(tokens))
        shard = VocabShard(0, vocab, None)
        head = chunked_token_head(rows, weight, target, shard, entropy=True, topn=3, weight_grad_VpH=buffer)
        head.logp_T.sum().backward()  # type: ignore[no-untyped-call]
    planned = formulas.chunked_logits_bytes(tokens, vocab, hidden, dtype.itemsize, entropy=True, kernels=False)
    assert 0.9 < peak.most / planned < 1.1, peak.most / planned


def test_a_window_bounds_the_cache_of_a_response() -> None:
    """The mean over all moments of decoding, of evenly spread lengths, summed token by token."""
    lengths = Lengths(prompt=10, prompt_longest=20, response=50, response_longest=100)
    for window in (1, 30, 100, 500):
        moments = [(10 + min(t + 0.5, window), 1 - (t + 0.5) / 100) for t in range(100)]
        mean = sum(size * live for size, live in moments) / sum(live for _, live in moments)
        cache = KvCache(4, window)
        assert cache.mean_bytes(lengths) == pytest.approx(4 * mean, rel=1e-3)
        assert cache.bytes_at(10, 60) == 4 * (10 + min(60, window))
    assert KvCache(4, 100).mean_bytes(lengths) == pytest.approx(KvCache(4).mean_bytes(lengths), rel=1e-12)
