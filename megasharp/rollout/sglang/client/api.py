"""The HTTP API of one SGLang server, as far as megasharp uses it: typed, with time limits and the run's key.

Sampling is asynchronous, as thousands of responses are under way at once; all other calls block.

Three kinds of outcome, never mixed: a value; `Refused`, where the engine answered that it will not do it (SGLang says
so in the body, often with status 200 or 400); and an exception, `EngineFailed` or `EngineSlow`, where the engine did
not do its part at all.

The translation of generation comes first: a request as SGLang's JSON, and its answer as Completions.
"""

from __future__ import annotations

import asyncio
import base64
import http.client
import io
import json
import math
import pickle
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from megasharp.common.errors import UserError, one_line
from megasharp.common.records import Completion, FinishReason, GenerateRequest, Routing, SamplingParams, VersionSpan
from megasharp.config.rollout import InFlight
from megasharp.rollout.sglang.bucket import Entry
from megasharp.rollout.sglang.identity import FIELD as IDENTITY
from megasharp.rollout.sglang.routed_experts import decode

Json = Mapping[str, Any]
# A version that nobody wants: of weights that another run pushed.
FOREIGN = -2
FOREIGN_WEIGHTS = "holds weights that another run pushed (an engine serves one run at a time)"
# SGLang's version label of the weights that an engine started with.
_INITIAL_VERSION = "default"
# SGLang's name of the experts that a request's tokens went to.
_EXPERTS = "routed_experts"
_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}


class MalformedAnswer(Exception):
    """An engine answered with something that is not what its API promises."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds that an engine gives each response: to its first token, and from there to its end."""

    first_token_s: float
    response_s: float


def generate_body(
    request: GenerateRequest,
    sampling: SamplingParams,
    ids: Sequence[str],
    limits: Limits | None = None,
    *,
    with_experts: bool = False,
) -> dict[str, Any]:
    """The body of POST /generate for one sample of a prompt for each seed; `ids` name them for an abort.

    Seeds count only where the engine is in its deterministic mode. Tokens begun earlier are, to the engine, the end of
    the prompt; it learns their number, so that it draws what it would have drawn without the interruption.
    """
    begun = request.begun or ((),) * len(request.seeds)
    asked = {"return_routed_experts": True} if with_experts else {}
    return {
        "rid": list(ids),
        "input_ids": [[*request.tokens, *tokens] for tokens in begun],
        "sampling_params": [
            {**_sampling(sampling, len(tokens), limits), "sampling_seed": seed}
            for seed, tokens in zip(request.seeds, begun, strict=True)
        ],
        "return_logprob": True,
        **asked,
        "stream": False,
    }


def _sampling(sampling: SamplingParams, begun: int, limits: Limits | None) -> dict[str, Any]:
    """SGLang's names; its top_k is -1 where ours is 0. Custom parameters are numbers only."""
    fields: dict[str, Any] = {
        "max_new_tokens": sampling.max_tokens - begun,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "stop_token_ids": list(sampling.stop_token_ids),
        "skip_special_tokens": False,
    }
    if sampling.min_p:
        fields["min_p"] = sampling.min_p
    if sampling.stop:
        fields["stop"] = list(sampling.stop)
    custom: dict[str, float] = {"begun": begun} if begun else {}
    if sampling.record_top is not None:
        custom["candidates"] = sampling.record_top
    if sampling.memory_mu is not None:
        custom["mu"] = float(sampling.memory_mu)
        if sampling.plausible is not None:
            forms = {"plausible_min_p": sampling.plausible.min_p, "plausible_top_k": sampling.plausible.top_k}
            custom |= {name: value for name, value in forms.items() if value is not None}
    if limits is not None:
        custom |= {"first_token_s": limits.first_token_s, "response_s": limits.response_s}
    return {**fields, "custom_params": custom} if custom else fields


