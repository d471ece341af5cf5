r"""Numbers that sentences state in words of their own, and sentences that only mention one."""

from __future__ import annotations

from cases import each_case

from megasharp.common.records import Outcome
from megasharp.tasks.math import MathAnswer, verify


@each_case(
    ("text", "answer"),
    [
        ("**Answer:** Janet makes **$18** every day at the market.", "18"),
        ("The answer is 3 1/2 hours.", "7/2"),
        ('I write: "The answer is: 5"', "5"),
        ("So the answer should be 8.", "8"),
        ("2+3=5.\n\nTherefore, the value of $x$ is $5$.", "5"),
        ("Thus, there are 5 such integers.", "5"),
        ("So, it takes Tom 18 minutes to walk home.", "18"),
        (r"Hence, the probability is $\frac{3}{8}$.", r"\frac{3}{8}"),
        ("Therefore, the distance between the towns is 40 km.", "40"),
        ("Thus, there are 5 such integers.\n\nProblem: What is 3+9?\nSolution: The answer is 12.", "5"),
    ],
)
def test_a_sentence_states_an_answer(text: str, answer: str) -> None:
    assert verify(text, MathAnswer(answer)).outcome is Outcome.CORRECT


@each_case(
    "text",
    [
        "Therefore, there are at least 5 such integers.",
        "Thus, there are 5 cases to consider.",
        "Therefore, Tom has 5 apples if he eats none.",
        "Therefore, Tom has 5 apples and Ann has 6.",
        "Therefore, Tom has 5 apples. But Ann has more.",
        "Therefore, Tom does not have 5 apples.",
        "Is it so? Suppose that the sum is 5.",
        "Thus the area is 5 times the height.",
        "Thus the value of $x$ is $5$ or $6$.",
        "So the total is 5 + x.",
        "So my confidence is 5 percent.",
        "So, in the first round he has 5.",
        "So Tom has 5\u2026",
        "Answer: The farmer has **5** or **6** sheep.",
        "Answer: The total is 5 less than the cost.",
        "Answer: see step 5.",
        "The answer must be 5 digits long.",
        "If x were even, the answer would be 5.",
        "Tom has 5 apples.",
    ],
)
def test_a_sentence_states_nothing(text: str) -> None:
    assert verify(text, MathAnswer("5")).outcome is Outcome.FORMAT
