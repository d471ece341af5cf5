"""What is saved comes back: weights, moments, step count and schedule, under the same or another layout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from launch import run_ranks
from megatron.core import dist_checkpointing
from policies import (
    LAYOUTS,
    learner_on,
    optimizer_settings,
    packed,
    ragged_sequences,
    save,
    save_model,
    settings,
    weights_of,
)
from torch import Tensor

from megasharp.algos.build_recipe import build_recipe
from megasharp.algos.entropy_bonus import EntropyBonusParams
from megasharp.common.records import Sequence, StepStats
from megasharp.config.policy import LoraConfig
from megasharp.convert.lora import TARGETS
from megasharp.learner.learner import RankLearner
from megasharp.learner.optimizer import parts
from megasharp.learner.ranks.all_ranks import RanksLearner

STEPS = 2
# Its loss depends on the weights, as that of a first on-policy step does not.
METHOD = build_recipe(
    ("grpo", "entropy_bonus"),
    {"entropy_bonus": EntropyBonusParams(coefficient=0.1)},
    reduction=None,
    constant=40.0,
    mini_batches=1,
)
# The learning rate differs at every step, so that a schedule that starts anew is seen.
OPTIMIZER = optimizer_settings(warmup_steps=1, decay="linear", weight_decay=0.1, eps=1e-6)
OTHER = optimizer_settings(
    warmup_steps=1, decay="linear", lr=0.5 * OPTIMIZER.lr, betas=[0.5, 0.6], eps=1e-3, weight_decay=0.7
)


@dataclass(frozen=True)
class Case:
    """A model and its dtype in training, and its adapters where only they are trained."""

    model: str
    dtype: torch.dtype
    lora: LoraConfig | None = None


FP32, BF16 = Case("qwen3-tied", torch.float32), Case("qwen2", torch.bfloat16)
OLMO2 = Case("olmo2", torch.float32)
EXPERTS, EXPERTS_BF16 = Case("qwen3moe", torch.float32), Case("mixtral", torch.bfloat16)
LORA = Case("qwen3-tied", torch.float32, LoraConfig(rank=4, alpha=8.0, targets=list(TARGETS)))
# Which checkpoint (case and layout it was saved at) is loaded at which layout.
RESUMES = (
    (FP32, "tp1", "tp1"),
    (BF16, "tp1", "tp1"),
    (FP32, "dp2", "tp1"),
    (FP32, "tp2pp2", "tp1"),
    (FP32, "tp1", "tp2"),
    (BF16, "tp1", "tp2"),
    (FP32, "tp2", "pp2"),
    (FP32, "tp1", "dp2"),
    (FP32, "tp2", "dp2"),
    (FP32, "pp2", "tp2"),
    (FP32, "dp2", "dp2"),
    (FP32, "pp2", "pp2"),
    (FP32, "cp2", "tp1"),
    (FP32, "tp1", "cp2"),
    (OLMO2, "tp1", "tp2"),
    (OLMO2, "tp2pp2", "tp1"),
    (LORA, "tp1", "tp1"),
    (LORA, "tp1", "tp2"),
    (LORA, "dp2", "dp2"),
    (LORA, "tp2pp2", "tp1"),
    (LORA, "cp2", "tp1"),
    (LORA, "tp1", "cp2"),
    (EXPERTS, "ep2", "tp1"),
    (EXPERTS, "tp1", "ep2"),
    (EXPERTS, "tp2", "ep2"),
    (EXPERTS, "ep2", "tp2etp2"),
    (EXPERTS, "pp2", "ep2"),
    (EXPERTS_BF16, "ep2", "ep2"),
    (EXPERTS_BF16, "ep2", "tp1"),
    (EXPERTS, "ep2", "ep2"),
)
# Of these a slice takes the rest: bf16, adapters, another cut of the layers and experts on two ranks each once.
FEW = ((BF16, "tp1", "tp1"), (LORA, "tp1", "tp1"), (FP32, "tp2", "pp2"), (EXPERTS, "ep2", "ep2"))
Resume = tuple[Case, str, str]


@dataclass(frozen=True)
class Point:
    """The weights at the save, and what one more step made of them."""

    at_save: dict[str, Tensor]
    stats: StepStats
    after: dict[str, Tensor]


@dataclass(frozen=True)
class Inner:
    """This rank's Adam: its step counts, and how many moment elements it holds and how many are not zero."""

    steps: list[int]
    elements: int
    nonzero: int


