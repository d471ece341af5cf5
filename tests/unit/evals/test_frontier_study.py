"""The frontier study's scripts: records of runs, Holm's correction, areas, and unique names across its sweeps."""

from __future__ import annotations

import csv
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from megasharp.evals.crossed import adjusted
from megasharp.evals.frontier import area_above, distance
from megasharp.reporting.sweeps.grid import cells, load_sweep

STUDY = Path(__file__).parents[3] / "examples" / "frontier"
MODULES = ("records", "confirm", "tuning", "strata", "claims", "prolonged", "tokens")


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The study's modules, with an empty folder of results."""
    monkeypatch.syspath_prepend(str(STUDY))
    loaded = {name: importlib.import_module(name) for name in MODULES}
    monkeypatch.setattr(loaded["records"], "RESULTS", tmp_path)
    monkeypatch.setattr(loaded["records"].table, "__defaults__", (tmp_path,))
    monkeypatch.setattr(loaded["records"].counts, "__defaults__", (1.0, tmp_path))
    for name in ("confirm", "tokens"):
        monkeypatch.setattr(loaded[name], "RESULTS", tmp_path)
    yield loaded
    for name in MODULES:
        sys.modules.pop(name)


def record(records: ModuleType, folder: Path, row: str, seed: int, rate: float, correct: np.ndarray) -> None:
    """Record one run with a curve of two points and counts on test problems."""
    name = f"{row}_s{seed}"
    settings = json.dumps({"policy": {"optimizer": {"lr": rate}}})
    figures = [0.2] * 7 + [0.3, 2.0, 0.4, 1.0, -0.1]
    records.add(folder, "curves", records.CURVES, [[name, 0, 0, *figures], [name, 20, 88000, *figures]])
    texts = [" ".join(map(str, each.tolist())) for each in (correct, np.minimum(correct, 3))]
    records.add(folder, "counts", records.COUNTS, [[name, records.TEST, 1.0, 256, 1000, *texts]])
    if row != records.UNTRAINED:
        records.add(folder, "runs", records.RUNS, [[name, row, seed, "confirm", 135, 600000, 95, settings]])


def made_up(rng: np.random.Generator, level: float, spread: float, hardness_P: np.ndarray) -> np.ndarray:
    solved_P = 1.0 / (1.0 + np.exp(-(level + spread * hardness_P + rng.normal(0.0, 0.3, hardness_P.size))))
    return rng.binomial(256, solved_P)


def test_eight_seeds_are_tested_and_three_described(study: dict[str, ModuleType], tmp_path: Path) -> None:
    """Distances are those of `distance` on the recorded counts; Holm counts the methods that have all seeds."""
    records, confirm = study["records"], study["confirm"]
    rng = np.random.default_rng(5)
    hardness_P = rng.normal(size=40)
    for seed in confirm.SEEDS:
        record(records, tmp_path, records.UNTRAINED, seed, 0.0, made_up(rng, -2.0, 1.0, hardness_P))
        for rate, spread in ((2.5e-5, 2.0), (5.0e-5, 2.9), (1.0e-4, 3.8)):
            record(records, tmp_path, f"grpo-lr{rate:g}", seed, rate, made_up(rng, -2.2, spread, hardness_P))
        record(records, tmp_path, "iac-alpha1", seed, 5.0e-5, made_up(rng, -2.2, 2.4, hardness_P))
        record(records, tmp_path, "casp-alpha0.3-lr2.5e-05", seed, 2.5e-5, made_up(rng, -1.5, 2.4, hardness_P))
        if seed < 104:
            record(records, tmp_path, "kl-coefficient0.1", seed, 5.0e-5, made_up(rng, -1.8, 1.5, hardness_P))
        # Followed up: far above the line with the first seeds, on it with the fresh ones.
        level, spread = (-2.2, 2.4) if seed > 103 else (-0.5, 1.0)
        record(records, tmp_path, "passk_training-k3", seed, 5.0e-5, made_up(rng, level, spread, hardness_P))
    confirm.main()
    with (tmp_path / "distances.csv").open(encoding="utf-8") as lines:
        found = {(line["method"], line["metric"]): line for line in csv.DictReader(lines)}
    assert {method for method, _ in found} == {"iac", "casp", "kl", "passk_training"}
    runs = [f"iac-alpha1_s{seed}" for seed in confirm.SEEDS]
    names = ("untrained", "grpo-lr2.5e-05", "grpo-lr5e-05", "grpo-lr0.0001")
    line = [records.tested(name, [f"{name}_s{seed}" for seed in confirm.SEEDS], "pass@256") for name in names]
    expected = distance(records.tested("mine", runs, "pass@256"), line)
    assert expected is not None
    one = found["iac", "pass@256"]
    assert float(one["distance"]) == pytest.approx(float(expected.crossed.difference), abs=1e-5)
    p_values = [float(found[method, "pass@256"]["p"]) for method in ("iac", "casp")]
    holm = [float(found[method, "pass@256"]["holm"]) for method in ("iac", "casp")]
    assert holm == pytest.approx(list(adjusted(p_values)), rel=1e-3)
    assert found["casp", "pass@256"]["verdict"] in ("confirmed", "contradicted", "not shown")
    assert found["kl", "pass@256"]["verdict"] == found["casp", "pass@16"]["verdict"] == "described"
    followed = found["passk_training", "pass@256"]
    assert followed["seeds"] == "5" and followed["holm"] and float(followed["pass@1"]) < 0.4
    assert "| `casp-alpha0.3, 2.5e-5` | 8 |" in (tmp_path / "confirmed.md").read_text()


