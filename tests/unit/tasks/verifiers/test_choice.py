r"""Multiple choice: boxes, sentences, labels of both kinds, and sentences that only begin like a label."""

from __future__ import annotations

from cases import each_case

from megasharp.common.records import Outcome
from megasharp.tasks.choice import ChoiceAnswer, verify
from megasharp.tasks.table import make_verifiers

FOUR = ChoiceAnswer("B", ("A", "B", "C", "D"))
NUMBERS = ChoiceAnswer("3", ("1", "2", "3", "4"))
METALS = ChoiceAnswer("B", ("A", "B", "C", "D"), ("B or C", "Iron", "B", "vitamin C"))
TEN = ChoiceAnswer("I", tuple("ABCDEFGHIJ"))


@each_case(
    ("text", "answer", "chosen"),
    [
        (r"\boxed{B}", FOUR, "B"),
        (r"\boxed{(B)}", FOUR, "B"),
        (r"\boxed{\text{(B)}}", FOUR, "B"),
        (r"\boxed{\textbf{(B)}\ 12}", FOUR, "B"),
        (r"\boxed{B. a comet}", FOUR, "B"),
        (r"\boxed{\text{B: a comet}}", FOUR, "B"),
        (r"\boxed{B \text{ comet}}", FOUR, "B"),
        (r"\boxed{B \text{ or } C}", FOUR, None),
        (r"\boxed{B \text{ or C}}", FOUR, None),
        (r"\boxed{3 \text{ m}}", NUMBERS, None),
        (r"\boxed{b}", FOUR, "B"),
        (r"\boxed{A} no, \boxed{D}", FOUR, "D"),
        (r"The answer is (B). \boxed{C}", FOUR, "C"),
        ("The answer is (B).", FOUR, "B"),
        ("the answer is A. No wait, the answer is B", FOUR, "B"),
        ("the answer is B", FOUR, "B"),
        ("The answer is (A). Wait.\nThe answer is (C).", FOUR, "C"),
        ("**Answer:** option D, as shown", FOUR, "D"),
        ("The answer is **(B)**", FOUR, "B"),
        ("The answer is:\n\nB", FOUR, "B"),
        ("The answer is B because A is wrong.", FOUR, "B"),
        (r"\boxed{[B]}", FOUR, "B"),
        (r'\boxed{"B"}', FOUR, "B"),
        (r"\boxed{3}", NUMBERS, "3"),
        ("the answer is (4)", NUMBERS, "4"),
        ("The answer is (I).", TEN, "I"),
        (r"\boxed{J}", TEN, "J"),
        ("The answer is I think B", TEN, None),
        ("The answer is A comet", FOUR, None),
        (r"\boxed{E}", FOUR, None),
        (r"\boxed{BC}", FOUR, None),
        (r"\boxed{}, the answer is (B)", FOUR, "B"),
        (r"\boxed{C}. Actually no, so the answer is B.", FOUR, "B"),
        (r"\boxed{C}. The answer is based on heat.", FOUR, "C"),
        (r"Either \boxed{A} or \boxed{C}.", FOUR, None),
        (r"\boxed{B}, so again \boxed{B}", FOUR, "B"),
        (r"\boxed{C}. That is wrong. So the answer is B.", FOUR, "B"),
        (r"\boxed{B}. Wait, is that right? Yes, that is right.", FOUR, "B"),
        ("The answer is B.\n\nQuestion: Which is cold?\nThe answer is C.", FOUR, "B"),
        (r"\boxed{3 apples}", NUMBERS, None),
        ("I choose B", FOUR, "B"),
        ("I would not choose B", FOUR, None),
        ("So option **B** is correct.", FOUR, "B"),
        ("The correct option is D.", FOUR, "D"),
        ("**D**", FOUR, "D"),
        ("<answer>C</answer>", FOUR, "C"),
        ('{"answer": "C"}', FOUR, "C"),
        ("Both B and C are comets.", FOUR, None),
        (r"\boxed{\text{B. or maybe C}}", FOUR, None),
        (r"\boxed{B (or C)}", FOUR, None),
        (r"\boxed{\text{B (most likely), but C if it is cold}}", FOUR, None),
        ("The answer is B, unless it is cold, then A.", FOUR, None),
        ("The answer is B because it is cold, or maybe C.", FOUR, None),
        ("The answer is B because A or C would be warm.", FOUR, "B"),
        ("The answer is B, rather than C.", FOUR, "B"),
        (r"\boxed{\text{B (not A)}}", FOUR, "B"),
        (r"\boxed{\textbf{\text{B}}}", FOUR, "B"),
        (r"\boxed{\underline{\text{B}}}", FOUR, "B"),
        (r"\boxed{\rm B}", FOUR, "B"),
        (r"\boxed{\uff08\uff22\uff09}", FOUR, None),
        ("\\boxed{\uff08\uff22\uff09}", FOUR, "B"),
        (r"\boxed{B. iron}", METALS, "B"),
        (r"\boxed{B iron}", METALS, "B"),
        (r"\boxed{\text{iron (B)}}", METALS, "B"),
        (r"\boxed{\text{vitamin C (D)}}", METALS, "D"),
        (r"\boxed{B. vitamin C}", METALS, None),
        (r"\boxed{\text{iron (A)}}", METALS, None),
        (r"\boxed{iron}", METALS, None),
        (r"\boxed{C. B}", METALS, "C"),
        (r"\boxed{(C) B}", METALS, "C"),
        (r"\boxed{A or B}", METALS, None),
        (r"\boxed{\text{A. B or C}}", METALS, "A"),
        (r"\boxed{B, A}", FOUR, None),
        (r"\boxed{B; or A}", FOUR, None),
        (r"\boxed{(B) and (C)}", FOUR, None),
        (r"\boxed{\text{(B), (C), or (D)}}", FOUR, None),
        ("The answer is (B) or (C).", FOUR, None),
        ("The answer is (B) (A).", FOUR, None),
        (r"\boxed{A,\ B}", FOUR, None),
        (r"\boxed{A;\;B}", FOUR, None),
        (r"\boxed{(B)(C)}", FOUR, None),
        (r"\boxed{A. B. C. D.}", FOUR, None),
        (r"\boxed{A) or B)}", FOUR, None),
        (r"\boxed{(A)\ \text{or}\ (B)}", FOUR, None),
        (r"\boxed{A,B,C,D,E}", FOUR, None),
        ("The answer is A), B), C)", FOUR, None),
        (r"\boxed{B - a comet}", FOUR, "B"),
        (r"\boxed{\(B\)}", FOUR, "B"),
        (r"\boxed{2.5}", NUMBERS, None),
        ("The answer is 2.5 m", NUMBERS, None),
        (r"\boxed{3,000}", NUMBERS, None),
        (r"\boxed{3. 5 apples}", NUMBERS, "3"),
        (r"\boxed{2/3}", NUMBERS, None),
        ("The answer is (B), not (A).", FOUR, "B"),
        (r"\boxed{B. A comet}", FOUR, "B"),
        (r"\boxed{(B) and E}", FOUR, "B"),
        (r"\boxed{Answer: B}", FOUR, "B"),
        (r"\boxed{The correct answer is (B)}", FOUR, "B"),
        (r"\boxed{\boldsymbol{B}}", FOUR, "B"),
        ("The answer is Option B.", FOUR, "B"),
        (r"\boxed{Choice (D)}", FOUR, "D"),
        (r"\boxed{" + "B, " * 40_000 + "B}", FOUR, None),
        ("", FOUR, None),
        ("B" * 10_000_000, FOUR, None),
    ],
    ids=range(104),
)
def test_the_label_that_is_chosen(text: str, answer: ChoiceAnswer, chosen: str | None) -> None:
    verdict = verify(text, answer)
    expected = Outcome.FORMAT if chosen is None else Outcome.CORRECT if chosen == answer.label else Outcome.WRONG
    assert (verdict.outcome, verdict.canonical_answer) == (expected, chosen)
    assert verdict.reward == float(expected is Outcome.CORRECT)


def test_the_table_names_the_task() -> None:
    assert make_verifiers()["choice"](r"\boxed{B}", FOUR).outcome is Outcome.CORRECT
