"""Groups made by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megasharp.common.records import Completion, FinishReason, Group, Outcome, Prompt, Response, Verdict, VersionSpan
from megasharp.tasks.countdown import CountdownAnswer

MakeResponse = Callable[..., Response]
MakeGroup = Callable[..., Group]


@pytest.fixture
def make_response() -> MakeResponse:
    def make(
        outcome: Outcome,
        length: int = 4,
        answer: str | None = None,
        gap: float = 0.0,
        finish: FinishReason = FinishReason.STOP,
        text: str = "1+2",
    ) -> Response:
        policy = -torch.arange(1.0, length + 1.0)
        completion = Completion(
            tokens=torch.zeros(length, dtype=torch.int64),
            sampler_logp=policy + gap,
            policy_logp=policy,
            memory_logp=None,
            version_spans=(VersionSpan(5, 0, length),),
            finish_reason=finish,
            seed=1,
        )
        return Response(completion, text, Verdict(outcome, float(outcome is Outcome.CORRECT), answer))

    return make


@pytest.fixture
def make_group() -> MakeGroup:
    def make(*responses: Response, name: str = "g0", dropped: str | None = None) -> Group:
        prompt = Prompt("p0", "countdown", "1 2=3:", (1, 2), CountdownAnswer((1, 2), 3), "dev.jsonl", 0, 0)
        return Group(name, prompt, responses, policy_version=5, dropped_reason=dropped)

    return make
