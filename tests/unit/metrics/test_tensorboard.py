"""Event files: rows of a run that was cut off are gone from them, not only hidden."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from megasharp.metrics.tensorboard import TensorBoard


def aside(folder: Path) -> Path:
    """A place of its own for each resume."""
    superseded = folder.with_name(f"{folder.name}_superseded")
    return superseded / f"attempt_{1 + len([*superseded.glob('*')])}"


def attempt(folder: Path, resumed: int | None, steps: range, value: float) -> None:
    board = TensorBoard(folder, resumed, aside(folder))
    for step in steps:
        board.write(step, {"reward/mean": value + step, "time/step": 1.0})
    board.close()


def in_files(folder: Path) -> list[int]:
    """Steps of all rows in all event files, as they lie there."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    # Names end with a process's count of its writers, which has more digits from the tenth on.
    paths = sorted(folder.iterdir(), key=lambda path: [int(part) for part in path.name.split(".") if part.isdigit()])
    events = [event for path in paths for event in EventFileLoader(str(path)).Load()]
    return [event.step for event in events if event.HasField("summary")]


def shown(folder: Path) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars("reward/mean")]


def test_rows_beyond_the_resumed_step_are_gone_from_the_files(tmp_path: Path) -> None:
    attempt(tmp_path, None, range(1, 6), 0.0)
    attempt(tmp_path, 3, range(4, 8), 100.0)
    attempt(tmp_path, 5, range(6, 8), 200.0)
    assert in_files(tmp_path) == [1, 2, 3, 4, 5, 6, 7]
    moved = tmp_path.with_name(f"{tmp_path.name}_superseded")
    assert [in_files(moved / f"attempt_{number}" / tmp_path.name) for number in (1, 2)] == [[4, 5], [6, 7]]
    assert shown(tmp_path) == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 104.0), (5, 105.0), (6, 206.0), (7, 207.0)]


def test_a_file_of_which_nothing_is_left_goes(tmp_path: Path) -> None:
    attempt(tmp_path, None, range(1, 4), 0.0)
    attempt(tmp_path, 3, range(4, 6), 1.0)
    attempt(tmp_path, 3, range(4, 5), 2.0)
    assert len(list(tmp_path.iterdir())) == 2
    assert shown(tmp_path)[-1] == (4, 6.0)


def test_an_evaluation_that_a_resume_made_up_for_stays_through_the_next_one(tmp_path: Path) -> None:
    """It lies behind the start, which names the step after it."""
    attempt(tmp_path, None, range(1, 6), 0.0)
    for last in (4, 6):
        board = TensorBoard(tmp_path, 3, aside(tmp_path))
        board.write(3, {"eval/x/pass@1": 0.5})
        board.write(4, {"reward/mean": float(last)})
        board.close()
        if last == 4:
            again = TensorBoard(tmp_path, 3, aside(tmp_path))
            again.close()
            assert in_files(tmp_path) == [1, 2, 3, 3]


@pytest.mark.parametrize("torn", [1, 11, 40])
def test_a_record_that_was_torn_goes(tmp_path: Path, torn: int) -> None:
    attempt(tmp_path, None, range(1, 6), 0.0)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-torn])
    attempt(tmp_path, 9, range(10, 12), 0.0)
    assert in_files(tmp_path) == [1, 2, 3, 4, 10, 11]


@pytest.mark.parametrize("place", [3, 12])
def test_nothing_behind_a_damaged_record_is_lost(tmp_path: Path, place: int) -> None:
    """A byte of the second record's length, and one of its content."""
    attempt(tmp_path, None, range(1, 6), 0.0)
    (path,) = tmp_path.iterdir()
    whole = bytearray(path.read_bytes())
    first = 12 + int.from_bytes(whole[:8], "little") + 4
    second = first + 12 + int.from_bytes(whole[first : first + 8], "little") + 4
    whole[second + place] ^= 0xFF
    path.write_bytes(whole)
    attempt(tmp_path, 9, range(10, 11), 0.0)
    (moved,) = tmp_path.with_name(f"{tmp_path.name}_superseded").rglob(path.name)
    assert path.read_bytes() + moved.read_bytes().removeprefix(whole[:first]) == whole
    assert in_files(tmp_path) == [1, 10]


def test_a_hundred_thousand_rows_are_cut_in_seconds(tmp_path: Path) -> None:
    """Written once and repeated: what costs time is the number of records."""
    attempt(tmp_path, None, range(1, 1001), 0.0)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    version = 12 + int.from_bytes(whole[:8], "little") + 4
    path.write_bytes(whole[:version] + whole[version:] * 100)
    began = time.monotonic()
    board = TensorBoard(tmp_path, 1000, aside(tmp_path))
    taken = time.monotonic() - began
    board.close()
    assert taken < 20.0
