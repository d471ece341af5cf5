"""A run read from its folder, whatever its state (running, finished, killed, or written by an older version).

In reading order: `RunHistory` and how it is read, goodput, and the best evaluation beside the last one. Goodput is the
share of wall-clock time that became the run's history:

    goodput = useful step time / wall time

Useful step time adds up the steps of the history, each once, without evaluations, checkpoints and start-up (in runs of
older versions the row of the next step contains these). A step that was trained again after a restart counts with its
last time; its earlier time is `repeated`, and so are steps that a killed attempt had begun. A run of one attempt has
repeated nothing: its stages' time outside steps is in `rest`. Wall time adds up all attempts, from the start of the
process (imports and checks included) to its end, or to when a killed one was last seen. Time between attempts, in a
queue, is not counted.

Papers report peaks (2601.15609, section 5.1: the best of a checkpoint every 50 steps). The suite that chose the peak
flatters it, because the best of many noisy metrics is partly luck; on other suites the peak is as fair as the last one.
"""

from __future__ import annotations

import fcntl
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from megasharp.checkpoint.attempts import AttemptRecord, attempt_paths, read_attempts
from megasharp.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from megasharp.checkpoint.recorded import CONFIG_FILE
from megasharp.checkpoint.run_folder import SUPERSEDED, stored_config
from megasharp.cluster.slurm.submitted import SUBMITTED, submitted_jobs
from megasharp.common.control import BestFigure, with_evaluation
from megasharp.common.errors import UserError
from megasharp.common.formats import NewerFormat
from megasharp.config.core import Tree, validate
from megasharp.config.log import LogConfig
from megasharp.metrics.writers import Row, read_metrics

_TIME = "time/"
_STEP = "step"
_EVAL = "eval/"
_PASS_AT_K = re.compile(r"eval/(?P<suite>.+)/pass@(?P<k>\d+)$")


@dataclass(frozen=True, slots=True)
class CheckpointEntry:
    """One checkpoint: step, size in bytes, time of completion (seconds since 1970), and its problem, if any.

    Hashes are not computed here: a file of the right size counts as complete until a resume reads it.
    """

    step: int
    size: int
    written: float
    problem: str | None
    manifest: Manifest | None


@dataclass(frozen=True)
class RunHistory:
    """A run as its folder is at `now`. `attempts` are by number, None for those of versions without records.

    `evaluations` has the metrics of evaluations by step, from rows and from the files of `evals/`.
    """

    folder: Path
    config: Tree
    rows: Sequence[Row]
    evaluations: Mapping[int, Mapping[str, float]]
    attempts: dict[int, AttemptRecord | None]
    checkpoints: Sequence[CheckpointEntry]
    alive: bool
    now: float

    @property
    def name(self) -> str:
        """The run's name from its configuration."""
        # On one line, whatever a stranger's stored configuration says.
        return str(self.config.get("name", self.folder.name)).replace("\n", " ")

    @property
    def steps(self) -> int | None:
        """The number of steps that the run is configured for."""
        steps = self.config.get("steps")
        return steps if isinstance(steps, int) else None

    @property
    def token_budget(self) -> int | None:
        """The number of response tokens that end the run; None: its steps alone end it."""
        budget = self.config.get("token_budget")
        return budget if isinstance(budget, int) else None

    @cached_property
    def tokens(self) -> int:
        """The response tokens of the steps in the history."""
        return int(sum(row.get("rollout/tokens") or 0.0 for row in self.training))

    @property
    def complete(self) -> bool:
        """True where the last step that is configured is in the history."""
        by_tokens = self.token_budget is not None and self.tokens >= self.token_budget
        return by_tokens or (self.steps is not None and self.last_step >= self.steps)

    @cached_property
    def training(self) -> list[Row]:
        """The rows of training steps in order, each step once: of a step that was trained again, the last row."""
        by_step = {row["step"] or 0: row for row in self.rows if row.get("time/step") is not None}
        return [by_step[step] for step in sorted(by_step)]

    @cached_property
    def stages(self) -> dict[int, dict[str, float]]:
        """Seconds by stage of each step, with the evaluation and the save after it, in the order of steps.

        Step 0 is the evaluation before the first step. In runs of older versions both belong to the next step.
        """
        found: dict[int, dict[str, float]] = {}
        for row in self.rows:
            seconds = {
                name.removeprefix(_TIME): value for name, value in row.items() if name.startswith(_TIME) and value
            }
            if not seconds:
                continue
            step = int(row["step"] or 0)
            if seconds.pop(_STEP, None) is not None:
                # Of a step that was trained again, the last row counts.
                found.pop(step, None)
            of_step = found.setdefault(step, {})
            for stage, value in seconds.items():
                of_step[stage] = of_step.get(stage, 0.0) + value
        return dict(sorted(found.items()))

    @cached_property
    def last_step(self) -> int:
        """The last step of the history; 0 before the first."""
        return max((int(row["step"] or 0) for row in self.training), default=0)

    def series(self, name: str) -> list[tuple[int, float]]:
        """Return a metric's (step, value) in the order of steps, without nulls; of several in one step the last."""
        if name.startswith(_EVAL):
            return [(step, figures[name]) for step, figures in self.evaluations.items() if name in figures]
        found = {int(row["step"] or 0): value for row in self.rows if (value := row.get(name)) is not None}
        return sorted(found.items())

    @property
    def restarts(self) -> int:
        """Number of starts after the first."""
        return max(len(self.attempts) - 1, 0)

    @property
    def may_be_queued(self) -> bool:
        """True where it neither trains now nor is finished: a job that goes on with it may be waiting."""
        return self.state not in ("running", "finished")

    @property
    def written(self) -> float:
        """When its last row was written, or its configuration where there is none, in seconds since 1970."""
        times = [row.get("time") or 0.0 for row in self.rows]
        return max(times, default=(self.folder / CONFIG_FILE).stat().st_mtime)

    @property
    def state(self) -> str:
        """The state in a few words: running, finished, or how the last attempt ended."""
        last = list(self.attempts.values())[-1] if self.attempts else None
        if self.alive:
            return "running"
        # The row of the last step is written before its checkpoint and the last evaluation.
        if self.complete and (last is None or last.exit_code == 0):
            return "finished"
        if last is None:
            return "not running" if self.rows else "never trained a step"
        if last.ended is None:
            return "killed"
        return f"stopped: {last.reason}"


