"""Errors that are the user's to mend: each is one line that says what, where, and what to do."""

from __future__ import annotations


class UserError(Exception):
    """A mistake the user can mend; the command line prints it as one line and exits with code 2."""


class TrainingStopped(Exception):
    """The run ended itself after saving a checkpoint (for instance too many non-finite steps)."""


def one_line(error: BaseException) -> str:
    """The error's text on one line, for messages that promise to be one line."""
    return " ".join(str(error).split()) or type(error).__name__
