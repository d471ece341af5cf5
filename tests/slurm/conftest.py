"""Makes the helpers of this folder importable, and gives all its tests one real Slurm of three nodes."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from cluster import Cluster, problem


@pytest.fixture(scope="session")
def slurm() -> Iterator[Cluster]:
    """Fails, where it cannot start, with one line that says what to do."""
    why = problem()
    if why is not None:
        pytest.fail(why, pytrace=False)
    # Sockets need short paths.
    cluster = Cluster(Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp")), nodes=3)
    try:
        yield cluster
    finally:
        cluster.close()
