"""Nodes of a job that examine each other through a folder that all of them see.

A node tells the others by a file of its own, which a rename puts there whole, and hears them by looking at the folder:
a list asks a network file system anew, while a name that was not there is remembered for a while. First all tell their
cards; so nobody waits later for a node that never came, and nobody starts what a sick node will not join.
"""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megasharp.cluster.slurm.doctor.filesystem import NO_LOCKS, taken
from megasharp.cluster.slurm.doctor.findings import Finding, Place
from megasharp.common.errors import one_line
from megasharp.common.files import write_text

# A node that starts later, or imports from a cold disk, is waited for.
_MEET_S = 300.0
# Caches of a network file system keep what is old for a minute at most (NFS: acregmax 60).
_SEEN_S, _SLOW_S = 90.0, 10.0
_POLL_S = 0.1
_CARD, _LEAD, _TRIED = "card", "lead", "tried"


class Meeting:
    """The folder of nodes that meet. Raises UserError where this node cannot write there."""

    def __init__(self, place: Place) -> None:
        assert place.meeting is not None
        self.node, self.names = place.node, place.nodes
        self._folder = place.meeting / "doctor"
        self.lock = self._folder / "lock"

    def tell(self, subject: str, content: Mapping[str, Any]) -> None:
        """Put a word of this node on a subject there, in the place of an earlier one."""
        write_text(self._folder / f"{subject}_{self.node}.json", json.dumps(content))

    def hear(self, subject: str, limit_s: float, nodes: Sequence[int] | None = None) -> dict[int, dict[str, Any]]:
        """Return the words of `nodes` (None: all) on a subject, by number, of those that came within `limit_s`."""
        wanted = {f"{subject}_{node}.json": node for node in (range(len(self.names)) if nodes is None else nodes)}
        deadline = time.monotonic() + limit_s
        while True:
            there = wanted.keys() & {path.name for path in self._folder.iterdir()}
            if len(there) == len(wanted) or time.monotonic() > deadline:
                return {wanted[name]: json.loads((self._folder / name).read_text()) for name in there}
            time.sleep(_POLL_S)


def meet(meeting: Meeting, able: bool, values: Mapping[str, str]) -> Iterator[Finding]:
    """Exchange cards, and compare them; a failure or a note says that the nodes do nothing more together.

    `able`: this node can take part in what follows. `values` should be the same on all nodes. The first node reports.
    """
    meeting.tell(_CARD, {"able": able, "values": dict(values)})
    cards = meeting.hear(_CARD, _MEET_S)
    names = meeting.names
    absent = [name for number, name in enumerate(names) if number not in cards]
    if absent:
        yield not_met(absent)
        return
    unable = [names[number] for number, card in sorted(cards.items()) if not card["able"]]
    if unable:
        yield Finding("note", "all-reduce", f"not tried, because of what failed on {', '.join(unable)}")
        return
    if meeting.node == 0:
        yield from differing({names[number]: card["values"] for number, card in sorted(cards.items())})


def not_met(absent: Sequence[str]) -> Finding:
    """Report nodes of which nothing was seen in the meeting's folder."""
    text = (
        f"{', '.join(absent)} did not come within {_MEET_S:.0f} s: down, without this Python, or with another file "
        "system under the runs' folder; take them out (--sbatch=--exclude), or mount it there"
    )
    return Finding("FAIL", "nodes", text, at_fault=tuple(absent))


def differing(values: Mapping[str, Mapping[str, str]]) -> Iterator[Finding]:
    """Yield a warning for each value that is not the same on all nodes; `values` by the node's name."""
    keys = sorted({key for of_node in values.values() for key in of_node})
    for key in keys:
        by_value: dict[str, list[str]] = {}
        for name, of_node in values.items():
            by_value.setdefault(of_node.get(key, "not set"), []).append(name)
        if len(by_value) > 1:
            fewest = sorted(by_value.items(), key=lambda item: len(item[1]))
            text = "; ".join(f"{value} on {', '.join(names[:3])}{' ...' * (len(names) > 3)}" for value, names in fewest)
            yield Finding("warn", "nodes", f"{key} differs: {text}; ranks may not find each other, make it alike")


def try_shared_files(meeting: Meeting) -> Iterator[Finding]:
    """Try locks and renames of one node as the others see them. All nodes of the meeting call it."""
    if meeting.node == 0:
        with meeting.lock.open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                # The others wait for no more.
                meeting.tell(_LEAD, {"replaced": True})
                yield locks_between({meeting.names[0]: one_line(error)})
                return
            meeting.tell(_LEAD, {"replaced": False})
            heard = meeting.hear(_TRIED, _SEEN_S, range(1, len(meeting.names)))
        meeting.tell(_LEAD, {"replaced": True})
        yield locks_between({meeting.names[number]: word["lock"] for number, word in sorted(heard.items())})
        return
    heard = meeting.hear(_LEAD, _SEEN_S, (0,))
    meeting.tell(_TRIED, {"lock": taken(meeting.lock)})
    begin = time.monotonic()
    while heard and not heard[0]["replaced"] and time.monotonic() < begin + 2 * _SEEN_S:
        time.sleep(_POLL_S)
        heard = meeting.hear(_LEAD, 0.0, (0,))
    seen = time.monotonic() - begin if heard and heard[0]["replaced"] else None
    yield replaced(meeting.names[0], seen)


def locks_between(answers: Mapping[str, str]) -> Finding:
    """Judge what other nodes say of a lock that the first holds: "held", "free", or why it could not be tried."""
    blind = [name for name, answer in answers.items() if answer == "free"]
    broken = [f"{name}: {answer}" for name, answer in answers.items() if answer not in ("held", "free")]
    if broken:
        return Finding("FAIL", "locks", f"{'; '.join(broken)}; {NO_LOCKS}")
    if blind:
        text = f"{', '.join(blind)} could take a lock that the first node holds: two jobs could run one run"
        return Finding("warn", "locks", f"{text}; {NO_LOCKS}")
    return Finding("ok", "locks", f"one that the first node holds is kept from the {len(answers)} other node(s)")


def replaced(name: str, seconds: float | None) -> Finding:
    """Judge how long a file that node `name` replaced was still the old one here; None: longer than was waited."""
    if seconds is None:
        text = f"a file that {name} replaced is the old one here after {2 * _SEEN_S:.0f} s"
        remedy = "mount the file system so that nodes see each other's files (NFS: actimeo=3)"
        return Finding("FAIL", "shared files", f"{text}; {remedy}")
    if seconds > _SLOW_S:
        text = f"a file that {name} replaced was seen here after {seconds:.0f} s"
        return Finding("warn", "shared files", f"{text}: jobs start and end slower; mount with less caching (actimeo)")
    return Finding("ok", "shared files", f"a file that {name} replaced was seen here after {seconds:.1f} s")
