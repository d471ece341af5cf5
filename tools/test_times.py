"""Print what the tests cost in wall and CPU seconds, by folder and for the costliest, from pytest's report file.

    make test && python tools/test_times.py            # the table of `make test`
    python tools/test_times.py --write                 # and put it into tests/README.md
    python tools/test_times.py .reports/fleet.xml      # of a slice of the long tier

CPU seconds are user and system seconds of the test, its fixtures and its processes (tests/conftest.py records them);
wall seconds are those of the test alone, and three files run at a time. A test above 10 s of CPU states its reason by
`@pytest.mark.costly("why")`; one that states none is printed as such.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from xml.etree import ElementTree

REPOSITORY = Path(__file__).resolve().parents[1]
REPORT = REPOSITORY / ".reports" / "test.xml"
README = REPOSITORY / "tests" / "README.md"
COSTLIEST = 40
COSTLY_S = 10.0
_BEGIN, _END = "<!-- tools/test_times.py -->", "<!-- end -->"


@dataclass(frozen=True)
class TestTime:
    """One test of a report: its folder below tests/, its name, its seconds, and why it may be costly."""

    folder: str
    name: str
    wall_s: float
    cpu_s: float
    reason: str


def read_report(file: Path) -> list[TestTime]:
    """Read every test of a JUnit XML report that pytest wrote."""
    return [_test_time(case) for case in ElementTree.parse(file).getroot().iter("testcase")]


def _test_time(case: ElementTree.Element) -> TestTime:
    properties = {each.get("name"): each.get("value", "") for each in case.iter("property")}
    *folders, file = case.get("classname", "").removeprefix("tests.").split(".")
    return TestTime(
        "/".join(folders[:2]) or file,
        f"{'/'.join([*folders, file])}::{case.get('name', '')}",
        float(properties.get("wall_s", "0")),
        float(properties.get("cpu_s", "0")),
        properties.get("costly", ""),
    )


def table(tests: Sequence[TestTime]) -> str:
    """Render two Markdown tables: folders, then the costliest tests with their reasons."""
    by_folder: dict[str, list[TestTime]] = defaultdict(list)
    for test in tests:
        by_folder[test.folder].append(test)
    lines = ["| folder | tests | wall s | CPU s |", "|---|---:|---:|---:|"]
    for folder, members in sorted(by_folder.items(), key=lambda item: -_cpu_s(item[1])):
        lines.append(_row(folder, members))
    lines += [_row("all", tests), "", "| costliest | wall s | CPU s | why |", "|---|---:|---:|---|"]
    for test in sorted(tests, key=lambda test: -test.cpu_s)[:COSTLIEST]:
        why = test.reason or ("**no reason given**" if test.cpu_s > COSTLY_S else "")
        name = test.name.replace("|", "\\|")
        lines.append(f"| `{name}` | {test.wall_s:.1f} | {test.cpu_s:.1f} | {why} |")
    return "\n".join(lines)


def _cpu_s(tests: Iterable[TestTime]) -> float:
    return sum(test.cpu_s for test in tests)


def _row(name: str, tests: Sequence[TestTime]) -> str:
    return f"| {name} | {len(tests)} | {sum(test.wall_s for test in tests):.0f} | {_cpu_s(tests):.0f} |"


def write_table(readme: Path, text: str, today: date) -> None:
    """Replace the table between the two marks of a Markdown file; ValueError where they are missing."""
    before = readme.read_text()
    pattern = re.compile(f"{re.escape(_BEGIN)}.*{re.escape(_END)}", re.DOTALL)
    if not pattern.search(before):
        raise ValueError(f"{readme} has no lines {_BEGIN} and {_END}")
    measured = f"{_BEGIN}\nMeasured on {today.isoformat()}.\n\n{text}\n{_END}"
    readme.write_text(pattern.sub(lambda _: measured, before))


def main(arguments: Sequence[str]) -> None:
    """Print the table of the reports named on the command line."""
    parser = argparse.ArgumentParser(description="Wall and CPU seconds of tests.")
    parser.add_argument("reports", nargs="*", type=Path, default=[REPORT])
    parser.add_argument("--write", action="store_true", help="put the table into tests/README.md")
    asked = parser.parse_args(arguments)
    missing = [str(path) for path in asked.reports if not path.is_file()]
    if missing:
        sys.exit(f"no report at {', '.join(missing)}: `make test` writes {REPORT.relative_to(REPOSITORY)}")
    text = table([test for path in asked.reports for test in read_report(path)])
    print(text)
    if asked.write:
        write_table(README, text, date.today())


if __name__ == "__main__":
    main(sys.argv[1:])
