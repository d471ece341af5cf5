"""Run files of shipped models, asked about and planned, for the tests of `megasharp plan`."""

from __future__ import annotations

from pathlib import Path

from megasharp.config.run_config import load_run
from megasharp.planner.records import Plan
from megasharp.planner.suggest import make_plan
from megasharp.trainer.plan import Asked, Options, ask

REPOSITORY = Path(__file__).parents[3]
EXAMPLES = REPOSITORY / "examples"
STEP = "{task: countdown, prompts_per_step: 64, responses_per_prompt: 8}"


def write_run(folder: Path, piece: str) -> Path:
    """A run file of configs/model/PIECE.yaml."""
    file = folder / "run.yaml"
    file.write_text(f"name: golden\nsteps: 1\ninclude: [{REPOSITORY}/configs/model/{piece}.yaml]\ndata: {STEP}\n")
    return file


def asked(folder: Path, piece: str, *overrides: str, options: Options | None = None) -> Asked:
    """The planner's request for it."""
    return ask(load_run(write_run(folder, piece), overrides), "run.yaml", options or Options())


def asked_in_process(folder: Path, piece: str, *overrides: str, options: Options) -> Asked:
    """The same with the engine in the learners' process, beside which keys for other engines are refused."""
    config = load_run(write_run(folder, piece), overrides)
    policy = config.policy.model_copy(update={"offload": []})
    changed = {"rollout": type(config.rollout)(), "policy": policy}
    return ask(config.model_copy(update=changed), "run.yaml", options)


def planned(folder: Path, piece: str, *overrides: str, options: Options | None = None) -> Plan:
    """Its plan."""
    return make_plan(asked(folder, piece, *overrides, options=options).request)


def texts(plan: Plan, level: str) -> str:
    """All problems of a level."""
    return " | ".join(problem.text for problem in plan.problems if problem.level == level)
