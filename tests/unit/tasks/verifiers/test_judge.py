"""A signal that ends the command is no verdict: where it arrives in a verifier, everything ends at once."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from waiting import HANG_S

from megasharp.common.records import Outcome, TaskAnswer, Verdict
from megasharp.common.signals import Stopped
from megasharp.tasks.judge import verify

_SLOW_JUDGING = """
import time
from megasharp.common.exit_codes import run_command
from megasharp.tasks.judge import DirectJudge, Item
from megasharp.common.records import Outcome, TaskAnswer, Verdict

def slow(text, answer):
    print("judging", flush=True)
    time.sleep(3600.0)
    return Verdict(Outcome.CORRECT, 1.0)

run_command(lambda: DirectJudge({"slow": slow}).verdicts([Item("slow", "", TaskAnswer())] * 9))
"""


def ends_with(error: BaseException) -> Verdict:
    def verifier(_: str, __: TaskAnswer) -> Verdict:
        raise error

    return verify(verifier, "", TaskAnswer())


def test_a_signal_is_no_verdict_and_an_exit_of_the_verifier_is_one() -> None:
    with pytest.raises(Stopped):
        ends_with(Stopped(signal.SIGTERM))
    assert ends_with(SystemExit(3)).outcome is Outcome.ERROR


def test_sigterm_ends_slow_judging_at_once() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _SLOW_JUDGING], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "judging\n"
        process.terminate()
        said, errors = process.communicate(timeout=HANG_S)
    finally:
        process.kill()
    assert (process.returncode, said, errors) == (143, "", "megasharp: stopped by SIGTERM\n")
