"""A Slurm job as a value, its sbatch file, and its submission, alone or as part of an array.

A job's file is rendered without asking Slurm anything. A user may give further options of sbatch. sbatch takes the last
of two lines for one option and says nothing, so an option that the file sets itself is refused. Only a dependency is
the user's as well: it is put beside the one by which jobs of one run wait for each other. To submit, the file is
written beside the run's logs and given to sbatch. Many jobs become one Slurm array: each of its jobs runs one run's own
sbatch file, chosen by its number.
"""

from __future__ import annotations

import getpass
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import resources
from itertools import product
from pathlib import Path
from string import Template

from megasharp.cluster.slurm.setup_lines import check_setup, render_setup
from megasharp.cluster.slurm.submitted import record
from megasharp.common.errors import UserError
from megasharp.common.files import UMASK, write_text

TEMPLATE = "job.sbatch"
# sbatch's own names for a time limit: MM, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS.
_TIME = re.compile(r"(?:(?P<days>\d+)-(?P<hours>\d+)(?::(?P<minutes>\d+)(?::(?P<seconds>\d+))?)?)|(?P<plain>[\d:]+)")
# Slurm sends the early signal up to a minute before the time that was asked for, which it keeps in 16 bits.
_EARLY_S, LONGEST_LEAD_S = 60, 65535
LIMIT_S = 120
DEPENDENCY = "dependency"
_SINGLETON = "singleton"
# Options that differ from run to run, which an array sets itself: `singleton` would let one run at a time.
_OWN = ("--job-name=", "--output=", "--dependency=", "--chdir=")
# Options that a job's file sets by itself: the long name, sbatch's letter for it, and what sets it.
_SET = (
    ("job-name", "J", "give the run file's name"),
    ("nodes", "N", "give --nodes"),
    ("ntasks-per-node", "n", "leave it out, every node has one program"),
    ("exclusive", "", "leave out --cpus-per-node for whole nodes"),
    ("cpus-per-task", "c", "give --cpus-per-node"),
    ("gpus-per-node", "G", "give the run file's cluster.gpus_per_node"),
    ("partition", "p", "give --partition"),
    ("account", "A", "give --account"),
    ("time", "t", "give --time"),
    ("signal", "", "give --lead"),
    ("requeue", "", "give --restarts"),
    ("no-requeue", "", "give --restarts 0"),
    ("open-mode", "", "leave it out, restarts write to one log"),
    ("output", "o", "give --runs, logs are in the run's folder"),
    ("chdir", "D", "submit from the folder where the job is to work"),
)


@dataclass(frozen=True, slots=True)
class Resources:
    """The resources asked of Slurm. `lead_s`: seconds before the limit at which the run is asked to end.

    `gres` is the name of GPUs in `--gres`, None asks by `--gpus-per-node`. `cpus_per_node` None asks for whole nodes.
    `extra` are further options of sbatch, as `--qos=high`; `refuse_options` says which.
    """

    nodes: int
    time: str
    gpus_per_node: int = 0
    gres: str | None = None
    cpus_per_node: int | None = None
    lead_s: int = 600
    partition: str | None = None
    account: str | None = None
    extra: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Software:
    """The software of a job: a Python that has megasharp, in a container of pyxis or on the nodes as they are.

    `mounts` as pyxis has them: "/from:/to".
    """

    python: str
    container: str | None = None
    mounts: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Job:
    """One job. `run` is the run's folder, `folder` the job's working directory.

    `command` are the arguments of `megasharp`, `doctor` those of `megasharp doctor` before it; empty for none.
    `setup` are lines of shell before anything starts, `profile` is the file that they are from. `umask` is for all that
    the job writes.
    """

    name: str
    command: Sequence[str]
    run: Path
    folder: Path
    resources: Resources
    software: Software
    restarts: int = 20
    doctor: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    setup: Sequence[str] = ()
    profile: Path | None = None
    umask: int = UMASK["owner"]

    @property
    def latest(self) -> str:
        """The link in the run's logs to the newest attempt: a run's own is not turned to another command's."""
        return "latest" if self.is_run else f"latest_{self.command[0]}"

    @property
    def asked(self) -> str:
        """The words of its log for the command when time is nearly up."""
        if self.is_run:
            return "the run is asked to save and end"
        return "the evaluation is asked to end"

    @property
    def standing(self) -> str:
        """A line of shell that says how far the command has come, so that a job which makes no progress gives up."""
        if self.is_run:
            return 'cat "$run/checkpoints/latest" 2>/dev/null || echo "no checkpoint"'
        tables = 'find "$run/evals/by_hand" -name "*.parquet" 2>/dev/null'
        return f'echo "$({tables} | wc -l) tables of the evaluation"'

    @property
    def is_run(self) -> bool:
        """True where the job trains."""
        return self.command[0] == "train"


