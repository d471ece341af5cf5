"""A whole run on the stand-in for a GPU: the same figures as on the CPU, through a save, a stop and a resume."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY / "tests" / "multirank" / "learner"))

from pretended_cuda import pretended_cuda  # noqa: E402

from megasharp.config.run_config import load_run  # noqa: E402
from megasharp.trainer.resolve.resolved_run import check  # noqa: E402
from megasharp.trainer.run import train  # noqa: E402

RUN = REPOSITORY / "examples" / "quickstart" / "run.yaml"
SHORT = (
    "data.prompts_per_step=4",
    "data.responses_per_prompt=4",
    "recipe.methods=[dapo, iac, dlc, kl]",
    "recipe.dlc.window=6",
    "checkpoint.every=1",
    "eval.n=1",
    "eval.k=[1]",
    "eval.probe=2",
    "eval.every=0",
    "log.tensorboard=false",
)


def figures(root: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "policy/loss" in row]


def run(root: Path, device: str, steps: int, *, resume: bool = False) -> None:
    config = load_run(RUN, [*SHORT, f"policy.device={device}", f"steps={steps}"])
    train(check(config, str(RUN)), root, resume=resume, say=print)


@pytest.mark.long("layouts")
def test_a_run_is_the_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    run(tmp_path / "cpu", "cpu", 3)
    with pretended_cuda():
        run(tmp_path / "cuda", "cuda", 2)
        run(tmp_path / "cuda", "cuda", 3, resume=True)
    expected, found = figures(tmp_path / "cpu"), figures(tmp_path / "cuda")
    assert len(found) == len(expected) == 3
    for mine, theirs in zip(found, expected, strict=True):
        for name in ("policy/loss", "policy/grad_norm", "reward/mean", "memory/grad_norm", "memory/calibration_kl"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-6), name
