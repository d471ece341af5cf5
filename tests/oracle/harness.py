"""One random training step in float64, seen twice: through megasharp's recipes, and through a formula in NumPy.

An oracle is a function `loss(case, z)`. `case` holds everything that is constant (rewards, old and reference logits,
what the sampler recorded); `z` are the policy's logits, complex, of shape [..., T, V]: any leading axes, all of the
step's response tokens in order, the vocabulary. It returns the step's loss, of shape [...], written straight from the
formula, with plain loops over groups, responses and tokens and none of megasharp's code.

The gradient comes from the complex step: d loss / d z = imag(loss(z + i h)) / h is exact to rounding, because h may be
1e-30. So an oracle must be analytic in z: use `stop` for what the formula holds constant, the functions here in place
of numpy's `maximum`, `clip` and `abs`, and decide (sort, compare, pick the top) on real parts only.

    def oracle(case, z):
        logp = log_softmax(z)[..., np.arange(case.T), case.target]        # [..., T]
        ...
    check(case, oracle, ["grpo", "kl"], {"kl": KLParams(coefficient=0.3)})
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from cases import each_case
from numpy.typing import NDArray
from torch import Tensor

from megasharp.algos import METHODS
from megasharp.algos.base import Method, MethodParams, Needs, Reduction, overridden_hooks
from megasharp.algos.build_recipe import build_recipe
from megasharp.algos.recipe import Recipe
from megasharp.batching.packing import PackLayout, pack
from megasharp.common.records import (
    Completion,
    Episode,
    FinishReason,
    Group,
    MicroBatch,
    Outcome,
    Prompt,
    Response,
    StepBatch,
    TaskAnswer,
    Turn,
    Verdict,
)
from megasharp.ops.head import VocabShard, token_head

Real = NDArray[np.float64]
Complex = NDArray[np.complex128]

VOCAB = 9
HORIZON = 16.0
# Per group: rewards of its responses (None: an infra failure, which must not count anywhere).
REWARDS: tuple[tuple[float | None, ...], ...] = (
    (1.0, 0.0, 0.0, 1.0),
    (1.0, 1.0, 1.0),
    (0.0, 0.0, 0.0, 0.0, 0.0),
    (0.0, 1.0, None, 0.0, 0.0, 0.0),
    (1.0,),
    (0.0, 1.0),
    (1.0, 1.0, 0.0, 1.0, 1.0),
)


# The steps that a test with the fixture `case` sees in turn.
each_step = each_case("seed", (0, 1, 2))


@dataclass(frozen=True)
class Answer:
    """One response: its group and index, its tokens `[start, stop)` among the step's, and its verdict.

    `scored` is False for an infra failure. `seed` is the completion's.
    """

    group: int
    index: int
    start: int
    stop: int
    reward: float
    scored: bool
    seed: int

    @property
    def length(self) -> int:
        return self.stop - self.start

    @property
    def correct(self) -> bool:
        return self.scored and self.reward == 1.0


@dataclass(frozen=True)
class Case:
    """A step: `T` tokens of all responses in order. `target` int [T]; logits [T, V]; log-probs [T].

    `z`: the policy's own logits. `z_old`: before the update. `z_ref`: the reference's. `sampler_logp`: what the sampler
    recorded, another distribution's. `engine_logp`: what the engine recorded of the policy, equal to the old log-prob
    up to noise. `temperature` divides all logits before anything else.
    """

    answers: tuple[Answer, ...]
    target: NDArray[np.int64]
    z: Real
    z_old: Real
    z_ref: Real
    sampler_logp: Real
    engine_logp: Real
    temperature: float
    # By group and index, the turns of responses that an environment has answered; places count from the response's
    # first token, and its tokens are among `target`.
    turns: Mapping[tuple[int, int], tuple[Turn, ...]] = dataclasses.field(default_factory=dict)

    @property
    def T(self) -> int:
        return len(self.target)

    def group(self, number: int) -> list[Answer]:
        """The scored responses of a group."""
        return [a for a in self.answers if a.group == number and a.scored]

    @property
    def groups(self) -> list[list[Answer]]:
        """The scored responses of every group."""
        return [self.group(number) for number in sorted({answer.group for answer in self.answers})]

    @property
    def scored(self) -> list[Answer]:
        """All scored responses."""
        return [a for a in self.answers if a.scored]

    @property
    def tokens(self) -> int:
        """Scored response tokens of the step."""
        return sum(a.length for a in self.scored)

    def logp(self, z: Complex | Real) -> Any:
        """Log-probs of the targets under logits z: [..., T]."""
        return log_softmax(z / self.temperature)[..., np.arange(self.T), self.target]

    def entropy(self, z: Complex | Real) -> Any:
        """Entropies in nats: [..., T]."""
        logp = log_softmax(z / self.temperature)
        return -(np.exp(logp) * logp).sum(-1)


def random_case(seed: int) -> Case:
    """Groups as in `REWARDS`, in another order per seed; lengths 0 to 7, some empty and some of one token."""
    random = np.random.default_rng(seed)
    answers, start = [], 0
    for group, rewards in enumerate(REWARDS):
        for index, reward in enumerate(rewards):
            length = 1 if (group + index) % 4 == 3 else int(random.integers(2, 8))
            # Only wrong answers may be empty: a correct one has said something.
            length = 0 if reward == 0.0 and (group, index) in {(2, 1), (3, 3)} else length
            answer = Answer(group, index, start, start + length, reward or 0.0, reward is not None, 10 * group + index)
            answers.append(answer)
            start += length
    z = random.normal(0.0, 1.5, (start, VOCAB))
    target = random.integers(0, VOCAB, start)
    # Half of the targets are the policy's own favourites, so that rank-one rules have something to act on.
    target = np.where(random.random(start) < 0.5, z.argmax(-1), target)
    temperature = (1.0, 0.7, 1.3)[seed % 3]
    z_old = z + random.normal(0.0, 0.4, z.shape)
    old_logp = log_softmax(z_old / temperature)[np.arange(start), target]
    return Case(
        answers=tuple(answers),
        target=target,
        z=z,
        z_old=z_old,
        z_ref=z + random.normal(0.0, 0.5, z.shape),
        sampler_logp=np.minimum(old_logp + random.normal(0.0, 0.5, start), -1e-3),
        engine_logp=np.minimum(old_logp + random.normal(0.0, 0.01, start), -1e-3),
        temperature=temperature,
    )


def answered(case: Case, seed: int) -> tuple[Case, NDArray[np.bool_]]:
    """Put answers of an environment between the tokens of most responses; return the step, and which tokens are its.

    What stands at them is what no loss may read: log-probs that are not finite among it.
    """
    random = np.random.default_rng(seed)
    chosen: list[NDArray[np.int64]] = []
    answers, turns, start = [], {}, 0
    for answer in case.answers:
        places = [*range(answer.start, answer.stop)]
        own: list[Turn] = []
        row: list[int] = []
        begun = 0
        for place in places:
            row.append(place)
            # An answer at the very end as well: a turn that was cut short may leave one.
            if random.random() < 0.4:
                said = int(random.integers(1, 4))
                row += [-1] * said
                own.append(Turn(begun, len(row) - said, len(row), 0.0))
                begun = len(row)
        if own:
            turns[answer.group, answer.index] = tuple(own)
        answers.append(dataclasses.replace(answer, start=start, stop=start + len(row)))
        start += len(row)
        chosen.append(np.array(row, dtype=np.int64))
    at = np.concatenate(chosen)
    said = at < 0

    def spread(values: Any, fill: Any) -> Any:
        found = values[np.where(said, 0, at)]
        found[said] = fill(int(said.sum()))
        return found

    noise = lambda count: random.normal(0.0, 1.5, (count, VOCAB))  # noqa: E731
    wild = lambda count: random.choice([-np.inf, np.nan, -50.0, 0.0], count)  # noqa: E731
    return dataclasses.replace(
        case,
        answers=tuple(answers),
        target=spread(case.target, lambda count: random.integers(0, VOCAB, count)),
        z=spread(case.z, noise),
        z_old=spread(case.z_old, noise),
        z_ref=spread(case.z_ref, noise),
        sampler_logp=spread(case.sampler_logp, wild),
        engine_logp=spread(case.engine_logp, wild),
        turns=turns,
    ), said


def stop(x: Any) -> Any:
    """Stop-gradient: the value, held constant."""
    return np.real(x)


def log_softmax(z: Any) -> Any:
    """Over the last axis."""
    shifted = z - np.real(z).max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def maximum(a: Any, b: Any) -> Any:
    """The larger by real part."""
    return np.where(np.real(a) >= np.real(b), a, b)


def minimum(a: Any, b: Any) -> Any:
    """The smaller by real part."""
    return np.where(np.real(a) <= np.real(b), a, b)


def clip(x: Any, low: float, high: float) -> Any:
    """Between two constants, constant outside."""
    return minimum(maximum(x, low + 0.0 * stop(x)), high + 0.0 * stop(x))


def absolute(x: Any) -> Any:
    """The absolute value, by the real part's sign."""
    return np.where(np.real(x) >= 0, x, -x)


