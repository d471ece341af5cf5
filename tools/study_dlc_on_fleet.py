"""What DLC's sampling does to a model that was trained with it, on the CPU fleet; prints Markdown and writes a CSV.

    .venv/bin/python tools/study_dlc_on_fleet.py --out runs/study_dlc

Trains the quickstart's model with DLC for each seed, the memory network a step each step, as
`examples/fleet_on_cpu/run.yaml` says (with one engine and one rank). Then SGLang engines sample the same problems with
the same seeds: the policy alone in an engine without a memory network, again with other seeds, and policy and memory
in one engine at several mu. Every way has the same number of samples for each problem. `--grpo` also trains without
DLC. `--long` trains as the quickstart does instead (200 steps of 384 responses, DLC in the in-process engine). What is
done already is not done again: the same command goes on where it was interrupted.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from megasharp.common.files import write_text
from megasharp.common.records import Completion, GenerateRequest, Plausible, SamplingParams
from megasharp.config.rollout import RolloutConfig
from megasharp.convert.hf_write import carry_over
from megasharp.evals.estimators import pass_at_k
from megasharp.evals.evaluate import WITH_MEMORY, evaluate
from megasharp.evals.result import EvalSetting
from megasharp.evals.result_files import save
from megasharp.evals.suites import Suite, load_suite
from megasharp.learner.conversion import megatron_to_hf
from megasharp.rollout.sglang.client.fleet import Fleet, start_fleet
from megasharp.rollout.sglang.client.launch import FleetSettings
from megasharp.tasks.tokenizer import load_tokenizer

REPOSITORY = Path(__file__).resolve().parents[1]
QUICKSTART = REPOSITORY / "examples" / "quickstart"
FLEET_RUN, LONG_RUN = REPOSITORY / "examples" / "fleet_on_cpu" / "run.yaml", QUICKSTART / "run.yaml"
FLEET_STEPS, LONG_STEPS = 30, 200
FLEET_KEYS = ("rollout.engines=1", "policy.tp=1", "cluster.backend=local", "eval.with_memory=false")
LONG_KEYS = (
    "recipe.methods=[grpo,dlc]",
    "recipe.dlc={mu: 0.2, memory: {path: examples/quickstart/memory}}",
    "eval.every=0",
)
MAX_TOKENS = 20
OTHER_SEEDS = 1_000_003
RESAMPLES = 2000
PLAIN, AGAIN, GRPO = "policy alone", "policy alone, other seeds", "trained without DLC"


@dataclass(frozen=True, slots=True)
class Way:
    """One way to sample: from the policy alone (`mu` None) or with the memory's logits times mu subtracted.

    `plausible` is the guard of `SamplingParams`.
    """

    name: str
    mu: float | None
    seed: int
    temperature: float = 1.0
    plausible: Plausible | None = None


@dataclass(frozen=True, slots=True)
class Use:
    """What `evaluate` asks about the memory network."""

    mu: float
    plausible: Plausible | None


@dataclass(frozen=True, slots=True)
class Found:
    """One way on one trained model: counts for each problem, and what the subtraction did to the tokens."""

    correct: tuple[int, ...]
    distinct: tuple[int, ...]
    argmax_moved: float
    calibration_kl: float


class Watched:
    """An engine whose completions' figures are added up as they pass."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._tokens, self._moved, self._kl = 0, 0.0, 0.0

    @property
    def version(self) -> int:
        """Of the engine's weights."""
        return self._fleet.version

    def generate(self, requests: Sequence[GenerateRequest], sampling: SamplingParams) -> list[list[Completion]]:
        """As the engine does it."""
        found = self._fleet.generate(requests, sampling)
        for completion in (each for completions in found for each in completions):
            if completion.argmax_moved is not None and completion.calibration_kl is not None:
                self._tokens += completion.tokens.numel()
                self._moved += float(completion.argmax_moved.sum())
                self._kl += float(completion.calibration_kl.sum())
        return found

    def healthy(self) -> bool:
        """Whether the engine can serve."""
        return self._fleet.healthy()

    def close(self) -> None:
        """The engine is another's to close."""

    def means(self) -> tuple[float, float]:
        """Share of tokens whose likeliest token was moved, and nats of KL(calibrated || policy) of a token."""
        tokens = max(1, self._tokens)
        return self._moved / tokens, self._kl / tokens


def main() -> None:
    """Train, sample, print."""
    arguments = _arguments()
    _check_settings(arguments)
    suite = load_suite("countdown_test")
    suite = Suite(suite.name, suite.task, suite.items[: arguments.problems])
    found: dict[tuple[str, int], Found] = {}
    for seed in arguments.seeds:
        for way, one in _of_seed(arguments, suite, seed):
            found[way, seed] = one
    table = _table(arguments, found)
    write_text(arguments.out / "table.md", table)
    _write_csv(arguments, found)
    print(table)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="DLC's sampling on the CPU fleet.")
    parser.add_argument("--out", type=lambda text: Path(text).absolute(), default=REPOSITORY / "runs" / "study_dlc")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--long", action="store_true", help="train as the quickstart does")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--mu", type=float, nargs="+", default=[0.0, 0.1, 0.2, 0.4])
    parser.add_argument("--temperature", type=float, nargs="+", default=[], help="more ways for the policy alone")
    parser.add_argument("--problems", type=int, default=128)
    parser.add_argument("--n", type=int, default=32, help="samples for each problem")
    parser.add_argument("--plausible", type=float, help="sample each mu above 0 with this guard (min_p) too")
    parser.add_argument("--grpo", action="store_true", help="also train without DLC")
    parser.add_argument("--python", type=Path, default=REPOSITORY / ".venv-fleet" / "bin" / "python")
    arguments = parser.parse_args()
    arguments.steps = arguments.steps or (LONG_STEPS if arguments.long else FLEET_STEPS)
    return arguments


