"""What an evaluation has sampled so far, on disk: a small table per chunk of samples, and what they are samples of.

A chunk appears under its name only when it is whole. Whoever evaluates again with the same identity reads the chunks
that are there and samples the others; another identity is refused.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from megasharp.errors import UserError, one_line
from megasharp.evals.rows import TokenFigures
from megasharp.evals.samples import Sample
from megasharp.files import completed, write_text
from megasharp.types import Outcome

_IDENTITY = "identity.json"
_SECONDS = b"seconds"
_SCHEMA = pa.schema(
    [
        pa.field("problem", pa.int32()),
        pa.field("outcome", pa.string()),
        pa.field("answer", pa.string()),
        pa.field("tokens", pa.int32()),
        pa.field("truncated", pa.bool_()),
        pa.field("entropy", pa.float64()),
        pa.field("entropy_sampled", pa.float64()),
        pa.field("lambdas", pa.list_(pa.float64())),
        pa.field("lambda_sample", pa.float64()),
    ]
)


class Progress:
    """The chunks of one evaluation, in a folder of its own."""

    def __init__(self, folder: Path, identity: Mapping[str, str]) -> None:
        """Open `folder`, or make it with the first chunk.

        Raises UserError where it holds another evaluation's samples, or cannot be read.
        """
        self._folder = folder
        self._identity = dict(identity)
        path = folder / _IDENTITY
        if path.exists():
            check_identity(_read_identity(path), self._identity, f"{folder} holds samples")

    @property
    def samples(self) -> int:
        """How many samples are stored."""
        return sum(pq.read_metadata(path).num_rows for path in self._folder.glob("*.parquet"))

    def read(self, name: str) -> tuple[list[Sample], float] | None:
        """The samples of a chunk, and the seconds they took; None where it is not there.

        Raises UserError for a file that is no chunk.
        """
        path = self._path(name)
        if not path.exists():
            return None
        try:
            table = pq.read_table(path)
            return list(_samples(table)), float(table.schema.metadata[_SECONDS])
        except (OSError, pa.ArrowException, KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path}: cannot be read ({one_line(error)}); remove it to sample it again") from error

    def write(self, name: str, samples: Sequence[Sample], seconds: float) -> None:
        """Store a chunk. Raises UserError where the disk refuses."""
        if not (self._folder / _IDENTITY).exists():
            write_text(self._folder / _IDENTITY, json.dumps(self._identity, indent=1) + "\n")
        table = pa.Table.from_pylist([_record(sample) for sample in samples], schema=_SCHEMA)
        with completed(self._path(name)) as temporary:
            pq.write_table(table.replace_schema_metadata({_SECONDS: repr(seconds)}), temporary)

    def remove(self) -> None:
        """Remove all of it: the result is stored."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.parquet"


def check_identity(found: Mapping[str, str], asked: Mapping[str, str], where: str) -> None:
    """Raise UserError, naming the first difference, unless both are the same evaluation; `where` begins its line."""
    for name in (*asked, *found):
        there, here = found.get(name), asked.get(name)
        if there != here:
            raise UserError(
                f"{where} of another evaluation ({name} {there or 'unknown'}, now {here or 'unknown'}); "
                "give another --out, or remove it"
            )


def _read_identity(path: Path) -> dict[str, str]:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        return {str(name): str(value) for name, value in tree.items()}
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: cannot be read ({one_line(error)}); remove {path.parent}") from error


def _record(sample: Sample) -> dict[str, Any]:
    seen = sample.seen
    return {
        "problem": sample.problem,
        "outcome": str(sample.outcome),
        "answer": sample.answer,
        "tokens": sample.tokens,
        "truncated": sample.truncated,
        "entropy": seen.entropy,
        "entropy_sampled": seen.entropy_sampled,
        "lambdas": list(seen.lambdas),
        "lambda_sample": seen.lambda_sample,
    }


def _samples(table: pa.Table) -> Iterator[Sample]:
    for record in table.to_pylist():
        seen = TokenFigures(
            record["entropy"], record["entropy_sampled"], tuple(record["lambdas"]), record["lambda_sample"]
        )
        yield Sample(
            problem=record["problem"],
            outcome=Outcome(record["outcome"]),
            answer=record["answer"],
            tokens=record["tokens"],
            truncated=record["truncated"],
            seen=seen,
        )
