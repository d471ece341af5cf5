"""A Hugging Face model for the studies that measure one: loaded, and sampled from its own distribution, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megasharp.common.errors import UserError, one_line
from megasharp.tasks.countdown import CountdownAnswer, CountdownProblem, prompt_text, verify
from megasharp.tasks.tokenizer import TextTokenizer

# Smaller models than this are slower on two threads than on one.
ONE_THREAD_BELOW = 4_000_000


def load_model(folder: Path) -> Any:
    """Load the causal language model in `folder`, in float32. Raises UserError where there is none."""
    # Imported here because it takes seconds, which listing the studies must not.
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, dtype=torch.float32, trust_remote_code=False
        )
    except Exception as error:  # transformers raises many kinds here, and all mean the same to the user
        raise UserError(
            f"{folder}: cannot load its model ({one_line(error)}); give a folder of a causal language model"
        ) from error
    return model.eval()


def parameter_count(model: Any) -> int:
    """Return the number of the model's parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


@contextmanager
def threads_for(model: Any) -> Iterator[None]:
    """Use one thread for a small model, and what torch was set to otherwise."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if parameter_count(model) < ONE_THREAD_BELOW else threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def draw_responses(
    model: Any, tokenizer: TextTokenizer, prompts: Sequence[tuple[int, ...]], count: int, longest: int, seed: int
) -> list[tuple[int, tuple[int, ...]]]:
    """Sample `count` responses per prompt, uncut, at temperature 1: (prompt, tokens with the end token)."""
    responses = []
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for place, prompt in enumerate(prompts):
            out = model.generate(
                torch.tensor([prompt] * count),
                attention_mask=torch.ones(count, len(prompt), dtype=torch.long),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=longest,
                eos_token_id=list(tokenizer.stop_token_ids),
                pad_token_id=tokenizer.pad_token_id,
            )
            for tokens in out[:, len(prompt) :].tolist():
                ends = [index for index, token in enumerate(tokens) if token in tokenizer.stop_token_ids]
                responses.append((place, tuple(tokens[: ends[0] + 1] if ends else tokens)))
    return responses


def answer_countdown(
    model: Any, tokenizer: TextTokenizer, problems: Sequence[CountdownProblem], count: int, longest: int, seed: int
) -> tuple[list[tuple[int, ...]], list[tuple[int, tuple[int, ...]]], list[float]]:
    """Sample `count` responses to each problem; return prompts, (problem, tokens) of each response, and its reward."""
    prompts = [tokenizer.encode(prompt_text(problem.numbers, problem.target)) for problem in problems]
    with threads_for(model):
        responses = draw_responses(model, tokenizer, prompts, count, longest, seed)
    answers = [CountdownAnswer(problem.numbers, problem.target) for problem in problems]
    rewards = [verify(tokenizer.decode(tokens), answers[problem]).reward for problem, tokens in responses]
    return prompts, responses, rewards
