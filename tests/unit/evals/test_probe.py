"""The probe's files: the same responses for all, and rows that hold enough of each distribution."""

from __future__ import annotations

import math
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from megasharp.common.errors import UserError
from megasharp.common.records import Completion, FinishReason, SamplingParams
from megasharp.evals.probe import (
    ProbeResponse,
    probe,
    read_responses,
    read_table,
    sample_responses,
    step_file,
    token_schema,
    write_responses,
)
from megasharp.evals.suites import Suite, load_suite
from megasharp.rollout.inprocess.engine import Candidates

RESPONSE = ProbeResponse("dev", "p1", "1 2=\ud8003:", (1, 2), (5, 6))


class Names:
    """Token ids as letters; 6 is half of a surrogate pair."""

    stop_token_ids = (9,)

    def token_texts(self, tokens):
        return ["\ud800" if token == 6 else chr(97 + token) for token in tokens]

    def encode(self, text):
        return tuple(map(ord, text))

    plain = encode

    def decode(self, tokens):
        return "".join(self.token_texts(tokens))


class Reader:
    """A distribution that needs two candidates, then one that needs nine of ten."""

    def candidates(self, prompt, response, n):
        assert (tuple(prompt), tuple(response)) == ((1, 2), (5, 6))
        first = [0.6, 0.35, *[0.01] * 8]
        return Candidates(
            torch.tensor([math.log(0.35), math.log(0.2)]),
            torch.tensor([1, 4]),
            torch.tensor([0.9, 1.6]),
            torch.tensor([[0, 5, 1, 2, 3, 4, 6, 7, 8, 9], [0, 1, 2, 3, 4, 5, 7, 8, 6, 9]]),
            torch.tensor([first, [0.11] * 10]).log(),
        )


class Sampler:
    """Answers with the first character of the prompt."""

    version = 0

    def generate(self, requests, sampling):
        self.asked, self.sampling = requests, sampling
        tokens = [torch.tensor([request.tokens[0]]) for request in requests]
        return [[Completion(t, torch.zeros(1), torch.zeros(1), None, (), FinishReason.STOP, 0)] for t in tokens]


def test_rows_hold_the_mass_and_at_least_eight_ranks(tmp_path: Path) -> None:
    path = probe(Reader(), Names(), [RESPONSE], step_file(tmp_path, 7))
    assert path.name == "step_000007.parquet"
    first, second = pq.read_table(path).to_pylist()
    assert (first["response"], first["position"], first["token"], first["rank"]) == (0, 0, "f", 1)
    assert first["candidates"] == ["a", "f", "b", "c", "d", "e", "?", "h"]
    assert [math.exp(logp) for logp in first["candidate_logp"]] == pytest.approx([0.6, 0.35, *[0.01] * 6])
    assert second["candidates"] == ["a", "b", "c", "d", "e", "f", "h", "i", "?"]
    assert second["entropy"] == pytest.approx(1.6)


def test_responses_are_read_as_written(tmp_path: Path) -> None:
    assert read_responses(tmp_path) == []
    write_responses(tmp_path, [RESPONSE])
    (found,) = read_responses(tmp_path)
    assert (found.prompt_tokens, found.tokens, found.prompt) == (RESPONSE.prompt_tokens, RESPONSE.tokens, "1 2=?3:")


def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    path = step_file(tmp_path, 1)
    path.write_text("no parquet")
    with pytest.raises(UserError, match="megasharp probe"):
        read_table(path, token_schema())


def test_the_same_problems_and_seeds_whatever_the_run() -> None:
    """Evenly chosen; the seed is the problem's own."""
    whole = load_suite("countdown_test")
    suite = Suite("few", whole.task, whole.items[:10])
    engine = Sampler()
    found = sample_responses(engine, suite, Names(), count=4, max_tokens=20)
    assert [one.problem for one in found] == [suite.items[place].id for place in (0, 2, 5, 7)]
    assert len({request.seeds for request in engine.asked}) == 4
    again = Sampler()
    assert len(sample_responses(again, suite, Names(), count=99, max_tokens=20)) == 10
    assert again.asked[0] == engine.asked[0]
    assert engine.sampling == SamplingParams(20, temperature=1.0, stop_token_ids=(9,))
