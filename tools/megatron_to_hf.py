"""`megasharp convert megatron-to-hf` without the command line's packages: for a cluster image without Ray or SGLang.

PYTHONPATH=path/to/megasharp python tools/megatron_to_hf.py runs/mine/checkpoints/step_000300 HF
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megasharp.common.exit_codes import run_command
from megasharp.learner.conversion import DTYPES, megatron_to_hf


def main() -> None:
    """Parse, convert, print."""
    parser = argparse.ArgumentParser(description="Megatron folder or a run's checkpoint to a Hugging Face folder.")
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--dtype", choices=DTYPES, help="round the weights; else as stored")
    arguments = parser.parse_args()
    megatron_to_hf(arguments.source, arguments.target, dtype=arguments.dtype)
    print(f"wrote {arguments.target}")


if __name__ == "__main__":
    run_command(main)
