"""Prompt templates: each paper's where it prints one, else what the public code of the paper or of the data set uses.

A template is data. Where `chat` is set, its text is the message of a user, after `system` where there is one, and the
model's own chat template writes both; otherwise the text is the whole prompt, markers of a family of models included.
Of the four papers only 2510.04028 prints its prompt as text (`boxed_prompt`), the same for every model and every set of
problems.

A set or a task has the template of its publication. Where that is written for one family of models, runs that name no
template ask by its `in_chat`: the same words as messages, which every model's own chat template can write.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

from megasharp.common.errors import UserError
from megasharp.tasks.judge import TaskItem


def boxed_prompt(question: str) -> str:
    r"""Return the ChatML prompt of 2510.04028 (C.2, after Zeng et al. 2025), verbatim; a response puts `\boxed{}`.

    It is text as it stands: the tokenizer of a Qwen model reads the markers as its own.
    """
    return (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        f"<|im_start|>user\n{question}\n"
        "Please reason step by step, and put your final answer within \\boxed{}.\n<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


_HERE = "{question}"
_BOX = "Please reason step by step, and put your final answer within \\boxed{}."
_TAGS = "Think step by step, then give your final answer alone between <answer> and </answer>."
_THINKER = (
    "You are a helpful assistant. You first thinks about the reasoning process in the mind and then provides the user "
    "with the answer."
)
_COUNTDOWN = (
    "{question} You can use basic arithmetic operations (+, -, *, /) and each number can only be used once. Show your "
    "work in <think> </think> tags. And return the final answer in <answer> </answer> tags, for example <answer> "
    "(1 + 2) / 3 </answer>."
)
_PROGRAMMER = (
    "You are an expert Python programmer. You will be given a question (problem specification) and will generate a "
    "correct Python program that matches the specification and passes all tests."
)


# Tasks whose verifiers read what such a template asks for.
_BOXED = ("math", "choice", "short_answer")
_EQUATION = ("countdown_3", "countdown_3to4")
_MARKER = re.compile(r"<\|[^<>|\s]+\|>")


@dataclass(frozen=True, slots=True)
class Template:
    """A prompt with a place for the question, and where it is from.

    `tasks` are those whose verifiers read the form of answer that it asks for; empty where it asks for none. `in_chat`
    names the template that has its words as messages, where its text is for one family of models. One with a `line`
    asks for a last line `Answer: ...`.

    Example: `Template("Q: {question}\\nA:", "ours").text_of("1+1?")` is `"Q: 1+1?\\nA:"`.
    """

    text: str
    source: str
    chat: bool = False
    system: str = ""
    tasks: tuple[str, ...] = ()
    in_chat: str = ""
    line: bool = False

    def text_of(self, question: str) -> str:
        """Return the text with the question in its place; a question may hold braces."""
        before, after = self.text.split(_HERE)
        return f"{before}{question}{after}"

    def turns_of(self, question: str) -> tuple[tuple[str, str], ...]:
        """Return messages, role and text, for the model's chat template; none where the text is the whole prompt."""
        if not self.chat:
            return ()
        system = (("system", self.system),) if self.system else ()
        return (*system, ("user", self.text_of(question)))

    @property
    def markers(self) -> list[str]:
        """The special tokens that its own words name, such as `<|im_start|>`; those of a question are not counted."""
        return markers_in(self.system + self.text)

    def fits(self, task: str) -> bool:
        """Return whether the task's verifier reads the form of answer that it asks for."""
        return not self.tasks or task in self.tasks


