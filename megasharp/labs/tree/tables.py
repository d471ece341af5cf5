"""The tables of the tree study."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from megasharp.labs.study import Cell, Table
from megasharp.labs.tree.experiments import (
    ADAM_RATES,
    ALPHAS,
    BETAS,
    LEARNING_RATE,
    MAIN,
    RATES,
    TOPNS,
    VARIANTS,
    Result,
    Results,
    at_entropy,
    at_rate,
    casp,
)
from megasharp.labs.tree.training import Setting
from megasharp.labs.tree.world import MODES

_COLUMNS = ("median modes", "mean modes", "seeds with 1", "seeds with 6", "mean accuracy", "least accuracy")
_PAPER = {"GRPO": "1 mode", "GRPO + entropy": "6 modes, .48", "CaSP": "6 modes, 1.00"}


def tables(results: Results) -> tuple[Table, ...]:
    """All tables: the paper's three methods, then what was varied."""
    sgd = results.sgd
    betas = (((beta,), sgd[at_entropy(beta)]) for beta in BETAS)
    strengths = (((n, alpha), sgd[casp(n, alpha)]) for n in TOPNS for alpha in ALPHAS)
    variants = (((name,), sgd[setting]) for name, setting in VARIANTS.items())
    return (
        _table("methods", "2510.14807 figure 5", ("method", "paper"), _methods(sgd)),
        _table("entropy", "entropy bonus, by coefficient", ("beta",), betas),
        _table("casp", "CaSP, by N and alpha (lambda 1.1, no gate)", ("N", "alpha"), strengths),
        _table("variants", "CaSP, other variants", ("variant",), variants),
        _table("rates", "other learning rates and Adam", ("method", "optimizer", "lr"), _rates(results)),
        _modes(sgd),
    )


def _table(name: str, title: str, keys: tuple[str, ...], rows: Iterable[tuple[tuple[Cell, ...], Result]]) -> Table:
    return Table(name, title, (*keys, *_COLUMNS), tuple((*key, *_cells(result)) for key, result in rows))


def _cells(result: Result) -> tuple[Cell, ...]:
    modes_R = result.modes_R
    single, accuracy_R = int((modes_R == 1).sum()), result.accuracy_R
    return (
        result.median_modes,
        float(modes_R.mean()),
        single,
        result.seeds_with_all,
        result.accuracy,
        float(accuracy_R.min()),
    )


def _methods(sgd: Mapping[Setting, Result]) -> Iterable[tuple[tuple[Cell, ...], Result]]:
    return (((name, _PAPER[name]), sgd[setting]) for name, setting in MAIN.items())


def _rates(results: Results) -> Iterable[tuple[tuple[Cell, ...], Result]]:
    for name, setting in MAIN.items():
        for lr in sorted((*RATES, LEARNING_RATE)):
            yield (name, "SGD", lr), results.sgd[at_rate(setting, lr)]
        for lr in ADAM_RATES:
            yield (name, "Adam", lr), results.adam[at_rate(setting, lr)]


def _modes(sgd: Mapping[Setting, Result]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for name, setting in MAIN.items():
        mean_M = sgd[setting].mode_probability_RM.mean(axis=0)
        rows.append((name, *(float(p) for p in mean_M), float(1.0 - mean_M.sum())))
    title = "exact probability of each mode, mean over seeds"
    return Table("modes", title, ("method", *MODES, "not rewarded"), tuple(rows))
