"""Whatever bytes a policy of a byte-level vocabulary samples, its response gets a verdict that is not an error."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megasharp.common.records import Completion, FinishReason, Outcome, Prompt, Response, SamplingParams, VersionSpan
from megasharp.rollout.step_request import GroupMaker
from megasharp.tasks.countdown import CountdownAnswer
from megasharp.tasks.judge import DirectJudge
from megasharp.tasks.table import make_verifiers
from megasharp.tasks.tokenizer import TextTokenizer

PROMPT = Prompt("a", "countdown", "1 2=3:", (0,), CountdownAnswer((1, 2), 3), "train.jsonl", 0, 0)


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    """Token n is one of the 256 bytes, and none is a stop token."""
    signs = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({sign: number for number, sign in enumerate(signs)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return TextTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend), (), 0, len(signs), None, frozenset())


def verified(tokenizer: TextTokenizer, tokens: tuple[int, ...]) -> Response:
    zeros = torch.zeros(len(tokens))
    spans = (VersionSpan(0, 0, len(tokens)),)
    completion = Completion(torch.tensor(tokens), zeros, zeros, None, spans, FinishReason.STOP, 0)
    maker = GroupMaker(DirectJudge(make_verifiers()), tokenizer.decode_batch, SamplingParams(9), 1, 0)
    return maker.groups(["g"], [PROMPT], [[completion]], 0)[0].responses[0]


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("1+2", Outcome.CORRECT),
        ("1+2\U0001f600", Outcome.FORMAT),
        ("1\u00b2+2", Outcome.FORMAT),
        ("\u0663", Outcome.FORMAT),
    ],
)
def test_text_beyond_ascii(tokenizer: TextTokenizer, text: str, outcome: Outcome) -> None:
    response = verified(tokenizer, tokenizer.encode(text))
    assert (response.text, response.verdict.outcome) == (text, outcome), response.verdict.detail


def test_broken_bytes(tokenizer: TextTokenizer) -> None:
    """Half an emoji, and bytes that start no character."""
    whole, half = tokenizer.encode("1+2"), tokenizer.encode("\U0001f600")[:2]
    for tokens in ((*whole, *half), (*half, *whole), half[1:] * 3):
        response = verified(tokenizer, tokens)
        assert "\ufffd" in response.text
        assert response.verdict.outcome is Outcome.FORMAT, response.verdict.detail
