"""Stage seconds with a clock set by hand, and peak memory of real processes."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from megasharp.metrics.clock import StageClock, peak_rss_bytes

MEBIBYTE = 2**20


class HandClock:
    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


def test_what_had_passed_before_counts_to_its_stage():
    hand = HandClock()
    clock = StageClock(hand, before={"start": 7.0})
    with clock.stage("start"):
        hand.time += 2.0
    assert clock.present() == ("other", 0.0)
    hand.time += 1.0
    assert clock.take() == {"start": 9.0, "other": 1.0}
    assert clock.take() == {"other": 0.0}


def test_a_process_knows_when_it_began():
    """Also after a while, and to better than the second in which the machine was booted."""
    program = (
        "import time; here = time.time(); time.sleep(0.5); from megasharp.metrics.clock import process_began\n"
        "print(process_began(), here)"
    )
    before = time.time()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    began, here = map(float, done.stdout.split())
    # A tick of the kernel's clock is a hundredth.
    assert before - 0.02 <= began <= here + 0.02


def test_stages_add_up_to_the_wall_clock():
    hand = HandClock()
    clock = StageClock(hand)
    with clock.stage("rollout"):
        hand.time += 2.0
    hand.time += 0.5
    with clock.stage("rollout"):
        hand.time += 1.0
    hand.time += 4.0
    clock.add("reward", 4.0)
    assert clock.take() == {"rollout": 3.0, "reward": 4.0, "other": 0.5}
    with clock.stage("rollout"):
        hand.time += 1.0
    assert clock.take() == {"rollout": 1.0, "other": 0.0}
    assert clock.totals == {"rollout": 4.0, "reward": 4.0, "other": 0.5}
    assert sum(clock.totals.values()) == hand.time - 100.0


def test_stages_apart_are_in_no_step_and_in_the_totals():
    hand = HandClock()
    clock = StageClock(hand, apart=("eval",))
    with clock.stage("update"):
        hand.time += 2.0
    assert clock.take() == {"update": 2.0, "other": 0.0}
    for seconds in (3.0, 4.0):
        with clock.stage("eval"):
            hand.time += seconds
    assert (clock.take_apart("eval"), clock.take_apart("eval")) == (7.0, 0.0)
    with clock.stage("update"):
        hand.time += 1.0
    hand.time += 0.5
    assert clock.take() == {"update": 1.0, "other": 0.5}
    assert clock.totals == {"update": 3.0, "other": 0.5, "eval": 7.0}
    assert sum(clock.totals.values()) == hand.time - 100.0


def test_a_stage_that_raises_is_counted():
    hand = HandClock()
    clock = StageClock(hand)
    with pytest.raises(KeyError), clock.stage("update"):
        hand.time += 3.0
        raise KeyError
    with clock.stage("update"):
        hand.time += 1.0
    assert clock.take()["update"] == 4.0


def test_overlapping_measurements_never_give_a_negative_rest():
    hand = HandClock()
    clock = StageClock(hand)
    clock.add("reward", 5.0)
    assert clock.take()["other"] == 0.0


def test_stages_do_not_nest():
    clock = StageClock()
    with (
        pytest.raises(AssertionError, match="sync starts inside stage update"),
        clock.stage("update"),
        clock.stage("sync"),
    ):
        pass


def test_peak_memory_counts_live_children_at_their_peak():
    before = peak_rss_bytes()
    code = "b = bytearray(200 << 20); del b; print('ready', flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], text=True, **pipes) as child:
        child.stdout.readline()
        during = peak_rss_bytes()
        child.communicate("\n")
    assert during - before >= 200 * MEBIBYTE
    assert peak_rss_bytes() - before < 150 * MEBIBYTE