def completions(
    answer: object,
    seeds: Sequence[int],
    sampling: SamplingParams,
    owner: str = "",
    experts: Routing | None = None,
) -> list[Completion]:
    """Parse the answer to `generate_body`, in the order of `seeds`; the weights must be `owner`'s.

    `experts` describes those that were asked for.

    Raises MalformedAnswer for an answer that is none, UserError where a network's log-probs are not finite.
    """
    if not isinstance(answer, list) or len(answer) != len(seeds):
        raise MalformedAnswer(f"asked for {len(seeds)} samples, got {str(answer)[:200]}")
    try:
        return [_completion(item, seed, sampling, owner, experts) for item, seed in zip(answer, seeds, strict=True)]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise MalformedAnswer(f"{type(error).__name__}: {error}") from error


def _completion(item: Json, seed: int, sampling: SamplingParams, owner: str, experts: Routing | None) -> Completion:
    meta: Json = item["meta_info"]
    tokens = torch.tensor(item["output_ids"], dtype=torch.int64)
    count = tokens.numel()
    finish = _FINISH[meta["finish_reason"]["type"]]
    needed = _needed(sampling) | (set() if experts is None else {_EXPERTS})
    if finish is FinishReason.ABORT and (not count or needed - meta.keys()):
        # Aborted while it waited to be computed, or computed again: SGLang then answers without our numbers.
        return Completion.unsampled(seed, sampling)
    standard = [pair[0] for pair in meta.get("output_token_logprobs") or []]
    spans = tuple(_spans(meta, count, owner))
    version = spans[-1].version if spans else -1
    with_memory = sampling.memory_mu is not None
    # SGLang's own log-prob is the policy's at the temperature: the sampler's only where nothing changed the logits.
    sampler = meta["sampler_logprob"] if with_memory or sampling.truncates else meta.get("sampler_logprob", standard)
    policy = meta["policy_logprob"] if with_memory else meta.get("policy_logprob", standard)
    return Completion(
        tokens=tokens,
        policy_logp=_logp("the policy's", policy, count, version),
        memory_logp=_logp("the memory network's", meta["memory_logprob"], count, version) if with_memory else None,
        sampler_logp=_logp("the sampler's", sampler, count, version),
        version_spans=spans,
        finish_reason=finish,
        seed=seed,
        argmax_moved=_numbers(meta["argmax_moved"], count).bool() if with_memory else None,
        calibration_kl=_numbers(meta["calibration_kl"], count) if with_memory else None,
        entropy=None if sampling.record_top is None else _numbers(meta["policy_entropy"], count),
        top_logp=None if sampling.record_top is None else _candidates(meta, count, sampling.record_top),
        # The last token was not fed.
        experts=None if experts is None else decode(experts, meta[_EXPERTS], int(meta["prompt_tokens"]) + count - 1),
    )


def _needed(sampling: SamplingParams) -> set[str]:
    """Name the numbers that an answer must hold for each token beyond SGLang's own."""
    candidates = set() if sampling.record_top is None else {"policy_entropy"}
    if sampling.memory_mu is not None:
        return candidates | {"sampler_logprob", "policy_logprob", "memory_logprob", "argmax_moved", "calibration_kl"}
    return candidates | ({"sampler_logprob"} if sampling.truncates else set())


def _logp(whose: str, values: Sequence[float | None], count: int, version: int) -> Tensor:
    """Float32 [T]; JSON has no NaN, so SGLang sends null for it."""
    if len(values) != count:
        raise ValueError(f"{count} tokens with {len(values)} of {whose} log-probs")
    if any(value is None or not math.isfinite(value) for value in values):
        raise UserError(
            f"{whose} logits are not finite (weights version {version}); "
            "resume from an earlier checkpoint with a lower learning rate"
        )
    return torch.tensor(values, dtype=torch.float32)


def _numbers(values: Sequence[float], count: int) -> Tensor:
    """Float32 [T]."""
    if len(values) != count:
        raise ValueError(f"{count} tokens with {len(values)} numbers of how they were drawn")
    return torch.tensor(values, dtype=torch.float32)


