"""An engine that answers by a rule of its seeds, so that every count is known, and a small suite for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import torch

from megasharp.common.formats import Keep
from megasharp.common.records import Completion, FinishReason, GenerateRequest, SamplingParams
from megasharp.evals.evaluate import evaluate
from megasharp.evals.result import EvalSetting
from megasharp.evals.sample_store import SampleStore
from megasharp.evals.stored_samples import SamplesInfo
from megasharp.evals.suites import Suite
from megasharp.tasks.countdown import CountdownAnswer
from megasharp.tasks.judge import TaskItem

TEXTS = ("1+2", "2+1", "2*1", "1+", "1-2")
ANSWER = CountdownAnswer((1, 2), 3)


class CharacterTokenizer:
    stop_token_ids = (0,)

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))

    plain = encode

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(token) for token in tokens if token)


class RuleEngine:
    """Says TEXTS[seed % 5] (greedy: "1+2"), so a sample's text is a function of its seed alone."""

    version = 0

    def __init__(self) -> None:
        self.calls: list[tuple[list[GenerateRequest], SamplingParams]] = []

    def generate(self, requests: Sequence[GenerateRequest], sampling: SamplingParams) -> list[list[Completion]]:
        self.calls.append((list(requests), sampling))
        return [[self.complete(seed, sampling) for seed in request.seeds] for request in requests]

    def complete(self, seed: int, sampling: SamplingParams) -> Completion:
        text = TEXTS[seed % 5] if sampling.temperature else "1+2"
        tokens = torch.tensor([*map(ord, text), 0])
        logp = torch.zeros(len(tokens))
        finish = FinishReason.LENGTH if text == "1+" else FinishReason.STOP
        return Completion(tokens, logp, logp, None, (), finish, seed)


def suite_of(count: int, names: str = "p") -> Suite:
    items = (TaskItem(f"{names}{index}", "countdown", f"{index}:", ANSWER, "test") for index in range(count))
    return Suite("tiny", "countdown", tuple(items))


def run(engine: RuleEngine | None = None, suite: Suite | None = None, **changes):
    """Evaluate; `changes` are fields of the setting or arguments of `evaluate`."""
    suite = suite or suite_of(6)
    names = {each.name for each in fields(EvalSetting)}
    asked = {"suite": suite.name, "label": "", "step": None, "n": 10, "ks": (1, 4, 10), "temperature": 1.0, "seed": 3}
    setting = EvalSetting(**asked | {"max_tokens": 8} | {name: changes.pop(name) for name in names & changes.keys()})
    return evaluate(engine or RuleEngine(), suite, CharacterTokenizer(), setting, **changes)


def store_of(folder: Path, keep: Keep = "texts", **identity: str) -> SampleStore:
    """The store of `run` in a folder."""
    return SampleStore(folder, SamplesInfo("tiny", {}, {"weights": "abc", **identity}, keep))
