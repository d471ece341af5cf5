"""The tree study: its gradients against autograd of the printed objectives, its world against enumeration."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import each_case
from torch import Tensor

from megasharp.algos.casp import CaSP, CaSPParams
from megasharp.algos.clip import Clip, ClipParams
from megasharp.algos.entropy_bonus import EntropyBonus, EntropyBonusParams
from megasharp.algos.grpo import GRPO, GRPOParams
from megasharp.common.records import Group, Prompt, TaskAnswer, TokenInputs
from megasharp.studies.softmax import Ascent, softmax
from megasharp.studies.study import Findings, Outcome
from megasharp.studies.tree import experiments
from megasharp.studies.tree.claims import claims, draw, tables
from megasharp.studies.tree.experiments import (
    ACTIONS,
    HORIZON,
    MODES,
    REWARD_64,
    STATES,
    Batch,
    Result,
    Results,
    Setting,
    collect,
    descend,
    gate,
    gradient,
    group_advantages,
    judge,
    ranks,
    sequence_index,
    sequence_probability,
    tabulate,
    train,
)

SEQUENCES = ["".join(path) for path in itertools.product(ACTIONS, repeat=HORIZON)]
GROUP = Group("g", Prompt("p", "tree", "", (), TaskAnswer(), "", 0, 0), (), 0)


def random_policy(seed: int, runs: int = 1, scale: float = 1.5) -> np.ndarray:
    return softmax(np.random.default_rng(seed).normal(scale=scale, size=(runs, STATES, 4)))


def states_of(sequence: str) -> list[int]:
    first, second, _ = (ACTIONS.index(action) for action in sequence)
    return [0, 1 + first, 5 + 4 * first + second]


def test_rewarded_sequences_are_the_six_of_the_paper() -> None:
    rewarded = [sequence for sequence, reward in zip(SEQUENCES, REWARD_64, strict=True) if reward == 1.0]
    assert sorted(rewarded) == sorted(MODES) and [sequence_index(s) for s in SEQUENCES] == list(range(64))


def test_sequence_probabilities_are_products_along_the_path() -> None:
    policy_RDV = random_policy(0, runs=2)
    expected = [
        [np.prod([policy[s, ACTIONS.index(a)] for s, a in zip(states_of(q), q, strict=True)]) for q in SEQUENCES]
        for policy in policy_RDV
    ]
    np.testing.assert_allclose(sequence_probability(policy_RDV), expected, rtol=1e-12)


def test_descend_visits_the_states_of_its_sequences_as_often_as_they_are_probable() -> None:
    policy_RDV = random_policy(1)
    uniform_RGL = np.random.default_rng(2).random((1, 40_000, HORIZON))
    state_RGL, action_RGL, sequence_RG = descend(policy_RDV, uniform_RGL)
    for state_L, action_L, index in zip(state_RGL[0, :50], action_RGL[0, :50], sequence_RG[0, :50], strict=True):
        text = "".join(ACTIONS[a] for a in action_L)
        assert text == SEQUENCES[index] and list(state_L) == states_of(text)
    share_64 = np.bincount(sequence_RG[0], minlength=64) / 40_000
    assert np.abs(share_64 - sequence_probability(policy_RDV)[0]).max() < 0.01


def test_advantages_are_those_of_the_grpo_method() -> None:
    reward_RG = np.array([[1.0, 0.0, 0.0, 1.0, 0.0], [1.0] * 5, [0.0] * 5, [0.0, 0.0, 1.0, 0.0, 0.0]])
    expected = [GRPO(GRPOParams()).advantages(torch.from_numpy(row), GROUP).numpy() for row in reward_RG]
    np.testing.assert_allclose(group_advantages(reward_RG), expected, atol=1e-14)


def test_ranks_count_those_ahead_and_earlier_ones_win_ties() -> None:
    policy_RDV = np.array([[[0.1, 0.4, 0.4, 0.1], [0.25] * 4, [0.1, 0.2, 0.3, 0.4]]])
    assert ranks(policy_RDV).tolist() == [[[2, 0, 1, 3], [0, 1, 2, 3], [3, 2, 1, 0]]]


@each_case("quantile", [0.2, 0.4, 0.5, 0.8, 1.0])
def test_gate_is_strictly_above_torchs_quantile(quantile: float) -> None:
    entropy_RGL = np.random.default_rng(3).random((1, 200, HORIZON))
    threshold = torch.quantile(torch.from_numpy(entropy_RGL[0]), quantile, dim=-1, keepdim=True).numpy()
    got = gate(entropy_RGL, np.array([quantile]))[0]
    assert (got == (entropy_RGL[0] > threshold)).all() and got.any() == (quantile < 1.0)


def test_gate_at_zero_takes_all_even_ties() -> None:
    assert gate(np.ones((1, 5, HORIZON)), np.array([0.0])).all()


def printed_objective(logit_DV: Tensor, batch: Batch, setting: Setting) -> Tensor:
    """1/(3G) sum A gamma with gamma+ and gamma- as in 2510.14807 eq 4, 5 and figure 10, plus the entropy bonus."""
    state_GL, action_GL = torch.from_numpy(batch.state_RGL[0]), torch.from_numpy(batch.action_RGL[0])
    adv_GL = torch.from_numpy(batch.advantage_RG[0])[:, None].expand(state_GL.shape)
    adv_GL = torch.where(adv_GL < 0, setting.negative * adv_GL, adv_GL)
    logp_GLV = torch.log_softmax(logit_DV, dim=-1)[state_GL]
    old_GLV = logp_GLV.detach()
    entropy_GL = -(logp_GLV.exp() * logp_GLV).sum(-1)
    logp_GL, old_GL = (x.gather(-1, action_GL[..., None])[..., 0] for x in (logp_GLV, old_GLV))
    gamma_GL = (logp_GL - old_GL).exp()
    top_GLN = old_GLV.topk(setting.topn, dim=-1).indices
    gamma_GLN = (logp_GLV.gather(-1, top_GLN) - old_GLV.gather(-1, top_GLN)).exp()
    auxiliary_GL = ((gamma_GL[..., None].detach() / gamma_GLN.detach()) * gamma_GLN).mean(-1)
    h_GL = entropy_GL.detach()
    gated_GL = (h_GL > torch.quantile(h_GL, setting.quantile, dim=-1, keepdim=True)) | (setting.quantile == 0)
    w_GL = gated_GL.double()
    smoothed_GL = (1 - setting.alpha * w_GL) * gamma_GL + setting.alpha * w_GL * auxiliary_GL
    punished_GL = (adv_GL < 0) & (top_GLN[..., 0] == action_GL) & gated_GL
    gamma_GL = torch.where(adv_GL > 0, smoothed_GL, gamma_GL) * (1 + (setting.lambda_top1 - 1) * punished_GL.double())
    return (adv_GL * gamma_GL + setting.beta * entropy_GL).mean()


@each_case(
    "setting",
    [
        Setting(1.0),
        Setting(1.0, beta=0.7),
        Setting(1.0, alpha=0.3, topn=2),
        Setting(1.0, alpha=1.0, topn=4, lambda_top1=1.1),
        Setting(1.0, alpha=0.5, topn=3, quantile=0.4, lambda_top1=2.0),
        Setting(1.0, alpha=0.5, topn=1, quantile=0.8, lambda_top1=1.5, beta=0.1),
        Setting(1.0, negative=3.0),
    ],
)
def test_gradient_is_autograd_of_the_printed_objective(setting: Setting) -> None:
    policy_RDV = random_policy(4)
    batch = collect(policy_RDV, np.random.default_rng(5).random((1, 32, HORIZON)))
    assert 0 < (batch.advantage_RG > 0).sum() < 32
    logit_DV = torch.from_numpy(np.log(policy_RDV[0])).requires_grad_()
    (expected_DV,) = torch.autograd.grad(printed_objective(logit_DV, batch, setting), logit_DV)
    got_DV = gradient(policy_RDV, batch, tabulate([setting], 1))[0]
    np.testing.assert_allclose(got_DV, expected_DV.numpy(), atol=1e-14)
    assert np.abs(got_DV).max() > 1e-3


def recipe_objective(logit_DV: Tensor, batch: Batch, setting: Setting) -> Tensor:
    """The same from megasharp's own casp, clip and entropy_bonus, hook by hook; the mean over tokens, maximised."""
    state_T, target_T = (torch.from_numpy(x[0]).flatten() for x in (batch.state_RGL, batch.action_RGL))
    adv_T = torch.from_numpy(batch.advantage_RG[0]).repeat_interleave(HORIZON)
    logp_TV = torch.log_softmax(logit_DV, dim=-1)[state_T]
    ones_T = torch.ones_like(adv_T)
    sequences = batch.advantage_RG.shape[1]
    x = TokenInputs(
        mask_T=ones_T,
        seq_T=torch.arange(sequences).repeat_interleave(HORIZON),
        group_T=torch.zeros_like(target_T),
        reward_T=(adv_T > 0).double(),
        correct_T=(adv_T > 0).double(),
        group_size_T=sequences * ones_T,
        group_correct_T=ones_T,
        num_sequences=sequences,
        logp_T=logp_TV.gather(-1, target_T[:, None])[:, 0],
        entropy_T=-(logp_TV.exp() * logp_TV).sum(-1),
        topn_logp_TN=logp_TV.topk(setting.topn, dim=-1).values,
        is_top1_T=(logp_TV.argmax(-1) == target_T).double(),
    )
    assert x.logp_T is not None
    casp = CaSP(
        CaSPParams(alpha=setting.alpha, topn=setting.topn, quantile=setting.quantile, lambda_top1=setting.lambda_top1)
    )
    directed_T, _ = casp.direction(x.logp_T, x, adv_T)
    logr_T = casp.log_ratio(directed_T - x.before_T, x, adv_T)
    loss_T, _ = Clip(ClipParams()).surrogate(x, logr_T, adv_T, {})
    bonus_T, _ = EntropyBonus(EntropyBonusParams(coefficient=setting.beta)).penalty(x)
    return -(loss_T + bonus_T).mean()