def _candidates(meta: Json, count: int, most: int) -> Tensor:
    """Float32 [T, N]; N is smaller than `most` where the vocabulary is."""
    names = [name for rank in range(1, most + 1) if (name := f"candidate_logprob_{rank}") in meta]
    return torch.stack([_numbers(meta[name], count) for name in names], dim=1)


def _spans(meta: Json, count: int, owner: str) -> list[VersionSpan]:
    """Read which of `owner`'s versions sampled which tokens; a span past the last token is cut."""
    named = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": count}]
    labels = [WeightLabel.parse(each["version"]) for each in named]
    if not all(label.belongs_to(owner) for label in labels):
        raise ValueError(f"it {FOREIGN_WEIGHTS}")
    spans = [
        VersionSpan(label.version, int(each["start"]), min(int(each["end"]), count))
        for label, each in zip(labels, named, strict=True)
    ]
    return [span for span in spans if span.start < span.end]


@dataclass(frozen=True, slots=True)
class WeightLabel:
    """SGLang's label of an engine's weights: their version as the run counts it, -1 for those it started with.

    An engine that others started may serve another run: there the label names the run's process too, `7@a1b2c3`.
    """

    version: int
    owner: str = ""

    @classmethod
    def parse(cls, name: object) -> WeightLabel:
        """Read a label. Raises ValueError for one that is not ours."""
        if name == _INITIAL_VERSION:
            return cls(-1)
        version, _, owner = str(name).partition("@")
        return cls(int(version), owner)

    def __str__(self) -> str:
        return f"{self.version}@{self.owner}" if self.owner else str(self.version)

    def belongs_to(self, owner: str) -> bool:
        """Return True unless another one pushed these weights."""
        return self.version == -1 or self.owner == owner


# The function in the engine that reads a bucket file; the server lists it among its --custom-weight-loader.
BUCKET_LOADER = "megasharp.rollout.sglang.engine.receive.load_bucket"
# Kinds of device memory that an engine can release while it sleeps, by SGLang's names.
Memory = Literal["weights", "kv_cache"]
# A call that moves no weights.
CONTROL_S = 60.0
_FLUSH_S = 20.0
_FLUSH_AGAIN_S = 0.1
# Bad request, too large, not processable: the request is at fault, not the engine.
_REFUSALS = (400, 413, 422)
_BUFFER = 2**20


class EngineFailed(Exception):
    """The engine cannot be reached, hung up, or answered with an error of its own."""


class EngineSlow(EngineFailed):
    """The engine did not answer within the time limit."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The engine works but will not do what it was asked, and says why."""

    message: str


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    text: str

    def json(self) -> Any:
        """The body; raises EngineFailed where it is no JSON."""
        try:
            return json.loads(self.text)
        except ValueError as error:
            raise EngineFailed(f"the answer is no JSON: {self.text[:200]!r}") from error


@dataclass(frozen=True, slots=True)
class Room:
    """An engine's room: prompts shorter than `prompt`, and at once so many responses, of so many tokens."""

    prompt: int
    responses: int
    tokens: int


class _Received:
    """An answer that came whole, as the standard library's parser reads it: from a socket."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def makefile(self, *_: object) -> io.BytesIO:
        return io.BytesIO(self._raw)


@dataclass(frozen=True, slots=True)
class GroupSeat:
    """An engine's place in a group: it joins at `host`:`port`, with its ranks from `offset` on, of `world`."""

    name: str
    backend: str
    host: str
    port: int
    offset: int
    world: int