def _check_settings(arguments: argparse.Namespace) -> None:
    """Ends the program where the folder holds results of other settings, which would be taken for these."""
    wanted = {name: getattr(arguments, name) for name in ("long", "steps", "problems", "n")}
    path = arguments.out / "settings.json"
    if path.exists() and (found := json.loads(path.read_text(encoding="utf-8"))) != wanted:
        sys.exit(f"{arguments.out} holds results of {found}, not of {wanted}; choose another --out")
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(wanted))


def _of_seed(arguments: argparse.Namespace, suite: Suite, seed: int) -> Iterator[tuple[str, Found]]:
    """Every way on the models trained with this seed."""
    plain = [Way(PLAIN, None, seed), Way(AGAIN, None, seed + OTHER_SEEDS)]
    plain += [Way(f"{PLAIN}, temperature {value:g}", None, seed, value) for value in arguments.temperature]
    calibrated = [Way(f"mu = {mu:g}", mu, seed) for mu in arguments.mu]
    if arguments.plausible is not None:
        share: float = arguments.plausible
        calibrated += [
            Way(f"mu = {mu:g}, plausible {share:g}", mu, seed, plausible=Plausible(min_p=share))
            for mu in arguments.mu
            if mu > 0
        ]
    yield from _measured(arguments, suite, f"dlc_{seed}", [], plain, with_memory=False)
    yield from _measured(arguments, suite, f"dlc_{seed}", [], calibrated, with_memory=True)
    if arguments.grpo:
        without = ["recipe.methods=[grpo]"]
        yield from _measured(arguments, suite, f"grpo_{seed}", without, [Way(GRPO, None, seed)], with_memory=False)


def _measured(
    arguments: argparse.Namespace,
    suite: Suite,
    name: str,
    overrides: Sequence[str],
    ways: Sequence[Way],
    with_memory: bool,
) -> Iterator[tuple[str, Found]]:
    """The ways on one trained model; neither training nor engines where all of it is on disk."""
    folders = {way: arguments.out / "samples" / name / way.name.replace(" ", "").replace(",", "_") for way in ways}
    missing = [way for way in ways if not (folders[way] / "found.json").exists()]
    if missing:
        model = _trained(arguments, name, seed=ways[0].seed, overrides=overrides)
        memory = model / "memory" if with_memory else None
        with _engine(arguments, model / "policy", memory, arguments.out / "logs" / name) as fleet:
            for way in missing:
                _sample(arguments, suite, fleet, way, folders[way])
    for way in ways:
        yield way.name, _read(folders[way])


def _trained(arguments: argparse.Namespace, name: str, seed: int, overrides: Sequence[str]) -> Path:
    """A folder with the Hugging Face folders `policy` and, for DLC, `memory` of the run's last checkpoint."""
    model: Path = arguments.out / "models" / name
    if model.exists():
        return model
    runs = arguments.out / "runs"
    resume = ["--resume"] if (runs / name).exists() else []
    keys = [f"name={name}", f"seed={seed}", f"steps={arguments.steps}", f"checkpoint.every={arguments.steps}"]
    keys += ["eval.suites=[]", *(LONG_KEYS if arguments.long else FLEET_KEYS), *overrides]
    megasharp = Path(sys.executable).with_name("megasharp")
    print(f"training {name} ...", file=sys.stderr, flush=True)
    run = LONG_RUN if arguments.long else FLEET_RUN
    subprocess.run([megasharp, "train", run, *keys, "--runs", runs, *resume], check=True, cwd=REPOSITORY, stdout=2)
    _export(runs / name / "checkpoints" / f"step_{arguments.steps:06d}", model)
    return model


