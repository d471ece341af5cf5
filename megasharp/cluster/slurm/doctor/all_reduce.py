"""An all-reduce over all ranks of a job, timed, and their clocks read at one moment.

`python -m megasharp.cluster.slurm.doctor.all_reduce FILE RANK WORLD DEVICE` is one rank. Ranks meet through a file that
all of them see. NCCL on `cuda`, one GPU a rank, gloo on `cpu`. Rank 0 prints the best seconds of a few rounds, and the
clock of each rank just after a barrier: whoever came late has been waited for by then.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from megasharp.common.errors import UserError

_ROUNDS = 5
_LIMIT_S = 120
# Large enough for the links' full rate; small on CPUs, where nothing is demanded.
MEBIBYTES = {"cuda": 4096, "cpu": 16}


@dataclass(frozen=True, slots=True)
class Measured:
    """Rank 0's record: seconds of one all-reduce, and each rank's clock at one moment, in seconds since 1970."""

    seconds: float
    clocks: tuple[float, ...]


def measure(
    meeting: Path, first: int, local: int, world: int, device: str, variables: Mapping[str, str]
) -> Measured | None:
    """Start ranks `first` to `first + local` here and wait for them; None where rank 0 is not among them.

    `device` is a key of MEBIBYTES: a run on CPUs asks for no GPU that happens to be here. Raises UserError with a
    rank's last line when one fails.
    """
    processes = [
        subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, str(meeting), str(rank), str(world), device],
            env={**os.environ, **variables, "LOCAL_RANK": str(rank - first)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(first, first + local)
    ]
    try:
        outputs = [process.communicate(timeout=2 * _LIMIT_S) for process in processes]
    except subprocess.TimeoutExpired:
        raise UserError(
            f"an all-reduce of {world} ranks did not end in {2 * _LIMIT_S} s: a link or a rank hangs"
        ) from None
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for rank, (process, (_, errors)) in enumerate(zip(processes, outputs, strict=True), start=first):
        if process.returncode:
            last = (errors.strip().splitlines() or ["it said nothing"])[-1]
            raise UserError(f"rank {rank} of {world} failed in an all-reduce: {last}")
    if first != 0:
        return None
    found = json.loads(outputs[0][0].splitlines()[-1])
    return Measured(found["seconds"], tuple(found["clocks"]))


def main() -> None:
    """Run one rank."""
    import torch
    import torch.distributed as dist

    meeting, rank, world, kind = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    on_gpu = kind == "cuda"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=_LIMIT_S),
    )
    tensor = torch.ones(MEBIBYTES[kind] << 18, device=device)
    best = float("inf")
    for _ in range(_ROUNDS):
        tensor.fill_(1.0)
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(tensor)
        if on_gpu:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
        if float(tensor[-1]) != world:
            sys.exit(f"the sum over {world} ranks came out as {float(tensor[-1])}")
    clocks = torch.zeros(world, dtype=torch.float64, device=device)
    dist.barrier()
    clocks[rank] = time.time()
    dist.all_reduce(clocks)
    if rank == 0:
        print(json.dumps({"seconds": best, "clocks": clocks.tolist()}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
