"""Small run folders with all that a page draws, written by the same code that runs use."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from megasharp.checkpoint.attempts import ATTEMPT_FILE, AttemptRecord
from megasharp.common.records import Completion, FinishReason, Group, Outcome, Prompt, Response, Verdict, VersionSpan
from megasharp.evals.probe import ProbeResponse, probe, step_file, write_responses
from megasharp.evals.result import EvalResult, EvalSetting, summarize
from megasharp.evals.result_files import save
from megasharp.evals.samples import ProblemResult
from megasharp.metrics.response_table import TokenColumns, write_rollouts
from megasharp.rollout.inprocess.engine import Candidates
from megasharp.tasks.countdown import CountdownAnswer


def numbers(packed: str | list[float]) -> list[float]:
    """Read numbers of a page as its scripts do."""
    if isinstance(packed, list):
        first, difference, count = packed
        return [first + difference * place for place in range(int(count))]
    return np.frombuffer(base64.b64decode(packed), dtype="<f4").astype(float).tolist()


EVIL = "</script><script>document.title='broken'</script><img src=x onerror=alert(1)>\u2028"
FAILED = "The code prints\nTypeError: cannot determine truth value of Relational\nso the answer is 3"
WORDS = ("one", " two", "\n", EVIL)


def problem(name: str, samples: int, correct: int) -> ProblemResult:
    """One problem of an evaluation."""
    wrong = samples - correct
    return ProblemResult(name, samples, correct, min(correct, 1), wrong, 0, 0, 0, 0, 9 * samples, 0, correct > 3)


def result(corrects: Sequence[int], n: int, step: int, suite: str = "dev", first: int = 0) -> EvalResult:
    """An evaluation in which problem i has corrects[i] correct ones of n samples."""
    rows = [problem(f"p{first + place}", n, correct) for place, correct in enumerate(corrects)]
    return summarize(rows, EvalSetting(suite, "mine", step, n, (1, 2, n), 1.0, 1), 1.0)


def make_run(
    root: Path,
    *,
    name: str = "mine",
    steps: int = 6,
    seed: int = 1,
    evaluations: Mapping[int, EvalResult] | None = None,
    response: tuple[int, ...] = (0, 1, 2, 3),
) -> Path:
    """A run of `steps` steps; restarted after step 3, reset before step 5, with longer responses from step 4 on."""
    root.mkdir(parents=True)
    (root / "config.yaml").write_text(
        f"name: {name}\nsteps: {steps}\nseed: {seed}\nmodel: {{path: base}}\npolicy: {{optimizer: {{lr: 0.{seed}}}}}\n"
    )
    rows = [_row(step) for step in range(1, steps + 1)]
    results = (
        {0: result([0, 1, 2, 4], 8, 0), steps: result([0, 0, 8, 8], 8, steps)} if evaluations is None else evaluations
    )
    rows += [{"step": step, "time": 3000.0 + step, **found.figures()} for step, found in results.items()]
    (root / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for step, found in results.items():
        save(found, root / "evals" / f"step_{step:06d}")
    for number, start in ((1, 0), (2, 3)):
        folder = root / "logs" / f"attempt_{number}"
        folder.mkdir(parents=True)
        record = AttemptRecord(started=1000.0 * number, seen=1000.0 * number + 50, from_step=start)
        (folder / ATTEMPT_FILE).write_text(record.model_dump_json())
    for step in range(1, steps + 1):
        write_rollouts(
            root, step, groups(step), tokens=TokenColumns(lambda tokens: [WORDS[one] for one in tokens], 999)
        )
    write_responses(root / "probe", [ProbeResponse("dev", "p1", f"prompt {EVIL}", (1,), response)])
    for step in results:
        probe(
            Reader(step),
            Names(),
            [ProbeResponse("dev", "p1", "prompt", (1,), response)],
            step_file(root / "probe", step),
        )
    return root


def _row(step: int) -> dict[str, float]:
    return {
        "step": step,
        "time": 1000.0 + step,
        "time/step": 2.0,
        "time/update": 1.5,
        "time/rollout": 0.5,
        "reward/mean": step / 10,
        "entropy/policy": 1.0 / step,
        "candidates/lambda_1": -0.1,
        "candidates/gate_rate": 0.2,
        "policy/clip_high": 0.01 * step,
        "policy/reset": float(step == 5),
        "rollout/length_limit": 8.0 if step < 4 else 16.0,
        "rollout/tokens": 40.0,
        "rollout/length_mean": 10.0,
        **{f"responses/trained{name}": value for name, value in {"": 4.0, "_length_mean": 9.0 + step}.items()},
        "responses/trained_length_p90": 15.0 + step,
        # Nothing is discarded in some steps, and nothing has no length.
        "responses/discarded": float(step % 3 > 0),
        **({"responses/discarded_length_mean": 20.0, "responses/discarded_length_p90": 30.0} if step % 3 else {}),
        "rollout/tokens_per_second": 20.0,
        "something/of_its_own": 3.0,
    }


def groups(step: int) -> list[Group]:
    """Two prompts, two responses each; one correct response reports an error of its code."""
    made = []
    for number in range(2):
        prompt = Prompt(f"q{number}", "countdown", f"{number} 2=3:", (1, 2), CountdownAnswer((1, 2), 3), "d", 0, 0)
        texts = [FAILED if number else EVIL, "plain words"]
        made.append(Group(f"step{step}-{number}", prompt, tuple(map(_response, texts, (True, False))), step))
    return made


def _response(text: str, correct: bool) -> Response:
    logp = torch.tensor([0.0, math.log(0.5), -3.0, -1.0])
    completion = Completion(torch.arange(4), logp, logp, None, (VersionSpan(1, 0, 4),), FinishReason.STOP, 1)
    outcome = Outcome.CORRECT if correct else Outcome.WRONG
    return Response(completion, text, Verdict(outcome, float(correct), "1+2" if correct else None))


class Names:
    """Texts of the probe's tokens."""

    def token_texts(self, tokens: Sequence[int]) -> list[str]:
        return [WORDS[token % 4] for token in tokens]


class Reader:
    """A model that grows surer with its step: the token said is of rank 2 at first, then of rank 1."""

    def __init__(self, step: int) -> None:
        self._step = step

    def candidates(self, prompt: Sequence[int], response: Sequence[int], n: int) -> Candidates:
        sure = [0.92, 0.06, *[0.02 / 6] * 6] if self._step else [0.52, 0.37, *[0.11 / 6] * 6]
        count = len(response)
        chances = torch.tensor([sure] * count)
        said = 0 if self._step else 1
        return Candidates(
            chances[:, said].log(),
            torch.full((count,), said),
            torch.special.entr(chances).sum(-1),
            torch.arange(8).repeat(count, 1),
            chances.log(),
        )