def test_a_run_that_was_cut_off_while_recorded_leaves_nothing(study: dict[str, ModuleType], tmp_path: Path) -> None:
    records = study["records"]
    record(records, tmp_path, "iac-alpha1", 11, 5.0e-5, np.arange(4))
    records.add(tmp_path, "curves", records.CURVES, [["dlc-mu0.1_s11", 20, 1, *[0.1] * 12]])
    record(records, tmp_path, records.UNTRAINED, 11, 0.0, np.arange(4))
    records.drop_unfinished(tmp_path)
    assert {line["run"] for line in records.table("curves", tmp_path)} == {"iac-alpha1_s11", "untrained_s11"}
    assert [run.name for run in records.read_runs()] == ["iac-alpha1_s11"]


def test_tuning_measures_areas_beside_grpo_of_the_same_seed(study: dict[str, ModuleType], tmp_path: Path) -> None:
    records, tuning = study["records"], study["tuning"]

    def run(row: str, *points: tuple[float, float]) -> object:
        curve = [{"step": 20.0 * step, "pass@1": x, "pass@64": y} for step, (x, y) in enumerate(((0.1, 0.9), *points))]
        return records.Run(row, records.method_of(row), row.split("-lr")[0], 5.0e-5, 11, 600000, curve)

    grpo, dapo = run("grpo-lr5e-05", (0.2, 0.8), (0.3, 0.5)), run("dapo-lr5e-05", (0.2, 0.85))
    baseline = tuning.Baseline([grpo, dapo])
    assert baseline.area([dapo]) == area_above([(0.2, 0.85)], [(0.2, 0.8), (0.3, 0.5)], (0.1, 0.9))
    assert baseline.height((0.25, 0.7)) == pytest.approx(0.05) and baseline.height((0.4, 0.5)) == 0.0


def test_every_run_of_the_sweeps_is_of_a_known_method_and_has_a_name_of_its_own(study: dict[str, ModuleType]) -> None:
    names: list[str] = []
    for file in sorted(STUDY.glob("*.yaml")):
        if file.stem != "run":
            for cell in cells(load_sweep(file), file):
                # Runs about single claims and prolonged ones have results of their own.
                assert file.stem.startswith(("claims", "prolonged")) or study["records"].method_of(cell.row)
                names.append(cell.name)
    assert len(set(names)) == len(names) > 100


