"""Errors that end a run or a command: each is one line that says what is wrong, where, and what to do."""

from __future__ import annotations

import errno
from collections.abc import Collection
from difflib import get_close_matches
from pathlib import Path


class UserError(Exception):
    """A mistake that the user can fix; the command line prints it as one line and exits with `exit_code`."""

    exit_code = 2


class NotAtHand(UserError):
    """A model or a data set is neither on this machine nor to be had from the hub now."""


class RunFailed(UserError):
    """A failure that another start may fix, such as engines that are lost or late; the message says what failed."""

    exit_code = 1


class TrainingStopped(Exception):
    """The end of a run that stopped itself after saving a checkpoint, for instance after too many non-finite steps."""


class RankDied(Exception):
    """A rank of the learner ended or raised; the message names the rank and says where its log is."""


class StageTimeout(Exception):
    """A stage of the run took longer than its budget; the message names who held it up and says where stacks are."""


class NotSampled(Exception):
    """No engine samples this request, and asking again does not help; the message says why."""


class EnginesLost(NotSampled):
    """Several engines failed over this request; others may sample it."""


def nearest(name: str, known: Collection[str]) -> str:
    """Return the end of a message about an unknown name: the nearest known one, if one is near, and all."""
    close = get_close_matches(name, known, 1)
    return f"{f'nearest is {close[0]}; ' if close else ''}known are: {', '.join(known)}"


_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# The last one is all that torch's file writer says when a write falls short.
_FULL_TEXTS = ("No space left on device", "Disk quota exceeded", "File too large", "unexpected pos")


def one_line(error: BaseException) -> str:
    """Return the error's text on one line, for messages that promise to be one line."""
    try:
        text = str(error)
    except Exception:  # a stranger's class may raise anything here
        text = "its text cannot be made"
    return " ".join(text.split()) or type(error).__name__


def reason_at(error: BaseException, *paths: Path) -> str:
    """Return the reason on one line for a message that names one of `paths` already: without them and `[Errno 2]`."""
    named = (None, *paths, *map(str, paths))
    if isinstance(error, OSError) and error.strerror and error.filename in named:
        return error.strerror if error.filename2 in named else f"{error.strerror} -> {error.filename2}"
    return one_line(error)


def reason_unwritten(error: BaseException, *paths: Path) -> str:
    """Return why one of `paths` was not written: as `reason_at`, but of a full disk the same from every writer."""
    return "no space left on the disk" if disk_is_full(error) else reason_at(error, *paths)


def disk_is_full(error: BaseException) -> bool:
    """Return whether an error, or one it was raised from, says that the disk (or quota, or file size limit) is full.

    Writers that work in processes of their own pass only the text on, so the text counts too.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in _FULL:
            return True
        if any(text in str(seen) for text in _FULL_TEXTS):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
