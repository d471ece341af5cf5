"""Generators of a process come back to where they stood, through text."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from waiting import HANG_S

from megasharp.common.random_state import GeneratorStates, generator_states, restore_generators, seed_generators

REPOSITORY = Path(__file__).parents[2]


def draw() -> list[float]:
    """From each generator, an odd number of Gaussian ones, of which two are made at a time."""
    return [random.random(), random.gauss(), np.random.rand(), np.random.standard_normal(), *torch.randn(3).tolist()]


def test_what_is_drawn_after_a_restore_is_what_was_drawn_after_the_capture() -> None:
    seed_generators(7)
    draw()
    states = generator_states()
    expected = [draw(), draw()]
    draw()
    restore_generators(GeneratorStates.model_validate_json(states.model_dump_json()))
    assert generator_states() == states
    assert [draw(), draw()] == expected
    assert draw() not in expected


def test_equal_seeds_draw_equally_and_others_do_not() -> None:
    def drawn(seed: int) -> list[float]:
        seed_generators(seed)
        return draw()

    assert drawn(3) == drawn(3)
    assert not set(drawn(3)) & set(drawn(4))
    assert drawn(3 + 2**32) != drawn(3), "NumPy's 32 bits are not all that is used"


DETERMINISTIC = """
import os, torch
from megasharp.common.random_state import compute_deterministically
compute_deterministically()
print(torch.are_deterministic_algorithms_enabled(), os.environ["CUBLAS_WORKSPACE_CONFIG"], os.environ["NCCL_ALGO"])
"""


def test_the_deterministic_mode_keeps_what_the_user_set() -> None:
    environment = {**os.environ, "NCCL_ALGO": "Tree"}
    done = subprocess.run(
        [sys.executable, "-c", DETERMINISTIC], env=environment, capture_output=True, text=True, check=True,
        timeout=HANG_S, cwd=REPOSITORY,
    )  # fmt: skip
    assert done.stdout == "True :4096:8 Tree\n"
