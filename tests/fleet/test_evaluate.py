"""`megasharp eval --engines`: a suite on real engines, beside the engine of one process."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from engines import KEY, running

from megasharp.common.errors import UserError
from megasharp.evals.groups import Settings
from megasharp.evals.stored_samples import read_samples
from megasharp.rollout.endpoint import Style
from megasharp.rollout.endpoint.http_calls import KEY_VARIABLE
from megasharp.trainer.eval_endpoint import EndpointOptions
from megasharp.trainer.evaluation import Asked, evaluate_source

pytestmark = pytest.mark.long("fleet-runs")

REPOSITORY = Path(__file__).parents[2]
BASE = REPOSITORY / "examples" / "quickstart" / "base"
EXAMPLE = REPOSITORY / "examples" / "fleet_on_cpu" / "run.yaml"


def evaluated(out: Path, engines: Path | None, *overrides: str) -> dict[str, float]:
    asked = Asked(
        BASE,
        ["countdown_test"],
        Settings(n=2, k="1,2", max_tokens=20),
        out=out,
        engines=engines,
        overrides=overrides,
    )
    evaluate_source(asked, lambda _: None, lambda _: None)
    found: dict[str, float] = json.loads((out / "countdown_test.json").read_text())
    return found


def test_engines_answer_greedily_as_the_engine_of_one_process_does(tmp_path: Path) -> None:
    ours = evaluated(tmp_path / "ours", None)
    theirs = evaluated(tmp_path / "theirs", EXAMPLE, "rollout.engines=1")
    assert (tmp_path / "theirs" / "logs" / "engine_0.log").stat().st_size > 0, "no engine was started"
    assert theirs["greedy_accuracy"] == pytest.approx(ours["greedy_accuracy"], abs=2 / 256)
    assert 0.0 < ours["greedy_accuracy"] < 1.0
    # Of different samples of the same distribution.
    assert theirs["token_entropy"] == pytest.approx(ours["token_entropy"], abs=0.05)
    assert theirs["token_entropy_sampled"] == pytest.approx(theirs["token_entropy"], abs=0.08)
    assert theirs["lambdas"] == pytest.approx(ours["lambdas"], abs=0.3) and len(theirs["lambdas"]) == 3


def test_truncated_and_stopped_responses_are_those_of_one_process(tmp_path: Path) -> None:
    """SGLang's sampler cuts by top-k, top-p and min-p as ours does, and ends at the same token of a stop string."""
    settings = {"n": 2, "k": "1,2", "max_tokens": 20, "temperature": 1.2, "top_k": 6, "top_p": 0.95, "min_p": 0.05}
    texts = []
    for name, engines in (("ours", None), ("theirs", EXAMPLE)):
        overrides = ("rollout.engines=1",) if engines else ()
        asked = Asked(BASE, ["countdown_test"], Settings(**settings, stop=["+"]), engines=engines, overrides=overrides)
        evaluate_source(replace(asked, out=tmp_path / name, keep="tokens"), lambda _: None, lambda _: None)
        found = read_samples(tmp_path / name, "countdown_test")
        texts.append({(one.problem, one.index, one.greedy): (one.text, [*(one.token_ids or ())]) for one in found})
    ours, theirs = texts
    assert any(text != "" for text, _ in ours.values()) and not any("+" in str(text) for text, _ in ours.values())
    # Sums in another order may move a draw that falls between two tokens.
    assert sum(ours[key] == theirs[key] for key in ours) >= 0.99 * len(ours)


def test_an_endpoint_answers_greedily_as_the_engine_of_one_process_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's own server of OpenAI's API, by messages, texts and tokens; its log-probs are the sampler's at 1."""
    ours = evaluated(tmp_path / "ours", None)
    model = shutil.copytree(BASE, tmp_path / "model")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (model / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    with running(tmp_path / "engine", model, None, sglang={"skip_tokenizer_init": False}) as engine:
        for style in get_args(Style):
            monkeypatch.setenv(KEY_VARIABLE, KEY)
            options = EndpointOptions(f"http://127.0.0.1:{engine.port}/v1", style=style)
            asked = Asked(
                BASE if style == "tokens" else None, ["countdown_test"], Settings(n=2, k="1,2", max_tokens=20)
            )
            evaluate_source(replace(asked, endpoint=options, out=tmp_path / style), lambda _: None, lambda _: None)
            theirs = json.loads((tmp_path / style / "countdown_test.json").read_text())
            assert theirs["greedy_accuracy"] == pytest.approx(ours["greedy_accuracy"], abs=2 / 256)
            assert theirs["token_entropy_sampled"] == pytest.approx(ours["token_entropy"], abs=0.08)
            assert theirs["mean_length"] == pytest.approx(ours["mean_length"], abs=0.5)


def test_a_run_file_without_engines_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rollout.engine=inprocess starts no engines; leave out --engines"):
        evaluated(tmp_path, EXAMPLE.parents[1] / "quickstart" / "run.yaml")
