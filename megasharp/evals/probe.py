"""A probe: the same responses read by every checkpoint, to see how the next-token distributions move under training.

The responses are sampled once, from the first weights that are evaluated, one to each of some of a suite's problems.
Every later checkpoint reads these texts, so that a position's candidates can be put side by side (2510.14807, figures
11 to 16); sampled texts would differ from the first token on. They do not depend on the run's seed: runs from one base
model have the same ones, and can be compared too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from megasharp.common.errors import UserError, reason_at
from megasharp.common.files import completed
from megasharp.common.formats import read_table_stamp, table_stamp
from megasharp.common.records import GenerateRequest, SamplingParams
from megasharp.evals.evaluate import Tokenizer, sample_seed
from megasharp.evals.suites import Suite
from megasharp.metrics.parquet import arrow, parquet, write_rows
from megasharp.rollout.inprocess.engine import Candidates
from megasharp.rollout.step_request import Engine
from megasharp.tasks.stream import read_prompt

if TYPE_CHECKING:
    import pyarrow as pa

FOLDER = "probe"
RESPONSES = "responses.parquet"
# Candidates are kept until they hold this mass, as in 2510.14807's figures: a few ranks always, never more than MOST.
MASS, FEWEST, MOST = 0.95, 8, 32
# A probe is to be cheap beside an evaluation, which samples each problem many times.
LONGEST = 512
_SEED = 0
_STAMP = table_stamp("probe")


@cache
def _response_schema() -> pa.Schema:
    """A row for each response that checkpoints read."""
    pa = arrow()
    return pa.schema(
        [
            ("suite", pa.string()),
            ("problem", pa.string()),
            ("prompt", pa.string()),
            ("prompt_tokens", pa.list_(pa.int64())),
            ("tokens", pa.list_(pa.int64())),
        ]
    )


@cache
def token_schema() -> pa.Schema:
    """A row for each token of them."""
    pa = arrow()
    return pa.schema(
        [
            ("response", pa.int32()),
            ("position", pa.int32()),
            ("token", pa.string()),
            ("logp", pa.float32()),
            ("rank", pa.int32()),
            ("entropy", pa.float32()),
            ("candidates", pa.list_(pa.string())),
            ("candidate_logp", pa.list_(pa.float32())),
        ]
    )


@runtime_checkable
class Scorer(Protocol):
    """An engine that scores a given text; `megasharp.rollout.inprocess.InProcessEngine` can."""

    def candidates(self, prompt: Sequence[int], response: Sequence[int], n: int) -> Candidates:
        """Return the `n` most probable tokens at each token of `response`, and its own log-prob, rank and entropy."""
        ...


class TokenNames(Protocol):
    """Token ids as single texts."""

    def token_texts(self, tokens: Sequence[int]) -> list[str]:
        """Return each token's own text."""
        ...


@dataclass(frozen=True, slots=True)
class ProbeResponse:
    """One fixed text: a problem's prompt and the response to it, in tokens."""

    suite: str
    problem: str
    prompt: str
    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]


