"""Rollouts on a simulated clock: that the collector trains on what it admits, whatever its length, and how fast.

    python tools/simulate_rollouts.py                                # every setting, 3,000 steps each
    python tools/simulate_rollouts.py --settings 0.5/1/abort 0.5/0   # oversample/max_staleness/stragglers
    python tools/simulate_rollouts.py --lengths mine.txt --limit 24576 --prompts 64 --responses 16 --running 93
    python tools/simulate_rollouts.py --settings 0/0 --annotate 30   # seconds of annotation that sampling hides
    python tools/simulate_rollouts.py --broken                       # a collector that drops long groups: exit code 1

The collector is the real one (`megasharp/rollout/async_collector.py`); all groups are kept. The engines are simulated
(`simulated_fleet.py`): with n responses at work a decode step takes --weights + n x --cache x context seconds,
`context` being the mean number of tokens that a response in progress attends to; --read is for a token that is read.
The defaults are an engine of qwen3-32b-dlc as a plain roofline has it, 4 H200, at half their bandwidth and 40 %
of their FLOPs: 17.2 GB of weights and 94 kB a token of cache at 2.4 TB/s; 43.6 us a token read; 54.7 s of training for
278,528 tokens an engine.

Checked of each setting with max_staleness above 0: every admitted response is trained exactly once or unfinished at the
end, by identity and by length; and without the last 50 steps' admissions the mean and the 90th percentile of what was
trained are within 0.5 % of what was admitted. Without staleness the differences are only told. The standard errors are
of the admitted ones: of the mean, and of the 90th percentile by the means of 50 batches. `steps/h` and `tokens/s` are
against oversample 0, max_staleness 0.
"""

from __future__ import annotations

import argparse
import functools
import math
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy
import torch
from results import Figure, report
from simulated_fleet import Lengths, SimulatedFleet, World

from megasharp.batching.packing import MICRO_BATCHES_AHEAD
from megasharp.common.records import (
    Completion,
    Group,
    Outcome,
    Prompt,
    Response,
    SamplingParams,
    TaskAnswer,
    Verdict,
)
from megasharp.config.rollout import RolloutConfig
from megasharp.rollout.async_collector import AsyncRollouts
from megasharp.rollout.step_request import Collected, GroupMaker, PromptSource, StepRequest
from megasharp.tasks.judge import DirectJudge

LAST, BAR, BATCHES, BROKEN = 50, 0.5, 50, 0.02
OVERSAMPLE = (0.0, 0.25, 0.5, 1.0)
BASE = "0/0/abort"
KEPT = Verdict(Outcome.CORRECT, 1.0, "")


class Stream:
    """Prompts 0, 1, 2, ..."""

    def __init__(self) -> None:
        self.taken = 0

    def take(self, count: int) -> list[Prompt]:
        """The next ones."""
        self.taken += count
        return [prompt_at(number) for number in range(self.taken - count, self.taken)]


def prompt_at(number: int) -> Prompt:
    """The prompt with this number."""
    return Prompt(f"p{number}", "simulated", "", (number,), TaskAnswer(), "simulation", 0, number)


class Maker(GroupMaker):
    """Makes groups without text and verifier."""

    def groups(
        self, names: Sequence[str], prompts: Sequence[Prompt], sampled: Sequence[Sequence[Completion]], version: int
    ) -> list[Group]:
        """All are right."""
        return [
            Group(name, prompt, tuple(Response(each, "", KEPT) for each in some), version)
            for name, prompt, some in zip(names, prompts, sampled, strict=True)
        ]


class Annotation:
    """A step's annotation, each group's as long, where `rollout.overlap_annotation` has it done in pieces.

    A piece is as many groups as fill one to four of the step's `micro_batches`.
    """

    def __init__(self, fleet: SimulatedFleet, groups: int, seconds: float, micro_batches: int) -> None:
        self._fleet, self._seconds = fleet, seconds / groups
        self._least = math.ceil(groups / micro_batches)
        self._waiting = self._done = 0

    def finished(self, group: Group) -> None:
        """One more."""
        self._waiting += 1

    def work(self) -> bool:
        """Annotate a piece while engines sample."""
        if self._waiting < self._least:
            return False
        count = min(self._waiting, MICRO_BATCHES_AHEAD * self._least)
        self._waiting, self._done = self._waiting - count, self._done + count
        self._fleet.go_on(count * self._seconds)
        return True

    def end(self) -> float:
        """Annotate the rest after sampling; returns the seconds that had been annotated before."""
        done, rest = self._done * self._seconds, self._waiting * self._seconds
        self._waiting = self._done = 0
        self._fleet.go_on(rest)
        return done


