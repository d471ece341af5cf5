"""Prompt templates: each paper's where it prints one, else what the public code of the paper or of the data set uses.

A template is data. Where `chat` is set, its text is the message of a user, after `system` where there is one, and the
model's own chat template writes both; otherwise the text is the whole prompt, markers of a family of models included.
Of the four papers only 2510.04028 prints its prompt as text (`boxed_prompt`), the same for every model and every set of
problems.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

from megasharp.common.errors import UserError


def boxed_prompt(question: str) -> str:
    r"""The ChatML prompt of 2510.04028 (appendix C.2, after Zeng et al. 2025), verbatim; a response puts `\boxed{}`.

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
_COUNTDOWN = (
    "{question} You can use basic arithmetic operations (+, -, *, /) and each number can only be used once. Show your "
    "work in <think> </think> tags. And return the final answer in <answer> </answer> tags, for example <answer> "
    "(1 + 2) / 3 </answer>."
)
_PROGRAMMER = (
    "You are an expert Python programmer. You will be given a question (problem specification) and will generate a "
    "correct Python program that matches the specification and passes all tests."
)


@dataclass(frozen=True, slots=True)
class Template:
    """A prompt with a place for the question, and where it is from.

    Example: `Template("Q: {question}\\nA:", "ours").text_of("1+1?")` is `"Q: 1+1?\\nA:"`.
    """

    text: str
    source: str
    chat: bool = False
    system: str = ""

    def text_of(self, question: str) -> str:
        """The text with the question in its place; a question may hold braces."""
        before, after = self.text.split(_HERE)
        return f"{before}{question}{after}"

    def turns_of(self, question: str) -> tuple[tuple[str, str], ...]:
        """The messages, role and text, for the model's chat template; none where the text is the whole prompt."""
        if not self.chat:
            return ()
        system = (("system", self.system),) if self.system else ()
        return (*system, ("user", self.text_of(question)))


TEMPLATES: dict[str, Template] = {
    "boxed_chatml": Template(boxed_prompt(_HERE), "2510.04028, appendix C.2, verbatim: the same for every model"),
    "boxed_qwen": Template(
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        f"<|im_start|>user\n{_HERE}\n{_BOX}<|im_end|>\n<|im_start|>assistant\n",
        "code of 2510.14807 and 2506.01347 (rl_dataset.py, type qwen, the default of both): one line break less",
    ),
    "boxed_llama": Template(
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nYou are a helpful assistant.<|eot_id|>"
        f"<|start_header_id|>user<|end_header_id|>\n\n{_HERE}\n{_BOX}<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "code of 2510.14807 and 2506.01347 (rl_dataset.py, type llama)",
    ),
    "step_by_step": Template(
        f"Question:\n{_HERE}\nAnswer:\nLet's think step by step.\n",
        "code of 2510.14807 and 2506.01347 (rl_dataset.py, type simple): for base models, asks for no box",
    ),
    "boxed_chat": Template(f"{_HERE}\n{_BOX}", "boxed_chatml's user message, in the model's own chat template", True),
    "boxed_verl": Template(
        f"{_HERE} Let's think step by step and output the final answer within \\boxed{{}}.",
        "verl's math_dataset.py, and the code of a 2511.19942 author; 2601.15609 names verl's recipes and prints none",
        True,
    ),
    "dapo": Template(
        "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
        f"$Answer (without quotes) where $Answer is the answer to the problem.\n\n{_HERE}\n\n"
        'Remember to put your answer on its own line after "Answer:".',
        "the rows of DAPO-Math-17k",
        True,
    ),
    "countdown_qwen": Template(
        "<|im_start|>system\nYou are a helpful assistant. You first thinks about the reasoning process in the mind and "
        f"then provides the user with the answer.<|im_end|>\n<|im_start|>user\n {_COUNTDOWN}<|im_end|>\n"
        "<|im_start|>assistant\nLet me solve this step by step.\n<think>",
        "TinyZero's countdown.py, type qwen-instruct, which 2511.19942 builds on",
    ),
    "countdown_base": Template(
        "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The "
        "assistant first thinks about the reasoning process in the mind and then provides the user with the answer.\n"
        f"User: {_COUNTDOWN}\nAssistant: Let me solve this step by step.\n<think>",
        "TinyZero's countdown.py, type base",
    ),
    "livecodebench": Template(
        f"{_HERE}### Answer: (use the provided format with backticks)\n\n",
        "LiveCodeBench's prompts/code_generation.py, for chat models; 2510.14807 prints none",
        True,
        _PROGRAMMER,
    ),
    "deepcoder": Template(
        f"{_PROGRAMMER}\n\n{_HERE}### Answer: (use the provided format with backticks)\n\n",
        "rllm's fetch_live_code_bench_system_prompt, which DeepCoder is trained with; 2510.14807 prints none",
        True,
    ),
    "evalplus": Template(
        "Please provide a self-contained Python script that solves the following problem in a markdown code block:\n"
        f"```\n{_HERE}\n```\n",
        "EvalPlus' codegen.py, without the beginning of an answer that it adds; 2510.14807 prints none",
        True,
    ),
    "chat": Template(_HERE, "the question alone, in the model's own chat template", True),
    "plain": Template(_HERE, "the question alone"),
}


def template_named(name: str) -> Template:
    """The template of that name. Raises UserError, with near names, where there is none."""
    if name not in TEMPLATES:
        near = " or ".join(get_close_matches(name, TEMPLATES, n=3, cutoff=0.5)) or ", ".join(TEMPLATES)
        raise UserError(f"prompt: no template {name!r}; did you mean {near}? see megasharp data list")
    return TEMPLATES[name]
