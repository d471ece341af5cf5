"""The scoreboard of claims: its files, its page, and verdicts that a run contradicts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megasharp.common.errors import UserError
from megasharp.studies.scoreboard.claims import (
    PAPERS,
    FrontierCheck,
    MeasuredCheck,
    Paper,
    PaperClaim,
    StudyCheck,
    read_paper,
)
from megasharp.studies.scoreboard.page import scoreboard
from megasharp.studies.scoreboard.verdicts import (
    DISTANCES,
    FrontierTest,
    Measured,
    check_named,
    computed,
    read_measured,
)
from megasharp.studies.study import Claim, Outcome

REPOSITORY = Path(__file__).parents[3]


def of(
    verdict: str,
    study: StudyCheck | None = None,
    frontier: FrontierCheck | None = None,
    measured: list[MeasuredCheck] | None = None,
) -> PaperClaim:
    return PaperClaim(
        id="iac-x",
        place="§1",
        claim="It rains",
        kind="toy",
        test="look",
        verdict=verdict,
        evidence="wet",
        study=study,
        frontier=frontier,
        measured=measured or [],
    )


def test_a_study_that_speaks_against_a_claim_is_named_by_it() -> None:
    statement = Claim("§1", "it rains", "always", "in no week", Outcome.DIFFERS)
    named = of("does not hold here", study=StudyCheck(name="rain", statements=["it rains"]))
    check_named([Paper(paper="1", title="Rain", claims=[named])], {"rain": [statement]})
    with pytest.raises(UserError, match="toy rain says differs: it rains; name it"):
        check_named([Paper(paper="1", title="Rain", claims=[of("holds")])], {"rain": [statement]})


def test_a_claim_that_needs_gpus_names_its_run_with_the_cost_of_the_plan() -> None:
    """configs/sweep/README.md has the costs, which a test of the sweeps holds to `megasharp sweep --plan`."""
    costs = (REPOSITORY / "configs" / "sweep" / "README.md").read_text(encoding="utf-8")
    for name in PAPERS:
        for claim in read_paper(name).claims:
            if claim.word != "needs GPUs" or "megasharp plan" in claim.test:
                continue
            assert claim.evidence.startswith("Ready: "), claim.id
            for file in re.findall(r"`(configs/sweep/\w+\.yaml|examples/[\w.-]+)`", claim.evidence):
                assert (REPOSITORY / file).exists(), (claim.id, file)
            for cost in re.findall(r"[\d.]+ to [\d.]+(?= (?:days|GPU-hours)|[;,.]|$)", claim.evidence):
                assert cost in costs, (claim.id, cost)


def test_a_verdict_is_one_of_the_known_words() -> None:
    assert of("holds where it is wet").word == "holds where"
    assert of("does not hold here (its own Table 2)").word == "does not hold here"
    for wrong in ("reproduced", "holds where", "holds, mostly"):
        with pytest.raises(ValueError, match="is none of holds"):
            of(wrong)


@pytest.mark.parametrize(
    ("outcome", "verdict", "fits"),
    [
        (Outcome.REPRODUCED, "holds", True),
        (Outcome.REPRODUCED, "holds where it is wet", True),
        (Outcome.REPRODUCED, "does not hold here", False),
        (Outcome.PARTLY, "holds", False),
        (Outcome.PARTLY, "holds where it is wet", True),
        (Outcome.DIFFERS, "does not hold here", True),
        (Outcome.DIFFERS, "holds", False),
    ],
)
def test_a_study_that_contradicts_a_verdict_is_an_error(outcome: Outcome, verdict: str, fits: bool) -> None:
    claim = of(verdict, study=StudyCheck(name="rain", statements=["it rains"]))
    studies = {"rain": [Claim("§1", "it rains", "always", "in 3 of 4 weeks", outcome)]}
    if fits:
        assert computed(claim, studies, None) == ["in 3 of 4 weeks"]
    else:
        with pytest.raises(UserError, match=r"iac-x: .* toy rain says .*in 3 of 4 weeks"):
            computed(claim, studies, None)


def test_a_statement_that_no_study_makes_is_an_error() -> None:
    claim = of("holds", study=StudyCheck(name="rain", statements=["it snows"]))
    with pytest.raises(UserError, match="toy rain has no claim 'it snows'"):
        computed(claim, {"rain": []}, None)


def test_the_frontier_study_decides_what_it_tested(tmp_path: Path) -> None:
    path = tmp_path / DISTANCES
    path.parent.mkdir(parents=True)
    path.write_text(
        "method,setting,seeds,metric,pass@1,value,distance,low,high,p,holm,verdict,beyond\n"
        'casp,"casp-alpha0.1, 5e-05",8,pass@256,0.25,0.9,0.04,0.01,0.07,0.002,0.012,confirmed,False\n'
        'iac,"iac-alpha2, 5e-05",8,pass@256,0.25,0.9,0.01,-0.02,0.04,0.3,0.6,not shown,False\n'
    )
    found = read_measured(tmp_path, [])
    assert found.frontier["casp", "pass@256"] == FrontierTest(
        "confirmed",
        "casp-alpha0.1, 5e-05: pass@256 +0.040 [+0.010, +0.070] from GRPO's line at pass@1 0.250, 8 seeds, "
        "Holm's p 0.012",
    )
    assert len(computed(of("holds", frontier=FrontierCheck(method="casp")), {}, found)) == 1
    assert computed(of("not shown here", frontier=FrontierCheck(method="iac")), {}, found)
    assert read_measured(tmp_path / "none", []) == Measured({}, {})
    with pytest.raises(UserError, match="the frontier study has no test of dlc"):
        computed(of("holds", frontier=FrontierCheck(method="dlc")), {}, found)
    for verdict, method, sign in (("holds", "iac", "above"), ("holds", "casp", "below")):
        check = FrontierCheck.model_validate({"method": method, "sign": sign})
        with pytest.raises(UserError, match="the frontier study says"):
            computed(of(verdict, frontier=check), {}, found)


ROWS = {
    "wetter": {"difference": "0.05", "low": "0.01", "high": "0.09"},
    "drier": {"difference": "-0.05", "low": "-0.09", "high": "-0.01"},
    "alike": {"difference": "0.01", "low": "-0.02", "high": "0.04"},
    "corrected": {"difference": "0.05", "low": "0.01", "high": "0.09", "holm": "0.12"},
}


@pytest.mark.parametrize(
    ("cases", "verdicts"),
    [
        (["wetter"], {"holds", "holds where it is wet"}),
        (["alike"], {"not shown here"}),
        (["corrected"], {"not shown here"}),
        (["drier", "alike"], {"does not hold here"}),
        (["wetter", "alike"], {"holds where it is wet", "does not hold here"}),
        (["wetter", "drier"], {"holds where it is wet", "does not hold here"}),
    ],
)
def test_measured_differences_decide_what_a_verdict_may_be(cases: list[str], verdicts: set[str]) -> None:
    """Intervals decide, or Holm's p-value where a row has one."""
    lines = [{"case": case, "against": "plain", **row} for case, row in ROWS.items()]
    found = Measured({}, {"rain.csv": lines})
    checks = [MeasuredCheck(file="rain.csv", row={"case": case}) for case in cases]
    for verdict in ("holds", "holds where it is wet", "not shown here", "does not hold here"):
        if verdict in verdicts:
            assert computed(of(verdict, measured=checks), {}, found)[0].startswith(f"{cases[0]} less plain: ")
        else:
            with pytest.raises(UserError, match="its measured differences allow"):
                computed(of(verdict, measured=checks), {}, found)
    with pytest.raises(UserError, match=r"has 0 rows with \{'case': 'snow'\}, not one"):
        snow = MeasuredCheck(file="rain.csv", row={"case": "snow"})
        computed(of("holds", measured=[snow]), {}, found)


