"""Measure which right answers of the untrained model gain by training (2511.19942, section 3.2): `claims/gains.csv`.

    python examples/frontier/gains.py --work runs

Trains 40 steps of the quickstart with three seeds. The untrained model's distinct right answers to the development
problems, of 64 samples each, are scored before and after: the share whose log-prob rises, by their log-prob before, and
the slope of the gain over it within problems, with bootstrap intervals over problems.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from claims import CLAIMS
from records import write
from study import megasharp

from megasharp.common.records import GenerateRequest, Outcome, SamplingParams
from megasharp.evals.evaluate import sample_seed
from megasharp.evals.frontier import Values
from megasharp.rollout.inprocess import InProcessEngine
from megasharp.tasks import countdown
from megasharp.tasks.tokenizer import load_tokenizer
from megasharp.trainer.eval_source import engine_of, hf_folder, measured

BASE = Path("examples/quickstart/base")
PROBLEMS = Path("examples/quickstart/data/dev.jsonl")
SEEDS, STEPS, SAMPLES, MAX_TOKENS = (1, 2, 3), 40, 64, 20
# Edges of log-probs before training, in nats.
EDGES = (-np.inf, -6.0, -5.0, 0.0)
COLUMNS = ("seed", "figure", "answers", "value", "low", "high")
# A problem's number, the prompt's tokens and the answer's.
Answer = tuple[int, tuple[int, ...], tuple[int, ...]]


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs"), help="folder for the runs")
    work = parser.parse_args().work
    work.mkdir(parents=True, exist_ok=True)
    with engine_of(BASE) as engine:
        answers = right_answers(engine)
        before_A = scores(engine, answers)
    rows: list[tuple[object, ...]] = []
    for seed in SEEDS:
        name = f"gains_s{seed}"
        options = (f"name={name}", f"seed={seed}", f"steps={STEPS}", f"checkpoint.every={STEPS}", "eval.every=0")
        words = ("train", "examples/quickstart/run.yaml", *options, "--runs", str(work), "--resume")
        megasharp(work / f"{name}.log", *words)
        with hf_folder(measured(work / name).weights) as folder, engine_of(folder) as engine:
            gain_A = scores(engine, answers) - before_A
        rows += lines(seed, np.array([number for number, _, _ in answers]), before_A, gain_A)
    write(CLAIMS / "gains.csv", COLUMNS, rows)


def right_answers(engine: InProcessEngine) -> list[Answer]:
    """Sample the untrained model; return its distinct right answers, problem by problem."""
    tokenizer = load_tokenizer(BASE)
    items = countdown.load_items(PROBLEMS)
    requests = [
        GenerateRequest(tokenizer.plain(item.text), tuple(sample_seed(1, item.id, index) for index in range(SAMPLES)))
        for item in items
    ]
    sampled = engine.generate(requests, SamplingParams(MAX_TOKENS, stop_token_ids=tokenizer.stop_token_ids))
    return [
        (number, request.tokens, tokens)
        for number, (item, request, completions) in enumerate(zip(items, requests, sampled, strict=True))
        for tokens in sorted({tuple(one.tokens.tolist()) for one in completions})
        if countdown.verify(tokenizer.decode(tokens), item.answer).outcome is Outcome.CORRECT
    ]


def scores(engine: InProcessEngine, answers: Sequence[Answer]) -> Values:
    """Return the log-prob of each answer, in nats."""
    return np.array(
        [float(engine.candidates(prompt, tokens, 1).logp_T.double().sum()) for _, prompt, tokens in answers]
    )


def lines(seed: int, problem_A: np.ndarray, before_A: Values, gain_A: Values) -> list[tuple[object, ...]]:
    """Return the table's lines of one run."""
    problems = np.unique(problem_A)
    chosen_B = np.random.default_rng(0).choice(problems, (2000, len(problems)))
    weight_BA = np.array([np.bincount(chosen, minlength=problems.max() + 1)[problem_A] for chosen in chosen_B])
    found: list[tuple[object, ...]] = []
    for low, high in (*pairwise(EDGES), (EDGES[0], EDGES[-1])):
        inside_A = (before_A >= low) & (before_A < high)
        gains_A, weights_BA = (gain_A > 0.0)[inside_A], weight_BA[:, inside_A]
        shares_B = (weights_BA * gains_A).sum(axis=1) / weights_BA.sum(axis=1)
        found.append(_line(seed, f"share gaining, {low:g} to {high:g}", len(gains_A), gains_A.mean(), shares_B))
    x_A, y_A = (values_A - _by_problem(values_A, problem_A) for values_A in (before_A, gain_A))
    slopes_B = (weight_BA * x_A * y_A).sum(axis=1) / (weight_BA * x_A**2).sum(axis=1)
    found.append(_line(seed, "slope within problems", len(x_A), (x_A * y_A).sum() / (x_A**2).sum(), slopes_B))
    return found


def _by_problem(values_A: Values, problem_A: np.ndarray) -> Values:
    sums, counts = np.bincount(problem_A, values_A), np.bincount(problem_A)
    found: Values = (sums / np.maximum(counts, 1))[problem_A]
    return found


def _line(seed: int, figure: str, answers: int, value: float, resampled_B: Values) -> tuple[object, ...]:
    low, high = np.quantile(resampled_B, [0.025, 0.975])
    return seed, figure, answers, f"{value:.4f}", f"{low:.4f}", f"{high:.4f}"


if __name__ == "__main__":
    main()
