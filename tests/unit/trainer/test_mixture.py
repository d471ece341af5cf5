"""A run on a mixture: what is read of its sources, who judges them, how suites are asked, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from cases import each_case
from chat_models import write_model, write_problems

from megasharp.common.errors import UserError
from megasharp.config.run_config import RunConfig, load_run
from megasharp.tasks.judge import Item
from megasharp.trainer.plan import Options, ask
from megasharp.trainer.resolve.prompt_format import asking_of
from megasharp.trainer.resolve.resolved_run import ResolvedRun, check
from megasharp.trainer.resolve.summary import describe
from megasharp.trainer.reward_judge import RewardJudge, judged_tasks, own_rewards

RUN = """
name: mine
steps: 1
model: {path: qwen}
data:
  max_prompt_tokens: 400
  prompts_per_step: 8
  responses_per_prompt: 16
  max_response_tokens: 64
  mix:
    - {source: math, task: math, path: data/math.jsonl, prompt: boxed_verl, size: 3}
    - {path: data/chat.jsonl, prompt_key: text, system: "Be brief.", reward: "judging:brief", responses_per_prompt: 4}
    - {source: two, path: data/chat.jsonl, prompt_key: text, max_response_tokens: 9,
       reward: [{function: "judging:brief", weight: 2}, {function: "judging:long"}]}
  stages: [{until: 9, max_response_tokens: 8, responses_per_prompt: 32, weights: {math: 3, two: 1}}]
