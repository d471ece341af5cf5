"""The tables of a step's responses: `rollouts/step_N.parquet` has texts, verdicts and mean log-probs of all responses.

`rollout_tokens/step_N.parquet` has the tokens of some of them, apart, so that a long run can keep them for fewer steps.
`leave_pandas_out` keeps pyarrow from importing pandas, which tables of plain values do not need.
"""

from __future__ import annotations

import hashlib
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megasharp.common.errors import UserError, reason_at
from megasharp.common.files import completed
from megasharp.common.formats import read_table_stamp, table_stamp
from megasharp.common.records import Completion, Group
from megasharp.config.log import RolloutTablesConfig
from megasharp.metrics.parquet import arrow, parquet, turn_cells, turns_type, write_rows

if TYPE_CHECKING:
    import pyarrow as pa


class _NoPandas(MetaPathFinder):
    """Ends the search for pandas without finding it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "pandas":
            raise ImportError("pandas is imported by who converts to it")
        return None


def leave_pandas_out() -> None:
    """Have pyarrow look for pandas now and not find it, which saves half a second of CPU at the first table.

    pyarrow asks whether a list may be a pandas Series. It looks again when a table is converted to pandas or from it,
    so `to_pandas` and `from_pandas` work afterwards; until then `pa.array` of a Series keeps NaN instead of null.
    Nothing changes where pandas is imported already. Raises UserError where pyarrow is not installed.
    """
    pa = arrow()
    if "pandas" in sys.modules:
        return
    finder = _NoPandas()
    sys.meta_path.insert(0, finder)
    try:
        pa.array([])
    finally:
        sys.meta_path.remove(finder)


MeanEntropy = Mapping[tuple[str, int], float]

ROLLOUTS, TOKENS = "rollouts", "rollout_tokens"
_METADATA = table_stamp("rollouts")


@cache
def response_schema() -> pa.Schema:
    """The columns of a table of responses, in their order."""
    pa = arrow()
    # Response tokens `[start, end)` and whose they are; `memory` is null where no memory network took part.
    span = pa.struct([(name, pa.int64()) for name in ("start", "end", "policy", "memory")])
    return pa.schema(
        [
            ("step", pa.int64()),
            ("group_id", pa.string()),
            ("index", pa.int64()),
            ("task", pa.string()),
            ("prompt_id", pa.string()),
            ("prompt", pa.string()),
            ("policy_version", pa.int64()),
            ("text", pa.string()),
            ("length", pa.int64()),
            ("outcome", pa.string()),
            ("reward", pa.float64()),
            ("canonical_answer", pa.string()),
            ("finish_reason", pa.string()),
            ("versions", pa.list_(span)),
            ("mean_sampler_logp", pa.float64()),
            ("mean_policy_logp", pa.float64()),
            ("mean_memory_logp", pa.float64()),
            ("mean_entropy", pa.float64()),
            ("dropped_reason", pa.string()),
            ("begun_limit", pa.int64()),
            ("turns", pa.int64()),
            ("turn_places", turns_type()),
        ],
        metadata=_METADATA,
    )


@cache
def token_schema() -> pa.Schema:
    """The columns of a table of tokens, in their order."""
    pa = arrow()
    return pa.schema(
        [
            ("step", pa.int64()),
            ("group_id", pa.string()),
            ("index", pa.int64()),
            ("token_texts", pa.list_(pa.string())),
            ("token_policy_logp", pa.list_(pa.float32())),
        ],
        metadata=_METADATA,
    )


# Responses are text, of which zstd makes half of what Parquet's default (snappy) does.
_COMPRESSION = "zstd"

Span = dict[str, int | None]
Cell = str | int | float | list[Span] | list[dict[str, Any]] | None


@dataclass(frozen=True, slots=True)
class TokenColumns:
    """Selects the groups whose responses are written token by token, together at most `limit` tokens a step.

    `texts` returns each token's own text. Groups are chosen by a hash of their prompt, so that runs over the same data
    choose the same prompts.
    """

    texts: Callable[[Sequence[int]], Sequence[str]]
    limit: int

    def chosen(self, groups: Sequence[Group]) -> frozenset[str]:
        """Return the ids of the chosen groups."""
        left, found = self.limit, set()
        for group in sorted(groups, key=lambda group: prompt_rank(group.prompt.id)):
            tokens = sum(response.length for response in group.responses)
            if tokens <= left:
                found.add(group.id)
                left -= tokens
        return frozenset(found)


def prompt_rank(prompt_id: str) -> int:
    """Hash a prompt's id to its rank: whoever keeps only some prompts keeps those of smallest rank."""
    return int.from_bytes(hashlib.blake2b(prompt_id.encode("utf-8", "replace"), digest_size=8).digest(), "big")