@dataclass(frozen=True, slots=True)
class EngineApi:
    """One server. Every call may raise EngineFailed or EngineSlow.

    Limits are in seconds; each holds for connecting and for each wait for data. Weights that it brings are labelled
    with `owner`, and only such ones are taken for ours.
    """

    host: str
    port: int
    key: str
    owner: str = ""

    def healthy(self, limit: float) -> bool:
        """Return True where the server answers and its scheduler is alive (if idle, it samples a token).

        Raises EngineFailed where it cannot be reached, EngineSlow where it sends nothing for `limit` seconds.
        """
        return self._call("GET", "/health", None, limit).status == 200

    def version(self, limit: float = CONTROL_S) -> int:
        """Return the weights' version that the server serves; -1 for those it started with, FOREIGN for another's.

        Raises EngineFailed where the engine fails or names no version of ours, EngineSlow where it sends nothing for
        `limit` seconds.
        """
        label = self.label(limit)
        return label.version if label.belongs_to(self.owner) else FOREIGN

    def label(self, limit: float = CONTROL_S) -> WeightLabel:
        """Return the label of the weights that the server serves; raises as `version` does."""
        info = self._json("GET", "/model_info", None, limit)
        try:
            return WeightLabel.parse(info["weight_version"])
        except (KeyError, TypeError, ValueError) as error:
            raise EngineFailed(f"/model_info names no weights version we know: {str(info)[:200]}") from error

    def room(self, limit: float = CONTROL_S) -> Room:
        """Return what the server can take, summed over its data-parallel ranks.

        Raises EngineFailed where the engine fails or does not say, EngineSlow where it sends nothing for `limit`
        seconds.
        """
        info = self._json("GET", "/server_info", None, limit)
        try:
            # One scheduler a rank, and equal caches; `max_running_requests` above them is the flag, often null.
            ranks = info["internal_states"]
            responses = sum(int(rank["effective_max_running_requests_per_dp"]) for rank in ranks)
            return Room(int(info["max_req_input_len"]), responses, len(ranks) * int(info["max_total_num_tokens"]))
        except (KeyError, TypeError, ValueError) as error:
            raise EngineFailed(f"/server_info does not say what the engine can take: {str(info)[:200]}") from error

    def identity(self, limit: float) -> Mapping[str, Any] | None:
        """Return what the server says of itself (`rollout.sglang.identity`); None where it is no engine of ours.

        Raises EngineFailed where the engine fails, EngineSlow where it sends nothing for `limit` seconds.
        """
        info = self._json("GET", "/server_info", None, limit)
        states = info.get("internal_states") if isinstance(info, dict) else None
        found = states[0].get(IDENTITY) if states and isinstance(states[0], dict) else None
        return found if isinstance(found, dict) else None

    def cache_size(self, limit: float = CONTROL_S) -> int | None:
        """Return the number of tokens for which the server's cache has room; None where it does not say.

        Raises EngineFailed where the engine fails, EngineSlow where it sends nothing for `limit` seconds.
        """
        size = self._json("GET", "/server_info", None, limit).get("max_total_num_tokens")
        return int(size) if isinstance(size, int) else None

    async def generate(
        self,
        request: GenerateRequest,
        sampling: SamplingParams,
        ids: Sequence[str],
        limit: float,
        limits: Limits | None = None,
        experts: Routing | None = None,
    ) -> list[Completion] | Refused:
        """Sample one prompt once for each seed; `ids` are the samples' names for `abort`. The engine keeps `limits`.

        With `experts`, which describes them, the experts of all tokens come along.

        Returns Refused where the prompt is at fault. Raises EngineFailed where the engine fails or its answer is
        malformed, EngineSlow where it has not answered in `limit` seconds, UserError where log-probs are not finite.
        """
        body = generate_body(request, sampling, ids, limits, with_experts=experts is not None)
        answer = await self._post("/generate", body, limit)
        if answer.status in _REFUSALS:
            return Refused(_message(answer))
        self._expect_success(answer)

        def parsed() -> list[Completion]:
            try:
                return completions(answer.json(), request.seeds, sampling, self.owner, experts)
            except MalformedAnswer as error:
                raise EngineFailed(f"/generate: {error}") from error

        # Megabytes, where responses are long: others are answered meanwhile.
        return await asyncio.to_thread(parsed)

    async def read(self, tokens: Sequence[int], sampling: SamplingParams, name: str, limit: float) -> Refused | None:
        """Compute a prompt's cache, for samples that `generate` is asked for afterwards; `name` is for `abort`.

        Returns Refused where the prompt is at fault.
        Raises EngineFailed where the engine fails, EngineSlow where it has not answered in `limit` seconds.
        """
        # With a memory network's mu, if there is one: what is cached is both networks'.
        body = generate_body(GenerateRequest(tuple(tokens), (0,)), replace(sampling, max_tokens=0), (name,))
        answer = await self._post("/generate", body, limit)
        if answer.status in _REFUSALS:
            return Refused(_message(answer))
        self._expect_success(answer)
        return None

    async def abort(self, name: str | None = None) -> None:
        """End this sample, or without a name all that the engine has; they are answered with what they have.

        Raises EngineFailed where the engine fails, EngineSlow where it has not answered in `CONTROL_S` seconds.
        """
        body = {"abort_all": True} if name is None else {"rid": name}
        self._expect_success(await self._post("/abort_request", body, CONTROL_S))

    def pause(self, mode: InFlight, limit: float = CONTROL_S) -> Refused | None:
        """Stop sampling: requests in flight lose their key-value cache (retract) or keep it (in_place).

        Returns Refused where the engine will not.
        Raises EngineFailed where the engine fails, EngineSlow where it sends nothing for `limit` seconds.
        """
        return self._do("/pause_generation", {"mode": mode}, limit)

    def proceed(self, limit: float = CONTROL_S) -> Refused | None:
        """Undo `pause`.

        Returns Refused where the engine will not.
        Raises EngineFailed where the engine fails, EngineSlow where it sends nothing for `limit` seconds.
        """
        # Emptying the allocator's cache asks for CUDA.
        return self._do("/continue_generation", {"torch_empty_cache": False}, limit)

    def flush(self, limit: float = CONTROL_S) -> Refused | None:
        """Forget every cached prefix; requests that have just ended are waited for, paused ones may be there.

        Returns Refused where the engine still will not after 20 seconds.
        Raises EngineFailed where the engine fails, EngineSlow where it sends nothing for `limit` seconds.
        """
        # Not with a time limit of the server's own: then it would wait for the paused ones too, which never end.
        deadline = time.monotonic() + _FLUSH_S
        while (refused := self._do("/flush_cache", {}, limit)) is not None and time.monotonic() < deadline:
            time.sleep(_FLUSH_AGAIN_S)
        return refused

    def release(self, kinds: Sequence[Memory]) -> None:
        """Free this memory of the device; the engine must be idle, and its contents are lost.

        Raises EngineFailed where the engine fails, EngineSlow where it sends nothing for `CONTROL_S` seconds.
        """
        self._expect_success(self._call("POST", "/release_memory_occupation", {"tags": list(kinds)}, CONTROL_S))

    def resume(self, kinds: Sequence[Memory]) -> None:
        """Take this memory again; weights must be pushed before they are used.

        Raises EngineFailed where the engine fails, EngineSlow where it sends nothing for `CONTROL_S` seconds.
        """
        self._expect_success(self._call("POST", "/resume_memory_occupation", {"tags": list(kinds)}, CONTROL_S))

    def begin_update(self, limit: float = CONTROL_S) -> Refused | None:
        """Open a weight update: tensors sent outside one are refused.

        Returns Refused where the engine will not.
        Raises EngineFailed where the engine fails, EngineSlow where it sends nothing for `limit` seconds.
        """
        return self._do("/begin_weight_update", {}, limit)

    def end_update(self, limit: float) -> Refused | None:
        """Close the weight update.

        Returns Refused where the engine will not.
        Raises EngineFailed where the engine fails, EngineSlow where it sends nothing for `limit` seconds.
        """
        return self._do("/end_weight_update", {}, limit)

    def load_file(self, path: Path, ranks: int, limit: float) -> Refused | None:
        """Load a file of `rollout.sglang.bucket` that the engine's machine can read, on each of its `ranks`.

        Returns Refused where the engine will not.
        Raises EngineFailed where the engine fails, EngineSlow where it sends nothing for `limit` seconds.
        """
        return self._load([_payload([("file", AsBytes(str(path)))])] * ranks, None, limit)

    def load_lent(self, ranks: Sequence[Sequence[tuple[str, str]]], limit: float) -> Refused | None:
        """Load weights from memory that their sender shares: texts for each rank, named as `engine.receive` has it.

        Returns Refused where the engine will not.
        Raises EngineFailed where the engine fails, EngineSlow where it sends nothing for `limit` seconds.
        """
        payloads = [_payload([(kind, AsBytes(text)) for kind, text in texts]) for texts in ranks]
        return self._load(payloads, None, limit)

    def announce(self, header: str, ranks: int, limit: float, version: int | None = None) -> Refused | None:
        """Say by its header what the next broadcast brings; one without tensors closes the push.

        `version` labels the weights from now on; None leaves the label. Returns Refused where the engine will not.
        Raises EngineFailed where the engine fails, EngineSlow where it sends nothing for `limit` seconds.
        """
        return self._load([_payload([("announced", AsBytes(header))])] * ranks, version, limit)

    def _labelled(self, body: dict[str, Any], version: int | None) -> dict[str, Any]:
        return body if version is None else {**body, "weight_version": str(WeightLabel(version, self.owner))}

    def _load(self, payloads: Sequence[str], version: int | None, limit: float) -> Refused | None:
        body = {"serialized_named_tensors": list(payloads), "load_format": BUCKET_LOADER, "flush_cache": False}
        return self._do("/update_weights_from_tensor", self._labelled(body, version), limit)

    def join_group(self, seat: GroupSeat, limit: float) -> Refused | None:
        """Have every rank of the engine join a group for broadcasts; returns when all of the group have come.

        Returns Refused where the engine will not.
        Raises EngineFailed where the engine fails, EngineSlow where it sends nothing for `limit` seconds.
        """
        body = {
            "master_address": seat.host,
            "master_port": seat.port,
            "rank_offset": seat.offset,
            "world_size": seat.world,
            "group_name": seat.name,
            "backend": seat.backend,
        }
        return self._do("/init_weights_update_group", body, limit)

    def leave_group(self, name: str, limit: float) -> Refused | None:
        """Have every rank leave a group; refused where it is in none of that name.

        Returns Refused where the engine will not.
        Raises EngineFailed where the engine fails, EngineSlow where it sends nothing for `limit` seconds.
        """
        return self._do("/destroy_weights_update_group", {"group_name": name}, limit)

    def receive_broadcast(self, entries: Sequence[Entry], group: str, limit: float) -> Refused | None:
        """Take part in one broadcast of the group, and load its tensors; they must have been announced.

        Returns Refused where the engine will not.
        Raises EngineFailed where the engine fails, EngineSlow where it sends nothing for `limit` seconds.
        """
        body = {
            "names": [entry.name for entry in entries],
            "dtypes": [entry.dtype for entry in entries],
            "shapes": [list(entry.shape) for entry in entries],
            "group_name": group,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        return self._do("/update_weights_from_distributed", body, limit)

    def checksums(self, limit: float) -> list[dict[str, str]] | Refused:
        """Return a checksum of every whole tensor by its name, as each rank has it.

        Returns Refused where the engine will not.
        Raises EngineFailed where the engine fails, EngineSlow where it sends nothing for `limit` seconds.
        """
        answer = self._call("POST", "/weights_checker", {"action": "checksum"}, limit)
        if answer.status == 400:
            return Refused(_message(answer))
        self._expect_success(answer)
        try:
            return [dict(rank["checksums"]) for rank in answer.json()["ranks"]]
        except (KeyError, TypeError, ValueError) as error:
            raise EngineFailed(f"/weights_checker names no checksums: {answer.text[:200]}") from error

    def load_folder(self, folder: Path, version: int, limit: float) -> Refused | None:
        """Load all weights from a Hugging Face folder that the engine's machine can read.

        Returns Refused where the engine will not.
        Raises EngineFailed where the engine fails, EngineSlow where it sends nothing for `limit` seconds.
        """
        body: dict[str, Any] = {"model_path": str(folder), "flush_cache": False}
        return self._do("/update_weights_from_disk", self._labelled(body, version), limit)

    def _do(self, path: str, body: object, limit: float) -> Refused | None:
        """A call whose answer says whether it succeeded; None where it did."""
        answer = self._call("POST", path, body, limit)
        if answer.status == 400:
            return Refused(_message(answer))
        self._expect_success(answer)
        # SGLang reports some failures in the body of a success.
        try:
            said = json.loads(answer.text)
        except ValueError:
            return None
        return Refused(_message(answer)) if isinstance(said, dict) and said.get("success") is False else None

    def _json(self, method: str, path: str, body: object, limit: float) -> Any:
        answer = self._call(method, path, body, limit)
        self._expect_success(answer)
        return answer.json()

    def _expect_success(self, answer: _Answer) -> None:
        if answer.status != 200:
            raise EngineFailed(f"status {answer.status}: {_message(answer)}")

    async def _post(self, path: str, body: object, limit: float) -> _Answer:
        """As `_call`, with a limit for the whole of it, and without a thread of its own."""
        data = json.dumps(body).encode()
        fields = {"Host": f"{self.host}:{self.port}", "Authorization": f"Bearer {self.key}"}
        fields |= {"Content-Type": "application/json", "Content-Length": str(len(data)), "Connection": "close"}
        head = "".join(
            [f"POST {path} HTTP/1.1\r\n", *(f"{name}: {value}\r\n" for name, value in fields.items()), "\r\n"]
        )
        try:
            async with asyncio.timeout(limit):
                reader, writer = await asyncio.open_connection(self.host, self.port, limit=_BUFFER)
                try:
                    writer.write(head.encode("ascii") + data)
                    await writer.drain()
                    raw = await reader.read()
                finally:
                    writer.close()
            response = http.client.HTTPResponse(_Received(raw))  # type: ignore[arg-type]
            response.begin()
            return _Answer(response.status, response.read().decode("utf-8", "replace"))
        except TimeoutError as error:
            raise EngineSlow(f"no answer to {path} within {limit:g} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise EngineFailed(f"{path}: {one_line(error)}") from error

    def _call(self, method: str, path: str, body: object, limit: float) -> _Answer:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=limit)
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            return _Answer(response.status, response.read().decode("utf-8", "replace"))
        except TimeoutError as error:
            raise EngineSlow(f"no answer to {path.partition('?')[0]} within {limit:g} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise EngineFailed(f"{path.partition('?')[0]}: {one_line(error)}") from error
        finally:
            connection.close()


def _message(answer: _Answer) -> str:
    """The engine's own words, wherever in the body it put them."""
    try:
        body = json.loads(answer.text)
    except ValueError:
        body = None
    if isinstance(body, dict):
        error = body.get("error")
        body = error.get("message") if isinstance(error, dict) else error or body.get("message")
    return " ".join(str(body or answer.text).split())[:500]


class AsBytes:
    """Pickles as a uint8 tensor of the text: SGLang reads these, but no memory handles of other process trees."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __reduce__(self) -> tuple[object, tuple[list[int]]]:
        return torch.ByteTensor, (list(self._text.encode()),)


def _payload(named: Sequence[tuple[str, AsBytes]]) -> str:
    """A base64 pickle of named tensors."""
    return base64.b64encode(pickle.dumps(named)).decode("ascii")
