"""One question's update on another one, measured on a model: Assumption 3.2 and Appendix E of arXiv 2601.15609.

Assumption 3.2: the inner products between a response o' at q' and the responses o'' of q are those of the same o' at q
times one factor rho. Here q' is the next question; each response of q is read under its prompt as well.

Appendix E: fitting wanted shifts Delta at q with the least-norm update d = J' K^-1 Delta moves another response by
k' K^-1 Delta. Delta is GRPO's advantages times a size in nats. Three updates of one length are made: d itself, a plain
gradient step on sum A f, and Adam's first, which is the gradient's sign; the last two are not d, though the paper says
that usual optimizers find it. Only their direction is compared: the prediction is scaled to fit.

Section 4.1: how unevenly weights 1 / pi fall on the responses of one question.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from megasharp.studies.bounds.gradients import (
    MAX_RESPONSE_TOKENS,
    READINGS,
    GradientKernel,
    Samples,
    flat_gradient,
    response_value,
)
from megasharp.studies.claims import clearly_above, clearly_below, outcome
from megasharp.studies.language_model import draw_responses, threads_for
from megasharp.studies.softmax import Counts, Floats
from megasharp.studies.study import Cell, Claim, Outcome, Table

# Every other question for Assumption 3.2, the first of the questions with right and wrong responses for Appendix E.
PAIRS = 12
STEPPED = 6
# Questions, and responses of each, for the weights 1 / pi.
WEIGHED, WEIGHTED = 12, 64
SIZES = (0.01, 0.1, 1.0)
Update = Literal["least norm", "gradient", "Adam"]
UPDATES: tuple[Update, ...] = ("least norm", "gradient", "Adam")
# One factor, or a prediction, describes the values from this share of their squares on, and roughly from that one on.
DESCRIBES, ROUGHLY = 0.9, 0.7
# A kernel's smaller eigenvalues, relative to its largest, are rounding in float32.
SINGULAR = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """`rho_P`, `explained_P`: Assumption 3.2 by reading and pair: best factor, and the share of squares it explains.

    `followed_Q`: Appendix E by reading, update, size and question: the share of the squared shifts of the next
    question's responses that the prediction explains. `effective_Q`: of WEIGHTED responses weighted by 1 / pi, how
    many count, by question.
    """

    rho_P: dict[str, Floats]
    explained_P: dict[str, Floats]
    followed_Q: dict[tuple[str, Update, float], Floats]
    effective_Q: Floats


def measure_transfer(samples: Samples, kernel: GradientKernel, seed: int) -> Transfer:
    """Measure all three on the model of `samples`, whose weights are restored afterwards."""
    with threads_for(samples.model):
        factors = {reading: _factors(samples, reading, seed) for reading in READINGS}
        followed = {}
        for reading in READINGS:
            shares = [_follow(samples, kernel, question, reading) for question in _mixed(kernel)[:STEPPED]]
            for row, update in enumerate(UPDATES):
                for column, size in enumerate(SIZES):
                    followed[reading, update, size] = np.array([share[row, column] for share in shares])
        logp_QR = _many_log_probs(samples, seed)
    return Transfer(
        rho_P={reading: pairs_P2[:, 0] for reading, pairs_P2 in factors.items()},
        explained_P={reading: pairs_P2[:, 1] for reading, pairs_P2 in factors.items()},
        followed_Q=followed,
        effective_Q=effective_number(logp_QR),
    )


def _many_log_probs(samples: Samples, seed: int) -> Floats:
    """Sample WEIGHTED responses to each of the first WEIGHED questions; return their log-probs [Q, R]."""
    prompts = samples.prompts[:WEIGHED]
    drawn = draw_responses(samples.model, samples.tokenizer, prompts, WEIGHTED, MAX_RESPONSE_TOKENS, seed)
    # Many are sampled several times.
    logp = {(place, response): _values(samples, place, [response], "log-prob")[0] for place, response in set(drawn)}
    return np.array([logp[one] for one in drawn]).reshape(len(prompts), WEIGHTED)


def effective_number(logp_QR: Floats) -> Floats:
    """Return (sum w)^2 / sum w^2 of the weights w = 1 / pi along the last axis: 1 to their number."""
    weight_QR = np.exp(logp_QR.min(axis=-1, keepdims=True) - logp_QR)
    return np.asarray(weight_QR.sum(axis=-1) ** 2 / (weight_QR**2).sum(axis=-1))


def proportional(x: Floats, y: Floats) -> tuple[float, float]:
    """Return the factor of the best y = factor x, and the share of y's squares that it explains."""
    factor = float((x * y).sum() / (x * x).sum())
    return factor, 1.0 - float(((y - factor * x) ** 2).sum() / (y * y).sum())


