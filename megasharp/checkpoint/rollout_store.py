"""The files of a checkpoint with sampled tokens.

One has the responses to prompts that no step has trained on yet. The other has those that the memory network of DLC
learns again; it belongs to the checkpoint's format and has no number of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megasharp.common.formats import read_table_stamp, table_stamp
from megasharp.common.records import (
    Completion,
    Episode,
    FinishReason,
    Outcome,
    Sampled,
    Turn,
    Verdict,
    VersionSpan,
    dtype_name,
)
from megasharp.metrics.parquet import arrow, parquet, write_rows
from megasharp.rollout.in_flight import SampledWith, Unfinished

if TYPE_CHECKING:
    import pyarrow as pa

FILE = "rollouts.parquet"
REPLAY_FILE = "replay.parquet"


# Of a turn of an episode, and of the verdict of one that has ended.
_PLACES = ("start", "end", "until")
_VERDICT = ("outcome", "canonical_answer", "detail")


@cache
def _unfinished_schema() -> pa.Schema:
    """One row for each response, in order; `tokens` and all that belongs to them are null before the first token."""
    pa = arrow()
    # Exactly the dtype of a Completion: a resumed run must get back every bit.
    logp = pa.list_(pa.float32())
    # Megabytes a response, which as lists of numbers would be Python objects of 30 times the size.
    experts = pa.struct([("dtype", pa.string()), ("shape", pa.list_(pa.int64())), ("bytes", pa.large_binary())])
    span = pa.struct([(name, pa.int64()) for name in ("version", "start", "end")])
    return pa.schema(
        [
            ("epoch", pa.int64()),
            ("position", pa.int64()),
            ("open", pa.bool_()),
            ("max_tokens", pa.int64()),
            ("with_memory", pa.bool_()),
            ("begun_limit", pa.int64()),
            ("tokens", pa.list_(pa.int32())),
            ("sampler_logp", logp),
            ("policy_logp", logp),
            ("memory_logp", logp),
            ("argmax_moved", pa.list_(pa.bool_())),
            ("calibration_kl", logp),
            ("version_spans", pa.list_(span)),
            ("finish_reason", pa.string()),
            ("seed", pa.int64()),
            ("turns", pa.list_(pa.struct([*((name, pa.int64()) for name in _PLACES), ("reward", pa.float64())]))),
            ("verdict", pa.struct([(name, pa.string()) for name in _VERDICT] + [("reward", pa.float64())])),
            ("cut", pa.bool_()),
            ("failure", pa.string()),
            ("experts", experts),
        ]
    )


@cache
def _replay_schema() -> pa.Schema:
    """One row for each group."""
    pa = arrow()
    return pa.schema(
        [
            ("step", pa.int64()),
            ("group_id", pa.string()),
            ("prompt", pa.list_(pa.int32())),
            ("responses", pa.list_(pa.list_(pa.int32()))),
            ("observed", pa.list_(pa.list_(pa.list_(pa.int32())))),
        ]
    )


def write_unfinished(folder: Path, prompts: Sequence[Unfinished]) -> None:
    """Write them into `folder`; no file where no response has a token, or without pyarrow. Raises OSError.

    Without it a run is on-policy, and a save that was asked for amid a step has that step sampled anew.
    """
    sampled = any(response is not None for prompt in prompts for response in prompt.responses)
    if not sampled or find_spec("pyarrow") is None:
        return
    rows = [row for prompt in prompts for row in _rows(prompt)]
    schema = _unfinished_schema().with_metadata(table_stamp("unfinished rollouts"))
    write_rows(rows, schema, folder / FILE, "zstd")


def read_unfinished(folder: Path) -> tuple[Unfinished, ...]:
    """Read what `write_unfinished` wrote, in its order; nothing where there is no file.

    Raises UserError for a file of a later release.
    """
    path = folder / FILE
    if not path.is_file():
        return ()
    # Format 1 (d7f7a60, 2026-11-22, to 255d13e, 2026-11-24) differs by having no `format`.
    read_table_stamp(path, "unfinished rollouts", parquet().read_schema(path).metadata)
    prompts = []
    rows = parquet().read_table(path, schema=_unfinished_schema()).to_pylist()
    for place, group in groupby(rows, lambda row: (row["epoch"], row["position"])):
        own = list(group)
        limit, memory, begun = own[0]["max_tokens"], own[0]["with_memory"], own[0]["begun_limit"]
        prompts.append(
            Unfinished(
                *place,
                responses=tuple(None if row["tokens"] is None else _completion(row) for row in own),
                open=tuple(index for index, row in enumerate(own) if row["open"]),
                sampled_with=SampledWith(limit, bool(memory), begun) if isinstance(limit, int) else None,
            )
        )
    return tuple(prompts)


def write_replay(folder: Path, steps: Sequence[Sequence[Sampled]]) -> None:
    """Write the groups of some training steps, the oldest first; no file without any. Raises OSError."""
    if not steps:
        return
    rows = [
        {
            "step": number,
            "group_id": group.group_id,
            "prompt": group.prompt.tolist(),
            "responses": [response.tolist() for response in group.responses],
            "observed": [[list(place) for place in places] for places in group.observed],
        }
        for number, groups in enumerate(steps)
        for group in groups
    ]
    write_rows(rows, _replay_schema(), folder / REPLAY_FILE, "zstd")


def read_replay(folder: Path) -> list[list[Sampled]]:
    """Read what `write_replay` wrote; nothing where there is no file."""
    if not (folder / REPLAY_FILE).is_file():
        return []
    rows = parquet().read_table(folder / REPLAY_FILE, schema=_replay_schema()).to_pylist()

    def tokens(row: list[int]) -> Tensor:
        return torch.tensor(row, dtype=torch.int32)

    def sampled(row: dict[str, Any]) -> Sampled:
        observed = tuple(tuple((start, end) for start, end in places) for places in row["observed"] or ())
        return Sampled(row["group_id"], tokens(row["prompt"]), tuple(map(tokens, row["responses"])), observed)

    return [[sampled(row) for row in step] for _, step in groupby(rows, lambda row: row["step"])]


def _rows(prompt: Unfinished) -> Iterator[dict[str, Any]]:
    used = prompt.sampled_with
    for index, response in enumerate(prompt.responses):
        row: dict[str, Any] = {
            "epoch": prompt.epoch,
            "position": prompt.position,
            "open": index in prompt.open,
            "max_tokens": None if used is None else used.max_tokens,
            "with_memory": None if used is None else used.memory,
            "begun_limit": None if used is None else used.begun,
        }
        if response is not None:
            spans = [{"version": span.version, "start": span.start, "end": span.end} for span in response.version_spans]
            row |= {
                "tokens": response.tokens.tolist(),
                "sampler_logp": _floats(response.sampler_logp),
                "policy_logp": _floats(response.policy_logp),
                "memory_logp": _floats(response.memory_logp),
                "argmax_moved": None if response.argmax_moved is None else response.argmax_moved.tolist(),
                "calibration_kl": _floats(response.calibration_kl),
                "version_spans": spans,
                "finish_reason": response.finish_reason.value,
                "seed": response.seed,
                **_episode_cells(response.episode),
                "experts": _array(response.experts),
            }
        yield row


def _episode_cells(episode: Episode | None) -> dict[str, Any]:
    if episode is None:
        return {}
    verdict = episode.verdict
    return {
        "cut": episode.cut,
        "failure": episode.failure,
        "turns": [{name: getattr(turn, name) for name in (*_PLACES, "reward")} for turn in episode.turns],
        "verdict": None
        if verdict is None
        else {
            "outcome": verdict.outcome.value,
            "canonical_answer": verdict.canonical_answer,
            "detail": verdict.detail,
            "reward": verdict.reward,
        },
    }


def _episode(row: dict[str, Any]) -> Episode | None:
    if row["turns"] is None:
        return None
    found = row["verdict"]
    verdict = None
    if found is not None:
        verdict = Verdict(Outcome(found["outcome"]), found["reward"], found["canonical_answer"], found["detail"])
    return Episode(tuple(Turn(**turn) for turn in row["turns"]), verdict, bool(row["cut"]), row["failure"] or "")


def _floats(values_T: Tensor | None) -> list[float] | None:
    assert values_T is None or values_T.dtype is torch.float32, "the file would round them"
    return None if values_T is None else values_T.tolist()


def _array(values: Tensor | None) -> dict[str, Any] | None:
    if values is None:
        return None
    return {
        "dtype": dtype_name(values.dtype),
        "shape": list(values.shape),
        "bytes": values.contiguous().numpy().tobytes(),
    }


def _tensor(cell: dict[str, Any] | None) -> Tensor | None:
    """Return what `_array` wrote."""
    if cell is None:
        return None
    dtype = {"uint8": torch.uint8, "int16": torch.int16}[cell["dtype"]]
    if not cell["bytes"]:
        return torch.empty(cell["shape"], dtype=dtype)
    return torch.frombuffer(bytearray(cell["bytes"]), dtype=dtype).reshape(cell["shape"])


def _completion(row: dict[str, Any]) -> Completion:
    def tensor(name: str, dtype: torch.dtype) -> Tensor | None:
        return None if row[name] is None else torch.tensor(row[name], dtype=dtype)

    def present(name: str, dtype: torch.dtype) -> Tensor:
        return torch.tensor(row[name], dtype=dtype)

    spans, seed, episode = row["version_spans"], row["seed"], _episode(row)
    assert isinstance(spans, list) and isinstance(seed, int)
    return Completion(
        tokens=present("tokens", torch.int64),
        sampler_logp=present("sampler_logp", torch.float32),
        policy_logp=present("policy_logp", torch.float32),
        memory_logp=tensor("memory_logp", torch.float32),
        version_spans=tuple(VersionSpan(**span) for span in spans),
        finish_reason=FinishReason(str(row["finish_reason"])),
        seed=seed,
        argmax_moved=tensor("argmax_moved", torch.bool),
        calibration_kl=tensor("calibration_kl", torch.float32),
        cause="" if episode is None else episode.failure,
        episode=episode,
        experts=_tensor(row["experts"]),
    )
