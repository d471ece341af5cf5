"""What `megasharp eval` measures: a run's newest checkpoint, a checkpoint, or a Hugging Face folder."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from megasharp.checkpoint.store import CheckpointStore, complete_steps
from megasharp.config.core import read_tree
from megasharp.convert.weight_files import CONFIG_FILE
from megasharp.errors import UserError

# Stands, in the name of the folder that gets results, for the name of what is measured.
CHECKPOINT = "{checkpoint}"
_CHECKPOINTS = "checkpoints"


def check_measurable(source: Path) -> None:
    """Raise UserError for a folder that is none of them. No weights are read."""
    if not _holds_weights(source) and not complete_steps(source / _CHECKPOINTS):
        raise UserError(f"{source}: neither a run with a checkpoint, nor a checkpoint, nor a Hugging Face folder")


@dataclass(frozen=True, slots=True)
class Measured:
    """What is measured: the folder of its weights, and what it is called.

    `label` tells it from other models in a result, `place` is the folder, below evals/, of its results. Of a run's
    checkpoint both have the run's name and the step.

    Example: `Measured(Path("runs/mine/checkpoints/step_000300"), "mine step 300", 300, Path("mine/step_000300"))`.
    """

    weights: Path
    label: str
    step: int | None
    place: Path


def measured(source: Path) -> Measured:
    """The checkpoint or Hugging Face folder itself: of a run the newest checkpoint whose files are unchanged.

    Raises UserError as `check_measurable`, and where no checkpoint can be trusted.
    """
    check_measurable(source)
    if _holds_weights(source):
        return _named(source)
    found = CheckpointStore(source / _CHECKPOINTS, keep_last=1, keep_every=None).newest()
    assert found is not None
    return _named(found[0])


def _named(weights: Path) -> Measured:
    """By the run that a checkpoint lies in, or else by the folder's own name."""
    whole = weights.resolve()
    step = re.fullmatch(r"step_(\d+)", whole.name)
    if step is None or whole.parent.name != _CHECKPOINTS:
        return Measured(weights, whole.name, None, Path(whole.name))
    run = _run_name(whole.parent.parent)
    return Measured(weights, f"{run} step {int(step[1])}", int(step[1]), Path(run) / whole.name)


def _run_name(run: Path) -> str:
    """As its configuration says; a run that was copied to another folder without one is its folder's name."""
    try:
        name = read_tree(run / "config.yaml").get("name")
    except UserError:
        return run.name
    return name if isinstance(name, str) else run.name


def _holds_weights(folder: Path) -> bool:
    return (folder / CONFIG_FILE).is_file() or (folder / "policy").is_dir()
