"""The page of the scoreboard: verdicts counted by paper, then a table for each paper."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from megasharp.studies.scoreboard.claims import PAPERS, VERDICTS, Paper, read_paper
from megasharp.studies.scoreboard.verdicts import Measured, check_named, computed, read_measured, study_names
from megasharp.studies.study import Claim

HEAD = """# The papers' claims, on trial

Each theorem, figure, table and stated result of the four papers that megasharp implements, how it is tested here, and
what came out. `megasharp toy --scoreboard --out docs` writes this page: it runs all [studies](explanation/studies.md)
and reads the results of the [frontier study](../examples/frontier/README.md); a verdict that a run contradicts is an
error.

| verdict | means |
|---|---|
| holds | shown here, by proof, exact computation, or measurement with its interval |
| holds where ... | the same under the condition named; elsewhere not, or not clearly |
| not shown here | measured, and the interval contains zero |
| does not hold here | the contrary was shown here, or the paper's own figures contradict it |
| needs GPUs | about the papers' own models; the run files are ready |
| not testable | no statement that a run could contradict |

"Here" is a model of a few numbers (`toy`), or of 0.6 million parameters on Countdown (`small model`). A claim that does
not hold here may hold for larger models, and the reverse. *Miniature* and *second tier* are
[collapse in miniature](../examples/collapse_in_miniature/README.md) and its second table (one seed, not tuned);
*solution multiplicity* is [a study of its own](../examples/solution_multiplicity/README.md). Names in `code` without a
folder are run files of [configs/algo/paper](../configs/algo/paper/README.md). Figures of the form "A less B" are
[runs at one learning rate](../examples/frontier/README.md#parts-and-coefficients), 5e-5, on 256 test problems unless
they name another suite, with at least three seeds and nothing corrected; more pass@256 there is seldom more at equal
pass@1. A line with *also* has the other k of the same pair whose intervals leave zero out; p is Holm's.
"""


def scoreboard(studies: Mapping[str, Sequence[Claim]], root: Path | None) -> str:
    """Return the page as Markdown, with figures that the repository at `root` has, if there is one.

    Raises UserError where a run contradicts a verdict, or a study a claim that does not name it.
    """
    papers = [read_paper(name) for name in PAPERS]
    measured = None if root is None else read_measured(root, papers)
    check_named(papers, studies)
    return "\n".join([HEAD, *_counts(papers), *(line for paper in papers for line in _table(paper, studies, measured))])


def needed_studies() -> list[str]:
    """Return the names of the studies that the page needs."""
    return study_names(read_paper(name) for name in PAPERS)


def _counts(papers: Sequence[Paper]) -> list[str]:
    counts = [Counter(claim.word for claim in paper.claims) for paper in papers]
    lines = [f"| | {' | '.join(paper.paper for paper in papers)} | all |", "|---" * (len(papers) + 2) + "|"]
    for word in VERDICTS:
        row = [count[word] for count in counts]
        if any(row):
            lines.append(f"| {word} | {' | '.join(map(str, row))} | {sum(row)} |")
    totals = [len(paper.claims) for paper in papers]
    return [*lines, f"| claims | {' | '.join(map(str, totals))} | {sum(totals)} |", ""]


def _table(paper: Paper, studies: Mapping[str, Sequence[Claim]], measured: Measured | None) -> list[str]:
    lines = [
        f"## {paper.paper}: {paper.title}",
        "",
        "| place | claim | kind | tested by | verdict | figures |",
        "|---|---|---|---|---|---|",
    ]
    for claim in paper.claims:
        figures = "<br>".join(text for text in (claim.evidence, *computed(claim, studies, measured)) if text)
        cells = [f'<a id="{claim.id}"></a>{claim.place}', claim.claim, claim.kind, claim.test]
        cells += [f"**{claim.verdict}**", figures]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return [*lines, ""]