def write_rollouts(
    folder: Path,
    step: int,
    groups: Sequence[Group],
    mean_entropy: MeanEntropy | None = None,
    *,
    memory_ahead: int = 0,
    tokens: TokenColumns | None = None,
) -> Path:
    """Write `folder`/rollouts/step_000123.parquet, one row per response, and return its path.

    Log-probs and entropies are means over the response's tokens, in nats; null where there is none.
    `mean_entropy` maps (group id, index in the group) to it. A run pushes both networks together, so the memory
    network's version is always the policy's and `memory_ahead`. `tokens` says which responses are written token by
    token, to `folder`/rollout_tokens/step_000123.parquet. The files of a step that is repeated after a resume are
    replaced. `docs/reference/metrics.md` describes the columns.

    Raises:
        UserError: a file cannot be written.
    """
    path = folder / ROLLOUTS / table_name(step)
    # Before the responses, so that whoever sees these has the tokens too.
    _write_tokens(folder / TOKENS / path.name, step, groups, tokens)
    rows = [*_rows(step, groups, mean_entropy or {}, memory_ahead)]
    with completed(path) as temporary:
        write_rows(rows, response_schema(), temporary, _COMPRESSION)
    return path


def table_name(step: int) -> str:
    """Return the name of a step's file, in either folder."""
    return f"step_{step:06d}.parquet"


def table_step(path: Path) -> int | None:
    """Return the step in a file's name; None where it is not one of ours."""
    number = path.name.removeprefix("step_").removesuffix(".parquet")
    return int(number) if number.isdecimal() and path.name.startswith("step_") else None


def _write_tokens(path: Path, step: int, groups: Sequence[Group], tokens: TokenColumns | None) -> None:
    chosen = tokens.chosen(groups) if tokens else frozenset()
    if tokens is None or not chosen:
        path.unlink(missing_ok=True)
        return
    rows = [
        {
            "step": step,
            "group_id": group.id,
            "index": index,
            "token_texts": [storable(text) for text in tokens.texts(response.completion.tokens.tolist())],
            "token_policy_logp": response.completion.policy_logp.tolist(),
        }
        for group in groups
        if group.id in chosen
        for index, response in enumerate(group.responses)
    ]
    with completed(path) as temporary:
        write_rows(rows, token_schema(), temporary, _COMPRESSION)


def read_table(path: Path, columns: Iterable[str]) -> pa.Table | None:
    """Read those `columns` that a step's file has; None where it is gone, by retention or a resume.

    Raises UserError for a damaged file, and for one of a newer version.
    """
    try:
        with parquet().ParquetFile(path) as file:
            read_table_stamp(path, "rollouts", file.schema_arrow.metadata)
            return file.read(columns=[name for name in columns if name in file.schema_arrow.names])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, arrow().ArrowException) as error:
        raise UserError(f"{path}: cannot read this table of responses ({reason_at(error, path)}); remove it") from error


def read_tokens(path: Path, groups: Collection[str]) -> dict[tuple[str, int], tuple[list[str], list[float]]]:
    """Read texts and log-probs of tokens, by group and number, of the step whose responses are at `path`.

    Responses of other groups than `groups`, and those whose tokens were not written or are gone, are not in it. Raises
    UserError as `read_table` does.
    """
    columns = token_schema().names
    table = read_table(path.parents[1] / TOKENS / path.name, columns)
    if table is None:
        # Format 1 (a2725ee, 2026-11-21, to e938716, 2026-11-24) has the columns of tokens among the others.
        table = read_table(path, columns)
    if table is None or "token_texts" not in table.column_names:
        return {}
    chosen = [place for place, group in enumerate(table["group_id"].to_pylist()) if group in groups]
    return {
        (row["group_id"], row["index"]): (row["token_texts"], row["token_policy_logp"])
        for row in table.take(chosen).to_pylist()
        if row["token_texts"] is not None and row["token_policy_logp"] is not None
    }


