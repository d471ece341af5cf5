"""Make the table of the runs about single claims (claims.yaml and the files beside it): `claims/differences.csv`.

    python examples/frontier/claims.py

Each case is compared with its reference by runs of the same seeds, and with GRPO's line at equal pass@1 (`against` is
"line", `value` its pass@1), with intervals over seeds and problems. Problems of three numbers count where they are not
in the training data. Entropy and log-probs of candidates are means over the last windows of training that have 30 steps
together, with t intervals over seeds; those of examples/collapse_in_miniature are beside them.
Nothing is corrected for the number of rows: three seeds describe. docs/claims.md is made from it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from math import sqrt
from pathlib import Path
from statistics import fmean

import numpy as np
from records import TEST, UNTRAINED, WINDOW, counts, method_runs, t_test, table, values, write

from megasharp.evals.crossed import crossed
from megasharp.evals.frontier import Values, distance

CLAIMS = Path(__file__).parent / "claims"
MINIATURE = Path(__file__).parents[1] / "collapse_in_miniature"
METRICS = ("pass@1", "pass@8", "pass@16", "pass@64", "pass@256", "distinct_correct")
EASY = "pass@1, easy"
# A suite of which most problems are in the training data, and both files.
RELATED = "multiplicity_countdown_3"
EXAMPLES = Path(__file__).parents[1]
TRAINING_DATA = EXAMPLES / "quickstart" / "data" / "train.jsonl"
RELATED_DATA = EXAMPLES / "solution_multiplicity" / "data" / "countdown_3" / "test.jsonl"
LAST_STEPS = 30
# GRPO's samples stand beside those at a temperature lower by this too, under a name of their own.
WARMER = 0.2
HEAT, WARM = "claim_heat_grpo", f"claim_heat_grpo, {WARMER} warmer"
COLUMNS = ("case", "against", "suite", "temperature", "metric", "seeds", "value", "difference", "low", "high")
LAST_TUNING_SEED = 12
EARLY = ("40", "80")
# Runs of the frontier study at the same rate and with the same seeds, and what they are called here.
SHARED = {
    "grpo-lr5e-05": "claim_grpo",
    "casp-alpha0.3-lr5e-05": "claim_casp",
    "iac-alpha0.5-lr5e-05": "claim_iac-alpha0.5",
    "entropy_bonus-coefficient0.003-lr5e-05": "claim_bonus-coefficient0.003",
    "kl-coefficient0.01-lr5e-05": "claim_grpo_kl-coefficient0.01",
    "gspo_3e-3-lr5e-05": "claim_gspo",
    "passk_training-k3-lr5e-05": "claim_passk_training-k3",
    "ds_sequence_0.03-lr5e-05": "claim_ds_sequence",
    "dlc-mu0.1-memory1x-lr5e-05": "claim_dlc",
    "dapo_iac-alpha1-lr5e-05": "claim_dapo_iac",
    "dapo_iac_dlc-mu0.05-lr5e-05": "claim_dapo_iac_dlc",
    UNTRAINED: UNTRAINED,
}
# A case's reference is that of the longest prefix.
REFERENCES = {
    "claim_": "claim_grpo",
    "claim_casp_": "claim_casp",
    "claim_ds_": "claim_ds",
    "claim_ds_temperature-temperature1.2": "claim_grpo_temperature-temperature1.2",
    "claim_ds_kl-coefficient0.03": "claim_grpo_kl-coefficient0.03",
    "claim_ds_sequence": "claim_grpo",
    "claim_gspo_n": "claim_gspo",
    "claim_related_": UNTRAINED,
    "claim_heat_": HEAT,
}
# Further pairs that a claim is about.
ALSO = (
    ("claim_ds", "claim_ds_positive"),
    ("claim_ds", "claim_ds_negative"),
    *(("claim_ds", f"claim_bonus-coefficient{value}") for value in ("0.003", "0.01")),
    *(("claim_ds", f"claim_penalty-coefficient{value}") for value in ("0.003", "0.01")),
    ("claim_ds", "claim_unlikeliness-beta0.25"),
    ("claim_ds_positive", "claim_grpo"),
    ("claim_ds_negative", "claim_grpo"),
    ("claim_gspo_n", "claim_grpo"),
    *(
        (f"claim_{case}", "claim_casp")
        for case in (
            "nsr",
            "psr",
            "w_reinforce",
            "kl_cov",
            "passk_training-k3",
            "entropy_adv",
            "forking_tokens",
            "filter",
        )
    ),
    ("claim_bonus-coefficient0.003", "claim_casp"),
    ("claim_casp_without_positive", "claim_grpo"),
    ("claim_casp_without_negative", "claim_grpo"),
    *((f"claim_casp_quantile-quantile{value}", "claim_grpo") for value in ("0", "0.4")),
    ("claim_filter", "claim_iac-alpha1"),
    ("claim_iac-alpha1", "claim_dapo"),
    ("claim_dapo_iac", "claim_dapo"),
    ("claim_dapo_iac", "claim_iac-alpha1"),
    ("claim_dapo_iac_dlc", "claim_dapo_iac"),
    ("claim_heat_casp", WARM),
    *(
        (f"claim_{case}", UNTRAINED)
        for case in ("grpo", "casp", "ds_sequence", "grpo_n", "gspo_n", "nsr", "w_reinforce")
    ),
)


@dataclass(frozen=True, slots=True)
class Setup:
    """The suite and the sampling temperature of a measurement."""

    suite: str
    temperature: str


def main() -> None:
    """Write the table."""
    rows = chain(
        differences(), from_the_line(), in_training(), in_evaluations(), in_miniature(), stopped_early(), link()
    )
    write(CLAIMS / "differences.csv", COLUMNS, rows)


def differences() -> Iterator[tuple[object, ...]]:
    """Yield a line for each pair of cases, setup and metric."""
    for setup, lines in recorded().items():
        by_case: dict[str, dict[str, Mapping[str, str]]] = {}
        for run, line in lines.items():
            case, _, seed = run.rpartition("_s")
            by_case.setdefault(case, {})[seed] = line
        for case, other, seeds in pairs(by_case):
            for metric in METRICS if setup.suite != TEST else (*METRICS, EASY):
                own_RP, other_RP = (_metric(by_case[each], seeds, metric) for each in (case, other))
                if setup.suite == RELATED:
                    own_RP, other_RP = own_RP[:, unseen_problems()], other_RP[:, unseen_problems()]
                found = crossed(other_RP, own_RP, paired=True)
                assert found is not None
                interval = found.interval()
                numbers = (own_RP.mean(), float(found.difference), interval.low, interval.high)
                head = (case, other, setup.suite, setup.temperature, metric, len(seeds))
                yield *head, *(f"{number:.5f}" for number in numbers)


def from_the_line() -> Iterator[tuple[object, ...]]:
    """Yield each case's distance from GRPO's line at its pass@1, as confirm.py measures it; `against` is "line"."""
    frontier = counts(TEST)
    sides = (UNTRAINED, *(f"grpo-lr{rate}" for rate in ("2.5e-05", "5e-05", "0.0001")))
    by_case: dict[str, list[str]] = {}
    own = counts(TEST, folder=CLAIMS)
    for run in own:
        case, _, seed = run.rpartition("_s")
        if case != UNTRAINED and all(f"{side}_s{seed}" in frontier for side in sides):
            by_case.setdefault(case, []).append(seed)
    for case, seeds in by_case.items():
        line = [method_runs(side, [frontier[f"{side}_s{seed}"] for seed in seeds], "pass@256") for side in sides]
        found = distance(method_runs(case, [own[f"{case}_s{seed}"] for seed in seeds], "pass@256"), line)
        if found is not None:
            interval = found.crossed.interval()
            numbers = (found.x, float(found.crossed.difference), interval.low, interval.high)
            yield case, "line", TEST, "1.0", "pass@256", len(seeds), *(f"{number:.5f}" for number in numbers)


def pairs(by_case: Mapping[str, Mapping[str, object]]) -> Iterator[tuple[str, str, list[str]]]:
    """Yield each case with what it is compared with, and the seeds that both have, if these are at least two."""
    for case, other in [*((case, reference(case)) for case in by_case), *ALSO]:
        seeds = sorted(by_case.get(case, {}).keys() & by_case.get(other, {}).keys())
        if case != other and len(seeds) > 1:
            yield case, other, seeds


def in_training() -> Iterator[tuple[object, ...]]:
    """Yield lines as `differences` does for metrics of training; `suite` is "training".

    A case is compared with its own first 20 steps too.
    """
    windows: dict[str, dict[str, list[Mapping[str, str]]]] = {}
    for line in [*table("training", CLAIMS), *shared("training")]:
        case, _, seed = line["run"].rpartition("_s")
        windows.setdefault(case, {}).setdefault(seed, []).append(line)
    ends = {case: {seed: _means(_last(lines)) for seed, lines in by_seed.items()} for case, by_seed in windows.items()}
    starts = {case: {seed: _means(lines[:1]) for seed, lines in by_seed.items()} for case, by_seed in windows.items()}
    yield from _t_lines(ends, "training", "")
    for case in ends:
        yield from _t_pair((case, f"{case} at its start", "training", ""), ends[case], starts[case])


def _last(lines: Sequence[Mapping[str, str]]) -> list[Mapping[str, str]]:
    """Return the last windows of a run that have LAST_STEPS steps together: the very last may be short."""
    end = int(lines[-1]["step"])
    return [line for line in lines if int(line["step"]) > end - LAST_STEPS]


def _means(lines: Sequence[Mapping[str, str]]) -> dict[str, float]:
    found = {metric: _mean(lines, metric) for metric in ("entropy", "lambda_1", "lambda_2")}
    return {**found, "lambda_1 - lambda_2": found["lambda_1"] - found["lambda_2"]}


def _mean(lines: Sequence[Mapping[str, str]], metric: str) -> float:
    # A window goes from the one before to its own step.
    steps = [(int(line["step"]) - 1) % WINDOW + 1 for line in lines]
    return fmean([float(line[metric]) for line in lines], steps)


def in_evaluations() -> Iterator[tuple[object, ...]]:
    """Yield lines as `differences` does for entropies and Lambda(1) of the last evaluation, or the first of all."""
    ends: dict[str, dict[str, dict[str, float]]] = {}
    for line in [*table("curves", CLAIMS), *shared("curves")]:
        case, _, seed = line["run"].rpartition("_s")
        figures = {metric: float(line[metric]) for metric in ("token_entropy", "answer_entropy", "lambda_1", "greedy")}
        # Later evaluations come later in the file.
        ends.setdefault(UNTRAINED if line["step"] == "0" else case, {})[seed] = figures
    yield from _t_lines(ends, "countdown_dev", "1.0")


def in_miniature() -> Iterator[tuple[object, ...]]:
    """Yield lines for last models of collapse_in_miniature less GRPO's, and less the untrained one."""
    ends: dict[str, dict[str, dict[str, float]]] = {}
    for line in table("results", MINIATURE):
        found = {metric: float(line[metric]) for metric in ("token_entropy", "lambda_1", "lambda_2", "lambda_sample")}
        found["lambda_1 - lambda_2"] = found["lambda_1"] - found["lambda_2"]
        found["lambda_1 - lambda_sample"] = found["lambda_1"] - found["lambda_sample"]
        ends.setdefault(line["row"], {})[line["seed"]] = found
    for case in ends:
        for other in ("grpo", "base"):
            if case not in (other, "base"):
                yield from _t_pair((case, other, "miniature", "1.0"), ends[case], ends[other])


