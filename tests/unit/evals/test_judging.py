"""The thread that judges beside sampling."""

from __future__ import annotations

import threading

from megasharp.common.records import Completion, SamplingParams
from megasharp.evals.judging import Finished, Judging


def test_no_thread_is_left_at_the_end() -> None:
    """One that drops a tensor while the interpreter ends aborts the process."""
    finished = Finished(0, False, [0], [Completion.unsampled(1, SamplingParams(8), "")], 0.0)
    for _ in range(8):
        with Judging(lambda _: [], lambda _: None) as judging:
            judging.put(finished)
        assert "judging" not in [thread.name for thread in threading.enumerate()]
