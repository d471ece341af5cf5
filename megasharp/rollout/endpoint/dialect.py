"""OpenAI's API as servers speak it: bodies of requests, their answers as Completions, and what a server does not know.

`/chat/completions` gets a problem's messages, `/completions` a text or tokens. Every setting of sampling is sent, those
that cut nothing too: servers such as SGLang and vLLM take what is missing from the model's generation_config.json.
A field that a server does not know is left out of the calls in which its value changes nothing, and of no others.

A sample's text is the content that the server answers. Of a thinking model whose server keeps the thoughts apart, it is
thoughts and content, as the model wrote them: `<think>`, the thoughts, `</think>`, the content. A refusal is a text,
and what a content filter has cut is judged as it stands: both are answers of the system that is measured.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from megasharp.common.records import Completion, FinishReason, GenerateRequest, SamplingParams
from megasharp.rollout.endpoint import Style
from megasharp.rollout.endpoint.http_calls import Answer, Failed

Json = Mapping[str, Any]

_ENDS = {
    **dict.fromkeys(("stop", "eos", "stop_sequence", "tool_calls", "function_call"), FinishReason.STOP),
    **dict.fromkeys(("length", "max_tokens"), FinishReason.LENGTH),
    "content_filter": FinishReason.STOP,
}
FILTERED = "content_filter"
# SGLang's and vLLM's name, and that of newer servers.
_THOUGHTS = ("reasoning_content", "reasoning")
# A limit's older name, and the one that thinking models of OpenAI ask for.
_LIMITS = ("max_tokens", "max_completion_tokens")
# Seeds are int32 to some servers.
_SEEDS = 2**31


@dataclass(frozen=True, slots=True)
class Dialect:
    """The form of calls that a server takes: path, name of the limit of tokens, and fields that it does not know.

    An unknown field is sent all the same where its value matters: the server's refusal is what the user must know.
    """

    style: Style
    limit: str = _LIMITS[0]
    unknown: frozenset[str] = field(default_factory=frozenset)

    @property
    def path(self) -> str:
        """The path of the call, after the address."""
        return "/chat/completions" if self.style == "chat" else "/completions"

    def body(self, model: str, request: GenerateRequest, sampling: SamplingParams) -> Json:
        """The body of a call for all samples of a request; the first one's seed is the server's for all."""
        return {
            "model": model,
            **self._prompt(request),
            self.limit: request.under(sampling).max_tokens,
            **({"n": len(request.seeds)} if len(request.seeds) > 1 else {}),
            **self._settings(sampling),
            **({} if "seed" in self.unknown else {"seed": request.seeds[0] % _SEEDS}),
        }

    def _prompt(self, request: GenerateRequest) -> Json:
        if self.style == "tokens":
            return {"prompt": list(request.tokens)}
        if self.style == "text":
            return {"prompt": "\n\n".join(text for _, text in request.turns)}
        return {"messages": [{"role": role, "content": text} for role, text in request.turns]}

    def _settings(self, sampling: SamplingParams) -> Json:
        fields: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "repetition_penalty": 1.0,
            **({"stop": list(sampling.stop)} if sampling.stop else {}),
            **({"logprobs": True if self.style == "chat" else 1} if reports_logprobs(sampling) else {}),
        }
        left_out = self.unknown & _spare(sampling)
        return {name: value for name, value in fields.items() if name not in left_out}

    def _sent(self, sampling: SamplingParams) -> set[str]:
        return {*self._settings(sampling), *({"seed"} - self.unknown)}

    def refused(self, answer: Answer, sampling: SamplingParams) -> set[str]:
        """Return the fields of a call that a refusal names: as its `param`, or else in its message."""
        sent = self._sent(sampling)
        return sent & _words(answer.param) or sent & _words(answer.message)

    def without(self, answer: Answer, sampling: SamplingParams) -> Dialect | None:
        """Return what to send instead to a server that refused this; None where nothing can go."""
        words = _words(answer.message)
        if self.limit == _LIMITS[0] and _LIMITS[1] in words:
            return replace(self, limit=_LIMITS[1])
        named, spare = self.refused(answer, sampling), self._sent(sampling) & _spare(sampling)
        dropped = named & spare
        # Some say only that a field is not permitted: then first those go that OpenAI does not have.
        if not named and not words & {*_LIMITS} and _UNNAMED.search(answer.message):
            dropped = spare & _NOT_OPENAIS or spare
        return replace(self, unknown=self.unknown | dropped) if dropped else None


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


def _spare(sampling: SamplingParams) -> frozenset[str]:
    """The fields that change nothing that was asked for."""
    off = {
        "top_p": sampling.top_p == 1.0,
        "top_k": not sampling.top_k,
        "min_p": not sampling.min_p,
        "temperature": sampling.temperature == 1.0,
    }
    return frozenset({"repetition_penalty", "seed", "logprobs"} | {name for name, is_off in off.items() if is_off})


_NOT_OPENAIS = frozenset({"top_k", "min_p", "repetition_penalty"})
_UNNAMED = re.compile(r"extra|unrecogni[sz]ed|unknown|unexpected|not permitted|unsupported", re.IGNORECASE)


def reports_logprobs(sampling: SamplingParams) -> bool:
    """Return whether a server's log-probs are known to be those that tokens were drawn with.

    Some report them at the temperature, some before it, and none after a cut.
    """
    return sampling.temperature == 1.0 and not sampling.truncates


def completions(answer: object, seeds: Sequence[int], sampling: SamplingParams) -> list[Completion]:
    """Read the answer to a request, in the order of `seeds`. Raises Failed for one that is none."""
    try:
        if not isinstance(answer, dict):
            raise TypeError(f"no object but {str(answer)[:100]}")
        choices = sorted(answer["choices"], key=lambda choice: choice.get("index", 0))
        if len(choices) != len(seeds):
            raise ValueError(f"asked for {len(seeds)} samples, got {len(choices)}")
        logps = [_logp(choice) if reports_logprobs(sampling) else [] for choice in choices]
        counts = _counts(answer.get("usage") or {}, [len(logp) for logp in logps])
        return [
            _completion(choice, seed, count, logp)
            for choice, seed, count, logp in zip(choices, seeds, counts, logps, strict=True)
        ]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Failed(f"not an answer of OpenAI's API ({type(error).__name__}: {str(error)[:200]})") from error


def _completion(choice: Json, seed: int, count: int, logp: Sequence[float]) -> Completion:
    finish = choice["finish_reason"]
    if finish not in _ENDS:
        raise ValueError(f"finish_reason {finish!r}")
    nothing, logp_T = torch.empty(0, dtype=torch.int64), torch.tensor(logp, dtype=torch.float32)
    return Completion(
        tokens=nothing,
        sampler_logp=logp_T,
        policy_logp=logp_T,
        memory_logp=None,
        version_spans=(),
        finish_reason=_ENDS[finish],
        seed=seed,
        cause="the server's content filter cut it" if finish == FILTERED else "",
        text=_text(choice),
        counted=count,
    )


def _text(choice: Json) -> str:
    message = choice.get("message")
    if message is None:
        return str(choice["text"])
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content)
    content = str(content or message.get("refusal") or "")
    thoughts = next((str(found) for name in _THOUGHTS if (found := message.get(name))), "")
    if not thoughts:
        return content
    # Cut while it thought: the mark of the end is not there either.
    closed = bool(content) or _ENDS.get(choice["finish_reason"]) is not FinishReason.LENGTH
    return f"<think>{thoughts}" + (f"</think>{content}" if closed else "")


def _logp(choice: Json) -> list[float]:
    """Log-probs of a choice's tokens; none where the server gives none, or one that is no number."""
    found = choice.get("logprobs") or {}
    values = found.get("token_logprobs") or [each["logprob"] for each in found.get("content") or ()]
    numbers = [float(value) for value in values if value is not None]
    return numbers if len(numbers) == len(values) and all(map(math.isfinite, numbers)) else []


def _counts(usage: Json, known: Sequence[int]) -> list[int]:
    """Tokens of each choice: those with log-probs, or shares of the request's, where only their sum is known."""
    if all(known):
        return [*known]
    total = int(usage.get("completion_tokens") or 0)
    share, rest = divmod(total, len(known))
    return [share + (place < rest) for place in range(len(known))]
