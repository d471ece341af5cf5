"""What DLC costs where the tokens are sampled: seconds of a rollout with the memory network and without, as Markdown.

    .venv/bin/python tools/bench_dlc.py
    .venv/bin/python tools/bench_dlc.py --batch 8 --new-tokens 64 512 1024 --window 128
    .venv/bin/python tools/bench_dlc.py --predict
    .venv/bin/python tools/bench_dlc.py --others
    .venv/bin/python tools/bench_dlc.py --preset qwen3-8b-1.7b --device cuda --batch 64 --new-tokens 512

Two engines are up, one with the policy and one with policy and memory; they take turns over the same work, each round
in the other order. Ratios are within a round: of the seconds that passed, and of the engines' CPU seconds (on a GPU the
host's part only). On a busy machine look at the least seconds of each way: others' work only adds to them. With mu = 0
the second engine must draw the very tokens of the first. With `--window` an engine more has the memory network see
the prompt and so many last tokens (`recipe.dlc.window`).

`--predict` starts nothing: it prints the factor of a decode step by the roofline of `megasharp plan`, for pairs of
published models at several lengths: bytes that a step reads, by any GPU whose memory is the limit.

`--others` also times the two ways that are not used, an engine for each network and SGLang's logit processor:
they must draw the tokens of our engine at the same mu. On a GPU both models of the pair have dummy weights: nothing is
downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import psutil
from dlc_ways.logit_processor import logit_processor
from dlc_ways.models import PAIRS, Pair, write_model
from dlc_ways.processor import MEMORY, MU
from dlc_ways.two_engines import two_engines
from dlc_ways.work import Responses, Way, make_work, through_fleet

from megasharp.config.rollout import RolloutConfig
from megasharp.convert.hf_folder import read_config
from megasharp.planner.formulas import KvCache, kv_bytes_per_token
from megasharp.rollout.sglang.client.fleet import Fleet
from megasharp.rollout.sglang.client.launch import EngineProcess, FleetSettings, launch, stop

REPOSITORY = Path(__file__).resolve().parents[1]
PLAIN, ZERO = "policy alone", "DLC, mu = 0"
WARM_UP_SEED = 1_000_000


@dataclass(frozen=True, slots=True)
class Timed:
    """One round: seconds, CPU seconds of the engines, and responses of each way."""

    seconds: Mapping[str, float]
    cpu: Mapping[str, float]
    responses: Mapping[str, Responses]

    def equal(self, way: str, other: str) -> float:
        """The share of responses that are the same, token by token."""
        pairs = list(zip(self.responses[way], self.responses[other], strict=True))
        return sum(mine == theirs for mine, theirs in pairs) / len(pairs)


def main() -> None:
    """Parse, start the engines, measure, print."""
    arguments = _arguments()
    pair = PAIRS[arguments.preset]
    if arguments.predict:
        predict(arguments.window)
        return
    print(f"{pair.describe()}; {arguments.device}; prompts of {arguments.prompt_tokens} tokens\n")
    with tempfile.TemporaryDirectory(prefix="bench-dlc-") as folder, ExitStack() as stack:
        bench = _Bench(arguments, pair, Path(folder), stack)
        ours = bench.ours()
        print(_head(), flush=True)
        for batch, new_tokens in product(arguments.batch, arguments.new_tokens):
            _report(ours, bench.rounds(ours, batch, new_tokens))
        if arguments.others:
            ways = {name: ours[name] for name in (PLAIN, bench.calibrated)} | bench.others()
            for batch in arguments.others_batch:
                _report(ways, bench.rounds(ways, batch, arguments.others_tokens), bench.calibrated)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What DLC costs in the engine.")
    parser.add_argument("--preset", default="cpu", choices=tuple(PAIRS))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--python", type=Path, default=REPOSITORY / ".venv-fleet" / "bin" / "python")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64], help="responses at a time")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, nargs="+", default=[64])
    parser.add_argument("--window", type=int, nargs="+", default=[], help="windows of the memory network, in tokens")
    parser.add_argument("--predict", action="store_true", help="the planner's factors; measure nothing")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mu", type=float, default=0.2)
    parser.add_argument("--dummy", action="store_true", help="dummy weights where the preset has written ones")
    parser.add_argument("--sglang", default="{}", help="JSON: further flags of SGLang for every engine")
    parser.add_argument("--logs", type=Path, help="a folder for the engines' logs, to be kept")
    parser.add_argument("--others", action="store_true", help="also the two ways that are not used")
    parser.add_argument("--others-batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--others-tokens", type=int, default=16)
    arguments = parser.parse_args()
    if arguments.others and (arguments.dummy or not PAIRS[arguments.preset].written):
        sys.exit("--others needs models with written weights: transformers must read the memory network")
    return arguments


class _Bench:
    """The models, the engines that hold them, and turns."""

    def __init__(self, arguments: argparse.Namespace, pair: Pair, folder: Path, stack: ExitStack) -> None:
        self._arguments, self._pair, self._stack = arguments, pair, stack
        self._engines: list[EngineProcess] = []
        self._logs = arguments.logs or folder / "logs"
        written = pair.written and not arguments.dummy
        self._policy = write_model(folder / "policy", pair.policy, 1, written)
        self._memory = write_model(folder / "memory", pair.memory, 2, written)
        rows = max(arguments.batch)
        flags = {
            "skip_tokenizer_init": True,
            "max_running_requests": rows,
            "max_total_tokens": 2 * rows * (arguments.prompt_tokens + max(arguments.new_tokens)),
        }
        if not written:
            flags["load_format"] = "dummy"
        if arguments.device == "cuda":
            # Both engines are on one GPU; SGLang counts from what is free when it starts.
            flags["mem_fraction_static"] = 0.45
        self._settings = FleetSettings(
            python=arguments.python,
            model=self._policy,
            log_folder=self._logs,
            device=arguments.device,
            dtype=pair.dtype,
            # On a GPU it would slow both engines down; there equal tokens are a matter of luck.
            deterministic=arguments.device == "cpu",
            rollout=RolloutConfig(restarts=0, sglang=flags | json.loads(arguments.sglang)),
        )
        self.calibrated = f"DLC, mu = {arguments.mu:g}"

    def ours(self) -> dict[str, Way]:
        """The policy alone, and with the memory network in the same engine, by name."""
        self._plain = self._fleet("plain")
        both = self._fleet("both", memory=self._memory)
        ways = {
            PLAIN: through_fleet(self._plain, None),
            ZERO: through_fleet(both, 0.0),
            self.calibrated: through_fleet(both, self._arguments.mu),
        }
        for window in self._arguments.window:
            windowed = self._fleet(f"window-{window}", memory=self._memory, window=window)
            ways[f"{self.calibrated}, window {window}"] = through_fleet(windowed, self._arguments.mu)
        return ways

    def others(self) -> dict[str, Way]:
        """The ways that are not used, by name."""
        os.environ |= {MEMORY: str(self._memory), MU: str(self._arguments.mu)}
        server = Path(__file__).parent / "dlc_ways" / "processor_server.py"
        (processor,) = launch(replace(self._settings, log_folder=self._logs / "processor", command=(str(server),)))
        self._stack.callback(stop, [processor])
        self._engines.append(processor)
        memory = self._fleet("memory", model=self._memory)
        apis = [fleet.members.all[0].process.api for fleet in (self._plain, memory)]
        vocabulary = self._pair.policy.vocab_size
        return {
            "two engines": two_engines(apis[0], apis[1], vocabulary, self._arguments.mu),
            "logit processor": logit_processor(processor.api),
        }

    def rounds(self, ways: Mapping[str, Way], batch: int, new_tokens: int) -> list[Timed]:
        """Every way in turn over the same work, after a round that does not count."""
        found = []
        for number in range(-1, self._arguments.rounds):
            seed = (WARM_UP_SEED if number < 0 else number) + 1000 * batch
            work = make_work(batch, self._arguments.prompt_tokens, new_tokens, self._pair.policy.vocab_size, seed)
            order = list(ways) if number % 2 else list(ways)[::-1]
            seconds, cpu, responses = {}, {}, {}
            for name in order:
                start, used = time.perf_counter(), self._cpu_seconds()
                responses[name] = ways[name](work)
                seconds[name], cpu[name] = time.perf_counter() - start, self._cpu_seconds() - used
                assert all(len(response) == new_tokens for response in responses[name]), name
            if number >= 0:
                found.append(Timed(seconds, cpu, responses))
        return found

    def _fleet(
        self, name: str, model: Path | None = None, memory: Path | None = None, window: int | None = None
    ) -> Fleet:
        networks = replace(self._settings, model=model or self._policy, memory=memory, memory_window=window)
        settings = replace(networks, log_folder=self._logs / name)
        engines = launch(settings)
        self._engines += engines
        fleet = Fleet(engines, settings)
        self._stack.callback(fleet.close)
        return fleet

    def _cpu_seconds(self) -> float:
        """Of all engines so far; those that have nothing to do use none."""
        trees = [psutil.Process(engine.pid) for engine in self._engines]
        processes = [each for tree in trees for each in (tree, *tree.children(recursive=True))]
        times = [each.cpu_times() for each in processes]
        return sum(each.user + each.system for each in times)


# Policy, memory network, and GPUs of an engine.
_PUBLISHED = (("qwen3-8b", "qwen3-1.7b", 1), ("qwen3-32b", "qwen3-1.7b", 4))
_LENGTHS = (1024, 4096, 8192, 24_576)
_PROMPT, _RESPONSES = 256, 64


def predict(windows: Sequence[int]) -> None:
    """Print a decode step's factor by roofline: `_RESPONSES` responses, all of one length, bfloat16."""
    kinds = [None, *(windows or (256, 1024))]
    columns = [
        "policy + memory network",
        "tokens",
        *("all kept" if each is None else f"window {each}" for each in kinds),
    ]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for (policy, memory, tp), length in product(_PUBLISHED, _LENGTHS):
        archs = [read_config(REPOSITORY / "configs" / "model" / name)[2] for name in (policy, memory)]
        weights = [2 * arch.parameter_count() / tp for arch in archs]
        kv = [kv_bytes_per_token(arch, tp, 2) for arch in archs]
        alone = weights[0] + _RESPONSES * KvCache(kv[0]).bytes_at(_PROMPT, length)
        besides = [weights[1] + _RESPONSES * KvCache(kv[1], each).bytes_at(_PROMPT, length) for each in kinds]
        cells = [f"{policy} + {memory}, tp {tp}", f"{length:,}", *(f"{1 + more / alone:.2f}" for more in besides)]
        print(f"| {' | '.join(cells)} |")


