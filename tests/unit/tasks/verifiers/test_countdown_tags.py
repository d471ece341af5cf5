"""Countdown in answer tags: TinyZero's rewards, and where its own check is looser than the rules it states."""

from __future__ import annotations

from cases import each_case

from megasharp.common.records import Outcome
from megasharp.tasks.countdown_tags import TaggedCountdownAnswer, verify
from megasharp.tasks.table import make_verifiers

ANSWER = TaggedCountdownAnswer((19, 36, 55, 7), 65)
RIGHT = "55+36-7-19"


@each_case(
    ("text", "outcome", "reward"),
    [
        (f"91, 84, 65</think>\n<answer>{RIGHT}</answer>", Outcome.CORRECT, 1.0),
        (f"<answer>1</answer> <answer> {RIGHT} </answer> done\nand more", Outcome.CORRECT, 1.0),
        (f"<answer>{RIGHT}</answer> <answer>55+36</answer>", Outcome.WRONG, 0.1),
        ("<answer>55+36-7-18</answer>", Outcome.WRONG, 0.1),
        ("<answer>55+36-7</answer>", Outcome.WRONG, 0.1),
        ("<answer>55+36-7-19+7-7</answer>", Outcome.WRONG, 0.1),
        ("<answer>55/(36-36)</answer>", Outcome.WRONG, 0.1),
        (f"<answer>{RIGHT} = 65</answer>", Outcome.CORRECT, 1.0),
        (f"<answer>65 = {RIGHT}</answer>", Outcome.CORRECT, 1.0),
        (f"<answer>{RIGHT} = 64</answer>", Outcome.WRONG, 0.1),
        ("<answer>55+35-7-19 = 65</answer>", Outcome.WRONG, 0.1),
        (f"<answer>{RIGHT} = 65 = 65</answer>", Outcome.FORMAT, 0.1),
        ("<answer>55+36 = 91-7-19</answer>", Outcome.FORMAT, 0.1),
        ("<answer>65</answer>", Outcome.WRONG, 0.1),
        (f"<answer>{RIGHT}</answer> Wait, that is wrong. I give up.", Outcome.WRONG, 0.1),
        ("<answer>-7 + 36 \u2212 (19 \u2013 55)</answer>", Outcome.CORRECT, 1.0),
        ("<answer>+7+36+55</answer>", Outcome.FORMAT, 0.1),
        ("<answer></answer>", Outcome.FORMAT, 0.1),
        ("<answer>__import__('os')</answer>", Outcome.FORMAT, 0.1),
        # TinyZero hands this to eval: 19**55 // ... is more than the four operations that it names.
        ("<answer>19**55//36**7</answer>", Outcome.FORMAT, 0.1),
        (RIGHT, Outcome.FORMAT, 0.0),
        (f"<answer>{RIGHT}", Outcome.FORMAT, 0.0),
        ("", Outcome.FORMAT, 0.0),
        ("<answer>" * 1_000_000, Outcome.FORMAT, 0.0),
    ],
    ids=range(24),
)
def test_verdicts(text: str, outcome: Outcome, reward: float) -> None:
    verdict = verify(text, ANSWER)
    assert (verdict.outcome, verdict.reward) == (outcome, reward)


@each_case(
    ("text", "form"),
    [
        ("2\u00d73 \u00f7 [4 \u2212 1]", "2*3/(4-1)"),
        (r"\frac{2 \times 3}{4 - 1}", "2*3/(4-1)"),
        (r"$\left(2 \cdot 3\right) \div (4-1)$", "2*3/(4-1)"),
        (r"\boxed{2 x 3 / (4 - 1)}", "2*3/(4-1)"),
        ("\uff12*\uff13/(4\u00a0-\u00a01)", "2*3/(4-1)"),
        ("2\u00b2*3", None),
        ("2x", None),
        (r"\sqrt{4}*3", None),
        ("2^3", None),
        ("2(3)", None),
        (r"\frac" * 400, None),
    ],
)
def test_other_spellings_are_one_expression(text: str, form: str | None) -> None:
    """A raised digit is an exponent, never a factor or a digit."""
    answer = TaggedCountdownAnswer((1, 2, 3, 4), 2)
    verdict = verify(f"<answer>{text}</answer>", answer)
    assert (verdict.canonical_answer, verdict.outcome) == (form, Outcome.CORRECT if form else Outcome.FORMAT)


def test_values_are_exact_where_floats_are_close() -> None:
    near = TaggedCountdownAnswer((100_001, 100_000), 1)
    assert verify("<answer>100001/100000</answer>", near).outcome is Outcome.WRONG


def test_the_table_names_both_tasks() -> None:
    for task in ("countdown_3to4", "countdown_3"):
        assert make_verifiers()[task](f"<answer>{RIGHT}</answer>", ANSWER).canonical_answer == "36+55-19-7"
