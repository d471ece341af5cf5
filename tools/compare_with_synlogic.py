"""Compare our checkers of SynLogic's tasks with its own verifiers, on games of all tasks.

    git clone https://github.com/MiniMax-AI/SynLogic /tmp/SynLogic
    python -m venv /tmp/synlogic-venv
    /tmp/synlogic-venv/bin/pip install numpy nltk sympy math-verify pandas markdown inflect
    python tools/compare_with_synlogic.py /tmp/SynLogic --python /tmp/synlogic-venv/bin/python

Its `requirements.txt` lacks markdown and inflect. Games come from the repository's generators where these take seconds,
and are built from a solution elsewhere (`synlogic_peer/built.py`). Each task gets at least `--responses` right, as many
wrong and as many malformed responses. Both judge all of them; their verifiers, which call `eval`, do so in a process
with a limit of time. Printed is a table: for each task and kind the responses on which both agree, and where ours is
stricter or laxer; then the kinds of difference (`synlogic_peer/reasons.py`) with their reasons. A difference of no
known kind ends the program with 1, and so does a reason that would hold for a response that both accept: it would hide
a checker that refuses too much. Where all tasks are compared with the default seed,
`tools/results/synlogic_verifiers.json`, the tables of `docs/reference/synlogic.md` and the sample that the unit tests
hold are written. It takes about two minutes.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from synlogic_peer.games import puzzles
from synlogic_peer.malformed import TWO_VALUES
from synlogic_peer.peer import Peer
from synlogic_peer.reasons import REASONS, STRICTER, reason
from synlogic_peer.responses import KINDS, WRONG, Response, responses
from synlogic_peer.sample import sample
from verifier_tables import on_page

from megasharp import __version__
from megasharp.tasks.synlogic import CHECKERS, SynLogicAnswer, verify

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "tools" / "results" / "synlogic_verifiers.json"
PAGE = ROOT / "docs" / "reference" / "synlogic.md"
BEGIN = "<!-- tools/compare_with_synlogic.py -->"
SAMPLE = ROOT / "tests" / "unit" / "tasks" / "data" / "files" / "synlogic_agreed.jsonl"
GAMES = 10
SEED = 1  # of the figures on the page
SIDES = ("agree", "stricter", "laxer", "raised")
# Tasks of a difference that are named on the page; of more the number.
MOST_NAMED = 6
PACKAGES = ("numpy", "sympy", "math-verify")


@dataclass(frozen=True, slots=True)
class Judged:
    """A response with both verdicts; `theirs` is a text where their verifier raised."""

    response: Response
    ours: bool
    theirs: bool | str

    @property
    def side(self) -> str:
        """agree, stricter (ours refuses what theirs accepts), laxer, or raised."""
        if isinstance(self.theirs, str):
            return "raised"
        return "agree" if self.ours == self.theirs else "laxer" if self.ours else "stricter"


def judge(response: Response, peer: Peer) -> Judged:
    """Both verdicts on a response."""
    puzzle = response.puzzle
    game = json.dumps(puzzle.data, ensure_ascii=False)
    ours = verify(response.text, SynLogicAnswer(puzzle.task, game)).reward == 1.0
    return Judged(response, ours, peer.verdict(puzzle.task, puzzle.data, response.text))


def table(judged: Sequence[Judged]) -> list[dict[str, Any]]:
    """A row for each task and kind."""
    counts = Counter((each.response.puzzle.task, each.response.kind, each.side) for each in judged)
    both = Counter(
        (each.response.puzzle.task, each.response.kind) for each in judged if each.ours and each.theirs is True
    )
    return [
        {"task": task, "kind": kind, "both accept": both[task, kind]}
        | {side: counts[task, kind, side] for side in SIDES}
        for task in sorted({task for task, _, _ in counts})
        for kind in KINDS
    ]


def differences(judged: Sequence[Judged]) -> tuple[list[dict[str, Any]], list[Judged]]:
    """Each known kind of difference with its count, tasks and changes; and the differences of no known kind."""
    by_reason: dict[str, list[Judged]] = {}
    unknown: list[Judged] = []
    for each in judged:
        if each.side in ("stricter", "laxer"):
            known = reason(each.response, each.side)
            (by_reason.setdefault(f"{known.side}: {known.name}", []) if known else unknown).append(each)
    rows = [
        {
            "side": known.side,
            "kind": known.name,
            "responses": len(some),
            "tasks": sorted({each.response.puzzle.task for each in some}),
            "changes": sorted({each.response.change for each in some}),
            "reason": known.text,
        }
        for known in REASONS
        if (some := by_reason.get(f"{known.side}: {known.name}"))
    ]
    return rows, unknown


def hidden(judged: Sequence[Judged]) -> list[Response]:
    """Responses of the right value alone that both accept, and whose refusal would be of a known kind."""
    both = [each.response for each in judged if each.ours and each.theirs is True and each.response.kind != WRONG]
    return [each for each in both if each.change not in TWO_VALUES and reason(each, STRICTER)]


def versions(repository: Path, python: str) -> dict[str, str]:
    """Versions of both sides."""
    script = "import json, importlib.metadata as m, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
    theirs = json.loads(subprocess.check_output([python, "-c", script, *PACKAGES], text=True))
    commit = subprocess.check_output(["git", "-C", str(repository), "rev-parse", "HEAD"], text=True).strip()
    ours = {name: version(name) for name in ("math-verify", "sympy")}
    return {
        "megasharp": __version__,
        **ours,
        "python": platform.python_version(),
        "SynLogic": commit,
        **{f"{name} beside SynLogic": each for name, each in theirs.items()},
    }


def printed(rows: Sequence[dict[str, Any]]) -> None:
    """Print the table of tasks."""
    print(f"{'task':32}{'kind':11}{'both accept':>12}" + "".join(f"{side:>10}" for side in SIDES))
    for row in rows:
        figures = "".join(f"{row[side] or '':>10}" for side in SIDES)
        print(f"{row['task']:32}{row['kind']:11}{row['both accept'] or '':>12}{figures}")


def in_markdown(rows: Sequence[dict[str, Any]], kinds: Sequence[dict[str, Any]]) -> str:
    """The tables of the page: the kinds of difference, and the tasks."""
    lines = ["| here | kind | responses | reason | tasks |", "|---|---|---|---|---|"]
    for kind in kinds:
        tasks = ", ".join(f"`{task}`" for task in kind["tasks"]) if len(kind["tasks"]) <= MOST_NAMED else ""
        told = tasks or f"{len(kind['tasks'])} tasks"
        lines.append(f"| {kind['side']} | {kind['kind']} | {kind['responses']} | {kind['reason']} | {told} |")
    columns = [f"{kind}: {side}" for kind in KINDS for side in ("alike", *SIDES[1:])]
    lines += ["", f"| task | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for task in dict.fromkeys(row["task"] for row in rows):
        of_task = {row["kind"]: row for row in rows if row["task"] == task}
        figures = [str(of_task[kind][side] or "") for kind in KINDS for side in SIDES]
        lines.append(f"| `{task}` | {' | '.join(figures)} |")
    return "\n".join(lines)


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repository", type=Path)
    parser.add_argument("--python", default=sys.executable, help="a Python with the repository's dependencies")
    parser.add_argument("--responses", type=int, default=50, help="of each task and kind")
    parser.add_argument("--seed", type=int, default=SEED, help="of games and responses")
    parser.add_argument("--tasks", nargs="*", choices=sorted(CHECKERS), default=sorted(CHECKERS))
    return parser.parse_args()


def main() -> int:
    """Compare, task by task; 1 where a difference has no known reason."""
    asked = options()
    judged: list[Judged] = []
    with Peer(asked.python, asked.repository.resolve()) as peer:
        for task in asked.tasks:
            games = puzzles(task, GAMES, asked.seed, peer)
            made = responses(games, asked.responses, random.Random(f"{asked.seed} {task}"))
            judged += [judge(each, peer) for each in made]
    rows, (kinds, unknown) = table(judged), differences(judged)
    printed(rows)
    for kind in kinds:
        print(f"\n{kind['side']}, {kind['kind']}: {kind['responses']} responses. {kind['reason']}")
        print(f"  {', '.join(kind['tasks'])}\n  {'; '.join(kind['changes'])}")
    for each in unknown:
        told = f"{each.response.puzzle.task}, {each.response.kind}, {each.response.change}"
        print(f"\nNo reason known: {told}: ours {each.ours}, theirs {each.theirs}: {each.response.text[:300]!r}")
    excused = hidden(judged)
    for response in excused:
        print(f"\nA reason would hide a refusal: {response.puzzle.task}, {response.change}: {response.text[:300]!r}")
    if asked.tasks == sorted(CHECKERS) and asked.seed == SEED:
        result = {"date": datetime.now(UTC).date().isoformat(), "versions": versions(asked.repository, asked.python)}
        RESULT.write_text(json.dumps(result | {"tasks": rows, "differences": kinds}, indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(on_page(PAGE.read_text(encoding="utf-8"), in_markdown(rows, kinds), BEGIN), encoding="utf-8")
        agreed = [(each.response, each.ours) for each in judged if each.side == "agree"]
        SAMPLE.write_text("".join(sample(agreed)), encoding="utf-8")
    return 1 if unknown or excused else 0


if __name__ == "__main__":
    sys.exit(main())
