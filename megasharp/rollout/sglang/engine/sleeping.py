"""Sleep and wake: the calls that an engine may take while parts of its memory are given back.

SGLang's own calls trust their caller: one that comes at the wrong moment ends the scheduler, and a request to a
sleeping engine reads memory that is not there. `Sleep` keeps the account in the server, through which all calls come.
"""

from __future__ import annotations

from collections.abc import Collection

WEIGHTS = "weights"
TAGS = (WEIGHTS, "kv_cache")


class Sleep:
    """Account of the parts given back, and of weights owed: a wake does not bring back what a GPU gave up.

    `able` says that the engine was started with `sleep`, `loses_weights` that weights are gone after a wake.
    """

    def __init__(self, able: bool, loses_weights: bool) -> None:
        self._able = able
        self._loses_weights = loses_weights
        self._asleep: set[str] = set()
        self._owed = False

    def to_release(self, tags: Collection[str] | None) -> list[str]:
        """The parts that a call for `tags` (None or empty: all) gives back. Raises ValueError where it must not be."""
        if not self._able:
            raise ValueError("this engine cannot sleep; start it with `sleep: true` in its config")
        wanted = _known(tags or TAGS)
        if self._asleep & set(wanted):
            raise ValueError(f"{', '.join(sorted(self._asleep & set(wanted)))} sleeps already")
        return wanted

    def released(self, tags: Collection[str]) -> None:
        """These parts are being given back: from now on no request may come in."""
        self._asleep |= set(tags)

    def not_released(self, tags: Collection[str]) -> None:
        """The engine could not give these parts back after all; nothing has happened to them."""
        self._asleep -= set(tags)

    def to_resume(self, tags: Collection[str] | None) -> list[str]:
        """The parts that a call for `tags` (None or empty: all asleep) brings back. Raises ValueError for others."""
        wanted = _known(tags or sorted(self._asleep))
        if not wanted or set(wanted) - self._asleep:
            raise ValueError(f"{', '.join(sorted(set(wanted) - self._asleep)) or 'nothing'} sleeps not")
        return wanted

    def resumed(self, tags: Collection[str]) -> None:
        """These parts are there again, weights without their values where the engine loses them."""
        self._asleep -= set(tags)
        self._owed |= self._loses_weights and WEIGHTS in tags

    def updated(self) -> None:
        """A complete version of the weights has come."""
        self._owed = False

    def why_closed(self) -> str | None:
        """Return why no request can be served; None where one can."""
        if self._asleep:
            return f"the engine sleeps ({', '.join(sorted(self._asleep))})"
        return "the engine has had no weights since it woke" if self._owed else None

    def why_fixed(self) -> str | None:
        """Return why weights can be neither changed nor read; None where they can."""
        return "the engine's weights sleep" if WEIGHTS in self._asleep else None


def _known(tags: Collection[str]) -> list[str]:
    unknown = set(tags) - set(TAGS)
    if unknown:
        raise ValueError(f"{min(unknown)} is no part that sleeps; these are {' and '.join(TAGS)}")
    return [tag for tag in TAGS if tag in tags]
