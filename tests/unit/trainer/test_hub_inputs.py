"""Models of the hub's cache around jobs: what doctor finds of them, what a container mounts, where a sweep stays."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from megasharp.checkpoint.manifest import Inputs
from megasharp.checkpoint.store import CheckpointStore, RunState
from megasharp.cli.doctor import examine_node
from megasharp.cluster.slurm.doctor import examine
from megasharp.cluster.slurm.doctor.findings import Finding, Patient
from megasharp.common.errors import UserError
from megasharp.common.files import write_text
from megasharp.config.core import dump_tree, dump_yaml
from megasharp.config.run_config import load_run
from megasharp.config.slurm import ClusterProfile
from megasharp.trainer.resolve.resolved_run import check
from megasharp.trainer.submit import Asked, submit_run
from megasharp.trainer.sweep import Sweep
from tests.unit.saving import save_at_once

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart"
MODEL, COMMIT, MOVED = "model.path=owner/tiny", "1" * 40, "2" * 40


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The quickstart's model as the hub's cache has it at COMMIT."""
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    repository = tmp_path / "hf" / "hub" / "models--owner--tiny"
    shutil.copytree(QUICKSTART / "base", repository / "snapshots" / COMMIT)
    write_text(repository / "refs" / "main", COMMIT)
    return repository / "snapshots" / COMMIT


def test_doctor_says_what_the_cache_has_of_a_model(
    cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Patient] = []
    monkeypatch.setattr(examine, "examine", lambda patient: asked.append(patient) or ())

    def found(*overrides: str) -> Finding:
        examine_node(QUICKSTART / "run.yaml", [*overrides], tmp_path / "runs", print)
        (finding,) = asked[-1].inputs
        return finding

    at = f"model.path owner/tiny at commit {COMMIT}"
    assert found(MODEL) == Finding("ok", "model", f"{at}: in the hub's cache, {cached}")
    assert "owner/tiny" not in asked[-1].folders and asked[-1].checkpoint > 0
    (cached / "model.safetensors").unlink()
    missing = found(MODEL)
    assert missing.level == "FAIL" and missing.text.startswith(f"{at}: the hub's cache has a part of it (")
    assert "the hub is off (HF_HUB_OFFLINE)" in missing.text
    assert found("model.path=owner/none").level == "FAIL" and asked[-1].run is None
    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    assert found(MODEL).level == "note" and found(MODEL).text.endswith("(submit does that before a job)")


def test_a_container_sees_the_cache_only_where_the_run_reads_of_the_hub(cached: Path, tmp_path: Path) -> None:
    def file(*overrides: str) -> str:
        said: list[str] = []
        asked = Asked(
            QUICKSTART / "run.yaml", overrides, tmp_path, ClusterProfile(container="/i.sqsh", mount=["/data:/data"])
        )
        submit_run(asked, dry_run=True, say=said.append)
        return "\n".join(said)

    home = tmp_path / "hf"
    text = file(MODEL)
    assert f",/data:/data,{home}:{home}' --container-workdir" in text or f",/data:/data,{home}:{home} --" in text
    for variable in ("HF_HUB_OFFLINE:-1", f"HF_HOME:-{home}", f"HF_HUB_CACHE:-{home}/hub"):
        assert f"export {variable.partition(':')[0]}=${{{variable}}}\n" in text
    assert "HF_" not in file()
    (tmp_path / "inside.yaml").write_text("task: countdown\npath: /only/in/the/image.jsonl\n")
    assert "HF_" not in file(f"eval.suites=[{tmp_path}/inside.yaml]")


def test_a_profile_s_home_is_where_submit_looks_and_what_the_job_gets(
    cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "empty"))
    home = tmp_path / "hf"
    grid = tmp_path / "grid.yaml"
    profile = tmp_path / "profile.yaml"
    grid.write_text(
        f"name: study\nrun: {QUICKSTART}/run.yaml\nset: {{model: {{path: owner/tiny}}, eval.suites: []}}\n"
        f"slurm: {{profile: {profile}}}\n"
    )

    def files(**options: object) -> Iterator[str]:
        profile.write_text(dump_tree(options))
        said: list[str] = []
        asked = Asked(QUICKSTART / "run.yaml", [MODEL], tmp_path, ClusterProfile.model_validate(options))
        submit_run(asked, dry_run=True, say=said.append)
        yield from said
        Sweep(grid, [], tmp_path / "runs", said.append).submit(dry_run=True)
        assert "--array=" in said[-1]

    for text in files(environment={"HF_HOME": str(home)}):
        assert f"{{HF_HOME:-{home}}}\n" in text and f"{{HF_HUB_CACHE:-{home}/hub}}\n" in text
    # The image's name of the folder, which a mount brings there.
    for text in files(environment={"HF_HOME": "/in"}, mount=[f"{home}:/in"], container="/i.sqsh"):
        assert "{HF_HOME:-/in}\n" in text and f"{{HF_HUB_CACHE:-{home}/hub}}\n" in text and f",{home}:{home}" in text
    with pytest.raises(UserError, match="owner/tiny is no folder here, the hub's cache"):
        [*files()]
    assert "HF_HOME" not in os.environ


def test_a_sweep_s_begun_run_stays_at_its_commit(cached: Path, tmp_path: Path) -> None:
    grid = tmp_path / "grid.yaml"
    grid.write_text(f"name: study\nrun: {QUICKSTART}/run.yaml\nset: {{model: {{path: owner/tiny}}, eval.suites: []}}\n")
    run = tmp_path / "runs" / "study" / "study_s1"
    overrides = ["name=study_s1", "seed=1", MODEL, "eval.suites=[]"]
    config = check(load_run(QUICKSTART / "run.yaml", overrides), "run.yaml").config
    write_text(run / "config.yaml", dump_yaml(config))
    state = RunState(reference="base", step=1, inputs=Inputs(commits={"model.path": COMMIT}))
    save_at_once(CheckpointStore(run / "checkpoints", 1, None), state, lambda folder: None)
    # main has moved to what this cache does not have whole.
    write_text(cached.parents[1] / "refs" / "main", MOVED)
    shutil.copytree(cached, cached.parent / MOVED)
    (cached.parent / MOVED / "tokenizer.json").unlink()
    said: list[str] = []
    Sweep(grid, [], tmp_path / "runs", said.append).run(1, dry_run=True)
    assert said == ["study_s1: to do"]
    with pytest.raises(UserError, match=r"study_s2: .*tokenizer"):
        Sweep(grid, ["seeds=[1,2]"], tmp_path / "runs", said.append).run(1, dry_run=True)


def test_a_run_of_the_hubs_rows_does_not_go_on_with_a_folder_that_has_come() -> None:
    run = load_run(QUICKSTART / "run.yaml", ["eval.suites=[]"])
    with pytest.raises(
        UserError, match=r"run.yaml: data.path: .* is on this machine, and the run began with the hub's"
    ):
        check(run, "run.yaml", begun=True, commits={"data.path": COMMIT})
