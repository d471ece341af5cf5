"""docs/how-to/add-a-task.md: its task reads the quickstart's problems, its run file is valid, its tests pass."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from page_code import import_block, titled_blocks

from megasharp.config.core import validate
from megasharp.config.run_config import RunConfig
from megasharp.tasks.table import TASKS, Task, load_items, make_verifiers

REPOSITORY = Path(__file__).parents[4]


def test_the_pages_task_works_as_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = titled_blocks("add-a-task.md")
    task = import_block(monkeypatch, blocks, "megasharp/tasks/countdown_any.py")
    row = re.search(r'"countdown_any": (Task\(.*\)),', blocks["megasharp/tasks/table.py"])
    assert row is not None
    monkeypatch.setitem(TASKS, "countdown_any", eval(row[1], {"Task": Task, "countdown_any": task}))

    suite, run = yaml.safe_load(blocks["any_dev.yaml"]), yaml.safe_load(blocks["any.yaml"])
    first = load_items(suite["task"], REPOSITORY / suite["path"])[0]
    assert (first.id, first.text) == ("countdown-dev-00000", "3 8 3 5=4:")
    assert make_verifiers()["countdown_any"]("8-3-3+5-3", first.answer).reward == 0.0
    assert make_verifiers()["countdown_any"]("8/(5-3)", first.answer).reward == 1.0
    assert TASKS["countdown_any"].reading == TASKS["countdown"].reading, "a response that was cut off has no answer"
    config = validate(RunConfig, run, "any.yaml")
    assert config.data.task == suite["task"] and config.eval.suites == ["any_dev.yaml"]

    tests = import_block(monkeypatch, blocks, "tests/unit/tasks/verifiers/test_countdown_any.py")
    ran = [test() for name, test in vars(tests).items() if name.startswith("test_")]
    assert len(ran) == 3
