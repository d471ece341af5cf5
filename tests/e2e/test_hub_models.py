"""Models of a hub, by the real library: fetched once, kept at their commit, read from the cache without a network."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from quickstart import REPOSITORY
from waiting import HANG_S

from tests.unit.tasks.data.sets.small_hub import COMMIT, small_hub

RUN = """
name: mine
steps: 1
model: {path: owner/tiny}
data: {task: countdown, path: dev.jsonl, prompts_per_step: 2, responses_per_prompt: 2}
checkpoint: {asynchronous: false}
"""
MOVED = "2" * 40


class Machine:
    """A folder with a run file, a cache, and the commands given there."""

    def __init__(self, folder: Path, address: str) -> None:
        self.folder = folder
        (folder / "run.yaml").write_text(RUN)
        shutil.copy(REPOSITORY / "examples/quickstart/data/dev.jsonl", folder)
        self.variables = {"HF_HOME": str(folder / "cache"), "HF_ENDPOINT": address, "HF_HUB_DISABLE_XET": "1"}

    def __call__(self, *arguments: str, code: int = 0, **variables: str) -> str:
        environment = {**os.environ, "HF_HUB_OFFLINE": "", **self.variables, **variables}
        done = subprocess.run(
            [sys.executable, "-m", "megasharp.cli", *arguments],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=HANG_S,
        )
        assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """Repositories of a hub: the quickstart's model with files of other forms, and one without safetensors."""
    folder = tmp_path / "hub"
    shutil.copytree(REPOSITORY / "examples/quickstart/base", folder / "owner" / "tiny")
    (folder / "owner/tiny/pytorch_model.bin").write_bytes(b"0" * 1000)
    (folder / "owner/bins").mkdir()
    (folder / "owner/bins/pytorch_model.bin").write_bytes(b"0")
    (folder / "owner/experts").mkdir()
    config = '{"architectures": ["DeepseekV3ForCausalLM"], "n_routed_experts": 256}'
    (folder / "owner/experts/config.json").write_text(config)
    (folder / "owner/experts/model.safetensors").write_bytes(b"0")
    return folder


@pytest.mark.long("runs")
def test_a_run_fetches_its_model_once_and_stays_at_its_commit(hub: Path, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    with small_hub(hub) as address:
        megasharp = Machine(tmp_path / "here", address)
        said = megasharp("train", "run.yaml")
        assert f"owner/tiny at {COMMIT[:12]}: " in said and "are fetched from" in said
        assert not list((tmp_path / "here/cache").rglob("*.bin"))
        run = tmp_path / "here/runs/mine"
        manifest = json.loads((run / "checkpoints/step_000001/manifest.json").read_text())
        assert manifest["inputs"]["commits"] == {"model.path": COMMIT}
        (hub / "commit").write_text(MOVED)
        said = megasharp("train", "run.yaml", "--resume", "steps=2")
        assert f"owner/tiny: main has moved to {MOVED}; the run stays at {COMMIT}" in said
        assert "fetched" not in said
        for model, line in (
            ("owner/none", "owner/none is no folder here and no repository at"),
            ("owner/bins", "owner/bins has no safetensors weights (it has pytorch_model.bin)"),
            ("owner/experts", "architecture DeepseekV3ForCausalLM, a mixture of experts, is not supported"),
        ):
            assert line in megasharp("train", "run.yaml", f"model.path={model}", "name=other", code=2)
        assert len(list((tmp_path / "here/cache").rglob("*.safetensors"))) == 1, "nothing was fetched to be refused"
    # The hub is gone: its address answers nobody.
    said = megasharp("train", "run.yaml", "name=again", "--dry-run")
    assert "the hub cannot be reached" in said and "read from the hub's cache" in said
    said = megasharp("train", "run.yaml", "--dry-run", code=2, HF_HOME=str(tmp_path / "empty"), HF_HUB_OFFLINE="1")
    assert said.startswith("megasharp: run.yaml: owner/tiny is no folder here, the hub's cache (")
    assert said.count("\n") == 1
    shutil.copytree(hub / "owner", tmp_path / "here/owner")
    assert "hub" not in megasharp("train", "run.yaml", "name=folder", "--dry-run")
