"""Strings that end a response, found while it is sampled."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[Sequence[int]]], Sequence[str]]


class StopStrings:
    """Finds the samples whose text has come to one of some strings.

    A string of so many bytes is in the text of at most as many tokens, whatever the tokenizer. A few more are decoded
    before them, because a decoder may drop a space that begins a text, or need several tokens for a character.
    """

    _CONTEXT = 4

    def __init__(self, strings: Sequence[str], decode: Decode) -> None:
        self._strings = strings
        self._decode = decode
        self._window = self._CONTEXT + max(len(string.encode()) for string in strings)
        self._tails: dict[int, deque[int]] = {}
        self._found: set[int] = set()

    def add(self, samples: Sequence[int], tokens: Sequence[int]) -> list[bool]:
        """Add each sample's next token, -1 for nobody's; return whether its text holds a string now."""
        live = [(sample, token) for sample, token in zip(samples, tokens, strict=True) if sample >= 0]
        for sample, token in live:
            self._tails.setdefault(sample, deque(maxlen=self._window)).append(token)
        texts = self._decode([[*self._tails[sample]] for sample, _ in live])
        held = [any(string in text for string in self._strings) for text in texts]
        self._found |= {sample for (sample, _), is_held in zip(live, held, strict=True) if is_held}
        return [sample in self._found for sample in samples]

    def taken(self, sample: int) -> bool:
        """Drop what is kept of a sample that has ended; return whether its text holds a string."""
        self._tails.pop(sample, None)
        is_held = sample in self._found
        self._found.discard(sample)
        return is_held
