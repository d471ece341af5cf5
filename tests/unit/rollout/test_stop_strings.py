"""Responses that end with a string: the same tokens as without it, up to the one by which their text holds it."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest
from cases import each_case

from megasharp.common.records import FinishReason, GenerateRequest, SamplingParams
from tests.unit.rollout.conftest import MakeModel, engine_of

# Pieces that meet within a string, hold more than it, or are no text by themselves; number 2 ends a response.
PIECES = ["a", "b", "</s>", "ab", "ba", "\n", "\n\n", "Q:", "Q", ":", "\nQ", " ", "bab", "é", "aa", "::", "A", "B"]
PIECES += [f"<{number}>" for number in range(5)]


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    rules = Tokenizer(models.WordLevel({piece: number for number, piece in enumerate(PIECES)}, unk_token="a"))
    rules.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=rules, eos_token="</s>").save_pretrained(folder)


@each_case("stop", [("bb",), ("\nQ", "aa"), ("é",)])
def test_a_response_ends_where_its_text_first_holds_a_string(make_model: MakeModel, stop: tuple[str, ...]) -> None:
    """Against prefixes of the whole response, decoded one by one; log-probs and what follows in a row stay the same."""
    model, folder = make_model()
    write_tokenizer(folder)
    requests = [GenerateRequest(prompt, tuple(range(10 * prompt[0], 10 * prompt[0] + 6))) for prompt in ((3, 7), (5,))]
    engine = engine_of(model, folder, max_batch=5)
    whole = chain(*engine.generate(requests, SamplingParams(40, stop_token_ids=(2,))))
    sampling = SamplingParams(40, stop_token_ids=(2,), stop=stop)
    found = chain(*engine.generate(requests, sampling))
    ended = 0
    for before, after in zip(whole, found, strict=True):
        tokens = before.tokens.tolist()
        texts = ["".join(PIECES[token] for token in tokens[:end] if token != 2) for end in range(1, len(tokens) + 1)]
        end = next((end for end, text in enumerate(texts, 1) if any(each in text for each in stop)), None)
        assert after.tokens.tolist() == tokens[:end]
        assert after.policy_logp.tolist() == pytest.approx(before.policy_logp[:end].tolist(), abs=1e-5)
        assert after.finish_reason is (FinishReason.STOP if end is not None else before.finish_reason)
        if end is not None:
            ended += 1
            text = sampling.text(texts[end - 1])
            assert texts[end - 1].startswith(text) and not any(each in text for each in stop)
    assert ended >= 3


def test_the_earliest_of_several_strings_ends_the_text() -> None:
    assert SamplingParams(9, stop=("Q:", "\n")).text("5\n\nQ: 6") == "5"
    assert SamplingParams(9, stop=("Q:",)).text("five") == "five"
