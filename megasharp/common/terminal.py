"""Text of strangers on a terminal: control characters are shown, as `\\x1b`, and never sent.

A model's response, a name in a file, or an error of a reward may hold sequences by which a terminal hides or rewrites
lines, types answers, or sets the clipboard. `guard_streams` covers all that a command prints, tracebacks and libraries'
warnings included. What rich draws needs sequences of its own: it goes past the guard (`rich_proxied_file`), so consoles
of ours are `metrics.console.SafeConsole`, which makes the text in it visible first.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import Any, TextIO, cast

# C0 but tab and newline, DEL, C1, marks of a text's direction, separators and characters that nobody sees (but for the
# joiners that scripts and emoji need), and halves of pairs, which no file takes.
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)
_ONE_BYTE, _TWO_BYTES = 0x100, 0x10000


def visible(text: str) -> str:
    """Return the text with control characters written out: `\\x1b`, `\\u202e`."""
    return _CONTROL.sub(lambda found: _written(ord(found[0])), text)


def _written(code: int) -> str:
    if code < _TWO_BYTES:
        return f"\\x{code:02x}" if code < _ONE_BYTE else f"\\u{code:04x}"
    return f"\\U{code:08x}"


class VisibleStream:
    """A text stream that writes what `visible` makes of the text; in all else it is the stream itself."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @property
    def rich_proxied_file(self) -> TextIO:
        """The stream itself. Consoles of rich write to what a stream has under this name."""
        return self._stream

    def write(self, text: str) -> int:
        """Write the text, made visible."""
        self._stream.write(visible(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write lines, made visible."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def guard_streams() -> None:
    """Make all that this process prints to its standard streams visible, as long as it lives."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        # A process that was started without a stream has None there.
        if stream is not None and not isinstance(stream, VisibleStream):
            setattr(sys, name, cast(TextIO, VisibleStream(stream)))
