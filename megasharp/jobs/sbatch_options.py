"""Options of sbatch that a user gives beside those of a job's own file. Pure.

sbatch takes the last of two lines for one option and says nothing, so an option of the file's own is refused. Only a
dependency is the user's as well: it is put beside the one by which jobs of one run wait for each other.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from megasharp.errors import UserError

DEPENDENCY = "dependency"
# What a job's file sets by itself: the long name, sbatch's letter for it, and what sets it.
_SET = (
    ("job-name", "J", "give the run file's name"),
    ("nodes", "N", "give --nodes"),
    ("ntasks-per-node", "n", "leave it out, every node has one program"),
    ("exclusive", "", "leave out --cpus-per-node for whole nodes"),
    ("cpus-per-task", "c", "give --cpus-per-node"),
    ("gpus-per-node", "G", "give the run file's cluster.gpus_per_node"),
    ("partition", "p", "give --partition"),
    ("account", "A", "give --account"),
    ("time", "t", "give --time"),
    ("signal", "", "give --lead"),
    ("requeue", "", "give --restarts"),
    ("no-requeue", "", "give --restarts 0"),
    ("open-mode", "", "leave it out, restarts write to one log"),
    ("output", "o", "give --runs, logs lie in the run's folder"),
    ("chdir", "D", "submit from the folder where the job is to work"),
)


def check(extra: Sequence[str]) -> None:
    """Raise UserError for what is no option, and for an option of the file's own, naming what sets it."""
    for text in extra:
        options = [*_options(text)]
        for name, _ in options:
            _refuse_ours(text, name)
        if len(options) > 1 and any(_is_dependency(name) for name, _ in options):
            raise UserError(f"--sbatch {text!r}: give --dependency in an --sbatch of its own")
    for value in _values(extra):
        if not value or "?" in value:
            raise UserError(
                f"--sbatch=--dependency={value}: jobs of one run also wait for each other, and all has to hold; "
                "give what to wait for, with commas between, such as --sbatch=--dependency=afterok:7,afterany:8"
            )


def dependency(extra: Sequence[str]) -> str:
    """What the job waits for: what the user says, and the earlier jobs of the run."""
    parts = [part for value in _values(extra) for part in value.split(",")]
    return ",".join(dict.fromkeys([*parts, "singleton"]))


def waits(extra: Sequence[str]) -> bool:
    """Whether the user says what the job waits for."""
    return bool(_values(extra))


def others(extra: Sequence[str]) -> list[str]:
    """The lines beside the file's own."""
    return [text for text in extra if not any(_is_dependency(name) for name, _ in _options(text))]


def _values(extra: Sequence[str]) -> list[str]:
    return [value for text in extra for name, value in _options(text) if _is_dependency(name)]


def _options(text: str) -> Iterator[tuple[str, str]]:
    """Name, with its dashes, and value of each option. Raises UserError for a text that begins with none."""
    try:
        words = shlex.split(text)
    except ValueError:
        words = []
    if not words or not words[0].startswith("-") or "\n" in text:
        raise UserError(f"--sbatch {text!r}: give an option of sbatch with its value, such as --qos=high")
    for word, following in zip(words, [*words[1:], "-"], strict=True):
        if not word.startswith("-"):
            continue
        name, has_value, value = word.partition("=") if word.startswith("--") else (word[:2], word[2:], word[2:])
        yield name, value if has_value or following.startswith("-") else following


def _is_dependency(name: str) -> bool:
    return name == "-d" or _shortens(name, DEPENDENCY)


def _refuse_ours(text: str, given: str) -> None:
    for name, letter, remedy in _SET:
        if _shortens(given, name) or (letter and given == f"-{letter}"):
            raise UserError(f"--sbatch {text!r}: the job's file sets --{name} itself; {remedy}")


def _shortens(given: str, name: str) -> bool:
    """sbatch takes the beginning of a long name for all of it; one that fits several names it refuses itself."""
    return len(given) > len("--") and f"--{name}".startswith(given)