def read_run(folder: Path, now: Callable[[], float] = time.time) -> RunHistory:
    """Read a run's folder. Raises UserError where it is not a run."""
    config = stored_config(folder)
    rows = read_metrics(folder)
    return RunHistory(
        folder=folder,
        config=config,
        rows=rows,
        evaluations=read_evaluations(folder, rows),
        attempts=_with_rows(read_attempts(folder / "logs"), rows),
        checkpoints=read_checkpoints(folder / "checkpoints"),
        alive=is_alive(folder),
        now=now(),
    )


def find_run(name: str, runs: Path) -> Path:
    """Return the folder of a run that is given by its path, or by its name in `runs`. Raises UserError without one."""
    for folder in (Path(name), runs / name):
        if (folder / CONFIG_FILE).is_file():
            return folder
    raise UserError(f"no run {name!r}: neither {name} nor {runs / name} holds a {CONFIG_FILE}; see megasharp runs list")


def find_submitted(name: str, runs: Path) -> Path | None:
    """Return the folder of a run, given as in `find_run`, that was submitted and has not begun; None where it has."""
    for folder in (Path(name), runs / name):
        if (folder / CONFIG_FILE).is_file():
            return None
        if submitted_jobs(folder):
            return folder
    return None


def submitted_only(folder: Path) -> dict[Path, float]:
    """Return the runs directly below `folder` that were submitted and have not begun, and when; the latest first."""
    paths = (path.parents[1] for path in folder.glob(f"*/{SUBMITTED}"))
    found = {
        path: jobs[-1].time for path in paths if not (path / CONFIG_FILE).exists() and (jobs := submitted_jobs(path))
    }
    return dict(sorted(found.items(), key=lambda item: item[1], reverse=True))


def began(run: RunHistory) -> float:
    """Return when the last attempt of a run began, in seconds since 1970; 0.0 for attempts without a record."""
    return max((record.started for record in run.attempts.values() if record is not None), default=0.0)


def find_runs(folder: Path) -> tuple[list[RunHistory], list[str]]:
    """Read every run directly below `folder`, the latest first; return a line for each that cannot be read."""
    found, problems = [], []
    for path in sorted(folder.glob(f"*/{CONFIG_FILE}")):
        try:
            found.append(read_run(path.parent))
        except UserError as error:
            problems.append(str(error))
    return sorted(found, key=lambda run: run.written, reverse=True), problems


