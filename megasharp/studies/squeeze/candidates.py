"""Candidates of a model's next-token distributions, counted: 2510.14807 section 1, appendices D.2 and G.

The model answers the quickstart's development problems (Countdown), at temperature 1 and uncut. At each token of these
responses, its end token included, the whole distribution is read: the mass of the TOPN most probable candidates, in
which bin rank 1, 2 and 3 are (figure 9), and how many candidates are needed for .95 of the mass (figures 11 to 16).

The first claim is the assumption of the method: that the top three stand for the whole. Claims about training (GRPO
often leaves one candidate, CaSP more) compare models; a run of this for each of them gives the numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megasharp.config.core import SHIPPED
from megasharp.studies.claims import clearly_above
from megasharp.studies.language_model import draw_responses, load_model, threads_for
from megasharp.studies.softmax import Bools, Counts, Floats
from megasharp.studies.study import Cell, Claim, Outcome, Table
from megasharp.tasks.countdown import prompt_text, read_records
from megasharp.tasks.tokenizer import load_tokenizer

QUICKSTART = SHIPPED / "examples" / "quickstart"
DEFAULT_MODEL = QUICKSTART / "base"
PROBLEMS = QUICKSTART / "data" / "dev.jsonl"
RESPONSES = 2
LONGEST = 20
TOPN = 3
# The paper's: bins of figure 9, and the mass of figures 11 to 16.
RARE, MASS = 0.05, 0.95
# "More than 95 % of cases", of figure 9.
USUAL = 0.95


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Tokens of sampled responses, [T]: `response_T` which one; `top_TN` the probabilities of ranks 1 to TOPN.

    `needed_T`: how many candidates hold MASS. `sampled_T`: whether rank 1 was sampled.
    """

    response_T: Counts
    top_TN: Floats
    needed_T: Counts
    sampled_T: Bools

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return len(self.needed_T)

    def per_response(self, value_T: Floats) -> Floats:
        """Return the mean of `value_T` over each response's tokens; tokens of one response are not independent."""
        total_R = np.bincount(self.response_T, weights=value_T)
        return np.asarray(total_R / np.bincount(self.response_T))


def measure_candidates(folder: Path, seed: int) -> Candidates:
    """Sample responses of the model in `folder` and read every token's distribution; float32, on the CPU.

    Raises UserError where the folder holds no causal language model with its tokenizer.
    """
    tokenizer, model = load_tokenizer(folder), load_model(folder)
    prompts = [tokenizer.encode(prompt_text(record.numbers, record.target)) for record in read_records(PROBLEMS)]
    with threads_for(model):
        responses = draw_responses(model, tokenizer, prompts, RESPONSES, LONGEST, seed)
        read = [_read(model, prompts[place], response) for place, response in responses]
    lengths = [len(response) for _, response in responses]
    top_TN, needed_T, sampled_T = (torch.cat(parts).numpy() for parts in zip(*read, strict=True))
    return Candidates(np.repeat(np.arange(len(lengths)), lengths), top_TN, needed_T, sampled_T)


def _read(model: Any, prompt: tuple[int, ...], response: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    with torch.no_grad():
        logit_TV = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    ordered = torch.softmax(logit_TV.double(), dim=-1).sort(dim=-1, descending=True)
    return ordered.values[:, :TOPN], needed(ordered.values), ordered.indices[:, 0] == torch.tensor(response)


def needed(ordered_TV: Tensor, mass: float = MASS) -> Tensor:
    """Return how many of the most probable candidates hold at least `mass`, [T]; probabilities in falling order."""
    before_TV = ordered_TV.cumsum(dim=-1) - ordered_TV
    return (before_TV < mass).sum(dim=-1)


def candidates_table(found: Candidates) -> Table:
    """Tabulate figure 9's bins by rank, and the candidates needed."""
    edges = (0.0, RARE, 0.2, 0.5, 0.8, MASS, 1.0)
    rows: list[tuple[Cell, ...]] = []
    for rank in range(TOPN):
        place_T = np.digitize(found.top_TN[:, rank], edges[1:-1])
        shares = np.bincount(place_T, minlength=len(edges) - 1) / found.tokens
        rows.append((f"rank {rank + 1}", float(found.top_TN[:, rank].mean()), *map(float, shares)))
    columns = ("candidate", "mean p", *(f"to {edge:g}" for edge in edges[1:]))
    return Table(
        "candidates", f"probability of the top {TOPN} at {found.tokens:,} sampled tokens", columns, tuple(rows)
    )


def candidates_claims(found: Candidates) -> tuple[Claim, ...]:
    """Judge that the top three stand for the whole, figure 9, and that several candidates are left."""
    return (_skewed(found), _rank_3(found), _several(found))


def _skewed(found: Candidates) -> Claim:
    mass_T = found.top_TN.sum(axis=-1)
    mass_R = found.per_response(mass_T)
    enough = float((mass_T >= MASS).mean())
    ours = (
        f"top {TOPN} hold {mass_T.mean():.3f} of the mass on average, at least {MASS:g} of it at {enough:.0%} of "
        f"{found.tokens:,} tokens; least {mass_T.min():.2f}"
    )
    verdict = Outcome.PARTLY if clearly_above(mass_R, MASS) else Outcome.DIFFERS
    if verdict is Outcome.PARTLY and enough > USUAL:
        verdict = Outcome.REPRODUCED
    statement = f"next-token distributions are so skewed that the top N stand for the whole (N = {TOPN}, {MASS:g})"
    return Claim("sec 1, fig 2", statement, "only a few carry mass", ours, verdict)


def _rank_3(found: Candidates) -> Claim:
    low_R = found.per_response((found.top_TN[:, 2] < RARE).astype(np.float64))
    share = float((found.top_TN[:, 2] < RARE).mean())
    second = float((found.top_TN[:, 1] < RARE).mean())
    ours = f"rank 3 below {RARE:g} at {share:.1%} of the tokens, rank 2 at {second:.1%}"
    verdict = Outcome.REPRODUCED if clearly_above(low_R, USUAL) else Outcome.DIFFERS
    statement = f"rank 3 is below {RARE:g} in more than {USUAL:.0%} of the positions"
    return Claim("fig 9, app D.2", statement, f"> {USUAL:.0%}, across methods", ours, verdict)


def _several(found: Candidates) -> Claim:
    single, needed_R = float((found.needed_T == 1).mean()), found.per_response(found.needed_T.astype(np.float64))
    ours = (
        f"{found.needed_T.mean():.2f} candidates for {MASS:g} of the mass on average, at most "
        f"{int(found.needed_T.max())}; one at {single:.0%} of the tokens; rank 1 sampled at "
        f"{found.sampled_T.mean():.0%}"
    )
    # "A small but visible set": more than one, and no more than the top N on average.
    small = clearly_above(needed_R, 1.0) and not clearly_above(needed_R, float(TOPN))
    statement = "the base model keeps a small but visible set of alternatives"
    return Claim("figs 11-13, app G", statement, "several", ours, Outcome.REPRODUCED if small else Outcome.DIFFERS)
