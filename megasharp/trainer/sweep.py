"""`megasharp sweep`: runs a grid of runs, here or as a Slurm array, and tabulates their results."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from megasharp.checkpoint.recorded import CONFIG_FILE
from megasharp.checkpoint.run_folder import holds_no_run, stored_config
from megasharp.cluster.slurm.job import Job, render_array, submit_array
from megasharp.common.errors import UserError
from megasharp.common.exit_codes import Say, note
from megasharp.common.files import held, write_for, write_like, write_text
from megasharp.config.core import dump_tree, find, included, validate
from megasharp.config.hub import read_as_a_job
from megasharp.config.run_config import RunConfig, run_of, with_paths_beside
from megasharp.config.slurm import ClusterProfile, JobOptions, find_profile, load_profile
from megasharp.reporting.history import read_run
from megasharp.reporting.number_text import duration
from megasharp.reporting.sweeps.grid import Cell, cells, load_sweep
from megasharp.reporting.sweeps.local import Task, last_line, run_all
from megasharp.trainer.plan import Options
from megasharp.trainer.resolve.recipes import build_recipes, resolved_config
from megasharp.trainer.resolve.resolved_run import check
from megasharp.trainer.resume import check_resume, commits_of
from megasharp.trainer.stored_config import resumed_config
from megasharp.trainer.submit import Asked, assumed, make_job, with_given
from megasharp.trainer.sweep_plan import RunCost, cost_of, cost_text

_FINISHED, _RUNNING, _TO_DO = "finished", "running", "to do"
_RETRIES = 2
_REMEDY = "restore the sweep's file, or give the case, or the sweep, another name"
# Options of `megasharp submit` that are keys of a sweep, where a message names them, and not one of sbatch's own.
_OPTION = re.compile(
    r"(?<![\w'=-])(?<!sets )--"
    r"(time|lead|gpu|nodes|cpus-per-node|partition|account|sbatch|restarts|retries|container|mount)(?![\w-])"
)


@contextmanager
def _naming_keys(file: Path) -> Iterator[None]:
    """Have messages about a job name the sweep's keys, where `megasharp submit` has options."""
    try:
        yield
    except UserError as error:
        said, count = _OPTION.subn(lambda found: f"slurm.{found[1].replace('-', '_')}", str(error))
        raise type(error)(f"{file}: {said}" if count else said) from None


