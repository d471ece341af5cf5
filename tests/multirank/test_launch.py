"""The harness itself: results by rank, the first failure's traceback, hangs ended, no process left."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launch import RankError, run_ranks


@dataclass(frozen=True)
class Answer:
    rank: int
    total: torch.Tensor


def sum_of_ranks(rank: int, world: int, offset: Answer) -> Answer:
    total = offset.total + rank
    dist.all_reduce(total)
    return Answer(rank, total)


def fail_on_rank_1(rank: int, world: int) -> None:
    if rank == 1:
        raise KeyError("the culprit")
    dist.barrier()


def die_on_rank_1(rank: int, world: int) -> None:
    if rank == 1:
        os._exit(7)
    time.sleep(3600)


def hang(rank: int, world: int, folder: Path) -> None:
    (folder / str(rank)).write_text(str(os.getpid()))
    if rank == 0:
        time.sleep(3600)


def test_results_come_back_by_rank() -> None:
    answers = run_ranks(3, sum_of_ranks, Answer(-1, torch.tensor([10.0, 20.0])))
    assert [answer.rank for answer in answers] == [0, 1, 2]
    assert all(torch.equal(answer.total, torch.tensor([33.0, 63.0])) for answer in answers)


def test_failing_rank_is_named_with_its_traceback() -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1 of 2 failed.*fail_on_rank_1.*KeyError: 'the culprit'"):
        run_ranks(2, fail_on_rank_1)


def test_death_without_exception_is_reported_at_once() -> None:
    """The other rank sleeps for an hour, and a hang is reported by another message."""
    with pytest.raises(RankError, match="rank 1 of 2 failed\nexit code 7"):
        run_ranks(2, die_on_rank_1)


def test_hung_rank_is_killed_and_its_stack_shown(tmp_path: Path) -> None:
    """In several times the time that ranks need here to start and end, and no less than 6 s."""
    run_ranks(2, sum_of_ranks, Answer(-1, torch.tensor([0.0])))
    began = time.monotonic()
    run_ranks(2, sum_of_ranks, Answer(-1, torch.tensor([0.0])))
    limit = 6.0 + int(8 * (time.monotonic() - began))
    with pytest.raises(RankError, match=rf"(?s)ranks \[0\] still ran after {limit:g} s.*in hang"):
        run_ranks(2, hang, tmp_path, timeout_s=limit)
    for rank in range(2):
        process = int((tmp_path / str(rank)).read_text())
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def test_nested_functions_are_refused() -> None:
    with pytest.raises(ValueError, match="top level"):
        run_ranks(1, lambda rank, world: None)
