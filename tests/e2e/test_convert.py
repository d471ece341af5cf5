"""The convert commands as a user types them, as scripts for a bare image, and what an interruption leaves."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from quickstart import REPOSITORY, Command
from waiting import HANG_S

BASE = REPOSITORY / "examples" / "quickstart" / "base"
ABSENT = ("ray", "sglang", "typer", "rich")
# Imports of what a cluster image may lack fail, as they would there.
BARE = f"""
import runpy, sys
for name in {ABSENT!r}:
    sys.modules[name] = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
# A conversion that stops for good once some tensors are written.
STUCK = """
import sys, time
from pathlib import Path
from megasharp.common.exit_codes import run_command
from megasharp.learner import conversion
add = conversion.Digests.add
def slow(self, *arguments):
    add(self, *arguments)
    if len(self.read) == 20:
        Path(sys.argv[4]).touch()
        time.sleep(3600)
conversion.Digests.add = slow
run_command(lambda: getattr(conversion, sys.argv[1])(Path(sys.argv[2]), Path(sys.argv[3])))
"""


@pytest.mark.long("ranks")
def test_verify_tells_a_converted_model_from_another(command: Command, tmp_path: Path) -> None:
    megatron = tmp_path / "megatron"
    command.run("convert", "hf-to-megatron", str(BASE), str(megatron), "--tp", "2", "--pp", "2")
    same = command.run("convert", "verify", str(BASE), str(megatron), "--tokens", "16")
    assert same.splitlines()[-1] == "equal"
    process = command.start("convert", "verify", str(BASE), str(BASE.parent / "memory"), "--no-logits")
    other, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == 1
    assert "embedding: model.embed_tokens.weight: shape (22, 128) in A" in other
    assert other.splitlines()[-1] == "different"


@pytest.mark.long("ranks")
def test_a_run_is_not_resumed_with_another_models_arguments(command: Command, tmp_path: Path) -> None:
    base, memory = tmp_path / "base", tmp_path / "memory"
    shutil.copytree(BASE, base)
    shutil.copytree(BASE.parent / "memory", memory)
    with_memory = ("recipe.methods=[grpo,dlc]", f"recipe.dlc.memory.path={memory}")
    run = command.train("steps=1", "name=a", f"model.path={base}", *with_memory)
    command.run(*run)
    checkpoint = command.runs / "a" / "checkpoints" / "step_000001"
    theta = json.loads((memory / "config.json").read_text())["rope_parameters"]["rope_theta"]
    edit(memory / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 2 * theta})
    error = command.run(*run, "steps=2", "--resume", code=2)
    assert f"{memory / 'config.json'} does not describe the weights in {checkpoint / 'memory'}" in error
    assert f"rope_theta={2 * theta}, recorded {theta}" in error
    edit(base / "config.json", rms_norm_eps=0.5)
    error = command.run(*run, "steps=2", "--resume", code=2)
    assert f"{base / 'config.json'} does not describe the weights in {checkpoint / 'policy'}" in error
    assert "rms_norm_eps=0.5, recorded 1e-06" in error
    edit(checkpoint / "hf" / "config.json", rms_norm_eps=0.25)
    error = command.run("convert", "megatron-to-hf", str(checkpoint), str(tmp_path / "hf"), code=2)
    assert "rms_norm_eps=0.25, recorded 1e-06" in error


def edit(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def bare(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BARE, str(REPOSITORY / "tools" / script), *map(str, arguments)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.long("ranks")
def test_scripts_need_neither_ray_nor_sglang_nor_the_command_line(tmp_path: Path) -> None:
    megatron, back = tmp_path / "megatron", tmp_path / "back"
    for script, source, target in (("hf_to_megatron.py", BASE, megatron), ("megatron_to_hf.py", megatron, back)):
        done = bare(script, source, target)
        assert (done.returncode, done.stdout) == (0, f"wrote {target}\n"), done.stderr
    done = bare("verify_checkpoint.py", BASE, back, "--no-logits")
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "equal", done.stderr
    edit(megatron / "hf" / "config.json", rms_norm_eps=0.5)
    done = bare("verify_checkpoint.py", BASE, megatron)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "rms_norm_eps=0.5, recorded" in done.stderr


@pytest.mark.long("ranks")
@pytest.mark.parametrize(
    ("function", "number"), [("hf_to_megatron", signal.SIGKILL), ("megatron_to_hf", signal.SIGTERM)]
)
def test_an_interrupted_conversion_leaves_no_folder(
    megatron: Path, tmp_path: Path, function: str, number: signal.Signals
) -> None:
    source = BASE if function == "hf_to_megatron" else megatron
    target, marker = tmp_path / "result", tmp_path / "marker"
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK, function, str(source), str(target), str(marker)],
        cwd=REPOSITORY,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        wait_for(marker, process)
        (hidden,) = tmp_path.glob(".result.partial-*")
        process.send_signal(number)
        _, error = process.communicate(timeout=HANG_S)
    finally:
        process.kill()
    assert not target.exists()
    # Only the one that was not asked could not clear up; the next conversion does it.
    assert hidden.exists() == (number == signal.SIGKILL)
    assert process.returncode == (143 if number == signal.SIGTERM else -signal.SIGKILL)
    assert number == signal.SIGKILL or b"megasharp: stopped by SIGTERM" in error
    convert(function, source, target)
    assert target.exists() and not hidden.exists()


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted") / "megatron"
    convert("hf_to_megatron", BASE, folder)
    return folder


def convert(function: str, source: Path, target: Path) -> None:
    from megasharp.learner import conversion

    getattr(conversion, function)(source, target)


def wait_for(marker: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + HANG_S
    while not marker.exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.long("ranks")
def test_a_run_from_a_converted_folder_is_the_run_from_its_source(command: Command, megatron: Path) -> None:
    command.run(*command.train("steps=2", "name=hf"))
    command.run(*command.train("steps=2", "name=megatron", f"model.path={megatron}"))
    exact = ("policy/loss", "policy/grad_norm", "policy/sampler_gap", "reward/mean")
    one, other = ([{key: row[key] for key in exact} for row in command.rows(name)] for name in ("hf", "megatron"))
    assert one == other and len(one) == 2
    checkpoint = command.runs / "megatron" / "checkpoints" / "step_000002"
    command.run(*command.train("steps=1", "name=further", f"model.path={checkpoint}", "policy.tp=2"))
    assert command.rows("further")[0]["policy/grad_norm"] > 0.0
