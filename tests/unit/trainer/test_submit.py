"""`megasharp submit`: what is refused before Slurm is asked, and that it works from any folder."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from cases import each_case

from megasharp.common.errors import UserError
from megasharp.config.core import dump_yaml
from megasharp.config.run_config import load_run
from megasharp.config.slurm import ClusterProfile, find_profile, load_profile
from megasharp.planner.records import Checkpoint, StageTime
from megasharp.trainer.resolve.recipes import build_recipes, resolved_config
from megasharp.trainer.resolve.resolved_run import check
from megasharp.trainer.submit import Asked, fitting_plan, lead_of, submit_run, with_given

REPOSITORY = Path(__file__).parents[3]
CASP = REPOSITORY / "examples" / "qwen2.5-32b-casp" / "run.yaml"
QUICKSTART = REPOSITORY / "examples" / "quickstart" / "run.yaml"
FLEET = REPOSITORY / "examples" / "fleet_on_cpu" / "run.yaml"
BASE = QUICKSTART.parent / "base"
# A program that finds nothing wrong stands in for an engines' Python on GPUs.
FOR_GPUS = "rollout.python=/bin/true"


def dry_run(file: Path, *overrides: str, **asked: object) -> str:
    """`asked`: options of the job, and fields of `Asked` besides."""
    said: list[str] = []
    own = {"runs": Path("runs"), **{name: value for name, value in asked.items() if name in Asked.__slots__}}
    options = ClusterProfile.model_validate({name: asked[name] for name in asked.keys() - own.keys()})
    overrides = (*overrides, FOR_GPUS) if file == CASP else overrides
    submit_run(Asked(file, overrides, options=options, **own), dry_run=True, say=said.append)  # type: ignore[arg-type]
    return "\n".join(said)


def test_the_example_is_rendered_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = dry_run(CASP, nodes=4)
    assert text.startswith("#!/bin/bash\n")
    assert f"#SBATCH --output={tmp_path}/runs/qwen2.5-32b-casp/logs/slurm_%j.log" in text
    assert f"  {CASP}\n" in text and "#SBATCH --nodes=4\n" in text and "#SBATCH --gpus-per-node=8\n" in text
    # 8,192 responses of 8,192 tokens to prompts of 1,024, with a quarter more.
    tokens, prompts = 8192 * 8192, 8192 * 1024
    store = re.search(r"export MEGASHARP_RAY_STORE_BYTES=\$\{MEGASHARP_RAY_STORE_BYTES:-(\d+)\}\n", text)
    assert store is not None and int(store[1]) == pytest.approx(1.25 * (42 * tokens + 4 * prompts), rel=0.01)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """What a checkpoint looks like from outside."""
    folder = tmp_path / "step_000300"
    (folder / "policy").mkdir(parents=True)
    return folder


def test_an_evaluation_is_a_job_of_one_node_with_a_name_of_its_own(checkpoint: Path) -> None:
    text = dry_run(CASP, suite="countdown_test", checkpoint=checkpoint)
    assert "--job-name=qwen2.5-32b-casp-eval" in text and "#SBATCH --nodes=1\n" in text
    assert f"  {checkpoint}\n  --suite countdown_test\n" in text and f"  --engines {CASP}\n" in text
    assert '"$run/logs/latest_eval"' in text


def test_an_evaluation_measures_what_the_run_measures_and_writes_nothing_that_the_run_reads() -> None:
    asked = {"suite": "countdown_test", "checkpoint": BASE}
    own = dry_run(FLEET, "seed=7", "eval.max_response_tokens=11", **asked)
    assert "  --max-tokens 11\n  --seed 7\n" in own
    assert f"  --out '{Path.cwd()}/runs/fleet_on_cpu/evals/by_hand/{{checkpoint}}'\n" in own
    stages = "data.stages=[{max_response_tokens: 20, until: 2}, {max_response_tokens: 24, until: 4}]"
    staged = dry_run(FLEET, stages, **asked)
    assert "  --max-tokens 24\n" in staged


def test_an_evaluation_keeps_its_samples_and_is_warned_late() -> None:
    text = dry_run(FLEET, suite="countdown_test", checkpoint=BASE)
    assert "#SBATCH --signal=B:USR1@60\n" in text
    assert 'say "time is nearly up: the evaluation is asked to end"' in text
    assert 'standing() { echo "$(find "$run/evals/by_hand" -name "*.parquet" 2>/dev/null | wc -l) tables' in text
    assert 'standing() { cat "$run/checkpoints/latest"' in dry_run(QUICKSTART)
    text = dry_run(FLEET, suite="countdown_test", checkpoint=BASE, lead=90)
    assert "#SBATCH --signal=B:USR1@90\n" in text
    assert "#SBATCH --signal=B:USR1@600\n" in dry_run(QUICKSTART)


@each_case(
    ("file", "overrides", "asked", "words"),
    [
        (
            FLEET,
            [],
            {"suite": "nosuchsuite"},
            "no suite or group of this name; suites: .*countdown_test",
        ),
        (FLEET, [], {"checkpoint": Path("/nowhere")}, "/nowhere: neither a run .*; give --checkpoint, or wait for"),
        (FLEET, [], {"checkpoint": None}, "fleet_on_cpu: neither a run with a checkpoint"),
        (QUICKSTART, [], {}, "rollout.engine=inprocess starts no engines, on which --eval samples; set rollout.engine"),
        (CASP, ["rollout.tp=16"], {}, "rollout.tp=16 is more than cluster.gpus_per_node=8, so .*; lower rollout.tp"),
        (FLEET, ["data.max_response_tokens=9999"], {}, "lower the lengths"),
    ],
)
def test_an_evaluation_that_could_not_start_is_refused(
    file: Path, overrides: list[str], asked: dict[str, object], words: str, tmp_path: Path
) -> None:
    given = {"suite": "countdown_test", "checkpoint": BASE, "runs": tmp_path, **asked}
    with pytest.raises(UserError, match=words):
        dry_run(file, *overrides, **given)


def test_a_checkpoint_that_is_not_seen_from_here_is_left_to_the_job(tmp_path: Path) -> None:
    """One that another job is to write, or that lies in the image."""
    later: dict[str, object] = {"suite": "countdown_test", "runs": tmp_path}
    assert "by_hand" in dry_run(FLEET, sbatch=["--dependency=afterok:7"], **later)
    inside = Path("/data/step_000300")
    assert "  /data/step_000300\n" in dry_run(FLEET, container="/i.sqsh", checkpoint=inside, **later)
    with pytest.raises(UserError, match="neither a run with a checkpoint"):
        dry_run(FLEET, container="/i.sqsh", **later)


@each_case(
    ("asked", "words"),
    [
        ({"checkpoint": BASE}, "--checkpoint .*base is for --eval; add --eval SUITE, or leave it out"),
        ({"mount": ["/data:/data"]}, "--mount /data:/data is for --container; add --container IMAGE, or leave it out"),
    ],
)
def test_options_that_mean_nothing_without_another_are_refused(asked: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        dry_run(QUICKSTART, **asked)


@each_case(
    ("file", "overrides", "asked", "words"),
    [
        (CASP, [], {"nodes": 2}, "cluster.nodes=4 x cluster.gpus_per_node=8 is more than the 2 node.s. of --nodes"),
        (CASP, [], {"nodes": 6}, "so 2 of the 6 nodes of --nodes would idle; set cluster.nodes=6, and policy.dp"),
        (QUICKSTART, [], {"nodes": 4}, "set cluster.nodes=4, cluster.backend=ray, and policy.dp"),
        (CASP, ["policy.dp=8"], {}, "cluster.nodes = 4 x cluster.gpus_per_node = 8 cannot hold"),
        (CASP, ["policy.offload=[]"], {}, "GB of 150 GB do not fit"),
        (CASP, ["policy.offload=[]"], {"gpu": "h100"}, "GB of 85 GB do not fit"),
        (QUICKSTART, [], {"gpu": "h300"}, "--gpu h300: give one of h200, h100, b200"),
        (
            CASP,
            [],
            {"lead": 60},
            "asked to end takes about .* s for its checkpoint.*asked 60 s before .*raise --lead",
        ),
        (CASP, [], {"time": "1d"}, "--time 1d"),
        (CASP, [], {"suite": "countdown_test", "nodes": 2}, "an evaluation's engines are on one node"),
        (QUICKSTART, ["cluster.nodes=2"], {}, "cluster.nodes=2 needs cluster.backend=ray"),
    ],
)
def test_what_cannot_fit_is_refused(file: Path, overrides: list[str], asked: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        dry_run(file, *overrides, **asked)


def test_without_slurm_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="sbatch is not on this machine"):
        submit_run(Asked(QUICKSTART, [], tmp_path, ClusterProfile(time="60")), dry_run=False, say=print)


def test_sbatchs_own_words_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for sbatch, which refuses in two lines; what was made for it goes, and nothing else."""
    sbatch = tmp_path / "sbatch"
    lines = "sbatch: error: invalid partition specified: gpu\nsbatch: error: Batch job submission failed: no such one"
    sbatch.write_text(f"#!/bin/sh\necho '{lines}' >&2; exit 1\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    runs = tmp_path / "runs"
    said = r"^sbatch refused quickstart.sbatch \(--dry-run prints it\): invalid partition specified: gpu; Batch job "
    said += "submission failed: no such one$"
    for there in ([], [runs / "quickstart" / "logs" / "slurm_1.log"]):
        for file in there:
            file.parent.mkdir(parents=True)
            file.write_text("of an earlier job")
        with pytest.raises(UserError, match=said):
            submit_run(Asked(QUICKSTART, [], runs, ClusterProfile(time="60")), dry_run=False, say=print)
        assert [path for path in runs.rglob("*") if path.is_file()] == there
        assert there or [*runs.glob("*")] == []


@pytest.mark.parametrize("name", ["enroot-8xh200", "modules-venv", "roce-gres"])
def test_bash_reads_the_job_of_each_example_profile_which_says_where_it_is_from(name: str) -> None:
    profile = REPOSITORY / "slurm" / "profiles" / f"{name}.yaml"
    options = load_profile(profile)
    text = dry_run(CASP, profile=profile, runs=Path("runs"), **dict(options))
    assert f"# Cluster profile: {profile}\n" in text
    assert "#SBATCH --gpus-per-node=8\n" in text or "#SBATCH --gres=gpu:h100:8\n" in text
    for variable, value in options.environment.items():
        assert f"export {variable}=${{{variable}:-{shlex.quote(value)}}}\n" in text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


@each_case(
    ("line", "fails"),
    [
        ("false && true", True),
        ("false   # a comment", True),
        ("cd /nowhere 2>/dev/null; true", True),
        ("export READ=$NOT_SET; false || true", False),
        ("sleep 0 &", False),
        ("source ./sourced", False),
    ],
)
def test_a_command_of_a_profiles_setup_that_fails_ends_the_job(line: str, fails: bool, tmp_path: Path) -> None:
    """Bash runs what is rendered between the job's beginning and its first step."""
    (tmp_path / "sourced").write_text("false\ntrue\n")
    text = dry_run(QUICKSTART, setup=[line], runs=tmp_path, interface="bond0")
    assert "export MEGASHARP_INTERFACE=${MEGASHARP_INTERFACE:-bond0}\n" in text
    part = text[text.index("set -u\n") : text.index("export MEGASHARP_NODES")].replace("#SBATCH", "#")
    asked = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a", "PATH": os.environ["PATH"]}
    file = tmp_path / "job"
    file.write_text(f"run={tmp_path}\nmost_restarts=1\n{part}")
    done = subprocess.run(["bash", file], env=asked, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == fails and done.stderr == ""
    assert (f"gave up: a line of setup failed: {line};" in done.stdout) == fails


@each_case("line", ["module load 'x", "if true; then", "module load x \\"])
def test_a_line_of_setup_that_bash_does_not_read_is_refused(line: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^/c.yaml: setup: .* is no whole line of bash \(.+\); write each command on"):
        dry_run(QUICKSTART, setup=[line], runs=tmp_path, profile=Path("/c.yaml"))


def test_what_is_given_counts_before_the_profile(tmp_path: Path) -> None:
    profile = ClusterProfile(partition="a", time="60", sbatch=["--qos=low", "--constraint=h200"], mount=["/a:/a"])
    found = with_given(profile, {"time": "90", "sbatch": ["--qos=high"], "mount": ["/b:/b"]})
    assert found == profile.model_copy(
        update={"time": "90", "sbatch": ["--constraint=h200", "--qos=high"], "mount": ["/a:/a", "/b:/b"]}
    )
    with pytest.raises(UserError, match=r"gres: gpu sets it; leave out one"):
        dry_run(CASP, gres="gpu", sbatch=["--gres=gpu:8"], runs=tmp_path)


def test_a_profile_is_found_by_its_name_and_its_mistakes_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    file = tmp_path / "megasharp" / "profiles" / "site.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("partion: gpu\n")
    assert find_profile("site") == file and find_profile("site.yaml", file.parent) == file
    with pytest.raises(UserError, match=r"site.yaml: partion: unknown key, nearest is partition; .* \(line 1"):
        load_profile(file)
    file.write_text("environment: {NCCL_IB_GID_INDEX: 3}\n")
    with pytest.raises(UserError, match=r'environment: NCCL_IB_GID_INDEX: .* write it in quotes, as "3" \(line 1'):
        load_profile(file)
    file.write_text("environment: {LD_LIBRARY_PATH: /opt/lib}\n")
    with pytest.raises(UserError, match=r"setup instead, as export LD_LIBRARY_PATH=/opt/lib:\$LD_LIBRARY_PATH"):
        load_profile(file)
    with pytest.raises(UserError, match=r"--profile sit: neither this file nor .*sit.yaml exists; nearest is site"):
        find_profile("sit")
    with pytest.raises(UserError, match=r"profiles there: site$"):
        find_profile("other/cluster")


def test_the_lead_holds_what_is_left_of_a_step_and_a_save() -> None:
    """A signal in the update waits for the step's end; one in the rollout does not."""
    plan = fitting_plan(load_run(CASP), str(CASP), None, None)
    times = (StageTime("rollout", 999.0, ""), StageTime("update", 450.0, ""), StageTime("sync", 50.0, ""))
    plan = replace(plan, times=times, checkpoint=Checkpoint(1, 100.0))
    predicted, high = plan.ending_seconds
    lead = lead_of(plan, "run.yaml", None)
    assert predicted == 600 < high and 1.2 * high <= lead < 1.2 * high + 60 and lead_of(plan, "run.yaml", 600) == 600
    words = r"takes about 600 s, as planned \(500 s for what is left of a step, 100 s for its checkpoint\)"
    with pytest.raises(
        UserError, match=f"run.yaml: a run that is asked to end {words}.* raise --lead .without it: {lead}"
    ):
        lead_of(plan, "run.yaml", 599)
    assert lead_of(replace(plan, times=times[:1]), "run.yaml", None) == 600
    seconds = [fitting_plan(load_run(CASP), str(CASP), None, speed).checkpoint.seconds for speed in (1.0, 10.0)]
    assert seconds[0] == pytest.approx(10 * seconds[1])


@each_case(
    "overrides",
    [
        ["data.path=/no/such/train.jsonl"],
        ["reward.function=nowhere:reward"],
        ["eval.suites=[nosuchsuite]"],
        ["model.path=/no/such/model"],
        ["rollout.engine=sglang", "rollout.python=/no/such/python"],
        ["rollout.engine=sglang", f"rollout.python={sys.executable}"],
        ["rollout.top_k=1"],
        ["eval.with_memory=true"],
        ["reward.workers=0", "data.task=math"],
    ],
)
def test_what_train_refuses_is_refused_before_it_waits_in_a_queue(overrides: list[str], tmp_path: Path) -> None:
    """In the words of `train --dry-run`."""
    with pytest.raises(UserError) as refused:
        check(load_run(QUICKSTART, overrides), str(QUICKSTART))
    with pytest.raises(UserError) as early:
        dry_run(QUICKSTART, *overrides, runs=tmp_path)
    assert str(early.value) == str(refused.value)


def test_what_only_the_nodes_have_is_left_to_them(tmp_path: Path) -> None:
    """Files of an image, those that another job is to write, and GPUs."""
    absent = ("data.path=/no/such/train.jsonl", "model.path=/no/such/qwen3-1.7b", "eval.suites=[]")
    sglang = ("rollout.engine=sglang", "rollout.python=/no/such/python")
    assert dry_run(QUICKSTART, *absent, *sglang, runs=tmp_path, container="/image.sqsh")
    assert dry_run(QUICKSTART, *absent, runs=tmp_path, sbatch=["--dependency=afterok:7"])
    assert dry_run(QUICKSTART, "policy.device=cuda", runs=tmp_path)


def test_a_job_goes_on_with_the_nodes_and_gpus_that_its_run_began_with(tmp_path: Path) -> None:
    began = load_run(CASP)
    root = tmp_path / began.name
    (root / "logs" / "attempt_1").mkdir(parents=True)
    (root / "config.yaml").write_text(dump_yaml(resolved_config(began, build_recipes(began, str(CASP)))))
    own = tmp_path / "own.yaml"
    own.write_text(CASP.read_text().replace("placement: colocated, nodes: 4", "placement: colocated"))
    text = dry_run(own, FOR_GPUS, runs=tmp_path)
    assert "#SBATCH --nodes=4\n" in text and "#SBATCH --gpus-per-node=8\n" in text


def test_what_nobody_said_is_noted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    dry_run(CASP, runs=tmp_path, python="/no/such/python")
    said = capsys.readouterr().err
    assert "planned for h200; give --gpu" in said and "/no/such/python is not on this machine; it must be on" in said
    job = dry_run(CASP, runs=tmp_path, gpu="h200")
    assert "planned" not in capsys.readouterr().err and "--gpu h200" in job
    on_cpus = dry_run(QUICKSTART, "policy.device=cpu", runs=tmp_path, gpu="h200", doctor=True)
    assert " doctor " in on_cpus and "--gpu" not in on_cpus


def test_a_run_that_could_not_go_on_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "quickstart"
    config = load_run(QUICKSTART)
    (root / "logs" / "attempt_1").mkdir(parents=True)
    (root / "config.yaml").write_text(dump_yaml(resolved_config(config, build_recipes(config, str(QUICKSTART)))))
    with pytest.raises(UserError, match="seed was 1 and is now 2, which is another run; choose another name= for it"):
        dry_run(QUICKSTART, "seed=2", runs=tmp_path)
    assert dry_run(QUICKSTART, runs=tmp_path)
    (root / "metrics.jsonl").write_text('{"step": 7}\n')
    with pytest.raises(UserError, match=r"rows up to step 7; but .*checkpoints is not there; bring the checkpoints"):
        dry_run(QUICKSTART, runs=tmp_path)
