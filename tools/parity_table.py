"""Print how far an engine's log-probs are from transformers in float64, case by case, as Markdown.

    .venv/bin/python tools/parity_table.py
    .venv/bin/python tools/parity_table.py --device cuda --sglang '{"attention_backend": "triton"}'

Starts one engine after the other on tiny random models and drives it over HTTP, as `tests/fleet/test_engine.py` does:
the cases are those of `tests/fleet/parity.py`. The exit code is 1 where a case fails; its cell then says so.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
sys.path[:0] = [str(REPOSITORY / "tests" / folder) for folder in ("fleet", "support")]

import parity  # noqa: E402 (its folder had to be named first)

_LOG_PROBS = ("sampler", "policy", "memory")

Column = Mapping[str, Mapping[str, float] | str]


def main() -> int:
    """The exit code."""
    arguments = _arguments()
    setups = [name for name in parity.SETUPS if not arguments.only or name in arguments.only]
    if arguments.device != "cpu":
        # Engines on a GPU refuse a window.
        setups = [name for name in setups if "memory_window" not in parity.SETUPS[name][2]]
        setups = [name for name in setups if parity.SETUPS[name][2].get("tp", 1) <= max(1, arguments.gpus)]
    keys = {
        "device": arguments.device,
        "dtype": arguments.dtype,
        "python": arguments.python.absolute(),
        "sglang": json.loads(arguments.sglang),
    }
    columns = {}
    for name in setups:
        print(f"{name} ...", file=sys.stderr, flush=True)
        columns[name] = _column(name, keys)
    print(_table(columns))
    return int(any(isinstance(found, str) for column in columns.values() for found in column.values()))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Parity of the engines with transformers.")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--gpus", type=int, default=1, help="with 2, the setups of two ranks run on CUDA too")
    parser.add_argument("--python", type=Path, default=REPOSITORY / ".venv-fleet" / "bin" / "python")
    parser.add_argument("--sglang", default="{}", help="JSON: further flags of SGLang for every engine")
    parser.add_argument("--only", nargs="*", choices=tuple(parity.SETUPS), help="these setups alone")
    return parser.parse_args()


def _column(setup: str, keys: Mapping[str, Any]) -> Column:
    """Each case's errors, or why there are none."""
    column: dict[str, Mapping[str, float] | str] = {}
    with tempfile.TemporaryDirectory() as folder, parity.pair_of(Path(folder), setup, **keys) as pair:
        for case, measure in parity.CASES.items():
            try:
                column[case] = measure(pair)
            except (AssertionError, OSError) as error:
                print(f"{setup}, {case}: {error}", file=sys.stderr)
                column[case] = "failed"
    return column


def _table(columns: Mapping[str, Column]) -> str:
    rows = [["largest error of a log-prob", *columns], ["---"] * (1 + len(columns))]
    for case in parity.CASES:
        rows.append([case, *(_cell([column[case]], _LOG_PROBS) for column in columns.values())])
    rows.append(["`calibration_kl`, all cases", *(_cell(list(c.values()), ("kl",)) for c in columns.values())])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cell(found: Sequence[Mapping[str, float] | str], names: Sequence[str]) -> str:
    if any(isinstance(each, str) for each in found):
        return "failed"
    values = [each[name] for each in found if not isinstance(each, str) for name in names if name in each]
    return f"{max(values):.1e}" if values else ""


if __name__ == "__main__":
    sys.exit(main())
