"""A STAND-IN for an asynchronous engine: no model, a thread per request, and delays, losses and refusals as scripted.

A response's tokens are a function of its seed and their positions, so that a continued response can be told from one
that was sampled in one go only by its versions. A token's log-probs name the version that sampled it.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait

import torch

from megasharp.common.errors import EnginesLost, NotSampled
from megasharp.common.records import Completion, FinishReason, GenerateRequest, SamplingParams, VersionSpan
from megasharp.weight_sync.endpoints import NamedTensors

# Seconds that prompt `tokens[0]` takes for a token.
Delay = Callable[[int], float]


_READ_AGAIN = 255


class StandInEngine:
    """`lose[p]` times engines are lost over prompt `p`; prompts in `refuse` are never sampled."""

    def __init__(self, delay: Delay, lose: dict[int, int] | None = None, refuse: Sequence[int] = ()) -> None:
        self.version = 0
        self.retried = 0
        self.asked: list[GenerateRequest] = []
        # How many requests ran when each was asked for.
        self.beside: list[int] = []
        self.running: set[Future[list[Completion]]] = set()
        self._delay = delay
        self._lose = lose or {}
        self._refuse = refuse
        self._ended: set[Future[list[Completion]]] = set()

    def submit(self, request: GenerateRequest, sampling: SamplingParams) -> Future[list[Completion]]:
        future: Future[list[Completion]] = Future()
        self.asked.append(request)
        self.beside.append(len(self.running))
        self.running.add(future)
        threading.Thread(target=self._answer, args=(future, request, sampling), daemon=True).start()
        return future

    def abort(self, futures: Sequence[Future[list[Completion]]]) -> None:
        self._ended |= set(futures)
        wait(futures)

    def take_retried(self) -> list[int]:
        return []

    def generate(self, requests: Sequence[GenerateRequest], sampling: SamplingParams) -> list[list[Completion]]:
        raise AssertionError("the stand-in is asked one request at a time")

    def load_weights(self, version: int, tensors: NamedTensors) -> None:
        self.version = version

    def healthy(self) -> bool:
        return True

    def close(self) -> None:
        pass

    def _answer(self, future: Future[list[Completion]], request: GenerateRequest, sampling: SamplingParams) -> None:
        prompt = request.tokens[0]
        try:
            if prompt in self._refuse:
                raise NotSampled(f"prompt {prompt} is not for me")
            if self._lose.get(prompt, 0) > 0:
                self._lose[prompt] -= 1
                raise EnginesLost(f"lost over prompt {prompt}")
            answer = self._sample(future, request, sampling)
        except Exception as error:
            self.running.discard(future)
            future.set_exception(error)
        else:
            self.running.discard(future)
            future.set_result(answer)

    def _sample(
        self, future: Future[list[Completion]], request: GenerateRequest, sampling: SamplingParams
    ) -> list[Completion]:
        """All samples grow together, a token at a time; each token is of the version served at that time."""
        begun = [len(tokens) for tokens in request.begun] or [0] * len(request.seeds)
        versions: list[list[int]] = [[] for _ in request.seeds]
        wanted = [length(seed, sampling.max_tokens) for seed in request.seeds]
        while any(begun[i] + len(versions[i]) < wanted[i] for i in range(len(wanted))):
            if future in self._ended:
                break
            time.sleep(self._delay(request.tokens[0]))
            for i, most in enumerate(wanted):
                if begun[i] + len(versions[i]) < most:
                    versions[i].append(self.version)
        prompt = len(request.tokens)
        return [completion(seed, begun[i], versions[i], sampling, prompt) for i, seed in enumerate(request.seeds)]


def length(seed: int, max_tokens: int) -> int:
    return 1 + seed % max_tokens


def token(seed: int, position: int) -> int:
    return random.Random(f"{seed}-{position}").randrange(50)


def completion(seed: int, begun: int, versions: list[int], sampling: SamplingParams, prompt: int = 1) -> Completion:
    """Tokens `begun` and on of the response, with one span for each token, as ragged as spans may be.

    Tokens have one expert: the number of the version that sampled the token behind it. What this request reads again
    of a response, and the prompt but for its last token, has another one.
    """
    end = begun + len(versions)
    finished = end == length(seed, sampling.max_tokens)
    logp = -torch.tensor(versions, dtype=torch.float32)
    return Completion(
        tokens=torch.tensor([token(seed, position) for position in range(begun, end)], dtype=torch.int64),
        sampler_logp=logp,
        policy_logp=logp,
        memory_logp=None if sampling.memory_mu is None else logp,
        version_spans=tuple(VersionSpan(version, i, i + 1) for i, version in enumerate(versions)),
        finish_reason=FinishReason.STOP if finished else FinishReason.ABORT,
        seed=seed,
        experts=torch.tensor([_READ_AGAIN] * (prompt - 1 + begun) + versions, dtype=torch.uint8)[:, None, None],
    )
