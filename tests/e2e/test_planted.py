"""A checkpoint of a stranger is read and never executed: one line, exit code 2, by every command that reads one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from nursery import Nursery
from planted import plant, record_again
from quickstart import REPOSITORY
from waiting import HANG_S

STORED = REPOSITORY / "tests" / "stored" / "2026_11_24"
OLD, LORA = Path("runs/old/checkpoints/step_000004"), Path("runs/lora/checkpoints/step_000002")
RESUME = ("train", "runs/old/config.yaml", "--resume", "steps=5")
SHORT = ("eval.every=0", "eval.suites=[]", "checkpoint.keep_best=null", "steps=1", "name=new")
Refused = Callable[..., None]


@pytest.fixture
def refused(tmp_path: Path, nursery: Nursery) -> Refused:
    """Plants at `place` of `shards` in a copy of the stored runs; the command must refuse it, and make nothing."""

    def check(shards: Path, place: str, *command: str, checkpoint: Path | None = None) -> None:
        folder = Path(shutil.copytree(STORED, tmp_path / "stored"))
        made, out, error = tmp_path / "made", tmp_path / "out", tmp_path / "error"
        path, words = plant(folder / shards, place, made)
        if checkpoint is not None:
            record_again(folder / checkpoint, path, folder / shards / ".metadata")
        ended = nursery.run(command, folder, out, error, timeout_s=HANG_S)
        said = error.read_text()
        assert (ended, made.exists()) == (2, False), said
        line = said.splitlines()[-1]
        assert words in line and path.name in line and str(path.parent.relative_to(folder)) in line, said
        assert "Traceback" not in said
        shutil.rmtree(folder)

    return check


@pytest.mark.long("saves")
def test_commands_that_read_weights(refused: Refused) -> None:
    megatron = Path("megatron/policy")
    refused(megatron, "table", "convert", "megatron-to-hf", "megatron", "new")
    refused(OLD / "policy", "table", "convert", "megatron-to-hf", str(OLD), "new")
    refused(LORA / "policy", "table", "convert", "megatron-to-peft", str(LORA), "new")
    refused(megatron, "common", "convert", "verify", "model", "megatron", "--tokens", "8")
    for place in ("table", "object", "common"):
        refused(megatron, place, "train", "run.yaml", "model.path=megatron", *SHORT)
    refused(OLD / "policy", "table", "eval", "runs/old", "--suite", "dev.yaml", "--out", "new", checkpoint=OLD)


@pytest.mark.long("saves")
@pytest.mark.parametrize("part", ["policy", "memory/policy", "reference"])
def test_resumed_runs(refused: Refused, part: str) -> None:
    for place in ("table", "class", "object", "common", "elsewhere"):
        if (part, place) != ("reference", "common"):
            refused(OLD / part, place, *RESUME, checkpoint=OLD)
