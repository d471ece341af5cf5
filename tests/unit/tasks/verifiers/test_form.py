r"""The form of a response: tags in their order, once each, and boxes."""

from __future__ import annotations

from cases import each_case

from megasharp.common.records import Outcome
from megasharp.tasks.form import Form, FormAnswer, verify
from megasharp.tasks.table import make_verifiers


@each_case(
    ("text", "form", "kept"),
    [
        ("<think>2+2</think> <answer>4</answer>", "tags", True),
        ("2+2</think>\n\n<answer>4</answer>\n", "tags", True),
        ("<answer>4</answer>", "tags", False),
        ("<think>2+2 <answer>4</answer>", "tags", False),
        ("<think>2+2</think> so <answer>4</answer>", "tags", False),
        ("<think>2+2</think><answer> </answer>", "tags", False),
        ("<think>2+2</think><answer>4</answer> indeed", "tags", False),
        ("<think>2+2</think><answer>4</answer><answer>5</answer>", "tags", False),
        ("<answer>4</answer><think>2+2</think>", "tags", False),
        ("<think>" * 1_000_000, "tags", False),
        (r"so \boxed{4}", "box", True),
        (r"so \boxed{}", "box", False),
        (r"so \boxed{4", "box", False),
        ("<think>2+2</think><answer>4</answer>", "box", False),
        ("", "box", False),
        ("", "tags", False),
        ("Sure. <think>2+2</think><answer>4</answer>", "tags", False),
        ("\n<think>2+2</think><answer>4</answer>", "tags", True),
        # open-r1's pattern has it so too.
        ("<think></think><answer>4</answer>", "tags", True),
        ("<think>2+2</think><answer>\u200b</answer>", "tags", False),
        ("<think>2+2</think><answer> \u2060\ufeff\u3164\ufe0f</answer>", "tags", False),
        ("<think>2+2</think><answer>\u200b4</answer>", "tags", True),
        ("\\boxed{\u200b}", "box", False),
        (r"\boxed{ \, ~ }", "box", False),
        (r"\boxed{7}, so \boxed{}", "box", False),
    ],
    ids=range(25),
)
def test_the_form(text: str, form: Form, kept: bool) -> None:
    verdict = verify(text, FormAnswer(form))
    assert verdict.outcome is (Outcome.CORRECT if kept else Outcome.FORMAT)
    assert (verdict.reward, verdict.canonical_answer) == (float(kept), None)


def test_the_table_names_the_task() -> None:
    assert make_verifiers()["form"](r"\boxed{1}", FormAnswer("box")).outcome is Outcome.CORRECT
