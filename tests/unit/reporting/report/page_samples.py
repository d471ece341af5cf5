"""Stored samples as evaluations leave them, some hostile to a page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from page_runs import EVIL

from megasharp.common.formats import Keep
from megasharp.common.records import FinishReason, Outcome
from megasharp.evals.sample_store import SampleStore
from megasharp.evals.stored_samples import SamplesInfo, StoredSample

# Right-to-left marks would turn what follows around; a line of a megabyte would widen the page.
BIDI, LONG = "\u202e\u2067mirror", "x" * 1_000_000 + "the end"
TEXTS = ("plain words", EVIL, BIDI, LONG, "# *<b>markup</b>* & \u0000 \ud83d")
N = 6
Right = Callable[[int, int], bool]


def sample(number: int, index: int, greedy: bool, right: bool, model: int = 0) -> StoredSample:
    """A sample of one of problems p0, p1, ...; problem 1 has a hostile name."""
    return StoredSample(
        problem=f"p{number}{EVIL}" if number == 1 else f"p{number}",
        number=number,
        index=index,
        greedy=greedy,
        seed=2**62 + number * 100 + index,
        text=TEXTS[index % len(TEXTS)].encode("utf-8", "replace").decode(),
        token_ids=None,
        finish=FinishReason.LENGTH if index == 3 else FinishReason.STOP,
        outcome=Outcome.CORRECT if right else Outcome.WRONG,
        reward=float(right),
        answer=f"{BIDI} {index}",
        detail="" if right else EVIL,
        tokens=5 + model,
    )


def samples(problems: int, right: Right, model: int = 0) -> list[StoredSample]:
    """N samples of each problem and a greedy one, which is as right as the first; in the order of reading."""
    return [
        sample(number, max(0, place), place < 0, right(number, max(0, place)), model)
        for number in range(problems)
        for place in range(-1, N)
    ]


def store(
    folder: Path, found: list[StoredSample], *, label: str = "mine", step: int = 6, keep: Keep = "texts",
    judged: str = "", suite: str = "dev",
) -> Path:  # fmt: skip
    """Store samples in a folder of results; return it."""
    identity = {"weights": "w", **({"judged": judged} if judged else {})}
    made = SampleStore(folder, SamplesInfo(suite, {"label": label, "step": step}, identity, keep))
    made.add(found if keep == "texts" else [replace(one, text=None) for one in found])
    made.finish()
    return folder
