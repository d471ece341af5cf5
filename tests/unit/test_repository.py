"""The repository's own files agree: make's targets, continuous integration, and what names a version."""

from __future__ import annotations

import re
from pathlib import Path

import locks as locks_of
import yaml

from megasharp import __version__
from megasharp.rollout.sglang.engine.check import PINNED

REPOSITORY = Path(__file__).parents[2]
MAKEFILE = (REPOSITORY / "Makefile").read_text()
# Slices by name, which a workflow runs by hand.
BY_HAND = {"test-long"}


def targets(text: str) -> set[str]:
    return set(re.findall(r"\bmake (?:--silent )?([a-z][\w-]*)", text))


def steps() -> list[str]:
    """Every command of every workflow."""
    files = [yaml.safe_load(path.read_text()) for path in sorted((REPOSITORY / ".github/workflows").glob("*.yml"))]
    jobs = [job for file in files for job in file["jobs"].values()]
    return [step["run"] for job in jobs for step in job["steps"] if "run" in step]


def test_workflows_run_what_ci_runs() -> None:
    commands = steps()
    others = [each for each in commands if not each.startswith(("make ", "bash .ci/", "git config "))]
    assert others == [], "a step is a target of the Makefile, so that anyone can run it"
    part = (REPOSITORY / ".ci" / "run").read_text().split("\npart bash", 1)[1]
    assert targets("\n".join(commands)) - BY_HAND == targets(part)


def test_help_lists_every_target() -> None:
    [phony] = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, flags=re.MULTILINE)
    listed = re.findall(r"^([a-z-]+):.*## \S", MAKEFILE, flags=re.MULTILINE)
    assert sorted(phony.split()) == sorted(listed)
    assert targets("\n".join(steps())) <= set(listed)


def test_targets_that_pages_name_exist() -> None:
    named = {
        (page.relative_to(REPOSITORY).as_posix(), target)
        for page in (*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/**/*.md"), *REPOSITORY.glob("*/README.md"))
        for target in re.findall(r"(?:`|^    )make ([a-z][\w-]*)", page.read_text(), flags=re.MULTILINE)
        if page.name != "CHANGELOG.md"  # names what went, too
    }
    rules = {
        target for line in re.findall(r"^([a-z][a-z -]*):", MAKEFILE, flags=re.MULTILINE) for target in line.split()
    }
    assert named and {(page, target) for page, target in named if target not in rules} == set()


def test_both_gpu_environments_have_one_torch_and_the_sglang_that_is_needed() -> None:
    """They share GPUs' memory and weights; the trainer's versions are those that the tests ran with."""
    locks = {one.name: locks_of.pins(one.lock.read_text()) for one in locks_of.ENVIRONMENTS}
    tested = locks_of.pins((REPOSITORY / "constraints.txt").read_text())
    assert locks["engines"]["sglang"] == PINNED
    assert locks["trainer"]["torch"] == locks["engines"]["torch"] == tested["torch"]
    assert locks["trainer"]["nvidia-nccl-cu13"] == locks["engines"]["nvidia-nccl-cu13"], "they form groups together"
    assert {name for name in locks["trainer"].keys() & tested.keys() if locks["trainer"][name] != tested[name]} == set()


def test_a_version_is_the_packages() -> None:
    assert yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())["version"] == __version__
    changes = (REPOSITORY / "CHANGELOG.md").read_text()
    assert f"\n## [{__version__}]" in changes, "a release has its section"
    sections = set(re.findall(r"^## \[(.+?)\]", changes, flags=re.MULTILINE))
    assert sections == set(re.findall(r"^\[(.+?)\]: https://", changes, flags=re.MULTILINE)), "a section has its link"


def test_vendored_files_are_named_with_their_licence() -> None:
    vendored = [path for path in (REPOSITORY / "megasharp").rglob("vendor/*") if path.suffix != ".LICENSE"]
    notice = (REPOSITORY / "NOTICE").read_text()
    for path in vendored:
        assert path.relative_to(REPOSITORY).as_posix() in notice
        assert path.with_name(f"{path.name.split('.')[0]}.LICENSE").is_file()
    assert vendored
