"""`megasharp convert hf-to-megatron` without the command line's packages: for a cluster image without Ray or SGLang.

PYTHONPATH=path/to/megasharp python tools/hf_to_megatron.py HF MEGATRON --tp 8
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megasharp.common.exit_codes import run_command
from megasharp.learner.conversion import DTYPES, hf_to_megatron


def main() -> None:
    """Parse, convert, print."""
    parser = argparse.ArgumentParser(description="Hugging Face folder to a Megatron checkpoint folder.")
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--tp", type=int, default=1, help="cut tensors where this many tensor-parallel ranks would")
    parser.add_argument("--pp", type=int, default=1, help="give each of this many pipeline stages files of its own")
    parser.add_argument("--dtype", choices=DTYPES, help="round the weights")
    arguments = parser.parse_args()
    hf_to_megatron(arguments.source, arguments.target, tp=arguments.tp, pp=arguments.pp, dtype=arguments.dtype)
    print(f"wrote {arguments.target}")


if __name__ == "__main__":
    run_command(main)
