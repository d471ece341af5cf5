"""`megasharp eval --endpoint`: a suite without weights and tokenizer, to stored samples and figures."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from cases import each_case

from megasharp.common.errors import UserError
from megasharp.evals.groups import Settings
from megasharp.evals.stored_samples import read_samples
from megasharp.rollout.endpoint.http_calls import KEY_VARIABLE
from megasharp.trainer.eval_endpoint import EndpointOptions
from megasharp.trainer.evaluation import Asked, evaluate_source
from tests.unit.rollout.endpoint.standin_server import Json, StandinServer, chat, serving


def script(body: Json, _: int) -> tuple[int, Json, dict[str, str]]:
    """Every second seed is answered after thinking, the others in thinking that never closed."""
    if not body:
        return 200, {"data": [{"id": "tiny/model"}]}, {}
    if body["seed"] % 2:
        return chat(body, "x", message={"reasoning_content": "easy", "content": "1+2"})
    return chat(body, "x", message={"reasoning_content": "1+2", "content": None}, finish_reason="length")


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(KEY_VARIABLE, "s3cret")
    rows = (json.dumps({"id": f"p{number}", "numbers": [1, 2], "target": 3}) for number in range(4))
    Path("rows.jsonl").write_text("\n".join(rows) + "\n")
    Path("mine.yaml").write_text("task: countdown\npath: rows.jsonl\n")
    return "mine.yaml"


def evaluated(server: StandinServer, suite: str, **changes: Any) -> list[str]:
    lines: list[str] = []
    options = EndpointOptions(server.url, **changes.pop("options", {}))
    settings = Settings(n=4, k="1,4", **changes.pop("settings", {}))
    evaluate_source(Asked(None, [suite], settings, endpoint=options, **changes), lines.append, lines.append)
    return lines


def test_a_suite_is_measured_by_messages_alone(suite: str, tmp_path: Path) -> None:
    with serving(script) as server:
        lines = evaluated(server, suite)
    result = json.loads(Path("evals/tiny--model/mine.json").read_text())
    samples = [one for one in read_samples(Path("evals/tiny--model"), "mine") if not one.greedy]
    right = [one.seed % 2**31 % 2 == 1 for one in samples]
    assert [one.outcome == "correct" for one in samples] == right and 0 < sum(right) < 16
    assert result["avg_at_n"] == sum(right) / 16 and result["label"] == "tiny/model"
    assert {one.text for one in samples} == {"<think>easy</think>1+2", "<think>1+2"}
    assert all(one.token_ids is None and one.tokens == 1 for one in samples)
    assert result["identity"]["weights"] == f"tiny/model at {server.url}"
    assert any("wrote evals/tiny--model/mine.json" in line for line in lines)
    stored = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"s3cret" not in stored and "s3cret" not in "\n".join(lines)
    assert KEY_VARIABLE not in os.environ
    assert {headers["Authorization"] for _, headers, _ in server.asked} == {"Bearer s3cret"}


def test_temperatures_have_folders_of_their_own_and_another_model_another_result(suite: str) -> None:
    with serving(script) as server:
        evaluated(server, suite, temperatures=(0.6, 1.0), settings={"top_k": 20, "min_p": 0.1, "stop": ["1"]})
        assert {path.parent.name for path in Path("evals").rglob("mine.json")} == {"temperature_0.6", "temperature_1"}
        cut = [one.text for one in read_samples(Path("evals/tiny--model/temperature_0.6"), "mine")]
        assert set(cut) == {"<think>easy</think>", "<think>"}
        with pytest.raises(UserError, match=r"another evaluation .weights tiny/model at .*, now other at"):
            evaluated(server, suite, out=Path("evals/tiny--model"), options={"model": "other"}, temperatures=(0.6, 1.0))
    greedy = [body for _, _, body in server.asked if body and body["temperature"] == 0]
    assert {(body["top_k"], body["min_p"]) for body in greedy} == {(-1, 0.0)} and len(greedy) == 8


@each_case(
    ("changes", "said"),
    [
        ({"source": Path("weights")}, "leave the folder out"),
        ({"endpoint": EndpointOptions("http://127.0.0.1:9/v1", style="tokens")}, "give the folder"),
        ({"engines": Path("run.yaml")}, "leave out --engines"),
        ({"suites": []}, "an endpoint is no run"),
        ({"endpoint": EndpointOptions("http://127.0.0.1:9/v1")}, "refused"),
    ],
)
def test_what_does_not_go_together_is_refused(suite: str, changes: dict[str, Any], said: str) -> None:
    asked = {"source": None, "suites": [suite], "endpoint": EndpointOptions("http://127.0.0.1:9/v1"), **changes}
    with pytest.raises(UserError, match=said):
        evaluate_source(Asked(settings=Settings(n=1), **asked), print, print)


def test_a_prompt_with_markers_of_a_chat_template_goes_as_text_alone(suite: str) -> None:
    rows = json.dumps({"question": "1+2?", "answer": "3"})
    Path("rows.jsonl").write_text(rows + "\n")
    Path("mine.yaml").write_text(
        "{task: math, path: rows.jsonl, prompt_key: question, answer_key: answer, prompt: boxed_chatml}"
    )
    with serving(script) as server, pytest.raises(UserError, match="--endpoint-api text"):
        evaluated(server, suite)
