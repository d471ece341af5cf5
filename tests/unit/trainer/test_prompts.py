"""Prompts of a run: what it shows, what it refuses, how its suites are asked, and what stored runs go on with."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from cases import each_case
from chat_models import write_model, write_problems
from typer.testing import CliRunner

from megasharp.cli.main import app
from megasharp.common.errors import UserError
from megasharp.config.core import dump_yaml
from megasharp.config.data import DataConfig
from megasharp.config.run_config import RunConfig, load_run, run_tree
from megasharp.evals.groups import Settings, plan_suites
from megasharp.evals.suites import Asking, load_suite
from megasharp.tasks.problems import prompt_of
from megasharp.trainer.eval_source import config_of
from megasharp.trainer.resolve.prompt_format import asking_of, prompt_differences, prompts_meant
from megasharp.trainer.resolve.resolved_run import ResolvedRun, check
from megasharp.trainer.resolve.summary import describe
from megasharp.trainer.resume import check_resume
from megasharp.trainer.stored_config import resumed_config

RUN = """
name: mine
steps: 1
model: {path: model}
data: {task: math, path: train.jsonl, max_prompt_tokens: 400, max_response_tokens: 8}
eval: {suites: [own.yaml], n: 1, k: [1]}
"""
Resolve = Callable[..., ResolvedRun]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of small models."""
    folder = tmp_path_factory.mktemp("models")
    for family in ("qwen", "llama"):
        write_model(folder / family, family)
    write_model(folder / "llama_base", "llama", chat=False)
    return folder


