"""A Slurm job's file: what is rendered, what is refused; bash reads it."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from cases import each_case
from example_jobs import EXAMPLES, SLURM

from megasharp.cluster.slurm.job import Job, Resources, Software, render, seconds
from megasharp.common.errors import UserError

REPOSITORY = Path(__file__).parents[4]
ASKED = Resources(nodes=4, time="24:00:00", gpus_per_node=8, extra=("--qos=high",))
JOB = Job(
    name="mine",
    command=("train", "/home/me/my run.yaml", "steps=5", "--runs", "/home/me/runs", "--resume"),
    run=Path("/home/me/runs/mine"),
    folder=Path("/home/me"),
    resources=ASKED,
    software=Software("/opt/venv/bin/python"),
    environment={"HF_HUB_OFFLINE": "1"},
)


@each_case(
    ("text", "expected"),
    [
        ("90", 90 * 60),
        ("2:30", 150),
        ("24:00:00", 86400),
        ("1-12", 36 * 3600),
        ("2-00:30", 2 * 86400 + 1800),
        ("1-02:03:04", 86400 + 2 * 3600 + 184),
    ],
)
def test_time_limits_are_read_as_sbatch_reads_them(text: str, expected: int) -> None:
    assert seconds(text) == expected


@each_case("text", ["", "1h", "1:2:3:4", "1-", "1-2:3:4:5", "::", "-5"])
def test_other_times_are_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"--time .*: give HH:MM:SS"):
        seconds(text)


def options(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


def test_every_option_stands_in_the_file() -> None:
    assert options(render(JOB)) == [
        "--job-name=mine",
        "--nodes=4",
        "--ntasks-per-node=1",
        "--exclusive",
        "--mem=0",
        "--gpus-per-node=8",
        "--qos=high",
        "--time=24:00:00",
        "--signal=B:USR1@600",
        "--requeue",
        "--dependency=singleton",
        "--open-mode=append",
        "--output=/home/me/runs/mine/logs/slurm_%j.log",
        "--chdir=/home/me",
    ]


def test_cpus_and_partition_take_the_place_of_whole_nodes() -> None:
    found = options(render(replace(JOB, resources=Resources(1, "60", cpus_per_node=3, partition="p", account="a"))))
    assert found[3:6] == ["--cpus-per-task=3", "--partition=p", "--account=a"]
    assert "--exclusive" not in found


@each_case(
    ("extra", "words"),
    [
        ("--signal=USR2@60", "--signal itself; give --lead"),
        ("--output=/elsewhere", "--output itself; give --runs"),
        ("--time 10", "--time itself; give --time"),
        ("-t10", "--time itself"),
        ("--tim=10", "--time itself"),
        ("--no-requeue", "--no-requeue itself; give --restarts 0"),
        ("--requeue", "--requeue itself; give --restarts"),
        ("--open-mode=truncate", "--open-mode itself; leave it out"),
        ("-D /elsewhere", "--chdir itself; submit from"),
        ("--gpus=4", "--gpus-per-node itself; give the run file's cluster.gpus_per_node"),
        ("--qos=high --nodes=2", "--nodes itself; give --nodes"),
    ],
)
def test_options_of_the_files_own_are_refused_because_sbatch_would_drop_one_of_both(extra: str, words: str) -> None:
    with pytest.raises(UserError, match=rf"--sbatch '{extra}': the job's file sets {words}"):
        render(replace(JOB, resources=replace(ASKED, extra=(extra,))))


@pytest.mark.parametrize("asked", ["--mem=200G", "--mem 200G", "--mem-per-cpu=4G"])
def test_whole_nodes_come_with_all_their_memory_unless_the_user_asks_for_less(asked: str) -> None:
    assert "--mem=0" in options(render(replace(JOB, resources=replace(ASKED, extra=["--mem-bind=local"]))))
    written = options(render(replace(JOB, resources=replace(ASKED, extra=[asked]))))
    assert asked in written and "--mem=0" not in written


def test_every_option_in_the_file_is_known_to_be_its_own() -> None:
    """But for the dependency, which a user may add to."""
    some_cpus = replace(ASKED, cpus_per_node=3, partition="p", account="a", extra=())
    written = {*options(render(JOB)), *options(render(replace(JOB, resources=some_cpus)))}
    for option in written - {"--qos=high", "--dependency=singleton", "--mem=0"}:
        with pytest.raises(UserError, match="itself"):
            render(replace(JOB, resources=replace(ASKED, extra=(option,))))


@each_case(
    ("extra", "written"),
    [
        (["--dependency=afterok:2"], "afterok:2,singleton"),
        (["-d afterok:2:3", "--dependency afterany:4"], "afterok:2:3,afterany:4,singleton"),
        (["--depend=singleton,afterok:2"], "singleton,afterok:2"),
    ],
)
def test_what_a_user_waits_for_stands_beside_the_runs_own(extra: list[str], written: str) -> None:
    job = replace(JOB, resources=replace(ASKED, extra=(*extra, "--qos=high", "--begin=now+1hour", "--time-min=60")))
    found = options(render(job))
    assert [option for option in found if "depend" in option or "-d" in option.split()] == [f"--dependency={written}"]
    assert {"--qos=high", "--begin=now+1hour", "--time-min=60"} <= {*found}


@each_case(
    ("extra", "words"),
    [
        ("--dependency=afterok:2?afterok:3", "with commas between"),
        ("--dependency", "with commas between"),
        ("--dependency=afterok:2 --qos=high", "in an --sbatch of its own"),
        ("--comment='a", "give an option of sbatch"),
    ],
)
def test_what_cannot_stand_beside_it_is_refused(extra: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        render(replace(JOB, resources=replace(ASKED, extra=(extra,))))


def shell(text: str, after: str) -> str:
    """What bash says after it has read the file's settings."""
    settings = text.partition("\nset -u\n")[0]
    done = subprocess.run(["bash", "-c", f"{settings}\n{after}"], capture_output=True, text=True, check=True)
    return done.stdout


