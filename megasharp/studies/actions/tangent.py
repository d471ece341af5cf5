"""Proposition 1 of 2510.04028 and its proof (B.3), on the quickstart's base model by its exact tangent kernel.

A sampled token y moves the logits' input by dz = lr A (one_hot(y) - pi); one gradient step then changes the log-probs
at that place, to first order, by (I - 1 pi') K dz, with K = J J' of the logits' Jacobian J [V, P]. The proof adds that
K hardly changes in training, so that dz decides direction and size of the change. Three measurements, all ours: the
error of the first-order change by the size of the step, that change beside the one of a table of logits (K = I), and
the change of K over some steps of SGD on the advantages of sampled responses.

Sizes are root mean squares of the predicted change over the vocabulary, in nats. Places are in responses that the model
itself samples, with tokens that it is not sure of. Parameters are float64, but the model's norms compute in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from megasharp.config.core import SHIPPED
from megasharp.studies.claims import outcome
from megasharp.studies.language_model import answer_countdown, load_model, threads_for
from megasharp.studies.study import Cell, Claim, Table
from megasharp.tasks.countdown import make_problem
from megasharp.tasks.tokenizer import load_tokenizer

MODEL = SHIPPED / "examples" / "quickstart" / "base"
QUESTIONS, NUMBERS, RESPONSES, MAX_RESPONSE_TOKENS = 12, 4, 8, 20
PLACES, SURE = 8, 0.9
SIZES = (0.01, 0.03, 0.1, 0.3, 1.0)
# Steps of SGD, and after which ones the kernel is taken: the last moves the responses' tokens by a third of a nat.
LR, STEPS = 0.02, (2, 6, 12)
# "Nearly constant" is granted up to this relative change, "governs the direction" from this cosine on, and "the size"
# up to this factor between places.
CONSTANT, SAME_DIRECTION, SAME_SIZE = 0.1, 0.9, 2.0
# The relative error of a first-order change falls tenfold from .1 to .01 nats; at least this counts.
FALL = 5.0


@dataclass(frozen=True, slots=True)
class FirstOrder:
    """One place. `errors` by SIZES, relative to the predicted change; `cosine` and `gain` compare K dz with dz."""

    errors: tuple[float, ...]
    cosine: float
    gain: float


@dataclass(frozen=True, slots=True)
class Drift:
    """After `steps` steps: the tokens' mean absolute change of log-prob, and each place's relative change of K."""

    steps: int
    moved: float
    changes: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """Everything that was measured on the model."""

    places: tuple[FirstOrder, ...]
    drifts: tuple[Drift, ...]


def jacobian(logits_V: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Return the gradient of every logit with respect to all parameters, [V, P]."""
    rows = [torch.autograd.grad(logit, parameters, retain_graph=True) for logit in logits_V]
    return torch.stack([torch.cat([part.flatten() for part in row]) for row in rows])


