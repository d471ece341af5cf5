"""Make the table of the runs about single claims (claims.yaml and the files beside it): `claims/differences.csv`.

    python examples/frontier/claims.py

Each case is held against its reference by runs of the same seeds, with intervals over seeds and problems. Nothing is
corrected for the number of rows: three seeds describe. docs/claims.md is made from it.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from records import TEST, UNTRAINED, table, values

from megasharp.evals.crossed import crossed
from megasharp.evals.frontier import Values

CLAIMS = Path(__file__).parent / "claims"
METRICS = ("pass@1", "pass@16", "pass@64", "pass@256", "distinct_correct")
COLUMNS = ("case", "against", "suite", "temperature", "metric", "seeds", "value", "difference", "low", "high")
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
    "claim_heat_": "claim_heat_grpo",
}
# Further pairs that a claim is about.
ALSO = (
    ("claim_ds", "claim_ds_positive"),
    ("claim_ds", "claim_ds_negative"),
    *(("claim_ds", f"claim_bonus-coefficient{value}") for value in ("0.003", "0.01")),
    *(("claim_ds", f"claim_penalty-coefficient{value}") for value in ("0.003", "0.01")),
    ("claim_ds", "claim_unlikeliness-beta0.25"),
    *((case, "claim_casp") for case in ("claim_nsr", "claim_w_reinforce", "claim_kl_cov", "claim_passk_training-k3")),
    ("claim_casp_without_positive", "claim_grpo"),
    ("claim_casp_without_negative", "claim_grpo"),
    *((f"claim_casp_quantile-quantile{value}", "claim_grpo") for value in ("0", "0.4")),
    ("claim_filter", "claim_iac-alpha1"),
)


@dataclass(frozen=True, slots=True)
class Setup:
    """What was measured: the suite, the sampling temperature."""

    suite: str
    temperature: str


def main() -> None:
    """Write the table."""
    with (CLAIMS / "differences.csv").open("w", encoding="utf-8", newline="") as lines:
        csv.writer(lines, lineterminator="\n").writerows([COLUMNS, *differences()])


def differences() -> Iterator[tuple[object, ...]]:
    """Yield a line for each pair of cases, setup and metric."""
    for setup, lines in recorded().items():
        by_case: dict[str, dict[str, Mapping[str, str]]] = {}
        for run, line in lines.items():
            case, _, seed = run.rpartition("_s")
            by_case.setdefault(case, {})[seed] = line
        pairs = [*((case, reference(case)) for case in by_case), *ALSO]
        for case, other in pairs:
            seeds = sorted(by_case.get(case, {}).keys() & by_case.get(other, {}).keys())
            if case == other or len(seeds) < 2:
                continue
            for metric in METRICS:
                own_RP, other_RP = (_metric(by_case[each], seeds, metric) for each in (case, other))
                found = crossed(other_RP, own_RP, paired=True)
                assert found is not None
                interval = found.interval()
                numbers = (own_RP.mean(), float(found.difference), interval.low, interval.high)
                head = (case, other, setup.suite, setup.temperature, metric, len(seeds))
                yield *head, *(f"{number:.5f}" for number in numbers)


def recorded() -> dict[Setup, dict[str, Mapping[str, str]]]:
    """Return the lines of `counts.csv` by what was measured and by their runs, `countdown_test` first."""
    lines = [*table("counts", CLAIMS), *shared()]
    found: dict[Setup, dict[str, Mapping[str, str]]] = {}
    for line in sorted(lines, key=lambda line: (line["suite"] != TEST, line["suite"], line["run"])):
        found.setdefault(Setup(line["suite"], line["temperature"]), {})[line["run"]] = line
    return found


def shared() -> Iterator[Mapping[str, str]]:
    """Yield the lines of the frontier study's runs that are references here, under the names they have here."""
    for line in table("counts"):
        row, _, seed = line["run"].rpartition("_s")
        if row in SHARED:
            yield {**line, "run": f"{SHARED[row]}_s{seed}"}


def reference(case: str) -> str:
    """Return what a case is held against: its own name where it is a reference of all."""
    known = [prefix for prefix in REFERENCES if case.startswith(prefix)]
    return REFERENCES[max(known, key=len)] if known else case


def _metric(by_seed: Mapping[str, Mapping[str, str]], seeds: list[str], metric: str) -> Values:
    return np.concatenate([values([by_seed[seed]], metric) for seed in seeds])


if __name__ == "__main__":
    main()
