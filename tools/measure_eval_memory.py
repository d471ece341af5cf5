"""Memory and CPU of an evaluation's driver, with synthetic responses through the code of a real one.

    python tools/measure_eval_memory.py --problems 500 --n 16 --tokens 8192
    python tools/measure_eval_memory.py --problems 500 --n 1024 --tokens 64 --again

Everything is real but the engine, which hands out tensors of random tokens and texts as fast as they are taken, the
tokenizer and the verifier. Words are as frequent as Zipf's law says, so that texts compress about as real ones do. In
a child process so that its peak is its own. With `--again` the finished samples are read as a further start reads them.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import torch

from megasharp.common.records import Completion, FinishReason, GenerateRequest, Outcome, SamplingParams, Verdict
from megasharp.evals.evaluate import evaluate
from megasharp.evals.keeping import Keeping
from megasharp.evals.result import EvalSetting
from megasharp.evals.sample_store import SampleStore
from megasharp.evals.suites import Suite
from megasharp.rollout.streaming import Asked, Ended
from megasharp.tasks.countdown import CountdownAnswer
from megasharp.tasks.judge import DirectJudge, TaskItem

WORDS = 32_000
# Rates of what the driver must keep up with: GPUs, and tokens a second of each.
GPUS, OF_A_GPU = 64, 2500


class Words:
    """A tokenizer whose tokens are words of four letters on average, a space included."""

    stop_token_ids = (0,)

    def __init__(self) -> None:
        letters = random.Random(1)
        self._words = [
            " " + "".join(letters.choices("etaoinshrdlu", k=letters.choice((1, 2, 3, 4, 5)))) for _ in range(WORDS)
        ]

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(1 + ord(letter) % 100 for letter in text)

    plain = encode

    def chat(self, turns: Sequence[tuple[str, str]], tools: str = "") -> str | None:
        raise NotImplementedError

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(map(self._words.__getitem__, tokens))


class Synthetic:
    """An engine of `rows` rows that ends requests in no order, each response with all of its tokens."""

    version = 0

    def __init__(self, rows: int) -> None:
        self.capacity = rows
        self._shares = torch.cumsum(1.0 / torch.arange(1, WORDS), dim=0)

    @contextmanager
    def stream(self, asked: Iterable[Asked], at_once: int) -> Iterator[Iterator[Ended]]:
        yield self._ended(enumerate(asked), at_once)

    def _ended(self, asked: Iterator[tuple[int, Asked]], at_once: int) -> Iterator[Ended]:
        order = random.Random(2)
        flying: list[tuple[int, Asked]] = []
        while True:
            flying += islice(asked, at_once - len(flying))
            if not flying:
                return
            last = order.randrange(len(flying))
            flying[last], flying[-1] = flying[-1], flying[last]
            place, (request, sampling) = flying.pop()
            yield place, [self._completion(seed, sampling) for seed in request.seeds]

    def _completion(self, seed: int, sampling: SamplingParams) -> Completion:
        tokens = torch.searchsorted(self._shares, torch.rand(sampling.max_tokens) * self._shares[-1])
        logp = torch.rand(len(tokens)).clamp(min=1e-6).log()
        top = logp.repeat(3, 1).T.contiguous() if sampling.record_top else None
        return Completion(tokens, logp, logp.clone(), None, (), FinishReason.STOP, seed, entropy=-logp, top_logp=top)

    def generate(self, requests: Sequence[GenerateRequest], sampling: SamplingParams) -> list[list[Completion]]:
        raise NotImplementedError

    def healthy(self) -> bool:
        return True

    def close(self) -> None: ...


def verify(text: str, _: object) -> Verdict:
    """A verdict that depends on the text, with one of a few hundred answers."""
    return Verdict(Outcome.CORRECT if text[1:2] == "e" else Outcome.WRONG, 0.0, text[-8:])


def memory() -> dict[str, float]:
    """Resident memory of this process now and at its peak, in MB."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {name: round(int(status[name].split()[0]) / 1024) for name in ("VmRSS", "VmHWM")}


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Evaluate, and return what it took."""
    torch.set_num_threads(1)
    items = tuple(
        TaskItem(f"p{number}", "countdown", f"{number}", CountdownAnswer((1, 2), 3), "synthetic")
        for number in range(arguments.problems)
    )
    n, tokens = arguments.n, arguments.tokens
    setting = EvalSetting("synthetic", "", None, n, (1,), 1.0, 1, 1.0, tokens)

    def run(store: SampleStore) -> tuple[float, float]:
        start, cpu = time.monotonic(), time.process_time()
        evaluate(
            Synthetic(arguments.rows),
            Suite("synthetic", "countdown", items),
            Words(),
            setting,
            judge=DirectJudge({"countdown": verify}),
            store=store,
            say=lambda line: print(line, file=sys.stderr),
        )
        return time.monotonic() - start, time.process_time() - cpu

    before = memory()
    keeping = Keeping(folder, arguments.keep, 1 << 20)
    store = keeping.open(folder, setting)
    seconds, cpu = run(store)
    store.finish()
    samples = len(items) * (n + 1)
    size = sum(path.stat().st_size for path in folder.rglob("*.parquet"))
    found = {
        "samples": samples,
        "tokens": tokens,
        "before_mb": before["VmRSS"],
        "peak_mb": memory()["VmHWM"],
        "seconds": round(seconds, 1),
        "cpu_ms_a_sample": round(1000 * cpu / samples, 2),
        "tokens_a_second": round(samples * tokens / seconds),
        "wanted_tokens_a_second": GPUS * OF_A_GPU,
        "bytes_a_token": round(size / (samples * tokens), 3),
        "bytes_a_sample": round(size / samples),
    }
    if arguments.again:
        seconds, _ = run(keeping.open(folder, setting))
        found |= {"again_s": round(seconds, 1), "again_peak_mb": memory()["VmHWM"]}
    return found


def main() -> None:
    """Measure in a child process, and print its figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=500)
    parser.add_argument("--n", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rows", type=int, default=64 * 256, help="samples that the engines decode at once")
    parser.add_argument("--keep", default="texts", choices=["none", "answers", "texts", "tokens"])
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.child:
        sys.exit(subprocess.run([sys.executable, __file__, *sys.argv[1:], "--child"], check=False).returncode)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(arguments, Path(folder)), indent=1))


if __name__ == "__main__":
    main()
