"""The lines of shell that a profile has a job run first: they are checked by bash, and end the job where they fail."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from megasharp.common.errors import UserError

_LIMIT_S = 10


def check_setup(lines: Sequence[str], profile: Path | None) -> None:
    """Raise UserError for a line that bash, where it is at hand, does not read as a whole one."""
    for line in lines:
        if mistake := _mistake(line):
            where = "setup" if profile is None else f"{profile}: setup"
            raise UserError(f"{where}: {line!r} is no whole line of bash ({mistake}); write each command on one line")


@cache
def _mistake(line: str) -> str:
    if line.endswith("\\"):
        return "it ends in a backslash"
    bash = shutil.which("bash")
    if bash is None:
        return ""
    done = subprocess.run(
        [bash, "-n", "-c", line],
        env={"LC_ALL": "C"},
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    if not done.returncode:
        return ""
    # "bash: -c: line 1: syntax error near unexpected token `fi'", and the line again.
    return done.stderr.partition("\n")[0].rpartition("line ")[2].partition(": ")[2] or "a syntax error"


def render_setup(lines: Sequence[str]) -> str:
    """Return the lines as a part of a job's file, in which a command that fails ends the job; "" for none."""
    return "\n".join((*_part(lines), "", "")) if lines else ""


def _part(lines: Sequence[str]) -> Iterator[str]:
    yield "# Of the cluster's profile: a line ends the job where one of its commands fails, or the line as a whole."
    yield 'setup_failed() { give_up "a line of setup failed: $setup_line"; }'
    # A file that a line sources may try things that fail.
    yield "trap '((${#BASH_SOURCE[@]} > 1)) || setup_failed' ERR"
    # Modules and profiles of shells read variables that are not set.
    yield "set +u"
    for line in lines:
        yield f"setup_line={shlex.quote(line)}"
        yield line
        # Bash leaves commands before && and || to the line's own status.
        yield "(($? == 0)) || setup_failed"
    yield "set -u"
    yield "trap - ERR"
