r"""Multiple choice: boxes, sentences, labels of both kinds, and sentences that only begin like a label."""

from __future__ import annotations

from cases import each_case

from megasharp.common.records import Outcome
from megasharp.tasks.choice import ChoiceAnswer, verify
from megasharp.tasks.table import make_verifiers

FOUR = ChoiceAnswer("B", ("A", "B", "C", "D"))
NUMBERS = ChoiceAnswer("3", ("1", "2", "3", "4"))
METALS = ChoiceAnswer("B", ("A", "B", "C", "D"), ("B or C", "Iron", "B", "vitamin C"))
HALVES = ChoiceAnswer("B", ("A", "B", "C"), (r"$\frac{1}{2}$", r"$\frac{3}{4}$", "$x^{2}+1$"))
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


@each_case(
    ("text", "chosen"),
    [
        ("Thus, B is the correct answer.", "B"),
        ("It makes ATP, so B is the right choice.", "B"),
        ("A does not make ATP, so B is the right choice.", "B"),
        ("It is not A, which is why option B is correct.", "B"),
        ("B is correct because A is wrong.", "B"),
        ("A is incorrect. B is correct. C is incorrect.", "B"),
        ("B is the correct answer, not A.", "B"),
        ("The answer should be (B).", "B"),
        ("The answer must be **B**.", "B"),
        ("The answer should be B, not A.", "B"),
        ("The answer appears to be B", "B"),
        ("So the answer is B!", "B"),
        ('So "The answer is: B"', "B"),
        ("The answer is B rather than A.", "B"),
        ("The answer is B (and not A, C or D).", "B"),
        ("The answer is B. Both A and C are wrong.", "B"),
        ("The answer is B. C could not be correct.", "B"),
        ("I'd go with B.", "B"),
        ("It makes ATP. Hence (B).", "B"),
        ("Therefore, it's B.", "B"),
        ("**Final choice:** B", "B"),
        ("The correct letter is B.", "B"),
        ("Die richtige Antwort ist B.", "B"),
        ("The answer is A. No wait, B.", "B"),
        (r"\boxed{A}. Wait, no, it's B.", "B"),
        (r"\boxed{B}. On reflection, C is the correct answer.", "C"),
        ("B is the correct answer.\n\nQuestion: Which is cold?\nThe answer is C.", "B"),
        ("B is not correct.", None),
        ("It is not true that B is correct.", None),
        ("It is not true that the answer is B.", None),
        ("I don't think the correct answer is B.", None),
        ("I do not believe that option B is correct.", None),
        ("If B is the correct answer, then so is C.", None),
        ("Some students say that option B is correct.", None),
        ("B is correct? I doubt it.", None),
        ("B is correct, or maybe C.", None),
        ("B is correct. C is correct too.", None),
        ("B is correct if it is cold; otherwise C.", None),
        ("Both B and C are correct.", None),
        ("I'd go with B or C.", None),
        ("I pick B. I pick C.", "C"),
        ("If it were cold, I'd go with B.", None),
        ("At first I would pick B, but it is warm.", None),
        ("Hence B or C.", None),
        ("Hence not B.", None),
        ("Final choice: not B", None),
        ("The answer should be B or C.", None),
        ("The answer should be a letter such as B.", None),
        ("If it were cold, the answer would be B.", None),
        ("The answer is B, though it could be C.", None),
        ("The answer is B. However, C could also be correct.", None),
        ("The answer is B. Both B and C are acceptable.", None),
        ("The answer is B. No wait, B or C.", None),
        ("The answer is B as well as C.", None),
        ("The answer is B rather than C, or A.", None),
        ("B is correct, C too.", None),
    ],
)
def test_sentences_that_choose(text: str, chosen: str | None) -> None:
    assert verify(text, FOUR).canonical_answer == chosen


@each_case(
    ("text", "chosen"),
    [
        (r"\boxed{\text{B. } \frac34}", "B"),
        (r"The answer is (B) $\tfrac{3}{4}$.", "B"),
        (r"\boxed{B.\ 3/4}", "B"),
        (r"\boxed{\text{C. } x^2 + 1}", "C"),
        (r"\boxed{\text{B. } \frac12}", None),
        (r"\boxed{\text{B. } \dfrac{1}{2}}", None),
        ("The answer is (B) $x^2+1$.", None),
    ],
)
def test_an_option_s_text_in_other_latex_is_that_option_s(text: str, chosen: str | None) -> None:
    assert verify(text, HALVES).canonical_answer == chosen


def test_the_table_names_the_task() -> None:
    assert make_verifiers()["choice"](r"\boxed{B}", FOUR).outcome is Outcome.CORRECT


def test_the_text_of_the_option_is_no_word_about_it() -> None:
    answer = ChoiceAnswer("B", ("A", "B", "C"), ("tin", "iron", "lead"))
    for text, right in (("Sorry, I meant C.", False), ("Wait, C is better.", False), ("It is not tin or lead.", True)):
        assert (verify(f"The answer is B. iron.\n\n{text}", answer).reward == 1.0) is right
