"""A rank's share of the prompt stream: every rank may read the data itself, and together they read the stream.

The order is the stream's, which depends on the problems, the seed and the epoch alone: prompt number `i`, counted over
all epochs, is rank `i % ranks`'s. So a run may go on with another number of ranks where it stopped.
"""

from __future__ import annotations

from megasharp.data.stream import DataCursor, PromptStream
from megasharp.types import Prompt


class StreamShare:
    """Every `ranks`-th prompt of a stream of its own, from number `rank` on.

    Example: of prompts 0 to 5, rank 1 of 2 is handed 1, 3 and 5.
    """

    def __init__(self, stream: PromptStream, rank: int, ranks: int) -> None:
        """`stream` is moved by this share alone from here on."""
        assert 0 <= rank < ranks
        self._stream, self._rank, self._ranks = stream, rank, ranks

    @property
    def cursor(self) -> DataCursor:
        """Where the whole stream stands after as many prompts of every rank; the same for all of them."""
        return self._stream.cursor

    def restore(self, cursor: DataCursor) -> None:
        """Go to where the whole stream stood, of a share of this or another number of ranks. Raises UserError."""
        self._stream.restore(cursor)

    def take(self, count: int) -> list[Prompt]:
        """This rank's next `count` prompts; the others' are passed over."""
        rounds = (self._stream.take(self._ranks) for _ in range(count))
        return [prompts[self._rank] for prompts in rounds]
