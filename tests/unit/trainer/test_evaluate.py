"""`megasharp eval` as a process: where its results go, and what SIGUSR1 does to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases import each_case
from waiting import HANG_S

from megasharp.cli.main import app
from megasharp.common.errors import UserError
from megasharp.common.files import held
from megasharp.common.signals import save_kept_from_children
from megasharp.config.core import dump_yaml
from megasharp.config.data import RewardConfig, RewardFunction
from megasharp.config.run_config import load_run
from megasharp.evals.groups import Settings
from megasharp.evals.result_files import load_result
from megasharp.evals.stored_samples import read_samples
from megasharp.trainer.eval_endpoint import EndpointOptions
from megasharp.trainer.eval_source import Measured, check_measurable, hf_folder, measured
from megasharp.trainer.evaluation import Asked, evaluate_source
from megasharp.trainer.rejudging import rejudge_folder

BASE = Path(__file__).parents[3] / "examples" / "quickstart" / "base"


def started(out: Path, samples: int, *more: str) -> subprocess.Popen[str]:
    """As a job's node starts it: SIGUSR1 is held back until it is heard."""
    suite = ["--suite", "countdown_test"]
    asked = [*suite, "--n", str(samples), "--k", "1", "--max-tokens", "4", "--out", str(out), *more]
    with save_kept_from_children():
        return subprocess.Popen(
            [sys.executable, "-m", "megasharp.cli", "eval", str(BASE), *asked],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def ended(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Both outputs."""
    try:
        return process.communicate(timeout=HANG_S)
    finally:
        process.kill()


def test_results_lie_under_the_name_of_what_is_measured(tmp_path: Path) -> None:
    process = started(tmp_path / "{checkpoint}", 1)
    said, errors = ended(process)
    assert process.returncode == 0, errors
    file = tmp_path / "base" / "countdown_test.json"
    assert f"wrote {file}" in said and json.loads(file.read_text())["label"] == "base"


def test_a_warning_at_the_start_ends_an_evaluation_in_one_line(tmp_path: Path) -> None:
    """When it is not heard yet."""
    process = started(tmp_path / "out", 100_000)
    process.send_signal(signal.SIGUSR1)
    _, errors = ended(process)
    assert process.returncode == 75, errors
    assert (
        "SIGUSR1 (time is nearly up): nothing of the present suite is sampled yet; the same command goes on" in errors
    )
    assert "Traceback" not in errors and not (tmp_path / "out").exists()


@each_case(
    ("option", "value", "said"),
    [
        ("--stop", "", "eval: --stop holds an empty text"),
        (
            "--max-tokens",
            "64",
            "eval: responses of 64 tokens leave no room .* the 64 positions of base; lower --max",
        ),
    ],
)
def test_mistakes_are_said_by_the_option_s_name_before_all_else(
    option: str, value: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["eval", str(BASE), "--suite", "countdown_dev", "--n", "1", "--out", str(tmp_path / "out"), option, value]
    with pytest.raises(UserError, match=said):
        app(line, standalone_mode=False)
    assert capsys.readouterr() == ("", "")


def in_process(
    out: Path, suite: Path, *, temperatures: list[float | None], k: str = "1,2"
) -> tuple[list[str], list[str]]:
    """Evaluate in this process; what is said, and what is noted."""
    said: list[str] = []
    noted: list[str] = []
    asked = Asked(BASE, [str(suite)], Settings(k=k), temperatures, out=out)
    evaluate_source(asked, said.append, noted.append)
    return said, noted


def test_a_sweep_writes_one_result_a_temperature_and_a_group_its_table(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("source: none\nsettings: {n: 4, max_tokens: 4}\nours: [top_p]\nsuites: [countdown_dev]\n")
    _, noted = in_process(tmp_path, own, temperatures=[0.5, 1.0])
    # On a slow machine lines of progress are printed as well.
    ours, *kept = (line for line in noted if " of 640 samples (" not in line)
    assert ours == "own: the paper does not say top_p; the values are ours"
    assert len(kept) == 2 and all("texts of 640 samples are kept, at most about 68 kB" in line for line in kept)
    for temperature in ("0.5", "1"):
        folder = tmp_path / f"temperature_{temperature}"
        row = json.loads((folder / "countdown_dev.json").read_text())
        table = json.loads((folder / "own.json").read_text())
        assert row["temperature"] == float(temperature)
        assert table["average"]["figures"]["pass@2"] == row["pass_at_k"]["2"]
        assert table["average"]["intervals"]["pass@2"] == row["intervals"]["pass@2"]
        assert len(list(read_samples(folder, "countdown_dev"))) == 640
    before = (tmp_path / "temperature_1" / "countdown_dev.json").read_text()
    said, _ = in_process(tmp_path / "temperature_1", own, temperatures=[1.0], k="1,4")
    assert any("was measured before; figures are from its samples" in line for line in said)
    after = json.loads((tmp_path / "temperature_1" / "countdown_dev.json").read_text())
    assert set(after["pass_at_k"]) == {"1", "2", "4"} and after["lambdas"] == json.loads(before)["lambdas"]
    with pytest.raises(UserError, match=r"of another evaluation \(temperature 1.0, now 0.5\); give another --out"):
        in_process(tmp_path / "temperature_1", own, temperatures=[0.5])


def test_limits_of_turns_are_part_of_an_evaluation(tmp_path: Path) -> None:
    """They are the run's where the command says none; a server of OpenAI's API plays no episodes."""
    maze = Path(__file__).parents[3] / "examples" / "maze"
    small = tmp_path / "small.yaml"
    small.write_text(f"task: maze\npath: {maze / 'data' / 'dev.jsonl'}\nlimit: 3\n")

    def evaluated(turns: dict[str, int], suite: Path = small, **more: Any) -> list[str]:
        said: list[str] = []
        settings = Settings(n=2, max_tokens=32)
        asked = Asked(maze / "base", [str(suite)], settings, out=tmp_path / "out", turns=turns, **more)
        evaluate_source(asked, said.append, lambda line: None)
        return said

    heading, *figures = evaluated({"max_turns": 3, "turn_tokens": 4})
    assert heading.endswith("at most 32 tokens, the environment's included, and 3 turns of at most 4")
    assert any(line.startswith("  turns") for line in figures)
    result = load_result(tmp_path / "out" / "small.json")
    assert (result.max_turns, result.turn_tokens, result.identity["max_turns"]) == (3, 4, "3")
    assert result.turns is not None and 1 <= result.turns <= 3
    with pytest.raises(UserError, match=r"of another evaluation \(max_turns 3, now 8\); give another --out"):
        evaluated({})
    with pytest.raises(UserError, match="--max-turns: no suite here has an environment"):
        evaluated({"max_turns": 3}, Path("countdown_dev"))
    endpoint = EndpointOptions("http://localhost:1/v1", "m", "tokens")
    with pytest.raises(UserError, match=r"small has an environment, whose answers .* --engines"):
        evaluated({}, endpoint=endpoint)
    with pytest.raises(UserError, match=r"small has an environment, which judges while responses are sampled"):
        asked = Asked(None, [str(small)], Settings(), out=tmp_path / "again")
        rejudge_folder(tmp_path / "out", asked, False, lambda line: None, lambda line: None)


def test_own_rows_are_judged_by_the_function_that_is_asked_for_or_the_run_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a source says which suites it is evaluated on, or is refused."""
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"question": "Say 2", "answer": "2"}\n{"question": "Say 3", "answer": "3"}\n')
    Path("mine.yaml").write_text("path: rows.jsonl\n")
    Path("graded.py").write_text("def two(text, answer):\n    return 1.0 if answer == '2' else 0.0\n")
    reward = RewardConfig(workers=0, functions=[RewardFunction(function="graded:two")])
    asked = Asked(BASE, ["mine.yaml"], Settings(n=1, max_tokens=2), out=Path("out"), reward=reward)
    evaluate_source(asked, lambda line: None, lambda line: None)
    assert json.loads(Path("out/mine.json").read_text())["pass_at_k"] == {"1": 0.5}
    with pytest.raises(UserError, match=r"of another evaluation \(reward graded:two x 1, now graded:two x 2"):
        other = RewardConfig(workers=0, functions=[RewardFunction(function="graded:two", weight=2.0)])
        evaluate_source(replace(asked, reward=other), lambda line: None, lambda line: None)
    with pytest.raises(UserError, match=r"nothing judges the responses to rows of your own: .*eval: --reward"):
        evaluate_source(replace(asked, reward=RewardConfig()), lambda line: None, lambda line: None)
    with pytest.raises(UserError, match=r"base is no run, whose eval.suites would be taken: say --suite .*gsm8k"):
        evaluate_source(Asked(BASE, [], Settings()), lambda line: None, lambda line: None)
    for suites, message in (
        ("[]", "is a run without eval.suites: say --suite"),
        ("[other]", "suite other: no"),
    ):
        run = load_run(BASE.parent / "run.yaml", ["checkpoint.keep_best=null", f"eval.suites={suites}"])
        Path("config.yaml").write_text(dump_yaml(run))
        with pytest.raises(UserError, match=message):
            evaluate_source(Asked(tmp_path, [], Settings()), lambda line: None, lambda line: None)


def test_functions_are_looked_for_beside_the_folder_of_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever that folder is called."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    run = tmp_path / "place" / "mine" / "run"
    run.mkdir(parents=True)
    changes = ["checkpoint.keep_best=null", "eval.suites=[other]"]
    (run / "config.yaml").write_text(dump_yaml(load_run(BASE.parent / "run.yaml", changes)))
    with pytest.raises(UserError, match="suite other: no"):
        evaluate_source(Asked(run, [], Settings()), lambda line: None, lambda line: None)
    assert str(tmp_path / "place") in sys.path
    with pytest.raises(UserError, match=r"mine/rum: no run of this name in .*mine; see megasharp runs list$"):
        evaluate_source(Asked(run.with_name("rum"), [], Settings()), lambda line: None, lambda line: None)


def test_two_evaluations_do_not_write_into_one_folder(tmp_path: Path) -> None:
    with held(tmp_path, ""), pytest.raises(UserError, match="another megasharp eval writes there; give another --out"):
        in_process(tmp_path, Path("countdown_dev"), temperatures=[1.0])


def test_a_checkpoints_converted_weights_do_not_stay_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr("megasharp.learner.conversion.megatron_to_hf", lambda _, folder: folder.mkdir())
    child = os.fork()
    if not child:
        with hf_folder(tmp_path):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    [left] = tmp_path.iterdir()
    with hf_folder(tmp_path) as folder:
        assert folder.is_dir() and not left.exists()
    assert not list(tmp_path.iterdir())


def test_what_can_be_measured_and_what_it_is_called(tmp_path: Path) -> None:
    check_measurable(BASE)
    assert measured(BASE) == Measured(BASE, "base", None, Path("base"))
    run = tmp_path / "run"
    checkpoint = run / "checkpoints" / "step_000001"
    checkpoint.mkdir(parents=True)
    with pytest.raises(UserError, match="run: neither a run with a checkpoint, nor a checkpoint, nor a Hugging Face"):
        measured(run)
    (checkpoint / "policy").mkdir()
    assert measured(checkpoint) == Measured(checkpoint, "run step 1", 1, Path("run/step_000001"))
    (run / "config.yaml").write_text("name: mine\n")
    assert measured(checkpoint).label == "mine step 1"