class Broken(AsyncRollouts):
    """Drops groups that have one of the longest responses, as many as `share` of all groups; takes others for them."""

    longest = 0

    def collect(self, source: PromptSource, order: StepRequest) -> Collected:
        """Collect with a selection that goes by length."""

        def short(groups: list[Group]) -> list[Group]:
            return [
                replace(group, dropped_reason="long")
                if max(response.length for response in group.responses) >= self.longest
                else group
                for group in groups
            ]

        return super().collect(source, replace(order, select=short, refill_rounds=1))


@dataclass(frozen=True, slots=True)
class Setting:
    """The collector's keys."""

    oversample: float
    max_staleness: int
    stragglers: str = "abort"

    @property
    def name(self) -> str:
        """Its short form."""
        return f"{self.oversample:g}/{self.max_staleness}/{self.stragglers}"

    @classmethod
    def parse(cls, text: str) -> Setting:
        """Read the short form; `abort` may be left out."""
        oversample, staleness, *rest = text.split("/")
        return cls(float(oversample), int(staleness), *rest)


def all_settings() -> list[Setting]:
    """All that are offered; to keep stragglers needs staleness."""
    return [
        Setting(oversample, staleness, stragglers)
        for staleness in (0, 1, 2)
        for stragglers in (("abort", "keep") if staleness else ("abort",))
        for oversample in OVERSAMPLE
    ]


@dataclass(frozen=True, slots=True)
class Run:
    """The outcome of a setting: step and length of each admitted response by seed; seeds and lengths as trained."""

    setting: Setting
    admitted: dict[int, tuple[int, int]]
    trained: list[tuple[int, int]]
    unfinished: list[int]
    discarded: int
    stale: float
    late: float
    steps: int
    seconds: float
    took: float
    annotated: float


def simulate(
    setting: Setting, world: World, steps: int, *, broken: bool = False, annotate: tuple[float, int] = (0.0, 1)
) -> Run:
    """Collect so many steps, each with so many seconds of annotation in so many micro-batches."""
    began, fleet, source, trained = time.process_time(), SimulatedFleet(world), Stream(), []
    judge, sampling = DirectJudge({"simulated": lambda *_: KEPT}), SamplingParams(world.lengths.limit)
    maker = Maker(judge, lambda rows: [""] * len(rows), sampling, world.responses, 1)
    config = RolloutConfig(
        oversample=setting.oversample,
        max_staleness=setting.max_staleness,
        stragglers=setting.stragglers,  # type: ignore[arg-type]
        allow_length_bias=setting.max_staleness == 0,
    )
    collector = (Broken if broken else AsyncRollouts)(fleet, maker, config, waiting=fleet.wait)
    if isinstance(collector, Broken):
        collector.longest = world.lengths.at((1 - BROKEN) ** (1 / world.responses))
    annotation = Annotation(fleet, world.prompts, *annotate)
    discarded, stale, late, annotated = 0, 0.0, 0.0, 0.0
    for step in range(1, steps + 1):
        fleet.step = step
        found = collector.collect(source, StepRequest(step, world.prompts, list, meanwhile=annotation))
        annotated += annotation.end()
        for group in found.groups:
            if group.dropped_reason is None:
                trained += [(response.completion.seed, response.length) for response in group.responses]
            discarded += len(group.responses) if group.dropped_reason else 0
        discarded += int(found.tally.metrics()["responses/discarded"])
        stale = max(stale, found.metrics.get("rollout/staleness_max", 0.0))
        late += found.metrics["rollout/overdue"]
        fleet.go_on(world.update_s)
        fleet.push(step)
    # A prompt that was taken but never sent to an engine was not admitted.
    seeds = [seed for left in collector.unfinished() for seed in maker.request(prompt_at(left.position)).seeds]
    unfinished = [seed for seed in seeds if seed in fleet.admitted]
    took = time.process_time() - began
    return Run(setting, fleet.admitted, trained, unfinished, discarded, stale, late, steps, fleet.now, took, annotated)