@each_case(
    "setting", [Setting(1.0, alpha=0.65, lambda_top1=1.1), Setting(1.0, beta=0.2, alpha=0.3, topn=3, quantile=0.4)]
)
def test_gradient_is_that_of_the_methods_of_a_recipe(setting: Setting) -> None:
    policy_RDV = random_policy(6)
    batch = collect(policy_RDV, np.random.default_rng(7).random((1, 32, HORIZON)))
    assert 0 < (batch.advantage_RG > 0).sum() < 32
    logit_DV = torch.from_numpy(np.log(policy_RDV[0])).requires_grad_()
    (expected_DV,) = torch.autograd.grad(recipe_objective(logit_DV, batch, setting), logit_DV)
    got_DV = gradient(policy_RDV, batch, tabulate([setting], 1))[0]
    np.testing.assert_allclose(got_DV, expected_DV.numpy(), atol=1e-14)


def test_a_run_depends_only_on_its_own_setting_and_seed() -> None:
    settings = [Setting(5.0), Setting(5.0, beta=0.5), Setting(2.0, alpha=0.4, topn=3, quantile=0.4)]
    together = train(settings, (3, 4), 30, 8, Ascent(1.0)).reshape(3, 2, STATES, 4)
    np.testing.assert_allclose(train(settings[2:], (4,), 30, 8, Ascent(1.0))[0], together[2, 1], atol=1e-12)
    assert np.abs(together[0] - together[1]).max() > 1e-3 and np.abs(together[0, 0] - together[0, 1]).max() > 1e-3