def test_a_claim_cannot_choose_its_k() -> None:
    """A claim about pass@k shows each other recorded k of its pair whose interval excludes zero, and not pass@1."""
    pair = {"case": "wet", "against": "dry"}
    rows = {"pass@1": "drier", "pass@16": "drier", "pass@64": "alike", "pass@256": "wetter"}
    found = Measured({}, {"rain.csv": [{**pair, "metric": metric, **ROWS[row]} for metric, row in rows.items()]})
    check = MeasuredCheck(file="rain.csv", row={**pair, "metric": "pass@256"})
    assert computed(of("holds", measured=[check]), {}, found) == [
        "wet less dry, pass@256: +0.050 [+0.010, +0.090]",
        "also wet less dry: pass@16 -0.050 [-0.090, -0.010]",
    ]
    check = MeasuredCheck(file="rain.csv", row={**pair, "metric": "pass@1"}, sign="below")
    assert len(computed(of("holds", measured=[check]), {}, found)) == 1


def test_the_page_has_every_claim_with_its_verdict() -> None:
    """With outcomes that fit the verdicts; the studies run in the long tier."""
    claims = [claim for name in PAPERS for claim in read_paper(name).claims]
    studies: dict[str, list[Claim]] = {}
    for claim in claims:
        for statement in claim.study.statements if claim.study is not None else ():
            outcome = Outcome.REPRODUCED if claim.word == "holds" else Outcome.DIFFERS
            assert claim.study is not None
            studies.setdefault(claim.study.name, []).append(Claim(claim.place, statement, "", "ours", outcome))
    lines = scoreboard(studies, None).splitlines()
    for claim in claims:
        (line,) = (line for line in lines if f'<a id="{claim.id}"></a>' in line)
        assert f"**{claim.verdict}**" in line