def tangent_kernel(logits_V: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Return J J', [V, V]."""
    jacobian_VP = jacobian(logits_V, parameters)
    return jacobian_VP @ jacobian_VP.T


def to_log_probs(policy_V: Tensor, logit_change_V: Tensor) -> Tensor:
    """Return (I - 1 pi') dz, the first-order change of log-probs."""
    return logit_change_V - policy_V @ logit_change_V


def first_order(logits: Callable[[], Tensor], parameters: Sequence[Tensor], sampled: int) -> FirstOrder:
    """Step along the gradient of log pi(sampled) at every size, and compare with the prediction; changes nothing."""
    before_V = logits()
    jacobian_VP = jacobian(before_V, parameters)
    before_V = before_V.detach()
    policy_V = before_V.softmax(-1)
    pull_V = torch.eye(len(policy_V), dtype=policy_V.dtype)[sampled] - policy_V
    predicted_V = to_log_probs(policy_V, jacobian_VP @ (jacobian_VP.T @ pull_V))
    table_V = to_log_probs(policy_V, pull_V)
    start_P, errors = parameters_to_vector(parameters).detach().clone(), []
    for size in SIZES:
        rate = size / predicted_V.square().mean().sqrt()
        vector_to_parameters(start_P + rate * (jacobian_VP.T @ pull_V), parameters)
        with torch.no_grad():
            change_V = logits().log_softmax(-1) - before_V.log_softmax(-1)
        errors.append(float((change_V - rate * predicted_V).norm() / (rate * predicted_V).norm()))
    vector_to_parameters(start_P, parameters)
    cosine = torch.nn.functional.cosine_similarity(predicted_V, table_V, 0)
    return FirstOrder(tuple(errors), float(cosine), float(predicted_V.norm() / table_V.norm()))


def drift(
    logits: Sequence[Callable[[], Tensor]],
    log_probs: Callable[[], Tensor],
    weight: Tensor,
    parameters: Sequence[Tensor],
) -> tuple[Drift, ...]:
    """Take SGD steps on sum(weight * log_probs) and follow the kernel at every place; changes the parameters.

    `weight` is zero where `log_probs` has no token of a response.
    """
    counted = weight != 0.0
    kernels = [tangent_kernel(place(), parameters) for place in logits]
    start, found = log_probs().detach(), []
    for step in range(1, max(STEPS) + 1):
        gradients = torch.autograd.grad((weight * log_probs()).sum(), parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.add_(LR * gradient)
        if step in STEPS:
            pairs = zip((tangent_kernel(place(), parameters) for place in logits), kernels, strict=True)
            changes = tuple(float((now - then).norm() / then.norm()) for now, then in pairs)
            found.append(Drift(step, float((log_probs().detach() - start)[counted].abs().mean()), changes))
    return tuple(found)


def measure(seed: int, folder: Path = MODEL) -> Measured | None:
    """Measure the model in `folder` on Countdown problems; None where there is no such folder."""
    if not folder.is_dir():
        return None
    tokenizer, model, rng = load_tokenizer(folder), load_model(folder), Random(seed)
    problems = [make_problem(rng, NUMBERS) for _ in range(QUESTIONS)]
    prompts, responses, rewards = answer_countdown(model, tokenizer, problems, RESPONSES, MAX_RESPONSE_TOKENS, seed)
    with threads_for(model):
        model.double()
        parameters = list(model.parameters())
        places = _places(model, [(prompts[question], response) for question, response in responses], rng)
        orders = tuple(first_order(place, parameters, sampled) for place, sampled in places)
        log_probs, weight = _batch(model, prompts, responses, np.array(rewards).reshape(QUESTIONS, -1))
        return Measured(orders, drift([place for place, _ in places], log_probs, weight, parameters))


def _places(
    model: Any, texts: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], rng: Random
) -> list[tuple[Callable[[], Tensor], int]]:
    """Pick random places whose next token the model gave no more than SURE: logits there, and that token."""
    found: list[tuple[Callable[[], Tensor], int]] = []
    for prompt, response in rng.sample(list(texts), len(texts)):
        place = rng.randrange(len(response))
        tokens = torch.tensor([prompt + response[:place]])

        def logits(tokens: Tensor = tokens) -> Tensor:
            result: Tensor = model(tokens).logits[0, -1]
            return result

        with torch.no_grad():
            sure = float(logits().softmax(-1)[response[place]])
        if sure <= SURE:
            found.append((logits, response[place]))
        if len(found) == PLACES:
            break
    return found


def _batch(
    model: Any,
    prompts: Sequence[tuple[int, ...]],
    responses: Sequence[tuple[int, tuple[int, ...]]],
    reward_QG: np.ndarray[Any, np.dtype[np.float64]],
) -> tuple[Callable[[], Tensor], Tensor]:
    """Return the log-probs of all responses' tokens and their weights: advantages over tokens and responses."""
    centred_QG = reward_QG - reward_QG.mean(axis=1, keepdims=True)
    advantage_S = (centred_QG / (reward_QG.std(axis=1, ddof=1, keepdims=True) + 1e-6)).ravel()
    longest = max(len(prompts[question]) + len(response) for question, response in responses)
    token_ST = torch.zeros(len(responses), longest, dtype=torch.long)
    weight_ST = torch.zeros(len(responses), longest - 1, dtype=torch.float64)
    for row, (question, response) in enumerate(responses):
        text, first = prompts[question] + response, len(prompts[question]) - 1
        token_ST[row, : len(text)] = torch.tensor(text)
        weight_ST[row, first : len(text) - 1] = advantage_S[row] / len(response) / len(responses)

    def log_probs() -> Tensor:
        logits_STV: Tensor = model(token_ST).logits[:, :-1]
        return logits_STV.log_softmax(-1).gather(-1, token_ST[:, 1:, None])[..., 0]

    return log_probs, weight_ST


def tabulate(measured: Measured) -> tuple[Table, ...]:
    """Make a table of the first-order error by size, and one of the kernel's change by step."""
    by_size = zip(SIZES, zip(*(place.errors for place in measured.places), strict=True), strict=True)
    errors: list[tuple[Cell, ...]] = [(size, *_range(each)) for size, each in by_size]
    changes: list[tuple[Cell, ...]] = [(one.steps, one.moved, *_range(one.changes)) for one in measured.drifts]
    ends = ("least", "median", "largest")
    return (
        Table("first_order", "proposition 1: relative error by size of the change", ("nats", *ends), tuple(errors)),
        Table(
            "kernel_drift",
            "B.3: relative change of the tangent kernel over SGD steps",
            ("steps", "tokens moved, nats", *ends),
            tuple(changes),
        ),
    )


def _range(values: Sequence[float]) -> tuple[float, float, float]:
    return min(values), float(np.median(values)), max(values)


def judge(measured: Measured) -> tuple[Claim, ...]:
    """Judge the proposition and the proof's two sentences on the kernel."""
    return _order(measured), _constant(measured), _governs(measured)


def _order(measured: Measured) -> Claim:
    small, large = SIZES.index(0.01), SIZES.index(0.1)
    holds = sum(place.errors[large] > FALL * place.errors[small] for place in measured.places)
    medians = [float(np.median([place.errors[index] for place in measured.places])) for index in range(len(SIZES))]
    shown = ", ".join(f"{error:.1%} at {size:g}" for size, error in zip(SIZES, medians, strict=True))
    ours = (
        f"median relative error by nats moved: {shown}; falls with the step in {holds} of {len(measured.places)} places"
    )
    statement = "the change of log-probs is (I - 1 pi') K dz, to first order"
    return Claim("prop 1", statement, "first order", ours, outcome(holds, len(measured.places)))


def _constant(measured: Measured) -> Claim:
    last = measured.drifts[-1]
    kept = sum(change <= CONSTANT for change in last.changes)
    shown = "; ".join(f"{np.median(d.changes):.0%} after {d.steps} ({d.moved:.2f} nats)" for d in measured.drifts)
    ours = (
        f"median relative change by SGD steps, with the mean move of the tokens' log-probs: {shown}; at the end "
        f"{min(last.changes):.0%} to {max(last.changes):.0%}, within {CONSTANT:.0%} in {kept} of {len(last.changes)}"
    )
    statement = "the tangent kernel stays nearly constant in training"
    # One quiet place of several does not make it nearly constant.
    holds = kept if np.median(last.changes) <= CONSTANT else 0
    return Claim("B.3", statement, "nearly constant", ours, outcome(holds, len(last.changes)))


def _governs(measured: Measured) -> Claim:
    cosines, gains = ([getattr(place, name) for place in measured.places] for name in ("cosine", "gain"))
    alike = sum(cosine >= SAME_DIRECTION for cosine in cosines)
    same_size = max(gains) <= SAME_SIZE * min(gains)
    ours = (
        f"cosine with a table of logits {min(cosines):.2f} to {max(cosines):.2f}, at least {SAME_DIRECTION:g} in "
        f"{alike} of {len(cosines)} places; size of the change per dz {min(gains):.0f} to {max(gains):.0f}"
    )
    statement = "dz governs direction and size of the change (as in a table of logits)"
    return Claim("B.3", statement, "primarily governs", ours, outcome(alike + same_size, len(cosines) + 1))
