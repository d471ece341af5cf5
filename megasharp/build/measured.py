"""What `megasharp eval` measures: a run's newest checkpoint, a checkpoint, or a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from megasharp.checkpoint.store import CheckpointStore, complete_steps
from megasharp.convert.weight_files import CONFIG_FILE
from megasharp.errors import UserError

# Stands, in the name of the folder that gets results, for the name of what is measured.
CHECKPOINT = "{checkpoint}"
_CHECKPOINTS = "checkpoints"


def check_measurable(source: Path) -> None:
    """Raise UserError for a folder that is none of them. No weights are read."""
    if not _holds_weights(source) and not complete_steps(source / _CHECKPOINTS):
        raise UserError(f"{source}: neither a run with a checkpoint, nor a checkpoint, nor a Hugging Face folder")


def measured(source: Path) -> Path:
    """The checkpoint or Hugging Face folder itself: of a run the newest checkpoint whose files are unchanged.

    Raises UserError as `check_measurable`, and where no checkpoint can be trusted.
    """
    check_measurable(source)
    if _holds_weights(source):
        return source
    found = CheckpointStore(source / _CHECKPOINTS, keep_last=1, keep_every=None).newest()
    assert found is not None
    return found[0]


def _holds_weights(folder: Path) -> bool:
    return (folder / CONFIG_FILE).is_file() or (folder / "policy").is_dir()