def test_judge_counts_modes_and_accuracy_of_known_policies() -> None:
    policy_RDV = np.full((2, STATES, 4), 0.25)
    for state, action in zip(states_of("CAB"), "CAB", strict=True):
        policy_RDV[1, state] = np.eye(4)[ACTIONS.index(action)]
    result = judge(policy_RDV, (0, 1))
    # Uniform: each mode has 1/64, so that all are seen, and six in 64 sequences are right.
    assert result.modes_R.tolist() == [6.0, 1.0] and result.accuracy_R[1] == 1.0
    assert abs(result.accuracy_R[0] - 6 / 64) < 4 * np.sqrt(6 / 64 * 58 / 64 / 1000)


@pytest.fixture(scope="module")
def small_results() -> Results:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiments, "STEPS", 60)
        return experiments.run_all((0, 1))


def test_study_reports_every_table_and_claim(small_results: Results) -> None:
    findings = Findings("", tables(small_results), claims(small_results), draw(small_results))
    names = ["methods", "entropy", "casp", "variants", "rates", "negatives", "modes"]
    assert [table.name for table in findings.tables] == names
    for table in findings.tables:
        assert table.rows and all(len(row) == len(table.columns) for row in table.rows)
    assert len(findings.claims) == 9
    # After 60 steps both seeds have two modes.
    assert findings.claims[0].outcome is Outcome.PARTLY


def test_claims_follow_the_figures(small_results: Results) -> None:
    good = replace(small_results.sgd[experiments.CASP], modes_R=np.full(2, 6.0), accuracy_R=np.full(2, 1.0))
    bad = replace(good, accuracy_R=np.full(2, 0.48))
    results = Results({**small_results.sgd, experiments.CASP: good, experiments.ENTROPY: bad}, small_results.adam)
    outcomes = {claim.where: claim.outcome for claim in claims(results)}
    assert outcomes["fig 5c"] is Outcome.REPRODUCED and outcomes["fig 5d"] is Outcome.REPRODUCED
    swapped = Results({**small_results.sgd, experiments.CASP: bad, experiments.ENTROPY: good}, small_results.adam)
    outcomes = {claim.where: claim.outcome for claim in claims(swapped)}
    assert outcomes["fig 5c"] is Outcome.DIFFERS and outcomes["fig 5d"] is Outcome.DIFFERS


