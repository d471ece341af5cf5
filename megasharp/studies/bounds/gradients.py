"""Appendix F of arXiv 2601.15609 on a Hugging Face model: do gradients of different questions' responses align?

The paper takes 1000 pairs of GSM8K questions, 8 responses each, and reports the mean inner product of their "logit
gradients" on Qwen3-0.6B: 1467.50 +- 363.97 [PAPER]. It does not say what the logit of a response is, so two readings
are measured: the sum over response tokens of their raw logits, and of their log-probs. They differ in kind: for
responses that the model itself samples, the gradient of the log-prob has mean zero (the score function), so its mean
inner product between questions is zero in expectation, whatever the model. Questions are Countdown problems, because
a generator and a verifier of them are at hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megasharp.studies.language_model import answer_countdown, load_model, parameter_count, threads_for
from megasharp.studies.softmax import Bools, Counts, Floats
from megasharp.tasks.countdown import make_problem
from megasharp.tasks.tokenizer import TextTokenizer, load_tokenizer

# The paper's 1000 pairs would take minutes; 24 questions make 276.
QUESTIONS = 24
RESPONSES = 8
NUMBERS = 4
# Temperature, length and truncation are not in the paper: the model's own distribution, nothing cut.
MAX_RESPONSE_TOKENS = 20
# Gradients with more entries are kept as a count sketch of this many: an inner product then errs by about
# |g| |g'| / 1024, and 192 of them take 0.8 GB whatever the model.
SKETCH = 2**20
READINGS = ("logit", "log-prob")


@dataclass(frozen=True, slots=True, eq=False)
class GradientKernel:
    """Inner products between the gradients of R responses; `gram_RR` has one matrix per reading of READINGS."""

    parameters: int
    question_R: Counts
    response_R: tuple[tuple[int, ...], ...]
    correct_R: Bools
    gram_RR: dict[str, Floats]


@dataclass(frozen=True, slots=True)
class Alignment:
    """Appendix F's numbers for one reading.

    `mean`, `deviation`: inner products between responses of different questions, and `cosine` their mean cosine;
    `positive`: the share of them that is > 0; `standard_error`: of the mean, over questions (jackknife);
    `absorbed`: their mean when each gradient carries the sign of its response's advantage;
    `self_alignment`, `cross_alignment`: mean diagonal and mean entry between distinct responses of one question;
    `dominated`: the share of questions whose smallest diagonal exceeds their largest entry between distinct responses.
    """

    mean: float
    deviation: float
    standard_error: float
    positive: float
    cosine: float
    absorbed: float
    self_alignment: float
    cross_alignment: float
    dominated: float


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """A model with its responses to Countdown questions: (question, tokens with the end token) for each response."""

    model: Any
    tokenizer: TextTokenizer
    prompts: tuple[tuple[int, ...], ...]
    responses: tuple[tuple[int, tuple[int, ...]], ...]
    correct_R: Bools


def sample_responses(folder: Path, seed: int) -> Samples:
    """Sample RESPONSES of the model in `folder` to each of QUESTIONS; float32, on the CPU.

    Raises UserError where the folder holds no causal language model with its tokenizer.
    """
    tokenizer, model = load_tokenizer(folder), load_model(folder)
    rng = Random(seed)
    problems = [make_problem(rng, NUMBERS) for _ in range(QUESTIONS)]
    prompts, responses, rewards = answer_countdown(model, tokenizer, problems, RESPONSES, MAX_RESPONSE_TOKENS, seed)
    return Samples(model, tokenizer, tuple(prompts), tuple(responses), np.array(rewards) > 0)


def measure(samples: Samples, seed: int) -> GradientKernel:
    """Take all inner products of the gradients of the sampled responses."""
    model, prompts = samples.model, samples.prompts
    with threads_for(model):
        grams = _grams(model, [(prompts[question], response) for question, response in samples.responses], seed)
    return GradientKernel(
        parameter_count(model),
        np.array([question for question, _ in samples.responses]),
        tuple(response for _, response in samples.responses),
        samples.correct_R,
        grams,
    )


def _grams(model: Any, texts: list[tuple[tuple[int, ...], tuple[int, ...]]], seed: int) -> dict[str, Floats]:
    grams = {}
    for reading in READINGS:
        gradients_R = torch.empty(len(texts), min(SKETCH, parameter_count(model)))
        for row, (prompt, response) in enumerate(texts):
            gradients_R[row] = flat_gradient(model, prompt, response, reading, seed)
        grams[reading] = (gradients_R @ gradients_R.T).double().numpy()
    return grams


def flat_gradient(model: Any, prompt: tuple[int, ...], response: tuple[int, ...], reading: str, seed: int) -> Tensor:
    """Return the gradient of a response's value, or its count sketch where it is longer than SKETCH."""
    value = response_value(model, prompt, response, reading)
    gradient = torch.autograd.grad(value, list(model.parameters()))
    return _flat(gradient, min(SKETCH, parameter_count(model)), seed)