def _t_lines(
    ends: Mapping[str, Mapping[str, Mapping[str, float]]], suite: str, temperature: str
) -> Iterator[tuple[object, ...]]:
    for case, other, _ in pairs(ends):
        yield from _t_pair((case, other, suite, temperature), ends[case], ends[other])


def _t_pair(
    head: tuple[str, ...], own: Mapping[str, Mapping[str, float]], other: Mapping[str, Mapping[str, float]]
) -> Iterator[tuple[object, ...]]:
    """Yield a line for each metric, of the seeds that both sides have, if these are at least two."""
    seeds = sorted(own.keys() & other.keys())
    for metric in own[seeds[0]] if len(seeds) > 1 else ():
        own_R, other_R = (np.array([side[seed][metric] for seed in seeds]) for side in (own, other))
        yield _t_line(head, metric, own_R, other_R)


def stopped_early() -> Iterator[tuple[object, ...]]:
    """Yield lines for GRPO at 5e-5 after fewer steps, against its last, on the development problems."""
    by_seed: dict[str, list[Mapping[str, str]]] = {}
    for line in table("curves"):
        row, _, seed = line["run"].rpartition("_s")
        if row == "grpo-lr5e-05" and int(seed) > LAST_TUNING_SEED:
            by_seed.setdefault(seed, []).append(line)
    for step in EARLY if by_seed else ():
        for metric in ("pass@1", "pass@64"):
            early = [next(float(line[metric]) for line in lines if line["step"] == step) for lines in by_seed.values()]
            last = [float(lines[-1][metric]) for lines in by_seed.values()]
            head = (f"claim_grpo at step {step}", "claim_grpo", "countdown_dev", "1.0")
            yield _t_line(head, metric, np.array(early), np.array(last))


