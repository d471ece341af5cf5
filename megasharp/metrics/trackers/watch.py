"""The trackers' processes as the run sees them: begun, looked at now and then, and never waited for long.

What a run folder holds of a tracker: the run's id there, how far each curve has come, and whose folder that is.
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
    """The run's id in a tracker, and the last step that each curve there has.

    `folder` and `inode` are of the run folder that it is the record of, because a copied folder has it too.
    """

    id: str
    folder: str
    inode: int
    sent: dict[str, int] = {}

    def is_of(self, root: Path) -> bool:
        """Whether `root` is that folder: it lies where it lay, or is the same one, renamed or mounted elsewhere.

        Where in doubt it is not: a run of its own has all rows, and rows in another's cannot be taken back.
        """
        before = Path(self.folder)
        return before.samefile(root) if before.exists() else root.stat().st_ino == self.inode


def record_path(root: Path, tracker: str) -> Path:
    """Where the record of a tracker lies."""
    return root / "trackers" / f"{tracker}.json"


def forget_the_originals(root: Path, tracker: str) -> str | None:
    """In a copied folder, remove the record, so that the copy becomes a run of its own there; returns whose it was.

    What does not read as a record stays for the tracker's own process to name.
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


_SHOWN = 300


@dataclass(slots=True)
class _Process:
    name: str
    process: subprocess.Popen[bytes]
    log: Path
    told: bool = False

    @property
    def trouble(self) -> str | None:
        """Why it has ended before the run did, or None."""
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
        # A folder of that name, as the libraries leave them, is found too.
        if found is None or found.origin is None:
            raise UserError(f"{where}: log.{name}: {name} is not installed; pip install 'megasharp[trackers]'")


class Trackers:
    """The processes of a run's trackers, project by library name; outputs go to `<name>.log` in `logs`."""

    def __init__(self, trackers: Mapping[str, str], root: Path, logs: Path, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._processes: list[_Process] = []
        for name, project in trackers.items():
            try:
                original = forget_the_originals(root, name)
                if original is not None:
                    tell(f"log.{name}: this folder was copied or moved from {original}: a run of its own begins there")
                self._processes.append(_begin(name, project, root, logs / f"{name}.log"))
            except OSError as error:
                tell(f"log.{name}: cannot be started ({one_line(error)}); the run goes on without it")

    def look(self) -> None:
        """Tell, once, of a tracker that has ended."""
        for one in self._processes:
            trouble = None if one.told else one.trouble
            if trouble is not None:
                one.told = True
                self._tell(
                    f"log.{one.name}: {trouble}; the run goes on without it, and a resumed one sends what is missing"
                )

    def close(self, limit_s: float) -> None:
        """Let them end, and wait for that at most so many seconds; they end by themselves later."""
        for one in self._processes:
            assert one.process.stdin is not None
            one.process.stdin.close()
        deadline = time.monotonic() + limit_s
        for one in self._processes:
            try:
                one.process.wait(max(deadline - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                one.told = True
                self._tell(f"log.{one.name}: is not done sending; it goes on for a minute by itself ({one.log})")
        self.look()


def _begin(name: str, project: str, root: Path, log: Path) -> _Process:
    # -P: a folder of the library's name, which it leaves where people work, is not the library.
    command = [sys.executable, "-P", "-m", "megasharp.metrics.trackers.follow", name, project, str(root)]
    with log.open("ab") as output, save_kept_from_children():
        # A session of its own: Ctrl-C is the run's, which then says that it is over.
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    return _Process(name, process, log)