def test_a_bonus_that_helps_where_solutions_are_many_is_found(
    study: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contrasts by stratum: one bonus moves pass@8 only with many solutions, the penalty moves it alike in both."""
    records, strata = study["records"], study["strata"]
    monkeypatch.setattr(strata, "STRATA_RESULTS", tmp_path)
    rng = np.random.default_rng(6)
    effects = {"bonus-coefficient0.01": (0.0, 1.0), "bonus-coefficient0.03": (0.0, 0.0), "ds": (0.0, 0.0)}
    effects["penalty-coefficient0.01"] = (-0.5, -0.5)
    for stratum in strata.STRATA:
        many, hardness_P = stratum == "over_8", rng.normal(size=60)
        for seed in range(5):
            for method, effect in {"untrained": (0.0, 0.0), "grpo": (0.0, 0.0), **effects}.items():
                row = [f"{method}_s{seed}", f"strata_{stratum}", 1.0, 256, 1000]
                correct = made_up(rng, -2.5 + effect[many], 1.0, hardness_P)
                texts = [" ".join(map(str, each.tolist())) for each in (correct, correct)]
                records.add(tmp_path / stratum, "counts", records.COUNTS, [[*row, *texts]])
    strata.main()
    with (tmp_path / "contrasts.csv").open(encoding="utf-8") as lines:
        found = {(line["case"], line["metric"]): line for line in csv.DictReader(lines)}
    assert float(found["bonus-coefficient0.01", "pass@8"]["holm"]) < 0.01
    assert float(found["bonus-coefficient0.01", "pass@8"]["difference"]) > 0.1
    assert min(float(found[method, "pass@8"]["holm"]) for method in strata.TESTED[1:]) > 0.05
    assert found["ds", "pass@8"]["holm"] == ""
    text = (tmp_path / "tables.md").read_text(encoding="utf-8")
    assert text.count("| more than 8 |") == 6 and "described" in text


def test_a_case_is_compared_with_its_own_reference(
    study: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CaSP's cases against CaSP, the rest against GRPO of the frontier study; known shifts and a link are found."""
    records, claims = study["records"], study["claims"]
    monkeypatch.setattr(claims, "CLAIMS", tmp_path / "claims")
    rng = np.random.default_rng(7)
    hardness_P = rng.normal(size=60)
    levels = {"claim_heat_grpo": -2.0, "claim_heat_casp": -1.0, "claim_casp": -1.0, "claim_casp_topn-topn1": -1.0}
    levels["claim_iac-alpha2"] = -1.0

    def add(folder: Path, run: str, level: float, temperature: float = 1.0) -> None:
        correct = made_up(rng, level, 1.0, hardness_P)
        texts = " ".join(map(str, correct.tolist()))
        records.add(folder, "counts", records.COUNTS, [[run, records.TEST, temperature, 256, 1000, texts, texts]])
        if temperature == 1.0 and not run.startswith(records.UNTRAINED):
            # The fewer problems are out of reach of 16 samples, the more distinct next tokens.
            gain = float(records.values(records.table("counts", folder)[-1:], "pass@256").mean())
            noise = rng.normal(0.0, 0.001)
            means = (0.5 - 0.1 * level + noise, noise - 0.2, -4.0, -5.0, -gain, 1.0, 0.2, "", "")
            window = [run, 20, 1000, *means]
            records.add(folder, "training", records.WINDOWS, [window, window])

    for seed in range(101, 104):
        add(tmp_path, f"{records.UNTRAINED}_s{seed}", -2.0)
        add(tmp_path, f"grpo-lr5e-05_s{seed}", -2.0)
        points = [
            [f"grpo-lr5e-05_s{seed}", step, 1, 0.2 + step * seed / 1e5, *[0.5] * 5, 0.9 - step * seed / 1e6, *[0.1] * 5]
            for step in (40, 80, 135)
        ]
        records.add(tmp_path, "curves", records.CURVES, points)
        for case, level in levels.items():
            for temperature in (0.6, 0.8, 1.0):
                add(tmp_path / "claims", f"{case}_s{seed}", level, temperature)
    claims.main()
    with (tmp_path / "claims" / "differences.csv").open(encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    beside_untrained = {line["case"] for line in rows if line["against"] == records.UNTRAINED}
    assert beside_untrained == {"claim_grpo", "claim_casp"}
    warmer = [line for line in rows if "warmer" in line["case"] + line["against"] and line["metric"] == "pass@1"]
    assert {(line["case"], line["temperature"]) for line in warmer if "warmer" in line["against"]} == {
        ("claim_heat_casp", "0.6"),
        ("claim_heat_casp", "0.8"),
    }
    rows = [line for line in rows if line["against"] != records.UNTRAINED and line not in warmer]
    found = {(line["case"], line["temperature"]): line for line in rows if line["metric"] == "pass@1"}
    assert {case for case, _ in found} == {*levels, "claim_grpo at step 40", "claim_grpo at step 80"} - {
        "claim_heat_grpo"
    }
    assert found["claim_casp_topn-topn1", "1.0"]["against"] == "claim_casp"
    assert min(float(found["claim_iac-alpha2", "1.0"]["low"]), float(found["claim_heat_casp", "0.6"]["low"])) > 0.05
    low, high = (float(found["claim_casp_topn-topn1", "0.6"][key]) for key in ("low", "high"))
    assert low < 0.0 < high
    assert float(found["claim_grpo at step 40", "1.0"]["difference"]) == pytest.approx(-0.0969)
    entropy = {(line["case"], line["against"]): line for line in rows if line["metric"] == "entropy"}
    assert float(entropy["claim_casp", "claim_grpo"]["difference"]) == pytest.approx(-0.1, abs=0.005)
    # Both windows of a run are the same here.
    assert float(entropy["claim_casp", "claim_casp at its start"]["difference"]) == 0.0
    small = {(line["case"], line["against"], line["metric"]): line for line in rows if line["suite"] == "miniature"}
    assert float(small["grpo", "base", "lambda_1"]["difference"]) == pytest.approx(-0.1161 + 0.3868, abs=1e-3)
    easy = {line["case"]: float(line["value"]) for line in rows if line["metric"] == "pass@1, easy"}
    assert easy["claim_casp"] > float(found["claim_casp", "1.0"]["value"])
    assert next(line["case"] for line in rows if line["metric"] == "correlation") == "distinct_next"


def test_only_problems_that_were_not_trained_on_count_as_related(study: dict[str, ModuleType]) -> None:
    claims = study["claims"]
    trained = {json.dumps(row) for row in _problems(claims.TRAINING_DATA)}
    related = [json.dumps(row) for row in _problems(claims.RELATED_DATA)]
    unseen = claims.unseen_problems()
    assert [row in trained for row in related] == [place not in unseen for place in range(len(related))]
    assert len(unseen) == 95


def _problems(path: Path) -> list[list[int]]:
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [[row["target"], *sorted(row["numbers"])] for row in rows]


def test_a_short_last_window_counts_by_its_steps(study: dict[str, ModuleType]) -> None:
    """Steps 41 to 60 and 61 alone: as many are taken as have 30 steps together, and each weighs by its own."""
    claims = study["claims"]
    by_step = {20: 1.0, 40: 2.0, 60: 3.0, 61: 9.0}
    windows = [
        {"step": step, "entropy": value, "lambda_1": value, "lambda_2": value} for step, value in by_step.items()
    ]
    last = claims._last(windows)
    assert [line["step"] for line in last] == [40, 60, 61]
    assert claims._means(last)["entropy"] == pytest.approx((20 * 2.0 + 20 * 3.0 + 9.0) / 41)


def test_equal_tokens_are_compared_by_pairs_of_seeds(study: dict[str, ModuleType], tmp_path: Path) -> None:
    """A method above the line that two rates of GRPO draw, by as much in each seed."""
    records, tokens = study["records"], study["tokens"]
    rng = np.random.default_rng(3)
    for seed in range(101, 105):
        shift = rng.normal(0.0, 0.01)
        for row, rate, x, y in (
            ("grpo-lr2.5e-05", 2.5e-5, 0.20, 0.90),
            ("grpo-lr0.0001", 1e-4, 0.30, 0.80),
            ("kl-coefficient0.01-lr5e-05", 5e-5, 0.25, 0.88),
        ):
            name, settings = f"{row}_s{seed}", json.dumps({"policy": {"optimizer": {"lr": rate}}})
            points = [(0, 0.1, 0.98), (800_000, 2 * x - 0.1, 2 * y - 0.98 + 2 * shift)]
            curve = [[name, at, at, one, *[0.5] * 5, many, *[0.3] * 5] for at, one, many in points]
            records.add(tmp_path, "curves", records.CURVES, curve)
            records.add(tmp_path, "runs", records.RUNS, [[name, row, seed, "confirm", 135, 1, 1, settings]])
    tokens.main()
    (line,) = [line for line in (tmp_path / "tokens.md").read_text().splitlines() if line.startswith("| `kl")]
    assert line.count("+0.030 [+0.030, +0.030]") == 1 and "0.250" in line, line


def test_prolonged_runs_that_widen_and_have_two_stages_are_seen(
    study: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Curves made up: one case gains pass@64 late, entropy falls and rises, good answers pass their share on."""
    records, prolonged = study["records"], study["prolonged"]
    monkeypatch.setattr(prolonged, "PROLONGED", tmp_path)
    rng = np.random.default_rng(9)
    cases = (*prolonged.CASES, prolonged.GRADED)
    for seed in range(4):
        for name in (records.UNTRAINED, *(f"prolonged_{case}" for case in cases)):
            run = f"{name}_s{seed}"
            counts = " ".join(map(str, made_up(rng, -2.0, 1.0, rng.normal(size=30)).tolist()))
            records.add(tmp_path, "counts", records.COUNTS, [[run, records.TEST, 1.0, 256, 1000, counts, counts]])
            if name == records.UNTRAINED:
                continue
            steps = range(0 if name == "prolonged_grpo" else 200, 2001, 200)
            rise = {1800: 0.05, 2000: 0.05}.get if name == "prolonged_two_stage" else {}.get
            points = [(step, 0.13 + 5e-5 * step, 0.9 - 5e-5 * step + rise(step, 0.0)) for step in steps]
            noisy = [(step, x, y + rng.normal(0.0, 0.005)) for step, x, y in points]
            curve = [[run, step, 0, x, *[0.5] * 5, y, *[0.3] * 5] for step, x, y in noisy]
            records.add(tmp_path, "curves", records.CURVES, curve)
            windows = [
                [run, step, 0, 0.6 - 0.3 * np.sin(step / 700) + rng.normal(0.0, 0.01), *[0.1] * 6]
                + (
                    [0.3 * np.sin(step / 700) + rng.normal(0.0, 0.01), step / 4000 + rng.normal(0.0, 0.01)]
                    if name == "prolonged_graded"
                    else ["", ""]
                )
                for step in range(20, 2001, 20)
            ]
            records.add(tmp_path, "training", records.WINDOWS, windows)
            records.add(tmp_path, "runs", records.RUNS, [[run, name, seed, "prolonged", 2000, 1, 1, "{}"]])
    prolonged.main()
    text = (tmp_path / "tables.md").read_text(encoding="utf-8")
    rows = {line.split(" | ")[0].removeprefix("| "): line.split(" | ") for line in text.splitlines() if " to " in line}
    assert float(rows["good, last 200 less peak"][1]) < -0.1 and float(rows["better, last 200 less peak"][1]) > 0.05
    widening = text.split("\n\n")[0].splitlines()
    assert [line.split(" | ")[0] for line in widening[2:7]] == [f"| {case}" for case in prolonged.CASES]
    assert float(widening[4].split(" | ")[3].rstrip(" |")) < 0.05 and float(widening[2].split(" | ")[1]) < 0.0
    assert float(rows["grpo_n, less the first 100"][3].rstrip(" |")) < 0.05
    assert (tmp_path / "curves.png").stat().st_size > 10_000
