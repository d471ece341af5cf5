"""SynLogic's generators and verifiers in a process of their own: they run what responses say, and print as they please.

    PYTHON -I their_process.py REPOSITORY

Reads one JSON object a line from its standard input, and writes one for each. `{"generate": [module, class, options],
"count": 10, "seed": 1}` is answered with the games' data, `{"task": ..., "data": ..., "text": ...}` with the verdict:
true, false or the name of what was raised. A call that takes longer than `LIMIT_S` raises TimeoutError. Nothing but the
standard library and the repository is imported: `-I` leaves out this folder, which has files of the same names.
"""

import contextlib
import importlib
import io
import json
import logging
import random
import signal
import sys
from types import SimpleNamespace
from typing import Any

LIMIT_S = 5
LONGEST_GENERATION_S = 300


class OutOfTimeError(BaseException):
    """The call took too long; a BaseException, as the verifiers catch every Exception."""


def stop(*_: object) -> None:
    """Handle the alarm."""
    raise OutOfTimeError


def generated(module: str, name: str, options: dict[str, Any], count: int, seed: int) -> list[dict[str, Any]]:
    """Games of one of the repository's generators."""
    random.seed(seed)
    game = getattr(importlib.import_module(module), name)(**options)
    return [
        {"question": each.question, "answer": each.answer, "metadata": each.metadata} for each in game.generate(count)
    ]


def verdict(verifiers: dict[str, Any], extract: Any, task: str, data: dict[str, Any], text: str) -> bool:
    """Their verdict; of a response with tags they are given the inside, as the repository reads it."""
    given = extract(text) if "<answer>" in text or "</think>" in text else text
    return bool(verifiers[task]().verify(SimpleNamespace(**data), given))


def main() -> None:
    """Answer requests until the input ends."""
    sys.path.insert(0, sys.argv[1])
    logging.disable()
    signal.signal(signal.SIGALRM, stop)
    answers = sys.stdout
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(printed):
        verifiers = importlib.import_module("task2verifier").verifier_classes
        extract = importlib.import_module("base.verifier")._extract_solution_with_thought
        for line in sys.stdin:
            asked = json.loads(line)
            signal.alarm(LONGEST_GENERATION_S if "generate" in asked else LIMIT_S)
            answer: Any
            try:
                if "generate" in asked:
                    module, name, game_options = asked["generate"]
                    answer = generated(module, name, game_options, asked["count"], asked["seed"])
                else:
                    answer = verdict(verifiers, extract, asked["task"], asked["data"], asked["text"])
            except OutOfTimeError:
                answer = "TimeoutError"
            except Exception as error:  # another repository's code
                answer = f"{type(error).__name__}: {error}"[:200] if "generate" in asked else type(error).__name__
            signal.alarm(0)
            printed.seek(0)
            printed.truncate()
            print(json.dumps(answer, default=str), file=answers, flush=True)


if __name__ == "__main__":
    main()