def link() -> Iterator[tuple[object, ...]]:
    """Yield the correlation of distinct next tokens in training with the gain from more samples.

    `difference` is Pearson's coefficient of the means of settings, with Fisher's interval.
    """
    lines = {**counts(TEST), **counts(TEST, folder=CLAIMS)}
    windows: dict[str, list[Mapping[str, str]]] = {}
    for window in [*table("training"), *table("training", CLAIMS)]:
        windows.setdefault(window["run"], []).append(window)
    by_case: dict[str, list[tuple[float, float]]] = {}
    for run in windows.keys() & lines.keys():
        gain = float(values([lines[run]], "pass@256").mean() - values([lines[run]], "pass@16").mean())
        by_case.setdefault(run.rpartition("_s")[0], []).append((_mean(_last(windows[run]), "distinct_next"), gain))
    points = np.array([np.mean(each, axis=0) for each in by_case.values()])
    if len(points) > 3:
        found = float(np.corrcoef(points.T)[0, 1])
        low, high = np.tanh(np.arctanh(found) + np.array([-1.96, 1.96]) / sqrt(len(points) - 3))
        numbers = (points[:, 1].mean(), found, low, high)
        head = ("distinct_next", "pass@256 less pass@16", TEST, "1.0", "correlation", len(points))
        yield *head, *(f"{number:.5f}" for number in numbers)


