"""When a learner's weights and its reference change places, and what memory a new reference takes."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from policies import CPU, LAYOUTS, packed, ragged_sequences, recipe, save_model, settings
from torch import Tensor

from megasharp.learner import learner as learner_module
from megasharp.learner.learner import POLICY, LearnerSettings
from megasharp.learner.offload import Reference
from megasharp.learner.ranks.all_ranks import OneRank, RanksLearner

MODEL = "qwen3-tied"


@contextmanager
def learner_alone(own: LearnerSettings) -> Iterator[RanksLearner]:
    learner = RanksLearner(OneRank({POLICY: own}, CPU))
    try:
        yield learner
    finally:
        learner.close()


@pytest.mark.parametrize(("methods", "exchanges"), [(("grpo", "kl"), 2), (("grpo", "kl", "casp"), 2), (("grpo",), 0)])
def test_weights_and_reference_change_places_once_a_step(
    tmp_path: Path, methods: tuple[str, ...], exchanges: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There and back, whatever the number of mini-batches; not at all where the step's recipe reads no reference."""
    count, exchange = [0], Reference._exchange

    def counted(self: Reference) -> None:
        count[0] += 1
        exchange(self)

    monkeypatch.setattr(Reference, "_exchange", counted)
    kept, method = recipe(("grpo", "kl"), mini_batches=2), recipe(methods, mini_batches=2)
    batch = packed(ragged_sequences(), LAYOUTS["tp1"], mini_batches=2)
    with learner_alone(settings(save_model(tmp_path, MODEL), LAYOUTS["tp1"], kept.needs)) as learner:
        learner.annotate(batch, method.annotation)
        assert count == [exchanges]


def test_a_new_reference_takes_the_former_ones_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host may not hold two."""
    held: list[int] = []

    def made(parameters: list[Tensor]) -> Reference:
        gc.collect()
        held.append(sum(isinstance(one, Reference) for one in gc.get_objects()))
        return Reference(parameters)

    monkeypatch.setattr(learner_module, "Reference", made)
    with learner_alone(settings(save_model(tmp_path, MODEL), LAYOUTS["tp1"], recipe(("grpo", "kl")).needs)) as learner:
        learner.set_reference()
    assert held == [0, 0]
