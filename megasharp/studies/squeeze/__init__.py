"""`megasharp toy squeeze`: how updates concentrate one state's distribution, and what is left to sample from it.

2510.14807: Observation 1, Lemma 2 by autograd and by simulation, Proposition 3, two distributions of equal entropy as
in figure 4c, equation 15, and how many candidates a model's own distributions have.
"""

from __future__ import annotations

from megasharp.studies.squeeze import candidates
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
    """Measure everything, with `options.seeds` on-policy runs (100 by default).

    `options.model` is a Hugging Face folder; without one the quickstart's model is measured, where it is shipped.
    Raises UserError where `options.model` is given and cannot be loaded.
    """
    seeds = range(options.seed, options.seed + (options.seeds or SEEDS))
    measured = measure(seeds)
    shown, judged, settings = tables(measured), claims(measured), f"{len(seeds)} runs. {SETTINGS}"
    default = candidates.DEFAULT_MODEL
    folder = options.model or (default if default.is_dir() else None)
    if folder is None:
        settings += f"\nFigures 9 and 11 are left out: no {default} here, and no --model was given."
    else:
        found = candidates.measure_candidates(folder, options.seed)
        shown, judged = (*shown, candidates.candidates_table(found)), (*judged, *candidates.candidates_claims(found))
        settings += (
            f"\nFigures 9 and 11 on {folder}: {candidates.RESPONSES} responses to each of the quickstart's development "
            "problems at temperature 1, another model and another task than the paper's."
        )
    return Findings(settings, shown, judged, draw(measured))


STUDY = Study(
    "squeeze",
    "2510.14807",
    "one next-token distribution: squeeze, distinct samples, equal entropy; a model's candidates",
    run,
    takes_model=True,
)
