"""Probes: a run's fixed responses, read by its weights at every evaluation, or afterwards by `megasharp probe`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megasharp.checkpoint.run_folder import stored_config
from megasharp.checkpoint.store import complete_steps
from megasharp.common.errors import UserError
from megasharp.config.core import find, validate
from megasharp.config.run import RunConfig
from megasharp.evals.probe import FOLDER, Scorer, probe, read_responses, sample_responses, step_file, write_responses
from megasharp.evals.suites import Suite, load_suite
from megasharp.reporting.runs_command import find_run
from megasharp.rollout.engine import Engine
from megasharp.tasks.tokenizer import TextTokenizer, load_tokenizer
from megasharp.trainer.resolve.sampling_model import engine_of, hf_folder


@dataclass(frozen=True, slots=True)
class Probes:
    """The probe of one run: `count` problems of `suite`, responses of at most `max_tokens` tokens."""

    root: Path
    suite: Suite
    tokenizer: TextTokenizer
    count: int
    max_tokens: int

    def missing(self, step: int) -> bool:
        """Whether the weights after `step` were not probed yet."""
        return not step_file(self.root / FOLDER, step).exists()

    def take(self, engine: Engine, step: int) -> Path | None:
        """Probe the engine's weights, which are those after `step`; None where the engine cannot read a text.

        The first call of a run samples the responses. Raises UserError where a file cannot be read or written.
        """
        if not isinstance(engine, Scorer):
            return None
        folder = self.root / FOLDER
        responses = read_responses(folder)
        if not responses:
            responses = sample_responses(
                engine, self.suite, self.tokenizer, count=self.count, max_tokens=self.max_tokens
            )
            write_responses(folder, responses)
        return probe(engine, self.tokenizer, responses, step_file(folder, step))


def probe_run(name: str, runs: Path, suite: str | None, count: int, say: Callable[[str], None]) -> None:
    """Probe a run's base model and its checkpoints, as far as that was not done; one line for each.

    Raises UserError where there is no such run, suite or model, or a file cannot be read or written.
    """
    root = find_run(name, runs)
    config = validate(RunConfig, stored_config(root), f"{root}/config.yaml")
    chosen = suite or next(iter(config.eval.suites), None)
    if chosen is None:
        raise UserError(f"{root}: the run evaluates on no suite; name one with --suite, whose problems are read")
    base = find(config.model.path)
    steps = complete_steps(root / "checkpoints")
    sources = {0: base} | {step: root / "checkpoints" / f"step_{step:06d}" for step in steps}
    longest = config.eval.max_response_tokens or config.data.largest_response
    for step, weights in sorted(sources.items()):
        path = step_file(root / FOLDER, step)
        if path.exists():
            say(f"{path}: there already")
            continue
        with hf_folder(weights) as folder, engine_of(folder) as engine:
            probes = Probes(root, load_suite(chosen), load_tokenizer(folder), count, longest)
            say(f"wrote {probes.take(engine, step)}")


def probe_runs(names: Sequence[str], runs: Path, suite: str | None, count: int, say: Callable[[str], None]) -> None:
    """`probe_run` for each."""
    for name in names:
        probe_run(name, runs, suite, count, say)
