"""Prompt templates: the papers' own words, questions with any signs in them, and prompts as models read them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from cases import each_case
from chat_models import write_tokenizer

from megasharp.common.errors import UserError
from megasharp.tasks.judge import TaskItem, digest_of
from megasharp.tasks.math import MathAnswer
from megasharp.tasks.prompts import TEMPLATES, by_chat, template_named
from megasharp.tasks.sets import SETS
from megasharp.tasks.sets.load import load_set
from megasharp.tasks.stream import PromptStream, ReadPrompt, read_prompt, tokenize_prompts
from megasharp.tasks.table import TASKS, load_items
from megasharp.tasks.tokenizer import load_tokenizer

FILES = Path(__file__).parent / "files" / "sets"
TASK_FILES = Path(__file__).parents[3] / "golden" / "tasks"
TAUGHT = ("qwen", "llama")
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
    if SETS[name].task in ("synlogic", "instructions"):
        asked = "{question}"  # each of its questions says what form its answer has
    if name == "dapo_math_17k":
        asked = "Answer: $Answer"  # the line of its rows, which the verifier reads beside boxes
    for template in (TEMPLATES[SETS[name].prompt], TEMPLATES[by_chat(SETS[name].prompt)]):
        assert asked in template.text + template.system and template.fits(SETS[name].task)


def test_the_countdown_set_asks_what_the_countdown_task_asks() -> None:
    path = FILES / "countdown_3to4.jsonl"
    texts = [item.text for item in load_set("countdown_3to4", path).items]
    assert texts == [item.text for item in load_items("countdown_3to4", path)]
    assert texts[0] == TINYZERO


def test_an_unknown_template_names_near_ones() -> None:
    with pytest.raises(UserError, match="no template 'bxed_qwen'; did you mean boxed_qwen"):
        template_named("bxed_qwen")


class Tokens:
    """A tokenizer of one token per character whose chat template is brackets."""

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))

    plain = encode

    def chat(self, turns: tuple[tuple[str, str], ...], tools: str = "") -> str:
        return "".join(f"[{role}: {text}]" for role, text in turns) + "[assistant: "


def test_a_chat_prompt_is_written_by_the_model_s_template() -> None:
    items = load_set("humaneval_plus", FILES / "humaneval_plus.jsonl").items
    assert read_prompt(items[0], Tokens()).text.startswith("[user: Please provide a self-contained Python script")
    with_system = load_set("livecodebench", FILES / "livecodebench.jsonl").items[0]
    assert read_prompt(with_system, Tokens()).text.startswith("[system: You are an expert Python programmer.")
    plain = load_set("math500", FILES / "math500.jsonl", "plain").items[0]
    assert read_prompt(plain, Tokens()).text == plain.text == "What is $\\frac{1}{3}$?"
    stream = PromptStream(tokenize_prompts(items[:1], Tokens(), 10_000), seed=1)
    (prompt,) = stream.take(1)
    assert prompt.text == read_prompt(items[0], Tokens()).text and prompt.tokens == tuple(map(ord, prompt.text))
    chat = load_set("math500", FILES / "math500.jsonl", "chat").items
    assert digest_of(chat) != digest_of(load_set("math500", FILES / "math500.jsonl", "plain").items)


@each_case("task", [name for name, row in TASKS.items() if row.prompt and not row.extra])
def test_a_task_s_file_is_asked_by_its_published_template(task: str) -> None:
    """Digests of stored runs are of these texts."""
    (item, *_) = load_items(task, TASK_FILES / f"{'countdown_3to4' if task == 'countdown_3' else task}.jsonl")
    assert item.question and item.text == TEMPLATES[TASKS[task].prompt].text_of(item.question)


@each_case("name", [name for name, template in TEMPLATES.items() if template.in_chat])
def test_what_is_for_one_family_of_models_has_messages_for_all(name: str) -> None:
    template, messages = TEMPLATES[name], TEMPLATES[by_chat(name)]
    assert messages.chat and not messages.markers and messages.tasks == template.tasks
    assert all(text.strip() in template.text_of(QUESTION) for _, text in messages.turns_of(QUESTION))


TURNS = (("system", "Add."), ("user", "1+1?"), ("assistant", "2"), ("user", "2+1?"))
ASKED = TaskItem("p", "math", "2+1?", MathAnswer("3"), "own.jsonl", TURNS)


def test_every_message_is_in_the_prompt_and_a_special_token_is_one_token(tmp_path: Path) -> None:
    qwen, llama = (load_tokenizer(write_tokenizer(tmp_path / family, family)) for family in ("qwen", "llama"))
    read = read_prompt(ASKED, qwen)
    assert read.text == (
        "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
        "<|im_start|>user\n2+1?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [read.tokens.count(number) for number in (257, 258)] == [5, 4]
    read = read_prompt(ASKED, llama)
    assert read.tokens.count(256) == read.text.count("<|begin_of_text|>") == 1 and read.tokens[0] == 256
    assert "Today Date: 26 Jul 2024\n\nAdd.<|eot_id|>" in read.text
    llama.backend.chat_template = (
        "\n  {% if strftime_now is defined %}{{ strftime_now('%Y-%m-%d, %A %H:%M').split('-') }}{% endif %}"
        "{{ messages[0].content }}"
    )
    assert llama.chat(TURNS) == "\n['2024', '07', '26, Friday 00:00']Add.", "whatever the day is"


def test_a_base_model_reads_the_plain_text_begun_as_its_tokenizer_begins_texts(tmp_path: Path) -> None:
    qwen, llama = (load_tokenizer(write_tokenizer(tmp_path / family, family, chat=False)) for family in TAUGHT)
    assert read_prompt(ASKED, qwen) == ReadPrompt("Add.\n\n1+1?\n\n2\n\n2+1?", qwen.encode("Add.\n\n1+1?\n\n2\n\n2+1?"))
    read = read_prompt(ASKED, llama)
    assert read.tokens == (256, *llama.encode(read.text)) == tuple(llama.backend.encode(read.text))
    assert llama.written_out(read.tokens).startswith("<|begin_of_text|>Add.\n\n1+1?")
    own = replace(ASKED, turns=(), text=TEMPLATES["boxed_llama"].text_of("1+1?"))
    assert read_prompt(own, llama).tokens.count(256) == 1, "a template with a beginning of its own"
    assert read_prompt(ASKED, llama.with_bos(False)).tokens == read.tokens[1:]
    assert read_prompt(ASKED, llama.with_bos(None)).tokens == read.tokens
    with pytest.raises(UserError, match=r"data\.bos: the tokenizer of .*qwen has no begin-of-text token"):
        qwen.with_bos(True)


def test_a_chat_template_that_cannot_write_the_messages_says_what_to_set(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, "qwen"))
    tokenizer.backend.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(UserError, match=r"cannot write messages of system, user, .*System role.*; set data\.prompt"):
        read_prompt(ASKED, tokenizer)