def value_and_gradient(oracle: Callable[[Case, Complex], Any], case: Case) -> tuple[float, Real]:
    """An oracle's loss, and its gradient with respect to the logits, [T, V]."""
    step = 1e-30
    count = case.z.size
    moved = np.broadcast_to(case.z.astype(np.complex128), (count, *case.z.shape)).copy()
    moved.reshape(count, count)[np.arange(count), np.arange(count)] += 1j * step
    losses = np.asarray(oracle(case, moved))
    assert losses.shape == (count,), f"an oracle keeps the leading axes; its shape is {losses.shape}"
    return float(np.real(losses[0])), (np.imag(losses) / step).reshape(case.z.shape)


def groups_of(case: Case) -> list[Group]:
    """The step as rollouts hand it over; every number derives from the case."""
    made = []
    for number in sorted({answer.group for answer in case.answers}):
        prompt = Prompt(f"p{number}", "task", "", (1, 2, 3)[: 1 + number % 3], TaskAnswer(), "memory", 0, number)
        responses = tuple(_response(case, a) for a in case.answers if a.group == number)
        made.append(Group(f"g{number}", prompt, responses, policy_version=0))
    return made


def _response(case: Case, answer: Answer) -> Response:
    span = slice(answer.start, answer.stop)
    completion = Completion(
        tokens=torch.from_numpy(case.target[span]),
        sampler_logp=torch.from_numpy(case.sampler_logp[span]),
        policy_logp=torch.from_numpy(case.engine_logp[span]),
        memory_logp=None,
        version_spans=(),
        finish_reason=FinishReason.STOP,
        seed=answer.seed,
        episode=Episode(turns) if (turns := case.turns.get((answer.group, answer.index))) else None,
    )
    if not answer.scored:
        return Response(completion, "", Verdict(Outcome.INFRA, 0.0))
    outcome = Outcome.CORRECT if answer.correct else Outcome.WRONG
    return Response(completion, f"answer {answer.index % 3}", Verdict(outcome, answer.reward, str(answer.index % 3)))


