"""`megasharp toy cats`: a softmax classifier that collapses onto one of two correct labels, and what IAC and DLC do.

2601.15609 section 3.4 and appendices I, J: inputs are Persian cats, "Cat" and "Persian" are both correct; a policy
gradient on groups of sampled labels keeps one of them. Figures 1, 2, 4, 5 and 6, section 3.3's criterion, and section
4.1's reasons for leaving wrong samples and 1 / pi alone.
"""

from __future__ import annotations

from megasharp.studies.cats.claims import draw, judge
from megasharp.studies.cats.criterion import criterion_claims, criterion_table, run_criteria
from megasharp.studies.cats.drift import drift_by_success, drift_table
from megasharp.studies.cats.experiments import PLAIN, run_all, tabulate, train
from megasharp.studies.cats.negatives import negatives_claims, negatives_table, run_negatives
from megasharp.studies.cats.variance import variance_claim, variance_table
from megasharp.studies.study import Findings, Options, Study

# Enough for IAC's effect under normalised advantages, .05 of dominance, to be several standard errors.
SEEDS = 128
SETTINGS = (
    "Not in the paper: features, start, learning rates, group sizes, mu, the memory's learning rate. Here: linear "
    "softmax from zero weights; Persian (1,1,0,0), Siamese (1,1-s,0,s), s .2/.5/.8 for High/Mid/Low similarity; "
    "lr .5 (momentum .9; AdamW .5 and .1, weight decay .01); memory lr .5; DLC without importance weights if "
    "none are named. 500 steps, as in the paper. The tables vary the learning rate."
)


def run(options: Options) -> Findings:
    """Train every setting for `options.seeds` seeds (128 by default)."""
    seeds = range(options.seed, options.seed + (options.seeds or SEEDS))
    results, criteria, effects, noise = run_all(seeds), run_criteria(seeds), run_negatives(seeds), variance_table()
    drifts = (drift_table(), drift_by_success())
    tables = (*tabulate(results), criterion_table(criteria), negatives_table(effects), noise, *drifts)
    more = (*criterion_claims(criteria), *negatives_claims(effects), variance_claim(noise))
    figure = draw(results, train(PLAIN, seeds))
    return Findings(f"{len(seeds)} seeds. {SETTINGS}", tables, (*judge(results), *more), figure)


STUDY = Study("cats", "2601.15609", "Cat or Persian: how a policy gradient drops a correct label, IAC and DLC", run)
