"""The page's records, which become its JSON, and the helpers that keep it small. Scripts in `static/` draw them.

A `model` is the weights of a run after a step; models are named by their place in `Page.models`, runs by theirs in
`Page.runs`. Curves over steps are packed (`float_arrays.py`); points of other figures are lists, [x, y] or
[x, y, low, high]. Of many things a page holds a few, evenly chosen, and of very long curves the means.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from megasharp.reporting.page.float_arrays import Packed

Points = list[list[float]]


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened after a step: `kind` is restart, reset or stage."""

    kind: str
    step: int
    text: str


@dataclass(frozen=True, slots=True)
class Run:
    """A run as the page names it: its methods and where it differs from the others (`what`); `facts` on its state."""

    name: str
    folder: str
    what: str
    facts: list[str]
    marks: list[Mark]
    warnings: list[str]


@dataclass(frozen=True, slots=True)
class Model:
    """The weights of run `run` after `step`; `shared`: the base model, the same for several runs.

    `run` is -1 for a model that is known by an evaluation alone.
    """

    run: int
    step: int
    label: str
    last: bool
    shared: bool


@dataclass(frozen=True, slots=True)
class Series:
    """One run's curve over steps `x`; `label` tells it from the run's others in the figure.

    `low` and `high` bound a 95% interval at each point; None where none was measured.
    """

    run: int
    x: Packed
    y: Packed
    label: str = ""
    low: Packed | None = None
    high: Packed | None = None


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure over steps, the runs overlaid: metric `name`, whose `title` is in words.

    `noisy`: one point per step, which the page may smooth. `zero`: 0 at every step of every run, which it folds away.
    """

    name: str
    title: str
    section: str
    noisy: bool
    zero: bool
    series: list[Series]


@dataclass(frozen=True, slots=True)
class ModelPoints:
    """One model's points in a figure that is not over steps."""

    model: int
    points: Points


@dataclass(frozen=True, slots=True)
class PassAtK:
    """pass@k over k with 95% intervals on one suite; `note` says how it was measured.

    `changes` are differences from model `base`, over the same problems; none where there is no such model.
    """

    suite: str
    note: str
    models: list[ModelPoints]
    base: int | None
    changes: list[ModelPoints]


@dataclass(frozen=True, slots=True)
class Bars:
    """Shares in bins, which have `labels`: of a model, or of a run where `model` is None."""

    label: str
    run: int
    model: int | None
    shares: list[float]


@dataclass(frozen=True, slots=True)
class Success:
    """Shares of prompts by the share of their samples that is correct, of a suite or of the rollouts of training."""

    source: str
    labels: list[str]
    bars: list[Bars]


@dataclass(frozen=True, slots=True)
class ProbeText:
    """A fixed response: its problem, its prompt, the texts of its first tokens, and its number of tokens."""

    problem: str
    prompt: str
    tokens: list[str]
    whole: int


@dataclass(frozen=True, slots=True)
class ProbedModel:
    """One model's candidates for the tokens of the fixed responses.

    `rank_means`: mean probability at ranks 1, 2, ...; `entropy`: shares of tokens by entropy; `rank_bins`: of ranks 1
    to 3, shares by probability. `cells[response][position]` is [probability of the token, its rank, then token text's
    number and probability in turn for the candidates to 0.95], rounded.
    """

    model: int
    tokens: int
    mean_entropy: float
    rank_means: list[float]
    entropy: list[float]
    rank_bins: list[list[float]]
    cells: list[list[list[float]]]