def _factors(samples: Samples, reading: str, seed: int) -> Floats:
    """Fit Assumption 3.2 for PAIRS pairs of questions: factor and share explained, [P, 2]."""
    found = []
    for question in range(0, 2 * PAIRS, 2):
        other = (question + 1) % len(samples.prompts)
        distinct = list(dict.fromkeys(response for q, response in samples.responses if q == question))
        own_RD, moved_RD = (
            torch.stack(
                [
                    flat_gradient(samples.model, samples.prompts[prompt], response, reading, seed)
                    for response in distinct
                ]
            )
            for prompt in (question, other)
        )
        found.append(proportional(*((rows_RD @ own_RD.T).double().numpy() for rows_RD in (own_RD, moved_RD))))
    return np.array(found)


def _mixed(kernel: GradientKernel) -> list[int]:
    """List the questions with right and wrong responses, the last one left out: there is none after it."""
    questions = np.unique(kernel.question_R)
    shares = [kernel.correct_R[kernel.question_R == question].mean() for question in questions]
    return [int(q) for q, share in zip(questions[:-1], shares[:-1], strict=True) if 0 < share < 1]


def _follow(samples: Samples, kernel: GradientKernel, question: int, reading: str) -> Floats:
    """Take each update in each size on one question; return the shares explained at the next, [updates, sizes]."""
    own_R = _distinct(kernel, question)
    other_R = _distinct(kernel, question + 1)
    gram_RR = kernel.gram_RR[reading]
    advantage_R = kernel.correct_R[own_R].astype(np.float64)
    advantage_R = (advantage_R - advantage_R.mean()) / (advantage_R.std() or 1.0)
    dual_R = np.linalg.pinv(gram_RR[np.ix_(own_R, own_R)], rcond=SINGULAR, hermitian=True) @ advantage_R
    predicted_R = gram_RR[np.ix_(other_R, own_R)] @ dual_R
    responses = [kernel.response_R[row] for row in own_R]
    least = _direction(samples, question, responses, dual_R, reading)
    plain = _direction(samples, question, responses, advantage_R, reading)
    length = _length(least)
    updates = (least, plain, [part.sign() for part in plain])
    before_R = _values(samples, question + 1, [kernel.response_R[row] for row in other_R], reading)
    shares = []
    for update in updates:
        scale = length / _length(update)
        row = []
        for size in SIZES:
            with _moved(samples.model, update, size * scale):
                after_R = _values(samples, question + 1, [kernel.response_R[row] for row in other_R], reading)
            row.append(_share(after_R - before_R, size * predicted_R, exact=update is least))
        shares.append(row)
    return np.array(shares)


def _share(moved_R: Floats, predicted_R: Floats, exact: bool) -> float:
    if not exact:
        return proportional(predicted_R, moved_R)[1]
    return 1.0 - float(((moved_R - predicted_R) ** 2).sum() / (moved_R**2).sum())


def _distinct(kernel: GradientKernel, question: int) -> Counts:
    """Return the rows of a question's responses, each response once."""
    first = {kernel.response_R[row]: int(row) for row in np.flatnonzero(kernel.question_R == question)[::-1]}
    return np.array(sorted(first.values()))


def _direction(
    samples: Samples, question: int, responses: Sequence[tuple[int, ...]], weight_R: Floats, reading: str
) -> list[Tensor]:
    """Return the gradient of the weighted sum of the responses' values: J' weight, a tensor for each parameter."""
    prompt = samples.prompts[question]
    values = [response_value(samples.model, prompt, response, reading) for response in responses]
    total = sum(float(weight) * value for weight, value in zip(weight_R, values, strict=True))
    assert isinstance(total, Tensor)
    return list(torch.autograd.grad(total, list(samples.model.parameters())))


def _length(update: Sequence[Tensor]) -> float:
    return float(torch.stack([part.double().square().sum() for part in update]).sum().sqrt())


