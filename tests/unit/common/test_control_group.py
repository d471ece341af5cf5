"""Limits of control groups as Linux writes them, in folders made here."""

from __future__ import annotations

from pathlib import Path

import pytest

from megasharp.common.control_group import least_cores, least_memory


@pytest.mark.parametrize(
    ("own", "files", "limit"),
    [
        ("0::/job_7/step_0\n", {"job_7/memory.max": "1000", "job_7/step_0/memory.max": "max"}, 1000),
        ("0::/job_7\n", {"job_7/memory.max": "max"}, None),
        # A container's own root, under a path of the host that is not seen here.
        ("0::/../host/job_7\n", {"memory.max": "500"}, 500),
        (
            "4:memory:/job_7/step_0\n0::/\n",
            {"memory/job_7/memory.limit_in_bytes": "700", "memory/job_7/step_0/memory.limit_in_bytes": f"{2**63}"},
            700,
        ),
        ("", {}, None),
    ],
)
def test_the_least_limit_of_a_cgroup_and_those_above_counts(
    tmp_path: Path, own: str, files: dict[str, str], limit: int | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert least_memory(own, tmp_path) == limit


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        ("0::/job_7/step_0\n", {"job_7/cpu.max": "250000 100000", "job_7/step_0/cpu.max": "max 100000"}, 2.5),
        ("0::/\n", {"cpu.max": "max 100000"}, None),
        (
            "5:cpu,cpuacct:/job_7\n0::/\n",
            {"cpu/job_7/cpu.cfs_quota_us": "50000", "cpu/job_7/cpu.cfs_period_us": "100000"},
            0.5,
        ),
        ("5:cpu,cpuacct:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
    ],
)
def test_the_least_quota_counts(tmp_path: Path, own: str, files: dict[str, str], cores: float | None) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert least_cores(own, tmp_path) == cores
