"""`python -m megasharp.serving.engine CONFIG.json`: one engine, until it is told to end."""

from __future__ import annotations

import sys
from pathlib import Path

from megasharp.errors import UserError
from megasharp.serving.engine.config import read_config
from megasharp.serving.engine.server import serve


def main(arguments: list[str]) -> int:
    """The exit code: 2, with one line on stderr, for what the user can mend."""
    if len(arguments) != 1:
        print("usage: python -m megasharp.serving.engine CONFIG.json", file=sys.stderr)
        return 2
    try:
        serve(read_config(Path(arguments[0])))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
