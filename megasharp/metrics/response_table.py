"""The table of a step's responses: one Parquet file per step with the texts, verdicts and log-probs of all responses.

`leave_pandas_out` keeps pyarrow from importing pandas, which tables of plain values do not need.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor

from megasharp.common.files import completed
from megasharp.common.records import Completion, Group, Response


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
    Nothing changes where pandas is imported already.
    """
    if "pandas" in sys.modules:
        return
    finder = _NoPandas()
    sys.meta_path.insert(0, finder)
    try:
        pa.array([])
    finally:
        sys.meta_path.remove(finder)


MeanEntropy = Mapping[tuple[str, int], float]

# Response tokens `[start, end)` and whose they are; `memory` is null where no memory network took part.
SPAN = pa.struct([("start", pa.int64()), ("end", pa.int64()), ("policy", pa.int64()), ("memory", pa.int64())])
SCHEMA = pa.schema(
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
        ("versions", pa.list_(SPAN)),
        ("mean_sampler_logp", pa.float64()),
        ("mean_policy_logp", pa.float64()),
        ("mean_memory_logp", pa.float64()),
        ("mean_entropy", pa.float64()),
        ("dropped_reason", pa.string()),
        ("token_texts", pa.list_(pa.string())),
        ("token_policy_logp", pa.list_(pa.float32())),
    ]
)

Span = dict[str, int | None]
Cell = str | int | float | list[Span] | list[str] | list[float] | None


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
    token; the two columns of the others are null. The file of a step that is repeated after a resume is replaced.
    `docs/metrics.md` describes the columns.

    Raises:
        UserError: the file cannot be written.
    """
    path = folder / "rollouts" / f"step_{step:06d}.parquet"
    chosen = tokens.chosen(groups) if tokens else frozenset()
    rows = []
    for group, response, row in _rows(step, groups, mean_entropy or {}, memory_ahead):
        cells: dict[str, Cell] = {"token_texts": None, "token_policy_logp": None}
        if tokens and group.id in chosen:
            texts = tokens.texts(response.completion.tokens.tolist())
            cells["token_texts"] = [storable(text) for text in texts]
            cells["token_policy_logp"] = response.completion.policy_logp.tolist()
        rows.append(row | cells)
    with completed(path) as temporary:
        pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), temporary)
    return path


def _rows(
    step: int, groups: Sequence[Group], mean_entropy: MeanEntropy, memory_ahead: int
) -> Iterator[tuple[Group, Response, dict[str, Cell]]]:
    for group in groups:
        for index, response in enumerate(group.responses):
            completion, verdict = response.completion, response.verdict
            answer = verdict.canonical_answer
            row: dict[str, Cell] = {
                "step": step,
                "group_id": group.id,
                "index": index,
                "task": group.prompt.task,
                "prompt_id": group.prompt.id,
                "prompt": storable(group.prompt.text),
                "policy_version": group.policy_version,
                "text": storable(response.text),
                "length": response.length,
                "outcome": verdict.outcome.value,
                "reward": verdict.reward,
                "canonical_answer": None if answer is None else storable(answer),
                "finish_reason": completion.finish_reason.value,
                "mean_sampler_logp": _mean(completion.sampler_logp),
                "mean_policy_logp": _mean(completion.policy_logp),
                "mean_memory_logp": _mean(completion.memory_logp),
                "versions": _versions(completion, memory_ahead),
                "mean_entropy": mean_entropy.get((group.id, index)),
                "dropped_reason": group.dropped_reason,
            }
            yield group, response, row


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


def _mean(values_T: Tensor | None) -> float | None:
    return float(values_T.double().mean()) if values_T is not None and values_T.numel() else None


def storable(text: str) -> str:
    """Replace half a surrogate pair, which a model may emit, by a question mark: Parquet holds UTF-8 only."""
    return text.encode("utf-8", "replace").decode("utf-8")
