"""The examples of `examples/environments`, each trained for two steps with the package that it is for."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
from waiting import HANG_S, wait_until

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES = REPOSITORY / "examples" / "environments"
VERIFIERS = REPOSITORY / ".venv-verifiers" / "bin" / "python"
OPENENV = REPOSITORY / ".venv-openenv" / "bin" / "python"
STEPS = 2


@pytest.fixture
def server() -> Iterator[int]:
    """The port of the example's OpenEnv server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([OPENENV, EXAMPLES / "openenv" / "server.py", "--port", str(port)])

    def answers() -> bool:
        assert process.poll() is None, "the server has ended"
        with socket.socket() as tried:
            return tried.connect_ex(("127.0.0.1", port)) == 0

    try:
        wait_until(answers)
        yield port
    finally:
        process.kill()
        process.wait()


def trained(example: str, folder: Path, python: Path | str = sys.executable, *overrides: str) -> pd.DataFrame:
    """Train an example; returns its responses."""
    command = [python, "-m", "megasharp.cli", "train", EXAMPLES / example / "run.yaml", "--runs", folder]
    subprocess.run([*command, f"steps={STEPS}", *overrides], cwd=REPOSITORY, check=True, timeout=HANG_S)
    (run,) = folder.iterdir()
    responses = pd.concat([pd.read_parquet(file) for file in sorted((run / "rollouts").glob("*.parquet"))])
    assert set(responses["step"]) == {*range(1, STEPS + 1)}
    # No environment has failed, and some were answered more than once.
    assert set(responses["outcome"]) == {"correct", "wrong"}
    assert responses["text"].str.contains("\n").any()
    return responses


@pytest.mark.long("environments")
def test_gymnasium(tmp_path: Path) -> None:
    responses = trained("gymnasium", tmp_path)
    assert set(responses["reward"]) == {-1.0, 0.0, 1.0}
    assert set(" ".join(responses["canonical_answer"]).split()) == {"stick", "hit"}


@pytest.mark.long("environments")
def test_reasoning_gym(tmp_path: Path) -> None:
    """Judged in worker processes."""
    responses = trained("reasoning_gym", tmp_path)
    assert ((responses["reward"] == 1.0) == (responses["outcome"] == "correct")).all()
    told = responses[responses["text"].str.contains("wrong?", regex=False)]
    assert (told["outcome"] == "correct").any(), "no answer was mended"


@pytest.mark.long("environments")
def test_a_real_openenv_server(tmp_path: Path, server: int) -> None:
    problems = tmp_path / "guess.yaml"
    problems.write_text((EXAMPLES / "openenv" / "guess.yaml").read_text().replace("8765", str(server)))
    check_guesses(trained("openenv", tmp_path / "runs", sys.executable, f"data.path={problems}"))


@pytest.mark.long("environments")
def test_the_package_verifiers(tmp_path: Path) -> None:
    check_guesses(trained("verifiers", tmp_path, VERIFIERS))


def check_guesses(responses: pd.DataFrame) -> None:
    """Check that the answer to a guess is true of the number that others of the same problem have found."""
    right = responses[responses["outcome"] == "correct"]
    numbers = {one.prompt_id: one.canonical_answer.split()[-1] for one in right.itertuples()}
    checked = 0
    for one in responses.itertuples():
        number, turns = numbers.get(one.prompt_id), str(one.text).split("\n")
        if number is not None and len(turns) > 1 and turns[0] in "0123456789":
            assert turns[1].startswith("higher:" if turns[0] < number else "lower:"), (number, one.text)
            checked += 1
    assert checked > STEPS


@pytest.mark.long("environments")
def test_what_the_adapter_of_verifiers_refuses() -> None:
    """In a process of the Python that has it."""
    cases = Path(__file__).parent / "verifiers_cases.py"
    subprocess.run([VERIFIERS, "-m", "pytest", "-p", "no:cacheprovider", cases], cwd=REPOSITORY, check=True)