def _head() -> str:
    columns = ["way", "batch", "new tokens each", "seconds", "tokens/s"]
    columns += ["times the policy alone", "least / least", "in CPU seconds", "same responses"]
    return f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"


def _report(ways: Mapping[str, Way], rounds: Sequence[Timed], reference: str | None = None) -> None:
    """Print a row for each way. Responses are compared with the reference's, those of mu = 0 with the plain ones."""
    responses = rounds[0].responses[PLAIN]
    tokens = sum(map(len, responses))
    for name in ways:
        seconds = statistics.median(timed.seconds[name] for timed in rounds)
        other = PLAIN if name == ZERO else reference if name not in (PLAIN, reference) else None
        same = f"{statistics.mean(timed.equal(name, other) for timed in rounds):.1%} of {other}" if other else ""
        least, least_alone = (min(timed.seconds[each] for timed in rounds) for each in (name, PLAIN))
        ratios = [
            _spread([timed.seconds for timed in rounds], name),
            f"{least / least_alone:.2f}",
            _spread([timed.cpu for timed in rounds], name),
        ]
        cells = [name, len(responses), tokens // len(responses), f"{seconds:.3f}", f"{tokens / seconds:.0f}"]
        print(f"| {' | '.join(map(str, [*cells, *ratios, same]))} |", flush=True)


def _spread(figures: Sequence[Mapping[str, float]], way: str) -> str:
    """The way's figure over that of the policy alone: median, least and largest of the rounds."""
    if way == PLAIN:
        return "1"
    ratios = sorted(each[way] / each[PLAIN] for each in figures)
    return f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"


if __name__ == "__main__":
    main()
