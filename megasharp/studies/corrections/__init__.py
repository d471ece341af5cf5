"""`megasharp toy corrections`: the bias of every correction against what it claims, exact on small bandits.

Whatever is against the sampler claims the on-policy gradient; whatever is against the policy claims the gradient of the
present policy under the shift that was recorded. Only weights of whole responses that nothing cuts reach their claim;
the rest trades bias for variance, and the tables say how much.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import mean

from matplotlib.figure import Figure
from torch import Tensor

from megasharp.algos.base import MethodParams
from megasharp.algos.clip import ClipParams
from megasharp.algos.group_statistics import ComparedParams
from megasharp.algos.off_policy_mask import OffPolicyMaskParams
from megasharp.algos.ratio_mask import RatioMaskParams
from megasharp.algos.truncated_is import TruncatedISParams
from megasharp.studies.claims import outcome
from megasharp.studies.corrections.bandit import ENGINE, MU, SITUATIONS, STALE, VOCABULARY, Bandit, make_bandit
from megasharp.studies.study import Claim, Findings, Options, Study, Table

PROBLEMS = 20
LENGTH = 3
EXACT = 1e-12
UNCUT = 1e9
HIGH = 2.0
SETTINGS = (
    f"All ours: responses of {LENGTH} tokens over {VOCABULARY} candidates, enumerated in float64; logits with standard "
    f"deviation 1, staleness {STALE:g}, engine noise {ENGINE:g}, mu {MU:g}; random rewards less their mean. A bias is "
    "the norm of the difference of two expected gradients, as a share of the second; the mean over problems."
)


@dataclass(frozen=True, slots=True)
class Estimator:
    """A recipe under test. `against` is what it compares with; None: nothing."""

    name: str
    methods: Sequence[str]
    params: Mapping[str, MethodParams]
    against: str | None = None


def _estimators(against: str) -> list[Estimator]:
    def weight(name: str, **params: object) -> Estimator:
        settings = TruncatedISParams.model_validate({"against": against, **params})
        return Estimator(name, ["reinforce", "truncated_is"], {"truncated_is": settings}, against)

    compared = {"bypass": ComparedParams.model_validate({"against": against}), "clip": ClipParams(low=1.0, high=UNCUT)}
    ratio = {"ratio_mask": RatioMaskParams.model_validate({"against": against, "low": 0.8, "high": 1.25})}
    off = {"off_policy_mask": OffPolicyMaskParams.model_validate({"against": against, "threshold": 0.1})}
    return [
        weight("weight by response, uncut", level="sequence", high=UNCUT),
        weight(f"weight by response, at most {HIGH:g}", level="sequence", high=HIGH),
        weight("weight by token, uncut", high=UNCUT),
        weight(f"weight by token, at most {HIGH:g} (default)", high=HIGH),
        weight("IcePop: weight by token in 0.5..5, else 0", mode="mask", low=0.5, high=5.0),
        weight("weight by geometric mean in 0.8..1.25, else 0", level="geometric", mode="mask", low=0.8, high=1.25),
        Estimator("bypass, unclipped", ["bypass", "clip"], compared, against),
        Estimator("ratio_mask: geometric mean in 0.8..1.25", ["reinforce", *ratio], ratio, against),
        Estimator("off_policy_mask: above 0.1", ["reinforce", *off], off, against),
    ]


ESTIMATORS = [Estimator("none", ["reinforce"], {}), *_estimators("policy"), *_estimators("sampler")]


def run(options: Options) -> Findings:
    """Measure all estimators on `options.seeds` problems (20 by default)."""
    seeds = range(options.seed, options.seed + (options.seeds or PROBLEMS))
    tables = (
        _table("on_policy", "bias against the on-policy gradient, which `sampler` claims", "on_policy", seeds),
        _table("shift_kept", "bias against the recorded shift kept, which `policy` claims", "shift_kept", seeds),
        _table("afresh", "bias against sampling afresh with the shift, what dlc means", "sampled_afresh", seeds),
    )
    return Findings(f"{len(seeds)} problems. {SETTINGS}", tables, _claims(seeds), _draw(tables))


@cache
def _bandit(seed: int, situation: int, length: int = LENGTH) -> Bandit:
    return make_bandit(seed, SITUATIONS[situation], length)


@cache
def _expected(number: int, seed: int, situation: int, length: int = LENGTH) -> Tensor:
    """The expected gradient of estimator `number` of `ESTIMATORS`."""
    estimator = ESTIMATORS[number]
    return _bandit(seed, situation, length).expected(["grpo", *estimator.methods], estimator.params)


def _bias(got: Tensor, claimed: Tensor) -> float:
    return float((got - claimed).norm() / claimed.norm())


def _table(name: str, title: str, claim: str, seeds: range) -> Table:
    def row(number: int) -> tuple[str | float, ...]:
        cells = []
        for situation in range(len(SITUATIONS)):
            biases = [_bias(_expected(number, s, situation), getattr(_bandit(s, situation), claim)) for s in seeds]
            cells.append(mean(biases))
        return ESTIMATORS[number].name, ESTIMATORS[number].against or "", *cells

    columns = ("estimator", "against", *(situation.name for situation in SITUATIONS))
    return Table(name, title, columns, tuple(map(row, range(len(ESTIMATORS)))))


def _claims(seeds: range) -> tuple[Claim, ...]:
    cases = [(seed, number) for seed in seeds for number in range(len(SITUATIONS))]
    claims = [
        _unbiased("weight by response, uncut", LENGTH, cases),
        _unbiased("weight by token, uncut", 1, cases),
        _unbiased("bypass, unclipped", 1, cases),
    ]
    gaps, bounds = zip(*(_cut(*case) for case in cases), strict=True)
    within = sum(gap <= bound + EXACT for gap, bound in zip(gaps, bounds, strict=True))
    ours = f"{within} of {len(cases)}; largest gap {max(gaps):.3g}, largest bound {max(bounds):.3g}"
    statement = "the cut's bias is at most the mass that it cuts off, times the largest gradient"
    claims.append(Claim(f"at most {HIGH:g}", statement, "below", ours, outcome(within, len(cases))))
    same = [_bias(_expected(n, seed, 0), _bandit(seed, 0).on_policy) for seed in seeds for n in range(len(ESTIMATORS))]
    exact = sum(bias <= EXACT for bias in same)
    ours = f"{exact} of {len(same)}; largest {max(same):.1e}"
    statement = "on-policy no estimator changes the gradient"
    claims.append(Claim("all", statement, "bias 0", ours, outcome(exact, len(same))))
    return tuple(claims)


def _unbiased(name: str, length: int, cases: Sequence[tuple[int, int]]) -> Claim:
    worst, exact, of = 0.0, 0, 0
    for number, estimator in enumerate(ESTIMATORS):
        for seed, situation in cases if estimator.name == name else ():
            bandit = _bandit(seed, situation, length)
            claimed = bandit.shift_kept if estimator.against == "policy" else bandit.on_policy
            bias = _bias(_expected(number, seed, situation, length), claimed)
            worst, exact, of = max(worst, bias), exact + (bias <= EXACT), of + 1
    ours = f"{exact} of {of}; largest {worst:.1e}"
    statement = f"unbiased for its claim, responses of {length} token{'s' * (length > 1)}"
    return Claim(name, statement, "bias 0", ours, outcome(exact, of))


def _cut(seed: int, situation: int) -> tuple[float, float]:
    """Return how far the cut moves the expected gradient from the on-policy one, and the bound on that.

    With weight w and sampler s the cut loses sum_y s (w - high)^+ A grad log pi, whose norm is at most the lost mass
    sum_y (pi - high s)^+ times the largest norm of A grad log pi.
    """
    bandit, name = _bandit(seed, situation), f"weight by response, at most {HIGH:g}"
    (cut,) = (n for n, estimator in enumerate(ESTIMATORS) if estimator.against == "sampler" and estimator.name == name)
    gap = float((_expected(cut, seed, situation) - bandit.on_policy).norm())
    logp_SL, p = bandit.logp(bandit.logits), bandit.logits.softmax(-1)
    lost = float((logp_SL.sum(1).exp() - HIGH * bandit.sampler_logp_SL.sum(1).exp()).clamp(min=0.0).sum())
    # Of log-softmax by its logits: the one-hot token less the probabilities, in a row of its own for each state.
    square_SL = 1.0 - 2.0 * logp_SL.exp() + p.square().sum(-1)[bandit.state_SL]
    return gap, lost * float((bandit.advantage_S.abs() * square_SL.sum(1).sqrt()).max())


def _draw(tables: Sequence[Table]) -> Figure:
    figure = Figure(figsize=(10.0, 7.0), layout="constrained")
    for axes, table in zip(figure.subplots(1, 2, sharey=True), tables[:2], strict=True):
        labels = [" ".join(map(str, row[:2])) for row in table.rows]
        for number, situation in enumerate(SITUATIONS):
            values = [float(row[2 + number]) for row in table.rows]
            axes.plot(values, range(len(labels)), "o", label=situation.name)
        axes.set_yticks(range(len(labels)), labels)
        axes.set_title(table.title, fontsize=8)
        axes.set_xlabel("bias")
    figure.axes[0].invert_yaxis()
    figure.axes[0].legend()
    return figure


STUDY = Study("corrections", "2510.18855", "the bias of corrections for stale and shifted samples, exactly", run)
