"""The second, blind labels of the corpus: the items for a second reader, and their labels.

    python tools/second_labels.py write /tmp/blind
    python tools/second_labels.py read /tmp/blind

`write` makes four files of items, in mixed order, without label, reason, category, template and recorded verdict. The
second reader reads them with the rules of `tests/corpus/README.md` and writes `labels-*.jsonl` beside them, a line
`{"id": ..., "wanted": "correct" or "wrong", "reason": ...}` for each item. `read` puts those labels into the corpus and
prints where they differ from the first ones.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from verifier_corpus import CorpusItem, files, for_second_labels, problems_of, read_corpus, read_file, write_file

from megasharp.common.errors import UserError
from megasharp.tasks.reasoning_gym import GymAnswer, problem

SHOWN = ("id", "task", "row", "response", "finish", "thinks")
_FILES = 4


def shown(items: Sequence[CorpusItem]) -> list[dict[str, object]]:
    """Return what a second reader sees; a generated problem with its question and answer."""
    found = []
    for item, asked in zip(items, problems_of(items), strict=True):
        fields = {name: getattr(item, name) for name in SHOWN}
        if isinstance(asked.answer, GymAnswer):
            generated = problem(asked.answer)
            fields["row"] = {**item.row, "question": generated["question"], "known answer": generated["answer"]}
        found.append(fields)
    return found


def write(folder: Path) -> None:
    """Write the files of items."""
    chosen = sorted(for_second_labels(read_corpus()), key=lambda item: sha256(f"order {item.id}".encode()).digest())
    folder.mkdir(parents=True, exist_ok=True)
    size = -(-len(chosen) // _FILES)
    for number in range(_FILES):
        lines = [
            json.dumps(fields, ensure_ascii=False) for fields in shown(chosen[number * size : (number + 1) * size])
        ]
        (folder / f"blind-{number + 1}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def read(folder: Path) -> list[str]:
    """Put the labels of a folder into the corpus; returns a line for each that differs from the first label.

    Raises UserError for a label of an item that the corpus does not have.
    """
    lines = [line for path in sorted(folder.glob("labels-*.jsonl")) for line in path.read_text().splitlines()]
    labels = {label["id"]: label for label in map(json.loads, lines)}
    left, differ = dict(labels), []
    for path in files():
        items = read_file(path)
        for place, item in enumerate(items):
            if (label := left.pop(item.id, None)) is None:
                continue
            items[place] = replace(item, second=label["wanted"])
            if label["wanted"] != item.wanted:
                differ.append(f"{item.id}: {item.wanted} ({item.reason}), second {label['wanted']} ({label['reason']})")
        write_file(path, items)
    if left:
        raise UserError(f"{folder}: labels of items that the corpus does not have: {', '.join(sorted(left))}")
    return [*differ, f"{len(labels)} labels, {len(differ)} of them other than the first"]


def main() -> None:
    """Write or read, as the command says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("write", "read"))
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    if arguments.what == "write":
        write(arguments.folder)
    else:
        print(*read(arguments.folder), sep="\n")


if __name__ == "__main__":
    main()
