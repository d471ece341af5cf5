"""Who may read a run's folder: its owner, or its group where the run says so, whatever the user's umask."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from quickstart import Command

from megasharp.checkpoint.run_folder import open_run
from megasharp.common.files import write_below, write_like

EVALUATED = ("eval.suites=[countdown_dev]", "eval.n=1", "eval.k=[1]")


def modes(root: Path) -> Iterator[tuple[Path, int]]:
    """Each folder and file, with its mode."""
    for path in (root, *root.rglob("*")):
        if not path.is_symlink():
            yield path, stat.S_IMODE(path.stat().st_mode)


def check_owners_only(root: Path) -> None:
    for path, mode in modes(root):
        assert mode in ((0o700,) if path.is_dir() else (0o600,)), f"{path} has {mode:o}"


def check_groups(root: Path, group: int) -> None:
    """Engines' logs hold the key of their engine: they stay their owner's."""
    for path, mode in modes(root):
        wanted = 0o2750 if path.is_dir() else 0o600 if path.name.startswith("engine_") else 0o640
        assert mode == wanted, f"{path} has {mode:o}"
        assert path.stat().st_gid == group, path


@pytest.mark.long("runs")
def test_a_run_is_its_owners(command: Command) -> None:
    """With a umask that lets the group write; the folder of runs is an ordinary one."""
    root = command.runs / "a"
    command.run(*command.train("name=a", "steps=1", *EVALUATED, "log.tensorboard=true"), umask=0o002)
    check_owners_only(root)
    assert stat.S_IMODE(command.runs.stat().st_mode) == 0o775
    assert {path.name for path in root.iterdir()} >= {"checkpoints", "evals", "logs", "probe"}


def test_an_older_releases_folder_is_closed_by_a_resume(tmp_path: Path) -> None:
    """What was in it keeps its modes, and nobody reaches it."""
    root = tmp_path / "a"
    open_run(root, "name: a", resume=False).close()
    for path in (root, *root.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    os.umask(0o022)
    open_run(root, "name: a", resume=True).close()
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    new, old = (stat.S_IMODE((root / "logs" / f"attempt_{n}" / "config.yaml").stat().st_mode) for n in (2, 1))
    assert (new, old) == (0o600, 0o644)


@pytest.mark.long("runs")
@pytest.mark.parametrize(
    ("readers", "backend", "umask"), [("owner", "ray", 0o022), ("group", "local", 0o002)], ids=["owner", "group"]
)
def test_every_writer(command: Command, readers: str, backend: str, umask: int) -> None:
    """Ranks, workers and trackers; then an evaluation, a probe, a report and a picture of it."""
    command.runs.mkdir(mode=0o775)
    group = 12345 if os.getuid() == 0 else os.getgid()
    os.chown(command.runs, -1, group)
    command.runs.chmod(0o2775)
    root = command.runs / "a"
    more = ("log.tensorboard=true", "log.mlflow=modes", f"log.readable_by={readers}", f"cluster.backend={backend}")
    command.run(
        *command.train("name=a", "steps=2", "policy.dp=2", "checkpoint.every=1", *EVALUATED, *more), umask=umask
    )
    command.run(
        "eval", str(root), "--suite", "countdown_dev", "--n", "1", "--k", "1", "--out", str(root / "mine"), umask=umask
    )
    command.run("probe", str(root), "--problems", "1", umask=umask)
    command.run("report", str(root), umask=umask)
    outside = command.runs / "page.html"
    command.run("report", str(root), "--out", str(outside), umask=umask)
    command.run(
        "runs",
        "compare",
        str(root),
        str(command.runs / "a"),
        "--picture",
        str(outside.with_suffix(".png")),
        umask=umask,
        code=2,
    )
    if readers == "owner":
        check_owners_only(root)
    else:
        check_groups(root, group)
    assert stat.S_IMODE(outside.stat().st_mode) == (0o600 if readers == "owner" else 0o640)


def test_what_is_written_of_several_is_for_the_readers_of_all(tmp_path: Path) -> None:
    for name, mode in (("a", 0o750), ("b", 0o705), ("c", 0o777)):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
    os.umask(0o022)
    write_like(tmp_path / "c")
    (tmp_path / "open").write_text(json.dumps({}))
    write_like(tmp_path / "a", tmp_path / "b", tmp_path / "c")
    (tmp_path / "closed").write_text("")
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("open", "closed")] == [0o644, 0o600]


def test_an_actor_writes_for_the_readers_of_its_log_folder(tmp_path: Path) -> None:
    """It does not inherit the driver's umask; where its node does not see the folder, it is its owner's."""
    (tmp_path / "group").mkdir()
    (tmp_path / "group").chmod(0o2750)
    for folder in ("group", "elsewhere/logs"):
        os.umask(0o022)
        write_below(tmp_path / folder)
        (tmp_path / folder / "rank_0.log").write_text("")
    found = (tmp_path / "group" / "rank_0.log", tmp_path / "elsewhere", tmp_path / "elsewhere" / "logs" / "rank_0.log")
    assert [stat.S_IMODE(path.stat().st_mode) for path in found] == [0o640, 0o700, 0o600]