def by_label(histories: Sequence[RunHistory], command: str) -> dict[str, RunHistory]:
    """Key runs by their names, or by their folders where two have the same. Raises UserError for one named twice."""
    if len({run.folder.resolve() for run in histories}) < len(histories):
        raise UserError(f"{command}: the same run is named twice")
    same = len({run.name for run in histories}) < len(histories)
    return {str(run.folder) if same else run.name: run for run in histories}


def _with_rows(attempts: dict[int, AttemptRecord | None], rows: Sequence[Row]) -> dict[int, AttemptRecord | None]:
    """Update the last record, where it has no end, from the rows that were written after it.

    A record is some seconds older than the newest row. Rows that earlier attempts wrote after their record are gone.
    """
    number = max(attempts, default=0)
    record = attempts.get(number)
    if record is None or record.ended is not None:
        return attempts
    trained = [row for row in rows if row.get("time/step") is not None and (row["step"] or 0) > record.from_step]
    own = [row for row in trained if (row.get("time") or 0.0) >= record.started]
    if not own:
        return attempts
    steps = [int(row["step"] or 0) for row in own]
    newer = {
        "seen": max(record.seen, own[-1]["time"] or 0.0),
        "first_step": steps[0] if record.first_step is None else record.first_step,
        "last_step": steps[-1],
    }
    return {**attempts, number: record.model_copy(update=newer)}


def is_alive(folder: Path) -> bool:
    """Return True where a process holds the run's lock, which is taken shared and released at once.

    Where the file system has no locks no run can be started, so none is running.
    """
    try:
        with (folder / ".lock").open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def read_checkpoints(folder: Path) -> list[CheckpointEntry]:
    """Read all checkpoints by step; incomplete ones carry their problem."""
    found = {}
    for path in folder.glob("step_*"):
        name = path.name.removeprefix("step_")
        if name.isdecimal():
            found[int(name)] = _entry(int(name), path)
    return [found[step] for step in sorted(found)]


def _entry(step: int, folder: Path) -> CheckpointEntry:
    try:
        written = (folder / MANIFEST).stat().st_mtime
        manifest = read_manifest(folder)
    except OSError:
        return CheckpointEntry(step, 0, 0.0, "it has no manifest", None)
    except NewerFormat:
        return CheckpointEntry(step, 0, 0.0, "a later release wrote it", None)
    except UserError:
        return CheckpointEntry(step, 0, 0.0, "its manifest is damaged", None)
    size = sum(entry.size for entry in manifest.files.values())
    broken = next((name for name, entry in manifest.files.items() if _size(folder / name) != entry.size), None)
    return CheckpointEntry(step, size, written, broken and f"{broken} is missing or has another size", manifest)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _yaml(value: int | None) -> str:
    return "null" if value is None else str(value)


def superseded(history: RunHistory) -> str:
    """Say what the run has in `superseded/`, which counts nowhere; empty where it has nothing."""
    folders = attempt_paths(history.folder / SUPERSEDED)
    numbers = [number for number, folder in folders.items() if any(folder.glob("*"))]
    if not numbers:
        return ""
    by = f"attempt {numbers[0]}" if len(numbers) == 1 else f"{len(numbers)} attempts, the last of them {numbers[-1]},"
    return f"{SUPERSEDED}/ has the earlier records of what {by} did again; they count in no figure"


def kept_responses(history: RunHistory) -> str:
    """Say how many of the run's steps have a table of responses, and why the others have none; empty where all have."""
    try:
        rules = validate(LogConfig, history.config.get("log", {}), str(history.folder / CONFIG_FILE)).rollouts
    except UserError:
        return ""
    trained = {int(row["step"] or 0) for row in history.training}
    found = (re.fullmatch(r"step_(\d+)\.parquet", path.name) for path in history.folder.glob("rollouts/*"))
    gone = trained - {int(match[1]) for match in found if match}
    if rules is None or not gone:
        return ""
    newest = history.last_step
    removed = sum(not rules.keeps(step, newest) for step in gone)
    older = (
        f"retention removed {removed:,} (log.rollouts: keep_last {_yaml(rules.keep_last)}, every {_yaml(rules.every)})"
    )
    parts = [older] * bool(removed) + [f"{len(gone) - removed:,} are missing"] * (len(gone) > removed)
    return f"tables of responses of {len(trained) - len(gone):,} of {len(trained):,} steps; {', '.join(parts)}"


# Stages of an attempt's clock that belong to no step.
_APART = ("start", "eval", "checkpoint")


