"""Problems that are solved with tools: a YAML file names another task's problems, and the tools.

    task: math                 # whose verifier judges the answer
    path: train.jsonl          # that task's file of problems, beside this one
    tools:
      - calculator
      - {use: search, options: {path: documents.jsonl}}
      - {use: my_tools.py:weather}

`use` is a tool that comes with megasharp (`calculator`, `python`, `search`), or the path of a function or of a class
that is a `Tool`, whose arguments `options` are. The schemas come into the prompt by the model's own chat template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import Field, JsonValue

from megasharp.common.errors import UserError
from megasharp.common.records import TaskAnswer, Verdict
from megasharp.common.section import Section
from megasharp.config.core import read_tree, validate
from megasharp.tasks.environment import Environment, EnvironmentAnswer, Observation, Row, plays
from megasharp.tasks.judge import TaskItem, Verifier
from megasharp.tasks.prompts import asked, by_chat, template_named
from megasharp.tasks.tools.calls import Notation
from megasharp.tasks.tools.search import Search
from megasharp.tasks.tools.tool import FunctionTool, Tool
from megasharp.tasks.user_import import beside, constructed, imported, look_beside

KEY = "tools: use"
OWN_TOOLS: Mapping[str, str] = {
    "calculator": "megasharp.tasks.tools.calculator:Calculator",
    "python": "megasharp.tasks.tools.python_tool:Python",
    "search": "megasharp.tasks.tools.search:Search",
}


class ToolEntry(Section):
    """One tool."""

    use: str = Field(description="calculator, python, search; or folder/file.py:name, package.module:name.")
    options: dict[str, JsonValue] = Field(default={}, description="Arguments of the tool's class, by their names.")


class ToolFile(Section):
    """The file."""

    task: str = Field(description="Task of the problems; its verifier judges the turn that calls no tool.")
    path: str = Field(description="Data file of that task, beside this file.")
    tools: list[str | ToolEntry] = Field(min_length=1, description="The tools: names, or objects with use and options.")
    prompt: str | None = Field(
        default=None, description="Template by which the problems are asked. null: the task's, as a message."
    )
    system: str | None = Field(default=None, description="Text of a system message before the problem.")
    notation: Notation = Field(
        default="json",
        description="How calls are written. json: as Hermes, Qwen and Llama 3 are taught, with the schemas in the chat "
        "template. short: a turn ?8*3 calls the only tool, answered by =24:, for tiny models without a template.",
    )
    calls: int = Field(default=4, ge=1, description="Most calls in one turn that are made.")
    characters: int = Field(default=2000, ge=1, description="Most characters of a tool's answer; the rest is cut off.")


@dataclass(frozen=True, slots=True)
class ToolAnswer(EnvironmentAnswer):
    """Another task's answer, and the tools, calls and characters of the file as a JSON text.

    Example: `ToolAnswer("countdown", CountdownAnswer((3, 8), 24), '{"tools": ...}')`.
    """

    task: str
    answer: TaskAnswer
    file: str
    schemas: str = field(default="", compare=False, repr=False)
    prompt: str = field(default="", compare=False, repr=False)
    judge: Verifier | None = field(default=None, compare=False, repr=False)
    folder: str = field(default="", compare=False, repr=False)

    @property
    def row(self) -> Row:
        """The prompt."""
        found: dict[str, Any] = json.loads(self.prompt)
        return found

    @property
    def tools(self) -> str:
        """The schemas that a chat template writes."""
        return self.schemas

    @property
    def example(self) -> Observation | None:
        """An answer of a tool; a made-up turn calls none."""
        return Observation(messages=(("tool", "?"),)) if self.schemas else None

    @property
    def given(self) -> object:
        """The answer of the problem's own task."""
        return self.answer.given

    def environment(self) -> Environment:
        """Begin a conversation."""
        # It reads responses by the table of tasks, which has this file's row.
        from megasharp.tasks.tools.tool_environment import ToolEnvironment

        file = ToolFile.model_validate_json(self.file)
        return ToolEnvironment(tools_of(file, Path(self.folder)), file.notation, file.calls, file.characters)


