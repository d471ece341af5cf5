"""Problems as prompts: a model's text of each, a seeded sample, and the endless stream of training prompts.

A prompt is a problem's messages in the model's own chat template, or their text alone where the model has none; a
problem without messages is its text as it stands. Evaluations may take a
sample, as 2510.04028 takes 128 questions of ARC-c (appendix C.2). The stream is shuffled again in each epoch and can be
restored to the exact prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Protocol

from megasharp.common.errors import UserError
from megasharp.common.records import Prompt
from megasharp.tasks.judge import TaskItem, digest_of

Turns = Sequence[tuple[str, str]]


class ChatEncoder(Protocol):
    """The methods of a tokenizer that prompts need."""

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of `text` as it stands."""
        ...

    def plain(self, text: str) -> tuple[int, ...]:
        """Token ids of a text that no chat template has written."""
        ...

    def chat(self, turns: Turns) -> str | None:
        """The text that the model's chat template makes of messages, up to where its answer begins; None without."""
        ...


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """A prompt as the model reads it. A token by which its tokenizer begins a plain text is not part of `text`."""

    text: str
    tokens: tuple[int, ...]


def read_prompt(item: TaskItem, tokenizer: ChatEncoder) -> ReadPrompt:
    """Return a problem as the model reads it. Raises UserError where its chat template cannot write the messages."""
    written = tokenizer.chat(item.turns) if item.turns else None
    if written is not None:
        return ReadPrompt(written, tokenizer.encode(written))
    text = "\n\n".join(text for _, text in item.turns) if item.turns else item.text
    return ReadPrompt(text, tokenizer.plain(text))


def sampled(items: Sequence[TaskItem], limit: int | None, seed: int) -> list[TaskItem]:
    """`limit` problems without repetition, in their own order; all of them where no limit is given.

    The choice depends on the number of problems, `limit` and `seed` alone, and a larger limit holds the smaller one's
    problems. Raises UserError where there are fewer problems than that.
    """
    if limit is None:
        return list(items)
    if not 1 <= limit <= len(items):
        raise UserError(f"limit: {limit} of {len(items)} problems of {items[0].source} cannot be drawn; lower it")
    order = list(range(len(items)))
    # Seeding with text is stable between processes and Python versions.
    Random(f"sample-{seed}").shuffle(order)
    return [items[index] for index in sorted(order[:limit])]


@dataclass(frozen=True, slots=True)
class DataCursor:
    """The next prompt to hand out: number `position` of the shuffled epoch `epoch`, both from 0.

    Example: after 130 prompts from a stream of 128, `DataCursor(epoch=1, position=2)`.
    """

    epoch: int
    position: int


@dataclass(frozen=True, slots=True)
class TokenizedPrompts:
    """The prompts of a training set as the model reads them, in the set's own order; nothing here ever changes.

    Items whose prompt is empty or too long are left out. `lengths` are the tokens of all, those included, in the set's
    order; `digest` is the SHA-256 of all items.
    """

    prompts: tuple[tuple[TaskItem, tuple[int, ...]], ...]
    lengths: tuple[int, ...]
    digest: str

    def __len__(self) -> int:
        """Prompts that are left, which is one epoch."""
        return len(self.prompts)

    def within(self, max_prompt_tokens: int) -> TokenizedPrompts:
        """Return those that are neither empty nor longer than this. Raises UserError if none is left."""
        kept = tuple((item, tokens) for item, tokens in self.prompts if 0 < len(tokens) <= max_prompt_tokens)
        if not kept:
            source, shortest = self.prompts[0][0].source, min(self.lengths)
            raise UserError(
                f"data.max_prompt_tokens: all {len(self.lengths)} prompts of {source} are longer than "
                f"{max_prompt_tokens} tokens; the shortest has {shortest}, so set it to at least that"
            )
        return replace(self, prompts=kept)

    @property
    def skipped(self) -> int:
        """Prompts that are left out."""
        return len(self.lengths) - len(self.prompts)