def seconds(time: str) -> int:
    """Return a time limit of sbatch in seconds. Raises UserError for a text that sbatch would not take."""
    found = _TIME.fullmatch(time)
    if found is None:
        raise _no_time(time)
    if found["plain"] is None:
        days, hours, minutes, rest = (int(found[name] or 0) for name in ("days", "hours", "minutes", "seconds"))
        return ((days * 24 + hours) * 60 + minutes) * 60 + rest
    parts = [int(part) if part else -1 for part in found["plain"].split(":")]
    if len(parts) > 3 or min(parts) < 0:
        raise _no_time(time)
    # One number is minutes, two are minutes and seconds.
    hours, minutes, rest = (0, parts[0], 0) if len(parts) == 1 else (0, *parts) if len(parts) == 2 else parts
    return (hours * 60 + minutes) * 60 + rest


def _no_time(time: str) -> UserError:
    return UserError(f"--time {time}: give HH:MM:SS, D-HH:MM:SS or minutes")


def check(job: Job) -> None:
    """Raise UserError for what can be known to be wrong without asking Slurm."""
    limit, asked = seconds(job.resources.time), job.resources
    if limit <= asked.lead_s + _EARLY_S:
        raise UserError(
            f"--time {asked.time}: Slurm would ask the run to end {asked.lead_s} s (--lead), and up to a minute more, "
            "before that, which is when it starts; give more time or a smaller --lead"
        )
    if asked.lead_s > LONGEST_LEAD_S:
        raise UserError(f"--lead {asked.lead_s}: Slurm warns at most {LONGEST_LEAD_S} s before the limit; give less")
    for option, name in (("--partition", asked.partition), ("--account", asked.account)):
        if name is not None and re.search(r"\s", name):
            raise UserError(f"{option} {name!r}: Slurm has no names with spaces; put commas between several")
    refuse_options(asked.extra)
    if asked.gres is not None and any(given == "--gres" for text in asked.extra for given, _ in _option_names(text)):
        raise UserError(f"--sbatch --gres: the profile's gres: {asked.gres} sets it; leave out one of them")
    for path in (job.run, job.folder):
        # In a line of #SBATCH nothing is quoted.
        if re.search(r"\s|%", str(path)):
            raise UserError(f"{path}: a path with spaces or % cannot stand in an sbatch file; use another folder")
    check_setup(job.setup, job.profile)


class _File(Template):
    """`%%{name}`: a dollar is the shell's."""

    delimiter = "%%"


def render(job: Job) -> str:
    """Render the sbatch file. Raises UserError as `check` does."""
    check(job)
    # Each only where it is not set already: a site knows better.
    exports = [f"export {name}=${{{name}:-{shlex.quote(value)}}}" for name, value in job.environment.items()]
    text = resources.files(__package__).joinpath(TEMPLATE).read_text(encoding="utf-8")
    return _File(text).substitute(
        title="\n# ".join(_title(job)),
        name=job.name,
        nodes=job.resources.nodes,
        resources="\n".join(f"#SBATCH {option}" for option in _options(job.resources)),
        time=job.resources.time,
        lead=job.resources.lead_s,
        dependency=dependency(job.resources.extra),
        run=job.run,
        latest=job.latest,
        asked=job.asked,
        standing=job.standing,
        run_quoted=shlex.quote(str(job.run)),
        folder=job.folder,
        restarts=job.restarts,
        umask=f"{job.umask:04o}",
        container=" ".join(map(shlex.quote, _container(job))),
        python=shlex.quote(job.software.python),
        command="\n".join(f"  {line}" for line in _lines(job)),
        doctor=" ".join(map(shlex.quote, job.doctor)),
        no_start="; does this cluster have pyxis?" if job.software.container else "",
        environment="\n".join(exports),
        setup=render_setup(job.setup),
    )


def _title(job: Job) -> Iterator[str]:
    yield f"megasharp {job.command[0]}: {job.name}"
    if job.profile is not None:
        yield f"Cluster profile: {job.profile}"


def _options(asked: Resources) -> list[str]:
    whole = "--exclusive" if asked.cpus_per_node is None else f"--cpus-per-task={asked.cpus_per_node}"
    options = [whole]
    given = {name for text in asked.extra for name, _ in _option_names(text)}
    if asked.cpus_per_node is None and given.isdisjoint(("--mem", "--mem-per-cpu", "--mem-per-gpu")):
        # Whole nodes come with the partition's default memory, unless all of it is asked for.
        options.append("--mem=0")
    if asked.gpus_per_node:
        asks = "gpus-per-node=" if asked.gres is None else f"gres={asked.gres}:"
        options.append(f"--{asks}{asked.gpus_per_node}")
    options += [f"--{name}={value}" for name in ("partition", "account") if (value := getattr(asked, name))]
    return [*options, *others(asked.extra)]


