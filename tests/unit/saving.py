"""A checkpoint whose content is there at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from megasharp.checkpoint.store import CheckpointStore, RunState
from megasharp.common.files import FileHash


class Written:
    """Content that was complete when its writing began; satisfies `Writing`."""

    def is_written(self) -> bool:
        return True

    def finish(self) -> Mapping[Path, FileHash]:
        return {}


def save_at_once(store: CheckpointStore, state: RunState, write: Callable[[Path], None]) -> Path:
    """Save, and return the checkpoint's folder; `write` fills an empty one."""
    partial: list[Path] = []

    def begin(folder: Path) -> Written:
        partial.append(folder)
        write(folder)
        return Written()

    store.begin(state, begin)
    store.finish()
    return partial[0].parent / f"step_{state.step:06d}"