def _t_line(head: tuple[str, ...], metric: str, own_R: Values, other_R: Values) -> tuple[object, ...]:
    difference, half, _ = t_test(own_R - other_R)
    numbers = (own_R.mean(), difference, difference - half, difference + half)
    return *head, metric, len(own_R), *(f"{number:.5f}" for number in numbers)


def recorded() -> dict[Setup, dict[str, Mapping[str, str]]]:
    """Return the lines of `counts.csv` by what was measured and by their runs, `countdown_test` first."""
    lines = [*table("counts", CLAIMS), *shared("counts")]
    found: dict[Setup, dict[str, Mapping[str, str]]] = {}
    for line in sorted(lines, key=lambda line: (line["suite"] != TEST, line["suite"], line["run"])):
        found.setdefault(Setup(line["suite"], line["temperature"]), {})[line["run"]] = line
        if line["run"].startswith(HEAT):
            cooler = Setup(line["suite"], f"{float(line['temperature']) - WARMER:.1f}")
            found.setdefault(cooler, {})[line["run"].replace(HEAT, WARM)] = line
    return found


def shared(name: str) -> Iterator[Mapping[str, str]]:
    """Yield a table's lines of the frontier study's runs that are references here, under the names they have here."""
    for line in table(name):
        row, _, seed = line["run"].rpartition("_s")
        if row in SHARED and int(seed) > LAST_TUNING_SEED:
            yield {**line, "run": f"{SHARED[row]}_s{seed}"}


def reference(case: str) -> str:
    """Return what a case is compared with: its own name where it is a reference of all."""
    known = [prefix for prefix in REFERENCES if case.startswith(prefix)]
    return REFERENCES[max(known, key=len)] if known else case


def _metric(by_seed: Mapping[str, Mapping[str, str]], seeds: list[str], metric: str) -> Values:
    found_RP = np.concatenate([values([by_seed[seed]], metric.partition(",")[0]) for seed in seeds])
    return found_RP[:, easy_problems()] if metric == EASY else found_RP


@lru_cache(maxsize=1)
def unseen_problems() -> tuple[int, ...]:
    """Return the problems of the related suite that are not in the training data, whatever their numbers' order."""
    trained, related = (
        [(sorted(row["numbers"]), row["target"]) for row in map(json.loads, path.open(encoding="utf-8"))]
        for path in (TRAINING_DATA, RELATED_DATA)
    )
    return tuple(place for place, problem in enumerate(related) if problem not in trained)


@lru_cache(maxsize=1)
def easy_problems() -> tuple[int, ...]:
    """Return the test problems, a quarter of them, that the untrained model solves most often."""
    lines = [line for run, line in counts(TEST).items() if run.startswith(UNTRAINED)]
    success_P = values(lines, "pass@1").mean(axis=0)
    return tuple(np.argsort(-success_P, kind="stable")[: len(success_P) // 4].tolist())


if __name__ == "__main__":
    main()