def step(learner: RanksLearner, sequences: list[Sequence], layout_name: str) -> StepStats:
    return learner.step(packed(sequences, LAYOUTS[layout_name]), METHOD)


def one_more(learner: RanksLearner, sequences: list[Sequence], layout_name: str) -> Point:
    at_save = weights_of(learner)
    stats = step(learner, sequences, layout_name)
    return Point(at_save, stats, weights_of(learner))


def save_all(
    rank: int, world: int, root: Path, sequences: list[Sequence], cases: list[tuple[Case, str]]
) -> list[Point]:
    """Train, save, and go on while it is being written."""
    points = []
    for case, layout in cases:
        folder = checkpoint(root, case, layout)
        folder.mkdir(exist_ok=True)
        values = settings(
            str(root / case.model),
            LAYOUTS[layout],
            METHOD.needs,
            OPTIMIZER,
            total_steps=8,
            dtype=case.dtype,
            lora=case.lora,
        )
        with learner_on(values) as (learner, _):
            for _ in range(STEPS):
                step(learner, sequences, layout)
            learner.begin_save(folder, copy=True)
            points.append(one_more(learner, sequences, layout))
            learner.finish_saves()
    return points


def load_all(
    rank: int, world: int, root: Path, sequences: list[Sequence], resumes: list[Resume]
) -> list[tuple[Inner, Point]]:
    """Load into a new learner, save again at once, and go on."""
    results = []
    for case, saved_at, layout in resumes:
        again = root / f"again-{checkpoint(root, case, saved_at).name}-{layout}"
        again.mkdir(exist_ok=True)
        values = settings(
            str(root / case.model),
            LAYOUTS[layout],
            METHOD.needs,
            OPTIMIZER,
            total_steps=8,
            dtype=case.dtype,
            lora=case.lora,
        )
        with learner_on(values) as (learner, own):
            learner.load(checkpoint(root, case, saved_at))
            inner = inner_state(own)
            save(learner, again)
            results.append((inner, one_more(learner, sequences, layout)))
    return results


def inner_state(learner: RankLearner) -> Inner:
    optimizers = [part.optimizer for part in parts(learner._optimizer)]
    steps = [group["step"] for o in optimizers for group in o.param_groups if group["params"]]
    moments = [moment for o in optimizers for state in o.state.values() for moment in state.values()]
    return Inner(
        steps=[int(count) for count in steps],
        elements=sum(moment.numel() for moment in moments),
        nonzero=sum(int(moment.count_nonzero()) for moment in moments),
    )


def checkpoint(root: Path, case: Case, layout: str) -> Path:
    adapters = "-lora" if case.lora else ""
    return root / f"{case.model}-{str(case.dtype).removeprefix('torch.')}{adapters}-{layout}"


def plain_tensors(rank: int, world: int, folders: list[Path]) -> list[dict[str, object]]:
    return [dist_checkpointing.load_plain_tensors(str(folder)) for folder in folders]


def worlds(layouts: list[str]) -> dict[int, list[int]]:
    """Positions in `layouts`, by the number of ranks they take."""
    found: dict[int, list[int]] = {}
    for i, layout in enumerate(layouts):
        found.setdefault(LAYOUTS[layout].world, []).append(i)
    return found


@dataclass(frozen=True)
class Runs:
    """Everything that was run: by saved case and layout, and by resume (with every rank's optimizer)."""

    root: Path
    saved: dict[tuple[Case, str], Point]
    resumed: dict[Resume, tuple[list[Inner], Point]]


