"""One problem before tokenization, as every task's file makes it, and the digest of many."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from megasharp.common.records import TaskAnswer


@dataclass(frozen=True, slots=True)
class TaskItem:
    """One problem before tokenization.

    `turns` are messages, each a role and a text, that the model's own chat template makes the prompt of
    (`tasks/stream.py`); where there are none, the prompt is `text` as it stands. `question` is what is asked, without
    what a prompt adds; empty where a prompt adds nothing.

    Example: `TaskItem("countdown-train-00017", "countdown", "3 5 7 8=24:", CountdownAnswer((3, 5, 7, 8), 24),
    "train.jsonl")`.
    """

    id: str
    task: str
    text: str
    answer: TaskAnswer
    source: str
    turns: tuple[tuple[str, str], ...] = ()
    question: str = ""


def digest_of(items: Sequence[TaskItem]) -> str:
    """SHA-256 of problems in their order: ids, texts and answers."""
    digest = hashlib.sha256()
    for item in items:
        digest.update(repr((item.id, item.text, item.answer, *item.turns)).encode())
    return digest.hexdigest()
