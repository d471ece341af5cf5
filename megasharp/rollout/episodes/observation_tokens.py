"""Tokens of what environments say, put behind what the policy said: its tokens are never decoded and encoded again.

A text is encoded as it stands. Messages are written by the model's own chat template, as the piece that it puts between
an answer and the next one. That piece is right only where the template leaves earlier turns as they were: one that
rewrites them (Qwen3's drops the thinking of earlier answers) would have the policy read another conversation than the
one it has sampled, and is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Protocol

from megasharp.common.errors import UserError
from megasharp.tasks.environment import Observation
from megasharp.tasks.tokenizer import ANSWER

Messages = tuple[tuple[str, str], ...]

_THINKING = f"<think>\n2b86d05e\n</think>\n\n{ANSWER}"


class Encoder(Protocol):
    """The methods of a tokenizer that observations need."""

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of `text` as it stands."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of `tokens`, special ones left out."""
        ...

    def chat(self, turns: Messages, tools: str = "") -> str | None:
        """The text that the chat template makes of messages and tools, up to where an answer begins; None without."""
        ...


class ObservationTokens:
    """Encodes observations for one model."""

    def __init__(self, tokenizer: Encoder) -> None:
        self._tokenizer = tokenizer
        self._between = lru_cache(maxsize=1 << 12)(self._written_between)

    def action(self, tokens: Sequence[int]) -> str:
        """Return the text of a turn of the policy."""
        return self._tokenizer.decode(tokens)

    def following(
        self, observation: Observation, last: int, stops: Collection[int] = (), tools: str = ""
    ) -> tuple[int, ...]:
        """Return the tokens of an observation behind the policy's token `last`.

        The end of a turn that the template writes is left out where the policy has said it, or another one of `stops`:
        Llama 3.1 ends a call with <|eom_id|>, where its template has <|eot_id|>. `tools` are those of the prompt.
        Raises UserError where the model's chat template rewrites earlier turns, or cannot write these messages.
        """
        if not observation.messages:
            return self._tokenizer.encode(observation.text)
        tokens = self._between(observation.messages, tools)
        ended = tokens[:1] == (last,) or (last in stops and bool({*tokens[:1]} & {*stops}))
        return tokens[1:] if ended else tokens

    def _written_between(self, messages: Messages, tools: str) -> tuple[int, ...]:
        asked = (("user", "?"),)
        begun = self._tokenizer.chat(asked, tools)
        if begun is None:
            return self._tokenizer.encode("\n\n".join(text for _, text in messages))
        following = ""
        for answer in (_THINKING, ANSWER):
            once = (*asked, ("assistant", answer), *messages)
            written = self._tokenizer.chat(once, tools) or ""
            following = written.removeprefix(begun + answer)
            # A second exchange shows what is numbered, or forgotten later.
            twice = self._tokenizer.chat((*once, ("assistant", answer), *messages), tools)
            if following == written or twice != written + answer + following:
                raise UserError(
                    "the model's chat template rewrites earlier turns of a conversation, so that the policy would read "
                    "another one than it has sampled; take a tokenizer whose template keeps them (its chat_template "
                    "may be edited), or an environment that answers with texts"
                )
        return self._tokenizer.encode(following)