@contextmanager
def _moved(model: Any, update: Sequence[Tensor], scale: float) -> Iterator[None]:
    """Add `scale` times the update to the weights, and put the old ones back afterwards."""
    parameters = list(model.parameters())
    saved = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        for parameter, part in zip(parameters, update, strict=True):
            parameter.add_(part, alpha=scale)
        try:
            yield
        finally:
            for parameter, old in zip(parameters, saved, strict=True):
                parameter.copy_(old)


def _values(samples: Samples, question: int, responses: Sequence[tuple[int, ...]], reading: str) -> Floats:
    prompt = samples.prompts[question]
    with torch.no_grad():
        return np.array([response_value(samples.model, prompt, response, reading).item() for response in responses])


def transfer_tables(found: Transfer) -> tuple[Table, ...]:
    """Tabulate Assumption 3.2's factors, and what Appendix E's prediction explains."""
    factors: list[tuple[Cell, ...]] = []
    for reading in READINGS:
        rho_P, explained_P = found.rho_P[reading], found.explained_P[reading]
        factors.append(
            (reading, *map(float, (rho_P.min(), np.median(rho_P), rho_P.max(), explained_P.min(), explained_P.mean())))
        )
    followed: tuple[tuple[Cell, ...], ...] = tuple(
        (reading, update, *(float(found.followed_Q[reading, update, size].mean()) for size in SIZES))
        for reading in READINGS
        for update in UPDATES
    )
    columns = ("logit of a response:", "rho: least", "median", "largest", "squares explained: least", "mean")
    return (
        Table("assumption_3_2", "one factor rho from question to question", columns, tuple(factors)),
        Table(
            "appendix_e",
            "share of the squared shifts at the next question that k' K^-1 Delta explains, by size of Delta in nats",
            ("logit of a response:", "update", *(f"{size:g}" for size in SIZES)),
            followed,
        ),
    )


def transfer_claims(found: Transfer) -> tuple[Claim, ...]:
    """Judge Assumption 3.2 and Appendix E by reading, and section 4.1's premise."""
    return (
        *(_one_factor(found, reading) for reading in READINGS),
        *(_followed(found, reading) for reading in READINGS),
        _uneven(found),
    )


def _one_factor(found: Transfer, reading: str) -> Claim:
    rho_P, explained_P = found.rho_P[reading], found.explained_P[reading]
    ours = (
        f"the best rho explains {explained_P.mean():.0%} of the squares ({explained_P.min():.0%} to "
        f"{explained_P.max():.0%} of {len(explained_P)} pairs); rho {rho_P.min():.2f} to {rho_P.max():.2f}"
    )
    verdict = Outcome.PARTLY if clearly_above(explained_P, ROUGHLY) else Outcome.DIFFERS
    if clearly_above(explained_P, DESCRIBES):
        verdict = Outcome.REPRODUCED
    statement = f"gradient correlations decay by one factor from q to q' ({reading})"
    return Claim("Ass 3.2", statement, "one rho in (0, 1]", ours, verdict)


def _followed(found: Transfer, reading: str) -> Claim:
    shares = {update: found.followed_Q[reading, update, SIZES[0]] for update in UPDATES}
    large = found.followed_Q[reading, "least norm", SIZES[-1]].mean()
    holds = sum(clearly_above(share_Q, DESCRIBES) for share_Q in shares.values())
    each = ", ".join(f"{update} {share_Q.mean():.0%}" for update, share_Q in shares.items())
    ours = (
        f"share of the squared shifts at another question that it explains, Delta of {SIZES[0]:g} nats: {each}; "
        f"least norm at {SIZES[-1]:g} nat: {large:.0%}"
    )
    statement = f"small real steps move other responses by k' K^-1 Delta ({reading})"
    return Claim("App E", statement, "usual optimizers find the least norm", ours, outcome(holds, len(UPDATES)))


def _uneven(found: Transfer) -> Claim:
    effective_Q, half = found.effective_Q, WEIGHTED / 2.0
    ours = (
        f"of {WEIGHTED} responses weighted by 1 / pi {effective_Q.mean():.1f} count ((sum w)^2 / sum w^2), by question "
        f"{effective_Q.min():.1f} to {effective_Q.max():.1f}"
    )
    verdict = Outcome.REPRODUCED if clearly_below(effective_Q, half) else Outcome.PARTLY
    if clearly_above(effective_Q, half):
        verdict = Outcome.DIFFERS
    statement = "sequence probabilities vary so much that 1 / pi weights are unusable (read as: fewer than half count)"
    return Claim("sec 4.1", statement, "extremely high variance", ours, verdict)
