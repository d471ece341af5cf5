"""`python -m megasharp.rollout.sglang.engine [--check] CONFIG.json`: one engine, which serves until SIGTERM.

With `--check` nothing starts: the exit code says whether the config is refused.
"""

from __future__ import annotations

import sys
from pathlib import Path

from megasharp.common.errors import UserError
from megasharp.rollout.sglang.engine.engine_config import read_config

CHECK = "--check"


def main(arguments: list[str]) -> int:
    """The exit code: 2, with one line on stderr, for what the user can fix."""
    *options, path = arguments or [""]
    if not path or options not in ([], [CHECK]):
        print(f"usage: python -m megasharp.rollout.sglang.engine [{CHECK}] CONFIG.json", file=sys.stderr)
        return 2
    try:
        config = read_config(Path(path))
        if options:
            from megasharp.rollout.sglang.engine.check import check

            check(config)
        else:
            # It brings torch with it, for which a refusal need not wait.
            from megasharp.rollout.sglang.engine.server import serve

            serve(config)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
