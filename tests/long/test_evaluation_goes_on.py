"""`megasharp eval` killed at five random times, then asked to end, gives the figures of one that ran undisturbed.

Those of outcomes, answers and lengths bit for bit. Means of log-probs agree to the rounding of float32, because which
samples are decoded together depends on when the process ended, and matrix products round by their shapes.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from waiting import HANG_S

from megasharp.common.signals import save_kept_from_children
from megasharp.evals.result_files import load_result
from megasharp.evals.samples import TokenFigures
from megasharp.evals.stored_samples import StoredSample, journals, parts, read_journal, read_samples

ROOT = Path(__file__).parents[2]
BASE = ROOT / "examples" / "quickstart" / "base"
PROBLEMS, N = 40, 800
# The command with an engine of 32 rows, which appends to a file how many samples each request that it begins is for.
COUNTED = """
import sys
from megasharp.cli.main import main
from megasharp.evals import evaluate

streamed, log = evaluate.streamed, open(sys.argv.pop(1), "a", buffering=1)

def counted(engine, asked):
    def each():
        for request, sampling in asked:
            log.write(f"{len(request.seeds)}\\n")
            yield request, sampling
    engine._max_batch = 32
    return streamed(engine, each())

evaluate.streamed = counted
main()
"""

pytestmark = pytest.mark.long("saves")


def suite_of_forty(folder: Path) -> Path:
    """Forty of the quickstart's problems."""
    lines = (ROOT / "examples" / "quickstart" / "data" / "test.jsonl").read_text().splitlines()[:PROBLEMS]
    (folder / "forty.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "forty.yaml").write_text("task: countdown\npath: forty.jsonl\n")
    return folder / "forty.yaml"


def started(out: Path, suite: Path) -> subprocess.Popen[str]:
    """As a job's node starts it: SIGUSR1 is held back until it is heard."""
    asked = ["--suite", str(suite), "--n", str(N), "--k", f"1,{N}", "--max-tokens", "16", "--out", str(out)]
    log = str(out.with_suffix(".asked"))
    with save_kept_from_children():
        return subprocess.Popen(
            [sys.executable, "-c", COUNTED, log, "eval", str(BASE), *asked],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def ended(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Both outputs."""
    try:
        return process.communicate(timeout=HANG_S)
    finally:
        process.kill()


def rounded(name: str) -> bool:
    """Return True for a figure that is a mean of log-probs."""
    return name.startswith(("token_entropy", "lambda"))


def without_rounding(one: StoredSample) -> StoredSample:
    """A sample without its times and its means of log-probs."""
    seen = dict.fromkeys(("entropy", "entropy_sampled", "lambda_sample", "sampled_s", "judged_s"))
    return replace(one, lambdas=(), **seen)


def committed(out: Path) -> int:
    """Samples that outlive a kill now; between two files a moment may see some in neither."""
    try:
        stored = sum(pq.read_metadata(path).num_rows for path in parts(out, "forty"))
        return stored + sum(read_journal(path)[0].num_rows for path in journals(out, "forty"))
    except OSError:
        return 0


def cut_off(out: Path, suite: Path, number: signal.Signals, more: int) -> tuple[int, str]:
    """Start an evaluation, send it a signal when so many more samples are there; its exit code and its errors."""
    process, before = started(out, suite), committed(out)
    deadline = time.monotonic() + HANG_S
    # As a journal becomes a part, a moment may see its samples in both: what is seen twice is there.
    looks = 0
    while looks < 2 and process.poll() is None and time.monotonic() < deadline:
        looks = looks + 1 if committed(out) >= before + more else 0
        time.sleep(0.02)
    process.send_signal(number)
    _, errors = ended(process)
    return process.returncode, errors


def test_five_kills_change_no_figure_and_lose_two_percent(tmp_path: Path) -> None:
    cut, whole, suite = tmp_path / "cut", tmp_path / "whole", suite_of_forty(tmp_path)
    times = random.Random(7)
    there = 0
    for _ in range(5):
        code, errors = cut_off(cut, suite, signal.SIGKILL, times.randrange(1, N * PROBLEMS // 8))
        assert code == -signal.SIGKILL, errors
        assert committed(cut) > there
        there = committed(cut)
    code, errors = cut_off(cut, suite, signal.SIGUSR1, 1)
    assert code == 75 and "samples of the present suite are kept; the same command goes on" in errors, errors
    for out in (cut, whole):
        process = started(out, suite)
        _, errors = ended(process)
        assert process.returncode == 0, errors
    one, other = (load_result(out / "forty.json") for out in (cut, whole))
    for name, value in one.named().items():
        assert value == (pytest.approx(other.named()[name], rel=1e-6) if rounded(name) else other.named()[name]), name
    for name, bound in one.intervals.items():
        assert bound == other.intervals[name] or rounded(name), name
    bare = [[replace(row, tokens_seen=TokenFigures()) for row in result.rows] for result in (one, other)]
    assert bare[0] == bare[1] and 0.0 < one.pass_at_k[1] < 1.0
    samples = [[without_rounding(each) for each in read_samples(out, "forty")] for out in (cut, whole)]
    assert samples[0] == samples[1] and len(samples[0]) == PROBLEMS * (N + 1)
    asked = [sum(map(int, out.with_suffix(".asked").read_text().split())) for out in (cut, whole)]
    print(f"samples begun: {asked[0]} with kills, {asked[1]} without")
    assert asked[1] == PROBLEMS * (N + 1) and asked[0] - asked[1] <= 0.02 * asked[1]