def tokenize_prompts(
    items: Sequence[TaskItem], tokenizer: ChatEncoder, max_prompt_tokens: int | None = None
) -> TokenizedPrompts:
    """Tokenize all items, and leave out those longer than `max_prompt_tokens`. Raises UserError if none is left."""
    if not items:
        raise UserError("data.path: the data file holds no problems")
    read = [read_prompt(item, tokenizer) for item in items]
    encoded = [(replace(item, text=each.text), each.tokens) for item, each in zip(items, read, strict=True)]
    # The file may be edited between two attempts of a run, so the digest is of what was read, before the template.
    whole = TokenizedPrompts(tuple(encoded), tuple(len(tokens) for _, tokens in encoded), digest_of(items))
    return whole if max_prompt_tokens is None else whole.within(max_prompt_tokens)


class PromptStream:
    """Prompts in an order that depends on the items, the seed and the epoch alone, and never ends.

    Every epoch hands out every prompt once.
    """

    def __init__(self, prompts: TokenizedPrompts, seed: int) -> None:
        self._items = prompts.prompts
        self._seed = seed
        self._pending: list[DataCursor] = []
        self._cursor = DataCursor(0, 0)
        self._order = self._shuffled(0)
        self._pending_order: tuple[int, list[int]] | None = None

    def __len__(self) -> int:
        """Prompts per epoch."""
        return len(self._items)

    @property
    def cursor(self) -> DataCursor:
        """The place of the next prompt; `restore` of it continues with the same prompts."""
        return self._cursor

    @property
    def pending(self) -> tuple[DataCursor, ...]:
        """Prompts before the cursor that were given to `restore` and not handed out since."""
        return tuple(self._pending)

    def restore(self, cursor: DataCursor, pending: Sequence[DataCursor] = ()) -> None:
        """Go to `cursor`, but hand out the `pending` prompts first.

        Raises UserError if the data has no such prompt, so the file must be another.
        """
        for place in (cursor, *pending):
            if not 0 <= place.position < len(self) or place.epoch < 0:
                raise UserError(
                    f"data.path: cannot resume at prompt {place.position} of epoch {place.epoch}, the file has "
                    f"{len(self)} usable prompts; resume with the data file the run began with"
                )
        self._pending = list(pending)
        self._cursor = cursor
        self._order = self._shuffled(cursor.epoch)

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts, across as many epochs as it takes."""
        return [self._next() for _ in range(count)]

    def _next(self) -> Prompt:
        if self._pending:
            place = self._pending.pop(0)
            return self._prompt(place, self._order_of(place.epoch))
        prompt = self._prompt(self._cursor, self._order)
        epoch, position = self._cursor.epoch, self._cursor.position + 1
        if position == len(self):
            epoch, position = epoch + 1, 0
            self._order = self._shuffled(epoch)
        self._cursor = DataCursor(epoch, position)
        return prompt

    def _prompt(self, place: DataCursor, order: Sequence[int]) -> Prompt:
        item, tokens = self._items[order[place.position]]
        return Prompt(
            item.id,
            item.task,
            item.text,
            tokens,
            item.answer,
            item.source,
            place.epoch,
            place.position,
            turns=item.messages,
            row=item.row,
            question=item.question,
        )

    def _order_of(self, epoch: int) -> list[int]:
        """The order of an epoch that pending prompts are of: a large file takes a second to shuffle."""
        if epoch == self._cursor.epoch:
            return self._order
        if self._pending_order is None or self._pending_order[0] != epoch:
            self._pending_order = epoch, self._shuffled(epoch)
        return self._pending_order[1]

    def _shuffled(self, epoch: int) -> list[int]:
        """The order of one epoch. Seeding with text is stable between processes and Python versions."""
        order = list(range(len(self)))
        Random(f"prompts-{self._seed}-{epoch}").shuffle(order)
        return order