"""
JUDGING = """
def brief(text, answer): return 1.0 if len(text) <= answer else 0.0
def long(text, answer): return len(text) / 100
"""
Resolve = Callable[..., ResolvedRun]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "qwen"
    write_model(folder, "qwen")
    return folder


@pytest.fixture
def run_file(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run above in a folder of its own, which is not the working directory."""
    folder = tmp_path / "mine"
    (folder / "data").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(folder)
    write_problems(folder / "data" / "math.jsonl")
    rows = [{"text": "x" * count, "answer": count} for count in (1, 3, 300, 500)]
    (folder / "data" / "chat.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "judging.py").write_text(JUDGING)
    (folder / "run.yaml").write_text(RUN.replace("path: qwen", f"path: {model}"))
    return folder / "run.yaml"


@pytest.fixture
def resolve(run_file: Path) -> Resolve:
    return lambda *overrides: check(load_run(run_file, list(overrides)), str(run_file))


def test_each_source_has_its_problems_its_share_and_its_judge(resolve: Resolve) -> None:
    resolved = resolve()
    prompts = resolved.prompts
    assert prompts.counts == {"math": 3, "chat": 3, "two": 3} and prompts.sources == ("math", "chat", "two")
    assert [item.task for item in prompts.first(1)] == ["math", "own/chat", "own/two"]
    assert all(item.id.startswith(f"{item.source}/") for item, _ in prompts.prompts)
    assert {item.turns[0] for item, _ in prompts.prompts if item.source == "chat"} == {("system", "Be brief.")}
    text = describe(resolved)
    assert "data       9 of 11 prompts of a mixture; 2 are longer than 400 tokens" in text
    assert "  math: 3 prompts of math, 75 %, then 33.3 % of a step, judged by math\n" in text
    assert "/chat.jsonl, 0 %, then 33.3 % of a step, judged by judging:brief, 4 responses\n" in text
    assert "25 %, then 33.3 % of a step, judged by judging:brief, judging:long, <= 9 tokens\n" in text
    assert "step       8 prompts x 32 = 256 responses at most" in text
    assert text.count("\nprompt     ") == 3 and "\nprompt     chat: " in text
    assert "judging:brief x 2: (text, answer)" in text


@pytest.mark.parametrize("workers", [0, 1])
def test_the_functions_of_several_sources_judge_side_by_side(resolve: Resolve, workers: int) -> None:
    # Without the source whose task needs workers.
    resolved = resolve("data.stages=[]", *without_math(), f"reward.workers={workers}")
    config = resolved.config
    tasks = judged_tasks(config, resolved.suites)
    assert tasks == {"own/chat", "own/two"}
    with closing(
        RewardJudge(config.reward, tasks, None, lambda line: None, own_rewards(config.reward, config.data.mix))
    ) as judging:
        judging.try_function(resolved.prompts.first(2))
        items = [Item(item.task, "x", item.answer, row=item.row) for item in resolved.prompts.first(1)]
        chat, two = judging.judge.verdicts(items)
    assert (chat.reward, two.reward) == (1.0, 2.0 + 1 / 100) and two.parts == {"brief": 1.0, "long": 0.01}


def without_math() -> list[str]:
    rows = "path: mine/data/chat.jsonl, prompt_key: text"
    several = "[{function: 'judging:brief', weight: 2}, {function: 'judging:long'}]"
    return [f"data.mix=[{{{rows}, reward: 'judging:brief'}}, {{source: two, {rows}, reward: {several}}}]"]


def test_the_run_s_function_judges_sources_without_their_own(resolve: Resolve) -> None:
    resolved = resolve("reward.function=judging:long")
    assert [item.task for item in resolved.prompts.first(1)] == ["own", "own/chat", "own/two"]
    with pytest.raises(UserError, match="nothing judges the responses to rows of your own"):
        resolve("data.stages=[]", "data.mix=[{path: mine/data/chat.jsonl, prompt_key: text}]")


def test_suites_are_asked_as_the_source_of_their_task_is(resolve: Resolve, run_file: Path) -> None:
    (run_file.parent / "held_out.yaml").write_text("task: math\npath: data/math.jsonl\n")
    (run_file.parent / "asked.yaml").write_text("task: math\npath: data/math.jsonl\nprompt: plain\n")
    resolved = resolve("eval.suites=[held_out.yaml, asked.yaml]", f"eval.suites=[{run_file.parent}/held_out.yaml]")
    assert [suite.prompt for suite in resolved.suites] == ["boxed_verl"]
    asking = asking_of(resolved.config)
    assert asking.words == {"own": ("Be brief.", None)} and "math" in asking.training
    resolved = resolve(f"eval.suites=[{run_file.parent}/asked.yaml]")
    assert "suite asked asks by plain, training by boxed_verl" in describe(resolved)


def test_the_size_of_a_source_is_drawn_by_the_seed(resolve: Resolve) -> None:
    def drawn(*overrides: str) -> set[str]:
        return {item.id for item, _ in resolve(*overrides).prompts.prompts if item.source == "math"}

    assert drawn() == drawn() and len({frozenset(drawn(f"seed={seed}")) for seed in range(5)}) > 1
    with pytest.raises(UserError, match=r"run.yaml: data.mix: math: size=999 of \d+ problems; lower it"):
        resolve("data.stages=[]", "data.mix=[{source: math, task: math, path: mine/data/math.jsonl, size: 999}]")


def test_what_is_left_open_and_a_plan_take_the_largest(run_file: Path) -> None:
    config: RunConfig = load_run(run_file, ["data.max_response_tokens=null", "policy.micro_batch_tokens=null"])
    # Of the model's 1,024 positions 400 are the prompt's.
    assert check(config, "run.yaml").config.data.max_response_tokens == 624
    batch = ask(load_run(run_file), "run.yaml", Options()).request.batch
    assert (batch.prompts, batch.responses) == (8, 32)


@each_case(
    ("data", "message"),
    [
        ("data.mix=[{task: math}]", "run.yaml: data.mix: math.path: name a data file of task 'math'"),
        ("data.mix=[{}]", "data.mix.0: give path, with rows"),
        ("data.set=gsm8k", "data: set is beside mix, whose entries say what is read; leave one of the two out"),
        ("data.system=Hi.", "data: system is beside mix"),
        ("data.mix=[{set: gsm8k}, {set: gsm8k}]", "mix: two sources are named gsm8k; give one of them another name"),
        ("data.mix=[{set: gsm8k, weight: 1}, {set: math500}]", "mix: math500 has no weight, and others have"),
        ("data.mix=[{set: gsm8k, weight: 0}]", "mix: all weights are 0"),
        ("data.mix=[{set: gsm8k, weight: -1}]", "data.mix.0.weight: expected number >= 0 or null, found -1"),
        ("data.mix=[{set: gsm8k, source: function}]", "no source may be named function"),
        (
            "data.mix=[{set: gsm8k, source: a b}]",
            "data.mix.0.source: expected string of letters, digits and . _ - or null",
        ),
        ("data.mix=[{set: gsm8k, reward: []}]", "mix: the reward of gsm8k names no function"),
        ("data.mix=[{set: gsm8k, wieght: 1}]", "data.mix.0.wieght: unknown key, nearest is weight"),
        ("data.stages=[{until: 3, max_response_tokens: 9, weights: {code: 1}}]", "no source 'code'; sources: math, ch"),
        ("data.stages=[{until: 3, max_response_tokens: 9, weights: {math: 0}}]", "weights: all are 0"),
    ],
)
def test_what_does_not_go_together_is_one_line(run_file: Path, data: str, message: str) -> None:
    stages = [] if "stages" in data else ["data.stages=[]"]
    with pytest.raises(UserError, match=message) as refused:
        check(load_run(run_file, [*stages, data]), "run.yaml")
    assert "\n" not in str(refused.value)
