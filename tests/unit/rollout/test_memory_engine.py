"""An engine with a memory network: weight loads, what it refuses, and what it says of logits that are not finite."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import each_case
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from megasharp.common.errors import UserError
from megasharp.common.records import Completion, GenerateRequest, Plausible, SamplingParams
from megasharp.rollout.inprocess import InProcessEngine
from tests.unit.rollout.conftest import MakeModel, engine_of, named_weights

CPU = torch.device("cpu")
REQUESTS = [GenerateRequest((3, 7, 1), (0, 1, 2)), GenerateRequest((5,), (3, 4))]
SAMPLING = SamplingParams(8, memory_mu=0.5)
SMALLER = {"hidden_size": 32, "num_hidden_layers": 1}


def tokens(samples: list[list[Completion]]) -> list[list[int]]:
    return [completion.tokens.tolist() for completion in chain(*samples)]


def write_tokenizer(folder: Path, words: str, pad_token: str | None = None) -> None:
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token=words[0]))
    if pad_token:
        tokenizer.add_special_tokens([pad_token])
    tokenizer.save(str(folder / "tokenizer.json"))


def test_nothing_is_served_until_both_networks_are_whole(make_model: MakeModel) -> None:
    (policy, folder), (memory, memory_folder) = make_model(seed=0), make_model(seed=1, **SMALLER)
    engine = InProcessEngine(folder, dtype=torch.float32, device=CPU, memory_folder=memory_folder)
    with pytest.raises(UserError, match=r"missing, among them memory\.model\.embed_tokens\.weight"):
        engine.load_weights(0, policy.named_parameters())
    assert not engine.healthy()
    with pytest.raises(RuntimeError, match="load_weights"):
        engine.generate(REQUESTS, SAMPLING)
    with pytest.raises(UserError, match=r"missing, among them model\.embed_tokens\.weight"):
        engine.load_weights(0, [pair for pair in named_weights(policy, memory) if pair[0].startswith("memory.")])
    assert engine.version == -1
    engine.load_weights(0, named_weights(policy, memory))
    assert engine.healthy()
    expected = engine_of(policy, folder, memory=(memory, memory_folder)).generate(REQUESTS, SAMPLING)
    assert tokens(engine.generate(REQUESTS, SAMPLING)) == tokens(expected)


def test_the_order_of_the_stream_does_not_matter(make_model: MakeModel) -> None:
    policy, memory = make_model(seed=0), make_model(seed=1, **SMALLER)
    engine = engine_of(*policy, memory=memory)
    before = tokens(engine.generate(REQUESTS, SAMPLING))
    engine.load_weights(1, sorted(named_weights(policy[0], memory[0]), key=lambda pair: pair[0][::-1]))
    assert tokens(engine.generate(REQUESTS, SAMPLING)) == before


def test_a_new_memory_changes_what_is_drawn(make_model: MakeModel) -> None:
    (policy, folder), memory = make_model(seed=0), make_model(seed=1, **SMALLER)
    other = make_model(seed=2, **SMALLER)
    engine = engine_of(policy, folder, memory=memory)
    before = tokens(engine.generate(REQUESTS, SAMPLING))
    engine.load_weights(1, named_weights(policy, other[0]))
    after = tokens(engine.generate(REQUESTS, SAMPLING))
    assert after == tokens(engine_of(policy, folder, memory=other).generate(REQUESTS, SAMPLING)) != before


@each_case(
    ("name", "message"),
    [
        ("memory.model.norm.weight", r"memory\.model\.norm\.weight came twice"),
        ("memory.model.extra.weight", r"memory\.model\.extra\.weight is not a weight of this model"),
    ],
)
def test_a_wrong_tensor_of_the_memory_is_named_in_full(make_model: MakeModel, name: str, message: str) -> None:
    policy, memory = make_model(seed=0), make_model(seed=1, **SMALLER)
    engine = engine_of(*policy, memory=memory)
    with pytest.raises(UserError, match=message):
        engine.load_weights(1, [*named_weights(policy[0], memory[0]), (name, torch.ones(32))])
    assert not engine.healthy()


def test_an_engine_without_a_memory_takes_no_memory_weights_and_no_mu(make_model: MakeModel) -> None:
    policy, memory = make_model(seed=0), make_model(seed=1, **SMALLER)
    engine = engine_of(*policy)
    with pytest.raises(UserError, match=r"memory_mu is 0\.5, but the engine holds no memory network"):
        engine.generate(REQUESTS, SAMPLING)
    with pytest.raises(UserError, match=r"memory\.model\.embed_tokens\.weight is not a weight"):
        engine.load_weights(1, named_weights(policy[0], memory[0]))


def test_unequal_vocabularies_name_both_folders(make_model: MakeModel) -> None:
    _, folder = make_model(seed=0)
    _, memory_folder = make_model(seed=1, vocab_size=24)
    with pytest.raises(UserError, match=r"vocab_size 23, the memory network .* 24") as raised:
        InProcessEngine(folder, dtype=torch.float32, device=CPU, memory_folder=memory_folder)
    assert str(folder) in str(raised.value)
    assert str(memory_folder) in str(raised.value)
    assert "\n" not in str(raised.value)


@each_case(
    ("words", "pad_token", "message"),
    [
        ("abcde", None, None),
        ("abdce", None, "token 'c' has id 2 in .* but 3 in "),
        ("abcd", None, "token 'e' has id 4 in .* but None in "),
        ("abcd", "e", None),
    ],
)
def test_tokenizers_are_compared_by_their_ids(
    make_model: MakeModel, words: str, pad_token: str | None, message: str | None
) -> None:
    (_, folder), (_, memory_folder) = make_model(seed=0), make_model(seed=1)
    write_tokenizer(folder, "abcde")
    write_tokenizer(memory_folder, words, pad_token)
    if message is None:
        InProcessEngine(folder, dtype=torch.float32, device=CPU, memory_folder=memory_folder)
        return
    with pytest.raises(UserError, match=message) as raised:
        InProcessEngine(folder, dtype=torch.float32, device=CPU, memory_folder=memory_folder)
    assert str(folder) in str(raised.value)
    assert str(memory_folder) in str(raised.value)


def test_a_broken_tokenizer_is_one_clear_line(make_model: MakeModel) -> None:
    (_, folder), (_, memory_folder) = make_model(seed=0), make_model(seed=1)
    write_tokenizer(folder, "abcde")
    (memory_folder / "tokenizer.json").write_text(json.dumps({"version": "1.0"}))
    with pytest.raises(UserError, match=r"tokenizer\.json: cannot be read"):
        InProcessEngine(folder, dtype=torch.float32, device=CPU, memory_folder=memory_folder)


def test_the_memorys_positions_bound_the_length_too(make_model: MakeModel) -> None:
    engine = engine_of(*make_model(seed=0), memory=make_model(seed=1, max_position_embeddings=20))
    with pytest.raises(UserError, match="exceed the memory network's max_position_embeddings 20"):
        engine.generate([GenerateRequest((1,) * 13, (1,))], SAMPLING)
    assert engine.generate([GenerateRequest((1,) * 12, (1,))], SAMPLING)[0][0].tokens.numel() == 8


@each_case(
    ("change", "message"),
    [
        ({"memory_mu": -0.1}, "memory_mu is -0.1"),
        ({"memory_mu": float("inf")}, "memory_mu is inf"),
        ({"memory_mu": float("nan")}, "memory_mu is nan"),
        ({"plausible": Plausible(min_p=0.0)}, r"plausible.min_p is 0.0; it must be in \(0, 1\]"),
        ({"plausible": Plausible(min_p=1.5)}, "plausible.min_p is 1.5"),
        ({"plausible": Plausible(min_p=float("nan"))}, "plausible.min_p is nan"),
        ({"plausible": Plausible(top_k=0)}, "plausible.top_k is 0; it must be at least 1"),
        ({"plausible": Plausible()}, "plausible must name one of min_p and top_k"),
        ({"plausible": Plausible(min_p=0.5, top_k=2)}, "plausible must name one of min_p and top_k"),
    ],
)
def test_parameters_out_of_range_are_refused(make_model: MakeModel, change: dict[str, Any], message: str) -> None:
    engine = engine_of(*make_model(seed=0), memory=make_model(seed=1, **SMALLER))
    with pytest.raises(UserError, match=message):
        engine.generate(REQUESTS, SamplingParams(8, **change))


def test_a_memory_that_is_not_finite_is_blamed_itself(make_model: MakeModel) -> None:
    policy, memory = make_model(seed=0), make_model(seed=1, **SMALLER)
    torch.nn.init.constant_(memory[0].model.norm.weight, float("nan"))
    engine = engine_of(*policy, memory=memory)
    for mu in (0.0, 0.5):
        with pytest.raises(UserError, match="the memory network's logits are not finite"):
            engine.generate(REQUESTS, SamplingParams(8, memory_mu=mu))


def test_a_mu_that_overflows_is_blamed_itself(make_model: MakeModel) -> None:
    engine = engine_of(*make_model(seed=0), memory=make_model(seed=1, **SMALLER))
    with pytest.raises(UserError, match="lower memory_mu"):
        engine.generate(REQUESTS, SamplingParams(8, memory_mu=1e308))


def test_without_a_mu_the_memory_is_left_out(make_model: MakeModel) -> None:
    policy, memory = make_model(seed=0), make_model(seed=1, **SMALLER)
    engine = engine_of(*policy, memory=memory)
    plain = [c for group in engine_of(*policy).generate(REQUESTS, SamplingParams(8)) for c in group]
    beside = [c for group in engine.generate(REQUESTS, SamplingParams(8)) for c in group]
    assert all(completion.memory_logp is None for completion in beside)
    assert all(torch.equal(a.sampler_logp, b.sampler_logp) for a, b in zip(plain, beside, strict=True))