def _container(job: Job) -> list[str]:
    software = job.software
    if software.container is None:
        return []
    # The run, its logs and the run file are found under the names that they have outside.
    mounts = [f"{path}:{path}" for path in dict.fromkeys((str(job.folder), str(job.run.parent)))]
    return [
        f"--container-image={software.container}",
        f"--container-mounts={','.join([*mounts, *software.mounts])}",
        # Otherwise it works in a folder of the image's choice.
        f"--container-workdir={job.folder}",
        "--no-container-mount-home",
    ]


def _lines(job: Job) -> list[str]:
    """The command, an argument or an option with its value a line."""
    lines = [f'"$python" -P -m megasharp.cli {shlex.quote(job.command[0])}']
    for argument in job.command[1:]:
        after_option = lines[-1].startswith("--") and " " not in lines[-1]
        if after_option and not argument.startswith("--"):
            lines[-1] += f" {shlex.quote(argument)}"
        else:
            lines.append(shlex.quote(argument))
    return lines


def besides(options: Sequence[str], over: Sequence[str]) -> list[str]:
    """Return the options that `over` does not give anew."""
    anew = {name for text in over for name, _ in _option_names(text)}
    return [text for text in options if not anew & {name for name, _ in _option_names(text)}]


def refuse_options(extra: Sequence[str]) -> None:
    """Raise UserError for what is no option, and for an option of the file's own, naming what sets it."""
    for text in extra:
        options = [*_option_names(text)]
        for given, (name, letter, remedy) in product((given for given, _ in options), _SET):
            if _shortens(given, name) or (letter and given == f"-{letter}"):
                raise UserError(f"--sbatch {text!r}: the job's file sets --{name} itself; {remedy}")
        if len(options) > 1 and any(_is_dependency(name) for name, _ in options):
            raise UserError(f"--sbatch {text!r}: give --dependency in an --sbatch of its own")
    for value in _values(extra):
        if not value or "?" in value:
            raise UserError(
                f"--sbatch=--dependency={value}: jobs of one run also wait for each other, and all has to hold; "
                "give what to wait for, with commas between, such as --sbatch=--dependency=afterok:7,afterany:8"
            )


def dependency(extra: Sequence[str]) -> str:
    """Return the job's dependency: the user's, and the earlier jobs of the run."""
    parts = [part for value in _values(extra) for part in value.split(",")]
    return ",".join(dict.fromkeys([*parts, _SINGLETON]))


def waits(extra: Sequence[str]) -> bool:
    """Return True where the user gives a dependency."""
    return bool(_values(extra))


def others(extra: Sequence[str]) -> list[str]:
    """Return the options besides a dependency."""
    return [text for text in extra if not any(_is_dependency(name) for name, _ in _option_names(text))]


def _values(extra: Sequence[str]) -> list[str]:
    return [value for text in extra for name, value in _option_names(text) if _is_dependency(name)]


def _option_names(text: str) -> Iterator[tuple[str, str]]:
    """Name, with its dashes, and value of each option. Raises UserError for a text that begins with none."""
    try:
        words = shlex.split(text)
    except ValueError:
        words = []
    if not words or not words[0].startswith("-") or "\n" in text:
        raise UserError(f"--sbatch {text!r}: give an option of sbatch with its value, such as --qos=high")
    for word, following in zip(words, [*words[1:], "-"], strict=True):
        if not word.startswith("-"):
            continue
        name, has_value, value = word.partition("=") if word.startswith("--") else (word[:2], word[2:], word[2:])
        yield name, value if has_value or following.startswith("-") else following


def _is_dependency(name: str) -> bool:
    return name == "-d" or _shortens(name, DEPENDENCY)


def _shortens(given: str, name: str) -> bool:
    """sbatch takes the beginning of a long name for all of it; one that fits several names it refuses itself."""
    return len(given) > len("--") and f"--{name}".startswith(given)


class Refused(UserError):
    """sbatch refused a job."""


def submit(job: Job) -> tuple[str, Path]:
    """Give a job to sbatch; return its number and its log.

    Raises UserError where there is no sbatch, and in sbatch's own words when it refuses.
    """
    text = render(job)
    sbatch_program()
    logs = job.run / "logs"
    file = logs / f"{job.name}.sbatch"
    made = not file.exists()
    write_text(file, text)
    try:
        number = sbatch(file)
    except Refused:
        _take_back([file] * made, [logs, job.run])
        raise
    log = logs / f"slurm_{number}.log"
    if job.is_run:
        record(job.run, number, log)
    return number, log


def sbatch_program() -> str:
    """Return the path of sbatch. Raises UserError where there is none."""
    program = shutil.which("sbatch")
    if program is None:
        raise UserError("sbatch is not on this machine: submit from a login node, or print the file with --dry-run")
    return program


