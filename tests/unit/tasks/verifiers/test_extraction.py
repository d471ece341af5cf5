r"""Answers in responses: boxes in boxes, boxes left open, tags, and texts of megabytes."""

from __future__ import annotations

import time

from cases import each_case

from megasharp.tasks.extraction import MAX_CHARACTERS, last_box, last_stated, last_tag


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
        (r"\boxed{1} \boxed{ }", ""),
        (r"\boxed", None),
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
    ],
)
def test_what_is_stated(text: str, stated: str | None) -> None:
    assert last_stated(text) == stated


@each_case("sign", ["{", "}", r"\boxed{", "<answer>", "</answer>", "answer is", "answer: ", "#", "\\"])
def test_megabytes_are_searched_at_once(sign: str) -> None:
    text = sign * (10_000_000 // len(sign))
    started = time.process_time()
    last_box(text), last_tag(text), last_stated(text)
    assert time.process_time() - started < 2.0


def test_only_the_end_is_searched() -> None:
    assert last_box(r"\boxed{1}" + " " * MAX_CHARACTERS) is None
    assert last_box(" " * MAX_CHARACTERS + r"\boxed{1}") == "1"
