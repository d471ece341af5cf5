"""Prompts as a model reads them: text as it stands, or messages in the model's own chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from megasharp.data.tasks import TaskItem

Turns = Sequence[tuple[str, str]]


class ChatEncoder(Protocol):
    """The part of a tokenizer that prompts need."""

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of `text`."""
        ...

    def chat(self, turns: Turns) -> str:
        """The text that the model's chat template makes of messages, up to where its answer begins."""
        ...


def prompt_of(item: TaskItem, tokenizer: ChatEncoder) -> str:
    """The text that a model reads. Raises UserError where it takes a chat template, and the tokenizer has none."""
    return tokenizer.chat(item.turns) if item.turns else item.text
