"""Problems as prompts: a model's text of each, a seeded sample, and the endless stream of training prompts.

A prompt is a problem's messages in the model's own chat template, or their text alone where the model has none; a
problem without messages is its text as it stands. Evaluations may take a
sample, as 2510.04028 takes 128 questions of ARC-c (appendix C.2). The stream is shuffled again in each epoch and can be
restored to the exact prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from random import Random
from typing import Protocol

from megasharp.common.errors import UserError
from megasharp.common.records import Prompt
from megasharp.tasks.judge import TaskItem, digest_of
from megasharp.tasks.shares import Account, Shares

Turns = Sequence[tuple[str, str]]


class ChatEncoder(Protocol):
    """The methods of a tokenizer that prompts need."""

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of `text` as it stands."""
        ...

    def plain(self, text: str) -> tuple[int, ...]:
        """Token ids of a text that no chat template has written."""
        ...

    def chat(self, turns: Turns, tools: str = "") -> str | None:
        """The text that the chat template makes of messages and tools, up to where an answer begins; None without."""
        ...


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """A prompt as the model reads it. A token by which its tokenizer begins a plain text is not part of `text`."""

    text: str
    tokens: tuple[int, ...]


def read_prompt(item: TaskItem, tokenizer: ChatEncoder) -> ReadPrompt:
    """Return a problem as the model reads it. Raises UserError where its chat template cannot write the messages."""
    written = tokenizer.chat(item.turns, item.tools) if item.turns else None
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
    order; `digest` is the SHA-256 of all items. `sources` are the names of a mixture's sources in the order in which
    their prompts follow each other, each item's `source`; empty where there is one source.
    """

    prompts: tuple[tuple[TaskItem, tuple[int, ...]], ...]
    lengths: tuple[int, ...]
    digest: str
    sources: tuple[str, ...] = ()

    def __len__(self) -> int:
        """Prompts that are left, which is one epoch."""
        return len(self.prompts)

    def within(self, max_prompt_tokens: int, positions: int | None = None) -> TokenizedPrompts:
        """Return those that are neither empty nor longer than this. Raises UserError if none is left.

        `positions` are the model's: a prompt that fills them leaves no room for a response, so no limit helps it.
        """
        kept = tuple((item, tokens) for item, tokens in self.prompts if 0 < len(tokens) <= max_prompt_tokens)
        if not kept:
            source = self.prompts[0][0].source
            shortest = min((length for length in self.lengths if length), default=0)
            remedy = "so set it to at least that"
            if not shortest:
                raise UserError(f"data.path: all {len(self.lengths)} prompts of {source} are empty")
            if positions is not None and shortest >= positions:
                remedy = f"and the model has {positions} positions in all; shorten them, or take another model"
            raise UserError(
                f"data.max_prompt_tokens: all {len(self.lengths)} prompts of {source} are longer than "
                f"{max_prompt_tokens} tokens; the shortest has {shortest}, {remedy}"
            )
        found = replace(self, prompts=kept)
        if empty := [name for name, count in found.counts.items() if not count]:
            raise UserError(
                f"data.max_prompt_tokens: all prompts of {empty[0]} are empty or longer than {max_prompt_tokens} "
                "tokens; raise it, or leave the source out of data.mix"
            )
        return found

    @property
    def counts(self) -> dict[str, int]:
        """Prompts of each source of a mixture that are left; nothing where there is one source."""
        found = Counter(item.source for item, _ in self.prompts) if self.sources else {}
        return {name: found[name] for name in self.sources}

    def first(self, count: int) -> list[TaskItem]:
        """The first `count` problems of each source."""
        if not self.sources:
            return [item for item, _ in self.prompts[:count]]
        by_source = (islice((item for item, _ in self.prompts if item.source == name), count) for name in self.sources)
        return [item for items in by_source for item in items]

    @property
    def skipped(self) -> int:
        """Prompts that are left out."""
        return len(self.lengths) - len(self.prompts)


def tokenize_prompts(
    items: Sequence[TaskItem],
    tokenizer: ChatEncoder,
    max_prompt_tokens: int | None = None,
    sources: Sequence[str] = (),
) -> TokenizedPrompts:
    """Tokenize all items, those of a mixture's `sources` in their order.

    Those longer than `max_prompt_tokens` are left out. Raises UserError if none is left.
    """
    if not items:
        raise UserError("data.path: the data file holds no problems")
    read = [read_prompt(item, tokenizer) for item in items]
    encoded = [(replace(item, text=each.text), each.tokens) for item, each in zip(items, read, strict=True)]
    # The file may be edited between two attempts of a run, so the digest is of what was read, before the template.
    lengths = tuple(len(tokens) for _, tokens in encoded)
    whole = TokenizedPrompts(tuple(encoded), lengths, digest_of(items), tuple(sources))
    return whole if max_prompt_tokens is None else whole.within(max_prompt_tokens)


@dataclass(frozen=True, slots=True)
class SourceState:
    """Where a source of a mixture is: its name, its next prompt, and its account among the sources.

    Example: `SourceState("math", DataCursor(epoch=0, position=17), Account(share=0.5))`.
    """

    name: str
    cursor: DataCursor
    account: Account


class PromptStream:
    """Prompts in an order that depends on the items, the seed and the epoch alone, and never ends.

    Every epoch hands out every prompt once. The sources of a mixture take turns (`shares.py`), by `weights` in blocks
    of `block` prompts, and each has epochs of its own. A prompt's place is its source's epoch, and its position there
    after the prompts of the sources before it.
    """

    def __init__(
        self, prompts: TokenizedPrompts, seed: int, block: int = 1, weights: Mapping[str, float] | None = None
    ) -> None:
        counts = prompts.counts or {"": len(prompts)}
        firsts = accumulate(counts.values(), initial=0)
        self._sources = [
            Epochs(name, prompts.prompts, range(first, first + count), seed)
            for first, (name, count) in zip(firsts, counts.items(), strict=False)
        ]
        self._size = len(prompts)
        self._is_mixture = bool(prompts.counts)
        self._block = block
        self._weights = weights or {name: float(count) for name, count in counts.items()}
        self._pending: list[DataCursor] = []
        self._shares = Shares([*counts], block)
        self._shares.weigh(self._weights)

    def __len__(self) -> int:
        """Prompts in one epoch of all sources."""
        return self._size

    @property
    def cursor(self) -> DataCursor:
        """The place of the next prompt, of the first source's where there are several; `restore` continues there."""
        return self._sources[0].cursor

    @property
    def sources(self) -> tuple[SourceState, ...]:
        """Where each source of a mixture is, for `restore`; nothing where there is one source."""
        if not self._is_mixture:
            return ()
        pairs = zip(self._sources, self._shares.accounts, strict=True)
        return tuple(SourceState(source.name, source.cursor, account) for source, account in pairs)

    @property
    def pending(self) -> tuple[DataCursor, ...]:
        """Prompts before the cursor that were given to `restore` and not handed out since."""
        return tuple(self._pending)

    def weigh(self, weights: Mapping[str, float] | None) -> None:
        """Take turns by other weights from now on; None stands for those of the beginning."""
        self._shares.weigh(weights or self._weights)

    def restore(
        self, cursor: DataCursor, pending: Sequence[DataCursor] = (), sources: Sequence[SourceState] = ()
    ) -> None:
        """Go to `cursor`, or with a mixture to where its `sources` were, but hand out the `pending` prompts first.

        A source that was not there begins at its first prompt. Raises UserError if the data has no such prompt, so the
        file must be another.
        """
        known = {state.name: state for state in sources}
        places = [known[s.name].cursor if s.name in known else DataCursor(0, 0) for s in self._sources]
        if not self._is_mixture:
            places = [cursor]
        for place in pending:
            self._check(place, len(self))
        for source, place in zip(self._sources, places, strict=True):
            self._check(place, len(source))
            source.go_to(place)
        self._pending = list(pending)
        if [source.name for source in self._sources] == [*known]:
            self._shares = Shares([*known], self._block, [state.account for state in sources])

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts, across as many epochs as it takes."""
        return [self._next() for _ in range(count)]

    def _next(self) -> Prompt:
        if not self._pending:
            return self._sources[self._shares.next()].next()
        place = self._pending.pop(0)
        return next(source for source in self._sources if place.position in source.places).prompt(place)

    def _check(self, place: DataCursor, prompts: int) -> None:
        if not 0 <= place.position < prompts or place.epoch < 0:
            raise UserError(
                f"data.path: cannot resume at prompt {place.position} of epoch {place.epoch}, the file has "
                f"{prompts} usable prompts; resume with the data file the run began with"
            )


class Epochs:
    """The prompts of one source, which are those at `places` of all, shuffled again in each epoch."""

    def __init__(self, name: str, items: Sequence[tuple[TaskItem, tuple[int, ...]]], places: range, seed: int) -> None:
        self.name = name
        self.places = places
        self._items = items
        self._seed = f"{seed}-{name}" if name else str(seed)
        self._pending_order: tuple[int, list[int]] | None = None
        self.go_to(DataCursor(0, 0))

    def __len__(self) -> int:
        """Prompts per epoch."""
        return len(self.places)

    def go_to(self, cursor: DataCursor) -> None:
        """Continue with this prompt, counted from the source's first."""
        self.cursor = cursor
        self._order = self._shuffled(cursor.epoch)

    def next(self) -> Prompt:
        """The prompt at the cursor, which moves on."""
        epoch, position = self.cursor.epoch, self.cursor.position
        prompt = self.prompt(DataCursor(epoch, self.places.start + position))
        if position + 1 == len(self):
            self.go_to(DataCursor(epoch + 1, 0))
        else:
            self.cursor = DataCursor(epoch, position + 1)
        return prompt

    def prompt(self, place: DataCursor) -> Prompt:
        """The prompt at a place of the stream."""
        item, tokens = self._items[self._order_of(place.epoch)[place.position - self.places.start]]
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
        if epoch == self.cursor.epoch:
            return self._order
        if self._pending_order is None or self._pending_order[0] != epoch:
            self._pending_order = epoch, self._shuffled(epoch)
        return self._pending_order[1]

    def _shuffled(self, epoch: int) -> list[int]:
        """The order of one epoch. Seeding with text is stable between processes and Python versions."""
        order = list(self.places)
        Random(f"prompts-{self._seed}-{epoch}").shuffle(order)
        return order