TEMPLATES: dict[str, Template] = {
    "boxed_chatml": Template(
        boxed_prompt(_HERE),
        "2510.04028, appendix C.2, verbatim: the same for every model",
        tasks=_BOXED,
        in_chat="boxed_chat",
    ),
    "boxed_qwen": Template(
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        f"<|im_start|>user\n{_HERE}\n{_BOX}<|im_end|>\n<|im_start|>assistant\n",
        "code of 2510.14807 and 2506.01347 (rl_dataset.py, type qwen, the default of both): one line break less",
        tasks=_BOXED,
        in_chat="boxed_chat",
    ),
    "boxed_llama": Template(
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nYou are a helpful assistant.<|eot_id|>"
        f"<|start_header_id|>user<|end_header_id|>\n\n{_HERE}\n{_BOX}<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "code of 2510.14807 and 2506.01347 (rl_dataset.py, type llama)",
        tasks=_BOXED,
        in_chat="boxed_chat",
    ),
    "step_by_step": Template(
        f"Question:\n{_HERE}\nAnswer:\nLet's think step by step.\n",
        "code of 2510.14807 and 2506.01347 (rl_dataset.py, type simple): for base models, asks for no box",
    ),
    "boxed_chat": Template(
        f"{_HERE}\n{_BOX}", "boxed_chatml's user message, in the model's own chat template", True, tasks=_BOXED
    ),
    "boxed_verl": Template(
        f"{_HERE} Let's think step by step and output the final answer within \\boxed{{}}.",
        "verl's math_dataset.py, and the code of a 2511.19942 author; 2601.15609 names verl's recipes and prints none",
        True,
        tasks=_BOXED,
    ),
    "dapo": Template(
        "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
        f"$Answer (without quotes) where $Answer is the answer to the problem.\n\n{_HERE}\n\n"
        'Remember to put your answer on its own line after "Answer:".',
        "the rows of DAPO-Math-17k",
        True,
        tasks=("math",),
        line=True,
    ),
    "countdown_qwen": Template(
        f"<|im_start|>system\n{_THINKER}<|im_end|>\n<|im_start|>user\n {_COUNTDOWN}<|im_end|>\n"
        "<|im_start|>assistant\nLet me solve this step by step.\n<think>",
        "TinyZero's countdown.py, type qwen-instruct, which 2511.19942 builds on",
        tasks=_EQUATION,
        in_chat="countdown_chat",
    ),
    "countdown_chat": Template(
        _COUNTDOWN,
        "countdown_qwen's messages, in the model's own chat template, without the beginning of an answer",
        True,
        _THINKER,
        _EQUATION,
    ),
    "countdown_base": Template(
        "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The "
        "assistant first thinks about the reasoning process in the mind and then provides the user with the answer.\n"
        f"User: {_COUNTDOWN}\nAssistant: Let me solve this step by step.\n<think>",
        "TinyZero's countdown.py, type base",
        tasks=_EQUATION,
    ),
    "livecodebench": Template(
        f"{_HERE}### Answer: (use the provided format with backticks)\n\n",
        "LiveCodeBench's prompts/code_generation.py, for chat models; 2510.14807 prints none",
        True,
        _PROGRAMMER,
        ("code",),
    ),
    "deepcoder": Template(
        f"{_PROGRAMMER}\n\n{_HERE}### Answer: (use the provided format with backticks)\n\n",
        "rllm's fetch_live_code_bench_system_prompt, which DeepCoder is trained with; 2510.14807 prints none",
        True,
        tasks=("code",),
    ),
    "evalplus": Template(
        "Please provide a self-contained Python script that solves the following problem in a markdown code block:\n"
        f"```\n{_HERE}\n```\n",
        "EvalPlus' codegen.py, without the beginning of an answer that it adds; 2510.14807 prints none",
        True,
        tasks=("code",),
    ),
    "tags_chatml": Template(
        f"<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n{_HERE}\n{_TAGS}<|im_end|>\n"
        "<|im_start|>assistant\n",
        "ours, for reasoning_gym",
        tasks=("reasoning_gym",),
        in_chat="tags_chat",
    ),
    "tags_chat": Template(
        f"{_HERE}\n{_TAGS}",
        "tags_chatml's user message, in the model's own chat template",
        True,
        tasks=("reasoning_gym",),
    ),
    "chatml": Template(
        f"<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n{_HERE}<|im_end|>\n"
        "<|im_start|>assistant\n",
        "ours, for knights, whose puzzles say what form their answer has",
        in_chat="chat",
    ),
    "chat": Template(_HERE, "the question alone, in the model's own chat template", True),
    "plain": Template(_HERE, "the question alone", in_chat="chat"),
}


def markers_in(text: str) -> list[str]:
    """Return the names of special tokens in a text, such as `<|im_start|>`, each once."""
    return [*dict.fromkeys(_MARKER.findall(text))]


def template_named(name: str) -> Template:
    """Return the template of that name. Raises UserError, with near names, where there is none."""
    if name not in TEMPLATES:
        near = " or ".join(get_close_matches(name, TEMPLATES, n=3, cutoff=0.5)) or ", ".join(TEMPLATES)
        raise UserError(f"prompt: no template {name!r}; did you mean {near}? see megasharp data list")
    return TEMPLATES[name]


def by_chat(name: str) -> str:
    """Return the template of a run that names none, where a set or task has that of `name`; empty stays empty."""
    return name and (template_named(name).in_chat or name)


def asked(items: Sequence[TaskItem], name: str) -> list[TaskItem]:
    """Return problems asked by a named template. Raises UserError where their prompt, their task's, has no question."""
    for item in items:
        if not item.question:
            raise UserError(f"prompt: {name} has no place in task {item.task}, whose prompt is its own; leave it out")
    return worded(items, template_named(name))


def worded(items: Sequence[TaskItem], template: Template) -> list[TaskItem]:
    """Return problems with the words of a template around their questions."""
    return [
        replace(
            item,
            text=template.text_of(item.question),
            turns=template.turns_of(item.question),
            answer=item.answer.on_a_line(template.line),
        )
        for item in items
    ]