@pytest.fixture
def resolve(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Resolve:
    """Checks the run above, on a model and with overrides, in a folder with its data and its suites."""
    monkeypatch.chdir(tmp_path)
    write_problems(tmp_path / "train.jsonl")
    (tmp_path / "own.yaml").write_text("task: math\npath: train.jsonl\n")
    (tmp_path / "fixed.yaml").write_text("task: math\npath: train.jsonl\nprompt: plain\n")
    (tmp_path / "run.yaml").write_text(RUN)

    def resolved(model: str, *overrides: str, begun: bool = False) -> ResolvedRun:
        run = load_run(Path("run.yaml"), [f"model.path={models / model}", *overrides])
        return check(run, "run.yaml", begun)

    return resolved


def line(resolved: ResolvedRun, word: str) -> str:
    """The line of the run's description that begins with a word."""
    return next(line for line in describe(resolved).splitlines() if line.startswith(word)).removeprefix(word).strip()


def test_one_prompt_is_shown_with_its_special_tokens_and_its_making(resolve: Resolve) -> None:
    assert line(resolve("qwen"), "prompt") == (
        "<|im_start|>system⏎You are a helpful assistant.<|im_end|>⏎<|im_start|>user⏎What is 0 + 1?⏎Please reason step "
        "by step, and put your final answer within \\boxed{}.<|im_end|>⏎<|im_start|>assistant⏎ "
        "(142 tokens; boxed_chat in the model's chat template)"
    )
    shown = line(resolve("llama_base"), "prompt")
    assert shown.startswith("<|begin_of_text|>What is 0 + 1?⏎Please reason")
    assert shown.endswith("(86 tokens; boxed_chat as plain text, for the model has no chat template)")
    assert line(resolve("llama_base", "data.bos=false"), "prompt").startswith("What is 0 + 1?")
    own_words = 'data.template="{question}\\n<think>\\n"'
    assert line(resolve("llama_base", own_words), "prompt").endswith("; responses begin inside of thinking)")
    Path("train.jsonl").write_text('{"id": "a", "problem": "\\u001b[31m%s?", "answer": "1"}\n' % ("1+" * 190))
    shown = line(resolve("llama_base", "data.prompt=plain"), "prompt")
    assert "\\x1b[31m1+1" in shown and " [...] " in shown and shown.endswith("+? (387 tokens; plain, plain text)")


def test_a_turn_s_end_at_which_responses_do_not_stop_is_told(resolve: Resolve, models: Path, tmp_path: Path) -> None:
    """The tokenizers of Qwen's base models have its chat template, and another end token."""
    assert "note" not in describe(resolve("qwen")) + describe(resolve("llama")) + describe(resolve("llama_base"))
    shutil.copytree(models / "qwen", tmp_path / "base")
    names = tmp_path / "base" / "tokenizer_config.json"
    names.write_text(names.read_text().replace('"eos_token": "<|im_end|>"', '"eos_token": "<|endoftext|>"'))
    (tmp_path / "base" / "generation_config.json").unlink()
    assert line(resolve("qwen", f"model.path={tmp_path}/base"), "note").startswith(
        "the model's chat template ends an answer with <|im_end|> (token 258), at which responses do not stop (they do "
        "at <|endoftext|>); where the model writes it, add 258"
    )


def test_a_mark_of_answers_that_no_text_of_a_response_has_is_refused(resolve: Resolve) -> None:
    with pytest.raises(UserError, match=r"run.yaml: reward.answer_after: '<\|im_end\|>' is a special token of .*qwen,"):
        resolve("qwen", "reward.answer_after=<|im_end|>")
    for mark in ("auto", "", "</think>"):
        resolve("qwen", f"reward.answer_after='{mark}'")


def test_markers_that_are_no_tokens_of_the_model_are_refused(resolve: Resolve) -> None:
    with pytest.raises(
        UserError, match=r"run.yaml: it asks by boxed_chatml, whose <\|im_start\|> is no token of .*llama;"
    ):
        resolve("llama", "data.prompt=boxed_chatml")
    with pytest.raises(
        UserError, match=r"suite own asks by boxed_chatml, .*; set eval.prompt=boxed_chat, which"
    ) as found:
        resolve("llama", "eval.prompt=suite")
    assert "\n" not in str(found.value)
    assert resolve("llama", "data.prompt=boxed_chatml", begun=True).prompts, "a run that is asked so already goes on"
    resolve("llama", "data.prompt=boxed_llama")
    resolve("qwen", "data.prompt=boxed_chatml")
    Path("train.jsonl").write_text('{"id": "a", "problem": "What is <|im_start|> for?", "answer": "1"}\n')
    resolve("llama")


def test_a_message_that_the_chat_template_drops_is_named(resolve: Resolve, models: Path, tmp_path: Path) -> None:
    shutil.copytree(models / "qwen", tmp_path / "deaf")
    (tmp_path / "deaf" / "chat_template.jinja").write_text(
        "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
    )
    said = "the model's chat template leaves out or changes the system message of the first prompt, which is shown"
    assert line(resolve("qwen", f"model.path={tmp_path}/deaf", "data.system=Be brief."), "note").startswith(said)
    assert "note       the model's chat template leaves" not in describe(resolve("qwen", "data.system=Be brief."))


def test_suites_are_asked_as_training_is_unless_they_say_otherwise(resolve: Resolve) -> None:
    trained = resolve("qwen", "data.prompt=boxed_verl", "eval.suites=[own.yaml, fixed.yaml]")
    own, fixed = trained.suites
    assert own.prompt == "boxed_verl" and [item.turns for item in own.items] == [
        item.turns for item, _ in trained.prompts.prompts
    ]
    assert fixed.prompt == "plain" and fixed.items[0].text == "What is 0 + 1?"
    said = "eval prompts differ from training's: suite fixed asks by plain, training by boxed_verl; set eval.prompt"
    assert line(trained, "note") == said
    (own,) = resolve("qwen", "data.prompt=boxed_verl", "eval.prompt=dapo").suites
    assert own.prompt == "dapo"
    (own,) = resolve("qwen", "data.prompt=boxed_verl", "eval.prompt=suite").suites
    assert own.prompt == "boxed_chatml"
    assert prompt_differences({"math": ""}, []) == []
    with pytest.raises(UserError, match="no template 'boxed_ver'; did you mean boxed_verl"):
        resolve("qwen", "eval.prompt=boxed_ver")


@each_case(
    ("asking", "task", "own", "prompt"),
    [
        (Asking(None, {"math": "boxed_verl"}), "math", "boxed_chatml", "boxed_verl"),
        (Asking(None, {"math": "boxed_verl"}), "choice", "boxed_chatml", "boxed_chat"),
        (Asking(None, {"math": "boxed_verl"}), "code", "livecodebench", "livecodebench"),
        (Asking(None, {"math": "boxed_verl"}), "countdown", "", ""),
        (Asking("boxed_verl", {"code": "deepcoder"}), "choice", "boxed_chatml", "boxed_verl"),
        (Asking("boxed_verl"), "own", "", "boxed_verl"),
        (Asking(None, {"own": "boxed_verl"}), "own", "", "boxed_verl"),
        (Asking("boxed_verl"), "countdown_3", "countdown_qwen", "countdown_chat"),
        (Asking("suite", {"math": "boxed_verl"}), "math", "boxed_qwen", "boxed_qwen"),
        (Asking(), "math", "boxed_qwen", "boxed_chat"),
    ],
)
def test_a_suite_of_another_task_keeps_a_prompt_of_its_own(asking: Asking, task: str, own: str, prompt: str) -> None:
    assert asking.template(task, own) == prompt


def test_words_of_one_s_own_are_around_the_problems_of_suites_too(resolve: Resolve) -> None:
    Path("rows.jsonl").write_text('{"text": "What is 2 + 1?", "answer": "3", "hint": "count"}\n')
    rows, words = ("data.path=rows.jsonl", "data.prompt_key=text"), "data.template='Q: {question} Box it.'"
    trained = resolve("qwen", *rows, words, "data.system=Add.", "eval.suites=[own.yaml, fixed.yaml]")
    own, fixed = trained.suites
    assert own.items[0].turns == (("system", "Add."), ("user", "Q: What is 0 + 1? Box it.")) and own.prompt == ""
    assert line(trained, "prompt").endswith("; the rows' own words in the model's chat template)")
    said = (
        "eval prompts differ from training's: suite fixed asks by plain, training by the rows' own words; "
        "set eval.prompt"
    )
    assert line(trained, "note") == said and fixed.prompt == "plain"
    other = resolve("qwen", *rows, "data.template='{question} ({hint})'")
    assert other.suites[0].prompt == "boxed_chat" and "suite own asks by boxed_chat" in line(other, "note")
    messages = '[{"role": "user", "content": "1+1? In a box."}]'
    Path("rows.jsonl").write_text(f'{{"text": {messages}, "answer": "2"}}\n')
    other = resolve("qwen", *rows)
    assert "suite own asks by boxed_chat, training by the rows' own words" in line(other, "note")
    for words in ("data.template='<|im_start|>{question}'", "data.system='<|eot_id|>'"):
        with pytest.raises(UserError, match=r"run.yaml: data.\w+ has <\|\w+\|> in it: it is the text of a message"):
            resolve("qwen", *rows, words)
    Path("own.yaml").write_text("task: math\npath: rows.jsonl\nprompt_key: text\n")
    assert resolve("qwen", *rows, "eval.prompt=dapo").suites[0].prompt == "", "messages have no template around them"


def test_a_notation_takes_no_template(resolve: Resolve) -> None:
    Path("train.jsonl").write_text('{"id": "a", "numbers": [1, 2], "target": 3}\n')
    with pytest.raises(UserError, match="prompt: plain has no place in task countdown, whose prompt is its own"):
        resolve("qwen", "data.task=countdown", "data.prompt=plain", "eval.suites=[]")
    assert line(resolve("qwen", "data.task=countdown", "eval.suites=[]"), "prompt").startswith("1 2=3: (6 tokens; ")


def test_a_stored_run_goes_on_with_the_prompts_it_began_with(resolve: Resolve, tmp_path: Path) -> None:
    """A file of before `eval.prompt` means the published templates; a newer one is read as it stands."""
    run = tmp_path / "runs" / "mine"
    (run / "checkpoints").mkdir(parents=True)
    begun = resolve("qwen").config
    stored = "\n".join(line for line in dump_yaml(begun).splitlines() if line not in ("  prompt: null", "  bos: null"))
    (run / "config.yaml").write_text(stored + "\n")

    def resumed(*overrides: str) -> RunConfig:
        tree = run_tree(Path("run.yaml"), [f"model.path={begun.model.path}", *overrides])
        return resumed_config(run, tree, "run.yaml", lambda line: None)

    config = resumed("data.prompt=null")
    assert (config.data.prompt, config.data.bos, config.eval.prompt) == ("boxed_chatml", False, "suite")
    assert check_resume(run, config) == []
    assert asking_of(config) == Asking("suite", {"math": "boxed_chatml"})
    measured = config_of(run)
    assert measured is not None and asking_of(measured) == asking_of(config)
    with pytest.raises(UserError, match=r"data\.prompt was 'boxed_chatml' and is now 'plain'"):
        check_resume(run, resumed("data.prompt=plain"))
    (run / "config.yaml").write_text(dump_yaml(resolve("qwen", "data.prompt=boxed_verl").config))
    config = resumed()
    assert (config.data.prompt, config.data.bos, config.eval.prompt) == ("boxed_verl", None, None)


def test_a_stored_run_keeps_the_template_that_its_set_had() -> None:
    """Rows of DAPO-Math-17k were asked by verl's template, and are asked by their own since."""
    assert prompt_of(DataConfig(set="dapo_math_17k")) == "dapo"
    assert prompts_meant({"data": {"set": "dapo_math_17k"}})["data"]["prompt"] == "boxed_verl"
    own = {"data": {"set": "dapo_math_17k", "prompt": "dapo"}}
    assert prompts_meant(own)["data"]["prompt"] == "dapo"
    assert prompts_meant({"data": {"set": "math500"}})["data"]["prompt"] == "boxed_chatml"
    assert prompts_meant({"data": {"set": "deepscaler"}})["data"]["prompt"] is None


def test_an_evaluation_by_hand_says_how_it_asks(resolve: Resolve, models: Path) -> None:
    command = ["eval", str(models / "llama"), "--suite", "own.yaml", "--n", "1", "--max-tokens", "2", "--workers", "1"]
    refused = CliRunner().invoke(app, [*command, "--prompt", "suite"])
    assert "set --prompt=boxed_chat" in str(refused.exception)
    assert config_of(models / "llama") is None
    assert load_suite("own.yaml").prompt == "boxed_chat"
    Path("group.yaml").write_text("source: none\nprompt: plain\nsettings: {n: 1}\nours: [prompt]\nsuites: [own.yaml]\n")
    for asking, prompt in ((Asking("dapo"), "plain"), (Asking("dapo", first=True), "dapo")):
        (planned,) = plan_suites(["group.yaml"], Settings(k="1"), 1, asking)
        assert planned.evaluations[0].suite.prompt == prompt
        assert planned.ours == (() if asking.first else ("prompt",))