def sample_responses(
    engine: Engine, suite: Suite, tokenizer: Tokenizer, *, count: int, max_tokens: int
) -> list[ProbeResponse]:
    """Sample one response at temperature 1 to each of `count` problems, evenly chosen, cut at LONGEST tokens.

    Raises UserError for what the engine refuses.
    """
    count = min(count, len(suite.items))
    items = [suite.items[place * len(suite.items) // count] for place in range(count)]
    prompts = [read_prompt(item, tokenizer) for item in items]
    requests = [
        GenerateRequest(prompt.tokens, (sample_seed(_SEED, item.id, 0),))
        for item, prompt in zip(items, prompts, strict=True)
    ]
    sampling = SamplingParams(min(max_tokens, LONGEST), stop_token_ids=tokenizer.stop_token_ids)
    sampled = engine.generate(requests, sampling)
    return [
        ProbeResponse(suite.name, item.id, prompt.text, prompt.tokens, tuple(completions[0].tokens.tolist()))
        for item, prompt, completions in zip(items, prompts, sampled, strict=True)
        if completions[0].tokens.numel()
    ]


def write_responses(folder: Path, responses: Sequence[ProbeResponse]) -> Path:
    """Write `folder`/responses.parquet. Raises UserError where it cannot be written."""
    path = folder / RESPONSES
    rows = [
        {
            "suite": one.suite,
            "problem": one.problem,
            "prompt": one.prompt.encode("utf-8", "replace").decode("utf-8"),
            "prompt_tokens": list(one.prompt_tokens),
            "tokens": list(one.tokens),
        }
        for one in responses
    ]
    with completed(path) as temporary:
        write_rows(rows, _response_schema().with_metadata(_STAMP), temporary)
    return path


def read_responses(folder: Path) -> list[ProbeResponse]:
    """Read what `write_responses` wrote; none where there is no file. Raises UserError for one that cannot be read."""
    path = folder / RESPONSES
    rows = read_table(path, _response_schema()).to_pylist() if path.exists() else []
    return [
        ProbeResponse(row["suite"], row["problem"], row["prompt"], tuple(row["prompt_tokens"]), tuple(row["tokens"]))
        for row in rows
    ]


def read_table(path: Path, schema: pa.Schema) -> pa.Table:
    """Read a probe's Parquet file.

    Raises UserError for one that is damaged, has not these columns, or is of a later release.
    """
    try:
        # Format 1 (ce3b3bc, 2026-11-22, to 255d13e, 2026-11-24) differs by having no `format`.
        read_table_stamp(path, "probe", parquet().read_schema(path).metadata)
        return parquet().read_table(path, schema=schema)
    except (OSError, arrow().ArrowException) as error:
        raise UserError(
            f"{path}: cannot be read ({reason_at(error, path)}); remove it, `megasharp probe` makes it"
        ) from error


def step_file(folder: Path, step: int) -> Path:
    """Return the file of the probe of the weights after `step`."""
    return folder / f"step_{step:06d}.parquet"


def probe(scorer: Scorer, names: TokenNames, responses: Sequence[ProbeResponse], path: Path) -> Path:
    """Let the present weights read `responses`; write a row per token to the Parquet file `path`.

    A row has the token's text, its log-prob in nats at temperature 1, the number of more probable tokens (`rank`), the
    distribution's entropy in nats, and the most probable tokens until they hold MASS of it (2510.14807, figures 11 to
    16). Raises UserError where the file cannot be written.
    """
    rows = [
        row
        for number, response in enumerate(responses)
        for row in _rows(number, response, scorer.candidates(response.prompt_tokens, response.tokens, MOST), names)
    ]
    with completed(path) as temporary:
        write_rows(rows, token_schema().with_metadata(_STAMP), temporary)
    return path


def _rows(number: int, response: ProbeResponse, found: Candidates, names: TokenNames) -> list[dict[str, object]]:
    # The first tokens that reach MASS together, the one that does included.
    mass_TN = found.topn_logp_TN.double().exp().cumsum(dim=-1)
    shown_T = ((mass_TN < MASS).sum(dim=-1) + 1).clamp(FEWEST, MOST).tolist()
    texts = _storable(names.token_texts(response.tokens))
    columns = zip(
        texts,
        found.logp_T.tolist(),
        found.rank_T.tolist(),
        found.entropy_T.tolist(),
        found.tokens_TN.tolist(),
        found.topn_logp_TN.tolist(),
        shown_T,
        strict=True,
    )
    return [
        {
            "response": number,
            "position": position,
            "token": text,
            "logp": logp,
            "rank": rank,
            "entropy": entropy,
            "candidates": _storable(names.token_texts(tokens[:shown])),
            "candidate_logp": logps[:shown],
        }
        for position, (text, logp, rank, entropy, tokens, logps, shown) in enumerate(columns)
    ]


def _storable(texts: Sequence[str]) -> list[str]:
    return [text.encode("utf-8", "replace").decode("utf-8") for text in texts]
