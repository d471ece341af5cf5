"""Saves in the background: the same files as a save that is waited for, and a rank's failure is everybody's."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from launch import run_ranks
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from policies import LAYOUTS, learner_on, packed, ragged_sequences, recipe, save_model, settings

from megasharp.common.errors import disk_is_full
from megasharp.common.files import FileHash

LAYOUT = "tp2"


def save_twice(rank: int, world: int, root: Path, model: str) -> dict[str, dict[str, FileHash]]:
    """The files of a save that is waited for, and of one during which a step is trained; by name."""
    batch = packed(ragged_sequences(), LAYOUTS[LAYOUT])
    saved: dict[str, dict[str, FileHash]] = {}
    with learner_on(settings(model, LAYOUTS[LAYOUT], recipe().needs)) as (learner, _):
        learner.step(batch, recipe())
        for name in ("waited", "meanwhile"):
            (root / name).mkdir(exist_ok=True)
            learner.begin_save(root / name, copy=name == "meanwhile")
            if name == "meanwhile":
                learner.step(batch, recipe())
            files = learner.finish_saves()
            assert learner.saves_are_written()
            saved[name] = {path.name: found for path, found in files.items()}
            assert set(files) == {path for path in (root / name).iterdir() if path.is_file()}, "no file is left out"
    return saved


@pytest.mark.long("saves")
def test_a_save_meanwhile_writes_the_same_files(tmp_path: Path) -> None:
    model = save_model(tmp_path, "qwen3-tied")
    files = run_ranks(2, save_twice, tmp_path, model)[0]
    # Megatron's own list of the shards has the folder's name in it.
    waited, meanwhile = ({name: found for name, found in of.items() if name != ".metadata"} for of in files.values())
    assert waited == meanwhile
    shards = [name for name in waited if name.endswith(".distcp")]
    assert {name.split("_")[2] for name in shards} == {"0", "1"}, "both ranks wrote"
    for name, found in files["meanwhile"].items():
        assert found == FileHash.of(tmp_path / "meanwhile" / name)


def save_with_a_full_disk(rank: int, world: int, root: Path, model: str) -> str:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    values = settings(model, LAYOUTS[LAYOUT], recipe().needs)
    with learner_on(values) as (_, own), pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(FileSystemWriterAsync, "write_preloaded_data", refuse)
        own.begin_save(root, copy=True)
        with pytest.raises(RuntimeError) as failed:
            own.finish_saves()
        assert disk_is_full(failed.value) == (rank == 0)
        return str(failed.value)


def test_one_rank_that_cannot_write_fails_the_save_of_all(tmp_path: Path) -> None:
    model = save_model(tmp_path, "qwen3-tied")
    (tmp_path / "full").mkdir()
    told = run_ranks(2, save_with_a_full_disk, tmp_path / "full", model)
    assert told == [
        "shards were not written: rank 1: Worker failure: [Errno 28] No space left on device",
        "shards were not written: another rank says why",
    ]
    assert not (tmp_path / "full" / "metadata.json").exists()
