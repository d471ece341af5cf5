r"""Short answers: what does not count is taken away, everything else must be the same."""

from __future__ import annotations

from cases import each_case

from megasharp.common.records import Outcome
from megasharp.tasks.short_answer import ShortAnswer, verify
from megasharp.tasks.table import make_verifiers


@each_case(
    ("text", "target", "expected"),
    [
        ("So the answer is valid.", "valid", Outcome.CORRECT),
        ("So the answer is invalid.", "valid", Outcome.WRONG),
        ("So the answer is (B).", "(B)", Outcome.CORRECT),
        (r"\boxed{B}", "(B)", Outcome.CORRECT),
        (r"\boxed{\text{(B)}}", "(B)", Outcome.CORRECT),
        (r"\boxed{(B) heron}", "(B)", Outcome.WRONG),
        (r"\boxed{A}", "(B)", Outcome.WRONG),
        ("So the answer is B.", "B", Outcome.CORRECT),
        ("So the answer is (B).", "B", Outcome.WRONG),
        ("the answer is True", "True", Outcome.CORRECT),
        ("the answer is No. Wait, the answer is Yes", "Yes", Outcome.CORRECT),
        ("the answer is true", "True", Outcome.WRONG),
        (r'\boxed{"yes"}', "yes", Outcome.CORRECT),
        ("The answer is **No**.", "No", Outcome.CORRECT),
        ("the answer is -50.", "-50", Outcome.CORRECT),
        ("the answer is 5", "-5", Outcome.WRONG),
        ("So the answer is ] ) }.", "] ) }", Outcome.CORRECT),
        ("So the answer is ]  ) }", "] ) }", Outcome.CORRECT),
        ("So the answer is ] ) ).", "] ) }", Outcome.WRONG),
        ("the answer is apple banana cherry", "apple banana cherry", Outcome.CORRECT),
        (r"the answer is no \boxed{yes}", "yes", Outcome.CORRECT),
        (r"\boxed{] ) \}}", "] ) }", Outcome.CORRECT),
        (r"\boxed{] ) }}", "] ) }", Outcome.CORRECT),
        (r"\boxed{ ] )}}", "] ) }", Outcome.CORRECT),
        (r"\boxed{] ) }} no, \boxed{] )}", "] ) }", Outcome.WRONG),
        (r"\boxed{] ) ] }}", "] ) }", Outcome.WRONG),
        (r"\boxed{\{ \}}", "{ }", Outcome.CORRECT),
        (r"\boxed{] )}", "] )", Outcome.CORRECT),
        (r"the answer is \(24\).", "24", Outcome.CORRECT),
        ("So the answer is (B) or (C).", "(B)", Outcome.WRONG),
        ("valid", "valid", Outcome.FORMAT),
        (r"\boxed{}", "valid", Outcome.FORMAT),
        ("the answer is " + "a" * 10_000_000, "a", Outcome.FORMAT),
    ],
    ids=range(33),
)
def test_verdicts(text: str, target: str, expected: Outcome) -> None:
    verdict = verify(text, ShortAnswer(target))
    assert (verdict.outcome, verdict.reward) == (expected, float(expected is Outcome.CORRECT))


def test_equal_answers_are_one() -> None:
    texts = ("the answer is (B).", r"\boxed{B}", r"\boxed{\text{(B)}}")
    assert {verify(text, ShortAnswer("(B)")).canonical_answer for text in texts} == {"(B)"}


def test_the_table_names_the_task() -> None:
    assert make_verifiers()["short_answer"]("the answer is 1", ShortAnswer("1")).outcome is Outcome.CORRECT