def sbatch(file: Path) -> str:
    """Submit a file; return the job's number. Raises UserError as `submit` does, Refused if sbatch refuses."""
    try:
        done = subprocess.run(
            [sbatch_program(), "--parsable", str(file)], capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"sbatch did not answer in {LIMIT_S} s; look with squeue before you submit again") from None
    if done.returncode:
        lines = (line.strip().removeprefix("sbatch: ").removeprefix("error: ") for line in done.stderr.splitlines())
        words = "; ".join(filter(None, lines))
        asked = re.search(r"^#SBATCH (--(?:gpus-per-node|gres)=\S+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
        hint = f"; the file asks for {asked[1]}: has this partition GPUs?" if asked and "gres" in words else ""
        raise Refused(f"sbatch refused {file.name} (--dry-run prints it): {words}{hint}")
    # On a federation "number;cluster" is printed.
    return done.stdout.strip().partition(";")[0]


def render_array(name: str, jobs: Mapping[int, Job], folder: Path, at_once: int | None) -> str:
    """Render the array's sbatch file; `jobs` by number are those that are to run, their files are in `folder`/jobs.

    Raises UserError as `render` does, and where two runs ask Slurm for different things: an array has one set of them.
    """
    first, *others = jobs.values()
    for job in others:
        asked, asked_first = _asked(job), _asked(first)
        if asked != asked_first:
            different = ", ".join(sorted(line.removeprefix("#SBATCH ") for line in set(asked) ^ set(asked_first)))
            raise UserError(
                f"{name}: runs {first.name} and {job.name} ask Slurm for different things ({different}); "
                "a Slurm array has one: make sweeps of their own of them"
            )
    numbers = ",".join(map(str, jobs)) + (f"%{at_once}" if at_once else "")
    # Runs of one array do not wait for each other, only for what the user says.
    waits = ",".join(part for part in dependency(first.resources.extra).split(",") if part != _SINGLETON)
    lines = [
        "#!/bin/bash",
        f"# megasharp sweep: {name}, a run a job. Rendered; each run's own file is jobs/N.sbatch.",
        f"#SBATCH --job-name={name}",
        f"#SBATCH --array={numbers}",
        *_asked(first),
        *([f"#SBATCH --dependency={waits}"] if waits else []),
        f"#SBATCH --output={folder}/logs/%A_%a.log",
        f"#SBATCH --chdir={first.folder}",
        # In this shell's place: Slurm's early signal is the file's to hear.
        f'exec bash {shlex.quote(str(folder / "jobs"))}/"$SLURM_ARRAY_TASK_ID".sbatch',
    ]
    return "\n".join(lines) + "\n"


def submit_array(name: str, jobs: Mapping[int, Job], folder: Path, at_once: int | None) -> str:
    """Write the files below `folder` and give the array to sbatch; return its number.

    Raises UserError where there is no sbatch, when it refuses, and while an array of this name is queued or running.
    """
    text = render_array(name, jobs, folder, at_once)
    sbatch_program()
    _refuse_twice(name)
    file = folder / "array.sbatch"
    texts = {folder / "jobs" / f"{number}.sbatch": render(job) for number, job in jobs.items()} | {file: text}
    made = [path for path in texts if not path.exists()]
    logs = [*(job.run / "logs" for job in jobs.values()), folder / "logs"]
    for place in logs:
        place.mkdir(parents=True, exist_ok=True)
    for path, its_text in texts.items():
        write_text(path, its_text)
    try:
        array = sbatch(file)
    except Refused:
        _take_back(made, [*logs, *(job.run for job in jobs.values()), folder / "jobs", folder])
        raise
    for number, job in jobs.items():
        record(job.run, f"{array}_{number}", folder / "logs" / f"{array}_{number}.log")
    return array


def _take_back(files: Sequence[Path], folders: Sequence[Path]) -> None:
    """Remove what a refused submission made: files, then folders as far as nothing else is in them."""
    for file in files:
        file.unlink(missing_ok=True)
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


def _asked(job: Job) -> list[str]:
    """The lines that ask Slurm for something, but for those that are a run's own."""
    lines = [line for line in render(job).split("\n") if line.startswith("#SBATCH ")]
    return [line for line in lines if not line.removeprefix("#SBATCH ").startswith(_OWN)]


def _refuse_twice(name: str) -> None:
    squeue = shutil.which("squeue")
    if squeue is None:
        return
    command = [squeue, "--noheader", f"--name={name}", f"--user={getpass.getuser()}", "--format=%A"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise UserError(f"squeue did not answer in {LIMIT_S} s; try again when Slurm does") from None
    numbers = sorted(set(done.stdout.split()))
    if numbers:
        raise UserError(
            f"{name}: jobs of it are queued or running ({', '.join(numbers[:3])}), and a run in two jobs would fail; "
            "wait for them, or scancel them: their runs go on where they stopped"
        )