def test_bash_reads_the_command_as_it_was_meant() -> None:
    assert shell(render(JOB), 'printf "%s\\n" "${command[@]}"').splitlines() == [
        *("/opt/venv/bin/python", "-P", "-m", "megasharp.cli", "train", "/home/me/my run.yaml", "steps=5"),
        *("--runs", "/home/me/runs", "--resume"),
    ]


def test_a_container_sees_the_folders_under_their_own_names() -> None:
    text = render(replace(JOB, software=Software("python3", "/images/m.sqsh", ("/data:/data",))))
    assert shell(text, 'printf "%s\\n" "${container[@]}"').splitlines() == [
        "--container-image=/images/m.sqsh",
        "--container-mounts=/home/me:/home/me,/home/me/runs:/home/me/runs,/data:/data",
        "--container-workdir=/home/me",
        "--no-container-mount-home",
    ]
    assert shell(render(JOB), 'echo "${#container[@]}"') == "0\n"


def test_bash_takes_the_whole_file() -> None:
    done = subprocess.run(["bash", "-n"], check=True, input=render(JOB), text=True, capture_output=True)
    assert done.stderr == ""


# The doctor's srun is warned as Slurm does it, the run's ends as a node that finds the file does.
_SRUN = """#!/bin/bash
case "$*" in
  # The job's shell, which leads the session.
  *doctor*) kill -USR1 $(cut -d' ' -f6 /proc/$$/stat); sleep 0.5 ;;
  *) code=1; [[ -e $RUN/logs/slurm_7/restart_0/time_is_up ]] && code=75; exit $code ;;
esac
"""


def test_a_warning_while_the_nodes_are_looked_at_is_heard(tmp_path: Path) -> None:
    run, tools = tmp_path / "mine", tmp_path / "tools"
    tools.mkdir()
    for name, text in (("srun", _SRUN), ("scontrol", '#!/bin/bash\necho "$@"\n')):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a", "SLURM_JOB_NUM_NODES": "1"}
    environment = {"PATH": f"{tools}:{os.environ['PATH']}", "RUN": str(run), **slurm}
    done = subprocess.run(
        ["bash", "-c", render(replace(JOB, run=run, doctor=("--gpus", "1")))],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        start_new_session=True,
    )
    assert done.returncode == 75, done
    assert "time is nearly up" in done.stdout and "requeue 7" in done.stdout


# Warns the job's shell as Slurm does, at the first thing that it starts.
_MKDIR = """#!/bin/bash
[[ -e $RUN.warned ]] || { touch "$RUN.warned"; kill -USR1 $PPID; }
exec /bin/mkdir "$@"
"""


def test_a_warning_is_heard_from_the_first_line_on(tmp_path: Path) -> None:
    run, tools = tmp_path / "mine", tmp_path / "tools"
    tools.mkdir()
    for name, text in (("srun", _SRUN), ("scontrol", '#!/bin/bash\necho "$@"\n'), ("mkdir", _MKDIR)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a", "SLURM_JOB_NUM_NODES": "1"}
    done = subprocess.run(
        ["bash", "-c", render(replace(JOB, run=run))],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": f"{tools}:{os.environ['PATH']}", "RUN": str(run), **slurm},
    )
    assert done.returncode == 75 and "time is nearly up" in done.stdout, done


def test_nothing_is_left_of_the_template() -> None:
    assert "%%" not in render(JOB)


@each_case(
    ("change", "words"),
    [
        ({"resources": replace(ASKED, time="00:10:30")}, "600 s .--lead.*give more time or a smaller --lead"),
        ({"resources": replace(ASKED, time="2-00", lead_s=70000)}, "--lead 70000: Slurm warns at most 65535 s"),
        ({"resources": replace(ASKED, partition="a b")}, "--partition 'a b': Slurm has no names with spaces"),
        ({"resources": replace(ASKED, account="a b")}, "--account 'a b': Slurm has no names with spaces"),
        ({"resources": replace(ASKED, extra=("qos=high",))}, "--sbatch 'qos=high': give an option"),
        ({"resources": replace(ASKED, extra=("--a\nrm",))}, "give an option of sbatch"),
        ({"run": Path("/home/me too/runs/mine")}, "/home/me too/runs/mine: a path with spaces"),
    ],
)
def test_what_cannot_be_a_job_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        render(replace(JOB, **change))  # type: ignore[arg-type]


def test_no_site_and_no_broad_kill_is_in_the_file() -> None:
    text = render(JOB)
    assert not any(word in text for word in ("pkill", "killall", "kill -9", "eth0", "mlx5", "NCCL_IB_SL"))


@each_case("file", EXAMPLES)
def test_the_files_in_slurm_are_what_is_rendered(file: str) -> None:
    written = (SLURM / file).read_text(encoding="utf-8")
    assert written == render(EXAMPLES[file]), "run tests/unit/cluster/slurm/example_jobs.py"