@dataclass(frozen=True, slots=True)
class Probe:
    """Models that read the same responses. `words` are the candidates' texts, `edges` those of the entropy bins."""

    runs: list[int]
    note: str
    texts: list[ProbeText]
    words: list[str]
    edges: list[float]
    models: list[ProbedModel]


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """A response of training. `probabilities` (in hundredths) are its `tokens`'; both empty where only text is kept.

    `turns` are those of a response that an environment answers, each [end, until, reward]: the policy's part ends
    before `end`, the environment's before `until`, in tokens, or in characters where there are none.
    """

    run: int
    step: int
    problem: str
    prompt: str
    index: int
    outcome: str
    reward: float
    answer: str
    text: str
    length: int
    tokens: list[str]
    probabilities: list[int]
    dropped: str
    code_error: str
    turns: list[list[float | None]]


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Some of the responses; `note` says which, and how many exist."""

    note: str
    rows: list[RolloutRow]


@dataclass(frozen=True, slots=True)
class Judgement:
    """One judgement of a set of samples: its name, how many samples are judged (greedy ones apart), and how they are.

    `gained` and `lost` count the samples, greedy ones too, that this judgement calls correct and the set's first does
    not, and the reverse.
    """

    name: str
    samples: int
    correct: int
    greedy: int
    greedy_correct: int
    gained: int
    lost: int


@dataclass(frozen=True, slots=True)
class SampleSet:
    """The samples of one model on a suite, judged once or more often; `run` is -1 where they are of no run."""

    run: int
    step: int
    name: str
    judgements: list[Judgement]


@dataclass(frozen=True, slots=True)
class StoredProblem:
    """A problem: its question and known answer, empty where unknown; `counts[set][judgement]` is [samples, correct]."""

    id: str
    question: str
    known: str
    counts: list[list[list[int]]]


@dataclass(frozen=True, slots=True)
class StoredVerdict:
    """The verdict on a sample."""

    outcome: str
    reward: float
    answer: str
    detail: str


@dataclass(frozen=True, slots=True)
class StoredRow:
    """A stored sample of problem and set by their places, with the verdicts of the set's judgements, in their order.

    `text` is empty where it was not kept, else its beginning; `tail` is its end where it is too long to be whole, and
    `letters` counts all of it. `seed` is text: JavaScript's numbers would round it. `turns` are as those of
    `RolloutRow`, in characters of the whole text.
    """

    set: int
    problem: int
    index: int
    greedy: bool
    seed: str
    finish: str
    tokens: int
    text: str
    tail: str
    letters: int
    verdicts: list[StoredVerdict]
    turns: list[list[float | None]]


@dataclass(frozen=True, slots=True)
class StoredSuite:
    """Some of the stored samples of a suite; `note` says which, and how many exist."""

    suite: str
    note: str
    sets: list[SampleSet]
    problems: list[StoredProblem]
    rows: list[StoredRow]


@dataclass(frozen=True, slots=True)
class CodeErrors:
    """Share of correct responses that report an error of code, over steps."""

    note: str
    series: list[Series]


@dataclass(frozen=True, slots=True)
class Stages:
    """Seconds of each stage in `names`, means over ranges of steps: `rows` are [first step, last step, seconds...].

    `totals` are a name and a value each, over all of the run's time.
    """

    run: int
    names: list[str]
    rows: Points
    totals: list[list[str]]


@dataclass(frozen=True, slots=True)
class Difference:
    """A key of the run files in which the runs differ, and each run's value."""

    key: str
    values: list[str]


@dataclass(frozen=True, slots=True)
class Page:
    """The whole page. `live`: it was served and polls for changes; `last_step`: the last of the curves over steps.

    `unread` has a line for each evaluation that cannot be read.
    """

    title: str
    made: str
    live: bool
    last_step: int
    words: list[str]
    unread: list[str]
    runs: list[Run]
    models: list[Model]
    differences: list[Difference]
    figures: list[Figure]
    pass_at_k: list[PassAtK]
    success: list[Success]
    probes: list[Probe]
    stored: list[StoredSuite]
    rollouts: Rollouts
    code_errors: CodeErrors
    stages: list[Stages]
    telemetry: str


Item = TypeVar("Item")


def spread_out(items: Sequence[Item], most: int) -> list[Item]:
    """Choose at most `most` (at least 2) of `items`, at equal distances, and the last.

    The distance is a power of two, so that the choice is stable, or halved, when items are added.
    """
    distance = 1
    while len(chosen := [*range(0, len(items) - 1, distance), len(items) - 1]) > most:
        distance *= 2
    return [items[place] for place in chosen] if items else []


def shared_steps(steps: Sequence[Collection[int]], most: int) -> list[list[int]]:
    """Choose at most `most` of each run's steps: of those that all have, if several, as others cannot be compared."""
    shared = sorted(set.intersection(*map(set, steps))) if steps else []
    return [spread_out(shared if len(shared) > 1 else sorted(own), most) for own in steps]


def ranges(count: int, most: int) -> list[range]:
    """Split `count` places into at most `most` ranges of one length, the last maybe shorter."""
    width = max(1, -(-count // most))
    return [range(start, min(start + width, count)) for start in range(0, count, width)]


def share_bin(correct: int, samples: int, parts: int) -> int:
    """Return the bin of a share of samples: 0 for none, 1 to `parts` for equal parts below all, `parts` + 1 for all.

    Computed in integers: a share at a bin's edge is exactly in it.
    """
    if correct in (0, samples):
        return 0 if correct == 0 else parts + 1
    return -(-parts * correct // samples)


def rounded(value: float, digits: int = 5) -> float:
    """Round to so many significant digits."""
    return float(f"{value:.{digits}g}")