def _export(checkpoint: Path, model: Path) -> None:
    """Both networks of a checkpoint as Hugging Face folders in `model`, which appears when both are there."""
    partial = model.with_name(f".{model.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    megatron_to_hf(checkpoint, partial / "policy")
    if (checkpoint / "memory").is_dir():
        # The converter reads a folder of one network: its shards as `policy`, what describes it as `hf`.
        staged = partial / "staged"
        (staged / "hf").mkdir(parents=True)
        carry_over(QUICKSTART / "memory", staged / "hf")
        (staged / "policy").symlink_to((checkpoint / "memory").resolve())
        megatron_to_hf(staged, partial / "memory")
        shutil.rmtree(staged)
    partial.rename(model)


@contextmanager
def _engine(arguments: argparse.Namespace, policy: Path, memory: Path | None, logs: Path) -> Iterator[Fleet]:
    """One deterministic engine: equal seeds draw equal tokens from equal distributions."""
    settings = FleetSettings(arguments.python, policy, logs, RolloutConfig(restarts=0), memory, deterministic=True)
    fleet = start_fleet(settings)
    try:
        yield fleet
    finally:
        fleet.close()


def _sample(arguments: argparse.Namespace, suite: Suite, fleet: Fleet, way: Way, folder: Path) -> None:
    """Evaluate one way and leave its files; `found.json` comes last."""
    print(f"sampling {folder} ...", file=sys.stderr, flush=True)
    engine = Watched(fleet)
    setting = EvalSetting(
        suite.name if way.mu is None else suite.name + WITH_MEMORY,
        way.name,
        arguments.steps,
        arguments.n,
        tuple(_ks(arguments.n)),
        way.temperature,
        way.seed,
        max_tokens=MAX_TOKENS,
    )
    result = evaluate(
        engine,
        suite,
        load_tokenizer(QUICKSTART / "base"),
        setting,
        greedy=False,
        memory=None if way.mu is None else Use(way.mu, way.plausible),
    )
    save(result, folder)
    moved, kl = engine.means()
    rows = result.rows
    found = Found(tuple(row.correct for row in rows), tuple(row.distinct_correct for row in rows), moved, kl)
    write_text(folder / "found.json", json.dumps(asdict(found)))


def _read(folder: Path) -> Found:
    found = json.loads((folder / "found.json").read_text(encoding="utf-8"))
    return Found(tuple(found.pop("correct")), tuple(found.pop("distinct")), **found)


def _ks(n: int) -> list[int]:
    return [k for k in (1, 8, n) if k <= n]


def _figures(n: int) -> Mapping[str, Callable[[Found], list[float]]]:
    """Each figure of a way, one value for each problem."""

    def of_k(k: int) -> Callable[[Found], list[float]]:
        return lambda found: [pass_at_k(n, correct, k) for correct in found.correct]

    distinct: Callable[[Found], list[float]] = lambda found: [float(count) for count in found.distinct]  # noqa: E731
    return {**{f"pass@{k}": of_k(k) for k in _ks(n)}, "distinct correct": distinct}


def _table(arguments: argparse.Namespace, found: Mapping[tuple[str, int], Found]) -> str:
    """Means over seeds; under each the difference from the policy alone with the same seeds."""
    ways = list(dict.fromkeys(way for way, _ in found))
    figures = _figures(arguments.n)
    lines = [f"| way | {' | '.join(figures)} | argmax moved | KL, nats |", "|---|" + "---|" * (len(figures) + 2)]
    for way in ways:
        ones = [found[way, seed] for seed in arguments.seeds]
        cells = [_cell(arguments, found, way, figure) for figure in figures.values()]
        cells += [f"{statistics.mean(one.argmax_moved for one in ones):.1%}"]
        cells += [f"{statistics.mean(one.calibration_kl for one in ones):.4f}"]
        lines.append(f"| {way} | {' | '.join(cells)} |")
    note = (
        f"{len(arguments.seeds)} seeds, {arguments.steps} steps each; {arguments.problems} problems x {arguments.n} "
        f"samples. In brackets: the difference from `{PLAIN}` and its 95 % interval, problems drawn anew "
        f"{RESAMPLES} times within each seed."
    )
    return "\n".join([*lines, "", note])


def _cell(
    arguments: argparse.Namespace,
    found: Mapping[tuple[str, int], Found],
    way: str,
    figure: Callable[[Found], list[float]],
) -> str:
    value_RP = np.array([figure(found[way, seed]) for seed in arguments.seeds])
    if way == PLAIN:
        return f"{value_RP.mean():.3f}"
    gain_RP = value_RP - np.array([figure(found[PLAIN, seed]) for seed in arguments.seeds])
    low, high = _interval(gain_RP)
    return f"{value_RP.mean():.3f} ({gain_RP.mean():+.3f}: {low:+.3f} to {high:+.3f})"


def _interval(gain_RP: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> tuple[float, float]:
    """The bootstrap's 95 % interval of the mean [seeds R, problems P]; each seed's problems are drawn by themselves."""
    random = np.random.default_rng(0)
    seeds, problems = gain_RP.shape
    means = np.zeros(RESAMPLES)
    for row in range(seeds):
        means += gain_RP[row][random.integers(problems, size=(RESAMPLES, problems))].mean(axis=1) / seeds
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def _write_csv(arguments: argparse.Namespace, found: Mapping[tuple[str, int], Found]) -> None:
    """A row for each way and seed."""
    figures = _figures(arguments.n)
    with (arguments.out / "table.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["way", "seed", *figures, "argmax_moved", "calibration_kl"])
        for (way, seed), one in found.items():
            values = [f"{statistics.mean(figure(one)):.4f}" for figure in figures.values()]
            writer.writerow([way, seed, *values, f"{one.argmax_moved:.5f}", f"{one.calibration_kl:.5f}"])


if __name__ == "__main__":
    main()