def response_value(model: Any, prompt: tuple[int, ...], response: tuple[int, ...], reading: str) -> Tensor:
    """Sum over the response's tokens of their raw logits, or of their log-probs (scalar, differentiable)."""
    logits_TV: Tensor = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    scores_TV = logits_TV if reading == "logit" else logits_TV.log_softmax(-1)
    return scores_TV.gather(-1, torch.tensor(response)[:, None]).sum()


def _flat(gradients: tuple[Tensor, ...], width: int, seed: int) -> Tensor:
    """Flatten the gradient; to a count sketch (Charikar et al. 2002) where it is longer than `width`."""
    if sum(gradient.numel() for gradient in gradients) <= width:
        return torch.cat([gradient.flatten() for gradient in gradients])
    sketch = torch.zeros(width)
    for signed, bucket in _signed_buckets(gradients, width, seed):
        sketch.index_add_(0, bucket, signed)
    return sketch


def _signed_buckets(gradients: tuple[Tensor, ...], width: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    # The same seed for every response: inner products survive only if an entry meets the same bucket and sign.
    generator = torch.Generator().manual_seed(seed)
    for gradient in gradients:
        draw = torch.randint(2 * width, (gradient.numel(),), generator=generator)
        yield gradient.flatten() * (1 - 2 * (draw % 2)), draw // 2


def summarise(kernel: GradientKernel, reading: str) -> Alignment:
    """Compute Appendix F's numbers for one reading."""
    gram_RR = kernel.gram_RR[reading]
    length_R = np.sqrt(np.diagonal(gram_RR))
    apart_RR = kernel.question_R[:, None] != kernel.question_R[None, :]
    between = gram_RR[apart_RR]
    sign_R = np.where(kernel.correct_R, 1.0, -1.0)
    identity = {response: index for index, response in enumerate(dict.fromkeys(kernel.response_R))}
    which_R = np.array([identity[response] for response in kernel.response_R])
    distinct_RR = ~apart_RR & (which_R[:, None] != which_R[None, :])
    dominates = []
    for question in np.unique(kernel.question_R):
        own_R = kernel.question_R == question
        others = gram_RR[np.ix_(own_R, own_R)][distinct_RR[np.ix_(own_R, own_R)]]
        # A question with one distinct response says nothing about Assumption 3.3.
        if others.size:
            dominates.append(np.diagonal(gram_RR)[own_R].min() > others.max())
    return Alignment(
        mean=float(between.mean()),
        deviation=float(between.std()),
        standard_error=_jackknife_error(gram_RR, kernel.question_R),
        positive=float((between > 0).mean()),
        cosine=float((gram_RR / length_R / length_R[:, None])[apart_RR].mean()),
        absorbed=float((gram_RR * sign_R * sign_R[:, None])[apart_RR].mean()),
        self_alignment=float(np.diagonal(gram_RR).mean()),
        cross_alignment=float(gram_RR[distinct_RR].mean()),
        dominated=float(np.mean(dominates)) if dominates else float("nan"),
    )


def _jackknife_error(gram_RR: Floats, question_R: Counts) -> float:
    """Return the jackknife error of the mean between questions: pairs share questions, so each is left out once.

    NaN for two questions, where nothing is left between one.
    """
    questions = np.unique(question_R)
    if len(questions) < 3:
        return float("nan")
    means = []
    for left_out in questions:
        kept_R = question_R != left_out
        apart_RR = question_R[kept_R][:, None] != question_R[kept_R][None, :]
        means.append(gram_RR[np.ix_(kept_R, kept_R)][apart_RR].mean())
    count = len(questions)
    return float(np.sqrt((count - 1) / count * np.square(np.array(means) - np.mean(means)).sum()))


def repeated_share(kernel: GradientKernel) -> float:
    """Return the share of questions with a response sampled twice, for which the kernel is singular."""
    questions = np.unique(kernel.question_R)
    repeated = 0
    for question in questions:
        own = [kernel.response_R[row] for row in np.flatnonzero(kernel.question_R == question)]
        repeated += len(set(own)) < len(own)
    return repeated / len(questions)
