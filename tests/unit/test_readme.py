"""The README says what the code does: its table of methods is the one that `megasharp methods` prints."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from megasharp.algos import METHODS
from megasharp.build.methods import describe_method, markdown_table, print_methods
from megasharp.errors import UserError

README = Path(__file__).parents[2] / "README.md"


def test_table_of_methods_is_the_printed_one() -> None:
    assert markdown_table() in README.read_text(encoding="utf-8"), "run megasharp methods --markdown"


def test_list_names_every_method_with_its_paper_and_defaults() -> None:
    console = Console(width=200, record=True, file=None, quiet=False)
    with console.capture() as captured:
        print_methods(console)
    text = captured.get()
    assert all(f" {name} " in text for name in METHODS)
    assert "2510.14807" in text and "lambda_top1: 1.1" in text


@pytest.mark.parametrize("name", METHODS)
def test_a_methods_page_opens_with_its_formula_and_names_its_parameters(name: str) -> None:
    page = describe_method(name)
    assert METHODS[name].paper in page
    assert all(f"{key}: " in page for key in METHODS[name].Params.model_fields)


def test_an_unknown_method_is_a_users_mistake() -> None:
    with pytest.raises(UserError, match="no method is called 'nope'; known are: grpo, "):
        describe_method("nope")
