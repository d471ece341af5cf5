r"""Answers in responses: boxes in boxes, boxes left open, tags, and texts of megabytes."""

from __future__ import annotations

import time

from cases import each_case

from megasharp.common.records import Outcome, TaskAnswer
from megasharp.tasks.choice import ChoiceAnswer
from megasharp.tasks.countdown_tags import TaggedCountdownAnswer
from megasharp.tasks.extraction import MAX_CHARACTERS, last_box, last_stated, last_tag, own_part
from megasharp.tasks.judge import ItemVerifier
from megasharp.tasks.knights import KnightsAnswer
from megasharp.tasks.math import MathAnswer
from megasharp.tasks.math_stated import commitment
from megasharp.tasks.retraction import taken_back
from megasharp.tasks.short_answer import ShortAnswer
from megasharp.tasks.table import make_verifiers


@each_case(
    ("text", "box"),
    [
        (r"\boxed{1}, no: \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{\boxed{\boxed{1}+\boxed{2}} or \frac{2}{\boxed{7}}}", r"1+2 or \frac{2}{7}"),
        (r"\fbox{ 4 }", "4"),
        (r"\boxed {5}", "5"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{1} and then \boxed{2", "1"),
        (r"\boxed{}", ""),
        (r"\boxed{ }", ""),
        # Places left empty take nothing back.
        (r"\boxed{1} \boxed{ }", "1"),
        (r"\boxed{1} \boxed{\ldots}", "1"),
        (r"\boxed", None),
        # TeX takes the next token where there are no braces.
        (r"\boxed 5", "5"),
        (r"$\boxed 72$.", "72"),
        (r"\boxed\frac16", r"\frac16"),
        (r"\boxed\sqrt{2}", r"\sqrt{2}"),
        (r"\boxed B", "B"),
        (r"\boxed(97).", "(97)"),
        (r"\boxed{\boxed 5 + \boxed{1}}", "5 + 1"),
        (r"\boxed A comet", None),
        (r"in \boxed and then", None),
        (r"\framebox{8}", "8"),
        (r"}}} \boxed{6}", "6"),
        ("boxed{1}", None),
        ("", None),
    ],
)
def test_the_last_box(text: str, box: str | None) -> None:
    assert last_box(text) == box


@each_case(
    ("text", "inside"),
    [
        ("<answer>1</answer> <answer> 2 </answer>", "2"),
        ("<answer>1</answer> <answer> 2", "1"),
        ("<answer><answer>1</answer>", "1"),
        ("1</answer>", None),
        ("<answer></answer>", ""),
        ("<answer>1<answer>", None),
    ],
)
def test_the_last_tags(text: str, inside: str | None) -> None:
    assert last_tag(text) == inside


@each_case(
    ("text", "stated"),
    [
        ("So the answer is (B).", "(B)."),
        ("The answer is 3.\nNo: the ANSWER IS 4", "4"),
        ("**Answer:** 5", "5"),
        ("#### 1,234", "1,234"),
        ("the answer is\n7", None),
        ("the answer is:\n\n  7 apples\n8", "7 apples"),
        ("**Answer:** \n7", "7"),
        ("#### 6\n####\n7", "7"),
        ("the answer is 1, the answer is ", "1, the"),
        ("the answer is 6. Wait, the answer is 7.", "7."),
        ("answers are 3", None),
        ("所以答案是 5。", "5。"),
        ("La respuesta es **63**.", "63**."),
        ("Ответ: 7", "7"),
        ("答えは45です。", "45です。"),
        ("### Answer\n18", "18"),
        ("### Answers\n18", None),
        (r"The answer is: \[5\]", "$5$"),
        ("The answer is:\n\\[\n5\n\\]", "$5$"),
        ("The answer is\n\n$$\n5\n$$ or so", "$5$ or so"),
        ('I write "The answer is: 5"', "5"),
        ('The answer is "5"', '"5"'),
        ("Thus the answer should be $x+1$.", "$x+1$."),
        ("The answer is 5. The answer must be an integer.", "5. The answer must be an integer."),
        ("The answer is 5.\nThe answer must be 3 digits long.", "5."),
        ("If x were odd, the answer would be 5.", None),
        ("Without the limit the answer would be 5, which is wrong.", None),
    ],
)
def test_what_is_stated(text: str, stated: str | None) -> None:
    assert last_stated(text) == stated


@each_case(
    ("text", "own"),
    [
        ("The answer is 15.\n\nQuestion: Max reads 4.\nAnswer: 4", "The answer is 15.\n\n"),
        ("\\boxed{8}\n<|im_end|>\n<|im_start|>user\n\\boxed{4}", "\\boxed{8}\n"),
        ("\\boxed{8}\n\n### Problem 2\n\\boxed{4}", "\\boxed{8}\n\n"),
        ("The answer is 5.\n\n**Problem:** Find 3+9.\nThe answer is 12.", "The answer is 5.\n\n"),
        ("The answer is 5.\n\n### Instruction:\nFind 3+9.", "The answer is 5.\n\n"),
        # Before an answer it is the problem, said again.
        ("Problem: two of it?\nThe answer is 8.", "Problem: two of it?\nThe answer is 8."),
        ("Question: two of it?\n\\boxed{8}", "Question: two of it?\n\\boxed{8}"),
        ("\\boxed{8}. No problem 2 is left.", "\\boxed{8}. No problem 2 is left."),
    ],
)
def test_a_response_ends_where_another_problem_begins(text: str, own: str) -> None:
    assert own_part(text) == own


@each_case(
    ("after", "taken"),
    [
        (". Hmm, wait, that is wrong, I give up.", True),
        ("\nBut that cannot be right. There must be an error somewhere.", True),
        (". Strike that, please disregard the box above.", True),
        (".\n\nI could not determine the number with certainty.", True),
        (". Wait, I made a mistake: let me start over. The", True),
        (". This result is incorrect.", True),
        # The last word counts.
        (". Wait, let me verify: yes.", False),
        (". Is that wrong? No, it is right.", False),
        (". Hmm, that is wrong. No wait, that is correct after all.", False),
        (". That is correct. Hmm, no, this is wrong.", True),
        # Of no answer, or of another.
        (".", False),
        (". If this is wrong, tell me.", False),
        (". A common mistake is to forget the sign.", False),
        (". A quick count gives 6, but that is wrong.", False),
        (". The other options are wrong.", False),
        (". Note: it is wrong to assume that x is odd.", False),
        (". Note that this is not correct for odd n.", False),
        (". I cannot give a proof here.", False),
        (". I can't give an answer.", True),
        (". I hope it is correct.", False),
        (". I am not sure.", False),
        # A root, a case or an option that is ruled out.
        (". The other root is negative, so it does not work.", False),
        (". We reject the other root: it is not valid.", False),
        (". The second case is impossible: it doesn't work.", False),
        (". The ribosome makes proteins, so it is incorrect.", False),
        (". It is tempting to double count, but this is wrong.", False),
        (". Never mind the sign; it cancels.", False),
        (". Never mind.", True),
        (". I was wrong to doubt it.", False),
        (". I was wrong about the parity, but the result is unchanged.", False),
        (". I made a mistake in line two, but the final result is unchanged.", False),
        (". Hmm, that doesn't satisfy the equation. Let me try again.", True),
        (". But this contradicts the assumption.", True),
        (". I computed it twice, and my answer is wrong.", True),
        (". I don't think that's correct.", True),
    ],
)
def test_answers_that_are_taken_back(after: str, taken: bool) -> None:
    assert taken_back(after) is taken


@each_case(
    ("after", "taken"),
    [
        (". Correction: $x = 7$.", True),
        (". I apologize, the correct value is $x = 7$.", True),
        (". Alternatively, the answer might be 7.", True),
        (". So the answer must be 7.", True),
        (". The second equation gives 14, so x=7 and not 5.", True),
        (". Actually, I think the answer is 7.", True),
        (". No, x must be 7.", True),
        (". The answer is 5 or 7.", True),
        (". But 5 does not satisfy the second equation.", True),
        (". The answer is not 5.", True),
        (". The correct value is $5.0$.", False),
        (". Hence 5, not 7.", False),
        (". However, if order counted, the answer would be 7.", False),
        (". The value of y is 7.", False),
        (". The correct value of the discriminant is 49.", False),
        (". One might think that the answer is 7.", False),
        (". Actually, it is $10/2$.", False),
    ],
)
def test_another_answer_takes_the_first_back(after: str, taken: bool) -> None:
    assert taken_back(after, "5") is taken


@each_case(
    ("after", "taken"),
    [
        (". On reflection, B is the correct answer.", True),
        (". However, B could also be correct.", True),
        (". Both B and C are acceptable.", True),
        (". The correct choice is B.", True),
        (". C is wrong.", True),
        (". C is the correct answer.", False),
        (". B is not correct.", False),
        (". B is a correct statement about cells.", False),
        (". B would be correct if it asked about proteins.", False),
        (". Both A and B are incorrect.", False),
    ],
)
def test_another_option_takes_the_first_back(after: str, taken: bool) -> None:
    assert taken_back(after, "C") is taken


@each_case(
    "sign", ["\n", " ", ".", "$", "no ", "no, ", "sorry. ", "correction: ", "5 ", "? no ", "that is wrong ", "\n* "]
)
def test_retractions_are_searched_at_once(sign: str) -> None:
    started = time.process_time()
    taken_back(sign * 1_000, "7"), taken_back(f"it is {sign * 1_000}", "7")
    assert time.process_time() - started < 2.0


@each_case(
    "sign",
    [
        "{",
        "}",
        r"\boxed{",
        r"\boxed{1}",
        r"\boxed{\boxed 1}",
        r"\[ ",
        r"\[x\]\n",
        " ",
        "\n# ",
        "$$",
        "I give up ",
        "that is wrong ",
        "Question: ",
        "答案是",
        "<answer>",
        "</answer>",
        "answer is",
        "answer: ",
        "Answer: he makes ",
        "Therefore, ",
        "#",
        "\\",
    ],
)
def test_megabytes_are_searched_at_once(sign: str) -> None:
    text = sign * (10_000_000 // len(sign))
    started = time.process_time()
    last_box(text), last_tag(text), last_stated(text), own_part(text), taken_back(text)
    commitment(text)
    assert time.process_time() - started < 2.0


def test_only_the_end_is_searched() -> None:
    assert last_box(r"\boxed{1}" + " " * MAX_CHARACTERS) is None
    assert last_box(" " * MAX_CHARACTERS + r"\boxed{1}") == "1"


@each_case(
    ("task", "text", "answer"),
    [
        ("choice", "\\boxed{C}", ChoiceAnswer("C", ("B", "C"))),
        ("short_answer", "So the answer is valid.", ShortAnswer("valid")),
        ("knights", "<answer>Zoey is a knight</answer>", KnightsAnswer((("Zoey", True),))),
        ("countdown_3to4", "<answer>3*8</answer>", TaggedCountdownAnswer((3, 8), 24)),
        ("math", "\\boxed{24}", MathAnswer("24")),
    ],
)
def test_no_verifier_counts_an_answer_that_is_taken_back(task: str, text: str, answer: TaskAnswer) -> None:
    judge = make_verifiers()[task]
    assert not isinstance(judge, ItemVerifier)
    assert judge(f"{text} Let me verify: yes.", answer).outcome is Outcome.CORRECT
    taken = judge(f"{text} Wait, that is wrong. I give up.", answer)
    assert (taken.outcome, taken.detail) == (Outcome.WRONG, "the answer is taken back")
