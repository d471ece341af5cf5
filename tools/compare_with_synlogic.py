"""Compare our checkers of SynLogic's tasks with its own, on problems that its own generators make.

    git clone https://github.com/MiniMax-AI/SynLogic /tmp/SynLogic
    python tools/compare_with_synlogic.py /tmp/SynLogic --problems 20

Each problem's solution is judged by both, and so are copies with one cell or digit changed. The repository's generators
need numpy, its checkers sympy and math-verify too. A disagreement is printed; the known ones are said in
`docs/reference/synlogic.md`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import logging
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megasharp.tasks.synlogic import SynLogicAnswer, verify
from megasharp.tasks.synlogic.filling import ARROWS

CHANGES = 6

# For each task: the module's name and its class, what its generator is told, and where a problem's solution is. The
# generators of the other tasks take minutes, or their problems have a reference answer that is only compared.
GENERATORS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "arrow_maze": ("arrow_maze", "ArrowMaze", {}, "solution"),
    "campsite": ("campsite", "Campsite", {}, "solution"),
    "dyck_language": ("dyck_language", "DyckLanguage", {}, "answer"),
    "dyck_language_errors": ("dyck_language_errors", "DyckLanguageErrors", {}, "answer"),
    "dyck_language_reasoning_errors": ("dyck_language_reasoning_errors", "DyckLanguageReasoningErrors", {}, "answer"),
    "goods_exchange": ("goods_exchange", "GoodsExchange", {}, "owns_after"),
    "kukurasu": ("kukurasu", "Kukurasu", {}, "solution"),
    "math_path": ("math_path", "MathPath", {}, "answer"),
    "minesweeper": ("minesweeper", "Minesweeper", {}, "current_mines"),
    "number_wall": ("number_wall", "NumberWall", {}, "solution"),
    "numbrix": ("numbrix", "Numbrix", {}, "solution"),
    "skyscraper_puzzle": ("skyscraper_puzzle", "SkyscraperPuzzle", {}, "solved_grid"),
    "sudoku": ("sudoku", "Sudoku", {}, "complete_sudoku"),
    "survo": ("survo", "Survo", {}, "answer"),
    "web_of_lies": ("web_of_lies", "WebOfLies", {}, "answer"),
}


def problems(task: str, count: int) -> list[Any]:
    """What the repository's generator makes; nothing it prints is shown."""
    module, name, options, _ = GENERATORS[task]
    with contextlib.redirect_stdout(io.StringIO()):
        game = getattr(importlib.import_module(f"games.tasks.{module}.scripts.{module}"), name)(**options)
        return list(game.generate(count))


def solution_of(task: str, data: Any) -> str:
    """The solution as a response would write it."""
    key = GENERATORS[task][3]
    solution = data.answer if key == "answer" else data.metadata[key]
    text = solution if isinstance(solution, str) else json.dumps(solution, ensure_ascii=False)
    if task == "math_path":
        return f"[[{text}]]"
    if task == "web_of_lies":
        return f"The answer is: **{text}**"
    plain = task.startswith("dyck") or task in ("minesweeper", "campsite", "kukurasu")
    return text if plain else f"```python\n{text}\n```"


def changed(text: str, rng: random.Random) -> Iterator[str]:
    """Copies of a response with one of its signs replaced by another of them."""
    plain = any(sign.isalnum() for sign in text)
    begin = max(text.find("```python\n") + len("```python"), text.find("**"), 0) if text[0] in "`T" else 0
    body = [at for at, sign in enumerate(text) if at >= begin and (sign.isalnum() or sign in ARROWS or not plain)]
    for _ in range(CHANGES):
        at, other = rng.choice(body), text[rng.choice(body)]
        yield text[:at] + other + text[at + 1 :]


def compare(task: str, count: int, rng: random.Random, theirs: Any) -> tuple[int, int, int]:
    """How many responses both judge alike, how many of those are right, and how many are judged otherwise."""
    same = right = other = 0
    for data in problems(task, count):
        game = json.dumps({"question": data.question, "answer": data.answer, "metadata": data.metadata})
        solution = solution_of(task, data)
        for text in (solution, *changed(solution, rng)):
            ours = verify(text, SynLogicAnswer(task, game)).reward == 1.0
            with contextlib.redirect_stdout(io.StringIO()):
                its = bool(theirs().verify(data, text))
            same, right, other = same + (ours == its), right + (ours and its), other + (ours != its)
            if ours != its:
                print(f"  {task}: ours {ours}, its {its}: {text!r}"[:400])
    return same, right, other


def main() -> None:
    """Compare, task by task."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("repository", type=Path)
    parser.add_argument("--problems", type=int, default=20)
    parser.add_argument("--tasks", nargs="*", default=sorted(GENERATORS))
    arguments = parser.parse_args()
    sys.path.insert(0, str(arguments.repository))
    with contextlib.redirect_stdout(io.StringIO()):
        verifiers = importlib.import_module("task2verifier").verifier_classes
    logging.disable()
    random.seed(1)
    for task in arguments.tasks:
        try:
            same, right, other = compare(task, arguments.problems, random.Random(1), verifiers[task])
        except Exception as error:  # another repository's code
            print(f"{task}: {type(error).__name__}: {error}")
            continue
        print(f"{task}: {same} judged alike, {right} of them right; {other} otherwise")


if __name__ == "__main__":
    main()
