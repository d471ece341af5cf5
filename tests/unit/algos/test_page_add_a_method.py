"""docs/how-to/add-a-method.md: its method joins a recipe, its preset is valid, and its tests pass."""

from __future__ import annotations

import pytest
import torch
import yaml
from page_code import import_block, titled_blocks

from megasharp.algos import METHODS
from megasharp.algos.base import Needs
from megasharp.cli.methods import describe_method


def test_the_pages_method_works_as_it_stands(monkeypatch: pytest.MonkeyPatch, make_micro, grade) -> None:
    blocks = titled_blocks("add-a-method.md")
    method = import_block(monkeypatch, blocks, "megasharp/algos/damp.py")
    monkeypatch.setitem(METHODS, "damp", method.Damp)
    assert describe_method("damp").startswith("Damped reinforcement")

    recipe = yaml.safe_load(blocks["configs/algo/damp.yaml"])["recipe"]
    assert set(recipe["methods"]) <= METHODS.keys()
    params = method.DampParams.model_validate(recipe["damp"])
    _, plain_T, _ = grade(make_micro(Needs()), ["grpo"])
    _, damped_T, metrics = grade(make_micro(Needs()), recipe["methods"], {"damp": params})
    assert metrics["method/damp/positive"] > 0
    assert not torch.equal(plain_T, damped_T)

    tests = import_block(monkeypatch, blocks, "tests/unit/algos/test_damp.py")
    ran = [test(make_micro) for name, test in vars(tests).items() if name.startswith("test_")]
    assert len(ran) == 2
