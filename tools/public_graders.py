"""Public graders of mathematics and instructions on items of the corpus; none is needed to build or test megasharp.

    python -m venv /tmp/graders
    /tmp/graders/bin/pip install sympy==1.14.0 antlr4-python3-runtime==4.11.1 math-verify==0.9.0
    /tmp/graders/bin/pip install pylatexenc langdetect nltk immutabledict packaging numpy tqdm
    /tmp/graders/bin/pip install --no-deps trl==1.16.0 verl==0.9.1 lm-eval==0.4.13 mathruler==0.1.0 openrlhf==0.11.2
    python tools/verifier_report.py --graders /tmp/graders/bin/python --record

This file runs in two Pythons. `grade` starts one that has a grader and hands it the items; there, as a program, it
reads an item a line and answers each with a line. The packages' `__init__` files, which ask for torch, ray or datasets,
are not run: the modules that grade need none of them.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import select
import subprocess
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# Judges a response by the known answer, or by the row of an item of `instructions`.
Grade = Callable[[str, Any], bool]
# Seconds for one item: some graders have no limit of their own.
_ITEM_S = 30.0


@dataclass(frozen=True, slots=True)
class Grader:
    """A public grader: its distribution, the task whose items it judges, how it is made, and what it is given."""

    distribution: str
    task: str
    make: Callable[[], Grade]
    given: str = "the response"


def _bare(*names: str) -> None:
    """Make packages importable without running their `__init__`; of a stand-in for one that is missing, too."""
    for name in names:
        if name in sys.modules:
            continue
        found = types.ModuleType(name)
        parent, _, last = name.rpartition(".")
        if parent:
            found.__path__ = [str(Path(folder) / last) for folder in sys.modules[parent].__path__]
        else:
            spec = find_spec(name)
            found.__path__ = list(spec.submodule_search_locations or ()) if spec else []
        sys.modules[name] = found


def _math_verify() -> Grade:
    library: Any = importlib.import_module("math_verify")
    return lambda text, known: bool(library.verify(library.parse(f"\\boxed{{{known}}}"), library.parse(text)))


def _trl() -> Grade:
    _bare("trl", "trl.rewards")
    # Its own test asks transformers.
    given: Any = types.ModuleType("trl.import_utils")
    given.is_math_verify_available = lambda: True
    sys.modules["trl.import_utils"] = given
    reward = importlib.import_module("trl.rewards.accuracy_rewards").accuracy_reward
    return lambda text, known: reward([[{"role": "assistant", "content": text}]], [f"${known}$"])[0] == 1.0


def _verl(name: str) -> Grade:
    _bare("verl", "verl.utils", "verl.utils.reward_score", "verl.utils.metric")
    # Beside the time limit that prime_math takes from there stands what asks for torch.
    sys.modules["verl.utils.metric"].Metric = object  # type: ignore[attr-defined]
    score = importlib.import_module(f"verl.utils.reward_score.{name}").compute_score
    signs: dict[str, Grade] = {
        "math_dapo": lambda text, known: bool(score(text, known)["acc"]),
        "math_reward": lambda text, known: score(text, known) == 1.0,
        "prime_math": lambda text, known: bool(score(text, known)[0]),
    }
    return signs[name]


def _lm_eval(name: str) -> Grade:
    _bare("lm_eval", "lm_eval.tasks", f"lm_eval.tasks.{name}", "datasets")
    sys.modules["datasets"].Dataset = object  # type: ignore[attr-defined]
    module = importlib.import_module(f"lm_eval.tasks.{name}.utils")
    normal = getattr(module, "normalize_final_answer", lambda text: text)

    def grade(text: str, known: str) -> bool:
        box = module.last_boxed_only_string(text)
        return box is not None and bool(module.is_equiv(normal(module.remove_boxed(box)), normal(known)))

    return grade


def _ifeval() -> Grade:
    # Its rules on sentences and capitals ask for data that is downloaded.
    _bare("lm_eval", "lm_eval.tasks", "lm_eval.tasks.ifeval")
    module = importlib.import_module("lm_eval.tasks.ifeval.utils")

    def grade(text: str, row: Mapping[str, Any]) -> bool:
        asked = module.InputExample(0, row["instruction_id_list"], row["prompt"], row["kwargs"])
        return bool(module.test_instruction_following_strict(asked, text).follow_all_instructions)

    return grade


def _mathruler() -> Grade:
    module = importlib.import_module("mathruler.grader")
    return lambda text, known: bool(module.grade_answer(module.extract_boxed_content(text), known))


def _openrlhf() -> Grade:
    _bare("openrlhf", "openrlhf.utils")
    module = importlib.import_module("openrlhf.utils.math_utils")
    return lambda text, known: bool(module.grade_answer(module.extract_boxed_answer(text), known))


GRADERS = {
    "math-verify": Grader("math-verify", "math", _math_verify),
    "trl accuracy_reward": Grader("trl", "math", _trl),
    "verl prime_math": Grader("verl", "math", lambda: _verl("prime_math")),
    "verl math_dapo": Grader("verl", "math", lambda: _verl("math_dapo"), "the last 300 characters"),
    "verl math_reward": Grader("verl", "math", lambda: _verl("math_reward")),
    "lm-eval minerva_math": Grader("lm-eval", "math", lambda: _lm_eval("minerva_math"), "the last box"),
    "lm-eval hendrycks_math": Grader("lm-eval", "math", lambda: _lm_eval("hendrycks_math"), "the last box"),
    "mathruler": Grader("mathruler", "math", _mathruler, "the last box"),
    "openrlhf math_utils": Grader("openrlhf", "math", _openrlhf, "the last box"),
    "lm-eval ifeval": Grader("lm-eval", "instructions", _ifeval),
}


def grade(python: str, name: str, asked: Iterable[tuple[str, str, object]]) -> tuple[str, dict[str, str]] | str:
    """Judge items (id, response, known answer or row) by a grader of the Python at `python`.

    Returns its distribution's version and, by id, `correct`, `wrong`, `raised` or `hung`; a line where that Python does
    not have it.
    """
    left = list(asked)
    found: dict[str, str] = {}
    told = ""
    while left:
        with subprocess.Popen([python, __file__, name], stdin=-1, stdout=-1, text=True) as process:
            assert process.stdin is not None and process.stdout is not None
            first = json.loads(process.stdout.readline() or '{"missing": "it ended"}')
            if "missing" in first:
                return f"{name}: {first['missing']}"
            told = first["version"]
            while left:
                id, text, known = left.pop(0)
                process.stdin.write(json.dumps([text, known]) + "\n")
                process.stdin.flush()
                if not select.select([process.stdout], [], [], _ITEM_S)[0]:
                    found[id] = "hung"
                    process.kill()
                    break
                found[id] = process.stdout.readline().strip() or "raised"
                if process.poll() is not None:
                    break
            process.stdin.close()
    return told, found


def main() -> None:
    """Judge what standard input brings, an item a line, by the grader that the command names."""
    answers, sys.stdout = sys.stdout, io.StringIO()  # what graders print is no answer
    warnings.simplefilter("ignore")
    logging.disable()
    grader = GRADERS[sys.argv[1]]
    try:
        grade_one = grader.make()
        first = {"version": version(grader.distribution)}
    except Exception as error:  # another package's code
        first = {"missing": f"{type(error).__name__}: {error}".splitlines()[0]}
    print(json.dumps(first), file=answers, flush=True)
    for line in sys.stdin:
        text, known = json.loads(line)
        verdict = "raised"
        with contextlib.suppress(Exception):
            verdict = "correct" if grade_one(text, known) else "wrong"
        print(verdict, file=answers, flush=True)


if __name__ == "__main__":
    main()
