r"""Short answers: what does not count is taken away, everything else must be the same."""

from __future__ import annotations

from cases import each_case

from megasharp.common.records import Outcome
from megasharp.tasks.short_answer import ShortAnswer, answer_to, verify
from megasharp.tasks.table import make_verifiers


@each_case(
    ("text", "target", "expected"),
    [
        ("So the answer is valid.", "valid", Outcome.CORRECT),
        ("So the answer is invalid.", "valid", Outcome.WRONG),
        ("So the answer is (B).", "(B)", Outcome.CORRECT),
        (r"\boxed{B}", "(B)", Outcome.CORRECT),
        (r"\boxed{\text{(B)}}", "(B)", Outcome.CORRECT),
        (r"\boxed{(B) heron}", "(B)", Outcome.CORRECT),
        (r"\boxed{A}", "(B)", Outcome.WRONG),
        ("So the answer is B.", "B", Outcome.CORRECT),
        ("So the answer is (B).", "B", Outcome.WRONG),
        ("the answer is True", "True", Outcome.CORRECT),
        ("the answer is No. Wait, the answer is Yes", "Yes", Outcome.CORRECT),
        ("the answer is true", "True", Outcome.CORRECT),
        (r"\boxed{\mathbf{\text{TRUE}}}", "True", Outcome.CORRECT),
        (r"\boxed{\text{``No''}}", "No", Outcome.CORRECT),
        ("the answer is Yes, you return.", "Yes", Outcome.CORRECT),
        ("the answer is Yes, or rather no.", "Yes", Outcome.WRONG),
        ("the answer is valid. This follows.", "valid", Outcome.CORRECT),
        ("the answer is valid reasoning", "valid", Outcome.WRONG),
        (r"\boxed{1,488}", "1488", Outcome.CORRECT),
        (r"\boxed{-3{,}240}", "-3240", Outcome.CORRECT),
        (r"\boxed{14,88}", "1488", Outcome.WRONG),
        ("the answer is \u221250.", "-50", Outcome.CORRECT),
        ("the answer is >})).", "> } ) )", Outcome.CORRECT),
        (r"\boxed{\text{> \} )}}", "> } )", Outcome.CORRECT),
        ("the answer is > } ).", "> } ) )", Outcome.WRONG),
        (r"\boxed{apple\ \text{Fig}}", "apple fig", Outcome.CORRECT),
        (r"\boxed{applefig}", "apple fig", Outcome.WRONG),
        (r"\boxed{[B]}", "(B)", Outcome.CORRECT),
        (r"\boxed{(B) or (C)}", "(B)", Outcome.WRONG),
        ("The correct option is (B).", "(B)", Outcome.CORRECT),
        (r"\boxed{no}. I take that back.", "no", Outcome.WRONG),
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
        ("The answer is True!", "True", Outcome.CORRECT),
        ("The answer should be No.", "No", Outcome.CORRECT),
        ('So "The answer is: valid"', "valid", Outcome.CORRECT),
        ("Therefore, (B) is the correct answer.", "(B)", Outcome.CORRECT),
        ("Therefore, (B) is not the correct answer.", "(B)", Outcome.FORMAT),
        ("If it were two more, the answer would be 8.", "8", Outcome.FORMAT),
        ("valid", "valid", Outcome.FORMAT),
        (r"\boxed{}", "valid", Outcome.FORMAT),
        ("the answer is " + "a" * 10_000_000, "a", Outcome.FORMAT),
    ],
    ids=range(58),
)
def test_verdicts(text: str, target: str, expected: Outcome) -> None:
    verdict = verify(text, ShortAnswer(target))
    assert (verdict.outcome, verdict.reward) == (expected, float(expected is Outcome.CORRECT))


@each_case(
    ("text", "expected"),
    [
        (r"\boxed{(B) a heron}", Outcome.CORRECT),
        (r"\boxed{B: \text{A heron}}", Outcome.CORRECT),
        ("The answer is (B) \u201ca heron\u201d.", Outcome.CORRECT),
        (r"\boxed{(B) a stork}", Outcome.WRONG),
        (r"\boxed{(A) a heron}", Outcome.WRONG),
        (r"\boxed{a heron (B)}", Outcome.CORRECT),
        (r"\boxed{a heron}", Outcome.WRONG),
        (r"\boxed{(D)}", Outcome.WRONG),
    ],
)
def test_an_option_s_text_must_be_that_of_its_letter(text: str, expected: Outcome) -> None:
    answer = answer_to("Which wades?\nOptions:\n(A) a stork\n(B) a heron\n(C) none", "(B)")
    assert verify(text, answer).outcome is expected


def test_equal_answers_are_one() -> None:
    texts = ("the answer is (B).", r"\boxed{B}", r"\boxed{\text{(B)}}")
    assert {verify(text, ShortAnswer("(B)")).canonical_answer for text in texts} == {"(B)"}


def test_the_table_names_the_task() -> None:
    assert make_verifiers()["short_answer"]("the answer is 1", ShortAnswer("1")).outcome is Outcome.CORRECT
