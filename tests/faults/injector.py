"""Faults on a schedule, for tests: in the driver or in one rank, at a step, each once and with a witness.

A schedule is a folder with `faults.json`. The driver arms the faults of a step before it begins; whoever a fault is for
writes `fired_NAME` there and then does it, so a fault that fired is never done again by a later attempt, and a test can
see which did not fire. Nothing in megasharp knows of this: `install` replaces functions in the process it is called in,
and ranks call it too, because they import the driver's main module.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from megasharp.checkpoint import store
from megasharp.learner import async_checkpoint, learner
from megasharp.trainer import loop

DRIVER = "driver"
VARIABLE = "FAULTS_FOLDER"
Point = Literal["step", "update", "save"]
Action = Literal["kill", "stop", "delay", "raise", "nan", "flip", "corrupt"]


@dataclass(frozen=True)
class Fault:
    """What happens to whom: `who` is "driver" or a rank's number; `seconds` are a delay's.

    In the driver: at the beginning of the step, before its update, or when a save's files are all written. In a rank:
    before its update, or when it has written the first file of a save. `nan` is a rank's gradient, `flip` a bit of its
    weights after the update. `corrupt` flips a byte of the newest checkpoint when the driver starts again after the
    fault named `after`.
    """

    name: str
    action: Action
    who: str = DRIVER
    step: int = 0
    point: Point = "update"
    seconds: float = 0.0
    after: str = ""


def write_schedule(folder: Path, faults: Sequence[Fault]) -> None:
    """Make a schedule's folder."""
    folder.mkdir(parents=True)
    (folder / "faults.json").write_text(json.dumps([asdict(fault) for fault in faults]))


def not_fired(folder: Path) -> list[str]:
    """Faults without a witness."""
    return [fault.name for fault in _read(folder) if not (folder / f"fired_{fault.name}").exists()]


def _read(folder: Path) -> list[Fault]:
    return [Fault(**fields) for fields in json.loads((folder / "faults.json").read_text())]


class Injector:
    """The faults of this process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        name = multiprocessing.current_process().name
        self._who = name.removeprefix("megasharp rank ") if name.startswith("megasharp rank ") else DRIVER
        self._faults = _read(folder)

    def install(self) -> None:
        """Replace what the points are at."""
        if self._who == DRIVER:
            _before(loop, "train_step", lambda parts, settings, step: self._arm(step))
            _before(loop, "_update", lambda *_: self.at("update"))
            _before(store, "_complete", lambda *_: self.at("save"))
        else:
            _before(learner.RankLearner, "step", lambda *_: self.at("update"))
            _after(learner.Passes, "update", lambda passes, *_: self._poison(passes))
            _after(learner.RankLearner, "step", lambda own, *_: self._flip(own))
            async_checkpoint.FileHash = _Hashing(self)  # type: ignore[misc, assignment]

    def start(self, checkpoints: Path) -> None:
        """In the driver, before anything else: corrupt what is due."""
        for fault in self._faults:
            if fault.action == "corrupt" and self._fired(fault.after).exists() and self._first(fault):
                newest = checkpoints / (checkpoints / "latest").read_text().strip()
                flip_a_byte(max((newest / "policy").iterdir(), key=lambda path: path.stat().st_size))

    def at(self, point: Point) -> None:
        """This process is at a point: whatever is armed for it there happens."""
        for fault in self._faults:
            mine = (fault.who, fault.point) == (self._who, point) and fault.action not in ("nan", "flip", "corrupt")
            if mine and self._armed(fault).exists() and self._first(fault):
                _do(fault)

    def _arm(self, step: int) -> None:
        for fault in self._faults:
            if fault.step == step:
                self._armed(fault).touch()
        self.at("step")

    def _poison(self, passes: Any) -> None:
        for fault in self._faults:
            armed = (fault.who, fault.action) == (self._who, "nan") and self._armed(fault).exists()
            if armed and self._first(fault):
                parameter = next(p for chunk in passes._chunks for p in chunk.parameters() if p.requires_grad)
                parameter.main_grad.view(-1)[0] = torch.nan

    def _flip(self, own: Any) -> None:
        for fault in self._faults:
            armed = (fault.who, fault.action) == (self._who, "flip") and self._armed(fault).exists()
            if armed and self._first(fault):
                parameter = next(p for chunk in own._chunks for p in chunk.parameters() if p.requires_grad)
                parameter.data.view(torch.uint8).view(-1)[0] ^= 1

    def _first(self, fault: Fault) -> bool:
        """Leave the witness; False when there is one: files that exist are not made again."""
        try:
            os.close(os.open(self._fired(fault.name), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def _armed(self, fault: Fault) -> Path:
        return self._folder / f"armed_{fault.name}"

    def _fired(self, name: str) -> Path:
        return self._folder / f"fired_{name}"


class _Hashing:
    """`FileHash` of the thread that writes a rank's shards: it is asked for after each file."""

    def __init__(self, injector: Injector) -> None:
        self._injector = injector
        self._own = async_checkpoint.FileHash

    def of(self, path: Path) -> object:
        self._injector.at("save")
        return self._own.of(path)


def _do(fault: Fault) -> None:
    if fault.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.action == "delay":
        time.sleep(fault.seconds)
    elif fault.action == "raise":
        raise RuntimeError(f"fault {fault.name}")


def flip_a_byte(path: Path) -> None:
    """In the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


def _before(owner: Any, name: str, deed: Callable[..., object]) -> None:
    function = getattr(owner, name)

    def wrapped(*arguments: Any, **named: Any) -> Any:
        deed(*arguments)
        return function(*arguments, **named)

    setattr(owner, name, wrapped)


def _after(owner: Any, name: str, deed: Callable[..., object]) -> None:
    function = getattr(owner, name)

    def wrapped(*arguments: Any, **named: Any) -> Any:
        result = function(*arguments, **named)
        deed(*arguments)
        return result

    setattr(owner, name, wrapped)
