"""The calculator, exact: `calculator(expression="(3+5)*7/2")` is answered with `28`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megasharp.tasks.arithmetic import NotArithmeticError, parse
from megasharp.tasks.tools.tool import Tool, ToolError


class Calculator(Tool):
    """Works out an expression of whole numbers; a value that is none is a fraction, `7/2`."""

    name = "calculator"
    description = "Work out an expression of whole numbers, + - * / and parentheses, exactly."
    parameters = {
        "type": "object",
        "properties": {"expression": {"type": "string", "description": "The expression, such as (3+5)*7/2."}},
        "required": ["expression"],
    }

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """Return the value."""
        try:
            form, _ = parse(arguments["expression"], signed=True)
        except NotArithmeticError as error:
            raise ToolError(f"no expression that can be worked out: {error}") from error
        except ZeroDivisionError as error:
            raise ToolError("division by zero") from error
        return str(form.value)