def twenty(results: Results, setting: Setting, modes: list[float], accuracy: float = 1.0) -> Result:
    return replace(results.sgd[setting], modes_R=np.array(modes), accuracy_R=np.full(20, accuracy))


def outcome_of(results: Results, changed: dict[Setting, Result], statement: str) -> Outcome:
    perfect = {setting: twenty(results, setting, [6.0] * 20) for setting in results.sgd}
    judged = claims(Results({**perfect, **changed}, results.adam))
    return next(claim.outcome for claim in judged if claim.statement.startswith(statement))


@each_case(
    ("fewer", "outcome"), [(0, Outcome.DIFFERS), (1, Outcome.DIFFERS), (3, Outcome.DIFFERS), (8, Outcome.REPRODUCED)]
)
def test_the_penalty_is_needed_only_where_clearly_more_modes_are_lost(
    small_results: Results, fewer: int, outcome: Outcome
) -> None:
    without = twenty(small_results, experiments.CASP, [5.0] * fewer + [6.0] * (20 - fewer))
    changed = {experiments.VARIANTS["smoothing only (lambda 1)"]: without}
    assert outcome_of(small_results, changed, "the penalty on the rank-1") is outcome


@each_case(
    ("single", "rest", "outcome"),
    [
        (20, 2.0, Outcome.REPRODUCED),
        (18, 2.0, Outcome.REPRODUCED),
        (12, 2.0, Outcome.PARTLY),
        (2, 5.0, Outcome.DIFFERS),
    ],
)
def test_a_single_mode_is_asked_of_nearly_all_seeds(
    small_results: Results, single: int, rest: float, outcome: Outcome
) -> None:
    grpo = twenty(small_results, experiments.GRPO, [1.0] * single + [rest] * (20 - single))
    assert outcome_of(small_results, {experiments.GRPO: grpo}, "GRPO collapses") is outcome


@each_case(
    ("modes", "accuracy", "outcome"),
    [(6.0, 0.48, Outcome.REPRODUCED), (3.0, 1.0, Outcome.REPRODUCED), (6.0, 0.98, Outcome.PARTLY)],
)
def test_a_bonus_matches_by_modes_and_accuracy_together(
    small_results: Results, modes: float, accuracy: float, outcome: Outcome
) -> None:
    bonus = twenty(small_results, experiments.ENTROPY, [modes] * 20, accuracy)
    changed = {experiments.at_entropy(beta): bonus for beta in experiments.BETAS}
    changed[experiments.CASP] = twenty(small_results, experiments.CASP, [6.0] * 20, 0.997)
    assert outcome_of(small_results, changed, "an entropy bonus cannot") is outcome
    changed[experiments.CASP] = twenty(small_results, experiments.CASP, [1.0] * 20, 0.997)
    assert outcome_of(small_results, changed, "an entropy bonus cannot") is Outcome.DIFFERS


@each_case(
    ("modes", "accuracy", "sharpens", "destabilises"),
    [
        (5.0, 1.0, Outcome.REPRODUCED, Outcome.PARTLY),
        (6.0, 0.9, Outcome.PARTLY, Outcome.REPRODUCED),
        (6.0, 1.0, Outcome.PARTLY, Outcome.PARTLY),
    ],
)
def test_amplified_negatives_are_judged_by_modes_and_by_accuracy(
    small_results: Results, modes: float, accuracy: float, sharpens: Outcome, destabilises: Outcome
) -> None:
    worse = twenty(small_results, experiments.GRPO, [modes] * 20, accuracy)
    changed = {experiments.amplified(f, lr): worse for f in experiments.NEGATIVES for lr in experiments.NEGATIVE_RATES}
    assert outcome_of(small_results, changed, "amplifying all negative") is sharpens
    assert outcome_of(small_results, changed, "amplified negative advantages destroy") is destabilises


def test_settings_say_what_was_chosen_from_the_sweeps(small_run: Callable[[str], Findings]) -> None:
    settings = small_run("tree").settings
    chosen = settings[settings.index("Chosen") :]
    assert all(word in chosen for word in ("coefficient", "alpha", "no gate", "learning rate", "at lr 1,", "at lr 5"))
