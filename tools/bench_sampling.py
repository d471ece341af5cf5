"""The in-process engine's tokens a second on a CPU: rows that are refilled at once against one batch at a time.

    python tools/bench_sampling.py              (part of: make bench)

The quickstart's network. A response ends at a length that its seed fixes, which the engine does not know before: the
tokens drawn are overwritten by a stop there, and nowhere else. `uneven` are lengths lognormal with sigma 1, `even` the
12 to 20 tokens of the quickstart's evaluation. Both ways draw the same responses by the same engine. One batch at a
time asks for as many samples as there are rows, and waits for all of them; so does the engine itself where limits are
as low as the even ones. A stream asks for twice as many samples as there are rows, one prompt after the other, and gets
each prompt's when they have ended. Rounds alternate; ratios are medians of rounds, wall and CPU seconds apart.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch
from results import Figure, report
from safetensors.torch import load_file
from torch import Tensor

from megasharp.common.records import Completion, GenerateRequest, SamplingParams
from megasharp.convert.model_folder import CONFIG_FILE
from megasharp.rollout.inprocess import InProcessEngine, decode_loop
from megasharp.rollout.inprocess.generation import Draw, Logits, draw

BASE = Path(__file__).resolve().parents[1] / "examples" / "quickstart" / "base"
STOP, OTHER = 1, 2
BAR = 1.6


@dataclass(frozen=True, slots=True)
class Load:
    """`prompts` prompts of `responses` each, `rows` at once; the response of seed `s` has `lengths[s]` tokens."""

    name: str
    prompts: int
    responses: int
    rows: int
    lengths: Tensor

    @property
    def requests(self) -> list[GenerateRequest]:
        """Prompts of 12 to 15 tokens."""
        drawn = torch.Generator().manual_seed(1)
        return [
            GenerateRequest(
                tuple(torch.randint(3, 20, (12 + number % 4,), generator=drawn).tolist()),
                tuple(range(self.responses * number, self.responses * (number + 1))),
            )
            for number in range(self.prompts)
        ]


def uneven(median: int) -> Load:
    """Lengths lognormal with sigma 1, cut at 12 times the median."""
    drawn = torch.randn(48 * 8, generator=torch.Generator().manual_seed(0)).exp() * median
    return Load("uneven", 48, 8, 64, drawn.clamp(1, 12 * median).long())


def even() -> Load:
    """The quickstart's evaluation, of fewer prompts."""
    lengths = torch.randint(12, 21, (48 * 64,), generator=torch.Generator().manual_seed(0))
    return Load("even", 48, 64, 512, lengths)


def ending(lengths: Tensor) -> Callable[[Logits, Tensor, Tensor, SamplingParams], Draw]:
    """Draw as the engine does, but for where responses end."""

    def drawn(logits: Logits, seeds_S: Tensor, positions_S: Tensor, sampling: SamplingParams) -> Draw:
        found = draw(logits, seeds_S, positions_S, sampling)
        found.tokens_S.masked_fill_(found.tokens_S == STOP, OTHER)
        found.tokens_S.masked_fill_(positions_S + 1 >= lengths[seeds_S], STOP)
        return found

    return drawn


def one_batch_at_a_time(
    engine: InProcessEngine, requests: Sequence[GenerateRequest], sampling: SamplingParams, rows: int
) -> list[list[Completion]]:
    """As many samples as there are rows, then the next ones; a row is dropped, not refilled."""
    count = max(1, rows // len(requests[0].seeds))
    found = []
    for start in range(0, len(requests), count):
        found += engine.generate(requests[start : start + count], sampling)
    return found


def as_a_stream(
    engine: InProcessEngine, requests: Sequence[GenerateRequest], sampling: SamplingParams, rows: int
) -> list[list[Completion]]:
    """As an evaluation samples."""
    with engine.stream([(request, sampling) for request in requests], 2 * rows) as ended:
        done = dict(ended)
    return [done[place] for place in range(len(requests))]


def timed(work: Callable[[], list[list[Completion]]]) -> tuple[list[list[Completion]], float, float]:
    """The result, and seconds by the wall and of CPU."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    return result, time.perf_counter() - wall, time.process_time() - cpu


def measure(load: Load, rounds: int) -> list[Figure]:
    """Alternating rounds of both ways, after one that does not count."""
    longest = int(load.lengths.max())
    sampling = SamplingParams(longest, stop_token_ids=(STOP,))
    with tempfile.TemporaryDirectory() as folder, patch.object(decode_loop, "draw", ending(load.lengths)):
        config = json.loads((BASE / CONFIG_FILE).read_text())
        (Path(folder) / CONFIG_FILE).write_text(json.dumps(config | {"max_position_embeddings": longest + 20}))
        engine = InProcessEngine(Path(folder), dtype=torch.float32, device=torch.device("cpu"), max_batch=load.rows)
        engine.load_weights(0, load_file(BASE / "model.safetensors").items())
        rows: list[tuple[float, ...]] = []
        for _ in range(rounds + 1):
            requests = load.requests
            waited, *slow = timed(lambda: one_batch_at_a_time(engine, requests, sampling, load.rows))  # noqa: B023
            found, *fast = timed(lambda: engine.generate(requests, sampling))  # noqa: B023
            streamed, *stream = timed(lambda: as_a_stream(engine, requests, sampling, load.rows))  # noqa: B023
            assert tokens(found) == tokens(waited) == tokens(streamed), "a completion depends on its batch"
            rows.append((slow[0], fast[0], slow[1], fast[1], stream[1]))
    count = int(load.lengths.sum())
    walls, refilled, cpus, refilled_cpus, streamed_cpus = zip(*rows[1:], strict=True)
    bar = BAR if load.name == "uneven" else None
    return [
        Figure(
            f"{load.name}, one batch at a time",
            count / statistics.median(walls),
            "tokens/s",
            better="higher",
            repeats=rounds,
        ),
        Figure(
            f"{load.name}, rows refilled",
            count / statistics.median(refilled),
            "tokens/s",
            better="higher",
            repeats=rounds,
        ),
        Figure(f"{load.name}, ratio", ratio(walls, refilled), "x", bar=bar, better="higher", repeats=rounds),
        Figure(f"{load.name}, ratio of CPU seconds", ratio(cpus, refilled_cpus), "x", better="higher", repeats=rounds),
        Figure(
            f"{load.name}, CPU seconds of a stream",
            ratio(streamed_cpus, refilled_cpus),
            "x",
            better="lower",
            repeats=rounds,
        ),
    ]


def tokens(found: list[list[Completion]]) -> list[list[int]]:
    """Of all responses."""
    return [completion.tokens.tolist() for group in found for completion in group]


def ratio(slow: Sequence[float], fast: Sequence[float]) -> float:
    """The median over rounds."""
    return statistics.median(a / b for a, b in zip(slow, fast, strict=True))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--median", type=int, default=64, help="tokens; of the uneven lengths")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    figures = measure(uneven(arguments.median), arguments.rounds) + measure(even(), arguments.rounds)
    report("bench_sampling", figures, {"threads": 1, "median": arguments.median, "model": "quickstart's base"})


if __name__ == "__main__":
    main()
