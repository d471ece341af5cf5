"""How many CPU threads torch may use in each process of a run."""

from __future__ import annotations

import os

import torch

from megasharp.convert.architecture import Architecture

# Below this size a step is thousands of operations of some microseconds, and threads cost more than they bring: a
# step of the quickstart (0.6 million parameters, two cores) took 0.40 s on one thread and 0.52 s on two. Threads that
# wait for each other also suffer most when anything else runs on the machine.
ONE_THREAD_BELOW = 4_000_000


def cpu_threads(architecture: Architecture, processes: int, deterministic: bool) -> int:
    """Threads for one of `processes` processes that compute at the same time. OMP_NUM_THREADS, where set, decides.

    One in deterministic mode: sums depend on the number of threads, and so they would on the machine.
    """
    if deterministic:
        return 1
    if "OMP_NUM_THREADS" in os.environ:
        return torch.get_num_threads()
    if architecture.parameter_count() < ONE_THREAD_BELOW:
        return 1
    return max(1, torch.get_num_threads() // processes)


def limit_threads(architecture: Architecture, deterministic: bool = False) -> None:
    """Apply the rule to this process."""
    torch.set_num_threads(cpu_threads(architecture, 1, deterministic))