@dataclass(frozen=True)
class Cut:
    """How the step is packed. `order`: the groups' order, a seed to shuffle by, or None to leave them."""

    micro_batch_tokens: int = 10_000
    dp: int = 1
    share_prompts: bool = True
    order: int | None = None


@dataclass(frozen=True)
class Result:
    """Loss, and gradient with respect to the logits [T, V] in the case's order."""

    loss: float
    gradient: Real
    metrics: dict[str, float]


def run(
    case: Case,
    names: Sequence[str],
    params: Mapping[str, MethodParams] | None = None,
    reduction: Reduction | None = None,
    cut: Cut = Cut(),
    dtype: torch.dtype = torch.float64,
) -> Result:
    """The step through a recipe: selection, advantages, packing, calibration, the head, the loss, backward."""
    recipe = build_recipe(names, params or {}, reduction=reduction, constant=HORIZON, mini_batches=1)
    groups = recipe.select(groups_of(case))
    if cut.order is not None:
        groups = [groups[i] for i in np.random.default_rng(cut.order).permutation(len(groups))]
    samples = recipe.advantages(groups)
    numbers = [_flat_number(case, sample.group_id, sample.index) for sample in samples]
    layout = PackLayout(cut.dp, cut.micro_batch_tokens, 1, 1, HORIZON, cut.share_prompts)
    batch = _annotated(pack(samples, layout, seed=0), case, numbers, recipe.needs, dtype)
    batch, calibrated = recipe.calibrate(batch)
    (mini,) = batch.mini_batches
    z = torch.tensor(case.z, dtype=dtype, requires_grad=True)
    loss, metrics = torch.zeros((), dtype=dtype), dict(calibrated)
    for micro in (micro for rank in mini.per_rank for micro in rank):
        rows = _rows(case, micro, numbers)
        share, more = recipe.loss(micro, _with_head(z[rows], micro, recipe, case), mini.denominators, mini.statistics)
        loss = loss + share
        metrics = {name: metrics[name] + more[name] if name in metrics else more[name] for name in more} | {
            name: metric for name, metric in metrics.items() if name not in more
        }
    loss.backward()
    assert z.grad is not None
    values = {name: metric.value for name, metric in metrics.items()}
    return Result(float(loss.detach()), z.grad.double().numpy(), values)


