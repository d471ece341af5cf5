"""`megasharp toy actions`: exploitation, then exploration, of a policy gradient over three or four actions.

2510.04028 sections 3 and 4.1, Algorithm 1 (C.1) and C.4: Theorem 1 by exact enumeration; figures 1, 5, 6 and 7; the
variants that learn from relative negatives alone (-N); remark 4's momentum, resets and entropy control;
proposition 1 on a small model.
"""

from __future__ import annotations

from megasharp.studies.actions import remark_4, tangent
from megasharp.studies.actions.claims import draw, judge
from megasharp.studies.actions.experiments import run_all, tabulate
from megasharp.studies.study import Findings, Options, Study

SEEDS = 32
SETTINGS = (
    "From the paper: G = 2, lr .1, A = r - mean, Algorithm 1. Not in the paper: rewards and starts (only r(a1) < "
    "r(a2), r(a3) = 0 and pi(a1) > pi(a2)), steps (here 1,000 with Adam, 10,000 with the plain gradient), Adam's betas "
    '(torch\'s here), and whether "Adam update" or the plain formula printed beside it is meant: both are run.'
)


def run(options: Options) -> Findings:
    """Run every setting for `options.seeds` seeds (32 by default)."""
    seeds = range(options.seed, options.seed + (options.seeds or SEEDS))
    results, remedies, measured = run_all(seeds), remark_4.run_all(seeds), tangent.measure(options.seed)
    left_out = "" if measured else f" Proposition 1 is left out: no {tangent.MODEL} here."
    return Findings(
        f"{len(seeds)} seeds. {SETTINGS}{left_out}",
        (*tabulate(results), *remark_4.tabulate(remedies), *(tangent.tabulate(measured) if measured else ())),
        (*judge(results), *remark_4.judge(remedies), *(tangent.judge(measured) if measured else ())),
        draw(results),
    )


STUDY = Study("actions", "2510.04028", "exploitation, then exploration: two stages of a policy gradient, and -N", run)
