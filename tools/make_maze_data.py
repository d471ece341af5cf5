"""Write problems of the task maze: train, dev and test, with no maze in two of them. Deterministic in `--seed`.

python tools/make_maze_data.py --out examples/maze/data
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from random import Random

from megasharp.tasks.maze import make_maze

SPLITS = {"dev": 64, "test": 128, "train": 2_000}


def main() -> None:
    """Write the three files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write into")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    rng, taken = Random(arguments.seed), set[str]()
    for split, size in SPLITS.items():
        lines: list[str] = []
        while len(lines) < size:
            maze = make_maze(rng).text
            if maze not in taken:
                taken.add(maze)
                lines.append(json.dumps({"id": f"maze-{split}-{len(lines):05d}", "maze": maze}))
        (arguments.out / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
