"""Shares of a step reach the ranks that work on them, bit for bit, and leave nothing behind."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import signal
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launch import run_ranks
from policies import CPU, recipe, save_model, settings
from torch import Tensor

from megasharp.common.layout import ParallelLayout
from megasharp.learner.learner import POLICY, LearnerSettings, RankLearner
from megasharp.learner.parallel import destroy, initialize, megatron_device
from megasharp.learner.ranks.processes import ProcessRanks, RankDied

EIGHT = (
    ParallelLayout(tp=2, dp=2, pp=2),
    ParallelLayout(cp=2, dp=2, pp=2),
    ParallelLayout(tp=2, cp=2, dp=2),
)


def data_places(rank: int, world: int) -> list[tuple[int, int]]:
    """This rank's data-parallel place at each layout: by our formula, and by Megatron's groups."""
    found = []
    for layout in EIGHT:
        with megatron_device(CPU):
            place = initialize(layout, seed=0, gloo=False)
        found.append((layout.data_rank(dist.get_rank()), place.dp))
        destroy()
        gc.collect()
    return found


def test_data_places_are_those_of_megatrons_groups() -> None:
    """Another order would give ranks a share of their peers' and the sum of gradients would hide it."""
    for rank in run_ranks(8, data_places):
        assert all(ours == theirs for ours, theirs in rank), rank


@dataclass(frozen=True)
class Share:
    """Stands for a data-parallel place's micro-batches: large and small tensors of several dtypes."""

    ids_P: Tensor
    logp_T: Tensor
    advantage_T: Tensor
    lengths_S: Tensor


def shares(count: int) -> list[Share]:
    """Shares of other bits and another size each, with NaNs among them."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for place in range(count):
        bits = torch.randint(-(2**31), 2**31 - 1, (3, 50_000 + place), generator=generator, dtype=torch.int32)
        half = bits[2, :4000].view(torch.bfloat16)
        made.append(Share(bits[0], bits[1].view(torch.float32), half, torch.arange(place + 1)))
    return made


def digest(share: Share) -> str:
    whole = hashlib.sha256()
    for tensor in (share.ids_P, share.logp_T, share.advantage_T, share.lengths_S):
        whole.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        whole.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


@dataclass(frozen=True)
class Seen:
    """One rank's share: its bits, a column of it, and the inodes of the memory files that the rank maps.

    `named`: what it maps under a name.
    """

    place: int
    digest: str
    logp_T: Tensor
    files: tuple[str, ...]
    named: list[str]


def seen(part: RankLearner, share: Share, shift: int, *, write: bool = False) -> Seen:
    found = Seen(part.place.dp, digest(share), share.logp_T.roll(shift), mapped_files(), named_memory())
    if write:
        # Peers of the share, which map the same file, must not see it.
        share.ids_P.zero_()
    return found


def mapped_files() -> tuple[str, ...]:
    lines = Path("/proc/self/maps").read_text(encoding="ascii").splitlines()
    return tuple(line.split()[4] for line in lines if "memfd:" in line)


def open_files() -> set[str]:
    """Memory files and sockets that this process has open, by name and inode."""
    gc.collect()
    kinds = set()
    for place in Path("/proc/self/fd").iterdir():
        # The listing's own is gone by now.
        with contextlib.suppress(FileNotFoundError):
            kinds.add(str(place.readlink()))
    return {kind for kind in kinds if "memfd:" in kind or kind.startswith("socket:")}


def named_memory(process: int | str = "self") -> list[str]:
    """Mappings of named files in /dev/shm, which would stay if the process were killed."""
    lines = Path(f"/proc/{process}/maps").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if "/dev/shm/" in line and not line.endswith("(deleted)")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("models"), "qwen3-tied")


def values(folder: str, layout: ParallelLayout) -> dict[str, LearnerSettings]:
    return {POLICY: replace(settings(folder, layout, recipe().needs), layout=layout)}


@pytest.mark.parametrize(
    "layout", [ParallelLayout(dp=2, tp=2), ParallelLayout(dp=2, pp=2), ParallelLayout(dp=2, cp=2)], ids=str
)
def test_peers_map_one_copy_of_their_share(folder: str, tmp_path: Path, layout: ParallelLayout) -> None:
    """Twice, because what a rank wrote into its share the first time must not be in the next; results come in full."""
    ranks = ProcessRanks(values(folder, layout), CPU, tmp_path / "logs")
    before, sent = open_files(), shares(layout.dp)
    for _ in range(2):
        found = ranks.call_shared(POLICY, seen, sent, 3, write=True)
        assert [each.place for each in found] == [layout.data_rank(rank) for rank in range(layout.world)]
        for each in found:
            own = sent[each.place]
            assert each.digest == digest(own)
            assert torch.equal(own.logp_T.roll(3).view(torch.int32), each.logp_T.view(torch.int32))
        files = [{each.files for each in found if each.place == place} for place in range(layout.dp)]
        assert all(len(of_place) == 1 for of_place in files), "peers map different files"
        assert [len(*of_place) for of_place in files] == [1] * layout.dp, (
            "the share is mapped once, the last one no more"
        )
        assert files[0] != files[1]
        assert not named_memory() and not any(each.named for each in found)
    del found
    # Of what tests before this one opened, some is closed meanwhile.
    assert not open_files() - before
    ranks.close()


def end_of(part: RankLearner, _: Share, victim: int) -> None:
    if dist.get_rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_a_rank_that_is_killed_with_its_share_leaves_nothing(folder: str, tmp_path: Path) -> None:
    before, layout = open_files(), ParallelLayout(tp=2)
    ranks = ProcessRanks(values(folder, layout), CPU, tmp_path / "logs")
    with pytest.raises(RankDied, match=r"rank 1 ended with exit code -9 in end_of; its log is .*rank_1\.log"):
        ranks.call_shared(POLICY, end_of, shares(1), 1)
    ranks.close()
    del ranks
    assert not open_files() - before
