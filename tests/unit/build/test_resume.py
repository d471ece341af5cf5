"""Resuming with another configuration, and into folders that are not runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from megasharp.build.resume import check_resume
from megasharp.config.core import dump_yaml
from megasharp.config.run import RunConfig, load_run
from megasharp.errors import UserError

REPOSITORY = Path(__file__).resolve().parents[3]


def _config(*overrides: str) -> RunConfig:
    return load_run(REPOSITORY / "examples" / "quickstart" / "run.yaml", overrides)


def _stored(folder: Path, *overrides: str) -> Path:
    (folder / "config.yaml").write_text(dump_yaml(_config(*overrides)))
    return folder


def test_the_same_configuration_resumes_without_a_word(tmp_path: Path) -> None:
    assert check_resume(_stored(tmp_path), _config()) == []


def test_a_run_that_does_not_exist_yet_begins(tmp_path: Path) -> None:
    assert check_resume(tmp_path / "new", _config()) == []


def test_harmless_changes_are_named(tmp_path: Path) -> None:
    lines = check_resume(_stored(tmp_path), _config("steps=300", "policy.tp=2"))
    assert lines == [
        "changed since the last attempt: policy.tp: 1 -> 2",
        "changed since the last attempt: steps: 200 -> 300",
    ]


@pytest.mark.parametrize(
    "override",
    [
        "seed=7",
        "model.path=elsewhere",
        "data.prompts_per_step=4",
        "recipe.methods=[grpo,kl]",
        "rollout.temperature=0.7",
    ],
)
def test_another_experiment_is_refused(tmp_path: Path, override: str) -> None:
    with pytest.raises(UserError, match="another run") as refused:
        check_resume(_stored(tmp_path), _config(override))
    assert override.split("=")[0] in str(refused.value)


@pytest.mark.parametrize("override", ["rank=4", "alpha=8.0", "targets=[qkv]"])
def test_other_adapters_are_another_run(tmp_path: Path, override: str) -> None:
    before = _stored(tmp_path, "policy.lora.rank=8")
    assert check_resume(before, _config("policy.lora.rank=8")) == []
    with pytest.raises(UserError, match=f"policy.lora.{override.split('=')[0]} was .* which is another run"):
        check_resume(before, _config("policy.lora.rank=8", f"policy.lora.{override}"))
    with pytest.raises(UserError, match=r"policy\.lora.* which is another run"):
        check_resume(before, _config())


def test_a_folder_that_is_no_run_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("x")
    with pytest.raises(UserError, match="not a run folder"):
        check_resume(tmp_path, _config())
    assert (tmp_path / "thesis.txt").exists()