class Sweep:
    """A sweep's file with its runs, whose folders and run files are in `runs`/<name>.

    Raises UserError in one line for a run that could not start, or that exists with another configuration.
    """

    def __init__(self, file: Path, overrides: Sequence[str], runs: Path, say: Say) -> None:
        file = find(str(file))
        self._file = file
        self._config = load_sweep(file, overrides)
        self._cells = cells(self._config, file)
        self._folder = runs / self._config.name
        self._say = say

    def run(self, at_once: int, *, dry_run: bool) -> None:
        """Run what is not finished, `at_once` runs together. Raises RunFailed where some failed."""
        if not dry_run:
            # Until the runs are read, which say for whom.
            write_for("owner", self._folder)
        with nullcontext() if dry_run else held(self._folder, "another megasharp sweep runs this grid"):
            self._run(at_once, dry_run=dry_run)

    def _run(self, at_once: int, *, dry_run: bool) -> None:
        self._prepare(dry_run)
        state = {cell.name: self._state(cell) for cell in self._cells}
        if dry_run:
            for name, what in state.items():
                self._say(f"{name}: {what}")
            return
        for name in (name for name, what in state.items() if what == _RUNNING):
            self._say(f"{name} goes on in another process: left to it")
        open_cells = [cell for cell in self._cells if state[cell.name] == _TO_DO]
        count = len(self._cells)
        self._say(f"{self._config.name}: {count} runs, {count - len(open_cells)} of them finished or going on")
        left = [cell.name for cell in open_cells]

        def done(task: Task, code: int, seconds: float) -> None:
            left.remove(task.name)
            end = f"failed with exit code {code}: {last_line(task.log)}" if code else "finished"
            self._say(f"{task.name} {end} after {duration(seconds)}; {len(left)} of {count} runs are left")

        run_all([self._task(cell) for cell in open_cells], at_once, done)

    def submit(self, *, dry_run: bool) -> None:
        """Submit what is not finished as one Slurm array."""
        with _naming_keys(self._file):
            self._submit(dry_run)

    def _submit(self, dry_run: bool) -> None:
        profile, options = self._options()
        with read_as_a_job(options.environment, options.mount):
            self._prepare(dry_run)
            to_do = {number: cell for number, cell in enumerate(self._cells) if self._state(cell) == _TO_DO}
            jobs = {number: self._job(cell, profile, options) for number, cell in to_do.items()}
        for line in {line: None for cell in to_do.values() for line in assumed(options, self._resumed(cell))}:
            note(line)
        if not jobs:
            self._say(f"{self._config.name}: nothing to submit; {len(self._cells)} runs are finished or going on")
            return
        at_once = self._config.slurm.at_once
        if dry_run:
            self._say(render_array(self._config.name, jobs, self._folder.absolute(), at_once).rstrip("\n"))
            return
        number = submit_array(self._config.name, jobs, self._folder.absolute(), at_once)
        self._say(f"submitted array {number}: {len(jobs)} of {len(self._cells)} runs")
        self._say(f"logs: {self._folder / 'logs'}/{number}_N.log")

    def plan(self, response: int | None) -> bool:
        """Tell what each case costs by plan, for `slurm.gpu`; return whether all runs would work.

        Models and data need not be here. `response`: mean length of a response in tokens.
        """
        _, slurm = self._options()
        options = Options(self._config.slurm.nodes, slurm.gpu, response=response, disk_gb=slurm.disk)
        costs: dict[str, RunCost] = {}
        for cell in self._cells:
            if cell.row not in costs:
                file = self._run_file(cell)
                costs[cell.row] = cost_of(run_of(cell.tree, file), f"{self._file}: {cell.row}", options)
        runs = Counter(cell.row for cell in self._cells)
        self._say(cost_text(self._config.name, [(row, runs[row], cost) for row, cost in costs.items()], options))
        return all(cost.plan.works for cost in costs.values())

    def tell(self, out: Path | None) -> None:
        """Write table, CSV and picture of the finished runs, in `out` or the sweep's folder."""
        from megasharp.reporting.sweeps.results import write_results

        finished = {cell: self._folder / cell.name for cell in self._cells if self._state(cell) == _FINISHED}
        for cell in finished:
            self._check_same(cell)
        if self._folder.is_dir():
            write_like(self._folder)
        text, paths = write_results(self._config, self._cells, finished, out or self._folder)
        self._say(text)
        for path in paths:
            self._say(f"wrote {path}")

    def _prepare(self, dry_run: bool) -> None:
        """Check every run and, unless it is a dry run, write their files, which jobs that wait in a queue read.

        What the runs read of the hub is in its cache then: compute nodes never reach for a network.
        """
        rows: dict[str, RunConfig] = {}
        checked = set()
        for cell in self._cells:
            file, root = self._run_file(cell), self._folder / cell.name
            try:
                config, begun = self._resumed(cell), not holds_no_run(root)
                commits = commits_of(root, config) if begun else {}
                # Runs that differ in their seeds alone read the same, where both have begun or neither has.
                if (read := (cell.row, begun, *commits.items())) not in checked:
                    checked.add(read)
                    rows[cell.row] = check(config, str(file), begun, commits, weights=not dry_run).config
            except UserError as error:
                raise UserError(f"{self._file}: {cell.name}: {error}") from None
            results, evals = self._config.results, rows[cell.row].eval
            # A table of what a run will not measure would stay empty.
            for suite in results.suites:
                if suite not in evals.suites:
                    raise UserError(f"{self._file}: results.suite: {suite} is none of eval.suites ({evals.suites})")
            if missing := sorted({*results.k} - {*evals.k}):
                raise UserError(f"{self._file}: results.k: {missing} is not in eval.k ({evals.k}); add it there")
            self._check_same(cell)
        if dry_run:
            return
        # A sweep's logs hold what its runs print.
        write_for(rows[self._cells[0].row].log.readable_by, self._folder)
        for cell in self._cells:
            write_text(self._run_file(cell), dump_tree(cell.tree))

    def _check_same(self, cell: Cell) -> None:
        """Refuse a run that exists with another configuration than the file's."""
        root = self._folder / cell.name
        try:
            begun = self._resumed(cell)
            config = resolved_config(begun, build_recipes(begun, str(self._file)))
            check_resume(root, config, remedy=_REMEDY)
            if self._state(cell) == _FINISHED:
                # A finished run is not evaluated again, so it must have been evaluated as the file asks.
                folder = self._folder / cell.name
                before = validate(RunConfig, stored_config(folder), str(folder))
                for key in ("n", "k", "suites", "top_p"):
                    was, now = getattr(before.eval, key), getattr(config.eval, key)
                    if was != now:
                        changed = f"eval.{key} was {was} and is now {now}"
                        raise UserError(f"{folder}: {changed}, and the run is finished; {_REMEDY}")
        except UserError as error:
            raise UserError(f"{self._file}: {cell.name}: {error}") from None

    def _resumed(self, cell: Cell) -> RunConfig:
        """Return a run's configuration as `train --resume` reads it."""
        file, root = self._run_file(cell), self._folder / cell.name
        return resumed_config(root, included(cell.tree, file, with_paths_beside), str(file), lambda line: None)

    def _run_file(self, cell: Cell) -> Path:
        return self._folder / "files" / f"{cell.name}.yaml"

    def _state(self, cell: Cell) -> str:
        folder = self._folder / cell.name
        if not (folder / CONFIG_FILE).is_file():
            return _TO_DO
        history = read_run(folder)
        if history.state == "finished":
            before = validate(RunConfig, stored_config(folder), str(folder))
            now = run_of(cell.tree, self._run_file(cell))
            # The file may ask for more by now than the run was to do when it finished.
            longer = now.steps > before.steps or (now.token_budget or 0) > (before.token_budget or 0)
            if longer and history.last_step < now.steps:
                return _TO_DO
        return {"finished": _FINISHED, "running": _RUNNING}.get(history.state, _TO_DO)

    def _task(self, cell: Cell) -> Task:
        safe = ["-P"] if sys.flags.safe_path else []
        command = [
            *(sys.executable, *safe, "-m", "megasharp.cli", "train", str(self._run_file(cell))),
            *("--runs", str(self._folder), "--resume", "--retries", str(_RETRIES)),
        ]
        return Task(cell.name, command, self._folder / "logs" / f"{cell.name}.log")

    def _options(self) -> tuple[Path | None, ClusterProfile]:
        """Return the profile's file, and its options with those of the sweep's file laid over them."""
        slurm = self._config.slurm
        profile = None if slurm.profile is None else find_profile(slurm.profile, self._file.parent)
        given = {name: getattr(slurm, name) for name in slurm.model_fields_set & {*JobOptions.model_fields}}
        return profile, with_given(ClusterProfile() if profile is None else load_profile(profile), given)

    def _job(self, cell: Cell, profile: Path | None, options: ClusterProfile) -> Job:
        asked = Asked(
            file=self._run_file(cell),
            overrides=[],
            runs=self._folder,
            options=options,
            profile=profile,
            nodes=self._config.slurm.nodes,
        )
        return make_job(asked, self._resumed(cell))
