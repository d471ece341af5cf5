"""`megasharp convert verify` without the command line's packages: for a cluster image without Ray or SGLang.

    PYTHONPATH=path/to/megasharp python tools/verify_checkpoint.py HF MEGATRON

Exit code 0 when both hold the same model bit for bit, 3 when one's weights are the other's rounded to its dtype, 1 when
they differ, 2 when one cannot be read.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megasharp.common.exit_codes import run_command
from megasharp.learner.conversion import DTYPES
from megasharp.learner.verification import Probe, verify


def main() -> None:
    """Parse, compare, print."""
    parser = argparse.ArgumentParser(description="Compare two folders, of Hugging Face or of Megatron.")
    parser.add_argument("one", type=Path)
    parser.add_argument("other", type=Path)
    parser.add_argument("--tokens", type=int, default=64, help="length of the longest random sequence")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random tokens")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="what the logits are computed in")
    parser.add_argument("--no-logits", action="store_true", help="compare bytes only: no whole model is held in memory")
    arguments = parser.parse_args()
    probe = None if arguments.no_logits else Probe(arguments.tokens, arguments.seed, arguments.dtype)
    found = verify(arguments.one, arguments.other, probe)
    print("\n".join(found.lines))
    sys.exit(found.exit_code)


if __name__ == "__main__":
    run_command(main)
