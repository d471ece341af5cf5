"""The tables of the squeeze study."""

from __future__ import annotations

from collections.abc import Mapping

from megasharp.labs.softmax import Array, entropy
from megasharp.labs.squeeze.measure import BUDGETS, SHAPE_BUDGETS, TOPS, Measured
from megasharp.labs.squeeze.shapes import budgets, distinct
from megasharp.labs.study import Cell, Table

# How many samples stand for "a group" in the tables of trajectories.
GROUP = 16


def tables(measured: Measured) -> tuple[Table, ...]:
    """All tables."""
    return (_penalised(measured), _sampled(measured), _distinct(measured), _shapes(measured.shapes))


def _penalised(measured: Measured) -> Table:
    rows = [(rank, *_ends(p_TV, float(entropy(p_TV[-1])))) for rank, p_TV in measured.penalised.items()]
    columns = ("penalised rank", "rank 1: start", "rank 1: end", "entropy: end", f"distinct of {GROUP}: end")
    return Table("penalised", "one rank penalised again and again", columns, tuple(rows))


def _ends(p_TV: Array, last_entropy: float) -> tuple[Cell, ...]:
    return float(p_TV[0].max()), float(p_TV[-1].max()), last_entropy, distinct(p_TV[-1], GROUP)


def _sampled(measured: Measured) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for advantage, p_TRV in measured.sampled.items():
        last_RV = p_TRV[-1]
        top, first = float(last_RV.max(axis=-1).mean()), float(last_RV[:, 0].mean())
        count = sum(distinct(p_V, GROUP) for p_V in last_RV) / len(last_RV)
        rows.append((advantage, float(p_TRV[0].max()), top, first, float(entropy(last_RV).mean()), count))
    columns = (
        "advantage",
        "rank 1: start",
        "rank 1: end",
        "its first holder: end",
        "entropy: end",
        f"distinct of {GROUP}: end",
    )
    return Table(
        "sampled", "on-policy updates, all tokens equally right or wrong, mean over runs", columns, tuple(rows)
    )


def _distinct(measured: Measured) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for top in TOPS:
        pairs = [measured.distinct[top, samples] for samples in BUDGETS]
        rows.append((str(top), *(value for pair in pairs for value in pair)))
    heads = [f"K={samples}{kind}" for samples in BUDGETS for kind in ("", " simulated")]
    return Table("distinct", "expected distinct tokens by p_1, an even tail", ("p_1", *heads), tuple(rows))


def _shapes(shapes: Mapping[str, Array]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for name, p_V in shapes.items():
        rows.append((name, float(entropy(p_V)), float(p_V.max()), *budgets(p_V, SHAPE_BUDGETS)))
    columns = ("shape", "entropy", "rank 1", *(f"K={samples}" for samples in SHAPE_BUDGETS))
    return Table("shapes", "two distributions of one entropy: expected distinct tokens of K", columns, tuple(rows))