class TableRetention:
    """Removes the tables in a run's `folder` that `rules` no longer keep; `removed` counts them.

    A table is a file of its own and is removed whole, so a reader finds it or does not. The first call looks at the
    folders: the attempt before may have had other rules. Later calls know what has become old, and list nothing.
    """

    # Of one step: on a shared disk each may take a few milliseconds.
    MOST = 32

    def __init__(self, folder: Path, rules: RolloutTablesConfig) -> None:
        self._kinds = ((folder / ROLLOUTS, rules.keeps), (folder / TOKENS, rules.keeps_tokens))
        self._windows = [window for window in (rules.keep_last, rules.tokens_keep_last) if window is not None]
        self._old: deque[Path] | None = None
        self.removed = 0

    def written(self, newest: int) -> None:
        """Remove what is old now that step `newest` is written, a few files at a time. Raises OSError."""
        if self._old is None:
            self._old = deque(self._found(newest))
        else:
            self._old.extend(
                folder / table_name(step)
                for step in (newest - window for window in self._windows)
                for folder, keeps in self._kinds
                if not keeps(step, newest)
            )
        for _ in range(min(self.MOST, len(self._old))):
            with suppress(FileNotFoundError):
                self._old.popleft().unlink()
                self.removed += 1

    def _found(self, newest: int) -> list[Path]:
        return [
            path
            for folder, keeps in self._kinds
            if folder.is_dir()
            for path in sorted(folder.iterdir())
            if (step := table_step(path)) is not None and step <= newest and not keeps(step, newest)
        ]


def _rows(
    step: int, groups: Sequence[Group], mean_entropy: MeanEntropy, memory_ahead: int
) -> Iterator[dict[str, Cell]]:
    for group in groups:
        for index, response in enumerate(group.responses):
            completion, verdict = response.completion, response.verdict
            answer = verdict.canonical_answer
            yield {
                "step": step,
                "group_id": group.id,
                "index": index,
                "task": group.prompt.task,
                "prompt_id": group.prompt.id,
                "prompt": storable(group.prompt.text),
                "policy_version": group.policy_version,
                "text": storable(response.text),
                "length": response.policy_tokens,
                "outcome": verdict.outcome.value,
                "reward": verdict.reward,
                "canonical_answer": None if answer is None else storable(answer),
                "finish_reason": completion.finish_reason.value,
                "mean_sampler_logp": _mean(completion, completion.sampler_logp),
                "mean_policy_logp": _mean(completion, completion.policy_logp),
                "mean_memory_logp": _mean(completion, completion.memory_logp),
                "versions": _versions(completion, memory_ahead),
                "mean_entropy": mean_entropy.get((group.id, index)),
                "dropped_reason": group.dropped_reason,
                "begun_limit": group.begun_limit,
                "turns": len(response.turns) or None,
                "turn_places": turn_cells(response.turns),
            }


def _versions(completion: Completion, memory_ahead: int) -> list[Span]:
    with_memory = completion.memory_logp is not None
    return [
        {
            "start": span.start,
            "end": span.end,
            "policy": span.version,
            "memory": span.version + memory_ahead if with_memory else None,
        }
        for span in completion.version_spans
    ]


def _mean(completion: Completion, values_T: Tensor | None) -> float | None:
    own_T = None if values_T is None else completion.of_policy(values_T)
    return float(own_T.double().mean()) if own_T is not None and own_T.numel() else None


def storable(text: str) -> str:
    """Replace half a surrogate pair, which a model may emit, by a question mark: Parquet holds UTF-8 only."""
    return text.encode("utf-8", "replace").decode("utf-8")
