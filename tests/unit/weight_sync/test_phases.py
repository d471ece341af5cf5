"""The order in which learner and engines take turns, and that no phase has both whole."""

from __future__ import annotations

import random

import pytest

from megasharp.weight_sync.colocation import Colocated, Phase


class Devices:
    """A stand-in for two learners and a fleet on one device: notes each call, and who has what."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.has = {"learner"}
        self.pushed = False

    def offload(self) -> None:
        self.calls.append("offload")
        self.has.discard("learner")

    def onload(self) -> None:
        self.calls.append("onload")
        assert "cache" not in self.has, "a learner came back beside the engines' cache"
        self.has.add("learner")

    def sleep(self) -> None:
        self.calls.append("sleep")
        self.has -= {"weights", "cache"}

    def rest(self) -> None:
        self.calls.append("rest")
        self.has.discard("cache")

    def wake_weights(self) -> None:
        self.calls.append("wake_weights")
        self.has.add("weights")

    def wake_cache(self) -> None:
        self.calls.append("wake_cache")
        assert "learner" not in self.has, "a cache was taken beside the learner"
        self.has.add("cache")


def test_a_steps_order() -> None:
    devices = Devices()
    phases = Colocated([devices], devices)
    phases.handover()
    phases.sampling()
    phases.training()
    phases.handover()
    phases.sampling()
    assert devices.calls == [
        *("wake_weights", "offload", "wake_cache"),
        *("sleep", "onload", "wake_weights", "offload", "wake_cache"),
    ]


def test_a_phase_that_is_there_is_not_entered_again() -> None:
    devices = Devices()
    phases = Colocated([devices], devices)
    phases.training()
    phases.handover()
    phases.handover()
    phases.training()
    phases.sampling()
    phases.sampling()
    assert devices.calls == ["wake_weights", "offload", "wake_cache"]
    assert phases.phase is Phase.SAMPLING


def test_engines_that_slept_do_not_sample_without_a_push() -> None:
    devices = Devices()
    phases = Colocated([devices], devices)
    with pytest.raises(AssertionError, match="hold no weights"):
        phases.sampling()


def test_whatever_comes_next_nobody_meets() -> None:
    """Random orders of needs: the stand-in asserts that cache and learner never meet."""
    draw = random.Random(1)
    devices = Devices()
    phases = Colocated([devices, devices], devices)
    for _ in range(300):
        need = draw.choice(["training", "handover", "sampling"])
        if need == "sampling" and phases.phase is Phase.TRAINING:
            need = "handover"
        getattr(phases, need)()
        held = {"training": {"learner"}, "handover": {"learner", "weights"}, "sampling": {"weights", "cache"}}[need]
        assert held <= devices.has
