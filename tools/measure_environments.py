"""Measure what environments and tools cost the trainer: CPU time of a begin and of a turn, tools' time and memory.

    python tools/measure_environments.py gymnasium reasoning_gym
    python tools/measure_environments.py openenv                # the example's server must be there
    .venv-verifiers/bin/python tools/measure_environments.py verifiers
    python tools/measure_environments.py search python          # the second needs bubblewrap

Of an environment 64 episodes are begun at once and take a turn at once, after one that loads what there is to load. The
search has 100,000 documents of 100 words drawn from 50,000. Of the tool `python` eight processes are started one after
the other, each by its first call, and stay; their memory is what no other process shares.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil

from megasharp.tasks.environment import Environment, called
from megasharp.tasks.environments.problem_file import AnyEnvironmentAnswer, load_items
from megasharp.tasks.tools.python_tool import Python
from megasharp.tasks.tools.search import Index

EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "environments"
AT_ONCE = 64
PROCESSES = 8
DOCUMENTS, WORDS, VOCABULARY, QUERIES = 100_000, 100, 50_000, 200
TAXI = 'use: gymnasium\noptions: {id: Taxi-v4, make: {render_mode: ansi}, chat: true, prompt: "{}", answer: "{}"}\n'
SUMS = "use: reasoning_gym\noptions: {name: chain_sum, config: {max_terms: 4}, tries: 3}\n"
# The file of problems, or its text, and a turn that ends no episode.
ENVIRONMENTS: dict[str, tuple[str | Path, str]] = {
    "gymnasium": (TAXI, "0"),
    "reasoning_gym": (SUMS, "<answer>none</answer>"),
    "openenv": (EXAMPLES / "openenv" / "guess.yaml", "no number"),
    "verifiers": (EXAMPLES / "verifiers" / "guess.yaml", "no number"),
}


def main() -> None:
    """Measure what is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tools = {"search": search, "python": lambda: asyncio.run(python())}
    measured: dict[str, Callable[[], None]] = {**{name: partial(environment, name) for name in ENVIRONMENTS}, **tools}
    parser.add_argument("names", nargs="+", choices=measured, metavar="NAME", help=", ".join(measured))
    for name in parser.parse_args().names:
        measured[name]()


def environment(name: str) -> None:
    """Print the CPU milliseconds of a begin and of a turn."""
    file, action = ENVIRONMENTS[name]
    with tempfile.TemporaryDirectory() as folder:
        path = file if isinstance(file, Path) else Path(folder) / "problems.yaml"
        if isinstance(file, str):
            path.write_text(f"{file}count: {AT_ONCE}\n")
        answers = [item.answer for item in load_items(path)[:AT_ONCE]]
    begin, turn = asyncio.run(episodes([each for each in answers if isinstance(each, AnyEnvironmentAnswer)], action))
    print(f"{name}: {begin:.2f} ms of CPU to begin, {turn:.2f} ms a turn; {len(answers)} at once", flush=True)


async def episodes(answers: list[AnyEnvironmentAnswer], action: str) -> tuple[float, float]:
    """Milliseconds of an episode's begin and of its first turn."""

    async def begin(answer: AnyEnvironmentAnswer) -> Environment:
        made = replace(answer).environment()
        await called(made.reset, answer.row)
        return made

    started = time.process_time()
    made = await asyncio.gather(*map(begin, answers))
    begun = time.process_time()
    await asyncio.gather(*(called(each.step, action) for each in made))
    ended = time.process_time()
    await asyncio.gather(*(called(each.close) for each in made if hasattr(each, "close")))
    return 1000 * (begun - started) / len(made), 1000 * (ended - begun) / len(made)


def search() -> None:
    """Print the seconds and the memory of an index, and the milliseconds of a query of five words."""
    draw = random.Random(0)
    words = [f"w{number:x}" for number in range(VOCABULARY)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "documents.jsonl"
        with path.open("w") as file:
            file.writelines(
                json.dumps({"text": " ".join(draw.choices(words, k=WORDS))}) + "\n" for _ in range(DOCUMENTS)
            )
        before, began = psutil.Process().memory_info().rss, time.process_time()
        index = Index(path)
        seconds, memory = time.process_time() - began, psutil.Process().memory_info().rss - before
    began = time.process_time()
    for _ in range(QUERIES):
        index.best(" ".join(draw.choices(words, k=5)), 3)
    query = 1000 * (time.process_time() - began) / QUERIES
    print(f"search: {DOCUMENTS:,} documents of {WORDS} words: {seconds:.1f} s of CPU, {memory / 1e6:.0f} MB; ", end="")
    print(f"a query {query:.2f} ms", flush=True)


async def python() -> None:
    """Print the seconds that a process takes to start and answer, and its memory."""
    kept = [Python() for _ in range(PROCESSES + 1)]
    await kept[0].call({"code": "1 + 1"})  # tries the sandbox
    before = own_memory()
    began = time.monotonic()
    for each in kept[1:]:
        await each.call({"code": "1 + 1"})
    seconds = (time.monotonic() - began) / PROCESSES
    memory = (own_memory() - before) / PROCESSES
    for each in kept:
        await each.close()
    load = psutil.getloadavg()[0]
    print(f"python: {seconds:.2f} s to start and answer, {memory / 1e6:.1f} MB a process; load {load:.1f}", flush=True)


def own_memory() -> int:
    """Bytes of this process's children that they share with nobody."""
    return sum(int(each.memory_full_info().uss) for each in psutil.Process().children(recursive=True))


if __name__ == "__main__":
    main()
