"""`megasharp toy squeeze`: how updates concentrate one state's distribution, and what is left to sample from it.

2510.14807: Observation 1, Lemma 2 by autograd and by simulation, Proposition 3, and two distributions of equal entropy
as in figure 4c.
"""

from __future__ import annotations

from megasharp.studies.squeeze.claims import claims, draw, measure, tables
from megasharp.studies.squeeze.dynamics import (
    EXPONENT,
    REPEATED_LR,
    REPEATED_STEPS,
    SAMPLED_LR,
    SAMPLED_STEPS,
    VOCABULARY,
)
from megasharp.studies.study import Findings, Options, Study

SEEDS = 100
SETTINGS = (
    "The paper states and proves; it has no experiment on a single state. All ours: "
    f"{VOCABULARY} candidates, start p_v ~ rank^-{EXPONENT:g}; penalties repeated {REPEATED_STEPS} times at lr "
    f"{REPEATED_LR:g}; on-policy runs of {SAMPLED_STEPS} one-token updates at lr {SAMPLED_LR:g}; figure 4c's shapes."
)


def run(options: Options) -> Findings:
    """Measure everything, with `options.seeds` on-policy runs (100 by default)."""
    seeds = range(options.seed, options.seed + (options.seeds or SEEDS))
    measured = measure(seeds)
    return Findings(f"{len(seeds)} runs. {SETTINGS}", tables(measured), claims(measured), draw(measured))


STUDY = Study("squeeze", "2510.14807", "one next-token distribution: squeeze, distinct samples, equal entropy", run)