def _flat_number(case: Case, group_id: str, index: int) -> int:
    return next(i for i, a in enumerate(case.answers) if f"g{a.group}" == group_id and a.index == index)


def _rows(case: Case, micro: MicroBatch, numbers: Sequence[int]) -> NDArray[np.int64]:
    """The step's token numbers of a micro-batch's tokens."""
    spans = [case.answers[numbers[flat]] for flat in micro.sequence_ids]
    return np.concatenate([np.arange(a.start, a.stop) for a in spans] or [np.zeros(0, dtype=np.int64)])


def _annotated(batch: StepBatch, case: Case, numbers: Sequence[int], needs: Needs, dtype: torch.dtype) -> StepBatch:
    """Every micro-batch in `dtype`, with what the learner's passes before the update would fill in."""
    tables = {
        "sampler_logp_T": case.sampler_logp,
        "policy_logp_T": case.engine_logp,
        "old_logp_T": case.logp(case.z_old) if needs.old_logp else None,
        "old_entropy_T": case.entropy(case.z_old) if needs.old_entropy else None,
        "ref_logp_T": case.logp(case.z_ref) if needs.ref_logp else None,
    }

    def filled(micro: MicroBatch) -> MicroBatch:
        rows = _rows(case, micro, numbers)
        held = {
            field.name: value.to(dtype)
            for field in dataclasses.fields(micro.inputs)
            if isinstance(value := getattr(micro.inputs, field.name), Tensor) and value.dtype == torch.float32
        }
        more = {name: torch.tensor(table[rows], dtype=dtype) for name, table in tables.items() if table is not None}
        return dataclasses.replace(micro, inputs=dataclasses.replace(micro.inputs, **(held | more)))

    (mini,) = batch.mini_batches
    per_rank = tuple(tuple(filled(micro) for micro in rank) for rank in mini.per_rank)
    return dataclasses.replace(batch, mini_batches=(dataclasses.replace(mini, per_rank=per_rank),))


def _with_head(z: Tensor, micro: MicroBatch, recipe: Recipe, case: Case) -> Any:
    head = token_head(
        z,
        micro.targets_T,
        VocabShard(0, VOCAB, None),
        temperature=case.temperature,
        entropy=True,
        entropy_gradient=recipe.needs.entropy_gradient,
        topn=recipe.needs.topn,
    )
    return dataclasses.replace(
        micro.inputs,
        logp_T=head.logp_T,
        entropy_T=head.entropy_T,
        topn_logp_TN=head.topn_logp_TN,
        is_top1_T=head.is_top1_T,
    )


def check(
    case: Case,
    oracle: Callable[[Case, Complex], Any],
    names: Sequence[str],
    params: Mapping[str, MethodParams] | None = None,
    reduction: Reduction | None = None,
) -> Result:
    """Loss and gradient of the recipe equal the oracle's to 1e-10; the gradient is somewhere not zero."""
    expected_loss, expected = value_and_gradient(oracle, case)
    result = run(case, names, params, reduction)
    assert abs(result.loss - expected_loss) <= 1e-10 * max(1.0, abs(expected_loss)), (result.loss, expected_loss)
    assert np.abs(result.gradient - expected).max() <= 1e-10, np.abs(result.gradient - expected).max()
    assert np.abs(expected).max() > 1e-6, "an oracle without gradient proves nothing"
    return result


CUTS = {
    "one response at a time": Cut(micro_batch_tokens=1, share_prompts=False),
    "few groups at a time": Cut(micro_batch_tokens=24),
    "another order": Cut(micro_batch_tokens=40, order=7),
    "two data-parallel ranks": Cut(micro_batch_tokens=32, dp=2, order=3),
}


def hooks_of(method: type[Method]) -> set[str]:
    return set(overridden_hooks(method)).union(*(hooks_of(METHODS[name]) for name in method.brings))


def with_estimator(name: str) -> list[str]:
    return [name] if "advantages" in hooks_of(METHODS[name]) else ["grpo", name]
