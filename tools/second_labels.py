"""The second, blind labels of the corpus: the items for a second reader, and their labels.

    python tools/second_labels.py write /tmp/blind
    python tools/second_labels.py read /tmp/blind

`write` makes four files of items that have no second label yet, in mixed order, without label, reason, category,
template and recorded verdict. The second reader reads them with the rules of `tests/corpus/README.md` and writes
`labels-*.jsonl` beside them, a line `{"id": ..., "wanted": "correct" or "wrong", "reason": ...}` for each item. `read`
puts those labels into the corpus and prints where they differ from the first ones.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from verifier_corpus import (
    WANTED,
    CorpusItem,
    files,
    for_second_labels,
    problems_of,
    read_corpus,
    read_file,
    write_file,
)

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


def write(folder: Path) -> int:
    """Write the files of items; returns the number of items."""
    drawn = [item for item in for_second_labels(read_corpus()) if item.second is None]
    lines = [
        json.dumps(fields, ensure_ascii=False)
        for fields in shown(sorted(drawn, key=lambda item: sha256(f"order {item.id}".encode()).digest()))
    ]
    folder.mkdir(parents=True, exist_ok=True)
    size = -(-len(lines) // _FILES)
    for number in range(_FILES):
        text = "".join(f"{line}\n" for line in lines[number * size : (number + 1) * size])
        (folder / f"blind-{number + 1}.jsonl").write_text(text, encoding="utf-8")
    return len(lines)


def read_labels(folder: Path) -> dict[str, dict[str, str]]:
    """Return the labels of a folder by id. Raises UserError for what is no label, with its line, and for no file."""
    labels: dict[str, dict[str, str]] = {}
    paths = sorted(folder.glob("labels-*.jsonl"))
    if not paths:
        raise UserError(f"{folder}: no labels-*.jsonl: the second reader writes them")
    for path in paths:
        try:
            # Not splitlines: reasons may quote other characters that break lines.
            lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: {error}") from error
        for number, line in enumerate(lines, 1):
            label = _label(line, f"{path}:{number}")
            if label["id"] in labels:
                raise UserError(f"{path}:{number}: {label['id']} has two labels")
            labels[label["id"]] = label
    return labels


def _label(line: str, where: str) -> dict[str, str]:
    try:
        label = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where}: not a label: {error}") from error
    fields = ("id", "wanted", "reason")
    if not isinstance(label, dict) or not all(isinstance(label.get(name), str) for name in fields):
        raise UserError(f"{where}: not a label: wanted is an object with the texts {', '.join(fields)}")
    if label["wanted"] not in WANTED:
        raise UserError(f"{where}: {label['id']}: wanted is {label['wanted']!r}, not {' or '.join(WANTED)}")
    return label


def read(folder: Path) -> list[str]:
    """Put the labels of a folder into the corpus; returns a line for each that differs from the first label.

    Raises UserError, before anything is written, for what is no label and for items that the corpus does not have.
    """
    labels = read_labels(folder)
    corpus = {path: read_file(path) for path in files()}
    if unknown := sorted(set(labels) - {item.id for items in corpus.values() for item in items}):
        raise UserError(f"{folder}: labels of items that the corpus does not have: {', '.join(unknown)}")
    differ = []
    for path, items in corpus.items():
        for place, item in enumerate(items):
            if (label := labels.get(item.id)) is None:
                continue
            items[place] = replace(item, second=label["wanted"])
            if label["wanted"] != item.wanted:
                differ.append(f"{item.id}: {item.wanted} ({item.reason}), second {label['wanted']} ({label['reason']})")
        write_file(path, items)
    return [*differ, f"{len(labels)} labels, {len(differ)} of them other than the first"]


def main() -> None:
    """Write or read, as the command says; a line and the exit code 1 where that cannot be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("write", "read"))
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    try:
        if arguments.what == "write":
            print(f"{write(arguments.folder)} items in {arguments.folder}")
        else:
            print(*read(arguments.folder), sep="\n")
    except (UserError, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
