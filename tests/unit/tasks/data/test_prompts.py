"""Prompt templates: the papers' own words, questions with any signs in them, and the model's own chat template."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import each_case

from megasharp.common.errors import UserError
from megasharp.tasks.countdown_tags import load_items
from megasharp.tasks.judge import digest_of
from megasharp.tasks.prompts import TEMPLATES, template_named
from megasharp.tasks.sets import SETS
from megasharp.tasks.sets.load import load_set
from megasharp.tasks.stream import PromptStream, prompt_of, tokenize_prompts
from megasharp.tasks.tokenizer import load_tokenizer

REPOSITORY = Path(__file__).parents[4]
FILES = Path(__file__).parent / "files" / "sets"
QUESTION = "Is {x} in \\{1, 2\\}? $a_{1}$"
PAPER = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n{input}\n"
    "Please reason step by step, and put your final answer within \\boxed{}.\n<|im_end|>\n<|im_start|>assistant\n"
)
TINYZERO = (
    "<|im_start|>system\nYou are a helpful assistant. You first thinks about the reasoning process in the mind and "
    "then provides the user with the answer.<|im_end|>\n<|im_start|>user\n Using the numbers [19, 36, 55, 7], create "
    "an equation that equals 65. You can use basic arithmetic operations (+, -, *, /) and each number can only be used "
    "once. Show your work in <think> </think> tags. And return the final answer in <answer> </answer> tags, for "
    "example <answer> (1 + 2) / 3 </answer>.<|im_end|>\n<|im_start|>assistant\nLet me solve this step by step.\n<think>"
)


@each_case("name", TEMPLATES)
def test_a_question_of_any_signs_stands_in_a_prompt_once(name: str) -> None:
    text = TEMPLATES[name].text_of(QUESTION)
    assert text.count(QUESTION) == 1 and "{question}" not in text
    assert TEMPLATES[name].source


def test_the_uniform_prompt_is_2510_04028_s() -> None:
    assert TEMPLATES["boxed_chatml"].text_of(QUESTION) == PAPER.replace("{input}", QUESTION)


@each_case("name", SETS)
def test_a_set_s_prompt_asks_for_what_its_verifier_reads(name: str) -> None:
    asked = {"countdown_3": "<answer>", "countdown_3to4": "<answer>", "code": "Python"}.get(
        SETS[name].task, r"\boxed{}"
    )
    if SETS[name].task == "synlogic":
        asked = "{question}"  # each of its questions says what form its answer has
    assert asked in TEMPLATES[SETS[name].prompt].text + TEMPLATES[SETS[name].prompt].system


def test_the_countdown_set_asks_what_the_countdown_task_asks() -> None:
    path = FILES / "countdown_3to4.jsonl"
    texts = [item.text for item in load_set("countdown_3to4", path).items]
    assert texts == [item.text for item in load_items(path)]
    assert texts[0] == TINYZERO


def test_an_unknown_template_names_near_ones() -> None:
    with pytest.raises(UserError, match="no template 'bxed_qwen'; did you mean boxed_qwen"):
        template_named("bxed_qwen")


class Tokens:
    """A tokenizer of one token per character whose chat template is brackets."""

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))

    def chat(self, turns: tuple[tuple[str, str], ...]) -> str:
        return "".join(f"[{role}: {text}]" for role, text in turns) + "[assistant: "


def test_a_chat_prompt_is_written_by_the_model_s_template() -> None:
    items = load_set("humaneval_plus", FILES / "humaneval_plus.jsonl").items
    assert prompt_of(items[0], Tokens()).startswith("[user: Please provide a self-contained Python script")
    with_system = load_set("livecodebench", FILES / "livecodebench.jsonl").items[0]
    assert prompt_of(with_system, Tokens()).startswith("[system: You are an expert Python programmer.")
    plain = load_set("math500", FILES / "math500.jsonl", "plain").items[0]
    assert prompt_of(plain, Tokens()) == plain.text == "What is $\\frac{1}{3}$?"
    stream = PromptStream(tokenize_prompts(items[:1], Tokens(), 10_000), seed=1)
    (prompt,) = stream.take(1)
    assert prompt.text == prompt_of(items[0], Tokens()) and prompt.tokens == tuple(map(ord, prompt.text))
    chat = load_set("math500", FILES / "math500.jsonl", "chat").items
    assert digest_of(chat) != digest_of(load_set("math500", FILES / "math500.jsonl", "plain").items)


def test_a_tokenizer_without_a_chat_template_says_what_to_do() -> None:
    tokenizer = load_tokenizer(REPOSITORY / "examples" / "quickstart" / "base")
    item = load_set("math500", FILES / "math500.jsonl", "boxed_chat").items[0]
    with pytest.raises(UserError, match=r"its chat template cannot write this prompt .*set prompt to a template"):
        prompt_of(item, tokenizer)
    tokenizer.backend.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}|{% endfor %}assistant:"
    assert prompt_of(item, tokenizer) == f"user: {item.text}|assistant:"
