"""What the engine tells of the memory's subtraction, and of responses that go on, against float64 written out."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megasharp.rollout.sglang.engine import sampling_math
from megasharp.rollout.sglang.engine.requests import check_request, columns_of
from megasharp.rollout.sglang.engine.sampling_math import (
    Drawn,
    argmax_moved,
    at,
    calibration_kl,
    logp_at,
    subtract_memory,
)

ROWS, VOCABULARY = 50, 30


def request(custom: dict[str, float] | None, prompt: int = 3) -> Any:
    params = SimpleNamespace(custom_params=custom, sampling_seed=None)
    return SimpleNamespace(sampling_params=params, origin_input_ids=[0] * prompt)


@pytest.mark.parametrize("block", [1 << 24, 4 * VOCABULARY])
def test_argmax_and_kl(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling_math, "_BLOCK_ELEMENTS", block)
    generator = torch.Generator().manual_seed(1)
    policy, memory = (2 * torch.randn(ROWS, VOCABULARY, generator=generator) for _ in range(2))
    guards: tuple[dict[str, float], ...] = ({}, {"plausible_min_p": 0.05}, {"plausible_top_k": 6})
    custom = [{"mu": 0.1 * row, **guards[row % 3]} for row in range(ROWS)]
    temperature = torch.linspace(0.4, 1.6, ROWS)
    columns = columns_of([request(each) for each in custom], "cpu")
    calibrated = subtract_memory(policy, memory, columns, temperature[:, None])
    probs = (calibrated / temperature[:, None]).softmax(-1)
    tokens = torch.multinomial(probs, 1, generator=generator)[:, 0]
    drawn = Drawn(tokens, at(probs, tokens).log(), logp_at(policy, tokens, temperature))
    moved, kl = argmax_moved(policy, calibrated), calibration_kl(probs, memory, columns, temperature, drawn)
    assert {0.0, 1.0} == set(moved.tolist())
    for row, each in enumerate(custom):
        p = [math.exp(z / float(temperature[row])) for z in policy[row].tolist()]
        c = [
            math.exp((z - each["mu"] * m) / float(temperature[row]))
            if p[token] >= each.get("plausible_min_p", 0) * max(p)
            and p[token] >= sorted(p)[-int(each.get("plausible_top_k", VOCABULARY))]
            else 0
            for token, (z, m) in enumerate(zip(policy[row].tolist(), memory[row].tolist(), strict=True))
        ]
        want = sum(x / sum(c) * math.log(x / sum(c) / (y / sum(p))) for x, y in zip(c, p, strict=True) if x)
        assert float(kl[row]) == pytest.approx(want, abs=2e-5)
        assert bool(moved[row]) == (c.index(max(c)) != p.index(max(p)))


def test_without_a_mu_nothing_has_changed() -> None:
    generator = torch.Generator().manual_seed(2)
    policy, memory = torch.randn(4, VOCABULARY, generator=generator), torch.randn(4, VOCABULARY, generator=generator)
    columns = columns_of([request(each) for each in (None, {"mu": 0.0}, {"begun": 2}, {"mu": 0.7})], "cpu")
    calibrated = subtract_memory(policy, memory, columns, torch.ones(4, 1))
    assert calibrated[:3].equal(policy[:3]) and not calibrated[3].equal(policy[3])
    # Rounding in the log-probs of a token must not show as a divergence.
    drawn = Drawn(torch.zeros(4, dtype=torch.int64), torch.full((4,), -1.0), torch.full((4,), -1.5))
    kl = calibration_kl(calibrated.softmax(-1), memory, columns, torch.ones(4), drawn)
    assert argmax_moved(policy[:3], calibrated[:3]).tolist() == kl[:3].tolist() == [0.0] * 3
    assert kl[3] > 0


def test_begun_tokens_are_no_prompt() -> None:
    columns = columns_of([request({"begun": 4}, 10), request(None, 10), request({"mu": 0.5, "begun": 0}, 7)], "cpu")
    assert columns.prompt_S.tolist() == [6, 10, 7]


def test_begun_is_a_number_of_tokens() -> None:
    check_request({"begun": 3}, has_memory=False)
    check_request({"begun": 0, "mu": 1e6}, has_memory=True)
    for bad in ({"begun": -1}, {"begun": 1.5}, {"begun": True}, {"begun": 2**31}, {"begun": 2, "mu": 1e7}):
        with pytest.raises(ValueError, match="custom_params"):
            check_request(bad, has_memory=True)
    with pytest.raises(ValueError, match="mu needs a memory network"):
        check_request({"begun": 3, "mu": 0.5}, has_memory=False)