def tools_of(file: ToolFile, folder: Path) -> list[Tool]:
    """Make the tools of a file in this folder. Raises UserError, naming the tool, for one that cannot be made."""
    return [_tool(ToolEntry(use=each) if isinstance(each, str) else each, folder) for each in file.tools]


def _tool(entry: ToolEntry, folder: Path) -> Tool:
    found = imported(OWN_TOOLS.get(entry.use, beside(entry.use, folder)), KEY)
    if not callable(found):
        raise UserError(f"{KEY}: {entry.use} is neither a function nor a class")
    if not isinstance(found, type):
        if entry.options:
            raise UserError(f"{KEY}: {entry.use} is a function, which has no options")
        return FunctionTool(found)
    options: dict[str, Any] = dict(entry.options)
    if found is Search:
        options["folder"] = str(folder)
    made: object = constructed(found, entry.use, options, KEY)
    if not isinstance(made, Tool):
        raise UserError(f"{KEY}: {entry.use} is no megasharp.tasks.tools.tool:Tool; a plain function is one too")
    return made


def load_items(path: Path) -> list[TaskItem]:
    """Read a file, its problems and its tools. Raises UserError for what is wrong with any of them."""
    # The table has this file's row.
    from megasharp.tasks.table import load_items as load_task
    from megasharp.tasks.table import row_of

    file = validate(ToolFile, read_tree(path), str(path), path)
    look_beside(path)
    row = row_of(file.task)
    if row.verify is None or row.extra:
        raise UserError(f"{path}: the answers of task {file.task} cannot be judged in a conversation with tools")
    try:
        tools = tools_of(file, path.parent)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    _check(path, file, tools)
    items = load_task(file.task, path.parent / file.path)
    if plays(items):
        raise UserError(f"{path}: task {file.task} is an environment itself, which has no tools")
    template = file.prompt or by_chat(row.prompt)
    items = asked(items, template) if template else items
    used = file.model_dump_json(include={"task", "path", "tools", "notation", "calls", "characters"})
    schemas = "" if file.notation == "short" else json.dumps([tool.schema for tool in tools])
    problems = [replace(item, source=path.name) for item in items]
    folder = str(path.parent.resolve())
    return [_item(item, file, used, schemas, row.verify, folder) for item in problems]


def _check(path: Path, file: ToolFile, tools: list[Tool]) -> None:
    names = [tool.name for tool in tools]
    if len({*names}) < len(names):
        raise UserError(f"{path}: two tools have one name; there are: {', '.join(names)}")
    if file.notation == "json" and file.prompt is not None and not template_named(file.prompt).chat:
        raise UserError(f"{path}: prompt {file.prompt} is no message, as notation json needs; name one that is")
    if file.notation == "short" and (len(tools) > 1 or len(tools[0].parameters["properties"]) != 1):
        raise UserError(f"{path}: notation short is for one tool of one argument; there are: {', '.join(names)}")


def _item(item: TaskItem, file: ToolFile, used: str, schemas: str, judge: Verifier, folder: str) -> TaskItem:
    turns = item.turns or ((("user", item.text),) if schemas else ())
    if file.system is not None and turns:
        turns = (("system", file.system), *(turn for turn in turns if turn[0] != "system"))
    prompt = json.dumps({"text": item.text, "turns": turns})
    answer = ToolAnswer(file.task, item.answer, used, schemas, prompt, judge, folder)
    return replace(item, task="tools", answer=answer, turns=turns, tools=schemas, question="")


def verify(text: str, answer: TaskAnswer) -> Verdict:
    """Judge the last turn of a conversation by the problem's own task."""
    assert isinstance(answer, ToolAnswer) and answer.judge is not None
    return answer.judge(text, answer.answer)
