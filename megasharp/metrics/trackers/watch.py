"""The trackers' processes as the run sees them: started, checked now and then, and never waited for long.

`Record` is what the run folder keeps of a tracker, for the next attempt and for a copy of the folder.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from megasharp.common.errors import UserError, one_line
from megasharp.common.section import Section
from megasharp.common.signals import save_kept_from_children


class Record(Section):
    """The run's id in a tracker, and the last step that was sent of each curve.

    `folder` and `inode` identify the run folder, because a copy of the folder contains the record too.
    """

    id: str
    folder: str
    inode: int
    sent: dict[str, int] = {}

    def is_of(self, root: Path) -> bool:
        """Return whether `root` is the recorded folder: at the same path, or renamed or mounted elsewhere.

        In doubt it is not: a new run in the tracker gets all rows, but rows sent to another's run cannot be removed.
        """
        before = Path(self.folder)
        return before.samefile(root) if before.exists() else root.stat().st_ino == self.inode


def record_path(root: Path, tracker: str) -> Path:
    """Return the path of a tracker's record."""
    return root / "trackers" / f"{tracker}.json"


def forget_the_originals(root: Path, tracker: str) -> str | None:
    """Remove the record from a copied folder, so that the copy becomes a run of its own; return the original's path.

    An unreadable record stays: the tracker's process reports it.
    """
    path = record_path(root, tracker)
    try:
        record = Record.model_validate_json(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    if record.is_of(root):
        return None
    path.unlink()
    return record.folder


# Characters of a tracker's last line that are reported.
_SHOWN = 300


@dataclass(slots=True)
class _Process:
    name: str
    process: subprocess.Popen[bytes]
    log: Path
    reported: bool = False

    @property
    def trouble(self) -> str | None:
        """The reason why it ended with an error, or None."""
        code = self.process.poll()
        if not code:
            return None
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        last = next((line for line in reversed(lines) if line.strip()), "nothing was said")
        return f"exit code {code}: {last[:_SHOWN]}"


def check_installed(trackers: Mapping[str, str], where: str) -> None:
    """Raise UserError for a tracker, by library name, whose library is not installed."""
    for name in trackers:
        found = find_spec(name)
        # The libraries leave folders of their name, which `find_spec` finds as packages without a file.
        if found is None or found.origin is None:
            raise UserError(f"{where}: log.{name}: {name} is not installed; pip install 'megasharp[trackers]'")


class Trackers:
    """The processes of a run's trackers, project by library name; their output goes to `<name>.log` in `logs`."""

    def __init__(self, trackers: Mapping[str, str], root: Path, logs: Path, report: Callable[[str], None]) -> None:
        self._report = report
        self._processes: list[_Process] = []
        for name, project in trackers.items():
            try:
                original = forget_the_originals(root, name)
                if original is not None:
                    report(
                        f"log.{name}: this folder was copied or moved from {original}: a run of its own begins there"
                    )
                log = logs / f"{name}.log"
                # -P: a folder of the library's name, which it leaves where people work, is not the library.
                command = [sys.executable, "-P", "-m", "megasharp.metrics.trackers.follow", name, project, str(root)]
                with log.open("ab") as output, save_kept_from_children():
                    # A session of its own: Ctrl-C is for the run, which then closes the tracker's standard input.
                    process = subprocess.Popen(
                        command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
                    )
                self._processes.append(_Process(name, process, log))
            except OSError as error:
                report(f"log.{name}: cannot be started ({one_line(error)}); the run goes on without it")

    def look(self) -> None:
        """Report, once, a tracker that ended with an error."""
        for one in self._processes:
            trouble = None if one.reported else one.trouble
            if trouble is not None:
                one.reported = True
                self._report(
                    f"log.{one.name}: {trouble}; the run goes on without it, and a resumed one sends what is missing"
                )

    def close(self, limit_s: float) -> None:
        """End the trackers and wait at most `limit_s` seconds for all of them; later they end by themselves."""
        for one in self._processes:
            assert one.process.stdin is not None
            one.process.stdin.close()
        deadline = time.monotonic() + limit_s
        for one in self._processes:
            try:
                one.process.wait(max(deadline - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                one.reported = True
                self._report(f"log.{one.name}: is not done sending; it goes on for a minute by itself ({one.log})")
        self.look()
