"""What a run folder holds of a tracker: the run's id there, how far each curve has come, and whose folder that is."""

from __future__ import annotations

from pathlib import Path

from megasharp.config.core import Section


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
