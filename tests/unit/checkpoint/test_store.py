"""Checkpoints exist only when complete, survive what happens to disks, and are pruned by the rules."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cases import each_case
from waiting import HANG_S

from megasharp.checkpoint.manifest import FileEntry, describe_files
from megasharp.checkpoint.store import CheckpointStore, RunState, read_state
from megasharp.common.control import BestFigure, ControlState, LengthChange, LengthState, Reset, ResetState, Watch
from megasharp.common.errors import RankDied, UserError
from megasharp.common.files import FileHash
from tests.unit.saving import save_at_once


def state(step: int) -> RunState:
    return RunState(
        reference="base",
        step=step,
        policy_version=step + 1,
        cursor_epoch=2,
        cursor_position=17,
        skipped_in_a_row=1,
        pending=((1, 95), (2, 3)),
        control=ControlState(
            ResetState(Watch(0.5, 2, 0.4, 4, 1), "due", (Reset(3, "every 3 steps", ("reference", "optimizer")),)),
            LengthState(1, (0.1, 1 / 3), Watch(), None, (LengthChange(2, 16, "step 2 is done"),)),
            {"eval/dev/pass@1": BestFigure(0.1 + 0.2, 4)},
            evaluated_step=4,
        ),
    )


def write(folder: Path) -> None:
    (folder / "policy").mkdir()
    (folder / "policy" / "shard_0").write_bytes(b"weights" * 100)
    (folder / "notes.txt").write_text("hello")


def store_with(folder: Path, steps: list[int], keep_last: int = 9, keep_every: int | None = None) -> CheckpointStore:
    store = CheckpointStore(folder, keep_last, keep_every)
    for step in steps:
        save_at_once(store, state(step), write)
    return store


def test_what_was_saved_is_read(tmp_path: Path) -> None:
    store = store_with(tmp_path / "checkpoints", [5, 12])
    found = store.newest()
    assert found is not None
    folder, read = found
    assert folder == tmp_path / "checkpoints" / "step_000012" and read == state(12) == read_state(folder)
    assert (folder / "policy" / "shard_0").read_bytes() == b"weights" * 100
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step_000012\n"
    assert store.steps() == [5, 12]


def test_manifest_lists_every_file(tmp_path: Path) -> None:
    store_with(tmp_path, [1])
    manifest = json.loads((tmp_path / "step_000001" / "manifest.json").read_text())
    assert manifest["files"].keys() == {"policy/shard_0", "notes.txt"}
    assert manifest["files"]["policy/shard_0"]["size"] == 700
    assert {"torch", "megatron-core"} <= manifest["software"].keys()


def test_the_best_step_outlives_retention_until_another_is_better(tmp_path: Path) -> None:
    store = store_with(tmp_path, [1, 2], keep_last=1)
    store.best = 2
    save_at_once(store, state(3), write)
    save_at_once(store, state(4), write)
    assert store.steps() == [2, 4]
    store.best = 4
    save_at_once(store, state(5), write)
    assert store.steps() == [4, 5]


def test_the_best_step_stays_until_the_new_ones_checkpoint_is_there(tmp_path: Path) -> None:
    """The evaluation is done first, and the save that follows may fail."""
    store = store_with(tmp_path, [1, 2], keep_last=1)
    store.best = 2
    save_at_once(store, state(3), write)
    store.best = 4
    save_at_once(store, state(5), write)
    assert store.steps() == [2, 5]
    store.best = 6
    save_at_once(store, state(6), write)
    save_at_once(store, state(7), write)
    assert store.steps() == [6, 7]


def test_nothing_saved_is_no_checkpoint(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path / "new", 1, None).newest() is None


@each_case("error", [RuntimeError("bug"), KeyboardInterrupt()])
def test_partial_is_never_visible(tmp_path: Path, error: BaseException) -> None:
    store = store_with(tmp_path, [1])

    def fail(folder: Path) -> None:
        write(folder)
        assert store.steps() == [1]
        raise error

    with pytest.raises(type(error)):
        save_at_once(store, state(2), fail)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_000001"]


def test_leftovers_of_a_killed_process_do_not_disturb(tmp_path: Path) -> None:
    """Killed while writing; killed after the rename but before `latest`."""
    store = store_with(tmp_path, [1, 2])
    leftover = tmp_path / ".step_000003.partial"
    leftover.mkdir()
    (leftover / "old").write_text("old")
    (tmp_path / "latest").write_text("step_000001\n")
    (tmp_path / "step_000002.copy").mkdir()
    (tmp_path / "step_000002.copy" / "manifest.json").write_text("{}")
    found = store.newest()
    assert found is not None and found[0].name == "step_000002"
    save_at_once(store, state(3), write)
    assert not (tmp_path / "step_000003" / "old").exists() and store.steps() == [1, 2, 3]


@each_case(
    ("keep_last", "keep_every", "left"),
    [(1, None, [60]), (2, None, [50, 60]), (1, 20, [20, 40, 60]), (2, 30, [30, 50, 60])],
)
def test_retention(tmp_path: Path, keep_last: int, keep_every: int | None, left: list[int]) -> None:
    store = store_with(tmp_path, [10, 20, 30, 40, 50, 60], keep_last, keep_every)
    assert store.steps() == left
    assert sorted(path.name for path in tmp_path.glob("step_*")) == [f"step_{step:06d}" for step in left]


def test_what_a_killed_removal_left_goes_at_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_with(tmp_path, [1])
    monkeypatch.setattr(shutil, "rmtree", lambda *arguments, **options: None)
    store_with(tmp_path, [2], keep_last=1)
    monkeypatch.undo()
    assert store.steps() == [2] and not (tmp_path / "step_000001").exists()
    assert len(list(tmp_path.rglob("shard_0"))) == 2
    store.take_up(lambda problem: None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_000002"]
    save_at_once(store, state(1), write)
    assert store.steps() == [1, 2]


def test_a_removal_that_is_refused_does_not_disturb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_with(tmp_path, [1], keep_last=1)
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path.name == "step_000001":
            raise PermissionError(errno.EACCES, "Permission denied")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    save_at_once(store, state(2), write)
    assert store.steps() == [1, 2] and (tmp_path / "latest").read_text() == "step_000002\n"
    monkeypatch.undo()
    save_at_once(store, state(3), write)
    assert store.steps() == [3]


def test_a_checkpoint_that_latest_could_not_name_is_told_as_complete(tmp_path: Path) -> None:
    store = store_with(tmp_path, [1], keep_last=1)
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").mkdir()
    with pytest.raises(UserError, match=r"step_000002: this checkpoint is complete, but latest does not .*--resume$"):
        save_at_once(store, state(2), write)
    found = store.newest()
    assert found is not None and found[1] == state(2) and store.steps() == [1, 2]


def test_files_that_the_drivers_listing_lacks_are_in_the_manifest(tmp_path: Path) -> None:
    """Another node's are seen late through a network file system's cache."""
    (tmp_path / "here").write_text("x")
    elsewhere = FileHash(3, "abc")
    found = describe_files(tmp_path, {tmp_path / "policy" / "elsewhere": elsewhere})
    assert found == {
        "here": FileEntry.of(FileHash.of(tmp_path / "here")),
        "policy/elsewhere": FileEntry.of(elsewhere),
    }


def flip_byte(folder: Path) -> None:
    content = bytearray((folder / "policy" / "shard_0").read_bytes())
    content[350] ^= 1
    (folder / "policy" / "shard_0").write_bytes(bytes(content))


def truncate(folder: Path) -> None:
    os.truncate(folder / "policy" / "shard_0", 699)


def lose_file(folder: Path) -> None:
    (folder / "notes.txt").unlink()


def spoil_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"step": 2')


def replace_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text('["step", 2]')


@each_case("damage", [flip_byte, truncate, lose_file, spoil_manifest, replace_manifest])
def test_damaged_checkpoint_gives_way_to_the_one_before(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    store = store_with(tmp_path, [1, 2])
    damage(tmp_path / "step_000002")
    found = store.newest()
    assert found is not None and found[1].step == 1
    damage(tmp_path / "step_000001")
    with pytest.raises(UserError, match=r"no complete checkpoint: .*step_000002") as refused:
        store.newest()
    assert "\n" not in str(refused.value)


def test_every_flipped_bit_of_a_manifest_is_seen(tmp_path: Path) -> None:
    """What it still reads as is what was saved: a flip within white space changes nothing."""
    store_with(tmp_path, [1])
    path = tmp_path / "step_000001" / "manifest.json"
    content, state_before = path.read_bytes(), read_state(path.parent)
    unseen = 0
    for place in range(len(content)):
        for bit in range(8):
            path.write_bytes(content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :])
            if CheckpointStore.problem(path.parent) is None:
                assert read_state(path.parent) == state_before
                unseen += 1
    assert unseen < 0.01 * 8 * len(content)


def test_a_checkpoint_under_another_steps_name_is_none(tmp_path: Path) -> None:
    store = store_with(tmp_path, [1, 2])
    (tmp_path / "step_000002").rename(tmp_path / "step_000003")
    told: list[str] = []
    found = store.newest(told.append)
    assert found is not None and found[1].step == 1
    assert told == [f"{tmp_path}/step_000003/manifest.json is that of step 2"]


def moved(step: int) -> str:
    return f"step_{step:06d} is now damaged_step_{step:06d} and stays until you remove it"


def test_damaged_newer_checkpoints_make_way(tmp_path: Path) -> None:
    """Else the run would write into their names, and `latest` would name something that is being replaced."""
    store = store_with(tmp_path, [1, 2, 3])
    (tmp_path / "step_000003" / "notes.txt").write_text("hullo")
    (tmp_path / "step_000002" / "policy" / "shard_0").unlink()
    (tmp_path / ".step_000004.partial").mkdir()
    said: list[str] = []
    found = store.take_up(said.append)
    assert found is not None and found[1] == state(1)
    assert [line.split("/")[-2:] for line in said] == [
        ["step_000003", f"notes.txt differs from what was saved; {moved(3)}"],
        ["policy", f"shard_0 is missing; {moved(2)}"],
    ]
    assert (tmp_path / "latest").read_text() == "step_000001\n" and store.steps() == [1]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "damaged_step_000002",
        "damaged_step_000003",
        "latest",
        "step_000001",
    ]
    save_at_once(store, state(2), write)
    assert store.steps() == [1, 2] and (tmp_path / "latest").read_text() == "step_000002\n"


def test_what_is_damaged_again_keeps_what_was_damaged_before(tmp_path: Path) -> None:
    """One without a manifest, which a purge has removed, makes way too: the next save of its step needs the name."""
    for shard in ("first", "second"):
        store = store_with(tmp_path, [1, 2])
        (tmp_path / "step_000002" / "policy" / "shard_0").write_text(shard)
        if shard == "second":
            (tmp_path / "step_000002" / "manifest.json").unlink()
        said: list[str] = []
        store.take_up(said.append)
        assert len(said) == 1 and store.steps() == [1]
        shutil.rmtree(tmp_path / "step_000001")
    kept = {path.parents[1].name: path.read_text() for path in tmp_path.glob("damaged_*/policy/shard_0")}
    assert kept == {"damaged_step_000002": "first", "damaged_step_000002_2": "second"}


@each_case("number", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_while_writing_shards(tmp_path: Path, number: int) -> None:
    """As Megatron reports it too: an error of its own, raised from the system's."""
    store = store_with(tmp_path, [4])

    def fail(folder: Path) -> None:
        write(folder)
        try:
            raise OSError(number, os.strerror(number))
        except OSError as error:
            raise RuntimeError("a writer failed") from error

    with pytest.raises(UserError, match=r"step_000005: no space left on the disk.*newest complete step: 4") as refused:
        save_at_once(store, state(5), fail)
    assert "\n" not in str(refused.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_000004"]


def test_a_rank_that_dies_while_it_writes_is_named_with_what_is_left(tmp_path: Path) -> None:
    store = store_with(tmp_path, [4])

    def fail(folder: Path) -> None:
        write(folder)
        raise RankDied("rank 1 failed in finish_saves: [Errno 5] Input/output error")

    with pytest.raises(RankDied, match=r"rank 1 failed in .*error; .*step_000005: this .* newest complete step: 4$"):
        save_at_once(store, state(5), fail)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_000004"]


LIMITED = """
import sys
from pathlib import Path
from megasharp.checkpoint.store import CheckpointStore, RunState
from megasharp.common.errors import UserError
from tests.unit.saving import save_at_once

store = CheckpointStore(Path(sys.argv[1]), 3, None)
save_at_once(store, RunState(reference="base", step=1), lambda folder: None)
try:
    big = lambda folder: (folder / "big").write_bytes(bytes(1 << 20)) and None
    save_at_once(store, RunState(reference="base", step=2), big)
except UserError as error:
    print(error)
"""


def test_full_disk_for_real(tmp_path: Path) -> None:
    """A limit on file size fails writes as a full disk does."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, 1 << 18))

    done = subprocess.run(
        [sys.executable, "-B", "-c", LIMITED, str(tmp_path)],
        capture_output=True, text=True, check=True, preexec_fn=limit, timeout=HANG_S, cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert "no space left on the disk" in done.stdout and len(done.stdout.splitlines()) == 1
    assert CheckpointStore(tmp_path, 3, None).steps() == [1]
    assert not list(tmp_path.glob(".*"))
