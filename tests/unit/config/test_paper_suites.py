"""A paper's rows and its group of suites measure alike, or say where they do not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from megasharp.config.core import read_tree, validate
from megasharp.config.run_config import RunConfig
from megasharp.evals.groups import GROUP_FOLDER, Member, SuiteGroup, complete, group_names, load_group
from megasharp.evals.suites import SuiteFile
from tests.unit.config.test_paper_values import PAPER, ROWS, SUITES, run_of

REPOSITORY = Path(__file__).parents[3]
_KEYS = {"max_tokens": "max_response_tokens"}


def paper_of(text: str) -> str | None:
    found = re.search(r"\d{4}\.\d{5}", text)
    return found and found[0]


def chain(row: Path) -> Iterator[str]:
    """The texts of a row's file and of all that it includes."""
    yield row.read_text()
    for names in re.findall(r"^include: \[(.*)\]", row.read_text(), re.MULTILINE):
        for name in names.split(", "):
            yield from chain(row.parent / name)


def suites_of(run: RunConfig) -> dict[str, SuiteFile]:
    """The run's suites by the names that groups have for them: `arc_c` for arc_c_128, whose limit is in its file.

    Those that do not exist yet are left out.
    """
    files = {name: SUITES / f"{name}.yaml" for name in run.eval.suites}
    found = {name: validate(SuiteFile, read_tree(file), name) for name, file in files.items() if file.is_file()}
    return {(file.set if file.set and file.limit else name): file for name, file in found.items()}


def differences(run: RunConfig, group: SuiteGroup, member: Member) -> Iterator[tuple[str, object, object]]:
    """Settings by which a run and a group measure one suite differently: name, the run's, the group's."""
    suite = suites_of(run)[member.suite]
    its = complete(member.over(group.settings), longest=0)
    limit = run.eval.max_response_tokens or run.data.largest_response
    pairs: dict[str, tuple[object, object]] = {
        "n": (run.eval.n, its.n),
        "k": (max(run.eval.k), max(its.ks)),
        "max_tokens": (limit, its.max_tokens or limit),
        "prompt": (run.eval.prompt or run.data.prompt, member.prompt or run.data.prompt),
        "stop": (tuple(run.eval.stop), its.stop),
        "limit": (suite.limit, member.limit),
    }
    if suite.limit:
        pairs["limit_seed"] = suite.seed, member.limit_seed
    for name in ("temperature", "top_p", "top_k", "min_p"):
        pairs[name] = getattr(run.eval, name), getattr(its, name)
    yield from ((name, ours, theirs) for name, (ours, theirs) in pairs.items() if ours != theirs)


def is_explained(row: Path, group: str, name: str, ours: object, theirs: object) -> bool:
    """The group's comment has the flag with the row's value, or the row's line of the key the group or its value."""
    text = (REPOSITORY / GROUP_FOLDER / f"{group}.yaml").read_text()
    if re.search(rf"^#.*--{name.replace('_', '-')} \S*\b{re.escape(str(ours))}\b", text, re.MULTILINE):
        return True
    lines = re.findall(rf"^\s+{_KEYS.get(name, name)}: [^#\n]*#(.*)$", "\n".join(chain(row)), re.MULTILINE)
    return any(str(theirs) in line or group in line for line in lines)


def compared() -> Iterator[tuple[Path, str]]:
    """Each row with the groups of its paper that have all of its suites."""
    groups = {name: group for name in group_names() if (group := load_group(name)) is not None}
    for row in (PAPER / f"{name}.yaml" for name in ROWS):
        suites, paper = {*suites_of(run_of(row.stem))}, paper_of("\n".join(chain(row)))
        for name, group in groups.items():
            if suites and suites <= {member.suite for member in group.members} and paper == paper_of(group.source):
                yield row, name


def test_rows_and_groups_measure_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    found = [*compared()]
    assert len({name for _, name in found}) >= 8 and len(found) > 80
    unexplained = [
        f"{row.stem}, {name}: {member.suite}: {key} {ours}, there {theirs}"
        for row, name in found
        if (group := load_group(name)) is not None
        for run in [run_of(row.stem)]
        for member in group.members
        if member.suite in suites_of(run)
        for key, ours, theirs in differences(run, group, member)
        if not is_explained(row, name, key, ours, theirs)
    ]
    assert unexplained == []
