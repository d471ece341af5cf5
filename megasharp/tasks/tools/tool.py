"""A tool: a name, a description, a JSON schema of its arguments, and what it answers to a call.

A plain function is a tool, where its parameters have annotations and its docstring describes them in Google's form:

    def weather(city: str) -> str:
        '''Say what the weather in a city is.

        Args:
            city: Name of the city.
        '''
        if city not in KNOWN:
            raise ToolError(f"no such city; known are {', '.join(KNOWN)}")
        return KNOWN[city]

`ToolError` is an answer: what the policy has asked for cannot be done. Whatever else a tool raises is a failure of the
tool, which says nothing of the policy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from megasharp.common.errors import UserError, one_line
from megasharp.tasks.environment import called

Schema = Mapping[str, Any]


class ToolError(Exception):
    """A call that cannot be answered, through the fault of who calls; the policy reads the message."""


class Tool(ABC):
    """A tool of one conversation. `parameters` is the JSON schema of the object of its arguments."""

    name: str
    description: str
    parameters: Schema
    # False where the same calls may be answered otherwise another time: by the clock, say.
    repeats = True

    @abstractmethod
    async def call(self, arguments: Mapping[str, Any]) -> str:
        """Answer a call whose arguments fit the schema. Raises ToolError where the policy is at fault."""

    async def close(self) -> None:
        """Release what the conversation holds."""
        return

    @property
    def schema(self) -> dict[str, Any]:
        """The tool as a chat template writes it."""
        described = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": described}


class FunctionTool(Tool):
    """A tool made of a function: a coroutine function, or a plain one, which is called in a thread and may block."""

    def __init__(self, function: Callable[..., Any]) -> None:
        # A second of imports, which the parent of judging workers does without.
        from transformers.utils import get_json_schema

        try:
            described = get_json_schema(function)["function"]
        except Exception as error:  # it raises many kinds, all of them about the function
            raise UserError(f"{function.__name__} is no tool: {one_line(error)}") from error
        self.name, self.description = described["name"], described["description"]
        self.parameters = described["parameters"]
        self._function = function

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """Call the function; what it returns is written as text."""
        return str(await called(partial(self._function, **arguments)))


_KINDS: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def check_arguments(arguments: Mapping[str, Any], parameters: Schema) -> None:
    """Raise ToolError for arguments that are missing, unknown, or of another type than the schema's.

    What a schema says of the inside of lists and objects, and of ranges, is left to the tool.
    """
    known: Mapping[str, Any] = parameters.get("properties", {})
    for name in parameters.get("required", ()):
        if name not in arguments:
            raise ToolError(f"the argument {name!r} is missing")
    for name, value in arguments.items():
        if name not in known:
            raise ToolError(f"there is no argument {name!r}; there are: {', '.join(known) or 'none'}")
        wanted = known[name].get("type", [])
        kinds = [wanted] if isinstance(wanted, str) else wanted
        if known[name].get("nullable"):
            kinds = [*kinds, "null"]
        if kinds and not any(_is_of(value, kind) for kind in kinds):
            raise ToolError(f"the argument {name!r} must be of type {' or '.join(kinds)}")
        if "enum" in known[name] and value not in known[name]["enum"]:
            raise ToolError(f"the argument {name!r} must be one of {', '.join(map(repr, known[name]['enum']))}")


def _is_of(value: object, kind: str) -> bool:
    if isinstance(value, bool) and kind != "boolean":
        return False
    return kind not in _KINDS or isinstance(value, _KINDS[kind])


def file_beside(written: str, folders: list[str], key: str) -> Path:
    """Return the file of a path as a user has written it, found in the first of the folders that has one.

    Raises UserError, naming the key, where none has.
    """
    found = next((place for folder in folders if (place := Path(folder) / Path(written).expanduser()).is_file()), None)
    if found is None:
        raise UserError(f"{key}: there is no file {written}, neither beside the file of tools nor in {Path.cwd()}")
    return found