@dataclass(frozen=True, slots=True)
class Goodput:
    """Seconds; they add up to `wall`. `estimated`: some attempt has no record, and `wall` is from the rows' times."""

    wall: float
    useful: float
    start: float
    evaluation: float
    checkpoint: float
    repeated: float
    rest: float
    estimated: bool

    @property
    def share(self) -> float | None:
        """Goodput; None before any time has passed."""
        return self.useful / self.wall if self.wall > 0 else None


def goodput(history: RunHistory) -> Goodput:
    """Account for a run's time so far."""
    rows = history.training
    useful = 0.0
    for row in rows:
        apart = sum(row.get(f"time/{stage}") or 0.0 for stage in _APART)
        useful += max((row["time/step"] or 0.0) - apart, 0.0)
    known = [record for record in history.attempts.values() if record is not None]
    if not known or len(known) < len(history.attempts):
        return _from_rows(history, useful)
    # The record of a killed attempt can be some seconds older than its last row.
    wall = max(sum(duration(record, history) for record in known), useful)
    start, evaluation, checkpoint = (sum(record.seconds.get(stage, 0.0) for record in known) for stage in _APART)
    in_steps = sum(seconds for record in known for stage, seconds in record.seconds.items() if stage not in _APART)
    left = wall - useful - start - evaluation - checkpoint
    repeated = min(max(in_steps - useful, 0.0), max(left, 0.0)) if len(known) > 1 else 0.0
    return Goodput(wall, useful, start, evaluation, checkpoint, repeated, max(left - repeated, 0.0), False)


def duration(record: AttemptRecord, history: RunHistory) -> float:
    """Return the seconds of one attempt so far."""
    if record.ended is not None:
        return record.ended - record.started
    newest = list(history.attempts.values())[-1]
    return (history.now if history.alive and record is newest else record.seen) - record.started


def _from_rows(history: RunHistory, useful: float) -> Goodput:
    rows = history.training
    if not rows:
        return Goodput(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, True)
    begun = (rows[0]["time"] or 0.0) - (rows[0]["time/step"] or 0.0)
    # The wall time begins with the first step: rows hold no earlier times.
    ended = max(row.get("time") or 0.0 for row in history.rows)
    wall = max(ended - begun, useful)
    stages = [seconds for step, seconds in history.stages.items() if step >= (rows[0]["step"] or 0)]
    evaluation, checkpoint = (sum(seconds.get(stage, 0.0) for seconds in stages) for stage in _APART[1:])
    rest = max(wall - useful - evaluation - checkpoint, 0.0)
    return Goodput(wall, useful, 0.0, evaluation, checkpoint, 0.0, rest, True)


KEEP_BEST = "checkpoint.keep_best"
_FIRST = "the first suite, because checkpoint.keep_best names none"


@dataclass(frozen=True, slots=True)
class Peak:
    """`metric` was best after step `step`, and `last_value` after the last evaluated step, `last_step`.

    `chosen_by` names what chose the metric; `kept`: the peak's checkpoint is there; `last_kept`: the last step's is.
    """

    metric: str
    chosen_by: str
    step: int
    value: float
    last_step: int
    last_value: float
    kept: bool
    last_kept: bool

    @property
    def line(self) -> str:
        """The peak in one line for a person."""
        kept, last_kept = ("checkpoint kept" if kept else "no checkpoint" for kept in (self.kept, self.last_kept))
        last = f"; last {self.last_value:.3f} after step {self.last_step} ({last_kept})"
        suite, _, name = self.metric.removeprefix("eval/").rpartition("/")
        best = f"best {name} on {suite}: {self.value:.3f} after step {self.step}"
        if self.step == self.last_step:
            return f"{best}, the last evaluated ({kept})"
        return f"{best} ({kept}){last}" + (f"; {KEEP_BEST} chooses the metric" if self.chosen_by == _FIRST else "")

    def tree(self, figures: Mapping[int, Mapping[str, float]]) -> dict[str, object]:
        """Return the peak for summary.json, with all metrics of both evaluations."""
        return {**asdict(self), "figures": figures.get(self.step, {}), "last_figures": figures.get(self.last_step, {})}


