r"""The prompt that asks for an answer in a box: 2510.04028's, the same for every model and every set of problems."""

from __future__ import annotations


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
