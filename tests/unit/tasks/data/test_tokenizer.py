"""The shipped tokenizers round-trip, and stop tokens come from where they should."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from random import Random

import pytest
from cases import each_case

from megasharp.common.errors import UserError
from megasharp.tasks.countdown import make_problem, prompt_text
from megasharp.tasks.tokenizer import load_tokenizer

QUICKSTART = Path(__file__).parents[4] / "examples" / "quickstart"
METASPACE = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the shipped tokenizer's folder, without the weights."""
    shutil.copytree(QUICKSTART / "base", tmp_path / "base", ignore=shutil.ignore_patterns("*.safetensors"))
    return tmp_path / "base"


@each_case("model", ["base", "memory"])
def test_shipped_tokenizers_round_trip(model: str) -> None:
    tokenizer = load_tokenizer(QUICKSTART / model)
    rng = Random(0)
    for problem in [make_problem(rng, 4) for _ in range(50)]:
        text = prompt_text(problem.numbers, problem.target) + problem.solution
        tokens = tokenizer.encode(text)
        assert len(tokens) == len(text)
        assert tokenizer.decode(tokens) == text
        assert tokenizer.decode([*tokens, *tokenizer.stop_token_ids, tokenizer.pad_token_id]) == text


def test_shipped_models_share_a_tokenizer_that_fits_them() -> None:
    base, memory = (load_tokenizer(QUICKSTART / model) for model in ("base", "memory"))
    assert base.backend.get_vocab() == memory.backend.get_vocab()
    assert base.stop_token_ids == memory.stop_token_ids == (1,)
    assert base.pad_token_id == 0
    for model in ("base", "memory"):
        config = json.loads((QUICKSTART / model / "config.json").read_text())
        assert config["vocab_size"] == base.vocabulary_size
        assert config["vocab_size"] % 2 == 0
        assert (config["num_key_value_heads"], config["head_dim"]) == (2, 32)
        assert config["num_attention_heads"] % 2 == config["num_hidden_layers"] % 2 == 0
        assert (config["eos_token_id"], config["pad_token_id"]) == (1, 0)
        assert (QUICKSTART / model / "model.safetensors").stat().st_size < 5_000_000


def test_each_tokens_own_text_keeps_spaces_and_names_special_tokens(folder: Path) -> None:
    """Also where the decoder drops the space that begins a text, as Llama 2's and Mistral's do."""
    rules = json.loads((folder / "tokenizer.json").read_text())
    for decoder, space in ((rules["decoder"], " "), (METASPACE, "\u2581")):
        vocabulary = {space if token == " " else token: number for token, number in rules["model"]["vocab"].items()}
        model = {**rules["model"], "vocab": vocabulary}
        written = {**rules, "decoder": decoder, "model": model}
        (folder / "tokenizer.json").write_text(json.dumps(written))
        found = load_tokenizer(folder).token_texts([rules["model"]["vocab"][text] for text in (" ", "5", " ", "7")])
        assert found == [" ", "5", " ", "7"]
        assert load_tokenizer(folder).token_texts([1]) == ["<eos>"]


@each_case(
    ("file", "before", "after"),
    [
        ("generation_config.json", '"eos_token_id": 1', '"eos_token_id": [1, 9]'),
        ("tokenizer.json", '"5"', '"X"'),
        ("tokenizer_config.json", "{", '{"chat_template": "{{ messages }}",'),
    ],
)
def test_its_digest_tells_other_ends_tokens_and_templates(folder: Path, file: str, before: str, after: str) -> None:
    unchanged = load_tokenizer(folder).digest()
    assert unchanged == load_tokenizer(QUICKSTART / "base").digest()
    text = (folder / file).read_text()
    assert before in text
    (folder / file).write_text(text.replace(before, after, 1))
    assert load_tokenizer(folder).digest() != unchanged


def test_halves_of_surrogate_pairs_are_read_as_unknown_text() -> None:
    """JSON can spell them; no Unicode text can hold them."""
    tokenizer = load_tokenizer(QUICKSTART / "base")
    assert tokenizer.encode("3 \udcff5") == tokenizer.encode("3 \ufffd5")
    # The two halves of one character are that character.
    assert tokenizer.encode("\ud83d\ude00") == tokenizer.encode("\U0001f600")


def test_unknown_characters_do_not_raise() -> None:
    tokenizer = load_tokenizer(QUICKSTART / "base")
    tokens = tokenizer.encode("3\n\u0663 ")
    assert len(tokens) == 4
    assert tokenizer.decode(tokens) == "3 "


@each_case(
    ("generation", "expected"),
    [
        ('{"eos_token_id": [5, 3]}', (1, 3, 5)),
        ('{"eos_token_id": 7}', (1, 7)),
        ("{}", (1,)),
        ('{"eos_token_id": null}', (1,)),
        (None, (1,)),
    ],
)
def test_stop_tokens_join_both_sources(folder: Path, generation: str | None, expected: tuple[int, ...]) -> None:
    path = folder / "generation_config.json"
    path.unlink() if generation is None else path.write_text(generation)
    assert load_tokenizer(folder).stop_token_ids == expected


def test_padding_falls_back_to_a_stop_token(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    fields = json.loads(path.read_text())
    del fields["pad_token"]
    path.write_text(json.dumps(fields))
    assert load_tokenizer(folder).pad_token_id == 1


def test_bad_folders(folder: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        load_tokenizer(folder / "missing")
    for content in ("{", "[]", '{"eos_token_id": "x"}', '{"eos_token_id": [-1]}', '{"eos_token_id": true}'):
        (folder / "generation_config.json").write_text(content)
        with pytest.raises(UserError, match=r"generation_config\.json: "):
            load_tokenizer(folder)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="cannot load its tokenizer") as caught:
        load_tokenizer(folder)
    assert "\n" not in str(caught.value)


def test_no_end_token_at_all(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    fields = json.loads(path.read_text())
    del fields["eos_token"]
    path.write_text(json.dumps(fields))
    (folder / "generation_config.json").unlink()
    with pytest.raises(UserError, match="no end token"):
        load_tokenizer(folder)