@dataclass(frozen=True, slots=True)
class Found:
    """A run's figures: differences and standard errors in percent of what was admitted."""

    run: Run
    mean: float
    mean_error: float
    p90: float
    p90_error: float
    lost: int
    twice: int
    changed: int
    balanced: bool

    @property
    def failed(self) -> bool:
        """Return True where a claim of partial rollouts is broken."""
        exact = self.balanced and not (self.lost or self.twice or self.changed or self.run.discarded or self.run.late)
        return not (exact and abs(self.mean) <= BAR and abs(self.p90) <= BAR)


def examine(run: Run) -> Found:
    """Compare what was trained with what was admitted."""
    times = Counter(seed for seed, _ in run.trained)
    accounted = times + Counter(run.unfinished)
    lengths = Counter(length for _, length in run.trained) + Counter(run.admitted[seed][1] for seed in run.unfinished)
    # Short runs have no 50 steps to leave out.
    until = run.steps - min(LAST, run.steps // 4)
    before = numpy.array([length for step, length in run.admitted.values() if step <= until])
    after = numpy.array([length for seed, length in run.trained if run.admitted[seed][0] <= until])
    mean, p90 = before.mean(), numpy.percentile(before, 90)
    batches = [numpy.percentile(batch, 90) for batch in numpy.array_split(before, BATCHES)]
    return Found(
        run,
        mean=float(100 * (after.mean() / mean - 1)),
        mean_error=float(100 * before.std() / mean / math.sqrt(len(before))),
        p90=float(100 * (numpy.percentile(after, 90) / p90 - 1)),
        p90_error=float(100 * numpy.std(batches, ddof=1) / p90 / math.sqrt(BATCHES)),
        lost=sum(seed not in accounted for seed in run.admitted),
        twice=sum(count > 1 for count in accounted.values()),
        changed=sum(run.admitted[seed][1] != length for seed, length in run.trained),
        balanced=lengths == Counter(length for _, length in run.admitted.values()),
    )


def examined(
    setting: Setting, world: World, steps: int, *, broken: bool = False, annotate: tuple[float, int] = (0.0, 1)
) -> Found:
    """Simulate and examine."""
    return examine(simulate(setting, world, steps, broken=broken, annotate=annotate))


HEAD = (
    "| oversample | max_staleness | stragglers | admitted | trained | unfinished | discarded | mean | 90 % | steps/h "
    "| tokens/s | s a step | check |\n|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|"
)


def row(found: Found, base: Run) -> str:
    """A line of the table."""
    run, setting = found.run, found.run.setting
    verdict = "biased" if setting.oversample else ""
    if setting.max_staleness:
        verdict = "FAILED" if found.failed else "passed"
    cells = (
        f"{setting.oversample:g} | {setting.max_staleness} | {setting.stragglers} | {len(run.admitted):,}",
        f"{len(run.trained):,} | {len(run.unfinished):,} | {run.discarded:,}",
        f"{found.mean:+.2f} % ± {found.mean_error:.2f} | {found.p90:+.2f} % ± {found.p90_error:.2f}",
        f"{base.seconds / base.steps / (run.seconds / run.steps):.2f}x | {rate(run) / rate(base):.2f}x",
        f"{run.seconds / run.steps:.1f} | {verdict}",
    )
    return f"| {' | '.join(cells)} |"


def rate(run: Run) -> float:
    """Trained tokens a second."""
    return sum(length for _, length in run.trained) / run.seconds


def figures(found: Found, base: Run) -> list[Figure]:
    """The same for the JSON file."""
    run, name = found.run, found.run.setting.name
    bar = BAR if run.setting.max_staleness else None
    note = f"trained against admitted, standard error {found.mean_error:.3f}"
    at_90 = f"trained against admitted, standard error {found.p90_error:.3f}"
    return [
        Figure(f"{name}: mean length, difference", abs(found.mean), "%", bar, note=note),
        Figure(f"{name}: 90th percentile, difference", abs(found.p90), "%", bar, note=at_90),
        Figure(f"{name}: lost, twice, changed", found.lost + found.twice + found.changed, "", 0 if bar else None),
        Figure(f"{name}: discarded", run.discarded, "", 0 if bar else None),
        Figure(f"{name}: steps/h", base.seconds / base.steps / (run.seconds / run.steps), "x"),
        Figure(f"{name}: tokens/s", rate(run) / rate(base), "x"),
    ]


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--settings", type=Setting.parse, nargs="+", default=all_settings(), help="as 0.5/1/keep")
    made.add_argument("--steps", type=int, default=3000)
    made.add_argument("--prompts", type=int, default=8, help="of a step")
    made.add_argument("--responses", type=int, default=8, help="to a prompt")
    made.add_argument("--engines", type=int, default=1)
    made.add_argument("--running", type=int, default=230, help="responses at once in an engine")
    made.add_argument("--lengths", type=Path, help="file of lengths, one number a line; else lognormal")
    made.add_argument("--median", type=float, default=500.0, help="of lengths, in tokens")
    made.add_argument("--sigma", type=float, default=0.76, help="of their logarithms")
    made.add_argument("--limit", type=int, default=4096, help="tokens at which a response is cut")
    made.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt")
    made.add_argument("--weights", type=float, default=17.2e9 / 2.4e12, help="seconds to read the weights once")
    made.add_argument("--cache", type=float, default=94.3e3 / 2.4e12, help="seconds to read a token of the cache")
    made.add_argument("--read", type=float, default=43.6e-6, help="seconds to compute a token of a prompt or prefix")
    made.add_argument("--update", type=float, help="seconds of training a step; default: by tokens, as planned")
    made.add_argument("--annotate", type=float, default=0.0, help="seconds of annotation a step, while engines sample")
    made.add_argument("--micro-batches", type=int, default=16, help="of a rank, in a step's annotation")
    made.add_argument("--processes", type=int, default=1, help="settings at once")
    made.add_argument("--broken", action="store_true", help="drop the 2 %% of groups with the longest responses")
    made.add_argument("--json", action="store_true", help="write tools/results/simulate_rollouts-*.json")
    made.add_argument("--name", default="", help="of the JSON file, where it is not the default's")
    return made


def world_of(arguments: argparse.Namespace) -> World:
    """Its engines and lengths."""
    given = [int(line) for line in arguments.lengths.read_text().split()] if arguments.lengths else []
    lengths = Lengths(arguments.limit, arguments.median, arguments.sigma, given)
    tokens = arguments.prompts * (arguments.responses * lengths.mean + arguments.prompt) / arguments.engines
    return World(
        lengths,
        arguments.prompts,
        arguments.responses,
        arguments.engines,
        arguments.running,
        arguments.prompt,
        arguments.weights,
        arguments.cache * (arguments.prompt + lengths.in_progress),
        arguments.read,
        54.7 / 278_528 * tokens if arguments.update is None else arguments.update,
    )


def main() -> int:
    """Simulate, print; 1 where a check failed."""
    arguments = parser().parse_args()
    torch.set_num_threads(1)
    world = world_of(arguments)
    print(
        f"lengths: mean {world.lengths.mean:,.0f}, 90 % {world.lengths.at(0.9):,}, limit {world.lengths.limit:,}; "
        f"decode step {1e3 * world.step_s:.2f} + {1e3 * world.response_s:.3f} n ms; update {world.update_s:,.1f} s\n"
    )
    annotate = arguments.annotate, arguments.micro_batches
    one = functools.partial(examined, world=world, steps=arguments.steps, annotate=annotate)
    rows, failed, settings = [], False, [each for each in arguments.settings if each.name != BASE or arguments.broken]
    mapped = map
    if arguments.processes > 1:
        mapped = multiprocessing.get_context("fork").Pool(arguments.processes).imap  # type: ignore[assignment]
    others = iter(mapped(functools.partial(one, broken=arguments.broken), settings))
    plain = one(Setting.parse(BASE))
    print(HEAD)
    for setting in arguments.settings:
        found = next(others) if setting in settings else plain
        print(row(found, plain.run), flush=True)
        if arguments.annotate:
            ahead = found.run.annotated / found.run.steps
            print(
                f"{setting.name}: of {arguments.annotate:g} s of annotation a step {ahead:.1f} s while engines sample"
            )
        print(f"{setting.name}: {found.run.took:.0f} s of CPU, staleness <= {found.run.stale:g}", file=sys.stderr)
        if setting.max_staleness and found.failed:
            failed = True
            print(
                f"{setting.name} FAILED: {found.lost} lost, {found.twice} twice, {found.changed} of another "
                f"length, {found.run.discarded} discarded, {found.run.late:g} groups overdue",
                file=sys.stderr,
            )
        rows += figures(found, plain.run)
    if arguments.json:
        kinds = (str, int, float, bool, type(None))
        told = {name: value for name, value in vars(arguments).items() if isinstance(value, kinds)}
        report("simulate_rollouts", rows, {**told, "update": world.update_s}, subject=arguments.name)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
