"""Samples by a rule of their place, for tests of what is stored."""

from __future__ import annotations

import random
from dataclasses import replace
from string import ascii_lowercase

from megasharp.common.records import FinishReason, Outcome
from megasharp.evals.stored_samples import StoredSample


def sample(number: int, index: int, greedy: bool = False, length: int = 20) -> StoredSample:
    """Every third is right; its text has `length` characters that hardly compress."""
    kind = number * 1000 + index * 2 + greedy
    text = "".join(random.Random(kind).choices(ascii_lowercase, k=length))
    right = kind % 3 == 0
    one = StoredSample(
        problem=f"p{number}",
        number=number,
        index=index,
        greedy=greedy,
        seed=2**62 + kind,
        text=text,
        token_ids=[kind, 5, 1],
        finish=FinishReason.STOP if right else FinishReason.LENGTH,
        outcome=Outcome.CORRECT if right else Outcome.WRONG,
        reward=float(right),
        answer=f"{kind % 7}" if kind % 5 else None,
        detail="" if right else "another value",
        tokens=3,
        entropy=kind / 7.0,
        entropy_sampled=kind / 3.0,
        lambdas=(-0.1 * kind, -1.0),
        lambda_sample=-kind / 9.0,
        sampled_s=1.5,
        judged_s=0.25,
    )
    return one if kind % 2 else replace(one, entropy=None)