@pytest.fixture(scope="module", params=["few", pytest.param("rest", marks=pytest.mark.long("saves"))])
def runs(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Runs:
    resumes = FEW if request.param == "few" else [resume for resume in RESUMES if resume not in FEW]
    root = tmp_path_factory.mktemp("state")
    for model in (FP32.model, OLMO2.model):
        save_model(root, model)
    save_model(root, BF16.model, dtype="bfloat16")
    save_model(root, EXPERTS.model)
    save_model(root, EXPERTS_BF16.model, dtype="bfloat16")
    sequences = ragged_sequences()
    saves = list(dict.fromkeys((case, saved_at) for case, saved_at, _ in resumes))
    saved: dict[tuple[Case, str], Point] = {}
    for world, chosen in worlds([layout for _, layout in saves]).items():
        points = run_ranks(world, save_all, root, sequences, [saves[i] for i in chosen])[0]
        saved.update(zip([saves[i] for i in chosen], points, strict=True))
    resumed: dict[Resume, tuple[list[Inner], Point]] = {}
    for world, chosen in worlds([layout for _, _, layout in resumes]).items():
        by_rank = run_ranks(world, load_all, root, sequences, [resumes[i] for i in chosen])
        for position, i in enumerate(chosen):
            inners = [rank[position][0] for rank in by_rank]
            resumed[resumes[i]] = (inners, by_rank[0][position][1])
    return Runs(root, saved, resumed)


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_moments_and_step_are_back_before_the_first_step(runs: Runs) -> None:
    for resume, (inners, _) in runs.resumed.items():
        for inner in inners:
            assert inner.steps and set(inner.steps) == {STEPS}, resume
            # Rows of tokens that never occurred have no gradient; everything else moved.
            assert inner.nonzero > 0.4 * inner.elements > 0, resume


def test_everything_saved_comes_back(runs: Runs) -> None:
    """Saving again right after the load writes the same tensors, whatever the layout."""
    resumes = list(runs.resumed)
    saves = {r: checkpoint(runs.root, r[0], r[1]) for r in resumes}
    again = {r: runs.root / f"again-{saves[r].name}-{r[2]}" for r in resumes}
    (tensors,) = run_ranks(1, plain_tensors, [*saves.values(), *again.values()])
    for resume, before, after in zip(resumes, tensors[: len(resumes)], tensors[len(resumes) :], strict=True):
        assert any("exp_avg_sq" in key for key in before), "no moments were saved"
        assert before.keys() == after.keys()
        for key, value in before.items():
            assert same_value(value, after[key]), (resume, key)


def same_value(before: object, after: object) -> bool:
    """Equal; padding of the vocabulary depends on TP, so the longer one's is left out."""
    if not (isinstance(before, Tensor) and isinstance(after, Tensor)):
        return before == after
    rows = min(len(before), len(after))
    return rows > 0 and torch.equal(before[:rows], after[:rows])


def test_weights_come_back_bit_for_bit(runs: Runs) -> None:
    """What is exported; the product that merges adapters is rounded otherwise under another layout."""
    for resume, (_, point) in runs.resumed.items():
        case, saved_at, layout = resume
        saved = runs.saved[case, saved_at].at_save
        if case.lora is None or saved_at == layout:
            assert same_bits(point.at_save, saved), resume
        else:
            for name, weight in saved.items():
                assert (point.at_save[name] - weight).abs().max() <= 1e-6, (resume, name)


def test_training_goes_on_as_if_it_had_not_stopped(runs: Runs) -> None:
    for resume, (_, point) in runs.resumed.items():
        case, saved_at, layout = resume
        unbroken = runs.saved[case, saved_at]
        assert point.stats.learning_rate == unbroken.stats.learning_rate != OPTIMIZER.lr, resume
        if saved_at == layout:
            assert point.stats == unbroken.stats, resume
            assert same_bits(point.after, unbroken.after), resume
        else:
            assert_close(resume, point, unbroken)


def assert_close(resume: Resume, point: Point, unbroken: Point) -> None:
    """fp32 to 1e-5 relative; in bf16 another layout's partial sums are rounded elsewhere, so to its precision."""
    case, saved_at, layout = resume
    tolerance = 1e-5 if case.dtype is torch.float32 else 2e-2
    loss, norm = (abs(getattr(point.stats, name) / getattr(unbroken.stats, name) - 1) for name in ("loss", "grad_norm"))
    adapters = ", adapters" if case.lora else ""
    print(f"{case.dtype}{adapters}: {saved_at} -> {layout}: relative difference of loss {loss:.1e}, norm {norm:.1e}")
    assert loss <= tolerance and norm <= tolerance, resume
    for name, weight in unbroken.after.items():
        difference = (point.after[name].float() - weight.float()).norm()
        assert difference <= tolerance * weight.float().norm(), (resume, name)


def load_with_other_settings(
    rank: int, world: int, root: Path, sequences: list[Sequence]
) -> list[tuple[list[dict[str, object]], float]]:
    """This rank's groups after a load under settings of its own, and the rate of the next step."""
    folder = root / "before"
    folder.mkdir(exist_ok=True)
    found = []
    for optimizer in (OPTIMIZER, OTHER):
        with learner_on(settings(str(root / FP32.model), LAYOUTS["dp2"], METHOD.needs, optimizer, total_steps=8)) as (
            learner,
            own,
        ):
            if optimizer is OPTIMIZER:
                for _ in range(STEPS):
                    step(learner, sequences, "dp2")
                save(learner, folder)
            else:
                learner.load(folder)
            groups = [{**group, "params": None} for group in own._optimizer.param_groups]
            found.append((groups, step(learner, sequences, "dp2").learning_rate))
    return found


def test_a_resumed_run_computes_with_its_own_settings(tmp_path: Path) -> None:
    """Those of the checkpoint are its past: Megatron would go on with them."""
    save_model(tmp_path, FP32.model)
    (before, rate), (after, other_rate) = run_ranks(2, load_with_other_settings, tmp_path, ragged_sequences())[0]
    assert {group["step"] for group in before} == {STEPS} == {group["step"] for group in after}
    assert {group["weight_decay"] for group in after} == {0.0, OTHER.weight_decay}
    assert {(group["betas"], group["eps"]) for group in after} == {(tuple(OTHER.betas), OTHER.eps)}
    assert other_rate / rate == pytest.approx(OTHER.lr / OPTIMIZER.lr)


def save_without_moments(rank: int, world: int, root: Path, sequences: list[Sequence]) -> list[Point]:
    """Before any step, and after `reset_optimizer`: saved, loaded by a new learner, one step; and never saved."""
    values = settings(str(root / FP32.model), LAYOUTS["dp2"], METHOD.needs, OPTIMIZER, total_steps=8)
    points = []
    for steps_before in (0, STEPS):
        folder = root / f"empty-{steps_before}"
        folder.mkdir(exist_ok=True)
        with learner_on(values) as (learner, _):
            for _ in range(steps_before):
                step(learner, sequences, "dp2")
            learner.reset_optimizer()
            save(learner, folder)
            points.append(one_more(learner, sequences, "dp2"))
        with learner_on(values) as (learner, _):
            learner.load(folder)
            points.append(one_more(learner, sequences, "dp2"))
    return points


def test_no_moments_come_back_as_no_moments(tmp_path: Path) -> None:
    save_model(tmp_path, FP32.model)
    points = run_ranks(2, save_without_moments, tmp_path, ragged_sequences())[0]
    for unbroken, loaded in (points[:2], points[2:]):
        assert loaded.stats == unbroken.stats
        assert same_bits(loaded.at_save, unbroken.at_save) and same_bits(loaded.after, unbroken.after)