def find_peak(
    config: Tree,
    evaluations: Mapping[int, Mapping[str, float]],
    checkpoints: Collection[int],
    known: Mapping[str, BestFigure],
) -> Peak | None:
    """Return the peak by `checkpoint.keep_best`, or else by pass@k of the first suite at the smallest k.

    None where nothing was evaluated after a step. `checkpoints` are the steps with a complete one. `known` are the best
    that the run itself has seen (`ControlState.best`): with them the evaluations need not be all that there are.
    """
    metric, chosen_by = peak_metric(config)
    values = {step: value for step, figures in evaluations.items() if (value := figures.get(metric)) is not None}
    best: dict[str, BestFigure] = {}
    for step, value in sorted(values.items()):
        best = with_evaluation(best, step, {metric: value})
    seen = known.get(metric)
    if seen is not None and (metric not in best or seen.value > best[metric].value):
        best[metric] = seen
    if metric not in best:
        return None
    peak = best[metric]
    last = max(values, default=peak.step)
    last_value = values.get(last, peak.value)
    return Peak(
        metric, chosen_by, peak.step, peak.value, last, last_value, peak.step in checkpoints, last in checkpoints
    )


def peak_metric(config: Tree) -> tuple[str, str]:
    """Return the metric that chooses a run's peak, and what named it."""
    named = _section(config, "checkpoint").get("keep_best")
    if isinstance(named, str):
        return named, KEEP_BEST
    evaluation = _section(config, "eval")
    suite = str((evaluation.get("suites") or [""])[0]).rpartition("/")[2].removesuffix(".yaml")
    return f"{_EVAL}{suite}/pass@{min(evaluation.get('k') or [1])}", _FIRST


def read_evaluations(folder: Path, rows: Iterable[Row]) -> dict[int, dict[str, float]]:
    """Collect the metrics of evaluations by step, in order: those of `rows`, then of files that have no row.

    Of a step that was evaluated twice the later ones count.
    """
    found: dict[int, dict[str, float]] = {}
    # Rows of steps, nearly all, have the same names: which of them are of evaluations is asked once.
    of_evaluations: dict[tuple[str, ...], bool] = {}
    for row in rows:
        names = tuple(row)
        if names not in of_evaluations:
            of_evaluations[names] = any(name.startswith(_EVAL) for name in names)
        if of_evaluations[names] and (figures := evaluation_figures([row])):
            found.setdefault(int(row["step"] or 0), {}).update(figures)
    steps = sorted({*found, *evaluated_steps(folder)})
    whole = {step: with_files(folder, step, found.get(step, {})) for step in steps}
    return {step: figures for step, figures in whole.items() if figures}


def evaluation_figures(rows: Iterable[Row]) -> dict[str, float]:
    """Collect the metrics of evaluations from the rows of one step."""
    return {name: value for row in rows for name, value in row.items() if name.startswith(_EVAL) and value is not None}


def evaluated_steps(folder: Path) -> list[int]:
    """Return the steps that have a folder in `evals/`, in order."""
    found = (re.fullmatch(r"step_(\d+)", path.name) for path in folder.glob("evals/step_*"))
    return sorted(int(match[1]) for match in found if match)


def with_files(folder: Path, step: int, figures: Mapping[str, float]) -> dict[str, float]:
    """Add to the `figures` that the rows of `step` have those of evaluations whose file has no row.

    An attempt that was killed between the two leaves such a file. A damaged one is left out; the report names it.
    """
    whole = dict(figures)
    for path in sorted((folder / "evals" / f"step_{step:06d}").glob("*.json")):
        if not any(name.startswith(f"{_EVAL}{path.stem}/") for name in figures):
            # Imported where it is needed, which is seldom: it brings torch.
            from megasharp.evals.result_files import stored_figures

            with suppress(UserError):
                whole |= stored_figures(path)
    return whole


def suite_figures(figures: Mapping[str, float], suite: str) -> tuple[dict[int, float], float | None]:
    """Return a suite's pass@k by k in order, and its mean number of distinct correct answers, of one evaluation."""
    matches = ((match, value) for name, value in figures.items() if (match := _PASS_AT_K.match(name)))
    found = {int(match["k"]): value for match, value in matches if match["suite"] == suite}
    return dict(sorted(found.items())), figures.get(f"{_EVAL}{suite}/distinct_correct")


def evaluated_suites(evaluations: Iterable[Mapping[str, object]]) -> dict[str, list[int]]:
    """Collect the suites that were evaluated, in order of appearance, each with its values of k in order."""
    found: dict[str, set[int]] = {}
    for match in (match for figures in evaluations for name in figures if (match := _PASS_AT_K.match(name))):
        found.setdefault(match["suite"], set()).add(int(match["k"]))
    return {suite: sorted(ks) for suite, ks in found.items()}


def _section(config: Tree, name: str) -> Tree:
    section = config.get(name)
    return section if isinstance(section, dict) else {}
