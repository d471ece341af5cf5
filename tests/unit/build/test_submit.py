"""`megasharp submit`: what is refused before Slurm is asked, and that it works from any folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from megasharp.build.submit import Asked, submit_run
from megasharp.errors import UserError

REPOSITORY = Path(__file__).parents[3]
CASP = REPOSITORY / "examples" / "qwen2.5-32b-casp" / "run.yaml"
QUICKSTART = REPOSITORY / "examples" / "quickstart" / "run.yaml"


def dry_run(file: Path, *overrides: str, **asked: object) -> tuple[str, list[str]]:
    said: list[str] = []
    notes: list[str] = []
    given = {"runs": Path("runs"), "time": "24:00:00", **asked}
    submit_run(Asked(file, overrides, **given), dry_run=True, say=said.append, note=notes.append)  # type: ignore[arg-type]
    return "\n".join(said), notes


def test_the_example_is_rendered_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text, notes = dry_run(CASP, nodes=4)
    assert text.startswith("#!/bin/bash\n")
    assert f"#SBATCH --output={tmp_path}/runs/qwen2.5-32b-casp/logs/slurm_%j.log" in text
    assert f"  {CASP}\n" in text and "#SBATCH --nodes=4\n" in text and "#SBATCH --gpus-per-node=8\n" in text
    assert any("policy.device: cuda is not built yet" in note for note in notes)
    assert list(tmp_path.iterdir()) == []


def test_an_evaluation_is_a_job_of_one_node_with_a_name_of_its_own() -> None:
    text, _ = dry_run(CASP, suite="countdown_test", checkpoint=Path("/c/step_000300"))
    assert "--job-name=qwen2.5-32b-casp-eval" in text and "#SBATCH --nodes=1\n" in text
    assert "  /c/step_000300\n  --suite countdown_test\n" in text and f"  --engines {CASP}\n" in text
    assert '"$run/logs/latest_eval"' in text


def test_an_evaluation_measures_what_the_run_measures_and_writes_nothing_that_the_run_reads() -> None:
    asked = {"suite": "countdown_test", "checkpoint": Path("/c/step_000300")}
    own, _ = dry_run(QUICKSTART, "seed=7", "eval.max_response_tokens=11", **asked)
    assert "  --max-tokens 11\n  --seed 7\n" in own
    assert f"  --out {Path.cwd()}/runs/quickstart/evals/by_hand/step_000300\n" in own
    stages = "data.stages=[{max_response_tokens: 32, until: 2}, {max_response_tokens: 48, until: 4}]"
    staged, _ = dry_run(QUICKSTART, stages, **asked)
    assert "  --max-tokens 48\n" in staged


@pytest.mark.parametrize(
    ("file", "overrides", "asked", "words"),
    [
        (CASP, [], {"nodes": 2}, "cluster.nodes=4 x cluster.gpus_per_node=8 is more than the 2 node.s. of --nodes"),
        (CASP, [], {"nodes": 6}, "so 2 of the 6 nodes of --nodes would idle"),
        (CASP, ["policy.dp=8"], {}, "cluster.nodes = 4 x cluster.gpus_per_node = 8 cannot hold"),
        (CASP, ["policy.offload=[]"], {}, "GB of 141 GB do not fit"),
        (CASP, [], {"lead_s": 20}, "a checkpoint takes .* s to write, as planned, .*; raise --lead"),
        (CASP, [], {"time": "1d"}, "--time 1d"),
        (CASP, [], {"suite": "countdown_test", "nodes": 2}, "an evaluation's engines are on one node"),
        (QUICKSTART, ["cluster.nodes=2"], {}, "cluster.nodes=2 needs cluster.backend=ray"),
    ],
)
def test_what_cannot_fit_is_refused(file: Path, overrides: list[str], asked: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        dry_run(file, *overrides, **asked)


def test_what_could_not_start_is_not_submitted() -> None:
    with pytest.raises(UserError, match="is not built yet, so the job would end at its start"):
        submit_run(Asked(CASP, [], Path("runs"), "24:00:00"), dry_run=False, say=print, note=print)


def test_without_slurm_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="sbatch is not on this machine"):
        submit_run(Asked(QUICKSTART, [], tmp_path, "60"), dry_run=False, say=print, note=print)


def test_sbatchs_own_words_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for sbatch, which refuses."""
    sbatch = tmp_path / "sbatch"
    sbatch.write_text("#!/bin/sh\necho 'sbatch: error: invalid partition specified: gpu' >&2; exit 1\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(UserError, match=r"sbatch refused .*quickstart.sbatch: invalid partition specified: gpu"):
        submit_run(Asked(QUICKSTART, [], tmp_path, "60"), dry_run=False, say=print, note=print)
